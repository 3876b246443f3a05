"""Configs in a process of their own, which may hang, crash or be killed without harm to this one.

`Worker` is this process's side: it starts the process (never by a fork, since JAX is running), asks it to compile, run
and sample configs, kills it when a limit is exceeded, and starts another. Executables die with their process; a config
is compiled again when it is next needed. What crosses the border is the op, its arguments, its inputs and configs; out
comes data alone. Outputs stay there and are compared there.

Several configs compile at a time. When the process dies meanwhile, each of them is tried again alone, so that only the
one that kills it has failed.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from tokamax._src import benchmarking, errors, timing
from tokamax._src.autotuning import gate
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.benchmarking import Compiled
from tokamax._src.bound_arguments import BoundArguments

_START_S = 120.0
"""How long a process may take to start and import JAX."""
_END_S = 5.0
_PARENT_POLL_S = 1.0
_READY = "ready"
_DOING = {"compile": "compiling", "run": "a run"}


class ConfigFailed(Exception):
    """A config failed in the worker; carries the outcome."""

    def __init__(self, failure: Failure):
        super().__init__(failure.reason)
        self.failure = failure


@dataclasses.dataclass(frozen=True)
class _Task:
    """All that the process needs to know, picklable.

    Attributes:
      ba: the op with abstract arguments.
      inputs: its arrays.
      check: whether outputs are judged.
      tolerance: the accepted error of outputs.
      timer: how to time.
      platform: JAX platform of the device.
      device: index of the device on its platform.
      x64: whether 64-bit types are enabled.
      precision: JAX's default matmul precision.
    """

    ba: BoundArguments
    inputs: list[np.ndarray]
    check: bool
    tolerance: Any
    timer: timing.Timer
    platform: str
    device: int
    x64: bool
    precision: Any


class _Pickler(pickle.Pickler):
    """Also names functions that pickle refuses since the object of their name is a wrapper, such as `jnp.tanh`."""

    def reducer_override(self, value: Any) -> Any:
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


def _pickled(task: _Task) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(task)
    return file.getvalue()


class _Died(Exception):
    """The process ended without an answer; the message says how."""


class _Gate:
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
    """Builds, runs and samples the configs of one tuning in another process.

    Args:
      ba: the op and its arguments.
      inputs: arrays of the call.
      check: whether outputs are judged, in the other process.
      tolerance: the accepted error of outputs; None for the op's own.
      timer: how to time.
      device: the JAX device.
      timeout_s: limit of compiling one config, and of running it once.

    Raises:
      ArgumentError: if something cannot be sent to another process.
      UnsupportedError: if the process does not start.
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
            task = _Task(
                BoundArguments(dataclasses.replace(ba.op, config=None), ba.abstract),
                [np.asarray(x) for x in inputs],
                check,
                tolerance,
                timer,
                device.platform,
                jax.devices(device.platform).index(device),
                values.jax_enable_x64,
                values.jax_default_matmul_precision,
            )
            self._task = _pickled(task)
        except Exception as error:
            raise errors.ArgumentError(
                f"isolation='process' needs an op, arguments and a timer that another process can find, got {ba!r}: "
                f"{error}; define them at the top level of a module, or use isolation='none'"
            ) from error
        self.timeout_s = timeout_s
        self._lock, self._gate, self._numbers = threading.RLock(), _Gate(), itertools.count()
        self._yardstick: Any = None
        """The first config whose output was right: a new process runs it again, to judge others by it."""
        self._with_reference = check
        self.note: str | None = None
        self._ended = False
        self._process: _Process | None = _Process.with_task(self._task)

    def build(self, config: Any) -> Compiled:
        """Compiles a config; its `run` returns nothing.

        Raises:
          ConfigFailed: if it cannot be compiled, exceeds the limit, or kills the process.
        """
        try:
            with self._gate.together():
                facts = self._ask("compile", config, None, "compile")
        except _Died:
            # Another one that compiled at the same time may have killed the process.
            with self._gate.alone():
                facts = self._ask_once("compile", config, None, "compile")
        return Compiled(lambda: self.run(config), *facts)

    def run(self, config: Any) -> None:
        """Runs a config once; its output stays in the process.

        Raises:
          ConfigFailed: if it raises, exceeds the limit, or kills the process.
        """
        self._ask_once("run", config, None, "run")

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

    def timer(self, run: Any, *, bound_args: Any, config: Any, rounds: int) -> list[float]:
        """Times a config in the worker; a timer for `autotuner.tune`."""
        return self._ask_once("sample", config, rounds, "run")

    def close(self) -> None:
        """Ends the tuning; the process waits for another one."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.release()
                self._process = None

    def _ask_once(self, what: str, config: Any, extra: Any, stage: str) -> Any:
        """Like `_ask`, for a request that is the only one: if the process dies, it is to blame."""
        try:
            return self._ask(what, config, extra, stage)
        except _Died as death:
            raise ConfigFailed(Failure(stage, str(death))) from None

    def _ask(self, what: str, config: Any, extra: Any, stage: str) -> Any:
        """Sends a request to the process, a new one if need be, and waits for its answer."""
        process, number, answers = self._alive(), next(self._numbers), queue.SimpleQueue()
        process.send(number, answers, what, config, extra)
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                kind, value = answers.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                process.kill()
                reason = f"{_DOING[stage]} took more than {self.timeout_s:g} s; its process was killed"
                raise ConfigFailed(Failure("timeout", reason)) from None
            if kind == "ok":
                return value
            if kind == "error":
                raise ConfigFailed(Failure(stage, value))
            if kind == "died":
                raise _Died(process.how_it_died())
            # Another phase begins: what a new process has to do again does not count against the config's own limit.
            stage, deadline = value, time.monotonic() + self.timeout_s

    def _alive(self) -> "_Process":
        with self._lock:
            if self._ended:
                raise ConfigFailed(Failure("run", "the tuning has ended"))
            if self._process is None or not self._process.alive():
                self._process = _Process.with_task(self._task)
            return self._process


class _Process:
    """One worker process, with the thread that hands out its answers."""

    _idle: ClassVar[list["_Process"]] = []
    _idle_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._sending = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self._process: Any = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    @classmethod
    def with_task(cls, task: bytes) -> "_Process":
        """Returns an idle process, else a new one, that has taken a task.

        Raises:
          UnsupportedError: if none can be had.
        """
        while True:
            with cls._idle_lock:
                process = cls._idle.pop() if cls._idle else None
            fresh = process is None
            process = cls() if process is None else process
            reason = process._take(task)
            if reason is None:
                return process
            process.kill()
            if fresh:
                raise errors.UnsupportedError(
                    f"a worker process must start and take the task, got: {reason}; a script that tunes with "
                    "isolation='process' must do so under `if __name__ == '__main__':`"
                )

    def _take(self, task: bytes) -> str | None:
        """Hands over a task; returns what is wrong, None if nothing is."""
        try:
            self._connection.send(task)
            if not self._connection.poll(_START_S):
                return f"no answer within {_START_S:g} s"
            answer = self._connection.recv()
        except (EOFError, OSError):
            return self.how_it_died()
        if answer != _READY:
            return str(answer)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="tokamax-worker")
        self._listener.start()
        return None

    def send(self, number: int, answers: "queue.SimpleQueue[Any]", *request: Any) -> None:
        """Sends a request, whose answers go into a queue, as (kind, value)."""
        self._waiting[number] = answers
        try:
            with self._sending:
                self._connection.send((number, *request))
        except (OSError, ValueError):
            answers.put(("died", None))

    def _listen(self) -> None:
        while True:
            try:
                number, kind, value = self._connection.recv()
            except (EOFError, OSError, TypeError, ValueError):
                break
            if number is None:  # The task is over.
                with self._idle_lock:
                    self._idle.append(self)
                return
            waiting = self._waiting.get(number) if kind == "phase" else self._waiting.pop(number, None)
            if waiting is not None:
                waiting.put((kind, value))
        for waiting in list(self._waiting.values()):
            waiting.put(("died", None))

    def release(self) -> None:
        """Ends the task: the process becomes idle, unless it still works on something that nobody waits for."""
        if self._waiting:
            self.kill()
            return
        try:
            with self._sending:
                self._connection.send(None)
        except (OSError, ValueError):
            self.kill()
        self._listener.join(_END_S)

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kills it with all its children."""
        if self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (OSError, AttributeError):  # No process groups here, or it has not made its own yet.
                self._process.kill()
        self._process.join(_END_S)

    def how_it_died(self) -> str:
        """Returns its end in words."""
        self._process.join(_END_S)
        code = self._process.exitcode
        if code is None:
            return "the process does not answer"
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"


