"""The public functions: find ops, tune them, say what runs. What only tuning and files need loads on use."""

import dataclasses
import difflib
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tokamax._src import capture, checking, devices, dispatch, errors, explanation, options, registry
from tokamax._src.autotuning import store
from tokamax._src.autotuning.result import AutotuningResult
from tokamax._src.bound_arguments import BoundArguments, ConfigChoice, set_runtime
from tokamax._src.dispatch import warn
from tokamax._src.op import NullConfig


def get_bound_args(f: Any, *args: Any, **kwargs: Any) -> tuple[BoundArguments, ...]:
    """Returns the bound arguments of every op call in a program, in program order, each once.

    Args:
      f: a function, a jitted function, or a `jax.stages.Lowered`.
      *args: arguments of `f`: arrays or `jax.ShapeDtypeStruct`; anything else is closed over.
      **kwargs: keyword arguments of `f`.

    Raises:
      ArgumentError: if `f` is no function, or the arguments do not fit it.
    """
    if isinstance(f, jax.stages.Lowered):
        if args or kwargs:
            raise errors.ArgumentError("a Lowered program must come alone, got further arguments; it has them already")
        return capture.bound_arguments_in(f)
    if not callable(f):
        raise errors.ArgumentError(
            f"f must be a function, a jitted function, a Lowered program, or bound arguments, got {type(f).__name__}"
        )
    _check_arguments(f, args, kwargs)
    if hasattr(f, "lower"):
        return capture.bound_arguments_in(_lowered(f, *args, **kwargs))
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def call(*arrays: Any) -> Any:
        merged = list(leaves)
        for i, array in zip(dynamic, arrays, strict=True):
            merged[i] = array
        f_args, f_kwargs = treedef.unflatten(merged)
        out = f(*f_args, **f_kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

    return capture.bound_arguments_in(_lowered(jax.jit(call), *(leaves[i] for i in dynamic)))


def _lowered(f: Any, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Lowers a jitted function for the device that configs are chosen for."""
    target = devices.target()
    if not isinstance(target, devices.AbsentDevice):
        return f.lower(*args, **kwargs)
    # JAX calls the platform of NVIDIA's devices by another name here.
    platform = {"gpu": "cuda"}.get(target.platform, target.platform)
    return f.trace(*args, **kwargs).lower(lowering_platforms=(platform,))


def _check_arguments(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = ""
        for name in set(kwargs) - set(signature.parameters):
            if close := difflib.get_close_matches(name, OPTION_NAMES, 1):
                hint = f"; {name!r} reached f since it is no option of autotune: did you mean {close[0]!r}?"
        raise errors.ArgumentError(
            f"the arguments must fit {getattr(f, '__name__', 'f')}{signature}: {error}{hint}"
        ) from None


def bound_args_to_json(bound_args: Sequence[BoundArguments]) -> str:
    """Returns bound arguments as JSON text, which `bound_args_from_json` reads.

    Raises:
      SerializationError: if an argument has no name that a file could carry, for example a lambda.
    """
    from tokamax._src import profiles

    return profiles.bound_args_text([(ba.to_json(), ba.usage) for ba in bound_args])


def bound_args_from_json(source: str | os.PathLike[str]) -> tuple[BoundArguments, ...]:
    """Reads bound arguments from a path or from JSON text.

    Raises:
      FormatError: if it is not what `bound_args_to_json` writes, or names an op that is not imported.
    """
    from tokamax._src import profiles

    text = source if isinstance(source, str) and source.lstrip()[:1] in ("{", "[") else None
    items = profiles.bound_args_items(pathlib.Path(source).read_bytes() if text is None else text)
    return tuple(dataclasses.replace(BoundArguments.from_json(data), usage=usage) for data, usage in items)


def bound_args_from_profile(*paths: str | os.PathLike[str]) -> tuple[BoundArguments, ...]:
    """Returns the bound arguments of the op calls in profiles, each once, those that took most time first.

    What each took stands in its `usage`. Calls that this process cannot understand are passed over, with one warning.

    Args:
      *paths: profiles that `jax.profiler` wrote (`.xplane.pb`, also with `.gz`), or folders with such files.

    Raises:
      FormatError: if a file is no profile, or if no op call is found.
      MissingExtraError: if protobuf is not installed.
    """
    from tokamax._src import profiles

    found: dict[BoundArguments, BoundArguments] = {}
    reasons = []
    for op in profiles.read([pathlib.Path(path) for path in paths]):
        try:
            ba = BoundArguments.from_json(op.data)
        except errors.FormatError as error:
            reasons.append(str(error))
        else:
            found.setdefault(ba, dataclasses.replace(ba, usage=op.usage))
    if reasons:
        warn(f"{len(reasons)} op calls of the profile are not understood here and passed over; the first: {reasons[0]}")
    return tuple(found.values())


def implementations(op: BoundArguments) -> tuple[BoundArguments, ...]:
    """Returns bound arguments for every implementation of an op's family that runs them here, the op's first."""
    place = registry.family_of(type(op.op))
    if place is None:
        return (op,)
    family, found = place[0], [op]
    for name in registry.implementations(family):
        cls = registry.implementation(family, name)
        if cls is type(op.op) or not cls().supported_on(devices.current()):
            continue
        try:
            found.append(cls().bind(**op.arguments, return_residuals=op.return_residuals))
        except (TypeError, ValueError, NotImplementedError):  # It does not take these arguments.
            continue
    return tuple(found)


def autotune(
    f: Any,
    *args: Any,
    ignore_cache: bool = False,
    all_implementations: bool = False,
    progress_bar: bool = True,
    search: str = "exhaustive",
    budget: int | None = None,
    timeout: float = 60.0,
    total_timeout: float | None = None,
    max_workers: int | None = None,
    rounds: int = 5,
    timer: Any = "wall_clock_min",
    check: bool = True,
    tolerance: float | Mapping[str, float] | None = None,
    seed: int = 0,
    keep: bool = True,
    resume: bool = True,
    isolation: str = "auto",
    device_kind: str | None = None,
    **kwargs: Any,
) -> AutotuningResult:
    """Finds every tunable op that a program calls and measures each config of its space.

    The default config is always a candidate and loses only to a gain beyond noise; see
    `tokamax.autotuning.fastest`. A config that fails is recorded with its reason and the others go on; so does an op
    that cannot be tuned. Ctrl-C ends the tuning and returns what was measured. Findings are noted in the private cache
    as they come: after an interruption, even of the whole process, the same call goes on where it ended.

    Args:
      f: a function (jitted or not) called with `args` and `kwargs`; a `jax.stages.Lowered`; or one or several
        `BoundArguments`.
      *args: arguments of `f`; arrays or `jax.ShapeDtypeStruct`.
      ignore_cache: measure again what this device, toolchain and space already have an entry for.
      all_implementations: also tune the other implementations of each op.
      progress_bar: whether to show one; it never shows where stderr is not a terminal.
      search: `exhaustive` measures each config at least once. `model` measures the default, the winner of the nearest
        measured shape, and then what promises most, by what was measured of other shapes before and of this one on the
        way; it ends early when another measurement promises less than noise.
      budget: how many configs a search by model may measure per op, on average: of many shapes of one op, the first
        few are measured whole to teach the others. None for about a quarter of 30 and a tenth of 300.
      timeout: limit in seconds for tracing, for compiling and for checking one config, and for each of its runs.
      total_timeout: limit in seconds for the whole call, which then returns what was measured; None for no limit.
      max_workers: configs compiled at the same time; None for one per core.
      rounds: interleaved rounds of measurement.
      timer: a timer, or the name of one; see `tokamax.benchmarking.get_timer`.
      check: whether a config counts as failed whose output differs from that of the op's reference (where it has none,
        from the default's), or from one run to the next.
      tolerance: how far outputs may be from that, as a share of the largest magnitude, or a mapping from dtype names to
        shares; None for what the op says, else for what suits the dtype.
      seed: seed of the inputs made for abstract arguments.
      keep: whether to add the entries to the private cache's data, from which models are trained.
      resume: whether to go on with what an interrupted call noted. What says how to measure (`timer`, `check`, `search`
        and so on) must be the same, and not for how long (`timeout`, `rounds`).
      isolation: `none` compiles and runs configs in this process, where a config that crashes ends it and one that
        hangs keeps a thread; `process` in another one, which is killed where a limit is exceeded, and replaced;
        `auto` is `process` on a GPU, for ops that another process can find, else `none`.
      device_kind: a kind of TPU, as JAX names it (`TPU v6 lite`) or shortly (`v6e`), that need not be here: nothing is
        measured then. Configs are compiled for it (extra `aot-tpu`), the best by the op's estimate first, until
        `budget` of them (by default one) are taken; the entries are marked as estimated, and dispatch uses them on that
        device below every measured one. An op without an estimate gives an entry with its error.
      **kwargs: keyword arguments of `f`.

    Raises:
      ArgumentError: if the arguments do not fit `f`, or a parameter of `f` has the name of an option; if `device_kind`
        is not known, or an option that is about measuring comes with it.
      UnsupportedError: if no op has an estimate for `device_kind`.
      MissingExtraError: if the compiler for `device_kind` is not installed.
    """
    from tokamax._src import tuning
    from tokamax._src.autotuning import session

    if total_timeout is not None and not total_timeout > 0:
        raise errors.ArgumentError(f"total_timeout must be a positive number of seconds or None, got {total_timeout}")
    if device_kind is not None:
        _check_measures_nothing(
            all_implementations=all_implementations,
            search=search,
            rounds=rounds,
            timer=timer,
            check=check,
            tolerance=tolerance,
            isolation=isolation,
        )
        kind = tuning.kind_of(device_kind)
        with options.cross_compile(kind):
            ahead = list(dict.fromkeys(_targets(f, args, kwargs)))
        return tuning.tune_ahead(
            ahead,
            kind,
            enough=1 if budget is None else budget,
            progress_bar=progress_bar,
            total_timeout=total_timeout,
            timeout=timeout,
            max_workers=max_workers,
            ignore_cache=ignore_cache,
        )
    settings = session.Settings(
        timeout_s=timeout,
        max_workers=max_workers,
        rounds=rounds,
        timer=timer,
        check=check,
        tolerance=tolerance,
        seed=seed,
        search=search,
        budget=budget,
        isolation=isolation,
    )
    if options.replay.value:
        raise errors.ArgumentError("tokamax.config.replay must be off to measure; it is on")
    if isinstance(options.cross_compile.value, str):
        raise errors.ArgumentError(
            "tokamax.config.cross_compile must be off to measure, since only a device that is here can be; it is "
            f"{options.cross_compile.value!r}"
        )
    targets = _targets(f, args, kwargs)
    if all_implementations:
        targets = [ba for target in targets for ba in implementations(target)]
    return tuning.tune(
        list(dict.fromkeys(targets)),
        settings,
        total_timeout=total_timeout,
        ignore_cache=ignore_cache,
        progress_bar=progress_bar,
        keep=keep,
        resume=resume,
    )


_DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(autotune).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
}
OPTION_NAMES = tuple(_DEFAULTS)


def _check_measures_nothing(**given: Any) -> None:
    """Checks that options that are about measuring have their defaults.

    Raises:
      ArgumentError: if one has not.
    """
    if changed := sorted(name for name, value in given.items() if value != _DEFAULTS[name]):
        raise errors.ArgumentError(
            f"options that are about measuring must be left out with device_kind, which measures nothing, got {changed}"
        )


def _targets(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BoundArguments]:
    """Returns the bound arguments to tune."""
    listed = [f] if isinstance(f, BoundArguments) else f
    if isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)):
        if args or kwargs or not all(isinstance(ba, BoundArguments) for ba in listed):
            kinds = sorted({type(ba).__name__ for ba in listed})
            raise errors.ArgumentError(
                f"a list to tune must hold BoundArguments alone, got {kinds} and {len(args) + len(kwargs)} further "
                "arguments; make them with op.bind(...) or tokamax.autotuning.get_bound_args(f, ...)"
            )
        return list(listed)
    if callable(f) and not isinstance(f, jax.stages.Lowered):
        try:
            clash = sorted(set(inspect.signature(f).parameters) & set(OPTION_NAMES))
        except (TypeError, ValueError):
            clash = []
        if clash:
            raise errors.ArgumentError(
                f"a parameter of f must not have the name of an option of autotune, got {clash}; use "
                "tokamax.autotune(tokamax.autotuning.get_bound_args(f, ...))"
            )
    return [ba for ba in get_bound_args(f, *args, **kwargs) if ba.op.config_cls is not NullConfig]


def explain(f: Any, *args: Any, **kwargs: Any) -> explanation.Explanation:
    """Says for every op call of a program which config it would run with here and now, and why.

    Args:
      f: a function (jitted or not), a `jax.stages.Lowered`, or one or several `BoundArguments`.
      *args: arguments of `f`; arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of `f`.
    """
    listed = [f] if isinstance(f, BoundArguments) else f
    if isinstance(listed, Sequence) and all(isinstance(ba, BoundArguments) for ba in listed):
        targets = tuple(listed)
    else:
        with options.autotuning_cache_miss_fallback("heuristics"), options.replay(False):
            targets = get_bound_args(f, *args, **kwargs)
    return explanation.explain(targets)


def check(f: Any, *args: Any, **kwargs: Any) -> checking.CheckReport:
    """Compiles every op call of a program with the config it would run with here and now, and reports; runs nothing.

    Dispatch itself can replace a config that fails while it is traced, but not one that the compiler refuses later,
    as part of the user's program. This finds those ahead of time.

    Args:
      f: a function (jitted or not), a `jax.stages.Lowered`, or one or several `BoundArguments`.
      *args: arguments of `f`; arrays or `jax.ShapeDtypeStruct`.
      **kwargs: keyword arguments of `f`.
    """
    if isinstance(options.cross_compile.value, str):
        raise errors.UnsupportedError(
            "tokamax.config.cross_compile must be off to check, since this compiles for a device that is here; it is "
            f"{options.cross_compile.value!r}"
        )
    return checking.compiled(explain(f, *args, **kwargs).rows)


class _Runtime:
    """Fills the slot that ops ask: dispatch chooses, this module tunes and saves."""

    def choose(self, ba: BoundArguments) -> ConfigChoice:
        return dispatch.choose(ba)

    def failed(self, ba: BoundArguments, choice: ConfigChoice, error: Exception) -> ConfigChoice:
        return dispatch.choose_without(ba, choice, error)

    def measured_ms(self, ba: BoundArguments) -> float | None:
        return dispatch.measured_ms(ba)

    def autotune(self, ba: BoundArguments, **options: Any) -> AutotuningResult:
        return autotune(ba, **options)

    def save(self, result: AutotuningResult) -> None:
        store.private().put(result.entries)
        dispatch.forget()


set_runtime(_Runtime())
