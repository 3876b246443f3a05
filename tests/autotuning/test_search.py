import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamax._src.autotuning import search
from toy import SPACE, ToyConfig

DEFAULT = ToyConfig(1)
CONFIGS = sorted(SPACE, key=str)
times = st.lists(st.floats(0, 1e3), min_size=1, max_size=4)
tables = st.dictionaries(st.sampled_from(CONFIGS), times, min_size=1)


@given(st.permutations(CONFIGS), st.integers(0, 100))
def test_shuffled_depends_on_the_round_alone(configs, number):
    order = search.shuffled(configs, number)
    assert order == search.shuffled(CONFIGS, number)
    assert sorted(order, key=str) == CONFIGS


def test_every_config_comes_first_in_some_round():
    assert {search.shuffled(CONFIGS, number)[0] for number in range(100)} == SPACE


@given(tables)
def test_survivors_keep_the_default_and_the_fastest(samples):
    kept = search.survivors(samples, DEFAULT)
    assert set(kept) <= set(samples)
    assert (DEFAULT in kept) == (DEFAULT in samples)
    assert min(samples, key=lambda c: statistics.median(samples[c])) in kept


def test_survivors_drop_clear_losers_by_their_best_sample():
    samples = {DEFAULT: [9.0], ToyConfig(2): [1.0, 1.0], ToyConfig(4): [9.0, 1.4], ToyConfig(8): [1.6, 1.6]}
    assert search.survivors(samples, DEFAULT) == [DEFAULT, ToyConfig(2), ToyConfig(4)]
    assert search.survivors(samples, DEFAULT, ratio=2.0) == list(samples)


@given(tables)
def test_finalists_are_few_close_and_hold_the_default(samples):
    chosen = search.finalists(samples, DEFAULT)
    medians = {c: statistics.median(s) for c, s in samples.items()}
    assert len(chosen) == len(set(chosen)) <= search.FINALISTS + 1
    assert medians[chosen[0]] == min(medians.values())
    assert (DEFAULT in chosen) == (DEFAULT in samples)
    assert all(c == DEFAULT or medians[c] <= search.FINALIST_RATIO * medians[chosen[0]] for c in chosen)


@given(st.permutations(CONFIGS))
def test_finalists_do_not_depend_on_the_order(configs):
    samples = {c: [1.0] for c in configs}
    assert search.finalists(samples, DEFAULT) == search.finalists({c: [1.0] for c in CONFIGS}, DEFAULT)


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 50))
def test_slower_configs_get_fewer_rounds_but_two(a, b, rounds):
    fast, slow = (search.affordable_rounds(ms, rounds, budget_ms=2000.0) for ms in sorted((a, b)))
    assert min(2, rounds) <= slow <= fast <= rounds


@pytest.mark.parametrize(
    ("ms", "rounds", "expected"), [(0.0, 5, 5), (100.0, 5, 5), (500.0, 5, 4), (5000.0, 5, 2), (5000.0, 1, 1)]
)
def test_affordable_rounds(ms, rounds, expected):
    assert search.affordable_rounds(ms, rounds, budget_ms=2000.0) == expected


@pytest.mark.parametrize(
    ("samples", "doubtful"),
    [
        ({"a": [1.0], "b": [0.09], "c": [2.0]}, ["b"]),
        ({"a": [1.0], "b": [0.11], "c": [2.0]}, []),
        ({"a": [0.05], "b": [0.06], "c": [2.0]}, []),
        ({"a": [1.0, 1.0, 0.3], "b": [1.0, 0.4, 0.4]}, ["a"]),
        ({"a": [0.3, 1.0, 1.0]}, []),
        ({"a": [1.0, 0.0], "b": [0.0]}, ["a", "b"]),
        ({"a": [1e-9]}, []),
        ({}, []),
    ],
)
def test_implausible_samples(samples, doubtful):
    assert search.implausible(samples) == doubtful


@given(st.dictionaries(st.integers(0, 9), st.lists(st.floats(0, 1e3), min_size=1, max_size=4)))
def test_implausible_does_not_depend_on_the_order_and_spares_most(samples):
    found = search.implausible(samples)
    assert found == search.implausible(dict(reversed(samples.items())))
    firsts = [c for c in found if len(samples[c]) == 1 and samples[c][0] > 0]
    assert len(firsts) <= 1
