"""One tuning session: a bound op in, an `Entry` out.

Brings the parts together: the op's space, seeded inputs, compiled candidates, the autotuner, the decision rule.
"""

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tokamax._src import benchmarking, devices, environment, errors, estimates, numerics, timing
from tokamax._src.autotuning import autotuner, gate, guide, isolation, outcome
from tokamax._src.autotuning.result import Entry, describe_config
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.costmodel import dataset, features
from tokamax._src.inputs import Inputs, example_inputs

SEARCHES = ("exhaustive", "model")
ISOLATIONS = ("auto", "none", "process")
_PATIENCE = 10
"""A worker process holds the limits itself; this many times longer, the autotuner waits for it."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to tune.

    Attributes:
      timeout_s: limit for tracing, compiling and checking one config, and for each of its runs.
      max_workers: configs compiled at the same time; None for one per core.
      rounds: interleaved rounds of measurement.
      timer: a timer or its name.
      check: whether outputs are judged, see `gate`.
      tolerance: the accepted error of outputs, as a share or by dtype name; None for the op's own.
      seed: seed of the inputs.
      search: `exhaustive` measures every config; `model` those that look best to a cost model and to what it measures
        on the way.
      budget: how many configs of an op a search by model may measure, on average; None for `guide.default_budget`.
      isolation: `none` compiles and runs in this process; `process` in another one, which a config may crash or hang;
        `auto` in another one where `isolation.PLATFORMS` says so, if it finds there what it needs.
    """

    timeout_s: float = 60.0
    max_workers: int | None = None
    rounds: int = 5
    timer: Any = "wall_clock_min"
    check: bool = True
    tolerance: float | Mapping[str, float] | None = None
    seed: int = 0
    search: str = "exhaustive"
    budget: int | None = None
    isolation: str = "auto"

    def __post_init__(self) -> None:
        numerics.check_tolerance(self.tolerance)
        if self.search not in SEARCHES:
            raise errors.ArgumentError(f"search must be one of {SEARCHES}, got {self.search!r}")
        if self.isolation not in ISOLATIONS:
            raise errors.ArgumentError(f"isolation must be one of {ISOLATIONS}, got {self.isolation!r}")
        if self.budget is not None and (self.search == "exhaustive" or self.budget < 1):
            raise errors.ArgumentError(
                f"budget must be at least 1, with search='model', got budget={self.budget} and search={self.search!r}"
            )

    def how(self) -> dict[str, Any]:
        """Returns how is measured, as recorded with every entry."""
        searched = {} if self.search == "exhaustive" else {"search": self.search, "budget": self.budget}
        place = isolation.wanted(self.isolation, devices.current().platform)
        isolated = {} if place == "none" else {"isolation": place}
        timer = timing.timer_name(timing.get_timer(self.timer))
        unchecked = {} if self.check else {"check": False}
        tolerance = dict(self.tolerance) if isinstance(self.tolerance, Mapping) else self.tolerance
        checked = {} if tolerance is None or not self.check else {"tolerance": tolerance}
        return {
            "timer": timer,
            "rounds": self.rounds,
            "timeout": self.timeout_s,
            **searched,
            **isolated,
            **unchecked,
            **checked,
        }


def scope_of_this_thread() -> Callable[[], contextlib.ExitStack]:
    """Returns what brings JAX's scoped settings, which hold for one thread, to the threads that compile."""
    values: Any = jax.config
    scoped = (
        (jax.default_device, values.jax_default_device),
        (jax.default_matmul_precision, values.jax_default_matmul_precision),
        (jax.enable_x64, values.jax_enable_x64),
    )

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for setting, value in scoped:
            stack.enter_context(setting(value))
        return stack

    return enter


