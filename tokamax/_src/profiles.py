"""Op calls in profiles: which ran, how often and how long.

XLA keeps the scope names of op calls (see `capture`) as `op_name` of each instruction of a compiled module, through
fusion and all other passes, and the profiler keeps the compiled modules. So the op calls are those named in the
modules; what they took is read from the events of their instructions:

- An event belongs to the op calls that its instruction's name stands in. A fusion without any belongs to the call that
  most of what was fused comes from. Where the module is not at hand, names in the event's own statistics decide.
- The time of a call is that during which any of its events runs, so that neither a loop and its body nor two threads
  count twice. Of several devices, that which spent most on it counts.
- The number of runs is estimated from how often its instructions ran, those of its own loops left aside.
"""

import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokamax._src import capture, errors, serialization, xspace
from tokamax._src.bound_arguments import SCOPE_PREFIX, Usage

BOUND_ARGS_SCHEMA = "tokamax-bound-arguments"
_SUFFIXES = (".xplane.pb", ".xplane.pb.gz")
_LOOPS = ("while/body", "while/cond")
_MARK = SCOPE_PREFIX.encode()
_MERGED = "merged"
"""The place of instructions that XLA made of several, with their names joined by `;`: they say little of a call."""


@dataclasses.dataclass(frozen=True)
class ProfiledOp:
    """An op call found in profiles.

    Attributes:
      data: the JSON data of its bound arguments.
      usage: how often and how long it ran; None where the trace has no event of it.
    """

    data: Mapping[str, Any]
    usage: Usage | None


def bound_args_text(items: Iterable[tuple[Mapping[str, Any], Usage | None]]) -> str:
    """Returns the JSON text of bound arguments, with what each took in a profile where that is known."""
    listed = [{**data, "profile": dataclasses.asdict(usage)} if usage else dict(data) for data, usage in items]
    return serialization.dumps({"schema": BOUND_ARGS_SCHEMA, "version": 1, "bound_args": listed})


def bound_args_items(text: str | bytes) -> list[tuple[Any, Usage | None]]:
    """Reads what `bound_args_text` wrote, as JSON data; a bare list is read too.

    Raises:
      FormatError: if it is not that.
    """
    data = serialization.loads(text)
    items = data.get("bound_args") if isinstance(data, dict) and data.get("schema") == BOUND_ARGS_SCHEMA else data
    if not isinstance(items, list):
        raise errors.FormatError(
            f"the JSON must be bound arguments (schema {BOUND_ARGS_SCHEMA!r}), got {str(data)[:60]!r}"
        )
    return [(item, _usage_from_json(item.get("profile") if isinstance(item, dict) else None)) for item in items]


def _usage_from_json(data: Any) -> Usage | None:
    if data is None:
        return None
    try:
        usage = Usage(int(data["runs"]), float(data["time_ms"]))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise errors.FormatError(f"profile must hold runs and time_ms, got {str(data)[:60]!r}") from error
    if not (usage.runs >= 0 and 0 <= usage.time_ms < math.inf):
        raise errors.FormatError(f"runs and time_ms of a profile must not be negative, got {str(data)[:60]!r}")
    return usage


def find(paths: Iterable[pathlib.Path]) -> tuple[pathlib.Path, ...]:
    """Returns the profiles among paths: files as they are, and those in folders, in a fixed order.

    Raises:
      FormatError: if a folder holds none.
      FileNotFoundError: if a path does not exist.
    """
    found: list[pathlib.Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*.xplane.pb*") if p.name.endswith(_SUFFIXES) and p.is_file())
            if not inside:
                raise errors.FormatError(
                    f"the folder {path} must hold a profile, a file named *.xplane.pb; it has none"
                )
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path} does not exist")
    return tuple(dict.fromkeys(p.resolve() for p in found))


