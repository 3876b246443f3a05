"""Tuning for a device that is not here: the best by estimate that its compiler takes. Nothing is measured."""

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from tokamax._src import environment, errors, estimates, options
from tokamax._src.aot.check import Checker
from tokamax._src.autotuning.result import Entry
from tokamax._src.autotuning.session import scope_of_this_thread
from tokamax._src.bound_arguments import BoundArguments

MOST = 12
"""How many configs are tried before an op is given up."""


def rankings(todo: Sequence[BoundArguments], device_kind: str) -> list[list[tuple[Any, float]]]:
    """Returns for each op its configs with their estimated times, the fastest first; none where it has no estimate.

    Raises:
      UnsupportedError: if no op has one.
    """
    with options.cross_compile(device_kind):
        found = [_ranking(ba, device_kind) for ba in todo]
    if todo and not any(found):
        names = sorted({ba.op.registered_name() for ba in todo})
        raise errors.UnsupportedError(
            f"an op must have an estimate for {device_kind!r} to be tuned without it, and none of {names} has one; "
            "tune on the device, or write the op's _estimate_ms"
        )
    return found


def _ranking(ba: BoundArguments, device_kind: str) -> list[tuple[Any, float]]:
    try:
        return estimates.ranked(ba, device_kind)
    except Exception:  # Its space raises: `tune_one` says so.
        return []


def tune_one(ba: BoundArguments, ranking: Sequence[tuple[Any, float]], checker: Checker, enough: int) -> Entry:
    """Compiles the best by estimate until enough of them are taken; what fails gives an entry with its error.

    Args:
      ba: the op and its arguments.
      ranking: its configs with their estimated times, the fastest first.
      checker: the compilers.
      enough: how many that compile are wanted.
    """
    kind, times = checker.facts.kind, dict(ranking[:MOST])
    about, default, failures, taken = environment.describe_estimate(checker.compiler), None, {}, {}
    try:
        with options.cross_compile(kind):
            default = ba.default_config
            if not times:
                raise errors.UnsupportedError(f"{ba.op.registered_name()} has no estimate for {kind!r}")
            for config, verdict in checker.verdicts(ba, times, enough):
                if verdict.compiles:
                    taken[config] = times[config]
                else:
                    failures[config] = verdict.failure()
        if not taken:
            raise errors.UnsupportedError(
                f"none of {len(times)} configs compiles; {failures[next(iter(times))].reason}"
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error) or 'no message'}"
        return Entry(ba, kind, {}, default, None, about, error=reason[:2000])
    best = min(taken, key=taken.__getitem__)
    return Entry(ba, kind, failures, default, best, about, estimated_ms=taken)


def tune(
    todo: Sequence[BoundArguments],
    ranked: Sequence[Sequence[tuple[Any, float]]],
    checker: Checker,
    *,
    enough: int,
    on_entry: Callable[[Entry], Any],
    is_over: Callable[[], bool],
) -> list[Entry]:
    """Tunes several ops at a time; ends early at Ctrl-C and when it is over, with what there is.

    Args:
      todo: the ops and their arguments.
      ranked: what `rankings` said of them.
      checker: the compilers.
      enough: how many configs that compile are wanted of each.
      on_entry: called with each entry as it comes.
      is_over: whether to begin no further op.
    """
    in_same_scope = scope_of_this_thread()

    def work(ba: BoundArguments, ranking: Sequence[tuple[Any, float]]) -> Entry | None:
        if is_over():
            return None
        with in_same_scope():
            return tune_one(ba, ranking, checker, enough)

    entries = []
    with futures.ThreadPoolExecutor(checker.workers) as threads:
        waiting = [threads.submit(work, *task) for task in zip(todo, ranked, strict=True)]
        try:
            for future in waiting:
                if (entry := future.result()) is not None:
                    entries.append(entry)
                    on_entry(entry)
        except KeyboardInterrupt:
            checker.close()  # What waits for a compiler goes on at once.
            threads.shutdown(cancel_futures=True)
    return entries
