"""How good choosers are on shapes they never saw: efficiency, top-k and coverage, beside the rivals.

Efficiency is best time / time of the chosen config, 1.0 at best; a config that failed counts 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import devices, errors
from tokamax._src.costmodel import dataset, features, rivals
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import Chooser, CostModel, Prediction

MODEL = "model"
RIVALS: Mapping[str, Callable[[], Chooser]] = {
    "heuristic": rivals.Heuristic,
    "best single": rivals.BestSingle,
    "nearest shape": rivals.NearestShape,
    "5 nearest": rivals.KNearest,
    "decision tree": rivals.WinnerTree,
    "random": rivals.RandomConfig,
}
FOLDS = 5
_FLOOR = 1e-3  # a failed choice enters the geometric mean as a thousandfold slowdown


@dataclasses.dataclass(frozen=True)
class Scores:
    """Efficiencies of one chooser over all scored problems.

    Attributes:
      mean: mean efficiency of the choices; where the chooser abstained, of what runs then: its fallback, else the
        default. Where a table names no default, it is the choice all the same.
      p10: tenth percentile.
      worst: least.
      within_2: share of choices at most 2 % slow.
      within_5: share of choices at most 5 % slow.
      slowdown: geometric mean of time / best time.
      coverage: share of problems on which the chooser did not abstain.
      over_5: share more than 5 % slow among those.
      over_15: share more than 15 % slow among those.
      top_1: mean efficiency of the first of its order, abstentions aside.
      top_3: mean efficiency of the best among the first three.
      top_5: mean efficiency of the best among the first five.
      top_8: mean efficiency of the best among the first eight.
    """

    mean: float
    p10: float
    worst: float
    within_2: float
    within_5: float
    slowdown: float
    coverage: float
    over_5: float
    over_15: float
    top_1: float
    top_3: float
    top_5: float
    top_8: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of an evaluation.

    Attributes:
      op: name of the op.
      device_kind: the device.
      split: how problems were held out.
      problems: number of scored problems.
      groups: number of distinct shapes among them.
      scores: chooser -> scores.
      ceiling: what choosing by half of each config's samples would score when judged by the other half: the noise of
        the data; None if there are too few samples to tell.
    """

    op: str
    device_kind: str
    split: str
    problems: int
    groups: int
    scores: Mapping[str, Scores]
    ceiling: float | None = None

    def beats_rivals(self) -> bool:
        """Whether the model's mean efficiency is above that of every rival."""
        ours = self.scores[MODEL].mean
        return all(ours > s.mean for name, s in self.scores.items() if name != MODEL)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON data."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """Returns the report as text."""
        names = [f.name for f in dataclasses.fields(Scores)]
        lines = [f"{self.op} on {self.device_kind}: {self.problems} problems, {self.groups} shapes, {self.split}"]
        if self.ceiling is not None:
            lines[0] += f", noise ceiling {self.ceiling:.4f}"
        lines.append(f"{'':14}" + "".join(f"{name.replace('_', ' '):>10}" for name in names))
        for chooser, scores in self.scores.items():
            lines.append(f"{chooser:14}" + "".join(f"{getattr(scores, name):10.4f}" for name in names))
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What a chooser said of a problem whose shape it never saw.

    Attributes:
      problem: the problem.
      prediction: what the chooser said.
      runs: index of the config that runs: the choice; where the chooser abstained, its fallback, else the
        default, if the problem has one.
    """

    problem: Problem
    prediction: Prediction
    runs: int

    @functools.cached_property
    def efficiency(self) -> np.ndarray:
        """Efficiency of each config, `[configs]`; 0 where it failed."""
        return np.nan_to_num(self.problem.best_ms / self.problem.times_ms, nan=0.0)

    def top(self, k: int) -> float:
        """Returns the best efficiency among the first k configs of the chooser's order."""
        return float(self.efficiency[self.prediction.order[:k]].max())