def _serve(connection: Any, parent: int) -> None:
    """Runs in the worker process: takes one task after the other until the connection or the parent ends."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sending = threading.Lock()
    while True:
        try:
            pickled = connection.recv()
        except (EOFError, OSError):
            return
        try:
            server = _Server(connection, sending, pickle.loads(pickled))
        except BaseException as error:
            connection.send(f"{type(error).__name__}: {error}")
            continue
        connection.send(_READY)
        if not server.run():
            return
        del server


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


class _Server:
    """The worker process's side of one task: compiles in threads, runs in one."""

    def __init__(self, connection: Any, sending: threading.Lock, task: _Task):
        jax.config.update("jax_enable_x64", task.x64)
        jax.config.update("jax_default_matmul_precision", task.precision)
        jax.config.update("jax_default_device", jax.devices(task.platform)[task.device])
        self._connection, self._sending, self._task = connection, sending, task
        self._inputs = [jax.device_put(x) for x in task.inputs]
        self._compiled: dict[Any, Compiled] = {}
        self._gate = gate.Gate(
            gate.comparison(task.ba, task.tolerance), task.ba.default_config, gate.reference_of(task.ba, self._inputs)
        )
        self._judged: set[Any] = set()

    def run(self) -> bool:
        """Answers requests until the task is over; returns False if the connection is."""
        runs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run_in_turn, args=(runs,), daemon=True).start()
        try:
            while (request := self._connection.recv()) is not None:
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
            self._answer(*request)

    def _send(self, *answer: Any) -> None:
        with self._sending:
            self._connection.send(answer)

    def _answer(self, number: int, what: str, config: Any, extra: Any) -> None:
        try:
            value = getattr(self, f"_{what}")(number, config, extra)
        except BaseException as error:
            self._send(number, "error", Failure.of("run", error).reason)
        else:
            self._send(number, "ok", value)

    def _built(self, number: int, config: Any) -> Compiled:
        if config not in self._compiled:
            self._send(number, "phase", "compile")
            function, _ = self._task.ba.as_function(config)
            self._compiled[config] = benchmarking.compile_function(function, self._inputs)
        return self._compiled[config]

    def _compile(self, number: int, config: Any, _: None) -> tuple[float, float, int | None]:
        compiled = self._built(number, config)
        return compiled.compile_ms, compiled.lowering_ms, compiled.peak_memory_bytes

    def _run(self, number: int, config: Any, _: None) -> None:
        compiled = self._built(number, config)
        self._send(number, "phase", "run")
        compiled.run()

    def _limited(self, number: int) -> gate.Limited:
        """Returns what runs a step with a limit of its own, which the other side holds."""

        def call(step: Callable[[], Any]) -> Any:
            self._send(number, "phase", "run")
            return step()

        return call

    def _prepare(self, number: int, _: None, __: None) -> tuple[bool, str | None]:
        self._gate.prepare(self._limited(number))
        return self._gate.has_reference, self._gate.note

    def _try_out(self, number: int, config: Any, known: tuple[Any, bool]) -> tuple[str | None, str | None]:
        yardstick, with_reference = known
        reason = None
        if not with_reference:
            self._gate.build_reference = None
        elif not self._gate.has_reference:
            self._prepare(number, None, None)
        for each in (config,) if yardstick is None or yardstick in self._judged else (yardstick, config):
            reason = self._gate.try_out(each, self._built(number, each).run, self._limited(number))
            if reason is None:
                self._judged.add(each)
        return reason, self._gate.note

    def _sample(self, number: int, config: Any, rounds: int) -> list[float]:
        compiled = self._built(number, config)
        self._send(number, "phase", "run")
        samples = self._task.timer(compiled.run, bound_args=self._task.ba, config=config, rounds=rounds)
        return [float(sample) for sample in samples]
