"""JAX's own splash attention kernels, wrapped: the one place that knows them.

`jax.experimental.pallas.ops.tpu.splash_attention` promises no stability, and its backward pass is private: it is called
here all the same, since the public way to it runs the forward pass once more. What is relied on stands here and in the
tests of this file, and nowhere else. Found in JAX 0.10.2 and 0.12.0, whose kernels differ in scratch memory alone:

- Query heads may be a multiple of key heads. Windows, and causal attention as a window without keys after, are computed
  in the kernel, and blocks that they hide are skipped. Soft caps are computed in the kernel.
- Keys are also hidden from queries with another segment id: so are those that padding adds, and those beyond a length.
- Blocks must divide the sequences and be multiples of 128: sequences are padded here.
- There is no scale: queries come scaled. There is no bias.
- A row that sees no key gives something undefined, told by its `logsumexp`: see `is_dead`.

Notation: batch B, queries T, keys S, query heads N, key and value heads K, head width H.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tokamax._src import errors

_HIDDEN = jnp.iinfo(jnp.int32).min
"""The segment of keys that no query sees."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Which keys a query sees by its position; None for all on that side.

    Attributes:
      left: how many before its own position.
      right: how many after.
    """

    left: int | None
    right: int | None

    def hides_all(self, queries: int, keys: int) -> bool:
        """Whether no query sees any key: then the first does not that has one within reach."""
        row = max(0, -(self.right or 0))
        return row >= queries or not self._range(row, keys)

    def may_hide_a_row(self, queries: int, keys: int) -> bool:
        """Whether some query sees no key: none sees less than both the first and the last."""
        return not (self._range(0, keys) and self._range(queries - 1, keys))

    def hides_from(self, queries: int, column: int) -> bool:
        """Whether no query sees a key from this column on."""
        return self.right is not None and queries - 1 + self.right < column

    def _range(self, row: int, keys: int) -> range:
        first = 0 if self.left is None else max(0, row - self.left)
        end = keys if self.right is None else min(keys, row + self.right + 1)
        return range(first, end)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the kernels read, padded to whole blocks.

    Attributes:
      q: scaled queries, `[B,N,T,H]`.
      k: keys, `[B,K,S,H]`.
      v: values, `[B,K,S,H]`.
      q_ids: segments of the queries, int32 `[B,T]`, or None.
      k_ids: segments of the keys, int32 `[B,S]`, or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_ids: jax.Array | None
    k_ids: jax.Array | None

    def padded(self, rows: int, columns: int, window: Window) -> "Inputs":
        """Pads the sequences to multiples of these numbers; keys that are added are not seen."""
        t, s = self.q.shape[2], self.k.shape[2]
        more_rows, more_columns = -t % rows, -s % columns
        q_ids, k_ids = self.q_ids, self.k_ids
        if q_ids is None and more_columns and not window.hides_from(t, s):
            q_ids, k_ids = (jnp.zeros((self.q.shape[0], size), jnp.int32) for size in (t, s))
        if q_ids is not None and k_ids is not None:
            q_ids = jnp.pad(q_ids, ((0, 0), (0, more_rows)))
            k_ids = jnp.pad(k_ids, ((0, 0), (0, more_columns)), constant_values=_HIDDEN)
        k, v = pad_rows(self.k, more_columns), pad_rows(self.v, more_columns)
        return Inputs(pad_rows(self.q, more_rows), k, v, q_ids, k_ids)


def hidden_beyond(ids: jax.Array | None, lengths: jax.Array, size: int) -> jax.Array:
    """Returns the segments of keys, with those beyond a length in the segment that no query sees.

    Args:
      ids: int32 `[B,S]`, or None for one segment.
      lengths: int32 `[B]`.
      size: S.
    """
    seen = jnp.arange(size)[None] < lengths[:, None]
    return jnp.where(seen, jnp.zeros(seen.shape, jnp.int32) if ids is None else ids, _HIDDEN)


def pad_rows(x: jax.Array, missing: int) -> jax.Array:
    """Adds zeros at the end of the third axis."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 3)) if missing else x


def is_dead(logsumexp: jax.Array) -> jax.Array:
    """Whether a row sees no key: all its logits are those of hidden keys, about -2e38, or it was never visited."""
    return ~(logsumexp > -1e38)


