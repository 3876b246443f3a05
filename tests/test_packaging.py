"""The folders of data and models are found in a checkout and travel with the package."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

import tokamax
from tokamax._src import resources

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("folder", [resources.data_dir, resources.models_dir])
def test_folders_are_found(folder):
    assert (folder() / "README.md").is_file()


def test_folders_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "tokamax")
    assert resources.data_dir() == tmp_path / "data"
    assert resources.models_dir() == tmp_path / "models"


def test_folders_inside_the_package_come_first(tmp_path, monkeypatch):
    (tmp_path / "tokamax" / "data").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "tokamax")
    assert resources.data_dir() == tmp_path / "tokamax" / "data"
    assert resources.models_dir() == tmp_path / "models"


def test_types_are_shipped():
    assert (pathlib.Path(tokamax.__file__).parent / "py.typed").is_file()


def pip_wheel(source: pathlib.Path, into: pathlib.Path) -> set[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(source)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = into.glob("tokamax-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_wheel_holds_all_that_a_checkout_has(tmp_path):
    names = pip_wheel(ROOT, tmp_path)
    for folder in ("data", "models"):
        here = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.*") if path.suffix != ".lock"}
        assert {f"tokamax/{name}" for name in here} <= names
    assert {"tokamax/py.typed", "tokamax/_src/resources.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "training", "data", "models")) for name in names)
