"""JAX's own megablox kernels, wrapped: the one place that knows them.

`jax.experimental.pallas.ops.tpu.megablox` promises no stability, so what is relied on stands here and in the tests of
this file, and nowhere else. Found in JAX 0.10.2 and 0.12.0, which have the same kernels:

- `gmm` multiplies the rows of each group with its matrix, `tgmm` makes one matrix per group from two arrays of rows;
  both take bf16 and f32, add up in f32, and write any dtype. Groups may be empty.
- The tile of rows must divide the rows: `_padded` adds some. The other tiles need not divide their axes.
- Rows after the last group are not written by `gmm`: they are set to zero here.
- Sums take the precision that `jax.default_matmul_precision` sets; on a TPU that is the default one or the highest.
- A vmap over the grid, whose size is known only when the program runs, does not exist: batches run one by one.
- Under `shard_map` it does not say over which mesh axes its output varies: `check_vma=False` is needed.

Notation: m rows, k inputs, n outputs, g groups.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tiles = tuple[int, int, int]
"""Tiles of m, k and n."""


def _padded(rows: jax.Array, tile_m: int) -> jax.Array:
    """Adds rows of zeros up to a multiple of a tile."""
    missing = -rows.shape[0] % tile_m if rows.shape[0] else tile_m
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _one_by_one(kernel: Callable[..., jax.Array], precision: str | None, *arrays: jax.Array) -> jax.Array:
    """Runs a kernel; under vmap in a loop."""
    with jax.default_matmul_precision(precision):
        return jax.custom_batching.sequential_vmap(kernel)(*arrays)


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: Tiles,
    out_dtype: Any,
    transpose_rhs: bool = False,
    precision: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies the rows of each group with its matrix.

    Args:
      lhs: [m, k], bf16 or f32.
      rhs: [g, k, n], or [g, n, k] if transposed; bf16 or f32.
      group_sizes: [g] integers.
      tiles: tiles of m, k and n.
      out_dtype: dtype of the result.
      transpose_rhs: whether `rhs` is transposed.
      precision: as in `jax.default_matmul_precision`.
      interpret: whether to run the kernel as plain XLA, for tests without a TPU.

    Returns:
      [m, n]; zeros after the last group.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm as kernel

    rows = lhs.shape[0]
    run = functools.partial(
        kernel,
        preferred_element_type=jnp.dtype(out_dtype),
        tiling=tiles,
        transpose_rhs=transpose_rhs,
        interpret=interpret,
    )
    group_sizes = group_sizes.astype(jnp.int32)
    out = _one_by_one(run, precision, _padded(lhs, tiles[0]), rhs, group_sizes)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < group_sizes.sum(), out, jnp.zeros((), out.dtype))


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: Tiles,
    out_dtype: Any,
    precision: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `lhs[rows of the group].T @ rhs[rows of the group]` for each group.

    Args:
      lhs: [m, k], bf16 or f32.
      rhs: [m, n], bf16 or f32.
      group_sizes: [g] integers.
      tiles: tiles of m, k and n.
      out_dtype: dtype of the result.
      precision: as in `jax.default_matmul_precision`.
      interpret: whether to run the kernel as plain XLA, for tests without a TPU.

    Returns:
      [g, k, n]; zeros for empty groups.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm as kernel

    run = functools.partial(kernel, preferred_element_type=jnp.dtype(out_dtype), tiling=tiles, interpret=interpret)
    # The kernel transposes it back: XLA drops both.
    transposed = _padded(lhs, tiles[0]).T
    return _one_by_one(run, precision, transposed, _padded(rhs, tiles[0]), group_sizes.astype(jnp.int32))
