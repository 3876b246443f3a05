"""What is known of TPU generations: the one table that rules, estimates and ahead-of-time compiling read.

Names are JAX's `device_kind`. A device is what JAX calls one: a whole chip of v4 and v5p, whose two TensorCores then
work together, and half a chip of 7x. Figures are of one TensorCore, since a kernel whose grid has a dynamic size, as
that of ragged dot, runs on one of them; bandwidth and size of the HBM are those of the device.

Sources:
- Peak rates, HBM: the system architecture pages of Google Cloud TPU (v4, v5e, v5p, v6e, TPU7x).
- VMEM, side of the MXU, cores: `jax.experimental.pallas.tpu.get_tpu_info_for_chip` of JAX 0.10.2. The compiler
  (libtpu 0.0.52) names the same sizes of the VMEM when it refuses a kernel.
- What a kernel may use of the VMEM without asking for more: the limits in the same refusals; a block of 0.1 MiB more
  than it is refused, one of 0.1 MiB less is not.
- Clock: that at which the MXUs reach the peak rate, `peak / (2 side² MXUs)`, with four MXUs a core. It agrees with
  the clocks published of v4 (1.05 GHz), v5e (1.5 GHz) and v5p (1.75 GHz). Where a generation has two MXUs that take
  two rows a cycle, this is the same rate.
"""

import dataclasses
import types
from collections.abc import Mapping

_MIB, _GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class TpuFacts:
    """What is known of one kind of TPU.

    Attributes:
      kind: JAX's `device_kind`.
      name: the name in the documentation, such as `v5e`.
      cores: TensorCores of a device.
      clock_ghz: clock of a TensorCore.
      mxu: rows and columns of a matrix unit.
      mxus: matrix units of a TensorCore.
      peak_tflops: dtype name -> peak rate of a TensorCore, in 1e12 operations a second; 0 where it has none.
      vmem_bytes: vector memory of a TensorCore.
      kernel_vmem_bytes: what a kernel may use of it without asking for more.
      hbm_bytes: memory of the device.
      hbm_gb_s: bandwidth of that, in 1e9 bytes a second.
      topology: the smallest topology that the compiler knows, see `tokamax.aot`.
      accelerator: a name for `TPU_ACCELERATOR_TYPE`.
    """

    kind: str
    name: str
    cores: int
    clock_ghz: float
    mxu: int
    mxus: int
    peak_tflops: Mapping[str, float]
    vmem_bytes: int
    kernel_vmem_bytes: int
    hbm_bytes: int
    hbm_gb_s: float
    topology: str
    accelerator: str

    @property
    def native_tile(self) -> tuple[int, int]:
        """Sublanes and lanes of a vector register of 32-bit numbers; 16-bit blocks take twice the sublanes."""
        return 8, 128

    @property
    def macs_per_cycle(self) -> int:
        """Products of bf16 that a TensorCore adds up in one cycle."""
        return self.mxus * self.mxu**2


def _peaks(bfloat16: float, int8: float, float8: float) -> Mapping[str, float]:
    # Products of float32 at the default precision take one pass of bfloat16.
    return types.MappingProxyType({"bfloat16": bfloat16, "float32": bfloat16, "int8": int8, "float8_e5m2": float8})


_ALL = (
    TpuFacts(
        kind="TPU v4",
        name="v4",
        cores=2,
        clock_ghz=1.05,
        mxu=128,
        mxus=4,
        peak_tflops=_peaks(137.5, 0, 0),
        vmem_bytes=16 * _MIB,
        kernel_vmem_bytes=16 * _MIB,
        hbm_bytes=32 * _GIB,
        hbm_gb_s=1228,
        topology="v4:2x2x1",
        accelerator="v4-8",
    ),
    TpuFacts(
        kind="TPU v5 lite",
        name="v5e",
        cores=1,
        clock_ghz=1.5,
        mxu=128,
        mxus=4,
        peak_tflops=_peaks(197, 394, 0),
        vmem_bytes=128 * _MIB,
        kernel_vmem_bytes=16 * _MIB,
        hbm_bytes=16 * _GIB,
        hbm_gb_s=819,
        topology="v5e:2x2",
        accelerator="v5litepod-4",
    ),
    TpuFacts(
        kind="TPU v5",
        name="v5p",
        cores=2,
        clock_ghz=1.75,
        mxu=128,
        mxus=4,
        peak_tflops=_peaks(229.5, 459, 0),
        vmem_bytes=64 * _MIB,
        kernel_vmem_bytes=16 * _MIB,
        hbm_bytes=95 * _GIB,
        hbm_gb_s=2765,
        topology="v5p:2x2x1",
        accelerator="v5p-8",
    ),
    TpuFacts(
        kind="TPU v6 lite",
        name="v6e",
        cores=1,
        clock_ghz=1.75,
        mxu=256,
        mxus=4,
        peak_tflops=_peaks(918, 1836, 918),
        vmem_bytes=128 * _MIB,
        kernel_vmem_bytes=32 * _MIB,
        hbm_bytes=32 * _GIB,
        hbm_gb_s=1640,
        topology="v6e:2x2",
        accelerator="v6e-4",
    ),
    TpuFacts(
        kind="TPU7x",
        name="7x",
        cores=1,
        clock_ghz=2.2,
        mxu=256,
        mxus=4,
        peak_tflops=_peaks(1153.5, 0, 2307),
        vmem_bytes=64 * _MIB,
        kernel_vmem_bytes=32 * _MIB,
        hbm_bytes=96 * _GIB,
        hbm_gb_s=3690,
        topology="tpu7x:2x2x1",
        accelerator="tpu7x-8",
    ),
)

TPUS: Mapping[str, TpuFacts] = types.MappingProxyType({tpu.kind: tpu for tpu in _ALL})
"""Device kind -> facts."""


def of(kind: str) -> TpuFacts | None:
    """Returns the facts of a device kind, or of a generation's short name such as `v5e`; None if it is not known."""
    return TPUS.get(kind) or next((tpu for tpu in _ALL if tpu.name == kind), None)
