"""Measured sweeps of one op on one device, as a report shows them: times by shape, and slowdowns by pair of knobs.

Slowdown is the time of a config over that of the fastest config of the same shape and session, 1 at best.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import shapes
from tokamax._src.autotuning.result import Entry, describe_config
from tokamax._src.benchmarking import BenchmarkData
from tokamax._src.bound_arguments import BoundArguments, config_order
from tokamax._src.costmodel.features import config_fields

SHAPES_DRAWN = 12
"""How many shapes of an op its figure shows: those whose default loses most."""

CONFIGS_DRAWN = 60
"""How many configs of a shape its figure shows, evenly by rank."""

PAIRS_DRAWN = 3
"""How many pairs of knobs have a heat map: those that tell most."""

VALUES_DRAWN = 9
"""How many values of a knob a heat map shows: those measured most."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """Entries of one op on one device, of which each has a config that ran; those whose default loses most first.

    Attributes:
      op: name of the op.
      device_kind: the device.
      entries: one per shape.
    """

    op: str
    device_kind: str
    entries: tuple[Entry, ...]

    @functools.cached_property
    def times_ms(self) -> tuple[Mapping[Any, float], ...]:
        """For each entry, the median time of each config that ran."""
        return tuple(map(_medians, self.entries))

    @property
    def gain(self) -> float:
        """Geometric mean of default time / chosen time, over the shapes where both are known."""
        gains = [math.log(e.speedup) for e in self.entries if e.speedup]
        return math.exp(sum(gains) / len(gains)) if gains else 1.0


def _medians(entry: Entry) -> dict[Any, float]:
    # A clock that says 0 ms says nothing about ratios.
    found = {c: o.median_ms for c, o in entry.outcomes.items() if isinstance(o, BenchmarkData)}
    return {config: ms for config, ms in found.items() if ms > 0}


def sweeps(entries: Iterable[Entry]) -> list[Sweep]:
    """Groups entries by op and device, those with the largest gain first."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if any(isinstance(o, BenchmarkData) and o.median_ms > 0 for o in entry.outcomes.values()):
            groups.setdefault((entry.bound_args.op.registered_name(), entry.device_kind), []).append(entry)
    found = [
        Sweep(op, kind, tuple(sorted(group, key=lambda e: (-(e.speedup or 0.0), e.key))))
        for (op, kind), group in groups.items()
    ]
    return sorted(found, key=lambda sweep: (-sweep.gain, sweep.op, sweep.device_kind))


def labels(bound: Sequence[BoundArguments]) -> list[str]:
    """Names bound arguments of one op shortly: what all have in common is left out, and each array stands once."""
    texts = [ba.argument_texts for ba in bound]
    common = set.intersection(*(set(t.items()) for t in texts)) if len(texts) > 1 else set()
    return [_label(ba, common) for ba in bound]


def _label(ba: BoundArguments, common: set[tuple[str, str]]) -> str:
    parts = [
        text if isinstance(ba.abstract[name], (shapes.ArraySpec, tuple, list)) else f"{name}={text}"
        for name, text in ba.argument_texts.items()
        if (name, text) not in common
    ]
    return " ".join(dict.fromkeys(parts)) or ba.shown_arguments


def by_shape(sweep: Sweep) -> list[dict[str, Any]]:
    """Returns, for each shape, its times as plain data; the first `SHAPES_DRAWN` with the slowdowns to draw."""
    rows = []
    names = labels([entry.bound_args for entry in sweep.entries])
    for number, (entry, times, label) in enumerate(zip(sweep.entries, sweep.times_ms, names, strict=True)):
        fastest = min(times, key=lambda config: (times[config], config_order(config)))
        row: dict[str, Any] = {
            "label": label,
            "arguments": entry.bound_args.shown_arguments,
            "measured": len(times),
            "failed": len(entry.outcomes) - len(times),
        }
        for name, config in (("default", entry.default), ("chosen", entry.best), ("fastest", fastest)):
            row[name] = describe_config(config) if config in times else None
            row[f"{name}_ms"] = times.get(config)
        if number < SHAPES_DRAWN:
            row["slowdowns"] = evenly(sorted(ms / times[fastest] for ms in times.values()), CONFIGS_DRAWN)
        rows.append(row)
    return rows


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Returns at most that many items, evenly by place, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, count).round().astype(int)]


def by_knobs(sweep: Sweep) -> list[dict[str, Any]]:
    """Returns the heat maps of the pairs of knobs whose cells differ most, as plain data.

    A cell is the geometric mean, over the shapes that have such configs, of the least slowdown among them.
    """
    fields = [[config_fields(config) for config in times] for times in sweep.times_ms]
    shape = np.repeat(np.arange(len(fields)), [len(f) for f in fields])
    logs = np.concatenate([np.log(list(times.values())) for times in sweep.times_ms])
    logs -= np.repeat([math.log(min(times.values())) for times in sweep.times_ms], [len(f) for f in fields])
    table = {name: [f[name] for one in fields for f in one] for name in fields[0][0]}
    knobs = {name: _codes(values) for name, values in table.items()}
    knobs = {name: found for name, found in knobs.items() if len(found[0]) > 1}
    maps = [_heat_map(a, b, knobs, shape, logs) for a, b in itertools.combinations(knobs, 2)]
    return sorted(maps, key=lambda found: (-_contrast(found), found["knobs"]))[:PAIRS_DRAWN]


def _codes(values: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Returns the values to show, in order, and the index of each given one among them, -1 for the others."""
    order = {value: config_order(value) for value in dict.fromkeys(values)}
    counts = dict.fromkeys(order, 0)
    for value in values:
        counts[value] += 1
    kept = sorted(sorted(order, key=lambda v: (-counts[v], order[v]))[:VALUES_DRAWN], key=lambda v: order[v])
    index = {value: i for i, value in enumerate(kept)}
    return kept, np.array([index.get(value, -1) for value in values])


def _heat_map(a: str, b: str, knobs: Mapping[str, Any], shape: np.ndarray, logs: np.ndarray) -> dict[str, Any]:
    (rows, row), (columns, column) = knobs[a], knobs[b]
    shown = (row >= 0) & (column >= 0)
    least = np.full((shape[-1] + 1, len(rows), len(columns)), np.inf)
    np.minimum.at(least, (shape[shown], row[shown], column[shown]), logs[shown])
    has = np.isfinite(least)
    count = has.sum(axis=0)
    mean = np.where(has, least, 0.0).sum(axis=0) / np.maximum(count, 1)
    slowdown = [
        [math.exp(m) if n else None for m, n in zip(means, counts, strict=True)]
        for means, counts in zip(mean.tolist(), count.tolist(), strict=True)
    ]
    texts = ([_value_text(v) for v in values] for values in (rows, columns))
    return {"knobs": [a, b], **dict(zip(("rows", "columns"), texts, strict=True))} | {
        "slowdown": slowdown,
        "shapes": count.tolist(),
    }


def _value_text(value: Any) -> str:
    return str(getattr(value, "name", value))


def _contrast(heat_map: Mapping[str, Any]) -> float:
    """How much the cells differ: the spread of log(slowdown), each cell weighed by its shapes."""
    cells = [
        (math.log(value), weight)
        for values, weights in zip(heat_map["slowdown"], heat_map["shapes"], strict=True)
        for value, weight in zip(values, weights, strict=True)
        if value is not None
    ]
    logs, weights = np.array(cells).T
    mean = np.average(logs, weights=weights)
    return float(np.average((logs - mean) ** 2, weights=weights))
