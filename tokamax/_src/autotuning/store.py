"""Where results are kept between processes: a folder of measured sweeps, winners and models.

    data/<device>/<op>.jsonl      entries, one per line: the only source of truth
    data/<device>/<op>.best.json  winners derived from them, so that dispatch never parses sweeps
    data/<device>/<op>.estimated.json   configs that were estimated, not measured: below all of these
    data/<device>/journal/        tunings that are under way or were interrupted
    models/<device>/<op>.npz      cost models

The private cache and the library cache have the same layout; the library cache is only read.
"""

import functools
import math
import os
import pathlib
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import platformdirs

from tokamax._src import devices, environment, errors, files, options, resources, serialization
from tokamax._src.autotuning import estimated, keyed
from tokamax._src.autotuning.estimated import Estimated
from tokamax._src.autotuning.journal import Journal
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.autotuning.result import Entry, Winner, parse_entries
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.costmodel.model import CostModel

_CHECKED = {"check": True, "tolerance": None}
"""How outputs were judged, where an environment does not say it: entries of another way say other things."""
_HOW_LONG = ("timeout", "rounds")
"""What says how long to measure, and nothing of what is measured: no part of what identifies a journal."""


class Store(Protocol):
    """What dispatch and tuning need of a store."""

    def winner(self, device_kind: str, op: str, key: str) -> Winner | None:
        """Returns the measured winner of a key, if there is one."""
        ...

    def estimated(self, device_kind: str, op: str, key: str) -> Estimated | None:
        """Returns the best config of a key by estimate, if there is one."""
        ...

    def model(self, device_kind: str, op: str) -> CostModel | None:
        """Returns the cost model of an op on a device, if there is one."""
        ...

    def put(self, entries: Iterable[Entry]) -> None:
        """Adds entries; later entries of a key win."""
        ...

    def model_kinds(self, op: str) -> tuple[str, ...]:
        """Returns the device kinds that have a cost model of an op."""
        ...


class MemoryStore:
    """A store that lives as long as its process."""

    def __init__(self) -> None:
        self._winners: dict[tuple[str, str], Winner] = {}
        self._estimated: dict[tuple[str, str], Estimated] = {}
        self._models: dict[tuple[str, str], CostModel] = {}

    def winner(self, device_kind: str, op: str, key: str) -> Winner | None:
        """See `Store`."""
        return self._winners.get((device_kind, key))

    def estimated(self, device_kind: str, op: str, key: str) -> Estimated | None:
        """See `Store`."""
        return self._estimated.get((device_kind, key))

    def model(self, device_kind: str, op: str) -> CostModel | None:
        """See `Store`."""
        return self._models.get((device_kind, op))

    def put(self, entries: Iterable[Entry]) -> None:
        """See `Store`."""
        for entry in entries:
            if (winner := Winner.of(entry)) is not None:
                self._winners[entry.device_kind, entry.key] = winner
            if (found := Estimated.of(entry)) is not None:
                self._estimated[entry.device_kind, entry.key] = found

    def clear(self) -> None:
        """Forgets everything."""
        self._winners.clear()
        self._estimated.clear()
        self._models.clear()

    def put_model(self, device_kind: str, op: str, model: CostModel) -> None:
        """Adds a cost model."""
        self._models[device_kind, op] = model

    def model_kinds(self, op: str) -> tuple[str, ...]:
        """See `Store`."""
        return tuple(sorted(kind for kind, name in self._models if name == op))


