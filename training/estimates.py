"""Judges the analytic estimate of ragged dot on TPU by the public measured winners that are on this disk.

    python training/estimates.py [--json]

The table (`tpu_ragged_dot_winners.jsonl` in the folder of `tables.py`) holds the winners of a public tuning on three
TPU generations, with their times. For each: the share of its space that the estimate calls faster, and estimate over
measured. Where the table has several rows of one problem, the fastest counts for the ratio: the others (some of them
have another pass over the result in them, by the bytes) are in `ratio of all`. The space is the public one: tiles of
64 to 1024 rows, powers of two and halvings of the other axes, as far as blocks and sums fit into what a kernel may use
of the vector memory. On TPU7x winners use more of it than the compiler grants unasked, so there it is all of it.

Group sizes are taken from the table where it has them, else none are known, as at dispatch. Winners that lie outside
this space are counted too, by what they would take. The constants of the estimate were chosen with a look at this
table, so it is no held-out test. The committed output stands in `training/results/estimates.txt`.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import re
import sys
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import tables

from tokamax._src import tpus
from tokamax._src.ops.ragged_dot import tpu_estimate
from tokamax._src.tables import format_table

NAME = "tpu_ragged_dot_winners.jsonl"
_PASSES = {"[[1], [1]]": "forward", "[[1], [2]]": "dlhs", "[[0], [0]]": "drhs"}
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Winner:
    """A row of the table, in the terms of the kernels.

    Attributes:
      device: device kind.
      what: `forward`, `dlhs` or `drhs`.
      product: what the kernel computes.
      sizes: group sizes, where the table has them.
      tiles: tiles of m, k and n.
      ms: measured time.
    """

    device: str
    what: str
    product: tpu_estimate.Product
    sizes: tuple[int, ...] | None
    tiles: tuple[int, int, int]
    ms: float

    @property
    def place(self) -> tuple[Any, ...]:
        """What rows of one problem have in common."""
        return self.device, self.what, self.product, self.sizes

    def estimate(self, tiles: np.ndarray) -> np.ndarray:
        """Returns [c] estimated times of tiles [c, 3]."""
        tpu, visits = tpus.TPUS[self.device], None
        if self.sizes is not None:
            visits = tpu_estimate.counted_visits(self.sizes, tiles[:, 0])
        kernel = tpu_estimate.tgmm_ms if self.what == "drhs" else tpu_estimate.gmm_ms
        return kernel(self.product, tiles, tpu, visits)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("[")[2])))


def read_row(row: dict[str, Any]) -> Winner:
    """Reads a row of the table.

    The product of `dlhs` sums over what is n in the forward pass. On v5p the table's tile_k is of the result there, as
    tiles that are larger than the other axis show.
    """
    what = _PASSES[json.dumps(row["dimension_numbers"]["dot_dimension_numbers"][0])]
    left, right, sizes = _shape(row["lhs"]), _shape(row["rhs"]), row["group_sizes"]
    columns = {"forward": right[-1], "dlhs": right[1] if len(right) == 3 else 0, "drhs": right[-1]}[what]
    known = tuple(sizes) if isinstance(sizes, list) else None
    groups = len(sizes) if known is not None else sizes["num_groups"]
    m, k, n = (row["config"][name] for name in ("tile_m", "tile_k", "tile_n"))
    tiles = (m, n, k) if what == "dlhs" and row["device"] == "TPU v5" else (m, k, n)
    product = tpu_estimate.Product(left[0], left[1], columns, groups, transposed=what == "dlhs")
    return Winner(row["device"], what, product, known, tiles, row["median_ms"])


def winners() -> list[Winner]:
    """Returns the rows of the table."""
    lines = (tables.folder() / NAME).read_text().splitlines()
    return [read_row(json.loads(line)) for line in lines if line.strip()]


def _axis(size: int) -> set[int]:
    whole = -(-size // 128) * 128
    doubled = {128 << i for i in range(8) if 128 << i <= whole}
    return doubled | {whole >> i for i in range(6)} | {size}


def vmem_bytes(winner: Winner, tiles: np.ndarray) -> np.ndarray:
    """Returns [c] bytes of the blocks, twice, and of the f32 block of sums."""
    m, k, n = tiles.T
    if winner.what == "drhs":
        return 4 * (m * k + m * n + k * n) + 4 * k * n
    return 4 * (m * k + k * n + m * n) + 4 * m * n


def space(winner: Winner) -> np.ndarray:
    """Returns [c, 3] tiles."""
    product, tpu = winner.product, tpus.TPUS[winner.device]
    rows = [64 << i for i in range(5) if 64 << i <= product.m]
    tiles = np.array(list(itertools.product(rows, sorted(_axis(product.k)), sorted(_axis(product.n)))))
    limit = tpu.vmem_bytes if winner.device == "TPU7x" else tpu.kernel_vmem_bytes
    return tiles[vmem_bytes(winner, tiles) <= limit]


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the estimate says of a winner.

    Attributes:
      winner: the winner.
      percentile: share of its space that is estimated to be faster, in percent.
      ratio: estimated over measured time.
      fastest: whether no other row of the problem is faster.
      inside: whether the space has it.
    """

    winner: Winner
    percentile: float
    ratio: float
    fastest: bool
    inside: bool


def judge(found: list[Winner]) -> list[Judged]:
    """Judges winners."""
    best: dict[tuple[Any, ...], float] = {}
    for winner in found:
        best[winner.place] = min(best.get(winner.place, np.inf), winner.ms)
    judged = []
    for winner in found:
        tiles = space(winner)
        own = winner.estimate(np.array([winner.tiles]))[0]
        percentile = 100 * np.mean(winner.estimate(tiles) < own * (1 - 1e-6))
        inside = bool((tiles == winner.tiles).all(1).any())
        judged.append(
            Judged(winner, float(percentile), float(own / winner.ms), winner.ms == best[winner.place], inside)
        )
    return judged


def summary(judged: list[Judged]) -> list[dict[str, Any]]:
    """Returns a row for each device and pass, and one for each device."""
    groups: dict[tuple[str, str], list[Judged]] = collections.defaultdict(list)
    for one in judged:
        for what in (one.winner.what, "all"):
            groups[one.winner.device, what].append(one)
    rows = []
    for (device, what), group in sorted(groups.items()):
        percentiles = [one.percentile for one in group]
        ratios = [one.ratio for one in group if one.fastest]
        rows.append(
            {
                "device": device,
                "pass": what,
                "winners": len(group),
                "outside": sum(not one.inside for one in group),
                "percentile": float(np.mean(percentiles)),
                "median": float(np.median(percentiles)),
                "worst": max(percentiles),
                "above 5": sum(p > 5 for p in percentiles),
                "ratio": float(np.median(ratios)),
                "p10": float(np.quantile(ratios, 0.1)),
                "p90": float(np.quantile(ratios, 0.9)),
                "ratio of all": float(np.median([one.ratio for one in group])),
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if not (tables.folder() / NAME).exists():
        print(f"skipped: there is no {tables.folder() / NAME}; TOKAMAX_DATASETS names the folder")
        return 0
    rows = summary(judge(winners()))
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    text = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    print(format_table([tuple(rows[0]), *map(tuple, text)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
