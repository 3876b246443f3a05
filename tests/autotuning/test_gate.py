"""What counts as a right output."""

import collections
import ctypes
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tokamax
from gated import TIMER, LooseMean, Mean, Way
from tokamax._src import devices, errors
from tokamax._src.autotuning import gate, session
from tokamax._src.autotuning.processes import Process
from tokamax.autotuning import Failure
from toy import TableTimer

X = jax.ShapeDtypeStruct((4, 64), jnp.float32)


def tune(op, x=X, **options):
    options = {"timer": TIMER, "rounds": 1, "progress_bar": False, "isolation": "none"} | options
    (entry,) = tokamax.autotune(op.bind(x), **options).entries
    assert entry.error is None
    return entry


def wrong(entry):
    return {c.way: o.stage for c, o in entry.outcomes.items() if isinstance(o, Failure)}


@pytest.fixture(scope="module", autouse=True)
def no_idle_processes_stay():
    yield
    Process.end_idle()


@pytest.mark.parametrize("isolated", ["none", "process"])
def test_a_default_that_is_wrong_is_noted_and_what_is_right_wins(isolated):
    entry = tune(Mean(ways=("plain", "zeros", "off"), default="zeros"), isolation=isolated)
    assert wrong(entry) == {"off": "check"}
    assert "the default's output is not that of the reference: error" in entry.environment["checked"]


@pytest.mark.parametrize("isolated", ["none", "process"])
def test_a_reference_that_is_wrong_fails_nothing_but_what_the_default_would(isolated):
    entry = tune(Mean(ways=("plain", "zeros"), broken="wrong"), isolation=isolated)
    assert wrong(entry) == {"zeros": "check"} and entry.best == Way("plain")


def test_without_the_default_the_reference_judges_alone():
    """Before, the first config that ran was the yardstick: `off`, by its name."""

    @dataclasses.dataclass(frozen=True)
    class NoDefault(Mean):
        def _fwd(self, x, *, return_residuals, config):
            if config.way == "default":
                raise ValueError("no default")
            return super()._fwd(x, return_residuals=return_residuals, config=config)

    entry = tune(NoDefault(ways=("off", "plain", "zeros"), default="default"))
    assert wrong(entry) == {"default": "compile", "off": "check", "zeros": "check"}
    assert entry.best == Way("plain")


@pytest.mark.parametrize(
    ("broken", "isolated", "noted"),
    [
        ("raises", "none", "ZeroDivisionError: no reference"),
        ("raises", "process", "ZeroDivisionError: no reference"),
        ("exits", "process", "exit code 3"),
        ("hangs", "none", "a run took more than 5 s"),
    ],
)
def test_a_reference_that_cannot_run_gives_way_to_the_default(broken, isolated, noted):
    timeout = 5.0 if broken == "hangs" else 60.0
    entry = tune(Mean(ways=("plain", "zeros"), broken=broken), isolation=isolated, timeout=timeout)
    assert wrong(entry) == {"zeros": "check"} and noted in entry.environment["checked"]


def test_a_reference_that_would_fill_the_memory_does_not_run(monkeypatch):
    facts = dataclasses.replace(devices.facts(), memory_bytes=100)
    monkeypatch.setattr(devices, "facts", lambda kind=None: facts)
    assert "GiB" in tune(Mean()).environment["checked"]


def test_16_bit_outputs_are_compared_with_a_reference_of_32_bits_and_their_own_tolerance():
    x = jnp.asarray(100 + np.random.default_rng(0).normal(size=(4, 2048)), jnp.float16)
    entry = tune(Mean(ways=("plain", "zeros")), x)
    assert wrong(entry) == {"zeros": "check"} and "checked" not in entry.environment


def test_sums_in_16_bits_that_saturate_are_wrong_even_if_the_default_saturates_alike():
    """The default's own output was the yardstick before."""
    x = jnp.full((4, 4096), 100.0, jnp.float16)
    entry = tune(Mean(ways=("plain", "half", "off"), default="half"), x)
    assert "not that of the reference" in entry.environment["checked"]
    assert wrong(entry) == {} and entry.best == Way("off")  # 1 % is within the tolerance of 16 bits.


def test_another_dtype_than_the_default_s_is_wrong():
    assert wrong(tune(Mean(ways=("plain", "bf16")))) == {"bf16": "check"}


def test_tolerance_of_a_call_comes_before_that_of_the_op_and_that_before_the_dtype_s():
    ways = ("plain", "off")
    assert wrong(tune(Mean(ways=ways))) == {"off": "check"}
    assert wrong(tune(Mean(ways=ways), tolerance=0.1)) == {}
    assert wrong(tune(LooseMean(ways=ways))) == {}
    assert wrong(tune(LooseMean(ways=ways), tolerance=1e-4)) == {"off": "check"}
    assert wrong(tune(LooseMean(ways=ways), tolerance={"bfloat16": 0.1})) == {"off": "check"}
    assert wrong(tune(LooseMean(ways=ways), tolerance=0.1, isolation="process")) == {}


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "0.1", True, {"float99": 0.1}, {"float32": -1}])
def test_a_tolerance_that_makes_no_sense_is_an_error_before_any_work(bad):
    with pytest.raises(errors.ArgumentError, match="tolerance must be the accepted error"):
        tune(Mean(), tolerance=bad)


