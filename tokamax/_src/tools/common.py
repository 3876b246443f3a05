"""What the commands share: how one is declared, JSON on stdout, modules that define a user's ops."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tokamax._src import errors

Run = Callable[[argparse.Namespace], int]


def add_command(commands: Any, name: str, run: Run, *, about: str, example: str) -> argparse.ArgumentParser:
    """Adds a subcommand, with `--json` and an example in its help.

    Args:
      commands: what `ArgumentParser.add_subparsers` returned.
      name: the subcommand.
      run: takes the parsed arguments and returns the exit code.
      about: one sentence.
      example: a command that does something useful.
    """
    parser = commands.add_parser(
        name,
        help=about,
        description=about[:1].upper() + about[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.set_defaults(run=run)
    return parser


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Adds `--import`."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first, so that the ops it defines are known; may be repeated",
    )


def import_module(name: str) -> Any:
    """Imports a module, also from the working directory.

    Raises:
      ArgumentError: if it cannot be imported.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # At the end: a file that happens to lie there hides no library.
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise errors.ArgumentError(f"the module {name!r} must be importable, got {reason}") from error


def import_modules(names: Iterable[str]) -> None:
    """Imports modules; see `import_module`."""
    for name in names:
        import_module(name)


def say(text: str) -> None:
    """Prints to stderr, where it does not get in the way of a result."""
    print(text, file=sys.stderr)


def print_json(data: Any) -> None:
    """Prints a JSON document to stdout."""
    print(json.dumps(data, indent=1))


def print_either(args: argparse.Namespace, data: Any, text: Any) -> None:
    """Prints data with `--json`, else text."""
    if args.json:
        print_json(data)
    else:
        print(text)
