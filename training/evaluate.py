"""Judges the cost models of the shipped sweeps on held-out shapes.

    python training/evaluate.py [--data data] [--op NAME] [--json]

For each op and device: shape-grouped folds, and the largest shapes held out as a family, beside the rivals. Models are
trained anew for each split, so the shipped model files are not read. The committed output stands in
`training/results/`.
"""

import pathlib
import sys

from tokamax._src.tools import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    sys.exit(cli.main(["evaluate", "--data", str(ROOT / "data"), *sys.argv[1:]]))
