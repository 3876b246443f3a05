"""What a cost model has to beat: simple choosers with its interface."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import devices
from tokamax._src.costmodel import features
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import Prediction, distances


def _prediction(cost: np.ndarray, default: int | None) -> Prediction:
    """Ranks by cost; the default wins ties, then the earlier config."""
    first = np.arange(len(cost)) != (-1 if default is None else default)
    order = np.lexsort((first, np.nan_to_num(cost, nan=np.inf)))
    return Prediction(int(order[0]), order, np.exp(cost), np.full(len(cost), np.nan))


class Heuristic:
    """The op's own default; without one, the first config."""

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> "Heuristic":
        """Learns nothing."""
        return self

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Puts the default first."""
        return _prediction(np.full(len(configs), np.nan), default or 0)


class BestSingle:
    """The config with the least mean log slowdown in training; where a shape lacks it, the next best one.

    A config that a training shape lacks counts there as that shape's median config.
    """

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> "BestSingle":
        """Averages each config's log slowdown."""
        texts = sorted({features.config_text(c) for p in problems for c in p.configs})
        column = {text: i for i, text in enumerate(texts)}
        table = np.full((len(problems), len(texts)), np.nan)
        for row, problem in zip(table, problems, strict=True):
            row[[column[features.config_text(c)] for c in problem.configs]] = problem.log_slowdown
            row[np.isnan(row)] = np.nanmedian(row)
        self.cost_ = dict(zip(texts, table.mean(axis=0).tolist(), strict=True))
        return self

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Ranks by the training mean."""
        return _prediction(np.array([self.cost_.get(features.config_text(c), np.nan) for c in configs]), default)


class KNearest:
    """The config with the least mean log slowdown over the nearest training shapes.

    Args:
      k: number of shapes. Where none of them has any of the candidates, more are asked.
    """

    def __init__(self, k: int = 5):
        self.k = k

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> "KNearest":
        """Keeps the problems."""
        scalars = [features.describe(p.arguments) for p in problems]
        fields = [[features.config_fields(c) for c in p.configs] for p in problems]
        self.spec_ = features.FeatureSpec.learn(list(zip(scalars, fields, strict=True)))
        points = [self.spec_.point(s) for s in scalars]
        self.numbers_ = np.stack([n for n, _ in points])
        self.codes_ = np.stack([c for _, c in points])
        self.costs_ = [
            dict(zip(map(features.config_text, p.configs), p.log_slowdown.tolist(), strict=True)) for p in problems
        ]
        return self

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Ranks by the mean over the neighbours."""
        point = self.spec_.point(features.describe(arguments))
        order = np.argsort(distances(*point, self.numbers_, self.codes_), kind="stable")
        texts = [features.config_text(c) for c in configs]
        for k in (self.k, 4 * self.k, len(order)):
            table = np.array([[self.costs_[i].get(t, np.nan) for t in texts] for i in order[:k]])
            known = (~np.isnan(table)).sum(axis=0)
            if known.any():
                break
        mean = np.where(known > 0, np.nansum(table, axis=0) / np.maximum(known, 1), np.nan)
        return _prediction(mean, default)


class NearestShape(KNearest):
    """The winner of the nearest training shape; where it is no candidate, that shape's next best config."""

    def __init__(self) -> None:
        super().__init__(1)


class RandomConfig:
    """A config drawn at random, the same in every process.

    Args:
      seed: of the draw.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> "RandomConfig":
        """Learns nothing."""
        return self

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Shuffles the configs."""
        text = ";".join(f"{n}={v}" for n, v in features.describe(arguments).items())
        rng = np.random.default_rng([self.seed, zlib.crc32(text.encode())])
        return _prediction(rng.random(len(configs)), None)
