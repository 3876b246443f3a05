"""What the documentation of openxla/tokamax shows for autotuning, files, benchmarks and profiles: the same calls, here.

Written from its README and its pages on basic usage, autotuning, benchmarking and supported ops, with small shapes.
Only imports differ. What it shows and we do not have (`layer_norm`, GPU kernels and their timers) stands in
docs/migrating.md; what can be said of it here is that it is refused in words.
"""

import contextlib
import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import tokamax
from tokamax import PallasMosaicTpuAttention, PallasMosaicTpuRaggedDot

SCRIPT = pathlib.Path(tokamax.__file__).parent / "_src" / "tools" / "xplane_to_bound_args.py"


# These tests are about the words, not the figures.
pytestmark = pytest.mark.usefixtures("one_round")


def loss(x, scale):
    """Two calls of attention under one scale, as in its first example."""
    x = tokamax.dot_product_attention(x * scale, x, x, implementation="xla_chunked")
    x = tokamax.dot_product_attention(x, x, x, implementation=None)
    return jnp.sum(x)


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (1, 64, 2, 16), dtype), jnp.ones((16,), dtype)


def ragged():
    return {"lhs": jnp.ones((8, 8)), "rhs": jnp.ones((2, 8, 8)), "group_sizes": jnp.array([3, 5])}


def sources(f, *args, **kwargs):
    return {op["source"] for op in tokamax.explain(f, *args, **kwargs).to_dict()["ops"]}


class TestBasicUsage:
    def test_a_jitted_gradient_is_autotuned_and_runs_inside_its_result(self):
        f_grad = jax.jit(jax.grad(loss))
        x, scale = inputs(jnp.bfloat16)
        out = f_grad(x, scale)
        autotune_result: tokamax.AutotuningResult = tokamax.autotune(f_grad, x, scale)
        with autotune_result:
            out_autotuned = f_grad(x, scale)
            assert sources(f_grad, x, scale) == {"exact"}
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out.astype(float), out_autotuned.astype(float), atol=0.1)
        autotune_result_json: str = autotune_result.dumps()
        again = tokamax.AutotuningResult.loads(autotune_result_json)
        assert again.overlay == autotune_result.overlay

    def test_implementations_by_name_by_preference_and_none(self):
        x, _ = inputs()
        plain = tokamax.dot_product_attention(x, x, x, implementation="xla")
        for implementation in (None, "xla_chunked", ["mosaic", "triton", "xla"]):
            out = tokamax.dot_product_attention(x, x, x, implementation=implementation)
            np.testing.assert_allclose(out, plain, rtol=1e-5)
        for refused in ("mosaic", "triton"):
            with pytest.raises(NotImplementedError, match=f"implementation.*'{refused}'"):
                tokamax.dot_product_attention(x, x, x, implementation=refused)
        with pytest.raises(ValueError, match="must be one of .*got 'tritn'"):
            tokamax.dot_product_attention(x, x, x, implementation=["tritn", "xla"])

    def test_an_op_of_the_user_s_own_overrides_the_search_space(self):
        @dataclasses.dataclass(frozen=True)
        class Config:
            repeats: int

        @dataclasses.dataclass(frozen=True)
        class Own(tokamax.Op):
            config_cls = Config

            def _fwd(self, x, *, return_residuals, config):
                return jnp.concatenate([part * 2 for part in jnp.split(x, config.repeats)]), None

            def _get_autotuning_configs(self, ba):
                return {Config(1), Config(2)}

            def _get_heuristics_config(self, ba):
                return Config(2)

        (entry,) = tokamax.autotune([Own().bind(jnp.ones(4))]).entries
        assert set(entry.outcomes) == {Config(1), Config(2)} and entry.default == Config(2)

    def test_a_gradient_is_exported_and_called_after_a_round_trip(self):
        f_grad = jax.jit(jax.grad(loss))
        x, scale = inputs()
        specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, scale)]
        exported = export.export(f_grad, disabled_checks=tokamax.DISABLE_JAX_EXPORT_CHECKS)(*specs)
        loaded = export.deserialize(exported.serialize())
        np.testing.assert_allclose(loaded.call(x, scale), f_grad(x, scale), rtol=1e-5)


