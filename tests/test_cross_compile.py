"""Choices and programs for a device that is not here: `tokamax.config.cross_compile`."""

import jax
import jax.numpy as jnp
import pytest

import tokamax
from tokamax import config
from tokamax._src import devices, dispatch, environment, errors
from toy import Toy, ToyConfig, arrays, entry

ELSEWHERE = "TPU v6 lite"


@pytest.mark.parametrize(
    ("kind", "platform"), [("TPU v5 lite", "tpu"), ("NVIDIA H200", "gpu"), ("cpu-some-other-8c", "cpu")]
)
def test_device_that_choices_are_for(kind, platform):
    here = devices.device_kind()
    with config.cross_compile(kind):
        assert devices.target() == devices.AbsentDevice(platform, kind)
        assert devices.device_kind() == kind == devices.facts().kind
        assert devices.current() == jax.devices()[0] and devices.device_kind(devices.current()) == here
    for value in (True, False):
        with config.cross_compile(value):
            assert devices.target() == devices.current() and devices.device_kind() == here


def test_measurements_of_that_device_are_used_and_of_no_other():
    there = tokamax.AutotuningResult((entry(best=ToyConfig(4), device_kind=ELSEWHERE),))
    here = tokamax.AutotuningResult((entry(best=ToyConfig(2)),))
    ba = Toy.bind(*arrays())
    with here | there:
        assert ba.choose_config().config == ToyConfig(2)
        with config.cross_compile(ELSEWHERE):
            choice = ba.choose_config()
            assert (choice.config, choice.source) == (ToyConfig(4), "exact")
        with config.cross_compile("TPU v5 lite"):
            assert ba.choose_config().source == "heuristic"


@pytest.mark.parametrize(("change", "fresh"), [({"backend": "its own"}, True), ({"jax": "0.1"}, False)])
def test_backend_here_says_nothing_of_a_device_that_is_not_here(change, fresh):
    about = environment.describe() | change
    with config.cross_compile(ELSEWHERE):
        assert environment.is_fresh(about) == fresh
    assert not environment.is_fresh(about)


def test_time_of_the_winner():
    ba = Toy.bind(*arrays())
    assert dispatch.measured_ms(ba) is None
    with tokamax.AutotuningResult((entry(best=ToyConfig(2), best_ms=0.25),)):
        assert dispatch.measured_ms(ba) == 0.25
        with config.cross_compile(ELSEWHERE):
            assert dispatch.measured_ms(ba) is None
    with tokamax.AutotuningResult((entry(environment={"jax": "0.1"}),)):
        assert dispatch.measured_ms(ba) is None


def test_space_and_default_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(
        Toy, "_is_feasible", lambda self, ba, config: config.block <= (8 if devices.device_kind() == ELSEWHERE else 2)
    )
    ba = Toy.bind(*arrays())
    largest = lambda: max(config.block for config in ba.autotuning_configs)
    for _ in range(2):
        assert largest() == 2
        with config.cross_compile(ELSEWHERE):
            assert largest() == 8


@pytest.mark.parametrize("jitted", [False, True])
def test_explain_lowers_for_the_device(jitted):
    def f(q):
        return tokamax.dot_product_attention(q, q, q)

    q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    with config.cross_compile(ELSEWHERE):
        told = tokamax.explain(jax.jit(f) if jitted else f, q)
    assert [item["op"] for item in told.to_dict()["ops"]] == ["PallasMosaicTpuAttention"]
    assert ELSEWHERE in str(told)


def test_what_needs_the_device_is_refused():
    ba = Toy.bind(*arrays())
    with config.cross_compile(ELSEWHERE):
        with pytest.raises(errors.ArgumentError, match="cross_compile must be off to measure.*'TPU v6 lite'"):
            tokamax.autotune(ba)
        with pytest.raises(errors.UnsupportedError, match="cross_compile must be off to check.*'TPU v6 lite'"):
            tokamax.check(ba)


def test_the_key_of_a_call_does_not_know_the_device():
    ba = Toy.bind(*arrays())
    with config.cross_compile(ELSEWHERE):
        assert Toy.bind(*arrays()).key == ba.key
