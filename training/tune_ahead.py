"""Tunes ragged dot for TPUs that are not here: `tokamax.autotune(..., device_kind=...)` over shapes of known models.

    pip install 'tokamax[aot-tpu]'
    python training/tune_ahead.py                         # 20 shapes for TPU v5 lite
    python training/tune_ahead.py --device v6e --gradients --write

Without what the private cache knows of the compiler. Every config that comes back is compiled once more, by a compiler
that starts anew (not with `--no-recheck`); the table counts those that compile, and it exits with 1 if one does not.
`tuning` is the time of the tuning alone. `--write` adds the entries to `data/<device>/<op>.estimated.json`, where
dispatch finds them below every measurement. The committed output stands in `training/results/tune_ahead.txt`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Else JAX looks for a TPU here, since its library is installed.

from shapes import ragged_dot_tpu

import tokamax
from tokamax._src import tpus
from tokamax._src.tables import format_table


def targets(gradients: bool) -> list[tokamax.BoundArguments]:
    """Returns what to tune."""
    forward = ragged_dot_tpu.bound_arguments()
    return forward + [vjp for ba in forward for vjp in ba.op.bind_vjp(ba) if gradients]


def recompiled(result: tokamax.AutotuningResult, name: str) -> int:
    """Returns how many configs of a result compile, asked of another compiler."""
    with tokamax.aot.Checker(name, ignore_cache=True) as checker:
        verdicts = [checker.verdicts(e.bound_args, [e.best]) for e in result.entries if e.best is not None]
        return sum(verdict.compiles for each in verdicts for _, verdict in each)


def row(name: str, todo: list[tokamax.BoundArguments], *, write: bool, recheck: bool) -> dict[str, Any]:
    """Tunes for a device and says how it went."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TOKAMAX_CACHE_DIR"] = folder
        result = tokamax.autotune(todo, device_kind=name, progress_bar=sys.stderr.isatty())
        seconds = time.monotonic() - start
        compile_again = recompiled(result, name) if recheck else None
    for entry in result.entries:
        if entry.error is not None:
            print(f"{entry.device_kind} {entry.bound_args!r}: {entry.error}", file=sys.stderr)
    if write:
        tokamax.autotuning.library_cache().put([entry for entry in result.entries if entry.is_estimated])
    return {
        "device": tpus.of(name).kind,
        "ops": len(todo),
        "with a config": sum(entry.best is not None for entry in result.entries),
        "compile again": "-" if compile_again is None else compile_again,
        "refused on the way": sum(len(entry.outcomes) for entry in result.entries),
        "tuning": f"{seconds:.0f} s",
    }


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [tpu.name for tpu in tpus.TPUS.values()]
    parser.add_argument("--device", action="append", choices=names, help="default: v5e")
    parser.add_argument("--gradients", action="store_true", help="tune both gradients too")
    parser.add_argument("--write", action="store_true", help="add the entries to data/")
    parser.add_argument("--no-recheck", action="store_true", help="do not compile again what came back")
    parser.add_argument("--limit", type=int, help="only the first so many")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    todo = targets(args.gradients)[: args.limit]
    names = args.device or ["v5e"]
    rows = [row(name, todo, write=args.write, recheck=not args.no_recheck) for name in names]
    texts = [tuple(map(str, each.values())) for each in rows]
    print(json.dumps(rows, indent=1) if args.json else format_table([tuple(rows[0]), *texts]))
    return 1 if any(each["compile again"] not in ("-", each["ops"]) for each in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
