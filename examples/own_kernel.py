"""An op of your own: a running sum along rows, by matrix products over blocks.

python examples/own_kernel.py
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

import tokamax


@dataclasses.dataclass(frozen=True)
class Config:
    """How long a block is; None for `jnp.cumsum` over the whole row."""

    block: int | None


@dataclasses.dataclass(frozen=True)
class RunningSum(tokamax.Op):
    """`out[i, j] = sum(x[i, :j + 1])`.

    Sums inside a block are a product with a triangle of ones; then comes what all blocks before it sum up to.
    """

    config_cls = Config

    def _fwd(self, x, *, return_residuals, config):
        if config.block is None:
            return jnp.cumsum(x, axis=-1), None
        m, n = x.shape
        triangle = jnp.triu(jnp.ones((config.block, config.block), x.dtype))
        inside = x.reshape(m, n // config.block, config.block) @ triangle
        total = inside[..., -1]
        before = jnp.cumsum(total, axis=-1) - total
        return (inside + before[..., None]).reshape(m, n), None

    def _get_autotuning_configs(self, ba):
        n = ba.abstract["x"].shape[1]
        return {Config(None), *(Config(block) for block in (8, 16, 32, 64, 128, 256, 512) if n % block == 0)}

    def _get_heuristics_config(self, ba):
        return Config(None)


def main(argv=None):
    """Runs the example; returns how many times faster a shape that was tuned became."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="rows of the smallest shape")
    parser.add_argument("--length", type=int, default=1024, help="length of its rows")
    args = parser.parse_args(argv)

    def bound(rows, length):
        return RunningSum.bind(jax.ShapeDtypeStruct((rows, length), jnp.float32))

    # Tune some shapes, and learn from all that was measured on the way.
    tuned = [bound(args.rows * r, args.length * n) for r in (1, 2) for n in (1, 2, 3, 4)]
    result = tokamax.autotune(tuned).fit()
    print(result.summary())

    # Inside the result, tuned shapes run with what was measured and others with what is predicted.
    with result:
        print(f"\n{tokamax.explain([tuned[-1], bound(args.rows * 3 // 2, args.length * 2)])}")

    # `benchmark` compiles a function of arrays, warms up and times it.
    before_ms = tokamax.benchmark(*tokamax.standardize_function(tuned[-1])).median_ms
    with result:
        after_ms = tokamax.benchmark(*tokamax.standardize_function(tuned[-1])).median_ms
    print(f"\n{tuned[-1]!r} took {before_ms:.2f} ms before, {after_ms:.2f} ms after: ratio {before_ms / after_ms:.2f}")
    return before_ms / after_ms


if __name__ == "__main__":
    main()
