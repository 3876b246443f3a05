import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src import errors, shapes
from tokamax._src.shapes import ArraySpec

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.int32, jnp.uint8, jnp.bool_, jnp.float8_e4m3fn]
specs = st.builds(
    ArraySpec,
    st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 99), max_size=3).map(tuple),
)


@given(specs)
def test_text_round_trip(spec):
    assert ArraySpec.parse(str(spec)) == spec


def test_text_form():
    assert str(ArraySpec((4096, 512), jnp.bfloat16)) == "bf16[4096,512]"
    assert str(ArraySpec((), jnp.float32, (3, 0))) == "f32[]{3,_}"


@pytest.mark.parametrize("text", ["f32", "f32[a]", "f99[1]", "os.system[1]", "f32[1" * 999, "object[3]x", ""])
def test_bad_text_is_a_format_error(text):
    with pytest.raises(errors.FormatError):
        ArraySpec.parse(text)


def test_random_key_arrays_have_specs():
    spec = shapes.spec_of(jax.random.key(0))
    assert ArraySpec.parse(str(spec)) == spec


def test_numpy_dtype_is_that_of_the_jax_array():
    assert shapes.spec_of(np.zeros((2,), np.float64)) == shapes.spec_of(jnp.zeros((2,)))


def test_vmap_axes_of_size_one_are_dropped():
    a, b = ArraySpec((2,), jnp.float32, (1, 3)), ArraySpec((2,), jnp.float32, (1, 0))
    assert [s.vmap for s in shapes.without_unit_axes([a, b])] == [(3,), (0,)]