@contextlib.contextmanager
def _in_this_process(ba: BoundArguments, settings: Settings, timer: timing.Timer) -> Iterator[dict[str, Any]]:
    """Yields the options of `autotuner.tune` that say how configs are built, timed and checked."""
    in_same_scope, made = scope_of_this_thread(), Inputs(lambda: example_inputs(ba, seed=settings.seed))

    def build(config: Any, begins: Callable[[str], None]) -> benchmarking.Compiled:
        function, _ = ba.as_function(config)
        with in_same_scope():
            return benchmarking.compile_function(function, made.arrays, begins)

    judge = None
    if settings.check:
        compare, reference = gate.comparison(ba, settings.tolerance), gate.reference_of(ba, made.arrays)
        reference = reference and _called(reference, in_same_scope)
        judge = gate.Gate(compare, ba.default_config, reference, made, in_same_scope)
    yield {"build": build, "timer": timer, "gate": judge, "timeout_s": settings.timeout_s}


def _called(build: Callable[[], Any], scope: Callable[[], contextlib.ExitStack]) -> Callable[[], Any]:
    """Returns a function that is called within a scope."""

    def call() -> Any:
        with scope():
            return build()

    return call


@contextlib.contextmanager
def _isolated(ba: BoundArguments, settings: Settings, timer: timing.Timer) -> Iterator[dict[str, Any]]:
    """Like `_in_this_process`, for configs that run in a worker process."""
    gate.comparison(ba, settings.tolerance)  # An op whose tolerance makes no sense fails here, not in the process.
    worker = isolation.Worker(
        ba,
        example_inputs(ba, seed=settings.seed),
        check=settings.check,
        tolerance=settings.tolerance,
        timer=timer,
        device=devices.current(),
        timeout_s=settings.timeout_s,
    )
    try:
        yield {
            "build": worker.build,
            "timer": worker.timer,
            "gate": worker if settings.check else None,
            "drop": worker.drop,
            "timeout_s": _PATIENCE * settings.timeout_s,
        }
    finally:
        worker.close()


def tune(
    ba: BoundArguments,
    settings: Settings = Settings(),
    *,
    teacher: guide.Teacher | None = None,
    budget: int | None = None,
    extends: tuple[Entry, Sequence[Any]] | None = None,
    journal: autotuner.Journal | None = None,
    on_event: Callable[[autotuner.Event], None] | None = None,
    stop: threading.Event | None = None,
) -> tuple[Entry, bool]:
    """Tunes one bound op; an op that cannot be tuned gives an entry with its error.

    Args:
      ba: the op and its arguments.
      settings: how to tune.
      teacher: what a search by model learns from, and teaches.
      budget: how many configs this session may measure, if not as many as the settings say.
      extends: an entry of an earlier session, and the configs that it lacks: only these, its winner and the default are
        measured.
      journal: where findings are noted as they come, and read that an interrupted tuning noted.
      on_event: called once per finished config.
      stop: when set, the session ends with what was measured.

    Returns:
      The entry, and whether the session was interrupted.
    """
    timer = timing.get_timer(settings.timer)
    kind = devices.device_kind()
    about = environment.describe(**settings.how())
    default = None
    with contextlib.ExitStack() as stack:
        try:
            default = ba.default_config
            configs = ba.autotuning_configs
            if extends is not None:
                earlier, new = extends
                configs = [*([] if earlier.best is None else [earlier.best]), *new]
                about["extends"] = earlier.environment.get("time")
            if not ba.op.supported_on(devices.current()):
                raise errors.UnsupportedError(f"{ba.op.registered_name()} does not run on {kind}")
            ways = _enter(stack, ba, settings, timer, about)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error) or 'no message'}"
            return Entry(ba, kind, {}, default, None, about, error=reason[:2000]), False

        search = None
        if settings.search == "model":
            teacher = guide.Teacher() if teacher is None else teacher
            search = _Search.of(ba, settings, teacher, budget or settings.budget)
        run = autotuner.tune(
            configs,
            default=default,
            bound_args=ba,
            rounds=settings.rounds,
            max_workers=settings.max_workers,
            **ways,
            propose=None if search is None else search.propose,
            most=None if search is None else search.proposer.budget,
            journal=journal,
            on_event=on_event,
            stop=stop,
        )
    best = outcome.fastest(run.outcomes, default)
    _note(about, run, ways["gate"])
    if about.get("isolation") == "process":
        _warn_of_memory(ba, run)
    entry = Entry(ba, kind, run.outcomes, default, best, about)
    if teacher is not None:
        for problem in dataset.problems_from_entries([entry]):
            teacher.learn(problem)
    return entry, run.interrupted


