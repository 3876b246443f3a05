"""`tokamax evaluate`: cost models beside their rivals, on held-out shapes."""

import argparse
import pathlib
from typing import Any

from tokamax._src import errors, training
from tokamax._src.autotuning import store
from tokamax._src.tools import common


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "evaluate",
        run,
        about="judge cost models beside their rivals on held-out shapes",
        example="tokamax evaluate --op XlaChunkedRaggedDot",
    )
    parser.add_argument("--data", type=pathlib.Path, help="folder of sweeps (default: the private cache's)")
    parser.add_argument("--op", help="judge this op alone")
    common.add_imports(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluates; returns 1 if there was nothing to."""
    common.import_modules(args.imports)
    data = args.data or store.private().data
    reports = []
    for problems in training.sweeps(data, args.op):
        try:
            reports += training.judge(problems)
        except errors.ArgumentError as error:
            common.say(f"{problems[0].op} on {problems[0].device_kind}: {error}")
    common.print_either(args, [r.to_dict() for r in reports], "\n\n".join(report.table() for report in reports))
    if not reports:
        common.say(f"nothing was evaluated; there must be measured sweeps in {data}")
        return 1
    return 0
