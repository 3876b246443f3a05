import dataclasses
import json
import math
import pathlib
import sys
import threading
import time
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tokamax
from tokamax import AutotuningResult
from tokamax._src import errors
from tokamax._src.autotuning import store
from tokamax.autotuning import Failure, get_bound_args
from toy import SPACE, TOY_WITH_VJP, TableTimer, Toy, ToyConfig, ToyVjp, arrays, by_block

TIMER = TableTimer(by_block)


def tune(*args, **kwargs):
    return tokamax.autotune(*args, timer=TIMER, progress_bar=False, **kwargs)


def f(x, w, *, scale=1.0):
    return Toy()(x, w, scale=scale)


@pytest.mark.parametrize("make", [lambda: f, lambda: jax.jit(f), lambda: Toy()], ids=["function", "jitted", "op"])
def test_functions(make):
    x, w = arrays()
    result = tune(make(), x, w=w)
    (entry,) = result.entries
    assert entry.bound_args == Toy.bind(x, w)
    assert entry.best == ToyConfig(8, True) and entry.default == ToyConfig(1)
    assert set(entry.outcomes) == SPACE
    assert entry.environment["timer"] == "table" and entry.speedup == pytest.approx(16)


def test_lowered_bound_arguments_and_lists():
    x, w = arrays()
    want = (Toy.bind(x, w),)
    assert tuple(e.bound_args for e in tune(jax.jit(f).lower(x, w)).entries) == want
    assert tuple(e.bound_args for e in tune(want[0]).entries) == want
    assert tuple(e.bound_args for e in tune([want[0], want[0]]).entries) == want
    assert tuple(e.bound_args for e in tune(want).entries) == want
    assert tune([]).entries == ()


def test_gradients_tune_both_ops():
    x, w = arrays()
    result = tune(jax.grad(lambda x, w: TOY_WITH_VJP(x, w).sum()), x, w)
    assert [type(e.bound_args.op) for e in result.entries] == [Toy, ToyVjp]


def test_bound_arguments_through_json(tmp_path):
    x, w = arrays()
    text = tokamax.autotuning.bound_args_to_json(get_bound_args(f, x, w))
    (tmp_path / "b.json").write_text(text)
    for source in (text, tmp_path / "b.json", str(tmp_path / "b.json")):
        bound = tokamax.autotuning.bound_args_from_json(source)
        assert bound == (Toy.bind(x, w),)
    assert len(tune(bound)) == 1


@pytest.mark.parametrize("text", ["{}", "[3]", '{"schema": "x"}', "[", '[{"op": "unknown.Op", "arguments": {}}]'])
def test_other_json_is_a_format_error(text):
    with pytest.raises(errors.FormatError):
        tokamax.autotuning.bound_args_from_json(text)


def test_an_option_that_is_also_a_parameter_of_f():
    def g(x, timeout):
        return x

    with pytest.raises(errors.ArgumentError, match=r"timeout.*get_bound_args\(f"):
        tokamax.autotune(g, 1.0, timeout=3)


def test_a_misspelt_option_is_told_from_an_argument():
    with pytest.raises(errors.ArgumentError, match=r"'timout'.*did you mean 'timeout'"):
        tokamax.autotune(f, *arrays(), timout=3)


def test_shapes_that_do_not_fit_are_the_op_s_own_error():
    x, w = arrays()
    with pytest.raises(TypeError, match="dot_general"):
        tune(f, x, w.T)


@pytest.mark.parametrize("target", [3, "text", [3], [Toy.bind(*arrays()), 4]])
def test_wrong_targets(target):
    with pytest.raises(errors.ArgumentError, match="must"):
        tune(target)


def test_a_list_takes_no_further_arguments():
    with pytest.raises(errors.ArgumentError, match="further arguments"):
        tune([Toy.bind(*arrays())], 3)


def test_an_op_that_cannot_be_tuned_is_an_error_entry():
    @dataclasses.dataclass(frozen=True)
    class NoSpace(Toy):
        def _get_autotuning_configs(self, ba):
            raise RuntimeError("no space today")

    x, w = arrays()
    result = tune([NoSpace.bind(x, w), Toy.bind(x, w)])
    assert "no space today" in result.entries[0].error and result.entries[0].best is None
    assert result.entries[1].best == ToyConfig(8, True)
    with result:
        assert "no space today" in str(result.summary())


@dataclasses.dataclass(frozen=True)
class Faulty(Toy):
    """Fails in a different way for each block."""

    def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        out = x @ w
        if config.block == 2:
            raise ValueError("does not lower\nsecond line")
        if config.block == 4:
            out = out * (jnp.nan if config.fast else 0)
        if config.block == 8:
            out = out * 1.5
        return out, None


