"""Limits: runs and builds that are given up when they take too long.

A limit is held by working in a daemon thread and going on without it: Python cannot stop a thread, so a step that hangs
keeps its thread, and possibly a core, until the process ends.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tokamax._src.autotuning.outcome import ConfigFailed, Failure, over_limit
from tokamax._src.benchmarking import Compiled

_POLL_S = 0.2


class Runner:
    """Runs steps one at a time in a thread that is given up when a step exceeds its limit, or at a stop."""

    def __init__(self, timeout_s: float, check_stop: Callable[[], None]):
        self.timeout_s = timeout_s
        self._check_stop = check_stop
        self._start()

    def _start(self) -> None:
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._steps,), daemon=True, name="tokamax-run").start()

    def call(self, step: Callable[[], Any], phase: str = "run") -> Any:
        """Returns the step's result.

        Raises:
          ConfigFailed: if it exceeds the limit of its phase.
        """
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._steps.put((step, done))
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                ok, value = done.get(timeout=max(0.0, min(_POLL_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                self._check_stop()
                if time.monotonic() >= deadline:
                    self._start()
                    raise ConfigFailed(over_limit(phase, self.timeout_s)) from None
        if ok:
            return value
        raise value

    def close(self) -> None:
        """Ends the thread once its present step is over."""
        self._steps.put(None)


def _serve(steps: "queue.SimpleQueue[Any]") -> None:
    while (item := steps.get()) is not None:
        step, done = item
        try:
            done.put((True, step()))
        except BaseException as error:
            done.put((False, error))


Build = Callable[[Any, Callable[[str], None]], Compiled]
"""Compiles a config; told what to call with the phase (`trace`, `compile`) that begins."""


def build_all(
    order: Sequence[Any],
    build: Build,
    workers: int,
    timeout_s: float,
    *,
    check_stop: Callable[[], None],
    done: Callable[[Any, Compiled | Failure], None],
) -> None:
    """Builds configs in parallel; one that exceeds the limit of a phase is given up and its thread replaced.

    Args:
      order: the configs.
      build: builds one.
      workers: how many are built at the same time.
      timeout_s: limit of each phase.
      check_stop: called often; what it raises ends the building.
      done: told, in the caller's thread, how each ended.
    """
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for config in order:
        todo.put(config)

    def begins(config: Any, phase: str) -> None:
        events.put((config, "begins", (phase, time.monotonic())))

    def work() -> None:
        while (config := _get_nowait(todo)) is not None:
            begins(config, "trace")
            try:
                events.put((config, "built", build(config, functools.partial(begins, config))))
            except BaseException as error:
                events.put((config, "built", Failure.of("compile", error)))

    def start_worker() -> None:
        threading.Thread(target=work, daemon=True, name="tokamax-compile").start()

    for _ in range(min(workers, len(order))):
        start_worker()
    open_configs, begun = set(order), dict[Any, tuple[str, float]]()
    try:
        while open_configs:
            check_stop()
            for config, phase in _overdue(open_configs, begun, timeout_s):
                open_configs.discard(config)
                done(config, over_limit(phase, timeout_s))
                start_worker()
            try:
                config, event, value = events.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if event == "begins":
                begun[config] = value
            elif config in open_configs:
                open_configs.discard(config)
                done(config, value)
    finally:
        while _get_nowait(todo) is not None:  # After an interruption, threads find nothing more to do.
            pass


def _overdue(
    open_configs: Collection[Any], begun: Mapping[Any, tuple[str, float]], timeout_s: float
) -> list[tuple[Any, str]]:
    """Returns the open configs whose present phase exceeds the limit, with the phase."""
    now = time.monotonic()
    return [(c, phase) for c, (phase, at) in begun.items() if c in open_configs and now - at > timeout_s]


def _get_nowait(todo: "queue.SimpleQueue[Any]") -> Any:
    try:
        return todo.get_nowait()
    except queue.Empty:
        return None
