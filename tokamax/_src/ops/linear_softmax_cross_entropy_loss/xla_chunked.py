"""The loss of a linear layer with softmax, as loops over blocks of rows and of classes.

Forward, each row keeps a running maximum and a running sum of exponentials (online normaliser calculation for softmax,
https://arxiv.org/abs/1805.02867). Backward, the probabilities of a block are made again from the log-sum-exp that the
forward pass saved. Blocks are evened out, so that the last one is not much smaller; what the last block has in common
with the one before is masked.

Notation: b rows, h features, v classes; z logits, lse their log-sum-exp, p probabilities.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import op, registry
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.ops import blocks, plain_form
from tokamax._src.ops.linear_softmax_cross_entropy_loss import base


@dataclasses.dataclass(frozen=True)
class XlaChunkedLinearSoftmaxCrossEntropyLossConfig:
    """How to split the loss; without any block it is the plain form.

    Attributes:
      block_b: rows of a block, about; None for all.
      block_v: classes of a block, about; None for all.
      upcast: whether 16-bit floats become f32 before they are multiplied, for CPUs that lack 16-bit products.
    """

    block_b: int | None = None
    block_v: int | None = None
    upcast: bool = False


@dataclasses.dataclass(frozen=True)
class XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig:
    """How to split the gradients of the loss.

    Attributes:
      use_lse: whether probabilities are made from the saved log-sum-exp; False for the plain form, in which JAX
        differentiates the reference, and which knows no blocks.
      block_b: rows of a block, about; None for all.
      block_v: classes of a block, about; None for all.
      flip_dx: whether the gradient of `x` is computed as `(weights @ p.T).T`, which some shapes multiply faster.
      flip_dw: whether the gradient of `weights` is computed as `(p.T @ x).T`.
      upcast: whether 16-bit floats become f32 before they are multiplied.
    """

    use_lse: bool = False
    block_b: int | None = None
    block_v: int | None = None
    flip_dx: bool = False
    flip_dw: bool = False
    upcast: bool = False


@dataclasses.dataclass(frozen=True)
class _Split:
    """An axis cut into equal blocks; the last begins early enough to end with the axis."""

    size: int
    block: int

    @classmethod
    def of(cls, size: int, block: int | None) -> "_Split":
        return cls(size, size if block is None else blocks.balanced(size, block))

    @property
    def count(self) -> int:
        return -(-self.size // self.block)

    def start(self, i: Any) -> Any:
        return 0 if self.count == 1 else jnp.minimum(i * self.block, self.size - self.block)

    def is_new(self, i: Any) -> jax.Array | None:
        """Which elements of block `i` no block before had; None if all of every block."""
        if self.size % self.block == 0:
            return None
        return self.start(i) + jnp.arange(self.block) >= i * self.block


def lse_and_label_logits(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    config: XlaChunkedLinearSoftmaxCrossEntropyLossConfig,
    precision: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes what the loss needs of the logits.

    Args:
      x: [b, h].
      labels: [b]; outside 0 .. v - 1 the label logit is 0.
      weights: [h, v].
      config: how to split.
      precision: as in `jax.lax.dot_general`.

    Returns:
      [b] log-sum-exp and [b] logit of the label.
    """
    rows, classes = _Split.of(x.shape[0], config.block_b), _Split.of(weights.shape[1], config.block_v)
    x, weights, labels = *_one_dtype(x, weights), base.signed(labels)
    dtype = blocks.accumulator_dtype(x.dtype)
    operand = dtype if config.upcast else x.dtype

    def class_block(j: Any, state: Any) -> Any:
        first = classes.start(j)
        w = blocks.take_axis(weights, first, classes.block, 1).astype(operand)
        new_classes = classes.is_new(j)

        def row_block(i: Any, state: Any) -> Any:
            start = rows.start(i)
            x_block, row_labels, top, total, picked = (
                blocks.take_axis(a, start, rows.block) for a in (x, labels, *state)
            )
            z = blocks.dot(x_block.astype(operand), w, (1, 0), precision)
            # Before the masking, which a label in the overlap of two blocks must not see.
            found = jnp.where(_is_within(row_labels, j, classes), base.label_logits(z, row_labels, first), picked)
            if new_classes is not None:
                z = jnp.where(new_classes, z, -jnp.inf)
            new_top = jnp.maximum(top, z.max(axis=1))
            added = jnp.exp(z - new_top[:, None]).sum(axis=1)
            updated = (new_top, total * jnp.exp(top - new_top) + added, found)
            new_rows = rows.is_new(i)
            if new_rows is not None:  # Rows that the block before has updated already.
                updated = tuple(
                    jnp.where(new_rows, new, old) for new, old in zip(updated, (top, total, picked), strict=True)
                )
            return tuple(blocks.put_axis(a, new, start) for a, new in zip(state, updated, strict=True))

        return blocks.loop(rows.count, row_block, state)

    zero = blocks.zeros(x.shape[:1], dtype, x, labels, weights)
    top, total, picked = blocks.loop(classes.count, class_block, (zero - jnp.inf, zero, zero))
    return top + jnp.log(total), picked


