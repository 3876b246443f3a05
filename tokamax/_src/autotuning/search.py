"""Which configs to go on measuring: pure functions over samples."""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tokamax._src.bound_arguments import config_order

LOSER_RATIO = 1.5
FIRST_ROUND_RATIO = 3.0
"""After one round only the hopeless stop: on a busy machine a single sample may be twice too long."""
FINALISTS = 6
FINALIST_RATIO = 1.1


def shuffled(configs: Sequence[Any], round_number: int) -> list[Any]:
    """Returns the configs of a round in an order that differs by round and is the same in every process."""
    order = sorted(configs, key=config_order)
    random.Random(round_number).shuffle(order)
    return order


def survivors(samples: Mapping[Any, Sequence[float]], default: Any, ratio: float = LOSER_RATIO) -> list[Any]:
    """Drops clear losers: configs whose best sample exceeds `ratio` times the least median. The default stays."""
    best = min(statistics.median(s) for s in samples.values())
    return [c for c, s in samples.items() if c == default or min(s) <= ratio * best]


def finalists(samples: Mapping[Any, Sequence[float]], default: Any) -> list[Any]:
    """Returns the few fastest configs within a tenth of the fastest, and the default."""
    medians = {c: statistics.median(s) for c, s in samples.items()}
    order = sorted(medians, key=lambda c: (medians[c], config_order(c)))
    close = [c for c in order[:FINALISTS] if medians[c] <= FINALIST_RATIO * medians[order[0]]]
    return [*close, *([default] if default in samples and default not in close else [])]


def affordable_rounds(slowest_ms: float, rounds: int, budget_ms: float) -> int:
    """Returns how many rounds a sample of this length allows within a budget: at least 2, at most `rounds`."""
    return max(min(2, rounds), min(rounds, int(budget_ms / max(slowest_ms, 1e-6))))
