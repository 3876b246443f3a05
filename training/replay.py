"""Replays guided tuning on recorded tables: how good it is at which share of the measurements, beside its rivals.

    python training/replay.py                              # the shipped sweeps and the public tables that are here
    python training/replay.py --table h100 --budget 4      # one table
    python training/replay.py --limit 200                  # the first shapes of each, in a seeded order

A sweep visits the shapes of a table in a random order and begins without data; each shape teaches the guide for the
next ones, as `tokamax.autotune(search="model")` does. `random` draws as many configs of each shape as the guide
measured of it. `TPE` is Optuna's (`pip install optuna`; left out where that is missing), with the same number again,
each shape on its own. Quality is best time / time of the best config found, as a geometric mean. The committed output
stands in `training/results/replay.txt`.
"""

import argparse
import dataclasses
import importlib.util
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np

import tokamax  # noqa: F401  (the ops that the sweeps name register themselves)
from tokamax._src import devices
from tokamax._src import training as sweeps_lib
from tokamax._src.autotuning import guide
from tokamax._src.costmodel import features
from tokamax._src.costmodel.dataset import Problem
from tokamax._src.tables import format_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "training"))

TABLES = ("sweeps", "h100", "a100", "full_grid")

Found = list[tuple[float, int]]
"""For each problem: efficiency of the best config found, and how many were measured."""


