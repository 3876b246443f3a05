"""Which shapes to measure next: those whose measurement would teach most.

The need of a shape is what the cost model's choice may lose there: its doubt, and at least `_ABSTAINED` where it does
not stand by its choice. Shapes are taken one by one, the neediest first; each one taken lowers the need of those near
it by `exp(-distance)`, with the distance in octaves, since measuring it teaches about them too.
"""

import dataclasses
import math
from collections.abc import Sequence

from tokamax._src import devices, dispatch, errors
from tokamax._src.autotuning import store
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.costmodel import features
from tokamax._src.costmodel.neighbours import distance_of
from tokamax._src.op import NullConfig

_ABSTAINED = 0.15
_NO_MODEL = 1.0


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """One shape worth measuring.

    Attributes:
      bound_args: the op and its arguments.
      need: how much a choice without measuring may lose there, as log(slowdown), times the shape's weight.
      reason: why, in words.
    """

    bound_args: BoundArguments
    need: float
    reason: str


def _need(ba: BoundArguments) -> tuple[float, str]:
    for name, prediction in dispatch.predictions(ba):
        if prediction.abstain is not None:
            return max(prediction.doubt, _ABSTAINED), f"{name} abstains: {prediction.abstain}"
        return max(prediction.doubt, 0.0), f"{name}: its members doubt its choice by {math.expm1(prediction.doubt):.1%}"
    return _NO_MODEL, "no model of this op and device"


def suggest(among: Sequence[BoundArguments], count: int, *, weights: Sequence[float] | None = None) -> list[Suggestion]:
    """Returns the shapes whose measurement would help most, the most useful first.

    Args:
      among: candidates. Those that this device has a measured winner for, and ops without configs, are passed over.
      count: how many to return at most.
      weights: how much each candidate matters, such as its share of a program's time; by default all alike.

    Raises:
      ArgumentError: if `count` is not positive, or weights and candidates differ in number.
    """
    weights = [1.0] * len(among) if weights is None else weights
    if count < 1 or len(weights) != len(among):
        raise errors.ArgumentError(
            f"count must be at least 1 and there must be a weight for each candidate, got count={count} and "
            f"{len(weights)} weights for {len(among)} candidates"
        )
    kind = devices.device_kind()
    found: dict[BoundArguments, tuple[float, str]] = {}
    for ba, weight in zip(among, weights, strict=True):
        op = ba.op.registered_name()
        measured = any(place.winner(kind, op, ba.key) for place in (store.private(), store.library()))
        if measured or ba.op.config_cls is NullConfig or ba in found:
            continue
        if dispatch.unlisted(ba) is not None or len(ba.autotuning_configs) < 2:
            continue
        need, reason = _need(ba)
        found[ba] = need * weight, reason
    described = {ba: features.describe(ba.abstract) for ba in found}
    left = {ba: need for ba, (need, _) in found.items()}
    chosen: list[Suggestion] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda ba: (left[ba], ba.key))
        chosen.append(Suggestion(best, left.pop(best), found[best][1]))
        for ba in left:
            if ba.op.registered_name() == best.op.registered_name():
                left[ba] *= 1.0 - math.exp(-distance_of(described[ba], described[best]))
    return chosen