def _kernel(inputs: Inputs, window: Window, soft_cap: float | None, blocks: dict[str, Any], **options: Any) -> Any:
    """Returns the kernels for one element of the batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    heads, t, s = inputs.q.shape[1], inputs.q.shape[2], inputs.k.shape[2]
    if window.left is None and window.right is None:
        mask = splash_attention_mask.FullMask((t, s))
    else:
        mask = splash_attention_mask.LocalMask((t, s), (window.left, window.right), offset=0)
    return splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**blocks),
        attn_logits_soft_cap=soft_cap,
        **options,
    )


def _segments(inputs: Inputs) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    if inputs.q_ids is None or inputs.k_ids is None:
        return None
    return splash_attention_kernel.SegmentIds(inputs.q_ids, inputs.k_ids)


def _check(inputs: Inputs, window: Window) -> None:
    t, s = inputs.q.shape[2], inputs.k.shape[2]
    if window.hides_all(t, s):
        raise errors.UnsupportedError(
            f"some query must see a key, got {t} queries and {s} keys of which the window {window} hides all; use "
            "implementation='xla'"
        )


def forward(
    inputs: Inputs,
    window: Window,
    soft_cap: float | None,
    *,
    block_q: int,
    block_kv: int,
    block_kv_compute: int,
    with_logsumexp: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes attention.

    Args:
      inputs: the arrays.
      window: the window.
      soft_cap: cap of the logits, or None.
      block_q: queries of a block.
      block_kv: keys of a block.
      block_kv_compute: keys that are computed at once.
      with_logsumexp: whether to return the logarithm of the sum of the exponentials of each row's logits.
      interpret: whether to run the kernel as plain XLA, for tests without a TPU.

    Returns:
      `[B,N,T,H]`, undefined in rows that see no key; and float32 `[B,N,T]` or None.
    """
    _check(inputs, window)
    t = inputs.q.shape[2]
    inputs = inputs.padded(block_q, block_kv, window)
    blocks = {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": block_kv_compute}
    kernel = _kernel(inputs, window, soft_cap, blocks, save_residuals=with_logsumexp, interpret=interpret)
    found = jax.vmap(kernel)(inputs.q, inputs.k, inputs.v, _segments(inputs))
    out, logsumexp = (found[0], found[1][0]) if with_logsumexp else (found, None)
    return out[:, :, :t], None if logsumexp is None else logsumexp[:, :, :t]


def backward(
    inputs: Inputs,
    window: Window,
    soft_cap: float | None,
    out: jax.Array,
    logsumexp: jax.Array,
    dout: jax.Array,
    *,
    block_q_dkv: int,
    block_kv_dkv: int,
    block_kv_dkv_compute: int,
    block_q_dq: int | None,
    block_kv_dq: int | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of attention.

    Args:
      inputs: the arrays.
      window: the window.
      soft_cap: cap of the logits, or None.
      out: what `forward` returned, `[B,N,T,H]`, finite.
      logsumexp: what `forward` returned, float32 `[B,N,T]`, finite.
      dout: the gradient of `out`, zero in rows that see no key.
      block_q_dkv: queries of a block of the kernel for keys and values.
      block_kv_dkv: keys of such a block.
      block_kv_dkv_compute: keys that this kernel computes at once.
      block_q_dq: queries of a block of the kernel for queries; None to compute all gradients in one kernel.
      block_kv_dq: keys of such a block; None likewise.
      interpret: whether to run the kernels as plain XLA, for tests without a TPU.

    Returns:
      The gradients of the scaled queries, keys and values, in their shapes and dtypes.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    _check(inputs, window)
    t, s = inputs.q.shape[2], inputs.k.shape[2]
    rows = math.lcm(block_q_dkv, block_q_dq or 1)
    padded = inputs.padded(rows, math.lcm(block_kv_dkv, block_kv_dq or 1), window)
    more = padded.q.shape[2] - t
    blocks = {
        "block_q": block_q_dkv,
        "block_kv": block_kv_dkv,
        "block_q_dkv": block_q_dkv,
        "block_kv_dkv": block_kv_dkv,
        "block_kv_dkv_compute": block_kv_dkv_compute,
        "block_q_dq": block_q_dq,
        "block_kv_dq": block_kv_dq,
        "use_fused_bwd_kernel": block_q_dq is None,
    }
    kernel = _kernel(padded, window, soft_cap, blocks, interpret=interpret)
    run = functools.partial(
        splash_attention_kernel._splash_attention_bwd,
        False,
        kernel.kwargs["mask_value"],
        False,
        kernel.kwargs["block_sizes"],
        None,
        kernel.kwargs["mask_function"],
        soft_cap,
        interpret,
    )

    def one(q: Any, k: Any, v: Any, ids: Any, out: Any, logsumexp: Any, dout: Any) -> tuple[Any, ...]:
        saved = (q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
        return run(saved, dout)[3:6]

    of_rows = (pad_rows(x, more) for x in (out, logsumexp, dout))
    dq, dk, dv = jax.vmap(one)(padded.q, padded.k, padded.v, _segments(padded), *of_rows)
    return dq[:, :, :t], dk[:, :, :s], dv[:, :, :s]
