"""Ops with right, wrong and loose outputs, at the top level of a module: a worker process can import them."""

import dataclasses
import os
import time

import jax
import jax.numpy as jnp

import tokamax
from toy import TableTimer


def by_way(config, ba):
    return {"half": 3.0, "plain": 2.0}.get(config.way, 1.0)


TIMER = TableTimer(by_way)


@dataclasses.dataclass(frozen=True)
class Way:
    way: str = "plain"


@dataclasses.dataclass(frozen=True)
class Mean(tokamax.Op):
    """The mean of rows. `plain` is right; `half` adds up in 16 bits; `zeros` is wrong; `bf16` returns another dtype."""

    config_cls = Way
    name = "test_gate_mean"
    ways: tuple[str, ...] = ("plain", "zeros")
    default: str = "plain"
    broken: str = ""

    def _fwd(self, x, *, return_residuals, config):
        if config.way == "zeros":
            return jnp.zeros_like(x[:, 0]), None
        if config.way == "half":
            return x.astype(jnp.float16).mean(1, dtype=jnp.float16).astype(x.dtype), None
        if config.way == "off":
            return x.mean(1) * 1.01, None
        if config.way == "bf16":
            return x.mean(1).astype(jnp.bfloat16), None
        return x.mean(1), None

    def _reference(self, x):
        if self.broken == "raises":
            raise ZeroDivisionError("no reference")
        if self.broken == "hangs":
            # Not for ever: a callback that still runs when the interpreter ends aborts it.
            return jax.pure_callback(lambda x: (time.sleep(12), x[:, 0])[1], jax.ShapeDtypeStruct((4,), x.dtype), x)
        if self.broken == "exits":
            os._exit(3)
        if self.broken == "wrong":
            return x.mean(1) + 1
        return x.mean(1)

    def _get_autotuning_configs(self, ba):
        return set(map(Way, self.ways))

    def _get_heuristics_config(self, ba):
        return Way(self.default)


@dataclasses.dataclass(frozen=True)
class LooseMean(Mean):
    name = "test_gate_loose_mean"

    def _get_tolerance(self, ba):
        return {"float32": 0.1}
