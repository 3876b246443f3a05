"""What only the TPU kernels of ragged dot have: what they take, their spaces, programs for a device that is not here.

Their numbers are tested with those of all implementations, in test_ragged_dot.py.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import tokamax
from tokamax import PallasMosaicTpuRaggedDot, PallasMosaicTpuRaggedDotLhsVjp, PallasMosaicTpuRaggedDotRhsVjp
from tokamax._src import devices, errors
from tokamax._src.inputs import example_inputs
from tokamax._src.ops import tpu
from tokamax._src.ops.ragged_dot import megablox
from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu import Config

KINDS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
# Rows, inputs, outputs, groups of models that people train, and odd ones.
SHAPES = [(8192, 4096, 14336, 8), (4096, 2880, 2880, 32), (131072, 2048, 768, 128), (300, 200, 136, 5), (3, 5, 4, 2)]


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def bind(m, k, n, g, dtype=jnp.bfloat16, **more):
    """Returns the forward pass and both gradients."""
    arrays = array(m, k, dtype=dtype), array(g, k, n, dtype=dtype), array(g, dtype=jnp.int32)
    ba = PallasMosaicTpuRaggedDot.bind(*arrays, **more)
    return ba, *ba.op.bind_vjp(ba)


def run_and_gradients(lhs, rhs, sizes, **more):
    def loss(lhs, rhs):
        return tokamax.ragged_dot(lhs, rhs, sizes, implementation="mosaic", **more).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1))(lhs, rhs)


class TestWrappedKernels:
    """What is relied on of an experimental module of JAX: a change there fails here, and `megablox.py` must follow."""

    @pytest.fixture
    def kernels(self):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

        return gmm, tgmm

    def test_parameters(self, kernels):
        gmm, tgmm = (set(inspect.signature(kernel).parameters) for kernel in kernels)
        used = {"lhs", "rhs", "group_sizes", "preferred_element_type", "tiling", "interpret"}
        assert used | {"transpose_rhs"} <= gmm and used <= tgmm

    def test_tile_of_rows_must_divide_them(self, kernels):
        gmm, _ = kernels
        lhs, rhs, sizes = jnp.ones((20, 8)), jnp.ones((1, 8, 8)), jnp.array([20], jnp.int32)
        with pytest.raises(ValueError, match="must be divisible"):
            gmm(lhs, rhs, sizes, tiling=(16, 8, 8), interpret=True)

    def test_other_dtypes_are_refused(self, kernels):
        gmm, _ = kernels
        lhs, rhs, sizes = jnp.ones((16, 8), jnp.float16), jnp.ones((1, 8, 8), jnp.float16), jnp.array([16], jnp.int32)
        with pytest.raises(ValueError, match="bfloat16 or float32"):
            gmm(lhs, rhs, sizes, tiling=(16, 8, 8), interpret=True)

    @pytest.mark.parametrize("precision", [None, "highest"])
    def test_precision_reaches_the_products(self, precision):
        def run(lhs, rhs):
            return megablox.gmm(lhs, rhs, jnp.array([16]), tiles=(16, 8, 8), out_dtype=jnp.float32, precision=precision)

        text = str(jax.make_jaxpr(run)(jnp.ones((16, 8)), jnp.ones((1, 8, 8))))
        assert ("HIGHEST" in text) == (precision == "highest")


class TestArguments:
    def test_binds_on_the_class_and_on_an_instance(self):
        arrays = array(64, 128), array(4, 128, 256), array(4, dtype=jnp.int32)
        ba = PallasMosaicTpuRaggedDot.bind(*arrays)
        assert ba == PallasMosaicTpuRaggedDot().bind(*arrays)
        assert ba != PallasMosaicTpuRaggedDot(interpret=True).bind(*arrays)
        assert tokamax.autotuning.bound_args_from_json(tokamax.autotuning.bound_args_to_json([ba])) == (ba,)

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64])
    def test_other_dtypes_are_refused(self, dtype):
        with jax.enable_x64(True), pytest.raises(errors.UnsupportedError, match="lhs must hold bf16 or f32"):
            bind(64, 128, 128, 2, dtype)

    @pytest.mark.parametrize("precision", ["high", "bfloat16_3x", ("highest", "default"), "TF32_TF32_F32"])
    def test_other_precisions_are_refused(self, precision):
        with pytest.raises(errors.UnsupportedError, match="precision must be None, 'default' or 'highest'"):
            bind(64, 128, 128, 2, jnp.float32, precision=precision)

    @pytest.mark.parametrize("precision", [None, "default", "highest", jax.lax.Precision.HIGHEST, ("highest",) * 2])
    def test_precisions(self, precision):
        for ba in bind(64, 128, 128, 2, jnp.float32, precision=precision):
            name = tpu.canonical_precision(ba.abstract["precision"], (jnp.float32,))
            assert name == (None if precision in (None, "default") else "highest")

    def test_products_of_16_bits_are_exact_whatever_the_precision(self):
        assert bind(64, 128, 128, 2, precision="high")[0].op is not None

    def test_gradients_that_do_not_fit_are_refused(self):
        with pytest.raises(errors.ArgumentError, match="the same n and g"):
            PallasMosaicTpuRaggedDotLhsVjp.bind(array(64, 100), array(2, 128, 96), array(2, dtype=jnp.int32))
        with pytest.raises(errors.ArgumentError, match="the same rows"):
            PallasMosaicTpuRaggedDotRhsVjp.bind(array(64, 100), array(65, 96), array(2, dtype=jnp.int32))

    def test_bound_gradients_are_those_of_a_program(self):
        ba, *gradients = bind(64, 128, 256, 4)
        with tokamax.config.cross_compile("TPU v5 lite"):
            arrays = array(64, 128), array(4, 128, 256), array(4, dtype=jnp.int32)
            lowered = jax.jit(run_and_gradients).trace(*arrays).lower(lowering_platforms=("tpu",))
            assert tokamax.autotuning.get_bound_args(lowered) == (ba, *gradients)

    def test_example_inputs(self):
        for ba in bind(96, 8, 16, 3):
            sizes = example_inputs(ba)[-1]
            assert sizes.sum() == 96 and len(set(sizes.tolist())) > 1


class TestSpaces:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_default_is_feasible_on_every_generation(self, shape, dtype, kind):
        for ba in bind(*shape, dtype):
            with tokamax.config.cross_compile(kind):
                assert ba.op._is_feasible(ba, ba.default_config)
                assert ba.autotuning_configs
                assert ba.op.vmem_bytes(ba, ba.default_config) <= 12 * 2**20

    def test_default_is_what_people_use(self):
        assert [ba.default_config.tiles for ba in bind(8192, 4096, 14336, 8)] == [(512, 1024, 1024)] * 3
        assert bind(4096, 4096, 4096, 64)[0].default_config.tile_m == 128

    def test_tiles_are_whole_native_tiles_or_the_axis(self):
        ba = bind(4096, 2880, 2880, 32)[0]
        feasible = lambda *tiles: ba.op._is_feasible(ba, Config(*tiles))
        assert feasible(128, 2880, 128) and feasible(128, 128, 2944) and feasible(16, 128, 128)
        assert not feasible(128, 2879, 128) and not feasible(128, 128, 64) and not feasible(8, 128, 128)

    def test_memory_decides(self):
        ba = bind(8192, 4096, 4096, 8)[0]
        for kind, fits in (("TPU v5 lite", False), ("TPU v6 lite", True), ("TPU7x", True), ("TPU v9", False)):
            with tokamax.config.cross_compile(kind):
                assert ba.op._is_feasible(ba, Config(1024, 2048, 1024)) == fits
                assert not ba.op._is_feasible(ba, Config(1024, 4096, 4096))

    def test_spaces_hold_more_on_a_device_with_more_memory(self):
        ba = bind(8192, 4096, 14336, 8)[0]
        sizes = {}
        for kind in ("TPU v5 lite", "TPU v6 lite"):
            with tokamax.config.cross_compile(kind):
                sizes[kind] = len(ba.autotuning_configs)
        assert 100 < sizes["TPU v5 lite"] < sizes["TPU v6 lite"] < 400

    def test_what_the_compiler_took_is_feasible(self):
        """Configs that libtpu 0.0.52 compiled though their blocks, all counted twice, exceed the limit."""
        with tokamax.config.cross_compile("TPU v5 lite"):
            forward, dlhs, _ = bind(4096, 2880, 2880, 32)
            assert forward.op._is_feasible(forward, Config(512, 2880, 768))
        with tokamax.config.cross_compile("TPU v6 lite"):
            assert dlhs.op._is_feasible(dlhs, Config(1024, 1536, 2880))


class TestWithoutTheDevice:
    def test_named_implementation_says_why_it_cannot_run(self):
        arrays = jnp.ones((4, 2)), jnp.ones((2, 2, 3)), jnp.array([2, 2])
        with pytest.raises(
            NotImplementedError, match=r"'mosaic' of ragged_dot must run on cpu.* \['xla', 'xla_chunked'\]"
        ):
            tokamax.ragged_dot(*arrays, implementation="mosaic")
        with pytest.raises(NotImplementedError, match="must run these arguments on cpu.*; mosaic: .*; mosaic: "):
            tokamax.ragged_dot(*arrays, implementation=("mosaic", "mosaic"))

    def test_none_takes_the_kernel_where_it_runs(self):
        arrays = array(64, 128), array(4, 128, 256), array(4, dtype=jnp.int32)

        def ops(*arrays, **more):
            run = lambda *arrays: tokamax.ragged_dot(*arrays, **more)
            lowered = jax.jit(run).trace(*arrays).lower(lowering_platforms=("tpu",))
            return [type(ba.op).__name__ for ba in tokamax.autotuning.get_bound_args(lowered)]

        assert ops(*arrays) == ["XlaChunkedRaggedDot"]
        with tokamax.config.cross_compile("TPU v6 lite"):
            assert ops(*arrays) == ["PallasMosaicTpuRaggedDot"]
            assert ops(*arrays, precision="high") == ["PallasMosaicTpuRaggedDot"]
            halves = array(64, 128, dtype=jnp.float16), array(4, 128, 256, dtype=jnp.float16), arrays[2]
            assert ops(*halves) == ["XlaChunkedRaggedDot"]
        with tokamax.config.cross_compile("NVIDIA H200"):
            assert ops(*arrays) == ["XlaChunkedRaggedDot"]
        with tokamax.config.cross_compile(True):
            assert ops(*arrays) == ["XlaChunkedRaggedDot"]
            assert ops(*arrays, implementation="mosaic") == ["PallasMosaicTpuRaggedDot"]

    def test_functions_are_traced_again_for_another_device(self):
        traced = []

        @jax.jit
        def f(x):
            traced.append(devices.device_kind())
            return x

        for kind in (False, "TPU v5 lite", "TPU v6 lite", "TPU v5 lite", False):
            with tokamax.config.cross_compile(kind):
                f(jnp.ones(()))
        assert traced == [devices.device_kind(), "TPU v5 lite", "TPU v6 lite"]

    def test_lowers_and_exports_for_tpu(self):
        arrays = array(64, 128), array(4, 128, 256), array(4, dtype=jnp.int32)
        make = export.export(
            jax.jit(run_and_gradients), platforms=["tpu"], disabled_checks=tokamax.DISABLE_JAX_EXPORT_CHECKS
        )
        with tokamax.config.cross_compile("TPU v5 lite"):
            exported = make(*arrays)
        assert exported.platforms == ("tpu",)
        assert [aval.shape for aval in exported.out_avals] == [(), (64, 128), (4, 128, 256)]
        assert exported.mlir_module().count("tpu_custom_call") >= 3
        pytest.importorskip("flatbuffers")
        again = export.deserialize(exported.serialize())
        assert (again.platforms, again.out_avals) == (exported.platforms, exported.out_avals)

    def test_plain_ops_export_as_they_are(self):
        run = jax.jit(lambda *arrays: tokamax.ragged_dot(*arrays))
        arrays = jnp.ones((6, 2)), jnp.ones((2, 2, 3)), jnp.array([2, 4])
        exported = export.export(run)(*arrays)
        np.testing.assert_array_equal(exported.call(*arrays), run(*arrays))

    def test_cannot_be_measured_here(self):
        result = tokamax.autotune(list(bind(64, 128, 256, 4)), progress_bar=False)
        assert [entry.best for entry in result.entries] == [None] * 3
        for entry in result.entries:
            assert "UnsupportedError" in entry.error and "does not run on cpu" in entry.error

    def test_nothing_is_measured_for_a_device_that_is_not_here(self):
        with tokamax.config.cross_compile("TPU v5 lite"):
            with pytest.raises(errors.ArgumentError, match="cross_compile must be off to measure"):
                tokamax.autotune(bind(64, 128, 256, 4)[0])

    def test_shard_map_needs_to_be_told_not_to_check(self):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        op = PallasMosaicTpuRaggedDot(interpret=True)
        arrays = jnp.ones((32, 8)), jnp.ones((2, 8, 8)), jnp.array([20, 12])
        specs = {"mesh": mesh, "in_specs": (P("x"), P("x"), P("x")), "out_specs": P("x")}
        out = jax.jit(jax.shard_map(op, **specs, check_vma=False))(*arrays)
        np.testing.assert_allclose(out, 8.0)
        with pytest.raises(errors.UnsupportedError, match="check_vma=False"):
            jax.jit(jax.shard_map(op, **specs))(*arrays)


def test_measured_implementations_compete(monkeypatch):
    """On a device on which several tunable implementations run, None takes the fastest measured one."""
    from tokamax._src import bound_arguments

    times = {}
    monkeypatch.setattr(
        type(bound_arguments.get_runtime()), "measured_ms", lambda self, ba: times.get(type(ba.op).__name__)
    )
    arrays = array(64, 128), array(4, 128, 256), array(4, dtype=jnp.int32)

    def chosen():
        run = lambda *arrays: tokamax.ragged_dot(*arrays)
        with tokamax.config.cross_compile("TPU v5 lite"):
            lowered = jax.jit(run).trace(*arrays).lower(lowering_platforms=("tpu",))
        return [type(ba.op).__name__ for ba in tokamax.autotuning.get_bound_args(lowered)]

    assert chosen() == ["PallasMosaicTpuRaggedDot"]
    times["XlaChunkedRaggedDot"] = 1.0
    assert chosen() == ["PallasMosaicTpuRaggedDot"]  # It was not measured: nobody knows that it is slower.
    times["PallasMosaicTpuRaggedDot"] = 2.0
    assert chosen() == ["XlaChunkedRaggedDot"]
    times["PallasMosaicTpuRaggedDot"] = 0.5
    assert chosen() == ["PallasMosaicTpuRaggedDot"]
