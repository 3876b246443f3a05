import threading

import jax
import jax.numpy as jnp
import pytest

from tokamax import config
from tokamax._src import errors, options

OPTIONS = pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.name)


@pytest.fixture(autouse=True)
def defaults_again():
    before = [option.value for option in options.OPTIONS]
    yield
    for option, value in zip(options.OPTIONS, before, strict=True):
        option.set(value)


def in_thread(f):
    found = []
    thread = threading.Thread(target=lambda: found.append(f()))
    thread.start()
    thread.join()
    return found[0]


def test_defaults():
    assert {option.name: option.value for option in options.OPTIONS} == {
        "autotuning_cache_miss_fallback": "heuristics",
        "cost_model": "auto",
        "cross_compile": False,
        "freshness": "toolchain",
        "private_cache": True,
        "replay": False,
    }


@OPTIONS
def test_options_are_public_and_documented(option):
    assert getattr(config, option.name) is option
    assert option.__doc__


@OPTIONS
def test_scopes_nest_and_survive_exceptions(option):
    for outer in option.allowed:
        with option(outer):
            for inner in option.allowed:
                with pytest.raises(ZeroDivisionError), option(inner):
                    assert option.value == inner
                    raise ZeroDivisionError
                assert option.value == outer


@OPTIONS
def test_scopes_hold_for_one_thread(option):
    before = option.value
    for value in option.allowed:
        with option(value):
            assert in_thread(lambda: option.value) == before


@OPTIONS
def test_set_holds_for_the_process_below_scopes(option):
    first, second = option.allowed[:2]
    option.set(second)
    assert option.value == second == in_thread(lambda: option.value)
    with option(first):
        assert option.value == first
    assert option.value == second


@OPTIONS
@pytest.mark.parametrize("value", ["sometimes", None, 1, 0, 2.0, [], "True"])
def test_other_values_say_which_there_are(option, value):
    before = option.value
    for use in (option, option.set):
        with pytest.raises(errors.ArgumentError, match=f"config.{option.name} must be one of .*got"):
            use(value)
    assert option.value == before


@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU v5", "TPU7x", "NVIDIA H200", "AMD MI300X", "cpu-some-8c"])
def test_cross_compile_takes_device_kinds(kind):
    before = options.state()
    with config.cross_compile(kind):
        assert config.cross_compile.value == kind
        assert options.state() != before


@pytest.mark.parametrize("kind", ["v5e", "tpu v5 lite", "TPU", "", "NVIDIA"])
def test_cross_compile_says_what_a_device_kind_is(kind):
    with pytest.raises(errors.ArgumentError, match="or a device kind, as JAX calls it, such as 'TPU v6 lite'"):
        config.cross_compile(kind)


@OPTIONS
def test_functions_are_traced_again_exactly_when_the_value_differs(option):
    traced = []

    @jax.jit
    def f(x):
        traced.append(option.value)
        return x + 1

    for value in (*option.allowed, *option.allowed):
        with option(value):
            f(jnp.zeros(()))
    assert traced == list(option.allowed)


def test_state_is_hashable_and_tells_every_option_apart():
    states = {options.state()}
    for option in options.OPTIONS:
        for value in option.allowed:
            with option(value):
                states.add(options.state())
    assert len(states) == 1 + sum(len(option.allowed) - 1 for option in options.OPTIONS)
    with options.overlays(("something",)):
        assert options.state() not in states
