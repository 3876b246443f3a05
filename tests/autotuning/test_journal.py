"""The journal: what is noted survives the process, and only what belongs to the same tuning is gone on with."""

import os
import signal
import subprocess
import sys
import types

import pytest

import tokamax
from tokamax._src import devices, errors
from tokamax._src.autotuning import session, store
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


def test_no_resume_empties_a_journal(open_journal):
    journal = open_journal()
    note(journal)
    journal.close()
    assert open_journal(resume=False).samples == {}


def test_a_damaged_first_line_costs_nothing_and_another_version_begins_anew(open_journal):
    journal = open_journal()
    note(journal)
    journal.close()
    head, *lines = journal.path.read_text().splitlines(keepends=True)
    for damaged in (head[:9] + "\n", head.replace('"k"', '"x"'), ""):
        journal.path.write_text(damaged + "".join(lines))
        again = open_journal()
        assert again.samples[A].samples_ms == (1.5, 1.25) and B in again.failures
        again.close()
    journal.path.write_text(head.replace('"version":1', '"version":7') + "".join(lines))
    assert open_journal().samples == {}


SLOW = Failure("timeout", "a run took more than 8 s", (1.5,))


def test_what_exceeded_a_limit_is_tried_again_under_a_larger_one_and_keeps_its_samples(open_journal):
    journal = open_journal(limit_s=8.0)
    note(journal)
    journal.sampled(C, 1.5)
    journal.failed(C, SLOW)
    journal.failed(A, SLOW)
    journal.close()
    for limit_s in (8.0, 5.0, 60.0):
        again = open_journal(limit_s=limit_s)
        assert again.failures.keys() == ({B} if limit_s == 60.0 else {A, B, C})
        assert again.samples.keys() == ({A} if limit_s == 60.0 else set())
        if limit_s != 60.0:
            again.close()
    again.runs(A)
    again.compiled(A, COMPILED)
    again.sampled(A, 9000.0)
    again.failed(C, SLOW)
    again.close()
    smaller = open_journal(limit_s=5.0)
    assert smaller.samples[A].samples_ms == (1.5, 1.25, 9000.0) and smaller.failures.keys() == {B, C}


def test_how_long_is_measured_makes_no_other_journal_and_how_does():
    how = session.Settings().how()
    changes = [{}, {"timeout": 5.0}, {"rounds": 99}, {"timer": "other"}, {"isolation": "process"}, {"check": False}]
    names = []
    for change in changes:
        journal = store.private().journal(Toy.bind(*arrays()), devices.device_kind(), how | change)
        names.append(journal.path.name)
        journal.close()
    assert len(set(names)) == 4 and len(set(names[:3])) == 1


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


@pytest.mark.parametrize("change", [{"timeout": 30.0}, {"timeout": 90.0}, {"rounds": 2}])
def test_another_limit_or_number_of_rounds_loses_nothing_that_was_measured(change):
    first, second = [], []
    ba = Toy.bind(*arrays())
    tokamax.autotune(ba, timer=counting(first, 7), progress_bar=False, keep=False)
    (entry,) = tokamax.autotune(ba, timer=counting(second), progress_bar=False, **change).entries
    assert set(entry.outcomes) == SPACE and len(first) == 7
    # The sixth of eight configs was under way; the six that were sampled once have that sample, and no other for it.
    assert sorted(c.block for c in second[:2]) == sorted(c.block for c in SPACE - set(first[:6]))


def test_a_tuning_that_cannot_be_kept_stays_in_its_journal(monkeypatch):
    def full(entries):
        raise errors.StorageError("no space left on device")

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="measurements are not kept: no space left"):
        patched.setattr(store.private(), "keep", full)
        tokamax.autotune(Toy.bind(*arrays()), timer=counting([]), progress_bar=False)
    again = []
    (entry,) = tokamax.autotune(Toy.bind(*arrays()), timer=counting(again), progress_bar=False).entries
    assert again == [] and set(entry.outcomes) == SPACE


def test_a_tuning_that_cannot_go_on_loses_nothing_that_was_measured(monkeypatch):
    first, second = [], []
    ba = Toy.bind(*arrays())
    tokamax.autotune(ba, timer=counting(first, 7), progress_bar=False, keep=False)
    with monkeypatch.context() as patched:
        patched.setattr(session, "example_inputs", lambda *args, **kwargs: 1 / 0)
        (entry,) = tokamax.autotune(ba, timer=counting(second), progress_bar=False).entries
    assert "ZeroDivisionError" in entry.error and second == []
    tokamax.autotune(ba, timer=counting(second), progress_bar=False)
    assert set(second[:2]) == SPACE - set(first[:6])


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
