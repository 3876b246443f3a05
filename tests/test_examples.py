"""Every example runs, with small sizes; what it prints about time is for larger ones."""

import importlib.util
import pathlib
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"

SMALL = {
    "transformer_block": ["--length", "32", "--width", "32", "--vocabulary", "64", "--top", "2", "--budget", "2"],
    "mixture_of_experts": ["--tokens", "32", "--width", "16", "--experts", "3", "--budget", "2"],
    "own_kernel": ["--rows", "4", "--length", "32"],
}


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SMALL)
    assert all(f"]({name}.py)" in (EXAMPLES / "README.md").read_text() for name in SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_example_runs(name, capfd, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    ratio = example.main(SMALL[name])
    assert f"ratio {ratio:.2f}" in capfd.readouterr().out
