import dataclasses
import os
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src import devices

XEON = {
    "model name": "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz",
    "cpu family": "6",
    "model": "106",
    "flags": "fpu sse2 avx2 avx512f",
}


@pytest.fixture
def host(monkeypatch):
    """Lets the test say what /proc/cpuinfo holds."""

    def pretend(info, cores=4):
        monkeypatch.setattr(devices, "_cpuinfo", lambda: info)
        monkeypatch.setattr(devices, "usable_cores", lambda: cores)

    monkeypatch.setattr(devices, "_host_kind", devices._host_kind.__wrapped__)
    monkeypatch.setattr(devices, "_host_facts", devices._host_facts.__wrapped__)
    return pretend


@given(st.text(max_size=50))
def test_folder_names_are_safe(kind):
    name = devices.folder_name(kind)
    assert re.fullmatch(r"[a-z0-9](.*[a-z0-9])?", name) and re.fullmatch(r"[a-z0-9.-]+", name)
    assert devices.folder_name(name) == name


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H200", "nvidia-h200"), ("TPU v5 lite", "tpu-v5-lite"), ("../../etc", "etc"), ("", "unknown")],
)
def test_folder_name(kind, name):
    assert devices.folder_name(kind) == name


def test_kind_of_this_cpu_names_the_processor_and_the_cores():
    kind = devices.device_kind()
    cores = len(os.sched_getaffinity(0))
    assert re.fullmatch(rf"cpu-[a-z0-9-]+-{cores}c", kind)
    assert devices.folder_name(kind) == kind
    assert devices.is_cpu(kind) and not devices.is_cpu("NVIDIA H200")


def test_unlikeness_is_nothing_to_itself_and_grows_with_facts_and_names():
    here = devices.DeviceFacts("cpu-amd-epyc-2c", "cpu", cores=2, l2_bytes=2**20)
    more = dataclasses.replace(here, kind="cpu-amd-epyc-8c", cores=8)
    other = dataclasses.replace(more, kind="cpu-intel-xeon-8c", l2_bytes=2**21)
    assert devices.unlikeness(here, here) == 0.0
    assert devices.unlikeness(here, more) == 4.0
    assert devices.unlikeness(here, other) == devices.unlikeness(other, here) == 9.0


def test_kind_of_a_device_that_is_no_cpu_is_the_one_that_jax_says():
    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str
        device_kind: str

    assert devices.device_kind(Device("gpu", "NVIDIA H200")) == "NVIDIA H200"
    assert devices.device_kind(jax.devices("cpu")[0]) == devices.device_kind()


def test_current_follows_the_default_device():
    cpu = jax.devices("cpu")[0]
    assert devices.current() == jax.devices()[0]
    for default in (cpu, "cpu"):
        with jax.default_device(default):
            assert devices.current() == cpu


def test_facts_of_this_cpu():
    facts = devices.facts()
    assert facts == devices.facts(devices.device_kind())
    assert (facts.kind, facts.platform) == (devices.device_kind(), "cpu")
    assert facts.cores >= 1
    assert facts.memory_bytes is None or facts.memory_bytes > 2**20


@pytest.mark.parametrize(
    ("kind", "platform", "cores"),
    [("cpu-some-other-8c", "cpu", 8), ("cpu-odd", "cpu", 1), ("NVIDIA H200", "gpu", 1), ("TPU v99", "tpu", 1)],
)
def test_facts_of_other_devices_are_what_the_kind_says(kind, platform, cores):
    assert devices.facts(kind) == devices.DeviceFacts(kind, platform, cores)


def test_facts_from_cpuinfo(host):
    host(XEON)
    assert devices._host_kind() == "cpu-intel-xeon-platinum-8370c-f6m106-4c"
    facts = devices.facts("cpu-intel-xeon-platinum-8370c-f6m106-4c")
    assert (facts.cores, facts.vector_bits) == (4, 512)
    assert facts == devices.facts("cpu-intel-xeon-platinum-8370c-f6m106-4c")


@pytest.mark.parametrize(("flags", "bits"), [("avx avx2", 256), ("sse2", 128), ("", 128)])
def test_vector_width(host, flags, bits):
    host(XEON | {"flags": flags})
    assert devices._host_facts().vector_bits == bits


def test_a_system_without_cpuinfo_still_has_a_kind(host):
    host({})
    assert re.fullmatch(r"cpu-[a-z0-9-]+-4c", devices._host_kind())
    assert devices._host_facts().cores == 4


def test_stepping_is_left_out_where_it_is_unknown(host):
    host({"model name": "AMD EPYC Processor"}, cores=2)
    assert devices._host_kind() == "cpu-amd-epyc-2c"


def test_a_cache_that_the_system_does_not_tell_is_unknown():
    assert devices._cache_bytes(99) is None
