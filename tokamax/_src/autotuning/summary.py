"""What a tuning found, at a glance: what `AutotuningResult.summary` shows."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tokamax._src.tables import Report


@dataclasses.dataclass(frozen=True)
class Row:
    """One entry of a result.

    Attributes:
      op: the op's name.
      arguments: its bound arguments, in words.
      device_kind: where it was measured.
      config: the config to use, in words; None if nothing ran.
      default_ms: the median time of the default.
      best_ms: the median time of the config to use.
      measured: how many configs have a time.
      failed: stage -> how many configs failed there.
      error: why the op could not be tuned at all, else None.
      time: when it was measured.
      estimated_ms: the estimated time of the config to use, where nothing was measured.
    """

    op: str
    arguments: str
    device_kind: str
    config: str | None
    default_ms: float | None
    best_ms: float | None
    measured: int
    failed: Mapping[str, int]
    error: str | None
    time: str | None
    estimated_ms: float | None = None

    @property
    def speedup(self) -> float | None:
        """Default time over best time; None unless both were measured."""
        return self.default_ms / self.best_ms if self.default_ms is not None and self.best_ms else None


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(Report):
    """What a result holds: a row per entry, and totals.

    Attributes:
      rows: one per entry.
      models: (device kind, op name) of its cost models.
      unknown: how many entries of its file this process cannot understand.
    """

    rows: tuple[Row, ...]
    models: tuple[tuple[str, str], ...] = ()
    unknown: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: one item per entry, and totals."""
        items = [{**dataclasses.asdict(row), "failed": dict(row.failed), "speedup": row.speedup} for row in self.rows]
        return {
            "entries": items,
            "models": [{"device_kind": kind, "op": op} for kind, op in self.models],
            "unknown": self.unknown,
            "totals": self._totals(),
        }

    def _totals(self) -> dict[str, Any]:
        failed: collections.Counter[str] = collections.Counter()
        for row in self.rows:
            failed.update(row.failed)
        gains = [math.log(row.speedup) for row in self.rows if row.speedup]
        return {
            "entries": len(self.rows),
            "with_a_config": sum(row.config is not None for row in self.rows),
            "estimated": sum(row.estimated_ms is not None for row in self.rows),
            "configs_measured": sum(row.measured for row in self.rows),
            "configs_failed": dict(sorted(failed.items())),
            "geometric_mean_speedup": math.exp(sum(gains) / len(gains)) if gains else None,
        }

    def table(self) -> list[tuple[str, ...]]:
        """See `Report`."""
        rows = [("op", "arguments", "default", "best", "speed-up", "config", "measured", "failed")]
        for row in self.rows:
            config = row.config or row.error or "every config failed"
            counts = str(row.measured), str(sum(row.failed.values()))
            best = _ms(row.best_ms) if row.estimated_ms is None else f"~{_ms(row.estimated_ms)}"
            times = _ms(row.default_ms), best
            rows.append((row.op, row.arguments, *times, _ratio(row.speedup), config, *counts))
        return rows

    def total(self) -> str:
        """See `Report`."""
        totals = self._totals()
        kinds = ", ".join(dict.fromkeys(row.device_kind for row in self.rows)) or "no device"
        parts = [f"{_count(len(self.rows), 'entry', 'entries')} on {kinds}"]
        parts.append(f"{_count(totals['configs_measured'], 'config', 'configs')} measured")
        if totals["estimated"]:
            parts.append(f"{_count(totals['estimated'], 'time is', 'times are')} estimated (~)")
        if failed := totals["configs_failed"]:
            stages = ", ".join(f"{stage} {number}" for stage, number in failed.items())
            parts.append(f"{sum(failed.values())} failed ({stages})")
        if (gain := totals["geometric_mean_speedup"]) is not None:
            parts.append(f"speed-up {gain:.2f}x (geometric mean)")
        if self.models:
            parts.append(_count(len(self.models), "model", "models"))
        if self.unknown:
            parts.append(f"{self.unknown} not understood here")
        return ", ".join(parts)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} ms"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
