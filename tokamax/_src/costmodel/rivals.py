"""What a cost model has to beat: simple choosers with its interface."""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import devices
from tokamax._src.costmodel import features
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import Prediction
from tokamax._src.costmodel.neighbours import Neighbours


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
        numbers, codes = (np.stack(part) for part in zip(*points, strict=True))
        self.neighbours_ = Neighbours.of(problems, numbers, codes)
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
        distance = self.neighbours_.distances(*self.spec_.point(features.describe(arguments)))
        order = np.argsort(distance, kind="stable")
        fields = [features.config_fields(c) for c in configs]
        for k in (self.k, 4 * self.k, len(order)):
            table = self.neighbours_.table(fields, order[:k])
            known = (~np.isnan(table)).sum(axis=0)
            if known.any():
                break
        mean = np.where(known > 0, np.nansum(table, axis=0) / np.maximum(known, 1), np.nan)
        return _prediction(mean, default)


class NearestShape(KNearest):
    """The winner of the nearest training shape; where it is no candidate, that shape's next best config."""

    def __init__(self) -> None:
        super().__init__(1)


class WinnerTree:
    """A decision tree that classifies shapes by their winning config, as AutoHeuristic and others do.

    Winners that are no candidates of a shape are passed over for the next most probable one.

    Args:
      min_samples_leaf: least shapes of a leaf.
    """

    def __init__(self, min_samples_leaf: int = 3):
        self.min_samples_leaf = min_samples_leaf

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> "WinnerTree":
        """Learns from each problem's arguments and winner."""
        from sklearn.tree import DecisionTreeClassifier

        scalars = [features.describe(p.arguments) for p in problems]
        self.spec_ = features.FeatureSpec.learn([(s, []) for s in scalars])
        winners = [features.config_text(p.configs[int(np.nanargmin(p.times_ms))]) for p in problems]
        tree = DecisionTreeClassifier(min_samples_leaf=self.min_samples_leaf, random_state=0)
        with warnings.catch_warnings():
            # Nearly as many winners as shapes look like a regression to scikit-learn; here they are what was measured.
            warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
            self.tree_ = tree.fit(np.stack([self._row(s) for s in scalars]), winners)
        return self

    def _row(self, scalars: Mapping[str, features.Scalar]) -> np.ndarray:
        numbers, codes = self.spec_.point(scalars)
        return np.concatenate([np.nan_to_num(numbers, nan=-1.0), codes])

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Ranks by the share of the leaf's shapes that a config won."""
        shares = self.tree_.predict_proba(self._row(features.describe(arguments))[None])[0]
        won = {str(name): float(share) for name, share in zip(self.tree_.classes_, shares, strict=True)}
        cost = np.array([-won.get(features.config_text(c), 0.0) for c in configs])
        return _prediction(cost, default)


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
