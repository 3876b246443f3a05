import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tokamax
from tokamax._src import errors
from tokamax._src.op import Op
from toy import TOY_WITH_VJP, Toy, ToyConfig, arrays

OPS = pytest.mark.parametrize("op", [Toy(), TOY_WITH_VJP], ids=["no_vjp", "vjp"])


def keys(f, *args):
    return [repr(ba) for ba in tokamax.autotuning.get_bound_args(f, *args)]


def reference(x, w):
    return x @ w


def loss(op):
    return lambda x, w: jnp.sum(op(x, w) ** 2)


@OPS
def test_call_and_residuals(op):
    x, w = arrays()
    np.testing.assert_allclose(op(x, w), x @ w, rtol=1e-6)
    out, residuals = op(x, w, return_residuals=True)
    np.testing.assert_array_equal(residuals, x)
    np.testing.assert_allclose(op(np.asarray(x), np.asarray(w)), out)


@OPS
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))])
def test_gradients(op, wrap):
    x, w = arrays()
    want = jax.grad(loss(reference), (0, 1))(x, w)
    got = jax.grad(wrap(loss(op)), (0, 1))(x, w)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@OPS
def test_gradient_of_residual_output_calls(op):
    x, w = arrays()
    got = jax.grad(lambda x: op(x, w, return_residuals=True)[0].sum())(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: (x @ w).sum())(x), rtol=1e-6)


@OPS
def test_second_derivative(op):
    x, w = arrays(2, 2, 2)
    want = jax.grad(lambda x: jax.grad(lambda x: loss(reference)(x, w))(x).sum())(x)
    got = jax.grad(lambda x: jax.grad(lambda x: loss(op)(x, w))(x).sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@OPS
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_vmap_and_vmap_of_grad(op, wrap):
    x, w = arrays()
    xs = jnp.stack([x, x + 1, x - 1])
    np.testing.assert_allclose(jax.vmap(wrap(op), (0, None))(xs, w), xs @ w, rtol=1e-5)
    want = jax.vmap(jax.grad(loss(reference), (0, 1)), (0, None))(xs, w)
    got = jax.vmap(wrap(jax.grad(loss(op), (0, 1))), (0, None))(xs, w)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_vmap_axes_are_in_the_key():
    x, w = arrays()
    f = jax.vmap(jax.vmap(Toy(), (None, 1)), (0, None))
    assert keys(f, jnp.stack([x, x, x]), jnp.zeros((4, 7, 6))) == ["toy(x=f32[8,4]{3,_}, w=f32[4,6]{_,7})"]


def test_vmap_axes_of_size_one_are_not_in_the_key():
    x, w = arrays()
    assert keys(jax.vmap(Toy(), (0, None)), x[None], w) == keys(Toy(), x, w)


@OPS
def test_vmap_of_grad_is_captured_with_its_axes(op):
    x, w = arrays()
    found = keys(jax.vmap(jax.grad(loss(op)), (0, None)), jnp.stack([x, x, x]), w)
    assert found[0].startswith("toy(x=f32[8,4]{3}, w=f32[4,6]{_}")
    assert len(found) == (2 if op.vjp else 1)


@OPS
def test_scan(op):
    x, w = arrays()
    xs = jnp.stack([x, x + 1])

    def total(xs, f):
        return jax.lax.scan(lambda c, xi: (c + f(xi, w).sum(), None), 0.0, xs)[0]

    np.testing.assert_allclose(jax.grad(total)(xs, op), jax.grad(total)(xs, reference), rtol=1e-5)


@OPS
def test_shard_map_sees_the_local_shape(op):
    x, w = arrays()
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def f(x, w):
        body = lambda x, w: op(x[0], w)[None]
        return jax.shard_map(body, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"))(x, w).sum()

    want = jax.grad(lambda x: (x @ w).sum())(x)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x[None], w)[0], want, rtol=1e-6)
    assert keys(jax.jit(f), x[None], w)[0].startswith("toy(x=f32[8,4], w=f32[4,6]")


@pytest.mark.parametrize("inside", [True, False], ids=["grad_in_shard_map", "shard_map_in_grad"])
def test_gradient_of_replicated_weights_under_shard_map(inside):
    x, w = arrays()
    op = Toy(vjp=lambda residuals, out, dout, x, w, **kwargs: (dout @ w.T, x.T @ dout))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def sharded(body, out_specs):
        return jax.shard_map(body, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=out_specs)

    if inside:
        got = sharded(lambda x, w: jax.grad(lambda w: op(x[0], w).sum())(w), spec())(x[None], w)
    else:
        got = jax.grad(lambda w: sharded(lambda x, w: op(x[0], w)[None], spec("d"))(x[None], w).sum())(w)
    np.testing.assert_allclose(got, jax.grad(lambda w: (x @ w).sum())(w), rtol=1e-6)


