"""Which configs a program runs with, and why: what `tokamax.explain` shows."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from tokamax._src import devices, dispatch, errors, notation
from tokamax._src.autotuning.result import describe_config
from tokamax._src.bound_arguments import BoundArguments, ConfigChoice
from tokamax._src.op import NullConfig
from tokamax._src.tables import Report

_MEASURED = ("exact", "tuned", "pinned")
"""Sources that no measurement can improve on."""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """What `explain` found: per op call, the config it runs with and where that came from.

    Attributes:
      rows: pairs of bound arguments and the choice, or the error that dispatch would raise.
      device_kind: the device.
      command: what measures every call that has no measured config.
    """

    rows: tuple[tuple[BoundArguments, ConfigChoice | errors.TokamaxError], ...]
    device_kind: str
    command: str = f"{dispatch.HOW_TO_TUNE}, then result.save_to_cache()"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: one item per op call, and totals by source.

        `spread` is the disagreement of the model's members about the logarithm of the slowdown. `share_of_time` counts
        the calls whose time in a profile is known.
        """
        return {"device_kind": self.device_kind, "ops": [*map(self._item, self.rows)], "totals": self._totals()}

    def _item(self, row: tuple[BoundArguments, ConfigChoice | errors.TokamaxError]) -> dict[str, Any]:
        ba, choice = row
        item: dict[str, Any] = {"op": ba.op.registered_name(), "arguments": repr(ba)}
        if ba.usage is not None:
            item |= dataclasses.asdict(ba.usage)
        if isinstance(choice, ConfigChoice):
            item |= {"config": describe_config(choice.config), "source": choice.source, "detail": choice.detail}
            item |= {"expected_slowdown": choice.expected_slowdown, "spread": choice.spread, "nearest": choice.nearest}
            item |= {"environment": None if choice.environment is None else dict(choice.environment)}
        else:
            item |= {"source": "error", "error": str(choice)}
        return item | {"to_make_exact": None if _is_settled(ba, choice) else self._how_to_measure(ba)}

    def _how_to_measure(self, ba: BoundArguments) -> str:
        return notation.tune_command(ba) or self.command

    def _totals(self) -> dict[str, dict[str, Any]]:
        calls: collections.Counter[str] = collections.Counter()
        times: dict[str, float] = collections.defaultdict(float)
        for ba, choice in self.rows:
            calls[_source(choice)] += 1
            times[_source(choice)] += ba.usage.time_ms if ba.usage else 0.0
        whole = sum(times.values())
        return {
            source: {
                "calls": number,
                "share_of_calls": number / len(self.rows),
                "share_of_time": times[source] / whole if whole else None,
            }
            for source, number in sorted(calls.items())
        }

    def table(self) -> list[tuple[str, ...]]:
        """See `Report`."""
        whole = sum(ba.usage.time_ms for ba, _ in self.rows if ba.usage)
        rows = [("op", "arguments", "config", "source", "expected loss", *(["time"] if whole else []), "detail")]
        for ba, choice in self.rows:
            shares = [_share(ba.usage.time_ms / whole) if ba.usage else "-"] if whole else []
            if isinstance(choice, ConfigChoice):
                config, loss, detail = describe_config(choice.config), _loss(choice), choice.detail + _when(choice)
            else:
                config, loss, detail = "-", "-", str(choice)
            rows.append((ba.op.registered_name(), ba.shown_arguments, config, _source(choice), loss, *shares, detail))
        return rows

    def total(self) -> str:
        """See `Report`."""
        parts = []
        for source, found in self._totals().items():
            time = "" if found["share_of_time"] is None else f", {_share(found['share_of_time'])} of their time"
            parts.append(f"{found['calls']} {source} ({_share(found['share_of_calls'])} of the calls{time})")
        text = f"{', '.join(parts) or 'no op calls'} on {self.device_kind}"
        left = [ba for ba, choice in self.rows if not _is_settled(ba, choice)]
        if not left:
            return text
        command = self._how_to_measure(left[0]) if len(left) == 1 else self.command
        return f"{text}\nto measure {'that' if len(self.rows) == 1 else f'the other {len(left)}'}: {command}"


def _source(choice: ConfigChoice | errors.TokamaxError) -> str:
    return choice.source if isinstance(choice, ConfigChoice) else "error"


def _is_settled(ba: BoundArguments, choice: ConfigChoice | errors.TokamaxError) -> bool:
    return _source(choice) in _MEASURED or ba.op.config_cls is NullConfig


def _loss(choice: ConfigChoice) -> str:
    if choice.expected_slowdown is None or math.isnan(choice.expected_slowdown):
        return "-"
    spread = "" if choice.spread is None else f" ± {100 * math.expm1(choice.spread):.1f}"
    return f"{100 * (choice.expected_slowdown - 1):.1f}{spread} %"


def _when(choice: ConfigChoice) -> str:
    """Returns when and by which timer a config was measured, as far as that is recorded, in words."""
    about = choice.environment or {}
    time, timer = str(about.get("time", ""))[:10], about.get("timer")
    return (f", on {time}" if time else "") + (f", by {timer}" if timer else "")


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def explain(targets: Iterable[BoundArguments]) -> Explanation:
    """Says for each of some bound arguments which config it would run with here and now, and why."""
    rows: list[tuple[BoundArguments, ConfigChoice | errors.TokamaxError]] = []
    for ba in targets:
        try:
            rows.append((ba, ba.choose_config()))
        except errors.TokamaxError as error:
            rows.append((ba, error))
    return Explanation(tuple(rows), devices.device_kind())
