"""Ragged dot as loops over tiles of rows: work grows with the rows, not with rows times groups.

On CPU, `jax.lax.ragged_dot` multiplies every row with the matrix of every group and masks. Here a tile of rows of one
group at a time is multiplied with that group's matrix. A tile may reach past the end of its group: the result of those
rows is overwritten by the next group, whose tiles come later and begin exactly there.

Notation: m rows, k inputs, n outputs, g groups.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tokamax._src import op, registry
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.ops import blocks, plain_form
from tokamax._src.ops.ragged_dot import base

_MAX_GATHERED_BYTES = 128 * 2**20


class Visit(enum.Enum):
    """How tiles are visited."""

    GROUPS = "groups"
    """A loop over groups around a loop over the tiles of the group: each matrix is read once."""
    TILES = "tiles"
    """One loop over all tiles."""
    GATHER = "gather"
    """All tiles at once in one batched product; the matrix is copied for each tile."""


@dataclasses.dataclass(frozen=True)
class XlaChunkedRaggedDotConfig:
    """How to split a ragged dot.

    Attributes:
      block_m: rows of a tile; None for the plain form, which is `jax.lax.ragged_dot`.
      block_tail: rows of the smaller tiles that take what is left of a group after its full tiles; None for none.
      visit: how tiles are visited.
      upcast: whether 16-bit floats become f32 before they are multiplied, for CPUs that lack 16-bit products.
    """

    block_m: int | None = None
    block_tail: int | None = None
    visit: Visit = Visit.GROUPS
    upcast: bool = False


@dataclasses.dataclass(frozen=True)
class XlaChunkedRaggedDotVjpConfig:
    """How to split the two gradients of a ragged dot.

    Attributes:
      block_m_lhs: rows of a tile for the gradient of `lhs`; None for the plain form of that gradient.
      block_m_rhs: rows of a tile for the gradient of `rhs`; None for the plain form of that gradient.
      block_tail: rows of the smaller tiles at the end of a group, for both gradients; None for none.
      upcast: whether 16-bit floats become f32 before they are multiplied.
    """

    block_m_lhs: int | None = None
    block_m_rhs: int | None = None
    block_tail: int | None = None
    upcast: bool = False


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    config: XlaChunkedRaggedDotConfig,
    precision: Any = None,
    out_dtype: Any = None,
    transpose_rhs: bool = False,
) -> jax.Array:
    """Computes a ragged dot by tiles.

    Args:
      lhs: [m, k].
      rhs: [g, k, n], or [g, n, k] with `transpose_rhs`.
      group_sizes: [g].
      config: how to split; `block_m` must be set.
      precision: as in `jax.lax.dot_general`.
      out_dtype: dtype of the result; None for that of `lhs`.
      transpose_rhs: whether to multiply with the transposed matrices.

    Returns:
      [m, n].
    """
    assert config.block_m is not None
    out_dtype = out_dtype or lhs.dtype
    m = lhs.shape[0]
    # A tile that begins in the last row must not be moved up by the clamping of slices.
    padded = jnp.pad(lhs, ((0, config.block_m), (0, 0)))
    if config.upcast:
        padded = padded.astype(blocks.accumulator_dtype(lhs.dtype))
    visit = {Visit.GROUPS: _by_groups, Visit.TILES: _by_tiles, Visit.GATHER: _by_gather}[config.visit]
    out = visit(padded, rhs, group_sizes.astype(jnp.int32), config, precision, 1 if transpose_rhs else 0)
    in_a_group = jnp.arange(m)[:, None] < group_sizes.sum()
    return jnp.where(in_a_group, out[:m], 0).astype(out_dtype)


def _loop_over_tiles(
    size: jax.Array, start: jax.Array, block_m: int, block_tail: int | None, body: Callable[..., Any], state: Any
) -> Any:
    """Runs `state = body(first_row, rows, is_full, state)` over the tiles of one group."""
    if block_tail is None or block_tail >= block_m:
        count = (size + block_m - 1) // block_m
        return lax.fori_loop(0, count, lambda i, s: body(start + i * block_m, block_m, False, s), state)
    full = size // block_m
    state = lax.fori_loop(0, full, lambda i, s: body(start + i * block_m, block_m, True, s), state)
    rest, start = size - full * block_m, start + full * block_m
    count = (rest + block_tail - 1) // block_tail
    return lax.fori_loop(0, count, lambda i, s: body(start + i * block_tail, block_tail, False, s), state)


def _matrix(rhs: jax.Array, group: Any, upcast: bool) -> jax.Array:
    matrix = blocks.take_axis(rhs, group, 1)[0] if rhs.shape[0] > 1 else rhs[0]
    return matrix.astype(blocks.accumulator_dtype(rhs.dtype)) if upcast else matrix


def _by_groups(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, config: XlaChunkedRaggedDotConfig, precision: Any, contract: int
) -> jax.Array:
    block_m = config.block_m
    assert block_m is not None
    starts = jnp.cumsum(sizes) - sizes

    def group(i: Any, out: jax.Array) -> jax.Array:
        matrix = _matrix(rhs, i, config.upcast)

        def tile(row: Any, rows: int, _: bool, out: jax.Array) -> jax.Array:
            product = blocks.dot(blocks.take_axis(lhs, row, rows), matrix, (1, contract), precision)
            return blocks.put_axis(out, product, row)

        return _loop_over_tiles(sizes[i], starts[i], block_m, config.block_tail, tile, out)

    return blocks.loop(rhs.shape[0], group, _empty(lhs, rhs, sizes, contract))


def _empty(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contract: int) -> jax.Array:
    shape = (lhs.shape[0], rhs.shape[2 - contract])
    return blocks.zeros(shape, blocks.accumulator_dtype(jnp.promote_types(lhs.dtype, rhs.dtype)), lhs, rhs, sizes)


def _tiles(sizes: jax.Array, rows: int, block_m: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists the tiles of all groups.

    Returns:
      [t] group and [t] first row of each tile, where t is an upper bound of their number, and [g + 1] the number of the
      first tile of each group and of all tiles.
    """
    counts = (sizes + block_m - 1) // block_m
    firsts = jnp.concatenate([jnp.zeros_like(counts[:1]), jnp.cumsum(counts)])
    bound = min(rows, rows // block_m + sizes.shape[0])  # Each group adds at most one partly filled tile.
    tile = jnp.arange(bound)
    group = jnp.minimum(jnp.searchsorted(firsts[1:], tile, side="right"), sizes.shape[0] - 1)
    row = (jnp.cumsum(sizes) - sizes)[group] + (tile - firsts[group]) * block_m
    return group, row, firsts


def _by_tiles(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, config: XlaChunkedRaggedDotConfig, precision: Any, contract: int
) -> jax.Array:
    assert config.block_m is not None
    block_m = config.block_m
    group, row, firsts = _tiles(sizes, lhs.shape[0] - block_m, block_m)

    def tile(i: Any, out: jax.Array) -> jax.Array:
        matrix = _matrix(rhs, group[i], config.upcast)
        product = blocks.dot(blocks.take_axis(lhs, row[i], block_m), matrix, (1, contract), precision)
        return blocks.put_axis(out, product, row[i])

    return lax.fori_loop(0, firsts[-1], tile, _empty(lhs, rhs, sizes, contract))


def _by_gather(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, config: XlaChunkedRaggedDotConfig, precision: Any, contract: int
) -> jax.Array:
    assert config.block_m is not None
    block_m, m = config.block_m, lhs.shape[0] - config.block_m
    group, row, firsts = _tiles(sizes, m, block_m)
    tiles = lhs[jnp.clip(row[:, None] + jnp.arange(block_m), 0, m)]
    matrices = rhs[group]
    if config.upcast:
        matrices = matrices.astype(lhs.dtype)
    dtype = jnp.promote_types(tiles.dtype, matrices.dtype)
    products = lax.dot_general(
        tiles.astype(dtype),
        matrices.astype(dtype),
        (((2,), (1 + contract,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=blocks.accumulator_dtype(dtype),
    )
    rows = jnp.arange(m)
    ends = jnp.cumsum(sizes)
    of = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), sizes.shape[0] - 1)
    place = firsts[of] * block_m + rows - (ends - sizes)[of]
    return products.reshape(-1, products.shape[-1])[jnp.clip(place, 0, products.shape[0] * block_m - 1)]


def rhs_gradient(
    lhs: jax.Array,
    dout: jax.Array,
    group_sizes: jax.Array,
    *,
    block_m: int,
    block_tail: int | None = None,
    upcast: bool = False,
    precision: Any = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Computes, for each group, `lhs[rows].T @ dout[rows]`.

    Args:
      lhs: [m, k].
      dout: [m, n].
      group_sizes: [g].
      block_m: rows of a tile.
      block_tail: rows of the smaller tiles at the end of a group.
      upcast: whether 16-bit floats become f32 first.
      precision: as in `jax.lax.dot_general`.
      out_dtype: dtype of the result; None for that of `lhs`.

    Returns:
      [g, k, n].
    """
    dtype = jnp.promote_types(lhs.dtype, dout.dtype)
    total_dtype = blocks.accumulator_dtype(dtype)
    if upcast:
        dtype = total_dtype
    sizes = group_sizes.astype(jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    x = jnp.pad(lhs.astype(dtype), ((0, block_m), (0, 0)))
    d = jnp.pad(dout.astype(dtype), ((0, block_m), (0, 0)))
    shape = (lhs.shape[1], dout.shape[1])

    def group(i: Any, out: jax.Array) -> jax.Array:
        def tile(row: Any, rows: int, is_full: bool, total: jax.Array) -> jax.Array:
            x_tile, d_tile = blocks.take_axis(x, row, rows), blocks.take_axis(d, row, rows)
            if not is_full:
                # Both sides: rows of other groups may hold NaN or infinities, which zeros do not wipe out.
                inside = row + jnp.arange(rows)[:, None] < starts[i] + sizes[i]
                x_tile, d_tile = jnp.where(inside, x_tile, 0), jnp.where(inside, d_tile, 0)
            return total + blocks.dot(x_tile, d_tile, (0, 0), precision)

        total = _loop_over_tiles(
            sizes[i], starts[i], block_m, block_tail, tile, blocks.zeros(shape, total_dtype, lhs, dout, sizes)
        )
        return blocks.put_axis(out, total[None], i)

    empty = blocks.zeros((sizes.shape[0], *shape), total_dtype, lhs, dout, sizes)
    return blocks.loop(sizes.shape[0], group, empty).astype(out_dtype or lhs.dtype)


def _plain_gradients(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, dout: jax.Array, precision: Any, out_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    run = lambda lhs, rhs: base.reference(lhs, rhs, group_sizes, precision, out_dtype)  # noqa: E731
    return jax.vjp(run, lhs, rhs)[1](dout)


def _tiles_of(rows: int, groups: int, block_m: int | None, block_tail: int | None) -> dict[str, float]:
    """Describes the tiles that uneven groups are cut into: their number, the small ones', the rows beyond `rows`.

    The sizes of the groups are known only when the program runs; typical ones stand for them.
    """
    if block_m is None:
        return {"log2_tiles": 0.0, "log2_tails": 0.0, "computed_share": float(groups)}
    sizes = base.example_group_sizes(rows, groups, np.random.default_rng(0)).astype(np.int64)
    if block_tail is None or block_tail >= block_m:
        full, tails, block_tail = -(-sizes // block_m), np.zeros_like(sizes), 0
    else:
        full, tails = sizes // block_m, -(-(sizes % block_m) // block_tail)
    return {
        "log2_tiles": math.log2(1.0 + full.sum()),
        "log2_tails": math.log2(1.0 + tails.sum()),
        "computed_share": float(full.sum() * block_m + tails.sum() * block_tail) / max(rows, 1),
    }


def _tile_sizes(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Returns the tile sizes that fit into `rows`; the smallest always stays."""
    return [size for size in sizes if size <= rows] or [sizes[0]]


@registry.register("ragged_dot_vjp", "xla_chunked")
@dataclasses.dataclass(frozen=True)
class XlaChunkedRaggedDotVjp(op.Op):
    """Gradients of ragged dot, by tiles of rows or plain."""

    config_cls = XlaChunkedRaggedDotVjpConfig

    def _fwd(
        self,
        residuals: None,
        out: jax.Array,
        dout: jax.Array,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        preferred_element_type: Any,
        return_residuals: bool,
        config: XlaChunkedRaggedDotVjpConfig,
    ) -> tuple[tuple[jax.Array, jax.Array, None], None]:
        # XLA drops the part of the plain gradients that is not used.
        plain = _plain_gradients(lhs, rhs, group_sizes, dout, precision, preferred_element_type)
        dlhs, drhs = plain
        if config.block_m_lhs is not None:
            split = XlaChunkedRaggedDotConfig(config.block_m_lhs, config.block_tail, upcast=config.upcast)
            dlhs = ragged_dot(
                dout,
                rhs,
                group_sizes,
                config=split,
                precision=precision,
                out_dtype=lhs.dtype,
                transpose_rhs=True,
            )
        if config.block_m_rhs is not None:
            drhs = rhs_gradient(
                lhs,
                dout,
                group_sizes,
                block_m=config.block_m_rhs,
                block_tail=config.block_tail,
                upcast=config.upcast,
                precision=precision,
                out_dtype=rhs.dtype,
            )
        return (dlhs, drhs, None), None

    _reference = plain_form.reference

    def _get_heuristics_config(self, ba: BoundArguments) -> XlaChunkedRaggedDotVjpConfig:
        return XlaChunkedRaggedDotVjpConfig()

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[XlaChunkedRaggedDotVjpConfig]:
        lhs = ba.abstract["lhs"]
        configs = {XlaChunkedRaggedDotVjpConfig()}
        for rows_lhs in _tile_sizes(lhs.shape[0], (16, 64, 256)):
            for rows_rhs in _tile_sizes(lhs.shape[0], (16, 32, 64, 128, 256)):
                for tail in (None, 16):
                    if tail is None or tail < max(rows_lhs, rows_rhs):
                        configs.add(XlaChunkedRaggedDotVjpConfig(rows_lhs, rows_rhs, tail))
        if blocks.is_half(lhs.dtype):
            for rows in _tile_sizes(lhs.shape[0], (16, 64, 256)):
                configs.add(XlaChunkedRaggedDotVjpConfig(rows, rows, 16 if rows > 16 else None, upcast=True))
        return configs

    def _get_cost_features(self, ba: BoundArguments, config: XlaChunkedRaggedDotVjpConfig) -> dict[str, float]:
        (m, k), (groups, _, n) = ba.abstract["lhs"].shape, ba.abstract["rhs"].shape
        features = {
            "log2_rows_per_group": math.log2(max(m, 1) / groups),
            "log2_matrix": math.log2(k * n),
        }
        for name, block_m, width in (("lhs", config.block_m_lhs, k), ("rhs", config.block_m_rhs, k + n)):
            block = m if block_m is None else block_m
            tiles = _tiles_of(m, groups, block_m, config.block_tail)
            features |= {f"{name}_{feature}": value for feature, value in tiles.items()}
            features[f"{name}_log2_block_per_group"] = math.log2(block * groups / max(m, 1))
            features[f"{name}_log2_operand"] = math.log2(block * width)
            features[f"{name}_log2_work"] = math.log2(block * k * n)
            features[f"{name}_serial_share"] = blocks.serial_share(block * k if name == "lhs" else k * n)
            features[f"{name}_matrix_share"] = k * n / (block * (k + n))
        return features

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        lhs_spec, rhs_spec = arguments["lhs"], arguments["rhs"]
        sizes = base.example_group_sizes(lhs_spec.shape[0], rhs_spec.shape[0], rng)
        lhs = rng.standard_normal(lhs_spec.shape, np.float32)
        rhs = rng.standard_normal(rhs_spec.shape, np.float32)
        parts = np.split(lhs, np.cumsum(sizes)[:-1])
        out = np.concatenate([part @ matrix for part, matrix in zip(parts, rhs, strict=True)])
        return {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "out": out}


@registry.register("ragged_dot", "xla_chunked")
@dataclasses.dataclass(frozen=True)
class XlaChunkedRaggedDot(op.Op):
    """Ragged dot by tiles of rows; the default config is `jax.lax.ragged_dot`."""

    config_cls = XlaChunkedRaggedDotConfig

    vjp: Any = dataclasses.field(default=XlaChunkedRaggedDotVjp(), kw_only=True)

    def bind(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: None = None,
        *,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds the arguments; see `tokamax.ragged_dot`."""
        args, kwargs = base.bind_arguments(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
        return super().bind(*args, **kwargs, return_residuals=return_residuals)

    def bind_vjp(self, ba: BoundArguments) -> BoundArguments:
        """Returns the abstract bound arguments of the backward pass of a call."""
        call, arrays = dataclasses.replace(ba, return_residuals=True).as_function(XlaChunkedRaggedDotConfig())
        out, residuals = jax.eval_shape(call, arrays)
        return self.vjp.bind(residuals, out, out, *ba.args, **ba.kwargs)

    def _fwd(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        preferred_element_type: Any,
        return_residuals: bool,
        config: XlaChunkedRaggedDotConfig,
    ) -> tuple[jax.Array, None]:
        if config.block_m is None:
            return base.reference(lhs, rhs, group_sizes, precision, preferred_element_type), None
        out = ragged_dot(lhs, rhs, group_sizes, config=config, precision=precision, out_dtype=preferred_element_type)
        return out, None

    _reference = plain_form.reference

    def _get_heuristics_config(self, ba: BoundArguments) -> XlaChunkedRaggedDotConfig:
        return XlaChunkedRaggedDotConfig()

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[XlaChunkedRaggedDotConfig]:
        lhs = ba.abstract["lhs"]
        rows, make = lhs.shape[0], XlaChunkedRaggedDotConfig
        configs = {make()}
        for block_m in _tile_sizes(rows, (8, 16, 32, 64, 128, 256)):
            tails = (None, 8, 16, 32) if block_m >= 64 else (None, 8)
            configs |= {make(block_m, tail) for tail in tails if tail is None or tail < block_m}
        configs |= {make(block_m, visit=Visit.TILES) for block_m in _tile_sizes(rows, (8, 16, 32, 64))}
        configs |= {make(block_m, visit=Visit.GATHER) for block_m in _tile_sizes(rows, (8, 16, 32, 64))}
        if blocks.is_half(lhs.dtype):
            for block_m in _tile_sizes(rows, (16, 64, 256)):
                configs.add(make(block_m, 16 if block_m > 16 else None, upcast=True))
        return configs

    def _is_feasible(self, ba: BoundArguments, config: XlaChunkedRaggedDotConfig) -> bool:
        if config.visit is not Visit.GATHER or config.block_m is None:
            return True
        lhs, rhs = ba.abstract["lhs"], ba.abstract["rhs"]
        groups, k, n = rhs.shape
        tiles = min(lhs.shape[0], lhs.shape[0] // config.block_m + groups)
        return tiles * k * n * rhs.dtype.itemsize <= _MAX_GATHERED_BYTES

    def _get_cost_features(self, ba: BoundArguments, config: XlaChunkedRaggedDotConfig) -> dict[str, float]:
        (m, k), (groups, _, n) = ba.abstract["lhs"].shape, ba.abstract["rhs"].shape
        block = m if config.block_m is None else config.block_m
        return {
            **_tiles_of(m, groups, config.block_m, config.block_tail),
            "log2_rows_per_group": math.log2(max(m, 1) / groups),
            "log2_block_per_group": math.log2(block * groups / max(m, 1)),
            "log2_product": math.log2(block * n),
            "log2_operand": math.log2(block * k),
            "log2_work": math.log2(block * k * n),
            "log2_matrix": math.log2(k * n),
            "serial_share": blocks.serial_share(block * n),
            # Elements of the matrix of a group, beside those of the rows of a tile.
            "matrix_share": k * n / (block * (k + n)),
        }

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"group_sizes": base.example_group_sizes(arguments["lhs"].shape[0], arguments["rhs"].shape[0], rng)}
