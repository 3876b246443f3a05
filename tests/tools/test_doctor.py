import json

import jax
import pytest

from tokamax._src import devices
from tokamax._src.autotuning import store
from tokamax._src.tools import cli, doctor
from toy import entry


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    empty = store.DirectoryStore(tmp_path / "data", tmp_path / "models")
    monkeypatch.setattr(store, "library", lambda: empty)


def test_a_machine_where_nothing_was_measured(no_library, capsys):
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["device"]["kind"] == devices.device_kind() and report["versions"]["jax"] == jax.__version__
    assert [cache["name"] for cache in report["caches"]] == ["private", "library"]
    (problem,) = report["problems"]
    assert "nothing was measured" in problem


def test_what_applies_here_is_counted(no_library, capsys):
    store.private().put([entry(8), entry(16), entry(32, device_kind="other")])
    report = doctor.examine()
    (toy,) = [item for item in report["ops"] if item["op"] == "toy"]
    assert (toy["shapes"], toy["winners"], toy["model"]) == (2, 2, None)
    assert report["problems"] == []
    assert cli.main(["doctor"]) == 0
    assert "no problems found" in capsys.readouterr().out


def test_the_shipped_models_are_named():
    (item,) = [item for item in doctor.examine()["ops"] if item["op"] == "XlaChunkedRaggedDot"]
    assert item["model"] is not None and item["model"].startswith("library model")


def test_damage_and_missing_rights_are_problems(no_library, monkeypatch, tmp_path):
    store.private().put([entry()])
    (path,) = store.private().sweeps()
    path.write_bytes(path.read_bytes() + b"{half\n")
    blocker = tmp_path / "a_file"
    blocker.write_text("")
    assert any("1 lines that cannot be read" in text for text in doctor.examine()["problems"])
    monkeypatch.setenv("TOKAMAX_CACHE_DIR", str(blocker))
    assert any("cannot be written: set TOKAMAX_CACHE_DIR" in text for text in doctor.examine()["problems"])
