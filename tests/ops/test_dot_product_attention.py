"""Attention: one contract for all implementations, against float64, forward and gradient.

Kernels for TPU run in interpret mode. What only one of them has is tested in a file of its own.
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
from tokamax._src.ops.dot_product_attention.pallas_mosaic_tpu import (
    PallasMosaicTpuAttention,
    PallasMosaicTpuAttentionConfig,
    PallasMosaicTpuAttentionVjp,
    PallasMosaicTpuAttentionVjpConfig,
)
from tokamax._src.ops.dot_product_attention.xla_chunked import (
    Blocks,
    XlaChunkedDotProductAttention,
    XlaChunkedDotProductAttentionConfig,
    XlaChunkedDotProductAttentionVjp,
    XlaChunkedDotProductAttentionVjpConfig,
)

Config, VjpConfig = XlaChunkedDotProductAttentionConfig, XlaChunkedDotProductAttentionVjpConfig

BLOCKS = [(None, None), (16, 32), (17, None), (None, 19), (37, 16)]
RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def some(*shape, share=0.7):
    return RNG.random(shape) < share


def rows_without_keys():
    mask = some(2, 1, 37, 53)
    mask[:, :, 4:20] = False
    return mask


def segments(*shape, count=4):
    return np.sort(RNG.integers(0, count, shape), -1).astype(np.int32)


# B, T, S, N, K, H, further arguments.
PROBLEMS = {
    "plain": (2, 37, 53, 2, 2, 8, {}),
    "causal_gqa": (2, 37, 53, 4, 2, 8, {"is_causal": True}),
    "causal_tall": (1, 53, 37, 2, 1, 8, {"is_causal": True}),
    "window": (1, 61, 61, 2, 2, 8, {"local_window_size": 9}),
    "window_causal_mqa": (1, 61, 61, 3, 1, 8, {"local_window_size": (11, 4), "is_causal": True}),
    "window_ahead": (1, 37, 53, 2, 2, 8, {"local_window_size": (-2, 7)}),
    "mask": (2, 37, 53, 2, 2, 8, {"mask": some(2, 2, 37, 53)}),
    "mask_of_keys": (2, 37, 53, 4, 2, 8, {"mask": some(2, 1, 1, 53), "scale": 0.6}),
    "mask_of_rows": (2, 37, 53, 4, 2, 8, {"mask": rows_without_keys()}),
    "bias": (2, 37, 53, 4, 2, 8, {"bias": normal(1, 4, 37, 53)}),
    "bias_of_keys": (2, 37, 53, 2, 2, 8, {"bias": normal(2, 1, 1, 53), "is_causal": True}),
    "bias_matrix": (2, 37, 53, 2, 1, 8, {"bias": normal(37, 53)}),
    "soft_cap": (2, 37, 53, 2, 1, 8, {"logits_soft_cap": 1.5, "bias": normal(2, 2, 37, 1), "is_causal": True}),
    "lengths": (
        2,
        37,
        53,
        2,
        2,
        8,
        {"query_seq_lengths": np.array([20, 37], np.int32), "key_value_seq_lengths": np.array([53, 11], np.int32)},
    ),
    "no_keys": (2, 37, 53, 2, 1, 8, {"key_value_seq_lengths": np.array([0, 11], np.int32), "is_causal": True}),
    "window_tall": (1, 53, 20, 2, 1, 8, {"local_window_size": (6, 0)}),
    "soft_cap_alone": (1, 37, 53, 4, 2, 8, {"logits_soft_cap": 1.5, "is_causal": True, "scale": 0.6}),
    "segments": (
        2,
        37,
        53,
        4,
        2,
        8,
        {"query_segment_ids": segments(2, 37, count=6), "key_value_segment_ids": segments(2, 53)},
    ),
    "segments_causal": (
        2,
        53,
        53,
        2,
        2,
        8,
        {"query_segment_ids": segments(2, 53), "key_value_segment_ids": segments(2, 53), "is_causal": True},
    ),
    "several_blocks": (1, 200, 300, 2, 1, 8, {"is_causal": True}),
    "several_blocks_window": (2, 300, 200, 4, 2, 8, {"local_window_size": (90, 140), "logits_soft_cap": 20.0}),
    "one_query": (2, 1, 53, 8, 1, 16, {}),
    "wide_head": (1, 33, 35, 2, 1, 72, {"is_causal": True}),
}


def make(problem, dtype=jnp.float32, scale=1.0):
    b, t, s, n, k, h, more = PROBLEMS[problem]
    rng = np.random.default_rng(1)
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, h), (b, t, n, h)
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q * jnp.asarray(scale, dtype), k, v, dout, dict(more)


def visible(full, more):
    rows, columns = np.arange(full[2])[:, None], np.arange(full[3])[None]
    seen = np.ones(full, bool)
    if more.get("mask") is not None:
        seen &= np.asarray(more["mask"])
    if more.get("is_causal"):
        seen &= columns <= rows
    if (window := more.get("local_window_size")) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (columns >= rows - left) & (columns <= rows + right)
    if (lengths := more.get("key_value_seq_lengths")) is not None:
        seen &= columns < lengths[:, None, None, None]
    if (ids := more.get("query_segment_ids")) is not None:
        seen &= (ids[:, :, None] == more["key_value_segment_ids"][:, None, :])[:, None]
    return seen


def reduced(grad, shape):
    """Sums over the axes along which an array of this shape was broadcast."""
    shape4 = (1,) * (4 - len(shape)) + shape
    summed = tuple(i for i in range(4) if shape4[i] == 1)
    return grad.sum(summed, keepdims=True).reshape(shape)


def exact(q, k, v, dout, more):
    """Attention and its gradients in float64, all logits at once."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    b, t, n, h = q.shape
    group = n // k.shape[2]
    scale = more.get("scale") or h**-0.5
    keys, values = (np.repeat(x, group, 2) for x in (k, v))
    bare = scale * np.einsum("btnh,bsnh->bnts", q, keys)
    cap = more.get("logits_soft_cap")
    if cap:
        bare = cap * np.tanh(bare / cap)
    bias = more.get("bias")
    seen = visible(bare.shape, more)
    logits = np.where(seen, bare if bias is None else bare + np.asarray(bias, np.float64), -1e300)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if (lengths := more.get("query_seq_lengths")) is not None:
        real = np.arange(t) < lengths[:, None]
        weights, dout = weights * real[:, None, :, None], dout * real[:, :, None, None]
    out = np.einsum("bnts,bsnh->btnh", weights, values)
    dweights = np.einsum("btnh,bsnh->bnts", dout, values)
    dlogits = np.where(seen, weights * (dweights - (weights * dweights).sum(-1, keepdims=True)), 0)
    grads = {"bias": None if bias is None else reduced(dlogits, np.shape(bias))}
    if cap:
        dlogits = dlogits * (1 - (bare / cap) ** 2)
    fold = lambda x: x.reshape(b, x.shape[1], -1, group, h).sum(3)
    grads["query"] = scale * np.einsum("bnts,bsnh->btnh", dlogits, keys)
    grads["key"] = scale * fold(np.einsum("bnts,btnh->bsnh", dlogits, q))
    grads["value"] = fold(np.einsum("bnts,btnh->bsnh", weights, dout))
    return out, grads