class DirectoryStore:
    """A store in two folders. Each file is read once per process; `reload` forgets what was read.

    Args:
      data: the folder of sweeps and winners.
      models: the folder of cost models.
    """

    def __init__(self, data: pathlib.Path, models: pathlib.Path):
        self.data, self.models = data, models
        self._lock = threading.Lock()
        self._winners: dict[tuple[str, str], dict[str, Winner]] = {}
        self._estimated: dict[tuple[str, str], dict[str, Estimated]] = {}
        self._models: dict[tuple[str, str], tuple[CostModel | None]] = {}

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.data)!r})"

    def reload(self) -> None:
        """Forgets what was read, so that files that changed are read again."""
        with self._lock:
            self._winners.clear()
            self._estimated.clear()
            self._models.clear()

    def sweep_path(self, device_kind: str, op: str) -> pathlib.Path:
        """Returns the path of the measured sweeps of an op."""
        return self.data / devices.folder_name(device_kind) / f"{file_stem(op)}.jsonl"

    def winners_path(self, device_kind: str, op: str) -> pathlib.Path:
        """Returns the path of the winners of an op."""
        return self.data / devices.folder_name(device_kind) / f"{file_stem(op)}.best.json"

    def estimated_path(self, device_kind: str, op: str) -> pathlib.Path:
        """Returns the path of the estimated configs of an op."""
        return self.data / devices.folder_name(device_kind) / f"{file_stem(op)}.estimated.json"

    def model_path(self, device_kind: str, op: str) -> pathlib.Path:
        """Returns the path of the cost model of an op."""
        return self.models / devices.folder_name(device_kind) / f"{file_stem(op)}.npz"

    def winner(self, device_kind: str, op: str, key: str) -> Winner | None:
        """See `Store`."""
        place = device_kind, op
        winners = self._winners.get(place)
        if winners is None:
            with self._lock:
                winners = self._winners[place] = WINNERS.read(self.winners_path(device_kind, op), device_kind)
        return winners.get(key)

    def estimated(self, device_kind: str, op: str, key: str) -> Estimated | None:
        """See `Store`."""
        place = device_kind, op
        found = self._estimated.get(place)
        if found is None:
            with self._lock:
                found = self._estimated[place] = estimated.FILES.read(self.estimated_path(device_kind, op), device_kind)
        return found.get(key)

    def model(self, device_kind: str, op: str) -> CostModel | None:
        """See `Store`."""
        place = device_kind, op
        found = self._models.get(place)
        if found is None:
            with self._lock:
                found = self._models[place] = (_read_model(self.model_path(device_kind, op)),)
        return found[0]

    def model_kinds(self, op: str) -> tuple[str, ...]:
        """See `Store`; kinds are given by their folder names."""
        return tuple(sorted(path.parent.name for path in self.models.glob(f"*/{file_stem(op)}.npz")))

    def keep(self, entries: Iterable[Entry]) -> None:
        """Appends entries to their sweeps, as training data; an entry that is there already is not added again.

        Those that are estimated are none, and are left out.

        Raises:
          StorageError: if a folder cannot be written.
          SerializationError: if an entry has an argument that a file cannot carry.
        """
        for (kind, op), group in _by_place(e for e in entries if not e.is_estimated).items():
            lines = [serialization.dumps(entry.to_json()) for entry in group]
            path = self.sweep_path(kind, op)
            with files.lock(path):
                present = set(_lines(path)) if path.exists() else set()
                for line in lines:
                    if line.encode() not in present:
                        files.append_line(path, line)

    def put(self, entries: Iterable[Entry]) -> None:
        """Keeps entries and makes their winners count at dispatch, beside what other processes wrote meanwhile.

        Raises:
          StorageError: if a folder cannot be written.
          SerializationError: if an entry has an argument that a file cannot carry.
        """
        entries = list(entries)
        self.keep(entries)
        for (kind, op), group in _by_place(e for e in entries if not e.is_estimated).items():
            path = self.winners_path(kind, op)
            with files.lock(path):
                winners = {**WINNERS.read(path, kind), **winners_of(group)}
                files.write_atomically(path, WINNERS.text(winners, kind, op).encode())
            with self._lock:
                self._winners.pop((kind, op), None)
        self._put_estimated(e for e in entries if e.is_estimated)

    def _put_estimated(self, entries: Iterable[Entry]) -> None:
        """Adds what was estimated to the files of that."""
        for (kind, op), group in _by_place(entries).items():
            path = self.estimated_path(kind, op)
            with files.lock(path):
                found = {**estimated.FILES.read(path, kind), **estimated.of_entries(group)}
                files.write_atomically(path, estimated.FILES.text(found, kind, op).encode())
            with self._lock:
                self._estimated.pop((kind, op), None)

    def put_model(self, device_kind: str, op: str, model: CostModel) -> None:
        """Writes a cost model.

        Raises:
          StorageError: if the folder cannot be written.
        """
        files.write_atomically(self.model_path(device_kind, op), model.dumps())
        with self._lock:
            self._models.pop((device_kind, op), None)

    def entries(self, device_kind: str, op: str) -> list[Entry]:
        """Returns all entries of an op, oldest first; a sweep is parsed again only after it changed."""
        path = self.sweep_path(device_kind, op)
        try:
            stat = path.stat()
        except OSError:
            return []
        return list(_parsed(path, stat.st_mtime_ns, stat.st_size))

    def known_entry(self, ba: BoundArguments, device_kind: str, how: Mapping[str, Any]) -> Entry | None:
        """Returns the newest entry of bound arguments that makes measuring them again needless, or None.

        It must be fresh, of the same timer and the same check, must not have been interrupted, and must cover the whole
        space (with the entries that it extends), or have been found by the same guided search.

        Args:
          ba: the bound arguments.
          device_kind: the device.
          how: how they would be measured now, see `session.Settings.how`.
        """
        usable = self._usable(ba, device_kind, how)
        for i, entry in enumerate(usable):
            searched = all(entry.environment.get(name) == how.get(name) for name in ("search", "budget"))
            if set(ba.autotuning_configs) <= _covered(usable[i:], how) or ("search" in how and searched):
                return entry
        return None

    def extensible_entry(
        self, ba: BoundArguments, device_kind: str, how: Mapping[str, Any]
    ) -> tuple[Entry, list[Any]] | None:
        """Returns the newest usable entry of an exhaustive tuning, and the configs that its space did not have yet.

        To find the best of all it is enough to measure those, the winner of the entry, and the default, in one session:
        samples of two sessions are never compared.

        Args:
          ba: the bound arguments.
          device_kind: the device.
          how: see `known_entry`.
        """
        if "search" in how:
            return None
        usable = [e for e in self._usable(ba, device_kind, how) if "search" not in e.environment]
        if not usable:
            return None
        entry, covered = usable[0], _covered(usable, how)
        if entry.best is not None and entry.best not in (ba.default_config, *ba.autotuning_configs):
            return None  # What is the best without it, no session has decided.
        return entry, [c for c in ba.autotuning_configs if c not in covered]

    def _usable(self, ba: BoundArguments, device_kind: str, how: Mapping[str, Any]) -> list[Entry]:
        """Returns the entries of bound arguments that were measured as they would be now, the newest first."""

        def usable(entry: Entry) -> bool:
            was = entry.environment
            same = entry.key == ba.key and was.get("timer") == how.get("timer") and not was.get("interrupted")
            checked = all(was.get(name, default) == how.get(name, default) for name, default in _CHECKED.items())
            return same and checked and environment.is_fresh(was)

        return list(filter(usable, reversed(self.entries(device_kind, ba.op.registered_name()))))

    def journal(
        self, ba: BoundArguments, device_kind: str, how: Mapping[str, Any], *, resume: bool = True
    ) -> Journal | None:
        """Opens the journal of a tuning, to note findings as they come; None where none can be had.

        Args:
          ba: the bound arguments to tune.
          device_kind: the device.
          how: how they are measured, see `session.Settings.how`. Another way has another journal, but for limits and
            rounds: what was measured under others counts, and what exceeded a smaller limit is tried again.
          resume: whether to go on with what an interrupted tuning noted.
        """
        try:
            key = serialization.dumps(ba.to_json())
            for config in (ba.default_config, *ba.autotuning_configs):
                serialization.encode_fields(config)
        except Exception:  # A lambda, say, that no other process could find again, or a space that raises.
            return None
        way = {name: value for name, value in how.items() if name not in _HOW_LONG}
        about = {"key": key, "toolchain": environment.toolchain(), **way}
        folder = self.data / devices.folder_name(device_kind) / "journal"
        path = folder / f"{file_stem(ba.op.registered_name())}-{serialization.digest(about)[:16]}.jsonl"
        return Journal.open(path, ba.op.config_cls, about, resume=resume, limit_s=how.get("timeout", math.inf))

    def sweeps(self) -> Iterator[pathlib.Path]:
        """Yields the paths of all sweeps, in a fixed order."""
        yield from sorted(self.data.glob("*/*.jsonl"))


