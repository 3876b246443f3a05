"""The reference: `jax.lax.ragged_dot`, and the checks of its arguments.

Notation: m rows, k inputs, n outputs, g groups. The rows of a group lie together, in the order of the groups.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tokamax._src import errors, op, registry, shapes
from tokamax._src.bound_arguments import BoundArguments


def reference(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, precision: Any, out_dtype: Any) -> jax.Array:
    """Computes `jax.lax.ragged_dot`.

    Args:
      lhs: [m, k].
      rhs: [g, k, n].
      group_sizes: [g].
      precision: as in `jax.lax.dot_general`.
      out_dtype: dtype of the result, or None.
    """
    return lax.ragged_dot(lhs, rhs, group_sizes, precision=precision, preferred_element_type=out_dtype)


def bind_arguments(
    lhs: Any, rhs: Any, group_sizes: Any, precision: Any, preferred_element_type: Any, group_offset: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Checks the arguments of `ragged_dot`; returns them in canonical form, as args and kwargs.

    Raises:
      ArgumentError: if they do not fit each other.
      UnsupportedError: for a `group_offset`.
    """
    for name, value, axes in (("lhs", lhs, "[m, k]"), ("rhs", rhs, "[g, k, n]"), ("group_sizes", group_sizes, "[g]")):
        if not shapes.is_array(value) or len(value.shape) != axes.count(",") + 1:
            raise errors.ArgumentError(f"{name} must be an array {axes}, got {_describe(value)}")
    if lhs.shape[1] != rhs.shape[1]:
        raise errors.ArgumentError(
            f"lhs [m, k] and rhs [g, k, n] must have the same k, got {tuple(lhs.shape)} and {tuple(rhs.shape)}"
        )
    if group_sizes.shape[0] != rhs.shape[0]:
        raise errors.ArgumentError(
            f"group_sizes must have one size for each of the {rhs.shape[0]} groups of rhs, got {group_sizes.shape[0]}"
        )
    if lhs.dtype != rhs.dtype and shapes.spec_of(lhs).dtype != shapes.spec_of(rhs).dtype:
        raise errors.ArgumentError(
            f"lhs and rhs must have the same dtype, got {lhs.dtype} and {rhs.dtype}; cast one of them"
        )
    if not jax.dtypes.issubdtype(lhs.dtype, np.floating):
        raise errors.ArgumentError(f"lhs and rhs must hold floats, got {lhs.dtype}")
    if not jax.dtypes.issubdtype(group_sizes.dtype, np.integer):
        raise errors.ArgumentError(f"group_sizes must hold integers, got {group_sizes.dtype}")
    if group_offset is not None:
        raise errors.UnsupportedError(
            "group_offset must be None, got an offset; slice rhs and group_sizes, or call jax.lax.ragged_dot"
        )
    if preferred_element_type is not None:
        preferred_element_type = jnp.dtype(preferred_element_type)
    return (lhs, rhs, group_sizes), {"precision": precision, "preferred_element_type": preferred_element_type}


def _describe(value: Any) -> str:
    return str(shapes.spec_of(value)) if shapes.is_array(value) else type(value).__name__


def example_group_sizes(rows: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Returns [g] uneven group sizes that sum up to `rows`, as a router of tokens to experts makes them."""
    return rng.multinomial(rows, rng.dirichlet(np.full(groups, 3.0))).astype(np.int32)


@registry.register("ragged_dot", "xla")
@dataclasses.dataclass(frozen=True)
class RaggedDot(op.Op):
    """`jax.lax.ragged_dot` as XLA compiles it."""

    def bind(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: None = None,
        *,
        return_residuals: bool = False,
    ) -> BoundArguments:
        """Binds the arguments; see `tokamax.ragged_dot`."""
        args, kwargs = bind_arguments(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
        return super().bind(*args, **kwargs, return_residuals=return_residuals)

    def _fwd(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        precision: Any,
        preferred_element_type: Any,
        return_residuals: bool,
        config: Any,
    ) -> tuple[jax.Array, None]:
        return reference(lhs, rhs, group_sizes, precision, preferred_element_type), None

    def _example_arguments(self, arguments: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"group_sizes": example_group_sizes(arguments["lhs"].shape[0], arguments["rhs"].shape[0], rng)}
