import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tokamax._src.autotuning import guide, session
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.benchmarking import BenchmarkData
from toy import Estimating, TableTimer, Toy, ToyConfig, arrays, by_block

QUICK = session.Settings(timer=TableTimer(by_block), rounds=2)


def tune(op=None, *, m=4, **options):
    return session.tune((op or Toy()).bind(*arrays(m)), QUICK, **options)[0]


def test_entry_says_what_was_found():
    entry = tune()
    assert set(entry.outcomes) == set(entry.bound_args.autotuning_configs)
    assert (entry.default, entry.best, entry.error) == (ToyConfig(1), ToyConfig(4, True), None)
    assert (entry.environment["timer"], entry.environment["rounds"]) == ("table", 2)


@pytest.mark.parametrize("wrong", ["zeros", "nan"])
def test_wrong_zeros_and_nan_that_are_fastest_lose(wrong):
    @dataclasses.dataclass(frozen=True)
    class Wrong(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            if config.block < 4:
                return x @ w, None
            return jnp.full_like(x @ w, {"zeros": 0.0, "nan": jnp.nan}[wrong]), None

    entry = tune(Wrong())
    assert isinstance(entry.outcomes[ToyConfig(4, True)], Failure) and entry.outcomes[ToyConfig(4)].stage == "check"
    assert entry.best == ToyConfig(2, True)


@pytest.mark.parametrize("when", ["trace", "run"])
def test_one_of_three_that_raises_costs_itself_alone(when):
    @dataclasses.dataclass(frozen=True)
    class Raises(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            if config.block != 2:
                return x @ w, None
            if when == "run":
                return jax.pure_callback(lambda y: 1 / 0, jax.ShapeDtypeStruct((4, 6), x.dtype), x @ w), None
            raise MemoryError("no more")

        def _get_autotuning_configs(self, ba):
            return {ToyConfig(1), ToyConfig(2), ToyConfig(4)}

    entry = tune(Raises())
    failed = entry.outcomes.pop(ToyConfig(2))
    assert (failed.stage, entry.best) == ({"trace": "compile", "run": "run"}[when], ToyConfig(4))
    assert [type(o) for o in entry.outcomes.values()] == [BenchmarkData] * 2


@pytest.mark.parametrize("method", ["supported_on", "_get_autotuning_configs", "_example_arguments"])
def test_an_op_that_cannot_be_tuned_gives_an_entry_with_its_error(method):
    def fails(*args):
        raise ZeroDivisionError("in the op")

    cls = dataclasses.dataclass(frozen=True)(type("Broken", (Toy,), {"name": "broken", method: fails}))
    entry = tune(cls())
    assert "ZeroDivisionError: in the op" in entry.error
    assert (entry.outcomes, entry.best) == ({}, None)


def test_an_op_that_does_not_run_here_says_so():
    cls = dataclasses.dataclass(frozen=True)(
        type("Elsewhere", (Toy,), {"name": "elsewhere", "supported_on": lambda self, device: False})
    )
    assert "UnsupportedError: elsewhere does not run on cpu" in tune(cls()).error


def test_scoped_settings_of_jax_hold_where_configs_compile():
    seen = set()

    @dataclasses.dataclass(frozen=True)
    class Scoped(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            seen.add((jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64))
            seen.add(jax.config.jax_default_device)
            return x @ w, None

    device = jax.devices()[0]
    with jax.default_matmul_precision("highest"), jax.enable_x64(True), jax.default_device(device):
        entry = tune(Scoped())
    assert entry.best is not None
    assert seen == {("highest", True), device}


def test_features_that_raise_cost_what_a_model_would_tell_and_not_the_tuning():
    def fails(*args):
        raise ZeroDivisionError("in the features")

    cls = dataclasses.dataclass(frozen=True)(
        type("Careless", (Toy,), {"name": "careless", "_get_cost_features": fails})
    )
    settings = dataclasses.replace(QUICK, search="model", budget=3)
    with pytest.warns(UserWarning, match="_get_cost_features raised ZeroDivisionError"):
        entry, _ = session.tune(cls().bind(*arrays(4)), settings)
    assert len(entry.outcomes) == 3 and entry.error is None


def test_a_search_without_data_begins_with_the_best_by_estimate():
    settings = dataclasses.replace(QUICK, search="model", budget=3, max_workers=2)
    first = lambda op: session._Search.of(op.bind(*arrays(8)), settings, guide.Teacher(), None).propose({})
    assert ToyConfig(8) in first(Estimating()) and Estimating().bind(*arrays(8)).default_config in first(Estimating())
    # What an estimate rules out comes last.
    inf = float("inf")
    says = tuple(inf if c.block == 8 else 1.0 for c in Toy().bind(*arrays(8)).autotuning_configs)
    assert ToyConfig(8) not in first(Estimating(says=says))
