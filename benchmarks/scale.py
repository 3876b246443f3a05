"""How long a large result takes to load, to sum up and to draw.

    python benchmarks/scale.py [--entries 500] [--configs 200]

Makes a result with made-up times (500 ops of 200 configs each: 100,000 measurements of two samples) and prints the
seconds of each step. The report is drawn as by `tokamax report`, which needs the extra `report`.
"""

import argparse
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dispatch import Config, Product

import tokamax
from tokamax._src import devices, environment
from tokamax._src.autotuning.result import Entry
from tokamax._src.tools import cli


def made_up(entries: int, configs: int) -> tokamax.AutotuningResult:
    """Returns a result of that size; its times are a smooth function of shape and config with 2 % of noise."""
    rng = np.random.default_rng(0)
    blocks = [2**i for i in range(3, 13)]
    space = [Config(m, n, s) for s, m, n in itertools.product(range(1, 9), blocks, blocks)][:configs]
    described = environment.describe(timer="made_up")
    found = []
    for i in range(entries):
        m, n = 64 + 8 * i, int(2 ** rng.uniform(6, 12))
        x, y = jax.ShapeDtypeStruct((m, 64), jnp.float32), jax.ShapeDtypeStruct((64, n), jnp.float32)
        times = [m * n * 1e-6 * (1 + abs(np.log2(c.block_m * c.block_n / m / n * 64)) / c.stages) for c in space]
        outcomes: dict[Any, Any] = {
            c: tokamax.BenchmarkData(tuple(t * rng.normal(1, 0.02, 2)), 10.0, 1.0, None)
            for c, t in zip(space, times, strict=True)
        }
        best = min(space, key=lambda c: outcomes[c].median_ms)
        ba = Product().bind(x, y)
        found.append(
            Entry(
                bound_args=ba,
                device_kind=devices.device_kind(),
                outcomes=outcomes,
                default=space[0],
                best=best,
                environment=described,
            )
        )
    return tokamax.AutotuningResult(tuple(found))


def timed(what: str, step: Callable[[], Any]) -> tuple[str, float]:
    """Runs a step; returns its name and seconds."""
    start = time.perf_counter()
    step()
    return what, time.perf_counter() - start


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=500)
    parser.add_argument("--configs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "result.json"
        made_up(args.entries, args.configs).dump(path)
        size = path.stat().st_size
        rows = [timed("load", lambda: tokamax.AutotuningResult.load(path))]
        loaded = tokamax.AutotuningResult.load(path)
        rows.append(timed("summary", lambda: str(loaded.summary())))
        command = ["report", str(path), "--output", str(path.with_suffix(".html"))]
        rows.append(timed("report, with loading", lambda: cli.main(command)))
    if args.json:
        print(json.dumps({"entries": args.entries, "configs": args.configs, "bytes": size, "seconds": dict(rows)}))
        return
    print(f"{args.entries} entries of {args.configs} configs, {size / 2**20:.1f} MiB")
    for what, seconds in rows:
        print(f"  {what:22} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
