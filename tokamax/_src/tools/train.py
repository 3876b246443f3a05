"""`tokamax train`: cost models from measured sweeps, and which shapes to measure next."""

import argparse
import math
import pathlib
from typing import Any

from tokamax._src import api, errors, suggest, training
from tokamax._src.autotuning import store
from tokamax._src.autotuning.result import AutotuningResult
from tokamax._src.tables import format_table
from tokamax._src.tools import common


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "train",
        run,
        about="train cost models from measured sweeps, and keep those that beat their rivals",
        example="tokamax train tuned.json\n  tokamax train --suggest 5 --among bound_args.json --output next.json",
    )
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="result files to add to the private sweeps first")
    parser.add_argument("--data", type=pathlib.Path, help="folder of sweeps (default: the private cache's)")
    parser.add_argument("--models", type=pathlib.Path, help="folder to write to (default: the private cache's)")
    parser.add_argument("--op", help="train the model of this op alone")
    parser.add_argument(
        "--suggest", type=int, metavar="N", help="train nothing: name the N shapes most worth measuring"
    )
    parser.add_argument("--among", type=pathlib.Path, help="with --suggest: bound arguments to choose from")
    parser.add_argument("--output", type=pathlib.Path, help="with --suggest: file to write (default: stdout)")
    common.add_imports(parser)


def _suggest(args: argparse.Namespace) -> int:
    if args.among is None:
        raise errors.ArgumentError("--suggest must come with --among, a file of the bound arguments to choose from")
    among = api.bound_args_from_json(args.among)
    times = [ba.usage.time_ms if ba.usage else 0.0 for ba in among]
    found = suggest.suggest(among, args.suggest, weights=times if any(times) else None)
    text = api.bound_args_to_json([s.bound_args for s in found])
    if args.output is None and not args.json:
        print(text)
        return 0
    if args.output is not None:
        args.output.write_text(text)
    data = [{"arguments": repr(s.bound_args), "need": s.need, "reason": s.reason} for s in found]
    rows = [("arguments", "may lose", "why")]
    rows += [(repr(s.bound_args), f"{math.expm1(s.need):.1%}", s.reason) for s in found]
    how = f"written to {args.output}; measure them with: tokamax tune {args.output}"
    common.print_either(
        args, {"output": args.output and str(args.output), "shapes": data}, f"{format_table(rows)}\n{how}"
    )
    return 0


def run(args: argparse.Namespace) -> int:
    """Trains; returns 1 if no model was written."""
    common.import_modules(args.imports)
    if args.suggest is not None:
        return _suggest(args)
    folders = store.private()
    for path in args.results:
        folders.keep(AutotuningResult.load(path).entries)
    place = store.DirectoryStore(args.data or folders.data, args.models or folders.models)
    trained = [training.train(problems, place) for problems in training.sweeps(place.data, args.op)]
    blocks = [
        (f"{item.op} on {item.device_kind}" if item.report is None else item.report.table()) + f"\n{item.note}\n"
        for item in trained
    ]
    data = [
        {
            "op": item.op,
            "device_kind": item.device_kind,
            "written": item.written,
            "note": item.note,
            "report": None if item.report is None else item.report.to_dict(),
        }
        for item in trained
    ]
    common.print_either(args, data, "\n".join(blocks))
    if not any(item.written for item in trained):
        common.say(f"no model was written; measured sweeps found in {place.data}: {len(trained)}")
        return 1
    return 0
