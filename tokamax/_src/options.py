"""Options that change which config is chosen: scoped values in JAX's own cache key.

Each option is one `jax.make_user_context`, so a jitted function is traced again exactly when an option it
depends on has another value. Options are set in code only; the command line of the process is never read.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax

from tokamax._src import errors


class Option:
    """One scoped option: `with option(value): ...` in this thread, `option.set(value)` for the process."""

    def __init__(
        self,
        name: str,
        default: Any,
        allowed: tuple[Any, ...],
        doc: str,
        *,
        also: Callable[[Any], bool] = lambda value: False,
        also_in_words: str = "",
    ):
        self.name, self.allowed, self.__doc__ = name, allowed, doc
        self._also, self._also_in_words = also, also_in_words
        self._context = jax.make_user_context(default)

    def _checked(self, value: Any) -> Any:
        if not any(value is a or (type(value) is type(a) and value == a) for a in self.allowed):
            if not self._also(value):
                raise errors.ArgumentError(
                    f"tokamax.config.{self.name} must be one of {self.allowed}{self._also_in_words}, got {value!r}"
                )
        return value

    @property
    def value(self) -> Any:
        """The value in force in this thread."""
        return self._context.value

    def set(self, value: Any) -> None:
        """Sets the value for the whole process, below any `with` block."""
        self._context.set_global(self._checked(value))

    def __call__(self, value: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that sets the value in this thread."""
        return self._context(self._checked(value))


autotuning_cache_miss_fallback = Option(
    "autotuning_cache_miss_fallback",
    "heuristics",
    ("heuristics", "autotune", "error"),
    "What to do for a shape that was never measured: go on down the ladder, tune now, or raise.",
)
cost_model = Option(
    "cost_model",
    "auto",
    ("auto", "off", "required"),
    "Whether predictions take part in dispatch; `required` raises where no model is confident.",
)
private_cache = Option(
    "private_cache",
    True,
    (True, False),
    "Whether winners and models of this user's own tunings take part in dispatch.",
)
replay = Option(
    "replay",
    False,
    (True, False),
    "Refuse every measurement, and raise for a shape that was never measured: for serving and many hosts.",
)

freshness = Option(
    "freshness",
    "toolchain",
    ("toolchain", "any", "strict"),
    "Which measurements count as fresh: those of the present jax, jaxlib and backend (others are used only where there "
    "is no fresh one); any; or strictly those of the present library, system and number of cores too, and no others.",
)


def _is_device_kind(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"TPU ?v?\d|NVIDIA .|AMD .|cpu-.", value) is not None


cross_compile = Option(
    "cross_compile",
    False,
    (False, True),
    "Choose implementations and configs for this device kind, though it is not here, to lower or export programs for "
    "it; True: for the device that is here, but take an implementation that was asked for by name at its word.",
    also=_is_device_kind,
    also_in_words=" or a device kind, as JAX calls it, such as 'TPU v6 lite'",
)

OPTIONS = (autotuning_cache_miss_fallback, cost_model, cross_compile, freshness, private_cache, replay)

overlays = jax.make_user_context(())
"""The active results' lookup tables, innermost last, compared by content."""

cache_epoch = jax.make_user_context(0)
"""Counts the changes that this process made to its caches, so that functions traced before are traced again."""


def state() -> tuple[Any, ...]:
    """Everything scoped that a choice depends on, as one hashable value."""
    return (overlays.value, cache_epoch.value, *(option.value for option in OPTIONS))
