"""Parts that kernels written as loops over blocks of arrays share."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tokamax._src import shapes

_PARALLEL_ELEMENTS = 2**17
"""On CPUs XLA runs a product on several cores only if one matrix of its result is about this large (measured)."""


def serial_share(*sizes: float) -> float:
    """Returns the share of some products that run on one core, a feature of cost.

    Args:
      *sizes: elements of one matrix of the result of each product.
    """
    return sum(size < _PARALLEL_ELEMENTS for size in sizes) / len(sizes)


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype to add up in: at least f32."""
    return jnp.promote_types(dtype, jnp.float32)


def is_half(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits."""
    return jax.dtypes.issubdtype(dtype, np.floating) and np.dtype(dtype).itemsize == 2


def balanced(size: int, block: int, *, multiple: int = 32) -> int:
    """Returns the block size, at most about `block`, that splits `size` most evenly.

    Args:
      size: elements to split.
      block: the largest block wanted.
      multiple: block sizes are rounded up to a multiple of this, for the sake of vector units.
    """
    count = -(-size // block)
    even = -(-size // count)
    return min(size, -(-even // multiple) * multiple)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], precision: Any = None) -> jax.Array:
    """Multiplies two matrices, adding up in f32 or wider.

    Args:
      a: a matrix.
      b: a matrix.
      contract: the axis of `a` and the axis of `b` to sum over.
      precision: as in `jax.lax.dot_general`.
    """
    if a.dtype != b.dtype:
        common = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(common), b.astype(common)
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=accumulator_dtype(a.dtype))


def zeros(shape: Sequence[int], dtype: Any, *like: jax.Array) -> jax.Array:
    """Returns zeros to start a loop from, which under `shard_map` vary over the mesh axes that `like` vary over."""
    axes = frozenset[str]().union(*map(shapes.varying_axes, like))
    return shapes.varying_over(jnp.zeros(shape, dtype), axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def take(array: jax.Array, starts: Sequence[Any], sizes: tuple[int, ...]) -> jax.Array:
    """Returns the block of an array that begins at `starts`; like `lax.dynamic_slice`.

    XLA turns slices of 16-bit floats on CPU into conversions to f32 and back, element by element; read as integers
    they are plain copies (2 to 3 times faster, measured).
    """
    if not is_half(array.dtype):
        return lax.dynamic_slice(array, starts, sizes)
    bits = lax.bitcast_convert_type(array, jnp.uint16)
    return lax.bitcast_convert_type(lax.dynamic_slice(bits, starts, sizes), array.dtype)


@take.defjvp
def _take_jvp(sizes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    array, starts = primals
    return take(array, starts, sizes), lax.dynamic_slice(tangents[0], starts, sizes)


def take_axis(array: jax.Array, start: Any, size: int, axis: int = 0) -> jax.Array:
    """Returns `size` elements of an array along one axis, from `start`."""
    if size == array.shape[axis]:
        return array
    starts = [jnp.int32(0)] * array.ndim
    starts[axis] = start
    sizes = list(array.shape)
    sizes[axis] = size
    return take(array, tuple(starts), tuple(sizes))


def put_axis(array: jax.Array, block: jax.Array, start: Any, axis: int = 0) -> jax.Array:
    """Returns an array with a block written over it from `start` along one axis."""
    if block.shape == array.shape:
        return block
    return lax.dynamic_update_slice_in_dim(array, block, start, axis)


def loop(count: Any, body: Any, state: Any) -> Any:
    """Runs `state = body(i, state)` for i in 0 .. count - 1; a single step is not made a loop."""
    if isinstance(count, int) and count == 1:
        return body(0, state)
    return lax.fori_loop(0, count, body, state)