def read(paths: Iterable[pathlib.Path], *, idle: bool = False) -> tuple[ProfiledOp, ...]:
    """Returns the op calls in profiles, each once, those that took most time first.

    Times and runs of several files add up. Nothing is imported: the ops need not be known in this process.

    Args:
      paths: files, or folders that are searched for `*.xplane.pb` and `*.xplane.pb.gz`.
      idle: whether to add the op calls of programs that were loaded but did not run while the profile was taken.

    Raises:
      FormatError: if a file is no profile, or if no op call is found.
      MissingExtraError: if protobuf is not installed.
      OSError: if a file cannot be read.
    """
    usages: dict[str, Usage | None] = {}
    files, modules = find(paths), 0
    for path in files:
        number, ops = _ops_of(xspace.read(path), idle=idle)
        modules += number
        for key, usage in ops.items():
            usages[key] = _added(usages.get(key), usage)
    if not usages:
        where = ", ".join(map(str, files))
        raise errors.FormatError(
            f"a profile must hold a compiled module, got none in {where}; run a jitted function while it is taken"
            if modules == 0
            else f"one of the {modules} compiled modules of {where} must call a tokamax op, got none that does"
        )
    ordered = sorted(usages, key=lambda key: -(usage.time_ms if (usage := usages[key]) else -1.0))
    return tuple(ProfiledOp(serialization.loads(key), usages[key]) for key in ordered)


def _added(left: Usage | None, right: Usage | None) -> Usage | None:
    return (left + right) if left and right else (left or right)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of an op call, by the name of an instruction: the call's key, and what stands before and after it."""

    key: str
    before: str
    after: str


@functools.lru_cache(maxsize=65536)
def _parts(op_name: bytes) -> tuple[_Part, ...]:
    """Returns the op calls that an instruction is part of, by its name, outermost first, each once."""
    if _MARK not in op_name:
        return ()
    found: dict[str, _Part] = {}
    for data, before, after in capture.scopes(op_name.decode("utf-8", "replace")):
        if isinstance(data, dict) and "op" in data:
            key = serialization.dumps(data)
            found.setdefault(key, _Part(key, before, after))
    return tuple(found.values())


@dataclasses.dataclass(frozen=True)
class _Module:
    """A compiled module: the op calls in it, and those that each instruction belongs to."""

    keys: tuple[str, ...]
    instructions: Mapping[bytes, tuple[_Part, ...]]

    @classmethod
    def of(cls, module: Any) -> "_Module":
        bodies = {c.id: c.instructions for c in module.computations}

        def parts(instruction: Any) -> tuple[_Part, ...]:
            if (own := _parts(instruction.metadata.op_name)) or instruction.opcode != b"fusion":
                return own
            inside = [i for body in instruction.called_computation_ids for i in bodies.get(body, ())]
            count = collections.Counter(found for i in inside if (found := parts(i)))
            return count.most_common(1)[0][0] if count else ()

        found = {i.name: parts(i) for body in bodies.values() for i in body}
        every = (part.key for body in bodies.values() for i in body for part in _parts(i.metadata.op_name))
        return cls(tuple(dict.fromkeys(every)), found)


class _Names:
    """The statistics of one plane: their names, and their values as bytes or numbers."""

    def __init__(self, plane: Any):
        self._names = {entry.key: entry.value.name for entry in plane.stat_metadata}

    def of(self, stats: Any) -> dict[bytes, Any]:
        """Returns name -> value of statistics, with names in lower case and `_` for blanks."""
        return {self._name(stat.metadata_id): self._value(stat) for stat in stats}

    def _name(self, number: int) -> bytes:
        return self._names.get(number, b"").lower().replace(b" ", b"_")

    def _value(self, stat: Any) -> Any:
        if stat.ref_value:
            return self._names.get(stat.ref_value, b"")
        return stat.str_value or stat.bytes_value or stat.uint64_value or stat.int64_value


def _modules_of(space: Any) -> dict[Any, _Module]:
    """Returns the compiled modules of a profile by the number and by the name of their program."""
    found: dict[Any, _Module] = {}
    for plane in space.planes:
        names = _Names(plane)
        for entry in plane.event_metadata:
            stats = names.of(entry.value.stats)
            raw = stats.get(b"hlo_proto")
            proto = xspace.hlo_module(raw) if isinstance(raw, bytes) else None
            if proto is not None:
                module = _Module.of(proto)
                found[_program({b"program_id": proto.id} | stats)] = module
                found.setdefault(proto.name, module)
    return found