def test_jvp_without_a_vjp_op():
    x, w = arrays()
    _, got = jax.jvp(lambda x: Toy()(x, w), (x,), (x,))
    np.testing.assert_allclose(got, x @ w, rtol=1e-6)


def test_jvp_with_a_vjp_op_is_a_clear_error():
    x, w = arrays()
    with pytest.raises(TypeError, match="forward-mode.*toy.*vjp=None"):
        jax.jvp(lambda x: TOY_WITH_VJP(x, w), (x,), (x,))


def test_calls_outside_of_jit_compile_once():
    x, w = arrays()
    traces = []

    def activation(x):
        traces.append(1)
        return x

    for _ in range(3):
        Toy()(x, w, activation=activation)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "activation",
    [None, jax.nn.relu, lambda x: x * 2, functools.partial(jax.nn.gelu, approximate=False)],
    ids=["none", "named", "lambda", "partial"],
)
def test_function_arguments(activation):
    x, w = arrays()
    want = (x if activation is None else activation(x)) @ w
    np.testing.assert_allclose(Toy()(x, w, activation=activation), want, rtol=1e-5)
    found = tokamax.autotuning.get_bound_args(lambda x, w: Toy()(x, w, activation=activation), x, w)
    assert len(found) == 1
    np.testing.assert_allclose(found[0].as_function()[0]([x, w]), want, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class TreeOp(Op):
    """Takes dicts, tuples, a dtype and a static list."""

    config_cls = ToyConfig

    def _fwd(self, tree, *, dtype, sizes=(), return_residuals, config):
        return sum(jax.tree.leaves(tree)).astype(dtype) + len(sizes), None

    def _get_autotuning_configs(self, ba):
        return {ToyConfig()}


def test_pytrees_dtypes_and_unhashable_static_arguments():
    tree = {"a": jnp.ones((2,)), "b": (jnp.ones((2,)), None)}
    out = TreeOp()(tree, dtype=jnp.bfloat16, sizes=[1, 2])
    assert out.dtype == jnp.bfloat16 and out.tolist() == [4.0, 4.0]
    (ba,) = tokamax.autotuning.get_bound_args(lambda t: TreeOp()(t, dtype=jnp.bfloat16, sizes=[1, 2]), tree)
    assert ba.arguments["sizes"] == [1, 2] and str(ba.arguments["tree"]["a"]) == "f32[2]"
    grad = jax.grad(lambda t: TreeOp()(t, dtype=jnp.float32).sum())(tree)
    assert grad["b"][0].tolist() == [1.0, 1.0]


def test_calling_with_an_abstract_array_says_what_to_do():
    x, w = arrays()
    with pytest.raises(errors.ArgumentError, match=r"op\.bind"):
        Toy()(jax.ShapeDtypeStruct(x.shape, x.dtype), w)


@pytest.mark.parametrize("grads", ["tuple", "dict", "short"])
def test_vjp_may_be_a_function_that_returns_a_tuple_or_a_dict(grads):
    x, w = arrays()

    def vjp(residuals, out, dout, x, w, **kwargs):
        dx, dw = dout @ w.T, x.T @ dout
        return {"tuple": (dx, dw), "dict": {"w": dw}, "short": (dx,)}[grads]

    dx, dw = jax.grad(lambda x, w: Toy(vjp=vjp)(x, w).sum(), (0, 1))(x, w)
    want_x, want_w = jax.grad(lambda x, w: (x @ w).sum(), (0, 1))(x, w)
    np.testing.assert_allclose(dx, 0 * x if grads == "dict" else want_x, rtol=1e-6)
    np.testing.assert_allclose(dw, 0 * w if grads == "short" else want_w, rtol=1e-6)


@pytest.mark.parametrize("wrong", [{"nonsense": 1}, 3, (1, 2, 3)])
def test_wrong_gradients_name_the_op(wrong):
    x, w = arrays()
    op = Toy(vjp=lambda *args, **kwargs: wrong)
    with pytest.raises(errors.ArgumentError, match="vjp of toy must return"):
        jax.grad(lambda x: op(x, w).sum())(x)


def test_an_overridden_bind_works_on_the_class():
    @dataclasses.dataclass(frozen=True)
    class Scaled(Toy):
        def bind(self, x, w, *, scale=2.0, return_residuals=False):
            return super().bind(x, w, scale=scale, return_residuals=return_residuals)

    x, w = arrays()
    assert Scaled.bind(x, w) == Scaled().bind(x, w)
    np.testing.assert_allclose(Scaled()(x, w), 2 * (x @ w), rtol=1e-6)
