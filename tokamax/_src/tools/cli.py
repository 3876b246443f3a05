"""The command line `tokamax`: one subcommand per task, each a thin layer over the public API in a file of its own."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from tokamax._src import errors
from tokamax._src.tools import (
    bound_args,
    cache,
    common,
    completion,
    demo,
    doctor,
    evaluate,
    explain,
    merge,
    predict,
    report,
    train,
    tune,
)

COMMANDS = (demo, bound_args, tune, merge, explain, predict, train, evaluate, report, cache, doctor, completion)

EXIT_CODES = """\
exit codes:
  0    done
  1    done in part: an op could not be tuned, no model was written, the doctor found a problem
  2    wrong use, or a file that cannot be read or written
  130  interrupted"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="tokamax",
        description="Tune JAX kernels and learn from every measurement.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit code, see `EXIT_CODES`.
    """
    args = parser().parse_args(argv)
    args.parser = parser
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = lambda message, *_: common.say(f"warning: {message}")
            return args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # Whoever read the output has seen enough, `head` say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (errors.TokamaxError, OSError) as error:
        common.say(f"tokamax {args.command}: {error}")
        return 2