def test_a_result_that_changes_between_two_runs_is_wrong():
    """A race, or memory that a config leaves unwritten. The first output is right, so that one run shows nothing."""
    runs = itertools.count()

    @dataclasses.dataclass(frozen=True)
    class Racy(Mean):
        def _fwd(self, x, *, return_residuals, config):
            mean = x.mean(1)
            if config.way != "racy":
                return mean, None
            return jax.pure_callback(lambda m: m + next(runs), jax.ShapeDtypeStruct(mean.shape, mean.dtype), mean), None

    entry = tune(Racy(ways=("plain", "racy")))
    assert wrong(entry) == {"racy": "check"}
    assert "two runs must give the same output" in entry.outcomes[Way("racy")].reason


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("share", "fails"), [(1e-6, False), (4e-4, False), (8e-4, True)])
def test_two_outputs_that_are_right_must_agree_with_each_other(share, fails, kept, monkeypatch):
    """Each is within 1e-3 of the reference, the tolerance of float32; two in a row are twice the share apart.

    Sums whose order differs from run to run must pass. Where first outputs are too large to be kept, one more run
    stands in for the first.
    """
    signs = itertools.cycle((1, -1))
    monkeypatch.setattr(gate, "_KEPT_SHARE", 0.05 if kept else 0.0)

    @dataclasses.dataclass(frozen=True)
    class Drifting(Mean):
        def _fwd(self, x, *, return_residuals, config):
            drift = lambda mean: mean + np.float32(next(signs) * share * np.abs(mean).max())
            mean = x.mean(1)
            if config.way != "drifts":
                return mean, None
            return jax.pure_callback(drift, jax.ShapeDtypeStruct(mean.shape, mean.dtype), mean), None

    entry = tune(Drifting(ways=("plain", "drifts")))
    assert "checked" not in entry.environment and wrong(entry) == ({"drifts": "check"} if fails else {})
    if fails:
        assert "two runs must give the same output; the second: error" in entry.outcomes[Way("drifts")].reason


def test_a_config_that_writes_into_its_inputs_fails_and_spoils_no_other(monkeypatch):
    made = []
    real = session.example_inputs
    monkeypatch.setattr(session, "example_inputs", lambda *args, **kw: made.append(real(*args, **kw)) or made[-1])

    @dataclasses.dataclass(frozen=True)
    class Writes(Mean):
        def _fwd(self, x, *, return_residuals, config):
            def write(mean):
                for arrays in made:
                    ctypes.memset(arrays[0].unsafe_buffer_pointer(), 0, arrays[0].nbytes)
                return np.asarray(mean)

            mean = x.mean(1)
            if config.way != "a writes":
                return super()._fwd(x, return_residuals=return_residuals, config=config)
            return jax.pure_callback(write, jax.ShapeDtypeStruct(mean.shape, mean.dtype), mean), None

    entry = tune(Writes(ways=("a writes", "plain", "zeros"), default="a writes"))
    assert wrong(entry) == {"a writes": "check", "zeros": "check"} and entry.best == Way("plain")
    assert entry.outcomes[Way("a writes")].reason == "it writes into its inputs"


def test_a_clean_space_costs_no_run_more_than_a_warm_up_and_the_samples():
    runs = collections.Counter()

    @dataclasses.dataclass(frozen=True)
    class Counted(Mean):
        def _fwd(self, x, *, return_residuals, config):
            note = lambda m: (runs.update([config]), np.asarray(m))[1]
            mean = x.mean(1) + 0.0 * len(config.way)
            return jax.pure_callback(note, jax.ShapeDtypeStruct(mean.shape, mean.dtype), mean), None

    def timer(run, *, bound_args, config, rounds):
        run()
        return [1.0]

    entry = tune(Counted(ways=("plain", "other")), timer=timer, rounds=3)
    assert {c: len(o.samples_ms) + 1 for c, o in entry.outcomes.items()} == dict(runs)


def test_a_config_that_runs_the_program_of_another_is_noted():
    @dataclasses.dataclass(frozen=True)
    class Deaf(Mean):
        def _fwd(self, x, *, return_residuals, config):
            return x.mean(1) + (0.0 if config.way == "plain" else 1e-9), None

    entry = tune(Deaf(ways=("plain", "b", "c")))
    assert (
        "1 of 3 configs compile to the program of another one: way=c to that of way=b"
        == (entry.environment["same_program"])
    )


def test_an_entry_that_was_checked_otherwise_is_not_reused():
    assert wrong(tune(Mean(ways=("plain", "off")), check=False)) == {}
    assert wrong(tune(Mean(ways=("plain", "off")))) == {"off": "check"}
    assert wrong(tune(Mean(ways=("plain", "off")), tolerance=0.1)) == {}


@pytest.mark.parametrize("family", ["attention", "loss", "ragged_dot"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ops_and_their_vjps_agree_with_their_references(family, dtype):
    x = jnp.ones((1, 32, 2, 16), dtype)
    f, args = {
        "attention": (lambda x: tokamax.dot_product_attention(x, x, x).sum(), (x,)),
        "loss": (
            lambda x, w: tokamax.linear_softmax_cross_entropy_loss(x, jnp.zeros((32,), jnp.int32), w),
            (x[0, :, 0], jnp.ones((16, 64), dtype)),
        ),
        "ragged_dot": (
            lambda x, w: tokamax.ragged_dot(x, w, jnp.array([20, 12], jnp.int32)).sum(),
            (x[0, :, 0], jnp.ones((2, 16, 8), dtype)),
        ),
    }[family]
    bound = tokamax.autotuning.get_bound_args(jax.grad(f), *args)
    tunable = [ba for ba in bound if ba.has_reference]
    assert len(tunable) == 2
    for ba in tunable:
        few = sorted(ba.autotuning_configs, key=repr)[:2]
        ba._by_device["space", devices.device_kind()] = tuple(few)
        options = {"rounds": 1, "progress_bar": False, "isolation": "none", "timer": TableTimer(lambda c, ba: 1.0)}
        (entry,) = tokamax.autotune(ba, **options).entries
        assert entry.error is None and "checked" not in entry.environment
        assert not [o for o in entry.outcomes.values() if isinstance(o, Failure)]
