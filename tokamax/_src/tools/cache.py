"""`tokamax cache`: what the private cache holds; clearing, filling and copying it."""

import argparse
import dataclasses
import datetime
import glob
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from tokamax._src import devices, environment, errors
from tokamax._src.autotuning import housekeeping, store
from tokamax._src.autotuning.result import AutotuningResult
from tokamax._src.bound_arguments import get_runtime
from tokamax._src.tables import format_table
from tokamax._src.tools import common


def add(commands: Any) -> None:
    """Adds the command and its own subcommands."""
    parser = commands.add_parser(
        "cache", help="list, show, clear, fill or copy the private cache", description="The cache of this user."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    found = common.add_command(
        actions, "list", _list, about="list what the cache holds, op by op", example="tokamax cache list"
    )
    _add_filters(found)
    found = common.add_command(
        actions,
        "show",
        _show,
        about="show the newest measurement of each shape",
        example="tokamax cache show --op XlaChunkedRaggedDot",
    )
    _add_filters(found)
    common.add_imports(found)
    found = common.add_command(
        actions,
        "prune",
        _prune,
        about="drop measurements, with the winners that came from them; there is no way back",
        example="tokamax cache prune --older-than 180 --dry-run",
    )
    _add_filters(found)
    found.add_argument("--older-than", type=float, metavar="DAYS", help="drop what was measured longer ago")
    found.add_argument("--stale", action="store_true", help="drop what another toolchain (jax, jaxlib) measured")
    found.add_argument("--journals", action="store_true", help="drop journals of interrupted tunings")
    found.add_argument("--estimated", action="store_true", help="drop configs that were estimated, not measured")
    found.add_argument("--all", action="store_true", help="drop every measurement")
    found.add_argument("--dry-run", action="store_true", help="only say what would go")
    found = common.add_command(
        actions,
        "import",
        _import,
        about="add results to the cache, so that their winners count in every process of this user",
        example="tokamax cache import tuned.json",
    )
    found.add_argument("results", nargs="+", type=pathlib.Path, help="result files")
    common.add_imports(found)
    found = common.add_command(
        actions,
        "export",
        _export,
        about="write the newest measurement of each shape as a result",
        example="tokamax cache export --output mine.json",
    )
    found.add_argument("--output", type=pathlib.Path, required=True, help="result to write")
    _add_filters(found)
    common.add_imports(found)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--device", help="only this device kind")


def _sweeps(args: argparse.Namespace) -> list[housekeeping.Sweep]:
    wanted = None if args.op is None else store.file_stem(args.op)
    return [
        sweep
        for sweep in housekeeping.sweeps(store.private())
        if wanted in (None, sweep.op) and args.device in (None, sweep.device)
    ]


def _estimated(args: argparse.Namespace) -> list[pathlib.Path]:
    op = "*" if args.op is None else glob.escape(store.file_stem(args.op))
    device = "*" if args.device is None else glob.escape(devices.folder_name(args.device))
    return sorted(store.private().data.glob(f"{device}/{op}.estimated.json"))


def _list(args: argparse.Namespace) -> int:
    found, place = _sweeps(args), store.private()
    journals, estimated = housekeeping.journals(place), _estimated(args)
    rows: list[tuple[str, ...]] = [("device", "op", "entries", "shapes", "winners", "model", "kB", "newest")]
    for s in found:
        model, size = "yes" if s.has_model else "no", f"{s.size_bytes / 1000:.0f}"
        row = (s.device, s.op, s.entries, s.shapes, s.winners, model, size, s.newest or "-")
        rows.append(tuple(map(str, row)))
    total = f"{sum(s.entries for s in found)} entries, {len(journals)} journals of interrupted tunings, "
    total += f"{len(estimated)} files of estimated configs, in {place.data}"
    data = {
        "data": str(place.data),
        "models": str(place.models),
        "sweeps": [{**dataclasses.asdict(s), "path": str(s.path)} for s in found],
        "journals": [str(path) for path in journals],
        "estimated": [str(path) for path in estimated],
    }
    common.print_either(args, data, f"{format_table(rows)}\n{total}")
    return 0


def _newest(args: argparse.Namespace) -> tuple[AutotuningResult, int]:
    """Returns the newest entry of each key and device, and how many older ones were passed over."""
    common.import_modules(args.imports)
    entries = [entry for sweep in _sweeps(args) for entry in store.read_jsonl(sweep.path)]
    newest = store.newest(entries)
    return AutotuningResult(newest), len(entries) - len(newest)


def _show(args: argparse.Namespace) -> int:
    result, _ = _newest(args)
    summary = result.summary()
    common.print_either(args, summary.to_dict(), summary)
    return 0


def _age_days(env: Mapping[str, Any]) -> float:
    """Returns how long ago an environment was; nan, which is older than nothing, where it does not say."""
    try:
        then = datetime.datetime.fromisoformat(str(env.get("time")))
    except ValueError:
        return math.nan
    then = then if then.tzinfo else then.replace(tzinfo=datetime.UTC)
    return (datetime.datetime.now(datetime.UTC) - then).total_seconds() / 86400


def _prune(args: argparse.Namespace) -> int:
    by_entry = args.all or args.stale or args.older_than is not None
    if not by_entry and not args.journals and not args.estimated:
        raise errors.ArgumentError(
            "what to drop must be said: --older-than DAYS, --stale, --journals, --estimated or --all"
        )

    def drop(env: Mapping[str, Any]) -> bool:
        old = args.older_than is not None and _age_days(env) > args.older_than
        return bool(args.all or old or (args.stale and environment.stale_parts(env)))

    place = store.private()
    pruned = [housekeeping.prune(place, s, drop, dry_run=args.dry_run) for s in (_sweeps(args) if by_entry else [])]
    journals = housekeeping.journals(place) if args.journals else []
    estimated = _estimated(args) if args.estimated else []
    if not args.dry_run:
        for path in (*journals, *estimated):
            path.unlink(missing_ok=True)
    rows = [("device", "op", "entries", "winners")]
    rows += [(p.sweep.device, p.sweep.op, str(p.entries), str(p.winners)) for p in pruned if p.entries or p.winners]
    entries, winners = sum(p.entries for p in pruned), sum(p.winners for p in pruned)
    verb = "would go" if args.dry_run else "are gone"
    counts = {"entries": entries, "winners": winners, "journals": len(journals), "estimated": len(estimated)}
    text = f"{entries} entries, {winners} winners, {len(journals)} journals, {len(estimated)} estimated files {verb}"
    data = {**counts, "dry_run": args.dry_run}
    common.print_either(args, data, text if len(rows) == 1 else f"{format_table(rows)}\n{text}")
    return 0


def _import(args: argparse.Namespace) -> int:
    common.import_modules(args.imports)
    count = 0
    for path in args.results:
        result = AutotuningResult.load(path)
        get_runtime().save(result)
        count += len(result)
    place = store.private()
    common.print_either(args, {"entries": count, "data": str(place.data)}, f"{count} entries added to {place.data}")
    return 0


def _export(args: argparse.Namespace) -> int:
    result, older = _newest(args)
    result.dump(args.output)
    text = f"{len(result)} entries written to {args.output}; {older} older ones of the same shapes stay in the cache"
    common.print_either(args, {"output": str(args.output), "entries": len(result), "older": older}, text)
    return 0
