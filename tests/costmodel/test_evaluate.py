import dataclasses
import json

import numpy as np
import pytest

from tokamax._src import errors
from tokamax._src.costmodel import evaluate, rivals
from tokamax._src.costmodel.model import CostModel, Prediction

SMALL = {evaluate.MODEL: lambda: CostModel(iterations=30), **evaluate.RIVALS}


class Oracle:
    """Knows the times; `abstains` on all."""

    def __init__(self, table, abstains=False):
        self.table, self.abstains = table, abstains

    def fit(self, problems, facts=None):
        self.trained_ = {p.group for p in problems}
        return self

    def predict(self, arguments, configs, device=None, *, default=None, extra=None):
        problem = self.table[id(arguments)]
        assert problem.group not in self.trained_
        order = np.argsort(problem.times_ms)
        nothing = np.full(len(configs), np.nan)
        return Prediction(int(order[0]), order, nothing, nothing, abstain="no" if self.abstains else None)


def oracles(problems):
    table = {id(p.arguments): p for p in problems}
    return {
        "oracle": lambda: Oracle(table),
        "silent": lambda: Oracle(table, abstains=True),
        "default": rivals.Heuristic,
    }


def test_perfect_choices_score_one(problems, facts):
    scores = evaluate.evaluate_folds(problems, facts, choosers=oracles(problems)).scores
    oracle = scores["oracle"]
    assert oracle.mean == oracle.worst == oracle.top_1 == oracle.within_2 == oracle.coverage == 1.0
    assert oracle.slowdown == 1.0 and oracle.over_5 == 0.0


def test_abstention_falls_to_the_default_and_lowers_coverage(problems, facts):
    scores = evaluate.evaluate_folds(problems, facts, choosers=oracles(problems)).scores
    assert scores["silent"].coverage == 0.0
    assert scores["silent"].mean == scores["default"].mean < 1.0
    assert scores["silent"].top_1 == 1.0


def test_without_a_default_the_choice_runs_though_it_abstains(problems, facts):
    without = [dataclasses.replace(p, default=None) for p in problems]
    scores = evaluate.evaluate_folds(without, facts, choosers={"silent": oracles(without)["silent"]}).scores
    assert scores["silent"].mean == 1.0 and scores["silent"].coverage == 0.0


def test_failed_choice_scores_nothing(problems, facts):
    times = [np.where(np.arange(len(p.configs)) == 0, np.nan, p.times_ms) for p in problems]
    broken = [dataclasses.replace(p, times_ms=t) for p, t in zip(problems, times, strict=True)]
    scores = evaluate.evaluate_folds(broken, facts, choosers={"default": rivals.Heuristic}).scores
    assert scores["default"].mean == 0.0


def test_model_beats_its_rivals(problems, facts):
    report = evaluate.evaluate_folds(problems, facts, count=3, choosers=SMALL)
    assert report.beats_rivals()
    assert report.problems == len(problems) and report.groups == len({p.group for p in problems})
    assert set(report.scores) == {
        "model",
        "heuristic",
        "best single",
        "nearest shape",
        "5 nearest",
        "decision tree",
        "random",
    }
    assert json.loads(json.dumps(report.to_dict()))["scores"]["model"]["mean"] == report.scores["model"].mean
    assert "nearest shape" in report.table()


def test_families_are_held_out_whole(make_problem, make_problems, facts):
    problems = [*make_problems(20), *(make_problem(n, n, n) for n in (64, 128, 256)), make_problem(48, 80, 96)]
    problems.append(make_problem(72, 80, 96, dtype="float16"))
    families = evaluate.families(problems)
    assert list(families) == ["largest 20% of the shapes", "smallest 20% of the shapes", "dtypes f16"]
    assert families["dtypes f16"].tolist() == [False] * 24 + [True]
    sizes = np.array([max(map(int, p.group.split("x"))) for p in problems])
    assert sizes[families["largest 20% of the shapes"]].min() > np.median(sizes)
    for name, is_test in families.items():
        report = evaluate.evaluate_family(problems, name, is_test, facts, choosers=oracles(problems))
        assert report.problems == is_test.sum() and report.scores["oracle"].mean == 1.0


def test_odd_sizes_are_a_family(make_problem):
    problems = [make_problem(n, 64, 64) for n in (64, 128, 256, 100)]
    assert evaluate.families(problems)["odd sizes"].tolist() == [False, False, False, True]


def test_partly_measured_problems_teach_and_are_not_scored(problems, facts):
    part = [dataclasses.replace(p, complete=i % 2 == 0) for i, p in enumerate(problems)]
    report = evaluate.evaluate_folds(part, facts, count=3, choosers=oracles(part))
    assert report.problems == len(problems) // 2


def test_ceiling_is_what_choosing_by_half_of_the_samples_scores(problems, facts):
    halves = [np.stack([p.times_ms, np.where(p.log_slowdown == 0, 2.0, 1.0) * p.times_ms]) for p in problems]
    noisy = [dataclasses.replace(p, halves_ms=h) for p, h in zip(problems, halves, strict=True)]
    assert 0.5 <= noisy[0].ceiling < 1.0 and problems[0].ceiling is None
    report = evaluate.evaluate_folds(noisy, facts, choosers=oracles(noisy))
    assert report.ceiling == pytest.approx(np.mean([p.ceiling for p in noisy]))
    assert f"noise ceiling {report.ceiling:.4f}" in report.table()


def test_fallback_runs_where_the_model_abstains(problems, facts):
    class Cautious(Oracle):
        def predict(self, *args, **kwargs):
            found = super().predict(*args, **kwargs)
            return dataclasses.replace(found, abstain="no", fallback=found.index)

    table = {id(p.arguments): p for p in problems}
    scores = evaluate.evaluate_folds(problems, facts, choosers={"cautious": lambda: Cautious(table)}).scores
    assert scores["cautious"].mean == 1.0 and scores["cautious"].coverage == 0.0


def test_splits_that_score_nothing_are_errors(problems, facts):
    with pytest.raises(errors.ArgumentError, match="distinct shapes"):
        evaluate.evaluate_folds(problems[:3], facts)
    with pytest.raises(errors.ArgumentError, match="distinct shapes"):
        evaluate.evaluate_folds([], facts)
    for everything in (False, True):
        with pytest.raises(errors.ArgumentError, match="shapes to learn from and shapes to score"):
            evaluate.evaluate_family(problems, "all", np.full(len(problems), everything), facts)


def test_public_matmul_table(training_script):
    tables = training_script("tables")
    if not (tables.folder() / "gpu_matmul_triton.csv.gz").exists():
        pytest.skip("the public tables are not on this disk")
    problems = tables.matmul("H100")
    assert len(problems) == 1519
    groups = sorted({p.group for p in problems})
    chosen = set(np.random.default_rng(0).choice(groups, 90, replace=False))
    sample = [p for p in problems if p.group in chosen]
    choosers = {evaluate.MODEL: lambda: CostModel(iterations=80), "5 nearest": rivals.KNearest}
    report = evaluate.evaluate_folds(sample, tables.facts(sample[0].device_kind), count=2, choosers=choosers)
    assert report.scores["model"].top_1 > report.scores["5 nearest"].top_1
    assert report.scores["model"].top_1 > 0.9
