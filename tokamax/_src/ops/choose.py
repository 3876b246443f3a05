"""Which implementation of a family a front function calls."""

from collections.abc import Sequence
from typing import Any

from tokamax._src import devices, errors, registry

PREFERRED = ("xla_chunked", "xla")
"""Order of preference. `xla_chunked` comes first since its space holds the plain form, as its default: per shape the
ladder picks between both, and without any knowledge it is the plain form that runs."""


def implementation_of(family: str, implementation: str | Sequence[str] | None) -> Any:
    """Returns an op of a family.

    Args:
      family: the family.
      implementation: a name, or names in order of preference; None for the best known.

    Raises:
      ArgumentError: if there is no such implementation.
      UnsupportedError: if none of those named runs on this device.
    """
    names = PREFERRED if implementation is None else implementation
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        op = registry.implementation(family, name)()
        if op.supported_on(devices.current()):
            return op
    raise errors.UnsupportedError(
        f"an implementation of {family} must run on {devices.device_kind()}, got {names}; "
        f"there are {registry.implementations(family)}"
    )
