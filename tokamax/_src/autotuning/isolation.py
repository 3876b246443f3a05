"""Configs in a process of their own, which may hang, crash or be killed without harm to this one.

`Worker` is this process's side of one tuning: it asks a worker process to compile, run and sample configs, kills it
when a limit is exceeded, and takes another. Executables die with their process; a config is compiled again when it is
next needed. What crosses the border is the op, its arguments, its inputs and configs; out comes data alone. Outputs
stay there and are compared there.

Several configs compile at a time. When the process dies meanwhile, each of them is tried again alone, so that only the
one that kills it has failed.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tokamax._src import errors, timing
from tokamax._src.autotuning import gate
from tokamax._src.autotuning.outcome import ConfigFailed, Failure, over_limit
from tokamax._src.autotuning.processes import Process
from tokamax._src.autotuning.worker import Task
from tokamax._src.benchmarking import Compiled
from tokamax._src.bound_arguments import BoundArguments

PLATFORMS = ("gpu", "cuda", "rocm")
"""JAX platforms on which configs run in a worker process by default.

A CPU has no context that a config could poison, and threads that compile beside each other in this process. A TPU lets
one process in at a time: as long as this one holds it, no other starts.
"""


def wanted(isolation: str, platform: str) -> str:
    """Returns where configs run on a JAX platform, `none` (in this process) or `process`, for an option."""
    if isolation != "auto":
        return isolation
    return "process" if platform in PLATFORMS else "none"


def memory_is_taken(platform: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process took most of the device's memory when JAX started, so that a worker gets what is left.

    See https://docs.jax.dev/en/latest/gpu_memory_allocation.html.
    """
    preallocates = environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true") not in ("false", "False", "0")
    return platform in PLATFORMS and preallocates and environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform"


