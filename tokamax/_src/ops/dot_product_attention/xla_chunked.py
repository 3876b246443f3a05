"""Attention in blocks of queries and keys, so that logits stay in cache and blocks that nobody sees are skipped.

Softmax runs online (https://arxiv.org/abs/1805.02867): each block of keys corrects the running maximum and sum.
Blocks need not divide the sequence: the last one is moved back to end with it, and what it repeats is left out.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import registry, shapes
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.op import Op
from tokamax._src.ops import blocks, plain_form
from tokamax._src.ops.dot_product_attention import base
from tokamax._src.ops.dot_product_attention.base import MASKED, Call, DotProductAttention, Statics

_LOWEST = float(jnp.finfo(jnp.float32).min)
_BLOCKS_Q = (32, 64, 128, 256, 512, 1024)
_BLOCKS_KV = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class XlaChunkedDotProductAttentionConfig:
    """How attention is cut into blocks.

    Attributes:
      block_q: at most so many queries at a time; None for all.
      block_kv: at most so many keys at a time; None for all.
    """

    block_q: int | None = None
    block_kv: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            block = getattr(self, name)
            if block is not None and block < 1:
                raise ValueError(f"{name} must be positive or None, got {block}")


@dataclasses.dataclass(frozen=True)
class XlaChunkedDotProductAttentionVjpConfig(XlaChunkedDotProductAttentionConfig):
    """How the gradient of attention is cut into blocks; the same fields."""


PLAIN = XlaChunkedDotProductAttentionConfig()
PLAIN_VJP = XlaChunkedDotProductAttentionVjpConfig()


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An axis cut into blocks of one size.

    Attributes:
      size: length of the axis.
      block: length of a block.
      count: number of blocks.
    """

    size: int
    block: int
    count: int

    @classmethod
    def of(cls, size: int, block: int | None) -> "Blocks":
        """Cuts an axis into the fewest blocks of at most `block`, all about equally long."""
        if block is None or block >= size:
            return cls(size, size, 1)
        even = math.ceil(size / math.ceil(size / block))
        block = min(block, math.ceil(even / _ALIGNMENT) * _ALIGNMENT)
        return cls(size, block, math.ceil(size / block))

    @property
    def exact(self) -> bool:
        """Whether no block was moved back."""
        return self.block * self.count == self.size

    def start(self, i: Any) -> Any:
        """Where block `i` starts."""
        return i * self.block if self.exact else jnp.minimum(i * self.block, self.size - self.block)

    def positions(self, i: Any) -> jax.Array:
        """The positions that block `i` covers."""
        return self.start(i) + jnp.arange(self.block)

    def fresh(self, i: Any) -> jax.Array | None:
        """Which positions of block `i` no earlier block has; None for all."""
        return None if self.exact else self.positions(i) >= i * self.block

    def loop(self, body: Callable[[Any, Any], Any], carry: Any, first: Any = 0, end: Any = None) -> Any:
        """Runs `carry = body(i, carry)` over the blocks."""
        if self.count == 1:
            return body(0, carry)
        return jax.lax.fori_loop(first, self.count if end is None else end, body, carry)


def _take(x: jax.Array, start: Any, cut: Blocks, axis: int) -> jax.Array:
    """Cuts a block out of an axis; axes of size one broadcast."""
    if cut.count == 1 or x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, cut.block, axis)


def _put(x: jax.Array, block: jax.Array, *starts: tuple[int, Any]) -> jax.Array:
    """Writes a block at the starts given by axis."""
    where: list[Any] = [0] * x.ndim
    for axis, start in starts:
        where[axis] = start if x.shape[axis] != block.shape[axis] else 0
    return jax.lax.dynamic_update_slice(x, block, where)