def shuffled(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """Returns problems in a random order, the same in every process."""
    problems = sorted(problems, key=lambda p: p.key)
    return [problems[i] for i in np.random.default_rng(seed).permutation(len(problems))]


def guided(
    problems: Sequence[Problem],
    facts: devices.DeviceFacts,
    budget: int | None = None,
    *,
    batch: int = 1,
    seed: int = 0,
    teach: bool = True,
) -> Found:
    """Tunes problems one after the other by `guide.Guide`, reading times from the table.

    Args:
      problems: the table, in the order of the sweep.
      facts: facts of the device.
      budget: configs measured per problem, on average; None for `guide.default_budget`.
      batch: configs proposed at a time.
      seed: of the openings.
      teach: whether shapes teach the guide for later ones.
    """
    teacher = guide.Teacher(facts=facts)
    configs = round(float(np.mean([len(p.configs) for p in problems])))
    budget = budget or guide.default_budget(configs)
    plan = guide.Plan.of([p.arguments for p in problems] if teach else [], configs, budget)
    found: dict[int, tuple[float, int]] = {}
    for i in plan.lessons:
        teacher.learn(problems[i])
        found[i] = 1.0, len(problems[i].configs)
    for number, problem in enumerate(problems):
        if number in found:
            continue
        winner = teacher.nearest_winner(problem.arguments, problem.configs)
        prior = teacher.prior(problem.arguments, problem.configs, extra=problem.extra)
        propose = guide.Guide(
            problem.configs,
            budget=plan.budget,
            first=[i for i in (problem.default, winner) if i is not None],
            prior=prior,
            batch=batch,
            seed=seed,
        )
        times: dict[int, float] = {}
        while proposed := propose(times):
            times |= {i: float(problem.times_ms[i]) for i in proposed}
        found[number] = _outcome(problem, list(times))
        if teach and len(times) > 1:
            teacher.learn(_part(problem, list(times)))
    return [found[i] for i in range(len(problems))]


def at_random(problems: Sequence[Problem], counts: Sequence[int], *, seed: int = 0) -> Found:
    """Measures as many configs of each problem, drawn at random, the default among them if there is one."""
    found = []
    for number, (problem, count) in enumerate(zip(problems, counts, strict=True)):
        order = np.random.default_rng([seed, number]).permutation(len(problem.configs)).tolist()
        first = [] if problem.default is None else [problem.default]
        found.append(_outcome(problem, list(dict.fromkeys([*first, *order]))[:count]))
    return found


def by_tpe(problems: Sequence[Problem], counts: Sequence[int], *, seed: int = 0) -> Found:
    """Measures as many configs of each problem, proposed by Optuna's tree-structured Parzen estimator.

    A proposal that is no config of the space, or one that was measured before, costs nothing and is not told; after
    20 of those in a row a config is drawn at random.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = []
    for number, (problem, count) in enumerate(zip(problems, counts, strict=True)):
        fields = [features.config_fields(c) for c in problem.configs]
        index = {features.config_text(f): i for i, f in enumerate(fields)}
        values = {n: sorted({f[n] for f in fields}, key=lambda v: (str(type(v)), v)) for n in sorted(fields[0])}
        space = {n: optuna.distributions.CategoricalDistribution(tuple(map(repr, v))) for n, v in values.items()}
        by_text = {n: {repr(x): x for x in v} for n, v in values.items()}
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed + number))
        order = np.random.default_rng([seed, number]).permutation(len(fields)).tolist()
        tried: list[int] = []
        for _ in range(min(count, len(fields))):
            for _ in range(20):
                trial = study.ask(space)
                proposed = {n: by_text[n][trial.params[n]] for n in space}
                i = index.get(features.config_text(proposed))
                if i is not None and i not in tried:
                    study.tell(trial, math.log(problem.times_ms[i]))
                    break
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                i = next(j for j in order if j not in tried)
            tried.append(i)
        found.append(_outcome(problem, tried))
    return found


def _outcome(problem: Problem, measured: Sequence[int]) -> tuple[float, int]:
    return float(problem.best_ms / np.nanmin(problem.times_ms[list(measured)])), len(measured)


def _part(problem: Problem, measured: Sequence[int]) -> Problem:
    """Returns what a problem teaches of which only some configs were measured."""
    if problem.default is None or problem.default not in measured:
        default = None
    else:
        default = list(measured).index(problem.default)
    return dataclasses.replace(
        problem,
        configs=tuple(problem.configs[i] for i in measured),
        times_ms=problem.times_ms[list(measured)],
        extra=None if problem.extra is None else tuple(problem.extra[i] for i in measured),
        default=default,
        complete=False,
        halves_ms=None,
    )


def summary(problems: Sequence[Problem], found: Found) -> tuple[float, float, float]:
    """Returns geometric mean quality, worst quality, and the share of all measurements that was taken."""
    quality = np.array([q for q, _ in found])
    share = sum(n for _, n in found) / sum(int(p.works.sum()) for p in problems)
    return float(np.exp(np.log(quality).mean())), float(quality.min()), share


def report(
    name: str, problems: Sequence[Problem], facts: devices.DeviceFacts, budget: int | None, seed: int
) -> list[tuple[str, ...]]:
    """Returns the rows of a table: the guide and its rivals."""
    problems = shuffled(problems, seed)
    ours = guided(problems, facts, budget, seed=seed)
    counts = [n for _, n in ours]
    runs: list[tuple[str, Found]] = [("guided", ours)]
    runs.append(("guided, each shape alone", guided(problems, facts, budget, seed=seed, teach=False)))
    runs.append(("random", at_random(problems, counts, seed=seed)))
    if importlib.util.find_spec("optuna"):
        runs.append(("TPE", by_tpe(problems, counts, seed=seed)))
    rows = []
    for strategy, found in runs:
        quality, worst, share = summary(problems, found)
        rows.append((name, str(len(problems)), strategy, f"{quality:.4f}", f"{worst:.3f}", f"{share:.2%}"))
    return rows


def tables(names: Sequence[str]) -> Iterator[tuple[str, list[Problem], devices.DeviceFacts, int | None]]:
    """Yields (name, problems, facts, usual budget) of the tables that are here."""
    import tables as public

    if "sweeps" in names:
        for problems in sweeps_lib.sweeps(ROOT / "data"):
            yield problems[0].op, problems, devices.facts(problems[0].device_kind), None
    for name, load, budget in (
        ("h100", lambda: public.matmul("H100"), 4),
        ("a100", lambda: public.matmul("A100"), 4),
        ("full_grid", public.full_grid, 45),
    ):
        if name not in names:
            continue
        try:
            problems = load()
        except FileNotFoundError:
            print(f"{name}: the public tables are not on this disk", file=sys.stderr)
            continue
        yield name, problems, public.facts(problems[0].device_kind), budget


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", choices=TABLES, help="default: all")
    parser.add_argument("--budget", type=int, help="configs per shape (default: 4 on matmul, 45 on the full grid)")
    parser.add_argument("--limit", type=int, help="at most this many shapes of each table")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [("table", "shapes", "search", "quality", "worst", "measured")]
    for name, problems, facts, budget in tables(args.table or TABLES):
        problems = shuffled(problems, args.seed)[: args.limit]
        rows += report(name, problems, facts, args.budget or budget, args.seed)
    print(format_table(rows))
    return 0 if len(rows) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