def pinned(blocks, vjp_blocks=None):
    vjp = XlaChunkedDotProductAttentionVjp(VjpConfig(*(vjp_blocks or blocks)))
    return XlaChunkedDotProductAttention(Config(*blocks), vjp=vjp)


# The first computes all gradients in one kernel; blocks that divide the sequences, and longer ones.
MOSAIC = {
    "small": ((128, 128, 128), (128, 128, 128, None, None)),
    "mixed": ((128, 256, 128), (256, 256, 128, 128, 256)),
}


def mosaic(name):
    config, vjp_config = MOSAIC[name]
    vjp = PallasMosaicTpuAttentionVjp(PallasMosaicTpuAttentionVjpConfig(*vjp_config), interpret=True)
    return PallasMosaicTpuAttention(PallasMosaicTpuAttentionConfig(*config), vjp=vjp, interpret=True)


def run(op, q, k, v, dout, more):
    """Returns the output and the gradients of everything that has one."""
    more = dict(more)
    arrays = {"query": q, "key": k, "value": v}
    if "bias" in more:
        arrays["bias"] = jnp.asarray(more.pop("bias"))

    @jax.jit
    def both(arrays, dout):
        out, back = jax.vjp(lambda arrays: op(**arrays, **more), arrays)
        return out, back(dout)[0]

    return both(arrays, dout)


def assert_close(actual, expected, tolerance):
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(actual, np.float64) / scale, expected / scale, atol=tolerance, rtol=0)


