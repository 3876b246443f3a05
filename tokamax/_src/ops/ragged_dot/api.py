"""The front function of ragged dot."""

from typing import Any

import jax

from tokamax._src.ops.choose import Choice, call
from tokamax._src.ops.ragged_dot import base as base  # registers itself
from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as pallas_mosaic_tpu  # registers itself
from tokamax._src.ops.ragged_dot import xla_chunked as xla_chunked  # registers itself


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    *,
    implementation: Choice = None,
) -> jax.Array:
    """Multiplies each group of rows with its own matrix, as the experts of a mixture do.

    The arguments are those of `jax.lax.ragged_dot`. The first `group_sizes[0]` rows of `lhs` are multiplied with
    `rhs[0]`, the next `group_sizes[1]` rows with `rhs[1]`, and so on; rows past the last group give zeros.

    Args:
      lhs: [m, k] floats.
      rhs: [g, k, n] floats of the same dtype.
      group_sizes: [g] integers, at least 0, that sum up to at most m. Groups may be empty.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of the result; None for the dtype of `lhs`. Sums are made in f32 or wider.
      group_offset: must be None.
      implementation: `"xla"` (`jax.lax.ragged_dot`), `"xla_chunked"` (loops over tiles of rows; its default config is
        the same as `"xla"`, tuning finds better ones), `"mosaic"` (TPU), an op to call in place of them, or several of
        these, of which the first that can run does; None for the best known.

    Returns:
      [m, n].

    Raises:
      ArgumentError: if the arguments do not fit each other, or there is no such implementation.
      UnsupportedError: for a `group_offset`, or if none of the implementations can run the arguments on this device.

    Example:
      >>> import jax.numpy as jnp
      >>> import tokamax
      >>> out = tokamax.ragged_dot(jnp.ones((5, 2)), jnp.ones((2, 2, 3)), jnp.array([2, 3]))
      >>> out.shape
      (5, 3)
    """
    return call("ragged_dot", implementation, lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
