"""Compiles the ops for TPU with the real compiler, for TPUs that are not here: do defaults and allowed configs compile?

    pip install 'tokamax[aot-tpu]'
    python training/compile_ahead.py --device v5e --device v6e     # default: v5e, v6e and 7x
    python training/compile_ahead.py --samples 4 --json

For each op, shape and device the default and a seeded sample of the whole space are compiled, also of what
`_is_feasible` refuses. The table counts, by op and device: those that compile, those that both refuse, those that the
compiler refuses though the rule allows them, and those that the rule refuses though they compile (there should be
none). It exits with 1 if a default does not compile. Nothing runs, so this says nothing of speed or numbers. `seconds`
is what the compiler took; what the private cache knows is not compiled again. The committed output stands in
`training/results/compile_ahead.txt`.
"""

import argparse
import collections
import json
import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Else JAX looks for a TPU here, since its library is installed.

import jax
import jax.numpy as jnp

import tokamax
from tokamax._src import tpus
from tokamax._src.tables import format_table

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


def counted(ba: tokamax.BoundArguments, checker: tokamax.aot.Checker, samples: int) -> Iterator[tuple[str, float]]:
    """Yields what becomes of the default and of a sample of the space of bound arguments, and the seconds it took."""
    default, space = ba.default_config, sorted(ba.op._get_autotuning_configs(ba), key=repr)
    configs = [default, *random.Random(0).sample(space, min(samples, len(space)))]
    for i, (config, verdict) in enumerate(checker.verdicts(ba, configs)):
        allowed = ba.op._is_feasible(ba, config)
        if not verdict.compiles:
            print(f"{checker.facts.kind} {ba!r} {config}: {verdict.kind}: {verdict.reason[:100]}", file=sys.stderr)
        if i == 0:
            yield "default compiles" if allowed and verdict.compiles else "default refused", verdict.seconds
        elif verdict.compiles:
            yield "compiles" if allowed else "refused by rule alone", verdict.seconds
        else:
            yield "refused by compiler alone" if allowed else "refused by both", verdict.seconds


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", action="append", choices=[tpu.name for tpu in tpus.TPUS.values()], help="default: v5e, v6e, 7x"
    )
    parser.add_argument("--samples", type=int, default=3, help="configs of each shape beside the default (default: 3)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for name in args.device or ("v5e", "v6e", "7x"):
        with tokamax.aot.Checker(name) as checker, tokamax.config.cross_compile(checker.facts.kind):
            for ba in calls():
                place = ba.op.registered_name(), checker.facts.kind
                for what, took in counted(ba, checker, args.samples):
                    found.setdefault(place, collections.Counter())[what] += 1
                    seconds[place] += took
    kinds = ("default compiles", "default refused", "compiles", "refused by both", "refused by compiler alone")
    kinds = (*kinds, "refused by rule alone")
    rows = [
        (op, kind, *(str(count[k]) for k in kinds), f"{seconds[op, kind]:.0f}") for (op, kind), count in found.items()
    ]
    if args.json:
        data = [dict(zip(("op", "device_kind", *kinds), row, strict=False)) for row in rows]
        print(json.dumps(data, indent=1))
    else:
        print(format_table([("op", "device", *kinds, "seconds"), *rows]))
    return 1 if any(count["default refused"] for count in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
