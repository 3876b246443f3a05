"""What each part of the cost model is worth: the model with one part changed at a time, on the same held-out shapes.

    python training/ablate.py                    # shipped sweeps and the public tables that are here (hours)
    python training/ablate.py --table sweeps     # one source
    python training/ablate.py --limit 300        # a seeded sample of the shapes of each

Each cell is the geometric mean slowdown of the first choice, abstentions aside.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

import tokamax  # noqa: F401  (the ops that the sweeps name register themselves)
from tokamax._src import devices
from tokamax._src.costmodel import evaluate, features
from tokamax._src.costmodel import model as model_lib
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import CostModel
from tokamax._src.tables import format_table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import replay

TABLES = ("sweeps", "h100", "a100")
CLIP = 0.5


@contextlib.contextmanager
def target(compressed: Callable[[Any], Any], expanded: Callable[[Any], Any]) -> Iterator[None]:
    """Learns another function of the log slowdown."""
    with mock.patch.multiple(model_lib, _compressed=compressed, _expanded=expanded):
        yield


@contextlib.contextmanager
def without(*prefixes: str) -> Iterator[None]:
    """Leaves out the columns whose names begin so."""
    columns = features.FeatureSpec.columns

    def fewer(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {n: v for n, v in columns(self, *args, **kwargs).items() if not n.startswith(prefixes)}

    with mock.patch.object(features.FeatureSpec, "columns", fewer):
        yield


def identity(x: Any) -> Any:
    """Returns x."""
    return x


VARIANTS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "the model": (contextlib.nullcontext, {}),
    "target: log slowdown": (lambda: target(identity, identity), {}),
    f"target: log slowdown, at most {CLIP}": (lambda: target(lambda r: np.minimum(r, CLIP), identity), {}),
    f"target: its root, at most that of {CLIP}": (
        lambda: target(lambda r: np.sqrt(np.minimum(r, CLIP)), model_lib._expanded),
        {},
    ),
    "no features of the op": (lambda: without("op:"), {}),
    "no tile counts and waste": (lambda: without("log2(count", "waste("), {}),
    "no grid, waves, fill, footprint": (lambda: without("log2(grid", "waves(", "fill(", "log2(footprint"), {}),
    "no alignment, no widths": (lambda: without("align(", "width("), {}),
    "3 members": (contextlib.nullcontext, {"members": 3}),
    "8 members": (contextlib.nullcontext, {"members": 8}),
    "half the trees": (contextlib.nullcontext, {"iterations": 75}),
    "twice the trees": (contextlib.nullcontext, {"iterations": 300}),
    "15 leaves": (contextlib.nullcontext, {"max_leaves": 15}),
    "63 leaves": (contextlib.nullcontext, {"max_leaves": 63}),
}


def slowdown(problems: list[Problem], facts: devices.DeviceFacts, options: dict[str, Any]) -> float:
    """Returns the geometric mean slowdown of first choices on held-out shapes."""
    return (
        evaluate.evaluate_folds(problems, facts, choosers={evaluate.MODEL: lambda: _Outspoken(**options)})
        .scores[evaluate.MODEL]
        .slowdown
    )


class _Outspoken(CostModel):
    """A model that always gives its first choice: what the limits make of it is another question."""

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().predict(*args, **kwargs)
        return dataclasses.replace(found, index=int(found.order[0]), abstain=None)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", choices=TABLES, help="default: all")
    parser.add_argument("--limit", type=int, help="at most this many shapes of each table")
    args = parser.parse_args()
    found = [
        (name.removeprefix("XlaChunked"), replay.shuffled(problems, 0)[: args.limit], facts)
        for name, problems, facts, _ in replay.tables(args.table or TABLES)
    ]
    rows = [("variant", *(f"{name} ({len(problems)})" for name, problems, _ in found))]
    for name, (context, options) in VARIANTS.items():
        with context():
            rows.append((name, *(f"{slowdown(problems, facts, options):.4f}" for _, problems, facts in found)))
        print(f"{name}: {rows[-1][1:]}", file=sys.stderr, flush=True)
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
