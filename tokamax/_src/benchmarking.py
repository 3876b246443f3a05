"""Compile, warm up, time: measurements of one function."""

import dataclasses
import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors, numerics, serialization, shapes, timing
from tokamax._src.bound_arguments import BoundArguments
from tokamax._src.inputs import example_inputs

Mode = Literal["forward", "forward_res", "vjp", "forward_and_vjp"]


@dataclasses.dataclass(frozen=True)
class BenchmarkData:
    """One measurement of a compiled function.

    Attributes:
      samples_ms: time of one run in ms, per sample.
      compile_ms: time of compiling.
      lowering_ms: time of tracing and lowering.
      peak_memory_bytes: arguments, outputs and temporaries as the compiler counts them; None if it does not say.
    """

    samples_ms: tuple[float, ...]
    compile_ms: float = 0.0
    lowering_ms: float = 0.0
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        samples = tuple(round(float(s), 6) for s in self.samples_ms)
        if not samples or not all(math.isfinite(s) and s >= 0 for s in samples):
            raise errors.ArgumentError(
                f"samples_ms must be one or more times in ms, finite and not negative, got {samples}"
            )
        object.__setattr__(self, "samples_ms", samples)

    @property
    def median_ms(self) -> float:
        """Median of the samples in ms."""
        return statistics.median(self.samples_ms)

    @property
    def min_ms(self) -> float:
        """Least of the samples in ms."""
        return min(self.samples_ms)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function with its inputs.

    Attributes:
      run: executes it once, blocks, and returns the outputs.
      compile_ms: time of compiling.
      lowering_ms: time of tracing and lowering.
      peak_memory_bytes: see `BenchmarkData`.
      program: a digest of the lowered program; equal for configs that run the same. None if it is not known.
    """

    run: Callable[[], Any]
    compile_ms: float
    lowering_ms: float
    peak_memory_bytes: int | None
    program: str | None = None

    def measured(self, samples_ms: Sequence[float]) -> BenchmarkData:
        """Returns the measurement that samples of this function make."""
        return BenchmarkData(tuple(samples_ms), self.compile_ms, self.lowering_ms, self.peak_memory_bytes)


def _peak_memory_bytes(compiled: Any) -> int | None:
    try:
        analysis = compiled.memory_analysis()
        parts = (analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.temp_size_in_bytes)
        return int(sum(parts))
    except (AttributeError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError):
        return None


def compile_function(
    f: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], begins: Callable[[str], None] = lambda phase: None
) -> Compiled:
    """Lowers and compiles a function of one list of arrays, and binds it to that list.

    Args:
      f: the function.
      arrays: its arrays; of a list, what it holds at the time of a run.
      begins: told when the phases `trace` and `compile` begin.
    """
    arrays = arrays if isinstance(arrays, list) else list(arrays)
    begins("trace")
    start = time.perf_counter()
    lowered = jax.jit(f).lower(arrays)
    lowered_at = time.perf_counter()
    program = serialization.digest(lowered.as_text())
    begins("compile")
    compiling = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    return Compiled(
        run=lambda: jax.block_until_ready(compiled(arrays)),
        compile_ms=round(1e3 * (end - compiling), 3),
        lowering_ms=round(1e3 * (lowered_at - start), 3),
        peak_memory_bytes=_peak_memory_bytes(compiled),
        program=program,
    )


def benchmark(
    f: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], *, iterations: int = 5, timer: Any = "wall_clock"
) -> BenchmarkData:
    """Compiles a function of one list of arrays, runs it once to warm up, and times it.

    Args:
      f: the function; `standardize_function` makes one of any function.
      arrays: its arrays.
      iterations: how many samples.
      timer: a timer or its name.
    """
    if iterations < 1:
        raise errors.ArgumentError(f"iterations must be at least 1, got {iterations}")
    compiled = compile_function(f, arrays)
    compiled.run()
    samples = timing.get_timer(timer)(compiled.run, bound_args=None, config=None, rounds=iterations)
    return compiled.measured(samples)


def standardize_function(
    f: Any, *args: Any, kwargs: Mapping[str, Any] | None = None, mode: Mode = "forward", seed: int = 0
) -> tuple[Callable[[Sequence[Any]], Any], list[jax.Array]]:
    """Turns any function and arguments into a function of one list of arrays, ready for `benchmark`.

    Args:
      f: the function, or `BoundArguments`, which bring their arguments.
      *args: its arguments; arrays may be abstract (`jax.ShapeDtypeStruct`) and get values from the seed.
      kwargs: its keyword arguments.
      mode: `forward` runs `f`; `forward_res` also returns what the backward pass needs; `vjp` runs the backward pass
        alone, for a cotangent of ones; `forward_and_vjp` runs both. Gradients are those of the floating-point arrays.
      seed: seed of the values.

    Returns:
      The function, and its arrays. Arguments that are no arrays are closed over.

    Raises:
      ArgumentError: for an unknown mode, or one with gradients where nothing can be differentiated.
    """
    if mode not in ("forward", "forward_res", "vjp", "forward_and_vjp"):
        raise errors.ArgumentError(f"mode must be forward, forward_res, vjp or forward_and_vjp, got {mode!r}")
    if isinstance(f, BoundArguments):
        if args or kwargs:
            raise errors.ArgumentError(f"bound arguments must come alone, got further arguments for {f!r}")
        call, _ = f.as_function()
        arrays = example_inputs(f, seed=seed)
    else:
        call, arrays = _of_arrays(f, args, dict(kwargs or {}), seed)
    return _with_mode(call, arrays, mode)


def _of_arrays(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> tuple[Callable[[Sequence[Any]], Any], list[jax.Array]]:
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except TypeError as error:
        raise errors.ArgumentError(f"the arguments must fit f: {error}") from None
    except ValueError:
        pass  # No signature to check against.
    leaves, treedef = jax.tree.flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if shapes.is_array(leaf)]
    made = numerics.initialize({str(n): leaves[i] for n, i in enumerate(where)}, seed=seed)

    def call(arrays: Sequence[Any]) -> Any:
        merged = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            merged[i] = array
        f_args, f_kwargs = treedef.unflatten(merged)
        return f(*f_args, **f_kwargs)

    return call, list(made.values())


def _with_mode(
    call: Callable[[Sequence[Any]], Any], arrays: list[jax.Array], mode: Mode
) -> tuple[Callable[[Sequence[Any]], Any], list[jax.Array]]:
    if mode == "forward":
        return call, arrays
    floats = [i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact)]
    if not floats:
        raise errors.ArgumentError(f"mode {mode} must have a floating-point array to differentiate, got none")

    def vjp_of(arrays: Sequence[Any]) -> tuple[Any, Callable[[Any], Any]]:
        def of_floats(*values: Any) -> Any:
            merged = list(arrays)
            for i, value in zip(floats, values, strict=True):
                merged[i] = value
            return call(merged)

        return jax.vjp(of_floats, *(arrays[i] for i in floats))

    def forward_res(arrays: Sequence[Any]) -> Any:
        out, vjp = vjp_of(arrays)
        return out, jax.tree.leaves(vjp)

    def forward_and_vjp(arrays: Sequence[Any]) -> Any:
        out, vjp = vjp_of(arrays)
        return out, vjp(jax.tree.map(_cotangent, out))

    if mode == "forward_res":
        return forward_res, arrays
    if mode == "forward_and_vjp":
        return forward_and_vjp, arrays
    out, vjp = jax.jit(vjp_of)(arrays)
    residuals, treedef = jax.tree.flatten(vjp)
    cotangents, out_treedef = jax.tree.flatten(jax.tree.map(_cotangent, out))
    given = [x for x in cotangents if isinstance(x, jax.Array)]

    def backward(arrays: Sequence[Any]) -> Any:
        saved, dout = arrays[: len(residuals)], iter(arrays[len(residuals) :])
        cotangent = [next(dout) if isinstance(x, jax.Array) else x for x in cotangents]
        return treedef.unflatten(saved)(out_treedef.unflatten(cotangent))

    return backward, [*residuals, *given]


def _cotangent(out: Any) -> Any:
    """Returns ones for a floating-point output; others, such as indices, have no cotangent."""
    if jax.dtypes.issubdtype(jnp.result_type(out), np.inexact):
        return jnp.ones_like(out)
    return np.zeros(np.shape(out), jax.dtypes.float0)
