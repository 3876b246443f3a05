"""`tokamax bound-args`: the op calls of a program, read from a profile of it, as a file of bound arguments."""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from tokamax._src import errors, profiles, serialization
from tokamax._src.bound_arguments import BoundArguments, Usage
from tokamax._src.files import write_atomically
from tokamax._src.tables import format_table
from tokamax._src.tools import common


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "bound-args",
        run,
        about="write the op calls that a profile of jax.profiler holds, those that took most time first",
        example="tokamax bound-args /tmp/profile --output bound_args.json && tokamax tune bound_args.json --top 20",
    )
    parser.add_argument(
        "profiles", nargs="*", type=pathlib.Path, help="profiles (.xplane.pb, also with .gz), or folders with some"
    )
    parser.add_argument(
        "--xplane_file", dest="more", action="append", default=[], type=pathlib.Path, help="a profile, as well"
    )
    parser.add_argument(
        "--output",
        "--output_file",
        dest="output",
        type=pathlib.Path,
        default=pathlib.Path("bound_args.json"),
        help="file to write (default: %(default)s)",
    )
    parser.add_argument("--idle", action="store_true", help="add op calls of programs that did not run meanwhile")
    common.add_imports(parser)


def _names_a_local_function(data: Any) -> bool:
    if isinstance(data, Mapping):
        return "$local" in data or any(map(_names_a_local_function, data.values()))
    return isinstance(data, list) and any(map(_names_a_local_function, data))


def _written(op: profiles.ProfiledOp) -> tuple[Mapping[str, Any] | None, str, str | None]:
    """Returns what to write of an op call (None for nothing), the call in words, and what is amiss (None: nothing)."""
    try:
        ba = BoundArguments.from_json(op.data)
        return ba.to_json(), repr(ba), None
    except (errors.FormatError, errors.SerializationError) as error:
        words = f"{op.data['op']}(...)"
        if _names_a_local_function(op.data):
            return None, words, "left out: an argument is a lambda or local function, which no file can name"
        return op.data, words, f"kept as it is, but not understood here without --import MODULE: {error}"


def run(args: argparse.Namespace) -> int:
    """Reads profiles and writes bound arguments."""
    common.import_modules(args.imports)
    paths = [*args.profiles, *args.more]
    if not paths:
        raise errors.ArgumentError("a profile must be given: a path, or --xplane_file=PATH")
    items: dict[str, tuple[Mapping[str, Any], Usage | None]] = {}
    shown: list[dict[str, Any]] = []
    for op in profiles.read(paths, idle=args.idle):
        data, words, note = _written(op)
        runs, time_ms = (op.usage.runs, op.usage.time_ms) if op.usage else (None, None)
        shown.append({"arguments": words, "runs": runs, "time_ms": time_ms, "note": note})
        if data is not None:
            items.setdefault(serialization.dumps(data), (data, op.usage))
        if note is not None:
            common.say(f"warning: {words}: {note}")
    write_atomically(args.output, profiles.bound_args_text(items.values()).encode())
    rows = [("arguments", "runs", "time")]
    for item in shown:
        took = "-" if item["time_ms"] is None else f"{item['time_ms']:.3f} ms"
        rows.append((item["arguments"], "-" if item["runs"] is None else str(item["runs"]), took))
    text = f"{format_table(rows)}\n{len(items)} op calls written to {args.output}"
    common.print_either(args, {"output": str(args.output), "ops": shown}, text)
    return 0
