"""The correctness gate: whether the outputs of a config are right.

Outputs are compared with the op's plain reference at inputs of at least 32 bits, rounded to the dtypes of the op's own
outputs, so that the tolerance is that of those. Where an op has no reference, or it cannot run within the limits, they
are compared with the default's output.

A default that disagrees with the reference is noted, and what agrees with either counts as right: one of the two is at
fault, a tuning cannot tell which, and a config that computes what the program computes without tuning makes nothing
worse. Each config runs twice, and the second output must agree with the first. In between, memory of the size of the
outputs is filled with NaN and given back, so that a config that leaves a part of its output unwritten most likely shows
it, and no longer what an earlier config wrote there.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import benchmarking, devices, numerics
from tokamax._src.autotuning.outcome import Failure
from tokamax._src.bound_arguments import BoundArguments

Limited = Callable[[Callable[[], Any]], Any]
"""Runs a step under a limit and returns its result; raises what it raises, and TimeoutError."""

_MEMORY_SHARE = 0.5
"""The part of the device's memory that a reference may need: it keeps all intermediate results of a plain form."""


@dataclasses.dataclass
class Gate:
    """Judges the outputs of one tuning.

    Attributes:
      compare: returns None for an output that agrees with another, else one line that says where it does not.
      default: the default config.
      build_reference: compiles what outputs are compared with; None where the op has no reference.
      note: what is to be known about the check: why the reference is not used, or that the default disagrees with it.
    """

    compare: Callable[[Any, Any], str | None]
    default: Any
    build_reference: Callable[[], benchmarking.Compiled] | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        self._reference: tuple[Any, ...] = ()
        self._first: tuple[Any, ...] = ()
        """The output of the first config that ran: a yardstick where there is no reference, or the default differs."""

    @property
    def has_reference(self) -> bool:
        """Whether outputs are compared with the reference."""
        return bool(self._reference)

    def prepare(self, limited: Limited) -> None:
        """Runs the reference; if it cannot, notes why."""
        if self.build_reference is None:
            return
        build, self.build_reference = self.build_reference, None
        try:
            compiled = limited(build)
            needed, there = compiled.peak_memory_bytes or 0, devices.facts().memory_bytes
            if there and needed > _MEMORY_SHARE * there:
                raise MemoryError(f"it needs {needed / 2**30:.1f} GiB of {there / 2**30:.1f}")
            self._reference = (limited(compiled.run),)
        except Exception as error:
            reason = "it exceeds the limit" if _is_limit(error) else Failure.of("run", error).reason
            self.note = without_reference(reason)

    def try_out(self, config: Any, run: Callable[[], Any], limited: Limited) -> str | None:
        """Runs a config for the first and the second time; returns what is wrong, None if nothing is.

        Raises:
          Exception: what a run raises; TimeoutError if one exceeds the limit.
        """
        output = limited(run)
        reason = self._judged(config, output)
        if reason is None:
            _poison(output)
            again = limited(run)
            if (changed := self._compared(again, output)) is not None:
                reason = f"two runs must give the same output; the second: {changed}"
        if reason is None and (not self._first and (not self._reference or self.note is not None)):
            self._first = (output,)
        return reason

    def _judged(self, config: Any, output: Any) -> str | None:
        if not self._reference:
            return self._compared(output, *self._first) if self._first else None
        reason = self._compared(output, *self._reference)
        if reason is None:
            return None
        if config == self.default:
            self.note = f"the default's output is not that of the reference: {reason}"
            return None
        return self._compared(output, *self._first) if self._first else reason

    def _compared(self, output: Any, expected: Any) -> str | None:
        try:
            return self.compare(output, expected)
        except Exception as error:
            return Failure.of("check", error).reason


def without_reference(reason: str) -> str:
    """Returns the note that the default stands in for the reference."""
    return f"checked against the default, since the reference cannot run: {reason}"


def _is_limit(error: Exception) -> bool:
    return isinstance(error, TimeoutError) and not error.args


def _poison(output: Any) -> None:
    """Fills memory of the size of an output with NaN (the largest integer), and gives it back."""
    shapes = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)}
    for shape, dtype in shapes:
        # A dtype that knows no such value, or too little memory, costs this precaution and not the config.
        with contextlib.suppress(Exception):
            value = jnp.nan if jax.dtypes.issubdtype(dtype, np.inexact) else jnp.iinfo(dtype).max
            jax.block_until_ready(jnp.full(shape, value, dtype)).delete()


def reference_of(ba: BoundArguments, inputs: Sequence[Any]) -> Callable[[], benchmarking.Compiled] | None:
    """Returns what compiles the op's reference at some inputs, None if it has none.

    Args:
      ba: the op and its arguments.
      inputs: the arrays of the call.
    """
    if not ba.has_reference:
        return None

    def build() -> benchmarking.Compiled:
        reference = ba.as_reference()
        try:
            wanted = jax.eval_shape(ba.as_function(ba.default_config)[0], list(inputs))
        except Exception:  # The default cannot be traced; it is recorded as failed.
            wanted = jax.eval_shape(reference, list(inputs))

        def rounded(arrays: Sequence[Any]) -> Any:
            exact = reference([_at_least_32_bits(x) for x in arrays])
            return jax.tree.map(lambda x, spec: x.astype(spec.dtype), exact, wanted)

        with jax.default_matmul_precision("highest"):
            return benchmarking.compile_function(rounded, inputs)

    return build


def _at_least_32_bits(x: Any) -> Any:
    """Returns a float array in float32, if it has fewer bits."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def comparison(ba: BoundArguments, tolerance: float | Mapping[str, float] | None) -> Callable[[Any, Any], str | None]:
    """Returns how outputs of an op are compared: with the tolerance of the call, else the op's, else by dtype."""
    tolerance = ba.op._get_tolerance(ba) if tolerance is None else tolerance
    numerics.check_tolerance(tolerance)
    return lambda actual, expected: numerics.compare(actual, expected, tolerance=tolerance)
