"""Arguments as a command line writes them: `f32[8,128]` for an array, JSON for the rest, a bare word for text."""

import dataclasses
import re
import shlex
from typing import Any

from tokamax._src import errors, serialization, shapes
from tokamax._src.bound_arguments import HIDDEN_FIELDS, BoundArguments

_ARRAY = re.compile(r"[a-z][a-z0-9_<>]*\[[^\"']*")
_WORD = re.compile(r"[A-Za-z_][\w.+-]*")
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHONS = {"None": "null", "True": "true", "False": "false"}
_JSONS = ("null", "true", "false", "NaN", "Infinity")


def parse_value(text: str) -> Any:
    """Reads one value; arrays become an `ArraySpec`.

    Raises:
      FormatError: if the text is neither an array, nor JSON, nor a bare word.
    """
    if _ARRAY.fullmatch(text):
        return shapes.ArraySpec.parse(text)
    if text in _PYTHONS:
        raise errors.FormatError(f"a value must be written as in JSON, got {text}; write {_PYTHONS[text]}")
    if _WORD.fullmatch(text) and text not in _JSONS:
        return text
    try:
        return serialization.decode(serialization.loads(text))
    except errors.FormatError as error:
        raise errors.FormatError(
            f"a value must be an array such as f32[8,128], a word, or JSON such as 0.5, true, [1,2], "
            f"got {text[:60]!r}: {error}"
        ) from error


def value_text(value: Any) -> str:
    """Returns the text that `parse_value` reads back.

    Raises:
      SerializationError: if the value has no name that another process could look up.
    """
    if isinstance(value, shapes.ArraySpec):
        return str(value)
    if type(value) is str and _WORD.fullmatch(value) and value not in (*_PYTHONS, *_JSONS):
        return value
    return serialization.dumps(serialization.encode(value))


def parse_arguments(texts: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Reads `VALUE` and `NAME=VALUE` as positional and keyword arguments.

    Raises:
      FormatError: if a value cannot be read, or a name is given twice.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        if (match := _NAMED.fullmatch(text)) is None:
            args.append(parse_value(text))
        elif match[1] in kwargs:
            raise errors.FormatError(f"an argument must be given once, got {match[1]} twice")
        else:
            kwargs[match[1]] = parse_value(match[2])
    return args, kwargs


def tune_command(ba: BoundArguments) -> str | None:
    """Returns the shell command that measures bound arguments for good, or None where a command cannot say them."""
    if any(
        getattr(ba.op, f.name) != f.default for f in dataclasses.fields(ba.op) if f.name not in (*HIDDEN_FIELDS, "_")
    ):
        return None
    module, parts = type(ba.op).__module__, ["tokamax", "tune", ba.op.registered_name()]
    if module == "__main__":
        return None
    if not module.startswith("tokamax."):
        parts += ["--import", module]
    for name, parameter in ba.op.signature.parameters.items():
        value = ba.abstract[name]
        if isinstance(value, shapes.ArraySpec) or value is not parameter.default:
            try:
                parts += ["--arg", f"{name}={value_text(value)}"]
            except errors.SerializationError:
                return None
    return shlex.join([*parts, "--save"])
