import dataclasses

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from tokamax._src import errors
from tokamax._src.costmodel import trees


def fitted(rows=400, columns=6, seed=0, **settings):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[rng.random(x.shape) < 0.1] = np.nan
    y = np.nan_to_num(x[:, 0]) * np.nan_to_num(x[:, 1]) + np.isnan(x[:, 2])
    model = HistGradientBoostingRegressor(early_stopping=False, random_state=seed, max_iter=20, **settings)
    return rounded(model.fit(x, y)), x


def rounded(model):
    """Gives the leaves of a model the two bytes that they are exported with."""
    for (tree,) in model._predictors:
        tree.nodes["value"] = tree.nodes["value"].astype(np.float16)
    return model


@pytest.fixture(scope="module")
def ensemble():
    return [fitted(seed=s)[0] for s in range(3)]


@pytest.fixture(scope="module")
def forest(ensemble):
    return trees.forest_from_sklearn(ensemble)


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_equals_sklearn(ensemble, forest, rows):
    x = fitted(seed=9)[1][:rows]
    expected = [model.predict(x) for model in ensemble]
    np.testing.assert_allclose(forest.predict(x), expected, rtol=1e-5, atol=1e-5)


def test_equals_sklearn_where_rows_share_columns(ensemble, forest):
    x = fitted(seed=9)[1].copy()
    x[:, :3] = x[0, :3]
    x[:, 2] = np.nan
    np.testing.assert_allclose(forest.predict(x), [m.predict(x) for m in ensemble], rtol=1e-5, atol=1e-5)


def test_values_at_and_beside_thresholds_go_the_same_way():
    model, _ = fitted()
    nodes = model._predictors[0][0].nodes
    splits = nodes[(nodes["is_leaf"] == 0) & np.isfinite(nodes["num_threshold"])]
    middle = splits["num_threshold"].astype(np.float32)
    beside = [np.nextafter(middle, np.float32(-np.inf)), middle, np.nextafter(middle, np.float32(np.inf))]
    x = np.zeros((3 * len(splits), 6), np.float32)
    x[np.arange(len(x)), np.tile(splits["feature_idx"], 3)] = np.concatenate(beside)
    np.testing.assert_allclose(trees.forest_from_sklearn([model]).predict(x)[0], model.predict(x), atol=1e-5)


def test_sklearn_still_has_the_private_fields_that_the_export_reads():
    model, _ = fitted()
    nodes = model._predictors[0][0].nodes
    assert {"value", "feature_idx", "num_threshold", "missing_go_to_left", "left", "right", "is_leaf"} <= set(
        nodes.dtype.names
    )
    assert np.size(model._baseline_prediction) == 1


def test_trees_that_are_only_a_leaf():
    x = np.zeros((50, 2), np.float32)
    model = HistGradientBoostingRegressor(early_stopping=False, max_iter=3).fit(x, np.ones(50))
    forest = trees.forest_from_sklearn([model])
    forest.check(2)
    np.testing.assert_allclose(forest.predict(x), 1.0, atol=1e-6)


def test_no_rows(forest):
    assert forest.predict(np.empty((0, 6), np.float32)).shape == (3, 0)


def test_good_arrays_pass(forest):
    forest.check(6)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("feature", lambda a: a + np.int16(6)),
        ("feature", lambda a: np.full_like(a, -2)),
        ("feature", lambda a: a.astype(np.int32)),
        ("feature", lambda a: np.zeros_like(a)),
        ("threshold", lambda a: a * np.float32(np.nan)),
        ("threshold", lambda a: a[:-1]),
        ("right", lambda a: -a),
        ("right", lambda a: a + np.int16(20000)),
        ("roots", lambda a: a + np.int32(10**6)),
        ("roots", lambda a: a - np.int32(1)),
        ("first_tree", lambda a: a[::-1].copy()),
        ("first_tree", lambda a: a[:1]),
        ("first_tree", lambda a: a + np.int32(1)),
        ("baseline", lambda a: a * np.float32(np.inf)),
        ("missing_left", lambda a: a.astype(np.int8)),
    ],
)
def test_damaged_arrays_are_refused(forest, name, change):
    with np.errstate(invalid="ignore"):
        damaged = dataclasses.replace(forest, **{name: change(getattr(forest, name))})
    with pytest.raises(errors.FormatError, match="damaged"):
        damaged.check(6)


def test_packed_arrays_give_the_same_forest(forest):
    again = trees.Forest.unpacked(forest.packed())
    for field in dataclasses.fields(forest):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(forest, field.name))
    assert sum(a.nbytes for a in forest.packed().values()) < 5 * len(forest.feature)


def test_packing_takes_wider_integers_where_narrow_ones_do_not_do(forest):
    wide = dataclasses.replace(forest, feature=np.where(forest.feature > 0, np.int16(300), forest.feature))
    np.testing.assert_array_equal(trees.Forest.unpacked(wide.packed()).feature, wide.feature)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("inner", lambda a: a[:-1]),
        ("inner", lambda a: ~a),
        ("feature", lambda a: a[:-1]),
        ("feature", lambda a: a.astype(np.float32)),
        ("right", lambda a: np.full(a.shape, 40_000, np.uint16)),
        ("missing_left", lambda a: a[:-1]),
        ("threshold", lambda a: a[:-1]),
        ("leaves", lambda a: a.astype(np.float64)),
        ("leaves", lambda a: np.append(a, a)),
    ],
)
def test_damaged_packed_arrays_are_refused(forest, name, change):
    packed = forest.packed()
    with pytest.raises(errors.FormatError, match="damaged"):
        trees.Forest.unpacked({**packed, name: change(packed[name])})
