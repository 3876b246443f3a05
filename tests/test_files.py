import concurrent.futures
import multiprocessing
import os
import stat
import threading

import pytest

from tokamax._src import errors, files
from toy import count_up

CONTENTS = [bytes([65 + i]) * 100_000 for i in range(4)]


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "new" / "folder" / "file.json"
    for content in (b"first", b"", b"third"):
        files.write_atomically(path, content)
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file.json"]


def test_others_may_read_what_the_users_mask_lets_them(tmp_path):
    files.write_atomically(tmp_path / "atomic", b"")
    (tmp_path / "plain").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "atomic").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_nobody_sees_half_a_file(tmp_path):
    path = tmp_path / "file"
    files.write_atomically(path, CONTENTS[0])
    stop = threading.Event()

    def read():
        while not stop.is_set():
            assert path.read_bytes() in CONTENTS

    with concurrent.futures.ThreadPoolExecutor() as pool:
        reader = pool.submit(read)
        for writer in [pool.submit(files.write_atomically, path, content) for content in CONTENTS * 5]:
            writer.result()
        stop.set()
        reader.result()
    assert os.listdir(tmp_path) == ["file"]


def test_a_crash_before_the_move_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(errors.StorageError, match="must be writable, got disk is gone; set TOKAMAX_CACHE_DIR"):
            files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def crash(*args):
    raise OSError("disk is gone")


def hold(path):
    with files.lock(path):
        pass


@pytest.mark.parametrize(
    "use", [lambda path: files.write_atomically(path, b""), lambda path: files.append_line(path, ""), hold]
)
def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path, use):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError, match="must be writable.*TOKAMAX_CACHE_DIR") as caught:
        use(tmp_path / "file" / "below")
    assert isinstance(caught.value, OSError)


def test_a_folder_in_the_place_of_the_file_is_a_storage_error(tmp_path):
    (tmp_path / "name").mkdir()
    for use in (lambda path: files.write_atomically(path, b""), lambda path: files.append_line(path, "")):
        with pytest.raises(errors.StorageError, match="must be writable"):
            use(tmp_path / "name")
    assert os.listdir(tmp_path) == ["name"]


def test_lines_are_appended(tmp_path):
    path = tmp_path / "new" / "lines.jsonl"
    for line in ("one", "zwölf", ""):
        files.append_line(path, line)
    assert path.read_text(encoding="utf-8") == "one\nzwölf\n\n"


def test_a_line_cut_short_is_ended_first(tmp_path):
    path = tmp_path / "lines"
    path.write_text("whole\nhal")
    files.append_line(path, "next")
    files.append_line(path, "last")
    assert path.read_text() == "whole\nhal\nnext\nlast\n"


def test_lock_keeps_threads_and_processes_apart(tmp_path):
    path = tmp_path / "number"
    path.write_text("0")
    context = multiprocessing.get_context("spawn")
    jobs = [threading.Thread(target=count_up, args=(path, 20)) for _ in range(3)]
    jobs.append(context.Process(target=count_up, args=(path, 20)))
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert path.read_text() == "80"


def test_lock_is_released_after_an_exception(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), files.lock(tmp_path / "file"):
            raise ZeroDivisionError
