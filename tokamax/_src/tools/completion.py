"""`tokamax completion`: the completion of this command line for a shell."""

import argparse
from typing import Any

from tokamax._src import errors
from tokamax._src.tools import common

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Any) -> None:
    """Adds the command."""
    parser = common.add_command(
        commands,
        "completion",
        run,
        about="print the completion of this command line for a shell",
        example="tokamax completion bash > ~/.local/share/bash-completion/completions/tokamax",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    try:
        import shtab
    except ImportError as error:
        raise errors.MissingExtraError(
            "shtab must be installed to print completions; try: pip install 'tokamax[completion]'"
        ) from error
    script = shtab.complete(args.parser(), shell=args.shell)
    common.print_either(args, {"shell": args.shell, "script": script}, script)
    return 0
