"""`training/transfer.py` on made-up tables of two devices."""

import dataclasses

import numpy as np
import pytest


@pytest.fixture(scope="module")
def transfer(training_script):
    return training_script("transfer")


def test_a_device_that_only_scales_all_times_adds_nothing(transfer, problems):
    slower = [dataclasses.replace(p, times_ms=3.0 * p.times_ms) for p in problems]
    assert transfer.difference(problems, slower) == pytest.approx(0.0, abs=1e-9)


def test_what_a_device_adds_is_found(transfer, problems):
    rng = np.random.default_rng(0)
    other = [
        dataclasses.replace(p, times_ms=p.times_ms * np.exp(rng.normal(0, 0.1, len(p.times_ms)))) for p in problems
    ]
    assert 0.05 < transfer.difference(problems, other) < 0.15


def test_rows_judge_a_model_on_another_device(transfer, model, problems, facts):
    other = dataclasses.replace(facts, kind="cpu-another-4c")
    name, count, slowdown, top_5, moved, lost, gain = transfer.row(model, problems, other)
    assert name == f"{model.device_kind_} -> cpu-another-4c" and int(count) == len(problems)
    assert 1.0 <= float(slowdown) < 1.1 and float(top_5) > 0.95
    assert 0.0 < float(moved) <= 1.0 and float(lost) <= 0.05 and float(gain.removesuffix("x")) > 1.1
