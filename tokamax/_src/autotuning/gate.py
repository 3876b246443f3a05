"""The correctness gate: whether the outputs of a config are right.

Outputs are compared with the op's plain reference at inputs of at least 32 bits, rounded to the dtypes of the op's own
outputs, so that the tolerance is that of those. Where an op has no reference, or it cannot run within the limits, they
are compared with the default's output.

A default that disagrees with the reference is noted, and what agrees with either counts as right: one of the two is at
fault, a tuning cannot tell which, and a config that computes what the program computes without tuning makes nothing
worse. Each config is judged twice: after its first run, which warms it up, and after a run of its first sample, which
costs no run more. The second output must be right as well, and agree with the first, as closely as with the reference:
sums whose order differs from run to run do, outputs that change do not. Before that sample, memory of the size of the
outputs is filled with NaN and given back, so that a config that leaves a part of its output unwritten most likely shows
it, and no longer what an earlier run wrote there. A config that writes into its inputs has failed, and they are made
anew for the others.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import benchmarking, devices, errors, numerics
from tokamax._src.autotuning.outcome import ConfigFailed, Failure
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.inputs import Inputs


class Limited(Protocol):
    """Runs a step under the limit of a phase (`trace`, `compile`, `check`, `run`) and returns its result."""

    def __call__(self, step: Callable[[], Any], phase: str = "run") -> Any:
        """Raises what the step raises, and `ConfigFailed` if it exceeds the limit."""
        ...


_MEMORY_SHARE = 0.5
"""The part of the device's memory that a reference may need: it keeps all intermediate results of a plain form."""
_KEPT_SHARE = 0.05
"""The part of the device's memory that first outputs may take until the second ones come; beyond it, a config runs once
more before its first sample."""
_KEPT_BYTES = 2**28
"""The same where the size of the memory is not known."""


@dataclasses.dataclass(frozen=True)
class _Once:
    """A config that was judged once.

    Attributes:
      looks: shape, dtype and sharding of each array of its output.
      output: the output, in a tuple; empty if it was too large to be kept.
      size_bytes: what is kept takes.
    """

    looks: list[tuple[Any, Any, Any]]
    output: tuple[Any, ...]
    size_bytes: int


