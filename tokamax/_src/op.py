"""The base class of ops: binding, running, differentiating and batching a kernel that has configs.

A call goes through three layers of JAX. `custom_vmap`, innermost, tells the vmap axes around the call, so that the
config is chosen for the batched shape. `custom_jvp` around it differentiates the kernel itself, for which `custom_vmap`
has no reverse mode. `custom_vjp` outermost hands the backward pass to the op's `vjp`, where it has one.
Each layer is a module-level function with the static part of the call as a hashable argument, so that calls outside
of `jit` compile once.
"""

import dataclasses
import enum
import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import jax
import numpy as np

from tokamax._src import errors, registry, serialization, shapes
from tokamax._src.bound_arguments import BoundArguments, config_order, get_runtime

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R = TypeVar("_R")
_C = TypeVar("_C")
_K = TypeVar("_K")

Axes = tuple[tuple[int, tuple[bool, ...]], ...]
"""Per vmap around a call, outermost first: its size, and for each array whether it is batched."""


@dataclasses.dataclass(frozen=True)
class NullConfig:
    """The config of an op that has nothing to tune."""


class _ClassOrInstanceMethod:
    """A method that, called on the class, gets a default instance."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        functools.update_wrapper(self, function)  # pyright: ignore[reportArgumentType]

    def __get__(self, instance: Any, owner: type) -> Any:
        return types.MethodType(self.function, owner() if instance is None else instance)


class _Binder:
    """Binds arguments to the signature of an op's `_fwd`, faster than `inspect` where nothing is odd."""

    def __init__(self, cls: type):
        parameters = list(inspect.signature(cls._fwd).parameters.values())[1:]
        parameters = [p for p in parameters if p.name not in ("config", "return_residuals")]
        self.name = cls.registered_name()
        self.signature = inspect.Signature(parameters)
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = [p.name for p in parameters]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.plain and len(args) <= len(self.positional):
            given = dict(zip(self.positional, args, strict=False))
            if given.keys().isdisjoint(kwargs):
                given.update(kwargs)
                arguments = {n: given[n] if n in given else self.defaults.get(n, _MISSING) for n in self.names}
                if given.keys() <= arguments.keys() and not any(v is _MISSING for v in arguments.values()):
                    return arguments
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; its arguments are {self.signature}") from None
        bound.apply_defaults()
        return dict(bound.arguments)


def _named_types(config_cls: type) -> set[type]:
    """Returns the enums and dataclasses that the fields of a config may hold: files name them."""
    if not dataclasses.is_dataclass(config_cls):
        return set()
    try:
        hints = typing.get_type_hints(config_cls)
    except (NameError, TypeError):  # A type that is only known to type checkers.
        return set()
    candidates = {t for hint in hints.values() for t in (hint, *typing.get_args(hint)) if isinstance(t, type)}
    return {t for t in candidates if issubclass(t, enum.Enum) or dataclasses.is_dataclass(t)}


_MISSING = object()
_REPLACEABLE = ("exact", "model", "tuned", "estimate")
"""Sources of configs that the user did not write: one that fails gives way to another."""


@functools.cache
def _binder(cls: type) -> _Binder:
    return _Binder(cls)


