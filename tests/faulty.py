"""An op whose configs hang, crash and lie: what the tests of isolation and `benchmarks/faults.py` tune."""

import ctypes
import dataclasses
import gc
import itertools
import os
import signal
import sys
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


def _write_inputs(x: np.ndarray) -> np.ndarray:
    """What a kernel does that takes an input for its output, here to the inputs that a tuning holds in this process."""
    for inputs in [found for found in gc.get_objects() if type(found).__name__ == "Inputs"]:
        for array in inputs.arrays:
            ctypes.memset(array.unsafe_buffer_pointer(), 0, array.nbytes)
    return 2 * x


def _draw(x: np.ndarray) -> np.ndarray:
    return np.random.default_rng().standard_normal(x.shape, np.float32)


_runs = itertools.count()


def _count(x: np.ndarray) -> np.ndarray:
    """What a race gives, or memory that nobody writes: right at first, and another thing at every later run."""
    return (2 + next(_runs)) * x


CALLED = {"unstable": _draw, "changes": _count, "writes into its inputs": _write_inputs}


def _long_to_compile() -> jax.Array:
    """A value that XLA computes while it compiles, by slow means: some 3e11 multiplications, ten minutes and more."""
    image, kernel = (np.arange(n * n, dtype=np.float32).reshape(1, 1, n, n) for n in (1500, 750))
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID").sum()


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sticky:
    """An output that hangs where it is compared, and nowhere else."""

    x: Any

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:
            if frame.f_code.co_name == "compare":
                _hang()
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Sticky":
        return cls(*children)


DEEDS = {"hang": _hang, "exit": _exit, "segfault": _segfault, "killed": _killed, "raise": _raise, "memory": _memory}
FAULTS = (
    *(f"{deed} in trace" for deed in DEEDS),
    "hang in compile",
    "hang in check",
    *(f"{deed} in run" for deed in DEEDS),
    "zeros",
    "nan",
    *CALLED,
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
        if when == "compile":
            return 2 * x + 0.0 * _long_to_compile(), None
        if when == "check":
            return Sticky(2 * x), None
        if config.fault == "zeros":
            return jnp.zeros_like(x), None
        if config.fault == "nan":
            return jnp.full_like(x, jnp.nan), None
        if config.fault in CALLED:
            return jax.pure_callback(CALLED[config.fault], jax.eval_shape(lambda x: x, x), x), None
        return 2 * x + 0.0 * config.number, None

    def _get_autotuning_configs(self, ba: tokamax.BoundArguments) -> set[Any]:
        return {FaultyConfig(number=n) for n in range(3)} | {FaultyConfig(fault) for fault in self.faults}

    def _get_heuristics_config(self, ba: tokamax.BoundArguments) -> FaultyConfig:
        return FaultyConfig()


def counting_executables(run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
    """A timer that tells how many executables the worker process holds."""
    (server,) = [x for x in gc.get_objects() if type(x).__name__ == "_Server"]
    return [float(len(server._compiled))] * rounds


def with_a_jump(run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
    """A timer whose clock jumps: the first sample of a slow config is 0 ms."""
    ms = {0: 2.0, 1: 3.0, 2: 1.0}[config.number]
    first = config.number == 1 and next(_samples) == 0
    return [0.0 if first else ms] * rounds


_samples = itertools.count()