def check(op, q, k, v, dout, more, tolerance=5e-6):
    out, grads = run(op, q, k, v, dout, more)
    assert out.dtype == q.dtype and out.shape == q.shape
    expected_out, expected = exact(q, k, v, dout, more)
    assert_close(out, expected_out, tolerance)
    for name, grad in grads.items():
        assert_close(grad, expected[name], tolerance)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_forward_and_gradient(problem):
    check(pinned((16, 32)), *make(problem))


@pytest.mark.parametrize("name", MOSAIC)
@pytest.mark.parametrize("problem", [name for name, case in PROBLEMS.items() if not {"mask", "bias"} & set(case[6])])
def test_forward_and_gradient_of_tpu_kernels(problem, name):
    check(mosaic(name), *make(problem))


@pytest.mark.parametrize("problem", ["window_causal_mqa", "mask_of_rows", "bias_matrix", "soft_cap", "lengths"])
def test_plain_form(problem):
    check(pinned((None, None)), *make(problem))


@pytest.mark.parametrize(
    ("problem", "blocks"),
    [("causal_gqa", (17, None)), ("soft_cap", (None, 19)), ("mask_of_rows", (37, 16)), ("bias", (5, 50))],
    ids=str,
)
def test_odd_blocks(problem, blocks):
    check(pinned(blocks), *make(problem))


BOTH = pytest.mark.parametrize("op", [pinned((16, 32)), mosaic("mixed")], ids=["chunked", "mosaic"])


@pytest.mark.parametrize(
    "op", [pinned((None, None)), pinned((16, 32)), *map(mosaic, MOSAIC)], ids=["plain", "chunked", *MOSAIC]
)
def test_bfloat16(op):
    q, k, v, dout, more = make("causal_gqa", jnp.bfloat16)
    check(op, q, k, v, dout, more, tolerance=2e-2)


@BOTH
@pytest.mark.parametrize("scale", [1e-20, 30.0])
def test_tiny_and_large_values(scale, op):
    check(op, *make("plain", scale=scale), tolerance=5e-5)


@BOTH
def test_huge_logits_stay_finite(op):
    q, k, v, dout, more = make("causal_gqa", scale=1e15)
    out, grads = run(op, q, k, v, dout, more)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, grads)))
    assert np.abs(out).max() <= np.abs(v).max()


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min], ids=str)
def test_bias_that_masks(lowest):
    q, k, v, dout, _ = make("plain")
    seen = some(1, 1, 37, 53)
    seen[..., 0] = True
    bias = np.where(seen, 0, lowest).astype(np.float32)
    out, grads = run(pinned((16, 16)), q, k, v, dout, {"bias": bias})
    expected, expected_grads = exact(q, k, v, dout, {"mask": seen})
    assert_close(out, expected, 5e-6)
    for name in ("query", "key", "value"):
        assert_close(grads[name], expected_grads[name], 5e-6)


@pytest.mark.parametrize("blocks", [((None, None), (16, 32)), ((16, 32), (None, None))], ids=str)
def test_configs_of_forward_and_gradient_are_independent(blocks):
    check(pinned(*blocks), *make("causal_gqa"))


@pytest.mark.parametrize("problem", ["causal_gqa", "lengths"])
def test_default_is_bitwise_what_jax_computes(problem):
    q, k, v, dout, more = make(problem)
    op = XlaChunkedDotProductAttention()
    assert op.bind(q, k, v, **more).default_config == Config()
    actual = run(pinned((None, None)), q, k, v, dout, more)
    expected = run(jax.nn.dot_product_attention, q, k, v, dout, more)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("blocks", [(None, None), (16, 32)], ids=str)
def test_residuals_do_not_depend_on_the_config(blocks):
    q, k, v, _, more = make("mask")
    _, (top, total) = pinned(blocks)(q, k, v, return_residuals=True, **more)
    assert top.shape == total.shape == (2, 2, 37) and top.dtype == jnp.float32
    _, (plain_top, plain_total) = pinned((None, None))(q, k, v, return_residuals=True, **more)
    assert_close(top, np.asarray(plain_top, np.float64), 1e-6)
    assert_close(total, np.asarray(plain_total, np.float64), 1e-6)


@pytest.mark.parametrize("blocks", [(None, None), (16, 32)], ids=str)
def test_without_a_batch(blocks):
    q, k, v, dout, _ = make("causal_gqa")
    more = {"is_causal": True, "mask": some(1, 1, 37, 53), "bias": normal(4, 1, 53)}
    out, grads = run(pinned(blocks), q[0], k[0], v[0], dout[0], more)
    expected_out, expected = exact(q[:1], k[:1], v[:1], dout[:1], more)
    assert_close(out, expected_out[0], 5e-6)
    for name, grad in grads.items():
        assert_close(grad, expected[name].reshape(grad.shape), 5e-6)


