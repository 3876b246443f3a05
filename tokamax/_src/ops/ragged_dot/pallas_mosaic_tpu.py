"""Ragged dot on TPU by JAX's megablox kernels, and its two gradients, each an op with tiles of its own.

Notation: m rows, k inputs, n outputs, g groups.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors, op, registry, shapes, tpus
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.ops import tpu
from tokamax._src.ops.ragged_dot import base, megablox, tpu_estimate


@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuRaggedDotConfig:
    """Tiles of the product that a step of the grid computes.

    Attributes:
      tile_m: rows; those of the product, which for the gradients are the rows of `dout` too.
      tile_k: inputs. The product sums over them in the forward pass.
      tile_n: outputs. The gradient of `lhs` sums over them.
    """

    tile_m: int = 128
    tile_k: int = 128
    tile_n: int = 128

    @property
    def tiles(self) -> megablox.Tiles:
        """The three tiles."""
        return self.tile_m, self.tile_k, self.tile_n


Config = PallasMosaicTpuRaggedDotConfig

_DEFAULT_BYTES = tpu.LEAST_KERNEL_VMEM * 3 // 4
"""What blocks of the default take at most: the rest is for what the compiler keeps beside them."""


_SAFE_SHARE = 0.9
"""What blocks may take of the vector memory for a config that nobody compiled. Of the 90 that the estimate favours for
ten shapes on v5e, the compiler (libtpu 0.0.52) refused 11, which take 0.92 or more, and took all 67 of at most 0.9."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What one of the three kernels computes, with the names of the forward pass for its axes.

    Attributes:
      m: rows.
      k: inputs.
      n: outputs.
      groups: groups.
      left: dtype of the rows that come first.
      right: dtype of the other side.
      out: dtype of the result.
    """

    m: int
    k: int
    n: int
    groups: int
    left: Any
    right: Any
    out: Any


def _tile_m(problem: Problem) -> int:
    """Returns the rows that the default takes at once: about those of a group, 128 to 512."""
    rows = max(problem.m, 1) / max(problem.groups, 1)
    tile = next((tile for tile in (128, 256) if rows <= tile), 512)
    return min(tile, tpu.round_up(problem.m, 16))


def _halved(tile: int) -> int:
    return tpu.round_up(tile // 2, tpu.LANES)


@dataclasses.dataclass(frozen=True)
class _Megablox:
    """What the forward pass and both gradients have in common.

    Attributes:
      interpret: whether to run the kernel as plain XLA, on any device: slow, for tests without a TPU.
    """

    config_cls: ClassVar[type] = Config
    _transposed: ClassVar[bool] = False
    """Whether the kernel gets the matrices of groups transposed."""

    interpret: bool = dataclasses.field(default=False, kw_only=True)

    def _problem(self, ba: BoundArguments) -> Problem:
        raise NotImplementedError

    def _blocks(self, problem: Problem, config: Config) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Returns the blocks that a step loads, left and right, and the one that it stores."""
        raise NotImplementedError

    def _columns(self, problem: Problem) -> int | None:
        """Returns the columns of the rows that `gmm` stores; None for `tgmm`, which stores the matrices of groups."""
        raise NotImplementedError

    def _kernel_tiles(self, tiles: np.ndarray) -> np.ndarray:
        """Returns [c, 3] tiles of the kernel's own m, k and n, for those of configs."""
        return tiles

    def vmem_bytes(self, ba: BoundArguments, config: Config) -> int:
        """Returns what a config takes of the vector memory: blocks twice, and the f32 block that sums are made in."""
        problem = self._problem(ba)
        left, right, out = self._blocks(problem, config)
        moved = tpu.padded_bytes(left, problem.left) + tpu.padded_bytes(right, problem.right)
        return 2 * (moved + tpu.padded_bytes(out, problem.out)) + tpu.padded_bytes(out, np.float32)

    def _least_vmem_bytes(self, ba: BoundArguments, config: Config) -> int:
        """Returns what a config takes at least.

        By the limits at which the compilers for v5e and v6e (libtpu 0.0.52) begin to take a config, they keep some
        blocks once, not twice, where a tile is a whole axis that is no multiple of the native tile, and do without a
        block for sums where the result of `gmm` has a single tile of columns.
        """
        problem = self._problem(ba)
        out, columns = self._blocks(problem, config)[2], self._columns(problem)
        sums = 0 if columns is not None and out[1] >= columns else tpu.padded_bytes(out, np.float32)
        moved = self.vmem_bytes(ba, config) - tpu.padded_bytes(out, np.float32)
        is_odd = any(tile % tpu.LANES for tile in (config.tile_k, config.tile_n))
        return (moved // 2 if is_odd else moved) + sums

    supported_on = tpu.supported_on

    def _is_feasible(self, ba: BoundArguments, config: Config) -> bool:
        problem = self._problem(ba)
        rows = max(tpu.sublanes(problem.left), tpu.sublanes(problem.right))
        return (
            config.tile_m % rows == 0
            and tpu.is_lane_tile(config.tile_k, problem.k)
            and tpu.is_lane_tile(config.tile_n, problem.n)
            and self._least_vmem_bytes(ba, config) <= tpu.kernel_vmem_bytes()
        )

    def _is_safe(self, ba: BoundArguments, config: Config) -> bool:
        return self.vmem_bytes(ba, config) <= _SAFE_SHARE * tpu.kernel_vmem_bytes()

    def _get_autotuning_configs(self, ba: BoundArguments) -> set[Config]:
        problem = self._problem(ba)
        rows = tpu.powers_of_two(64, min(problem.m, 1024)) or [tpu.round_up(problem.m, 16)]
        return {
            Config(tile_m, tile_k, tile_n)
            for tile_m in rows
            for tile_k in tpu.lane_tiles(problem.k)
            for tile_n in tpu.lane_tiles(problem.n)
        }

    def _get_heuristics_config(self, ba: BoundArguments) -> Config:
        """About 512 x 1024 x 1024, as in MaxText, made smaller until it fits into the memory of every generation."""
        problem = self._problem(ba)
        config = Config(_tile_m(problem), min(problem.k, 1024), min(problem.n, 1024))
        while self.vmem_bytes(ba, config) > _DEFAULT_BYTES and max(config.tile_k, config.tile_n) > tpu.LANES:
            if config.tile_k >= config.tile_n:
                config = dataclasses.replace(config, tile_k=_halved(config.tile_k))
            else:
                config = dataclasses.replace(config, tile_n=_halved(config.tile_n))
        return config

    def _estimate_ms(self, ba: BoundArguments, configs: Sequence[Config], device_kind: str) -> np.ndarray | None:
        """Estimates the kernel from its grid; group sizes are not known. Batches of `vmap` run one after another."""
        problem = self._problem(ba)
        facts = tpus.TPUS.get(device_kind)
        if facts is None or self.interpret or 0 in (problem.m, problem.k, problem.n):
            return None
        left, right, out = (np.dtype(dtype).itemsize for dtype in (problem.left, problem.right, problem.out))
        m, k, n = self._kernel_tiles(np.array([[problem.m, problem.k, problem.n]]))[0].tolist()
        passes = tpu.passes(ba.abstract["precision"], (problem.left, problem.right))
        product = tpu_estimate.Product(m, k, n, problem.groups, left, right, out, passes, self._transposed)
        tiles = self._kernel_tiles(np.array([config.tiles for config in configs]).reshape(-1, 3))
        kernel = tpu_estimate.tgmm_ms if self._columns(problem) is None else tpu_estimate.gmm_ms
        return kernel(product, tiles, facts) * math.prod(ba.vmap_sizes)

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        rows = arguments["lhs" if "lhs" in arguments else "dout"].shape[0]
        return {"group_sizes": base.example_group_sizes(rows, arguments["group_sizes"].shape[0], rng)}


@registry.register("ragged_dot_lhs_vjp", "mosaic")
@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuRaggedDotLhsVjp(_Megablox, op.Op):
    """The gradient of a ragged dot with respect to `lhs`: `dout` times each group's matrix, transposed."""

    _transposed: ClassVar[bool] = True

    def bind(
        self,
        dout: Any,
        rhs: Any,
        group_sizes: Any,
        *,
        precision: Any = None,
        out_dtype: Any = None,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds arguments.

        Args:
          dout: [m, n], the gradient of the result.
          rhs: [g, k, n].
          group_sizes: [g].
          precision: as in `tokamax.ragged_dot`.
          out_dtype: dtype of the gradient; None for that of `rhs`.
          return_residuals: must be False.
        """
        if (*dout.shape[1:], *group_sizes.shape) != (rhs.shape[2], rhs.shape[0]):
            raise errors.ArgumentError(
                f"dout [m, n], rhs [g, k, n] and group_sizes [g] must have the same n and g, got {tuple(dout.shape)}, "
                f"{tuple(rhs.shape)} and {tuple(group_sizes.shape)}"
            )
        tpu.check_dtypes(dout=shapes.spec_of(dout), rhs=shapes.spec_of(rhs))
        tpu.check_placed(dout, rhs, group_sizes)
        return super().bind(
            dout,
            rhs,
            group_sizes,
            precision=tpu.canonical_precision(precision, (dout.dtype, rhs.dtype)),
            out_dtype=jnp.dtype(rhs.dtype if out_dtype is None else out_dtype),
            return_residuals=return_residuals,
        )

    def _fwd(
        self,
        dout: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        out_dtype: Any,
        return_residuals: bool,
        config: Config,
    ) -> tuple[jax.Array, None]:
        # The kernel's own n is what its result has beside rows.
        tiles = config.tile_m, config.tile_n, config.tile_k
        out = megablox.gmm(
            dout,
            rhs,
            group_sizes,
            tiles=tiles,
            out_dtype=out_dtype,
            transpose_rhs=True,
            precision=precision,
            interpret=self.interpret,
        )
        return out, None

    def _reference(
        self, dout: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, precision: Any, out_dtype: Any
    ) -> jax.Array:
        return base.reference(dout, rhs.swapaxes(1, 2), group_sizes, "highest", None)

    def _problem(self, ba: BoundArguments) -> Problem:
        dout, rhs = ba.abstract["dout"], ba.abstract["rhs"]
        groups, k, n = rhs.shape
        return Problem(dout.shape[0], k, n, groups, dout.dtype, rhs.dtype, ba.abstract["out_dtype"])

    def _columns(self, problem: Problem) -> int | None:
        return problem.k

    def _kernel_tiles(self, tiles: np.ndarray) -> np.ndarray:
        return tiles[:, [0, 2, 1]]

    def _blocks(self, problem: Problem, config: Config) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        tile_m, tile_k, tile_n = config.tiles
        return (tile_m, tile_n), (tile_k, tile_n), (tile_m, tile_k)


@registry.register("ragged_dot_rhs_vjp", "mosaic")
@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuRaggedDotRhsVjp(_Megablox, op.Op):
    """The gradient of a ragged dot with respect to `rhs`: for each group, `lhs` transposed times `dout`."""

    def bind(
        self,
        lhs: Any,
        dout: Any,
        group_sizes: Any,
        *,
        precision: Any = None,
        out_dtype: Any = None,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds arguments.

        Args:
          lhs: [m, k].
          dout: [m, n], the gradient of the result.
          group_sizes: [g].
          precision: as in `tokamax.ragged_dot`.
          out_dtype: dtype of the gradient; None for that of `lhs`.
          return_residuals: must be False.
        """
        if not len(lhs.shape) == len(dout.shape) == 2 or lhs.shape[0] != dout.shape[0]:
            raise errors.ArgumentError(
                f"lhs [m, k] and dout [m, n] must have the same rows m, got {tuple(lhs.shape)} and {tuple(dout.shape)}"
            )
        tpu.check_dtypes(lhs=shapes.spec_of(lhs), dout=shapes.spec_of(dout))
        tpu.check_placed(lhs, dout, group_sizes)
        return super().bind(
            lhs,
            dout,
            group_sizes,
            precision=tpu.canonical_precision(precision, (lhs.dtype, dout.dtype)),
            out_dtype=jnp.dtype(lhs.dtype if out_dtype is None else out_dtype),
            return_residuals=return_residuals,
        )

    def _fwd(
        self,
        lhs: jax.Array,
        dout: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        out_dtype: Any,
        return_residuals: bool,
        config: Config,
    ) -> tuple[jax.Array, None]:
        out = megablox.tgmm(
            lhs,
            dout,
            group_sizes,
            tiles=config.tiles,
            out_dtype=out_dtype,
            precision=precision,
            interpret=self.interpret,
        )
        return out, None

    def _reference(
        self, lhs: jax.Array, dout: jax.Array, group_sizes: jax.Array, *, precision: Any, out_dtype: Any
    ) -> jax.Array:
        rhs = jnp.zeros((group_sizes.shape[0], lhs.shape[1], dout.shape[1]), dout.dtype)
        run = lambda rhs: base.reference(lhs, rhs, group_sizes, "highest", dout.dtype)  # noqa: E731
        return jax.vjp(run, rhs)[1](dout)[0]

    def _problem(self, ba: BoundArguments) -> Problem:
        lhs, dout = ba.abstract["lhs"], ba.abstract["dout"]
        (m, k), n, groups = lhs.shape, dout.shape[1], ba.abstract["group_sizes"].shape[0]
        return Problem(m, k, n, groups, lhs.dtype, dout.dtype, ba.abstract["out_dtype"])

    def _columns(self, problem: Problem) -> int | None:
        return None

    def _blocks(self, problem: Problem, config: Config) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        tile_m, tile_k, tile_n = config.tiles
        return (tile_m, tile_k), (tile_m, tile_n), (tile_k, tile_n)


@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuRaggedDotVjp:
    """The backward pass of `PallasMosaicTpuRaggedDot`: two ops, which are tuned apart.

    Attributes:
      lhs: the op that computes the gradient of `lhs`.
      rhs: the op that computes the gradient of `rhs`.
    """

    lhs: PallasMosaicTpuRaggedDotLhsVjp = PallasMosaicTpuRaggedDotLhsVjp()
    rhs: PallasMosaicTpuRaggedDotRhsVjp = PallasMosaicTpuRaggedDotRhsVjp()

    def __call__(
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
    ) -> tuple[jax.Array, jax.Array, None]:
        """Returns the gradients of `lhs` and `rhs`."""
        return (
            self.lhs(dout, rhs, group_sizes, precision=precision, out_dtype=lhs.dtype),
            self.rhs(lhs, dout, group_sizes, precision=precision, out_dtype=rhs.dtype),
            None,
        )


@registry.register("ragged_dot", "mosaic")
@dataclasses.dataclass(frozen=True)
class PallasMosaicTpuRaggedDot(_Megablox, op.Op):
    """Ragged dot by JAX's megablox kernels (Pallas Mosaic), for TPU.

    It takes bf16 and f32 and adds up in f32. Rows after the last group give zeros, as in `jax.lax.ragged_dot`.
    """

    vjp: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """The gradients of a kernel in interpret mode are in interpret mode."""
        if self.vjp is None:
            vjp = PallasMosaicTpuRaggedDotVjp(
                PallasMosaicTpuRaggedDotLhsVjp(interpret=self.interpret),
                PallasMosaicTpuRaggedDotRhsVjp(interpret=self.interpret),
            )
            object.__setattr__(self, "vjp", vjp)

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
        """Binds the arguments; see `tokamax.ragged_dot`.

        Raises:
          ArgumentError: if they do not fit each other.
          UnsupportedError: if the kernel does not take them.
        """
        args, kwargs = base.bind_arguments(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
        tpu.check_dtypes(lhs=shapes.spec_of(lhs), rhs=shapes.spec_of(rhs))
        tpu.check_placed(lhs, rhs, group_sizes)
        tpu.canonical_precision(precision, (lhs.dtype, rhs.dtype))
        return super().bind(*args, **kwargs, return_residuals=return_residuals)

    def bind_vjp(self, ba: BoundArguments) -> tuple[BoundArguments, BoundArguments]:
        """Returns the abstract bound arguments of both ops of the backward pass of a call."""
        lhs, rhs, group_sizes = (ba.abstract[name] for name in ("lhs", "rhs", "group_sizes"))
        dtype = ba.abstract["preferred_element_type"] or lhs.dtype
        dout = shapes.ArraySpec((lhs.shape[0], rhs.shape[2]), dtype, lhs.vmap)
        precision = ba.abstract["precision"]
        return (
            self.vjp.lhs.bind(dout, rhs, group_sizes, precision=precision, out_dtype=lhs.dtype),
            self.vjp.rhs.bind(lhs, dout, group_sizes, precision=precision, out_dtype=rhs.dtype),
        )

    def _fwd(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        preferred_element_type: Any,
        return_residuals: bool,
        config: Config,
    ) -> tuple[jax.Array, None]:
        out = megablox.gmm(
            lhs,
            rhs,
            group_sizes,
            tiles=config.tiles,
            out_dtype=lhs.dtype if preferred_element_type is None else preferred_element_type,
            precision=tpu.canonical_precision(precision, (lhs.dtype, rhs.dtype)),
            interpret=self.interpret,
        )
        return out, None

    def _reference(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        preferred_element_type: Any,
    ) -> jax.Array:
        return base.reference(lhs, rhs, group_sizes, precision, preferred_element_type)

    def _problem(self, ba: BoundArguments) -> Problem:
        lhs, rhs = ba.abstract["lhs"], ba.abstract["rhs"]
        (m, k), (groups, _, n) = lhs.shape, rhs.shape
        out = ba.abstract["preferred_element_type"] or lhs.dtype
        return Problem(m, k, n, groups, lhs.dtype, rhs.dtype, out)

    def _columns(self, problem: Problem) -> int | None:
        return problem.n

    def _blocks(self, problem: Problem, config: Config) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        tile_m, tile_k, tile_n = config.tiles
        return (tile_m, tile_k), (tile_k, tile_n), (tile_m, tile_n)
