"""The estimate counts steps by kind; here the grids are walked step by step, with the index maps of the kernels."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokamax
from tokamax._src import tpus
from tokamax._src.ops.ragged_dot import tpu_estimate as estimate
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import Config

V5E = tpus.TPUS["TPU v5 lite"]


def visits_of(sizes, tile_m, *, empty):
    """(group, tile of rows) in the order of the grid."""
    found, start = [], 0
    for group, size in enumerate(sizes):
        end = start + size
        if size:
            found += [(group, tile) for tile in range(start // tile_m, math.ceil(end / tile_m))]
        elif empty:
            found.append((group, start // tile_m))
        start = end
    return found


def walk(blocks, compute_ms, moved_ms):
    """Runs the pipeline: (left, right, out) indices, ms of each step's computing and of each block's move."""
    total = moved_ms[0] + moved_ms[1]
    for i, step in enumerate(blocks):
        after = blocks[i + 1] if i + 1 < len(blocks) else (None, None, None)
        fetched = sum(moved_ms[b] for b in (0, 1) if after[0] is not None and after[b] != step[b])
        stored = moved_ms[2] if after[2] != step[2] else 0
        total += max(compute_ms[i], fetched + stored)
    return total


def gmm_walked(product, tiles, sizes):
    m, k, n = tiles
    step = estimate._Step(product, V5E)
    parts, slices = math.ceil(product.k / k), math.ceil(product.n / n)
    visits = visits_of(sizes, m, empty=False)
    blocks, compute = [], []
    for j, (group, tile), part in itertools.product(range(slices), visits, range(parts)):
        blocks.append(((tile, part), (group, part, j), (tile, j)))
        passes = 0.25 + (part == 0) + (part == parts - 1)
        compute.append(step.cycles(step.products(m, k, n) + passes * m * n / 1024))
    return walk(blocks, compute, [step.moved(x, 2) for x in (m * k, k * n, m * n)])


def tgmm_walked(product, tiles, sizes):
    m, k, n = tiles
    step = estimate._Step(product, V5E)
    visits = visits_of(sizes, m, empty=True)
    total = 0.0
    for _ in range(math.ceil(product.k / k) * math.ceil(product.n / n)):
        blocks = [(tile, tile, group) for group, tile in visits]
        compute = []
        for i, (group, _) in enumerate(visits):
            first = i == 0 or visits[i - 1][0] != group
            last = i + 1 == len(visits) or visits[i + 1][0] != group
            inner = step.products(k, m, n) + 0.5 * m * (k + n) / 1024 + 0.25 * k * n / 1024
            compute.append(step.cycles((inner if sizes[group] else 150) + (first + last) * k * n / 1024))
        total += walk(blocks, compute, [step.moved(x, 2) for x in (m * k, m * n, k * n)])
    return total


SIZES = st.lists(st.integers(0, 900), min_size=1, max_size=12).filter(any)
TILES = st.tuples(*(st.sampled_from([64, 128, 256, 512]) for _ in range(3)))


@settings(max_examples=80, deadline=None)
@given(SIZES, TILES, st.sampled_from([256, 512]), st.sampled_from([128, 512]))
def test_gmm_is_what_walking_the_grid_gives(sizes, tiles, k, n):
    product = estimate.Product(sum(sizes), k, n, len(sizes))
    tiles = (tiles[0], min(tiles[1], k), min(tiles[2], n))
    visits = estimate.counted_visits(sizes, np.array(tiles[:1]))
    got = estimate.gmm_ms(product, np.array([tiles]), V5E, visits)[0]
    # Moves between slices, and which step a block is stored at, are shared out: the rest is exact.
    assert got == pytest.approx(gmm_walked(product, tiles, sizes), rel=0.25)


@settings(max_examples=80, deadline=None)
@given(SIZES, TILES)
def test_tgmm_is_what_walking_the_grid_gives(sizes, tiles):
    product = estimate.Product(sum(sizes), 512, 512, len(sizes))
    visits = estimate.counted_visits(sizes, np.array(tiles[:1]))
    got = estimate.tgmm_ms(product, np.array([tiles]), V5E, visits)[0]
    assert got == pytest.approx(tgmm_walked(product, tiles, sizes), rel=0.4)


@given(SIZES, st.sampled_from([64, 128, 1024]))
def test_visits_are_counted_as_the_kernels_make_them(sizes, tile_m):
    visits = estimate.counted_visits(sizes, np.array([tile_m]))
    assert visits.count[0] == len(visits_of(sizes, tile_m, empty=False))
    assert visits.count[0] + visits.empty[0] == len(visits_of(sizes, tile_m, empty=True))


def test_expected_visits_are_those_of_sizes_that_no_tile_divides():
    sizes = [1000 + 3 * i for i in range(8)]
    tile_m = np.array([64, 128, 512])
    expected, counted = (
        estimate.expected_visits(sum(sizes), 8, tile_m),
        estimate.counted_visits(sizes, tile_m),
    )
    np.testing.assert_array_equal(expected.count, counted.count)
    np.testing.assert_array_equal(expected.group, counted.group)


def test_an_estimate_takes_all_configs_at_once_and_grows_with_the_work():
    product = estimate.Product(8192, 4096, 2048, 8)
    tiles = np.array(list(itertools.product((128, 256), (512, 4096), (256, 2048))))
    for kernel in (estimate.gmm_ms, estimate.tgmm_ms):
        at_once = kernel(product, tiles, V5E)
        np.testing.assert_allclose(at_once, [kernel(product, t[None], V5E)[0] for t in tiles])
        assert (kernel(estimate.Product(16384, 4096, 2048, 8), tiles, V5E) > 1.7 * at_once).all()
        assert (kernel(estimate.Product(8192, 4096, 2048, 8, passes=6), tiles, V5E) > at_once).all()


def test_turning_matrices_is_hidden_by_many_rows_alone():
    turned = estimate.Product(65536, 2048, 2048, 8, transposed=True)
    tiles = np.array([[m, 2048, 256] for m in (64, 128, 512, 1024)])
    for tpu in tpus.TPUS.values():
        plain = estimate.gmm_ms(dataclasses.replace(turned, transposed=False), tiles, tpu)
        ratio = estimate.gmm_ms(turned, tiles, tpu) / plain
        assert ratio[0] > 1 and (ratio[tiles[:, 0] >= tpu.mxu**2 // 128] == 1).all()
        assert (np.diff(ratio) <= 1e-9).all()


def test_no_estimate_beats_the_peak_rate_or_the_bandwidth():
    product = estimate.Product(65536, 4096, 4096, 16)
    tiles = np.array(list(itertools.product((128, 512), (512, 4096), (512, 4096))))
    for tpu in tpus.TPUS.values():
        for kernel in (estimate.gmm_ms, estimate.tgmm_ms):
            flops = 2 * product.m * product.k * product.n
            assert (kernel(product, tiles, tpu) > flops / (tpu.peak_tflops["bfloat16"] * 1e9) * 0.99).all()
            bytes_ = 2 * (product.m * (product.k + product.n) + 16 * product.k * product.n)
            assert (kernel(product, tiles, tpu) > bytes_ / (tpu.hbm_gb_s * 1e6)).all()


def training_module(name):
    import importlib.util
    import pathlib
    import sys

    folder = pathlib.Path(__file__).resolve().parents[2] / "training"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))


ROW = {
    "device": "TPU v5 lite",
    "lhs": "bf16[4096,4096]",
    "rhs": "bf16[8,4096,2048]",
    "dimension_numbers": {"dot_dimension_numbers": [[[1], [1]], [[], []]]},
    "group_sizes": {"num_groups": 8, "total_size": 4096},
    "config": {"tile_m": 256, "tile_k": 4096, "tile_n": 512},
    "median_ms": 0.5,
}


def test_the_command_that_judges_reads_rows_and_skips_without_the_table(tmp_path, monkeypatch, capsys):
    estimates = training_module("estimates")
    monkeypatch.setenv("TOKAMAX_DATASETS", str(tmp_path))
    assert estimates.main([]) == 0
    assert "skipped" in capsys.readouterr().out
    drhs = {**ROW, "dimension_numbers": {"dot_dimension_numbers": [[[0], [0]], [[], []]]}, "rhs": "bf16[4096,2048]"}
    (tmp_path / estimates.NAME).write_text("\n".join(map(json.dumps, (ROW, {**ROW, "median_ms": 0.7}, drhs))))
    judged = estimates.judge(estimates.winners())
    assert [one.fastest for one in judged] == [True, False, True]
    assert [one.winner.product.n for one in judged] == [2048, 2048, 2048]
    assert estimates.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["pass"], row["winners"]) for row in rows} == {("all", 3), ("forward", 2), ("drhs", 1)}
    assert all(0 <= row["percentile"] <= 100 for row in rows)


def test_dlhs_on_v5p_names_its_tiles_otherwise():
    estimates = training_module("estimates")
    row = {**ROW, "dimension_numbers": {"dot_dimension_numbers": [[[1], [2]], [[], []]]}, "rhs": "bf16[8,2048,4096]"}
    assert estimates.read_row(row).tiles == (256, 4096, 512)
    assert estimates.read_row({**row, "device": "TPU v5"}).tiles == (256, 512, 4096)
    assert estimates.read_row(row).product.n == 2048


def bound(m, k, n, groups, dtype="bfloat16", **more):
    """Forward pass and both gradients."""
    lhs, rhs = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((groups, k, n), dtype)
    ba = tokamax.PallasMosaicTpuRaggedDot.bind(lhs, rhs, jax.ShapeDtypeStruct((groups,), "int32"), **more)
    return ba, *ba.op.bind_vjp(ba)


def test_each_op_estimates_its_own_kernel():
    config = Config(256, 512, 1024)
    forward, dlhs, drhs = (ba.op._estimate_ms(ba, (config,), "TPU v5 lite") for ba in bound(8192, 4096, 2048, 8))
    product = estimate.Product(8192, 4096, 2048, 8)
    np.testing.assert_array_equal(forward, estimate.gmm_ms(product, np.array([[256, 512, 1024]]), V5E))
    np.testing.assert_array_equal(drhs, estimate.tgmm_ms(product, np.array([[256, 512, 1024]]), V5E))
    # The gradient of lhs sums over the outputs, and has the inputs as its columns.
    product = estimate.Product(8192, 2048, 4096, 8, transposed=True)
    np.testing.assert_array_equal(dlhs, estimate.gmm_ms(product, np.array([[256, 1024, 512]]), V5E))


def test_dtypes_precision_and_batches_count():
    config = (Config(256, 512, 1024),)
    at = lambda ba: ba.op._estimate_ms(ba, config, "TPU v6 lite")[0]
    (plain, *_), (wide, *_) = bound(4096, 2048, 2048, 8), bound(4096, 2048, 2048, 8, "float32")
    exact, *_ = bound(4096, 2048, 2048, 8, "float32", precision="highest")
    assert at(plain) < at(wide) < at(exact)
    batched = {n: dataclasses.replace(s, vmap=(3,)) for n, s in plain.abstract.items() if hasattr(s, "vmap")}
    assert at(dataclasses.replace(plain, arguments={**plain.arguments, **batched})) == pytest.approx(3 * at(plain))


def test_no_estimate_of_other_devices_and_of_what_is_no_kernel():
    config = (Config(256, 512, 1024),)
    for ba in bound(4096, 2048, 2048, 8):
        assert ba.op._estimate_ms(ba, config, "NVIDIA H200") is None
        assert ba.op._estimate_ms(ba, (), "TPU7x").shape == (0,)
        interpreted = dataclasses.replace(ba, op=type(ba.op)(interpret=True))
        assert interpreted.op._estimate_ms(interpreted, config, "TPU7x") is None
    for ba in bound(0, 2048, 2048, 8):
        assert ba.op._estimate_ms(ba, config, "TPU7x") is None


def test_a_safe_config_leaves_some_of_the_memory():
    with tokamax.config.cross_compile("TPU v5 lite"):
        for ba in bound(8192, 6144, 16384, 8):
            safe = [config for config in ba.autotuning_configs if ba.op._is_safe(ba, config)]
            assert 0 < len(safe) < len(ba.autotuning_configs) and ba.op._is_safe(ba, ba.default_config)
            assert max(ba.op.vmem_bytes(ba, config) for config in safe) <= 0.9 * 16 * 2**20
        forward, *_ = bound(8192, 6144, 16384, 8)
        assert not forward.op._is_safe(forward, Config(128, 6144, 512)), "libtpu 0.0.52 refuses it"
