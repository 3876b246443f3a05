"""What ops of Pallas for TPU (Mosaic) share: which blocks the compiler takes, and what they take of the vector memory.

The compiler wants the last two axes of a block to be whole native tiles or the full axis. Blocks that are loaded and
stored are there twice, so that the next one moves while this one is computed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokamax._src import devices, errors, shapes, tpus

LANES = 128
"""Elements of the last axis of a native tile."""

LEAST_KERNEL_VMEM = min(facts.kernel_vmem_bytes for facts in tpus.TPUS.values())
"""What the generation that grants least lets a kernel use of its vector memory, unless it asks for more."""


def supported_on(op: Any, device: Any) -> bool:
    """Whether a device is a TPU; for an op in interpret mode any is. Made for `Op.supported_on`."""
    return op.interpret or device.platform == "tpu"


def kernel_vmem_bytes() -> int:
    """Returns what the device lets a kernel use of its vector memory, unless the kernel asks for more.

    It is less than the memory (128 MiB on v5e and v6e), see `tpus`. On what is no TPU, or unknown, the least of all.
    """
    facts = tpus.of(devices.device_kind())
    return LEAST_KERNEL_VMEM if facts is None else facts.kernel_vmem_bytes


def sublanes(dtype: Any) -> int:
    """Returns the elements of the second last axis of a native tile."""
    return 32 // np.dtype(dtype).itemsize


def is_lane_tile(tile: int, size: int) -> bool:
    """Whether a tile of a last axis is a multiple of the native one, or the full axis."""
    return tile % LANES == 0 or tile == size


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not less than `size`, and at least one."""
    return max(1, math.ceil(size / multiple)) * multiple


def powers_of_two(low: int, high: int) -> list[int]:
    """Returns the doublings of `low` that are not above `high`."""
    return [low << i for i in range(64) if low << i <= high] if low <= high else []


def lane_tiles(size: int) -> set[int]:
    """Returns tiles worth trying for an axis: doublings of the native tile, the axis, and even parts of it."""
    parts = {round_up(math.ceil(size / 2**i), LANES) for i in range(1, 5)}
    return {tile for tile in (*powers_of_two(LANES, size), *parts) if tile < size} | {size}


def padded_bytes(shape: tuple[int, int], dtype: Any) -> int:
    """Returns what a block takes of the vector memory: whole native tiles."""
    rows, columns = round_up(shape[0], sublanes(dtype)), round_up(shape[1], LANES)
    return rows * columns * np.dtype(dtype).itemsize


def canonical_precision(precision: Any, dtypes: tuple[Any, ...]) -> str | None:
    """Returns a precision as the compiler for TPU knows it: None (its default) or `highest`.

    Products of 16-bit floats are exact in any case.

    Raises:
      UnsupportedError: for any other.
    """
    given = precision if isinstance(precision, (tuple, list)) else (precision, precision)
    try:
        names = {_precision_name(item) for item in given}
    except (ValueError, KeyError):
        names = set()
    if all(np.dtype(dtype).itemsize <= 2 for dtype in dtypes) and names:
        return None
    if len(names) != 1 or (name := names.pop()) not in (None, "highest"):
        raise errors.UnsupportedError(
            f"precision must be None, 'default' or 'highest', the same for both sides, for a Mosaic TPU kernel, got "
            f"{precision!r}; use implementation='xla'"
        )
    return name


def passes(precision: Any, dtypes: tuple[Any, ...]) -> int:
    """Returns how many products of bf16 the matrix unit makes for one product of some dtypes.

    At the highest precision numbers of 32 bits are split in three parts, and six products of those are added up.
    """
    return 6 if canonical_precision(precision, dtypes) == "highest" else 1


def _precision_name(precision: Any) -> str | None:
    """Returns `highest` or `high`, or None for the default."""
    if precision is None:
        return None
    name = (precision if isinstance(precision, jax.lax.Precision) else jax.lax.Precision(precision)).name.lower()
    return None if name == "default" else name


def check_placed(*arrays: Any) -> None:
    """Checks that arrays do not lie in a `shard_map` that follows over which mesh axes values vary.

    The wrapped kernels do not say it of their results.

    Raises:
      UnsupportedError: if one does.
    """
    for array in arrays:
        if isinstance(array, jax.Array) and (axes := shapes.varying_axes(array)):
            raise errors.UnsupportedError(
                "jax.shard_map must be called with check_vma=False around a Mosaic TPU kernel, got an array that "
                f"varies over {sorted(axes)}; or use implementation='xla'"
            )


def check_dtypes(**arrays: Any) -> None:
    """Checks that arrays hold bf16 or f32.

    Raises:
      UnsupportedError: if one does not.
    """
    for name, spec in arrays.items():
        if spec.dtype not in (jnp.bfloat16, jnp.float32):
            raise errors.UnsupportedError(
                f"{name} must hold bf16 or f32 for a Mosaic TPU kernel, got {spec}; cast it, or use "
                "implementation='xla'"
            )
