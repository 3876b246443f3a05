"""Files written so that a reader, a crash or a second writer never sees half of one."""

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator

import filelock

from tokamax._src import errors


def _explained(path: pathlib.Path, error: OSError) -> errors.StorageError:
    return errors.StorageError(
        f"{path} must be writable, got {error.strerror or error}; set TOKAMAX_CACHE_DIR to a folder that is, or pass "
        "another path"
    )


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file beside its place and moves it there.

    Raises:
      StorageError: if the folder cannot be written.
    """
    # Not `tempfile`, whose files nobody else may read: a result is often meant for a colleague.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _explained(path, error) from error


def append_line(path: pathlib.Path, line: str) -> None:
    """Appends one line in one write; call it under `lock`. A line cut short by a crash before it is ended first.

    Raises:
      StorageError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _explained(path, error) from error


@contextlib.contextmanager
def lock(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock that guards a file against other threads and processes.

    Raises:
      StorageError: if the lock file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(path.with_name(path.name + ".lock"), thread_local=False)
        held.acquire()
    except OSError as error:
        raise _explained(path, error) from error
    try:
        yield
    finally:
        held.release()