@dataclasses.dataclass(frozen=True)
class Op(Generic[_P, _T, _R, _C, _K]):
    """An operation with tunable configs: subclass it as a frozen dataclass.

    A subclass sets `config_cls` and implements `_fwd` and `_get_autotuning_configs`; everything else is optional.
    Calling the op binds the arguments, chooses a config and runs `_fwd`, under any JAX transformation.

    Attributes:
      config: the config to always run with; None lets dispatch choose.
      vjp: the backward pass, often an op with a space of its own, called as
        `vjp(residuals, out, dout, *args, **kwargs)`. It returns a tuple with a gradient for each positional argument,
        or a dict from argument name to gradient; absent or None means zero. Without it JAX differentiates `_fwd`.
    """

    config_cls: ClassVar[type] = NullConfig
    name: ClassVar[str | None] = None
    """The name in keys and files; by default the class's module and name."""
    config_tiles: ClassVar[Mapping[str, str]] = {}
    """Config field -> the dimension that it tiles, as in `{"block_m": "x[0]"}`; cost models learn what is not named."""

    config: Any = None
    _: dataclasses.KW_ONLY
    vjp: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(own := cls.__dict__.get("bind")):
            cls.bind = _ClassOrInstanceMethod(own)
        registry.add_op(cls.registered_name(), cls)
        for value_type in _named_types(cls.config_cls):
            registry.remember(value_type)

    @classmethod
    def registered_name(cls) -> str:
        """Returns the name of this op in keys and files."""
        own = cls.__dict__.get("name")
        if own is not None:
            return own
        return cls.__qualname__ if cls.__module__.startswith("tokamax.") else registry.qualified_name(cls)

    @property
    def signature(self) -> inspect.Signature:
        """The signature of the canonical arguments: that of `_fwd` without config and residuals."""
        return _binder(type(self)).signature

    def __call__(self, *args: Any, return_residuals: bool = False, **kwargs: Any) -> Any:
        """Runs the op.

        Args:
          *args: the arguments of `_fwd`.
          return_residuals: whether to return `(out, residuals)` instead of `out`.
          **kwargs: more arguments of `_fwd`.

        Raises:
          TypeError: if the arguments do not fit, or for forward-mode differentiation of an op with a `vjp`.
        """
        call, arrays = _split(self.bind(*args, return_residuals=return_residuals, **kwargs), return_residuals)
        if self.vjp is None:
            return _call(call, *arrays)
        # A gradient must vary over the mesh axes of a `shard_map` that its array varies over. Here all arrays vary
        # alike, and JAX sums the gradients of those that did not before, such as replicated weights.
        axes = frozenset[str]().union(*map(shapes.varying_axes, arrays))
        if axes:
            arrays = [shapes.varying_over(array, axes) for array in arrays]
        try:
            return _call_with_vjp(call, *arrays)
        except TypeError as error:
            if "jvp" in str(error) and "custom_vjp" in str(error):
                raise TypeError(
                    f"forward-mode differentiation (jvp, jacfwd) needs an op without a VJP op of its own, got "
                    f"{self.registered_name()}; use reverse mode, or dataclasses.replace(op, vjp=None)"
                ) from error
            raise

    @_ClassOrInstanceMethod
    def bind(self, *args: Any, return_residuals: bool = False, **kwargs: Any) -> BoundArguments:
        """Binds arguments to the op without running it; works on the class (default instance) and on an instance.

        Override it to validate and canonicalise arguments, ending with `return super().bind(...)`.

        Raises:
          TypeError: if the arguments do not fit the signature.
        """
        return BoundArguments(self, _binder(type(self)).bind(args, kwargs), return_residuals)

    def with_config(self, config: Any) -> Any:
        """Returns this op pinned to a config."""
        return dataclasses.replace(self, config=config)

    def _fwd(self, *args: Any, return_residuals: bool, config: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Computes the op with a config; returns `(out, residuals)`, residuals None where there are none."""
        raise NotImplementedError(f"{self.registered_name()} must implement _fwd")

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[Any]:
        """Returns the search space for bound arguments."""
        return set()

    def _get_heuristics_config(self, ba: BoundArguments) -> Any:
        """Returns the default config for bound arguments; without it the first config of the space is used."""
        return None

    def supported_on(self, device: Any) -> bool:
        """Whether the op can run on a JAX device."""
        return True

    def _is_feasible(self, ba: BoundArguments, config: Any) -> bool:
        """Whether a config can run at all for bound arguments: tile sizes, on-chip memory."""
        return True

    def _is_safe(self, ba: BoundArguments, config: Any) -> bool:
        """Whether a feasible config surely compiles: dispatch uses an estimate only of those that are.

        Where `_is_feasible` refuses only what cannot run at all, this one keeps its distance from the limits.
        """
        return True

    def _get_cost_features(self, ba: BoundArguments, config: Any) -> dict[str, float]:
        """Returns further numbers for the cost model, beside those it derives by itself."""
        return {}

    def _estimate_ms(self, ba: BoundArguments, configs: Sequence[Any], device_kind: str) -> Any:
        """Returns how long configs take on a device by calculation alone, without a measurement.

        It is called once for many configs, for devices that are here or not, and orders them where nothing is known by
        measuring: the rung `estimate` of dispatch, and `autotune(device_kind=...)`.

        Args:
          ba: the bound arguments.
          configs: c configs.
          device_kind: the device, as JAX names it.

        Returns:
          [c] times in ms, inf or nan for a config that should not be used; None if there are none for this device.
        """
        return None

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns values for the arguments that random numbers do not suit: labels, group sizes, residuals.

        Args:
          arguments: the arguments with arrays as `ArraySpec`, without vmap axes.
          rng: the source of randomness, seeded by the caller.
        """
        return {}

    def _get_tolerance(self, ba: BoundArguments) -> float | Mapping[str, float] | None:
        """Returns how far outputs may be from the reference: a share of its largest magnitude, or shares by dtype name.

        None for what suits the dtype, see `tokamax._src.numerics.TOLERANCE`.
        """
        return None

    _reference: ClassVar[Callable[..., Any] | None] = None
    """A method `_reference(self, *args, **kwargs) -> out`: the op in its plainest form, of floats of at least 32 bits.

    Tuning compares the outputs of configs with what it returns, or where there is none with those of the default.
    """

    def feasible_configs(self, ba: BoundArguments) -> tuple[Any, ...]:
        """Returns the feasible configs of the space in a fixed order."""
        configs = sorted(self._get_autotuning_configs(ba), key=config_order)
        return tuple(config for config in configs if self._is_feasible(ba, config))

    def default_config(self, ba: BoundArguments) -> Any:
        """Returns the hand-written config, else the first of the space, also where the hand-written rule raises.

        Raises:
          UnsupportedError: if there is neither.
          Exception: what the rule raises, if the space has nothing to put in its place.
        """
        try:
            config = self._get_heuristics_config(ba)
        except Exception as error:
            return self._in_place_of_heuristics(ba, error)
        if config is not None:
            return config
        if self.config_cls is NullConfig:
            return NullConfig()
        try:
            configs = ba.autotuning_configs
        except Exception as error:
            raise self._without_config(ba, f"its space raises {type(error).__name__}: {error}") from error
        if not configs:
            raise self._without_config(ba, "its space is empty")
        return configs[0]

    def _without_config(self, ba: BoundArguments, reason: str) -> errors.UnsupportedError:
        name = self.registered_name()
        return errors.UnsupportedError(
            f"{name} must have a config for {ba!r}; {reason} and it has no _get_heuristics_config"
        )

    def _in_place_of_heuristics(self, ba: BoundArguments, error: Exception) -> Any:
        """Returns the first config of the space; a program runs on, and the op's author is told."""
        try:
            configs = ba.autotuning_configs
        except Exception:
            configs = ()
        if not configs:
            raise error
        warnings.warn(
            f"_get_heuristics_config of {self.registered_name()} raised {type(error).__name__}: {error}; the first "
            "config of its space is the default",
            stacklevel=2,
        )
        return configs[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The static part of a call: everything but the arrays. Hashable, equal by content."""

    op: Op
    treedef: Any
    leaves: tuple[Any, ...]
    is_array: tuple[bool, ...]
    return_residuals: bool

    @functools.cached_property
    def _identity(self) -> tuple[Any, ...]:
        return self.op, self.treedef, self.is_array, self.return_residuals, tuple(map(_static_key, self.leaves))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._identity == other._identity

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns args and kwargs with the arrays put in their places."""
        remaining = iter(arrays)
        leaves = [next(remaining) if a else leaf for a, leaf in zip(self.is_array, self.leaves, strict=True)]
        return self.treedef.unflatten(leaves)

    def bound(self, arrays: Sequence[Any], axes: Axes) -> BoundArguments:
        """Binds the call with abstract arrays that carry the vmap axes."""
        specs = []
        for i, array in enumerate(arrays):
            vmap = tuple(size if batched[i] else 0 for size, batched in axes)
            spec = shapes.spec_of(array)
            specs.append(shapes.ArraySpec(spec.shape[sum(map(bool, vmap)) :], spec.dtype, vmap))
        args, kwargs = self.arguments(specs)
        names = _binder(type(self.op)).bind(args, kwargs)
        return BoundArguments(self.op, names, self.return_residuals)

    def run(self, ba: BoundArguments, arrays: Sequence[Any]) -> Any:
        """Runs the kernel on unbatched arrays with the config that `ba` chooses.

        A measured or predicted config that cannot be traced is replaced by what dispatch falls to without it.
        """
        args, kwargs = self.arguments(arrays)
        choice = ba.choose_config()
        while True:
            try:
                out, residuals = self.op._fwd(
                    *args, return_residuals=self.return_residuals, config=choice.config, **kwargs
                )
                return (out, residuals) if self.return_residuals else out
            except Exception as error:
                if choice.source not in _REPLACEABLE:
                    raise
                choice = get_runtime().failed(ba, choice, error)


def _static_key(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return serialization.dumps(serialization.encode(leaf, local=True))
    return type(leaf), leaf


def _split(ba: BoundArguments, return_residuals: bool) -> tuple[_Call, list[Any]]:
    """Separates the arrays of a call from its static part."""
    leaves, treedef = jax.tree.flatten((ba.args, ba.kwargs))
    is_array = tuple(map(shapes.is_array, leaves))
    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    for array in arrays:
        if isinstance(array, (shapes.ArraySpec, jax.ShapeDtypeStruct)):
            raise errors.ArgumentError(
                f"{ba.op.registered_name()} must be called with arrays, got the abstract {shapes.spec_of(array)}; "
                "use op.bind(...) to bind abstract arrays, or jax.eval_shape to trace with them"
            )
    rest = tuple(None if a else leaf for leaf, a in zip(leaves, is_array, strict=True))
    return _Call(ba.op, treedef, rest, is_array, return_residuals), arrays


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _batched_kernel(call: _Call, axes: Axes, *arrays: Any) -> Any:
    """Runs the kernel; a vmap around it adds to `axes` and chooses the config anew."""

    @jax.custom_batching.custom_vmap
    def kernel(*arrays: Any) -> Any:
        ba = call.bound(arrays, axes)
        run = functools.partial(_run_arrays, call, ba)
        for size, batched in reversed(axes):
            in_axes = tuple(0 if b else None for b in batched)
            run = jax.vmap(run, in_axes=in_axes, axis_size=size)
        with jax.named_scope(ba.scope):
            return run(*arrays)

    @kernel.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        out = _batched_kernel(call, ((axis_size, tuple(in_batched)), *axes), *arrays)
        return out, jax.tree.map(lambda _: True, out)

    return kernel(*arrays)


def _run_arrays(call: _Call, ba: BoundArguments, *arrays: Any) -> Any:
    return call.run(ba, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _plain_kernel(call: _Call, axes: Axes, *arrays: Any) -> Any:
    """Runs the kernel in a form that JAX can differentiate and batch; `axes` are those of vmaps around the call."""
    specs = [
        jax.ShapeDtypeStruct(tuple(size for size, batched in axes if batched[i]) + array.shape, array.dtype)
        for i, array in enumerate(arrays)
    ]
    ba = call.bound(specs, axes)
    with jax.named_scope(ba.scope):
        return call.run(ba, arrays)


def _surrounding_vmaps(arrays: Sequence[Any]) -> Axes:
    """Returns the vmaps around the caller, as far as its own trace knows them."""
    found: list[tuple[int, tuple[bool, ...]]] = []

    @jax.custom_batching.custom_vmap
    def probe(*arrays: Any) -> Any:
        return ()

    @probe.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        found.insert(0, (axis_size, tuple(in_batched)))
        return probe(*arrays), ()

    probe(*map(jax.lax.stop_gradient, arrays))
    return tuple(found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _call(call: _Call, *arrays: Any) -> Any:
    """Runs the op; differentiated by JAX."""
    if call.op.config_cls is NullConfig:
        return _plain_kernel(call, (), *arrays)
    return _batched_kernel(call, (), *arrays)


@_call.defjvp
def _call_jvp(call: _Call, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    axes = _surrounding_vmaps(primals)
    return jax.jvp(functools.partial(_plain_kernel, call, axes), primals, tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call_with_vjp(call: _Call, *arrays: Any) -> Any:
    """Runs the op; differentiated by its `vjp`."""
    return _call(call, *arrays)


def _call_fwd(call: _Call, *arrays: Any) -> tuple[Any, Any]:
    out, residuals = _call(dataclasses.replace(call, return_residuals=True), *arrays)
    return ((out, residuals) if call.return_residuals else out), (arrays, out, residuals)


def _call_bwd(call: _Call, saved: Any, cotangent: Any) -> tuple[Any, ...]:
    arrays, out, residuals = saved
    dout = cotangent[0] if call.return_residuals else cotangent
    args, kwargs = call.arguments(arrays)
    assert call.op.vjp is not None
    grads = call.op.vjp(residuals, out, dout, *args, **kwargs)
    return tuple(_gradient_leaves(call, (args, kwargs), grads))


def _gradient_leaves(call: _Call, arguments: Any, grads: Any) -> list[Any]:
    """Brings the gradients that a `vjp` returned into the order of the arrays; absent ones are None (zero)."""
    args, kwargs = arguments
    if not isinstance(grads, dict):
        given = list(call.op.signature.parameters)[: len(args)]
        if not isinstance(grads, (tuple, list)) or len(grads) > len(given):
            raise errors.ArgumentError(
                f"the vjp of {call.op.registered_name()} must return a dict of gradients or a tuple with one for each "
                f"of {given}, got {type(grads).__name__}"
                + (f" of {len(grads)}" if isinstance(grads, (tuple, list)) else "")
            )
        grads = dict(zip(given, grads, strict=False))
    names = list(call.op.signature.parameters)
    if unknown := sorted(set(grads) - set(names)):
        raise errors.ArgumentError(
            f"the vjp of {call.op.registered_name()} must return gradients of {names}, got {unknown}"
        )
    leaves: list[Any] = []
    by_name = [*zip(names, args, strict=False), *kwargs.items()]
    for name, value in by_name:
        flat, treedef = jax.tree.flatten(value)
        grad = grads.get(name)
        flat_grad = [None] * len(flat) if grad is None else treedef.flatten_up_to(grad)
        leaves.extend(g for x, g in zip(flat, flat_grad, strict=True) if shapes.is_array(x))
    return [g if _differentiable(x) else None for x, g in zip(_array_leaves(arguments), leaves, strict=True)]


def _array_leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if shapes.is_array(leaf)]


def _differentiable(array: Any) -> bool:
    return jax.dtypes.issubdtype(array.dtype, np.inexact)


_call_with_vjp.defvjp(_call_fwd, _call_bwd)
