"""Evaluates candidates under limits. Knows callables, not ops.

Phases: compile all in parallel, the default first -> run each once, or through a gate that judges its output (warm-up,
never counted) -> interleaved rounds, one sample each, in which clear losers stop early -> further rounds among
the finalists and the default. Nothing is measured while something compiles. A guided tuning takes the first steps batch
by batch: each batch is compiled, run and sampled once before the next is proposed.

Whatever is found is told to a journal at once. A tuning that is given what an earlier one noted there goes on from it:
a config is compiled again only if it needs more samples.
"""

import dataclasses
import functools
import math
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokamax._src import devices, timing
from tokamax._src.autotuning import search
from tokamax._src.autotuning.gate import Limited
from tokamax._src.autotuning.limits import Build, Runner, build_all
from tokamax._src.autotuning.outcome import Failure, Outcome
from tokamax._src.autotuning.state import Event, Journal, NoJournal, Session

_ROUND_BUDGET_MS = 2_000.0
"""Time that the rounds of one config may take: slower configs get fewer rounds, at least two."""


@dataclasses.dataclass(frozen=True)
class TuningRun:
    """What a tuning found.

    Attributes:
      outcomes: config -> outcome; configs that an interruption left out are absent.
      interrupted: whether Ctrl-C or the stop event ended it early.
      same_programs: groups of configs that lowered to one program, as far as they were compiled now.
    """

    outcomes: dict[Any, Outcome]
    interrupted: bool
    same_programs: tuple[tuple[Any, ...], ...] = ()


class Gate(Protocol):
    """Judges outputs. Its steps run through `limited`, which holds them to the limit of their phase."""

    def begin(self) -> None:
        """Called once, before the first configs compile: what takes time may go on beside that."""
        ...

    def prepare(self, limited: Limited) -> None:
        """Makes what outputs are compared with; called once, before any config runs."""
        ...

    def try_out(self, config: Any, run: Callable[[], Any], limited: Limited) -> str | None:
        """Runs a config for the first time and returns what is wrong with its output, None if nothing is."""
        ...

    def measured(self, config: Any, run: Callable[[], Any], measure: Callable[..., Sequence[float]]) -> list[float]:
        """Returns what `measure(run)` does; raises `ConfigFailed` if an output on the way is wrong."""
        ...


def _run_step(session: Session, runner: Runner, config: Any, step: Callable[[], Any]) -> Any:
    """Runs a step of a config; returns None, with the failure recorded, if it raises or exceeds its limit."""
    return _recorded(session, config, functools.partial(runner.call, step))


def _recorded(session: Session, config: Any, steps: Callable[[], Any]) -> Any:
    """Like `_run_step`, for what holds its own limits."""
    session.check_stop()
    try:
        return steps()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        session.fail(config, Failure.of("run", error))
    return None


def _warm_up(session: Session, runner: Runner, order: Sequence[Any], gate: Gate | None) -> None:
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
            found = _recorded(session, config, lambda try_out=try_out: (None, try_out()))
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

    session: Session
    runner: Runner
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
    build: Build,
    timer: timing.Timer = timing.wall_clock_min,
    bound_args: Any = None,
    gate: Gate | None = None,
    rounds: int = 5,
    max_workers: int | None = None,
    timeout_s: float = 60.0,
    propose: Callable[[Mapping[Any, float]], Sequence[Any]] | None = None,
    most: int | None = None,
    journal: Journal | None = None,
    drop: Callable[[Any], None] = lambda config: None,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> TuningRun:
    """Measures every config at least once, or records why it cannot be; or only those that are proposed.

    Args:
      configs: the candidates; the default is added if it is not among them.
      default: the default config.
      build: compiles a config, see `limits.Build`; called in threads.
      timer: times a compiled config.
      bound_args: handed to the timer.
      gate: judges the outputs; None for no check. The default is the first that it sees.
      rounds: interleaved rounds, and again as many among the finalists.
      max_workers: how many configs compile at the same time; None for one per core.
      timeout_s: limit for tracing, for compiling and for checking a config, and for each of its runs.
      propose: for a guided tuning: given the time in ms of each config tried so far (nan for a failure), returns the
        configs to try next, none to end the search.
      most: how many configs a guided tuning may try; for the progress alone.
      journal: where findings are noted, and read that an earlier tuning noted.
      drop: called with a compiled config that is finished, whose executable is not needed any more.
      on_event: called once per finished config.
      stop: when set, the tuning ends with what was measured.

    Returns:
      The outcomes. Ctrl-C ends the tuning and returns those so far.
    """
    order = [default, *(c for c in dict.fromkeys(configs) if c != default)]
    session = Session(order, most or len(order), on_event, stop, journal or NoJournal(), drop)
    runner = Runner(timeout_s, session.check_stop)
    workers = max_workers or devices.usable_cores()

    def prepare(todo: Sequence[Any]) -> None:
        # The default's output must be there before anything is compared with it.
        missing = gate is not None and not session.gate_is_ready and default not in todo
        first = [default] if missing and todo and session.open([default]) else []
        todo = [*first, *todo]
        if gate is not None and todo and not session.gate_has_begun:
            session.gate_has_begun = True
            gate.begin()
        build_all(todo, build, workers, timeout_s, check_stop=session.check_stop, done=session.built)
        _warm_up(session, runner, todo, gate)

    def sample(config: Any) -> list[float]:
        run = session.compiled[config].run
        measure = functools.partial(timer, bound_args=bound_args, config=config, rounds=1)
        return [float(ms) for ms in (measure(run) if gate is None else gate.measured(config, run, measure))]

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
    same = tuple(tuple(configs) for configs in session.programs.values() if len(configs) > 1)
    return TuningRun({c: session.outcomes[c] for c in order if c in session.outcomes}, interrupted, same)
