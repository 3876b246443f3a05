"""The autotuner over made-up builds: no op, no compiler, and no clock but for the limits."""

import collections
import os
import signal
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from tokamax import BenchmarkData
from tokamax._src.autotuning import autotuner
from tokamax._src.autotuning.gate import Gate
from tokamax._src.autotuning.outcome import Failure, fastest
from tokamax._src.benchmarking import Compiled
from tokamax._src.timing import RecordedTimer
from toy import Toy, ToyConfig, arrays

DEFAULT = ToyConfig(1)
CONFIGS = [ToyConfig(block) for block in (1, 2, 4, 8)]
PLENTY_S = 30.0
"""Longer than any step here takes on a busy machine: a test that waits so long has failed."""


class Build:
    """Builds configs that do what a table says, else return "output" at once, and keeps a record.

    Args:
      build: config -> what to call while it is built.
      run: config -> what to call as the compiled config; its result is the output.
    """

    def __init__(self, build=None, run=None):
        self._build, self._run = build or {}, run or {}
        self.log = []
        self._lock = threading.Lock()

    def note(self, *event):
        with self._lock:
            self.log.append(event)

    def __call__(self, config, begins):
        begins("compile")
        self.note("build", config)
        self._build.get(config, lambda: None)()
        self.note("built", config)
        return Compiled(lambda: self._execute(config), compile_ms=3.0, lowering_ms=2.0, peak_memory_bytes=100)

    def _execute(self, config):
        self.note("run", config)
        return self._run.get(config, lambda: "output")()

    def order(self, kind):
        return [config for event, config in self.log if event == kind]


class Tape:
    """A timer that plays each config's samples, the last one over and over, and keeps a record."""

    def __init__(self, samples=None):
        self.samples = samples or {}
        self.log = []

    def __call__(self, run, *, bound_args, config, rounds):
        assert rounds == 1
        played = self.samples.get(config, [1.0])
        self.log.append(config)
        sample = played[min(self.log.count(config), len(played)) - 1]
        return [sample() if callable(sample) else sample]


def tune(configs=CONFIGS, *, build=None, timer=None, default=DEFAULT, check=None, **options):
    build, timer = build or Build(), timer or Tape()
    if check is not None:
        options["gate"] = Gate(check, default)
    return autotuner.tune(configs, default=default, build=build, timer=timer, **({"max_workers": 2} | options))


def raises(error):
    def step():
        raise error

    return step


@pytest.fixture
def hang():
    """A step that does not end before the test does."""
    released = threading.Event()
    yield lambda: released.wait(PLENTY_S)
    released.set()


