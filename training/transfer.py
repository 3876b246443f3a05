"""How far models of one device serve another that nobody measured: A100 and H100, each held out whole.

    python training/transfer.py

Reads the public matmul tables where they are on the disk (`tables.py`); they train nothing that is shipped. A model
learns from one device alone and ranks the configs of each problem of the other. The tables name no default, so each
problem gets one at random among the 40 most common configs, in a seeded order. The committed output stands in
`training/results/transfer.txt`.
"""

import collections
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from tokamax._src import devices
from tokamax._src.costmodel import evaluate, features
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import CostModel
from tokamax._src.tables import format_table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

_GOOD = 0.3
"""Log slowdown up to which configs are compared between devices."""
_HARM = 0.03
"""Log slowdown against the default that counts as a loss."""


def difference(here: Sequence[Problem], there: Sequence[Problem]) -> float:
    """Returns the median over problems of the standard deviation of what a device adds to the log slowdown of a config.

    Only configs count that are good on the first device, and problems with at least eight configs in common.
    """
    others = {p.key: p for p in there}
    found = []
    for problem in here:
        if (other := others.get(problem.key)) is None:
            continue
        index = {features.config_text(c): i for i, c in enumerate(other.configs)}
        pairs = [(i, index[t]) for i, c in enumerate(problem.configs) if (t := features.config_text(c)) in index]
        if len(pairs) < 8:
            continue
        a = problem.log_slowdown[[i for i, _ in pairs]]
        b = other.log_slowdown[[j for _, j in pairs]]
        if (good := a < _GOOD).sum() > 3:
            found.append(float(np.std((b - a)[good])))
    return float(np.median(found))


def with_defaults(problems: Sequence[Problem], seed: int = 0) -> list[tuple[Problem, int]]:
    """Returns problems with an index of a config that stands for what runs without a model."""
    counts = collections.Counter(features.config_text(c) for p in problems for c in p.configs)
    common = {text for text, _ in counts.most_common(40)}
    rng, found = np.random.default_rng(seed), []
    for problem in problems:
        places = [i for i, c in enumerate(problem.configs) if features.config_text(c) in common and problem.works[i]]
        if places:
            found.append((problem, int(rng.choice(places))))
    return found


def row(model: CostModel, problems: Sequence[Problem], facts: devices.DeviceFacts) -> tuple[str, ...]:
    """Returns a row of the table: a model on the problems of a device."""
    ranked = {evaluate.MODEL: [evaluate.ask(model, p, facts) for p in problems]}
    scores = evaluate.report_of(ranked, "the device held out").scores[evaluate.MODEL]
    gains, asked = [], with_defaults(problems)
    for problem, default in asked:
        found = model.predict(problem.arguments, problem.configs, facts, default=default)
        if found.abstain is None and found.index != default:
            gains.append(float(problem.log_slowdown[default] - problem.log_slowdown[found.index]))
    real = np.array(gains)
    return (
        f"{model.device_kind_} -> {facts.kind}",
        str(len(problems)),
        f"{scores.slowdown:.3f}",
        f"{scores.top_5:.3f}",
        f"{len(gains) / len(asked):.2f}",
        f"{np.mean(real < -_HARM):.3f}",
        f"{np.exp(real.mean()):.2f}x",
    )


def main() -> int:
    """Runs the command."""
    import replay

    tables = replay.tables(("h100", "a100"))
    found = {name.upper(): (replay.shuffled(problems, 0), facts) for name, problems, facts, _ in tables}
    if len(found) < 2:
        return 1
    rows = [("learned -> judged", "problems", "slowdown of first", "best of 5", "defaults moved", "lost", "mean gain")]
    for a, b in (("H100", "A100"), ("A100", "H100")):
        rows.append(row(CostModel().fit(*found[a]), *found[b]))
        added = difference(found[a][0], found[b][0])
        print(f"what {b} adds to the log slowdown of configs good on {a}: {added:.3f}")
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
