"""The front function of the loss of a linear layer with softmax."""

from typing import Any

import jax

from tokamax._src.ops.choose import Choice, call
from tokamax._src.ops.linear_softmax_cross_entropy_loss import base
from tokamax._src.ops.linear_softmax_cross_entropy_loss import xla_chunked as xla_chunked  # registers itself


def linear_softmax_cross_entropy_loss(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    reduction: base.Reduction = "sum",
    precision: Any = None,
    implementation: Choice = None,
) -> jax.Array:
    """Computes the cross entropy of `softmax(x @ weights)`, the loss of a language model's head.

    Chunked configs never hold all logits in memory, neither here nor in the gradient.

    Args:
      x: [b, h] floats, one row for each token.
      labels: [b] integers. A label outside 0 .. v - 1 acts like a row of zeros from `jax.nn.one_hot`: the loss of that
        row is its log-sum-exp alone, so mask such rows with `reduction=None` if they stand for padding.
      weights: [h, v] floats.
      reduction: `"sum"` or `"mean"` over the rows, or None for the loss of each row.
      precision: as in `jax.lax.dot_general`; sums are made in f32 or wider.
      implementation: `"xla"`, `"xla_chunked"` (loops over rows and classes; its default config is the same as `"xla"`,
        tuning finds better ones), an op to call in place of them, or several of these, of which the first that can run
        does; None for the best known.

    Returns:
      The loss, f32 (f64 for f64 inputs): a scalar, or [b] without a reduction.

    Raises:
      ArgumentError: if the arguments do not fit each other, or there is no such implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> import tokamax
      >>> x, labels, weights = jnp.ones((4, 8)), jnp.array([0, 1, 2, 3]), jnp.zeros((8, 16))
      >>> loss = tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, reduction="mean")
      >>> round(float(loss), 3)  # log(16)
      2.773
    """
    family = "linear_softmax_cross_entropy_loss"
    return call(family, implementation, x, labels, weights, reduction=reduction, precision=precision)
