"""The environment of a measurement: what a later reader must know to trust it."""

import datetime
import functools
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import jaxlib

from tokamax._src import devices, options

TOOLCHAIN = ("jax", "jaxlib", "backend")
"""The parts whose change makes a measurement stale."""

COMPILED = ("jax", "jaxlib")
"""The parts of those that what was compiled ahead of time, on another machine, has too."""

STRICT = (*TOOLCHAIN, "tokamax", "system", "cores")
"""The parts whose change does so if `tokamax.config.freshness` is `strict`."""


@functools.cache
def _fixed() -> dict[str, Any]:
    try:
        version = metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "tokamax": version,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def toolchain() -> dict[str, Any]:
    """Returns the parts of the environment that decide whether a measurement is fresh."""
    return {**{k: _fixed()[k] for k in ("jax", "jaxlib")}, "backend": devices.current().client.platform_version}


def describe(**how: Any) -> dict[str, Any]:
    """Returns the present environment: versions, device, UTC time, and how was measured (timer, rounds)."""
    facts = devices.facts()
    return {
        **_fixed(),
        **toolchain(),
        "cores": facts.cores,
        "memory_bytes": facts.memory_bytes,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **how,
    }


def describe_estimate(compiler: str) -> dict[str, Any]:
    """Returns the environment of what was estimated and compiled for a device that is not here: versions, UTC time."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**_fixed(), "compiler": compiler, "time": time}


def stale_parts(environment: Mapping[str, Any], names: tuple[str, ...] | None = None) -> list[str]:
    """Returns what differs between a recorded environment and the present one, as `jax 0.10.2 (now 0.12.0)`.

    Which parts are compared is an option, `tokamax.config.freshness`, unless they are named.
    """
    strict = options.freshness.value == "strict"
    now = {**_fixed(), **toolchain(), **({"cores": devices.facts().cores} if strict else {})}
    if isinstance(options.cross_compile.value, str):  # The backend here says nothing of a device that is not here.
        del now["backend"]
    return [
        f"{name} {str(environment.get(name, 'unknown'))[:40]} (now {str(now[name])[:40]})"
        for name in names or (STRICT if strict else TOOLCHAIN)
        if name in now and environment.get(name) != now[name]
    ]


def is_fresh(environment: Mapping[str, Any]) -> bool:
    """Whether a measurement of an environment counts as fresh, by the option `tokamax.config.freshness`."""
    return options.freshness.value == "any" or not stale_parts(environment)
