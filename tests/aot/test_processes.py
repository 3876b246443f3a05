"""Compiler processes, with a script in the place of the worker: what hangs, crashes or cannot start."""

import os

import pytest

from tokamax._src import errors
from tokamax._src.aot import processes
from tokamax._src.aot.processes import Compilers

WORKER = """
import base64, json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    what = base64.b64decode(request["program"]).decode()
    if what == "hang":
        time.sleep(600)
    if what == "crash":
        os.kill(os.getpid(), 11)
    if what == "exit":
        sys.exit(3)
    if what == "refuse":
        answer = {"error": "XlaRuntimeError: INTERNAL: Mosaic failed\\n more", "seconds": 0.5}
    elif what == "large":
        answer = {"error": "XlaRuntimeError: RESOURCE_EXHAUSTED: vmem", "seconds": 0.5}
    elif what == "broken":
        answer = {"broken": "ValueError: no such topology"}
    else:
        sizes = {"temp": os.getpid()}
        answer = {"seconds": 0.25, "memory_bytes": sizes, "costs": {"flops": float(len(request["topology"]))}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    monkeypatch.setattr(processes, "_WORKER", path)
    return path


def verdict(compilers, what):
    return compilers.submit(what.encode(), "v5e:2x2").result()


def test_one_process_serves_many_programs(worker):
    with Compilers(max_workers=1) as compilers:
        first, second = verdict(compilers, "a"), verdict(compilers, "b")
    assert first.compiles and first.seconds == 0.25 and first.costs == {"flops": 7.0}
    assert first.memory_bytes == second.memory_bytes


def test_refusals_are_values(worker):
    with Compilers(max_workers=1) as compilers:
        refused, large, broken = (verdict(compilers, what) for what in ("refuse", "large", "broken"))
    assert (refused.kind, refused.reason) == ("refused", "XlaRuntimeError: INTERNAL: Mosaic failed more")
    assert (large.kind, large.failure().stage) == ("resource exhausted", "compile")
    assert (broken.kind, broken.is_lasting) == ("crashed", False)


def test_what_hangs_is_killed_and_the_next_goes_on(worker):
    with Compilers(timeout_s=1.0, max_workers=1) as compilers:
        before, hung, after = (verdict(compilers, what) for what in ("a", "hang", "a"))
    assert hung.kind == "timeout" and hung.failure().stage == "timeout" and "1 s" in hung.reason
    assert before.compiles and after.compiles and before.memory_bytes != after.memory_bytes


@pytest.mark.parametrize(("what", "how"), [("crash", "SIGSEGV"), ("exit", "exit code 3")])
def test_what_crashes_is_told_and_the_next_goes_on(worker, what, how):
    with Compilers(max_workers=1) as compilers:
        crashed, after = verdict(compilers, what), verdict(compilers, "a")
    assert crashed.kind == "crashed" and how in crashed.reason and after.compiles


def test_a_process_that_cannot_start_is_told(worker, monkeypatch):
    worker.write_text("raise SystemExit(5)")
    with Compilers(max_workers=1) as compilers:
        assert "must start" in verdict(compilers, "a").reason
    worker.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(processes, "_START_S", 0.5)
    with Compilers(max_workers=1) as compilers:
        assert "must start within 0.5 s" in verdict(compilers, "a").reason


def test_leaving_ends_what_still_runs(worker):
    with Compilers(max_workers=2) as compilers:
        pid = verdict(compilers, "a").memory_bytes["temp"]
        compilers.submit(b"hang", "")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not compilers._all


@pytest.mark.parametrize("options", [{"max_workers": 0}, {"timeout_s": 0}])
def test_options_must_make_sense(options):
    with pytest.raises(errors.ArgumentError, match="must be positive"):
        Compilers(**options)


@pytest.mark.parametrize("missing", ["libtpu", "flatbuffers"])
def test_without_the_compiler_the_extra_is_named(monkeypatch, missing):
    def version(name):
        if missing == "libtpu":
            raise processes.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(processes.metadata, "version", version)
    if missing == "flatbuffers":
        monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingExtraError, match=r"tokamax\[aot-tpu\]"):
        processes.compiler_version()
