"""Devices: their kind (the name that keys and folders carry) and a few fixed facts about them.

JAX calls every CPU `cpu`, yet configs differ between processors, so a CPU's kind names the processor and the
number of cores this process may use: `cpu-amd-epyc-f25m17-2c`.
"""

import dataclasses
import functools
import math
import os
import pathlib
import platform
import re
from typing import Any

import jax

from tokamax._src import options, tpus


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """What the cost model may know about a device; None is unknown.

    Attributes:
      kind: the device kind, as in keys.
      platform: `cpu`, `gpu` or `tpu`.
      cores: parallel compute units (CPU cores, SMs, TensorCores).
      clock_ghz: clock of one core.
      l1_bytes: first-level cache per core; the vector memory of a TPU.
      l2_bytes: second-level cache per core.
      l3_bytes: last-level cache, shared.
      memory_bytes: main memory.
      vector_bits: width of a vector register.
    """

    kind: str
    platform: str
    cores: int = 1
    clock_ghz: float | None = None
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    memory_bytes: int | None = None
    vector_bits: int | None = None


def folder_name(kind: str) -> str:
    """Returns a kind as a safe file name: `NVIDIA H200` -> `nvidia-h200`."""
    return re.sub(r"[^a-z0-9.]+", "-", kind.lower()).strip("-.") or "unknown"


def current() -> Any:
    """Returns the JAX device that ops run on by default."""
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        return jax.devices()[0]
    return jax.devices(default)[0] if isinstance(default, str) else default


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """A device that is not here, but for which programs are made; see `tokamax.config.cross_compile`.

    Attributes:
      platform: as of a JAX device.
      device_kind: as of a JAX device.
    """

    platform: str
    device_kind: str


def target() -> Any:
    """Returns the device that implementations and configs are chosen for: the current one, or one that is not here."""
    kind = options.cross_compile.value
    return AbsentDevice(facts(kind).platform, kind) if isinstance(kind, str) else current()


@functools.lru_cache(maxsize=64)
def _kind_of(device: Any) -> str:
    if device.platform == "cpu" and not isinstance(device, AbsentDevice):
        return _host_kind()
    return device.device_kind


def device_kind(device: Any = None) -> str:
    """Returns the kind of a JAX device, by default of the one that configs are chosen for."""
    return _kind_of(target() if device is None else device)


def is_cpu(kind: str) -> bool:
    """Whether a kind names a CPU."""
    return kind.startswith("cpu")


def facts(kind: str | None = None) -> DeviceFacts:
    """Returns the facts of a device kind; for the host's own CPU they are read from the system."""
    kind = device_kind() if kind is None else kind
    if kind == _host_kind():
        return _host_facts()
    if is_cpu(kind):
        cores = re.search(r"-(\d+)c$", kind)
        return DeviceFacts(kind, "cpu", cores=int(cores[1]) if cores else 1)
    if (tpu := tpus.TPUS.get(kind)) is not None:
        return DeviceFacts(kind, "tpu", tpu.cores, tpu.clock_ghz, tpu.vmem_bytes, memory_bytes=tpu.hbm_bytes)
    return DeviceFacts(kind, "tpu" if kind.lower().startswith("tpu") else "gpu")


def unlikeness(a: DeviceFacts, b: DeviceFacts) -> float:
    """How little two devices have in common: octaves between facts that both have, and parts of one name alone."""
    names = [f.name for f in dataclasses.fields(DeviceFacts) if f.name not in ("kind", "platform")]
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    octaves = sum(abs(math.log2(x / y)) for x, y in pairs if x and y)
    return octaves + len(set(folder_name(a.kind).split("-")) ^ set(folder_name(b.kind).split("-")))


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


@functools.cache
def _host_kind() -> str:
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine() or "unknown"
    name = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*", " ", name.lower())
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    stepping = f"-f{info['cpu family']}m{info['model']}" if "cpu family" in info and "model" in info else ""
    return f"cpu-{name}{stepping}-{usable_cores()}c"


def _cache_bytes(index: int) -> int | None:
    try:
        text = pathlib.Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size").read_text().strip()
    except OSError:
        return None
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    digits = text.rstrip("KMG")
    return int(digits) * scale if digits.isdigit() else None


def _clock_ghz() -> float | None:
    """The highest clock that the system states; what it runs at now would differ from call to call."""
    try:
        khz = pathlib.Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()
    except OSError:
        return None
    return round(int(khz) / 1e6, 3) if khz.strip().isdigit() else None


@functools.cache
def _host_facts() -> DeviceFacts:
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    vector_bits = 512 if "avx512f" in flags else 256 if "avx2" in flags else 128
    try:
        # In GiB, since the exact figure differs from boot to boot.
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30
    except (ValueError, OSError, AttributeError):
        memory = None
    return DeviceFacts(
        kind=_host_kind(),
        platform="cpu",
        cores=usable_cores(),
        clock_ghz=_clock_ghz(),
        l1_bytes=_cache_bytes(0),
        l2_bytes=_cache_bytes(2),
        l3_bytes=_cache_bytes(3),
        memory_bytes=memory,
        vector_bits=vector_bits,
    )
