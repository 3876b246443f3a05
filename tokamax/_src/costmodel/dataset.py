"""Training problems: one shape in one tuning session, with the time of each config."""

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import errors
from tokamax._src.costmodel import features

_LEAST_HALVED = 4
"""Samples of a config that can be split into two halves to compare."""
_POLISHES = 5


@dataclasses.dataclass(frozen=True)
class Problem:
    """One measured shape of an op.

    Attributes:
      op: registered name of the op.
      key: names the shape, dtypes and flags; equal for two sessions of the same bound op.
      group: names the bare shape. Problems of one group never stand on both sides of a split.
      arguments: name -> value; arrays are `ArraySpec`.
      configs: the candidates, dataclasses or dicts.
      times_ms: time of each config, `[configs]`; nan where it failed.
      default: index of the config that runs without tuning, if known.
      device_kind: the device that was measured.
      extra: the op's own features of each config, if it has any.
      complete: whether the whole space was tried, so that the best time is the best there is.
      tiles: config field -> dimension that it tiles, as far as the op names them.
      halves_ms: times by the even and by the odd samples alone, `[2, configs]`, where there are enough samples.
    """

    op: str
    key: str
    group: str
    arguments: Mapping[str, Any]
    configs: tuple[Any, ...]
    times_ms: np.ndarray
    default: int | None = None
    device_kind: str = ""
    extra: tuple[Mapping[str, float], ...] | None = None
    complete: bool = True
    halves_ms: np.ndarray | None = None
    tiles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        times = np.asarray(self.times_ms, dtype=np.float64)
        if times.shape != (len(self.configs),):
            raise errors.ArgumentError(
                f"times_ms must have one entry per config, got {times.shape} for {len(self.configs)} configs"
            )
        if np.any(times <= 0) or np.any(np.isinf(times)):
            raise errors.ArgumentError(f"times_ms of {self.key[:80]} must be positive and finite, or nan for a failure")
        if self.default is not None and not 0 <= self.default < len(self.configs):
            raise errors.ArgumentError(f"default must index one of {len(self.configs)} configs, got {self.default}")
        object.__setattr__(self, "times_ms", times)

    @property
    def works(self) -> np.ndarray:
        """Which configs ran, `[configs]`."""
        return ~np.isnan(self.times_ms)

    @property
    def best_ms(self) -> float:
        """The least time; nan if no config ran."""
        return float(np.nanmin(self.times_ms)) if self.works.any() else float("nan")

    @property
    def ceiling(self) -> float | None:
        """Mean efficiency of the config that half of the samples favour, judged by the other half.

        A chooser that knew every true time would score 1; a repeated measurement scores this. None where fewer than two
        configs have samples enough.
        """
        if self.halves_ms is None or np.isfinite(self.halves_ms).all(axis=0).sum() < 2:
            return None
        first, second = np.where(np.isfinite(self.halves_ms).all(axis=0), self.halves_ms, np.inf)
        pairs = ((first, second), (second, first))
        return float(np.mean([judge.min() / judge[chooser.argmin()] for chooser, judge in pairs]))

    @property
    def log_slowdown(self) -> np.ndarray:
        """log(time / best time), `[configs]`; nan where the config failed."""
        return np.log(self.times_ms / self.best_ms)


def shape_group(arguments: Mapping[str, Any]) -> str:
    """Names the bare shape: the distinct sizes of all array axes, without order, dtype or optional arrays.

    This is coarse on purpose: a transposed copy, or a copy with a mask of the same sizes, is no new shape.
    """
    sizes = set(features.dimensions(features.describe(arguments)).values()) - {1}
    return "x".join(map(str, sorted(sizes))) or "1"


def typical_ms(samples_ms: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the typical time of each config of one session, freed from what slowed whole rounds.

    Sample i of each config comes from round i of the session. By median polish (Tukey, Exploratory Data Analysis, 1977,
    ch. 11) log(sample) is split into an effect of the config and one of the round, whose median is zero.

    Args:
      samples_ms: positive samples of each config; configs that stopped early have fewer, failed ones none.

    Returns:
      float64 `[configs]`; nan for a config without samples.
    """
    rounds = max(map(len, samples_ms), default=0)
    logs = np.full((len(samples_ms), rounds), np.nan)
    for row, samples in zip(logs, samples_ms, strict=True):
        row[: len(samples)] = np.log(samples)
    logs = logs[:, ~np.isnan(logs).all(axis=0)]
    ran = ~np.isnan(logs).all(axis=1)
    times = np.full(len(logs), np.nan)
    if ran.any():
        logs, effect = logs[ran], np.zeros(logs.shape[1])
        for _ in range(_POLISHES):
            config = np.nanmedian(logs - effect, axis=1)
            effect = np.nanmedian(logs - config[:, None], axis=0)
            effect -= np.median(effect)
        times[ran] = np.exp(np.nanmedian(logs - effect, axis=1))
    return times


def problems_from_entries(entries: Iterable[Any]) -> list[Problem]:
    """Turns tuning entries into problems, one per entry: times of two sessions are never mixed.

    Entries with fewer than two configs that ran teach nothing about choosing and are left out.
    """
    problems = []
    for entry in entries:
        configs = tuple(entry.outcomes)
        samples = [getattr(entry.outcomes[c], "samples_ms", ()) for c in configs]
        samples = [s if len(s) and min(s) > 0 else () for s in samples]
        times = typical_ms(samples)
        if np.isfinite(times).sum() < 2:
            continue
        ba = entry.bound_args
        enough = [s if len(s) >= _LEAST_HALVED else () for s in samples]
        halves = [typical_ms([s[i::2] for s in enough]) for i in range(2)]
        problems.append(
            Problem(
                op=ba.op.registered_name(),
                key=ba.key,
                group=shape_group(ba.abstract),
                arguments=dict(ba.abstract),
                configs=configs,
                times_ms=times,
                default=configs.index(entry.default) if entry.default in configs else None,
                device_kind=entry.device_kind,
                extra=features.of_op(ba, configs),
                complete=_is_complete(ba, configs),
                halves_ms=np.stack(halves),
                tiles=ba.op.config_tiles,
            )
        )
    return problems


def _is_complete(ba: Any, configs: Collection[Any]) -> bool:
    """Whether all of a space is among some configs; not known of a space that raises."""
    try:
        return set(ba.autotuning_configs) <= set(configs)
    except Exception:
        return False


def folds(groups: Sequence[str], count: int) -> np.ndarray:
    """Assigns each problem a fold by its group: the same groups give the same folds in any order.

    Args:
      groups: group of each problem.
      count: number of folds.

    Returns:
      Fold of each problem, `[problems]`, of sizes that differ by at most one group.

    Raises:
      ArgumentError: if there are fewer groups than folds.
    """
    distinct = sorted(set(groups), key=lambda g: hashlib.sha256(g.encode()).digest())
    if count < 2 or len(distinct) < count:
        raise errors.ArgumentError(
            f"a split into {count} folds needs at least 2 folds and as many distinct shapes, got {len(distinct)} shapes"
        )
    fold_of = {group: i % count for i, group in enumerate(distinct)}
    return np.array([fold_of[g] for g in groups])
