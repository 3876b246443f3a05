"""From a profile to a file of bound arguments, and on to a tuning, as a user types it."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest
from programs import Own

import tokamax
from tokamax._src.tools import cli
from toy import Toy, arrays

SCRIPT = pathlib.Path(tokamax.__file__).parent / "_src" / "tools" / "xplane_to_bound_args.py"


def program(x, w):
    return Toy()(x, w) + Own()(x + 1, w) + Toy()(x + 2, w, activation=lambda x: x)


@pytest.fixture
def profile(tmp_path):
    f = jax.jit(program)
    jax.block_until_ready(f(*arrays()))
    with jax.profiler.trace(tmp_path / "profile"):
        jax.block_until_ready(f(*arrays()))
    return tmp_path / "profile"


def test_the_command_writes_what_the_reader_reads(profile, tmp_path, capsys):
    out = tmp_path / "b.json"
    assert cli.main(["bound-args", str(profile), "--output", str(out), "--json"]) == 0
    told = capsys.readouterr()
    ops = json.loads(told.out)["ops"]
    assert len(ops) == 3 and all(op["runs"] == 1 and op["time_ms"] > 0 for op in ops)
    assert "left out: an argument is a lambda" in told.err
    found = tokamax.autotuning.bound_args_from_json(out)
    assert set(found) == {Toy.bind(*arrays()), Own.bind(*arrays())}
    assert all(ba.usage.runs == 1 for ba in found)


def test_the_script_imports_nothing_and_keeps_ops_it_does_not_know(profile, tmp_path):
    (path,) = profile.rglob("*.xplane.pb")
    out = tmp_path / "b.json"
    words = [sys.executable, "-P", str(SCRIPT), f"--xplane_file={path}", f"--output_file={out}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 op calls written" in done.stdout and "'programs.Own' is not known in this process" in done.stderr
    assert "--import MODULE" in done.stderr
    assert {ba.op.registered_name() for ba in tokamax.autotuning.bound_args_from_json(out)} == {"toy", "programs.Own"}


def test_top_tunes_what_took_most_time(tmp_path, capsys):
    bound = [
        tokamax.BoundArguments(Toy(), Toy.bind(*arrays(m)).arguments, usage=tokamax.autotuning.Usage(1, 9.0 - m))
        for m in (4, 5, 6)
    ]
    path, out = tmp_path / "b.json", tmp_path / "out.json"
    path.write_text(tokamax.autotuning.bound_args_to_json(bound))
    assert cli.main(["tune", str(path), "--top", "2", "--output", str(out), "--save"]) == 0
    assert [e.bound_args for e in tokamax.AutotuningResult.load(out).entries] == bound[:2]
    assert Toy.bind(*arrays(4)).choose_config().source == "exact"
    assert cli.main(["tune", str(path), "--top", "0"]) == 2


@pytest.mark.parametrize("words", [[], ["missing.xplane.pb"]])
def test_without_a_profile(words, capsys):
    assert cli.main(["bound-args", *words]) == 2
    assert "tokamax bound-args: " in capsys.readouterr().err
