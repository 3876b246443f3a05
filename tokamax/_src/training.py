"""Retraining: measured sweeps in, cost models that beat their rivals out."""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator, Sequence

from tokamax._src import devices, errors
from tokamax._src.autotuning import store
from tokamax._src.costmodel import dataset, evaluate
from tokamax._src.costmodel.evaluate import MODEL
from tokamax._src.costmodel.model import MIN_GROUPS, CostModel


@dataclasses.dataclass(frozen=True)
class Training:
    """What came of training one model.

    Attributes:
      op: name of the op.
      device_kind: the device.
      report: scores on held-out shapes; None if there were too few shapes to tell.
      written: path of the model; None if it was not written.
      note: one line that says what happened.
    """

    op: str
    device_kind: str
    report: evaluate.Report | None
    written: pathlib.Path | None
    note: str


def sweeps(data: pathlib.Path, op: str | None = None) -> Iterator[list[dataset.Problem]]:
    """Yields the problems of each op and device with measured sweeps, in the order of their names.

    Args:
      data: folder of the sweeps.
      op: yield those of this op alone.
    """
    for path in sorted(data.glob("*/*.jsonl")):
        places: dict[tuple[str, str], list[dataset.Problem]] = {}
        for problem in dataset.problems_from_entries(store.read_jsonl(path)):
            if op in (None, problem.op):
                places.setdefault((problem.device_kind, problem.op), []).append(problem)
        yield from (places[place] for place in sorted(places))


def train(problems: Sequence[dataset.Problem], place: store.DirectoryStore) -> Training:
    """Evaluates and fits one model; writes it only if it beats its rivals, and the present model, on held-out shapes.

    Args:
      problems: measured problems of one op on one device.
      place: where the model goes.
    """
    op, kind = problems[0].op, problems[0].device_kind
    facts = devices.facts(kind)
    try:
        found = evaluate.predict_folds(problems, facts)
    except errors.ArgumentError as error:
        return Training(op, kind, None, None, f"no model: {error}")
    report = evaluate.report_of(found, evaluate.in_folds(evaluate.FOLDS))
    if not report.beats_rivals():
        return Training(op, kind, report, None, "not written: it does not beat its rivals")
    present = place.model(kind, op)
    if present is not None and (reason := _stays(present, found[MODEL], facts)) is not None:
        return Training(op, kind, report, None, f"not written: {reason}")
    model = CostModel().fit(problems, facts)
    place.put_model(kind, op, model)
    path = place.model_path(kind, op)
    note = f"written: {path}, {path.stat().st_size / 1024:.0f} KiB, digest {model.digest}"
    return Training(op, kind, report, path, note)


def _stays(present: CostModel, found: Sequence[evaluate.HeldOut], facts: devices.DeviceFacts) -> str | None:
    """Returns why the present model stays: it does better where neither it nor a new one saw the shape; else None.

    Better means by more than two standard errors of the paired differences. Where all but a few of the shapes are known
    to it, nothing can be told. Without a reason to stay, the model that saw more data wins.
    """
    new = [held for held in found if not present.has_seen(held.problem.arguments)]
    if len({held.problem.group for held in new}) < MIN_GROUPS:
        return None
    old = [evaluate.ask(present, held.problem, facts) for held in new]
    before, now = ([float(held.efficiency[held.runs]) for held in each] for each in (old, new))
    gains = [a - b for a, b in zip(before, now, strict=True)]
    if statistics.fmean(gains) <= 2 * statistics.stdev(gains) / len(gains) ** 0.5:
        return None
    before, now = statistics.fmean(before), statistics.fmean(now)
    shapes = f"on {len(new)} problems of shapes that it never saw"
    return f"{shapes}, the present model reaches {before:.4f}, a new one {now:.4f}"


def judge(problems: Sequence[dataset.Problem]) -> list[evaluate.Report]:
    """Scores a model and its rivals on shape-grouped folds, and on families of shapes held out whole.

    Raises:
      ArgumentError: if there are too few shapes to hold any out.
    """
    facts = devices.facts(problems[0].device_kind)
    reports = [evaluate.evaluate_folds(problems, facts)]
    for name, is_test in evaluate.families(problems).items():
        try:
            reports.append(evaluate.evaluate_family(problems, name, is_test, facts))
        except errors.ArgumentError:  # What is left without the family is too little to learn from.
            continue
    return reports
