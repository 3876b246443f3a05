import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src import numerics
from tokamax._src.numerics import compare
from tokamax._src.shapes import ArraySpec

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn]
INTEGERS = [jnp.int8, jnp.int32, jnp.uint8]


def made(**arguments):
    return numerics.initialize(arguments, seed=0)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, jnp.bool_, jnp.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_random_array_has_the_shape_and_dtype(dtype, shape):
    array = numerics.random_array(ArraySpec(shape, dtype), seed=0)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert np.isfinite(array.astype(np.complex64)).all()


def test_random_arrays_suit_their_dtype():
    assert not numerics.random_array(ArraySpec((5,), jnp.int32), seed=0).any()
    assert numerics.random_array(ArraySpec((5,), jnp.bool_), seed=0).all()
    values = numerics.random_array(ArraySpec((1000,), jnp.float32), seed=0)
    assert abs(values.mean()) < 0.2 and 0.8 < values.std() < 1.2
    assert numerics.random_array(ArraySpec((1000,), jnp.complex64), seed=0).imag.std() > 0.8


def test_vmap_axes_stand_in_front():
    assert numerics.random_array(ArraySpec((2, 5), jnp.float32, (3, 0, 4)), seed=0).shape == (3, 4, 2, 5)


def test_initialize_says_the_same_for_a_seed():
    spec = jax.ShapeDtypeStruct((100,), jnp.float32)
    first, again = made(x=spec, y=spec), made(y=ArraySpec((100,), jnp.float32), x=spec)
    np.testing.assert_array_equal(first["x"], again["x"])
    np.testing.assert_array_equal(first["y"], again["y"])
    assert (numerics.initialize({"x": spec}, seed=1)["x"] != first["x"]).any()


def test_initialize_makes_every_array_of_its_own():
    spec = ArraySpec((100,), jnp.float32)
    arguments = made(x=spec, y=[spec, {"z": spec}], scale=2.0, name=None)
    leaves = [arguments["x"], arguments["y"][0], arguments["y"][1]["z"]]
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert len({np.asarray(x).tobytes() for x in leaves}) == 3
    assert (arguments["scale"], arguments["name"]) == (2.0, None)


def test_initialize_copies_real_arrays():
    x = jnp.ones((4,))
    y = np.ones((4,), np.float32)
    copies = made(x=x, y=y)
    y[0] = 5
    assert copies["x"].unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    assert copies["y"][0] == 1 and isinstance(copies["y"], jax.Array)


def test_overrides_replace_random_values_of_abstract_arrays_alone():
    spec = ArraySpec((2,), jnp.int32)
    arguments = {"labels": spec, "sizes": (spec, jnp.zeros((2,), jnp.int32))}
    values = numerics.initialize(
        arguments, seed=0, overrides={"labels": np.array([1, 2]), "sizes": ([3, 4], [5, 6]), "unknown": 3}
    )
    assert values["labels"].tolist() == [1, 2] and values["labels"].dtype == jnp.int32
    assert [x.tolist() for x in values["sizes"]] == [[3, 4], [0, 0]]


def test_override_of_a_part_leaves_the_rest_random():
    spec = ArraySpec((2,), jnp.float32)
    values = numerics.initialize({"x": [spec, spec]}, seed=0, overrides={"x": [None, np.ones(2)]})
    assert values["x"][1].tolist() == [1, 1] and values["x"][0].tolist() != [1, 1]


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_can_be_made(shape, impl):
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), shape))
    value = made(rng=key)["rng"]
    assert (value.shape, value.dtype) == (key.shape, key.dtype)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_everything_agrees_with_itself(values, dtype):
    x = jnp.asarray([*values, np.nan, np.inf, -np.inf], dtype)
    assert compare(x, x) is None


@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_tolerance_is_a_share_of_the_largest_magnitude(dtype):
    reference = jnp.asarray([0.0, 1.0, -64.0], dtype)
    limit = 64 * numerics.TOLERANCE[np.dtype(dtype).name]
    assert compare(reference.at[0].set(0.9 * limit), reference) is None
    reason = compare(reference.at[0].set(1.2 * limit), reference)
    assert "error" in reason and "at (0,)" in reason and "must be at most" in reason


def test_reason_names_the_place_and_both_values():
    reference = jnp.zeros((3, 4)).at[0, 0].set(np.inf).at[0, 1].set(1.0)
    assert "at (2, 1) must be at most 0.001 (got 3, want 0)" in compare(reference.at[2, 1].set(3.0), reference)


@pytest.mark.parametrize(
    ("actual", "reference", "match"),
    [
        ([1.0, np.nan], [1.0, 2.0], "1 NaN, the reference has 0"),
        ([1.0, 2.0], [np.nan, 2.0], "0 NaN, the reference has 1"),
        ([np.nan, 2.0], [2.0, np.nan], "1 NaN"),
        ([1.0, np.inf], [1.0, 2.0], "1 infinities, the reference has 0"),
        ([1.0, -np.inf], [1.0, np.inf], "elsewhere"),
        ([np.inf, 1.0], [1.0, np.inf], "elsewhere"),
        ([1e-30, 0.0], [0.0, 0.0], "error"),
    ],
)
def test_values_that_disagree(actual, reference, match):
    assert match in compare(jnp.asarray(actual), jnp.asarray(reference))


@pytest.mark.parametrize("dtype", [*INTEGERS, jnp.bool_])
def test_integers_and_bools_must_be_equal(dtype):
    reference = jnp.asarray([0, 1, 1, 0], dtype)
    assert compare(reference, reference) is None
    assert compare(1 - reference.astype(jnp.int32).astype(dtype), reference) is not None
    assert "1 of 4 values differ" in compare(jnp.asarray([1, 1, 1, 0], dtype), reference)


def test_shapes_dtypes_and_structures_must_be_equal():
    x = jnp.ones((2, 3))
    assert "must be f32[2,3], got f32[3,2]" in compare(x.T, x)
    assert "must be f32[2,3], got bf16[2,3]" in compare(x.astype(jnp.bfloat16), x)
    assert "structure" in compare((x, x), [x, x])
    assert "structure" in compare((x,), (x, x))


def test_of_many_outputs_the_wrong_one_is_named():
    x = jnp.ones((2,))
    assert compare({"a": x, "b": (x, x)}, {"a": x, "b": (x, x)}) is None
    assert compare((x, x + 1), (x, x)).startswith("output 1: error")


def test_complex_and_empty_arrays():
    x = jnp.asarray([1 + 2j, 3 - 1j], jnp.complex64)
    assert compare(x * (1 + 1e-5), x) is None
    assert "error" in compare(x.conj(), x)
    assert compare(jnp.zeros((0, 3)), jnp.zeros((0, 3))) is None
    assert compare((), ()) is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_, jnp.float8_e4m3fn])
def test_identical_is_of_bits(dtype):
    x = jnp.asarray([[0, 1], [1, 0]], dtype)
    assert numerics.identical({"a": x, "b": None}, {"a": x + jnp.zeros_like(x), "b": None})
    assert not numerics.identical(x, x.T[:1]) and not numerics.identical(x, ~x if dtype == jnp.bool_ else x + x)
    assert not numerics.identical([x], (x,)) and not numerics.identical(x, x.astype(jnp.float16))
    assert numerics.identical(x[0, 0], x[1, 1])


def test_nan_is_identical_to_nan_and_zero_not_to_minus_zero():
    assert numerics.identical(jnp.full(3, jnp.nan), jnp.full(3, jnp.nan))
    assert not numerics.identical(jnp.zeros(3), -jnp.zeros(3))
