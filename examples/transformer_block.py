"""A training step of a small transformer block: profile, find the ops, tune the slowest, run faster.

    python examples/transformer_block.py

Reading profiles needs `pip install 'tokamax[profile]'`.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

import tokamax


def init(key, width, vocabulary):
    """Returns the parameters of the block, its embedding and its head."""
    keys = jax.random.split(key, 6)
    shapes = {
        "embedding": (vocabulary, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "head": (width, vocabulary),
    }
    return {
        name: jax.random.normal(k, shape) / shape[0] ** 0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x):
    """Scales each token to unit variance."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(params, x, heads):
    """Attention and a feed-forward layer, `[batch, length, width]` to the same."""
    batch, length, width = x.shape
    q, k, v = (
        part.reshape(batch, length, heads, width // heads) for part in jnp.split(norm(x) @ params["qkv"], 3, axis=-1)
    )
    mixed = tokamax.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(batch, length, width) @ params["out"]
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def make_step(heads):
    """Returns a jitted step: `(params, tokens [batch, length]) -> (loss, new params)`."""

    @jax.jit
    def step(params, tokens):
        def loss(params):
            x = block(params, params["embedding"][tokens], heads)
            x, labels = x[:, :-1], tokens[:, 1:]
            return tokamax.linear_softmax_cross_entropy_loss(
                x.reshape(-1, x.shape[-1]), labels.reshape(-1), params["head"], reduction="mean"
            )

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


def main(argv=None):
    """Runs the example; returns how many times faster the step became."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--width", type=int, default=256, help="width of the block")
    parser.add_argument("--vocabulary", type=int, default=8192, help="number of tokens")
    parser.add_argument("--top", type=int, default=4, help="how many ops to tune")
    parser.add_argument("--budget", type=int, default=12, help="configs to measure of each op")
    args = parser.parse_args(argv)

    params = init(jax.random.key(0), args.width, args.vocabulary)
    tokens = jax.random.randint(jax.random.key(1), (1, args.length), 0, args.vocabulary)
    step = make_step(heads=4)

    def step_ms():
        start = time.perf_counter()
        jax.block_until_ready(step(params, tokens))
        return 1e3 * (time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder, tokamax.config.cost_model("off"):
        # 1. Profile some steps. To compare with the ops' defaults, what was learned about other shapes is off.
        step_ms()  # Compiles.
        with jax.profiler.trace(folder):
            for _ in range(3):
                step_ms()

        # 2. Read its ops from the profile, those that took most time first. In a shell: tokamax bound-args FOLDER
        path = pathlib.Path(folder, "bound_args.json")
        subprocess.run([sys.executable, "-m", "tokamax", "bound-args", folder, "--output", str(path)], check=True)
        found = tokamax.autotuning.bound_args_from_json(path)
        assert set(found) == set(tokamax.autotuning.get_bound_args(step, params, tokens)), "the profile lost an op"

        # 3. Tune the first of them. In a shell: tokamax tune bound_args.json --top 4
        result = tokamax.autotune(found[: args.top], search="model", budget=args.budget)
        print(f"\n{result.summary()}\n")

        # 4. Run with what was found, in turns with the defaults: what slows the machine for a while slows both.
        with result:
            print(tokamax.explain(found))
            step_ms()  # Compiles again, since the configs differ.
        before, after = [], []
        for _ in range(5):
            before.append(step_ms())
            with result:
                after.append(step_ms())
    before_ms, after_ms = statistics.median(before), statistics.median(after)
    print(f"\na step took {before_ms:.1f} ms before, {after_ms:.1f} ms after: ratio {before_ms / after_ms:.2f}")
    return before_ms / after_ms


if __name__ == "__main__":
    main()