def file_stem(op: str) -> str:
    """Returns an op's name as a file name; names that would not survive get a hash, so that none collide."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", op)[:100].lstrip(".")
    return safe if safe == op else f"{safe}-{serialization.digest(op)[:8]}"


def _covered(entries: Sequence[Entry], how: Mapping[str, Any]) -> set[Any]:
    """Returns the configs among which the first of some entries decided: its own, and those of what it extends.

    What it extends counts only if the winner of that ran again. A config that exceeded a smaller limit than the present
    one does not count: it may keep within this one.
    """
    last, covered = entries[0], _tried(entries[0], how)
    for entry in entries[1:]:
        extended = last.environment.get("extends")
        is_it = extended is not None and extended == entry.environment.get("time")
        if is_it and (entry.best is None or last.median_ms(entry.best) is not None):
            last, covered = entry, covered | _tried(entry, how)
    return covered


def _tried(entry: Entry, how: Mapping[str, Any]) -> set[Any]:
    """Returns the configs of an entry whose outcome would be no other under the present limit."""
    was, now = entry.environment.get("timeout"), how.get("timeout")
    longer = isinstance(was, (int, float)) and isinstance(now, (int, float)) and now > was
    return {c for c, o in entry.outcomes.items() if not (longer and isinstance(o, Failure) and o.stage == "timeout")}


def _by_place(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Groups entries by device kind and op name."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.device_kind, entry.bound_args.op.registered_name()), []).append(entry)
    return groups


def _lines(path: pathlib.Path) -> list[bytes]:
    return path.read_bytes().splitlines()


@functools.lru_cache(maxsize=64)
def _parsed(path: pathlib.Path, mtime_ns: int, size: int) -> tuple[Entry, ...]:
    return tuple(read_jsonl(path))


def read_jsonl(path: pathlib.Path) -> list[Entry]:
    """Returns the entries of a sweep, oldest first; an unreadable line costs that line, with one warning for all.

    Raises:
      FileNotFoundError: if there is no such file.
    """
    items: list[Any] = []
    for line in _lines(path):
        if line.strip():
            try:
                items.append(serialization.loads(line))
            except errors.FormatError:
                items.append(None)
    return parse_entries(items)[0]


def newest(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Returns the last entry of each key and device."""
    return tuple({(entry.device_kind, entry.key): entry for entry in entries}.values())


