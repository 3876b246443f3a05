"""Worker processes: how one is started, spoken to, killed and replaced.

A process is a new interpreter that imports `worker` and, later, what its tasks name. It is never a fork, since JAX is
running here, and it does not run the program's main module again, as `multiprocessing` would: a script needs no guard.
"""

import atexit
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from typing import Any, ClassVar

from tokamax._src import errors
from tokamax._src.autotuning import worker

_START_S = 120.0
"""How long a process may take to start, import JAX and take a task."""
_END_S = 5.0

# Modules are looked for where this process would find them. `-P` keeps the working folder out until then.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from tokamax._src.autotuning import worker
worker.serve(connection, int(sys.argv[2]))
"""


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a worker: on a GPU it takes memory as it needs it, beside the process that tunes."""
    return {**environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Process:
    """One worker process, with the thread that hands out its answers."""

    idle: ClassVar[list["Process"]] = []
    """Processes that wait for another task."""
    _idle_lock: ClassVar[threading.Lock] = threading.Lock()
    _all: ClassVar[weakref.WeakSet["Process"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._sending = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self.platform = "cpu"
        command = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                env=worker_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # A process group of its own, to be killed with its children.
            )
        except OSError as error:
            raise errors.UnsupportedError(f"a worker process must start, got {error} for {sys.executable!r}") from error
        finally:
            theirs.close()
        self._all.add(self)
        self._connection.send([path or os.getcwd() for path in sys.path])

    @classmethod
    def with_task(cls, task: bytes, platform: str) -> "Process":
        """Returns an idle process, else a new one, that has taken a pickled `worker.Task` for a JAX platform.

        Raises:
          UnsupportedError: if none can be had.
        """
        while True:
            with cls._idle_lock:
                process = cls.idle.pop() if cls.idle else None
            fresh = process is None
            process = cls() if process is None else process
            reason = process._take(task)
            if reason is None:
                process.platform = platform
                return process
            process.kill()
            if fresh:
                raise errors.UnsupportedError(f"a worker process must start and take the task, got: {reason}")

    @classmethod
    def end_idle(cls, *, but: str | None = None) -> None:
        """Ends idle processes, but those that worked for one platform."""
        with cls._idle_lock:
            ending = [process for process in cls.idle if process.platform != but]
            cls.idle[:] = [process for process in cls.idle if process.platform == but]
        for process in ending:
            process.kill()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def _take(self, task: bytes) -> str | None:
        """Hands over a task; returns what is wrong, None if nothing is."""
        try:
            self._connection.send_bytes(task)
            if not self._connection.poll(_START_S):
                return f"no answer within {_START_S:g} s"
            answer = self._connection.recv()
        except (EOFError, OSError):
            return self.how_it_died()
        if answer != worker.READY:
            return str(answer)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="tokamax-worker")
        self._listener.start()
        return None

    def send(self, number: int, answers: "queue.SimpleQueue[Any] | None", *request: Any) -> None:
        """Sends a request, whose answers go into a queue, as (kind, value); None for one that has no answer."""
        pickled = pickle.dumps((number, *request))
        if answers is not None:
            self._waiting[number] = answers
        try:
            with self._sending:
                self._connection.send_bytes(pickled)
        except (OSError, ValueError):
            if answers is not None:
                answers.put(("died", None))

    def _listen(self) -> None:
        while True:
            try:
                number, kind, value = self._connection.recv()
            except (EOFError, OSError, TypeError, ValueError):
                break
            if number is None:  # The task is over.
                with self._idle_lock:
                    self.idle.append(self)
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
                self._connection.send_bytes(pickle.dumps(None))
        except (OSError, ValueError):
            self.kill()
        self._listener.join(_END_S)

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills it with all its children."""
        if self.alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except OSError:  # It has just ended.
                self._process.kill()
        self._wait()

    def _wait(self) -> int | None:
        """Returns its exit code; None if it does not end."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None

    def how_it_died(self) -> str:
        """Returns its end in words."""
        code = self._wait()
        if code is None:
            return "the process does not answer"
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"


@atexit.register
def _kill_all() -> None:
    for process in list(Process._all):
        process.kill()
