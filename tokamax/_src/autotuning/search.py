"""Which configs to go on measuring: pure functions over samples."""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tokamax._src.bound_arguments import config_order

LOSER_RATIO = 1.5
FIRST_ROUND_RATIO = 3.0
"""After one round only the hopeless stop: on a busy machine a single sample may be twice too long."""
OWN_RATIO = 3.0
OTHERS_RATIO = 10.0
"""A sample is implausibly short if it is this many times shorter than the config's own before, or than all others'."""
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


def implausible(samples: Mapping[Any, Sequence[float]]) -> list[Any]:
    """Returns the configs whose latest sample must be confirmed by another before anything follows from it.

    Those are samples of 0 ms, samples far below the config's own earlier ones, and first samples far below the median
    of every other config: a clock that jumped, a run that ended early, or a timer that missed the work.
    """
    medians = {c: statistics.median(s) for c, s in samples.items()}
    least = sorted(medians.items(), key=lambda item: item[1])[:2]

    def is_implausible(config: Any) -> bool:
        *earlier, last = samples[config]
        others = [ms for c, ms in least if c != config]
        usual = statistics.median(earlier) / OWN_RATIO if earlier else min(others, default=0.0) / OTHERS_RATIO
        return last == 0.0 or last < usual

    return sorted(filter(is_implausible, samples), key=config_order)


def finalists(samples: Mapping[Any, Sequence[float]], default: Any) -> list[Any]:
    """Returns the few fastest configs within a tenth of the fastest, and the default."""
    medians = {c: statistics.median(s) for c, s in samples.items()}
    order = sorted(medians, key=lambda c: (medians[c], config_order(c)))
    close = [c for c in order[:FINALISTS] if medians[c] <= FINALIST_RATIO * medians[order[0]]]
    return [*close, *([default] if default in samples and default not in close else [])]


def affordable_rounds(slowest_ms: float, rounds: int, budget_ms: float) -> int:
    """Returns how many rounds a sample of this length allows within a budget: at least 2, at most `rounds`."""
    return max(min(2, rounds), min(rounds, int(budget_ms / max(slowest_ms, 1e-6))))
