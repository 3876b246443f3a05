import dataclasses
import enum
import functools
import json

import numpy as np
import pytest

from tokamax._src import devices, errors, shapes
from tokamax._src.costmodel import features

F32 = np.dtype("float32")


class Mode(enum.Enum):
    FAST = 1


def learn(problems, facts):
    described = [features.describe(p.arguments) for p in problems]
    fields = [[features.config_fields(c) for c in p.configs] for p in problems]
    spec = features.FeatureSpec.learn(list(zip(described, fields, strict=True)))
    columns = [spec.columns(d, f, facts) for d, f in zip(described, fields, strict=True)]
    names = list(columns[0])
    blocks = [
        np.stack([np.broadcast_to(np.float32(c[n]), len(f)) for n in names])
        for c, f in zip(columns, fields, strict=True)
    ]
    return spec.pruned(np.concatenate(blocks, axis=1).T, names)


def test_describe_names_every_leaf():
    described = features.describe(
        {
            "x": shapes.ArraySpec((4, 8), F32, vmap=(3, 0)),
            "tree": {"b": [True, None], "a": 2},
            "scale": 0.25,
            "mode": Mode.FAST,
            "f": functools.partial(np.sum, axis=0),
            "dtype": np.dtype("int8"),
        }
    )
    assert described["x"] == "rank 2" and described["x.dtype"] == "f32" and described["x.vmap"] == 3
    assert (described["x[0]"], described["x[1]"]) == (4, 8)
    assert described["tree.a.value"] == 2 and described["tree.b.0"] == "True" and described["tree.b.1"] == "None"
    assert described["scale"] == "float 1" and described["mode"] == "Mode.FAST" and described["dtype"] == "dtype i8"
    assert features.dimensions(described) == {"x[0]": 4, "x[1]": 8}


def test_tiled_dimensions_are_recognised(problems, facts):
    spec, _ = learn(problems, facts)
    assert spec.fields["block_m"].tiles == "a[0]"
    assert spec.fields["block_n"].tiles == "b[1]"
    assert spec.fields["unroll"].tiles is None
    assert spec.twins["b[0]"] == "a[1]"


def test_columns_are_what_they_say(problems, facts, make_problem):
    spec, _ = learn(problems, facts)
    described = features.describe(make_problem(100, 64, 300).arguments)
    configs = [{"block_m": 32, "block_n": None, "unroll": 2}, {"block_m": 100, "block_n": 128, "unroll": 1}]
    columns = spec.columns(described, configs, facts)
    np.testing.assert_allclose(columns["log2(count a[0]/block_m)"], [2.0, 0.0])
    np.testing.assert_allclose(columns["waste(a[0]/block_m)"], [0.28, 0.0])
    np.testing.assert_allclose(columns["none(block_n)"], [1.0, 0.0])
    # None stands for the whole axis.
    np.testing.assert_allclose(columns["log2(block_n)"], np.log2([301, 129]))
    np.testing.assert_allclose(columns["waves(block_m*block_n)"], [1.0, 1.0])
    np.testing.assert_allclose(columns["fill(block_m*block_n)"], [1.0, 0.75])


def test_constant_and_repeated_columns_are_dropped(problems, facts):
    spec, matrix = learn(problems, facts)
    assert matrix.shape[1] == len(spec.names) == len({c.tobytes() for c in matrix.T})
    assert np.all(matrix.max(axis=0) > matrix.min(axis=0))
    assert "log2(a.vmap)" not in spec.names and not any("b[0]" in name for name in spec.names)


def test_layout_survives_json(problems, facts):
    spec, _ = learn(problems, facts)
    again = features.FeatureSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec and again.digest == spec.digest