def test_failures_are_recorded_and_never_win():
    (entry,) = tune(Faulty.bind(*arrays())).entries
    assert entry.best == ToyConfig(1, True)
    stages = {(c.block, c.fast): o.stage for c, o in entry.outcomes.items() if isinstance(o, Failure)}
    assert stages == {(2, None): "compile", (2, True): "compile"} | {
        (b, s): "check" for b in (4, 8) for s in (None, True)
    }
    assert entry.outcomes[ToyConfig(2)].reason == "ValueError: does not lower"
    assert "NaN" in entry.outcomes[ToyConfig(4, True)].reason


def test_unchecked_tuning_measures_what_check_would_refuse():
    (entry,) = tune(Faulty.bind(*arrays()), check=False).entries
    assert entry.best == ToyConfig(8, True)


def test_a_config_that_hangs_is_given_up():
    @dataclasses.dataclass(frozen=True)
    class Hanging(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            if config.block == 2:
                time.sleep(30)
            return x @ w, None

    started = time.monotonic()
    (entry,) = tune(Hanging.bind(*arrays()), timeout=2.0).entries
    assert time.monotonic() - started < 25
    assert {entry.outcomes[ToyConfig(2, fast)].stage for fast in (None, True)} == {"timeout"}
    assert entry.best == ToyConfig(8, True)


def test_a_run_that_hangs_is_given_up():
    def slow(run, *, bound_args, config, rounds):
        if config == ToyConfig(8):
            time.sleep(30)
        return [by_block(config, bound_args)] * rounds

    (entry,) = tokamax.autotune(Toy.bind(*arrays()), timer=slow, progress_bar=False, timeout=2.0).entries
    assert entry.outcomes[ToyConfig(8)].stage == "timeout" and "a run" in entry.outcomes[ToyConfig(8)].reason
    assert entry.best == ToyConfig(8, True)


@pytest.mark.parametrize("bad", [[], [float("nan")], [-1.0], [1.0, 2.0]])
def test_a_timer_that_returns_nonsense_fails_the_config(bad):
    def timer(run, *, bound_args, config, rounds):
        return bad if config.block == 8 else [by_block(config, bound_args)] * rounds

    (entry,) = tokamax.autotune(Toy.bind(*arrays()), timer=timer, progress_bar=False).entries
    assert entry.outcomes[ToyConfig(8)].stage == "run" and entry.best == ToyConfig(4, True)


def test_ctrl_c_returns_what_was_measured():
    calls = []

    def timer(run, *, bound_args, config, rounds):
        calls.append(config)
        if len(calls) > 11:
            raise KeyboardInterrupt
        return [by_block(config, bound_args)] * rounds

    bound = [Toy.bind(*arrays(m)) for m in (8, 9, 10)]
    result = tokamax.autotune(bound, timer=timer, progress_bar=False)
    assert 1 <= len(result.entries) <= 2
    assert result.entries[0].best is not None and result.entries[-1].outcomes


def test_known_entries_are_reused_until_told_otherwise():
    ba = Toy.bind(*arrays())
    first = tune(ba)
    calls = []

    def timer(run, *, bound_args, config, rounds):
        calls.append(config)
        return [1.0] * rounds

    timer.name = "table"
    again = tokamax.autotune(ba, timer=timer, progress_bar=False)
    assert not calls and again.entries[0].to_json() == first.entries[0].to_json()
    tokamax.autotune(ba, timer=timer, progress_bar=False, ignore_cache=True)
    assert calls


def test_measurements_are_kept_unless_told_otherwise():
    ba = Toy.bind(*arrays())
    tune(ba, keep=False)
    assert list(store.private().sweeps()) == []
    tune(ba)
    (path,) = store.private().sweeps()
    assert len(path.read_text().splitlines()) == 1
    assert ba.choose_config().source == "heuristic"


def test_a_cache_that_cannot_be_written_costs_nothing_but_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKAMAX_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept.*TOKAMAX_CACHE_DIR"):
        assert len(tune(Toy.bind(*arrays()))) == 1


def test_a_lambda_is_tuned_but_not_kept():
    result = tune(Toy.bind(*arrays(), activation=lambda x: x))
    assert result.entries[0].best is not None
    assert list(store.private().sweeps()) == []


def test_arrays_are_left_untouched_and_argv_is_not_read(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "--nonsense=1"])

    def writing(run, *, bound_args, config, rounds):
        return [by_block(config, bound_args)] * rounds

    x, w = (np.array(a) for a in arrays())
    before = x.copy(), w.copy()
    tokamax.autotune(f, x, w, timer=writing, progress_bar=False)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(w, before[1])


