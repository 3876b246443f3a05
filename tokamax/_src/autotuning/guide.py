"""Which configs to measure next, where not all of them can be.

Notation: `x` is a config as a vector, `y = log(time)` of it for the arguments at hand. The belief is

    y(x) = b + m(x) + e(x) + g(x)

with an unknown level `b`; `m`, the log slowdown that a cost model predicts, and `e`, its independent error: the spread
of the model's members, and more where it expects a slow config; and `g`, a Gaussian process with the Matern-3/2 kernel
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2, 4 and 5), whose scales maximise the
marginal likelihood on a small grid. Without a model, m and e are zero. The next config is the one with the largest
expected improvement (Jones, Schonlau and Welch, 1998, https://doi.org/10.1023/A:1008306431147); further ones of a
batch are chosen as if the earlier ones had come out as expected (the "kriging believer" of Ginsbourger, Le Riche and
Carraro, 2010).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import devices, errors
from tokamax._src.costmodel import features
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import MIN_GROUPS, CostModel
from tokamax._src.costmodel.neighbours import distance_of

_NOISE = 0.01
"""Standard deviation of log(time) between measurements of one config."""
_LENGTHS = (0.25, 0.5, 1.0, 2.0, 6.0)
_USUAL_LENGTH = 1.0
_SCALES = (0.03, 0.1, 0.3, 1.0)
_LEAST_BUDGET = 8
_LEAST_SPREAD, _RELATIVE_SPREAD = 0.02, 0.3
"""Standard deviation of a model's error where it expects the best, and how it grows with the expected log slowdown."""
_ESTIMATE_SPREAD = 0.2
"""The same of an estimate, about what the one of ragged dot on TPU is off by."""
_LESSON_SHARE = 1 / 3
_LEAST_TRIED = 3
"""Configs that ran before an early end."""
_OPENING = 0.25
"""Share of the budget that is drawn at random where there is no model."""


def default_budget(configs: int) -> int:
    """Returns how many configs of a space of this size a guided tuning measures: 8 of 29, 23 of 300, 90 of 4,540."""
    return min(configs, max(_LEAST_BUDGET, round(4 / 3 * math.sqrt(configs))))


@dataclasses.dataclass(frozen=True)
class Prior:
    """What a cost model expects of the configs of a space before any is measured.

    Attributes:
      log_slowdown: log(time / best time), `[configs]`; nan for configs that it expects to fail or does not know.
      spread: its uncertainty, `[configs]`.
    """

    log_slowdown: np.ndarray
    spread: np.ndarray

    @classmethod
    def of_estimate(cls, times_ms: np.ndarray) -> "Prior":
        """Returns what an op's estimate says, `[configs]` in ms, inf for what should not be used; it is a rough one."""
        finite = np.isfinite(times_ms)
        expected = np.full(len(times_ms), np.nan)
        expected[finite] = np.log(times_ms[finite] / times_ms[finite].min()) if finite.any() else np.nan
        return cls(expected, _ESTIMATE_SPREAD + _RELATIVE_SPREAD * np.minimum(expected, 1.0))


