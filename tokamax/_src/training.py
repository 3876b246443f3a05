"""Retraining: measured sweeps in, cost models that beat their rivals out."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from tokamax._src import devices, errors
from tokamax._src.autotuning import store
from tokamax._src.costmodel import dataset, evaluate
from tokamax._src.costmodel.model import CostModel


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
    """Evaluates and fits one model; writes it only if it beats its rivals on held-out shapes.

    Args:
      problems: measured problems of one op on one device.
      place: where the model goes.
    """
    op, kind = problems[0].op, problems[0].device_kind
    facts = devices.facts(kind)
    try:
        report = evaluate.evaluate_folds(problems, facts)
    except errors.ArgumentError as error:
        return Training(op, kind, None, None, f"no model: {error}")
    if not report.beats_rivals():
        return Training(op, kind, report, None, "not written: it does not beat its rivals")
    model = CostModel().fit(problems, facts)
    place.put_model(kind, op, model)
    path = place.model_path(kind, op)
    note = f"written: {path}, {path.stat().st_size / 1024:.0f} KiB, digest {model.digest}"
    return Training(op, kind, report, path, note)


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