def predict_folds(
    problems: Sequence[Problem],
    facts: devices.DeviceFacts | None = None,
    *,
    count: int = FOLDS,
    choosers: Mapping[str, Callable[[], Chooser]] | None = None,
) -> dict[str, list[HeldOut]]:
    """Returns what each chooser says of each problem that can be scored, held out in shape-grouped folds.

    Args:
      problems: measured problems of one op on one device.
      facts: the device's facts.
      count: number of folds.
      choosers: name -> constructor; by default the cost model and its rivals.

    Raises:
      ArgumentError: if a fold would score nothing.
    """
    fold = dataset.folds([p.group for p in problems], count)
    splits = [(np.flatnonzero(fold != i), np.flatnonzero(fold == i)) for i in range(count)]
    return _held_out(problems, splits, in_folds(count), facts, choosers)


def in_folds(count: int) -> str:
    """Names the split of `predict_folds`."""
    return f"{count} shape-grouped folds"


def evaluate_folds(
    problems: Sequence[Problem],
    facts: devices.DeviceFacts | None = None,
    *,
    count: int = FOLDS,
    choosers: Mapping[str, Callable[[], Chooser]] | None = None,
) -> Report:
    """Scores choosers on shape-grouped folds: each problem by choosers that never saw its shape.

    Args:
      problems: measured problems of one op on one device.
      facts: the device's facts.
      count: number of folds.
      choosers: name -> constructor; by default the cost model and its rivals.

    Raises:
      ArgumentError: if a fold would score nothing.
    """
    return report_of(predict_folds(problems, facts, count=count, choosers=choosers), in_folds(count))


def families(problems: Sequence[Problem], share: float = 0.2) -> dict[str, np.ndarray]:
    """Returns families of problems to hold out whole: name -> which problems belong to it, bool `[problems]`.

    They are the largest and the smallest shapes, shapes with an odd size (some dimension of at least 16 that 8 does not
    divide), and the least common dtype of the arrays. Families that are empty or hold more than half are left out.

    Args:
      problems: measured problems of one op on one device.
      share: share of the shapes that counts as largest, and as smallest.
    """
    scalars = [features.describe(p.arguments) for p in problems]
    size: dict[str, int] = {}
    for problem, s in zip(problems, scalars, strict=True):
        size[problem.group] = max(_elements(s), size.get(problem.group, 0))
    ranked = sorted(size, key=lambda g: (size[g], g))
    count = round(share * len(ranked))
    largest, smallest = set(ranked[len(ranked) - count :]), set(ranked[:count])
    dtypes = [",".join(sorted({str(v) for n, v in s.items() if n.endswith(".dtype")})) for s in scalars]
    rarest = min(sorted(set(dtypes)), key=dtypes.count, default="")
    found = {
        f"largest {share:.0%} of the shapes": [p.group in largest for p in problems],
        f"smallest {share:.0%} of the shapes": [p.group in smallest for p in problems],
        "odd sizes": [any(d >= 16 and d % 8 for d in features.dimensions(s).values()) for s in scalars],
        f"dtypes {rarest}": [d == rarest for d in dtypes],
    }
    masks = {name: np.array(mask, dtype=bool) for name, mask in found.items()}
    return {name: mask for name, mask in masks.items() if 0 < mask.sum() <= len(mask) / 2}


def evaluate_family(
    problems: Sequence[Problem],
    name: str,
    is_test: np.ndarray,
    facts: devices.DeviceFacts | None = None,
    *,
    choosers: Mapping[str, Callable[[], Chooser]] | None = None,
) -> Report:
    """Scores choosers on one family of problems, learned from the others; see `evaluate_folds` and `families`.

    Args:
      problems: measured problems of one op on one device.
      name: name of the family.
      is_test: which problems belong to it, bool `[problems]`.
      facts: the device's facts.
      choosers: name -> constructor; by default the cost model and its rivals.

    Raises:
      ArgumentError: if there is nothing to learn from or nothing to score.
    """
    split = [(np.flatnonzero(~is_test), np.flatnonzero(is_test))]
    return report_of(_held_out(problems, split, f"{name} held out", facts, choosers), f"{name} held out")