def _enter(
    stack: contextlib.ExitStack, ba: BoundArguments, settings: Settings, timer: timing.Timer, about: dict[str, Any]
) -> dict[str, Any]:
    """Enters the place where configs run; `auto` stays in this process if another cannot have what it needs."""
    if isolation.wanted(settings.isolation, devices.current().platform) == "process":
        try:
            return stack.enter_context(_isolated(ba, settings, timer))
        except errors.TokamaxError as error:
            if settings.isolation != "auto":
                raise
            about["isolation"] = f"none: {error}"
            warnings.warn(f"configs of {ba.op.registered_name()} run in this process: {error}", stacklevel=4)
    return stack.enter_context(_in_this_process(ba, settings, timer))


def _note(about: dict[str, Any], run: autotuner.TuningRun, judge: Any) -> None:
    """Notes with an entry what a reader should know of how it was found."""
    if judge is not None and judge.note is not None:
        about["checked"] = judge.note
    if run.interrupted:
        about["interrupted"] = True
    if run.same_programs:
        first, other, *_ = run.same_programs[0]
        others = sum(len(configs) - 1 for configs in run.same_programs)
        about["same_program"] = (
            f"{others} of {len(run.outcomes)} configs compile to the program of another one: "
            f"{describe_config(other)} to that of {describe_config(first)}"
        )


def _warn_of_memory(ba: BoundArguments, run: autotuner.TuningRun) -> None:
    """Warns of configs that may have failed only since this process holds the memory of the device."""
    failed = sum(isinstance(o, outcome.Failure) and isolation.ran_out_of_memory(o) for o in run.outcomes.values())
    if failed and isolation.memory_is_taken(devices.current().platform):
        warnings.warn(
            f"{failed} configs of {ba!r} ran out of memory in a worker process, which has only what this process left "
            "when JAX started here; set XLA_PYTHON_CLIENT_PREALLOCATE=false before that, or use isolation='none'",
            stacklevel=4,
        )


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search by model over the configs of one op; `propose` is what `autotuner.tune` asks.

    Attributes:
      configs: the space.
      proposer: proposes their indices.
    """

    configs: Sequence[Any]
    proposer: guide.Guide

    @classmethod
    def of(cls, ba: BoundArguments, settings: Settings, teacher: guide.Teacher, budget: int | None) -> "_Search":
        """Begins with the default and the winner of the nearest measured shape."""
        default, configs = ba.default_config, ba.autotuning_configs
        configs = configs if default in configs else (default, *configs)
        winner = teacher.nearest_winner(ba.abstract, configs)
        prior = teacher.prior(ba.abstract, configs, extra=features.of_op(ba, configs))
        if prior is None and (times_ms := estimates.of(ba, configs, devices.device_kind())) is not None:
            prior = guide.Prior.of_estimate(times_ms)
        search = guide.Guide(
            configs,
            budget=budget or guide.default_budget(len(configs)),
            first=[configs.index(default), *([] if winner is None else [winner])],
            prior=prior,
            batch=max(2, settings.max_workers or devices.usable_cores()),
            seed=settings.seed,
        )
        return cls(configs, search)

    def propose(self, times: Mapping[Any, float]) -> list[Any]:
        """Returns the configs to try next, given the times so far."""
        return [self.configs[i] for i in self.proposer({self.configs.index(c): t for c, t in times.items()})]
