"""Attention for users."""

from typing import Any

import jax

from tokamax._src.ops.choose import Choice, call
from tokamax._src.ops.dot_product_attention import base as base  # registers itself
from tokamax._src.ops.dot_product_attention import pallas_mosaic_tpu as pallas_mosaic_tpu  # registers itself
from tokamax._src.ops.dot_product_attention import xla_chunked as xla_chunked  # registers itself


def dot_product_attention(
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
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    implementation: Choice = None,
) -> jax.Array:
    """Computes `softmax(scale * q @ k.T + bias) @ v` for each head.

    The arguments are those of `jax.nn.dot_product_attention`, a soft cap and segment ids. Softmax runs in float32.
    Where a query sees no key at all, its output is the average of all values, as in JAX.

        >>> import jax.numpy as jnp
        >>> import tokamax
        >>> q = k = v = jnp.ones((1, 16, 4, 32))
        >>> tokamax.dot_product_attention(q, k, v, is_causal=True).shape
        (1, 16, 4, 32)

    Args:
      query: `[B,T,N,H]` or `[T,N,H]`.
      key: `[B,S,K,H]` or `[S,K,H]`, with K a divisor of N: each head of keys serves N / K heads of queries.
      value: as key.
      bias: what to add to the logits, broadcastable to `[B,N,T,S]`.
      mask: bool, broadcastable to `[B,N,T,S]`; True where a query sees a key.
      scale: factor of the logits; by default `1 / sqrt(H)`.
      is_causal: whether a query sees no later key.
      query_seq_lengths: int32 `[B]`; the output of queries beyond is zero.
      key_value_seq_lengths: int32 `[B]`; keys beyond are not seen.
      local_window_size: how many keys before and after its own position a query sees: `(left, right)`, or one number
        for both.
      logits_soft_cap: cap of the logits before bias and mask, `cap * tanh(logits / cap)`; None for none.
      query_segment_ids: int32 `[B,T]`: a query sees the keys of its own segment alone.
      key_value_segment_ids: int32 `[B,S]`; given exactly if those of the queries are.
      implementation: `"xla"`, `"xla_chunked"`, `"mosaic"` (TPU; without bias and mask), an op to call in place of them,
        or several of these, of which the first that can run does; None for the best known.

    Returns:
      An array of the shape and dtype of query.

    Raises:
      ArgumentError: if the arguments do not fit each other, or there is no such implementation.
      UnsupportedError: if none of the named implementations can run the arguments on this device.
    """
    segments: dict[str, Any] = {}
    if query_segment_ids is not None or key_value_segment_ids is not None:
        segments = {"query_segment_ids": query_segment_ids, "key_value_segment_ids": key_value_segment_ids}
    return call(
        "dot_product_attention",
        implementation,
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
        **segments,
    )
