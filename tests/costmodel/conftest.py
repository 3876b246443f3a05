"""Made-up measurements with known rules: blocked products `a[m, k] @ b[k, n]` whose best block depends on the shape."""

import dataclasses
import importlib.util
import pathlib

import numpy as np
import pytest

from tokamax._src import devices, shapes
from tokamax._src.costmodel import dataset

FACTS = devices.DeviceFacts("cpu-test-4c", "cpu", cores=4)


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """None is one block for the whole axis."""

    block_m: int | None = None
    block_n: int | None = None
    unroll: int = 1


def space(m, n):
    blocks_m = sorted({min(b, m) for b in (16, 32, 64, 128, 256)})
    blocks_n = sorted({min(b, n) for b in (32, 128, 512)})
    return (BlockConfig(), *(BlockConfig(bm, bn, u) for bm in blocks_m for bn in blocks_n for u in (1, 2)))


def time_ms(m, k, n, config, width):
    """Time with padding, a cache that overflows, and a cost per block."""
    bm, bn = config.block_m or m, config.block_n or n
    steps = -(-m // bm) * -(-n // bn)
    work = steps * bm * bn * k
    overflow = max(bm * bn * width / 65536, 1.0) ** 0.3
    return (work * overflow + steps * 3e4 * config.unroll**-0.2) * width * 1e-8


def problem(m, k, n, *, dtype="float32", fails=False, flag=False):
    dtype = np.dtype(dtype)
    arguments = {
        "a": shapes.ArraySpec((m, k), dtype),
        "b": shapes.ArraySpec((k, n), dtype),
        "bias": shapes.ArraySpec((n,), dtype) if flag else None,
        "scale": 0.5,
        "mode": "fast",
    }
    configs = space(m, n)
    times = np.array([time_ms(m, k, n, c, dtype.itemsize) for c in configs])
    if fails:
        times = np.where([c.block_m == 256 for c in configs], np.nan, times)
    key = f"{m},{k},{n},{dtype},{flag}"
    return dataset.Problem("toy", key, f"{m}x{k}x{n}", arguments, configs, times, 0, FACTS.kind)


def make(count=24, seed=0, **options):
    rng = np.random.default_rng(seed)
    sizes = 2 ** rng.uniform(5, 11, (count, 3))
    return [problem(*(int(s) for s in row), **options) for row in sizes]


@pytest.fixture(scope="session")
def facts():
    return FACTS


@pytest.fixture(scope="session")
def make_problem():
    return problem


@pytest.fixture(scope="session")
def make_problems():
    return make


@pytest.fixture(scope="session")
def problems():
    return make()


@pytest.fixture(scope="session")
def model(problems):
    from tokamax._src.costmodel.model import CostModel

    return CostModel(iterations=40).fit(problems, FACTS)


@pytest.fixture(scope="session")
def training_script():
    """Loads a script of `training/` by its name, where that folder is."""

    def load(name):
        path = pathlib.Path(__file__).parents[2] / "training" / f"{name}.py"
        if not path.exists():
            pytest.skip("training/ is not installed")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
