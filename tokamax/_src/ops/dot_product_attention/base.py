"""The reference of attention: arguments, their checks, and the plain XLA form.

Notation: batch B, queries T, keys S, query heads N, key and value heads K, head width H.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors, registry, shapes
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.op import NullConfig, Op

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The logit of a key that a query must not see; finite, so that a row that sees none averages all values."""


def _check_heads(query: shapes.ArraySpec, key: shapes.ArraySpec, value: shapes.ArraySpec) -> None:
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        raise errors.ArgumentError(
            f"query, key and value must all have the shape [B,T,N,H] or [T,N,H], got {query}, {key}, {value}"
        )
    if key.shape != value.shape or query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise errors.ArgumentError(
            f"key and value must have one shape [B,S,K,H] with the B and H of query, got {query}, {key}, {value}"
        )
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise errors.ArgumentError(
            f"query, key and value must have one floating dtype, got {query}, {key}, {value}; cast them first"
        )
    if query.shape[-2] % key.shape[-2]:
        raise errors.ArgumentError(
            "the number of query heads must be a multiple of that of key heads, "
            f"got {query.shape[-2]} and {key.shape[-2]}"
        )


def _check_broadcast(name: str, given: shapes.ArraySpec, full: tuple[int, ...]) -> None:
    shape = (1,) * (4 - given.ndim) + given.shape
    if given.ndim > 4 or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        raise errors.ArgumentError(f"{name} must broadcast to [B,N,T,S]={list(full)}, got {given}")


def check_segments(query: Any, key: Any, query_ids: Any, key_ids: Any) -> None:
    """Checks segment ids, int32 `[B,T]` and `[B,S]`, both or none.

    Raises:
      ArgumentError: if they do not fit.
    """
    if (query_ids is None) != (key_ids is None):
        given = "key_value_segment_ids" if query_ids is None else "query_segment_ids"
        raise errors.ArgumentError(
            f"query_segment_ids and key_value_segment_ids must both be given or both be None, got {given} alone"
        )
    batch = query.shape[0] if len(query.shape) == 4 else 1
    for name, ids, size in (
        ("query_segment_ids", query_ids, query.shape[-3]),
        ("key_value_segment_ids", key_ids, key.shape[-3]),
    ):
        if ids is not None and (tuple(ids.shape) != (batch, size) or ids.dtype != jnp.int32):
            raise errors.ArgumentError(f"{name} must be int32 [{batch},{size}], got {shapes.spec_of(ids)}")


def with_segments(mask: Any, query_ids: Any, key_ids: Any) -> Any:
    """Returns a mask that also hides the keys of other segments.

    Args:
      mask: bool, broadcastable to `[B,N,T,S]`, or None.
      query_ids: int32 `[B,T]`, or None for one segment.
      key_ids: int32 `[B,S]`, or None.
    """
    if query_ids is None:
        return mask
    same = (query_ids[:, :, None] == key_ids[:, None, :])[:, None]
    return same if mask is None else mask & same


def _mask_with_segments(mask: Any, query_ids: Any, key_ids: Any) -> Any:
    """Like `with_segments`, for arrays and for abstract ones."""
    given = (mask, query_ids, key_ids)
    if not any(isinstance(x, (shapes.ArraySpec, jax.ShapeDtypeStruct)) for x in given):
        return with_segments(*given)
    specs = jax.tree.map(shapes.spec_of, given, is_leaf=shapes.is_array)
    vmap = next((spec.vmap for spec in specs if spec is not None and spec.vmap), ())
    abstract = [None if spec is None else jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]
    found = jax.eval_shape(with_segments, *abstract)
    return shapes.ArraySpec(found.shape, found.dtype, vmap)


def _window(size: Any) -> tuple[int, int]:
    try:
        left, right = size if isinstance(size, (tuple, list)) else (size, size)
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise errors.ArgumentError(
            f"local_window_size must be an integer or a pair (left, right) of integers, got {size!r}"
        ) from None


