"""Bound arguments read back from lowered programs.

Each op call runs inside a scope named `tokamax:<key>`, and JAX keeps scope names as locations of the operations in
the lowered module. They are read from the module's text, function by function from `main` along its calls, so that
the order is that of the program and a function called from many places is visited once.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokamax._src import serialization
from tokamax._src.bound_arguments import SCOPE_PREFIX, BoundArguments

_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_FUNCTION = re.compile(r"^\s*func\.func .*?@([\w.$-]+|\"(?:[^\"\\]|\\.)*\")\(")
_REFERENCE = re.compile(r"(?:\bcall @([\w.$-]+|\"(?:[^\"\\]|\\.)*\"))|(#loc\d*)\b")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)
_NAME_WITHIN = re.compile(r":\"\((#loc\d*)\)$")
"""The end of a name that stands within another one: JAX 0.12 writes so what a `custom_vmap` contains."""

_JSON = json.JSONDecoder()


def unescape(text: str) -> str:
    """Undoes the escapes of MLIR strings: a backslash before two hexadecimal digits or a character."""

    def replace(match: re.Match[bytes]) -> bytes:
        body = match[1]
        return bytes([int(body, 16)]) if len(body) == 2 else body

    return _ESCAPE.sub(replace, text.encode("utf-8")).decode("utf-8", "replace")


def scopes(text: str) -> Iterator[tuple[Any, str, str]]:
    """Yields the JSON data after each `tokamax:` of a scope name, outermost first, and the text before and after it."""
    position = text.find(SCOPE_PREFIX)
    while position >= 0:
        start = position + len(SCOPE_PREFIX)
        try:
            data, start = _JSON.raw_decode(text, start)
        except ValueError:
            pass  # A scope of the user's own that happens to start alike.
        else:
            yield data, text[:position], text[start:]
        position = text.find(SCOPE_PREFIX, start)


def _program_order(module: str) -> Iterator[str]:
    """Yields the location aliases of a module in program order, each once."""
    events: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in module.splitlines():
        if line.startswith("#loc"):
            continue
        if match := _FUNCTION.match(line):
            current = events.setdefault(match[1], [])
        for callee, alias in _REFERENCE.findall(line):
            current.append(("call", callee) if callee else ("loc", alias))
    seen: set[tuple[str, str]] = set()
    stack = [iter(events.get("main", [e for body in events.values() for e in body]))]
    while stack:
        event = next(stack[-1], None)
        if event is None:
            stack.pop()
        elif event not in seen:
            seen.add(event)
            if event[0] == "loc":
                yield event[1]
            else:
                stack.append(iter(events.get(event[1], [])))


def _whole_name(alias: str, aliases: dict[str, str]) -> str:
    """Returns the text of a location, with the names that its own stands within before it."""
    texts = [aliases.get(alias, "")]
    while match := _NAME_WITHIN.search(texts[-1]):
        texts.append(aliases.get(match[1], ""))
    return "/".join(reversed(texts))


def keys_in_module(module: str) -> list[Any]:
    """Returns the JSON data of the op calls in the text of a lowered module, in program order, each once.

    Args:
      module: `lowered.as_text(debug_info=True)`.
    """
    aliases = {m[1]: m[2] for line in module.splitlines() if (m := _ALIAS.match(line))}
    found: dict[str, Any] = {}
    for alias in _program_order(module):
        if SCOPE_PREFIX in (body := _whole_name(alias, aliases)):
            for data, _, _ in scopes(unescape(body)):
                found.setdefault(serialization.dumps(data), data)
    return list(found.values())


def bound_arguments_in(lowered: Any) -> tuple[BoundArguments, ...]:
    """Returns the bound arguments of the op calls in a `jax.stages.Lowered`, in program order, each once."""
    return tuple(map(BoundArguments.from_json, keys_in_module(lowered.as_text(debug_info=True))))
