"""What `autotune` does with a list of bound arguments: in which order, from which caches, noted where, shown how.

Here, one session for each; for a device that is not here, estimates and its compiler.
"""

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tokamax._src import devices, dispatch, errors, options
from tokamax._src.aot import check as aot_check
from tokamax._src.aot import tune as aot_tune
from tokamax._src.autotuning import guide, processes, session, store
from tokamax._src.autotuning.journal import Journal
from tokamax._src.autotuning.result import AutotuningResult, Entry
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.costmodel import dataset
from tokamax._src.dispatch import warn

_T = TypeVar("_T")


def tune(
    todo: Sequence[BoundArguments], settings: session.Settings, *, total_timeout: float | None, **how: Any
) -> AutotuningResult:
    """Tunes bound arguments by measuring them.

    Args:
      todo: what to tune, each once.
      settings: how to measure.
      total_timeout: limit in seconds for all of them; what was measured until then is returned.
      **how: `ignore_cache`, `progress_bar`, `keep` and `resume` of `tokamax.autotune`.
    """
    with _deadline(total_timeout) as stop, _memory_given_back():
        return _result(_tune_all(todo, settings, stop=stop, **how), len(todo), total_timeout, stop)


def kind_of(device_kind: str) -> str:
    """Returns the kind of a device that need not be here, which may be given by a short name.

    Raises:
      ArgumentError: if there is none of that name.
    """
    return aot_check.facts_of(device_kind).kind


def tune_ahead(
    todo: Sequence[BoundArguments],
    kind: str,
    *,
    enough: int,
    progress_bar: bool,
    total_timeout: float | None,
    **limits: Any,
) -> AutotuningResult:
    """Tunes bound arguments for a device that is not here.

    Args:
      todo: what to tune, each once, found while `config.cross_compile` was this device.
      kind: the device kind.
      enough: how many configs of each the compiler must take.
      progress_bar: whether to show one.
      total_timeout: limit in seconds for all of them; what was found until then is returned.
      **limits: `timeout`, `max_workers` and `ignore_cache` of `aot.check.Checker`.
    """
    if enough < 1:
        raise errors.ArgumentError(f"budget must be at least 1, got {enough}")
    with _deadline(total_timeout) as stop:
        ranked = aot_tune.rankings(todo, kind)
        with aot_check.Checker(kind, **limits) as checker, _bar(len(todo), f"for {kind}", progress_bar) as move:
            entries = aot_tune.tune(todo, ranked, checker, enough=enough, on_entry=move, is_over=stop.is_set)
        return _result(entries, len(todo), total_timeout, stop)


def _result(
    entries: Sequence[Entry], asked: int, total_timeout: float | None, stop: threading.Event
) -> AutotuningResult:
    """Returns entries as a result, with a warning if the time was over before all that was asked for was tuned."""
    if stop.is_set():
        warn(f"total_timeout of {total_timeout:g} s is over: {len(entries)} of {asked} ops are in the result")
    return AutotuningResult(tuple(entries))


