"""How good predictions are, as a report shows it: predicted against measured slowdowns, and what top-k choices lose.

Where models are judged on shape-grouped folds, each shape is predicted by a model that never saw it. Otherwise the
model that dispatch would ask is shown, which may have learned from these very shapes; a report says which.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokamax._src import devices, dispatch, errors
from tokamax._src.costmodel import dataset, evaluate
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.costmodel.model import Prediction
from tokamax._src.report.sweeps import Sweep, evenly

CONFIGS_COUNTED = 12
"""Up to how many configs measured the curves go."""

PAIRS_DRAWN = 400
"""How many predictions are drawn."""

SHAPES_ASKED = 24
"""How many shapes a fitted model is asked about."""

ROWS_JUDGED = 1_000
"""Up to how many measured configs, of all ops together, models are judged without being asked to."""


def judge(sweep: Sweep, *, held_out: bool) -> dict[str, Any]:
    """Returns what is known of predictions for a sweep, as plain data.

    Args:
      sweep: what was measured.
      held_out: whether to fit models on folds and judge them beside their rivals, which takes a while.

    Returns:
      `kind` is `held out`, `fitted` or `none`, `note` says it in words. The first two have `predicted`, the first
      `regret` as well.
    """
    facts = devices.facts(sweep.device_kind)
    if held_out:
        try:
            return _held_out(dataset.problems_from_entries(sweep.entries), facts)
        except errors.ArgumentError as error:
            return {"kind": "none", "note": f"Predictions cannot be judged: {error}."}
    return _fitted(sweep, facts)


def _held_out(problems: Sequence[Problem], facts: devices.DeviceFacts) -> dict[str, Any]:
    found = evaluate.predict_folds(problems, facts)
    ours = found[evaluate.MODEL]
    return {
        "kind": "held out",
        "note": f"Each of {len(ours)} shapes was predicted by a model that never saw it (5 shape-grouped folds).",
        "predicted": _pairs([(held.problem, held.prediction) for held in ours]),
        "regret": _regret(found),
    }


def _regret(found: Mapping[str, Sequence[evaluate.HeldOut]]) -> dict[str, Any]:
    most = min(CONFIGS_COUNTED, max(len(h.problem.configs) for h in found[evaluate.MODEL]))
    measured = list(range(1, most + 1))
    return {
        "measured": measured,
        "efficiency": {
            name: [float(np.mean([h.top(k) for h in held])) for k in measured] for name, held in found.items()
        },
        "chosen": {name: float(np.mean([h.efficiency[h.runs] for h in held])) for name, held in found.items()},
    }


def _fitted(sweep: Sweep, facts: devices.DeviceFacts) -> dict[str, Any]:
    place = next(dispatch.models(sweep.device_kind, sweep.op), None)
    if place is None:
        return {
            "kind": "none",
            "note": "There is no cost model of this op and device, and none was fitted to judge it.",
        }
    problems = dataset.problems_from_entries(evenly(sweep.entries, SHAPES_ASKED))
    pairs = [
        (p, place.found.predict(p.arguments, p.configs, facts, default=p.default, extra=p.extra)) for p in problems
    ]
    asked = [pair for pair in pairs if np.isfinite(pair[1].slowdown).any()]
    if not asked:
        return {"kind": "none", "note": f"The model ({place.name}) says nothing about these shapes."}
    note = f"Predicted for {len(asked)} shapes by a fitted model ({place.name}), which may have learned from them."
    return {"kind": "fitted", "note": note, "predicted": _pairs(asked)}


def _pairs(asked: Sequence[tuple[Problem, Prediction]]) -> dict[str, Any]:
    """Returns predicted and measured slowdowns, and how well they agree in order, shape by shape."""
    from scipy import stats

    predicted, measured, agreement = [], [], []
    for problem, prediction in asked:
        both = np.isfinite(prediction.slowdown) & problem.works
        said, true = prediction.slowdown[both], np.exp(problem.log_slowdown[both])
        predicted += said.tolist()
        measured += true.tolist()
        if len(set(said)) > 1 and len(set(true)) > 1:
            agreement.append(float(stats.spearmanr(said, true).statistic))  # pyright: ignore[reportAttributeAccessIssue]
    kept = evenly(range(len(predicted)), PAIRS_DRAWN)
    error = np.abs(np.log(predicted) - np.log(measured))
    return {
        "predicted": [predicted[i] for i in kept],
        "measured": [measured[i] for i in kept],
        "configs": len(predicted),
        "shapes": len(asked),
        "rank_correlation": float(np.mean(agreement)) if agreement else None,
        "median_error": math.expm1(float(np.median(error))) if len(error) else None,
    }
