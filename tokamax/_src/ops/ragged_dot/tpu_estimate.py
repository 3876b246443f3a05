"""How long the megablox kernels take on a TPU, estimated from their grids: pure functions of numpy arrays.

A kernel of Pallas is a pipeline: while one step of its grid is computed, the blocks of the next one are fetched, as
far as their indices change, and the output block that was finished is written. So a step takes as long as the larger
of both. What is counted:

- computing: the products of the tile over the rate of the matrix units, with tiles filled up to whole units; about 150
  cycles of a step's own work; clearing the block of sums, adding to it and storing from it, and masking, in passes
  over vector registers of 1024 numbers;
- turning: for the gradient of `lhs`, `gmm` gets the matrices of groups transposed, and turns each block before it
  becomes weights of a matrix unit, at every visit. That runs beside the products and does not depend on the rows: few
  rows do not hide it, and measured winners of this gradient have larger tiles of rows than those of the forward pass;
- moving: bytes over the bandwidth of the HBM.

Columns of the result are the outermost axis of the grid: slices of n run one after another, and each reads all rows
anew. Steps alike are counted, not walked.

Notation, as in the kernels: `gmm` multiplies rows [m, k] with the matrix [k, n] of their group, and its result is
[m, n]; `tgmm` multiplies rows [m, k], transposed, with rows [m, n], and its result is one [k, n] per group. A visit is
a tile of rows met by a group: a tile that two groups share is visited twice.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tokamax._src.tpus import TpuFacts

# Round numbers, chosen with a look at the public winners that `training/estimates.py` judges on: not held out.
STEP_CYCLES = 150.0
"""What a step takes beside products and moves: index arithmetic, starting and awaiting copies."""
_CLEAR, _ADD, _STORE, _MASK = 1.0, 0.25, 1.0, 0.5
"""Cycles per vector register: to clear sums, to add to them, to store them, and to mask blocks of rows."""
_TURN = 2.0
"""Cycles to transpose a vector register of 16-bit numbers."""
_REGISTER = 1024.0
_LEAST_ROWS = 0.5
"""Rows that a matrix unit needs at least, as a share of its side, to hide how its weights are loaded."""
_HBM_SHARE = 0.9
"""Share of the peak bandwidth that copies reach."""


@dataclasses.dataclass(frozen=True)
class Product:
    """What a kernel computes.

    Attributes:
      m: rows.
      k: columns of the left rows.
      n: columns of the result.
      groups: groups.
      left_bytes: bytes of a number on the left.
      right_bytes: bytes of a number on the right.
      out_bytes: bytes of a number of the result.
      passes: passes of bf16 products that a product of its dtype takes.
      transposed: whether the matrices of groups come as [n, k].
    """

    m: int
    k: int
    n: int
    groups: int
    left_bytes: int = 2
    right_bytes: int = 2
    out_bytes: int = 2
    passes: int = 1
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Visits:
    """How often tiles of rows are visited, by what changes from the visit before; arrays [c], one number per config.

    Attributes:
      both: tile of rows and group change; the first visit counts here.
      group: the group alone changes: it begins within the tile.
      rows: the tile of rows alone changes.
      empty: groups without rows; `tgmm` visits them to store zeros.
    """

    both: np.ndarray
    group: np.ndarray
    rows: np.ndarray
    empty: np.ndarray

    @property
    def count(self) -> np.ndarray:
        """All visits, those of empty groups left out."""
        return self.both + self.group + self.rows


def expected_visits(m: int, groups: int, tile_m: np.ndarray) -> Visits:
    """Returns the visits where group sizes are not known: no group begins where a tile does, and none is empty.

    Args:
      m: rows.
      groups: groups.
      tile_m: [c] tiles of rows.
    """
    tiles = np.maximum(np.ceil(m / tile_m), 1.0)
    some = np.ones_like(tiles)
    visited = min(groups, max(m, 1))
    return Visits(some, some * (visited - 1), tiles - 1, some * (groups - visited))


def counted_visits(group_sizes: Sequence[int], tile_m: np.ndarray) -> Visits:
    """Returns the visits of known group sizes.

    Args:
      group_sizes: [g].
      tile_m: [c] tiles of rows.
    """
    sizes = np.asarray(group_sizes, np.int64)
    ends = np.cumsum(sizes)[sizes > 0]
    starts = ends - sizes[sizes > 0]
    at = tile_m[:, None].astype(np.int64)
    inside = ((starts[1:] % at) != 0).sum(1)
    visits = (-(-ends // at) - starts // at).sum(1)
    both = np.full(len(tile_m), len(starts)) - inside
    empty = np.full(len(tile_m), len(sizes) - len(starts))
    return Visits(*(x.astype(float) for x in (both, inside, visits - len(starts), empty)))


def _filled(size: np.ndarray, unit: int) -> np.ndarray:
    return np.ceil(size / unit) * unit


class _Step:
    """Times of the parts of a step in ms, for tiles [c] each."""

    def __init__(self, product: Product, tpu: TpuFacts):
        self.product, self.tpu = product, tpu

    def cycles(self, cycles: np.ndarray) -> np.ndarray:
        return cycles / (self.tpu.clock_ghz * 1e6)

    def products(self, rows: np.ndarray, summed: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Returns cycles of multiplying [rows, summed] with [summed, columns]."""
        side = self.tpu.mxu
        macs = np.maximum(rows, _LEAST_ROWS * side) * _filled(summed, side) * _filled(columns, side)
        cycles = macs * self.product.passes / self.tpu.macs_per_cycle
        if self.product.transposed:
            turned = _TURN * summed * columns / _REGISTER * self.product.right_bytes / 2
            cycles = np.maximum(cycles, turned)
        return cycles + STEP_CYCLES

    def moved(self, size: np.ndarray, itemsize: int) -> np.ndarray:
        return size * itemsize / (self.tpu.hbm_gb_s * 1e6 * _HBM_SHARE)


