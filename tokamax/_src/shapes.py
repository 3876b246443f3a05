"""Shape and dtype records: how arrays enter keys, files and cost models.

An array is known by its dtype, its shape as the op sees it, and the `vmap` axes around it. The text form is
`bf16[4096,512]`; `f32[8,64]{3,_}` is an array inside two vmaps, batched (size 3) in the outer one only.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import errors

_LONG_NAMES = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}
_SHORT_NAMES = {long: short for short, long in _LONG_NAMES.items()}
KEY_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
"""The random number generator of each dtype of random keys."""

_TEXT = re.compile(r"([a-z][a-z0-9_<>]*)\[([0-9,]*)\](?:\{([0-9_,]+)\})?")


def dtype_name(dtype: Any) -> str:
    """Returns the short name of a dtype: `f32`, `bf16`, `i8`, `bool`."""
    name = str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name
    match = re.fullmatch(r"(bfloat|float|uint|int|complex)(\d.*)", name)
    return _SHORT_NAMES[match[1]] + match[2] if match else name


def dtype_from_name(name: str) -> Any:
    """Returns the dtype of a short name.

    Raises:
      FormatError: if there is no such dtype.
    """
    match = re.fullmatch(r"(bf|f|u|i|c)(\d.*)", name)
    try:
        if name.startswith("key<"):
            return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_IMPLS[name])).dtype
        return jnp.dtype(_LONG_NAMES[match[1]] + match[2] if match else name)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise errors.FormatError(f"dtype must be a known name such as f32 or bf16, got {name[:40]!r}") from error


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array, with the vmap axes around it.

    Attributes:
      shape: the shape that the op sees, without vmap axes.
      dtype: the element type.
      vmap: per surrounding vmap, outermost first, its size if this array is batched there, else 0.
    """

    shape: tuple[int, ...]
    dtype: Any
    vmap: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.dtype, np.dtype) and not jax.dtypes.issubdtype(self.dtype, jax.dtypes.extended):
            object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @property
    def ndim(self) -> int:
        """Number of axes, vmap axes not counted."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, vmap axes not counted."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the vmap axes that this array has, outermost first."""
        return tuple(size for size in self.vmap if size)

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"
        return text + "{" + ",".join(str(size or "_") for size in self.vmap) + "}" if self.vmap else text

    @classmethod
    def parse(cls, text: str) -> "ArraySpec":
        """Reads the text form back.

        Raises:
          FormatError: if the text is not of that form.
        """
        match = _TEXT.fullmatch(text) if len(text) < 1000 else None
        try:
            if match is None:
                raise ValueError(text)
            shape = tuple(int(n) for n in match[2].split(",")) if match[2] else ()
            vmap = tuple(0 if n == "_" else int(n) for n in match[3].split(",")) if match[3] else ()
        except ValueError as error:
            raise errors.FormatError(f"array must read like f32[8,128], got {text[:60]!r}") from error
        return cls(shape, dtype_from_name(match[1]), vmap)


def is_array(value: Any) -> bool:
    """Whether a value counts as an array: a JAX or numpy array, a tracer, or an abstract array."""
    return isinstance(value, (jax.Array, np.ndarray, ArraySpec, jax.ShapeDtypeStruct))


def spec_of(value: Any) -> ArraySpec:
    """Returns the spec of an array; specs are returned as they are."""
    if isinstance(value, ArraySpec):
        return value
    return ArraySpec(tuple(value.shape), jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))


def abstract(tree: Any) -> Any:
    """Replaces each array of a pytree by its spec."""
    return jax.tree.map(lambda x: spec_of(x) if is_array(x) else x, tree)


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the mesh axes of a surrounding `shard_map` that an array varies over; JAX has renamed the attribute."""
    aval = jax.typeof(array)
    manual = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def varying_over(array: Any, axes: frozenset[str]) -> Any:
    """Marks an array as varying over mesh axes, beside those that it varies over already."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def without_unit_axes(specs: list[ArraySpec]) -> list[ArraySpec]:
    """Drops the vmap levels that batch nothing or have size one: they change no program worth tuning apart."""
    levels = max((len(spec.vmap) for spec in specs), default=0)
    keep = [i for i in range(levels) if any(i < len(spec.vmap) and spec.vmap[i] > 1 for spec in specs)]
    return [
        dataclasses.replace(spec, vmap=tuple(spec.vmap[i] if i < len(spec.vmap) else 0 for i in keep)) for spec in specs
    ]
