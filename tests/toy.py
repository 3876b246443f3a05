"""A small op with a space, a VJP op and a timer that reads a table: what the tests tune."""

import dataclasses
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tokamax
from tokamax import BenchmarkData, Op
from tokamax._src import devices, environment, files
from tokamax._src.autotuning.store import DirectoryStore
from tokamax.autotuning import Entry, Failure


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    block: int = 1
    fast: bool | None = None


SPACE = {ToyConfig(block, fast) for block in (1, 2, 4, 8) for fast in (None, True)}


@dataclasses.dataclass(frozen=True)
class ToyVjp(Op):
    config_cls = ToyConfig
    name = "toy_vjp"

    def _fwd(self, residuals, out, dout, x, w, *, activation=None, scale=1.0, return_residuals, config):
        _, vjp = jax.vjp(lambda x, w: (activation or (lambda x: x))(x) @ w * scale, x, w)
        return vjp(dout), None

    def _get_autotuning_configs(self, ba):
        return {ToyConfig(1), ToyConfig(2)}


@dataclasses.dataclass(frozen=True)
class Toy(Op):
    """`activation(x) @ w * scale`; the sum is the same for every config."""

    config_cls = ToyConfig
    name = "toy"
    flavour: str = "plain"

    def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        x = x if activation is None else activation(x)
        out = x @ w * scale + 0.0 * config.block
        return out, (x if return_residuals else None)

    def _get_autotuning_configs(self, ba):
        return SPACE

    def _is_feasible(self, ba, config):
        return config.block <= ba.abstract["x"].shape[0]


TOY_WITH_VJP = Toy(vjp=ToyVjp())


@dataclasses.dataclass(frozen=True)
class Estimating(Toy):
    """Estimates that larger blocks are faster, or says what it is told to say."""

    name = "estimating"
    says: Any = None

    def _estimate_ms(self, ba, configs, device_kind):
        if self.says is not None:
            return self.says
        return None if device_kind == "other" else [10.0 / config.block for config in configs]


@dataclasses.dataclass(frozen=True)
class TableTimer:
    """A timer that runs nothing and reads times from a function of config and arguments."""

    ms: Callable[[Any, Any], float]
    name: str = "table"

    def __call__(self, run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
        return [self.ms(config, bound_args)] * rounds


def by_block(config: Any, ba: Any) -> float:
    """Fewer milliseconds for larger blocks; `fast` helps."""
    return 10.0 / config.block * (0.5 if config.fast else 1.0)


def arrays(m: int = 8, k: int = 4, n: int = 6, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(m, k)), dtype), jnp.asarray(rng.normal(size=(k, n)), dtype)


def data(ms: float = 1.0) -> BenchmarkData:
    return BenchmarkData(samples_ms=(ms, ms), compile_ms=2.0, lowering_ms=1.0, peak_memory_bytes=None)


def entry(m: int = 8, best: Any = ToyConfig(2), best_ms: float = 1.0, **changes: Any) -> Entry:
    fields = {
        "bound_args": Toy.bind(*arrays(m)),
        "device_kind": devices.device_kind(),
        "outcomes": {ToyConfig(1): data(2.0), ToyConfig(8): Failure("run", "boom"), best: data(best_ms)},
        "default": ToyConfig(1),
        "best": best,
        "environment": environment.describe(timer="table"),
    }
    return Entry(**(fields | changes))


def estimated_entry(m: int = 8, best: Any = ToyConfig(4), ms: float = 2.5, **changes: Any) -> Entry:
    fields = {
        "bound_args": Estimating.bind(*arrays(m)),
        "outcomes": {ToyConfig(8): Failure("compile", "too large")},
        "best": best,
        "environment": environment.describe_estimate("compiler 1.0"),
        "estimated_ms": {best: ms, ToyConfig(2): 5.0},
    }
    return entry(m, **(fields | changes))


def put_entries(folder: str, sizes: Any) -> None:
    """What a second process does: a spawned one can import this module, not a test's."""
    store = DirectoryStore(pathlib.Path(folder) / "data", pathlib.Path(folder) / "models")
    for m in sizes:
        store.put([entry(m)])


def tune_until_killed(kill_at: int) -> None:
    """What a second process does: tunes, and kills itself at a sample of that number, 0 for never.

    Prints how many samples it took, the best block, and the number of outcomes.
    """
    taken = 0

    def timer(run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
        nonlocal taken
        taken += 1
        if taken == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return [by_block(config, bound_args)]

    (entry,) = tokamax.autotune(Toy.bind(*arrays()), timer=timer, progress_bar=False).entries
    print(taken, entry.best.block, len(entry.outcomes))


def count_up(path: pathlib.Path, times: int) -> None:
    """Adds to the number in a file, under its lock."""
    for _ in range(times):
        with files.lock(path):
            path.write_text(str(int(path.read_text()) + 1))
