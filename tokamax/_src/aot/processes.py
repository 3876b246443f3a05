"""Compilers in processes of their own, which may hang or crash without harm to this one.

The library of the compiler takes seconds to start, so that a process compiles one program after the other; it is killed
when one takes too long, and the next program starts another.
"""

import base64
import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent import futures
from importlib import metadata
from typing import Any

from tokamax._src import devices, errors
from tokamax._src.aot.verdict import Verdict

_START_S = 120.0
"""How long a process may take to start and import JAX."""
_END_S = 5.0
"""How long it may take to end after it closed its output."""
_WORKER = pathlib.Path(__file__).with_name("worker.py")

# Without the first three libtpu asks the network which TPU this is, and keeps a second process out.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
}


def compiler_version() -> str:
    """Returns name and version of the compiler for TPU.

    Raises:
      MissingExtraError: if it is not installed.
    """
    try:
        version = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        version = None
    if version is None or importlib.util.find_spec("flatbuffers") is None:
        raise errors.MissingExtraError(
            "libtpu and flatbuffers must be installed to compile for a TPU that is not here; try: pip install "
            "'tokamax[aot-tpu]'"
        )
    return f"libtpu {version}"


class _Process:
    """One worker process; answers one request at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Returns the next answer; None if the process ended instead.

        Raises:
          queue.Empty: if it takes too long.
        """
        line = self._lines.get(timeout=timeout_s)
        return None if line is None else json.loads(line)

    def ask(self, request: Mapping[str, Any]) -> None:
        """Sends a request; that the process is gone shows when it does not answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def kill(self, patience_s: float = 0.0) -> str:
        """Kills it with its children, if it does not end by itself; returns how it ended, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        ended = self._process.poll()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        if ended is None:
            return "the process was killed"
        name = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        return f"the process of the compiler ended with {name}"


class Compilers:
    """A few compiler processes, started when they are needed. A context manager, which ends them.

    Args:
      timeout_s: limit for compiling one program.
      max_workers: processes at the same time; None for one per core.
    """

    def __init__(self, timeout_s: float = 60.0, max_workers: int | None = None):
        self.count = devices.usable_cores() if max_workers is None else max_workers
        if self.count < 1 or not timeout_s > 0:
            raise errors.ArgumentError(f"max_workers and timeout must be positive, got {max_workers} and {timeout_s}")
        self._timeout_s = timeout_s
        self._threads = futures.ThreadPoolExecutor(self.count, "tokamax-aot")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: set[_Process] = set()

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; what was submitted is told that it crashed, or cancelled if it did not begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end_all()
        self._threads.shutdown()
        self._end_all()  # Those that a thread was just starting.

    def submit(self, program: bytes, topology: str) -> "futures.Future[Verdict]":
        """Compiles an exported program for a topology; returns the verdict to come."""
        request = {"program": base64.b64encode(program).decode(), "topology": topology}
        return self._threads.submit(self._compile, request)

    def _compile(self, request: Mapping[str, Any]) -> Verdict:
        try:
            process = self._ready()
        except _Broken as error:
            return Verdict("crashed", str(error))
        process.ask(request)
        try:
            answer = process.answer(self._timeout_s)
        except queue.Empty:
            self._end(process)
            return Verdict("timeout", f"compiling took longer than {self._timeout_s:g} s", self._timeout_s)
        if answer is None:
            return Verdict("crashed", self._end(process, _END_S))
        self._idle.put(process)
        return Verdict.of_answer(answer)

    def _ready(self) -> _Process:
        """Returns an idle process, or a new one."""
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        process = _Process()
        self._all.add(process)
        patience_s = 0.0
        with contextlib.suppress(queue.Empty):
            if process.answer(_START_S) is not None:
                return process
            patience_s = _END_S
        how = self._end(process, patience_s)
        raise _Broken(f"a process with the compiler must start within {_START_S:g} s; {how}")

    def _end(self, process: _Process, patience_s: float = 0.0) -> str:
        self._all.discard(process)
        return process.kill(patience_s)

    def _end_all(self) -> None:
        for process in list(self._all):
            self._end(process)


class _Broken(Exception):
    """No process could be started; the message says how it ended."""
