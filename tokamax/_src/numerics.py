"""Inputs made from a seed, and the comparison of outputs."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors, shapes

TOLERANCE = {
    "float64": 1e-8,
    "float32": 1e-3,
    "float16": 1e-2,
    "bfloat16": 3e-2,
}
"""Largest accepted error by dtype, as a share of the reference's largest magnitude."""


def random_array(spec: shapes.ArraySpec, seed: int) -> np.ndarray:
    """Returns values that suit a dtype: normal floats, 0 for integers, True for bools."""
    shape = spec.batch + spec.shape
    if spec.dtype == np.bool_:
        return np.ones(shape, np.bool_)
    if not jax.dtypes.issubdtype(spec.dtype, np.inexact):
        return np.zeros(shape, spec.dtype)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, dtype=np.float32)
    if jax.dtypes.issubdtype(spec.dtype, np.complexfloating):
        values = values + 1j * rng.standard_normal(shape, dtype=np.float32)
    return values.astype(spec.dtype)


def initialize(
    arguments: Mapping[str, Any], *, seed: int, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Makes every array of some arguments real.

    Args:
      arguments: name -> value, pytrees allowed. Abstract arrays get values from the seed, independent of each other
        and equal in every process; real arrays are copied, since a kernel may write into them.
      seed: the seed.
      overrides: name -> value for abstract arguments that random numbers do not suit.

    Returns:
      The arguments with JAX arrays.
    """
    made = {}
    for name, value in arguments.items():
        leaves, treedef = jax.tree.flatten(value)
        given = treedef.flatten_up_to(overrides[name]) if overrides and name in overrides else [None] * len(leaves)
        for i, leaf in enumerate(leaves):
            if shapes.is_array(leaf):
                leaves[i] = _real(leaf, given[i], zlib.crc32(f"{seed}/{name}/{i}".encode()))
        made[name] = treedef.unflatten(leaves)
    return made


def _real(leaf: Any, override: Any, seed: int) -> jax.Array:
    if not isinstance(leaf, (shapes.ArraySpec, jax.ShapeDtypeStruct)):
        return jnp.array(leaf, copy=True)
    spec = shapes.spec_of(leaf)
    if override is not None:
        return jnp.asarray(override, dtype=spec.dtype)
    if jax.dtypes.issubdtype(spec.dtype, jax.dtypes.prng_key):
        key = jax.random.key(seed, impl=shapes.KEY_IMPLS[shapes.dtype_name(spec.dtype)])
        return jax.random.split(key, spec.batch + spec.shape)
    return jnp.asarray(random_array(spec, seed))


def check_tolerance(tolerance: Any) -> None:
    """Checks what says how exact outputs must be.

    Raises:
      ArgumentError: if it is no share, no mapping from dtype names to shares, and not None.
    """
    shares = tolerance if isinstance(tolerance, Mapping) else {"float32": tolerance}
    right = all(
        name in TOLERANCE and isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share < math.inf
        for name, share in shares.items()
    )
    if tolerance is not None and not right:
        raise errors.ArgumentError(
            "tolerance must be the accepted error as a share of the largest magnitude, such as 1e-3, or a mapping from "
            f"{sorted(TOLERANCE)} to such shares, got {tolerance!r}"
        )


def _tolerance_of(dtype: str, tolerance: float | Mapping[str, float] | None) -> float:
    """Returns the accepted error of a dtype; what a mapping does not name keeps that of `TOLERANCE`."""
    if tolerance is None or isinstance(tolerance, Mapping):
        return {**TOLERANCE, **(tolerance or {})}.get(dtype, 0.1)
    return tolerance


def compare(actual: Any, reference: Any, *, tolerance: float | Mapping[str, float] | None = None) -> str | None:
    """Compares the outputs of two configs.

    Floats agree if the largest error is at most `TOLERANCE` of their dtype times the largest finite magnitude of the
    reference: a sum over a long axis may round differently, but not by more than its own scale. NaN and infinities
    must stand in the same places. Everything else must be equal.

    Args:
      actual: outputs of a config.
      reference: what they must be.
      tolerance: the accepted error in place of `TOLERANCE`: one share for all, or by dtype.

    Returns:
      None if they agree, else one line that says where they do not.
    """
    leaves, treedef = jax.tree.flatten(actual)
    expected, expected_treedef = jax.tree.flatten(reference)
    if treedef != expected_treedef:
        return f"the output must have the structure {expected_treedef}, got {treedef}"
    for i, (a, b) in enumerate(zip(leaves, expected, strict=True)):
        if (reason := _compare_arrays(a, b, tolerance)) is not None:
            return f"output {i}: {reason}" if len(leaves) > 1 else reason
    return None


def identical(actual: Any, reference: Any) -> bool:
    """Whether two outputs are equal bit by bit, which is cheaper to find out than how far they are apart."""
    leaves, treedef = jax.tree.flatten(actual)
    expected, expected_treedef = jax.tree.flatten(reference)
    return treedef == expected_treedef and all(map(_identical_arrays, leaves, expected))


def _identical_arrays(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not isinstance(a, jax.Array) or not isinstance(b, jax.Array) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended):
        return False
    bits, other_bits = (np.asarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return np.array_equal(bits, other_bits)


def _compare_arrays(actual: Any, reference: Any, tolerance: float | Mapping[str, float] | None) -> str | None:
    if (actual.shape, actual.dtype) != (reference.shape, reference.dtype):
        return f"must be {shapes.spec_of(reference)}, got {shapes.spec_of(actual)}"
    if jax.dtypes.issubdtype(actual.dtype, jax.dtypes.extended):
        return None
    a, b = np.asarray(actual), np.asarray(reference)
    if not jax.dtypes.issubdtype(a.dtype, np.inexact):
        return None if np.array_equal(a, b) else f"{np.sum(a != b)} of {a.size} values differ"
    share = _tolerance_of(np.real(a).dtype.name, tolerance)
    if a.dtype.itemsize < 4:
        a, b = a.astype(np.float32), b.astype(np.float32)
    finite = np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return f"{np.sum(np.isnan(a))} NaN, the reference has {np.sum(np.isnan(b))}"
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[np.isinf(b)], b[np.isinf(b)]):
        return f"{np.sum(np.isinf(a))} infinities, the reference has {np.sum(np.isinf(b))} or has them elsewhere"
    if not finite.all():
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    if not a.size:
        return None
    error = np.abs(a - b)
    worst, limit = float(error.max()), share * float(np.abs(b).max())
    if worst <= limit:
        return None
    at = np.unravel_index(int(error.argmax()), error.shape)
    return f"error {worst:.3g} at {tuple(map(int, at))} must be at most {limit:.3g} (got {a[at]:.6g}, want {b[at]:.6g})"
