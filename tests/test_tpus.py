import pytest
from jax.experimental.pallas import tpu as pltpu

from tokamax._src import devices, tpus

CHIPS = {"v4": "TPU_V4", "v5e": "TPU_V5E", "v5p": "TPU_V5P", "v6e": "TPU_V6E", "7x": "TPU_7X"}


@pytest.mark.parametrize("tpu", tpus.TPUS.values(), ids=lambda tpu: tpu.name)
def test_the_table_says_what_jax_says(tpu):
    said = pltpu.get_tpu_info_for_chip(getattr(pltpu.ChipVersion, CHIPS[tpu.name]), tpu.cores)
    assert said.vmem_capacity_bytes == tpu.vmem_bytes
    assert said.mxu_column_size == tpu.mxu
    assert (said.num_sublanes, said.num_lanes) == tpu.native_tile
    # JAX rounds; and it counts memory and bandwidth by core.
    assert said.bf16_ops_per_second / 1e12 == pytest.approx(tpu.peak_tflops["bfloat16"], rel=0.01)
    assert said.int8_ops_per_second / 1e12 == pytest.approx(tpu.peak_tflops["int8"], rel=0.01)
    assert said.hbm_capacity_bytes * tpu.cores == pytest.approx(tpu.hbm_bytes, rel=0.02)
    assert said.mem_bw_bytes_per_second * tpu.cores / 1e9 == pytest.approx(tpu.hbm_gb_s, rel=0.13)


@pytest.mark.parametrize("tpu", tpus.TPUS.values(), ids=lambda tpu: tpu.name)
def test_the_clock_is_that_of_the_peak_rate(tpu):
    assert 2 * tpu.macs_per_cycle * tpu.clock_ghz / 1e3 == pytest.approx(tpu.peak_tflops["bfloat16"], rel=0.01)
    assert tpu.kernel_vmem_bytes <= tpu.vmem_bytes


def test_names_short_and_long_lead_to_the_same_facts():
    assert tpus.of("v6e") is tpus.of("TPU v6 lite") is tpus.TPUS["TPU v6 lite"]
    assert tpus.of("NVIDIA H200") is None
    facts = devices.facts("TPU v5")
    assert (facts.platform, facts.cores, facts.l1_bytes) == ("tpu", 2, 64 * 2**20)
