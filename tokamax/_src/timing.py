"""Timers: how a compiled config is timed. A timer is any callable of the `Timer` form.

The name of a timer is part of what is recorded, so that times of different methods are never mixed unseen.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokamax._src import errors

_SHORTEST_SAMPLE_NS = 2_000_000
"""Runs shorter than this are repeated within one sample, so that the clock and the call weigh little."""
_LEAST_RUNS, _MOST_RUNS = 3, 20
_MANY_RUNS_NS, _FEW_RUNS_NS = 10_000_000, 200_000_000
"""A sample of `wall_clock_min` goes on to the most runs while it is short; a long one ends before the least."""


class Timer(Protocol):
    """What measures: `run()` executes the compiled config once and blocks."""

    def __call__(self, run: Callable[[], Any], *, bound_args: Any, config: Any, rounds: int) -> Sequence[float]:
        """Returns `rounds` samples in ms, each the time of one run."""
        ...


def wall_clock(run: Callable[[], Any], *, bound_args: Any, config: Any, rounds: int) -> list[float]:
    """Times whole runs with the process's monotonic clock; a short run is repeated and averaged within a sample."""
    return [_sample_ms(run) for _ in range(rounds)]


def _sample_ms(run: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    run()
    once = time.perf_counter_ns() - start
    repeats = min(1000, math.ceil(_SHORTEST_SAMPLE_NS / max(once, 1)))
    if repeats > 1:
        start = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        once = (time.perf_counter_ns() - start) / repeats
    return once / 1e6


def wall_clock_min(run: Callable[[], Any], *, bound_args: Any, config: Any, rounds: int) -> list[float]:
    """Times the fastest of a few consecutive runs per sample: what else runs on the machine can only add time."""
    return [_fastest_ms(run) for _ in range(rounds)]


def _fastest_ms(run: Callable[[], Any]) -> float:
    start, runs = time.perf_counter_ns(), 0
    best = math.inf
    while True:
        before = time.perf_counter_ns()
        run()
        after = time.perf_counter_ns()
        best, runs = min(best, after - before), runs + 1
        enough = _MANY_RUNS_NS if runs >= _LEAST_RUNS else _FEW_RUNS_NS
        if runs == _MOST_RUNS or after - start >= enough:
            return best / 1e6


@dataclasses.dataclass(frozen=True)
class RecordedTimer:
    """Replays a table instead of running anything.

    Attributes:
      samples: (key of the bound arguments, config) -> recorded samples in ms.
    """

    samples: Mapping[tuple[str, Any], Sequence[float]]
    name: str = "recorded"

    def __call__(self, run: Callable[[], Any], *, bound_args: Any, config: Any, rounds: int) -> list[float]:
        """Returns the first `rounds` recorded samples, starting over where the record is shorter.

        Raises:
          ArgumentError: if nothing was recorded.
        """
        recorded = self.samples.get((bound_args.key, config))
        if not recorded:
            raise errors.ArgumentError(f"the record must have samples of {bound_args!r} with {config}, got none")
        return [float(recorded[i % len(recorded)]) for i in range(rounds)]


TIMERS: dict[str, Timer] = {"wall_clock": wall_clock, "wall_clock_min": wall_clock_min}


def get_timer(timer: str | Timer) -> Timer:
    """Returns a timer by name, or the callable itself.

    Raises:
      ArgumentError: if there is no such timer.
    """
    if callable(timer):
        return timer
    if timer not in TIMERS:
        raise errors.ArgumentError(f"timer must be a callable or one of {sorted(TIMERS)}, got {timer!r}")
    return TIMERS[timer]


def timer_name(timer: Timer) -> str:
    """Returns the name under which measurements of a timer are recorded."""
    return str(getattr(timer, "name", None) or getattr(timer, "__name__", type(timer).__name__))
