"""Ragged dot shapes of mixtures of experts that people train and serve, at the sizes of TPUs."""

import jax
import jax.numpy as jnp

import tokamax

# rows (tokens times experts per token), inputs, outputs, experts: both products of the expert layers of ten models.
SHAPES = (
    (8192, 4096, 14336, 8),  # Mixtral 8x7B
    (8192, 14336, 4096, 8),
    (8192, 6144, 16384, 8),  # Mixtral 8x22B
    (8192, 16384, 6144, 8),
    (16384, 6144, 10752, 16),  # DBRX
    (16384, 10752, 6144, 16),
    (4096, 5120, 8192, 16),  # Llama 4 Scout
    (4096, 8192, 5120, 16),
    (16384, 2880, 5760, 32),  # gpt-oss-20b
    (16384, 2880, 2880, 32),
    (16384, 2880, 5760, 128),  # gpt-oss-120b
    (16384, 2880, 2880, 128),
    (24576, 2048, 1408, 64),  # DeepSeek-V2-Lite
    (24576, 1408, 2048, 64),
    (32768, 2048, 1024, 64),  # OLMoE
    (32768, 1024, 2048, 64),
    (32768, 2048, 768, 128),  # Qwen3-30B-A3B
    (32768, 768, 2048, 128),
    (32768, 4096, 1536, 128),  # Qwen3-235B-A22B
    (32768, 1536, 4096, 128),
)


def bound_arguments() -> list[tokamax.BoundArguments]:
    """Returns one forward call per shape, in bf16."""
    array, bound = jax.ShapeDtypeStruct, []
    for m, k, n, groups in SHAPES:
        lhs, rhs = array((m, k), jnp.bfloat16), array((groups, k, n), jnp.bfloat16)
        bound.append(tokamax.PallasMosaicTpuRaggedDot.bind(lhs, rhs, array((groups,), jnp.int32)))
    return bound