def _one_dtype(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    common = jnp.promote_types(x.dtype, weights.dtype)
    return x.astype(common), weights.astype(common)


def _is_within(labels: jax.Array, j: Any, classes: _Split) -> jax.Array:
    """Whether labels lie in block `j` of the classes."""
    first = classes.start(j)
    return (labels >= first) & (labels < first + classes.block)


def gradients(
    x: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    lse: jax.Array,
    row_scale: jax.Array,
    *,
    config: XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig,
    precision: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of `sum(row_scale * loss)` from the log-sum-exp.

    Args:
      x: [b, h].
      labels: [b].
      weights: [h, v].
      lse: [b].
      row_scale: [b].
      config: how to split.
      precision: as in `jax.lax.dot_general`.

    Returns:
      The gradients of `x` and of `weights`.
    """
    rows, classes = _Split.of(x.shape[0], config.block_b), _Split.of(weights.shape[1], config.block_v)
    x_dtype, w_dtype = x.dtype, weights.dtype
    x, weights, labels = *_one_dtype(x, weights), base.signed(labels)
    dtype = blocks.accumulator_dtype(x.dtype)
    # f16 cannot hold the small probabilities of a mean over many rows.
    operand = dtype if config.upcast or x.dtype == jnp.float16 else x.dtype

    def class_block(j: Any, state: Any) -> Any:
        dx, dw = state
        first = classes.start(j)
        w = blocks.take_axis(weights, first, classes.block, 1).astype(operand)
        numbers, new_classes = first + jnp.arange(classes.block), classes.is_new(j)

        def row_block(i: Any, state: Any) -> Any:
            dx, dw_block = state
            start = rows.start(i)
            x_block, row_labels, row_lse, scale, dx_block = (
                blocks.take_axis(a, start, rows.block) for a in (x, labels, lse, row_scale, dx)
            )
            x_block = x_block.astype(operand)
            z = blocks.dot(x_block, w, (1, 0), precision)
            new_rows = rows.is_new(i)
            if new_rows is not None:
                scale = jnp.where(new_rows, scale, 0)
            dz = (jnp.exp(z - row_lse[:, None]) - (numbers == row_labels[:, None])) * scale[:, None]
            if new_classes is not None:
                dz = jnp.where(new_classes, dz, 0)
            dz = dz.astype(operand)
            if config.flip_dx:
                dx_block += blocks.dot(w, dz, (1, 1), precision).T
            else:
                dx_block += blocks.dot(dz, w, (1, 1), precision)
            if config.flip_dw:
                dw_part = blocks.dot(dz, x_block, (0, 0), precision).T
            else:
                dw_part = blocks.dot(x_block, dz, (0, 0), precision)
            return blocks.put_axis(dx, dx_block, start), dw_part if rows.count == 1 else dw_block + dw_part

        dw_block = blocks.zeros(w.shape, dtype, x, labels, weights, lse, row_scale)
        dx, dw_block = blocks.loop(rows.count, row_block, (dx, dw_block))
        if new_classes is not None:
            dw_block += blocks.take_axis(dw, first, classes.block, 1)
        return dx, blocks.put_axis(dw, dw_block, first, 1)

    like = (x, labels, weights, lse, row_scale)
    state = (blocks.zeros(x.shape, dtype, *like), blocks.zeros(weights.shape, dtype, *like))
    dx, dw = blocks.loop(classes.count, class_block, state)
    return dx.astype(x_dtype), dw.astype(w_dtype)


def _cost_features(ba: BoundArguments, config: Any, *, backward: bool = False) -> dict[str, float]:
    """Numbers of blocks, the logits of one, the operands of its products, and the share of logits computed twice."""
    (b, h), v = ba.abstract["x"].shape, ba.abstract["weights"].shape[1]
    rows, classes = _Split.of(b, config.block_b), _Split.of(v, config.block_v)
    logits = float(rows.block * classes.block)
    products = (logits, float(h * rows.block), float(h * classes.block)) if backward else (logits,)
    return {
        "serial_share": blocks.serial_share(*products),
        # Elements of the operands of a block, beside its logits.
        "x_share": h / classes.block,
        "weights_share": h / rows.block,
        "row_blocks": float(rows.count),
        "class_blocks": float(classes.count),
        "log2_blocks": math.log2(rows.count * classes.count),
        "log2_logits": math.log2(rows.block * classes.block),
        "log2_rows": math.log2(rows.block),
        "log2_classes": math.log2(classes.block),
        "log2_weights": math.log2(h * classes.block),
        "log2_x": math.log2(h * rows.block),
        "computed_share": rows.count * rows.block * classes.count * classes.block / (b * v),
    }


def _block_pairs(b: int, v: int, pairs: list[tuple[int | None, int | None]]) -> list[tuple[int | None, int | None]]:
    """Returns the pairs of block sizes that split anything, one of those that split alike."""
    kept: dict[tuple[int, int], tuple[int | None, int | None]] = {}
    for block_b, block_v in pairs:
        if (block_b is None or block_b < b) and (block_v is None or block_v < v):
            split = (_Split.of(b, block_b).block, _Split.of(v, block_v).block)
            if split != (b, v):
                kept.setdefault(split, (block_b, block_v))
    return list(kept.values())


@registry.register("linear_softmax_cross_entropy_loss_vjp", "xla_chunked")
@dataclasses.dataclass(frozen=True)
class XlaChunkedLinearSoftmaxCrossEntropyLossVjp(op.Op):
    """Gradients of the loss of a linear layer with softmax, by blocks or plain."""

    config_cls = XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig

    def _fwd(
        self,
        residuals: jax.Array | None,
        out: jax.Array,
        dout: jax.Array,
        x: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *,
        reduction: base.Reduction,
        precision: Any,
        return_residuals: bool,
        config: XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig,
    ) -> tuple[tuple[jax.Array, None, jax.Array], None]:
        if not config.use_lse:
            run = lambda x, weights: base.reference(x, labels, weights, reduction, precision)[0]  # noqa: E731
            dx, dw = jax.vjp(run, x, weights)[1](dout)
            return (dx, None, dw), None
        lse = base.reference(x, labels, weights, None, precision)[1] if residuals is None else residuals
        scale = jnp.broadcast_to(dout / x.shape[0] if reduction == "mean" else dout, lse.shape)
        dx, dw = gradients(x, labels, weights, lse, scale, config=config, precision=precision)
        return (dx, None, dw), None

    _reference = plain_form.reference

    def _get_heuristics_config(self, ba: BoundArguments) -> XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig:
        return XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig()

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig]:
        x, (_, v) = ba.abstract["x"], ba.abstract["weights"].shape
        pairs: list[tuple[int | None, int | None]] = [
            *((rows, None) for rows in (64, 128, 256, 512)),
            *((None, classes) for classes in (1024, 2048, 4096)),
            *((256, classes) for classes in (1024, 2048, 4096)),
        ]
        make = XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig
        configs = {make()}
        for block_b, block_v in [(None, None), *_block_pairs(x.shape[0], v, pairs)]:
            configs.add(make(True, block_b, block_v))
            configs.add(make(True, block_b, block_v, flip_dx=True))
            if block_b is None or block_v is None:
                configs.add(make(True, block_b, block_v, flip_dx=True, flip_dw=True))
        if blocks.is_half(x.dtype):
            for block_b, block_v in [(None, None), *_block_pairs(x.shape[0], v, [(256, None), (None, 2048)])]:
                configs.add(make(True, block_b, block_v, upcast=True))
        return configs

    def _get_cost_features(self, ba: BoundArguments, config: Any) -> dict[str, float]:
        return _cost_features(ba, config, backward=True)

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        x_spec, w_spec = arguments["x"], arguments["weights"]
        x = jnp.asarray(rng.standard_normal(x_spec.shape, np.float32), x_spec.dtype)
        weights = jnp.asarray(
            rng.standard_normal(w_spec.shape, np.float32) / np.sqrt(np.float32(w_spec.shape[0])), w_spec.dtype
        )
        labels = base.example_labels(arguments, rng)
        made = {"x": x, "labels": labels, "weights": weights, "dout": np.ones(arguments["dout"].shape)}
        loss, lse = base.reference(x, jnp.asarray(labels), weights, arguments["reduction"], arguments["precision"])
        return {**made, "out": loss, **({} if arguments["residuals"] is None else {"residuals": lse})}


@registry.register("linear_softmax_cross_entropy_loss", "xla_chunked")
@dataclasses.dataclass(frozen=True)
class XlaChunkedLinearSoftmaxCrossEntropyLoss(op.Op):
    """The loss of a linear layer with softmax by blocks; the default config is the plain form."""

    config_cls = XlaChunkedLinearSoftmaxCrossEntropyLossConfig

    vjp: Any = dataclasses.field(default=XlaChunkedLinearSoftmaxCrossEntropyLossVjp(), kw_only=True)

    def bind(
        self,
        x: Any,
        labels: Any,
        weights: Any,
        *,
        reduction: base.Reduction = "sum",
        precision: Any = None,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds the arguments; see `tokamax.linear_softmax_cross_entropy_loss`."""
        args, kwargs = base.bind_arguments(x, labels, weights, reduction, precision)
        return super().bind(*args, **kwargs, return_residuals=return_residuals)

    def bind_vjp(self, ba: BoundArguments) -> BoundArguments:
        """Returns the abstract bound arguments of the backward pass of a call."""
        plain = XlaChunkedLinearSoftmaxCrossEntropyLossConfig()
        call, arrays = dataclasses.replace(ba, return_residuals=True).as_function(plain)
        out, residuals = jax.eval_shape(call, arrays)
        return self.vjp.bind(residuals, out, out, *ba.args, **ba.kwargs)

    def _fwd(
        self,
        x: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        *,
        reduction: base.Reduction,
        precision: Any,
        return_residuals: bool,
        config: XlaChunkedLinearSoftmaxCrossEntropyLossConfig,
    ) -> tuple[jax.Array, jax.Array]:
        if config.block_b is None and config.block_v is None and not config.upcast:
            return base.reference(x, labels, weights, reduction, precision)
        lse, picked = lse_and_label_logits(x, labels, weights, config=config, precision=precision)
        return base.reduce(lse - picked, reduction), lse

    _reference = plain_form.reference

    def _get_heuristics_config(self, ba: BoundArguments) -> XlaChunkedLinearSoftmaxCrossEntropyLossConfig:
        return XlaChunkedLinearSoftmaxCrossEntropyLossConfig()

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[XlaChunkedLinearSoftmaxCrossEntropyLossConfig]:
        x, (_, v) = ba.abstract["x"], ba.abstract["weights"].shape
        pairs: list[tuple[int | None, int | None]] = [
            *((rows, None) for rows in (16, 32, 64, 128, 256, 512)),
            *((None, classes) for classes in (256, 512, 1024, 2048, 4096, 8192)),
            *((rows, classes) for rows in (64, 256) for classes in (256, 512, 1024, 2048, 4096)),
        ]
        make = XlaChunkedLinearSoftmaxCrossEntropyLossConfig
        configs = {make(), *(make(*pair) for pair in _block_pairs(x.shape[0], v, pairs))}
        if blocks.is_half(x.dtype):
            upcast: list[tuple[int | None, int | None]] = [(128, None), (None, 1024), (256, 1024)]
            configs |= {make(None, None, True), *(make(*p, True) for p in _block_pairs(x.shape[0], v, upcast))}
        return configs

    def _get_cost_features(self, ba: BoundArguments, config: Any) -> dict[str, float]:
        return _cost_features(ba, config)

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"labels": base.example_labels(arguments, rng)}
