"""What `import tokamax` costs, in fresh processes."""

import os
import subprocess
import sys

HEAVY = ("sklearn", "scipy", "pandas", "matplotlib", "joblib", "tqdm", "jax.experimental.pallas")


def python(code: str, cwd) -> str:
    # -P and a folder of its own: the package comes from where the suite found it, not from the working directory.
    # Compiled once, as an installed package is, whatever the surroundings say.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def seconds(module: str, cwd) -> float:
    """Processor time of an import: unlike the clock, it does not count what other processes do."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    return float(python(code, cwd))


def test_nothing_heavy_is_imported(tmp_path):
    code = f"import sys, tokamax; print([name for name in {HEAVY} if name in sys.modules])"
    assert python(code, tmp_path) == "[]"


def test_import_starts_no_backend(tmp_path):
    code = "import tokamax; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(code, tmp_path) == "False"


def test_import_takes_little_longer_than_jax(tmp_path):
    pairs = [(seconds("tokamax", tmp_path), seconds("jax", tmp_path)) for _ in range(3)]
    ours, jaxs = (min(times) for times in zip(*pairs, strict=True))
    assert ours < 1.35 * jaxs, f"import tokamax: {ours:.2f} s, import jax: {jaxs:.2f} s"
