import math

import jax.numpy as jnp
import numpy as np
import pytest

import tokamax
from tokamax._src import explanation
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.report import content, judged, sweeps
from toy import TableTimer, Toy, ToyConfig, arrays, by_block, data, entry


@pytest.fixture
def result():
    bound = [Toy.bind(*arrays(m)) for m in (2, 8, 64)]
    return tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False)


def test_times_are_those_of_the_entries(result):
    (sweep,) = sweeps.sweeps(result.entries)
    by_label = {row["label"]: row for row in sweeps.by_shape(sweep)}
    assert list(by_label) == ["f32[64,4]", "f32[8,4]", "f32[2,4]"]  # The default loses most on the first.
    row = by_label["f32[8,4]"]
    assert (row["default"], row["chosen"], row["fastest"]) == (
        "block=1, fast=None",
        "block=8, fast=True",
        "block=8, fast=True",
    )
    assert (row["default_ms"], row["chosen_ms"], row["measured"], row["failed"]) == (10.0, 0.625, 8, 0)
    assert row["slowdowns"] == sorted(by_block(c, None) / 0.625 for c in by_block_space())
    assert sweep.gain == pytest.approx(math.exp(np.mean(np.log([e.speedup for e in result.entries]))))


def by_block_space():
    return [ToyConfig(block, fast) for block in (1, 2, 4, 8) for fast in (None, True)]


def test_a_heat_map_takes_the_best_config_of_each_cell(result):
    (found,) = sweeps.by_knobs(sweeps.sweeps(result.entries)[0])
    assert found["knobs"] == ["block", "fast"] and found["rows"] == ["1", "2", "4", "8"]
    cells = {
        (block, fast): (value, count)
        for block, values, counts in zip(found["rows"], found["slowdown"], found["shapes"], strict=True)
        for fast, value, count in zip(found["columns"], values, counts, strict=True)
    }
    assert cells["8", "True"] == (pytest.approx(1.0), 2)  # Blocks of 8 do not fit into the least shape.
    assert cells["2", "True"] == (pytest.approx((1 * 4 * 4) ** (1 / 3)), 3)


def test_labels_leave_out_what_all_shapes_share():
    bound = [Toy.bind(*arrays(m), scale=2.0, activation=a) for m, a in ((4, None), (8, None), (8, jnp.tanh))]
    assert sweeps.labels(bound)[:2] == ["f32[4,4]", "f32[8,4]"]
    assert sweeps.labels(bound)[2].startswith("f32[8,4] activation=")
    assert sweeps.labels(bound[:1]) == ["f32[4,4] f32[4,6] scale=2.0"]


def test_many_configs_are_thinned_evenly():
    thinned = sweeps.evenly(list(range(1000)), sweeps.CONFIGS_DRAWN)
    assert len(thinned) == sweeps.CONFIGS_DRAWN and thinned[0] == 0 and thinned[-1] == 999


def test_a_config_that_took_no_time_is_left_out():
    (found,) = sweeps.sweeps([entry(outcomes={ToyConfig(1): data(0.0), ToyConfig(2): data(1.0)})])
    assert list(found.times_ms[0]) == [ToyConfig(2)]
    assert sweeps.by_shape(found)[0]["default_ms"] is None


def test_coverage_failures_and_environment(result):
    broken = entry(
        128, outcomes={ToyConfig(1): data(2.0), ToyConfig(2): data(1.0), ToyConfig(8): Failure("run", "boom")}
    )
    with result:
        told = explanation.explain((Toy.bind(*arrays(8)), Toy.bind(*arrays(9))))
    found = content.content(result | tokamax.AutotuningResult((broken,)), told, title="t", held_out="no")
    assert found["coverage"]["totals"]["exact"]["share_of_calls"] == 0.5
    assert found["failures"]["stages"] == {"run": 1}
    assert found["failures"]["reasons"] == [{"op": "toy", "stage": "run", "reason": "boom", "configs": 1}]
    assert sum(found["environment"]["jax"].values()) == 4
    (op,) = found["ops"]
    assert op["shapes"] == 4 and op["configs"] == 4 + 8 + 8 + 2
    assert op["model"]["kind"] == "none"


def test_an_op_that_could_not_be_tuned_is_named():
    failed = entry(outcomes={}, best=None, default=None, error="the space raised ValueError: no")
    found = content.content(tokamax.AutotuningResult((failed,)), None, title="t")
    assert found["ops"] == [] and found["untunable"][0]["error"] == "the space raised ValueError: no"


def test_held_out_predictions_are_of_models_that_did_not_see_the_shape():
    bound = [Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96, 128, 192)]
    found = tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False)
    (sweep,) = sweeps.sweeps(found.entries)
    told = judged.judge(sweep, held_out=True)
    assert told["kind"] == "held out" and "never saw" in told["note"]
    assert told["predicted"]["shapes"] == 8 and told["predicted"]["configs"] == 64
    curve = told["regret"]["efficiency"]["model"]
    assert curve == sorted(curve) and curve[-1] == 1.0 and len(curve) == len(told["regret"]["measured"]) == 8
    with found.fit():
        fitted = judged.judge(sweep, held_out=False)
    assert fitted["kind"] == "fitted" and "may have learned from them" in fitted["note"] and "regret" not in fitted


def test_too_few_shapes_to_judge_are_said_so(result):
    told = judged.judge(sweeps.sweeps(result.entries)[0], held_out=True)
    assert told["kind"] == "none" and "cannot be judged" in told["note"]
