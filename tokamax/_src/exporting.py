"""What `jax.export` may be told to write programs with kernels of this library.

A Pallas kernel is a custom call, and `jax.export` writes only those that it knows to stay readable. It knows that of
Pallas for TPU (seen in JAX 0.10.2 and 0.12.0), so that the list here is needed only where it does not. What was
exported with a kernel runs on the kind of device that it was made for, and on no other.
"""

from jax import export

_MOSAIC_TPU = "tpu_custom_call"

DISABLE_JAX_EXPORT_CHECKS: tuple[export.DisabledSafetyCheck, ...] = (
    export.DisabledSafetyCheck.custom_call(_MOSAIC_TPU),
)
"""For `jax.export.export(f, disabled_checks=...)`: the custom calls that the kernels here are made of."""
