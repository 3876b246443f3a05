"""Inputs of a bound op: its own arrays where they are real, else values made from a seed, vmap axes in front."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import numerics, shapes
from tokamax._src.bound_arguments import BoundArguments, is_leaf


class Inputs:
    """The arrays of a call, which are made anew when a kernel has written into them.

    Args:
      make: makes them, the same every time.

    Attributes:
      arrays: the list of them; what was written into is replaced there.
    """

    def __init__(self, make: Callable[[], Sequence[Any]]):
        self._make = make
        self.arrays = list(make())
        self._watched = [i for i, x in enumerate(self.arrays) if _can_be_summed(x)]
        self._before = self._sums()

    def _sums(self) -> list[int]:
        return [int(x) for x in _sums_of([self.arrays[i] for i in self._watched])]

    def restored(self) -> bool:
        """Makes the arrays anew if they are not what they were; returns whether that was so."""
        if self._sums() == self._before:
            return False
        self.arrays[:] = self._make()
        return True


def _sum_of(array: Any) -> Any:
    """Returns a sum over the bits of an array, weighted by place, modulo 2**32."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    wide = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(array, wide).ravel().astype(jnp.uint32)
    return jnp.sum(words * (2 * jnp.arange(words.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


@jax.jit
def _sums_of(arrays: Sequence[Any]) -> list[Any]:
    return [_sum_of(x) for x in arrays]


def _can_be_summed(array: Any) -> bool:
    try:
        jax.eval_shape(_sum_of, array)
    except Exception:  # A random key, or a type of less than a byte: not watched.
        return False
    return True


def example_inputs(ba: BoundArguments, *, seed: int = 0) -> list[jax.Array]:
    """Returns the arrays of a call in the order in which the function of `ba.as_function` takes them.

    Args:
      ba: the op and its arguments; real arrays are copied, abstract ones get values.
      seed: seed of the values; the op's `_example_arguments` come first, random numbers where it gives none.
    """
    if not ba.vmap_sizes:
        arguments = jax.tree.map(lambda x, spec: spec if is_leaf(x) else x, dict(ba.arguments), ba.abstract)
        return _leaves(ba, _initialized(ba, arguments, seed))
    specs = _leaves(ba, ba.abstract)
    copies = []
    for i in np.ndindex(ba.vmap_sizes):
        flat = zlib.crc32(repr((seed, i)).encode())
        unbatched = jax.tree.map(
            lambda x: dataclasses.replace(x, vmap=()) if is_leaf(x) else x, dict(ba.abstract), is_leaf=is_leaf
        )
        copies.append(_leaves(ba, _initialized(ba, unbatched, flat if any(i) else seed)))
    stacked = []
    for n, spec in enumerate(specs):
        picked = [copies[_flat_index(i, spec, ba.vmap_sizes)][n] for i in np.ndindex(spec.batch)] if spec.vmap else []
        array = np.stack([np.asarray(x) for x in picked]) if picked and spec.batch else np.asarray(copies[0][n])
        stacked.append(jax.device_put(array.reshape(spec.batch + spec.shape)))
    return stacked


def _flat_index(index: tuple[int, ...], spec: shapes.ArraySpec, sizes: tuple[int, ...]) -> int:
    """Returns which copy of the unbatched inputs holds an element of a batched array; absent axes count as 0."""
    remaining = iter(index)
    full = tuple(next(remaining) if batched else 0 for batched in spec.vmap)
    return int(np.ravel_multi_index(full, sizes))


def _initialized(ba: BoundArguments, arguments: Mapping[str, Any], seed: int) -> dict[str, Any]:
    abstract = shapes.abstract(dict(arguments))
    overrides = ba.op._example_arguments({name: abstract[name] for name in arguments}, np.random.default_rng(seed))
    return numerics.initialize(arguments, seed=seed, overrides=overrides)


def _leaves(ba: BoundArguments, arguments: Mapping[str, Any]) -> list[Any]:
    """Returns the arrays of arguments in the order in which `as_function` takes them."""
    bound = dataclasses.replace(ba, arguments={name: arguments[name] for name in ba.arguments})
    return [leaf for leaf in jax.tree.leaves((bound.args, bound.kwargs)) if shapes.is_array(leaf)]
