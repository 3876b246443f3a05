"""Estimated entries: kept apart from measured ones in files, merges, stores and training data."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax import AutotuningResult
from tokamax._src import errors
from tokamax._src.autotuning import estimated, store
from tokamax._src.autotuning.result import Winner
from tokamax._src.costmodel import dataset
from toy import SPACE, Estimating, ToyConfig, arrays, data, entry, estimated_entry

MEASURED = entry(bound_args=Estimating.bind(*arrays()))
ALL_FAILED = entry(bound_args=Estimating.bind(*arrays()), best=None, outcomes=estimated_entry().outcomes)


def result(*entries):
    return AutotuningResult(entries)


@given(st.dictionaries(st.sampled_from(sorted(SPACE, key=str)), st.floats(1e-6, 1e6), min_size=1))
def test_text_round_trip(times):
    best = min(times, key=times.get)
    before = result(estimated_entry(best=best, estimated_ms=times))
    after = AutotuningResult.loads(before.dumps())
    assert after.entries[0].estimated_ms == times and after.entries[0].is_estimated
    assert after.dumps() == before.dumps() and after.overlay == before.overlay


def test_a_file_of_measured_entries_says_nothing_of_estimates():
    raw = json.loads(result(MEASURED).dumps())
    assert "estimated_ms" not in raw["entries"][0]
    assert not AutotuningResult.loads(json.dumps(raw)).entries[0].is_estimated


@pytest.mark.parametrize("ms", [0, -1.0, None, True, "1", [1]])
def test_a_time_that_is_none_costs_its_entry(ms):
    raw = json.loads(result(estimated_entry(), MEASURED).dumps())
    raw["entries"][0]["estimated_ms"][0][1] = ms
    with pytest.warns(UserWarning, match="1 of 2.*positive number of ms"):
        assert len(AutotuningResult.loads(json.dumps(raw))) == 1


def test_an_entry_is_measured_or_estimated():
    with pytest.raises(errors.ArgumentError, match="measured or estimated"):
        dataclasses.replace(estimated_entry(), outcomes={ToyConfig(2): data()})
    raw = json.loads(result(MEASURED).dumps())
    raw["entries"][0]["estimated_ms"] = [[{"block": 2}, 1.0]]
    with pytest.warns(UserWarning, match="measured or estimated"):
        assert not AutotuningResult.loads(json.dumps(raw)).entries


@pytest.mark.parametrize("measured", [MEASURED, ALL_FAILED])
def test_measured_wins_over_estimated_on_either_side(measured):
    guess = estimated_entry()
    assert (result(measured) | result(guess)).entries == (measured,)
    assert (result(guess) | result(measured)).entries == (measured,)


def test_of_two_estimated_the_right_one_wins_and_both_beat_an_error():
    first, second = estimated_entry(), estimated_entry(best=ToyConfig(1))
    failed = entry(bound_args=first.bound_args, best=None, outcomes={}, error="boom")
    assert (result(first) | result(second)).entries == (second,)
    assert (result(first) | result(failed)).entries == (first,)
    assert (result(failed) | result(first)).entries == (first,)


def test_what_is_estimated_is_no_winner_and_teaches_nothing():
    guess = estimated_entry()
    assert Winner.of(guess) is None and guess.median_ms(guess.best) is None and guess.speedup is None
    assert estimated.Estimated.of(MEASURED) is None
    assert dataset.problems_from_entries([guess]) == []
    assert result(guess).overlay.winners == {} and result(guess).overlay != result().overlay


def test_the_summary_marks_what_was_not_measured():
    said = str(result(MEASURED, estimated_entry(16)).summary())
    assert "~2.5 ms" in said and "1 time is estimated (~)" in said
    assert "estimated" not in str(result(MEASURED).summary())


def test_a_store_keeps_both_apart():
    place, guess = store.private(), estimated_entry(16)
    at = MEASURED.device_kind, "estimating"
    place.put([MEASURED, guess])
    assert [e.key for e in place.entries(*at)] == [MEASURED.key]
    assert place.winner(*at, guess.key) is None and place.estimated(*at, MEASURED.key) is None
    assert place.estimated(*at, guess.key) == estimated.Estimated.of(guess)
    place.put([estimated_entry(8, ms=1.0)])
    assert place.estimated(*at, guess.key).ms == 2.5 and place.estimated(*at, MEASURED.key).ms == 1.0
    assert len(place.entries(*at)) == 1 and [p.name for p in place.sweeps()] == ["estimating.jsonl"]


def test_a_store_of_estimates_alone_has_no_sweep():
    place = store.private()
    place.put([estimated_entry()])
    assert not list(place.sweeps()) and place.estimated(MEASURED.device_kind, "estimating", MEASURED.key)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('[{"schema":"tokamax-winners","version":1,"device_kind":"a"}]', "must be tokamax-estimated version 1"),
        ('[{"schema":"tokamax-estimated","version":1,"device_kind":"b"}]', "of 'a'"),
        ('[{"schema":"tokamax-estimated","version":1,"device_kind":"a"},["key",{"config":{}}]]', "1 of 1"),
        ('[{"schema":"tokamax-estimated","version":1,"device_kind":"a"},3]', "1 of 1"),
    ],
)
def test_a_damaged_file_is_a_miss_with_a_warning(tmp_path, text, match):
    (tmp_path / "file").write_text(text)
    with pytest.warns(UserWarning, match=match):
        assert estimated.FILES.read(tmp_path / "file", "a") == {}
    assert estimated.FILES.read(tmp_path / "none", "a") == {}
