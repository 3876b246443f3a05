"""Ragged dot shapes to measure: expert layers of known mixtures, scaled down for a CPU."""

import jax
import jax.numpy as jnp

import tokamax

F32, BF16 = jnp.float32, jnp.bfloat16

# rows (tokens times experts per token), inputs, outputs, experts, dtype
SHAPES = (
    (64, 256, 512, 8, F32),  # Mixtral-like: few large experts
    (128, 256, 512, 8, F32),
    (256, 256, 896, 8, F32),
    (512, 256, 896, 8, F32),
    (1024, 256, 896, 8, F32),
    (512, 896, 256, 8, F32),
    (300, 512, 1024, 8, F32),
    (1000, 384, 384, 8, F32),
    (2048, 256, 256, 8, F32),
    (4096, 128, 256, 8, F32),
    (77, 512, 512, 8, F32),
    (150, 768, 512, 4, F32),
    (640, 512, 768, 4, F32),
    (1536, 384, 512, 4, F32),
    (3000, 256, 384, 4, F32),
    (700, 640, 640, 2, F32),
    (2000, 512, 512, 2, F32),
    (96, 1024, 1024, 2, F32),
    (128, 256, 128, 64, F32),  # DeepSeek-like: many small experts
    (384, 256, 176, 64, F32),
    (768, 128, 176, 64, F32),
    (1536, 128, 128, 64, F32),
    (3000, 128, 128, 64, F32),
    (512, 176, 256, 64, F32),
    (100, 512, 176, 32, F32),
    (256, 384, 192, 32, F32),
    (600, 256, 192, 32, F32),
    (1200, 192, 256, 32, F32),
    (2400, 128, 192, 32, F32),
    (64, 512, 384, 16, F32),  # Qwen-like
    (200, 512, 384, 16, F32),
    (450, 384, 512, 16, F32),
    (900, 256, 384, 16, F32),
    (1800, 256, 256, 16, F32),
    (4000, 128, 192, 16, F32),
    (333, 320, 448, 16, F32),
    (1111, 200, 300, 12, F32),
    (513, 129, 257, 10, F32),
    (256, 256, 512, 8, BF16),
    (1024, 256, 512, 8, BF16),
    (384, 256, 176, 32, BF16),
    (1500, 128, 192, 32, BF16),
    (600, 512, 512, 4, BF16),
    (2000, 256, 256, 4, BF16),
)


def bound_arguments() -> list[tokamax.BoundArguments]:
    """Returns one call per shape."""
    bound = []
    for m, k, n, groups, dtype in SHAPES:
        lhs, rhs = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((groups, k, n), dtype)
        bound.append(tokamax.XlaChunkedRaggedDot.bind(lhs, rhs, jax.ShapeDtypeStruct((groups,), jnp.int32)))
    return bound
