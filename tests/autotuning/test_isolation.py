"""Configs in another process: it may hang, crash or be killed; this one measures on."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import pytest

import tokamax
from faulty import Faulty, FaultyConfig
from tokamax._src import errors
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


def test_hangs_are_killed_at_the_limit():
    start = time.monotonic()
    entry = tune("hang in trace", "hang in run", timeout=8.0)
    found = failures(entry)
    assert {fault: f.stage for fault, f in found.items()} == {"hang in trace": "timeout", "hang in run": "timeout"}
    assert "compiling took more than 8 s" in found["hang in trace"].reason
    assert "a run took more than 8 s" in found["hang in run"].reason
    assert len(entry.outcomes) == 5
    assert time.monotonic() - start < 90  # Two limits, and a few processes started on a busy machine.


def test_errors_and_wrong_outputs_are_what_they_are_in_process():
    faults = ("raise in trace", "raise in run", "memory in trace", "zeros", "nan", "unstable")
    isolated, here = (failures(tune(*faults, isolation=i)) for i in ("process", "none"))
    assert isolated.keys() == set(faults)
    assert {fault: f.stage for fault, f in isolated.items()} == {fault: f.stage for fault, f in here.items()}
    assert isolated["memory in trace"] == here["memory in trace"]
    assert "NaN" in isolated["nan"].reason


def test_without_a_check_wrong_outputs_are_measured():
    assert failures(tune("zeros", check=False)) == {}


def test_a_lambda_is_an_error_before_any_work():
    (entry,) = tokamax.autotune(Toy.bind(*arrays(), activation=lambda x: x), isolation="process").entries
    assert "isolation='process' needs an op, arguments and a timer that another process can find" in entry.error
    assert "isolation='none'" in entry.error and not entry.outcomes


def test_isolation_is_none_or_process():
    with pytest.raises(errors.ArgumentError, match="isolation must be one of"):
        tune(isolation="container")


def test_named_functions_and_vmap_axes_cross_the_border():
    import jax

    x, w = arrays()
    f = jax.vmap(lambda x: Toy()(x, w, activation=jnp.tanh))
    options = {"isolation": "process", "progress_bar": False, "rounds": 1}
    (entry,) = tokamax.autotune(f, jnp.stack([x, x]), **options).entries
    assert entry.error is None and set(entry.outcomes) == SPACE


PROGRAM = """
import sys
sys.path[:0] = {path!r}
import dataclasses, jax.numpy as jnp, tokamax

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

{guard}
    result = tokamax.autotune(Own.bind(jnp.ones(3)), isolation="process", rounds=1, progress_bar=False)
    print(result.entries[0].error, len(result.entries[0].outcomes), flush=True)
"""


@pytest.mark.parametrize("guard", ["if __name__ == '__main__':", "if True:"])
def test_ops_of_a_script(tmp_path, guard):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM).format(path=sys.path, guard=guard))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ, timeout=240)
    if guard == "if True:":
        assert "if __name__ == '__main__'" in done.stdout
    else:
        assert done.stdout.strip() == "None 2", done.stderr


def test_the_process_ends_with_its_parent(tmp_path):
    code = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {sys.path!r}
        if __name__ == "__main__":
            import jax.numpy as jnp, tokamax
            from faulty import Faulty
            from tokamax._src.autotuning.processes import Process
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
