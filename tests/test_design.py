"""The snippets of the design's first section, as a user types them.

The profile tool and `tokamax report` have tests of their own, and so have the ops for TPU, which cannot be measured on
a CPU.
"""

import jax
import jax.numpy as jnp
import pytest

import tokamax

# These tests are about the words, not the figures.
pytestmark = pytest.mark.usefixtures("one_round")


def f(q, k, v):
    return tokamax.dot_product_attention(q, k, v, is_causal=True).sum()


def inputs(length=70):
    return tuple(jnp.ones((1, length, 2, 16)) * i for i in (0.1, 0.2, 0.3))


def test_autotune_with_and_explain():
    args = inputs()
    result = tokamax.autotune(f, *args)
    with result:
        out = f(*args)
        told = tokamax.explain(f, *args)
    assert jnp.isfinite(out)
    assert [item["source"] for item in told.to_dict()["ops"]] == ["exact"]


def test_gradients_tune_the_vjp_op():
    result = tokamax.autotune(jax.grad(f), *inputs())
    names = [e.bound_args.op.registered_name() for e in result.entries]
    assert names == ["XlaChunkedDotProductAttention", "XlaChunkedDotProductAttentionVjp"]
    assert all(e.error is None for e in result.entries)


def test_binding_on_the_class():
    x, y, group_sizes = jnp.ones((24, 8)), jnp.ones((3, 8, 8)), jnp.array([8, 8, 8])
    q, k, v = inputs()
    result = tokamax.autotune(
        [tokamax.XlaChunkedRaggedDot.bind(x, y, group_sizes), tokamax.XlaChunkedDotProductAttention.bind(q, k, v)]
    )
    assert len(result) == 2


def test_ops_for_tpu_bind_on_the_class_and_say_that_they_cannot_be_measured_here():
    x, y, group_sizes = jnp.ones((24, 8)), jnp.ones((3, 8, 8)), jnp.array([8, 8, 8])
    q, k, v = inputs()
    result = tokamax.autotune(
        [tokamax.PallasMosaicTpuRaggedDot.bind(x, y, group_sizes), tokamax.PallasMosaicTpuAttention.bind(q, k, v)]
    )
    assert [e.error.split(" on ")[0] for e in result.entries] == [
        "UnsupportedError: PallasMosaicTpuRaggedDot does not run",
        "UnsupportedError: PallasMosaicTpuAttention does not run",
    ]


def test_bound_arguments_from_json_paths_and_text(tmp_path):
    text = tokamax.autotuning.bound_args_to_json(tokamax.autotuning.get_bound_args(f, *inputs()))
    (tmp_path / "bound_args.json").write_text(text)
    bound_args = tokamax.autotuning.bound_args_from_json(str(tmp_path / "bound_args.json"))
    assert bound_args == tokamax.autotuning.bound_args_from_json(text)
    assert len(tokamax.autotune(bound_args)) == 1


def test_files_and_merging(tmp_path):
    result_1, result_2 = tokamax.autotune(f, *inputs()), tokamax.autotune(f, *inputs(90))
    text = result_1.dumps()
    result = tokamax.AutotuningResult.loads(text)
    result.dump(tmp_path / "a.json")
    result = tokamax.AutotuningResult.load(tmp_path / "a.json")
    merged = result | result_2
    assert len(merged) == 2


def test_fit_and_predict():
    q = [jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32) for n in (65, 80, 96, 112, 130, 144, 160)]
    result = tokamax.autotune([tokamax.XlaChunkedDotProductAttention.bind(x, x, x) for x in q[:-1]])
    result = result.fit()
    assert len(result.models) == 1
    with result:
        choice = tokamax.XlaChunkedDotProductAttention.bind(q[3], q[3], q[3]).choose_config()
        assert choice.source == "exact"
        # What nobody tuned gets the model's choice, or the default where the model does not stand by one.
        x = jax.ShapeDtypeStruct((1, 120, 2, 16), jnp.float32)
        assert tokamax.XlaChunkedDotProductAttention.bind(x, x, x).choose_config().source in ("model", "heuristic")
    print(tokamax.explain(f, *inputs()))