def winners_of(entries: Iterable[Entry]) -> dict[str, Winner]:
    """Returns the winners of entries of one op and device; later entries of a key win."""
    return {entry.key: winner for entry in entries if (winner := Winner.of(entry)) is not None}


def _winner_json(winner: Winner) -> dict[str, Any]:
    return {
        "config": winner.config,
        "median_ms": winner.median_ms,
        "default_ms": winner.default_ms,
        "environment": winner.environment,
    }


def _winner_of_json(data: Any) -> Winner:
    env = data["environment"]
    winner = Winner(data["config"], float(data["median_ms"]), data["default_ms"], env)
    if not (isinstance(winner.config, dict) and isinstance(env, dict)):
        raise TypeError
    return winner


WINNERS = keyed.Form("tokamax-winners", 1, "measured on", _winner_json, _winner_of_json)
"""How winners are kept."""


def _read_model(path: pathlib.Path) -> CostModel | None:
    try:
        return CostModel.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, errors.FormatError) as error:
        warnings.warn(f"{path} is damaged or of another version and is not used: {error}", stacklevel=3)
        return None


def private_dir() -> pathlib.Path:
    """Returns the folder of the private cache: `$TOKAMAX_CACHE_DIR`, else the user's cache folder."""
    return pathlib.Path(os.environ.get("TOKAMAX_CACHE_DIR") or platformdirs.user_cache_dir("tokamax", appauthor=False))


@functools.lru_cache(maxsize=8)
def _private(folder: pathlib.Path) -> DirectoryStore:
    return DirectoryStore(folder / "data", folder / "models")


def private() -> DirectoryStore:
    """Returns the private cache."""
    return _private(private_dir())


@functools.cache
def library() -> DirectoryStore:
    """Returns the library cache: the data and models that are installed with the package."""
    return DirectoryStore(resources.data_dir(), resources.models_dir())


def in_use() -> list[tuple[str, DirectoryStore]]:
    """Returns the caches that are read, with their names, the one to prefer first."""
    own = [("private", private())] if options.private_cache.value else []
    return [*own, ("library", library())]
