"""Configs in another process: it may hang, crash or be killed; this one measures on."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import pytest

import tokamax
from faulty import CALLED, Faulty, FaultyConfig, counting_executables
from tokamax._src import devices, errors
from tokamax._src.autotuning import autotuner, isolation, processes, session
from tokamax._src.autotuning.processes import Process
from toy import SPACE, TableTimer, Toy, ToyConfig, arrays, by_block

GOOD = [FaultyConfig(number=n) for n in range(3)]
X = jnp.arange(12.0).reshape(3, 4)


def tune(*faults, timeout=30.0, **options):
    ba = Faulty(faults=faults).bind(X)
    options = {"isolation": "process", "rounds": 1, "progress_bar": False} | options
    (entry,) = tokamax.autotune(ba, timeout=timeout, **options).entries
    assert entry.error is None
    return entry


def failures(entry):
    return {c.fault: o for c, o in entry.outcomes.items() if isinstance(o, tokamax.autotuning.Failure)}


@pytest.fixture(scope="module", autouse=True)
def no_idle_processes_stay():
    yield
    Process.end_idle()


def test_a_clean_space_is_measured_and_the_process_is_used_again():
    entry = tune()
    assert set(entry.outcomes) == set(GOOD) and not failures(entry)
    assert entry.environment["isolation"] == "process"
    (process,) = Process.idle
    before = process.pid
    x, w = arrays()
    options = {"isolation": "process", "progress_bar": False, "rounds": 2}
    (entry,) = tokamax.autotune(Toy.bind(x, w), timer=TableTimer(by_block), **options).entries
    assert entry.best == ToyConfig(8, True) and set(entry.outcomes) == SPACE
    assert [p.pid for p in Process.idle] == [before]


def test_crashes_cost_only_the_config_that_crashes():
    found = failures(tune("exit in trace", "segfault in run", "killed in trace", "exit in run"))
    assert {fault: f.stage for fault, f in found.items()} == {
        "exit in trace": "compile",
        "killed in trace": "compile",
        "segfault in run": "run",
        "exit in run": "run",
    }
    assert "exit code 7" in found["exit in trace"].reason and "exit code 7" in found["exit in run"].reason
    assert "SIGKILL" in found["killed in trace"].reason and "SIGSEGV" in found["segfault in run"].reason


def test_a_stall_in_trace_compile_check_or_run_is_killed_at_the_limit():
    """The compiler really stalls: XLA computes a constant."""
    start = time.monotonic()
    in_words = {"trace": "tracing", "compile": "compiling", "check": "the check", "run": "a run"}
    entry = tune(*(f"hang in {phase}" for phase in in_words), timeout=8.0)
    told = {fault: (f.stage, f.reason) for fault, f in failures(entry).items()}
    assert told == {
        f"hang in {phase}": ("timeout", f"{words} took more than 8 s; its process was killed")
        for phase, words in in_words.items()
    }
    assert len(entry.outcomes) == 7
    assert time.monotonic() - start < 150  # Four limits, and a few processes started on a busy machine.


def test_errors_and_wrong_outputs_are_what_they_are_in_process():
    faults = ("raise in trace", "raise in run", "memory in trace", "memory in run", "zeros", "nan", *CALLED)
    isolated, here = (failures(tune(*faults, isolation=i)) for i in ("process", "none"))
    assert isolated.keys() == set(faults)
    assert {fault: f.stage for fault, f in isolated.items()} == {fault: f.stage for fault, f in here.items()}
    assert isolated["memory in trace"] == here["memory in trace"]
    assert "NaN" in isolated["nan"].reason and isolated["memory in run"].stage == "run"
    assert "two runs must give the same output" in isolated["changes"].reason
    assert isolated["writes into its inputs"].reason == "it writes into its inputs"


def test_without_a_check_wrong_outputs_are_measured():
    assert failures(tune("zeros", check=False)) == {}


def test_a_lambda_is_an_error_before_any_work():
    (entry,) = tokamax.autotune(Toy.bind(*arrays(), activation=lambda x: x), isolation="process").entries
    assert "isolation='process' needs an op, arguments and a timer that another process can find" in entry.error
    assert "isolation='none'" in entry.error and not entry.outcomes


def test_isolation_is_none_or_process():
    with pytest.raises(errors.ArgumentError, match="isolation must be one of .*auto"):
        tune(isolation="container")


def test_named_functions_and_vmap_axes_cross_the_border():
    x, w = arrays()
    f = jax.vmap(lambda x: Toy()(x, w, activation=jnp.tanh))
    options = {"isolation": "process", "progress_bar": False, "rounds": 1}
    (entry,) = tokamax.autotune(f, jnp.stack([x, x]), **options).entries
    assert entry.error is None and set(entry.outcomes) == SPACE


PROGRAM = """
import sys
sys.path[:0] = {path!r}
import dataclasses, warnings, jax.numpy as jnp, tokamax
from faulty import Faulty
from tokamax._src.autotuning import isolation

