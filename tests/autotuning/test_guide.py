"""The guide on made-up times: it finds what is fast with few measurements, and stops when nothing more is to be had."""

import dataclasses

import numpy as np
import pytest

from tokamax._src import devices, errors, shapes
from tokamax._src.autotuning import guide
from tokamax._src.costmodel.dataset import Problem

FACTS = devices.DeviceFacts("cpu-test-4c", "cpu", cores=4)
SPACE = [{"block": b, "stages": s, "mode": m} for b in (8, 16, 32, 64, 128, 256) for s in (1, 2, 3, 4) for m in "ab"]


def times_of(size):
    """The best block grows with the size; two stages are best; mode b is a fifth slower."""
    return np.array(
        [
            1.0 + 0.4 * abs(np.log2(c["block"] * 16 / size)) + 0.1 * abs(c["stages"] - 2) + 0.2 * (c["mode"] == "b")
            for c in SPACE
        ]
    )


def problem(size):
    arguments = {"x": shapes.ArraySpec((size, 64), np.dtype("float32"))}
    return Problem("op", f"k{size}", f"{size}x64", arguments, tuple(SPACE), times_of(size), 0, FACTS.kind)


def search(times, **options):
    """Runs a search; returns the indices measured, in order."""
    propose = guide.Guide(SPACE, **options)
    known = {}
    while batch := propose(known):
        assert not known.keys() & set(batch) and len(set(batch)) == len(batch)
        known |= {i: float(times[i]) for i in batch}
    return list(known)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_finds_the_best_without_a_prior(batch, seed):
    times = times_of(1024)
    found = search(times, budget=16, batch=batch, seed=seed, first=[0])
    assert found[0] == 0 and len(found) <= 16 < len(SPACE) / 2
    assert times[found].min() <= 1.1 * times.min()


def test_budget_is_kept_and_the_same_seed_gives_the_same_search():
    times = times_of(512)
    runs = [search(times, budget=5, batch=4, seed=1) for _ in range(2)]
    assert len(runs[0]) == 5 and runs[0] == runs[1]
    assert sorted(search(times, budget=1000, least_gain=-1.0)) == list(range(len(SPACE)))


def test_first_ones_come_first_even_in_a_small_batch():
    assert search(times_of(512), budget=4, batch=1, first=[7, 3, 7])[:2] == [7, 3]
    assert search(times_of(512), budget=1, batch=1, first=[7, 3]) == [7]


def test_a_right_prior_needs_hardly_a_measurement():
    times = times_of(2048)
    log_slowdown = np.log(times / times.min())
    prior = guide.Prior(log_slowdown, np.full(len(SPACE), 0.005))
    found = search(times, budget=30, prior=prior)
    assert found[0] == int(np.argmin(times)) and len(found) < 6


def test_a_wrong_prior_is_corrected():
    times = times_of(2048)
    wrong = times_of(256)
    prior = guide.Prior(np.log(wrong / wrong.min()), np.full(len(SPACE), 0.05))
    found = search(times, budget=20, prior=prior, first=[len(SPACE) - 1])
    assert times[found].min() <= 1.05 * times.min()


def test_configs_that_the_prior_does_not_know_come_last():
    times = times_of(512)
    log_slowdown = np.log(times / times.min())
    unknown = int(np.argmin(times))
    log_slowdown[unknown] = np.nan
    found = search(times, budget=5, prior=guide.Prior(log_slowdown, np.full(len(SPACE), 0.01)))
    assert unknown not in found[:2]


def test_failures_are_learned_from():
    times = times_of(1024)
    times[[c["block"] >= 64 for c in SPACE]] = np.nan
    found = search(times, budget=16, first=[0])
    assert np.nanmin(times[found]) <= 1.05 * np.nanmin(times)
    assert np.isnan(times[found]).sum() < len(found) / 2


def test_all_failing_ends_with_the_budget():
    assert len(search(np.full(len(SPACE), np.nan), budget=6)) == 6


