import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax import BenchmarkData
from tokamax._src import errors
from tokamax._src.autotuning import outcome
from tokamax._src.autotuning.outcome import Failure, fastest, paired_gain
from toy import SPACE, ToyConfig, data

DEFAULT, OTHER = ToyConfig(1), ToyConfig(2)
times = st.floats(1.0, 1e3)
samples = st.lists(times, min_size=1, max_size=6).map(tuple)
measurements = samples.map(BenchmarkData)
failures = st.builds(Failure, st.sampled_from(outcome.STAGES), st.text(max_size=20), st.just(()) | samples)
tables = st.dictionaries(st.sampled_from(sorted(SPACE, key=str)), measurements | failures)


@given(tables, st.randoms(use_true_random=False))
def test_order_does_not_matter(table, rng: random.Random):
    items = list(table.items())
    rng.shuffle(items)
    assert fastest(dict(items), DEFAULT) == fastest(table, DEFAULT)


@given(tables)
def test_only_what_ran_wins(table):
    best = fastest(table, DEFAULT)
    ran = {config for config, o in table.items() if isinstance(o, BenchmarkData)}
    assert best in ran if ran else best is None


@given(tables)
def test_winner_is_the_default_or_has_the_least_median(table):
    best = fastest(table, DEFAULT)
    medians = [o.median_ms for o in table.values() if isinstance(o, BenchmarkData)]
    assert best in (None, DEFAULT) or table[best].median_ms == min(medians)


@given(tables, failures)
def test_a_failure_more_changes_nothing(table, failure):
    without = {config: o for config, o in table.items() if config != OTHER}
    assert fastest(without | {OTHER: failure}, DEFAULT) == fastest(without, DEFAULT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_times_that_are_none_cannot_become_a_measurement(bad):
    with pytest.raises(errors.ArgumentError):
        BenchmarkData((1.0, bad))
    with pytest.raises(errors.FormatError):
        outcome.from_json({"samples_ms": [1.0, bad]})


@given(samples, st.floats(1.0, 1.019))
def test_gain_below_the_least_counts_for_nothing(default, ratio):
    table = {DEFAULT: BenchmarkData(default), OTHER: BenchmarkData(tuple(ms / ratio for ms in default))}
    assert fastest(table, DEFAULT) == DEFAULT


@given(samples, st.floats(1.03, 10.0))
def test_gain_of_every_round_counts(default, ratio):
    table = {DEFAULT: BenchmarkData(default), OTHER: BenchmarkData(tuple(ms / ratio for ms in default))}
    assert fastest(table, DEFAULT) == OTHER


def test_gain_within_the_noise_stays_default():
    noisy = {
        DEFAULT: BenchmarkData((10.0, 8.0, 11.0, 9.0, 10.5)),
        OTHER: BenchmarkData((8.0, 9.5, 10.5, 10.5, 9.0)),
    }
    gain, noise = paired_gain(noisy[DEFAULT], noisy[OTHER])
    assert 0.02 < gain < noise
    assert fastest(noisy, DEFAULT) == DEFAULT


def test_least_gain_can_be_set():
    table = {DEFAULT: data(1.0), OTHER: data(0.9)}
    assert fastest(table, DEFAULT) == OTHER
    assert fastest(table, DEFAULT, min_gain=0.11) == DEFAULT


@given(st.lists(st.tuples(times, times, st.floats(0.1, 10.0)), min_size=1, max_size=6))
def test_common_drift_changes_no_paired_gain(rounds):
    plain = [BenchmarkData(tuple(row[i] for row in rounds)) for i in (0, 1)]
    drifted = [BenchmarkData(tuple(row[i] * row[2] for row in rounds)) for i in (0, 1)]
    for a, b in zip(paired_gain(*plain), paired_gain(*drifted), strict=True):
        assert math.isclose(a, b, abs_tol=1e-3)


@given(
    st.dictionaries(st.sampled_from(sorted(SPACE, key=str)), st.sampled_from([1.0, 1.3, 2.0, 5.0]), min_size=1),
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6),
)
def test_common_drift_changes_no_winner(ms, drift):
    steady = {config: BenchmarkData((t,) * len(drift)) for config, t in ms.items()}
    drifted = {config: BenchmarkData(tuple(t * d for d in drift)) for config, t in ms.items()}
    assert fastest(drifted, DEFAULT) == fastest(steady, DEFAULT)


def test_ties_go_by_the_order_of_configs():
    table = {config: data(1.0) for config in sorted(SPACE, key=str, reverse=True)}
    del table[DEFAULT]
    assert fastest(table, DEFAULT) == ToyConfig(1, True)
    assert fastest(table | {DEFAULT: data(1.0)}, DEFAULT) == DEFAULT


def test_default_that_failed_is_replaced():
    table = {DEFAULT: Failure("run", "boom"), OTHER: data(9.0), ToyConfig(4): data(8.9)}
    assert fastest(table, DEFAULT) == ToyConfig(4)


def test_a_single_round_has_no_noise():
    assert paired_gain(BenchmarkData((2.0,)), BenchmarkData((1.0,))) == (math.log(2), 0.0)


def test_rounds_are_paired_from_the_first():
    gain, noise = paired_gain(BenchmarkData((2.0, 4.0, 8.0)), BenchmarkData((1.0, 2.0)))
    assert math.isclose(gain, math.log(2)) and noise == 0


def test_times_of_zero_are_no_error():
    assert fastest({DEFAULT: data(1.0), OTHER: data(0.0)}, DEFAULT) == OTHER
    assert fastest({DEFAULT: data(0.0), OTHER: data(0.0)}, DEFAULT) == DEFAULT


@given(
    failures
    | st.builds(BenchmarkData, samples, st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.integers(0, 2**50))
)
def test_json_round_trip(value):
    text = json.dumps(outcome.to_json(value), allow_nan=False)
    assert outcome.from_json(json.loads(text)) == value


def test_json_needs_the_samples_alone():
    assert outcome.from_json({"samples_ms": [1, 2], "from_the_future": 3}) == BenchmarkData((1.0, 2.0))
    assert outcome.from_json({"failure": "run"}) == Failure("run", "")


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        [],
        "failure",
        {},
        {"samples_ms": []},
        {"samples_ms": 1.0},
        {"samples_ms": ["x"]},
        {"samples_ms": [1.0], "compile_ms": None},
        {"samples_ms": [1.0], "peak_memory_bytes": math.inf},
        {"failure": 3},
        {"failure": "run", "measured_ms": 3},
        {"failure": "run", "measured_ms": [-1.0]},
        {"failure": "bad luck"},
    ],
)
def test_other_json_is_a_format_error(value):
    with pytest.raises(errors.FormatError, match="samples_ms or a failure"):
        outcome.from_json(value)


def test_failure_of_an_exception_is_one_line():
    failure = Failure.of("compile", ValueError("\nfirst\nsecond"))
    assert failure == Failure("compile", "ValueError: first")
    assert Failure.of("run", MemoryError()).reason == "MemoryError: no message"
    assert len(Failure.of("run", ValueError("x" * 10_000)).reason) < 400


def test_failure_has_a_known_stage():
    with pytest.raises(errors.ArgumentError, match="stage must be one of.*got 'luck'"):
        Failure("luck", "bad")
