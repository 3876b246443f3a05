import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src.inputs import example_inputs
from tokamax._src.shapes import ArraySpec
from toy import Toy, ToyConfig, arrays


@dataclasses.dataclass(frozen=True)
class Lookup(Toy):
    """A toy whose second argument must hold row numbers."""

    name = "lookup"

    def _fwd(self, table, rows, *, return_residuals, config):
        return table[rows], None

    def _example_arguments(self, arguments, rng):
        assert not arguments["rows"].vmap
        return {"rows": rng.integers(0, arguments["table"].shape[0], arguments["rows"].shape)}

    def _is_feasible(self, ba, config):
        return True


TABLE, ROWS = jax.ShapeDtypeStruct((50, 3), jnp.float32), jax.ShapeDtypeStruct((20,), jnp.int32)


def batched(x: jax.ShapeDtypeStruct, *vmap: int) -> ArraySpec:
    return ArraySpec(x.shape, x.dtype, vmap)


def runs(ba):
    """Whether the inputs fit the function of the bound arguments; returns their shapes."""
    inputs = example_inputs(ba)
    function, specs = ba.as_function(ToyConfig(1))
    assert [(x.shape, x.dtype) for x in inputs] == [(s.shape, s.dtype) for s in specs]
    jax.eval_shape(function, inputs)
    return [x.shape for x in inputs]


def test_real_arrays_are_copied():
    x, w = arrays()
    inputs = example_inputs(Toy.bind(x, w))
    np.testing.assert_array_equal(inputs[0], x)
    assert inputs[0].unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


def test_abstract_arrays_get_values_from_the_seed():
    ba = Lookup.bind(TABLE, ROWS)
    first, again, other = example_inputs(ba), example_inputs(ba), example_inputs(ba, seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    assert runs(ba) == [(50, 3), (20,)]


def test_the_op_says_what_suits_it():
    _, rows = example_inputs(Lookup.bind(TABLE, ROWS))
    assert rows.dtype == jnp.int32 and rows.max() > 1 and rows.max() < 50


def test_order_is_that_of_the_call():
    assert runs(Lookup.bind(rows=ROWS, table=TABLE)) == [(50, 3), (20,)]


def test_vmapped_arrays_have_their_axes_in_front_and_values_of_their_own():
    ba = Lookup.bind(batched(TABLE, 0, 3), batched(ROWS, 2, 3))
    assert runs(ba) == [(3, 50, 3), (2, 3, 20)]
    table, rows = example_inputs(ba)
    assert len({np.asarray(x).tobytes() for x in table}) == 3
    assert len({np.asarray(x).tobytes() for x in rows.reshape(6, 20)}) == 6


def test_vmap_axes_of_size_one_are_dropped_as_in_the_function():
    assert runs(Lookup.bind(batched(TABLE, 1), batched(ROWS, 1))) == [(50, 3), (20,)]
    assert runs(Lookup.bind(batched(TABLE, 1, 3), batched(ROWS, 1, 0))) == [(3, 50, 3), (20,)]


def test_arguments_that_are_no_arrays_are_left_out():
    x, w = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays())
    assert runs(Toy.bind(x, w, activation=jax.nn.relu, scale=2.0)) == [(8, 4), (4, 6)]
