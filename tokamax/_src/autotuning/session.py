"""One tuning session: a bound op in, an `Entry` out.

Brings the parts together: the op's space, seeded inputs, compiled candidates, the autotuner, the decision rule.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax

from tokamax._src import benchmarking, devices, environment, errors, numerics, timing
from tokamax._src.autotuning import autotuner, outcome
from tokamax._src.autotuning.result import Entry
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.inputs import example_inputs


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
    timer: Any = "wall_clock_min"
    check: bool = True
    seed: int = 0


def _scope_of_this_thread() -> Callable[[], contextlib.ExitStack]:
    """Returns what brings JAX's scoped settings, which hold for one thread, to the threads that compile."""
    values: Any = jax.config
    scoped = (
        (jax.default_device, values.jax_default_device),
        (jax.default_matmul_precision, values.jax_default_matmul_precision),
        (jax.enable_x64, values.jax_enable_x64),
    )

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for setting, value in scoped:
            stack.enter_context(setting(value))
        return stack

    return enter


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

    in_same_scope = _scope_of_this_thread()

    def build(config: Any) -> benchmarking.Compiled:
        function, _ = ba.as_function(config)
        with in_same_scope():
            return benchmarking.compile_function(function, inputs)

    run = autotuner.tune(
        configs,
        default=default,
        build=build,
        timer=timer,
        bound_args=ba,
        check=numerics.compare if settings.check else None,
        rounds=settings.rounds,
        max_workers=settings.max_workers,
        timeout_s=settings.timeout_s,
        on_event=on_event,
        stop=stop,
    )
    best = outcome.fastest(run.outcomes, default)
    return Entry(ba, kind, run.outcomes, default, best, about), run.interrupted
