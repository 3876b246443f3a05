import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src import capture, errors
from tokamax._src.bound_arguments import SCOPE_PREFIX
from tokamax.autotuning import get_bound_args
from toy import TOY_WITH_VJP, Toy, arrays


def labels(found):
    return [ba.arguments.get("activation") for ba in found]


def test_program_order_and_once_each():
    x, w = arrays()

    @jax.jit
    def inner(x):
        return Toy(flavour="b")(x, w) + Toy(flavour="c")(x, w)

    def f(x):
        first = Toy(flavour="a")(x, w)
        return first + inner(x) + inner(x + 1) + Toy(flavour="d")(x, w) + Toy(flavour="a")(x, w)

    assert [ba.op.flavour for ba in get_bound_args(f, x)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "make", [lambda f: f, jax.jit, lambda f: jax.jit(f).lower(*arrays())], ids=["fn", "jit", "low"]
)
def test_sources(make):
    f = make(lambda x, w: Toy()(x, w))
    args = () if isinstance(f, jax.stages.Lowered) else arrays()
    assert get_bound_args(f, *args) == (Toy.bind(*arrays()),)


def test_keyword_and_static_arguments():
    x, w = arrays()
    found = get_bound_args(lambda x, *, w, mode: Toy()(x, w, scale=len(mode)), x, w=w, mode="abc")
    assert found[0].arguments["scale"] == 3


@pytest.mark.parametrize(
    "text", ["{", '"', "a/b", "\\", "ü{\n}", "x\"}]}'", "tokamax:{}", "#loc1", "@f(", "a\\\\u0040@"]
)
def test_strings_survive(text):
    x, w = arrays()

    class Named(Toy):
        name = "named_for_strings"

        def _fwd(self, x, w, *, text, return_residuals, config):
            return x @ w, None

    def f(x):
        return jax.jit(lambda x: Named()(x, w, text=text))(x)

    found = get_bound_args(f, x)
    assert [ba.arguments["text"] for ba in found] == [text]


@given(st.text())
def test_unescape_undoes_mlir_escapes(text):
    escaped = "".join(
        f"\\{b:02X}" if b in b'"\\' or not 32 <= b < 127 else chr(b) for b in text.encode("utf-8", "replace")
    )
    assert capture.unescape(escaped) == text.encode("utf-8", "replace").decode()


def test_a_function_called_from_many_places_is_visited_once():
    x, w = arrays()

    def chain(f, depth):
        for _ in range(depth):
            f = (lambda g: jax.jit(lambda x: g(x) + g(x + 1)))(f)
        return f

    module = jax.jit(chain(lambda x: Toy()(x, w), 12)).lower(x).as_text(debug_info=True)
    order = list(capture._program_order(module))
    assert len(order) == len(set(order)) <= module.count("\n")
    assert len(capture.keys_in_module(module)) == 1


def test_a_scope_of_the_users_own_that_starts_alike_is_passed_over():
    def f(x, w):
        with jax.named_scope(SCOPE_PREFIX + "not json"):
            return Toy()(x, w)

    assert len(get_bound_args(f, *arrays())) == 1


def test_grad_of_vmap_of_scan():
    x, w = arrays()

    def f(xs):
        body = lambda c, x: (c + TOY_WITH_VJP(x, w).sum(), None)
        return jax.vmap(lambda xs: jax.lax.scan(body, 0.0, xs)[0])(xs).sum()

    found = get_bound_args(jax.grad(f), jnp.zeros((3, 2, *x.shape)))
    assert [ba.op.registered_name() for ba in found] == ["toy", "toy_vjp"]
    assert {ba.vmap_sizes for ba in found} == {(3,)}


def test_wrong_targets_say_what_must_come():
    with pytest.raises(errors.ArgumentError, match="must be a function"):
        get_bound_args(3)
    with pytest.raises(errors.ArgumentError, match="must fit"):
        get_bound_args(lambda x: x)
    with pytest.raises(errors.ArgumentError, match="alone"):
        get_bound_args(jax.jit(lambda x: x).lower(1.0), 2)


def test_a_name_that_stands_within_that_of_an_op():
    """JAX 0.12 writes what a `custom_vmap` inside an op contains so, and an op may consist of nothing else."""
    module = r"""
#loc1 = loc("jit(f)/tokamax:{\22op\22:\22inner\22}"(#loc3))
#loc2 = loc("eval_jaxpr:"(#loc1))
#loc3 = loc("file.py":1:2)
#loc4 = loc("eval_jaxpr:"(#loc2))
module {
  func.func public @main() {
    %0 = stablehlo.iota dim = 0 : tensor<4xi32> loc(#loc4)
  }
}
"""
    assert capture.keys_in_module(module) == [{"op": "inner"}]
