"""The benchmarks run, and what they inject is survived. Their figures are not judged here."""

import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
pytestmark = pytest.mark.slow


def run(name, *arguments):
    path = BENCHMARKS / name
    if not path.exists():
        pytest.skip("benchmarks/ is not installed")
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dispatch():
    assert "known config, us" in run("dispatch.py")


def test_scale():
    assert "20 entries of 30 configs" in run("scale.py", "--entries", "20", "--configs", "30")


def test_faults_are_survived():
    rows = [line.split("  ") for line in run("faults.py").splitlines()]
    survived = [row[0] for row in rows if "yes" in map(str.strip, row)]
    assert len(survived) == 24 and not any(cell.strip() == "NO" or cell.strip() == "no" for row in rows for cell in row)
