"""Attention shapes to measure: layers of known model families, cut to one or few sequences for a CPU."""

import jax
import jax.numpy as jnp

import tokamax

F32, BF16 = jnp.float32, jnp.bfloat16

# batch, queries, keys, query heads, key heads, head width, dtype, further arguments
SHAPES = (
    (1, 128, 128, 12, 12, 64, F32, {}),  # BERT base
    (4, 128, 128, 12, 12, 64, F32, {}),
    (1, 384, 384, 12, 12, 64, F32, {}),
    (2, 512, 512, 12, 12, 64, F32, {}),
    (1, 256, 256, 12, 12, 64, F32, {}),
    (1, 512, 512, 16, 16, 64, F32, {}),  # BERT large
    (1, 320, 320, 16, 16, 64, F32, {}),
    (1, 640, 640, 8, 8, 64, F32, {}),
    (1, 900, 900, 6, 6, 64, F32, {}),
    (2, 320, 320, 8, 8, 64, F32, {}),
    (1, 197, 197, 12, 12, 64, F32, {}),  # ViT B/16 at 224
    (4, 197, 197, 6, 6, 64, F32, {}),  # ViT S/16
    (1, 577, 577, 12, 12, 64, F32, {}),  # ViT B/16 at 384
    (1, 257, 257, 16, 16, 80, F32, {}),  # ViT H/14
    (1, 785, 785, 3, 3, 64, F32, {}),  # DeiT tiny, small patches
    (1, 1500, 1500, 6, 6, 64, F32, {}),  # Whisper tiny encoder
    (1, 448, 1500, 6, 6, 64, F32, {}),  # Whisper cross attention
    (1, 300, 1000, 8, 8, 64, F32, {}),
    (1, 448, 448, 8, 8, 64, F32, {"is_causal": True}),  # Whisper base decoder
    (1, 1024, 1024, 12, 12, 64, F32, {"is_causal": True}),  # GPT-2
    (1, 768, 768, 12, 12, 64, F32, {"is_causal": True}),
    (1, 640, 640, 12, 12, 64, F32, {"is_causal": True}),
    (1, 1280, 1280, 6, 6, 64, F32, {"is_causal": True}),
    (2, 300, 300, 12, 12, 64, F32, {"is_causal": True}),
    (1, 1536, 1536, 4, 4, 64, F32, {"is_causal": True}),
    (1, 2048, 2048, 2, 2, 64, F32, {"is_causal": True}),
    (1, 1100, 1100, 4, 4, 64, F32, {}),
    (1, 512, 512, 8, 1, 128, F32, {"is_causal": True}),  # Llama-like, 8 query heads a key head
    (1, 1024, 1024, 8, 1, 128, F32, {"is_causal": True}),
    (1, 900, 900, 8, 2, 128, F32, {"is_causal": True}),
    (1, 700, 700, 8, 2, 128, F32, {"is_causal": True}),
    (1, 640, 640, 14, 2, 64, F32, {"is_causal": True}),  # Qwen2 0.5B
    (1, 333, 333, 16, 8, 128, F32, {"is_causal": True}),
    (1, 512, 512, 4, 1, 256, F32, {"is_causal": True}),  # Gemma 3 1B
    (1, 800, 800, 4, 1, 256, F32, {"is_causal": True}),
    (1, 1024, 1024, 4, 1, 256, F32, {"is_causal": True, "local_window_size": (511, 0)}),
    (1, 1536, 1536, 4, 1, 128, F32, {"is_causal": True, "local_window_size": (255, 0)}),  # Mistral-like window
    (1, 800, 800, 8, 4, 64, F32, {"is_causal": True, "local_window_size": (127, 0)}),
    (1, 1200, 1200, 8, 4, 64, F32, {"is_causal": True, "local_window_size": (127, 0)}),
    (1, 1024, 1024, 4, 1, 128, F32, {"is_causal": True, "local_window_size": (511, 0)}),
    (1, 640, 640, 8, 4, 64, F32, {"is_causal": True, "local_window_size": (255, 0)}),
    (1, 1536, 1536, 4, 4, 64, F32, {"is_causal": True, "local_window_size": (127, 0)}),
    (1, 900, 900, 4, 1, 256, F32, {"is_causal": True, "local_window_size": (255, 0)}),
    (1, 512, 512, 8, 4, 128, F32, {"is_causal": True, "logits_soft_cap": 50.0}),  # Gemma 2
    (1, 768, 768, 8, 4, 128, F32, {"is_causal": True, "logits_soft_cap": 50.0}),
    (1, 1024, 1024, 8, 4, 128, F32, {"is_causal": True, "logits_soft_cap": 50.0}),
    (1, 384, 384, 8, 4, 128, F32, {"is_causal": True, "logits_soft_cap": 50.0}),
    (1, 640, 640, 4, 2, 256, F32, {"is_causal": True, "logits_soft_cap": 50.0}),
    (1, 1, 2048, 8, 1, 128, F32, {}),  # decoding
    (4, 1, 1024, 8, 2, 128, F32, {}),
    (8, 1, 777, 12, 12, 64, F32, {}),
    (1, 1, 8192, 8, 1, 128, F32, {}),
    (2, 1, 3000, 8, 1, 128, F32, {}),
    (1, 1, 512, 8, 1, 128, F32, {}),
    (2, 1, 2048, 8, 2, 128, F32, {}),
    (1, 1, 4096, 8, 1, 128, F32, {}),
    (4, 1, 2048, 8, 1, 128, F32, {}),
    (8, 1, 512, 12, 12, 64, F32, {}),
    (4, 1, 1536, 8, 8, 64, F32, {}),
    (1, 1, 3072, 4, 4, 64, F32, {}),
    (16, 1, 300, 8, 2, 64, F32, {}),
    (1, 16, 2048, 8, 1, 128, F32, {}),  # speculative decoding
    (1, 8, 1536, 8, 2, 128, F32, {}),
    (1, 32, 3072, 8, 2, 64, F32, {}),
    (1, 16, 4096, 4, 4, 64, F32, {}),
    (1, 64, 3000, 8, 2, 64, F32, {}),
    (1, 1024, 77, 8, 8, 40, F32, {}),  # diffusion cross attention
    (2, 576, 77, 8, 8, 40, F32, {}),
    (1, 1024, 77, 8, 8, 64, F32, {}),
    (2, 256, 77, 8, 8, 160, F32, {}),
    (1, 576, 77, 5, 5, 64, F32, {}),
    (1, 1024, 1024, 8, 8, 40, F32, {}),  # diffusion self attention at 32 x 32
    (2, 576, 576, 8, 8, 40, F32, {}),
    (2, 256, 256, 8, 8, 160, F32, {}),  # and at 16 x 16
    (2, 144, 144, 8, 8, 160, F32, {}),
    (1, 400, 400, 8, 8, 160, F32, {}),
    (16, 64, 64, 8, 8, 32, F32, {}),  # Swin-like windows
    (8, 100, 100, 8, 8, 32, F32, {}),
    (32, 49, 49, 4, 4, 32, F32, {}),
    (4, 144, 144, 6, 6, 32, F32, {}),
    (4, 256, 256, 4, 4, 32, F32, {}),
    (1, 512, 512, 12, 12, 64, BF16, {}),
    (1, 384, 384, 12, 12, 64, BF16, {}),
    (1, 700, 700, 8, 2, 64, BF16, {"is_causal": True}),
    (1, 1024, 1024, 8, 2, 64, BF16, {"is_causal": True}),
    (1, 197, 197, 12, 12, 64, BF16, {}),
    (1, 16, 2048, 8, 1, 128, BF16, {}),
)


def bound_arguments() -> list[tokamax.BoundArguments]:
    """Returns one call per shape."""
    bound = []
    for batch, queries, keys, heads, kv_heads, width, dtype, more in SHAPES:
        q = jax.ShapeDtypeStruct((batch, queries, heads, width), dtype)
        kv = jax.ShapeDtypeStruct((batch, keys, kv_heads, width), dtype)
        bound.append(tokamax.XlaChunkedDotProductAttention.bind(q, kv, kv, **more))
    return bound