def _add(x: jax.Array, block: jax.Array, *starts: tuple[int, Any]) -> jax.Array:
    """Adds a block at the starts given by axis."""
    if x.shape == block.shape:
        return x + block
    where: list[Any] = [0] * x.ndim
    for axis, start in starts:
        where[axis] = start if x.shape[axis] != block.shape[axis] else 0
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, where, block.shape) + block, where)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a call, and what is needed at each.

    Attributes:
      call: the arrays, with queries already scaled.
      statics: the other arguments.
      rows: blocks of queries.
      columns: blocks of keys.
      inputs: all arrays that results depend on.
    """

    call: Call
    statics: Statics
    rows: Blocks
    columns: Blocks
    inputs: tuple[jax.Array, ...]

    @classmethod
    def of(cls, call: Call, statics: Statics, config: XlaChunkedDotProductAttentionConfig, *more: jax.Array) -> "Grid":
        """Cuts a call as a config says, and scales its queries."""
        rows = Blocks.of(call.q.shape[3], config.block_q)
        columns = Blocks.of(call.k.shape[2], config.block_kv)
        inputs = (call.q, call.k, call.bias, call.mask, call.q_lengths, call.k_lengths, *more)
        given = tuple(x for x in inputs if x is not None)
        return cls(dataclasses.replace(call, q=call.q * statics.scale), statics, rows, columns, given)

    @property
    def may_mask(self) -> bool:
        """Whether some query may see no key at all."""
        windowed = self.statics.left is not None or self.statics.right is not None
        return windowed or self.call.mask is not None or self.call.k_lengths is not None

    def columns_seen(self, i: Any) -> tuple[Any, Any]:
        """The range of blocks of keys that the window lets block `i` of queries see."""
        first, end = 0, self.columns.count
        start = self.rows.start(i)
        if self.statics.left is not None:
            first = jnp.clip((start - self.statics.left) // self.columns.block, 0, end)
        if self.statics.right is not None:
            last = start + self.rows.block - 1 + self.statics.right
            end = jnp.clip(last // self.columns.block + 1, 0, end)
        return first, end

    def zeros(self, *shape: int) -> jax.Array:
        """Float32 zeros to start a loop from."""
        return blocks.zeros(shape, jnp.float32, *self.inputs)

    def query(self, i: Any) -> jax.Array:
        """Block `i` of the queries, `[B,K,G*rows,H]`."""
        return self.flat(self.take_rows(self.call.q, i))

    def take_rows(self, x: jax.Array, i: Any) -> jax.Array:
        """Block `i` of an array with queries on axis 3."""
        return _take(x, self.rows.start(i), self.rows, 3)

    def take_columns(self, x: jax.Array, j: Any) -> jax.Array:
        """Block `j` of an array with keys on axis 2."""
        return _take(x, self.columns.start(j), self.columns, 2)

    def flat(self, x: jax.Array) -> jax.Array:
        """`[B,K,G,rows,...]` -> `[B,K,G*rows,...]`: queries of a group share their keys."""
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def grouped(self, x: jax.Array) -> jax.Array:
        """`[B,K,G*rows,...]` -> `[B,K,G,rows,...]`."""
        return x.reshape(*x.shape[:2], -1, self.rows.block, *x.shape[3:])

    def _cut(self, x: jax.Array | None, i: Any, j: Any) -> jax.Array | None:
        if x is None:
            return None
        return _take(self.take_rows(x, i), self.columns.start(j), self.columns, 4)

    def logits(self, i: Any, j: Any, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the logits `[B,K,G,rows,columns]` of a block, and those before bias and mask."""
        bare = self.grouped(jnp.einsum("bkrh,bksh->bkrs", q, k))
        bare = base.capped(self.statics, bare)
        bias, mask = self._cut(self.call.bias, i, j), self._cut(self.call.mask, i, j)
        logits = bare if bias is None else bare + bias
        columns, fresh = self.columns.positions(j), self.columns.fresh(j)
        seen = base.visible(self.statics, self.rows.positions(i), columns, self.call.k_lengths, mask)
        if seen is not None:
            logits = jnp.where(seen, logits, MASKED)
        return (logits if fresh is None else jnp.where(fresh, logits, -jnp.inf)), bare