@BOTH
def test_vmap(op):
    q, k, v, dout, _ = make("causal_gqa")
    more = {"local_window_size": (20, 3)}
    op = functools.partial(op, **more)
    batched = jax.vmap(op, in_axes=(0, None, None))
    out, dq = jax.jit(lambda q, k, v, dout: (batched(q, k, v), jax.vjp(batched, q, k, v)[1](dout)[0]))(
        q[:, None], k[:1], v[:1], dout[:, None]
    )
    keys, values = (jnp.broadcast_to(x[:1], x.shape) for x in (k, v))
    expected_out, expected = exact(q, keys, values, dout, more)
    assert_close(out[:, 0], expected_out, 5e-6)
    assert_close(dq[:, 0], expected["query"], 5e-6)


def test_under_shard_map():
    q, k, v, dout, more = make("causal_gqa")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = lambda q, k, v, dout: (pinned((16, 32))(q, k, v, **more) * dout).sum()
    grad = jax.grad(loss, (0, 1, 2))
    sharded = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=(P("x"),) * 3))
    expected = exact(q, k, v, dout, more)[1]
    for name, actual in zip(("query", "key", "value"), sharded(q, k, v, dout), strict=True):
        assert_close(actual, expected[name], 5e-6)


@pytest.mark.parametrize("size", [1, 16, 37, 197, 577, 1024, 1500])
@pytest.mark.parametrize("block", [None, 1, 16, 19, 64, 256, 2000])
def test_blocks_cover_each_position_once(size, block):
    blocks = Blocks.of(size, block)
    assert blocks.block <= min(size, block or size)
    fresh = [np.ones(blocks.block, bool) if blocks.fresh(i) is None else blocks.fresh(i) for i in range(blocks.count)]
    positions = np.concatenate([np.asarray(blocks.positions(i))[f] for i, f in enumerate(fresh)])
    np.testing.assert_array_equal(positions, np.arange(size))


def bind(b, t, s, n, k, h, **more):
    q, kv = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, t, n, h), (b, s, k, h)))
    return XlaChunkedDotProductAttention.bind(q, kv, kv, **more)


@pytest.mark.parametrize(
    ("t", "s", "least"),
    [(197, 197, 5), (512, 512, 15), (2048, 2048, 15), (1, 4096, 5), (448, 1500, 15), (8192, 8192, 15)],
)
def test_spaces(t, s, least):
    ba = bind(1, t, s, 4, 4, 16)
    configs = ba.autotuning_configs
    assert ba.default_config == Config() and Config() in configs
    assert least <= len(configs) <= 36
    cuts = {(Blocks.of(t, c.block_q), Blocks.of(s, c.block_kv)) for c in configs}
    assert len(cuts) == len(configs), "two configs that compile to the same program"
    assert [dataclasses.astuple(c) for c in ba.op.bind_vjp(ba).autotuning_configs] == list(
        map(dataclasses.astuple, configs)
    )
    for config in configs:
        assert all(np.isfinite(list(ba.op._get_cost_features(ba, config).values())))


def test_computed_share_counts_skipped_blocks():
    ba = bind(1, 256, 256, 1, 1, 8, is_causal=True)
    share = lambda *blocks: ba.op._get_cost_features(ba, Config(*blocks))["computed_share"]
    assert share(None, None) == 1.0
    assert share(64, 64) == 10 / 16


@pytest.mark.parametrize(
    "more",
    [{}, {"is_causal": True, "bias": normal(1, 1, 37, 53)}, {"key_value_seq_lengths": np.array([3, 4], np.int32)}],
)
def test_bound_vjp_arguments_are_those_of_a_gradient(more):
    q, k, v, _, _ = make("causal_gqa")
    ba = XlaChunkedDotProductAttention.bind(q, k, v, **more)
    loss = lambda q, k, v: tokamax.dot_product_attention(q, k, v, **more).sum()
    found = tokamax.autotuning.get_bound_args(jax.value_and_grad(loss), q, k, v)
    assert found == (ba, ba.op.bind_vjp(ba))


