"""Names in files -> objects in this process, without importing anything.

Ops register themselves when their class is defined; the shipped implementations also stand in a table of
(family, implementation). Functions, enums and dataclasses that were used as op arguments in this process are
remembered by name. A name that is not here is unknown: a file can never make tokamax import a module.
"""

import importlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tokamax._src import errors

_T = TypeVar("_T", bound=type)

_lock = threading.Lock()
_ops: dict[str, type] = {}
_implementations: dict[str, dict[str, Any]] = {}
_values: dict[str, Any] = {}
_names: dict[Any, str] = {}


def qualified_name(value: Any) -> str:
    """Returns `module.qualname` of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"


def add_op(name: str, cls: type) -> None:
    """Makes an op class known by the name that keys and files use; the newest definition wins."""
    with _lock:
        _ops[name] = cls


def op_names() -> tuple[str, ...]:
    """Returns the names of the op classes known in this process."""
    return tuple(_ops)


def op_class(name: str) -> type:
    """Returns the op class of a name.

    Raises:
      FormatError: if no imported module has defined it.
    """
    try:
        return _ops[name]
    except KeyError:
        raise errors.FormatError(
            f"op {name[:80]!r} is not known in this process; import the module that defines it first"
        ) from None


def register(family: str, implementation: str) -> Callable[[_T], _T]:
    """Class decorator: makes an op the `implementation` of a `family`, in order of registration."""

    def decorate(cls: _T) -> _T:
        with _lock:
            _implementations.setdefault(family, {})[implementation] = cls
        return cls

    return decorate


def register_lazily(family: str, implementation: str, target: str) -> None:
    """Like `register` for a class named by `module:Class`, imported on first use."""
    with _lock:
        _implementations.setdefault(family, {})[implementation] = target


def implementations(family: str) -> tuple[str, ...]:
    """Names of a family's implementations, in order of registration."""
    return tuple(_implementations.get(family, {}))


def implementation(family: str, name: str) -> type:
    """Returns an implementation's op class.

    Raises:
      ArgumentError: if the family has no such implementation.
    """
    table = _implementations.get(family, {})
    if name not in table:
        raise errors.ArgumentError(f"implementation of {family} must be one of {sorted(table)}, got {name!r}")
    if isinstance(table[name], str):
        module, _, attribute = table[name].partition(":")
        table[name] = getattr(importlib.import_module(module), attribute)
    return table[name]


def family_of(cls: type) -> tuple[str, str] | None:
    """Returns (family, implementation) of an op class, or None for an op outside the table."""
    for family, table in _implementations.items():
        for name, entry in table.items():
            if entry is cls or entry == f"{cls.__module__}:{cls.__qualname__}":
                return family, name
    return None


def remember(value: Any, name: str | None = None) -> str:
    """Makes a function or class that this process already uses findable by name; returns the name.

    The first name of a value stays its name, so that a public name given once hides a private module path.
    """
    name = name or name_of(value)
    _values[name] = value
    _names.setdefault(value, name)
    return name


def name_of(value: Any) -> str:
    """Returns the name a function or class has in keys and files."""
    return _names.get(value) or qualified_name(value)


def recall(name: str) -> Any:
    """Returns a remembered function or class.

    Raises:
      FormatError: if nothing of that name was used or registered in this process.
    """
    try:
        return _values[name]
    except KeyError:
        raise errors.FormatError(
            f"{name[:80]!r} is not known in this process; import the module that defines it and call "
            "tokamax.autotuning.register_value(it) first"
        ) from None
