"""The state of one tuning: what is compiled, sampled and finished so far, and who is told of it."""

import dataclasses
import math
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokamax._src.autotuning.outcome import Failure, Outcome
from tokamax._src.benchmarking import BenchmarkData, Compiled


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


class NoJournal:
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


class Session:
    """The state of one tuning: what is compiled, sampled and finished so far, and who is told of it."""

    def __init__(
        self,
        order: Sequence[Any],
        total: int,
        on_event: Callable[[Event], None] | None,
        stop: threading.Event | None,
        journal: Journal,
        drop: Callable[[Any], None],
    ):
        self.outcomes: dict[Any, Outcome] = {c: journal.failures[c] for c in order if c in journal.failures}
        self.compiled: dict[Any, Compiled] = {}
        self.samples: dict[Any, list[float]] = {}
        self.confirmed: set[tuple[Any, int]] = set()
        """Config and number of the samples that were taken again since they seemed too short."""
        self.gate_has_begun = False
        self.gate_is_ready = False
        """Whether the gate is prepared and the default went through it, if it could."""
        self._facts: dict[Any, Compiled | BenchmarkData] = {}
        for config in order:
            if config in journal.samples and config not in self.outcomes:
                self._facts[config] = journal.samples[config]
                self.samples[config] = list(journal.samples[config].samples_ms)
        self._through_compiling = len(self.outcomes) + len(self.samples)
        self.programs: dict[str, list[Any]] = {}
        """The configs that were compiled, by the program that they are."""
        self._total, self._on_event, self._stop = total, on_event, stop
        self._journal, self._drop = journal, drop

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
        if compiled.program is not None and config not in self._facts:
            self.programs.setdefault(compiled.program, []).append(config)
        self._through_compiling += config not in self._facts
        self._facts[config] = compiled
        self._tell(config, None)

    def built(self, config: Any, found: Compiled | Failure) -> None:
        """Notes how the building of a config ended."""
        if isinstance(found, Failure):
            self.fail(config, found)
        else:
            self.add_compiled(config, found)

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
        if self.samples.get(config):
            failure = dataclasses.replace(failure, measured_ms=tuple(self.samples[config]))
        self._journal.failed(config, failure)
        self._through_compiling += config not in self._facts
        self._let_go(config)
        self.samples.pop(config, None)
        self.outcomes[config] = failure
        self._tell(config, failure)

    def finish(self, config: Any) -> None:
        """Ends a config with its samples and drops its executable."""
        self._let_go(config)
        facts = self._facts[config]
        outcome = BenchmarkData(
            tuple(self.samples[config]), facts.compile_ms, facts.lowering_ms, facts.peak_memory_bytes
        )
        self.outcomes[config] = outcome
        self._tell(config, outcome)

    def _let_go(self, config: Any) -> None:
        """Drops an executable: those of a large space would fill the device's memory."""
        if self.compiled.pop(config, None) is not None:
            self._drop(config)

    def open(self, configs: Sequence[Any]) -> list[Any]:
        """Returns those of some configs that are not finished."""
        return [c for c in configs if c not in self.outcomes]

    def first_times(self) -> dict[Any, float]:
        """Returns the time in ms by which each tried config is known so far; nan for failures."""
        failed = {c: math.nan for c, o in self.outcomes.items() if isinstance(o, Failure)}
        return failed | {c: statistics.median(s) for c, s in self.samples.items()}
