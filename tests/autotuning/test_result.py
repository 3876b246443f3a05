import dataclasses
import gc
import io
import json
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokamax
from tokamax import AutotuningResult
from tokamax._src import devices, errors, options
from tokamax._src.autotuning import housekeeping, store
from tokamax.autotuning import Failure
from toy import SPACE, TableTimer, Toy, ToyConfig, arrays, by_block, data, entry

CONFIGS = sorted(SPACE, key=str)


outcomes = st.one_of(
    st.builds(data, st.floats(1e-3, 1e3)),
    st.builds(Failure, st.sampled_from(["config", "compile", "check", "run", "timeout"]), st.text(max_size=20)),
)
entries = st.builds(
    lambda m, table, best: entry(
        m, outcomes=table | {best: data(0.5)}, best=best, environment={"time": "2026", "note": [1, {"a": None}]}
    ),
    st.integers(1, 9),
    st.dictionaries(st.sampled_from(CONFIGS), outcomes, max_size=4),
    st.sampled_from(CONFIGS),
)
results = st.lists(entries, max_size=4).map(lambda e: AutotuningResult(tuple({x.key: x for x in e}.values())))


def content(result):
    return {e.key: e.to_json() for e in result.entries}


@given(results)
def test_text_round_trip(result):
    back = AutotuningResult.loads(result.dumps())
    assert content(back) == content(result)
    assert back.overlay == result.overlay
    assert back.dumps() == result.dumps()


@given(results, results, results)
def test_merge_takes_the_right_side_and_is_associative(a, b, c):
    merged = a | b
    assert content(merged) == content(a) | content(b)
    assert content((a | b) | c) == content(a | (b | c))


def test_merge_keeps_a_measured_entry_when_the_right_side_has_only_an_error():
    good, bad = entry(), entry(best=None, outcomes={}, error="boom")
    merged = AutotuningResult((good,)) | AutotuningResult((bad,))
    assert merged.entries == (good,)


def test_paths_and_files(tmp_path):
    result = AutotuningResult((entry(),))
    result.dump(tmp_path / "a.json")
    result.dump(str(tmp_path / "sub" / "b.json"))
    with open(tmp_path / "c.json", "w") as file:
        result.dump(file)
    for name in ("a.json", "sub/b.json", "c.json"):
        assert content(AutotuningResult.load(tmp_path / name)) == content(result)
    assert content(AutotuningResult.load(io.StringIO(result.dumps()))) == content(result)


def test_unknown_ops_and_fields_survive_a_round_trip():
    text = AutotuningResult((entry(),)).dumps()
    raw = json.loads(text)
    stranger = json.loads(json.dumps(raw["entries"][0]))
    stranger["bound_args"]["op"] = "some.other.Op"
    raw["entries"][0]["from_the_future"] = {"a": [1]}
    raw["entries"].append(stranger)
    with pytest.warns(UserWarning, match="1 of 2 entries are not understood.*import the module"):
        result = AutotuningResult.loads(json.dumps(raw))
    assert len(result) == 1
    again = json.loads(result.dumps())
    assert again["entries"] == raw["entries"]
    assert json.loads((result | result).dumps())["entries"] == raw["entries"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "must be JSON"),
        ("[]", "must be a tuning result"),
        ('{"schema": "else"}', "must be a tuning result.*else"),
        ('{"schema": "tokamax-autotuning-result", "version": 99, "entries": []}', "version 1.*99.*update tokamax"),
        ('{"schema": "tokamax-autotuning-result", "version": 1, "entries": 3}', "list of entries"),
    ],
)
def test_other_texts_are_format_errors(text, match):
    with pytest.raises(errors.FormatError, match=match):
        AutotuningResult.loads(text)


@pytest.mark.parametrize(
    "change",
    [
        {"outcomes": 3},
        {"outcomes": [[{"block": 1}]]},
        {"outcomes": [[{"blocks": 1}, {"samples_ms": [1.0]}]]},
        {"outcomes": [[{"block": 1}, {"samples_ms": ["x"]}]]},
        {"outcomes": [[{"block": 1}, {"samples_ms": []}]]},
        {"outcomes": [[{"block": 1}, {"samples_ms": [-1.0]}]]},
        {"outcomes": [[{"block": 1}, {"failure": 3}]]},
        {"best": {"blocks": 1}},
        {"device_kind": 3},
        {"environment": []},
        {"bound_args": None},
    ],
)
def test_a_damaged_entry_costs_that_entry(change):
    raw = json.loads(AutotuningResult((entry(),)).dumps())
    raw["entries"].append(raw["entries"][0] | change)
    with pytest.warns(UserWarning, match="1 of 2"):
        assert len(AutotuningResult.loads(json.dumps(raw))) == 1


def test_a_lambda_cannot_go_into_a_file():
    x, w = arrays()
    result = AutotuningResult((entry(bound_args=Toy.bind(x, w, activation=lambda x: x)),))
    with pytest.raises(errors.SerializationError, match="lambda"):
        result.dumps()


def test_a_path_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError, match="must be writable"):
        AutotuningResult().dump(tmp_path / "file" / "a.json")


def chosen(m=8):
    return Toy.bind(*arrays(m)).choose_config()


