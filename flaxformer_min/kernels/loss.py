"""Parts of the loss over a vocabulary (section 5.4), whose logits fill most of the memory."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxformer_min.kernels.backend import backend

CPU_CHUNK = 512
"""Tokens whose logits are in memory at a time on a CPU, where they stay in its cache."""

MOST_LOGITS = 1 << 27
"""Most logits in memory at a time on an accelerator."""


def logit_of(logits: Float[Array, " vocab"], label: Int[Array, ""]) -> Float[Array, ""]:
    """Return `logits[label]`, as a sum over the vocabulary.

    The gradient of indexing is a scatter, which a TPU runs as a loop over the tokens: 30.0 instead
    of 2.95 ms for the loss of a step of the base model, by the compiler's estimate for a v5e. On a
    CPU both take as long.
    """
    numbers = jnp.arange(logits.size, dtype=label.dtype)
    return jnp.where(numbers == label, logits, 0.0).sum()


def chunk_count(tokens: int, logits_per_token: int) -> int:
    """Return into how many chunks of one size to divide the tokens for the loss.

    Each chunk costs an accelerator a pass over the gradient of the output projection, 0.1 ms of
    some 35 ms on an H200, so it gets few of them.

    >>> chunk_count(3 * CPU_CHUNK, logits_per_token=8000)
    3
    """
    if backend() == "cpu":
        chunks = max(tokens // CPU_CHUNK, 1)
        while tokens % chunks:
            chunks -= 1
        return chunks
    chunks = max(-(-tokens * logits_per_token // MOST_LOGITS), 1)
    while tokens % chunks:
        chunks += 1
    return chunks
