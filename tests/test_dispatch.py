import dataclasses
import logging
import os
import subprocess
import sys
import threading

import jax
import pytest

import tokamax
from tokamax import AutotuningResult, config
from tokamax._src import bound_arguments, devices, dispatch, environment, errors
from tokamax._src.autotuning import store
from tokamax._src.autotuning.result import Entry
from toy import TableTimer, Toy, ToyConfig, arrays, by_block, entry


def ba(m=8, **kwargs):
    return Toy.bind(*arrays(m), **kwargs)


def learned(sizes=(16, 24, 32, 48, 64, 96, 128, 192)):
    bound = [ba(m) for m in sizes]
    return tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False).fit()


def test_ladder_from_the_bottom_up():
    assert ba().choose_config().source == "heuristic"
    store.private().put([entry(best=ToyConfig(2))])
    dispatch.forget()
    assert (ba().choose_config().source, ba().choose_config().config) == ("exact", ToyConfig(2))
    with AutotuningResult((entry(best=ToyConfig(4)),)):
        assert ba().choose_config().config == ToyConfig(4)
    pinned = Toy(config=ToyConfig(8)).bind(*arrays())
    assert (pinned.choose_config().source, pinned.choose_config().config) == ("pinned", ToyConfig(8))


def test_the_chosen_config_is_the_one_that_runs():
    ran = []

    @dataclasses.dataclass(frozen=True)
    class Recording(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            ran.append(config)
            return x @ w, None

    x, w = arrays()
    with AutotuningResult((entry(bound_args=Recording.bind(x, w), best=ToyConfig(4)),)):
        Recording()(x, w)
    assert ran == [ToyConfig(4)]


def test_prediction_for_a_shape_nobody_tuned():
    result = learned()
    assert ba(80).choose_config().source == "heuristic"
    with result:
        choice = ba(80).choose_config()
        assert (choice.source, choice.config) == ("model", ToyConfig(8, True))
        assert choice.expected_slowdown >= 1.0 and "nearest" in choice.detail
        assert ba(64).choose_config().source == "exact"
        with config.cost_model("off"):
            assert ba(80).choose_config().source == "heuristic"


CHOOSE = """
import sys; sys.path[:0] = {path!r}
import tokamax
from toy import TableTimer, Toy, arrays, by_block
bound = [Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96, 128, 192)]
result = tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False).fit()
with result:
    print([Toy.bind(*arrays(m)).choose_config() for m in (16, 40, 80, 100, 192)])
print([model.dumps().hex() for model in result.models.values()])
"""


def test_two_processes_under_different_hash_seeds_pick_byte_equal_configs():
    told = set()
    for seed in ("0", "4711"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        program = CHOOSE.format(path=sys.path)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=env, check=True, timeout=240)
        told.add(done.stdout)
    (told,) = told
    assert told.count(b"source='model'") == 3 and told.count(b"source='exact'") == 2


def test_prediction_survives_a_file():
    with AutotuningResult.loads(learned().dumps()):
        assert ba(80).choose_config().source == "model"


def test_model_abstains_far_outside_of_what_it_saw():
    with learned():
        choice = ba(100_000).choose_config()
        assert choice.source == "heuristic"
        with config.cost_model("required"), pytest.raises(errors.CacheMissError, match="must stand by a config"):
            ba(100_000).choose_config()


def keep_model_of(kind, platform="cpu"):
    model = next(iter(learned().models.values()))
    model.device_kind_, model.facts_ = kind, dataclasses.replace(model.facts_, kind=kind, platform=platform)
    store.private().put_model(kind, "toy", model)
    dispatch.forget()


def test_model_of_another_cpu_is_used_and_flagged():
    with learned():
        own = ba(80).choose_config()
    keep_model_of("cpu-some-other-f1m1-64c")
    choice = ba(80).choose_config()
    assert choice.source == "model" and "another device, cpu-some-other-f1m1-64c" in choice.detail
    assert choice.config == own.config and choice.spread > own.spread
    assert choice.expected_slowdown > own.expected_slowdown


def test_model_of_another_sort_of_device_is_not_asked():
    keep_model_of("NVIDIA Some", "gpu")
    assert ba(80).choose_config().source == "heuristic"


def test_of_two_other_devices_the_more_alike_is_asked_first():
    here = devices.device_kind()
    keep_model_of("cpu-some-other-f1m1-64c")
    keep_model_of(here.rpartition("-")[0] + "-3c")
    assert "-3c" in next(dispatch.models(here, "toy")).name


@pytest.mark.parametrize("switch", ["error", "replay"])
def test_refusing_to_guess(switch):
    option = config.replay(True) if switch == "replay" else config.autotuning_cache_miss_fallback("error")
    with option:
        with pytest.raises(errors.CacheMissError, match=r"tokamax\.autotune\(f, \*args\)"):
            ba().choose_config()
        with AutotuningResult((entry(),)):
            assert ba().choose_config().source == "exact"
        assert "error" in str(tokamax.explain(lambda x, w: Toy()(x, w), *arrays()))


def test_replay_refuses_to_measure():
    with config.replay(True), pytest.raises(errors.ArgumentError, match="replay must be off"):
        tokamax.autotune(ba())


def test_tuning_at_the_call_even_inside_of_a_trace():
    x, w = arrays()
    with config.autotuning_cache_miss_fallback("autotune"):
        out = jax.jit(lambda x: Toy()(x, w))(x)
        choice = ba().choose_config()
    assert out.shape == (8, 6)
    assert choice.source == "exact" and choice.detail == "tuned in this process"


def test_an_entry_of_another_device_is_never_used():
    with AutotuningResult((entry(device_kind="TPU v5"),)):
        assert ba().choose_config().source == "heuristic"


def test_an_entry_of_another_toolchain_is_used_last_and_says_so():
    old = environment.describe() | {"jax": "0.1"}
    with AutotuningResult((entry(best=ToyConfig(2), environment=old),)):
        choice = ba().choose_config()
        assert choice.config == ToyConfig(2) and "measured with jax 0.1 (now" in choice.detail
        store.private().put([entry(best=ToyConfig(4))])
        dispatch.forget()
        assert ba().choose_config().config == ToyConfig(4)


def test_freshness_says_whether_an_entry_of_another_toolchain_counts():
    old = environment.describe() | {"jax": "0.1"}
    with AutotuningResult((entry(best=ToyConfig(2), environment=old),)):
        store.private().put([entry(best=ToyConfig(4))])
        dispatch.forget()
        assert ba().choose_config().config == ToyConfig(4)
        with config.freshness("any"):
            choice = ba().choose_config()
            assert choice.config == ToyConfig(2) and "measured with jax 0.1 (now" in choice.detail
        with config.freshness("strict"):
            assert ba().choose_config().config == ToyConfig(4)
            with config.private_cache(False):
                choice = ba().choose_config()
                assert choice.source == "heuristic"
                assert "the active result is not used: freshness is strict, and jax 0.1 (now" in choice.detail
                with config.replay(True), pytest.raises(errors.CacheMissError, match="freshness is strict"):
                    ba().choose_config()


@pytest.mark.parametrize("best", [{"blocks": 1}, {"block": 64}, {"block": "x"}, 3])
def test_a_wrong_entry_is_a_miss_with_a_warning(best):
    winners = {ba().key: dataclasses.replace(store.Winner.of(entry()), config=best)}
    path = store.private().winners_path(devices.device_kind(), "toy")
    path.parent.mkdir(parents=True)
    path.write_text(store.WINNERS.text(winners, devices.device_kind(), "toy"))
    with pytest.warns(UserWarning, match="not used|damaged"):
        assert ba().choose_config().source == "heuristic"
    assert ba().choose_config().source == "heuristic"


def test_one_log_line_per_op_and_shape(caplog):
    with caplog.at_level(logging.INFO, logger="tokamax"):
        for _ in range(3):
            ba(5).choose_config()
            dispatch._memo.clear()
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1 and "f32[5,4]" in lines[0] and "tokamax.autotune" in lines[0]


def test_a_repeated_choice_is_a_look_up(monkeypatch):
    ba().choose_config()
    monkeypatch.setattr(dispatch, "_choose", None)
    assert ba().choose_config().source == "heuristic"


def test_saving_to_the_cache_traces_again():
    x, w = arrays()
    seen = []

    @jax.jit
    def f(x):
        seen.append(Toy.bind(x, w).choose_config().config)
        return Toy()(x, w)

    f(x)
    f(x)
    AutotuningResult((entry(best=ToyConfig(4)),)).save_to_cache()
    f(x)
    assert seen == [ToyConfig(1), ToyConfig(4)]


def test_options_retrace_and_are_checked():
    x, w = arrays()
    traces = []
    f = jax.jit(lambda x: (traces.append(1), Toy()(x, w))[1])
    f(x)
    with config.cost_model("off"):
        f(x)
    f(x)
    assert len(traces) == 2
    with pytest.raises(errors.ArgumentError, match="must be one of"):
        config.cost_model("maybe")
    with pytest.raises(errors.ArgumentError, match="must be one of"):
        config.replay(1)


def test_options_are_scoped_to_a_thread():
    seen = []
    with config.cost_model("off"):
        thread = threading.Thread(target=lambda: seen.append(config.cost_model.value))
        thread.start()
        thread.join()
        assert config.cost_model.value == "off"
    assert seen == ["auto"]


def test_explain_counts_sources_and_gives_plain_data():
    x, w = arrays()
    with AutotuningResult((entry(),)):
        told = tokamax.explain(lambda x, w: Toy()(x, w) + Toy(flavour="b")(x, w), x, w)
    assert "1 exact (50 % of the calls), 1 heuristic (50 % of the calls)" in str(told) and "f32[8,4]" in str(told)
    items = told.to_dict()["ops"]
    assert [item["source"] for item in items] == ["exact", "heuristic"]
    assert items[0]["config"] == "block=2, fast=None"


def test_an_entry_without_a_winner_is_a_miss():
    broken = Entry(ba(), devices.device_kind(), {}, ToyConfig(1), None, environment.describe(), error="boom")
    with AutotuningResult((broken,)):
        assert ba().choose_config().source == "heuristic"


@dataclasses.dataclass(frozen=True)
class Picky(Toy):
    """Traces with all blocks but one."""

    name = "picky"

    def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        if config.block == 4:
            raise ValueError("block must not be 4")
        return x @ w + 0.0 * config.block, None


def test_a_config_that_does_not_trace_is_replaced_once_with_a_warning():
    x, w = arrays()
    with AutotuningResult((entry(bound_args=Picky.bind(x, w), best=ToyConfig(4)),)):
        with pytest.warns(UserWarning, match=r"block=4.*exact.*failed.*must not be 4.*block=1.*heuristic.*instead"):
            out = jax.jit(Picky())(x, w)
        assert out.shape == (8, 6)
        assert Picky.bind(x, w).choose_config().config == ToyConfig(1)
        jax.jit(lambda x: Picky()(x, w))(x)


def test_a_config_that_does_not_trace_falls_to_the_next_winner():
    x, w = arrays()
    inner = AutotuningResult((entry(bound_args=Picky.bind(x, w), best=ToyConfig(4)),))
    with AutotuningResult((entry(bound_args=Picky.bind(x, w), best=ToyConfig(8)),)), inner:
        with pytest.warns(UserWarning, match="block=8"):
            Picky()(x, w)


def test_what_the_user_pinned_and_the_default_raise():
    x, w = arrays()
    with pytest.raises(ValueError, match="must not be 4"):
        Picky(config=ToyConfig(4))(x, w)

    @dataclasses.dataclass(frozen=True)
    class Broken(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            raise ValueError(f"always, with block {config.block}")

    with pytest.raises(ValueError, match="always, with block 1"):
        Broken()(x, w)
    with AutotuningResult((entry(bound_args=Broken.bind(x, w), best=ToyConfig(4)),)):
        with pytest.warns(UserWarning, match="instead"), pytest.raises(ValueError, match="always, with block 1"):
            Broken()(x, w)


def careless(*methods, base=Toy):
    """An op some of whose methods raise."""

    def method(name):
        def raises(self, *args):
            raise ZeroDivisionError(f"in {name}")

        return raises

    made = type("Careless", (base,), {name: method(name) for name in methods} | {"__module__": __name__})
    return dataclasses.dataclass(frozen=True)(made)


@dataclasses.dataclass(frozen=True)
class WithDefault(Toy):
    name = "toy_with_default"

    def _get_heuristics_config(self, ba):
        return ToyConfig(4)


@pytest.mark.parametrize("method", ["_get_autotuning_configs", "_is_feasible"])
def test_a_space_whose_listing_raises_costs_the_prediction_and_not_the_program(method):
    x, w = arrays()
    op = careless(method, base=WithDefault)
    name = op.registered_name()
    with learned_for(op):
        with pytest.warns(UserWarning, match=f"the configs of {name} .*cannot be listed.*in {method}") as caught:
            out = jax.jit(op())(x, w)
            choice = op.bind(*arrays(16)).choose_config()
        assert out.shape == (8, 6) and len(caught) == 1
        assert (choice.source, choice.config) == ("heuristic", ToyConfig(4)) and "cannot be listed" in choice.detail
        told = tokamax.explain([op.bind(x, w)])
        assert f"ZeroDivisionError: in {method}" in str(told)
        with config.cost_model("required"), pytest.raises(errors.CacheMissError, match="cannot be listed"):
            op.bind(x, w).choose_config()


def learned_for(op):
    """A result with a model that is said to be of another op."""
    ((place, model),) = learned().models.items()
    return AutotuningResult(models={(place[0], op.registered_name()): model})


def test_a_measured_config_that_cannot_be_told_feasible_is_a_miss_with_a_warning():
    op = careless("_is_feasible", base=WithDefault)
    with AutotuningResult((entry(bound_args=op.bind(*arrays()), best=ToyConfig(8)),)), config.cost_model("off"):
        with pytest.warns(UserWarning, match="the active result: the config .* is not used: ZeroDivisionError"):
            assert op.bind(*arrays()).choose_config().source == "heuristic"


def test_a_measured_config_that_is_infeasible_is_named_once():
    with AutotuningResult((entry(4, best=ToyConfig(8)),)):
        with pytest.warns(UserWarning, match="block=8, fast=None is not feasible") as caught:
            assert ba(4).choose_config().source == "heuristic"
            with config.freshness("any"):
                assert ba(4).choose_config().source == "heuristic"
        assert len(caught) == 1


def test_a_default_rule_that_raises_gives_way_to_the_first_config_of_the_space():
    x, w = arrays()
    op = careless("_get_heuristics_config")
    with pytest.warns(UserWarning, match=f"_get_heuristics_config of {op.registered_name()} raised ZeroDivisionError"):
        choice = op.bind(x, w).choose_config()
    assert (choice.source, choice.config) == ("heuristic", ToyConfig(1))
    with pytest.warns(UserWarning, match="the first config of its space is the default"):
        (tuned,) = tokamax.autotune(op.bind(x, w), timer=TableTimer(by_block), progress_bar=False).entries
    assert tuned.default == ToyConfig(1) and tuned.best == ToyConfig(8, True)


@pytest.mark.filterwarnings("ignore:the configs of")
def test_where_no_config_is_known_at_all_the_error_says_why():
    x, w = arrays()
    with pytest.raises(errors.UnsupportedError, match="its space raises ZeroDivisionError: in _get_autotuning_conf"):
        careless("_get_autotuning_configs")()(x, w)
    told = tokamax.explain([careless("_get_autotuning_configs").bind(x, w), ba()])
    assert [item["source"] for item in told.to_dict()["ops"]] == ["error", "heuristic"]
    with pytest.raises(ZeroDivisionError, match="in _get_heuristics_config"):
        careless("_get_autotuning_configs", "_get_heuristics_config")()(x, w)


def test_a_model_that_raises_costs_its_prediction_and_not_the_program():
    result = learned()
    (model,) = result.models.values()
    model.trees_ = None
    model.choose = lambda *args, **kwargs: [][0]
    with AutotuningResult(models=result.models):
        with pytest.warns(UserWarning, match="the active result: not used for toy.*raises IndexError") as caught:
            assert ba(80).choose_config().source == ba(81).choose_config().source == "heuristic"
        assert len(caught) == 1


def test_a_tuning_at_the_call_that_raises_costs_the_tuning_and_not_the_program(monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(type(bound_arguments.get_runtime()), "autotune", fails)
    with config.autotuning_cache_miss_fallback("autotune"):
        with pytest.warns(UserWarning, match="could not be tuned at its call: OSError: no space left"):
            assert ba().choose_config().source == "heuristic"


def test_cost_features_that_raise_cost_the_prediction_and_not_the_program():
    @dataclasses.dataclass(frozen=True)
    class Careless(Toy):
        def _get_cost_features(self, ba, config):
            raise ZeroDivisionError("in the features")

    with pytest.warns(UserWarning, match="_get_cost_features raised ZeroDivisionError"):
        assert Careless.bind(*arrays()).choose_config().source == "heuristic"


def test_what_beat_the_default_on_the_nearest_shapes_replaces_an_abstention():
    result = learned()
    ((place, model),) = result.models.items()
    model.calibration_ = dataclasses.replace(model.calibration_, max_doubt=-1.0, max_distance=-1.0)
    with AutotuningResult(models={place: model}):
        choice = ba(80).choose_config()
        assert (choice.source, choice.config) == ("model", ToyConfig(8, True))
        assert "beat the default on the nearest measured shapes" in choice.detail
        assert choice.expected_slowdown is None
