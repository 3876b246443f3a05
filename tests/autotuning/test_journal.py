"""The journal: what is noted survives the process, and only what belongs to the same tuning is gone on with."""

import os
import signal
import subprocess
import sys
import types

import pytest

import tokamax
from tokamax._src.autotuning import store
from tokamax._src.autotuning.journal import Journal
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.benchmarking import BenchmarkData, Compiled
from toy import SPACE, Toy, ToyConfig, arrays, by_block

ABOUT = {"key": "k", "rounds": 3}
COMPILED = Compiled(lambda: None, 3.0, 2.0, 100)
A, B, C = ToyConfig(1), ToyConfig(2), ToyConfig(4, True)


@pytest.fixture
def open_journal(tmp_path):
    opened = []

    def open_it(about=ABOUT, **options):
        opened.append(Journal.open(tmp_path / "j" / "tuning.jsonl", ToyConfig, about, **options))
        return opened[-1]

    yield open_it
    for journal in filter(None, opened):
        journal.close()


def note(journal):
    journal.runs(A)
    journal.compiled(A, COMPILED)
    journal.sampled(A, 1.5)
    journal.sampled(A, 1.25)
    journal.failed(B, Failure("compile", "no"))
    journal.runs(C)


def test_what_was_noted_is_read_again(open_journal):
    journal = open_journal()
    assert journal.samples == {} and journal.failures == {}
    note(journal)
    journal.close()
    again = open_journal()
    assert again.samples == {A: BenchmarkData((1.5, 1.25), 3.0, 2.0, 100)}
    assert again.failures == {B: Failure("compile", "no")}


def test_a_sample_that_was_taken_again_counts_in_place_of_the_last(open_journal):
    journal = open_journal()
    journal.sampled_again(A, 9.0)  # There is none yet; such a line makes no sense.
    note(journal)
    journal.sampled_again(A, 1.75)
    journal.close()
    assert open_journal().samples[A].samples_ms == (1.5, 1.75)


def test_what_was_measured_of_a_config_that_failed_later_is_read_again(open_journal):
    journal = open_journal()
    journal.failed(A, Failure("run", "no", (1.5, 1.25)))
    journal.close()
    assert open_journal().failures == {A: Failure("run", "no", (1.5, 1.25))}


@pytest.mark.parametrize("change", [{"about": {"key": "other"}}, {"resume": False}])
def test_another_tuning_begins_anew(open_journal, change):
    journal = open_journal()
    note(journal)
    journal.close()
    assert open_journal(**change).samples == {}


def test_a_config_in_whose_first_run_the_process_dies_twice_has_failed(open_journal):
    for _ in range(2):
        journal = open_journal()
        assert C not in journal.failures
        journal.runs(C)
        journal.close()
    again = open_journal()
    assert again.failures == {C: Failure("run", "the process died 2 times during its first run")}
    again.close()
    assert open_journal().failures.keys() == {C}


def test_a_torn_or_damaged_line_costs_that_line(open_journal):
    journal = open_journal()
    note(journal)
    journal.close()
    content = journal.path.read_text()
    journal.path.write_text(content + 'nonsense\n["sample", {"block": 7}]\n["sample", {"blo')
    again = open_journal()
    assert again.samples.keys() == {A}
    again.sampled(A, 2.0)
    again.close()
    assert open_journal().samples[A].samples_ms == (1.5, 1.25, 2.0)


def test_one_process_at_a_time(open_journal):
    journal = open_journal()
    assert open_journal() is None
    journal.close()
    assert open_journal() is not None


def test_discarded_leaves_nothing(open_journal):
    journal = open_journal()
    note(journal)
    journal.discard()
    assert list(journal.path.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_gives_no_journal(tmp_path):
    (tmp_path / "file").write_text("")
    assert Journal.open(tmp_path / "file" / "j.jsonl", ToyConfig, ABOUT) is None


def test_a_full_disk_ends_the_journal_and_not_the_tuning(open_journal):
    def full(text):
        raise OSError("no space left on device")

    journal = open_journal()
    with journal._file as file:
        journal._file = types.SimpleNamespace(write=full, close=file.close)
        journal.sampled(A, 1.0)
        journal.sampled(A, 1.0)
    journal.close()


def test_what_a_file_cannot_carry_has_no_journal():
    place = store.private()
    assert place.journal(Toy.bind(*arrays(), activation=lambda x: x), "cpu", {}) is None


def counting(log, stop_at=None):
    def timer(run, *, bound_args, config, rounds):
        log.append(config)
        if stop_at is not None and len(log) == stop_at:
            raise KeyboardInterrupt
        return [by_block(config, bound_args)]

    timer.__name__ = "counting"
    return timer


@pytest.mark.parametrize("stop_at", [1, 3, 8, 9, 20])
def test_ctrl_c_then_the_same_call_goes_on(stop_at):
    whole, first, second = [], [], []
    ba = Toy.bind(*arrays())
    tokamax.autotune(ba, timer=counting(whole), keep=False, progress_bar=False)
    part = tokamax.autotune(ba, timer=counting(first, stop_at), progress_bar=False)
    if part.entries:
        assert part.entries[0].environment["interrupted"]
    result = tokamax.autotune(ba, timer=counting(second), progress_bar=False)
    assert len(first) - 1 + len(second) == len(whole)
    assert result.entries[0].best == ToyConfig(8, True)
    assert set(result.entries[0].outcomes) == SPACE
    assert "interrupted" not in result.entries[0].environment
    assert not list(store.private().data.glob("*/journal/*"))


def test_no_resume_begins_anew():
    first, second = [], []
    ba = Toy.bind(*arrays())
    tokamax.autotune(ba, timer=counting(first, 9), progress_bar=False)
    tokamax.autotune(ba, timer=counting(second), progress_bar=False, resume=False)
    assert len(second) > len(first)
    assert set(second) == SPACE


def run(kill_at):
    program = f"import sys; sys.path[:0] = {sys.path!r}; import toy; toy.tune_until_killed({kill_at})"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, timeout=120)


def test_kill_9_costs_one_measurement():
    assert run(kill_at=13).returncode == -signal.SIGKILL
    finished = run(kill_at=0)
    count, best, outcomes = map(int, finished.stdout.split())
    assert (best, outcomes) == (8, len(SPACE))
    whole = []
    tokamax.autotune(Toy.bind(*arrays()), timer=counting(whole), keep=False, progress_bar=False, ignore_cache=True)
    assert 12 + count == len(whole)
