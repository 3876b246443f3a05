"""Evaluates candidates under limits. Knows callables, not ops.

Phases: compile all in parallel, the default first -> run each once, or through a gate that judges its output (warm-up,
never counted) -> interleaved rounds, one sample each, in which clear losers stop early -> further rounds among
the finalists and the default. Nothing is measured while something compiles. A guided tuning takes the first steps batch
by batch: each batch is compiled, run and sampled once before the next is proposed.

Whatever is found is told to a journal at once. A tuning that is given what an earlier one noted there goes on from it:
a config is compiled again only if it needs more samples.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokamax._src import devices, timing
from tokamax._src.autotuning import search
from tokamax._src.autotuning.outcome import Failure, Outcome
from tokamax._src.benchmarking import BenchmarkData, Compiled

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


class Journal(Protocol):
    """Where a tuning notes what it finds, as it goes, and reads what an earlier one noted."""

    @property
    def samples(self) -> Mapping[Any, BenchmarkData]:
        """Configs that were measured before."""
        ...

    @property
    def failures(self) -> Mapping[Any, Failure]:
        """Configs that failed before."""
        ...

    def runs(self, config: Any) -> None:
        """Notes that a config is about to run for the first time in this process."""
        ...

    def compiled(self, config: Any, compiled: Compiled) -> None:
        """Notes that a config ran for the first time, and its compile time and memory."""
        ...

    def sampled(self, config: Any, sample_ms: float) -> None:
        """Notes one sample."""
        ...

    def sampled_again(self, config: Any, sample_ms: float) -> None:
        """Notes what counts in place of the last sample."""
        ...

    def failed(self, config: Any, failure: Failure) -> None:
        """Notes a failure."""
        ...


class Gate(Protocol):
    """Judges outputs. Its steps run through `limited`, which holds them to the limit of a run."""

    def prepare(self, limited: Callable[[Callable[[], Any]], Any]) -> None:
        """Makes what outputs are compared with; called once, before any config runs."""
        ...

    def try_out(self, config: Any, run: Callable[[], Any], limited: Callable[[Callable[[], Any]], Any]) -> str | None:
        """Runs a config for the first time and returns what is wrong with its output, None if nothing is."""
        ...


class _NoJournal:
    """Notes nothing."""

    samples: Mapping[Any, BenchmarkData] = {}
    failures: Mapping[Any, Failure] = {}

    def runs(self, config: Any) -> None:
        pass

    def compiled(self, config: Any, compiled: Compiled) -> None:
        pass

    def sampled(self, config: Any, sample_ms: float) -> None:
        pass

    def sampled_again(self, config: Any, sample_ms: float) -> None:
        pass

    def failed(self, config: Any, failure: Failure) -> None:
        pass


class _Runner:
    """Runs steps one at a time in a thread that is given up when a step exceeds its limit, or at a stop."""

    def __init__(self, timeout_s: float, check_stop: Callable[[], None]):
        self.timeout_s = timeout_s
        self._check_stop = check_stop
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
                self._check_stop()
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

    def __init__(
        self,
        order: Sequence[Any],
        total: int,
        on_event: Callable[[Event], None] | None,
        stop: threading.Event | None,
        journal: Journal,
    ):
        self.outcomes: dict[Any, Outcome] = {c: journal.failures[c] for c in order if c in journal.failures}
        self.compiled: dict[Any, Compiled] = {}
        self.samples: dict[Any, list[float]] = {}
        self.confirmed: set[tuple[Any, int]] = set()
        """Config and number of the samples that were taken again since they seemed too short."""
        self.gate_is_ready = False
        """Whether the gate is prepared and the default went through it, if it could."""
        self._facts: dict[Any, Compiled | BenchmarkData] = {}
        for config in order:
            if config in journal.samples and config not in self.outcomes:
                self._facts[config] = journal.samples[config]
                self.samples[config] = list(journal.samples[config].samples_ms)
        self._through_compiling = len(self.outcomes) + len(self.samples)
        self._total, self._on_event, self._stop, self._journal = total, on_event, stop, journal

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
        self._through_compiling += config not in self._facts
        self._facts[config] = compiled
        self._tell(config, None)

    def runs(self, config: Any) -> None:
        """Notes that a compiled config is about to run for the first time."""
        self._journal.runs(config)

    def ran(self, config: Any) -> None:
        """Notes that it did, with the right output."""
        self._journal.compiled(config, self.compiled[config])

    def sample(self, config: Any, sample_ms: float) -> None:
        """Notes a sample."""
        self._journal.sampled(config, sample_ms)
        self.samples.setdefault(config, []).append(sample_ms)

    def sample_again(self, config: Any, sample_ms: float) -> None:
        """Notes a sample that confirms the last one or not: the longer of the two counts."""
        self.confirmed.add((config, len(self.samples[config])))
        if sample_ms > self.samples[config][-1]:
            self._journal.sampled_again(config, sample_ms)
            self.samples[config][-1] = sample_ms

    def fail(self, config: Any, failure: Failure) -> None:
        """Ends a config with a failure; samples it may have are kept with it, and count no more."""
        if config in self.samples:
            failure = dataclasses.replace(failure, measured_ms=tuple(self.samples[config]))
        self._journal.failed(config, failure)
        self._through_compiling += config not in self._facts
        self.compiled.pop(config, None)
        self.samples.pop(config, None)
        self.outcomes[config] = failure
        self._tell(config, failure)

    def finish(self, config: Any) -> None:
        """Ends a config with its samples and drops its executable."""
        self.compiled.pop(config, None)
        facts = self._facts[config]
        outcome = BenchmarkData(
            tuple(self.samples[config]), facts.compile_ms, facts.lowering_ms, facts.peak_memory_bytes
        )
        self.outcomes[config] = outcome
        self._tell(config, outcome)

    def open(self, configs: Sequence[Any]) -> list[Any]:
        """Returns those of some configs that are not finished."""
        return [c for c in configs if c not in self.outcomes]

    def first_times(self) -> dict[Any, float]:
        """Returns the time in ms by which each tried config is known so far; nan for failures."""
        failed = {c: math.nan for c, o in self.outcomes.items() if isinstance(o, Failure)}
        return failed | {c: statistics.median(s) for c, s in self.samples.items()}


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
    return _recorded(session, runner, config, functools.partial(runner.call, step))


def _recorded(session: _Session, runner: _Runner, config: Any, steps: Callable[[], Any]) -> Any:
    """Like `_run_step`, for what calls the runner itself."""
    session.check_stop()
    try:
        return steps()
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


def _warm_up(session: _Session, runner: _Runner, order: Sequence[Any], gate: Gate | None) -> None:
    """Runs every config for the first time; what the gate refuses has failed."""
    if gate is not None and not session.gate_is_ready and any(c in session.compiled for c in order):
        session.check_stop()
        session.gate_is_ready = True
        gate.prepare(runner.call)
    for config in [c for c in order if c in session.compiled]:
        session.check_stop()
        session.runs(config)
        run = session.compiled[config].run
        if gate is None:
            found = _run_step(session, runner, config, lambda run=run: (run(), None))
        else:
            try_out = functools.partial(gate.try_out, config, run, runner.call)
            found = _recorded(session, runner, config, lambda try_out=try_out: (None, try_out()))
        if found is None:
            continue
        if found[1] is not None:
            session.fail(config, Failure("check", found[1]))
        else:
            session.ran(config)


@dataclasses.dataclass(frozen=True)
class _Measurer:
    """Prepares and samples configs of one tuning.

    Attributes:
      prepare: compiles configs that are not, runs each once, and checks it.
      sample: takes one sample of a compiled config.
    """

    session: _Session
    runner: _Runner
    prepare: Callable[[Sequence[Any]], None]
    sample: Callable[[Any], list[float]]

    def round(self, configs: Sequence[Any], number: int) -> None:
        """Takes the sample of a round from each config that does not have it yet."""
        session = self.session
        todo = [c for c in session.open(configs) if len(session.samples.get(c, ())) <= number]
        self.prepare([c for c in todo if c not in session.compiled])
        for config in search.shuffled([c for c in todo if c in session.compiled], number):
            if (sample_ms := self._sample_of(config)) is not None:
                session.sample(config, sample_ms)
        self._confirm()

    def _confirm(self) -> None:
        """Takes samples that are too short to be true once more, before they make losers of others or win."""
        session = self.session
        known = {c: session.samples[c] for c in session.open(list(session.samples))}
        doubtful = [c for c in search.implausible(known) if (c, len(known[c])) not in session.confirmed]
        self.prepare([c for c in doubtful if c not in session.compiled])
        for config in [c for c in doubtful if c in session.compiled]:
            if (sample_ms := self._sample_of(config)) is not None:
                session.sample_again(config, sample_ms)

    def _sample_of(self, config: Any) -> float | None:
        """Returns one sample of a compiled config in ms; None, with the failure recorded, if it fails."""
        samples = _run_step(self.session, self.runner, config, functools.partial(self.sample, config))
        if samples is None:
            return None
        if len(samples) == 1 and math.isfinite(samples[0]) and samples[0] >= 0:
            return samples[0]
        self.session.fail(config, Failure("run", f"the timer must return one time in ms, got {samples}"))
        return None


def _measure(
    measurer: _Measurer, batches: Callable[[Mapping[Any, float]], Sequence[Any]], default: Any, rounds: int
) -> None:
    """Samples batches until none comes; then interleaved rounds, and as many again among the finalists.

    Clear losers stop early.
    """
    session = measurer.session

    def keep(configs: Sequence[Any]) -> list[Any]:
        for config in [c for c in session.open(list(session.samples)) if c not in configs]:
            session.finish(config)
        return session.open(configs)

    while batch := session.open([c for c in batches(session.first_times()) if c not in session.samples]):
        measurer.round(batch, 0)
    alive = session.open(list(session.samples))
    number = 1
    while alive:
        ratio = search.FIRST_ROUND_RATIO if number == 1 else search.LOSER_RATIO
        alive = keep(search.survivors({c: session.samples[c] for c in alive}, default, ratio))
        slowest = max((statistics.median(session.samples[c]) for c in alive), default=0.0)
        if number >= search.affordable_rounds(slowest, rounds, _ROUND_BUDGET_MS):
            break
        measurer.round(alive, number)
        alive = session.open(alive)
        number += 1
    alive = keep(search.finalists({c: session.samples[c] for c in alive}, default)) if alive else []
    if len(alive) > 1:
        for extra in range(number):
            measurer.round(alive, number + extra)
            alive = session.open(alive)
    for config in alive:
        session.finish(config)


def tune(
    configs: Sequence[Any],
    *,
    default: Any,
    build: Callable[[Any], Compiled],
    timer: timing.Timer = timing.wall_clock_min,
    bound_args: Any = None,
    gate: Gate | None = None,
    rounds: int = 5,
    max_workers: int | None = None,
    timeout_s: float = 60.0,
    propose: Callable[[Mapping[Any, float]], Sequence[Any]] | None = None,
    most: int | None = None,
    journal: Journal | None = None,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> TuningRun:
    """Measures every config at least once, or records why it cannot be; or only those that are proposed.

    Args:
      configs: the candidates; the default is added if it is not among them.
      default: the default config.
      build: compiles a config; called in threads.
      timer: times a compiled config.
      bound_args: handed to the timer.
      gate: judges the outputs; None for no check. The default is the first that it sees.
      rounds: interleaved rounds, and again as many among the finalists.
      max_workers: how many configs compile at the same time; None for one per core.
      timeout_s: limit for compiling one config, and for each of its runs.
      propose: for a guided tuning: given the time in ms of each config tried so far (nan for a failure), returns the
        configs to try next, none to end the search.
      most: how many configs a guided tuning may try; for the progress alone.
      journal: where findings are noted, and read that an earlier tuning noted.
      on_event: called once per finished config.
      stop: when set, the tuning ends with what was measured.

    Returns:
      The outcomes. Ctrl-C ends the tuning and returns those so far.
    """
    order = [default, *(c for c in dict.fromkeys(configs) if c != default)]
    session = _Session(order, most or len(order), on_event, stop, journal or _NoJournal())
    runner = _Runner(timeout_s, session.check_stop)
    workers = max_workers or devices.usable_cores()

    def prepare(todo: Sequence[Any]) -> None:
        # The default's output must be there before anything is compared with it.
        missing = gate is not None and not session.gate_is_ready and default not in todo
        first = [default] if missing and todo and session.open([default]) else []
        todo = [*first, *todo]
        _compile_all(session, todo, build, workers, timeout_s)
        _warm_up(session, runner, todo, gate)

    def sample(config: Any) -> list[float]:
        times = timer(session.compiled[config].run, bound_args=bound_args, config=config, rounds=1)
        return [float(ms) for ms in times]

    def all_at_once(tried: Mapping[Any, float]) -> Sequence[Any]:
        return [c for c in order if c not in tried]

    interrupted = False
    try:
        _measure(_Measurer(session, runner, prepare, sample), propose or all_at_once, default, rounds)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        runner.close()
    for config in session.open(list(session.samples)):
        session.finish(config)
    return TuningRun({c: session.outcomes[c] for c in order if c in session.outcomes}, interrupted)
