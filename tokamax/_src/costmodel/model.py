"""The cost model of one op on one device: which config is fast for arguments that nobody tuned.

Notation: `r = log(time / best time of that shape)`; the trees learn `s = sqrt(r)`, which spends them on telling good
configs apart. A member of the ensemble is trained without one fold of shapes, so each training shape is judged by
members that never saw it. All limits (gain over the default, doubt, distance) come from those judgements.

The estimator contract holds: the constructor stores, `fit` returns self, learned names end in `_`.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

import numpy as np

from tokamax._src import devices, errors, serialization
from tokamax._src.costmodel import dataset, features, modelfile, neighbours, trees
from tokamax._src.costmodel.dataset import Problem

SCHEMA = "tokamax-cost-model"
VERSION = 3
MIN_GROUPS = 5
"""Distinct shapes that a model needs at least."""

_GAINS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
_SLOW, _VERY_SLOW = np.log(1.05), np.log(1.15)
_LEAST_COVERAGE = 0.9
_SHORTLIST = 300
_SHORTLIST_TREES = 40
"""How many configs of a larger space all members judge, and by how many trees these are picked."""
_HARM = 0.03
"""Log slowdown against the default that counts as a loss: what is less may be the noise of the measurements."""
_FOREIGN_SPREAD = 0.09
"""Standard deviation of the difference that another device makes to the log slowdown of a good config: 0.08 to 0.10
between A100 and H100 (`training/transfer.py`). A model of another device moves a default for twice that alone."""
_LEAST_GAIN = 0.02
_ASKED = 5
"""How many of the nearest shapes must agree before their choice replaces an abstention."""
_SETTINGS = (  # (rows below, trees, leaves, least rows of a leaf, learning rate)
    (4_000, 150, 31, 5, 0.12),
    (15_000, 120, 63, 5, 0.15),
    (float("inf"), 100, 100, 10, 0.15),
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a chooser says about the candidates of one problem.

    Attributes:
      index: the config to use.
      order: all configs, the most promising first, `[configs]`.
      slowdown: expected time over the best config's time, `[configs]`; nan where the chooser cannot say.
      spread: disagreement of the ensemble about log(slowdown), widened on another device, `[configs]`.
      doubt: by how much the members expect the chosen config to miss their own best, as log(slowdown).
      abstain: why the choice should not be used; None to stand by it.
      fallback: where it abstains, the config that beat the default on every one of the nearest shapes, if there is one.
      nearest: the nearest training shape, in words.
      distance: its distance, in octaves.
    """

    index: int
    order: np.ndarray
    slowdown: np.ndarray
    spread: np.ndarray
    doubt: float = 0.0
    abstain: str | None = None
    fallback: int | None = None
    nearest: str | None = None
    distance: float | None = None

    @property
    def expected_slowdown(self) -> float:
        """Expected slowdown of the chosen config."""
        return float(self.slowdown[self.index])

    def among(self, asked: np.ndarray, rest: np.ndarray) -> "Prediction":
        """Returns what a prediction for some configs says of all.

        Args:
          asked: index among all of each config that it is about.
          rest: indices of the others, the most promising first; they come last, and nothing more is said of them.
        """
        slowdown, spread = np.full((2, len(asked) + len(rest)), np.nan)
        slowdown[asked], spread[asked] = self.slowdown, self.spread
        order = np.concatenate([asked[self.order], rest])
        return dataclasses.replace(self, index=int(asked[self.index]), order=order, slowdown=slowdown, spread=spread)