@pytest.mark.parametrize("damage", [{}, {"numbers": 3}, {"fields": {"a": {}}}, None, []])
def test_damaged_layout_is_refused(problems, facts, damage):
    spec, _ = learn(problems, facts)
    data = {**spec.to_json(), **damage} if damage else damage
    with pytest.raises(errors.FormatError, match="feature layout"):
        features.FeatureSpec.from_json(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "slow"}, "mode is text slow"),
        ({"other": 1}, "other"),
        ({"scale": None}, "scale is None"),
        ({"a": shapes.ArraySpec((128, 64), np.dtype("float16"))}, "a.dtype is f16"),
        ({"a": shapes.ArraySpec((128, 64, 1), F32)}, "rank 3"),
        ({"a": shapes.ArraySpec((128, 32), F32)}, "always equalled"),
        ({"a": shapes.ArraySpec((2**20, 64), F32)}, "training saw"),
        ({"a": shapes.ArraySpec((128, 64), F32, vmap=(4,))}, "a.vmap is 4"),
    ],
)
def test_arguments_outside_of_training_are_named(problems, facts, make_problem, change, reason):
    spec, _ = learn(problems, facts)
    arguments = make_problem(128, 64, 256).arguments
    assert spec.mismatch(features.describe(arguments)) is None
    assert reason in spec.mismatch(features.describe({**arguments, **change}))


def test_absent_argument_is_a_mismatch(problems, facts, make_problem):
    spec, _ = learn(problems, facts)
    described = features.describe(make_problem(128, 64, 256).arguments)
    del described["scale"]
    assert "scale is absent" in spec.mismatch(described)


def test_unknown_config_values_are_not_known(problems, facts):
    spec, _ = learn(problems, facts)
    good = {"block_m": 64, "block_n": None, "unroll": 1}
    configs = [good, {**good, "block_m": 4096}, {**good, "unroll": None}, {**good, "stages": 2}, {"block_m": 64}]
    assert spec.known(configs).tolist() == [True, False, False, False, False]


def test_configs_may_hold_bools_enums_and_text():
    configs = [{"flag": True, "mode": Mode.FAST, "name": "x"}, {"flag": False, "mode": None, "name": "y"}]
    described = features.describe({"x": shapes.ArraySpec((4,), F32)})
    spec = features.FeatureSpec.learn([(described, configs)])
    columns = spec.columns(described, configs, devices.DeviceFacts("t", "cpu"))
    assert columns["is(flag)"].tolist() == [1.0, 0.0]
    assert columns["none(mode)"].tolist() == [0.0, 1.0]
    assert columns["is(name)"].tolist() == [0.0, 1.0]
    assert spec.known(configs).all()


def test_a_named_tile_is_taken_at_its_word():
    squares = [features.describe({"a": shapes.ArraySpec((n, n), F32)}) for n in (512, 1024, 2048)]
    table = [(square, [{"block_n": b, "other": b} for b in (16, 512)]) for square in squares]
    learned, named = (features.FeatureSpec.learn(table, tiles=t) for t in (None, {"block_n": "a[1]", "other": "b[7]"}))
    assert learned.fields["block_n"].tiles is None  # No block is capped by a square, so nothing tells.
    assert named.fields["block_n"].tiles == "a[0]"  # Its twin in these squares.
    assert named.fields["other"].tiles is None  # There is no such dimension.
    assert "log2(footprint)" in named.columns(*table[0], devices.DeviceFacts("t", "cpu"))


def test_flags_come_in_pairs_too():
    flags = [{"p": p, "q": q, "s": True} for p in (False, True) for q in (False, True)]
    described = [features.describe({"x": shapes.ArraySpec((4,), F32), **f}) for f in flags]
    spec = features.FeatureSpec.learn([(d, [{"t": 1}]) for d in described])
    pairs = [spec.columns(d, [{"t": 1}], devices.DeviceFacts("t", "cpu"))["is(p, q)"] for d in described]
    assert pairs == [0, 1, 2, 3]
    assert "is(p, s)" not in spec.columns(described[0], [{"t": 1}], devices.DeviceFacts("t", "cpu"))


def test_config_text_does_not_depend_on_the_kind_of_config():
    @dataclasses.dataclass(frozen=True)
    class Config:
        b: int = 1
        a: bool | None = None

    assert features.config_text(Config()) == features.config_text({"a": None, "b": 1}) == "a=None,b=1"
    with pytest.raises(errors.ArgumentError, match="config must be"):
        features.config_text(3)