@contextlib.contextmanager
def _deadline(seconds: float | None) -> Iterator[threading.Event]:
    """Yields an event that is set when the time is over."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set) if seconds is not None else None
    try:
        if timer is not None:
            timer.daemon = True
            timer.start()
        yield stop
    finally:
        if timer is not None:
            timer.cancel()


@contextlib.contextmanager
def _memory_given_back() -> Iterator[None]:
    """Ends worker processes at the end that hold memory of an accelerator; others wait for another tuning."""
    try:
        yield
    finally:
        processes.Process.end_idle(but="cpu")


def _tune_all(
    todo: Sequence[BoundArguments],
    settings: session.Settings,
    *,
    ignore_cache: bool,
    progress_bar: bool,
    keep: bool,
    resume: bool,
    stop: threading.Event,
) -> list[Entry]:
    """Tunes bound arguments one after the other; ends early at Ctrl-C and when `stop` is set."""
    course = _Course(todo, settings) if settings.search == "model" else None
    entries: dict[int, Entry] = {}
    for number, i in enumerate(range(len(todo)) if course is None else course.order, 1):
        ba = todo[i]
        if stop.is_set():
            break
        known = None if ignore_cache else _known_entry(ba, settings.how())
        if known is not None:
            entries[i] = known
            continue
        journal = store.private().journal(ba, devices.device_kind(), settings.how(), resume=resume and not ignore_cache)
        with _Progress(ba, f"{number}/{len(todo)}", enabled=progress_bar) as progress, _closed(journal):
            try:
                told = {"journal": journal, "on_event": progress.event, "stop": stop}
                if course is None:
                    extends = None if ignore_cache else _extensible_entry(ba, settings.how())
                    entry, interrupted = session.tune(ba, settings, extends=extends, **told)
                else:
                    entry, interrupted = course.tune(ba, settings, **told)
            except KeyboardInterrupt:
                break
            entries[i] = entry
            kept = _keep(entry) if keep and entry.outcomes else True
            if interrupted:
                break
            if journal is not None and kept and entry.error is None:
                journal.discard()
    return [entries[i] for i in sorted(entries)]


class _Course:
    """In which order a search by model tunes, and what each op's shapes teach each other.

    Attributes:
      order: indices of what is to be tuned: the lessons of each op first.
    """

    def __init__(self, todo: Sequence[BoundArguments], settings: session.Settings):
        self._teachers: dict[str, guide.Teacher] = {}
        self._budgets: dict[str, int] = {}
        lessons: list[int] = []
        for op in dict.fromkeys(ba.op.registered_name() for ba in todo):
            where = [i for i, ba in enumerate(todo) if ba.op.registered_name() == op]
            self._teachers[op] = teacher = _teacher(op)
            sizes = [_space_size(todo[i]) for i in where]
            configs = round(sum(sizes) / len(sizes))
            budget = settings.budget or guide.default_budget(configs)
            plan = guide.Plan.of([todo[i].abstract for i in where], configs, budget, len(teacher.problems))
            lessons += [where[n] for n in plan.lessons]
            self._budgets[op] = max(1, plan.budget)
        self.order = [*lessons, *(i for i in range(len(todo)) if i not in set(lessons))]
        self._lessons = {todo[i] for i in lessons}

    def tune(self, ba: BoundArguments, settings: session.Settings, **options: Any) -> tuple[Entry, bool]:
        """Tunes one op: a lesson whole, another by what the lessons taught."""
        op = ba.op.registered_name()
        if ba in self._lessons:
            settings = dataclasses.replace(settings, search="exhaustive", budget=None)
        return session.tune(ba, settings, teacher=self._teachers[op], budget=self._budgets[op], **options)


def _space_size(ba: BoundArguments) -> int:
    return _unless_it_raises(lambda: len(ba.autotuning_configs)) or 0


@contextlib.contextmanager
def _closed(journal: Journal | None) -> Iterator[None]:
    try:
        yield
    finally:
        if journal is not None:
            journal.close()


def _teacher(op: str) -> guide.Teacher:
    """Returns what is known of an op on this device before it is tuned: its model here, and what was measured."""
    kind = devices.device_kind()
    problems = [p for _, place in store.in_use() for p in dataset.problems_from_entries(place.entries(kind, op))]
    return guide.Teacher(dispatch.model(kind, op), problems, devices.facts(kind))


@contextlib.contextmanager
def _bar(total: int, text: str, enabled: bool) -> Iterator[Callable[[Entry], Any]]:
    """Yields what moves a progress bar by one op; it does not show where stderr is not a terminal."""
    if not (enabled and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda entry: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=text, unit="op", leave=False) as bar:
        yield lambda entry: bar.update()


def _known_entry(ba: BoundArguments, how: Mapping[str, Any]) -> Entry | None:
    """Returns the newest known entry of the caches that spares a tuning, the private cache's first; or None."""
    found = (place.known_entry(ba, devices.device_kind(), how) for _, place in store.in_use())
    return _unless_it_raises(lambda: next((entry for entry in found if entry is not None), None))


def _extensible_entry(ba: BoundArguments, how: Mapping[str, Any]) -> tuple[Entry, list[Any]] | None:
    """Returns an entry of the private cache that needs to be extended alone, and the configs it lacks; or None."""
    if not options.private_cache.value:
        return None
    return _unless_it_raises(lambda: store.private().extensible_entry(ba, devices.device_kind(), how))


def _unless_it_raises(look: Callable[[], _T]) -> _T | None:
    """Returns what a look at an op finds; None if it raises, as for a space that does: the session records why."""
    try:
        return look()
    except Exception:
        return None


def _keep(entry: Entry) -> bool:
    """Adds an entry to the private data; what a file cannot carry stays in the result alone.

    Returns:
      False if it could not be written: its journal then keeps what was measured.
    """
    try:
        store.private().keep([entry])
    except errors.SerializationError:
        pass
    except errors.StorageError as error:
        warn(f"measurements are not kept: {error}")
        return False
    return True


class _Progress:
    """A progress bar over the configs of one op: how many are done, the best so far, time left."""

    def __init__(self, ba: BoundArguments, number: str, *, enabled: bool):
        self._ba, self._number = ba, number
        self._bar = None
        self._enabled = enabled and sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> "_Progress":
        if self._enabled:
            from tqdm.auto import tqdm

            name = self._ba.op.registered_name()
            self._bar = tqdm(total=None, desc=f"{self._number} {name}", unit="config", leave=False)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def event(self, event: Any) -> None:
        """Moves the bar."""
        if self._bar is None:
            return
        self._bar.total = event.total
        self._bar.update(event.done - self._bar.n)
        if event.best_ms is None:
            self._bar.set_postfix_str(f"compiled {event.compiled}/{event.total}")
        else:
            self._bar.set_postfix_str(f"best {event.best_ms:.3g} ms")
