"""An op whose configs hang, crash and lie: what the tests of isolation and `benchmarks/faults.py` tune."""

import dataclasses
import gc
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tokamax

HOUR_S = 3600.0


@dataclasses.dataclass(frozen=True)
class FaultyConfig:
    fault: str = "none"
    number: int = 0


def _hang() -> None:
    time.sleep(HOUR_S)


def _exit() -> None:
    os._exit(7)


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ValueError("as it was told")


def _memory() -> None:
    raise MemoryError("no more")


DEEDS = {"hang": _hang, "exit": _exit, "segfault": _segfault, "killed": _killed, "raise": _raise, "memory": _memory}
FAULTS = (
    *(f"{deed} in trace" for deed in DEEDS),
    *(f"{deed} in run" for deed in DEEDS),
    "zeros",
    "nan",
    "unstable",
)
"""What may go wrong in a config, and when."""


@dataclasses.dataclass(frozen=True)
class Faulty(tokamax.Op):
    """`2 * x`, unless a config does something else."""

    config_cls = FaultyConfig
    name = "faulty"
    faults: tuple[str, ...] = ()

    def _fwd(self, x: jax.Array, *, return_residuals: bool, config: FaultyConfig) -> tuple[jax.Array, None]:
        deed, _, when = config.fault.partition(" in ")
        if when == "trace":
            DEEDS[deed]()
        if when == "run":
            return jax.pure_callback(lambda x: (DEEDS[deed](), 2 * x)[1], jax.eval_shape(lambda x: x, x), x), None
        if config.fault == "zeros":
            return jnp.zeros_like(x), None
        if config.fault == "nan":
            return jnp.full_like(x, jnp.nan), None
        if config.fault == "unstable":
            draw = lambda x: np.random.default_rng().standard_normal(x.shape, np.float32)
            return jax.pure_callback(draw, jax.eval_shape(lambda x: x, x), x), None
        return 2 * x + 0.0 * config.number, None

    def _get_autotuning_configs(self, ba: tokamax.BoundArguments) -> set[Any]:
        return {FaultyConfig(number=n) for n in range(3)} | {FaultyConfig(fault) for fault in self.faults}

    def _get_heuristics_config(self, ba: tokamax.BoundArguments) -> FaultyConfig:
        return FaultyConfig()


def counting_executables(run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
    """A timer that tells how many executables the worker process holds."""
    (server,) = [x for x in gc.get_objects() if type(x).__name__ == "_Server"]
    return [float(len(server._compiled))] * rounds
