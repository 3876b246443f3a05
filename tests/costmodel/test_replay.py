"""Replay of recorded tables: what the guide finds, by how few measurements."""

import sys

import numpy as np
import pytest


@pytest.fixture(scope="module")
def replay(training_script):
    return training_script("replay")


def test_a_guided_sweep_beats_chance_at_the_same_cost(replay, make_problems, facts):
    problems = replay.shuffled(make_problems(20), 0)
    found = replay.guided(problems, facts, 5)
    chance = replay.at_random(problems, [n for _, n in found])
    ours, _, share = replay.summary(problems, found)
    assert ours > 0.97 > replay.summary(problems, chance)[0]
    assert share < 0.25


def test_replay_is_the_same_every_time(replay, make_problems, facts):
    problems = replay.shuffled(make_problems(8), 1)
    assert replay.guided(problems, facts, 5) == replay.guided(problems, facts, 5)


def test_shapes_teach_the_next_ones(replay, make_problems, facts):
    problems = replay.shuffled(make_problems(24), 0)
    taught, alone = (replay.guided(problems, facts, 4, teach=teach) for teach in (True, False))
    assert np.mean([q for q, _ in taught[12:]]) > np.mean([q for q, _ in alone[12:]])


def test_public_matmul_table(replay, training_script):
    tables = training_script("tables")
    if not (tables.folder() / "gpu_matmul_triton.csv.gz").exists():
        pytest.skip("the public tables are not on this disk")
    problems = replay.shuffled(tables.matmul("H100"), 0)[:80]
    found = replay.guided(problems, tables.facts(problems[0].device_kind), 4)
    quality, _, share = replay.summary(problems, found)
    chance = replay.summary(problems, replay.at_random(problems, [n for _, n in found]))[0]
    assert quality > 0.93 > chance + 0.05 and share < 0.2


@pytest.mark.parametrize(("shapes", "split"), [(8, "8 shape-grouped folds"), (30, "5 shape-grouped folds")])
def test_a_table_is_judged_on_folds(training_script, replay, make_problems, facts, monkeypatch, shapes, split):
    evaluate = training_script("evaluate")
    monkeypatch.setitem(sys.modules, "replay", replay)
    monkeypatch.setattr(replay, "tables", lambda names: [(names[0], make_problems(shapes), facts, None)])
    (report,) = evaluate.judge_tables(["h100"])
    assert report.split == split and {"model", "5 nearest"} <= report.scores.keys()
