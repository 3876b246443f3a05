"""Evaluates candidates under limits. Knows callables, not ops.

Phases: compile all in parallel, the default first -> run each once (warm-up, never counted) and check its output
against the default's -> interleaved rounds, one sample each, in which clear losers stop early -> further rounds among
the finalists and the default. Nothing is measured while something compiles.

A limit is held by running a step in a daemon thread and going on without it: Python cannot stop a thread, so a step
that hangs keeps its thread, and possibly a core, until the process ends.
"""

import dataclasses
import functools
import math
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokamax._src import devices, timing
from tokamax._src.autotuning import search
from tokamax._src.autotuning.outcome import Failure, Outcome
from tokamax._src.benchmarking import Compiled

_POLL_S = 0.2
_ROUND_BUDGET_MS = 2_000.0
"""Time that the rounds of one config may take: slower configs get fewer rounds, at least two."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One config compiled or finished.

    Attributes:
      config: the config.
      outcome: how it ended; None if it was only compiled.
      compiled: how many configs are through compiling.
      done: how many configs are finished.
      total: how many there are.
      best_ms: the least median so far, None if nothing ran.
    """

    config: Any
    outcome: Outcome | None
    compiled: int
    done: int
    total: int
    best_ms: float | None


@dataclasses.dataclass(frozen=True)
class TuningRun:
    """What a tuning found.

    Attributes:
      outcomes: config -> outcome; configs that an interruption left out are absent.
      interrupted: whether Ctrl-C or the stop event ended it early.
    """

    outcomes: dict[Any, Outcome]
    interrupted: bool