class TestAutotuning:
    def test_a_function_with_positional_arguments(self):
        args = tuple(ragged().values())
        autotune_result: tokamax.AutotuningResult = tokamax.autotune(tokamax.ragged_dot, *args)
        with autotune_result:
            tokamax.ragged_dot(*args)
            assert sources(tokamax.ragged_dot, *args) == {"exact"}

    def test_a_function_with_keyword_arguments_through_bound_arguments_or_directly(self):
        bound_args = tokamax.autotuning.get_bound_args(tokamax.ragged_dot, **ragged())
        autotune_result = tokamax.autotune(bound_args)
        with autotune_result:
            tokamax.ragged_dot(**ragged())
            assert sources(tokamax.ragged_dot, **ragged()) == {"exact"}
        directly = tokamax.autotune(tokamax.ragged_dot, **ragged())
        assert directly.overlay == autotune_result.overlay

    def test_a_pullback_brings_the_vjp_ops(self):
        args = ragged()
        f = lambda lhs, rhs: tokamax.ragged_dot(lhs, rhs, args["group_sizes"]).sum()
        result = tokamax.autotune(jax.grad(f), args["lhs"], args["rhs"])
        assert [type(entry.bound_args.op) for entry in result.entries] == [
            tokamax.XlaChunkedRaggedDot,
            tokamax.XlaChunkedRaggedDotVjp,
        ]

    def test_ops_for_tpu_are_bound_on_an_instance_and_tuned_in_one_list(self):
        q, _ = inputs()
        ragged_dot_ba = PallasMosaicTpuRaggedDot().bind(*ragged().values())
        attention_ba = PallasMosaicTpuAttention().bind(q, q, q)
        autotune_result: tokamax.AutotuningResult = tokamax.autotune([ragged_dot_ba, attention_ba])
        assert [entry.bound_args for entry in autotune_result.entries] == [ragged_dot_ba, attention_ba]
        assert all("does not run on cpu" in entry.error for entry in autotune_result.entries)  # None is measured here.
        with autotune_result:
            tokamax.ragged_dot(**ragged())

    def test_results_are_read_from_open_files_and_merged(self, tmp_path):
        for n, f in enumerate((tokamax.ragged_dot, lambda lhs, rhs, group_sizes: (lhs @ rhs[0]).sum())):
            with open(tmp_path / f"{n}.json", "w") as file:
                tokamax.autotune(f, **ragged()).dump(file)
        with open(tmp_path / "0.json") as file_1, open(tmp_path / "1.json") as file_2:
            merged_results = tokamax.AutotuningResult.load(file_1) | tokamax.AutotuningResult.load(file_2)
        assert len(merged_results) == 1
        with merged_results:
            assert sources(tokamax.ragged_dot, **ragged()) == {"exact"}

    def test_the_right_side_of_a_merge_wins(self):
        first = tokamax.autotune(tokamax.ragged_dot, **ragged())
        second = tokamax.autotune(tokamax.ragged_dot, **ragged(), ignore_cache=True)
        assert (first | second).entries[0] is second.entries[0]

    def test_from_a_profile_through_the_script_to_a_tuning(self, tmp_path):
        f = jax.jit(tokamax.ragged_dot)
        jax.block_until_ready(f(**ragged()))
        with jax.profiler.trace(tmp_path):
            jax.block_until_ready(f(**ragged()))
        (xplane,) = tmp_path.rglob("*.xplane.pb")
        out = tmp_path / "bound_args.json"
        words = [sys.executable, "-P", str(SCRIPT), f"--xplane_file={xplane}", f"--output_file={out}"]
        subprocess.run(words, check=True, timeout=120, cwd=tmp_path)
        bound_args = tokamax.autotuning.bound_args_from_json_file(str(out))
        assert [ba.op.registered_name() for ba in bound_args] == ["XlaChunkedRaggedDot"]
        with tokamax.autotune(bound_args):
            assert sources(tokamax.ragged_dot, **ragged()) == {"exact"}

    @pytest.mark.parametrize(
        ("fallback", "source"), [("heuristics", "heuristic"), ("autotune", "tuned"), ("error", None)]
    )
    def test_what_to_do_for_a_shape_that_was_never_tuned(self, fallback, source):
        ba = tokamax.XlaChunkedRaggedDot().bind(*ragged().values())
        refused = pytest.raises(LookupError) if source is None else contextlib.nullcontext()
        with tokamax.config.cost_model("off"), tokamax.config.autotuning_cache_miss_fallback(fallback), refused:
            assert ba.choose_config().source == source


class TestBenchmarking:
    def test_standardize_and_benchmark(self):
        x, scale = inputs()
        f_std, args = tokamax.standardize_function(loss, kwargs={"x": x, "scale": scale})
        bench: tokamax.BenchmarkData = tokamax.benchmark(f_std, args)
        assert len(bench.samples_ms) == 5 and bench.median_ms > 0
        assert len(tokamax.benchmark(f_std, args, iterations=10).samples_ms) == 10

    def test_the_same_names_in_the_module_and_a_compiled_benchmark(self):
        x, scale = inputs()
        f_grad = jax.jit(jax.grad(loss))
        f_std, args = tokamax.benchmarking.standardize_function(f_grad, kwargs={"x": x, "scale": scale})
        run = tokamax.benchmarking.compile_benchmark(f_std, args)
        bench: tokamax.benchmarking.BenchmarkData = run(args)
        assert len(bench.samples_ms) == 5 and bench.compile_ms > 0
        assert len(run(args, iterations=10, method=None).samples_ms) == 10

    def test_methods(self):
        f_std, args = tokamax.standardize_function(lambda x: jnp.sin(x), kwargs={"x": jnp.ones(3)})
        for method in (None, "wallclock"):
            assert tokamax.benchmark(f_std, args, method=method, iterations=2).median_ms > 0
        for method in ("cupti", "xprof", "hermetic_xprof", "xprof_hermetic"):
            with pytest.raises(NotImplementedError, match=f"method must be .*got '{method}'"):
                tokamax.benchmark(f_std, args, method=method)

    @pytest.mark.parametrize("mode", ["forward", "forward_res", "vjp", "forward_and_vjp"])
    def test_abstract_arguments_are_initialised_and_every_mode_runs(self, mode):
        x, scale = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs())
        f_std, args = tokamax.standardize_function(loss, kwargs={"x": x, "scale": scale}, mode=mode)
        assert all(isinstance(array, jax.Array) for array in args)
        assert jax.tree.leaves(jax.jit(f_std)(args))
        assert tokamax.benchmark(f_std, args, iterations=1).median_ms > 0


def test_what_is_not_here_says_so():
    args = ragged()
    with pytest.raises(NotImplementedError, match="group_offset"):
        tokamax.ragged_dot(**args, group_offset=jnp.array([0]))
    missing = ("layer_norm", "gated_linear_unit", "triangle_multiplication", "QuantizedArray", "ragged_dot_general")
    assert not [name for name in missing if hasattr(tokamax, name)]
    page = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "migrating.md").read_text()
    assert all(f"`{name}`" in page for name in missing)
