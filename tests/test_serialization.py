import collections
import dataclasses
import enum
import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src import errors, registry, serialization
from tokamax._src.shapes import ArraySpec


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: tuple[int, ...] = ()

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x must not be negative")


Pair = collections.namedtuple("Pair", "left right")


def named(x):
    return x


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, inside):
        self.inside = inside

    def tree_flatten(self):
        return (self.inside,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
leaves = (
    scalars
    | st.sampled_from([Colour.RED, Colour.BLUE, np.dtype("int8"), named, jax.nn.gelu, ArraySpec((2,), jnp.bfloat16)])
    | st.builds(Point, st.integers(0, 9), st.lists(st.integers()).map(tuple))
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(values)
def test_round_trip(value):
    data = json.loads(serialization.dumps(serialization.encode(value)))
    assert serialization.decode(data) == value


@given(st.dictionaries(st.text(), scalars, max_size=5))
def test_text_does_not_depend_on_dict_order(value):
    backwards = dict(reversed(list(value.items())))
    assert serialization.dumps(serialization.encode(value)) == serialization.dumps(serialization.encode(backwards))


def test_special_values():
    assert math.isnan(serialization.decode(serialization.encode(float("nan"))))
    assert serialization.decode(serialization.encode(-math.inf)) == -math.inf
    assert serialization.decode(serialization.encode({1, 2})) == {1, 2}
    assert serialization.decode(serialization.encode(jnp.float32)) == np.dtype("float32")
    assert serialization.decode(serialization.encode(np.float32(0.5))) == 0.5
    assert serialization.decode(serialization.encode(jax.lax.Precision.HIGHEST)) is jax.lax.Precision.HIGHEST


def test_partial():
    back = serialization.decode(serialization.encode(functools.partial(named, 1, key="x")))
    assert (back.func, back.args, back.keywords) == (named, (1,), {"key": "x"})


def test_pytrees_of_other_classes_are_kept_within_the_process():
    back = serialization.decode(serialization.encode(Box(jnp.ones((2, 3)))))
    assert back.inside == ArraySpec((2, 3), jnp.float32)


def test_lambda_cannot_go_into_a_file():
    with pytest.raises(errors.SerializationError, match="lambda.*top level of a module"):
        serialization.encode(lambda x: x)


def test_lambda_is_known_within_the_process():
    function = lambda x: x
    assert serialization.decode(serialization.encode(function, local=True)) is function


def test_public_names_hide_private_module_paths():
    assert serialization.encode(jax.nn.gelu) == {"$name": "jax.nn.gelu"}


@pytest.mark.parametrize(
    "data",
    [
        {"$name": "os.system"},
        {"$name": 3},
        {"$unknown": 1},
        {"$array": "f32"},
        {"$array": 5},
        {"$tuple": 5},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$set": [{}]},
        {"$float": "abc"},
        {"$enum": ["os.system", "x"]},
        {"$enum": [registry.remember(Colour), "GREEN"]},
        {"$data": [registry.remember(Point), {"z": 1}]},
        {"$data": [registry.remember(Point), {"x": -1}]},
        {"$data": [registry.remember(Point), 3]},
        {"$data": ["nowhere.Class", {}]},
        {"$partial": [1, 2, 3]},
        {"$local": "gone"},
        {"$tree": ["gone", []]},
        {"$array": "f32[1]", "$tuple": []},
    ],
)
def test_bad_data_is_a_format_error(data):
    with pytest.raises(errors.FormatError):
        serialization.decode(data)


def test_deep_data_is_a_format_error():
    data = []
    for _ in range(200):
        data = [data]
    with pytest.raises(errors.FormatError, match="deeper"):
        serialization.decode(data)
    with pytest.raises(errors.FormatError):
        serialization.loads("[" * 100_000)


def test_decoding_imports_nothing():
    code = (
        "import sys, tokamax\n"
        "from tokamax._src import errors, serialization\n"
        "before = set(sys.modules)\n"
        "for tag in ('$name', '$enum', '$data', '$namedtuple'):\n"
        "    body = 'antigravity.fly' if tag == '$name' else ['antigravity.fly', {}]\n"
        "    try: serialization.decode({tag: body})\n"
        "    except errors.FormatError: pass\n"
        "assert 'antigravity' not in sys.modules\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
