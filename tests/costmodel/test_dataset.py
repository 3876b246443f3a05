import dataclasses
import types

import numpy as np
import pytest

from tokamax._src import errors, shapes
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.costmodel import dataset

F32 = np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 1


class Op:
    config_tiles = {"block": "x[0]"}

    @classmethod
    def registered_name(cls):
        return "op"

    def _get_cost_features(self, ba, config):
        return {"block_squared": float(config.block**2)}


def entry(times, *, rows=64, default=1, key="k"):
    outcomes = {
        Config(b): types.SimpleNamespace(samples_ms=t if isinstance(t, tuple) else (t,))
        if t
        else Failure("run", "died")
        for b, t in times.items()
    }
    abstract = {"x": shapes.ArraySpec((rows, 8), F32)}
    ba = types.SimpleNamespace(op=Op(), abstract=abstract, key=key, autotuning_configs=(Config(1), Config(2)))
    return types.SimpleNamespace(bound_args=ba, outcomes=outcomes, default=Config(default), device_kind="cpu-x")


def test_entries_become_problems():
    (problem,) = dataset.problems_from_entries([entry({1: 2.0, 2: None, 4: 1.0})])
    assert problem.op == "op" and problem.device_kind == "cpu-x" and problem.default == 0
    np.testing.assert_array_equal(problem.works, [True, False, True])
    np.testing.assert_allclose(problem.log_slowdown, [np.log(2), np.nan, 0])
    assert problem.extra[2] == {"block_squared": 16.0}
    assert problem.tiles == {"block": "x[0]"}


def test_what_slows_a_whole_round_slows_no_config():
    quiet, loser = np.array([2.0, 2.1, 1.9, 2.0, 2.05, 1.95]), 3.0
    drift = np.array([1.0, 1.0, 1.5, 1.0, 2.0, 1.0])
    (p,) = dataset.problems_from_entries(
        [
            entry(
                {1: tuple(quiet * drift), 2: tuple(1.1 * quiet * drift), 4: tuple(1.2 * quiet * drift)[:3], 8: (loser,)}
            )
        ]
    )
    np.testing.assert_allclose(p.times_ms[1:3] / p.times_ms[0], [1.1, 1.2], rtol=0.03)
    np.testing.assert_allclose(p.times_ms[[0, 3]], [2.0, 3.0], rtol=0.05)


def test_typical_times_of_nothing():
    assert dataset.typical_ms([]).shape == (0,)
    assert np.isnan(dataset.typical_ms([(), ()])).all()


def test_whole_spaces_are_told_from_parts():
    whole, part = dataset.problems_from_entries([entry({1: 2.0, 2: 1.0}), entry({1: 2.0, 4: 1.0})])
    assert whole.complete and not part.complete


def test_ceiling_needs_samples_enough():
    samples = {1: (1.0, 2.0) * 4, 2: (2.0, 1.0) * 4}
    noisy, few = dataset.problems_from_entries([entry(samples), entry({b: s[:3] for b, s in samples.items()})])
    assert noisy.ceiling == pytest.approx(0.5) and few.ceiling is None
    (steady,) = dataset.problems_from_entries([entry({1: (2.0,) * 6, 2: (1.0,) * 6})])
    assert steady.ceiling == 1.0


def test_sessions_are_not_mixed():
    found = dataset.problems_from_entries([entry({1: 2.0, 2: 1.0}), entry({1: 4.0, 2: 3.0})])
    np.testing.assert_allclose([p.times_ms for p in found], [[2.0, 1.0], [4.0, 3.0]])


def test_entries_that_teach_nothing_are_left_out():
    assert dataset.problems_from_entries([entry({1: 2.0}), entry({1: None, 2: None}), entry({})]) == []


def test_default_that_was_not_measured_is_unknown():
    assert dataset.problems_from_entries([entry({1: 2.0, 2: 1.0}, default=9)])[0].default is None


def test_group_is_the_bare_shape():
    a, b = shapes.ArraySpec((64, 8), F32), shapes.ArraySpec((64, 8), np.dtype("int8"))
    plain = dataset.shape_group({"x": a, "flag": True})
    assert plain == dataset.shape_group({"x": b, "flag": False, "mask": shapes.ArraySpec((1, 64), F32)})
    assert plain == dataset.shape_group({"x": shapes.ArraySpec((8, 64), F32)})
    assert plain != dataset.shape_group({"x": shapes.ArraySpec((64, 9), F32)})


@pytest.mark.parametrize("times", [[1.0], [1.0, -1.0], [1.0, np.inf], [0.0, 1.0]])
def test_wrong_times_are_refused(times):
    with pytest.raises(errors.ArgumentError, match="times_ms"):
        dataset.Problem("op", "k", "g", {}, (Config(1), Config(2)), np.array(times))


def test_folds_keep_groups_together_and_do_not_depend_on_order():
    groups = [f"g{i % 13}" for i in range(50)]
    fold = dataset.folds(groups, 4)
    assert {len(set(fold[np.array(groups) == g])) for g in groups} == {1}
    assert sorted(set(fold)) == [0, 1, 2, 3]
    np.testing.assert_array_equal(dataset.folds(groups[::-1], 4), fold[::-1])


def test_too_few_groups_for_the_folds():
    with pytest.raises(errors.ArgumentError, match="distinct shapes"):
        dataset.folds(["a", "b", "a"], 3)
