"""The reference: logits, then their log-sum-exp, in f32; and the checks of the arguments.

Notation: b rows (tokens), h features, v classes (the vocabulary). With logits `z = x @ weights`, the loss of a row with
label l is `lse - z[l]`, where `lse = log(sum(exp(z)))`.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors, op, registry, shapes
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.ops import blocks

Reduction = Literal["sum", "mean"] | None


def reference(
    x: jax.Array, labels: jax.Array, weights: jax.Array, reduction: Reduction, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """Computes the loss with all logits in memory.

    Args:
      x: [b, h].
      labels: [b]; a label outside 0 .. v - 1 counts as a class of logit 0 that no class has, like `jax.nn.one_hot`.
      weights: [h, v].
      reduction: how to combine the rows.
      precision: as in `jax.lax.dot_general`.

    Returns:
      The loss, f32, and the log-sum-exp of each row, [b] f32.
    """
    logits = blocks.dot(x, weights, (1, 0), precision)
    lse = jax.nn.logsumexp(logits, axis=1)
    return reduce(lse - label_logits(logits, labels), reduction), lse


def label_logits(logits: jax.Array, labels: jax.Array, first: Any = 0) -> jax.Array:
    """Returns, for each row, the logit of its label, 0 where that is not among these classes.

    Args:
      logits: [b, c], of classes `first` .. `first + c - 1`.
      labels: [b].
      first: the first class.
    """
    place = signed(labels) - first
    inside = (place >= 0) & (place < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(inside, place, 0)[:, None], axis=1)[:, 0]
    return jnp.where(inside, picked, 0)


def signed(labels: jax.Array) -> jax.Array:
    """Returns labels in a dtype in which differences between them cannot wrap around."""
    return labels if labels.dtype in (jnp.int32, jnp.int64) else labels.astype(jnp.int32)


def reduce(losses: jax.Array, reduction: Reduction) -> jax.Array:
    """Combines the losses of the rows, [b]."""
    if reduction is None:
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


def bind_arguments(
    x: Any, labels: Any, weights: Any, reduction: Any, precision: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks the arguments of the loss; returns them as args and kwargs.

    Raises:
      ArgumentError: if they do not fit each other.
    """
    for name, value, axes in (("x", x, "[b, h]"), ("labels", labels, "[b]"), ("weights", weights, "[h, v]")):
        if not shapes.is_array(value) or len(value.shape) != axes.count(",") + 1:
            came = shapes.spec_of(value) if shapes.is_array(value) else type(value).__name__
            hint = "; reshape batch and sequence into one axis" if name != "weights" else ""
            raise errors.ArgumentError(f"{name} must be an array {axes}, got {came}{hint}")
    if x.shape[0] != labels.shape[0]:
        raise errors.ArgumentError(
            f"x [b, h] and labels [b] must have the same b, got {tuple(x.shape)} and {tuple(labels.shape)}"
        )
    if x.shape[1] != weights.shape[0]:
        raise errors.ArgumentError(
            f"x [b, h] and weights [h, v] must have the same h, got {tuple(x.shape)} and {tuple(weights.shape)}; "
            "transpose weights if they are [v, h]"
        )
    if 0 in x.shape or 0 in weights.shape:
        raise errors.ArgumentError(f"x and weights must not be empty, got {tuple(x.shape)} and {tuple(weights.shape)}")
    for name, value, kind in (("x", x, np.floating), ("labels", labels, np.integer), ("weights", weights, np.floating)):
        if not jax.dtypes.issubdtype(value.dtype, kind):
            what = "integers" if kind is np.integer else "floats"
            raise errors.ArgumentError(f"{name} must hold {what}, got {value.dtype}")
    if reduction not in ("sum", "mean", None):
        raise errors.ArgumentError(f"reduction must be 'sum', 'mean' or None, got {reduction!r}")
    return (x, labels, weights), {"reduction": reduction, "precision": precision}


def example_labels(arguments: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Returns [b] random labels."""
    return rng.integers(0, arguments["weights"].shape[1], arguments["labels"].shape, np.int32)


@registry.register("linear_softmax_cross_entropy_loss", "xla")
@dataclasses.dataclass(frozen=True)
class LinearSoftmaxCrossEntropyLoss(op.Op):
    """The loss as XLA compiles it, with all logits in memory."""

    def bind(
        self,
        x: Any,
        labels: Any,
        weights: Any,
        *,
        reduction: Reduction = "sum",
        precision: Any = None,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds the arguments; see `tokamax.linear_softmax_cross_entropy_loss`."""
        args, kwargs = bind_arguments(x, labels, weights, reduction, precision)
        return super().bind(*args, **kwargs, return_residuals=return_residuals)

    def _fwd(
        self,
        x: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *,
        reduction: Reduction,
        precision: Any,
        return_residuals: bool,
        config: Any,
    ) -> tuple[jax.Array, jax.Array]:
        return reference(x, labels, weights, reduction, precision)

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"labels": example_labels(arguments, rng)}