@dataclasses.dataclass
class Gate:
    """Judges the outputs of one tuning.

    Attributes:
      compare: returns None for an output that agrees with another, else one line that says where it does not.
      default: the default config.
      build_reference: compiles what outputs are compared with; None where the op has no reference.
      inputs: what the configs run on; None to leave them unwatched.
      scope: enters the scoped settings of JAX that the tuning was called with, in whichever thread.
      note: what is to be known about the check: why the reference is not used, or that the default disagrees with it.
    """

    compare: Callable[[Any, Any], str | None]
    default: Any
    build_reference: Callable[[], benchmarking.Compiled] | None = None
    inputs: Inputs | None = None
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    note: str | None = None

    def __post_init__(self) -> None:
        self._reference: tuple[Any, ...] = ()
        self._first: tuple[Any, ...] = ()
        """The output of the first config that ran: a yardstick where there is no reference, or the default differs."""
        self._once: dict[Any, _Once] = {}
        """Configs whose second output is not judged yet."""
        self.judged: set[Any] = set()
        """Configs whose first output was right."""

    @property
    def has_reference(self) -> bool:
        """Whether outputs are compared with the reference."""
        return bool(self._reference)

    def begin(self) -> None:
        """Begins to compile the reference, beside the configs."""
        if self.build_reference is None:
            return
        build, future = self.build_reference, concurrent.futures.Future()
        threading.Thread(target=_fulfil, args=(future, build), daemon=True, name="tokamax-reference").start()
        self.build_reference = future.result

    def prepare(self, limited: Limited) -> None:
        """Runs the reference; if it cannot, notes why."""
        if self.build_reference is None:
            return
        build, self.build_reference = self.build_reference, None
        try:
            compiled = limited(build, "compile")
            needed, there = compiled.peak_memory_bytes or 0, devices.facts().memory_bytes
            if there and needed > _MEMORY_SHARE * there:
                raise MemoryError(f"it needs {needed / 2**30:.1f} GiB of {there / 2**30:.1f}")
            self._reference = (limited(compiled.run),)
        except Exception as error:
            self.note = without_reference(Failure.of("run", error).reason)

    def try_out(self, config: Any, run: Callable[[], Any], limited: Limited) -> str | None:
        """Runs a config for the first time; returns what is wrong, None if nothing is.

        Raises:
          Exception: what the run raises; `ConfigFailed` if it, or the check, exceeds the limit.
        """
        output = limited(run)
        reason, note = limited(functools.partial(self._judged_first, config, output), "check")
        self.note = note or self.note
        if reason is not None:
            return reason
        if not self._first and (not self._reference or self.note is not None):
            self._first = (output,)
        self._once[config] = self._kept(output)
        self.judged.add(config)
        return None

    def _kept(self, output: Any) -> _Once:
        """Keeps what a second output is compared with, if there is room for it."""
        arrays = [x for x in jax.tree.leaves(output) if isinstance(x, jax.Array)]
        looks = [(x.shape, x.dtype, x.sharding) for x in arrays]
        size = sum(x.nbytes for x in arrays)
        memory = devices.facts().memory_bytes
        room = _KEPT_SHARE * memory if memory else _KEPT_BYTES
        fits = size + sum(once.size_bytes for once in self._once.values()) <= room
        return _Once(looks, (output,), size) if fits else _Once(looks, (), 0)

    def measured(
        self, config: Any, run: Callable[[], Any], measure: Callable[[Callable[[], Any]], Sequence[float]]
    ) -> list[float]:
        """Measures a config; at the first time, the output of the first run on the way is judged.

        Args:
          config: the config.
          run: runs it.
          measure: a timer.

        Raises:
          ConfigFailed: if the output is wrong; the samples are kept with it.
        """
        once = self._once.pop(config, None)
        if once is None:
            return list(measure(run))
        first = once.output[0] if once.output else run()
        kept: list[Any] = []

        def watched() -> Any:
            output = run()
            if not kept:
                kept.append(output)
            return output

        with self.scope():
            _poison(once.looks)
        samples = list(measure(watched))
        if not kept:  # A timer that runs nothing, but reads a table.
            watched()
        with self.scope():
            reason = self._judged_again(first, kept[0])
        if reason is not None:
            raise ConfigFailed(Failure("check", reason, _measured_ms(samples)))
        return samples

    def _judged_first(self, config: Any, output: Any) -> tuple[str | None, str | None]:
        """Returns what is wrong with a first output, and a note on the check."""
        with self.scope():
            if self.inputs is not None and self.inputs.restored():
                return "it writes into its inputs", None
            reason = self._against_all(output)
            if reason is not None and self._reference and config == self.default:
                return None, f"the default's output is not that of the reference: {reason}"
            return reason, None

    def _judged_again(self, first: Any, second: Any) -> str | None:
        """Returns what is wrong with a second output: that it is not right, or not the first, which was."""
        if numerics.identical(second, first):
            return None
        wrong = self._against_all(second) or self._compared(second, first)
        return wrong and f"two runs must give the same output; the second: {wrong}"

    def _against_all(self, output: Any) -> str | None:
        """Returns why an output agrees with neither the reference nor the yardstick, as far as they are there."""
        reason = self._compared(output, *self._reference) if self._reference else None
        if self._first and (reason is not None or not self._reference):
            return self._compared(output, *self._first)
        return reason

    def _compared(self, output: Any, expected: Any) -> str | None:
        try:
            return self.compare(output, expected)
        except Exception as error:
            return Failure.of("check", error).reason


def _fulfil(future: "concurrent.futures.Future[Any]", call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _measured_ms(samples: Sequence[float]) -> tuple[float, ...]:
    """Returns samples as a failure keeps them: none if the timer returned nonsense."""
    try:
        return benchmarking.BenchmarkData(tuple(samples)).samples_ms
    except (errors.ArgumentError, TypeError, ValueError):
        return ()


def without_reference(reason: str) -> str:
    """Returns the note that the default stands in for the reference."""
    return f"checked against the default, since the reference cannot run: {reason}"


def _poison(looks: Sequence[tuple[Any, Any, Any]]) -> None:
    """Fills memory of the size of outputs with NaN (the largest integer), and gives it back.

    Args:
      looks: shape, dtype and sharding of each.
    """
    for shape, dtype, sharding in looks:
        # A dtype that knows no such value, or too little memory, costs this precaution and not the config.
        with contextlib.suppress(Exception):
            value = jnp.nan if jax.dtypes.issubdtype(dtype, np.inexact) else jnp.iinfo(dtype).max
            jax.block_until_ready(jnp.full(shape, value, dtype, device=sharding)).delete()


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
