"""Boosted trees as flat numpy arrays: exported once after training, evaluated without scikit-learn.

All trees of all members of an ensemble lie in one array of nodes. Each tree is stored in preorder, so the left child
of node `i` is `i + 1` and only the distance to the right child is kept. A file holds them packed: inner nodes and
leaves apart, the former with the narrowest integers that do, the latter with two bytes each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import errors

_LEAF = -1
_LARGEST_LEAF = float(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class Forest:
    """An ensemble of boosted trees.

    Attributes:
      feature: int16 `[nodes]`, the column that is compared, -1 in a leaf.
      threshold: float32 `[nodes]`, goes left if `x <= threshold`; in a leaf, its value, a float16 number.
      right: int16 `[nodes]`, distance to the right child, 0 in a leaf.
      missing_left: uint8 `[nodes]`, whether nan goes left.
      roots: int32 `[trees]`, first node of each tree; trees of a member are neighbours.
      first_tree: int32 `[members]`, first tree of each member.
      baseline: float32 `[members]`, added to the sum over the member's trees.
    """

    feature: np.ndarray
    threshold: np.ndarray
    right: np.ndarray
    missing_left: np.ndarray
    roots: np.ndarray
    first_tree: np.ndarray
    baseline: np.ndarray

    @property
    def members(self) -> int:
        """Number of members."""
        return len(self.baseline)

    def member(self, i: int, trees: int | None = None) -> "Forest":
        """Returns one member on its own, or only its first trees, which correct the most."""
        first, end = [*self.first_tree.tolist(), len(self.roots)][i : i + 2]
        end = end if trees is None else min(end, first + trees)
        starts = [*self.roots.tolist(), len(self.feature)]
        nodes = slice(starts[first], starts[end])
        arrays = {name: getattr(self, name)[nodes] for name in ("feature", "threshold", "right", "missing_left")}
        roots = self.roots[first:end] - self.roots[first]
        return Forest(**arrays, roots=roots, first_tree=np.zeros(1, np.int32), baseline=self.baseline[[i]])

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Evaluates every member.

        Args:
          x: float32 features `[rows, columns]`.

        Returns:
          float64 `[members, rows]`.
        """
        rows = len(x)
        if rows == 0 or len(self.roots) == 0:
            return np.repeat(self.baseline.astype(np.float64)[:, None], rows, axis=1)
        left, right, roots = self._settled(x)
        inner = self.feature >= 0
        node = np.repeat(roots[:, None], rows, axis=1).ravel()
        values = np.ascontiguousarray(x.T).ravel()
        offset = np.maximum(self.feature, 0).astype(np.int32) * rows
        lane = np.flatnonzero(inner[node])
        row = (lane % rows).astype(np.int32)
        here = node[lane]
        has_nan = bool(np.isnan(values).any())
        while len(lane):
            value = values.take(offset.take(here) + row)
            go_left = value <= self.threshold.take(here)
            if has_nan:
                go_left |= np.isnan(value) & self.missing_left.take(here).astype(bool)
            here = np.where(go_left, left.take(here), right.take(here))
            going = inner.take(here)
            if not going.all():
                done = ~going
                node[lane[done]] = here[done]
                lane, row, here = lane[going], row[going], here[going]
        leaves = self.threshold.take(node).reshape(len(roots), rows).astype(np.float64)
        return np.add.reduceat(leaves, self.first_tree, axis=0) + self.baseline[:, None]

    def _settled(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns children and roots with the comparisons that are equal for all rows already made.

        The candidates of one shape share all features of the arguments, so half of each path is walked only once.
        """
        index = np.arange(len(self.feature), dtype=np.int32)
        left = np.minimum(index + 1, len(index) - 1).astype(np.int32)
        right = index + self.right
        inner = self.feature >= 0
        first = x[0]
        same = np.all((x == first) | (np.isnan(x) & np.isnan(first)), axis=0)
        column = np.maximum(self.feature, 0)
        settled = inner & same[column]
        value = first[column]
        go_left = (value <= self.threshold) | (np.isnan(value) & self.missing_left.astype(bool))
        jump = np.where(settled, np.where(go_left, left, right), index)
        while True:
            further = jump[jump]
            if np.array_equal(further, jump):
                break
            jump = further
        return jump[left], jump[right], jump[self.roots]

    def packed(self) -> dict[str, np.ndarray]:
        """Returns arrays by name for a file, a third to half the size: about 4 bytes a node."""
        inner = self.feature >= 0
        return {
            "inner": np.packbits(inner),
            "feature": _narrow(self.feature[inner]),
            "right": _narrow(self.right[inner]),
            "missing_left": np.packbits(self.missing_left[inner].astype(bool)),
            "threshold": self.threshold[inner],
            "leaves": self.threshold[~inner].astype(np.float16),
            "roots": self.roots,
            "first_tree": self.first_tree,
            "baseline": self.baseline,
        }

    @classmethod
    def unpacked(cls, arrays: Mapping[str, np.ndarray]) -> "Forest":
        """Returns the forest of packed arrays; `check` says whether it can be walked.

        Raises:
          FormatError: if the arrays do not fit each other.
        """
        dtypes = {"inner": "u1", "feature": "u1 u2", "right": "u1 u2", "missing_left": "u1"}
        dtypes |= {"threshold": "f4", "leaves": "f2", "roots": "i4", "first_tree": "i4", "baseline": "f4"}
        _require(arrays.keys() == dtypes.keys(), f"the arrays must be {', '.join(dtypes)}")
        for name, kinds in dtypes.items():
            array = arrays[name]
            _require(array.ndim == 1 and array.dtype.str[1:] in kinds.split(), f"{name} must be {kinds} of rank 1")
        splits, leaves = len(arrays["threshold"]), len(arrays["leaves"])
        nodes = splits + leaves
        _require(len(arrays["inner"]) == -(-nodes // 8), "inner must have one bit per node")
        _require(len(arrays["missing_left"]) == -(-splits // 8), "missing_left must have one bit per split")
        _require(len(arrays["feature"]) == len(arrays["right"]) == splits, "node arrays must agree")
        inner = np.unpackbits(arrays["inner"], count=nodes).astype(bool)
        _require(int(inner.sum()) == splits, "inner must count the splits")
        for name in ("feature", "right"):
            _require(int(arrays[name].max(initial=0)) <= np.iinfo(np.int16).max, f"{name} must fit 15 bits")
        feature, right, missing_left = np.full(nodes, _LEAF, np.int16), np.zeros(nodes, np.int16), np.zeros(nodes, "u1")
        feature[inner], right[inner] = arrays["feature"], arrays["right"]
        missing_left[inner] = np.unpackbits(arrays["missing_left"], count=splits)
        threshold = np.empty(nodes, np.float32)
        threshold[inner], threshold[~inner] = arrays["threshold"], arrays["leaves"]
        rest = {name: arrays[name] for name in ("roots", "first_tree", "baseline")}
        return cls(feature, threshold, right, missing_left, **rest)

    def check(self, columns: int) -> None:
        """Checks arrays that came from a file.

        Args:
          columns: number of feature columns.

        Raises:
          FormatError: if an index is out of range, a value is not finite, or walking a tree might not end.
        """
        dtypes = ("int16", "float32", "int16", "uint8", "int32", "int32", "float32")
        for field, dtype in zip(dataclasses.fields(self), dtypes, strict=True):
            array = getattr(self, field.name)
            _require(array.ndim == 1 and array.dtype == np.dtype(dtype), f"{field.name} must be {dtype} of rank 1")
        nodes, trees = len(self.feature), len(self.roots)
        index = np.arange(nodes)
        inner = self.feature >= 0
        _require(len(self.threshold) == len(self.right) == len(self.missing_left) == nodes, "node arrays must agree")
        _require(len(self.first_tree) == len(self.baseline), "there must be one baseline per member")
        _require(bool(np.all((self.feature >= _LEAF) & (self.feature < columns))), "features must be columns")
        _require(bool(np.isfinite(self.threshold).all() and np.isfinite(self.baseline).all()), "values must be finite")
        # Children always lie further on, so a walk ends; the last node must be a leaf.
        _require(bool(np.all(self.right[inner] > 1)), "a right child must follow the left one")
        _require(bool(np.all(index[inner] + self.right[inner] < nodes)), "children must be nodes")
        _require(bool(np.all((self.roots >= 0) & (self.roots < nodes))), "roots must be nodes")
        ordered = np.all(np.diff(self.first_tree) > 0) and (trees == 0 or self.first_tree[:1].sum() == 0)
        _require(bool(ordered and np.all(self.first_tree < max(trees, 1))), "first_tree must rise from 0")


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(np.uint8 if array.max(initial=0) < 256 else np.uint16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise errors.FormatError(f"tree arrays are damaged: {message}")


def forest_from_sklearn(regressors: Sequence[Any]) -> Forest:
    """Exports fitted `HistGradientBoostingRegressor`s, one per member.

    This is the only place that reads scikit-learn's private `_predictors` and `_baseline_prediction`.
    """
    trees = [[iteration[0].nodes for iteration in r._predictors] for r in regressors]
    flat = [nodes for member in trees for nodes in member]
    counts = [len(member) for member in trees]
    sizes = [len(nodes) for nodes in flat]
    nodes = np.concatenate(flat)
    leaf = nodes["is_leaf"].astype(bool)
    start = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    within = np.arange(len(nodes)) - start
    if np.any(nodes["left"][~leaf] != within[~leaf] + 1) or np.any(nodes["is_categorical"]):
        raise errors.UnsupportedError("trees must come in preorder and without categorical splits")
    right = np.where(leaf, 0, nodes["right"].astype(np.int64) - within)
    # Leaves are small corrections: rounded to two bytes they sum up to within a thousandth of the score.
    values = np.clip(nodes["value"], -_LARGEST_LEAF, _LARGEST_LEAF).astype(np.float16)
    threshold = np.where(leaf, values, _float32_below(nodes["num_threshold"]))
    return Forest(
        feature=np.where(leaf, _LEAF, nodes["feature_idx"]).astype(np.int16),
        threshold=threshold.astype(np.float32),
        right=right.astype(np.int16),
        missing_left=(nodes["missing_go_to_left"].astype(bool) & ~leaf).astype(np.uint8),
        roots=np.cumsum([0, *sizes[:-1]]).astype(np.int32),
        first_tree=np.cumsum([0, *counts[:-1]]).astype(np.int32),
        baseline=np.array([float(np.ravel(r._baseline_prediction)[0]) for r in regressors], np.float32),
    )


def _float32_below(threshold: np.ndarray) -> np.ndarray:
    """Returns the largest float32 that is not above: for float32 `x`, the answer of `x <= threshold` stays the same."""
    largest = np.finfo(np.float32).max
    near = np.clip(threshold, -largest, largest).astype(np.float32)
    return np.where(near.astype(np.float64) > threshold, np.nextafter(near, np.float32(-np.inf)), near)
