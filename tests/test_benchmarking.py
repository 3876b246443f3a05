import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokamax import BenchmarkData, benchmark, standardize_function
from tokamax._src import benchmarking, errors
from tokamax._src.shapes import ArraySpec
from toy import TOY_WITH_VJP, Toy, arrays

MODES = ("forward", "forward_res", "vjp", "forward_and_vjp")


def shapes_of(*values):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]


def product(x, w, *, rows=None, scale=1.0):
    out = jnp.tanh(x) @ w * scale
    return out if rows is None else out[rows]


def run(mode, f, *args, **kwargs):
    """The output of a standardised function, compiled."""
    function, inputs = standardize_function(f, *args, mode=mode, **kwargs)
    return jax.jit(function)(inputs)


def expected_grads(f, *args):
    return jax.grad(lambda *args: f(*args).sum(), tuple(range(len(args))))(*args)


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), a, b)


def test_data_rounds_and_summarises():
    data = BenchmarkData((3, 1.00000049, 2.0))
    assert data.samples_ms == (3.0, 1.0, 2.0)
    assert (data.median_ms, data.min_ms) == (2.0, 1.0)
    assert all(type(ms) is float for ms in data.samples_ms)


@pytest.mark.parametrize("samples", [(), (float("nan"),), (1.0, float("inf")), (-1.0,)])
def test_data_holds_times_only(samples):
    with pytest.raises(errors.ArgumentError, match="finite and not negative"):
        BenchmarkData(samples)


def test_compile_function():
    compiled = benchmarking.compile_function(lambda xs: xs[0] @ xs[1], arrays())
    x, w = arrays()
    np.testing.assert_allclose(compiled.run(), x @ w, rtol=1e-5)
    assert compiled.compile_ms > 0 and compiled.lowering_ms > 0
    assert compiled.peak_memory_bytes is None or compiled.peak_memory_bytes >= x.nbytes + w.nbytes
    assert compiled.measured([1, 2]) == BenchmarkData(
        (1.0, 2.0), compiled.compile_ms, compiled.lowering_ms, compiled.peak_memory_bytes
    )


def test_memory_is_unknown_where_the_compiler_does_not_say():
    assert benchmarking._peak_memory_bytes(object()) is None


def test_benchmark_times_after_a_run_to_warm_up():
    calls = []

    def timer(run, *, bound_args, config, rounds):
        assert (bound_args, config) == (None, None)
        calls.append(np.asarray(run()))
        return [1.5] * rounds

    function, inputs = standardize_function(product, *arrays())
    data = benchmark(function, inputs, iterations=3, timer=timer)
    assert data.samples_ms == (1.5,) * 3 and data.compile_ms > 0
    np.testing.assert_allclose(calls[0], product(*arrays()), rtol=1e-5)


def test_benchmark_with_the_clock():
    data = benchmark(*standardize_function(product, *shapes_of(*arrays())), iterations=2)
    assert len(data.samples_ms) == 2 and data.min_ms > 0


def test_benchmark_checks_its_arguments():
    function, inputs = standardize_function(product, *arrays())
    with pytest.raises(errors.ArgumentError, match="iterations must be at least 1, got 0"):
        benchmark(function, inputs, iterations=0)
    with pytest.raises(errors.UnsupportedError, match="method must be None or one of .*'wallclock'.*got 'cupti'"):
        benchmark(function, inputs, method="cupti")
    with pytest.raises(errors.ArgumentError, match="timer must be"):
        benchmark(function, inputs, timer="sundial")


def test_a_compiled_benchmark_times_the_arrays_that_it_is_given_and_compiles_once():
    traced, seen = [], []

    def f(xs):
        traced.append(xs)
        return xs[0] + 1

    def timer(run, *, bound_args, config, rounds):
        seen.append(float(run()))
        return [1.5] * rounds

    run = benchmarking.compile_benchmark(f, [jnp.float32(1)])
    first, second = (run([jnp.float32(x)], iterations=2, timer=timer) for x in (2, 3))
    assert seen == [3.0, 4.0] and len(traced) == 1
    assert first == second and first.samples_ms == (1.5, 1.5) and first.compile_ms > 0