def _program(stats: Mapping[bytes, Any]) -> Any:
    """Returns a program's number, which some statistics hold as text and some with a sign; else its name."""
    number = stats.get(b"program_id")
    if isinstance(number, bytes):
        number = int(number) if number.removeprefix(b"-").isdigit() else None
    return stats.get(b"hlo_module") if number is None else number % 2**64


def _ops_of(space: Any, *, idle: bool) -> tuple[int, dict[str, Usage | None]]:
    """Returns the number of compiled modules of a profile, and its op calls with what they took."""
    modules = _modules_of(space)
    distinct = {id(module): module for module in modules.values()}
    found: dict[str, Usage] = {}
    ran: set[int] = set()
    for plane in space.planes:
        trace = _Trace.of(plane, modules)
        ran |= trace.ran
        for key, usage in trace.usages().items():
            found[key] = max(usage, found.get(key, usage), key=lambda u: u.time_ms)
    shown = [m for number, m in distinct.items() if idle or not ran or number in ran]
    usages: dict[str, Usage | None] = {key: found.get(key) for module in shown for key in module.keys}
    return len(distinct), {**usages, **found}


@dataclasses.dataclass(frozen=True)
class _Trace:
    """The events of one plane.

    Attributes:
      ran: `id` of the modules that have any.
      spans: key of an op call -> (start, end) of its events in ps.
      counts: key of an op call -> program and place in it -> what follows the call in an instruction's name -> events.
    """

    ran: set[int]
    spans: Mapping[str, list[tuple[int, int]]]
    counts: Mapping[str, dict[Any, collections.Counter[str]]]

    @classmethod
    def of(cls, plane: Any, modules: Mapping[Any, _Module]) -> "_Trace":
        trace = cls(set(), collections.defaultdict(list), collections.defaultdict(dict))
        names = _Names(plane)
        known = {entry.key: (entry.value, names.of(entry.value.stats)) for entry in plane.event_metadata}
        for line in plane.lines:
            for event in line.events:
                metadata, fixed = known.get(event.metadata_id, (None, {}))
                stats = fixed | names.of(event.stats) if event.stats else fixed
                if metadata is not None and stats:
                    start = line.timestamp_ns * 1000 + event.offset_ps
                    trace._add(metadata, stats, modules, (start, start + event.duration_ps))
        return trace

    def _add(
        self, metadata: Any, stats: Mapping[bytes, Any], modules: Mapping[Any, _Module], span: tuple[int, int]
    ) -> None:
        program = _program(stats)
        module = modules.get(program) or modules.get(stats.get(b"hlo_module"))
        parts: tuple[_Part, ...] = ()
        if module is not None:
            self.ran.add(id(module))
            parts = module.instructions.get(stats.get(b"hlo_op") or metadata.display_name or metadata.name, ())
        if not parts:
            parts = next((p for v in stats.values() if isinstance(v, bytes) and (p := _parts(v))), ())
        for part in parts:
            self.spans[part.key].append(span)
            place = _MERGED if ";" in part.before + part.after else (program, part.before)
            self.counts[part.key].setdefault(place, collections.Counter())[part.after] += 1

    def usages(self) -> dict[str, Usage]:
        """Returns what each op call took."""
        usages = {}
        for key, spans in self.spans.items():
            places = self.counts[key]
            counts = [count for place, count in places.items() if place != _MERGED or len(places) == 1]
            usages[key] = Usage(sum(map(_runs, counts)), _covered_ps(spans) / 1e9)
        return usages


def _runs(counts: Mapping[str, int]) -> int:
    """Returns how often the calls at one place of a program ran, from how often the instructions of each name did.

    A name that stands for several instructions of a call counts too often, and what was moved out of a loop, shared by
    calls or fused with the caller too seldom. The second is the rarer, so the lower quartile is taken.
    """
    outside = [n for after, n in counts.items() if not any(loop in after for loop in _LOOPS)]
    often = sorted(outside or counts.values())
    return often[len(often) // 4]


def _covered_ps(spans: Sequence[tuple[int, int]]) -> int:
    """Returns the length of the union of intervals."""
    total, reached = 0, None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total
