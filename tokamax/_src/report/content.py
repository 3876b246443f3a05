"""What a report shows, as plain JSON data: the page and its figures are made from nothing else."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, Literal

from tokamax._src import explanation
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.autotuning.result import AutotuningResult, Entry
from tokamax._src.report import judged
from tokamax._src.report.sweeps import Sweep, by_knobs, by_shape, sweeps

OPS_DRAWN = 8
"""How many ops (on one device each) have figures: those whose defaults lose most."""

REASONS_SHOWN = 40

HeldOut = Literal["auto", "yes", "no"]


def content(
    result: AutotuningResult,
    told: explanation.Explanation | None,
    *,
    title: str,
    held_out: HeldOut = "auto",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Returns what the page shows.

    Args:
      result: what was measured.
      told: which configs the calls of interest run with; None to leave that out.
      title: the heading.
      held_out: whether cost models are fitted on folds and judged; `auto` does so for few measurements.
      say: told what takes a while.
    """
    summary = result.summary()
    found = sweeps(result.entries)
    rows = sum(len(times) for sweep in found[:OPS_DRAWN] for times in sweep.times_ms)
    judges = held_out == "yes" or (held_out == "auto" and rows <= judged.ROWS_JUDGED)
    drawn = []
    for sweep in found[:OPS_DRAWN]:
        if judges:
            say(f"fitting models of {sweep.op} on held-out shapes")
        with result:
            drawn.append(_overview(sweep) | _details(sweep, judges))
    return {
        "title": title,
        "total": summary.total(),
        "totals": summary.to_dict()["totals"],
        "device_kinds": sorted({entry.device_kind for entry in result.entries}),
        "coverage": None if told is None else told.to_dict(),
        "ops": [*drawn, *map(_overview, found[OPS_DRAWN:])],
        "failures": failures(result.entries),
        "untunable": [
            {"op": e.bound_args.op.registered_name(), "arguments": e.bound_args.shown_arguments, "error": e.error}
            for e in result.entries
            if e.error is not None
        ],
        "environment": environments(result.entries),
    }


def _overview(sweep: Sweep) -> dict[str, Any]:
    speedups = sorted(e.speedup for e in sweep.entries if e.speedup)
    return {
        "op": sweep.op,
        "device_kind": sweep.device_kind,
        "shapes": len(sweep.entries),
        "configs": sum(map(len, sweep.times_ms)),
        "speedup": sweep.gain if speedups else None,
        "largest_speedup": speedups[-1] if speedups else None,
    }


def _details(sweep: Sweep, judges: bool) -> dict[str, Any]:
    return {"times": by_shape(sweep), "knobs": by_knobs(sweep), "model": judged.judge(sweep, held_out=judges)}


def failures(entries: Iterable[Entry]) -> dict[str, Any]:
    """Returns how many configs failed, by stage, and by op, stage and reason, the most frequent first."""
    count = collections.Counter(
        (entry.bound_args.op.registered_name(), outcome.stage, outcome.reason)
        for entry in entries
        for outcome in entry.outcomes.values()
        if isinstance(outcome, Failure)
    )
    stages: collections.Counter[str] = collections.Counter()
    for (_, stage, _), number in count.items():
        stages[stage] += number
    first = count.most_common(REASONS_SHOWN)
    return {
        "stages": dict(stages.most_common()),
        "reasons": [{"op": op, "stage": stage, "reason": why, "configs": n} for (op, stage, why), n in first],
        "further_reasons": len(count) - len(first),
    }


def environments(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Returns, for each part of the environments, its values and how many entries have each; days for times."""
    found: dict[str, collections.Counter[str]] = {}
    for entry in entries:
        parts = {"device": entry.device_kind, **entry.environment}
        if "time" in parts:
            parts["time"] = str(parts["time"])[:10]
        for name, value in parts.items():
            found.setdefault(name, collections.Counter())[str(value)] += 1
    return {name: dict(counter.most_common()) for name, counter in found.items()}
