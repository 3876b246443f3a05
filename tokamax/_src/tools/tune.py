"""`tokamax tune`: measures the configs of ops and writes a result."""

import argparse
import pathlib
from typing import Any

from tokamax._src import api, errors
from tokamax._src.op import NullConfig
from tokamax._src.tools import common, targets


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "tune",
        run,
        about="measure the configs of ops and write a result",
        example="tokamax tune bound_args.json --top 20 --output tuned.json\n"
        "  tokamax tune tokamax:dot_product_attention --arg f32[1,256,4,32] --arg f32[1,256,4,32] "
        "--arg f32[1,256,4,32] --arg is_causal=true",
    )
    targets.add_target(parser)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("autotuning.json"), help="result to write")
    parser.add_argument(
        "--top", type=int, metavar="N", help="tune only the first N ops; a profile's come slowest first"
    )
    parser.add_argument("--save", action="store_true", help="make the winners count in every process of this user")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for compiling, and for a run, of a config")
    parser.add_argument("--total-timeout", type=float, help="seconds for everything; then what was measured is written")
    parser.add_argument("--ignore-cache", action="store_true", help="measure again what was measured before")
    parser.add_argument("--search", choices=("exhaustive", "model"), help="measure every config, or the promising ones")
    parser.add_argument("--budget", type=int, help="how many configs of an op a search by model may measure")
    parser.add_argument("--isolation", choices=("auto", "none", "process"), default="auto", help="where configs run")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on with what an interrupted run measured",
    )


def run(args: argparse.Namespace) -> int:
    """Tunes; returns 1 if an op could not be tuned."""
    if args.top is not None and args.top < 1:
        raise errors.ArgumentError(f"--top must be at least 1, got {args.top}")
    bound = [ba for ba in targets.bound_arguments(args) if ba.op.config_cls is not NullConfig][: args.top]
    if not bound:
        raise errors.ArgumentError(f"{args.target} must have an op to tune, got none")
    result = api.autotune(
        bound,
        timeout=args.timeout,
        total_timeout=args.total_timeout,
        ignore_cache=args.ignore_cache,
        search=args.search or ("exhaustive" if args.budget is None else "model"),
        budget=args.budget,
        resume=args.resume,
        isolation=args.isolation,
    )
    result.dump(args.output)
    if args.save:
        result.save_to_cache()
    summary = result.summary()
    saved = ", and saved in the private cache" if args.save else ""
    common.print_either(
        args,
        {"output": str(args.output), "saved": args.save, **summary.to_dict()},
        f"{summary}\nwritten to {args.output}{saved}",
    )
    done = len(result) == len(set(bound)) and all(entry.best is not None for entry in result.entries)
    return 0 if done else 1