def gmm_ms(product: Product, tiles: np.ndarray, tpu: TpuFacts, visits: Visits | None = None) -> np.ndarray:
    """Estimates `gmm`.

    Args:
      product: what it computes.
      tiles: [c, 3] tiles of m, k and n.
      tpu: the device.
      visits: the visits of known group sizes; None for the expected ones.

    Returns:
      [c] times in ms.
    """
    tile_m, tile_k, tile_n = np.asarray(tiles, float).T
    visits = visits or expected_visits(product.m, product.groups, tile_m)
    step = _Step(product, tpu)
    left = step.moved(tile_m * tile_k, product.left_bytes)
    right = step.moved(tile_k * tile_n, product.right_bytes)
    out = step.moved(tile_m * tile_n, product.out_bytes)
    registers = tile_m * tile_n / _REGISTER
    products = step.products(tile_m, tile_k, tile_n)
    slices, parts = np.ceil(product.n / tile_n), np.ceil(product.k / tile_k)

    # One part: all of k at once, so that a block which the next visit shares stays where it is.
    whole = step.cycles(products + (_CLEAR + _ADD + _STORE) * registers)
    at_once = (
        visits.both * np.maximum(whole, left + right + out)
        + visits.group * np.maximum(whole, right)
        + visits.rows * np.maximum(whole, left + out)
    )
    # Several: both blocks change at every step.
    written = out * (visits.both + visits.rows) / visits.count
    adds = products + _ADD * registers
    first = np.maximum(step.cycles(adds + _CLEAR * registers), left + right + written)
    inner = np.maximum(step.cycles(adds), left + right)
    last = np.maximum(step.cycles(adds + _STORE * registers), left + right)
    in_parts = visits.count * (first + (parts - 2) * inner + last)
    return slices * np.where(parts == 1, at_once, in_parts) + left + right


def tgmm_ms(product: Product, tiles: np.ndarray, tpu: TpuFacts, visits: Visits | None = None) -> np.ndarray:
    """Estimates `tgmm`; arguments and result as of `gmm_ms`."""
    tile_m, tile_k, tile_n = np.asarray(tiles, float).T
    visits = visits or expected_visits(product.m, product.groups, tile_m)
    step = _Step(product, tpu)
    left = step.moved(tile_m * tile_k, product.left_bytes)
    right = step.moved(tile_m * tile_n, product.right_bytes)
    out = step.moved(tile_k * tile_n, product.out_bytes)
    registers = tile_k * tile_n / _REGISTER
    masked = _MASK * (tile_m * tile_k + tile_m * tile_n) / _REGISTER

    inner = step.products(tile_k, tile_m, tile_n) + masked + _ADD * registers
    edge = step.cycles(inner + (_CLEAR + _STORE) * registers)
    empty = step.cycles(STEP_CYCLES + (_CLEAR + _STORE) * registers)
    slice_ms = (
        visits.rows * np.maximum(step.cycles(inner), left + right)
        + visits.both * np.maximum(edge, left + right + out)
        + visits.group * np.maximum(edge, out)
        + visits.empty * np.maximum(empty, out)
    )
    return np.ceil(product.k / tile_k) * np.ceil(product.n / tile_n) * slice_ms + left + right