def ran_out_of_memory(failure: Failure) -> bool:
    """Whether a config failed for lack of device memory."""
    return any(sign in failure.reason for sign in ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory"))


class _Pickler(pickle.Pickler):
    """Names what another process can find, and nothing else.

    It also names functions that pickle refuses since the object of their name is a wrapper, such as `jnp.tanh`. It
    refuses what the main module defines: a worker process does not run that again.
    """

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and isinstance(getattr(value, "__qualname__", None), str):
            raise errors.ArgumentError(
                f"{value.__qualname__} is defined in the script or notebook itself, which a worker process does not run"
            )
        if not callable(value) or isinstance(value, type):
            return NotImplemented
        try:
            pickle.dumps(value)
        except Exception:
            place = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if callable(_function(*place)):
                return _function, place
        return NotImplemented


def _function(module: Any, name: Any) -> Any:
    """Returns the function of a module, None if there is none of that name."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError, TypeError):
        return None


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Died(Exception):
    """The process ended without an answer; the message says how."""


class _Door:
    """Lets many in at a time, or one alone."""

    def __init__(self) -> None:
        self._changed, self._inside, self._closed = threading.Condition(), 0, False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Enters beside others, once nobody is alone inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Enters once nobody else is inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Worker:
    """Builds, runs, judges and samples the configs of one tuning in another process.

    Args:
      ba: the op and its arguments.
      inputs: arrays of the call.
      check: whether outputs are judged, in the other process.
      tolerance: the accepted error of outputs; None for the op's own.
      timer: how to time.
      device: the JAX device.
      timeout_s: limit of each phase of a config.

    Raises:
      ArgumentError: if something cannot be sent to another process.
      UnsupportedError: if the process does not start, or does not find what it is sent.
    """

    def __init__(
        self,
        ba: BoundArguments,
        inputs: Sequence[Any],
        *,
        check: bool,
        tolerance: Any,
        timer: timing.Timer,
        device: Any,
        timeout_s: float,
    ):
        values: Any = jax.config
        try:
            task = Task(
                BoundArguments(dataclasses.replace(ba.op, config=None), ba.abstract),
                ba.default_config,
                [np.asarray(x) for x in inputs],
                check,
                tolerance,
                timer,
                device.platform,
                jax.local_devices(backend=device.platform).index(device),
                values.jax_enable_x64,
                values.jax_default_matmul_precision,
            )
            self._task = _pickled(task)
        except Exception as error:
            raise errors.ArgumentError(
                f"isolation='process' needs an op, arguments and a timer that another process can find, got {ba!r}: "
                f"{error}; define them at the top level of a module that is imported, or use isolation='none'"
            ) from error
        self.timeout_s, self._platform = timeout_s, device.platform
        self._lock, self._door, self._numbers = threading.RLock(), _Door(), itertools.count()
        self._yardstick: Any = None
        """The first config whose output was right: a new process runs it again, to judge others by it."""
        self._with_reference = check
        self.note: str | None = None
        self._ended = False
        self._process: Process | None = self._new_process()

    def _new_process(self) -> Process:
        return Process.with_task(self._task, self._platform)

    def build(self, config: Any, begins: Callable[[str], None] = lambda phase: None) -> Compiled:
        """Compiles a config; its `run` returns nothing. The limits are held here.

        Raises:
          ConfigFailed: if it cannot be compiled, exceeds the limit, or kills the process.
        """
        try:
            with self._door.together():
                facts = self._ask("compile", config, None, "trace")
        except _Died:
            # Another one that compiled at the same time may have killed the process.
            with self._door.alone():
                facts = self._ask_once("compile", config, None, "trace")
        return Compiled(lambda: self.run(config), *facts)

    def run(self, config: Any) -> None:
        """Runs a config once; its output stays in the process.

        Raises:
          ConfigFailed: if it raises, exceeds the limit, or kills the process.
        """
        self._ask_once("run", config, None, "run")

    def begin(self) -> None:
        """See `autotuner.Gate`: a reference that kills the process must not do so while configs compile in it."""

    def prepare(self, limited: Any) -> None:
        """See `autotuner.Gate`; if the reference fails or kills the process, no other process tries it."""
        try:
            self._with_reference, self.note = self._ask_once("prepare", None, None, "compile")
        except ConfigFailed as failed:
            self._with_reference = False
            self.note = gate.without_reference(failed.failure.reason)

    def try_out(self, config: Any, run: Any, limited: Any) -> str | None:
        """See `autotuner.Gate`; the limits are held here.

        Raises:
          ConfigFailed: if it raises, exceeds the limit, or kills the process.
        """
        reason, note = self._ask_once("try_out", config, (self._yardstick, self._with_reference), "run")
        self.note = self.note or note
        if reason is None and self._yardstick is None:
            self._yardstick = config
        return reason

    def measured(self, config: Any, run: Any, measure: Callable[[Any], list[float]]) -> list[float]:
        """See `autotuner.Gate`; the second output is judged in the process, where it is timed."""
        return measure(run)

    def timer(self, run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
        """Times a config in the worker; a timer for `autotuner.tune`."""
        return self._ask_once("sample", config, (rounds, (self._yardstick, self._with_reference)), "run")

    def drop(self, config: Any) -> None:
        """Gives back what a finished config holds in the process."""
        with self._lock:
            if self._process is not None:
                self._process.send(next(self._numbers), None, "drop", config, None)

    def close(self) -> None:
        """Ends the tuning; the process waits for another one."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.release()
                self._process = None

    def _ask_once(self, what: str, config: Any, extra: Any, phase: str) -> Any:
        """Like `_ask`, for a request that is the only one: if the process dies, it is to blame."""
        try:
            return self._ask(what, config, extra, phase)
        except _Died as death:
            raise ConfigFailed(Failure(_stage(phase), str(death))) from None

    def _ask(self, what: str, config: Any, extra: Any, phase: str) -> Any:
        """Sends a request to the process, a new one if need be, and waits for its answer."""
        process, number, answers = self._alive(), next(self._numbers), queue.SimpleQueue()
        process.send(number, answers, what, config, extra)
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                kind, value = answers.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                process.kill()
                raise ConfigFailed(over_limit(phase, self.timeout_s, "; its process was killed")) from None
            if kind == "ok":
                return value
            if kind == "failed":
                raise ConfigFailed(value)
            if kind == "died":
                raise _Died(process.how_it_died())
            # Another phase begins: what a new process has to do again does not count against the config's own limit.
            phase, deadline = value, time.monotonic() + self.timeout_s

    def _alive(self) -> Process:
        with self._lock:
            if self._ended:
                raise ConfigFailed(Failure("run", "the tuning has ended"))
            if self._process is None or not self._process.alive():
                self._process = self._new_process()
            return self._process


def _stage(phase: str) -> str:
    return "compile" if phase in ("trace", "compile") else "run"
