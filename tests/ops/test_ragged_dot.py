"""Ragged dot: one contract for all implementations, every kind of config against float64, forward and gradient.

Kernels for TPU run in interpret mode. What only one implementation has is tested in a file of its own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tokamax
from tokamax._src import errors
from tokamax._src.inputs import example_inputs
from tokamax._src.ops.ragged_dot.base import RaggedDot
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import (
    PallasMosaicTpuRaggedDot,
    PallasMosaicTpuRaggedDotConfig,
    PallasMosaicTpuRaggedDotLhsVjp,
    PallasMosaicTpuRaggedDotRhsVjp,
    PallasMosaicTpuRaggedDotVjp,
)
from tokamax._src.ops.ragged_dot.xla_chunked import (
    Visit,
    XlaChunkedRaggedDot,
    XlaChunkedRaggedDotConfig,
    XlaChunkedRaggedDotVjp,
    XlaChunkedRaggedDotVjpConfig,
)

Config, VjpConfig = XlaChunkedRaggedDotConfig, XlaChunkedRaggedDotVjpConfig

CONFIGS = [
    Config(),
    Config(8),
    Config(32, 8),
    Config(16, upcast=True),
    Config(16, visit=Visit.TILES),
    Config(64, visit=Visit.TILES),
    Config(8, visit=Visit.GATHER),
    Config(32, visit=Visit.GATHER),
]
VJP_CONFIGS = [
    VjpConfig(),
    VjpConfig(8, None),
    VjpConfig(None, 16),
    VjpConfig(16, 16),
    VjpConfig(64, 32, 16),
    VjpConfig(16, 64, 16, upcast=True),
]
# Tiles that divide no axis, and tiles larger than the axes; interpret mode takes any.
TILES = [PallasMosaicTpuRaggedDotConfig(16, 8, 128), PallasMosaicTpuRaggedDotConfig(64, 128, 8)]
# Rows, inputs, outputs, and sizes: groups that cross tiles, empty ones first, last and between, rows past the end.
PROBLEMS = {
    "crossing": (71, 13, 17, [30, 1, 23, 17]),
    "empty": (50, 8, 5, [0, 20, 0, 0, 30, 0]),
    "past_the_end": (67, 9, 11, [10, 0, 21]),
    "nothing": (20, 4, 6, [0, 0, 0]),
    "one_group": (33, 7, 9, [33]),
    "few_rows": (3, 5, 4, [1, 0, 2]),
}
CASES = [*((name, jnp.dtype("float32")) for name in PROBLEMS), ("crossing", jnp.dtype("bfloat16"))]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def make(problem, dtype, scale=1.0, seed=0):
    m, k, n, sizes = PROBLEMS[problem]
    rng = np.random.default_rng(seed)
    lhs = jnp.asarray(rng.standard_normal((m, k)) * scale, dtype)
    rhs = jnp.asarray(rng.standard_normal((len(sizes), k, n)), dtype)
    dout = jnp.asarray(rng.standard_normal((m, n)), dtype)
    return lhs, rhs, jnp.asarray(sizes, jnp.int32), dout


def exact(lhs, rhs, sizes, dout):
    """Returns the result and both gradients in float64."""
    lhs, rhs, dout = (np.asarray(a, np.float64) for a in (lhs, rhs, dout))
    out, dlhs, drhs = np.zeros(dout.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for g, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows], dlhs[rows], drhs[g] = lhs[rows] @ rhs[g], dout[rows] @ rhs[g].T, lhs[rows].T @ dout[rows]
        start += size
    return out, dlhs, drhs


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    scale = max(np.abs(expected).max(), 1e-30)
    np.testing.assert_allclose(np.asarray(actual, np.float64) / scale, expected / scale, atol=TOLERANCE[str(dtype)])


def pinned(config=Config(), vjp_config=VjpConfig()):
    return XlaChunkedRaggedDot(config=config, vjp=XlaChunkedRaggedDotVjp(config=vjp_config))


def mosaic(tiles, vjp_tiles=None):
    lhs, rhs = (
        part(config=vjp_tiles or tiles, interpret=True)
        for part in (PallasMosaicTpuRaggedDotLhsVjp, PallasMosaicTpuRaggedDotRhsVjp)
    )
    return PallasMosaicTpuRaggedDot(config=tiles, interpret=True, vjp=PallasMosaicTpuRaggedDotVjp(lhs, rhs))


MOSAIC = {f"mosaic{tiles.tiles}": mosaic(tiles) for tiles in TILES}
FORWARD = {"xla": RaggedDot(), **{str(config): pinned(config) for config in CONFIGS}, **MOSAIC}
GRADIENT = {"xla": RaggedDot(), **{str(config): pinned(vjp_config=config) for config in VJP_CONFIGS}, **MOSAIC}

ONCE = [name for name in FORWARD if name != "mosaic(64, 128, 8)"]  # Interpret mode is slow.


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize(("problem", "dtype"), CASES, ids=str)
def test_forward(problem, name, dtype):
    lhs, rhs, sizes, dout = make(problem, dtype)
    actual = jax.jit(FORWARD[name])(lhs, rhs, sizes)
    assert_close(actual, exact(lhs, rhs, sizes, dout)[0], dtype)


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize(("problem", "dtype"), CASES, ids=str)
def test_gradient(problem, name, dtype):
    lhs, rhs, sizes, dout = make(problem, dtype)
    _, vjp = jax.vjp(lambda lhs, rhs: GRADIENT[name](lhs, rhs, sizes), lhs, rhs)
    dlhs, drhs = vjp(dout)
    _, expected_dlhs, expected_drhs = exact(lhs, rhs, sizes, dout)
    assert_close(dlhs, expected_dlhs, dtype)
    assert_close(drhs, expected_drhs, dtype)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("name", ONCE)
def test_tiny_and_large_values(name, scale):
    lhs, rhs, sizes, dout = make("crossing", jnp.float32, scale)
    out, vjp = jax.vjp(lambda lhs, rhs: FORWARD[name](lhs, rhs, sizes), lhs, rhs)
    expected, dlhs, drhs = exact(lhs, rhs, sizes, dout)
    assert_close(out, expected, jnp.dtype("float32"))
    for actual, expected in zip(vjp(dout), (dlhs, drhs), strict=True):
        assert_close(actual, expected, jnp.dtype("float32"))


@pytest.mark.parametrize("name", [name for name in FORWARD if name not in ("xla", str(Config()))])
def test_rows_past_the_end_may_hold_nan(name):
    lhs, rhs, sizes, dout = make("past_the_end", jnp.float32)
    lhs, dout = lhs.at[31:].set(jnp.nan), dout.at[31:].set(jnp.nan)
    out = FORWARD[name](lhs, rhs, sizes)
    assert np.isfinite(out).all() and not np.asarray(out[31:]).any()


# The plain form multiplies such rows with zeros.
@pytest.mark.parametrize("name", [str(config) for config in VJP_CONFIGS[3:]] + ["mosaic(16, 8, 128)"])
def test_gradients_ignore_nan_in_rows_past_the_end(name):
    lhs, rhs, sizes, dout = make("past_the_end", jnp.float32)
    lhs, dout = lhs.at[31:].set(jnp.nan), dout.at[31:].set(jnp.nan)
    dlhs, drhs = jax.vjp(lambda lhs, rhs: GRADIENT[name](lhs, rhs, sizes), lhs, rhs)[1](dout)
    assert np.isfinite(drhs).all() and np.isfinite(dlhs).all() and not np.asarray(dlhs[31:]).any()


@pytest.mark.parametrize("name", ONCE)
def test_preferred_element_type(name):
    lhs, rhs, sizes, dout = make("crossing", jnp.bfloat16)
    op = FORWARD[name]
    run = lambda lhs, rhs: op(lhs, rhs, sizes, preferred_element_type=jnp.float32, precision="highest")
    out, vjp = jax.vjp(run, lhs, rhs)
    expected, dlhs, drhs = exact(lhs, rhs, sizes, dout)
    assert_close(out, expected, jnp.dtype("float32"))
    grads = vjp(dout.astype(jnp.float32))
    assert_close(grads[0], dlhs, jnp.dtype("bfloat16"))
    assert_close(grads[1], drhs, jnp.dtype("bfloat16"))


@pytest.mark.parametrize(
    "op", [*(pinned(config, VjpConfig(16, 16, 8)) for config in CONFIGS[2::2]), MOSAIC["mosaic(16, 8, 128)"]], ids=str
)
def test_vmap_over_everything(op):
    made = [make("crossing", jnp.float32, seed=seed) for seed in (1, 2)]
    lhs, rhs, sizes, dout = (jnp.stack(parts) for parts in zip(*made, strict=True))
    sizes = sizes.at[1].set(jnp.array([0, 40, 2, 3]))
    run = lambda lhs, rhs, sizes: op(lhs, rhs, sizes)
    grad = jax.vmap(lambda lhs, rhs, sizes, d: jax.vjp(lambda a, b: run(a, b, sizes), lhs, rhs)[1](d))
    out, grads = jax.vmap(run)(lhs, rhs, sizes), grad(lhs, rhs, sizes, dout)
    for i in range(2):
        expected, dlhs, drhs = exact(lhs[i], rhs[i], sizes[i], dout[i])
        assert_close(out[i], expected, jnp.dtype("float32"))
        assert_close(grads[0][i], dlhs, jnp.dtype("float32"))
        assert_close(grads[1][i], drhs, jnp.dtype("float32"))


@pytest.mark.parametrize("config", [Config(), Config(16, 8), Config(16, visit=Visit.TILES)], ids=str)
def test_under_shard_map(config):
    lhs, rhs, sizes, dout = make("crossing", jnp.float32)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    op = pinned(config, VjpConfig(16, 16))
    loss = lambda lhs, rhs, sizes: (op(lhs, rhs, sizes) * dout).sum()
    grad = jax.grad(loss, (0, 1))
    spec = P("x")
    sharded = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(spec, spec, spec), out_specs=(spec, spec)))
    for actual, expected in zip(sharded(lhs, rhs, sizes), exact(lhs, rhs, sizes, dout)[1:], strict=True):
        assert_close(actual, expected, jnp.dtype("float32"))


@pytest.mark.parametrize("dtype", [jnp.dtype("float32"), jnp.dtype("bfloat16")], ids=str)
@pytest.mark.parametrize("config", CONFIGS[2::2], ids=str)
def test_forward_mode_without_a_vjp_op(config, dtype):
    lhs, rhs, sizes, dout = make("crossing", dtype)
    op = dataclasses.replace(pinned(config), vjp=None)
    _, tangent = jax.jvp(lambda lhs: op(lhs, rhs, sizes), (lhs,), (lhs,))
    assert_close(tangent, exact(lhs, rhs, sizes, dout)[0], dtype)


@pytest.mark.parametrize("implementation", [None, "xla", "xla_chunked", ("xla_chunked", "xla"), ("mosaic", "xla")])
def test_front_function(implementation):
    lhs, rhs, sizes, dout = make("crossing", jnp.float32)
    run = functools.partial(tokamax.ragged_dot, implementation=implementation)
    out = jax.jit(run)(lhs, rhs, sizes)
    assert_close(out, exact(lhs, rhs, sizes, dout)[0], jnp.dtype("float32"))
    np.testing.assert_array_equal(out, jax.jit(jax.lax.ragged_dot)(lhs, rhs, sizes))


@pytest.mark.parametrize("implementation", [MOSAIC["mosaic(16, 8, 128)"], (MOSAIC["mosaic(16, 8, 128)"], "xla")])
def test_front_function_calls_ops(implementation):
    lhs, rhs, sizes, dout = make("crossing", jnp.float32)
    ba = tokamax.autotuning.get_bound_args(tokamax.ragged_dot, lhs, rhs, sizes, implementation=implementation)
    assert [type(found.op) for found in ba] == [PallasMosaicTpuRaggedDot]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("m", [3, 64, 301, 4096])
def test_spaces(m, dtype):
    ba = XlaChunkedRaggedDot.bind(
        jax.ShapeDtypeStruct((m, 128), dtype),
        jax.ShapeDtypeStruct((8, 128, 256), dtype),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    for bound, plain in ((ba, Config()), (ba.op.bind_vjp(ba), VjpConfig())):
        assert bound.default_config == plain
        assert plain in bound.autotuning_configs
        assert len(bound.autotuning_configs) <= 40
        assert m < 300 or len(bound.autotuning_configs) >= 15


def test_gathered_matrices_are_limited():
    ba = XlaChunkedRaggedDot.bind(
        jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
        jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    assert not any(c.visit is Visit.GATHER and c.block_m < 64 for c in ba.autotuning_configs)


def test_bound_vjp_arguments_are_those_of_a_gradient():
    lhs, rhs, sizes, _ = make("crossing", jnp.bfloat16)
    ba = XlaChunkedRaggedDot.bind(*map(_abstract, (lhs, rhs, sizes)))
    loss = lambda lhs, rhs: tokamax.ragged_dot(lhs, rhs, sizes).sum()
    found = tokamax.autotuning.get_bound_args(jax.grad(loss, (0, 1)), lhs, rhs)
    assert ba.op.bind_vjp(ba) in found


def _abstract(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def test_example_arguments():
    lhs, rhs, sizes, dout = make("crossing", jnp.float32)
    ba = XlaChunkedRaggedDot.bind(*map(_abstract, (lhs, rhs, sizes)))
    inputs = example_inputs(ba)
    assert inputs[2].sum() == 71 and (inputs[2] >= 0).all() and len(set(inputs[2].tolist())) > 1
    vjp = ba.op.bind_vjp(ba)
    out, dout, lhs, rhs, sizes = example_inputs(vjp)
    assert sizes.sum() == 71
    assert_close(out, exact(lhs, rhs, sizes, dout)[0], jnp.dtype("float32"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lhs": jnp.ones((2, 3, 4))}, r"lhs must be an array \[m, k\], got f32\[2,3,4\]"),
        ({"lhs": [[1.0]]}, r"lhs must be an array \[m, k\], got list"),
        ({"rhs": jnp.ones((2, 5, 4))}, "the same k"),
        ({"group_sizes": jnp.array([1, 2, 3])}, "one size for each of the 2 groups"),
        ({"group_sizes": jnp.ones(2)}, "integers, got float32"),
        ({"rhs": jnp.ones((2, 3, 4), jnp.bfloat16)}, "same dtype, got float32 and bfloat16"),
        ({"lhs": jnp.ones((6, 3), jnp.int32), "rhs": jnp.ones((2, 3, 4), jnp.int32)}, "must hold floats"),
        ({"implementation": "nonsense"}, "implementation of ragged_dot must be one of"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "xla_chunked", MOSAIC["mosaic(16, 8, 128)"]], ids=str)
def test_wrong_arguments(change, message, implementation):
    right = {"lhs": jnp.ones((6, 3)), "rhs": jnp.ones((2, 3, 4)), "group_sizes": jnp.array([2, 4])}
    with pytest.raises(errors.ArgumentError, match=message):
        tokamax.ragged_dot(**{"implementation": implementation, **right, **change})


@pytest.mark.parametrize("op", [RaggedDot, XlaChunkedRaggedDot, PallasMosaicTpuRaggedDot])
def test_group_offset_is_refused(op):
    with pytest.raises(errors.UnsupportedError, match="group_offset must be None"):
        op().bind(jnp.ones((6, 3)), jnp.ones((2, 3, 4)), jnp.array([2, 4]), group_offset=jnp.array([0]))
