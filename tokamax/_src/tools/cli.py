"""The command line `tokamax`: one subcommand per task, each a thin layer over the public API."""

import argparse
import json
import math
import pathlib
import sys
import warnings
from collections.abc import Sequence

from tokamax._src import errors


def _demo(args: argparse.Namespace) -> int:
    from tokamax._src.tools import demo

    report = demo.run(device=args.device, progress_bar=not args.json, say=(lambda text: None) if args.json else print)
    if args.json:
        print(json.dumps(report, indent=1))
    return 0


def _tune(args: argparse.Namespace) -> int:
    import tokamax

    bound_args = tokamax.autotuning.bound_args_from_json(args.bound_args)
    result = tokamax.autotune(
        bound_args,
        timeout=args.timeout,
        total_timeout=args.total_timeout,
        ignore_cache=args.ignore_cache,
        search=args.search or ("exhaustive" if args.budget is None else "model"),
        budget=args.budget,
        resume=not args.no_resume,
        isolation=args.isolation,
    )
    result.dump(args.output)
    print(result.summary())
    print(f"written to {args.output}")
    return 0 if all(entry.error is None for entry in result.entries) else 1


def _merge(args: argparse.Namespace) -> int:
    import tokamax

    merged = tokamax.AutotuningResult()
    for path in args.results:
        merged = merged | tokamax.AutotuningResult.load(path)
    merged.dump(args.output)
    print(f"{len(merged)} entries written to {args.output}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    import tokamax

    explanation = tokamax.explain(tokamax.autotuning.bound_args_from_json(args.bound_args))
    print(json.dumps(explanation.to_dict(), indent=1) if args.json else explanation)
    return 0


def _suggest(args: argparse.Namespace) -> int:
    import tokamax
    from tokamax._src import suggest
    from tokamax._src.tables import format_table

    if args.among is None:
        print("tokamax train: --suggest needs --among, a file of the bound arguments to choose from", file=sys.stderr)
        return 2
    among = tokamax.autotuning.bound_args_from_json(args.among)
    found = suggest.suggest(among, args.suggest)
    text = tokamax.autotuning.bound_args_to_json([s.bound_args for s in found])
    if args.output is None:
        print(text)
        return 0
    args.output.write_text(text)
    rows = [("arguments", "may lose", "why")]
    rows += [(repr(s.bound_args), f"{math.expm1(s.need):.1%}", s.reason) for s in found]
    print(format_table(rows))
    print(f"written to {args.output}; measure them with: tokamax tune {args.output}")
    return 0


def _train(args: argparse.Namespace) -> int:
    if args.suggest is not None:
        return _suggest(args)
    from tokamax._src import training
    from tokamax._src.autotuning import store

    folders = store.private()
    if args.results:
        import tokamax

        for path in args.results:
            folders.keep(tokamax.AutotuningResult.load(path).entries)
    place = store.DirectoryStore(args.data or folders.data, args.models or folders.models)
    trained = [training.train(problems, place) for problems in training.sweeps(place.data, args.op)]
    for item in trained:
        print(f"{item.op} on {item.device_kind}" if item.report is None else item.report.table())
        print(f"{item.note}\n")
    if not any(item.written for item in trained):
        print(f"no model was written; measured sweeps found in {place.data}: {len(trained)}", file=sys.stderr)
        return 1
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from tokamax._src import training
    from tokamax._src.autotuning import store

    data = args.data or store.private().data
    reports = []
    for problems in training.sweeps(data, args.op):
        try:
            reports += training.judge(problems)
        except errors.ArgumentError as error:
            print(f"{problems[0].op} on {problems[0].device_kind}: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps([report.to_dict() for report in reports], indent=1))
    else:
        print("\n\n".join(report.table() for report in reports))
    if not reports:
        print(f"nothing was evaluated; there must be measured sweeps in {data}", file=sys.stderr)
        return 1
    return 0


def _predict(args: argparse.Namespace) -> int:
    import tokamax
    from tokamax._src import dispatch
    from tokamax._src.autotuning.result import describe_config
    from tokamax._src.tables import format_table

    found = []
    for ba in tokamax.autotuning.bound_args_from_json(args.bound_args):
        for name, prediction in dispatch.predictions(ba):
            ranked = [
                {
                    "config": describe_config(ba.autotuning_configs[i]),
                    "expected_slowdown": float(prediction.slowdown[i]),
                    "spread": float(prediction.spread[i]),
                }
                for i in prediction.order[: args.top]
            ]
            found.append({"arguments": repr(ba), "model": name, "abstains": prediction.abstain, "configs": ranked})
            break
        else:
            found.append(
                {"arguments": repr(ba), "model": None, "abstains": "no model of this op and device", "configs": []}
            )
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for item in found:
        print(
            f"{item['arguments']}\n{item['model'] or 'no model'}"
            + (f", abstains: {item['abstains']}" if item["abstains"] else "")
        )
        rows = [("config", "expected slowdown", "spread")]
        rows += [(c["config"], f"{c['expected_slowdown']:.3f}", f"{c['spread']:.3f}") for c in item["configs"]]
        print(format_table(rows) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokamax", description="Tune JAX kernels and learn from every measurement.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="tune a few ops on this machine, learn, predict, and check the predictions")
    demo.add_argument("--device", help="JAX platform to run on, such as cpu or gpu (default: JAX's own default)")
    demo.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    demo.set_defaults(run=_demo)

    tune = commands.add_parser("tune", help="tune the bound arguments of a JSON file")
    tune.add_argument("bound_args", type=pathlib.Path, help="file written by tokamax.autotuning.bound_args_to_json")
    tune.add_argument("--output", type=pathlib.Path, default=pathlib.Path("autotuning.json"), help="result to write")
    tune.add_argument("--timeout", type=float, default=60.0, help="seconds for compiling, and for a run, of a config")
    tune.add_argument("--ignore-cache", action="store_true", help="measure again what was measured before")
    tune.add_argument("--total-timeout", type=float, help="seconds for everything; then what was measured is written")
    tune.add_argument("--search", choices=("exhaustive", "model"), help="measure every config, or the promising ones")
    tune.add_argument("--budget", type=int, help="how many configs of an op a search by model may measure")
    tune.add_argument("--isolation", choices=("none", "process"), default="none", help="where configs run")
    tune.add_argument("--no-resume", action="store_true", help="do not go on with what an interrupted run measured")
    tune.set_defaults(run=_tune)

    merge = commands.add_parser("merge", help="merge results; later files win")
    merge.add_argument("results", nargs="+", type=pathlib.Path, help="result files")
    merge.add_argument("--output", type=pathlib.Path, required=True, help="result to write")
    merge.set_defaults(run=_merge)

    explain = commands.add_parser(
        "explain", help="say which config each of some bound arguments would run with, and why"
    )
    explain.add_argument("bound_args", type=pathlib.Path, help="file written by tokamax.autotuning.bound_args_to_json")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)

    train = commands.add_parser(
        "train", help="train cost models from measured sweeps, and keep those that beat their rivals"
    )
    train.add_argument("results", nargs="*", type=pathlib.Path, help="result files to add to the private sweeps first")
    train.add_argument("--data", type=pathlib.Path, help="folder of sweeps (default: the private cache's)")
    train.add_argument("--models", type=pathlib.Path, help="folder to write to (default: the private cache's)")
    train.add_argument("--op", help="train the model of this op alone")
    train.add_argument("--suggest", type=int, metavar="N", help="train nothing: name the N shapes most worth measuring")
    train.add_argument("--among", type=pathlib.Path, help="with --suggest: bound arguments to choose from")
    train.add_argument("--output", type=pathlib.Path, help="with --suggest: file to write (default: stdout)")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="judge cost models beside their rivals on held-out shapes")
    evaluate.add_argument("--data", type=pathlib.Path, help="folder of sweeps (default: the private cache's)")
    evaluate.add_argument("--op", help="judge this op alone")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.set_defaults(run=_evaluate)

    predict = commands.add_parser("predict", help="rank configs of bound arguments by predicted time")
    predict.add_argument("bound_args", type=pathlib.Path, help="file written by tokamax.autotuning.bound_args_to_json")
    predict.add_argument("--top", type=int, default=5, help="how many configs to show")
    predict.add_argument("--json", action="store_true", help="print JSON")
    predict.set_defaults(run=_predict)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      0 on success, 1 if something could not be tuned, trained or evaluated, 2 for wrong use or unreadable files.
    """
    args = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
            return args.run(args)
    except (errors.TokamaxError, OSError) as error:
        print(f"tokamax {args.command}: {error}", file=sys.stderr)
        return 2
