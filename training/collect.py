"""Measures sweeps: every config of every shape in a list, appended to `data/<device>/<op>.jsonl`.

    python training/collect.py                        # all ops, forward and VJP
    python training/collect.py --op ragged_dot --limit 5 --data /tmp/data

A sweep resumes where it stopped, in the middle of a shape too: shapes whose whole space this device has measured with
this toolchain are skipped. Run it on a machine that does nothing else. Winners (`<op>.best.json`) are derived at the
end of each op.
"""

import argparse
import importlib
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAMILIES = ("dot_product_attention", "linear_softmax_cross_entropy_loss", "ragged_dot")


def sweep(family: str) -> list:
    """Returns the bound arguments to measure for a family: forward first, then the VJP of each."""
    sys.path.insert(0, str(ROOT / "training"))
    forward = importlib.import_module(f"shapes.{family}").bound_arguments()
    return [*forward, *(ba.op.bind_vjp(ba) for ba in forward)]


def collect(families: list[str], data: pathlib.Path, *, limit: int | None, rounds: int) -> int:
    """Measures what is missing; returns how many shapes were measured."""
    from tokamax._src import devices
    from tokamax._src.autotuning import session
    from tokamax._src.autotuning.store import DirectoryStore

    store, settings = DirectoryStore(data, data.parent / "models"), session.Settings(rounds=rounds)
    kind, done = devices.device_kind(), 0
    for family in families:
        todo = sweep(family)
        names = dict.fromkeys(ba.op.registered_name() for ba in todo)
        missing = [ba for ba in dict.fromkeys(todo) if store.known_entry(ba, kind, settings.how()) is None]
        for number, ba in enumerate(missing[:limit], 1):
            started = time.perf_counter()
            journal = store.journal(ba, kind, settings.how())
            entry, interrupted = session.tune(ba, settings, journal=journal)
            if interrupted:
                raise KeyboardInterrupt
            store.keep([entry])
            if journal is not None:
                journal.discard()
            done += 1
            speedup = f"{entry.speedup:5.2f}x" if entry.speedup else entry.error or "no default"
            seconds = time.perf_counter() - started
            print(
                f"{family} {number}/{len(missing)} {seconds:5.1f} s {len(entry.outcomes):3d} configs {speedup} {ba!r}",
                flush=True,
            )
        for name in names:
            store.put(store.entries(kind, name))
    return done


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=FAMILIES, help="family to measure; default: all")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "data", help="folder of the sweeps")
    parser.add_argument("--limit", type=int, help="at most this many shapes per family")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of measurement")
    args = parser.parse_args()
    try:
        done = collect(args.op or list(FAMILIES), args.data, limit=args.limit, rounds=args.rounds)
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130
    print(f"{done} shapes measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
