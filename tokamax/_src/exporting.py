"""What `jax.export` must be told to write programs with kernels of this library.

A Pallas kernel is a custom call, and `jax.export` writes only those that JAX itself promises to keep readable. Those of
Pallas are readable for as long as their own compatibility promise says (half a year), and only on the kind of device
that they were made for.
"""

from jax import export

_MOSAIC_TPU = "tpu_custom_call"

DISABLE_JAX_EXPORT_CHECKS: tuple[export.DisabledSafetyCheck, ...] = (
    export.DisabledSafetyCheck.custom_call(_MOSAIC_TPU),
)
"""For `jax.export.export(f, disabled_checks=...)`: the custom calls that the kernels here are made of."""
