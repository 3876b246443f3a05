"""What runs in a worker process: takes tasks, and answers requests to compile, run, check and sample their configs.

The process is started by `processes`, and imports nothing of the program that started it but what a task names.
"""

import dataclasses
import functools
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import benchmarking, inputs, timing
from tokamax._src.autotuning import gate
from tokamax._src.autotuning.outcome import ConfigFailed, Failure
from tokamax._src.benchmarking import Compiled
from tokamax._src.bound_arguments import BoundArguments

READY = "ready"
_PARENT_POLL_S = 1.0


@dataclasses.dataclass(frozen=True)
class Task:
    """All that the process needs to know, picklable.

    Attributes:
      ba: the op with abstract arguments.
      default: its default config.
      arrays: the arrays of the call.
      check: whether outputs are judged.
      tolerance: the accepted error of outputs.
      timer: how to time.
      platform: JAX platform of the device.
      device: index of the device among those of its platform on this host.
      x64: whether 64-bit types are enabled.
      precision: JAX's default matmul precision.
    """

    ba: BoundArguments
    default: Any
    arrays: list[np.ndarray]
    check: bool
    tolerance: Any
    timer: timing.Timer
    platform: str
    device: int
    x64: bool
    precision: Any


def serve(connection: Any, parent: int) -> None:
    """Takes one task after the other until the connection or the parent process ends; then ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sending = threading.Lock()
    while True:
        try:
            pickled = connection.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            server = _Server(connection, sending, pickle.loads(pickled))
        except BaseException as error:
            connection.send(f"{type(error).__name__}: {error}")
            continue
        connection.send(READY)
        if not server.run():
            break
        del server
    os._exit(0)  # A thread that hangs in a config must not keep the process.


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


class _Server:
    """One task: compiles in threads, runs in one."""

    def __init__(self, connection: Any, sending: threading.Lock, task: Task):
        jax.config.update("jax_enable_x64", task.x64)
        jax.config.update("jax_default_matmul_precision", task.precision)
        jax.config.update("jax_default_device", jax.local_devices(backend=task.platform)[task.device])
        self._connection, self._sending, self._task = connection, sending, task
        made = inputs.Inputs(lambda: [jnp.array(x, copy=True) for x in task.arrays])
        self._arrays = made.arrays
        self._compiled: dict[Any, Compiled] = {}
        self._gate = gate.Gate(
            gate.comparison(task.ba, task.tolerance),
            task.default,
            gate.reference_of(task.ba, made.arrays),
            inputs=made,
        )
        self._ran: set[Any] = set()
        """Configs that ran in this process; where outputs are judged, with the right one."""
        self._phases: dict[int, str] = {}

    def run(self) -> bool:
        """Answers requests until the task is over; returns False if the connection is."""
        runs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run_in_turn, args=(runs,), daemon=True).start()
        try:
            while (request := pickle.loads(self._connection.recv_bytes())) is not None:
                if request[1] == "compile":
                    threading.Thread(target=self._answer, args=request, daemon=True).start()
                else:
                    runs.put(request)
        except (EOFError, OSError):
            return False
        runs.put(None)
        self._send(None, None, None)
        return True

    def _run_in_turn(self, runs: "queue.SimpleQueue[Any]") -> None:
        while (request := runs.get()) is not None:
            if request[1] == "drop":
                self._drop(request[2])
            else:
                self._answer(*request)

    def _drop(self, config: Any) -> None:
        """Gives back what a finished config holds; nobody waits for an answer."""
        self._compiled.pop(config, None)
        self._ran.discard(config)

    def _send(self, *answer: Any) -> None:
        with self._sending:
            self._connection.send(answer)

    def _begin(self, number: int, phase: str) -> None:
        """Tells that a phase of a request begins, which has a limit of its own."""
        self._phases[number] = phase
        self._send(number, "phase", phase)

    def _answer(self, number: int, what: str, config: Any, extra: Any) -> None:
        try:
            value = getattr(self, f"_{what}")(number, config, extra)
        except BaseException as error:
            phase = self._phases.pop(number, "compile")
            self._send(number, "failed", Failure.of("run" if phase == "run" else "compile", error))
        else:
            self._phases.pop(number, None)
            self._send(number, "ok", value)

    def _built(self, number: int, config: Any) -> Compiled:
        if config not in self._compiled:
            function, _ = self._task.ba.as_function(config)
            begins = functools.partial(self._begin, number)
            self._compiled[config] = benchmarking.compile_function(function, self._arrays, begins)
        return self._compiled[config]

    def _compile(self, number: int, config: Any, _: None) -> tuple[float, float, int | None, str | None]:
        compiled = self._built(number, config)
        return compiled.compile_ms, compiled.lowering_ms, compiled.peak_memory_bytes, compiled.program

    def _run(self, number: int, config: Any, _: None) -> None:
        compiled = self._built(number, config)
        self._begin(number, "run")
        compiled.run()
        self._ran.add(config)

    def _limited(self, number: int) -> gate.Limited:
        """Returns what runs a step with a limit of its own, which the other side holds."""

        def call(step: Callable[[], Any], phase: str = "run") -> Any:
            self._begin(number, phase)
            return step()

        return call

    def _prepare(self, number: int, _: None, __: None) -> tuple[bool, str | None]:
        self._gate.prepare(self._limited(number))
        return self._gate.has_reference, self._gate.note

    def _try_out(self, number: int, config: Any, known: tuple[Any, bool]) -> tuple[str | None, str | None]:
        """Judges a config; `known` is a config whose output was right, and whether the reference can run."""
        yardstick, with_reference = known
        reason = None
        if not with_reference:
            self._gate.build_reference = None
        elif not self._gate.has_reference:
            self._prepare(number, None, None)
        for each in (config,) if yardstick is None or yardstick in self._gate.judged else (yardstick, config):
            reason = self._gate.try_out(each, self._built(number, each).run, self._limited(number))
            if reason is None:
                self._ran.add(each)
        return reason, self._gate.note

    def _sample(self, number: int, config: Any, extra: tuple[int, tuple[Any, bool]]) -> list[float]:
        rounds, known = extra
        compiled = self._built(number, config)
        if config not in self._ran:  # The process that it ran in first is gone.
            if not self._task.check:
                self._run(number, config, None)
            elif (reason := self._try_out(number, config, known)[0]) is not None:
                raise ConfigFailed(Failure("check", reason))
        self._begin(number, "run")

        def times(run: Callable[[], Any]) -> list[float]:
            return [float(ms) for ms in self._task.timer(run, bound_args=self._task.ba, config=config, rounds=rounds)]

        return self._gate.measured(config, compiled.run, times) if self._task.check else times(compiled.run)
