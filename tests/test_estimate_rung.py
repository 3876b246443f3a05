"""The rung `estimate` of dispatch: below every measurement, above the hand heuristic."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import tokamax
from tokamax import AutotuningResult, config
from tokamax._src import dispatch, environment
from tokamax._src.autotuning import store
from toy import Estimating, Toy, ToyConfig, arrays, entry, estimated_entry

OTHER_JAX = environment.describe_estimate("compiler 1.0") | {"jax": "0.0.1"}


def bound(m=8, **fields):
    return Estimating(**fields).bind(*arrays(m))


def test_the_least_estimate_comes_before_the_default():
    choice = bound().choose_config()
    assert (choice.source, choice.config, choice.expected_slowdown) == ("estimate", ToyConfig(8), None)
    assert "the least of 8: estimated at 1.25 ms, not measured" in choice.detail
    assert bound(4).choose_config().config == ToyConfig(4)
    assert Toy.bind(*arrays()).choose_config().source == "heuristic"


def test_an_op_may_have_none_for_a_device():
    with config.cross_compile("NVIDIA H200"):
        assert bound().choose_config().source == "estimate"
        assert bound(says=(float("inf"),) * 8).choose_config().source == "heuristic"


def test_estimated_entries_come_before_estimates_made_now():
    kind = entry().device_kind
    with AutotuningResult((estimated_entry(),)):
        choice = bound().choose_config()
        assert (choice.source, choice.config) == ("estimate", ToyConfig(4))
        assert choice.detail == "the active result: estimated at 2.5 ms, not measured, taken by compiler 1.0"
        assert bound(16).choose_config().config == ToyConfig(8)
    store.private().put([estimated_entry()])
    dispatch.forget()
    assert bound().choose_config().detail.startswith("private cache: ")
    with config.private_cache(False):
        assert bound().choose_config().detail.startswith("the least of ")
    with AutotuningResult((estimated_entry(device_kind="other", best=ToyConfig(1)),)):
        assert bound().choose_config().config == ToyConfig(4), f"of {kind}, not of the other"


def test_every_measurement_comes_first():
    measured = AutotuningResult((entry(bound_args=bound(), best=ToyConfig(1)),))
    for outer, inner in ((measured, AutotuningResult((estimated_entry(),))),) * 2:
        with outer, inner:
            assert (bound().choose_config().source, bound().choose_config().config) == ("exact", ToyConfig(1))
        with inner, outer:
            assert bound().choose_config().source == "exact"


def test_one_of_other_versions_is_used_where_there_is_no_other_and_says_so():
    old = AutotuningResult((estimated_entry(environment=OTHER_JAX, best=ToyConfig(1)),))
    with old:
        choice = bound().choose_config()
        assert choice.config == ToyConfig(1) and "with jax 0.0.1 (now" in choice.detail
        with config.freshness("strict"):
            assert bound().choose_config().detail.startswith("the least of ")
    with AutotuningResult((estimated_entry(),)), old:
        assert bound().choose_config().config == ToyConfig(4)
        with config.freshness("any"):
            assert bound().choose_config().config == ToyConfig(1)


def test_an_entry_that_does_not_fit_is_a_miss_with_a_warning():
    damaged = estimated_entry(4, best=ToyConfig(8))
    with AutotuningResult((damaged,)), pytest.warns(UserWarning, match="not feasible"):
        assert bound(4).choose_config().config == ToyConfig(4)


@dataclasses.dataclass(frozen=True)
class KeepsDistance(Estimating):
    name = "keeps_distance"

    def _is_safe(self, ba, config):
        return config.block < 4


def test_what_nobody_compiled_keeps_a_distance_from_the_limits():
    ba = KeepsDistance.bind(*arrays())
    choice = ba.choose_config()
    assert choice.config == ToyConfig(2) and "the least of 4:" in choice.detail
    compiled = estimated_entry(bound_args=ba, best=ToyConfig(8))
    with AutotuningResult((compiled,)):
        assert ba.choose_config().config == ToyConfig(8)
    with AutotuningResult((dataclasses.replace(compiled, environment=OTHER_JAX),)):
        assert ba.choose_config().config == ToyConfig(2), "another compiler may draw the limits elsewhere"


@dataclasses.dataclass(frozen=True)
class SpaceRaises(Estimating):
    name = "space_raises"

    def _get_autotuning_configs(self, ba):
        raise RuntimeError("boom")

    def _get_heuristics_config(self, ba):
        return ToyConfig(2)


def test_mistakes_of_an_op_never_reach_the_model():
    with config.cost_model("off"), pytest.warns(UserWarning, match="space or rules raised RuntimeError: boom"):
        assert SpaceRaises().bind(*arrays()).choose_config().config == ToyConfig(2)
    with pytest.warns(UserWarning, match="does without an estimate"):
        assert bound(says=(1.0,)).choose_config().source == "heuristic"


@dataclasses.dataclass(frozen=True)
class LargeFails(Estimating):
    name = "large_fails"

    def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        if config == ToyConfig(8):
            raise ValueError("too large")
        return x @ w, None


def test_a_config_that_cannot_be_traced_gives_way_to_the_next_best():
    with pytest.warns(UserWarning, match="block=8.*estimate.*too large.*block=8, fast=True"):
        jax.jit(LargeFails())(*arrays())
    assert LargeFails().bind(*arrays()).choose_config().config == ToyConfig(8, True)


def test_it_is_asked_once_per_shape_and_explained(monkeypatch):
    calls = []
    said = Estimating._estimate_ms
    monkeypatch.setattr(Estimating, "_estimate_ms", lambda *args: calls.append(1) or said(*args))
    x, w = arrays(48)
    for _ in range(3):
        explained = tokamax.explain(lambda x, w: Estimating()(x, w), x, w)
    assert len(calls) == 1
    assert explained.to_dict()["totals"]["estimate"]["calls"] == 1 and "to measure that: " in str(explained)


def test_ragged_dot_for_a_tpu_that_is_not_here():
    shape = jax.ShapeDtypeStruct
    args = shape((8192, 4096), jnp.bfloat16), shape((8, 4096, 2048), jnp.bfloat16), shape((8,), jnp.int32)
    with config.cross_compile("TPU v5 lite"):
        (row,) = tokamax.explain(tokamax.ragged_dot, *args).rows
        assert row[1].source == "estimate" and row[1].config in row[0].autotuning_configs
    with config.cross_compile("TPU v99"):
        (row,) = tokamax.explain(tokamax.ragged_dot, *args).rows
        assert row[1].source == "heuristic"
