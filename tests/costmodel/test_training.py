"""Training and evaluation from sweeps of a toy op, as the project's own data lie."""

import json

import numpy as np
import pytest

import toy
from tokamax._src import devices, shapes
from tokamax._src.autotuning import store
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.benchmarking import BenchmarkData
from tokamax._src.costmodel import model as model_lib
from tokamax._src.costmodel.model import CostModel
from tokamax._src.tools import cli
from tokamax.autotuning import Entry


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    """A few trees say as much about the commands."""
    monkeypatch.setattr(model_lib, "_SETTINGS", ((float("inf"), 15, 15, 5, 0.2),))


def entry(rows, columns):
    f32 = np.dtype("float32")
    ba = toy.Toy().bind(shapes.ArraySpec((rows, 64), f32), shapes.ArraySpec((64, columns), f32))
    best = rows * columns / 40_000  # A tree over rows and columns alone does not get that right.
    outcomes = {}
    for config in ba.autotuning_configs:
        ms = rows * columns * 1e-5 * (1 + 0.3 * abs(np.log2(config.block / best)) + 0.2 * bool(config.fast))
        failed = config.block == 4 and config.fast and rows < 100
        outcomes[config] = Failure("run", "died") if failed else BenchmarkData((ms, ms), 1.0, 1.0, None)
    default = toy.ToyConfig(2)
    return Entry(ba, devices.device_kind(), outcomes, default, default, {})


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    entries = [entry(*(int(n) for n in 2 ** rng.uniform(5, 11, 2))) for _ in range(48)]
    store.DirectoryStore(tmp_path / "data", tmp_path / "models").keep(entries)
    return tmp_path


def test_train_writes_the_same_model_twice(folder, capsys):
    contents = []
    for name in ("models", "again"):
        assert cli.main(["train", "--data", str(folder / "data"), "--models", str(folder / name)]) == 0
        (path,) = (folder / name).glob("*/*.npz")
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    model = CostModel.load(path)
    assert model.op_ == "toy" and path.stem == "toy"
    problem = entry(600, 600)
    chosen = model.choose(problem.bound_args.abstract, problem.bound_args.autotuning_configs, default=problem.default)
    assert chosen.abstain is None
    assert problem.bound_args.autotuning_configs[chosen.index] == toy.ToyConfig(8)
    assert "written" in capsys.readouterr().out


def test_train_without_data_says_so(tmp_path, capsys):
    assert cli.main(["train", "--data", str(tmp_path), "--models", str(tmp_path), "--op", "toy"]) == 1
    assert "no model was written" in capsys.readouterr().err


def test_evaluate_prints_folds_and_families(folder, capsys):
    assert cli.main(["evaluate", "--data", str(folder / "data"), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert len(reports) == 3 and reports[0]["scores"]["model"]["mean"] > 0.9
    assert [r["split"].split()[0] for r in reports[1:]] == ["largest", "smallest"]


def test_evaluate_without_data_fails(tmp_path, capsys):
    assert cli.main(["evaluate", "--data", str(tmp_path)]) == 1
    assert "nothing was evaluated" in capsys.readouterr().err


def test_a_model_that_does_worse_on_new_shapes_does_not_replace_the_present_one(folder, monkeypatch):
    from tokamax._src import training

    place = store.DirectoryStore(folder / "data", folder / "models")
    (problems,) = training.sweeps(place.data)
    place.put_model(problems[0].device_kind, "toy", CostModel().fit(problems[:30]))
    path = place.model_path(problems[0].device_kind, "toy")
    before = path.read_bytes()
    # More data helps: the new model is written.
    assert training.train(problems, place).written == path
    assert path.read_bytes() != before
    # A learner that has become worse is not, even if it beat its rivals.
    path.write_bytes(before)
    place.reload()
    monkeypatch.setattr(model_lib, "_SETTINGS", ((float("inf"), 1, 2, 5, 0.2),))
    monkeypatch.setattr(training.evaluate.Report, "beats_rivals", lambda self: True)
    again = training.train(problems, place)
    assert again.written is None and "never saw, the present model reaches" in again.note
    assert path.read_bytes() == before


def test_a_model_knows_which_shapes_it_has_seen(folder):
    from tokamax._src import training

    (problems,) = training.sweeps(folder / "data")
    model = CostModel().fit(problems[:30])
    assert all(model.has_seen(problem.arguments) for problem in problems[:30])
    assert not any(model.has_seen(problem.arguments) for problem in problems[30:])
