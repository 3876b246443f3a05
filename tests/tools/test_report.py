import json
import sys

import pytest

import tokamax
from tokamax._src.autotuning import store
from tokamax._src.tools import cli
from toy import Toy, ToyConfig, arrays, entry


@pytest.fixture
def result(tmp_path):
    path = tmp_path / "result.json"
    tokamax.AutotuningResult((entry(4), entry(8))).dump(path)
    return path


def test_report_of_a_result(result, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert cli.main(["report", str(result), "--output", str(out), "--title", "Mine"]) == 0
    assert "2 entries" in capsys.readouterr().out
    assert "<h1>Mine</h1>" in out.read_text()


def test_report_of_a_folder_takes_the_newest_entry_of_each_key(tmp_path, capsys):
    place = store.DirectoryStore(tmp_path / "data", tmp_path / "models")
    place.put([entry(4), entry(8)])
    place.put([entry(8, best=ToyConfig(4))])
    out = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path / "data"), "--output", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["output"] == str(out) and told["ops"][0]["shapes"] == 2
    assert sorted(row["chosen"] for row in told["ops"][0]["times"]) == ["block=2, fast=None", "block=4, fast=None"]


def test_report_of_calls(result, tmp_path, capsys):
    calls = tmp_path / "calls.json"
    calls.write_text(tokamax.autotuning.bound_args_to_json([Toy.bind(*arrays(m)) for m in (4, 5)]))
    arguments = ["report", str(result), "--calls", str(calls), "--output", str(tmp_path / "r.html"), "--json"]
    assert cli.main(arguments) == 0
    totals = json.loads(capsys.readouterr().out)["coverage"]["totals"]
    assert {source: found["share_of_calls"] for source, found in totals.items()} == {"exact": 0.5, "heuristic": 0.5}


def test_report_of_an_empty_folder_is_an_error(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "r.html")]) == 2
    assert "must hold measured sweeps" in capsys.readouterr().err


def test_report_without_matplotlib_names_the_extra(result, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "r.html"
    assert cli.main(["report", str(result), "--output", str(out)]) == 2
    assert "tokamax[report]" in capsys.readouterr().err and not out.exists()
