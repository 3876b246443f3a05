"""The journal of one tuning: every finding on disk at once, so that a killed process loses one measurement.

One file of JSON lines per tuning, found by its name, see `store`. The first line says what is tuned and how, for
readers; a file of another version is begun anew. Then come, in the order of events, `runs` (a config is about to run
for the first time in this process), `ran` (it did; its compile time and memory), `sample`, `again` (what counts in
place of the last sample) and `failed`. Lines reach the operating system at once, which a kill of the process does not
undo, and the disk about once a second.

A config during whose first run the process died is tried once more; if the process dies again, it has failed. One that
exceeded a limit is tried once more under a larger one, and goes on from its samples.
"""

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import IO, Any

import filelock

from tokamax._src import errors, serialization
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.benchmarking import BenchmarkData, Compiled

_SCHEMA = "tokamax-journal"
_VERSION = 1
_SYNC_S = 1.0
_DEATHS = 2
"""Deaths of the process during a config's first run that make it a failure."""


class Journal:
    """What one tuning found so far. Open it with `Journal.open`, and end with `close` or `discard`.

    Args:
      path: the file.
      config_cls: class of the configs.
      about: what is tuned and how, JSON data.
      resume: whether to go on with what is there.
      limit_s: the limit under which configs are measured now.
      lock: the lock of the file, held; the journal releases it.
    """

    def __init__(
        self,
        path: pathlib.Path,
        config_cls: type,
        about: Mapping[str, Any],
        *,
        resume: bool,
        limit_s: float,
        lock: filelock.FileLock,
    ):
        self.path = path
        self.samples: dict[Any, BenchmarkData] = {}
        self.failures: dict[Any, Failure] = {}
        self._config_cls, self._limit_s, self._lock = config_cls, limit_s, lock
        head = serialization.dumps({"schema": _SCHEMA, "version": _VERSION, "about": dict(about)})
        lines = _lines(path) if resume else []
        known = bool(lines) and not _is_of_another_version(lines[0])
        self._file: IO[str] | None = open(path, "a" if known else "w", encoding="utf-8")
        self._synced = 0.0
        # The last line may have been cut short; it must not swallow the next one.
        self._write("" if known else head)
        for config, deaths in self._read(lines if known else []).items():
            if deaths >= _DEATHS:
                self.failed(config, Failure("run", f"the process died {deaths} times during its first run"))

    @classmethod
    def open(
        cls,
        path: pathlib.Path,
        config_cls: type,
        about: Mapping[str, Any],
        *,
        resume: bool = True,
        limit_s: float = math.inf,
    ) -> "Journal | None":
        """Opens the journal of a tuning; None if another process is writing it, or if the folder cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path.with_name(path.name + ".lock"), thread_local=False)
            lock.acquire(timeout=0)
        except (OSError, filelock.Timeout):
            return None
        try:
            return cls(path, config_cls, about, resume=resume, limit_s=limit_s, lock=lock)
        except OSError:
            lock.release()
            return None

    def _read(self, lines: list[str]) -> dict[Any, int]:
        """Takes over what an earlier process noted; lines that make no sense are passed over.

        Returns:
          How often the process died during the first run of a config, for those that it did not survive later.
        """
        facts: dict[Any, BenchmarkData] = {}
        samples: dict[Any, list[float]] = {}
        deaths: dict[Any, int] = {}
        for line in lines:
            try:
                event, fields, *rest = serialization.loads(line)
                config = serialization.build_dataclass(self._config_cls, fields)
                if event == "runs":
                    deaths[config] = deaths.get(config, 0) + 1
                elif event == "ran":
                    deaths.pop(config, None)
                    self.failures.pop(config, None)  # It was tried again, under a larger limit.
                    facts[config] = BenchmarkData((0.0,), float(rest[0]), float(rest[1]), rest[2])
                elif event == "sample":
                    samples.setdefault(config, []).append(*BenchmarkData((rest[0],)).samples_ms)
                elif event == "again":
                    samples[config][-1:] = BenchmarkData((rest[0],)).samples_ms
                elif event == "failed":
                    deaths.pop(config, None)
                    stage, reason, measured, limit_s = rest
                    failure = Failure(stage, reason, tuple(map(float, measured)))
                    if stage != "timeout" or limit_s is None or float(limit_s) >= self._limit_s:
                        self.failures[config] = failure
            except (errors.TokamaxError, TypeError, ValueError, LookupError):
                continue
        for config, taken in samples.items():
            if config in facts and config not in self.failures:
                self.samples[config] = dataclasses.replace(facts[config], samples_ms=tuple(taken))
        return deaths

    def runs(self, config: Any) -> None:
        """See `autotuner.Journal`."""
        self._note("runs", config)

    def compiled(self, config: Any, compiled: Compiled) -> None:
        """See `autotuner.Journal`."""
        self._note("ran", config, compiled.compile_ms, compiled.lowering_ms, compiled.peak_memory_bytes)

    def sampled(self, config: Any, sample_ms: float) -> None:
        """See `autotuner.Journal`."""
        self._note("sample", config, sample_ms)

    def sampled_again(self, config: Any, sample_ms: float) -> None:
        """See `autotuner.Journal`."""
        self._note("again", config, sample_ms)

    def failed(self, config: Any, failure: Failure) -> None:
        """See `autotuner.Journal`."""
        self.failures[config] = failure
        limit_s = self._limit_s if math.isfinite(self._limit_s) else None
        self._note("failed", config, failure.stage, failure.reason, list(failure.measured_ms), limit_s)

    def _note(self, event: str, config: Any, *rest: Any) -> None:
        self._write(serialization.dumps([event, serialization.encode_fields(config), *rest]))

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
            if time.monotonic() - self._synced > _SYNC_S:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError:  # The disk is full, say: the tuning goes on without its journal.
            self._file = None

    def close(self) -> None:
        """Keeps the journal for a later tuning to go on with."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def discard(self) -> None:
        """Removes the journal: its tuning is complete, and kept elsewhere."""
        self.path.unlink(missing_ok=True)
        pathlib.Path(self._lock.lock_file).unlink(missing_ok=True)
        self.close()


def _is_of_another_version(head: str) -> bool:
    """Whether a first line says so; a damaged one costs that line."""
    try:
        data = serialization.loads(head)
    except errors.FormatError:
        return False
    return isinstance(data, dict) and (data.get("schema"), data.get("version")) != (_SCHEMA, _VERSION)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
