"""`tokamax explain`: which config each op would run with, and why."""

import argparse
import contextlib
import dataclasses
import pathlib
from typing import Any

from tokamax._src import explanation
from tokamax._src.autotuning.result import AutotuningResult
from tokamax._src.tools import common, targets


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "explain",
        run,
        about="say which config each op would run with on this device, and why",
        example="tokamax explain bound_args.json --result tuned.json",
    )
    targets.add_target(parser)
    parser.add_argument(
        "--result", dest="results", type=pathlib.Path, action="append", default=[], help="enter this result first"
    )


def run(args: argparse.Namespace) -> int:
    """Explains."""
    with contextlib.ExitStack() as stack:
        bound = targets.bound_arguments(args)
        for path in args.results:
            stack.enter_context(AutotuningResult.load(path))
        told = dataclasses.replace(explanation.explain(bound), command=targets.tune_command(args))
    common.print_either(args, told.to_dict(), told)
    return 0
