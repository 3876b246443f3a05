"""Which implementation of a family a front function calls."""

from collections.abc import Callable, Sequence
from typing import Any

from tokamax._src import devices, errors, options, registry
from tokamax._src.bound_arguments import get_runtime
from tokamax._src.op import NullConfig

Implementation = str | Callable[..., Any]
"""The name of an implementation, or an op or function to call in its place."""

Choice = Implementation | Sequence[Implementation] | None
"""What a caller may ask for: one, several in order of preference, or the best known."""

PREFERRED = ("mosaic", "xla_chunked", "xla")
"""Order of preference among those that run on the device. `xla_chunked` comes before `xla` since its space holds the
plain form, as its default: per shape the ladder picks between both, and without any knowledge it is the plain form that
runs."""

_ELSEWHERE = ("mosaic", "mosaic_tpu", "mosaic_tpu_v2", "triton")
"""Names that openxla/tokamax documents. Where a family has no such implementation, it is one that cannot run, so that
of several the next one does; any other name that is not here is an error."""


def call(family: str, implementation: Choice, *args: Any, **kwargs: Any) -> Any:
    """Calls an op of a family.

    Args:
      family: the family.
      implementation: a name, or names in order of preference, of which the first that can run does; None for the best
        known: the fastest that was measured for these arguments, else by `PREFERRED`.
      *args: arguments of the op.
      **kwargs: keyword arguments of the op.

    Raises:
      ArgumentError: if there is no such implementation, or the arguments do not fit each other.
      UnsupportedError: if none of them can run these arguments on this device; it says why. It is a
        `NotImplementedError`, and so is what an op of the user's own may raise.
    """
    if implementation is None:
        candidates = _best_first(family, args, kwargs)
    elif isinstance(implementation, str) or callable(implementation):
        candidates = [implementation]
    else:
        candidates = list(implementation)
    if not candidates:
        raise errors.ArgumentError(
            f"implementation of {family} must be a name, or several, or None, got {implementation!r}; "
            f"there are {registry.implementations(family)}"
        )
    reasons = []
    for candidate in candidates:
        try:
            op = _op(family, candidate) if isinstance(candidate, str) else candidate
            _check_device(family, candidate, op)
            return op(*args, **kwargs)
        except NotImplementedError as error:
            if len(candidates) == 1:
                raise
            reasons.append(f"{candidate if isinstance(candidate, str) else type(op).__name__}: {error}")
    raise errors.UnsupportedError(
        f"an implementation of {family} must run these arguments on {devices.device_kind()}; {'; '.join(reasons)}"
    )


def _op(family: str, name: str) -> Any:
    """Returns the op of an implementation.

    Raises:
      ArgumentError: if there is no such implementation.
      UnsupportedError: if the public library has one of that name.
    """
    names = registry.implementations(family)
    if name in _ELSEWHERE and name not in names:
        raise errors.UnsupportedError(f"implementation of {family} must be one of {sorted(names)} here, got {name!r}")
    return registry.implementation(family, name)()


def _check_device(family: str, name: Any, op: Any) -> None:
    """Checks that an op runs on the device.

    Raises:
      UnsupportedError: if it does not.
    """
    supported_on = getattr(op, "supported_on", None)
    if supported_on is None or options.cross_compile.value is True or supported_on(devices.target()):
        return
    names = registry.implementations(family)
    others = [other for other in names if registry.implementation(family, other)().supported_on(devices.target())]
    raise errors.UnsupportedError(
        f"implementation {name!r} of {family} must run on {devices.device_kind()} and does not; {others} do; to make a "
        "program for another device, set tokamax.config.cross_compile to its kind"
    )


def _best_first(family: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns the implementations that run on the device, the best known for these arguments first."""
    known = registry.implementations(family)
    classes = {name: registry.implementation(family, name) for name in PREFERRED if name in known}
    names = [name for name, cls in classes.items() if cls().supported_on(devices.target())]
    tunable = [name for name in names if classes[name].config_cls is not NullConfig]
    times = {name: _measured_ms(classes[name](), args, kwargs) for name in tunable if len(tunable) > 1}
    measured = {name: ms for name, ms in times.items() if ms is not None}
    if tunable and tunable[0] in measured:  # What was never measured may still be faster than what was.
        best = min(measured, key=lambda name: measured[name])
        return [best, *(name for name in names if name != best)]
    return names


def _measured_ms(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    try:
        return get_runtime().measured_ms(op.bind(*args, **kwargs))
    except NotImplementedError:
        return None
