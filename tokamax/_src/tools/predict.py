"""`tokamax predict`: what a cost model says about the configs of ops."""

import argparse
from typing import Any

from tokamax._src import dispatch
from tokamax._src.autotuning.result import describe_config
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.tables import format_table
from tokamax._src.tools import common, targets


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "predict",
        run,
        about="rank the configs of ops by predicted time",
        example="tokamax predict XlaChunkedRaggedDot --arg f32[512,128] --arg f32[8,128,256] --arg i32[8]",
    )
    targets.add_target(parser)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many configs to show")


def _prediction(ba: BoundArguments, top: int) -> dict[str, Any]:
    for name, found in dispatch.predictions(ba):
        ranked = [
            {
                "config": describe_config(ba.autotuning_configs[i]),
                "expected_slowdown": float(found.slowdown[i]),
                "spread": float(found.spread[i]),
            }
            for i in found.order[:top]
        ]
        return {
            "arguments": repr(ba),
            "model": name,
            "abstains": found.abstain,
            "nearest": found.nearest,
            "configs": ranked,
        }
    if (reason := dispatch.unlisted(ba)) is None:
        reason = "nothing to choose from" if len(ba.autotuning_configs) < 2 else "no model of this op and device"
    return {"arguments": repr(ba), "model": None, "abstains": reason, "nearest": None, "configs": []}


def _text(item: dict[str, Any]) -> str:
    model = item["model"] or "no model"
    lines = [item["arguments"], model + (f", abstains: {item['abstains']}" if item["abstains"] else "")]
    if item["nearest"]:
        lines.append(f"nearest measured shape: {item['nearest']}")
    rows = [("config", "expected slowdown", "spread")]
    rows += [(c["config"], f"{c['expected_slowdown']:.3f}", f"{c['spread']:.3f}") for c in item["configs"]]
    return "\n".join([*lines, *([format_table(rows)] if item["configs"] else [])])


def run(args: argparse.Namespace) -> int:
    """Predicts."""
    found = [_prediction(ba, args.top) for ba in targets.bound_arguments(args)]
    common.print_either(args, found, "\n\n".join(map(_text, found)))
    return 0