def test_vmapped_ops_are_measured_batched():
    x, w = arrays()
    shapes_run = []

    def timer(run, *, bound_args, config, rounds):
        shapes_run.append(run().shape)
        return [by_block(config, bound_args)] * rounds

    result = tokamax.autotune(jax.vmap(f, (0, None)), jnp.stack([x, x, x]), w, timer=timer, progress_bar=False)
    assert set(shapes_run) == {(3, 8, 6)}
    with result:
        told = tokamax.explain(jax.vmap(f, (0, None)), jnp.stack([x, x, x]), w)
    assert told.to_dict()["ops"][0]["source"] == "exact"


def test_all_implementations():
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    w = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    bound = tokamax.XlaChunkedRaggedDot.bind(x, w, sizes)
    found = {type(ba.op) for ba in tokamax.autotuning.implementations(bound)}
    assert found == {tokamax.XlaChunkedRaggedDot, tokamax.RaggedDot}
    with warnings.catch_warnings():
        result = tokamax.autotune(bound, all_implementations=True, progress_bar=False, rounds=1)
    assert len(result) == 2 and all(e.error is None for e in result.entries)


def test_progress_bar_is_silent_where_there_is_no_terminal(capsys):
    tokamax.autotune(Toy.bind(*arrays()), timer=TIMER)
    assert capsys.readouterr().err == ""


def test_a_result_file_is_what_it_says(tmp_path):
    result = tune(f, *arrays())
    result.dump(tmp_path / "a.json")
    data = json.loads(pathlib.Path(tmp_path / "a.json").read_text())
    assert data["schema"] == "tokamax-autotuning-result"
    assert len(data["entries"][0]["outcomes"]) == len(SPACE)
    assert AutotuningResult.load(tmp_path / "a.json").entries[0].best == ToyConfig(8, True)


def test_a_search_by_model_measures_less_and_says_so():
    tuned = tune(Toy.bind(*arrays()), search="model", budget=3)
    (entry,) = tuned.entries
    assert len(entry.outcomes) == 3 and entry.default in entry.outcomes
    assert (entry.environment["search"], entry.environment["budget"]) == ("model", 3)


def test_a_search_by_model_learns_from_shape_to_shape():
    bound = [Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96, 128, 192)]
    result = tune(bound, search="model", budget=6, keep=False)
    assert all(len(entry.outcomes) <= 6 < len(SPACE) for entry in result.entries)
    assert [entry.best for entry in result.entries[-3:]] == [ToyConfig(8, True)] * 3
    assert len(result.entries[-1].outcomes) < 6


def test_a_search_by_model_begins_with_what_was_measured_before():
    tune([Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96)])
    (entry,) = tune(Toy.bind(*arrays(80)), search="model", budget=2).entries
    assert entry.best == ToyConfig(8, True)


def test_a_search_by_model_is_not_repeated_and_an_exhaustive_one_is_enough():
    ba = Toy.bind(*arrays())
    first = tune(ba, search="model", budget=3)
    assert tune(ba, search="model", budget=3).entries[0].environment["time"] == first.entries[0].environment["time"]
    assert len(tune(ba, search="model", budget=4).entries[0].outcomes) == 4
    assert len(tune(ba).entries[0].outcomes) == len(SPACE)
    assert len(tune(ba, search="model", budget=2).entries[0].outcomes) == len(SPACE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"search": "guess"}, "search must be one of"),
        ({"budget": 3}, "with search='model'"),
        ({"search": "model", "budget": 0}, "budget must be at least 1"),
        ({"total_timeout": 0}, "total_timeout must be a positive number"),
    ],
)
def test_wrong_options(wrong, message):
    with pytest.raises(errors.ArgumentError, match=message):
        tune(Toy.bind(*arrays()), **wrong)


def test_total_timeout_returns_what_was_measured():
    def timer(run, *, bound_args, config, rounds):
        time.sleep(0.05)
        return [by_block(config, bound_args)]

    bound = [Toy.bind(*arrays(m)) for m in (8, 16, 32)]
    with pytest.warns(UserWarning, match=r"total_timeout of 0.8 s is over: \d of 3 ops"):
        result = tokamax.autotune(bound, timer=timer, total_timeout=0.8, rounds=50, progress_bar=False)
    assert len(result) < 3


def test_check_compiles_what_would_run():
    report = tokamax.check(lambda x, w: Toy()(x, w), *arrays())
    assert report.ok and "1 of 1 compile" in str(report) and "heuristic" in str(report)


def test_check_reports_what_does_not_compile():
    @dataclasses.dataclass(frozen=True)
    class Picky(Toy):
        def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
            if config.block == 1:
                raise ValueError("block must not be 1")
            return x @ w, None

    report = tokamax.check([Picky.bind(*arrays()), Toy.bind(*arrays())])
    assert not report.ok
    assert "ValueError: block must not be 1" in str(report) and "1 of 2 compile" in str(report)


