import shlex

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import Own

import tokamax
from tokamax._src import errors, notation, shapes
from tokamax._src.tools import cli, targets
from toy import Toy, arrays

SPEC = shapes.ArraySpec((8, 128), jnp.float32)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f32[8,128]", SPEC),
        ("bf16[]", shapes.ArraySpec((), jnp.bfloat16)),
        ("f32[8]{3,_}", shapes.ArraySpec((8,), jnp.float32, (3, 0))),
        ("key<fry>[2]", shapes.ArraySpec((2,), jax.eval_shape(lambda: jax.random.key(0)).dtype)),
        ("true", True),
        ("null", None),
        ("3", 3),
        ("-0.5", -0.5),
        ("sum", "sum"),
        ("jax.nn.relu", "jax.nn.relu"),
        ('"a b"', "a b"),
        ("[1, 2]", [1, 2]),
        ('{"$name": "jax.nn.relu"}', jax.nn.relu),
    ],
)
def test_values(text, value):
    assert notation.parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("True", "write true"),
        ("None", "write null"),
        ("f32[8,", "must read like f32"),
        ("f99[8]", "known name"),
        ("a b", "must be an array such as"),
        ("", "must be an array such as"),
        ('{"$name": "os.system"}', "not known in this process"),
    ],
)
def test_what_is_no_value_says_what_is(text, words):
    with pytest.raises(errors.FormatError, match=words):
        notation.parse_value(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.tuples))
def test_text_of_a_value_is_read_back(value):
    assert notation.parse_value(notation.value_text(value)) == value


def test_names_are_given_once():
    assert notation.parse_arguments(["f32[8,128]", "a=1"]) == ([SPEC], {"a": 1})
    with pytest.raises(errors.FormatError, match="a twice"):
        notation.parse_arguments(["a=1", "a=2"])


def read_back(command):
    """The bound arguments that a shell command names."""
    words = shlex.split(command)
    assert words[0] == "tokamax"
    return targets.bound_arguments(cli.parser().parse_args(words[1:]))


def attention():
    q = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    return tokamax.autotuning.get_bound_args(
        jax.grad(lambda q: tokamax.dot_product_attention(q, q, q, is_causal=True).sum()), q
    )


@pytest.mark.parametrize(
    "ba",
    [
        Toy.bind(*arrays(), activation=jax.nn.relu, scale=0.5),
        Own.bind(*arrays()),
        *tokamax.autotuning.get_bound_args(jax.vmap(Toy(), (0, None)), jnp.ones((3, 8, 4)), arrays()[1]),
        *attention(),
    ],
    ids=lambda ba: ba.op.registered_name(),
)
def test_the_command_that_measures_bound_arguments_names_them(ba):
    assert read_back(notation.tune_command(ba)) == (ba,)


def test_what_a_command_cannot_say_has_none(monkeypatch):
    assert notation.tune_command(Toy(flavour="b").bind(*arrays())) is None
    assert notation.tune_command(Toy.bind(*arrays(), activation=lambda x: x)) is None
    monkeypatch.setattr(Own, "__module__", "__main__")
    assert notation.tune_command(Own.bind(*arrays())) is None
