"""Loads public measured tables as training problems, for evaluation only.

The tables are not part of the project and never train a shipped model. They lie in `../shared/datasets` beside the
checkout, or in the folder that `TOKAMAX_DATASETS` names.
"""

import csv
import gzip
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tokamax._src import devices, shapes
from tokamax._src.costmodel.dataset import Problem

CORES = {"NVIDIA A100 (sm80)": 108, "NVIDIA A100": 108, "NVIDIA H100 (sm90)": 132}
TILES = {"block_m": "a[0]", "block_n": "b[1]", "block_k": "a[1]"}
_DTYPES = {"float16": np.dtype("float16"), "float32": np.dtype("float32")}


def folder() -> pathlib.Path:
    """Returns the folder of the tables; it may not exist."""
    default = pathlib.Path(__file__).resolve().parents[2] / "shared" / "datasets"
    return pathlib.Path(os.environ.get("TOKAMAX_DATASETS", default))


def facts(device: str) -> devices.DeviceFacts:
    """Returns the facts of a device of the tables."""
    return devices.DeviceFacts(device, "gpu", cores=CORES[device])


def _rows(name: str) -> Iterator[dict[str, str]]:
    with gzip.open(folder() / name, "rt", newline="") as file:
        yield from csv.DictReader(file)


def _dtype(name: str) -> Any:
    return _DTYPES.get(name) or jnp.dtype(name)


def _config(row: Mapping[str, str]) -> dict[str, int]:
    names = [name for name in row if name.startswith("cfg_") and name != "cfg_kernel"]
    return {name.removeprefix("cfg_"): int(row[name]) for name in names}


def matmul(device: str = "H100", *, keep_failures: bool = False) -> list[Problem]:
    """Loads the Triton matmul table: `a[m, k] @ b[k, n]`, about 29 configs a shape.

    Args:
      device: `H100` or `A100`.
      keep_failures: whether failed configs stay, as nan.
    """
    names = ("m", "k", "n", "mat1_dtype", "mat1_iscontig", "mat2_iscontig", "using_tf32")
    strides = ("mat1_stride_0", "mat1_stride_1", "mat2_stride_0", "mat2_stride_1")
    table: dict[tuple[str, ...], dict[tuple[tuple[str, int], ...], float]] = {}
    kind = ""
    for row in _rows("gpu_matmul_triton.csv.gz"):
        if device not in row["device"] or row["cfg_kernel"] != "triton":
            continue
        kind = row["device"]
        time_ms = float(row["time_ms"]) if row["status"] == "ok" else float("nan")
        if time_ms == time_ms or keep_failures:
            key = tuple(row[n] for n in names + strides)
            table.setdefault(key, {})[tuple(_config(row).items())] = time_ms
    problems = []
    for key, outcomes in table.items():
        m, k, n = (int(v) for v in key[:3])
        dtype = _dtype(key[3])
        transposed = [int(key[len(names) + i]) == 1 and int(key[len(names) + i + 1]) != 1 for i in (0, 2)]
        times = np.array(list(outcomes.values()))
        if np.isfinite(times).sum() < 2:
            continue
        problems.append(
            Problem(
                op="triton_matmul",
                key=" ".join(key),
                group=f"{m}x{k}x{n}",
                arguments={
                    "a": shapes.ArraySpec((m, k), dtype),
                    "b": shapes.ArraySpec((k, n), dtype),
                    "a_transposed": transposed[0],
                    "b_transposed": transposed[1],
                    "tf32": key[6],
                },
                configs=tuple(dict(c) for c in outcomes),
                times_ms=times,
                device_kind=kind,
                tiles=TILES,
            )
        )
    return problems


def full_grid(*, keep_failures: bool = False) -> list[Problem]:
    """Loads the full grid of Triton matmul configs on nine square sizes (A100), in the order of their fields.

    The file has the fastest config of each size first, which must not break ties.
    """
    table: dict[tuple[int, int, int], tuple[list[Any], list[float]]] = {}
    for row in _rows("gpu_gemm_full_grid_a100.csv.gz"):
        time_ms = float(row["time_ms"]) if row["status"] == "ok" else float("nan")
        if time_ms == time_ms or keep_failures:
            configs, times = table.setdefault((int(row["m"]), int(row["k"]), int(row["n"])), ([], []))
            configs.append(_config(row))
            times.append(time_ms)
    problems = []
    for (m, k, n), rows in table.items():
        order = sorted(range(len(rows[0])), key=lambda i: tuple(rows[0][i].values()))
        configs, times = ([column[i] for i in order] for column in rows)
        half = np.dtype("float16")
        arguments = {"a": shapes.ArraySpec((m, k), half), "b": shapes.ArraySpec((k, n), half)}
        name = f"{m}x{k}x{n}"
        problems.append(
            Problem(
                "triton_matmul",
                name,
                name,
                arguments,
                tuple(configs),
                np.array(times),
                None,
                "NVIDIA A100",
                tiles=TILES,
            )
        )
    return problems