class _Runner:
    """Runs steps one at a time in a thread that is given up when a step exceeds its limit."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._start()

    def _start(self) -> None:
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._steps,), daemon=True, name="tokamax-run").start()

    def call(self, step: Callable[[], Any]) -> Any:
        """Returns the step's result.

        Raises:
          TimeoutError: if it exceeds the limit.
        """
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._steps.put((step, done))
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                ok, value = done.get(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                if time.monotonic() >= deadline:
                    self._start()
                    raise TimeoutError from None
        if ok:
            return value
        raise value

    def close(self) -> None:
        """Ends the thread once its present step is over."""
        self._steps.put(None)


def _serve(steps: "queue.SimpleQueue[Any]") -> None:
    while (item := steps.get()) is not None:
        step, done = item
        try:
            done.put((True, step()))
        except BaseException as error:
            done.put((False, error))


class _Session:
    """The state of one tuning: what is compiled, sampled and finished so far, and who is told of it."""

    def __init__(self, total: int, on_event: Callable[[Event], None] | None, stop: threading.Event | None):
        self.outcomes: dict[Any, Outcome] = {}
        self.compiled: dict[Any, Compiled] = {}
        self.samples: dict[Any, list[float]] = {}
        self._through_compiling = 0
        self._total, self._on_event, self._stop = total, on_event, stop

    def check_stop(self) -> None:
        """Turns the stop event into what Ctrl-C raises."""
        if self._stop is not None and self._stop.is_set():
            raise KeyboardInterrupt

    def _tell(self, config: Any, outcome: Outcome | None) -> None:
        if self._on_event is not None:
            best_ms = min(map(statistics.median, self.samples.values()), default=None)
            self._on_event(Event(config, outcome, self._through_compiling, len(self.outcomes), self._total, best_ms))

    def add_compiled(self, config: Any, compiled: Compiled) -> None:
        """Notes a compiled config."""
        self.compiled[config] = compiled
        self._through_compiling += 1
        self._tell(config, None)

    def fail(self, config: Any, failure: Failure) -> None:
        """Ends a config with a failure; samples it may have count no more."""
        self._through_compiling += config not in self.compiled
        self.compiled.pop(config, None)
        self.samples.pop(config, None)
        self.outcomes[config] = failure
        self._tell(config, failure)

    def finish(self, config: Any) -> None:
        """Ends a config with its samples and drops its executable."""
        outcome = self.compiled.pop(config).measured(self.samples[config])
        self.outcomes[config] = outcome
        self._tell(config, outcome)


def _compile_all(
    session: _Session, order: Sequence[Any], build: Callable[[Any], Compiled], workers: int, timeout_s: float
) -> None:
    """Compiles configs in parallel; one that exceeds the limit is given up and its worker replaced."""
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for config in order:
        todo.put(config)

    def work() -> None:
        while (config := _get_nowait(todo)) is not None:
            done.put(("start", config, time.monotonic()))
            try:
                done.put(("done", config, build(config)))
            except BaseException as error:
                done.put(("error", config, error))

    def start_worker() -> None:
        threading.Thread(target=work, daemon=True, name="tokamax-compile").start()

    for _ in range(min(workers, len(order))):
        start_worker()
    started: dict[Any, float] = {}
    open_configs = set(order)
    try:
        while open_configs:
            session.check_stop()
            now = time.monotonic()
            for config in [c for c, at in started.items() if c in open_configs and now - at > timeout_s]:
                open_configs.discard(config)
                session.fail(config, Failure("timeout", f"compiling took more than {timeout_s:g} s"))
                start_worker()
            try:
                event, config, value = done.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if event == "start":
                started[config] = value
            elif config in open_configs:
                open_configs.discard(config)
                if event == "done":
                    session.add_compiled(config, value)
                else:
                    session.fail(config, Failure.of("compile", value))
    finally:
        while _get_nowait(todo) is not None:  # After an interruption, workers find nothing more to do.
            pass


def _get_nowait(todo: "queue.SimpleQueue[Any]") -> Any:
    try:
        return todo.get_nowait()
    except queue.Empty:
        return None


def _run_step(session: _Session, runner: _Runner, config: Any, step: Callable[[], Any]) -> Any:
    """Runs a step of a config; returns None, with the failure recorded, if it raises or exceeds its limit."""
    session.check_stop()
    try:
        return runner.call(step)
    except TimeoutError as error:
        limit = runner.timeout_s
        own = bool(error.args)
        session.fail(
            config, Failure.of("run", error) if own else Failure("timeout", f"a run took more than {limit:g} s")
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        session.fail(config, Failure.of("run", error))
    return None


def _warm_up(
    session: _Session, runner: _Runner, order: Sequence[Any], check: Callable[[Any, Any], str | None] | None
) -> None:
    """Runs every config once and checks its output against that of the first that runs: the default, if it does."""
    reference = None
    for config in [c for c in order if c in session.compiled]:
        output = _run_step(session, runner, config, lambda config=config: (session.compiled[config].run(),))
        if output is None or check is None:
            continue
        if reference is None:
            reference = output
        elif (failure := _checked(check, output[0], reference[0])) is not None:
            session.fail(config, failure)


def _checked(check: Callable[[Any, Any], str | None], output: Any, reference: Any) -> Failure | None:
    try:
        reason = check(output, reference)
    except Exception as error:
        return Failure.of("check", error)
    return None if reason is None else Failure("check", reason)


def _measure(
    session: _Session, runner: _Runner, timer: timing.Timer, bound_args: Any, default: Any, rounds: int
) -> None:
    """Measures in interleaved rounds; clear losers stop early, finalists get as many rounds again."""

    def sample(config: Any) -> list[float]:
        times = timer(session.compiled[config].run, bound_args=bound_args, config=config, rounds=1)
        return [float(ms) for ms in times]

    def one_round(configs: Sequence[Any], number: int) -> None:
        for config in search.shuffled(configs, number):
            samples = _run_step(session, runner, config, functools.partial(sample, config))
            if samples is None:
                continue
            if len(samples) == 1 and math.isfinite(samples[0]) and samples[0] >= 0:
                session.samples.setdefault(config, []).append(samples[0])
            else:
                session.fail(config, Failure("run", f"the timer must return one time in ms, got {samples}"))

    def keep(configs: Sequence[Any]) -> list[Any]:
        for config in [c for c in session.samples if c in session.compiled and c not in configs]:
            session.finish(config)
        return [c for c in configs if c in session.compiled]

    one_round(list(session.compiled), 0)
    alive = list(session.compiled)
    number = 1
    while alive:
        ratio = search.FIRST_ROUND_RATIO if number == 1 else search.LOSER_RATIO
        alive = keep(search.survivors({c: session.samples[c] for c in alive}, default, ratio))
        slowest = max((statistics.median(session.samples[c]) for c in alive), default=0.0)
        if number >= search.affordable_rounds(slowest, rounds, _ROUND_BUDGET_MS):
            break
        one_round(alive, number)
        alive = [c for c in alive if c in session.compiled]
        number += 1
    alive = keep(search.finalists({c: session.samples[c] for c in alive}, default)) if alive else []
    if len(alive) > 1:
        for extra in range(number):
            one_round(alive, number + extra)
            alive = [c for c in alive if c in session.compiled]
    for config in alive:
        session.finish(config)


def tune(
    configs: Sequence[Any],
    *,
    default: Any,
    build: Callable[[Any], Compiled],
    timer: timing.Timer = timing.wall_clock_min,
    bound_args: Any = None,
    check: Callable[[Any, Any], str | None] | None = None,
    rounds: int = 5,
    max_workers: int | None = None,
    timeout_s: float = 60.0,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> TuningRun:
    """Measures every config at least once, or records why it cannot be.

    Args:
      configs: the candidates; the default is added if it is not among them.
      default: the default config.
      build: compiles a config; called in threads.
      timer: times a compiled config.
      bound_args: handed to the timer.
      check: `check(output, default's output)` returns None or what is wrong; None for no check.
      rounds: interleaved rounds, and again as many among the finalists.
      max_workers: how many configs compile at the same time; None for one per core.
      timeout_s: limit for compiling one config, and for each of its runs.
      on_event: called once per finished config.
      stop: when set, the tuning ends with what was measured.

    Returns:
      The outcomes. Ctrl-C ends the tuning and returns those so far.
    """
    order = [default, *(c for c in dict.fromkeys(configs) if c != default)]
    session = _Session(len(order), on_event, stop)
    runner = _Runner(timeout_s)
    interrupted = False
    try:
        _compile_all(session, order, build, max_workers or devices.usable_cores(), timeout_s)
        _warm_up(session, runner, order, check)
        _measure(session, runner, timer, bound_args, default, rounds)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        runner.close()
    for config in [c for c in session.samples if c in session.compiled]:
        session.finish(config)
    return TuningRun({c: session.outcomes[c] for c in order if c in session.outcomes}, interrupted)