def vectors(configs: Sequence[Any]) -> np.ndarray:
    """Returns configs as vectors: log2 of numbers scaled to [0, 1] over the space, and a flag for every other value."""
    fields = [features.config_fields(c) for c in configs]
    columns: list[np.ndarray] = []
    for name in sorted({n for f in fields for n in f}):
        values = [f.get(name) for f in fields]
        numbers = [float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else math.nan for v in values]
        is_number = ~np.isnan(numbers)
        if is_number.any():
            logs = np.log2(1.0 + np.abs(np.nan_to_num(numbers)))
            low, high = logs[is_number].min(), logs[is_number].max()
            # What is no number, None above all, means "the whole axis" more often than not.
            columns.append(np.where(is_number, (logs - low) / max(high - low, 1e-9), 1.0))
        texts = ["" if n else repr(v) for v, n in zip(values, is_number, strict=True)]
        others = sorted(set(texts) - {""})
        if len(others) + bool(is_number.any()) > 1:
            columns += [np.array([t == other for t in texts], dtype=float) for other in others]
    varied = [c for c in columns if c.min() < c.max()]
    return np.stack(varied, axis=1) if varied else np.zeros((len(configs), 1))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the measurements of a sweep over one op are shared out.

    Attributes:
      lessons: indices of the shapes that are measured whole, first of all, to teach the guide for the others.
      budget: how many configs of each other shape may be measured.
    """

    lessons: tuple[int, ...]
    budget: int

    @classmethod
    def of(cls, sweep: Sequence[features.Arguments], configs: int, budget: int, known: int = 0) -> "Plan":
        """Shares out `budget` measurements per shape: up to a third of them go into lessons, as far apart as can be.

        Args:
          sweep: arguments of each shape.
          configs: size of the space.
          budget: how many configs to measure per shape, on average.
          known: how many shapes were measured before.
        """
        total = len(sweep) * budget
        count = max(0, int(_LESSON_SHARE * total / max(configs, 1)) - known)
        if budget >= configs or not MIN_GROUPS <= count < len(sweep):
            return cls((), budget)
        described = [features.describe(arguments) for arguments in sweep]
        distance, chosen = np.full(len(sweep), np.inf), [0]
        for _ in range(count - 1):
            distance = np.minimum(distance, [distance_of(described[chosen[-1]], d) for d in described])
            chosen.append(int(np.argmax(distance)))
        return cls(tuple(chosen), max(1, (total - count * configs) // (len(sweep) - count)))


class Guide:
    """Proposes configs of a space to measure, all of them by their index.

    Args:
      configs: the space, dataclasses or dicts.
      budget: how many configs may be measured.
      first: configs to begin with, such as the default and the winner of the nearest shape.
      prior: what a cost model expects.
      batch: how many to propose at a time.
      seed: seed of the opening where there is no prior.
      least_gain: the search ends when the expected improvement of log(time) falls below this.
    """

    def __init__(
        self,
        configs: Sequence[Any],
        *,
        budget: int,
        first: Sequence[int] = (),
        prior: Prior | None = None,
        batch: int = 1,
        seed: int = 0,
        least_gain: float = _NOISE / 4,
    ):
        if budget < 1:
            raise errors.ArgumentError(f"budget must be at least 1 config, got {budget}")
        self.budget = min(budget, len(configs))
        self._batch, self._least_gain = batch, least_gain
        self._first, self._prior = list(dict.fromkeys(first)), prior
        self._x = vectors(configs)
        if prior is None:
            self._order = np.random.default_rng(seed).permutation(len(configs))
        else:
            self._order = np.argsort(np.nan_to_num(prior.log_slowdown, nan=np.inf), kind="stable")

    def __call__(self, times: Mapping[int, float]) -> list[int]:
        """Returns the next configs to measure; none when the search is over.

        Args:
          times: time in ms of each config tried so far; nan for failures.
        """
        count = min(self._batch, self.budget - len(times))
        if count <= 0:
            return []
        by_order = [i for i in self._order.tolist() if i not in times]
        if not times:
            # The first ones come whatever the batch, then what the prior or chance puts in front.
            return list(dict.fromkeys([*self._first, *by_order]))[: min(max(count, len(self._first)), self.budget)]
        works = sum(t == t for t in times.values())
        opening = round(_OPENING * self.budget) if self._prior is None else 0
        if works < 1 or len(times) < opening:
            return by_order[:count]
        # A few measurements come whatever the prior promises: they tell whether it is right.
        least_gain = self._least_gain if works >= _LEAST_TRIED else -math.inf
        return self._by_improvement(times, count, least_gain)

    def _by_improvement(self, times: Mapping[int, float], count: int, least_gain: float) -> list[int]:
        done = list(times)
        measured = np.array([times[i] for i in done])
        y = np.log(np.where(measured > 0, measured, np.nan))
        best = float(np.nanmin(y))
        # A failure warns of its surroundings as much as the slowest config that ran.
        y = np.nan_to_num(y, nan=float(np.nanmax(y)) + 0.3)
        belief = _Belief.fitted(self._x, self._prior, done, y)
        chosen: list[int] = []
        for _ in range(count):
            gain = belief.expected_improvement(best)
            gain[[*done, *chosen]] = -np.inf
            i = int(np.argmax(gain))
            if gain[i] < least_gain:
                break
            chosen.append(i)
            belief = belief.given(i)
        return chosen


@dataclasses.dataclass(frozen=True)
class _Belief:
    """The belief about all configs after some were measured.

    Attributes:
      x: vectors, `[configs, columns]`.
      mean_offset: m, `[configs]`.
      own_variance: variance of e, `[configs]`.
      done: indices of the measured configs.
      y: their log(time).
      lengths: scale of distances in the kernel along each column, `[columns]`.
      scale: standard deviation of g.
    """

    x: np.ndarray
    mean_offset: np.ndarray
    own_variance: np.ndarray
    done: list[int]
    y: np.ndarray
    lengths: np.ndarray
    scale: float

    @classmethod
    def fitted(cls, x: np.ndarray, prior: Prior | None, done: list[int], y: np.ndarray) -> "_Belief":
        """Returns the belief whose scales make the measurements most likely."""
        if prior is None:
            offset, variance, usual = np.zeros(len(x)), np.zeros(len(x)), 0.5
        else:
            known = prior.log_slowdown[~np.isnan(prior.log_slowdown)]
            # Configs that the model expects to fail come after all others, yet are not out of reach.
            worst = float(known.max()) + 0.5 if len(known) else 0.0
            offset = np.nan_to_num(prior.log_slowdown, nan=worst)
            variance = np.nan_to_num(prior.spread, nan=0.1) ** 2
            usual = 0.05
        columns = x.shape[1]

        def likely(belief: "_Belief") -> float:
            # Few measurements say little about the scales: log-normal priors around what is usual hold them.
            far = (np.log(belief.lengths / _USUAL_LENGTH) ** 2).sum() / columns + math.log(belief.scale / usual) ** 2
            return belief._log_likelihood() - 0.5 * float(far)

        beliefs = [
            cls(x, offset, variance, done, y, np.full(columns, length), scale)
            for length in _LENGTHS
            for scale in _SCALES
        ]
        best = max(beliefs, key=likely)
        for column in range(columns if columns > 1 else 0):
            beliefs = [dataclasses.replace(best, lengths=_with(best.lengths, column, value)) for value in _LENGTHS]
            best = max([best, *beliefs], key=likely)
        return best

    def _kernel(self, rows: np.ndarray) -> np.ndarray:
        """Covariance of g between some configs and the measured ones, `[rows, done]`."""
        gaps = (self.x[rows][:, None, :] - self.x[self.done][None, :, :]) / self.lengths
        r = np.sqrt(3.0 * (gaps**2).sum(-1))
        return self.scale**2 * (1.0 + r) * np.exp(-r)

    def _solved(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns the Cholesky factor of the covariance of y, what it solves of the residuals, and the level b."""
        done = np.array(self.done)
        covariance = self._kernel(done) + np.diag(self.own_variance[done] + _NOISE**2)
        factor = np.linalg.cholesky(covariance)
        residual = self.y - self.mean_offset[done]
        ones = _solve(factor, np.ones(len(done)))
        level = float(ones @ residual / ones.sum())
        return factor, _solve(factor, residual - level), level

    def _log_likelihood(self) -> float:
        factor, solved, level = self._solved()
        residual = self.y - self.mean_offset[self.done] - level
        return float(-0.5 * residual @ solved - np.log(np.diag(factor)).sum())

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean and standard deviation of y, `[configs]` each."""
        factor, solved, level = self._solved()
        cross = self._kernel(np.arange(len(self.x)))
        mean = level + self.mean_offset + cross @ solved
        half = np.linalg.solve(factor, cross.T)
        variance = self.scale**2 + self.own_variance - (half**2).sum(0)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def expected_improvement(self, best: float) -> np.ndarray:
        """Returns E[max(best - y, 0)], `[configs]`."""
        mean, deviation = self.posterior()
        z = (best - mean) / deviation
        return (best - mean) * _normal_cdf(z) + deviation * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)

    def given(self, i: int) -> "_Belief":
        """Returns the belief as if config `i` had come out as expected."""
        mean, _ = self.posterior()
        return dataclasses.replace(self, done=[*self.done, i], y=np.append(self.y, mean[i]))


def _with(values: np.ndarray, i: int, value: float) -> np.ndarray:
    changed = values.copy()
    changed[i] = value
    return changed


def _solve(factor: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.solve(factor.T, np.linalg.solve(factor, b))


def _normal_cdf(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.array([math.erf(v) for v in (z / math.sqrt(2)).tolist()]))


class Teacher:
    """Learns from each tuned shape what to expect of the next: the cost model of a guided sweep.

    Args:
      model: a model to begin with.
      problems: measured problems to begin with, of the same op and device.
      facts: facts of the device.
    """

    def __init__(
        self,
        model: CostModel | None = None,
        problems: Sequence[Problem] = (),
        facts: devices.DeviceFacts | None = None,
    ):
        self.model, self._facts = model, facts
        self.problems: list[Problem] = []
        self._described: list[dict[str, features.Scalar]] = []
        for problem in problems:
            self.learn(problem)
        self._learned = len(self.problems) if model is not None else 0

    def learn(self, problem: Problem) -> None:
        """Adds a measured problem. The model is fitted anew whenever the problems have become a quarter more."""
        self.problems.append(problem)
        self._described.append(features.describe(problem.arguments))

    def _refit(self) -> None:
        if len(self.problems) < max(MIN_GROUPS, 1.25 * self._learned):
            return
        if len({p.group for p in self.problems if p.works.sum() >= 2}) >= MIN_GROUPS:
            self.model = CostModel().fit(self.problems, self._facts)
            self._learned = len(self.problems)

    def prior(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        *,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prior | None:
        """Returns what is to be expected of configs; None where nothing is known.

        Args:
          arguments: abstract arguments.
          configs: the space.
          extra: the op's own features of each config.
        """
        self._refit()
        if self.model is None:
            return None
        expected, spread = self.model.expect(arguments, configs, self._facts, extra=extra)
        if np.isnan(expected).all():
            return None
        return Prior(expected, _LEAST_SPREAD + spread + _RELATIVE_SPREAD * np.minimum(expected, 1.0))

    def nearest_winner(self, arguments: features.Arguments, configs: Sequence[Any]) -> int | None:
        """Returns the index of what won on the nearest measured shape whose winner is a candidate; None if none is."""
        index = {features.config_text(c): i for i, c in enumerate(configs)}
        here = features.describe(arguments)
        distance = [distance_of(here, there) for there in self._described]
        for i in np.argsort(distance, kind="stable").tolist():
            problem = self.problems[i]
            won = features.config_text(problem.configs[int(np.nanargmin(problem.times_ms))])
            if won in index:
                return index[won]
        return None
