"""An op with canonical arguments: its key, its configs, and the slot through which it asks for a config.

`BoundArguments` is what is captured from programs, tuned, written to files and looked up at dispatch. Which config
runs is decided elsewhere: dispatch fills the one `Runtime` slot, so that ops know neither stores nor models.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from tokamax._src import devices, errors, registry, serialization, shapes

SCOPE_PREFIX = "tokamax:"
"""In a lowered program, a scope of this prefix and a key marks the operations of one op call."""

_IN_SCOPES = {ord(c): f"\\u{ord(c):04x}" for c in "@/;"}

HIDDEN_FIELDS = ("config", "vjp")
"""Fields of an op that say how it runs, not what it computes: no part of its key."""


@dataclasses.dataclass(frozen=True)
class ConfigChoice:
    """The config that an op runs with, and why.

    Attributes:
      config: the config.
      source: the rung of the ladder that gave it: `pinned`, `exact`, `model`, `tuned`, `estimate`, `heuristic`.
      detail: where it came from, in words.
      expected_slowdown: predicted time over the best time of this shape; 1.0 for measured winners, None if unknown.
      spread: how much the members of the model differ about log(expected_slowdown); None where no model chose.
      nearest: the nearest shape that a model was trained on, in words; None where no model was asked.
      environment: what is recorded of how and when the config was measured; None where it was not.
    """

    config: Any
    source: str
    detail: str = ""
    expected_slowdown: float | None = None
    spread: float | None = None
    nearest: str | None = None
    environment: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)


class Runtime(Protocol):
    """What dispatch provides to ops."""

    def choose(self, ba: "BoundArguments") -> ConfigChoice:
        """Returns the config to run bound arguments with."""
        ...

    def failed(self, ba: "BoundArguments", choice: ConfigChoice, error: Exception) -> ConfigChoice:
        """Returns the config to use in place of a choice that could not be traced."""
        ...

    def measured_ms(self, ba: "BoundArguments") -> float | None:
        """Returns the median time of the measured winner for bound arguments, or None if there is none."""
        ...

    def autotune(self, ba: "BoundArguments", **options: Any) -> Any:
        """Tunes bound arguments; returns an `AutotuningResult`."""
        ...

    def save(self, result: Any) -> None:
        """Writes an `AutotuningResult` into the private cache."""
        ...


_runtime: Runtime | None = None


def set_runtime(runtime: Runtime) -> None:
    """Fills the slot that ops ask for their config."""
    global _runtime
    _runtime = runtime


def get_runtime() -> Runtime:
    """Returns what fills the slot.

    Raises:
      RuntimeError: if nothing does, which means that `tokamax` itself was not imported.
    """
    if _runtime is None:
        raise RuntimeError("no runtime chooses configs yet; `import tokamax` before calling ops")
    return _runtime


def config_order(config: Any) -> tuple[Any, ...]:
    """Sort key of configs: field by field, None first, numbers by value, the rest by its text."""

    if dataclasses.is_dataclass(config):
        return tuple([_rank(getattr(config, f.name)) for f in dataclasses.fields(config)])
    return (_rank(config),)


def _rank(value: Any) -> tuple[int, Any, str]:
    # Most fields are plain integers, and a space may hold thousands of configs.
    if type(value) is int or (isinstance(value, (bool, int, float)) and value == value):
        return 1, value, ""
    if value is None:
        return 0, 0, ""
    return 2, 0, serialization.dumps(serialization.encode(value, local=True))


def is_leaf(value: Any) -> bool:
    """Whether tree functions stop here: abstract arrays are leaves of bound arguments."""
    return isinstance(value, shapes.ArraySpec)


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a call took in a profile.

    Attributes:
      runs: about how often it ran.
      time_ms: for how long in all.
    """

    runs: int
    time_ms: float

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.runs + other.runs, self.time_ms + other.time_ms)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundArguments:
    """An op and the arguments of one call, in canonical form.

    Two bound arguments are equal if they have the same key: op name, op fields and arguments, where arrays count by
    dtype, shape and vmap axes.

    Attributes:
      op: the op.
      arguments: name -> value, with defaults applied; arrays may be real or abstract.
      return_residuals: whether the call also wants the residuals of the backward pass; no part of the key.
      usage: what it took in the profile that it was read from, if that is known; no part of the key.
    """

    op: Any
    arguments: Mapping[str, Any]
    return_residuals: bool = False
    usage: Usage | None = None

    @functools.cached_property
    def abstract(self) -> dict[str, Any]:
        """The arguments with each array replaced by its `ArraySpec`, vmap axes of size one dropped."""
        leaves, treedef = jax.tree.flatten(dict(self.arguments))
        where = [i for i, leaf in enumerate(leaves) if shapes.is_array(leaf)]
        specs = shapes.without_unit_axes([shapes.spec_of(leaves[i]) for i in where])
        for i, spec in zip(where, specs, strict=True):
            leaves[i] = spec
        arguments = treedef.unflatten(leaves)
        return {name: arguments[name] for name in self.arguments}

    @functools.cached_property
    def vmap_sizes(self) -> tuple[int, ...]:
        """Sizes of the vmap axes around the call, outermost first, those of size one dropped."""
        specs = [leaf for leaf in jax.tree.leaves(self.abstract) if isinstance(leaf, shapes.ArraySpec)]
        return tuple(map(max, zip(*(spec.vmap for spec in specs if spec.vmap), strict=True)))

    @functools.cached_property
    def fingerprint(self) -> tuple[Any, ...]:
        """A hashable value, cheap to make, that is equal only if the key is equal."""
        leaves, treedef = jax.tree.flatten(dict(self.arguments))
        return self.op, treedef, tuple(map(_leaf_fingerprint, leaves))

    @functools.cached_property
    def key(self) -> str:
        """The text that stands for op, op fields and arguments in every process; the device kind goes beside it."""
        return serialization.dumps(self.to_json(local=True))

    @property
    def scope(self) -> str:
        """The name of the scope that marks the operations of this call in a program.

        XLA cuts the name of an operation at `@`, and where it merges operations, it joins their names by `;` and drops
        the folders (up to a `/`) that they share. JSON may write any character of a text by its number.
        """
        return SCOPE_PREFIX + self.key.translate(_IN_SCOPES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundArguments) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def argument_texts(self) -> dict[str, str]:
        """The arguments in words, by name: those that are not at their defaults."""
        defaults = {name: p.default for name, p in self.op.signature.parameters.items()}
        shown = {n: v for n, v in self.abstract.items() if v is not None and not _is_default(v, defaults[n])}
        return {name: _text(value) for name, value in shown.items()}

    @property
    def shown_arguments(self) -> str:
        """The arguments in words, on one line."""
        return ", ".join(f"{name}={text}" for name, text in self.argument_texts.items())

    def __repr__(self) -> str:
        return f"{self.op.registered_name()}({self.shown_arguments})"

    @functools.cached_property
    def _bound(self) -> inspect.BoundArguments:
        return inspect.BoundArguments(self.op.signature, dict(self.arguments))  # pyright: ignore[reportArgumentType]

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return self._bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self._bound.kwargs

    def to_json(self, *, local: bool = False) -> dict[str, Any]:
        """Returns plain JSON data: op name, op fields, arguments.

        Args:
          local: whether lambdas may be named by a token that only this process understands.

        Raises:
          SerializationError: if an argument cannot be written.
        """
        hidden = (*HIDDEN_FIELDS, "_")
        fields = {f.name: getattr(self.op, f.name) for f in dataclasses.fields(self.op) if f.name not in hidden}
        return {
            "op": self.op.registered_name(),
            "fields": serialization.encode(fields, local=local),
            "arguments": serialization.encode(self.abstract, local=local),
        }

    @classmethod
    def from_json(cls, data: Any) -> "BoundArguments":
        """Reads what `to_json` wrote.

        Raises:
          FormatError: if it is not that, or if the op is not known in this process.
        """
        if not isinstance(data, dict) or not isinstance(data.get("op"), str):
            raise errors.FormatError(f"bound arguments must be an object with an `op`, got {str(data)[:80]!r}")
        op_cls = registry.op_class(data["op"])
        fields = data.get("fields", {})
        if isinstance(fields, dict):
            fields = {k: v for k, v in fields.items() if k not in HIDDEN_FIELDS}
        op = serialization.build_dataclass(op_cls, fields)
        arguments = serialization.decode(data.get("arguments", {}))
        if not isinstance(arguments, dict):
            raise errors.FormatError("bound arguments must have an object of `arguments`")
        expected = list(op.signature.parameters)
        if sorted(arguments) != sorted(expected):
            raise errors.FormatError(f"{data['op']} must have arguments {expected}, got {sorted(arguments)}")
        return cls(op, {name: arguments[name] for name in expected})

    @functools.cached_property
    def _by_device(self) -> dict[Any, Any]:
        """Default and space by device kind: what fits into the memory of one may not fit into that of another."""
        return {}

    def _of_device(self, what: str, make: Callable[["BoundArguments"], Any]) -> Any:
        place = what, devices.device_kind()
        if place not in self._by_device:
            self._by_device[place] = make(self)
        return self._by_device[place]

    @property
    def default_config(self) -> Any:
        """The op's hand-written config for these arguments, else the first config of its space."""
        return self._of_device("default", self.op.default_config)

    @property
    def heuristics_config(self) -> Any:
        """The same as `default_config`."""
        return self.default_config

    @property
    def autotuning_configs(self) -> tuple[Any, ...]:
        """The op's feasible configs for these arguments on this device, in a fixed order."""
        return self._of_device("space", self.op.feasible_configs)

    def choose_config(self) -> ConfigChoice:
        """Returns the config that the op would run with here and now, and where it came from."""
        if self.op.config is not None:
            return ConfigChoice(self.op.config, "pinned", "the op's own config", None)
        return get_runtime().choose(self)

    def autotune(self, **options: Any) -> Any:
        """Tunes these bound arguments; see `tokamax.autotune`."""
        return get_runtime().autotune(self, **options)

    def as_function(self, config: Any = None) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
        """Returns the call as a function of one list of arrays, and the arrays or their specs.

        Non-array arguments are closed over, and the vmaps around the call are applied again.

        Args:
          config: the config to run with; None leaves the choice to dispatch.
        """
        op = self.op if config is None else dataclasses.replace(self.op, config=config)
        return self._as_function(functools.partial(op, return_residuals=self.return_residuals))

    @property
    def has_reference(self) -> bool:
        """Whether the op has a reference that computes what this call does: it knows no residuals."""
        return self.op._reference is not None and not self.return_residuals

    def as_reference(self) -> Callable[[Sequence[Any]], Any]:
        """Returns the op's `_reference` as a function of one list of arrays, like `as_function`."""
        return self._as_function(self.op._reference)[0]

    def _as_function(self, op: Callable[..., Any]) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
        leaves, treedef = jax.tree.flatten((self.args, self.kwargs))
        where = [i for i, leaf in enumerate(leaves) if shapes.is_array(leaf)]
        specs = shapes.without_unit_axes([shapes.spec_of(leaves[i]) for i in where])

        def call(*arrays: Any) -> Any:
            merged = list(leaves)
            for i, array in zip(where, arrays, strict=True):
                merged[i] = array
            args, kwargs = treedef.unflatten(merged)
            return op(*args, **kwargs)

        for level in reversed(range(len(self.vmap_sizes))):
            in_axes = tuple(0 if spec.vmap and spec.vmap[level] else None for spec in specs)
            call = jax.vmap(call, in_axes=in_axes)

        def function(arrays: Sequence[Any]) -> Any:
            return call(*arrays)

        inputs = [
            leaf if not is_leaf(leaf) else jax.ShapeDtypeStruct(spec.batch + spec.shape, spec.dtype)
            for leaf, spec in zip((leaves[i] for i in where), specs, strict=True)
        ]
        return function, inputs


def _leaf_fingerprint(leaf: Any) -> Any:
    if isinstance(leaf, shapes.ArraySpec):
        return leaf
    if shapes.is_array(leaf):
        return leaf.shape, leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        return serialization.dumps(serialization.encode(leaf, local=True))
    return type(leaf), leaf


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not is_leaf(value) and bool(value == default)


def _text(value: Any) -> str:
    if isinstance(value, shapes.ArraySpec):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    name = getattr(value, "__name__", None)
    return name if name is not None else repr(value)
