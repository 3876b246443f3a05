import json
import shlex
import subprocess
import sys

import pytest

import tokamax
from tokamax import AutotuningResult, BoundArguments
from tokamax._src.autotuning import store
from tokamax._src.tools import cli, completion, doctor, tune
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


COMMANDS = [module.__name__.rpartition(".")[2].replace("_", "-") for module in cli.COMMANDS]
ACTIONS = ["list", "show", "prune", "import", "export"]


@pytest.mark.parametrize("command", [[c] for c in COMMANDS if c != "cache"] + [["cache", a] for a in ACTIONS])
def test_every_command_explains_itself_with_an_example_and_json(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "usage: tokamax" in text
    assert f"example:\n  tokamax {' '.join(command)}" in text and "--json" in text


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "cache"])
def test_examples_are_commands_that_parse(command):
    """An example that does not parse would be worse than none."""
    commands = next(a for a in cli.parser()._actions if a.dest == "command")
    for line in commands.choices[command].epilog.splitlines()[1:]:
        for words in line.split("&&"):
            parsed = cli.parser().parse_args(shlex.split(words.partition(">")[0])[1:])
            assert callable(parsed.run)


def test_exit_codes_are_documented(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "exit codes:" in capsys.readouterr().out


def test_wrong_use_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["tune"])
    assert stop.value.code == 2


def test_an_interruption_exits_with_130(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["doctor"]) == 130


def test_an_op_that_cannot_be_tuned_exits_with_1(bound_args, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune.api, "autotune", lambda bound, **_: AutotuningResult((entry(8, best=None, outcomes={}),)))
    assert cli.main(["tune", bound_args, "--output", str(tmp_path / "out.json"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["totals"]["with_a_config"] == 0 and told["output"].endswith("out.json")


def test_merge_and_train_as_json(tmp_path, capsys):
    AutotuningResult((entry(),)).dump(tmp_path / "a.json")
    out = str(tmp_path / "c.json")
    assert cli.main(["merge", str(tmp_path / "a.json"), "--output", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": out, "entries": 1, "unknown": 0}
    assert cli.main(["train", str(tmp_path / "a.json"), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert told["op"] == "toy" and not told["written"]


def test_suggestions_weigh_by_time(tmp_path, capsys):
    bound = [
        BoundArguments(Toy(), Toy.bind(*arrays(m)).arguments, usage=tokamax.autotuning.Usage(1, ms))
        for m, ms in ((4, 0.1), (8, 9.0), (512, 1.0))
    ]
    path, out = tmp_path / "b.json", tmp_path / "next.json"
    path.write_text(tokamax.autotuning.bound_args_to_json(bound))
    words = ["train", "--suggest", "1", "--among", str(path), "--output", str(out)]
    assert cli.main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["shapes"]) == 1
    assert tokamax.autotuning.bound_args_from_json(out) == (bound[1],)
    assert cli.main(["train", "--suggest", "1"]) == 2


def test_predict_an_op_with_shapes(capsys):
    words = ["--arg", "f32[512,128]", "--arg", "f32[8,128,256]", "--arg", "i32[8]"]
    assert cli.main(["predict", "XlaChunkedRaggedDot", *words, "--top", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["arguments"].startswith("XlaChunkedRaggedDot(lhs=f32[512,128]")


def test_explain_with_a_result_and_the_command_for_the_rest(bound_args, tmp_path, capsys):
    AutotuningResult((entry(8),)).dump(tmp_path / "a.json")
    assert cli.main(["explain", bound_args, "--result", str(tmp_path / "a.json")]) == 0
    assert "1 exact (50 % of the calls), 1 heuristic" in capsys.readouterr().out
    assert cli.main(["explain", bound_args]) == 0
    assert f"tokamax tune {bound_args} --save" in capsys.readouterr().out


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "bound-args" in capsys.readouterr().out


def test_completion_names_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "tokamax[completion]" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    code = "import sys; from tokamax._src.tools import cli; sys.exit(cli.main(['--help']))"
    words = f'{sys.executable} -P -c "{code}" | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