@dataclasses.dataclass(frozen=True)
class Growing(Toy):
    """A toy whose space can grow, and whose configs can all fail."""

    name = "test_api_growing"
    space: ClassVar[set[ToyConfig]] = set()
    failing: ClassVar[set[ToyConfig]] = set()

    def _fwd(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        if config in self.failing:
            raise ValueError("as it was told")
        return x @ w, None

    def _get_autotuning_configs(self, ba):
        return self.space

    def _get_heuristics_config(self, ba):
        return ToyConfig(1)


def test_a_config_added_to_the_space_is_measured_with_the_default_and_the_winner_alone(monkeypatch):
    ba = lambda: Growing().bind(*arrays())
    monkeypatch.setattr(Growing, "space", {ToyConfig(b) for b in (1, 2, 4)})
    (first,) = tune(ba()).entries
    monkeypatch.setattr(Growing, "space", {ToyConfig(b) for b in (1, 2, 4, 8)})
    (second,) = tune(ba()).entries
    assert set(second.outcomes) == {ToyConfig(1), ToyConfig(4), ToyConfig(8)} and second.best == ToyConfig(8)
    assert second.environment["extends"] == first.environment["time"]
    (third,) = tune(ba()).entries
    assert third.to_json() == second.to_json()
    assert len(tune(ba(), ignore_cache=True).entries[0].outcomes) == 4


def test_a_space_is_measured_again_if_its_winner_is_gone_or_fails_now(monkeypatch):
    ba = lambda: Growing().bind(*arrays())
    monkeypatch.setattr(Growing, "space", {ToyConfig(b) for b in (1, 2, 4)})
    tune(ba())
    monkeypatch.setattr(Growing, "space", {ToyConfig(b) for b in (1, 2, 8)})
    assert set(tune(ba()).entries[0].outcomes) == Growing.space
    monkeypatch.setattr(Growing, "space", {ToyConfig(b) for b in (1, 2, 3, 8)})

    def fails(config, ba):
        return math.nan if config == ToyConfig(8) else by_block(config, ba)

    (entry,) = tokamax.autotune(ba(), timer=TableTimer(fails), progress_bar=False).entries
    assert set(entry.outcomes) == {ToyConfig(1), ToyConfig(3), ToyConfig(8)}
    assert ToyConfig(2) in tune(ba()).entries[0].outcomes


def test_a_shape_of_which_every_config_failed_is_remembered_and_not_tried_again(monkeypatch):
    monkeypatch.setattr(Growing, "space", {ToyConfig(1), ToyConfig(2)})
    monkeypatch.setattr(Growing, "failing", {ToyConfig(1), ToyConfig(2), ToyConfig(4)})
    (first,) = tune(Growing().bind(*arrays())).entries
    assert first.best is None and len(first.outcomes) == 2
    monkeypatch.setattr(Growing, "failing", set())
    (again,) = tune(Growing().bind(*arrays())).entries
    assert again.to_json() == first.to_json()
    monkeypatch.setattr(Growing, "space", {ToyConfig(1), ToyConfig(2), ToyConfig(4)})
    assert set(tune(Growing().bind(*arrays())).entries[0].outcomes) == {ToyConfig(1), ToyConfig(4)}
    assert tune(Growing().bind(*arrays()), ignore_cache=True).entries[0].best is not None


def test_configs_that_exceeded_a_smaller_limit_are_tried_again_under_a_larger_one(monkeypatch):
    slow = threading.Event()

    def waits(self, x, w, *, activation=None, scale=1.0, return_residuals, config):
        slow.wait(20)
        return x @ w, None

    monkeypatch.setattr(Growing, "space", {ToyConfig(1), ToyConfig(2)})
    monkeypatch.setattr(Growing, "_fwd", waits)
    (first,) = tune(Growing().bind(*arrays()), timeout=1.0).entries
    assert {o.stage for o in first.outcomes.values()} == {"timeout"} and first.best is None
    slow.set()
    assert tune(Growing().bind(*arrays()), timeout=1.0).entries[0].to_json() == first.to_json()
    assert tune(Growing().bind(*arrays()), timeout=30.0).entries[0].best is not None


def test_a_space_that_raises_after_it_was_tuned_is_an_error_entry(monkeypatch):
    monkeypatch.setattr(Growing, "space", {ToyConfig(1), ToyConfig(2)})
    tune(Growing().bind(*arrays()))
    monkeypatch.setattr(Growing, "_get_autotuning_configs", lambda self, ba: 1 / 0)
    (entry,) = tune(Growing().bind(*arrays())).entries
    assert "ZeroDivisionError" in entry.error
