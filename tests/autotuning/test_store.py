import json
import multiprocessing
import pathlib

import pytest

from tokamax._src import devices, errors
from tokamax._src.autotuning import store
from tokamax._src.autotuning.store import DirectoryStore, MemoryStore
from toy import Toy, ToyConfig, arrays, entry, put_entries

KIND = devices.device_kind()


@pytest.fixture
def folder(tmp_path):
    return DirectoryStore(tmp_path / "data", tmp_path / "models")


class TestContract:
    """What every store does."""

    @pytest.fixture(params=["memory", "directory"])
    def any_store(self, request, folder):
        return MemoryStore() if request.param == "memory" else folder

    def test_put_then_get(self, any_store):
        first, second = entry(8), entry(4, best=ToyConfig(4))
        any_store.put([first, second])
        assert any_store.winner(KIND, "toy", first.key).config["block"] == 2
        assert any_store.winner(KIND, "toy", second.key).config["block"] == 4

    def test_a_miss_is_none(self, any_store):
        assert any_store.winner(KIND, "toy", "nothing") is None
        assert any_store.model(KIND, "toy") is None
        assert any_store.model_kinds("toy") == ()

    def test_later_entries_win(self, any_store):
        any_store.put([entry(best=ToyConfig(2))])
        any_store.put([entry(best=ToyConfig(4))])
        assert any_store.winner(KIND, "toy", entry().key).config["block"] == 4

    def test_another_device_is_a_miss(self, any_store):
        any_store.put([entry(device_kind="TPU v5")])
        assert any_store.winner(KIND, "toy", entry().key) is None
        assert any_store.winner("TPU v5", "toy", entry().key) is not None


def test_what_is_written_is_read_by_another_store(folder):
    folder.put([entry(8), entry(4)])
    again = DirectoryStore(folder.data, folder.models)
    assert [e.bound_args for e in again.entries(KIND, "toy")] == [entry(8).bound_args, entry(4).bound_args]
    assert again.winner(KIND, "toy", entry(4).key) is not None


def test_keep_adds_training_data_and_no_winner(folder):
    one = entry()
    folder.keep([one])
    folder.keep([one])
    assert len(folder.entries(KIND, "toy")) == 1
    assert folder.winner(KIND, "toy", one.key) is None
    folder.put([one])
    assert len(folder.entries(KIND, "toy")) == 1
    assert folder.winner(KIND, "toy", one.key) is not None


def test_an_unreadable_line_costs_that_line(folder):
    folder.keep([entry(8), entry(4)])
    path = folder.sweep_path(KIND, "toy")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], b'{"half": ', b"\xff\xfe", lines[1][:50]]))
    with pytest.warns(UserWarning, match="3 of 4"):
        assert len(folder.entries(KIND, "toy")) == 1
    folder.keep([entry(2)])
    with pytest.warns(UserWarning, match="3 of 5"):
        assert len(folder.entries(KIND, "toy")) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", "[3]", '[{"schema": "tokamax-winners", "version": 9}]', "\x00\xff"])
def test_a_damaged_file_of_winners_is_a_miss_with_a_warning(folder, text):
    folder.put([entry()])
    folder.winners_path(KIND, "toy").write_text(text)
    folder.reload()
    with pytest.warns(UserWarning, match="damaged or of another version"):
        assert folder.winner(KIND, "toy", entry().key) is None


def test_a_damaged_winner_costs_that_winner(folder):
    folder.put([entry(8), entry(4)])
    path = folder.winners_path(KIND, "toy")
    data = json.loads(path.read_text())
    data[1][1] = {"config": 3}
    path.write_text(json.dumps(data))
    folder.reload()
    with pytest.warns(UserWarning, match="1 of 2 entries"):
        found = [folder.winner(KIND, "toy", entry(m).key) for m in (8, 4)]
    assert sorted(w is None for w in found) == [False, True]


def test_a_file_in_the_folder_of_another_device_is_not_used(folder):
    folder.put([entry(device_kind="tpu v5")])
    source = folder.winners_path("tpu v5", "toy")
    target = folder.winners_path(KIND, "toy")
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    with pytest.warns(UserWarning, match="measured on 'tpu v5'"):
        assert folder.winner(KIND, "toy", entry().key) is None


def test_a_damaged_model_is_a_miss_with_a_warning(folder):
    path = folder.model_path(KIND, "toy")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.warns(UserWarning, match="damaged"):
        assert folder.model(KIND, "toy") is None


def test_what_another_thread_forgets_meanwhile_is_found_all_the_same(folder):
    class Forgotten(dict):
        def __setitem__(self, place, found):
            pass

    folder.put([entry()])
    folder._winners, folder._models = Forgotten(), Forgotten()
    assert folder.winner(KIND, "toy", entry().key) is not None
    assert folder.model(KIND, "toy") is None


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = DirectoryStore(tmp_path / "file" / "data", tmp_path / "models")
    with pytest.raises(errors.StorageError, match="TOKAMAX_CACHE_DIR"):
        blocked.put([entry()])


@pytest.mark.parametrize("name", ["toy", "some.module.Op", "a/b", "../x", "ü", "x" * 300, ".hidden", "a:b"])
def test_file_stems_are_safe_and_do_not_collide(name):
    stem = store.file_stem(name)
    assert pathlib.PurePath(stem).name == stem and not stem.startswith(".") and len(stem) < 120
    assert store.file_stem(name + "/") != stem


def test_two_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=put_entries, args=(str(tmp_path), range(i, 20, 2))) for i in (2, 3)]
    [job.start() for job in jobs]
    [job.join() for job in jobs]
    assert [job.exitcode for job in jobs] == [0, 0]
    target = DirectoryStore(tmp_path / "data", tmp_path / "models")
    assert len(target.entries(KIND, "toy")) == 18
    assert all(target.winner(KIND, "toy", Toy.bind(*arrays(m)).key) for m in range(2, 20))
