"""Judges cost models on held-out shapes: those of the shipped sweeps, or of the public tables that are on this disk.

    python training/evaluate.py [--data data] [--op NAME] [--json]
    python training/evaluate.py --table h100 [--table a100] [--table full_grid] [--json]

For each op and device of the sweeps: shape-grouped folds, and families of shapes held out whole, beside the rivals. The
public tables have shape-grouped folds alone, the full grid leaves one size out at a time. Models are trained anew for
each split, so the shipped model files are not read. The public tables name no default: `heuristic` is the first config
there, and what abstains is judged by its choice. The committed outputs stand in `training/results/`.
"""

import argparse
import json
import pathlib
import sys

from tokamax._src.costmodel import evaluate
from tokamax._src.tools import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "training"))

FOLDS = 5
_FEW = 20
"""Up to as many shapes, each is left out on its own."""


def judge_tables(names: list[str]) -> list[evaluate.Report]:
    """Judges on public tables; those that are not here are passed over."""
    import replay

    reports = []
    for _, problems, facts, _ in replay.tables(names):
        groups = len({p.group for p in problems})
        reports.append(evaluate.evaluate_folds(problems, facts, count=groups if groups <= _FEW else FOLDS))
    return reports


def main(arguments: list[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--table", action="append", choices=("h100", "a100", "full_grid"))
    parser.add_argument("--json", action="store_true")
    args, further = parser.parse_known_args(arguments)
    if args.table and further:
        parser.error(f"with --table only --json may come, got {' '.join(further)}")
    if not args.table:
        return cli.main(["evaluate", "--data", str(ROOT / "data"), *arguments])
    reports = judge_tables(args.table)
    found = [report.to_dict() for report in reports]
    print(json.dumps(found, indent=1) if args.json else "\n\n".join(report.table() for report in reports))
    return 0 if reports else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