def test_nothing_to_gain_ends_the_search():
    assert len(search(np.ones(len(SPACE)), budget=40, first=[0])) < 30


@pytest.mark.parametrize("budget", [0, -3])
def test_budget_must_be_positive(budget):
    with pytest.raises(errors.ArgumentError, match="at least 1 config"):
        guide.Guide(SPACE, budget=budget)


def test_default_budgets():
    assert [guide.default_budget(n) for n in (1, 5, 29, 300, 4540)] == [1, 5, 8, 23, 90]


def test_vectors_take_any_config():
    @dataclasses.dataclass(frozen=True)
    class Config:
        tile: int | None
        flag: bool
        same: int = 3

    x = guide.vectors([Config(None, True), Config(16, False), Config(64, True)])
    assert x.shape[0] == 3 and np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1
    assert len({tuple(row) for row in x}) == 3
    assert guide.vectors([Config(16, True)]).shape == (1, 1)


def test_teacher_predicts_after_a_few_shapes_and_names_the_nearest_winner():
    teacher = guide.Teacher(facts=FACTS)
    new = problem(1400)
    assert teacher.prior(new.arguments, new.configs) is None
    assert teacher.nearest_winner(new.arguments, new.configs) is None
    for size in (128, 256, 512, 1024, 1500, 3000, 4096):
        teacher.learn(problem(size))
    prior = teacher.prior(new.arguments, new.configs)
    best = int(np.argmin(new.times_ms))
    assert prior.log_slowdown[best] <= np.nanquantile(prior.log_slowdown, 0.2)
    assert (prior.spread > 0).all()
    assert teacher.nearest_winner(new.arguments, new.configs) == int(np.argmin(times_of(1500)))


def test_teacher_fits_again_only_when_it_has_learned_a_quarter_more(monkeypatch):
    fits = []
    fit = guide.CostModel.fit
    monkeypatch.setattr(guide.CostModel, "fit", lambda self, *a: fits.append(1) or fit(self, *a))
    teacher, new = guide.Teacher(facts=FACTS), problem(700)
    for n in range(12):
        teacher.learn(problem(128 + 128 * n))
        teacher.prior(new.arguments, new.configs)
    assert len(fits) == 4  # of 5, 7, 9 and 12 shapes


def test_a_plan_keeps_the_number_of_measurements():
    sweep = [problem(128 * n).arguments for n in range(1, 61)]
    plan = guide.Plan.of(sweep, len(SPACE), 14)
    assert len(plan.lessons) == len(set(plan.lessons)) == 5
    assert len(plan.lessons) * len(SPACE) + (60 - len(plan.lessons)) * plan.budget <= 60 * 14
    assert {0, 59} <= set(plan.lessons)  # As far apart as can be.


def test_plans_without_lessons():
    sweep = [problem(128 * n).arguments for n in range(1, 61)]
    assert guide.Plan.of(sweep, len(SPACE), 8) == guide.Plan((), 8)  # Too few lessons for a model.
    assert guide.Plan.of(sweep, len(SPACE), 8, known=100) == guide.Plan((), 8)
    assert guide.Plan.of(sweep, 5, 8) == guide.Plan((), 8)
    assert guide.Plan.of([], 5, 8) == guide.Plan((), 8)


def test_a_guided_sweep_finds_good_configs():
    """The first shapes of a sweep teach the later ones."""
    teacher, losses = guide.Teacher(facts=FACTS), []
    for size in (200, 333, 512, 700, 900, 1024, 1300, 1800, 2048, 3000):
        p = problem(size)
        prior = teacher.prior(p.arguments, p.configs)
        found = search(p.times_ms, budget=16, prior=prior, first=[0])
        teacher.learn(dataclasses.replace(p, configs=tuple(SPACE[i] for i in found), times_ms=p.times_ms[found]))
        losses.append(p.times_ms[found].min() / p.best_ms)
    assert np.mean(losses[5:]) < 1.01