@registry.register("dot_product_attention", "xla")
@dataclasses.dataclass(frozen=True)
class DotProductAttention(Op[..., Any, Any, Any, Any]):
    """Attention in plain XLA: `jax.nn.dot_product_attention`, with a soft cap beside it."""

    config_cls: ClassVar[type] = NullConfig

    def bind(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds arguments; see `tokamax.dot_product_attention`. Segments become part of the mask."""
        q, k, v = (shapes.spec_of(x) for x in (query, key, value))
        _check_heads(q, k, v)
        full = (q.shape[0] if q.ndim == 4 else 1, q.shape[-2], q.shape[-3], k.shape[-3])
        if bias is not None:
            _check_broadcast("bias", shapes.spec_of(bias), full)
        if mask is not None:
            _check_broadcast("mask", shapes.spec_of(mask), full)
            if shapes.spec_of(mask).dtype != jnp.bool_:
                raise errors.ArgumentError(f"mask must be bool, got {shapes.spec_of(mask)}; add numbers through bias")
        for name, lengths in (
            ("query_seq_lengths", query_seq_lengths),
            ("key_value_seq_lengths", key_value_seq_lengths),
        ):
            if lengths is not None and shapes.spec_of(lengths).shape != (full[0],):
                raise errors.ArgumentError(f"{name} must have the shape [B]=[{full[0]}], got {shapes.spec_of(lengths)}")
            if lengths is not None and shapes.spec_of(lengths).dtype != jnp.int32:
                raise errors.ArgumentError(f"{name} must be int32, got {shapes.spec_of(lengths)}; cast it first")
        if local_window_size is not None:
            local_window_size = _window(local_window_size)
        if logits_soft_cap is not None and not logits_soft_cap > 0:
            raise errors.ArgumentError(f"logits_soft_cap must be positive or None, got {logits_soft_cap}")
        check_segments(query, key, query_segment_ids, key_value_segment_ids)
        if query_segment_ids is not None:
            mask = _mask_with_segments(mask, query_segment_ids, key_value_segment_ids)
        return super().bind(
            query,
            key,
            value,
            bias,
            mask,
            scale=None if scale is None else float(scale),
            is_causal=bool(is_causal),
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            logits_soft_cap=None if logits_soft_cap is None else float(logits_soft_cap),
            return_residuals=return_residuals,
        )

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
        config: Any,
    ) -> tuple[jax.Array, Any]:
        if logits_soft_cap is None:
            out = jax.nn.dot_product_attention(
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
                implementation="xla",
            )
            return out, None
        call = Call.of(query, key, bias, mask, query_seq_lengths, key_value_seq_lengths)
        statics = Statics.of(query, scale, is_causal, local_window_size, logits_soft_cap)
        return call.unfold_out(plain(call, statics, value)[0], query), None

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return example_arguments(arguments, rng)


def example_arguments(arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Returns lengths of half to all of the sequence, and a mask that hides one key in ten."""
    made: dict[str, Any] = {}
    for name, array in (("query_seq_lengths", "query"), ("key_value_seq_lengths", "key")):
        if (spec := arguments[name]) is not None:
            length = arguments[array].shape[-3]
            made[name] = rng.integers(max(1, length // 2), length + 1, spec.shape).astype(spec.dtype)
    if (spec := arguments["mask"]) is not None:
        made["mask"] = rng.random(spec.shape) < 0.9
    return made


def example_gradient_arguments(
    arguments: dict[str, Any], made: dict[str, Any], forward: Callable[..., Any], rng: np.random.Generator
) -> dict[str, Any]:
    """Returns values for a VJP op: residuals and output are those of random queries, keys and values.

    Args:
      arguments: its arguments, arrays as `ArraySpec`.
      made: values of those that are no floats.
      forward: takes the arguments of the forward pass by name; returns output and residuals.
      rng: the source of randomness.
    """
    made = dict(made)
    for name in ("query", "key", "value", "bias", "dout"):
        if (spec := arguments[name]) is not None:
            made[name] = rng.standard_normal(spec.shape, np.float32).astype(spec.dtype)
    given = {n: made.get(n, x) for n, x in arguments.items() if n not in ("residuals", "out", "dout")}
    arrays = {n: x for n, x in given.items() if shapes.is_array(x)}
    rest = {n: x for n, x in given.items() if n not in arrays}
    run = jax.jit(lambda arrays: forward(**arrays, **rest))
    made["out"], made["residuals"] = jax.tree.map(np.asarray, run(arrays))
    return made


@dataclasses.dataclass(frozen=True)
class Statics:
    """The arguments that are no arrays.

    Attributes:
      scale: factor of the logits.
      left: how many keys before its own position a query sees; None for all.
      right: how many after; None for all.
      soft_cap: `cap * tanh(logits / cap)`; None for none.
    """

    scale: float
    left: int | None
    right: int | None
    soft_cap: float | None

    @classmethod
    def of(
        cls,
        query: jax.Array,
        scale: float | None,
        is_causal: bool,
        window: tuple[int, int] | None,
        soft_cap: float | None,
    ) -> "Statics":
        """Normalises them: a causal mask is a window without keys after."""
        left, right = window if window is not None else (None, None)
        if is_causal:
            right = 0 if right is None else min(right, 0)
        return cls(query.shape[-1] ** -0.5 if scale is None else scale, left, right, soft_cap)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arrays of a call, with the query heads of a key head side by side (G = N / K).

    Attributes:
      q: float32 `[B,K,G,T,H]`.
      k: float32 `[B,K,S,H]`.
      bias: float32 `[B|1,K|1,G|1,T|1,S|1]` or None.
      mask: the same in bool.
      q_lengths: `[B]` or None.
      k_lengths: `[B]` or None.
    """

    q: jax.Array
    k: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    q_lengths: jax.Array | None
    k_lengths: jax.Array | None

    @classmethod
    def of(cls, query: Any, key: Any, bias: Any, mask: Any, q_lengths: Any, k_lengths: Any) -> "Call":
        """Folds the arguments of the op."""
        heads = key.shape[-2]
        bias = None if bias is None else fold_logits(bias.astype(jnp.float32), heads)
        mask = None if mask is None else fold_logits(mask, heads)
        return cls(fold_heads(query, heads), keys_first(key), bias, mask, q_lengths, k_lengths)

    def unfold_out(self, out: jax.Array, query: jax.Array) -> jax.Array:
        """Brings `[B,K,G,T,H]` back to the shape and dtype of the query."""
        return unfold_heads(out, query)


def fold_heads(x: jax.Array, heads: int) -> jax.Array:
    """`[B,T,N,H]` or `[T,N,H]` -> float32 `[B,K,G,T,H]`."""
    x = x[None] if x.ndim == 3 else x
    b, t, n, h = x.shape
    return x.reshape(b, t, heads, n // heads, h).transpose(0, 2, 3, 1, 4).astype(jnp.float32)


def unfold_heads(x: jax.Array, like: jax.Array) -> jax.Array:
    """`[B,K,G,T,H]` -> the shape and dtype of `like`."""
    return x.transpose(0, 3, 1, 2, 4).reshape(like.shape).astype(like.dtype)


def heads_first(x: jax.Array) -> jax.Array:
    """`[B,S,K,H]` or `[S,K,H]` -> `[B,K,S,H]`."""
    return (x[None] if x.ndim == 3 else x).swapaxes(1, 2)


def keys_first(x: jax.Array) -> jax.Array:
    """`[B,S,K,H]` or `[S,K,H]` -> float32 `[B,K,S,H]`."""
    return heads_first(x).astype(jnp.float32)


def heads_last(x: jax.Array, like: jax.Array) -> jax.Array:
    """`[B,K,S,H]` -> the shape and dtype of `like`."""
    return x.swapaxes(1, 2).reshape(like.shape).astype(like.dtype)


def fold_logits(x: jax.Array, heads: int) -> jax.Array:
    """`[B|1,N|1,T|1,S|1]`, or less axes, -> `[B|1,K|1,G|1,T|1,S|1]`."""
    b, n, t, s = (1,) * (4 - x.ndim) + x.shape
    return x.reshape(b, *((1, 1) if n == 1 else (heads, n // heads)), t, s)


def visible(
    statics: Statics, rows: jax.Array, columns: jax.Array, k_lengths: jax.Array | None, mask: jax.Array | None
) -> jax.Array | None:
    """Returns which keys queries see, broadcastable to `[B,K,G,rows,columns]`; None for all.

    Args:
      statics: the window.
      rows: positions of the queries, `[rows]`.
      columns: positions of the keys, `[columns]`.
      k_lengths: number of keys by batch, `[B]`.
      mask: the mask of these rows and columns.
    """
    seen = mask
    distance = columns[None, :] - rows[:, None]
    parts = []
    if statics.right is not None:
        parts.append(distance <= statics.right)
    if statics.left is not None:
        parts.append(distance >= -statics.left)
    if k_lengths is not None:
        parts.append((columns[None, :] < k_lengths[:, None])[:, None, None, None, :])
    for part in parts:
        seen = part if seen is None else seen & part
    return seen


def capped(statics: Statics, logits: jax.Array) -> jax.Array:
    """Applies the soft cap."""
    if statics.soft_cap is None:
        return logits
    return statics.soft_cap * jnp.tanh(logits / statics.soft_cap)


def row_is_real(call: Call, rows: jax.Array) -> jax.Array | None:
    """Whether queries lie within their sequence, `[B,1,1,rows,1]`; None for all. The output of others is zero."""
    if call.q_lengths is None:
        return None
    return (rows[None, :] < call.q_lengths[:, None])[:, None, None, :, None]


def plain(call: Call, statics: Statics, value: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes attention with all logits at once; returns `[B,K,G,T,H]`, and the maximum and sum of each row."""
    logits = jnp.einsum("bkgth,bksh->bkgts", call.q * statics.scale, call.k)
    logits = capped(statics, logits)
    if call.bias is not None:
        logits = logits + call.bias
    rows, columns = jnp.arange(logits.shape[-2]), jnp.arange(logits.shape[-1])
    seen = visible(statics, rows, columns, call.k_lengths, call.mask)
    if seen is not None:
        logits = jnp.where(seen, logits, MASKED)
    top = logits.max(-1)
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    out = jnp.einsum("bkgts,bksh->bkgth", weights / total[..., None], keys_first(value))
    real = row_is_real(call, rows)
    return (out if real is None else jnp.where(real, out, 0.0)), (top, total)
