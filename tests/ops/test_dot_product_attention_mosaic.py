"""What only the TPU kernels of attention have: what they take, their spaces, programs for a device that is not here.

Their numbers are tested with those of all implementations, in test_dot_product_attention.py.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import tokamax
from tokamax import PallasMosaicTpuAttention, PallasMosaicTpuAttentionVjp
from tokamax._src import errors
from tokamax._src.inputs import example_inputs
from tokamax._src.ops.dot_product_attention.pallas_mosaic_tpu import Config, VjpConfig
from tokamax._src.ops.dot_product_attention.splash import Window

KINDS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def bind(b, t, s, n, k, h, dtype=jnp.bfloat16, **more):
    """Returns the forward pass and the gradient."""
    q, kv = array(b, t, n, h, dtype=dtype), array(b, s, k, h, dtype=dtype)
    ba = PallasMosaicTpuAttention.bind(q, kv, kv, **more)
    return ba, ba.op.bind_vjp(ba)


def value_and_gradients(q, k, v, **more):
    def loss(q, k, v):
        return tokamax.dot_product_attention(q, k, v, implementation="mosaic", **more).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


class TestWrappedKernels:
    """What is relied on of an experimental module of JAX: a change there fails here, and `splash.py` must follow."""

    @pytest.fixture
    def module(self):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        return splash_attention_kernel

    def test_private_backward_pass_has_the_parameters_that_are_given(self, module):
        names = list(inspect.signature(module._splash_attention_bwd).parameters)
        assert names == [
            "save_residuals",
            "mask_value",
            "is_mqa",
            "block_sizes",
            "residual_checkpoint_name",
            "mask_function",
            "attn_logits_soft_cap",
            "interpret",
            "res",
            "do",
        ]

    def test_hidden_logits_are_told_from_real_ones(self, module):
        assert module.DEFAULT_MASK_VALUE < -1e38

    def test_block_sizes(self, module):
        fields = inspect.signature(module.BlockSizes).parameters
        assert {"block_q", "block_kv", "block_kv_compute"} <= set(fields)
        assert {"block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"} <= set(fields)
        assert "use_fused_bwd_kernel" in fields


def seen(window, t, s):
    rows, columns = np.arange(t)[:, None], np.arange(s)[None]
    left = True if window.left is None else columns >= rows - window.left
    right = True if window.right is None else columns <= rows + window.right
    return np.broadcast_to(left & np.ones((t, s), bool) & right, (t, s))


@pytest.mark.parametrize("left", [None, -9, -3, 0, 2, 30])
@pytest.mark.parametrize("right", [None, -9, -2, 0, 3, 30])
@pytest.mark.parametrize(("t", "s"), [(1, 5), (5, 8), (8, 5), (7, 7), (5, 1)])
def test_windows(left, right, t, s):
    window = Window(left, right)
    mask = seen(window, t, s)
    assert window.hides_all(t, s) == (not mask.any())
    assert window.may_hide_a_row(t, s) == (not mask.any(1).all())
    hidden = not seen(window, t, s + 4)[:, s:].any()
    assert window.hides_from(t, s) == hidden if left is None else hidden or not window.hides_from(t, s)


class TestArguments:
    def test_binds_on_the_class_and_on_an_instance(self):
        q = k = v = array(1, 256, 4, 64)
        ba = PallasMosaicTpuAttention.bind(q, k, v)
        assert ba == PallasMosaicTpuAttention().bind(q, k, v)
        assert ba != PallasMosaicTpuAttention(interpret=True).bind(q, k, v)
        assert tokamax.autotuning.bound_args_from_json(tokamax.autotuning.bound_args_to_json([ba])) == (ba,)

    @pytest.mark.parametrize("name", ["bias", "mask"])
    def test_bias_and_mask_are_refused(self, name):
        given = {name: array(1, 1, 256, 256, dtype=jnp.bool_ if name == "mask" else jnp.float32)}
        with pytest.raises(
            NotImplementedError, match=f"{name} must be None for the Mosaic TPU kernel, got .*xla_chunked"
        ):
            bind(1, 256, 256, 2, 2, 64, **given)

    def test_other_dtypes_are_refused(self):
        with pytest.raises(NotImplementedError, match="query must hold bf16 or f32"):
            bind(1, 256, 256, 2, 2, 64, jnp.float16)

    def test_a_window_that_hides_all_is_refused(self):
        op = PallasMosaicTpuAttention(interpret=True)
        q = jnp.ones((1, 8, 1, 8))
        with pytest.raises(NotImplementedError, match="some query must see a key"):
            op(q, q, q, local_window_size=(-20, 30))

    def test_residuals_of_another_implementation_are_refused(self):
        ba, vjp = bind(1, 256, 256, 2, 2, 64)
        arguments = dict(vjp.arguments) | {"residuals": (array(1, 2, 256), array(1, 2, 256))}
        with pytest.raises(errors.ArgumentError, match="residuals must be one f32"):
            PallasMosaicTpuAttentionVjp.bind(**arguments)

    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"is_causal": True, "logits_soft_cap": 20.0},
            {"key_value_seq_lengths": np.array([3, 4], np.int32)},
            {"query_segment_ids": np.zeros((2, 64), np.int32), "key_value_segment_ids": np.zeros((2, 96), np.int32)},
        ],
        ids=lambda more: "-".join(more),
    )
    def test_bound_gradient_is_that_of_a_program(self, more):
        bound = bind(2, 64, 96, 4, 2, 32, **more)
        arrays = array(2, 64, 4, 32), array(2, 96, 2, 32), array(2, 96, 2, 32)
        with tokamax.config.cross_compile("TPU v5 lite"):
            run = jax.jit(lambda *arrays: value_and_gradients(*arrays, **more))
            lowered = run.trace(*arrays).lower(lowering_platforms=("tpu",))
            assert tokamax.autotuning.get_bound_args(lowered) == bound

    def test_example_inputs_are_those_of_a_forward_pass(self):
        op = PallasMosaicTpuAttention(interpret=True)
        q = array(1, 64, 2, 16, dtype=jnp.float32)
        ids = array(1, 64, dtype=jnp.int32)
        ba = op.bind(q, q, q, query_segment_ids=ids, key_value_segment_ids=ids)
        *_, k_ids, q_ids = example_inputs(ba)
        assert len(set(np.asarray(q_ids).ravel().tolist())) > 1
        residuals, out, dout, q, k, v, k_ids, q_ids = example_inputs(op.bind_vjp(ba))
        more = {"query_segment_ids": q_ids, "key_value_segment_ids": k_ids}
        expected = op.with_config(Config())(q, k, v, return_residuals=True, **more)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), (out, residuals), expected)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Config(100), "block_q must be a positive multiple of 128, got 100"),
            (lambda: Config(128, 384, 256), "block_kv_compute must divide block_kv=384, got 256"),
            (lambda: VjpConfig(block_kv_dkv=256, block_kv_dkv_compute=512), "block_kv_dkv_compute must divide"),
            (lambda: VjpConfig(block_q_dq=None), "must both be set or both be None"),
        ],
    )
    def test_wrong_configs(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


class TestSpaces:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "shape",
        [(4096, 4096, 32, 8, 128), (1500, 700, 8, 8, 80), (8192, 8192, 8, 1, 256), (1, 4096, 8, 8, 128)],
        ids=str,
    )
    def test_default_is_feasible_on_every_generation(self, shape, kind):
        for dtype in (jnp.bfloat16, jnp.float32):
            with tokamax.config.cross_compile(kind):
                for ba in bind(1, *shape, dtype):
                    assert ba.default_config in ba.autotuning_configs
                    assert 3 <= len(ba.autotuning_configs) <= 100

    def test_default_is_what_people_use(self):
        forward, vjp = bind(1, 4096, 4096, 32, 8, 128)
        assert forward.default_config == Config(512, 512, 512)
        assert vjp.default_config == VjpConfig(512, 512, 512, 512, 512)
        assert bind(1, 200, 1000, 4, 4, 64)[0].default_config == Config(256, 512, 512)

    def test_spaces_hold_one_and_two_kernels_for_the_gradient(self):
        configs = bind(1, 4096, 4096, 32, 8, 128)[1].autotuning_configs
        fused = [config for config in configs if config.block_q_dq is None]
        assert 10 < len(fused) < len(configs) - 10

    def test_memory_decides(self):
        ba, vjp = bind(1, 8192, 8192, 8, 8, 256)
        large = Config(2048, 4096, 2048)
        assert not ba.op._is_feasible(ba, large)
        with tokamax.config.cross_compile("TPU v6 lite"):
            assert ba.op._is_feasible(ba, large)
            assert not vjp.op._is_feasible(vjp, VjpConfig(4096, 4096, 4096))
            assert not vjp.op._is_feasible(vjp, VjpConfig(128, 128, 128, 4096, 4096))


class TestWithoutTheDevice:
    def test_named_implementation_says_why_it_cannot_run(self):
        q = jnp.ones((1, 8, 1, 8))
        with pytest.raises(NotImplementedError, match="'mosaic' of dot_product_attention must run on cpu"):
            tokamax.dot_product_attention(q, q, q, implementation="mosaic")
        with tokamax.config.cross_compile("TPU v5 lite"), pytest.raises(NotImplementedError, match="bias must be None"):
            tokamax.dot_product_attention(q, q, q, bias=jnp.ones((8, 8)), implementation="mosaic")

    def test_what_the_kernel_does_not_take_goes_to_the_next(self):
        q = array(1, 128, 2, 64)

        def ops(**more):
            run = jax.jit(lambda q: tokamax.dot_product_attention(q, q, q, **more))
            lowered = run.trace(q).lower(lowering_platforms=("tpu",))
            return [type(ba.op).__name__ for ba in tokamax.autotuning.get_bound_args(lowered)]

        with tokamax.config.cross_compile("TPU v6 lite"):
            assert ops(is_causal=True) == ["PallasMosaicTpuAttention"]
            assert ops(mask=np.ones((1, 1, 128, 128), bool)) == ["XlaChunkedDotProductAttention"]
            ids = np.zeros((1, 128), np.int32)
            more = {"query_segment_ids": ids, "key_value_segment_ids": ids}
            assert ops(**more) == ["PallasMosaicTpuAttention"]
            assert ops(**more, implementation="xla_chunked") == ["XlaChunkedDotProductAttention"]

    def test_lowers_and_exports_for_tpu(self):
        run = jax.jit(lambda *arrays: value_and_gradients(*arrays, is_causal=True))
        make = export.export(run, platforms=["tpu"], disabled_checks=tokamax.DISABLE_JAX_EXPORT_CHECKS)
        with tokamax.config.cross_compile("TPU v5 lite"):
            exported = make(array(1, 256, 4, 64), array(1, 300, 2, 64), array(1, 300, 2, 64))
        assert exported.platforms == ("tpu",)
        assert [aval.shape for aval in exported.out_avals] == [(), (1, 256, 4, 64), (1, 300, 2, 64), (1, 300, 2, 64)]
        assert exported.mlir_module().count("tpu_custom_call") >= 3

    def test_cannot_be_measured_here(self):
        result = tokamax.autotune(list(bind(1, 256, 256, 2, 2, 64)), progress_bar=False)
        assert [entry.best for entry in result.entries] == [None] * 2
        for entry in result.entries:
            assert "UnsupportedError" in entry.error and "does not run on cpu" in entry.error

    def test_shard_map_needs_to_be_told_not_to_check(self):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        op = PallasMosaicTpuAttention(interpret=True)
        q = jnp.ones((2, 8, 1, 8))
        specs = {"mesh": mesh, "in_specs": (P("x"),) * 3, "out_specs": P("x")}
        out = jax.jit(jax.shard_map(op, **specs, check_vma=False))(q, q, q)
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)
        with pytest.raises(errors.UnsupportedError, match="check_vma=False"):
            jax.jit(jax.shard_map(op, **specs))(q, q, q)


def test_other_implementations_of_a_call(monkeypatch):
    """`all_implementations` takes those that can run the arguments, and folds segments into the mask where needed."""
    monkeypatch.setattr(PallasMosaicTpuAttention, "supported_on", lambda self, device: True)
    q, ids = array(1, 64, 2, 16), array(1, 64, dtype=jnp.int32)
    plain = tokamax.XlaChunkedDotProductAttention.bind(q, q, q)
    names = lambda ba: [type(other.op).__name__ for other in tokamax._src.api.implementations(ba)]
    assert "PallasMosaicTpuAttention" in names(plain)
    masked = tokamax.XlaChunkedDotProductAttention.bind(q, q, q, mask=array(1, 1, 64, 64, dtype=jnp.bool_))
    assert "PallasMosaicTpuAttention" not in names(masked)
    ba = PallasMosaicTpuAttention.bind(q, q, q, query_segment_ids=ids, key_value_segment_ids=ids)
    (chunked,) = [b for b in tokamax._src.api.implementations(ba) if type(b.op).__name__.startswith("XlaChunked")]
    assert chunked.abstract["mask"].shape == (1, 1, 64, 64)