def test_overlay_nests_reenters_and_survives_exceptions():
    outer = AutotuningResult((entry(best=ToyConfig(2)), entry(4, best=ToyConfig(4))))
    inner = AutotuningResult((entry(best=ToyConfig(8)),))
    before = chosen()
    with outer:
        assert chosen().config == ToyConfig(2)
        with pytest.raises(ZeroDivisionError), inner:
            assert chosen().config == ToyConfig(8)
            assert chosen(4).config == ToyConfig(4)
            with outer:
                assert chosen().config == ToyConfig(2)
            assert chosen().config == ToyConfig(8)
            raise ZeroDivisionError
        assert chosen().config == ToyConfig(2)
    assert chosen() == before
    assert options.overlays.value == ()


def test_overlay_is_per_thread_and_one_result_may_be_active_in_many():
    result = AutotuningResult((entry(),))
    seen = {}

    def work(i):
        seen[i, "before"] = chosen().source
        with result, result:
            seen[i, "inside"] = chosen().config
        seen[i, "after"] = chosen().source

    with result:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert chosen().config == ToyConfig(2)
    assert {seen[i, "before"] for i in range(8)} == {seen[i, "after"] for i in range(8)} == {"heuristic"}
    assert {seen[i, "inside"] for i in range(8)} == {ToyConfig(2)}


def noting_traces():
    """A jitted call, and the list of the configs that it was traced with."""
    traced = []

    @jax.jit
    def f(x, w):
        traced.append(Toy.bind(x, w).choose_config().config)
        return Toy()(x, w)

    return f, traced


def test_equal_results_share_a_trace_and_different_ones_do_not():
    x, w = arrays()
    f, traced = noting_traces()
    result = AutotuningResult((entry(),))
    with result:
        f(x, w)
    with AutotuningResult.loads(result.dumps()):
        f(x, w)
    assert traced == [ToyConfig(2)]
    with AutotuningResult((entry(best=ToyConfig(4)),)):
        f(x, w)
    f(x, w)
    assert traced == [ToyConfig(2), ToyConfig(4), ToyConfig(1)]


def test_a_result_may_be_freed_while_a_jitted_function_holds_its_program():
    """What is made in its place may lie at the same address, and must not get its program."""
    x, w = arrays()
    f, traced = noting_traces()
    for best in [ToyConfig(2), ToyConfig(4), ToyConfig(8)] * 3:
        result = AutotuningResult((entry(best=best),))
        with result:
            assert f(x, w).shape == (8, 6)
        gone = weakref.ref(result)
        del result
        gc.collect()
        assert gone() is None
    assert traced == [ToyConfig(2), ToyConfig(4), ToyConfig(8)]


def test_eight_threads_tune_and_enter_results_together():
    """Each shape is tuned by two threads at once: one has the journal, both have a result of their own."""
    start, found = threading.Barrier(8), {}

    def work(i):
        x, w = arrays(8 + i // 2)
        start.wait()
        result = tokamax.autotune(Toy.bind(x, w), timer=TableTimer(by_block), progress_bar=False)
        with AutotuningResult((entry(8 + i // 2, best=ToyConfig(1)),)), result:
            inside = Toy.bind(x, w).choose_config()
            out = jax.jit(Toy())(x, w)
        found[i] = result.entries[0], inside, bool(jnp.allclose(out, x @ w, atol=1e-5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(found) == list(range(8)) and options.overlays.value == ()
    for tuned, inside, right in found.values():
        assert set(tuned.outcomes) == SPACE and tuned.best == ToyConfig(8, True)
        assert (inside.source, inside.config) == ("exact", ToyConfig(8, True)) and right
    kept = store.private().entries(devices.device_kind(), "toy")
    assert {e.key for e in kept} == {Toy.bind(*arrays(m)).key for m in range(8, 12)}
    assert not housekeeping.journals(store.private())


def test_device_kind_and_environment():
    assert AutotuningResult().device_kind is None and AutotuningResult().environment == {}
    result = AutotuningResult((entry(),))
    assert result.device_kind == devices.device_kind()
    assert result.environment["timer"] == "table" and result.environment["jax"] == jax.__version__
    with pytest.raises(ValueError, match="one device kind"):
        AutotuningResult((entry(), entry(device_kind="TPU v5"))).device_kind  # noqa: B018


def test_summary_has_a_line_per_entry():
    result = AutotuningResult((entry(), entry(4, best=None, outcomes={}, error="boom")))
    head, rule, first, second, total = str(result.summary()).splitlines()
    assert "2.00x" in first and "block=2" in first and "f32[8,4]" in first
    assert "boom" in second
    assert total == f"2 entries on {devices.device_kind()}, 2 configs measured, 1 failed (run 1), " + (
        "speed-up 2.00x (geometric mean)"
    )


def test_fit_with_few_shapes_warns_and_goes_on():
    with pytest.warns(UserWarning, match="needs at least"):
        result = AutotuningResult((entry(),)).fit()
    assert result.models == {} and len(result) == 1


def test_save_to_cache_reaches_dispatch():
    result = AutotuningResult((entry(),))
    assert chosen().source == "heuristic"
    result.save_to_cache()
    assert (chosen().source, chosen().config) == ("exact", ToyConfig(2))
    assert "private cache" in chosen().detail
    with tokamax.config.private_cache(False):
        assert chosen().source == "heuristic"


def test_speedup():
    assert entry().speedup == 2.0
    assert dataclasses.replace(entry(), best=None).speedup is None
