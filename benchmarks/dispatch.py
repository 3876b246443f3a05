"""What a choice costs: a known config, a first prediction, a repeated one.

    python benchmarks/dispatch.py

Prints microseconds per call of `op.bind(...)` plus `choose_config()` from real arrays, and the time of a first
prediction over a space of 300 configs and one of 5,000, with models fitted here on recorded (made-up) times.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import tokamax
from tokamax._src import dispatch


@dataclasses.dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Product(tokamax.Op):
    """A matrix product with a space of 300 configs."""

    config_cls = Config
    name = "benchmark_product"

    def _fwd(self, x, y, *, scale=1.0, transpose=False, return_residuals, config):
        return x @ y * scale, None

    def _get_autotuning_configs(self, ba):
        blocks = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
        return {Config(m, n, s) for m in blocks for n in blocks for s in (1, 2, 3)}


@dataclasses.dataclass(frozen=True)
class LargeProduct(Product):
    """The same with a space of 5,000 configs."""

    name = "benchmark_large_product"

    def _get_autotuning_configs(self, ba):
        blocks = [8 * i for i in range(1, 26)]
        return {Config(m, n, s) for m in blocks for n in blocks for s in range(1, 9)}


@dataclasses.dataclass(frozen=True)
class MadeUpTimer:
    """A smooth function of shape and config instead of a measurement."""

    name: str = "made_up"

    def __call__(self, run: Callable[[], Any], *, bound_args: Any, config: Config, rounds: int) -> list[float]:
        m, k = bound_args.abstract["x"].shape
        n = bound_args.abstract["y"].shape[1]
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        return [1e-4 * tiles * (20 + config.block_m * config.block_n * k / 4096 / config.stages**0.1)] * rounds


def arrays(m: int, k: int, n: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    return jnp.zeros((m, k)), jnp.zeros((k, n))


def microseconds(call: Callable[[], Any], calls: int = 2000) -> float:
    """Median over 20 batches."""
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(calls // 20):
            call()
        samples.append(1e6 * (time.perf_counter() - start) / (calls // 20))
    return statistics.median(samples)


def entry(ba: tokamax.BoundArguments) -> Any:
    """One tuning session with made-up times for every config: nothing is compiled."""
    from tokamax._src import devices, environment

    timer = MadeUpTimer()
    outcomes = {
        config: tokamax.BenchmarkData(tuple(timer(lambda: None, bound_args=ba, config=config, rounds=1)))
        for config in ba.autotuning_configs
    }
    best = tokamax.autotuning.fastest(outcomes, ba.default_config)
    return tokamax.autotuning.Entry(
        ba, devices.device_kind(), outcomes, ba.default_config, best, environment.describe(timer=timer.name)
    )


def first_predictions_ms(op: type[Product], count: int) -> list[float]:
    """Times of choosing for shapes that nobody asked for before, listing the space included."""
    found = []
    for i in range(count):
        bound = op.bind(*arrays(200 + 64 * i, 160, 300))
        start = time.perf_counter()
        choice = bound.choose_config()
        found.append(1e3 * (time.perf_counter() - start))
        assert choice.source == "model", choice
    return found


def main() -> int:
    sizes = [(64 * i, 128 + 32 * (i % 5), 96 * (1 + i % 7)) for i in range(2, 26)]
    result = tokamax.AutotuningResult(tuple(entry(Product.bind(*arrays(*size))) for size in sizes)).fit()
    figures: dict[str, float] = {}
    x, y = arrays(*sizes[3])
    with result:
        figures["known config, us"] = microseconds(lambda: Product.bind(x, y).choose_config())
        first = first_predictions_ms(Product, 9)
        figures["first prediction of the process, ms"] = first[0]
        figures["first prediction of a shape, ms (median)"] = statistics.median(first[1:])
        x, y = arrays(200, 160, 300)
        choice = Product.bind(x, y).choose_config()
        figures["candidates"] = len(Product.bind(x, y).autotuning_configs)
        figures["repeated prediction, us"] = microseconds(lambda: Product.bind(x, y).choose_config())
    large = tokamax.AutotuningResult(tuple(entry(LargeProduct.bind(*arrays(*size))) for size in sizes[::3])).fit()
    with large:
        figures["first prediction, large space, ms (median)"] = statistics.median(first_predictions_ms(LargeProduct, 9))
        figures["candidates of the large space"] = len(LargeProduct.bind(x, y).autotuning_configs)
    dispatch.forget()
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:45s} {value:8.1f}")
        print(f"{'source of the prediction':45s} {choice.source:>8s} ({choice.detail})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