isolation.PLATFORMS = ("cpu",)
print("begins", flush=True)

@dataclasses.dataclass(frozen=True)
class Config:
    n: int

@dataclasses.dataclass(frozen=True)
class Own(tokamax.Op):
    config_cls = Config

    def _fwd(self, x, *, return_residuals, config):
        return 2 * x + 0.0 * config.n, None

    def _get_autotuning_configs(self, ba):
        return {{Config(1), Config(2)}}

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    op = {op}
    result = tokamax.autotune(op.bind(jnp.ones(3)), isolation={isolation!r}, rounds=1, progress_bar=False)
(entry,) = result.entries
print(entry.error, len(entry.outcomes), entry.environment.get("isolation"), [str(w.message) for w in caught])
"""


def run_script(tmp_path, **blanks):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM).format(path=sys.path, **blanks))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ, timeout=240)
    first, second = done.stdout.splitlines()
    assert first == "begins", "the script ran again in the worker"
    return second


@pytest.mark.parametrize("isolation", ["process", "auto"])
def test_a_script_needs_no_guard(tmp_path, isolation):
    assert run_script(tmp_path, op="Faulty()", isolation=isolation) == "None 3 process []"


def test_an_op_of_the_script_itself_is_an_error_before_any_work(tmp_path):
    told = run_script(tmp_path, op="Own()", isolation="process")
    assert "Own is defined in the script or notebook itself" in told and "isolation='none' 0" in told


def test_an_op_of_the_script_itself_runs_in_this_process_by_default_with_one_note(tmp_path):
    told = run_script(tmp_path, op="Own()", isolation="auto")
    assert told.startswith("None 2 none: isolation='process' needs an op")
    assert told.count("configs of __main__.Own run in this process") == 1


@pytest.mark.parametrize(
    ("platform", "place"),
    [("cpu", "none"), ("gpu", "process"), ("rocm", "process"), ("tpu", "none"), ("other", "none")],
)
def test_a_gpu_is_isolated_by_default(platform, place, monkeypatch):
    assert isolation.wanted("auto", platform) == place
    assert isolation.wanted("none", platform) == "none" and isolation.wanted("process", platform) == "process"
    fake = dataclasses.replace(session.Settings(), timer=TableTimer(by_block))
    monkeypatch.setattr(devices, "current", lambda: types.SimpleNamespace(platform=platform))
    assert fake.how().get("isolation", "none") == place


def test_a_worker_takes_memory_as_it_needs_it_whatever_this_process_does():
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    assert processes.worker_environment({name: "true", "A": "b"}) == {name: "false", "A": "b"}
    assert isolation.memory_is_taken("gpu", {}) and isolation.memory_is_taken("gpu", {name: "true"})
    assert not isolation.memory_is_taken("gpu", {name: "false"}) and not isolation.memory_is_taken("cpu", {})


def test_a_lack_of_memory_that_this_process_took_is_told(monkeypatch):
    run = autotuner.TuningRun({1: tokamax.autotuning.Failure("run", "RESOURCE_EXHAUSTED: out of memory")}, False)
    monkeypatch.setattr(devices, "current", lambda: types.SimpleNamespace(platform="gpu"))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    with pytest.warns(UserWarning, match="1 configs .* XLA_PYTHON_CLIENT_PREALLOCATE=false"):
        session._warn_of_memory(Toy.bind(*arrays()), run)


def test_finished_configs_are_dropped_in_the_process():
    """Else the executables of a large space fill the device's memory."""
    device, op = jax.devices()[0], Faulty()
    worker = isolation.Worker(
        op.bind(X), [X], check=True, tolerance=None, timer=counting_executables, device=device, timeout_s=60.0
    )
    try:
        ways = {"gate": worker, "drop": worker.drop, "timer": worker.timer, "rounds": 1, "timeout_s": 600.0}
        autotuner.tune(GOOD, default=GOOD[0], build=worker.build, **ways)
        worker.build(GOOD[0])
        assert worker.timer(None, bound_args=None, config=GOOD[0], rounds=1) == [1.0]
    finally:
        worker.close()


def test_the_process_ends_with_its_parent(tmp_path):
    code = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        if __name__ == "__main__":
            import jax.numpy as jnp, tokamax
            from faulty import Faulty
            from tokamax._src.autotuning.processes import Process
            tokamax.autotune(Faulty().bind(jnp.ones(3)), isolation="process", rounds=1, progress_bar=False)
            print(Process.idle[0].pid, flush=True)
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent by 10 s")