class Chooser(Protocol):
    """Anything that learns from problems and chooses configs: the cost model and its rivals."""

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> Any:
        """Learns from measured problems; returns self."""
        ...

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Ranks the configs for abstract arguments."""
        ...


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Limits learned on shapes that the judging members had not seen.

    Attributes:
      min_gain: log gain over the default that a prediction must exceed to replace it.
      max_doubt: doubt above which the model abstains.
      max_distance: distance to the nearest training shape, in octaves, above which it abstains.
      optimism: by how much log(slowdown) of chosen configs was underestimated on average; negative if overestimated.
      shapes: training problems that were judged.
      coverage: share of them that the model stands by.
      mean_efficiency: mean of best time / chosen time over those.
      over_5: share of those that are more than 5 % slow.
      over_15: share of those that are more than 15 % slow.
    """

    min_gain: float
    max_doubt: float
    max_distance: float
    optimism: float
    shapes: int
    coverage: float
    mean_efficiency: float
    over_5: float
    over_15: float

    @classmethod
    def from_json(cls, data: Any) -> "Calibration":
        """Reads the fields back.

        Raises:
          FormatError: if one is missing or no finite number.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise errors.FormatError(f"a calibration must have the fields {names}")
        if not all(type(v) in (int, float) and np.isfinite(v) for v in data.values()):
            raise errors.FormatError("the fields of a calibration must be finite numbers")
        return cls(**data)


class CostModel:
    """Ensemble of boosted trees over features that any op has.

    Args:
      members: members of the ensemble, each trained without one fold of shapes.
      iterations: trees of each member; None chooses by the number of rows.
      max_leaves: leaves of a tree; None chooses by the number of rows.
      seed: seed of the column sampling.
    """

    op_: str
    device_kind_: str
    facts_: devices.DeviceFacts
    spec_: features.FeatureSpec
    forest_: trees.Forest
    failures_: trees.Forest | None
    neighbours_: neighbours.Neighbours
    calibration_: Calibration
    data_digest_: str

    def __init__(
        self, *, members: int = 5, iterations: int | None = None, max_leaves: int | None = None, seed: int = 0
    ):
        self.members = members
        self.iterations = iterations
        self.max_leaves = max_leaves
        self.seed = seed

    def fit(self, problems: Sequence[Problem], facts: devices.DeviceFacts | None = None) -> "CostModel":
        """Learns from measured problems of one op on one device; their order does not matter.

        Args:
          problems: measured problems.
          facts: the device's facts; by default those known of the problems' device kind.

        Raises:
          ArgumentError: if they mix ops or devices, or hold fewer than `MIN_GROUPS` shapes.
        """
        problems = sorted((p for p in problems if p.works.sum() >= 2), key=lambda p: (p.key, p.times_ms.tobytes()))
        kinds = sorted({(p.op, p.device_kind) for p in problems})
        groups = len({p.group for p in problems})
        if len(kinds) != 1 or groups < MIN_GROUPS:
            raise errors.ArgumentError(
                f"a cost model needs at least {MIN_GROUPS} measured shapes of one op on one device, got {groups} of "
                f"{kinds[:3]}; tune more shapes, or fit per op and device"
            )
        self.op_, self.device_kind_ = kinds[0]
        self.facts_ = devices.facts(self.device_kind_) if facts is None else facts
        self.data_digest_ = _data_digest(problems)
        training = _Training(problems, self.facts_)
        self.spec_ = training.spec
        self.neighbours_ = neighbours.Neighbours.of(problems, training.numbers, training.codes)
        settings = self._settings(len(training.target))
        self.failures_ = _fit_failures(training, self.seed)
        self.forest_, scores = _fit_ensemble(training, min(self.members, groups), settings, self.seed)
        self.calibration_ = _calibrate(training, scores)
        self.__dict__.pop("digest", None)
        return self

    def _settings(self, rows: int) -> dict[str, Any]:
        """Returns tree settings: many rows bear deep trees, few rows want more and smaller steps."""
        iterations, leaves, least, rate = next(found for limit, *found in _SETTINGS if rows < limit)
        return {
            "max_iter": self.iterations or int(iterations),
            "max_leaf_nodes": self.max_leaves or int(leaves),
            "min_samples_leaf": int(least),
            "learning_rate": rate,
            "max_features": 0.3,
        }

    def predict(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: int | None = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Ranks the configs for abstract arguments.

        Args:
          arguments: name -> value; arrays as `ArraySpec`.
          configs: candidates, dataclasses or dicts.
          device: the device's facts; by default those of the training device.
          default: index of the config that runs without a prediction. It is kept unless another one's predicted gain
            exceeds the noise of the calibration.
          extra: the op's own features of each config.
        """
        if not configs:
            raise errors.ArgumentError("there must be at least one config to choose from, got none")
        off = self._off(device)
        scalars = features.describe(arguments)
        fields = [features.config_fields(c) for c in configs]
        usable = self.spec_.known(fields)
        reason = self.spec_.mismatch(scalars)
        if reason is None and not usable.any():
            reason = "the config space has changed: no config has the fields and ranges of the training configs"
        if reason is None and (missing := set(self.spec_.extra).difference(*(extra or ()))):
            reason = f"the op's own features are missing: {', '.join(sorted(missing)[:5])}"
        if reason is not None:
            found = _abstaining(len(configs), default, reason)
            # A dtype or a flag that is new hardly changes which config wins; anything else that is new may.
            if default is None or not usable.any() or self.spec_.mismatch(self.spec_.kin(scalars)) is not None:
                return found
            return dataclasses.replace(found, fallback=self._fallback(fields, self._nearest(scalars)[0], default, off))
        matrix = self.spec_.matrix(scalars, fields, device or self.facts_, extra)
        usable = self._should_work(matrix, usable)
        asked, rest = self._shortlist(matrix, usable, default)
        near, distance = self._nearest(scalars)
        place = None if default is None else int(np.searchsorted(asked, default))
        found = self._decide(self.forest_.predict(matrix[asked]), usable[asked], place, float(distance[near[0]]), off)
        found = dataclasses.replace(found.among(asked, rest), nearest=self._shown(near[0]))
        if found.abstain is None or default is None:
            return found
        return dataclasses.replace(found, fallback=self._fallback(fields, near, default, off))

    def _off(self, device: devices.DeviceFacts | None) -> float:
        """Returns how far another device may be from what the members know, as log(slowdown)."""
        return 0.0 if device is None or device.kind == self.device_kind_ else _FOREIGN_SPREAD

    def _nearest(self, scalars: Mapping[str, features.Scalar]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the training shapes by distance, the nearest first, and the distance of each, `[shapes]` both."""
        distance = self.neighbours_.distances(*self.spec_.point(scalars))
        return np.argsort(distance, kind="stable"), distance

    def has_seen(self, arguments: features.Arguments) -> bool:
        """Whether arguments of these shapes, dtypes and flags were among the training problems."""
        scalars = features.describe(arguments)
        return self.spec_.mismatch(scalars) is None and bool(self._nearest(scalars)[1].min() == 0.0)

    def _fallback(self, fields: Sequence[Mapping[str, Any]], near: np.ndarray, default: int, off: float) -> int | None:
        """Returns the config that beat the default on each of the nearest shapes; None if none did."""
        least = max(_LEAST_GAIN, 2 * off)
        return neighbours.unanimous(self.neighbours_.table(fields, near[:_ASKED]), default, least=least)

    def expect(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the trees make of any arguments, inside of the domain or not: for a search, not for a choice.

        Args:
          arguments: name -> value; arrays as `ArraySpec`.
          configs: candidates, dataclasses or dicts.
          device: the device's facts; by default those of the training device.
          extra: the op's own features of each config.

        Returns:
          log(time / best time) of each config and its spread over the members, widened on another device, `[configs]`
          each; nan for configs that are expected to fail or lie outside of the measured ones.
        """
        fields = [features.config_fields(c) for c in configs]
        matrix = self.spec_.matrix(features.describe(arguments), fields, device or self.facts_, extra)
        usable = self._should_work(matrix, self.spec_.known(fields))
        judged = _judge(self.forest_.predict(matrix), usable, self._off(device))
        return np.where(usable, judged.log_slowdown, np.nan), np.where(usable, judged.spread, np.nan)

    def _should_work(self, matrix: np.ndarray, usable: np.ndarray) -> np.ndarray:
        """Returns which of the usable configs are not expected to fail; all of them if all are, `[configs]`."""
        if self.failures_ is None:
            return usable
        works = usable & (self.failures_.predict(matrix)[0] < 0.5)
        return works if works.any() else usable

    def _shortlist(self, matrix: np.ndarray, usable: np.ndarray, default: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the configs that all members are asked about, in order, and the others, the most promising first.

        Of a large space the first trees of one member pick the former, so that a prediction takes milliseconds; the
        default stays.
        """
        if len(matrix) <= _SHORTLIST:
            return np.arange(len(matrix)), np.arange(0)
        first = np.where(usable, self.forest_.member(0, _SHORTLIST_TREES).predict(matrix)[0], np.inf)
        if default is not None:
            first[default] = -np.inf
        ranked = np.argsort(first, kind="stable")
        return np.sort(ranked[:_SHORTLIST]), ranked[_SHORTLIST:]

    def _decide(
        self, scores: np.ndarray, usable: np.ndarray, default: int | None, distance: float, off: float
    ) -> Prediction:
        """Chooses by the scores of the members; `off` is how far another device may be from what they know."""
        limits, judged = self.calibration_, _judge(scores, usable, off)
        least = max(limits.min_gain, 2 * off)
        index = int(judged.order[0])
        if default is not None and usable[default] and judged.gain(index, default) <= least:
            index = default
        doubt, agreed = judged.doubt(index) + off, judged.agree_on_gain(index, default, least)
        reason = None
        if distance > limits.max_distance:
            reason = f"the nearest shape is {distance:.1f} octaves away, at most {limits.max_distance:.1f} is usual"
        elif off and not agreed:
            reason = f"it is of {self.device_kind_}, and its members do not all expect a gain of {np.expm1(least):.0%}"
        elif doubt > limits.max_doubt and not agreed:
            reason = f"the members disagree by {np.expm1(doubt):.1%}, the limit is {np.expm1(limits.max_doubt):.1%}"
        slowdown = np.where(usable, np.exp(np.maximum(judged.log_slowdown + limits.optimism, 0.0) + off), np.nan)
        return Prediction(index, judged.order, slowdown, judged.spread, doubt, reason, distance=distance)

    def choose(
        self,
        arguments: features.Arguments,
        configs: Sequence[Any],
        device: devices.DeviceFacts | None = None,
        *,
        default: Any = None,
        extra: Sequence[Mapping[str, float]] | None = None,
    ) -> Prediction:
        """Like `predict`, with the default given as a config; it need not be among the candidates."""
        index = next((i for i, c in enumerate(configs) if c == default), None)
        return self.predict(arguments, configs, device, default=index, extra=extra)

    def _shown(self, i: int) -> str:
        """Returns a training shape in words: the numbers that varied."""
        shown = [
            f"{name}={2.0**value:.0f}"
            for name, value in zip(self.spec_.own_numbers, self.neighbours_.numbers[i], strict=True)
            if self.spec_.numbers[name][2] and not np.isnan(value)
        ]
        return ", ".join(shown)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything the model holds."""
        return hashlib.sha256(self.dumps()).hexdigest()[:20]

    def dumps(self) -> bytes:
        """Returns the bytes of the model's file: equal for equal models."""
        arrays = {f"scores.{n}": a for n, a in self.forest_.packed().items()}
        if self.failures_ is not None:
            arrays |= {f"failures.{n}": a for n, a in self.failures_.packed().items()}
        near = self.neighbours_
        arrays |= {f"near.{n}": a for n, a in near.packed().items()}
        facts = dataclasses.asdict(self.facts_)
        manifest = {
            "schema": SCHEMA,
            "version": VERSION,
            "op": self.op_,
            "device_kind": self.device_kind_,
            "facts": facts,
            "spec": self.spec_.to_json(),
            "spec_digest": self.spec_.digest,
            "calibration": dataclasses.asdict(self.calibration_),
            "configs": list(near.texts),
            "data_digest": self.data_digest_,
            "settings": {name: value for name, value in self._init_args().items() if value is not None},
        }
        return modelfile.pack(arrays, manifest)

    def _init_args(self) -> dict[str, int | None]:
        return {
            "members": self.members,
            "iterations": self.iterations,
            "max_leaves": self.max_leaves,
            "seed": self.seed,
        }

    def save(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Writes the model to a path or an open binary file."""
        if isinstance(file, (str, os.PathLike)):
            pathlib.Path(file).write_bytes(self.dumps())
        else:
            file.write(self.dumps())

    @classmethod
    def load(cls, file: str | os.PathLike[str] | IO[bytes]) -> "CostModel":
        """Reads a model.

        Raises:
          FormatError: if the file is damaged or of another version.
        """
        arrays, manifest = modelfile.unpack(file)
        if manifest.get("schema") != SCHEMA or manifest.get("version") != VERSION:
            raise errors.FormatError(
                f"a cost model must have schema {SCHEMA} and version {VERSION}, got "
                f"{str(manifest.get('schema'))[:40]!r} and {str(manifest.get('version'))[:20]!r}; train it again"
            )
        try:
            settings = {str(k): int(v) for k, v in manifest["settings"].items()}
            self = cls(**settings)
            self.op_, self.device_kind_ = str(manifest["op"]), str(manifest["device_kind"])
            self.data_digest_ = str(manifest["data_digest"])
            self.facts_ = devices.DeviceFacts(**manifest["facts"])
            self.spec_ = features.FeatureSpec.from_json(manifest["spec"])
            self.calibration_ = Calibration.from_json(manifest["calibration"])
            self.forest_ = _forest_of(_taken(arrays, "scores."), len(self.spec_.names))
            failures = _taken(arrays, "failures.")
            self.failures_ = _forest_of(failures, len(self.spec_.names)) if failures else None
            texts = tuple(map(str, manifest["configs"]))
            self.neighbours_ = neighbours.Neighbours.unpacked(_taken(arrays, "near."), texts)
        except errors.FormatError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise errors.FormatError(f"the cost model is damaged: {error!r}") from error
        self._check(arrays, manifest)
        return self

    def _check(self, rest: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """Checks what belongs together after reading.

        Raises:
          FormatError: if parts do not fit each other.
        """
        spec = self.spec_
        self.neighbours_.check(len(spec.own_numbers), len(spec.own_categories))
        known = set(_column_names(spec))
        checks = {
            "the layout must have the digest that was stored": spec.digest == manifest.get("spec_digest"),
            "the columns must be ones that the layout can make": set(spec.names) <= known,
            "there must be no further arrays": not rest,
            "a core must be a positive number": type(self.facts_.cores) is int and self.facts_.cores > 0,
            "the ensemble must have members with trees": self.forest_.members > 0 and len(self.forest_.roots) > 0,
        }
        for message, holds in checks.items():
            if not holds:
                raise errors.FormatError(f"the cost model is damaged: {message}")


def _taken(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Takes the arrays whose names begin so out of a file's."""
    return {name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}


def _forest_of(packed: Mapping[str, np.ndarray], columns: int) -> trees.Forest:
    forest = trees.Forest.unpacked(packed)
    forest.check(columns)
    return forest


def _column_names(spec: features.FeatureSpec) -> list[str]:
    """Returns all columns that a layout can make, by making them for made-up arguments."""
    scalars: dict[str, features.Scalar] = {n: max(low, 1.0) for n, (low, _, _) in spec.numbers.items()}
    scalars |= {n: next((v for v in reversed(seen)), "") for n, seen in spec.categories.items()}
    config = {n: f.low if f.numeric else None for n, f in spec.fields.items()}
    try:
        return list(spec.columns(scalars, [config], devices.DeviceFacts("", "cpu")))
    except (KeyError, TypeError, ValueError) as error:
        raise errors.FormatError(f"the cost model is damaged: its layout makes no columns ({error!r})") from error


def _abstaining(count: int, default: int | None, reason: str) -> Prediction:
    first = 0 if default is None else default
    order = np.array([first, *(i for i in range(count) if i != first)])
    unknown = np.full(count, np.nan)
    return Prediction(first, order, unknown, unknown, abstain=reason)


@dataclasses.dataclass(frozen=True)
class _Judged:
    """Member scores of one problem, read."""

    members: np.ndarray  # log slowdown by each member, [members, configs]
    log_slowdown: np.ndarray
    spread: np.ndarray
    order: np.ndarray
    usable: np.ndarray

    def gain(self, index: int, default: int) -> float:
        return float(self.log_slowdown[default] - self.log_slowdown[index])

    def agree_on_gain(self, index: int, default: int | None, least: float) -> bool:
        """Whether each member expects a gain over the default: then abstaining would only fall to something worse."""
        if default is None or index == default or not self.usable[default]:
            return False
        return bool(np.all(self.members[:, default] - self.members[:, index] > least))

    def doubt(self, index: int) -> float:
        best = np.where(self.usable, self.members, np.inf).min(axis=1)
        return float((self.members[:, index] - best).mean() + self.log_slowdown[index])


def _judge(scores: np.ndarray, usable: np.ndarray, off: float = 0.0) -> _Judged:
    """Reads member scores; `off`, what another device may make of them, widens the spread."""
    mean = scores.mean(axis=0)
    members, log_slowdown = _expanded(scores), _expanded(mean)
    spread = np.hypot(members.std(axis=0), off)
    order = np.argsort(np.where(usable, mean, np.inf), kind="stable")
    return _Judged(members, log_slowdown, spread, order, usable)


def _compressed(log_slowdown: np.ndarray) -> np.ndarray:
    """Returns what the trees learn: the root of the log slowdown."""
    return np.sqrt(log_slowdown)


def _expanded(score: np.ndarray) -> np.ndarray:
    """Returns the log slowdown that a score stands for."""
    return np.maximum(score, 0.0) ** 2


class _Training:
    """Training problems as one matrix."""

    def __init__(self, problems: Sequence[Problem], facts: devices.DeviceFacts):
        self.problems = problems
        scalars = [features.describe(p.arguments) for p in problems]
        fields = [[features.config_fields(c) for c in p.configs] for p in problems]
        extra = sorted({name for p in problems for e in p.extra or () for name in e})
        spec = features.FeatureSpec.learn(list(zip(scalars, fields, strict=True)), extra, problems[0].tiles)
        blocks, names = [], []
        for problem, s, f in zip(problems, scalars, fields, strict=True):
            columns = spec.columns(s, f, facts, problem.extra)
            names = names or list(columns)
            block = np.empty((len(names), len(f)), np.float32)
            for i, name in enumerate(names):
                # An optional array that is absent here has no columns of its own.
                block[i] = columns.get(name, np.nan)
            names += [n for n in columns if n not in names]
            blocks.append(block)
        self.spec, self.matrix = spec.pruned(_stack(blocks, len(names)), names)
        self.target = _compressed(np.concatenate([p.log_slowdown for p in problems]))
        self.ends = np.cumsum([len(f) for f in fields])
        self.problem_of_row = np.repeat(np.arange(len(problems)), [len(f) for f in fields])
        points = [self.spec.point(s) for s in scalars]
        self.numbers = np.stack([n for n, _ in points])
        self.codes = np.stack([c for _, c in points])

    def rows(self, i: int) -> slice:
        """Returns the rows of a problem."""
        return slice(self.ends[i] - len(self.problems[i].configs), self.ends[i])


def _stack(blocks: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Joins blocks `[columns, rows]`, some of which lack the last columns, into `[rows, columns]`."""
    padded = [np.pad(b, ((0, columns - len(b)), (0, 0)), constant_values=np.nan) for b in blocks]
    return np.ascontiguousarray(np.concatenate(padded, axis=1).T)


def _regressor(x: np.ndarray, y: np.ndarray, seed: int, **settings: Any) -> Any:
    """Fits one member, with one thread: sums in another order would change the last bits."""
    import threadpoolctl
    from sklearn.ensemble import HistGradientBoostingRegressor

    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        # A column without any number in these rows cannot be binned; as a constant no tree splits on it.
        x = np.where(np.isnan(x).all(axis=0), np.float32(0), x)
        options: dict[str, Any] = {"early_stopping": False, "random_state": seed, **settings}
        return HistGradientBoostingRegressor(**options).fit(x, y)


def _fit_failures(training: _Training, seed: int) -> trees.Forest | None:
    """Learns which configs fail; None if too few did."""
    failed = np.isnan(training.target)
    if len(set(training.problem_of_row[failed])) < 2:
        return None
    settings = {"max_iter": 60, "max_leaf_nodes": 15, "min_samples_leaf": 5, "max_features": 0.5}
    return trees.forest_from_sklearn([_regressor(training.matrix, failed.astype(float), seed, **settings)])


def _fit_ensemble(
    training: _Training, members: int, settings: Mapping[str, Any], seed: int
) -> tuple[trees.Forest, list[np.ndarray]]:
    """Fits the ensemble and judges each problem by models that never saw its shape.

    Member `i` leaves out fold `i`. An extra model `i`, used for judging alone, leaves out folds `i` and `i + 1`: so
    three models are new to each shape, and their disagreement can be read as the ensemble's will be.

    Returns:
      The forest of the members, and for each problem the scores `[3, configs]`.
    """
    fold = dataset.folds([p.group for p in training.problems], members)
    fold_of_row = fold[training.problem_of_row]
    ran = ~np.isnan(training.target)

    def fit(left_out: Sequence[int], number: int) -> Any:
        keep = ran & ~np.isin(fold_of_row, left_out)
        return _regressor(training.matrix[keep], training.target[keep], seed + number, **settings)

    ensemble = trees.forest_from_sklearn([fit((i,), i) for i in range(members)])
    judges = trees.forest_from_sklearn([fit((i, (i + 1) % members), members + i) for i in range(members)])
    scores: list[np.ndarray] = [np.empty(0)] * len(training.problems)
    for i in range(members):
        rows = np.flatnonzero(fold_of_row == i)
        x = training.matrix[rows]
        before = (i - 1) % members
        judged = np.concatenate([ensemble.predict(x)[[i]], judges.predict(x)[[before, i]]])
        start = 0
        for p in np.flatnonzero(fold == i).tolist():
            count = len(training.problems[p].configs)
            scores[p] = judged[:, start : start + count]
            start += count
    return ensemble, scores


def _calibrate(training: _Training, scores: Sequence[np.ndarray]) -> Calibration:
    problems = training.problems
    judged = [_judge(s, p.works) for s, p in zip(scores, problems, strict=True)]
    min_gain = _least_safe_gain(problems, judged)
    lost, expected, doubts = np.empty(len(problems)), np.empty(len(problems)), np.empty(len(problems))
    agreed = np.zeros(len(problems), dtype=bool)
    for i, (problem, j) in enumerate(zip(problems, judged, strict=True)):
        index = int(j.order[0])
        default = problem.default if problem.default is not None and problem.works[problem.default] else None
        if default is not None and j.gain(index, default) <= min_gain:
            index = default
        agreed[i] = j.agree_on_gain(index, default, min_gain)
        lost[i], expected[i], doubts[i] = problem.log_slowdown[index], j.log_slowdown[index], j.doubt(index)
    max_doubt = _largest_safe_doubt(lost, doubts)
    kept = (doubts <= max_doubt) | agreed
    stood_by = lost[kept] if kept.any() else lost
    return Calibration(
        min_gain=min_gain,
        max_doubt=max_doubt,
        max_distance=_largest_usual_distance(training),
        optimism=float((lost - expected).mean()),
        shapes=len(problems),
        coverage=float(kept.mean()),
        mean_efficiency=float(np.exp(-stood_by).mean()),
        over_5=float((stood_by > _SLOW).mean()),
        over_15=float((stood_by > _VERY_SLOW).mean()),
    )


def _least_safe_gain(problems: Sequence[Problem], judged: Sequence[_Judged]) -> float:
    """Returns the least predicted gain over the default that was real: at most 5 % of the moves cost beyond noise.

    Half a move is allowed on top, so that a single miss among few shapes does not keep all at their defaults.
    """
    moves = []
    for problem, j in zip(problems, judged, strict=True):
        if problem.default is not None and problem.works[problem.default]:
            index = int(j.order[0])
            real = problem.log_slowdown[problem.default] - problem.log_slowdown[index]
            moves.append((j.gain(index, problem.default), float(real)))
    if not moves:
        return 0.0
    gains = np.array(moves)
    for least in _GAINS:
        moved = gains[gains[:, 0] > least, 1]
        if (moved < -_HARM).sum() <= 0.05 * len(moved) + 0.5:
            return least
    return _GAINS[-1]


def _largest_safe_doubt(lost: np.ndarray, doubts: np.ndarray) -> float:
    """Returns the largest doubt up to which at most 1 % of choices lost over 15 % and at most 5 % over 5 %.

    It never closes the model to more than a tenth of the shapes: what an abstention falls to is worse as a rule.
    """
    order = np.argsort(doubts, kind="stable")
    count = np.arange(1, len(order) + 1)
    # Half a shape is allowed on top, so that a single miss among few shapes does not close the model.
    safe = (np.cumsum(lost[order] > _VERY_SLOW) <= 0.01 * count + 0.5) & (
        np.cumsum(lost[order] > _SLOW) <= 0.05 * count + 0.5
    )
    if safe.all():
        # Nothing went wrong, so nothing says where it would: leave room beyond what was seen.
        return float(doubts.max()) * 1.5 + 0.02
    usual = float(np.quantile(doubts, _LEAST_COVERAGE))
    return max(usual, float(doubts[order[np.flatnonzero(safe)[-1]]])) if safe.any() else usual


def _largest_usual_distance(training: _Training) -> float:
    """Returns the distance up to which shapes count as near: what is usual among the training shapes themselves."""
    groups = np.array([p.group for p in training.problems])
    nearest = []
    for i in range(len(groups)):
        others = groups != groups[i]
        found = neighbours.distances(
            training.numbers[i], training.codes[i], training.numbers[others], training.codes[others]
        )
        nearest.append(found.min())
    return float(max(np.quantile(nearest, 0.98) * 1.25, 0.5))


def _data_digest(problems: Sequence[Problem]) -> str:
    """Returns a hash of the training data."""
    parts = [[p.key, [features.config_text(c) for c in p.configs], p.times_ms.tobytes().hex()] for p in problems]
    return serialization.digest(parts)
