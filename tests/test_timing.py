import math
import time

import pytest

from tokamax._src import errors, timing
from tokamax._src.timing import RecordedTimer, wall_clock, wall_clock_min
from toy import Toy, ToyConfig, arrays

BA = Toy.bind(*arrays())
RECORDED = RecordedTimer({(BA.key, ToyConfig(1)): (1.0, 2.5, 4)})


class Calls:
    """A function to time that counts how often it ran."""

    def __init__(self, seconds=0.0):
        self.seconds, self.count = seconds, 0

    def __call__(self):
        self.count += 1
        time.sleep(self.seconds)


@pytest.mark.parametrize("timer", [wall_clock, wall_clock_min, RECORDED], ids=timing.timer_name)
class TestTimer:
    """What every timer keeps."""

    @pytest.mark.parametrize("rounds", [1, 2, 7])
    def test_returns_a_time_per_round(self, timer, rounds):
        samples = timer(Calls(), bound_args=BA, config=ToyConfig(1), rounds=rounds)
        assert len(samples) == rounds
        assert all(type(ms) is float and math.isfinite(ms) and ms >= 0 for ms in samples)

    def test_stands_for_itself_and_has_a_name(self, timer):
        assert timing.get_timer(timer) is timer
        assert timing.timer_name(timer)


def test_wall_clock_runs_what_it_times():
    slow = Calls(seconds=0.005)
    samples = wall_clock(slow, bound_args=None, config=None, rounds=3)
    assert slow.count == 3 and min(samples) >= 5.0


def test_wall_clock_repeats_short_runs_within_a_sample():
    short = Calls()
    wall_clock(short, bound_args=None, config=None, rounds=2)
    assert 2 < short.count <= 2 * 1001


@pytest.fixture
def clock(monkeypatch):
    """A clock in ns that only stands where a test puts it."""

    class Clock:
        now = 0

    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: Clock.now)
    return Clock


def runs_that_take(clock, *ms):
    """A function whose runs take these times one after another, and the last one from then on."""
    taken = []

    def run():
        taken.append(ms[min(len(taken), len(ms) - 1)])
        clock.now += round(taken[-1] * 1e6)

    return run, taken


@pytest.mark.parametrize(
    ("ms", "best", "count"),
    [
        ((40, 30, 50), 30, 3),  # Three runs at least,
        ((3, 2), 2, 5),  # more while they are short,
        ((0.2, 0.1), 0.1, 20),  # up to twenty,
        ((150, 90, 80), 90, 2),  # and fewer where they are long.
        ((300, 80), 300, 1),
    ],
)
def test_wall_clock_min_takes_the_fastest_of_a_few_runs(clock, ms, best, count):
    run, taken = runs_that_take(clock, *ms)
    assert wall_clock_min(run, bound_args=None, config=None, rounds=1) == [best]
    assert len(taken) == count


@pytest.mark.parametrize("timer", [wall_clock, wall_clock_min])
def test_wall_clocks_let_errors_through(timer):
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timer(broken, bound_args=None, config=None, rounds=1)


def test_recorded_timer_runs_nothing_and_starts_over():
    run = Calls()
    assert RECORDED(run, bound_args=BA, config=ToyConfig(1), rounds=5) == [1.0, 2.5, 4.0, 1.0, 2.5]
    assert run.count == 0


def test_recorded_timer_knows_bound_arguments_by_their_key():
    again = Toy.bind(*(x + 1 for x in arrays()))
    assert RECORDED(Calls(), bound_args=again, config=ToyConfig(1), rounds=1) == [1.0]


@pytest.mark.parametrize(("ba", "config"), [(BA, ToyConfig(2)), (Toy.bind(*arrays(m=4)), ToyConfig(1))])
def test_recorded_timer_without_a_record_says_what_is_missing(ba, config):
    with pytest.raises(errors.ArgumentError, match="must have samples of toy.*ToyConfig"):
        RECORDED(Calls(), bound_args=ba, config=config, rounds=1)


def test_timers_have_names():
    assert timing.get_timer("wall_clock") is wall_clock and timing.get_timer("wall_clock_min") is wall_clock_min
    assert [timing.timer_name(t) for t in (wall_clock, RECORDED, Calls())] == ["wall_clock", "recorded", "Calls"]


def test_unknown_timer_names_those_there_are():
    names = r"\['wall_clock', 'wall_clock_min'\]"
    with pytest.raises(errors.ArgumentError, match=rf"callable or one of {names}, got 'sundial'"):
        timing.get_timer("sundial")
