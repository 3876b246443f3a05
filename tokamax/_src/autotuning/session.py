"""One tuning session: a bound op in, an `Entry` out.

Brings the parts together: the op's space, seeded inputs, compiled candidates, the autotuner, the decision rule.
"""

import dataclasses
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tokamax._src import benchmarking, devices, environment, errors, numerics, shapes, timing
from tokamax._src.autotuning import autotuner, outcome
from tokamax._src.autotuning.result import Entry
from tokamax._src.bound_arguments import BoundArguments, is_leaf


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to tune.

    Attributes:
      timeout_s: limit for compiling, and for each run, of one config.
      max_workers: configs compiled at the same time; None for one per core.
      rounds: interleaved rounds of measurement.
      timer: a timer or its name.
      check: whether outputs must agree with the default's.
      seed: seed of the inputs.
    """

    timeout_s: float = 60.0
    max_workers: int | None = None
    rounds: int = 5
    timer: Any = "wall_clock"
    check: bool = True
    seed: int = 0


def example_inputs(ba: BoundArguments, *, seed: int = 0) -> list[jax.Array]:
    """Returns the arrays of a call, vmap axes in front: its own where they are real (copied), else made from a seed."""
    if not ba.vmap_sizes:
        return _leaves(ba, _initialized(ba, ba.arguments, seed))
    specs = [leaf for leaf in jax.tree.leaves((ba.args, ba.kwargs)) if shapes.is_array(leaf)]
    copies = []
    for i in np.ndindex(ba.vmap_sizes):
        flat = zlib.crc32(repr((seed, i)).encode())
        unbatched = jax.tree.map(
            lambda x: dataclasses.replace(x, vmap=()) if is_leaf(x) else x, dict(ba.abstract), is_leaf=is_leaf
        )
        copies.append(_leaves(ba, _initialized(ba, unbatched, flat if any(i) else seed)))
    stacked = []
    for n, spec in enumerate(specs):
        picked = [copies[_flat_index(i, spec, ba.vmap_sizes)][n] for i in np.ndindex(spec.batch)] if spec.vmap else []
        array = np.stack([np.asarray(x) for x in picked]) if picked and spec.batch else np.asarray(copies[0][n])
        stacked.append(jax.device_put(array.reshape(spec.batch + spec.shape)))
    return stacked


def _flat_index(index: tuple[int, ...], spec: shapes.ArraySpec, sizes: tuple[int, ...]) -> int:
    """Returns which copy of the unbatched inputs holds an element of a batched array; absent axes count as 0."""
    remaining = iter(index)
    full = tuple(next(remaining) if batched else 0 for batched in spec.vmap)
    return int(np.ravel_multi_index(full, sizes))


def _initialized(ba: BoundArguments, arguments: Mapping[str, Any], seed: int) -> dict[str, Any]:
    abstract = shapes.abstract(dict(arguments))
    overrides = ba.op._example_arguments({name: abstract[name] for name in arguments}, np.random.default_rng(seed))
    return numerics.initialize(arguments, seed=seed, overrides=overrides)


def _leaves(ba: BoundArguments, arguments: Mapping[str, Any]) -> list[jax.Array]:
    """Returns the arrays of arguments in the order in which `as_function` takes them."""
    bound = dataclasses.replace(ba, arguments={name: arguments[name] for name in ba.arguments})
    return [leaf for leaf in jax.tree.leaves((bound.args, bound.kwargs)) if shapes.is_array(leaf)]


def tune(
    ba: BoundArguments,
    settings: Settings = Settings(),
    *,
    on_event: Callable[[autotuner.Event], None] | None = None,
    stop: threading.Event | None = None,
) -> tuple[Entry, bool]:
    """Tunes one bound op; an op that cannot be tuned gives an entry with its error.

    Args:
      ba: the op and its arguments.
      settings: how to tune.
      on_event: called once per finished config.
      stop: when set, the session ends with what was measured.

    Returns:
      The entry, and whether the session was interrupted.
    """
    timer = timing.get_timer(settings.timer)
    kind = devices.device_kind()
    about = environment.describe(timer=timing.timer_name(timer), rounds=settings.rounds)
    default = None
    try:
        default = ba.default_config
        configs = ba.autotuning_configs
        if not ba.op.supported_on(devices.current()):
            raise errors.UnsupportedError(f"{ba.op.registered_name()} does not run on {kind}")
        inputs = example_inputs(ba, seed=settings.seed)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error) or 'no message'}"
        return Entry(ba, kind, {}, default, None, about, error=reason[:2000]), False

    def build(config: Any) -> benchmarking.Compiled:
        function, _ = ba.as_function(config)
        return benchmarking.compile_function(function, inputs)

    run = autotuner.tune(
        configs,
        default=default,
        build=build,
        timer=timer,
        bound_args=ba,
        check=numerics.compare if settings.check else None,
        rounds=settings.rounds,
        max_workers=settings.max_workers or len(os.sched_getaffinity(0)),
        timeout_s=settings.timeout_s,
        on_event=on_event,
        stop=stop,
    )
    best = outcome.fastest(run.outcomes, default)
    return Entry(ba, kind, run.outcomes, default, best, about), run.interrupted