def _elements(scalars: Mapping[str, features.Scalar]) -> int:
    """Returns the elements of all arrays among described arguments."""
    sizes: dict[str, int] = {}
    for name, size in features.dimensions(scalars).items():
        array = name.rpartition("[")[0]
        sizes[array] = sizes.get(array, 1) * size
    return sum(sizes.values())


def _held_out(
    problems: Sequence[Problem],
    splits: Sequence[tuple[np.ndarray, np.ndarray]],
    split: str,
    facts: devices.DeviceFacts | None,
    choosers: Mapping[str, Callable[[], Chooser]] | None,
) -> dict[str, list[HeldOut]]:
    teaches = np.array([p.works.sum() >= 2 for p in problems], dtype=bool)
    fair = teaches & np.array([p.complete for p in problems], dtype=bool)
    splits = [(train[teaches[train]], test[fair[test]]) for train, test in splits]
    for train, test in splits:
        if not len(train) or not len(test):
            raise errors.ArgumentError(
                f"every part of the split ({split}) must have shapes to learn from and shapes to score, got "
                f"{len(train)} and {len(test)} of {len(problems)} problems; measure more shapes"
            )
    choosers = {MODEL: CostModel, **RIVALS} if choosers is None else choosers
    found: dict[str, list[HeldOut]] = {name: [] for name in choosers}
    for train, test in splits:
        known = [problems[i] for i in train]
        for name, make in choosers.items():
            chooser = make().fit(known, facts)
            found[name] += [ask(chooser, problems[i], facts) for i in test]
    return found


def report_of(found: Mapping[str, Sequence[HeldOut]], split: str) -> Report:
    """Scores what choosers said of held-out problems.

    Args:
      found: chooser -> what it said, as `predict_folds` returns it.
      split: how the problems were held out, in words.
    """
    scored = [held.problem for held in next(iter(found.values()))]
    ceilings = [c for problem in scored if (c := problem.ceiling) is not None]
    return Report(
        op=scored[0].op,
        device_kind=scored[0].device_kind,
        split=split,
        problems=len(scored),
        groups=len({problem.group for problem in scored}),
        scores={name: _scores(held) for name, held in found.items()},
        ceiling=float(np.mean(ceilings)) if ceilings else None,
    )


def ask(chooser: Chooser, problem: Problem, facts: devices.DeviceFacts | None) -> HeldOut:
    """Returns what a fitted chooser says of a problem that it never saw."""
    told = {"default": problem.default, "extra": problem.extra}
    prediction = chooser.predict(problem.arguments, problem.configs, facts, **told)
    index = prediction.index
    if prediction.abstain is not None:
        instead = problem.default if prediction.fallback is None else prediction.fallback
        index = index if instead is None else instead
    return HeldOut(problem, prediction, index)


def _scores(held: Sequence[HeldOut]) -> Scores:
    efficiency = np.array([h.efficiency[h.runs] for h in held])
    stands = np.array([h.prediction.abstain is None for h in held])
    stood_by = efficiency[stands] if stands.any() else np.ones(1)
    top = {k: float(np.mean([h.top(k) for h in held])) for k in (1, 3, 5, 8)}
    return Scores(
        mean=float(efficiency.mean()),
        p10=float(np.quantile(efficiency, 0.1)),
        worst=float(efficiency.min()),
        within_2=float((efficiency >= 1 / 1.02).mean()),
        within_5=float((efficiency >= 1 / 1.05).mean()),
        slowdown=float(np.exp(-np.log(np.maximum(efficiency, _FLOOR)).mean())),
        coverage=float(stands.mean()),
        over_5=float((stood_by < 1 / 1.05).mean()),
        over_15=float((stood_by < 1 / 1.15).mean()),
        top_1=top[1],
        top_3=top[3],
        top_5=top[5],
        top_8=top[8],
    )
