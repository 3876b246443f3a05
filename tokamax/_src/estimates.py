"""What an op says of the speed of its configs on a device without measuring: `Op._estimate_ms`, made safe to ask."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokamax._src.bound_arguments import BoundArguments, config_order
from tokamax._src.op import Op


def of(ba: BoundArguments, configs: Sequence[Any], device_kind: str) -> np.ndarray | None:
    """Returns [c] estimated times of configs in ms, inf for those that should not be used; None if there are none.

    If the op raises, or returns something else, that is a mistake of its author, which costs the estimate and nothing
    else: a warning, and None.
    """
    try:
        found = ba.op._estimate_ms(ba, configs, device_kind)
        if found is None:
            return None
        times = np.asarray(found, float)
        if times.shape != (len(configs),):
            raise ValueError(f"it must return [{len(configs)}] times, one per config, got shape {times.shape}")
        if (times <= 0).any():
            raise ValueError(f"its times must be positive, got {times[times <= 0][0]}")
    except Exception as error:
        warnings.warn(
            f"_estimate_ms raised {type(error).__name__}: {error}; {ba!r} does without an estimate", stacklevel=2
        )
        return None
    return np.where(np.isnan(times), np.inf, times)


def ranked(ba: BoundArguments, device_kind: str, *, safe: bool = False) -> list[tuple[Any, float]]:
    """Returns the feasible configs with their estimated times in ms, the fastest first; empty if there are none.

    Args:
      ba: the bound arguments.
      device_kind: the device, which must be the one that configs are chosen for now: the space is that of this one.
      safe: whether to leave out configs of which the op does not know that they compile, see `Op._is_safe`.
    """
    if type(ba.op)._estimate_ms is Op._estimate_ms:
        return []
    configs = [config for config in ba.autotuning_configs if not safe or ba.op._is_safe(ba, config)]
    times = of(ba, configs, device_kind)
    if times is None:
        return []
    pairs = [(config, float(ms)) for config, ms in zip(configs, times, strict=True) if np.isfinite(ms)]
    return sorted(pairs, key=lambda pair: (pair[1], config_order(pair[0])))
