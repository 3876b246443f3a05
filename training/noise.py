"""How well choosing by measurement itself does on the shipped sweeps: the ceiling for any prediction judged on them.

    python training/noise.py [--data data]

Of the configs with at least five samples, the fastest by the even rounds is judged by the odd rounds of the same
session. A chooser that knew every true time would score 1; a repeated measurement scores this.
"""

import argparse
import pathlib
import statistics

import numpy as np

import tokamax  # noqa: F401  (the ops that the sweeps name register themselves)
from tokamax._src.autotuning import store
from tokamax._src.autotuning.result import Entry, format_table

ROOT = pathlib.Path(__file__).resolve().parent.parent


def efficiency(entry: Entry, statistic) -> float | None:
    """Best time / time of the config chosen by the other half of the samples; None with fewer than two configs."""
    samples = {c: o.samples_ms for c, o in entry.outcomes.items() if len(getattr(o, "samples_ms", ())) >= 5}
    if len(samples) < 2:
        return None
    chosen = min(samples, key=lambda c: statistic(samples[c][::2]))
    judged = {c: statistic(s[1::2]) for c, s in samples.items()}
    return min(judged.values()) / judged[chosen]


def main() -> None:
    """Prints a line per op."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, default=ROOT / "data")
    rows = [("op", "device", "shapes", "mean by medians", "p10", "mean by minima", "p10")]
    for path in sorted(parser.parse_args().data.glob("*/*.jsonl")):
        entries = store.read_jsonl(path)
        figures = []
        for statistic in (statistics.median, min):
            found = [e for entry in entries if (e := efficiency(entry, statistic)) is not None]
            figures += [f"{np.mean(found):.3f}", f"{np.quantile(found, 0.1):.3f}"]
        rows.append((path.stem, path.parent.name, str(len(entries)), *figures))
    print(format_table(rows))


if __name__ == "__main__":
    main()
