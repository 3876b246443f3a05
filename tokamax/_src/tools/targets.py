"""What a command works on: a file of bound arguments, `MODULE:FUNCTION`, or an op, with arguments."""

import argparse
import pathlib
import shlex
from typing import Any

import jax

from tokamax._src import api, errors, notation, registry, shapes
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.tools import common


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds the target and what gives it arguments."""
    parser.add_argument(
        "target",
        help="a JSON file of bound arguments (see `tokamax bound-args`), MODULE:FUNCTION, or the name of an op",
    )
    parser.add_argument(
        "--arg",
        dest="arguments",
        action="append",
        default=[],
        metavar="[NAME=]VALUE",
        help="an argument of the function or op: an array as f32[8,128], a word, or JSON; may be repeated",
    )
    parser.add_argument(
        "--args-from",
        metavar="MODULE:FUNCTION",
        help="take the arguments from this function: it returns a tuple, or a dict by name, of arrays or their shapes",
    )
    common.add_imports(parser)


def bound_arguments(args: argparse.Namespace) -> tuple[BoundArguments, ...]:
    """Returns the bound arguments that the command line names.

    Raises:
      ArgumentError: if they cannot be found, or do not fit.
      FormatError: if a file or value cannot be read.
    """
    common.import_modules(args.imports)
    target, path = args.target, pathlib.Path(args.target)
    if path.is_file() or path.suffix == ".json":
        if args.arguments or args.args_from:
            raise errors.ArgumentError(f"--arg and --args-from are for a function or an op, got them with {target}")
        return api.bound_args_from_json(path)
    positional, named = _arguments(args)
    if ":" in target:
        positional, named = jax.tree.map(_as_shape, (positional, named))
        return api.get_bound_args(_attribute(target), *positional, **named)
    op = _op(target)
    try:
        return (op.bind(*positional, **named),)
    except (TypeError, ValueError) as error:
        raise errors.ArgumentError(f"the arguments must fit the op: {error}") from error


def tune_command(args: argparse.Namespace) -> str:
    """Returns the command that measures the target for good."""
    parts = ["tokamax", "tune", args.target]
    parts += [part for text in args.arguments for part in ("--arg", text)]
    parts += ["--args-from", args.args_from] if args.args_from else []
    parts += [part for module in args.imports for part in ("--import", module)]
    return shlex.join([*parts, "--save"])


def _arguments(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    positional, named = notation.parse_arguments(args.arguments)
    if args.args_from is None:
        return positional, named
    found = _attribute(args.args_from)()
    if isinstance(found, dict):
        return positional, {**found, **named}
    if not isinstance(found, (tuple, list)):
        raise errors.ArgumentError(
            f"{args.args_from} must return a tuple or a dict of arguments, got {type(found).__name__}"
        )
    return [*found, *positional], named


def _as_shape(value: Any) -> Any:
    """Turns a spec into what JAX traces with."""
    if not isinstance(value, shapes.ArraySpec):
        return value
    if value.vmap:
        raise errors.ArgumentError(f"an array of a function must have no vmap axes, got {value}; give its whole shape")
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _attribute(name: str) -> Any:
    module, _, path = name.partition(":")
    value = common.import_module(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise errors.ArgumentError(f"{name!r} must name a function as MODULE:FUNCTION, got {type(value).__name__}")
    return value


def _op(name: str) -> Any:
    try:
        return registry.op_class(name)()
    except errors.FormatError:
        known = ", ".join(sorted(registry.op_names()))
        raise errors.ArgumentError(
            f"the target must be a file that exists, MODULE:FUNCTION, or the name of an op, got {name!r}; the ops "
            f"known here are {known}; --import MODULE adds those of a module"
        ) from None
