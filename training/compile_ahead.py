"""Compiles the ops for TPU with the real compiler, for TPUs that are not here: do defaults and allowed configs compile?

    pip install libtpu                                             # its version must fit that of jaxlib
    python training/compile_ahead.py --device v5e --device v6e     # default: v5e, v6e and 7x
    python training/compile_ahead.py --samples 4 --json

For each op, shape and device the default and a seeded sample of the whole space are compiled, also of what
`_is_feasible` refuses. The table counts, by op and device: those that compile, those that both refuse, those that the
compiler refuses though the rule allows them, and those that the rule refuses though they compile (there should be
none). It exits with 1 if a default does not compile. Nothing runs, so this says nothing of speed or numbers. The
committed output stands in `training/results/compile_ahead.txt`.
"""

import argparse
import collections
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

# Without these libtpu asks the network which TPU this is, and keeps a second process out.
os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import tokamax
from tokamax._src.tables import format_table

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
F32, BF16 = jnp.float32, jnp.bfloat16

# rows, inputs, outputs, experts, dtype
RAGGED = (
    (4096, 2880, 2880, 32, BF16),
    (8192, 2048, 1408, 64, BF16),
    (300, 200, 136, 5, BF16),
    (4096, 2048, 2048, 8, F32),
)
# queries, keys, heads, heads of keys, width, dtype, options
ATTENTION = (
    (4096, 4096, 32, 8, 128, BF16, {"is_causal": True}),
    (1500, 1500, 8, 8, 80, BF16, {"local_window_size": (512, 0)}),
    (8192, 8192, 8, 1, 256, BF16, {"is_causal": True, "logits_soft_cap": 50.0}),
    (1000, 700, 4, 4, 128, F32, {}),
)


def calls() -> Iterator[tokamax.BoundArguments]:
    """Yields the bound arguments to compile, forward and gradients."""
    array = jax.ShapeDtypeStruct
    for m, k, n, groups, dtype in RAGGED:
        sizes = array((groups,), jnp.int32)
        ba = tokamax.PallasMosaicTpuRaggedDot.bind(array((m, k), dtype), array((groups, k, n), dtype), sizes)
        yield from (ba, *ba.op.bind_vjp(ba))
    for queries, keys, heads, kv_heads, width, dtype, options in ATTENTION:
        key = array((1, keys, kv_heads, width), dtype)
        ba = tokamax.PallasMosaicTpuAttention.bind(array((1, queries, heads, width), dtype), key, key, **options)
        yield from (ba, ba.op.bind_vjp(ba))


def compiles(ba: tokamax.BoundArguments, config: Any, device: Any) -> bool:
    """Whether the compiler takes a config."""
    f, arrays = ba.as_function(config)
    place = jax.sharding.SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in arrays]
    try:
        jax.jit(f).lower(placed).compile()
    except Exception as error:
        print(f"{device.device_kind} {ba!r} {config}: {str(error)[:100]!r}", file=sys.stderr)
        return False
    return True


def verdicts(ba: tokamax.BoundArguments, device: Any, samples: int) -> Iterator[str]:
    """Yields what becomes of the default and of a sample of the space of bound arguments."""
    default = ba.default_config
    allowed = ba.op._is_feasible(ba, default)
    yield "default compiles" if allowed and compiles(ba, default, device) else "default refused"
    space = sorted(ba.op._get_autotuning_configs(ba), key=repr)
    for config in random.Random(0).sample(space, min(samples, len(space))):
        allowed, taken = ba.op._is_feasible(ba, config), compiles(ba, config, device)
        if taken:
            yield "compiles" if allowed else "refused by rule alone"
        else:
            yield "refused by compiler alone" if allowed else "refused by both"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="append", choices=tuple(TOPOLOGIES), help="default: v5e, v6e, 7x")
    parser.add_argument("--samples", type=int, default=3, help="configs of each shape beside the default (default: 3)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for name in args.device or ("v5e", "v6e", "7x"):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name])
        device = topology.devices[0]
        with tokamax.config.cross_compile(device.device_kind):
            for ba in calls():
                place, start = (ba.op.registered_name(), device.device_kind), time.monotonic()
                found.setdefault(place, collections.Counter()).update(verdicts(ba, device, args.samples))
                seconds[place] += time.monotonic() - start
    kinds = ("default compiles", "default refused", "compiles", "refused by both", "refused by compiler alone")
    kinds = (*kinds, "refused by rule alone")
    rows = [
        (op, kind, *(str(count[k]) for k in kinds), f"{seconds[op, kind]:.0f} s") for (op, kind), count in found.items()
    ]
    if args.json:
        data = [dict(zip(("op", "device_kind", *kinds), row, strict=False)) for row in rows]
        print(json.dumps(data, indent=1))
    else:
        print(format_table([("op", "device", *kinds, "compiling"), *rows]))
    return 1 if any(count["default refused"] for count in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
