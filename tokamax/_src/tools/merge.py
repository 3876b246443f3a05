"""`tokamax merge`: several results become one."""

import argparse
import pathlib
from typing import Any

from tokamax._src.autotuning.result import AutotuningResult
from tokamax._src.tools import common


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "merge",
        run,
        about="merge results; where two measured the same, the later file wins",
        example="tokamax merge monday.json tuesday.json --output both.json",
    )
    parser.add_argument("results", nargs="+", type=pathlib.Path, help="result files")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="result to write")
    common.add_imports(parser)


def run(args: argparse.Namespace) -> int:
    """Merges the files."""
    common.import_modules(args.imports)
    merged = AutotuningResult()
    for path in args.results:
        merged = merged | AutotuningResult.load(path)
    merged.dump(args.output)
    data = {"output": str(args.output), "entries": len(merged), "unknown": len(merged.unknown)}
    common.print_either(args, data, f"{len(merged)} entries written to {args.output}")
    return 0