class TestModes:
    """Each mode, over a plain function, an op, and bound arguments."""

    CALLS = {
        "function": (product, lambda x, w: product(x, w)),
        "op": (Toy(), lambda x, w: x @ w),
        "op_with_vjp": (TOY_WITH_VJP, lambda x, w: x @ w),
        "bound": (lambda x, w: Toy.bind(x, w), lambda x, w: x @ w),
        "bound_with_vjp": (lambda x, w: TOY_WITH_VJP.bind(x, w), lambda x, w: x @ w),
    }

    @pytest.fixture(params=CALLS)
    def case(self, request):
        """Arguments of `standardize_function`, and the function that says what must come out."""
        f, meaning = self.CALLS[request.param]
        return ((f(*arrays()),) if request.param.startswith("bound") else (f, *arrays())), meaning

    def test_forward(self, case):
        arguments, meaning = case
        assert_close(run("forward", *arguments), meaning(*arrays()))

    def test_forward_res_adds_what_the_backward_pass_needs(self, case):
        arguments, meaning = case
        out, residuals = run("forward_res", *arguments)
        assert_close(out, meaning(*arrays()))
        assert residuals and all(isinstance(x, jax.Array) for x in residuals)

    def test_vjp_gives_the_gradients_from_residuals_alone(self, case):
        arguments, meaning = case
        assert_close(run("vjp", *arguments), expected_grads(meaning, *arrays()))

    def test_forward_and_vjp(self, case):
        arguments, meaning = case
        out, grads = run("forward_and_vjp", *arguments)
        assert_close(out, meaning(*arrays()))
        assert_close(grads, expected_grads(meaning, *arrays()))


@pytest.mark.parametrize("mode", MODES)
def test_inputs_of_every_mode_can_be_measured(mode):
    function, inputs = standardize_function(product, *shapes_of(*arrays()), mode=mode)
    assert all(isinstance(x, jax.Array) for x in inputs)
    assert benchmark(function, inputs, iterations=1).min_ms > 0


@pytest.mark.parametrize("mode", MODES)
def test_integer_inputs_and_outputs_take_no_part_in_gradients(mode):
    def best(x, rows):
        return x[rows].max(axis=1), x.argmax(axis=1)

    x, rows = arrays()[0], jnp.array([0, 2])
    out = run(mode, best, x, rows)
    if mode in ("vjp", "forward_and_vjp"):
        (grad,) = out if mode == "vjp" else out[1]
        assert_close(grad, jax.grad(lambda x: best(x, rows)[0].sum())(x))


def test_abstract_arrays_get_values_from_the_seed():
    x, w = shapes_of(*arrays())
    _, first = standardize_function(product, x, w)
    _, again = standardize_function(product, x, w)
    _, other = standardize_function(product, x, w, seed=1)
    assert_close(first, again)
    assert (first[0] != other[0]).any()
    _, bound = standardize_function(Toy.bind(x, w))
    assert_close(bound, standardize_function(Toy.bind(x, w))[1])


def test_keyword_arguments_and_trees():
    x, w = arrays()

    def f(p, *, bias, twice):
        return (p["x"] @ p["w"] + bias) * (2 if twice else 1)

    out = run("forward", f, {"x": x, "w": w}, kwargs={"bias": jnp.ones(6), "twice": True})
    assert_close(out, (x @ w + 1) * 2)


def test_what_is_no_array_is_closed_over():
    function, inputs = standardize_function(product, *arrays(), kwargs={"scale": 3.0, "rows": None})
    assert len(inputs) == 2
    assert_close(function(inputs), product(*arrays(), scale=3.0))


def test_bound_arguments_in_a_vmap():
    x = ArraySpec((8, 4), jnp.float32, (3,))
    w = ArraySpec((4, 6), jnp.float32, (0,))
    function, (x, w) = standardize_function(Toy.bind(x, w))
    assert_close(function([x, w]), x @ w)


@pytest.mark.parametrize(
    ("f", "args", "options", "match"),
    [
        (product, arrays(), {"mode": "backward"}, "mode must be forward.*got 'backward'"),
        (product, arrays()[:1], {}, "must fit f: missing a required argument: 'w'"),
        (product, arrays(), {"kwargs": {"nonsense": 1}}, "must fit f.*nonsense"),
        (3, (), {}, "must fit f.*callable"),
        (lambda i: i + 1, (jnp.arange(3),), {"mode": "vjp"}, "floating-point array to differentiate"),
        (Toy.bind(*arrays()), arrays(), {}, "must come alone"),
        (Toy.bind(*arrays()), (), {"kwargs": {"scale": 2.0}}, "must come alone"),
    ],
)
def test_wrong_arguments_say_what_must_hold(f, args, options, match):
    with pytest.raises(errors.ArgumentError, match=match):
        standardize_function(f, *args, **options)
