import json

import pytest

import tokamax
from tokamax import AutotuningResult
from tokamax._src.autotuning import store
from tokamax._src.tools import cli
from toy import TableTimer, Toy, ToyConfig, arrays, by_block, entry


@pytest.fixture
def bound_args(tmp_path):
    path = tmp_path / "bound_args.json"
    path.write_text(tokamax.autotuning.bound_args_to_json([Toy.bind(*arrays(m)) for m in (4, 8)]))
    return str(path)


def test_tune_writes_a_result(bound_args, tmp_path, capsys):
    assert cli.main(["tune", bound_args, "--output", str(tmp_path / "out.json"), "--timeout", "30"]) == 0
    assert len(AutotuningResult.load(tmp_path / "out.json")) == 2
    assert "f32[8,4]" in capsys.readouterr().out


def test_merge_takes_the_later_file(tmp_path, capsys):
    AutotuningResult((entry(best=ToyConfig(2)),)).dump(tmp_path / "a.json")
    AutotuningResult((entry(best=ToyConfig(4)), entry(4))).dump(tmp_path / "b.json")
    out = tmp_path / "c.json"
    assert cli.main(["merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--output", str(out)]) == 0
    assert AutotuningResult.load(out).entries[0].best == ToyConfig(4)
    assert "2 entries" in capsys.readouterr().out


def test_explain_as_text_and_json(bound_args, capsys):
    assert cli.main(["explain", bound_args]) == 0
    assert "2 heuristic" in capsys.readouterr().out
    assert cli.main(["explain", bound_args, "--json"]) == 0
    assert [op["source"] for op in json.loads(capsys.readouterr().out)["ops"]] == ["heuristic", "heuristic"]


def test_train_then_predict(bound_args, tmp_path, capsys):
    bound = [Toy.bind(*arrays(m)) for m in (16, 24, 32, 48, 64, 96, 128, 192)]
    result = tokamax.autotune(bound, timer=TableTimer(by_block), progress_bar=False, keep=False)
    result.dump(tmp_path / "result.json")
    assert cli.main(["train", str(tmp_path / "result.json")]) in (0, 1)  # One shape of config may beat no rival.
    (sweep,) = store.private().sweeps()
    assert len(sweep.read_text().splitlines()) == len(bound)
    store.private().put_model(result.device_kind, "toy", result.fit().models[result.device_kind, "toy"])
    path = tmp_path / "new.json"
    path.write_text(tokamax.autotuning.bound_args_to_json([Toy.bind(*arrays(80))]))
    capsys.readouterr()
    assert cli.main(["predict", str(path), "--top", "3", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert len(found["configs"]) == 3 and found["configs"][0]["config"] == "block=8, fast=True"
    assert cli.main(["predict", str(path)]) == 0
    assert "private model" in capsys.readouterr().out


def test_predict_without_a_model_says_so(bound_args, capsys):
    assert cli.main(["predict", bound_args]) == 0
    assert "no model of this op and device" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "{", '{"schema": "other"}'])
def test_files_that_cannot_be_read_exit_with_2_and_one_line(tmp_path, capsys, text):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["explain", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_warnings_become_lines_of_stderr(tmp_path, capsys):
    raw = json.loads(AutotuningResult((entry(),)).dumps())
    raw["entries"][0]["bound_args"]["op"] = "some.other.Op"
    (tmp_path / "a.json").write_text(json.dumps(raw))
    assert cli.main(["merge", str(tmp_path / "a.json"), "--output", str(tmp_path / "b.json")]) == 0
    assert "warning: 1 of 1 entries" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "tune", "merge", "explain", "train", "evaluate", "predict"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0 and "usage: tokamax" in capsys.readouterr().out