def test_example_arguments():
    more = {
        "mask": jax.ShapeDtypeStruct((2, 1, 37, 53), jnp.bool_),
        "query_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    ba = bind(2, 37, 53, 4, 2, 8, **more)
    q, k, v, mask, k_lengths, q_lengths = example_inputs(ba)
    assert 0.8 < np.mean(mask) < 1.0
    assert (q_lengths >= 18).all() and (q_lengths <= 37).all() and (k_lengths <= 53).all()
    arrays = example_inputs(ba.op.bind_vjp(ba))
    top, total, out, dout, q, k, v, mask, k_lengths, q_lengths = arrays
    more = {"mask": mask, "query_seq_lengths": q_lengths, "key_value_seq_lengths": k_lengths}
    op = XlaChunkedDotProductAttention(Config())
    expected = op(q, k, v, return_residuals=True, **more)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), (out, (top, total)), expected)


@pytest.mark.parametrize("problem", ["causal_gqa", "segments"])
@pytest.mark.parametrize(
    "implementation", ["xla", "xla_chunked", ("xla_chunked", "xla"), ("mosaic", "xla"), mosaic("mixed"), None], ids=str
)
def test_front_function(implementation, problem):
    q, k, v, dout, more = make(problem)
    out = tokamax.dot_product_attention(q, k, v, implementation=implementation, **more)
    assert_close(out, exact(q, k, v, dout, more)[0], 5e-6)


def test_implementations_that_cannot_run(monkeypatch):
    q, k, v, _, _ = make("plain")
    with pytest.raises(errors.ArgumentError, match="implementation of dot_product_attention must be one of.*'cudnn'"):
        tokamax.dot_product_attention(q, k, v, implementation="cudnn")
    monkeypatch.setattr(XlaChunkedDotProductAttention, "supported_on", lambda self, device: False)
    with pytest.raises(errors.UnsupportedError, match="xla_chunked"):
        tokamax.dot_product_attention(q, k, v, implementation="xla_chunked")
    assert tokamax.dot_product_attention(q, k, v, implementation=("xla_chunked", "xla")).shape == q.shape


Q, KV = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 7, 2, 8))


@pytest.mark.parametrize("implementation", ["xla", "xla_chunked", mosaic("mixed")], ids=["xla", "chunked", "mosaic"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_segment_ids": jnp.zeros((2, 5), jnp.int32)}, "must both be given .* got query_segment_ids alone"),
        ({"key_value_segment_ids": jnp.zeros((2, 7), jnp.int32)}, "got key_value_segment_ids alone"),
        (
            {"query_segment_ids": jnp.zeros((2, 5)), "key_value_segment_ids": jnp.zeros((2, 7), jnp.int32)},
            r"query_segment_ids must be int32 \[2,5\], got f32\[2,5\]",
        ),
        (
            {"query_segment_ids": jnp.zeros((2, 5), jnp.int32), "key_value_segment_ids": jnp.zeros((7,), jnp.int32)},
            r"key_value_segment_ids must be int32 \[2,7\], got i32\[7\]",
        ),
        ({"query": Q[0]}, "must all have the shape"),
        ({"query": Q[0, 0], "key": KV[0, 0], "value": KV[0, 0]}, "must all have the shape"),
        ({"value": KV[:, :3]}, "key and value must have one shape"),
        ({"query": Q[:1]}, "the B and H of query"),
        ({"query": Q[..., :4]}, "the B and H of query"),
        ({"query": Q[:, :, :3]}, "multiple of that of key heads, got 3 and 2"),
        ({"query": Q.astype(jnp.bfloat16)}, "one floating dtype"),
        ({"bias": jnp.zeros((3, 1, 1, 7))}, r"bias must broadcast to \[B,N,T,S\]=\[2, 4, 5, 7\]"),
        ({"mask": jnp.zeros((2, 2, 5, 7), bool)}, "mask must broadcast"),
        ({"mask": jnp.zeros((5, 7))}, "mask must be bool"),
        ({"query_seq_lengths": jnp.zeros((3,), jnp.int32)}, r"must have the shape \[B\]=\[2\]"),
        ({"key_value_seq_lengths": jnp.zeros((2,))}, "must be int32"),
        ({"local_window_size": (1, 2, 3)}, "must be an integer or a pair"),
        ({"local_window_size": 1.5}, "must be an integer or a pair"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be positive"),
    ],
)
def test_wrong_arguments(change, message, implementation):
    arguments = {"query": Q, "key": KV, "value": KV} | change
    with pytest.raises(errors.ArgumentError, match=message):
        tokamax.dot_product_attention(**arguments, implementation=implementation)


def test_wrong_config():
    with pytest.raises(ValueError, match="block_q must be positive or None, got 0"):
        Config(0)
