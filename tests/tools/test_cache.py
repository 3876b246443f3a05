import json

import pytest

import tokamax
from tokamax import AutotuningResult
from tokamax._src.autotuning import housekeeping, store
from tokamax._src.tools import cli
from toy import Toy, ToyConfig, arrays, entry, estimated_entry

OLD = "2001-02-03T04:05:06+00:00"


def aged(m, time=OLD, **changes):
    fresh = entry(m)
    return entry(m, environment={**fresh.environment, "time": time, **changes})


def run(capsys, *words, code=0):
    assert cli.main(["cache", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def source(m):
    return Toy.bind(*arrays(m)).choose_config().source


@pytest.fixture
def filled():
    store.private().put([entry(8), aged(16), aged(32, time="9999-01-01T00:00:00", jax="0.0.1")])
    store.private().keep([aged(8)])


def test_list(filled, capsys):
    (sweep,) = run(capsys, "list")["sweeps"]
    assert (sweep["op"], sweep["entries"], sweep["shapes"], sweep["winners"]) == ("toy", 4, 3, 3)
    assert sweep["newest"].startswith("9999") and not sweep["has_model"]
    assert run(capsys, "list", "--op", "other")["sweeps"] == []
    assert cli.main(["cache", "list"]) == 0 and "4 entries, 0 journals" in capsys.readouterr().out


def test_an_empty_cache_lists_nothing(capsys):
    assert run(capsys, "list")["sweeps"] == []


def test_show_takes_the_newest_of_each_shape(filled, capsys):
    store.private().keep([entry(8, best=ToyConfig(4))])
    told = run(capsys, "show")
    assert len(told["entries"]) == 3
    assert [e["config"] for e in told["entries"] if "f32[8,4]" in e["arguments"]] == ["block=4, fast=None"]


def test_prune_by_age_drops_entries_and_their_winners(filled, capsys):
    assert [source(m) for m in (8, 16, 32)] == ["exact"] * 3
    dry = run(capsys, "prune", "--older-than", "365", "--dry-run")
    assert dry == {"entries": 2, "winners": 1, "journals": 0, "estimated": 0, "dry_run": True}
    assert run(capsys, "list")["sweeps"][0]["entries"] == 4
    assert run(capsys, "prune", "--older-than", "365") == dry | {"dry_run": False}
    tokamax.autotuning.reload_caches()
    assert [source(m) for m in (8, 16, 32)] == ["exact", "heuristic", "exact"]
    assert len(store.private().entries(entry().device_kind, "toy")) == 2


def test_prune_by_toolchain(filled, capsys):
    assert run(capsys, "prune", "--stale")["entries"] == 1
    assert source(8) == "exact"


def test_prune_all_and_filters(filled, capsys):
    assert run(capsys, "prune", "--all", "--op", "other")["entries"] == 0
    assert run(capsys, "prune", "--all")["entries"] == 4
    assert [source(m) for m in (8, 16, 32)] == ["heuristic"] * 3


def test_prune_says_what_must_be_said(filled, capsys):
    assert cli.main(["cache", "prune"]) == 2
    assert "--older-than" in capsys.readouterr().err


def test_prune_keeps_what_it_cannot_read_and_what_others_left(filled, capsys):
    (path,) = store.private().sweeps()
    unknown = {"bound_args": {"op": "gone"}, "device_kind": "x", "outcomes": [], "environment": {}}
    path.write_bytes(path.read_bytes() + json.dumps(unknown).encode() + b"\n{half a li")
    assert run(capsys, "list")["sweeps"][0]["damaged"] == 1
    run(capsys, "prune", "--older-than", "365")
    lines = path.read_bytes().splitlines()
    assert lines[-2:] == [json.dumps(unknown).encode(), b"{half a li"]


def test_prune_journals(capsys):
    folder = store.private().data / "device" / "journal"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("{}\n")
    assert len(housekeeping.journals(store.private())) == 1
    assert run(capsys, "prune", "--journals")["journals"] == 1
    assert housekeeping.journals(store.private()) == []


def test_export_and_import(filled, tmp_path, capsys, monkeypatch):
    out = tmp_path / "mine.json"
    assert run(capsys, "export", "--output", str(out)) == {"output": str(out), "entries": 3, "older": 1}
    assert len(AutotuningResult.load(out)) == 3
    monkeypatch.setenv("TOKAMAX_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert source(16) == "heuristic"
    assert run(capsys, "import", str(out))["entries"] == 3
    assert source(16) == "exact"
    assert run(capsys, "list")["sweeps"][0]["winners"] == 3


def test_prune_what_was_estimated(filled, capsys):
    store.private().put([estimated_entry()])
    assert len(run(capsys, "list")["estimated"]) == 1
    assert run(capsys, "prune", "--estimated", "--op", "toy")["estimated"] == 0
    assert run(capsys, "prune", "--estimated", "--dry-run")["estimated"] == 1
    found = run(capsys, "prune", "--estimated")
    assert (found["estimated"], found["entries"]) == (1, 0) and run(capsys, "list")["estimated"] == []
