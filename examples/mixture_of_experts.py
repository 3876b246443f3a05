"""A layer of experts, with gradients: `tokamax.ragged_dot` multiplies each expert's tokens with its own weights.

python examples/mixture_of_experts.py
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import tokamax


def init(key, width, hidden, experts):
    """Returns the weights of the router and of the experts."""
    router, up, down = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(router, (width, experts)) / width**0.5,
        "up": jax.random.normal(up, (experts, width, hidden)) / width**0.5,
        "down": jax.random.normal(down, (experts, hidden, width)) / hidden**0.5,
    }


def layer(params, x):
    """Sends each token to the expert that the router prefers, `[tokens, width]` to the same."""
    scores = jax.nn.softmax(x @ params["router"])
    expert = jnp.argmax(scores, axis=-1)
    order = jnp.argsort(expert)  # Tokens of one expert lie together.
    sizes = jnp.bincount(expert, length=scores.shape[-1]).astype(jnp.int32)
    hidden = jax.nn.silu(tokamax.ragged_dot(x[order], params["up"], sizes))
    out = tokamax.ragged_dot(hidden, params["down"], sizes)
    return jnp.zeros_like(x).at[order].set(out) * jnp.max(scores, axis=-1, keepdims=True)


def loss(params, x):
    """Something to differentiate."""
    return jnp.mean((layer(params, x) - x) ** 2)


def main(argv=None):
    """Runs the example; returns how many times faster the gradient became."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="number of tokens")
    parser.add_argument("--width", type=int, default=192, help="width of a token")
    parser.add_argument("--experts", type=int, default=12, help="number of experts")
    parser.add_argument("--budget", type=int, default=12, help="configs to measure of each op")
    args = parser.parse_args(argv)

    params = init(jax.random.key(0), args.width, 2 * args.width, args.experts)
    x = jax.random.normal(jax.random.key(1), (args.tokens, args.width))
    gradient = jax.jit(jax.value_and_grad(loss))

    def gradient_ms():
        start = time.perf_counter()
        jax.block_until_ready(gradient(params, x))
        return 1e3 * (time.perf_counter() - start)

    with tokamax.config.cost_model("off"):  # To compare with the ops' defaults, not with what other shapes taught.
        result = tokamax.autotune(gradient, params, x, search="model", budget=args.budget)
        print(result.summary())
        gradient_ms()  # Compiles.
        with result:
            gradient_ms()  # Compiles again, since the configs differ.
        before, after = [], []
        for _ in range(5):  # In turns: what slows the machine for a while slows both.
            before.append(gradient_ms())
            with result:
                after.append(gradient_ms())
    before_ms, after_ms = statistics.median(before), statistics.median(after)
    print(f"\nthe gradient took {before_ms:.1f} ms before, {after_ms:.1f} ms after: ratio {before_ms / after_ms:.2f}")
    return before_ms / after_ms


if __name__ == "__main__":
    main()