@pytest.fixture(autouse=True)
def ctrl_c_reaches_us():
    """Shells start jobs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c(then):
    """A step during which the user presses Ctrl-C."""

    def step():
        os.kill(os.getpid(), signal.SIGINT)
        then()

    return step


def measured(run):
    return {config: len(o.samples_ms) for config, o in run.outcomes.items() if isinstance(o, BenchmarkData)}


def test_every_config_is_measured():
    run = tune(timer=Tape({ToyConfig(4): [0.5]}), rounds=3)
    assert not run.interrupted
    assert list(run.outcomes) == CONFIGS
    assert run.outcomes[ToyConfig(4)] == BenchmarkData((0.5,) * 6, 3.0, 2.0, 100)


def test_recorded_times_give_the_same_run():
    ba = Toy.bind(*arrays())
    timer = RecordedTimer({(ba.key, config): (1.0 + config.block,) for config in CONFIGS})
    first, again = (tune(timer=timer, bound_args=ba, max_workers=workers) for workers in (1, 4))
    assert first == again
    assert first.outcomes[ToyConfig(8)].samples_ms == (9.0,)


def test_default_is_added_comes_first_and_nothing_twice():
    build = Build()
    run = tune([*CONFIGS[1:], *CONFIGS[1:]], build=build, max_workers=1)
    assert list(run.outcomes) == CONFIGS
    assert build.order("build") == CONFIGS == build.order("run")


def test_compiles_in_parallel():
    meeting = threading.Barrier(2, timeout=PLENTY_S)
    run = tune(build=Build(build=dict.fromkeys(CONFIGS, meeting.wait)), max_workers=2)
    assert len(measured(run)) == len(CONFIGS)


def test_at_most_max_workers_compile_at_a_time():
    build = Build()
    tune([ToyConfig(block) for block in range(1, 30)], build=build, max_workers=3)
    busy = most = 0
    for event, _ in build.log:
        busy += {"build": 1, "built": -1}.get(event, 0)
        most = max(most, busy)
    assert 1 <= most <= 3


def test_nothing_runs_while_something_compiles():
    build = Build()
    tune(build=build, timer=lambda run, **kwargs: [float(len(run()))])
    events = [event for event, _ in build.log]
    assert "run" not in events[: len(events) - events[::-1].index("built")]
    assert events.count("built") == len(CONFIGS)


def test_warm_up_is_not_measured():
    build = Build()
    tune(build=build)
    assert build.order("run") == CONFIGS


def test_losers_stop_early_and_keep_their_samples():
    run = tune(timer=Tape({ToyConfig(2): [1.6], ToyConfig(4): [9.0, 1.6, 1.0]}), rounds=5)
    assert measured(run) == {DEFAULT: 10, ToyConfig(2): 2, ToyConfig(4): 1, ToyConfig(8): 10}
    assert run.outcomes[ToyConfig(4)].samples_ms == (9.0,)


def test_a_config_that_falls_behind_stops_later():
    run = tune(timer=Tape({ToyConfig(2): [1.4], ToyConfig(8): [1.0, 0.8]}), rounds=4)
    assert run.outcomes[ToyConfig(2)].samples_ms == (1.4, 1.4)


def test_finalists_get_as_many_rounds_again():
    timer = Tape({DEFAULT: [1.4], ToyConfig(4): [1.2], ToyConfig(8): [1.05]})
    run = tune(timer=timer, rounds=3)
    assert measured(run) == {DEFAULT: 6, ToyConfig(2): 6, ToyConfig(4): 3, ToyConfig(8): 6}


def test_default_is_never_dropped():
    run = tune(timer=Tape({DEFAULT: [50.0]}), rounds=3)
    assert measured(run) == dict.fromkeys(CONFIGS, 6)


def test_rounds_are_interleaved_in_an_order_of_their_own():
    timer = Tape()
    tune(timer=timer, rounds=4)
    rounds = [timer.log[i : i + 4] for i in range(0, len(timer.log), 4)]
    assert all(set(configs) == set(CONFIGS) for configs in rounds) and len(rounds) == 8
    assert len({tuple(configs) for configs in rounds}) > 1


def test_slow_configs_get_fewer_rounds():
    assert set(measured(tune(timer=Tape({config: [900.0] for config in CONFIGS}), rounds=10)).values()) == {4}


def test_a_single_config_gets_its_rounds():
    assert measured(tune([], rounds=3)) == {DEFAULT: 3}


def test_failures_are_outcomes_and_the_others_go_on():
    run = tune(
        build=Build(
            build={ToyConfig(2): raises(ValueError("too large\nand more"))},
            run={ToyConfig(4): raises(MemoryError("no memory"))},
        ),
        timer=Tape({ToyConfig(8): [1.0, raises(RuntimeError("lost"))]}),
    )
    assert run.outcomes[ToyConfig(2)] == Failure("compile", "ValueError: too large")
    assert run.outcomes[ToyConfig(4)] == Failure("run", "MemoryError: no memory")
    assert run.outcomes[ToyConfig(8)] == Failure("run", "RuntimeError: lost", (1.0,))
    assert list(measured(run)) == [DEFAULT] and not run.interrupted


def test_every_config_may_fail():
    build = Build(build=dict.fromkeys(CONFIGS, raises(ValueError())))
    assert set(tune(build=build).outcomes.values()) == {Failure("compile", "ValueError: no message")}
    build = Build(run=dict.fromkeys(CONFIGS, raises(ValueError("no"))))
    assert set(tune(build=build).outcomes.values()) == {Failure("run", "ValueError: no")}
    timer = Tape({config: [raises(ValueError("no"))] for config in CONFIGS})
    assert set(tune(timer=timer).outcomes.values()) == {Failure("run", "ValueError: no")}


@pytest.mark.parametrize("times", [[], [1.0, 1.0], [float("nan")], [float("inf")], [-1.0], None, 1.0, ["soon"]])
def test_a_timer_must_return_one_time(times):
    run = tune(timer=lambda run, *, config, **kwargs: times if config == ToyConfig(2) else [1.0])
    assert run.outcomes[ToyConfig(2)].stage == "run"
    assert len(measured(run)) == 3


def check(output, reference):
    return None if output == reference else f"{output} is not {reference}"


def test_outputs_are_checked_against_the_default():
    build = Build(run={DEFAULT: lambda: "right", **dict.fromkeys(CONFIGS[1:3], lambda: "right")})
    timer = Tape()
    run = tune(build=build, timer=timer, check=check)
    assert run.outcomes[ToyConfig(8)] == Failure("check", "output is not right")
    assert ToyConfig(8) not in timer.log and len(measured(run)) == 3


def test_no_check_no_comparison():
    assert len(measured(tune(build=Build(run={DEFAULT: lambda: None})))) == len(CONFIGS)


def test_outputs_of_none_are_outputs():
    build = Build(run={DEFAULT: lambda: None, ToyConfig(2): lambda: None})
    run = tune(build=build, check=check)
    assert list(measured(run)) == [DEFAULT, ToyConfig(2)]


def test_a_check_that_raises_costs_the_config():
    def fails(output, reference):
        if output != reference:
            raise ZeroDivisionError("in the check")

    run = tune(build=Build(run={ToyConfig(2): lambda: "other"}), check=fails)
    assert run.outcomes[ToyConfig(2)] == Failure("check", "ZeroDivisionError: in the check")
    assert len(measured(run)) == 3


@pytest.mark.parametrize("stage", ["compile", "run"])
def test_without_the_default_the_first_that_runs_is_the_reference(stage):
    outputs = {ToyConfig(2): lambda: "two", ToyConfig(4): lambda: "two"}
    fails = {DEFAULT: raises(ValueError("no"))}
    build = Build(build=fails, run=outputs) if stage == "compile" else Build(run=outputs | fails)
    run = tune(build=build, check=check)
    assert run.outcomes[DEFAULT] == Failure(stage, "ValueError: no")
    assert list(measured(run)) == [ToyConfig(2), ToyConfig(4)]
    assert run.outcomes[ToyConfig(8)].stage == "check"


@pytest.mark.parametrize("phase", ["trace", "compile"])
def test_a_stall_in_trace_or_compile_costs_only_itself(hang, phase):
    build = Build()

    def stalls(config, begins):
        if config == ToyConfig(2):
            begins(phase)
            hang()
        return build(config, begins)

    run = tune(build=stalls, timeout_s=1.0)
    in_words = {"trace": "tracing", "compile": "compiling"}[phase]
    assert run.outcomes[ToyConfig(2)] == Failure("timeout", f"{in_words} took more than 1 s")
    assert len(measured(run)) == 3


def test_a_stall_in_the_check_costs_only_itself(hang):
    outputs = {ToyConfig(2): lambda: "slow"}
    run = tune(
        build=Build(run=outputs), check=lambda output, _: hang() and None if output == "slow" else None, timeout_s=1
    )
    assert run.outcomes[ToyConfig(2)] == Failure("timeout", "the check took more than 1 s")
    assert len(measured(run)) == 3


def test_stuck_workers_are_replaced(hang):
    run = tune(build=Build(build={DEFAULT: hang, ToyConfig(4): hang}), timeout_s=1.0, max_workers=1)
    assert [c for c, o in run.outcomes.items() if isinstance(o, Failure)] == [DEFAULT, ToyConfig(4)]
    assert len(measured(run)) == 2


def test_a_run_that_hangs_costs_only_itself(hang):
    run = tune(build=Build(run={ToyConfig(2): hang}), timeout_s=1.0)
    assert run.outcomes[ToyConfig(2)] == Failure("timeout", "a run took more than 1 s")
    assert len(measured(run)) == 3


def test_a_measurement_that_hangs_costs_only_itself(hang):
    run = tune(timer=Tape({ToyConfig(2): [1.0, hang]}), timeout_s=1.0)
    assert run.outcomes[ToyConfig(2)] == Failure("timeout", "a run took more than 1 s", (1.0,))
    assert len(measured(run)) == 3


def test_an_error_named_timeout_is_no_time_limit():
    run = tune(build=Build(run={ToyConfig(2): raises(TimeoutError("of the network"))}))
    assert run.outcomes[ToyConfig(2)] == Failure("run", "TimeoutError: of the network")


def test_ctrl_c_while_compiling(hang):
    told = threading.Event()

    def press():
        assert told.wait(PLENTY_S)
        ctrl_c(hang)()

    build = Build(build={ToyConfig(2): raises(ValueError("no")), ToyConfig(4): press})
    run = tune(build=build, max_workers=1, on_event=lambda event: told.set() if event.outcome else None)
    assert run.interrupted
    assert run.outcomes == {ToyConfig(2): Failure("compile", "ValueError: no")}
    assert ToyConfig(8) not in build.order("build")


def test_ctrl_c_while_running(hang):
    run = tune(build=Build(run={ToyConfig(4): ctrl_c(hang)}))
    assert run.interrupted and run.outcomes == {}


def test_ctrl_c_while_measuring_keeps_what_was_measured(hang):
    run = tune(timer=Tape({ToyConfig(4): [1.0, 1.0, ctrl_c(hang)]}), rounds=5)
    assert run.interrupted
    assert set(measured(run)) == set(CONFIGS)
    assert measured(run)[ToyConfig(4)] == 2 and set(measured(run).values()) <= {2, 3}


def test_keyboard_interrupt_inside_the_timer():
    timer = Tape({ToyConfig(4): [raises(KeyboardInterrupt())]})
    run = tune(timer=timer)
    assert run.interrupted
    assert set(measured(run)) == set(timer.log[:-1])


def test_stop_before_the_start():
    stop = threading.Event()
    stop.set()
    run = tune(stop=stop)
    assert run.interrupted and run.outcomes == {}


def test_stop_while_measuring_keeps_what_was_measured():
    stop = threading.Event()
    timer = Tape({ToyConfig(4): [1.0, lambda: stop.set() or 1.0]})
    run = tune(timer=timer, stop=stop)
    assert run.interrupted
    assert measured(run) == collections.Counter(timer.log)


def test_stop_while_compiling(hang):
    stop = threading.Event()
    run = tune(build=Build(build={ToyConfig(4): lambda: stop.set() or hang()}), stop=stop, max_workers=1)
    assert run.interrupted and run.outcomes == {}


def test_events_tell_each_config_compiled_and_finished():
    events = []
    run = tune(
        build=Build(build={ToyConfig(2): raises(ValueError("no"))}),
        timer=Tape({ToyConfig(8): [0.5]}),
        on_event=events.append,
    )
    assert collections.Counter(e.config for e in events if e.outcome is None) == {
        DEFAULT: 1,
        ToyConfig(4): 1,
        ToyConfig(8): 1,
    }
    assert {e.config: e.outcome for e in events if e.outcome is not None} == run.outcomes
    assert len([e for e in events if e.outcome is not None]) == len(CONFIGS)
    for name in ("compiled", "done"):
        counts = [getattr(e, name) for e in events]
        assert counts == sorted(counts) and counts[-1] == len(CONFIGS)
    assert {e.total for e in events} == {len(CONFIGS)}
    assert events[0].best_ms is None and events[-1].best_ms == 0.5


def test_events_come_in_the_thread_that_tunes():
    threads = set()
    tune(on_event=lambda event: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_an_error_of_the_listener_is_the_callers():
    def listener(event):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tune(on_event=listener)


def proposing(*batches):
    """Proposes given batches one after the other; keeps what it was told."""
    left, told = list(batches), []

    def propose(times):
        told.append(dict(times))
        return left.pop(0) if left else []

    propose.told = told
    return propose


def test_only_what_is_proposed_is_measured():
    propose = proposing([DEFAULT, ToyConfig(2)], [ToyConfig(8)])
    build = Build(run={ToyConfig(2): raises(ValueError("no"))})
    events = []
    run = tune(
        build=build, timer=Tape({ToyConfig(8): [0.5]}), propose=propose, most=3, rounds=2, on_event=events.append
    )
    assert list(run.outcomes) == [DEFAULT, ToyConfig(2), ToyConfig(8)]
    assert measured(run) == {DEFAULT: 4, ToyConfig(8): 4}
    assert ToyConfig(4) not in build.order("build") and {e.total for e in events} == {3}
    first, second, third = propose.told
    assert first == {} and second[DEFAULT] == 1.0 and second[ToyConfig(2)] != second[ToyConfig(2)]
    assert third[ToyConfig(8)] == 0.5


def test_later_batches_are_checked_against_the_default():
    build = Build(run={ToyConfig(8): lambda: "wrong"})
    run = tune(build=build, check=check, propose=proposing([ToyConfig(2)], [ToyConfig(8)]))
    assert build.order("run")[0] == DEFAULT
    assert run.outcomes[ToyConfig(8)].stage == "check"
    assert set(measured(run)) == {ToyConfig(2)}


def test_what_was_proposed_before_is_not_measured_again():
    run = tune(propose=proposing([DEFAULT], [DEFAULT, ToyConfig(2)], [ToyConfig(2)]), rounds=1)
    assert measured(run) == {DEFAULT: 2, ToyConfig(2): 2}


class Notes:
    """A journal in memory."""

    def __init__(self, samples=(), failures=()):
        self.samples, self.failures, self.log = dict(samples), dict(failures), []

    def runs(self, config):
        self.log.append(("runs", config))

    def compiled(self, config, compiled):
        self.log.append(("ran", config))

    def sampled(self, config, sample_ms):
        self.log.append(("sample", config, sample_ms))

    def sampled_again(self, config, sample_ms):
        self.log.append(("again", config, sample_ms))

    def failed(self, config, failure):
        self.log.append(("failed", config, failure))


def test_everything_is_noted_as_it_comes():
    notes = Notes()
    build = Build(build={ToyConfig(2): raises(ValueError("no"))}, run={ToyConfig(4): raises(ValueError("no"))})
    run = tune(build=build, timer=Tape({ToyConfig(8): [0.5]}), journal=notes, rounds=2)
    noted = collections.Counter(event[:2] for event in notes.log)
    assert noted["runs", ToyConfig(4)] == 1 and noted["ran", ToyConfig(4)] == 0
    assert {c: noted["sample", c] for c in measured(run)} == measured(run)
    assert [e for e in notes.log if e[0] == "failed"] == [
        ("failed", c, run.outcomes[c]) for c in (ToyConfig(2), ToyConfig(4))
    ]


def test_a_tuning_goes_on_from_its_journal():
    """A loser is done, a failure stays, a survivor gets the samples that it lacks."""
    build, timer = Build(), Tape({ToyConfig(8): [1.05]})
    notes = Notes(
        {
            DEFAULT: BenchmarkData((1.0, 1.0), 9.0, 9.0, 9),
            ToyConfig(2): BenchmarkData((50.0,), 9.0, 9.0, 9),
            ToyConfig(8): BenchmarkData((1.0,), 9.0, 9.0, 9),
        },
        {ToyConfig(4): Failure("run", "died")},
    )
    run = tune(build=build, timer=timer, check=check, journal=notes, rounds=2)
    assert build.order("build") == [DEFAULT, ToyConfig(8)]
    assert collections.Counter(build.order("run")) == {DEFAULT: 2, ToyConfig(8): 2}
    assert run.outcomes[ToyConfig(2)] == BenchmarkData((50.0,), 9.0, 9.0, 9)
    assert run.outcomes[ToyConfig(4)] == Failure("run", "died")
    assert run.outcomes[ToyConfig(8)].samples_ms[:2] == (1.0, 1.05)
    assert len(run.outcomes[DEFAULT].samples_ms) == 4


def test_stop_ends_a_run_that_hangs(hang):
    stop = threading.Event()
    run = tune(build=Build(run={ToyConfig(4): lambda: stop.set() or hang()}), stop=stop)
    assert run.interrupted and ToyConfig(4) not in run.outcomes


TIMES_MS = {DEFAULT: 4.0, ToyConfig(2): 3.0, ToyConfig(4): 2.0, ToyConfig(8): 2.5}


def glitching(config, number, glitch_ms):
    """A timer of constant times, but for one sample of one config."""
    timer = Tape({c: [ms] for c, ms in TIMES_MS.items()})
    timer.samples[config] = [TIMES_MS[config]] * (number - 1) + [glitch_ms, TIMES_MS[config]]
    return timer


@hypothesis.given(
    st.sampled_from(CONFIGS), st.integers(1, 6), st.floats(0, 0.1), st.integers(1, 3), st.permutations(CONFIGS)
)
def test_an_implausibly_fast_reading_is_taken_again_and_changes_nothing(config, number, glitch_ms, rounds, order):
    """A first sample of 0 ms once made losers of all others, which then had no second one."""
    clean = tune(order, timer=glitching(config, 99, glitch_ms), rounds=rounds)
    assert tune(order, timer=glitching(config, number, glitch_ms), rounds=rounds).outcomes == clean.outcomes


def test_a_config_that_is_far_faster_indeed_is_confirmed_and_wins():
    timer, notes = Tape({ToyConfig(4): [0.05, 0.06, 0.05]}), Notes()
    run = tune(timer=timer, rounds=2, journal=notes)
    assert run.outcomes[ToyConfig(4)].samples_ms[:2] == (0.06, 0.05)
    assert [e for e in notes.log if e[0] == "again"] == [("again", ToyConfig(4), 0.06)]
    assert fastest(run.outcomes, DEFAULT) == ToyConfig(4)


def test_a_reading_that_is_not_confirmed_since_the_config_fails_is_its_failure():
    timer = Tape({ToyConfig(4): [0.0, raises(ValueError("no"))]})
    assert tune(timer=timer).outcomes[ToyConfig(4)] == Failure("run", "ValueError: no", (0.0,))
