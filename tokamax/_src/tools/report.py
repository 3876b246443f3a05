"""`tokamax report`: one page about what was measured."""

import argparse
import pathlib
from typing import Any

from tokamax._src import api, devices, errors, explanation
from tokamax._src.autotuning import store
from tokamax._src.autotuning.result import AutotuningResult
from tokamax._src.files import write_atomically
from tokamax._src.report import content, page
from tokamax._src.tools import common


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "report",
        run,
        about="write one HTML page about results or measured sweeps, which needs no network",
        example="tokamax report tuned.json --calls bound_args.json --output report.html",
    )
    parser.add_argument(
        "sources", nargs="+", type=pathlib.Path, help="result files, sweeps (.jsonl), or folders with sweeps"
    )
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("report.html"), help="page to write")
    parser.add_argument(
        "--calls",
        type=pathlib.Path,
        metavar="BOUND_ARGS",
        help="say which configs these calls run with (default: those that were measured on this device)",
    )
    parser.add_argument(
        "--held-out",
        choices=("auto", "yes", "no"),
        default="auto",
        help="fit cost models on folds and judge them beside their rivals, about 20 s per 1500 measured configs "
        "(default: up to 1000)",
    )
    parser.add_argument("--title", help="heading of the page")
    common.add_imports(parser)


def _read(path: pathlib.Path) -> AutotuningResult:
    if not path.is_dir() and path.suffix != ".jsonl":
        return AutotuningResult.load(path)
    found = sorted(p for p in path.rglob("*.jsonl") if p.parent.name != "journal") if path.is_dir() else [path]
    if not found:
        raise errors.FormatError(f"the folder {path} must hold measured sweeps, *.jsonl; it has none")
    return AutotuningResult(store.newest(entry for sweep in found for entry in store.read_jsonl(sweep)))


def _told(args: argparse.Namespace, result: AutotuningResult) -> explanation.Explanation | None:
    if args.calls is not None:
        calls = api.bound_args_from_json(args.calls)
    else:
        here = devices.device_kind()
        calls = tuple(entry.bound_args for entry in result.entries if entry.device_kind == here)
    with result:
        return explanation.explain(calls) if calls else None


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    common.import_modules(args.imports)
    result = AutotuningResult()
    for path in args.sources:
        result = result | _read(path)
    title = args.title or f"Tuning report: {', '.join(path.name for path in args.sources)}"
    data = content.content(result, _told(args, result), title=title, held_out=args.held_out, say=common.say)
    write_atomically(args.output, page.page(data).encode())
    text = f"{len(result)} entries written to {args.output}"
    common.print_either(args, {"output": str(args.output), **data}, text)
    return 0
