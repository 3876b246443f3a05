"""The loss of a linear layer with softmax: every kind of config against float64, forward and gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tokamax
from tokamax._src import errors
from tokamax._src.autotuning.session import example_inputs
from tokamax._src.ops.linear_softmax_cross_entropy_loss.xla_chunked import (
    XlaChunkedLinearSoftmaxCrossEntropyLoss,
    XlaChunkedLinearSoftmaxCrossEntropyLossConfig,
    XlaChunkedLinearSoftmaxCrossEntropyLossVjp,
    XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig,
    _Split,
)

Config, VjpConfig = XlaChunkedLinearSoftmaxCrossEntropyLossConfig, XlaChunkedLinearSoftmaxCrossEntropyLossVjpConfig

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
CONFIGS = [
    Config(),
    Config(upcast=True),
    Config(32, None),
    Config(None, 32),
    Config(None, 64, upcast=True),
    Config(32, 64),
    Config(96, 32),
]
VJP_CONFIGS = [
    VjpConfig(),
    VjpConfig(True),
    VjpConfig(True, flip_dx=True, flip_dw=True),
    VjpConfig(True, 32, None),
    VjpConfig(True, None, 32, flip_dx=True),
    VjpConfig(True, 32, 64, flip_dw=True),
    VjpConfig(True, 96, 32, upcast=True),
]
SHAPES = [(101, 7, 203), (64, 16, 128), (5, 3, 11), (1, 4, 97), (70, 5, 1)]
CASES = [*((shape, F32) for shape in SHAPES), (SHAPES[0], BF16)]
PAIRS = [
    (Config(32, None), VjpConfig(True, 32, None)),
    (Config(None, 64), VjpConfig(True, None, 64)),
    (Config(32, 64), VjpConfig(True, 32, 64)),
]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


def make(shape, dtype, scale=1.0, seed=0):
    b, h, v = shape
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((b, h)) * scale, dtype)
    weights = jnp.asarray(rng.standard_normal((h, v)), dtype)
    return x, jnp.asarray(rng.integers(0, v, b), jnp.int32), weights


def exact(x, labels, weights, scale):
    """Returns the losses of the rows and the gradients of `sum(scale * losses)` in float64."""
    x, weights, labels = np.asarray(x, np.float64), np.asarray(weights, np.float64), np.asarray(labels)
    logits = x @ weights
    top = logits.max(axis=1, keepdims=True)
    p = np.exp(logits - top)
    total = p.sum(axis=1, keepdims=True)
    one_hot = (labels[:, None] == np.arange(weights.shape[1])).astype(np.float64)
    losses = (top + np.log(total))[:, 0] - (logits * one_hot).sum(axis=1)
    dz = (p / total - one_hot) * np.broadcast_to(scale, labels.shape)[:, None]
    return losses, dz @ weights.T, x.T @ dz


def assert_close(actual, expected, dtype, tolerance=None):
    assert actual.dtype == dtype and actual.shape == expected.shape
    scale = max(np.abs(expected).max(), 1.0)
    atol = tolerance or TOLERANCE[str(dtype)]
    np.testing.assert_allclose(np.asarray(actual, np.float64) / scale, expected / scale, atol=atol)


def pinned(config=Config(), vjp_config=VjpConfig()):
    return XlaChunkedLinearSoftmaxCrossEntropyLoss(
        config=config, vjp=XlaChunkedLinearSoftmaxCrossEntropyLossVjp(config=vjp_config)
    )


def reduced(losses, reduction):
    return losses if reduction is None else getattr(losses, reduction)()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_forward(shape, config, dtype):
    x, labels, weights = make(shape, dtype)
    losses, lse = pinned(config)(x, labels, weights, reduction=None, return_residuals=True)
    expected = exact(x, labels, weights, 1.0)[0]
    assert_close(losses, expected, F32)
    picked = (np.asarray(x, np.float64) @ np.asarray(weights, np.float64))[np.arange(len(labels)), labels]
    assert_close(lse, expected + picked, F32)


@pytest.mark.parametrize("reduction", ["sum", "mean", None])
@pytest.mark.parametrize("config", [Config(), Config(32, 64)], ids=str)
def test_reductions(config, reduction):
    x, labels, weights = make(SHAPES[0], F32)
    actual = pinned(config)(x, labels, weights, reduction=reduction)
    assert_close(actual, reduced(exact(x, labels, weights, 1.0)[0], reduction), F32)


@pytest.mark.parametrize("config", VJP_CONFIGS, ids=str)
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_gradient(shape, config, dtype):
    x, labels, weights = make(shape, dtype)
    dout = jnp.asarray(np.random.default_rng(1).standard_normal(shape[0]), jnp.float32)
    op = pinned(Config(None, 64), config)
    _, vjp = jax.vjp(lambda x, weights: op(x, labels, weights, reduction=None), x, weights)
    _, dx, dw = exact(x, labels, weights, dout)
    for actual, expected in zip(vjp(dout), (dx, dw), strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("config", VJP_CONFIGS, ids=str)
def test_gradient_of_reductions(config, reduction):
    x, labels, weights = make(SHAPES[0], F32)
    op = pinned(Config(), config)
    grads = jax.grad(lambda x, weights: 3 * op(x, labels, weights, reduction=reduction), (0, 1))(x, weights)
    _, dx, dw = exact(x, labels, weights, 3.0 if reduction == "sum" else 3.0 / len(labels))
    for actual, expected in zip(grads, (dx, dw), strict=True):
        assert_close(actual, expected, F32)


@pytest.mark.parametrize("config", VJP_CONFIGS, ids=str)
def test_backward_without_saved_lse(config):
    x, labels, weights = make(SHAPES[0], F32)
    op = XlaChunkedLinearSoftmaxCrossEntropyLossVjp(config=config)
    dx, _, dw = op(None, jnp.float32(0), jnp.float32(1), x, labels, weights, reduction="sum", precision=None)
    _, expected_dx, expected_dw = exact(x, labels, weights, 1.0)
    assert_close(dx, expected_dx, F32)
    assert_close(dw, expected_dw, F32)


@pytest.mark.parametrize(
    ("config", "vjp_config", "labels_dtype"),
    [
        *((*pair, jnp.int32) for pair in zip(CONFIGS, VJP_CONFIGS, strict=True)),
        (*PAIRS[2], jnp.uint8),
        (*PAIRS[2], jnp.int8),
    ],
    ids=str,
)
def test_labels_out_of_range_count_as_no_class(config, vjp_config, labels_dtype):
    x, labels, weights = make((101, 7, 99), F32)
    labels = labels.at[::3].set(-1).at[1::5].set(99).at[2::7].set(120).astype(labels_dtype)
    run = lambda x, weights: pinned(config, vjp_config)(x, labels, weights)
    loss, grads = jax.value_and_grad(run, (0, 1))(x, weights)
    losses, dx, dw = exact(x, labels, weights, 1.0)
    assert_close(loss, losses.sum(), F32)
    assert_close(grads[0], dx, F32)
    assert_close(grads[1], dw, F32)
    reference = tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, implementation="xla")
    assert_close(loss, np.asarray(reference), F32)


@pytest.mark.parametrize("scale", [1e-20, 1e3])
@pytest.mark.parametrize(("config", "vjp_config"), list(zip(CONFIGS, VJP_CONFIGS, strict=True)), ids=str)
def test_tiny_and_large_logits(config, vjp_config, scale):
    x, labels, weights = make(SHAPES[0], F32, scale)
    run = lambda x, weights: pinned(config, vjp_config)(x, labels, weights)
    loss, grads = jax.value_and_grad(run, (0, 1))(x, weights)
    losses, dx, dw = exact(x, labels, weights, 1.0)
    assert_close(loss, losses.sum(), F32)
    # A logit of some 1e3 has an error of some 1e-4 in f32, and so has a probability near a tie.
    assert_close(grads[0], dx, F32, 5e-3)
    assert_close(grads[1], dw, F32, 5e-3)


@pytest.mark.parametrize("config", VJP_CONFIGS[1:], ids=str)
def test_small_probabilities_survive_f16(config):
    x, labels, weights = make((101, 7, 203), jnp.float16)
    run = lambda weights: 1e-2 * pinned(vjp_config=config)(x, labels, weights, reduction="mean")
    _, _, dw = exact(x, labels, weights, 1.0)
    actual = np.asarray(jax.grad(run)(weights), np.float64) * 100 * 101
    np.testing.assert_allclose(actual, dw, atol=2e-3 * np.abs(dw).max())


@pytest.mark.parametrize(("config", "vjp_config"), list(PAIRS), ids=str)
def test_vmap(config, vjp_config):
    made = [make(SHAPES[0], F32, seed=seed) for seed in (1, 2)]
    x, labels, _ = (jnp.stack(parts) for parts in zip(*made, strict=True))
    weights = made[0][2]
    run = lambda x, labels, weights: pinned(config, vjp_config)(x, labels, weights)
    loss, grads = jax.vmap(jax.value_and_grad(run, (0, 2)), in_axes=(0, 0, None))(x, labels, weights)
    for i in range(2):
        losses, dx, dw = exact(x[i], labels[i], weights, 1.0)
        assert_close(loss[i], losses.sum(), F32)
        assert_close(grads[0][i], dx, F32)
        assert_close(grads[1][i], dw, F32)


@pytest.mark.parametrize(("config", "vjp_config"), list(PAIRS), ids=str)
def test_under_shard_map(config, vjp_config):
    x, labels, weights = make(SHAPES[0], F32)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def grad(x, labels, weights):
        loss = lambda x, weights: pinned(config, vjp_config)(x, labels, weights)
        return jax.grad(loss, (0, 1))(x, weights)

    specs = (P("d"), P("d"), P("d"))
    run = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=(P("d"), P("d"))))
    _, dx, dw = exact(x, labels, weights, 1.0)
    for actual, expected in zip(run(x, labels, weights), (dx, dw), strict=True):
        assert_close(actual, expected, F32)


@pytest.mark.parametrize(("config", "dtype"), [(PAIRS[0][0], BF16), (PAIRS[1][0], F32)], ids=str)
def test_without_a_vjp_op_jax_differentiates_the_blocks(config, dtype):
    x, labels, weights = make(SHAPES[0], dtype)
    op = dataclasses.replace(pinned(config), vjp=None)
    grads = jax.grad(lambda x, weights: op(x, labels, weights), (0, 1))(x, weights)
    _, dx, dw = exact(x, labels, weights, 1.0)
    assert_close(grads[0], dx, dtype)
    assert_close(grads[1], dw, dtype)


@pytest.mark.parametrize("implementation", [None, "xla", "xla_chunked", ("xla_chunked", "xla")])
def test_front_function(implementation):
    x, labels, weights = make(SHAPES[0], F32)
    run = lambda x, weights: tokamax.linear_softmax_cross_entropy_loss(
        x, labels, weights, reduction="mean", precision="highest", implementation=implementation
    )
    loss, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(x, weights)
    losses, dx, dw = exact(x, labels, weights, 1 / 101)
    assert_close(loss, losses.mean(), F32)
    assert_close(grads[0], dx, F32)
    assert_close(grads[1], dw, F32)


def abstract(b, h, v, dtype):
    return XlaChunkedLinearSoftmaxCrossEntropyLoss.bind(
        jax.ShapeDtypeStruct((b, h), dtype), jax.ShapeDtypeStruct((b,), jnp.int32), jax.ShapeDtypeStruct((h, v), dtype)
    )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("b", "v"), [(3, 11), (32, 1000), (300, 15261), (2048, 32768)])
def test_spaces(b, v, dtype):
    ba = abstract(b, 64, v, dtype)
    for bound, plain in ((ba, Config()), (ba.op.bind_vjp(ba), VjpConfig())):
        assert bound.default_config == plain
        assert plain in bound.autotuning_configs
        assert len(bound.autotuning_configs) <= 40
        assert b < 64 or len(bound.autotuning_configs) >= 15
        seen = [
            (dataclasses.replace(c, block_b=None, block_v=None), _Split.of(b, c.block_b), _Split.of(v, c.block_v))
            for c in bound.autotuning_configs
        ]
        assert len(set(seen)) == len(seen)  # No two configs split alike.


def test_bound_vjp_arguments_are_those_of_a_gradient():
    x, labels, weights = make(SHAPES[0], BF16)
    ba = abstract(*SHAPES[0], BF16)
    loss = lambda x, weights: tokamax.linear_softmax_cross_entropy_loss(x, labels, weights)
    assert ba.op.bind_vjp(ba) in tokamax.autotuning.get_bound_args(jax.grad(loss, (0, 1)), x, weights)


def test_example_arguments():
    ba = abstract(40, 8, 50, F32)
    _, labels, _ = example_inputs(ba)
    assert 0 <= labels.min() < labels.max() < 50
    lse, out, dout, x, labels, weights = example_inputs(ba.op.bind_vjp(ba))
    logits = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    assert_close(lse, np.log(np.exp(logits).sum(axis=1)), F32)
    assert_close(out, exact(x, labels, weights, 1.0)[0].sum(), F32)
    assert dout == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 2, 3))}, r"x must be an array \[b, h\], got f32\[2,2,3\]; reshape"),
        ({"labels": [0, 1, 2, 3]}, r"labels must be an array \[b\], got list"),
        ({"labels": jnp.array([1, 2])}, "the same b"),
        ({"weights": jnp.ones((5, 3))}, "transpose weights"),
        ({"labels": jnp.ones(4)}, "labels must hold integers, got float32"),
        ({"x": jnp.ones((4, 3), jnp.int32)}, "x must hold floats, got int32"),
        ({"weights": jnp.ones((3, 0))}, "must not be empty"),
        ({"reduction": "none"}, "reduction must be 'sum', 'mean' or None, got 'none'"),
        ({"implementation": "nonsense"}, "implementation of linear_softmax_cross_entropy_loss must be one of"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "xla_chunked"])
def test_wrong_arguments(change, message, implementation):
    right = {"x": jnp.ones((4, 3)), "labels": jnp.array([0, 1, 2, 3]), "weights": jnp.ones((3, 5))}
    with pytest.raises(errors.ArgumentError, match=message):
        tokamax.linear_softmax_cross_entropy_loss(**{"implementation": implementation, **right, **change})
