"""Language-model heads to measure: hidden widths and vocabularies of known models, scaled down for a CPU."""

import jax
import jax.numpy as jnp

import tokamax

F32, BF16 = jnp.float32, jnp.bfloat16

# tokens, hidden width, vocabulary, dtype
SHAPES = (
    (32, 128, 1000, F32),
    (128, 128, 5000, F32),
    (512, 128, 8192, F32),
    (2048, 128, 2513, F32),
    (1024, 128, 10000, F32),
    (256, 128, 32000, F32),  # Llama 2's vocabulary
    (64, 192, 30522, F32),  # BERT's
    (200, 192, 30522, F32),
    (32, 256, 50257, F32),  # GPT-2's
    (96, 256, 50257, F32),
    (128, 256, 32000, F32),
    (300, 256, 16000, F32),
    (512, 256, 8192, F32),
    (1000, 256, 4096, F32),
    (2048, 256, 1024, F32),
    (777, 256, 7777, F32),
    (256, 256, 8192, F32),
    (1536, 256, 2048, F32),
    (64, 384, 25600, F32),
    (256, 384, 12569, F32),
    (700, 384, 5000, F32),
    (1024, 384, 3000, F32),
    (48, 512, 32768, F32),
    (100, 512, 16384, F32),
    (256, 512, 8192, F32),
    (512, 512, 7121, F32),
    (900, 512, 2560, F32),
    (128, 512, 12800, F32),
    (2000, 512, 1000, F32),
    (32, 768, 30522, F32),
    (64, 768, 16000, F32),
    (197, 768, 8000, F32),
    (512, 768, 4000, F32),
    (1024, 768, 1500, F32),
    (32, 1024, 16384, F32),
    (128, 1024, 8192, F32),
    (384, 1024, 4096, F32),
    (800, 1024, 2000, F32),
    (128, 256, 16000, BF16),
    (512, 256, 8192, BF16),
    (1024, 128, 5000, BF16),
    (64, 512, 16384, BF16),
    (300, 512, 7121, BF16),
    (256, 768, 4096, BF16),
    # More, in between.
    (48, 128, 16000, F32),
    (384, 128, 12000, F32),
    (900, 128, 6000, F32),
    (1536, 128, 3500, F32),
    (96, 192, 20000, F32),
    (640, 192, 9000, F32),
    (1280, 192, 4000, F32),
    (64, 256, 40000, F32),
    (192, 256, 24000, F32),
    (400, 256, 12000, F32),
    (850, 256, 6000, F32),
    (1400, 256, 3000, F32),
    (100, 384, 18000, F32),
    (350, 384, 9000, F32),
    (1200, 384, 2200, F32),
    (72, 512, 24000, F32),
    (200, 512, 10000, F32),
    (640, 512, 5000, F32),
    (1500, 512, 1500, F32),
    (96, 768, 12000, F32),
    (300, 768, 6000, F32),
    (700, 768, 2500, F32),
    (200, 1024, 6000, F32),
    (560, 1024, 3000, F32),
    (200, 256, 24000, BF16),
    (700, 256, 5000, BF16),
    (128, 512, 12000, BF16),
    (400, 768, 3000, BF16),
)


def bound_arguments() -> list[tokamax.BoundArguments]:
    """Returns one call per shape."""
    bound = []
    for tokens, hidden, vocabulary, dtype in SHAPES:
        x, weights = jax.ShapeDtypeStruct((tokens, hidden), dtype), jax.ShapeDtypeStruct((hidden, vocabulary), dtype)
        labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        bound.append(tokamax.XlaChunkedLinearSoftmaxCrossEntropyLoss.bind(x, labels, weights))
    return bound