def chunked(
    call: Call, statics: Statics, value: jax.Array, config: XlaChunkedDotProductAttentionConfig
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes attention in blocks; returns `[B,K,G,T,H]`, and the maximum and sum of each row, `[B,K,G,T]`."""
    grid = Grid.of(call, statics, config, value)
    v = base.keys_first(value)

    def one_row(i: Any, written: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        q = grid.query(i)

        def one_block(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            out, top, total = carry
            logits, _ = grid.logits(i, j, q, grid.take_columns(call.k, j))
            new_top = jnp.maximum(top, logits.max(-1))
            weights = jnp.exp(logits - new_top[..., None])
            correction = jnp.exp(top - new_top)
            update = grid.grouped(jnp.einsum("bkrs,bksh->bkrh", grid.flat(weights), grid.take_columns(v, j)))
            return out * correction[..., None] + update, new_top, total * correction + weights.sum(-1)

        shape = (*call.q.shape[:3], grid.rows.block)
        start = (grid.zeros(*shape, v.shape[-1]), grid.zeros(*shape) + _LOWEST, grid.zeros(*shape))
        out, top, total = grid.columns.loop(one_block, start, *grid.columns_seen(i))
        out = out / total[..., None]
        return tuple(_put(x, y, (3, grid.rows.start(i))) for x, y in zip(written, (out, top, total), strict=True))

    rows = call.q.shape[:4]
    empty = (grid.zeros(*rows, v.shape[-1]), grid.zeros(*rows), grid.zeros(*rows))
    out, top, total = grid.rows.loop(one_row, empty)
    if grid.may_mask:
        out = jnp.where((top <= MASKED)[..., None], v.mean(2)[:, :, None, None], out)
    real = base.row_is_real(call, jnp.arange(rows[3]))
    return (out if real is None else jnp.where(real, out, 0.0)), (top, total)


def chunked_vjp(
    call: Call,
    statics: Statics,
    value: jax.Array,
    residuals: tuple[jax.Array, jax.Array],
    out: jax.Array,
    dout: jax.Array,
    config: XlaChunkedDotProductAttentionConfig,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes gradients in blocks, with the weights recomputed from the maximum and sum of each row.

    With logits L, weights P = exp(L - top) / total and output O = P V, the gradients are
    dV = P' dO,  dL = P * (dO V' - rowsum(dO * O)),  dQ = dL K,  dK = dL' Q.
    The division by `total` is done on dO, which is narrower than P.

    Args:
      call: the arrays.
      statics: the other arguments.
      value: `[B,S,K,H]`.
      residuals: maximum and sum of each row, `[B,K,G,T]`.
      out: float32 `[B,K,G,T,H]`.
      dout: its cotangent.
      config: the blocks.

    Returns:
      Gradients of query `[B,K,G,T,H]`, key and value `[B,K,S,H]`, and bias, in the shape of `call`.
    """
    grid = Grid.of(call, statics, config, value, dout)
    v, keys = base.keys_first(value), call.k.shape[2]
    top, total = residuals
    if (real := base.row_is_real(call, jnp.arange(call.q.shape[3]))) is not None:
        dout = jnp.where(real, dout, 0.0)
    spread = None
    if grid.may_mask:
        # A row that sees nothing averages all values: its gradient goes to them alone.
        empty = top <= MASKED
        spread = jnp.where(empty[..., None], dout, 0.0).sum((2, 3)) / keys
        dout = jnp.where(empty[..., None], 0.0, dout)
        top, total = jnp.where(empty, jnp.inf, top), jnp.where(empty, 1.0, total)
    dout = dout / total[..., None]
    delta = (dout * out).sum(-1)

    def one_row(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        dq, dk, dv, dbias = carry
        q, do, d, m = grid.query(i), *(grid.take_rows(x, i) for x in (dout, delta, top))
        if (fresh := grid.rows.fresh(i)) is not None:
            do, d = jnp.where(fresh[:, None], do, 0.0), jnp.where(fresh, d, 0.0)
        do = grid.flat(do)

        def one_block(j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            dq, dk, dv, dbias = carry
            k = grid.take_columns(call.k, j)
            logits, bare = grid.logits(i, j, q, k)
            weights = jnp.exp(logits - m[..., None])
            dweights = grid.grouped(jnp.einsum("bkrh,bksh->bkrs", do, grid.take_columns(v, j)))
            dlogits = weights * (dweights - d[..., None])
            column = (2, grid.columns.start(j))
            dv = _add(dv, jnp.einsum("bkrs,bkrh->bksh", grid.flat(weights), do), column)
            if dbias is not None:
                summed = tuple(a for a in range(5) if dbias.shape[a] == 1 and dlogits.shape[a] != 1)
                block = dlogits.sum(summed, keepdims=True)
                dbias = _add(dbias, block, (3, grid.rows.start(i)), (4, grid.columns.start(j)))
            if statics.soft_cap is not None:
                dlogits = dlogits * (1 - (bare / statics.soft_cap) ** 2)
            dlogits = grid.flat(dlogits)
            dk = _add(dk, jnp.einsum("bkrs,bkrh->bksh", dlogits, q), column)
            return dq + jnp.einsum("bkrs,bksh->bkrh", dlogits, k), dk, dv, dbias

        inner = (grid.zeros(*q.shape), dk, dv, dbias)
        dq_block, dk, dv, dbias = grid.columns.loop(one_block, inner, *grid.columns_seen(i))
        return _add(dq, grid.grouped(dq_block), (3, grid.rows.start(i))), dk, dv, dbias

    zeros = (call.q, call.k, v, call.bias)
    dq, dk, dv, dbias = grid.rows.loop(one_row, tuple(None if x is None else grid.zeros(*x.shape) for x in zeros))
    if spread is not None:
        dv = dv + spread[:, :, None]
    return dq * statics.scale, dk, dv, dbias


def _space(cls: type, ba: BoundArguments) -> set[Any]:
    """The plain form, and pairs of blocks that cut the sequences or, up to 512 queries, the keys alone."""
    t, s = ba.abstract["query"].shape[-3], ba.abstract["key"].shape[-3]
    rows: list[int | None] = [*[b for b in _BLOCKS_Q if b < t][-5:]]
    columns = [b for b in _BLOCKS_KV if b < s]
    if rows:
        columns = columns[-4:] if s <= 2048 else [256, 512, 1024, 2048]
    if t <= 512:
        rows = [None, *rows]
    return {cls(), *(cls(q, kv) for q in rows for kv in (None, *columns))}


def _cost_features(ba: BoundArguments, config: Any, *, backward: bool = False) -> dict[str, float]:
    """Numbers of blocks, the share of them that is computed, the bytes that a block works on, and its products.

    Args:
      ba: the bound arguments.
      config: the config.
      backward: whether these are features of the gradient.
    """
    query, key = ba.abstract["query"], ba.abstract["key"]
    statics = Statics.of(
        query, 1.0, ba.abstract["is_causal"], ba.abstract["local_window_size"], ba.abstract["logits_soft_cap"]
    )
    rows, columns = Blocks.of(query.shape[-3], config.block_q), Blocks.of(key.shape[-3], config.block_kv)
    starts = np.minimum(np.arange(rows.count) * rows.block, rows.size - rows.block)
    first, end = np.zeros(rows.count), np.full(rows.count, columns.count)
    if columns.count > 1 and statics.left is not None:
        first = np.clip((starts - statics.left) // columns.block, 0, columns.count)
    if columns.count > 1 and statics.right is not None:
        end = np.clip((starts + rows.block - 1 + statics.right) // columns.block + 1, 0, columns.count)
    visits = float(np.maximum(end - first, 0).sum())
    batch = math.prod(query.shape[:-3]) * math.prod(ba.vmap_sizes)
    cells = rows.block * columns.block * query.shape[-2] * batch
    arrays = 3 if backward else 1  # of the size of the logits, alive at once
    group, width = query.shape[-2] // key.shape[-2], query.shape[-1]
    logits, of_rows, of_columns = (
        float(rows.block * group * columns.block),
        float(rows.block * group * width),
        float(columns.block * width),
    )
    products = (logits, logits, of_rows, of_columns, of_columns) if backward else (logits, of_rows)
    return {
        "log2_matrix": math.log2(logits),
        "serial_share": blocks.serial_share(*products),
        # What a loop over columns carries from block to block, beside the logits of a block.
        "carry_share": width / columns.block if columns.count > 1 else 0.0,
        "row_blocks": float(rows.count),
        "column_blocks": float(columns.count),
        "visits": visits,
        "computed_share": visits * rows.block * columns.block / (rows.size * columns.size),
        "log2_block_bytes": math.log2(4.0 * arrays * cells),
        "log2_cells": math.log2(max(1.0, visits * cells)),
    }


def _row_maxima(call: Call, statics: Statics) -> tuple[jax.Array, jax.Array]:
    """The maximum of the logits of each row and the sum of their exponentials, `[B,K,G,T]`."""
    grid = Grid.of(call, statics, PLAIN)
    logits, _ = grid.logits(0, 0, grid.query(0), call.k)
    top = logits.max(-1)
    return top, jnp.exp(logits - top[..., None]).sum(-1)


@registry.register("dot_product_attention_vjp", "xla_chunked")
@dataclasses.dataclass(frozen=True)
class XlaChunkedDotProductAttentionVjp(Op[..., Any, Any, Any, Any]):
    """The gradient of attention; without blocks, what JAX derives from the plain form."""

    config_cls: ClassVar[type] = XlaChunkedDotProductAttentionVjpConfig

    def _fwd(
        self,
        residuals: tuple[jax.Array, jax.Array],
        out: jax.Array,
        dout: jax.Array,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        return_residuals: bool,
        config: XlaChunkedDotProductAttentionVjpConfig,
    ) -> tuple[dict[str, Any], None]:
        if config == PLAIN_VJP:

            def reference(query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
                return DotProductAttention()._fwd(
                    query,
                    key,
                    value,
                    bias,
                    mask,
                    scale=scale,
                    is_causal=is_causal,
                    query_seq_lengths=query_seq_lengths,
                    key_value_seq_lengths=key_value_seq_lengths,
                    local_window_size=local_window_size,
                    logits_soft_cap=logits_soft_cap,
                    return_residuals=False,
                    config=None,
                )[0]

            grads = jax.vjp(reference, query, key, value, bias)[1](dout)
            return dict(zip(("query", "key", "value", "bias"), grads, strict=True)), None
        heads = key.shape[-2]
        call = Call.of(query, key, bias, mask, query_seq_lengths, key_value_seq_lengths)
        statics = Statics.of(query, scale, is_causal, local_window_size, logits_soft_cap)
        top, total = (x.reshape(call.q.shape[:4]) for x in residuals)
        out, dout = base.fold_heads(out, heads), base.fold_heads(dout, heads)
        dq, dk, dv, dbias = chunked_vjp(call, statics, value, (top, total), out, dout, config)
        return {
            "query": base.unfold_heads(dq, query),
            "key": base.heads_last(dk, key),
            "value": base.heads_last(dv, value),
            "bias": None if bias is None or dbias is None else dbias.reshape(bias.shape).astype(bias.dtype),
        }, None

    _reference = plain_form.reference

    def _get_heuristics_config(self, ba: BoundArguments) -> XlaChunkedDotProductAttentionVjpConfig:
        return PLAIN_VJP

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[XlaChunkedDotProductAttentionVjpConfig]:
        return _space(XlaChunkedDotProductAttentionVjpConfig, ba)

    def _get_cost_features(self, ba: BoundArguments, config: Any) -> dict[str, float]:
        return _cost_features(ba, config, backward=True)

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Residuals and output are those of the plain form at random queries, keys and values."""
        forward = functools.partial(XlaChunkedDotProductAttention()._fwd, return_residuals=True, config=PLAIN)
        return base.example_gradient_arguments(arguments, base.example_arguments(arguments, rng), forward, rng)


@registry.register("dot_product_attention", "xla_chunked")
@dataclasses.dataclass(frozen=True)
class XlaChunkedDotProductAttention(Op[..., Any, Any, Any, Any]):
    """Attention in blocks of queries and keys; without blocks, `DotProductAttention`.

    Its residuals are the maximum of the logits of each row and the sum of their exponentials, float32 `[B,N,T]`,
    whatever the config. With both blocks set, only `vjp` can differentiate causal and windowed attention.
    """

    config_cls: ClassVar[type] = XlaChunkedDotProductAttentionConfig

    vjp: Callable[..., Any] | None = dataclasses.field(default=XlaChunkedDotProductAttentionVjp(), kw_only=True)

    def bind(self, *args: Any, return_residuals: bool = False, **kwargs: Any) -> BoundArguments:
        """Binds arguments; see `tokamax.dot_product_attention`."""
        canonical = DotProductAttention().bind(*args, **kwargs).arguments
        return super().bind(**canonical, return_residuals=return_residuals)

    def bind_vjp(self, ba: BoundArguments) -> BoundArguments:
        """Returns the abstract arguments with which the gradient of a call binds its VJP op.

        Args:
          ba: bound arguments of this op, without vmap axes.
        """
        op = self.vjp if isinstance(self.vjp, Op) else XlaChunkedDotProductAttentionVjp()
        arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in ba.abstract.items() if shapes.is_array(x)}
        rest = {n: x for n, x in ba.abstract.items() if n not in arrays}

        def forward(arrays: dict[str, Any]) -> Any:
            return self._fwd(**arrays, **rest, return_residuals=True, config=PLAIN)

        out, residuals = jax.tree.map(shapes.spec_of, jax.eval_shape(forward, arrays))
        return op.bind(residuals, out, out, **ba.abstract)

    def _fwd(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        local_window_size: tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        return_residuals: bool,
        config: XlaChunkedDotProductAttentionConfig,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        call = Call.of(query, key, bias, mask, query_seq_lengths, key_value_seq_lengths)
        statics = Statics.of(query, scale, is_causal, local_window_size, logits_soft_cap)
        if config == PLAIN:
            out, _ = DotProductAttention()._fwd(
                query,
                key,
                value,
                bias,
                mask,
                scale=scale,
                is_causal=is_causal,
                query_seq_lengths=query_seq_lengths,
                key_value_seq_lengths=key_value_seq_lengths,
                local_window_size=local_window_size,
                logits_soft_cap=logits_soft_cap,
                return_residuals=False,
                config=None,
            )
            # Where the plain VJP follows, nothing reads these, and the compiler drops them.
            maxima = _row_maxima(call, statics) if return_residuals else None
        else:
            folded, maxima = chunked(call, statics, value, config)
            out = base.unfold_heads(folded, query)
        if not return_residuals or maxima is None:
            return out, None
        rows = (call.q.shape[0], query.shape[-2], query.shape[-3])
        return out, (maxima[0].reshape(rows), maxima[1].reshape(rows))

    _reference = plain_form.reference

    def _get_heuristics_config(self, ba: BoundArguments) -> XlaChunkedDotProductAttentionConfig:
        return PLAIN

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[XlaChunkedDotProductAttentionConfig]:
        return _space(XlaChunkedDotProductAttentionConfig, ba)

    def _get_cost_features(self, ba: BoundArguments, config: Any) -> dict[str, float]:
        return _cost_features(ba, config)

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return base.example_arguments(arguments, rng)
