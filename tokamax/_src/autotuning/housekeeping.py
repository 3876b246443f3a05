"""What a cache folder holds, and how to clear it out.

Files are read as JSON, not as entries: what an op that is not imported here left behind is listed and cleared as well.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokamax._src import errors, files, serialization
from tokamax._src.autotuning.store import DirectoryStore

Drop = Callable[[Mapping[str, Any]], bool]
"""Whether to drop what was measured in an environment."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The measured sweep of one op on one device.

    Attributes:
      path: its file.
      device: the device's folder name.
      op: the op, as its file is named.
      entries: how many tuning sessions it holds.
      shapes: how many different bound arguments those are of.
      winners: how many winners take part in dispatch.
      has_model: whether a cost model of this device and op lies beside.
      size_bytes: the size of the file.
      newest: when the newest entry was measured; None if no entry says.
      damaged: how many lines are not JSON.
    """

    path: pathlib.Path
    device: str
    op: str
    entries: int
    shapes: int
    winners: int
    has_model: bool
    size_bytes: int
    newest: str | None
    damaged: int


def _line(text: bytes) -> Mapping[str, Any] | None:
    try:
        data = serialization.loads(text)
    except errors.FormatError:
        return None
    return data if isinstance(data, dict) else None


def _environment(data: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = {} if data is None else data.get("environment")
    return found if isinstance(found, dict) else {}


def _winners(path: pathlib.Path) -> list[Any] | None:
    """Returns the head and items of a file of winners, or None if it is none."""
    try:
        items = serialization.loads(path.read_bytes())
    except (OSError, errors.FormatError):
        return None
    return items if isinstance(items, list) and items else None


def sweeps(place: DirectoryStore) -> Iterator[Sweep]:
    """Yields what a cache holds, device by device and op by op."""
    for path in place.sweeps():
        device, op = path.parent.name, path.stem
        lines = [_line(text) for text in path.read_bytes().splitlines() if text.strip()]
        entries = [line for line in lines if line is not None]
        keys = {serialization.dumps(entry.get("bound_args")) for entry in entries}
        winners = _winners(place.winners_path(device, op))
        yield Sweep(
            path=path,
            device=device,
            op=op,
            entries=len(entries),
            shapes=len(keys),
            winners=len(winners) - 1 if winners else 0,
            has_model=place.model_path(device, op).exists(),
            size_bytes=path.stat().st_size,
            newest=max((str(time) for e in entries if (time := _environment(e).get("time"))), default=None),
            damaged=len(lines) - len(entries),
        )


def journals(place: DirectoryStore) -> list[pathlib.Path]:
    """Returns the journals of tunings that are under way or were interrupted, in a fixed order."""
    return sorted(place.data.glob("*/journal/*.jsonl"))


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What `prune` dropped from one sweep: entries, and winners derived from them."""

    sweep: Sweep
    entries: int
    winners: int


def prune(place: DirectoryStore, sweep: Sweep, drop: Drop, *, dry_run: bool = False) -> Pruned:
    """Drops entries and winners of a sweep. Lines that cannot be read stay.

    Args:
      place: the cache.
      sweep: one of its sweeps.
      drop: says by the environment what to drop.
      dry_run: whether to count only.

    Raises:
      StorageError: if the files cannot be written.
    """
    with files.lock(sweep.path):
        lines = sweep.path.read_bytes().splitlines(keepends=True)
        kept = [text for text in lines if (line := _line(text)) is None or not drop(_environment(line))]
        if len(kept) < len(lines) and not dry_run:
            files.write_atomically(sweep.path, b"".join(kept))
    path = place.winners_path(sweep.device, sweep.op)
    with files.lock(path):
        items = _winners(path) or []
        stay = [item for i, item in enumerate(items) if i == 0 or not _is_dropped(item, drop)]
        if len(stay) < len(items) and not dry_run:
            files.write_atomically(path, ("[" + ",\n".join(map(serialization.dumps, stay)) + "]\n").encode())
    if not dry_run:
        place.reload()
    return Pruned(sweep, len(lines) - len(kept), len(items) - len(stay))


def _is_dropped(item: Any, drop: Drop) -> bool:
    readable = isinstance(item, list) and len(item) == 2 and isinstance(item[1], dict)
    return readable and drop(_environment(item[1]))
