import dataclasses
import json

import jax
import numpy as np
import pytest
from programs import layer

import tokamax
from tokamax import AutotuningResult
from tokamax._src import devices, dispatch, explanation
from tokamax._src.costmodel.model import Prediction
from tokamax.autotuning import Usage
from toy import TableTimer, Toy, ToyConfig, arrays, by_block, entry


def bound(m, time_ms=None, **fields):
    usage = None if time_ms is None else Usage(1, time_ms)
    return dataclasses.replace(Toy(**fields).bind(*arrays(m)), usage=usage)


def test_shares_of_calls_and_of_time():
    with AutotuningResult((entry(8),)):
        told = explanation.explain([bound(8, 9.0), bound(16, 0.5), bound(32, 0.5), bound(64)])
    assert told.to_dict()["totals"] == {
        "exact": {"calls": 1, "share_of_calls": 0.25, "share_of_time": 0.9},
        "heuristic": {"calls": 3, "share_of_calls": 0.75, "share_of_time": 0.1},
    }
    assert "1 exact (25 % of the calls, 90 % of their time)" in str(told)
    assert told.to_dict()["ops"][0] | {"runs": 1, "time_ms": 9.0} == told.to_dict()["ops"][0]
    json.dumps(told.to_dict())


def test_what_would_make_it_exact():
    with AutotuningResult((entry(8),)):
        exact, by_command, by_function = explanation.explain([bound(8), bound(16), bound(16, flavour="b")]).to_dict()[
            "ops"
        ]
    assert exact["to_make_exact"] is None
    assert by_command["to_make_exact"].startswith("tokamax tune toy")
    assert by_function["to_make_exact"].startswith("tokamax.autotune(f, *args)")


def test_a_pinned_config_and_an_error_are_told():
    pinned = Toy(config=ToyConfig(2)).bind(*arrays())
    with tokamax.config.autotuning_cache_miss_fallback("error"):
        told = tokamax.explain([pinned, bound(16)])
    assert [item["source"] for item in told.to_dict()["ops"]] == ["pinned", "error"]
    assert [item["to_make_exact"] is None for item in told.to_dict()["ops"]] == [True, False]
    assert "1 error (50 % of the calls), 1 pinned (50 % of the calls)" in str(told)


def test_how_a_config_was_measured_is_recorded_kept_by_a_merge_and_a_file_and_told():
    stamps = ("jax", "jaxlib", "backend", "tokamax", "system", "cores", "timer", "time")
    tuned = tokamax.autotune(Toy.bind(*arrays()), timer=TableTimer(by_block), progress_bar=False)
    recorded = {name: tuned.entries[0].environment[name] for name in stamps}
    merged = AutotuningResult.loads((AutotuningResult((entry(4),)) | tuned).dumps())
    with merged:
        told = tokamax.explain([Toy.bind(*arrays())])
    tuned.save_to_cache()
    for each in (told, tokamax.explain([Toy.bind(*arrays())])):
        (item,) = each.to_dict()["ops"]
        assert item["source"] == "exact" and item["environment"] == recorded
        assert f", on {recorded['time'][:10]}, by table" in str(each).replace("\n", " ")
    (item,) = tokamax.explain([bound(16)]).to_dict()["ops"]
    assert item["environment"] is None


def test_no_calls():
    told = tokamax.explain(lambda x: x + 1, 1.0)
    assert told.rows == () and f"no op calls on {devices.device_kind()}" in str(told)


@pytest.fixture
def fitted():
    shapes = [Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96, 128, 192)]
    return tokamax.autotune(shapes, timer=TableTimer(by_block), progress_bar=False, keep=False).fit()


def test_a_prediction_has_a_spread_and_a_nearest_shape(fitted):
    with fitted:
        (item,) = tokamax.explain(layer, *arrays(80)).to_dict()["ops"]
        text = str(tokamax.explain(layer, *arrays(80)))
    assert item["source"] == "model" and item["expected_slowdown"] >= 1.0 and item["spread"] >= 0.0
    assert "x[0]" in item["nearest"] and item["nearest"] in item["detail"]
    assert "±" in text and "to measure that: tokamax tune toy" in text


def test_where_the_model_abstains_the_nearest_shape_is_named_too(monkeypatch):
    def abstains(ba):
        number = len(ba.autotuning_configs)
        order = np.arange(number)
        yield "a model", Prediction(0, order, np.ones(number), np.zeros(number), abstain="too far", nearest="x[0]=3")

    monkeypatch.setattr(dispatch, "predictions", abstains)
    (item,) = tokamax.explain(layer, *arrays()).to_dict()["ops"]
    assert item["source"] == "heuristic" and item["nearest"] == "x[0]=3" and "a model: too far" in item["detail"]


def test_summary_of_a_result(fitted):
    broken = entry(4, best=None, outcomes={}, error="<boom>", device_kind="other")
    result = AutotuningResult((*fitted.entries[:2], broken), fitted.models, unknown=({},))
    told = result.summary().to_dict()
    assert told["totals"] == {
        "entries": 3,
        "with_a_config": 2,
        "estimated": 0,
        "configs_measured": 16,
        "configs_failed": {},
        "geometric_mean_speedup": pytest.approx(16.0),
    }
    assert told["models"] == [{"device_kind": devices.device_kind(), "op": "toy"}] and told["unknown"] == 1
    assert told["entries"][0]["config"] == "block=8, fast=True" and told["entries"][2]["error"] == "<boom>"
    assert "&lt;boom&gt;" in result.summary()._repr_html_()
    assert "1 model, 1 not understood here" in str(result.summary())
    json.dumps(told)


def test_an_empty_result_has_a_summary():
    assert str(AutotuningResult().summary()).endswith("0 entries on no device, 0 configs measured")


def test_lambdas_explain_too():
    assert "heuristic" in repr(tokamax.explain(lambda x, w: Toy()(x, w, activation=jax.nn.relu), *arrays()))
