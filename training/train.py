"""Trains the shipped cost models from the measured sweeps.

    python training/train.py [--data data] [--models models] [--op NAME]

Reads `data/<device>/<op>.jsonl`, writes `models/<device>/<op>.npz`. A model is written only if it beats its rivals on
shapes held out in folds; the table is printed either way. The same data gives the same bytes. `tokamax train` does the
same for the private cache.
"""

import pathlib
import sys

from tokamax._src.tools import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    folders = ["--data", str(ROOT / "data"), "--models", str(ROOT / "models")]
    sys.exit(cli.main(["train", *folders, *sys.argv[1:]]))
