"""What the nearest measured shapes say: every config's slowdown there, looked up by distance.

A shape is a point: log2 of its numbers, and codes of its categories (`FeatureSpec.point`). Distance is Euclidean in
octaves, plus one for each category that differs; a number that only one side has counts one octave.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import errors
from tokamax._src.costmodel import features
from tokamax._src.costmodel.dataset import Problem

_UNKNOWN = 255
_STEPS_PER_LOG = 100.0
"""Costs are kept in one byte: steps of 1 % slowdown, up to a factor of 12; what is slower counts as that."""


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """Measured shapes with the slowdown of each config on each.

    Attributes:
      numbers: log2 of the numbers of each shape, float32 `[shapes, numbers]`; nan is absent.
      codes: category codes of each shape, int16 `[shapes, categories]`.
      texts: `features.config_text` of every config that ran anywhere, sorted.
      costs: log(time / best time) in hundredths, uint8 `[shapes, configs]`; 255 where it was not measured or failed.
    """

    numbers: np.ndarray
    codes: np.ndarray
    texts: tuple[str, ...]
    costs: np.ndarray

    @classmethod
    def of(cls, problems: Sequence[Problem], numbers: np.ndarray, codes: np.ndarray) -> "Neighbours":
        """Tabulates problems that lie at given points, in the same order."""
        texts = [[features.config_text(c) for c in p.configs] for p in problems]
        every = tuple(sorted({text for row in texts for text in row}))
        column = {text: i for i, text in enumerate(every)}
        costs = np.full((len(problems), len(every)), _UNKNOWN, np.uint8)
        for row, problem, names in zip(costs, problems, texts, strict=True):
            steps = np.nan_to_num(problem.log_slowdown * _STEPS_PER_LOG, nan=_UNKNOWN)
            steps[problem.works] = np.minimum(steps[problem.works], _UNKNOWN - 1)
            row[[column[name] for name in names]] = np.round(steps).astype(np.uint8)
        return cls(numbers, codes, every, costs)

    def distances(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Returns the distance of a point from each shape, in octaves, float64 `[shapes]`."""
        return distances(numbers, codes, self.numbers, self.codes)

    def table(self, configs: Sequence[Mapping[str, Any]], nearest: np.ndarray) -> np.ndarray:
        """Returns log(time / best time) of configs on some shapes, `[nearest, configs]`; nan where unknown."""
        column = {text: i for i, text in enumerate(self.texts)}
        where = np.array([column.get(features.config_text(c), -1) for c in configs])
        costs = np.where(where >= 0, self.costs[nearest][:, where], _UNKNOWN).astype(np.float64)
        return np.where(costs == _UNKNOWN, np.nan, costs / _STEPS_PER_LOG)

    def packed(self) -> dict[str, np.ndarray]:
        """Returns arrays by name for a file: a bit for each pair of shape and config, a byte for what was measured."""
        measured = self.costs != _UNKNOWN
        packed = {"measured": np.packbits(measured, axis=1), "costs": self.costs[measured]}
        return {"numbers": self.numbers, "codes": self.codes, **packed}

    @classmethod
    def unpacked(cls, arrays: Mapping[str, np.ndarray], texts: Sequence[str]) -> "Neighbours":
        """Reads what `packed` wrote; `check` says whether the parts fit each other.

        Raises:
          FormatError: if costs cannot be unpacked.
        """
        if arrays.keys() != (names := {"numbers", "codes", "measured", "costs"}):
            raise errors.FormatError(f"the cost model is damaged: what is near must be the arrays {sorted(names)}")
        bits, known = arrays["measured"], arrays["costs"]
        if bits.dtype != np.uint8 or bits.ndim != 2 or bits.shape[1] != -(-len(texts) // 8):
            raise errors.FormatError("the cost model is damaged: measured must hold a bit for each shape and config")
        measured = np.unpackbits(bits, axis=1, count=len(texts)).astype(bool)
        if known.dtype != np.uint8 or known.shape != (int(measured.sum()),):
            raise errors.FormatError("the cost model is damaged: costs must hold a byte for each bit of measured")
        costs = np.full(measured.shape, _UNKNOWN, np.uint8)
        costs[measured] = known
        return cls(arrays["numbers"], arrays["codes"], tuple(texts), costs)

    def check(self, numbers: int, categories: int) -> None:
        """Checks what a file gave.

        Raises:
          FormatError: if the parts do not fit each other.
        """
        rows = len(self.numbers) if self.numbers.ndim else 0
        checks = {
            "numbers must be float32 [shapes, numbers] without infinities": self.numbers.dtype == np.float32
            and self.numbers.shape == (rows, numbers)
            and not np.isinf(self.numbers).any(),
            "codes must be int16 [shapes, categories]": self.codes.dtype == np.int16
            and self.codes.shape == (rows, categories),
            "costs must be uint8 [shapes, configs]": self.costs.dtype == np.uint8
            and self.costs.shape == (rows, len(self.texts)),
            "there must be training shapes": rows > 0,
        }
        for message, holds in checks.items():
            if not holds:
                raise errors.FormatError(f"the cost model is damaged: {message}")


def distances(numbers: np.ndarray, codes: np.ndarray, all_numbers: np.ndarray, all_codes: np.ndarray) -> np.ndarray:
    """Returns the distance of a point from each of some points; see the module's text.

    Args:
      numbers: log2 numbers of the point, `[numbers]`; nan is absent.
      codes: its category codes, `[categories]`.
      all_numbers: `[points, numbers]`.
      all_codes: `[points, categories]`.

    Returns:
      float64 `[points]`.
    """
    gap = all_numbers.astype(np.float64) - numbers
    one_absent = np.isnan(all_numbers) != np.isnan(numbers)
    gap = np.where(one_absent, 1.0, np.nan_to_num(gap, nan=0.0))
    return np.sqrt((gap**2).sum(axis=1)) + (all_codes != codes).sum(axis=1)


def unanimous(table: np.ndarray, default: int, *, least: float) -> int | None:
    """Returns the config that is best on average among those faster than the default on every shape; None if none is.

    Args:
      table: log(time / best time), `[shapes, configs]`; nan where unknown.
      default: index of the default.
      least: log gain that counts as faster.
    """
    gains = table[:, [default]] - table
    agreed = np.all(np.nan_to_num(gains, nan=-1.0) > least, axis=0)
    if not agreed.any():
        return None
    return int(np.argmin(np.where(agreed, np.nan_to_num(table, nan=np.inf).mean(axis=0), np.inf)))


def distance_of(a: Mapping[str, features.Scalar], b: Mapping[str, features.Scalar]) -> float:
    """Returns the distance of two described arguments, without a layout: octaves, one for each other difference."""
    total = 0.0
    for name in a.keys() | b.keys():
        x, y = a.get(name), b.get(name)
        if x != y:
            sizes = isinstance(x, (int, float)) and isinstance(y, (int, float)) and x > 0 and y > 0
            total += abs(math.log2(x / y)) if sizes else 1.0  # pyright: ignore[reportOperatorIssue]
    return total
