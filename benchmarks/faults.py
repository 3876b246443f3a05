"""Injects faults into tunings and prints what survived.

    python benchmarks/faults.py              # about five minutes
    python benchmarks/faults.py --limit 3    # another time limit per config, in seconds

Each row tunes an op with three good configs and one that hangs, crashes, raises or lies, in a worker process.
`survived`: the three are measured and the fourth is recorded as failed; in the last row, a clock jumps instead. `over
the limit`: for a config that hangs, from the limit of that phase to the moment its process was killed. Below: tunings
killed with `kill -9` in the middle and begun again, and what the checks, limits and journals cost on a clean space, in
this process.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

TESTS = str(pathlib.Path(__file__).resolve().parent.parent / "tests")
sys.path.insert(0, TESTS)


def survive(fault: str, limit_s: float) -> tuple[str, ...]:
    """Tunes an op with a fault; returns a row."""
    import jax.numpy as jnp

    import tokamax
    from faulty import Faulty, FaultyConfig
    from tokamax._src.autotuning.outcome import Failure

    ba = Faulty(faults=(fault,)).bind(jnp.arange(12.0))
    noted: dict[str, float] = {}
    with _Clock(noted):
        (entry,) = tokamax.autotune(
            ba, isolation="process", timeout=limit_s, rounds=2, progress_bar=False, keep=False, ignore_cache=True
        ).entries
    outcome = entry.outcomes.get(FaultyConfig(fault))
    measured = sum(not isinstance(o, Failure) for o in entry.outcomes.values())
    good = isinstance(outcome, Failure) and measured == 3
    over = f"{noted['killed'] - noted['begun'] - limit_s:.2f} s" if outcome.stage == "timeout" else "-"
    return fault, "yes" if good else "NO", str(3 - measured), outcome.stage, over


class _Clock:
    """Notes when the last phase of the config that is at fault began, and when a process was killed."""

    def __init__(self, noted: dict[str, float]):
        self.noted = noted

    def __enter__(self) -> None:
        from tokamax._src.autotuning.processes import Process

        self._kill, self._send = Process.kill, Process.send

        def kill(process):
            self.noted["killed"] = time.monotonic()
            self._kill(process)

        def send(process, number, answers, what, config, extra):
            if getattr(config, "fault", "none") != "none" and answers is not None:
                self.noted["begun"] = time.monotonic()
                answers = _Phases(answers, self.noted)
            self._send(process, number, answers, what, config, extra)

        Process.kill, Process.send = kill, send

    def __exit__(self, *exc: object) -> None:
        from tokamax._src.autotuning.processes import Process

        Process.kill, Process.send = self._kill, self._send


@dataclasses.dataclass
class _Phases:
    """Hands answers on to a queue, and notes when a phase begins: it has a limit of its own."""

    answers: Any
    noted: dict[str, float]

    def put(self, answer: tuple[str, Any]) -> None:
        if answer[0] == "phase":
            self.noted["begun"] = time.monotonic()
        self.answers.put(answer)


def jump() -> tuple[str, ...]:
    """Tunes with a clock that jumps once, so that a slow config seems to take no time; returns a row."""
    import jax.numpy as jnp

    import tokamax
    from faulty import Faulty, FaultyConfig, with_a_jump

    ba = Faulty().bind(jnp.arange(12.0))
    options = {"isolation": "process", "rounds": 2, "progress_bar": False, "keep": False, "ignore_cache": True}
    (entry,) = tokamax.autotune(ba, timer=with_a_jump, **options).entries
    good = entry.best == FaultyConfig(number=2) and entry.outcomes[FaultyConfig(number=1)].samples_ms[0] == 3.0
    return "a sample of 0 ms", "yes" if good else "NO", str(3 - len(entry.outcomes)), "measured again", "-"


def samples_taken(cache: str, kill_at: int) -> int | None:
    """Runs a tuning in a process of its own, which kills itself at a sample; returns the samples it took at the end."""
    program = f"import sys; sys.path.insert(0, {TESTS!r}); import toy; toy.tune_until_killed({kill_at})"
    env = {**os.environ, "TOKAMAX_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) if done.returncode == 0 else None


def killed(at: int) -> tuple[str, ...]:
    """Kills a tuning at a sample and begins it again; returns a row."""
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cache:
        total = samples_taken(whole, 0)
        samples_taken(cache, at)
        again = samples_taken(cache, 0)
    # The sample under way was never taken; `at - 1` were.
    return f"kill -9 at sample {at} of {total}", "NO" if again is None else "yes", str(at - 1 + (again or 0) - total)


def overhead() -> tuple[float, float, int, int]:
    """Tunes a clean space in this process.

    Returns:
      Seconds in all; those in which a config (not the reference) was traced, compiled or ran; runs of configs; and how
      many of those belong to no sample: warm-ups, and what the check needs beside them.
    """
    import jax
    import jax.numpy as jnp

    import tokamax
    from tokamax._src import timing
    from tokamax._src.autotuning import autotuner

    busy: list[tuple[float, float]] = []
    lock, counts, tune = threading.Lock(), collections.Counter(), autotuner.tune

    def timed(function, name):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                with lock:
                    busy.append((start, time.perf_counter()))
                    counts[name] += 1

        return call

    def watched(configs, *, build, timer, **options):
        def built(config, begins):
            compiled = timed(build, "builds")(config, begins)
            return dataclasses.replace(compiled, run=timed(compiled.run, "runs"))

        def sampled(run, **about):
            before = counts["runs"]
            samples = timer(run, **about)
            counts["sampled"] += counts["runs"] - before
            return samples

        return tune(configs, build=built, timer=sampled, **options)

    lhs, rhs = jax.ShapeDtypeStruct((512, 256), jnp.float32), jax.ShapeDtypeStruct((8, 256, 512), jnp.float32)
    ba = tokamax.XlaChunkedRaggedDot.bind(lhs, rhs, jax.ShapeDtypeStruct((8,), jnp.int32))
    autotuner.tune = watched
    try:
        start = time.perf_counter()
        tokamax.autotune(ba, timer=timing.wall_clock_min, ignore_cache=True, progress_bar=False)
        total = time.perf_counter() - start
    finally:
        autotuner.tune = tune
    return total, _union(busy), counts["runs"], counts["runs"] - counts["sampled"]


def _union(spans: list[tuple[float, float]]) -> float:
    """Returns the seconds that some spans cover together."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds per config")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TOKAMAX_CACHE_DIR"] = cache
        from faulty import FAULTS
        from tokamax._src.tables import format_table

        rows = [*(survive(fault, args.limit) for fault in FAULTS), jump()]
        print(format_table([("fault", "survived", "lost", "recorded as", "over the limit"), *rows]), flush=True)
        kills = [killed(at) for at in (1, 8, 13, 24)]
        print("\n" + format_table([("fault", "resumed", "measured twice"), *kills]), flush=True)
        total, busy, runs, others = overhead()
        print(
            f"\nclean space: {total:.2f} s, where configs compiled or ran {busy:.2f} s: {total / busy - 1:.1%} more, "
            f"with {runs} runs of configs, {others} of them outside of samples"
        )
    return 0 if all(row[1] == "yes" for row in rows + kills) else 1


if __name__ == "__main__":
    sys.exit(main())
