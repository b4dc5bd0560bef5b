"""Parts of the loss over a vocabulary (section 5.4), whose logits fill most of the memory."""

from typing import Any

import jax
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


def stored(logits: Float[Array, "*batch vocab"], dtype: Any) -> Float[Array, "*batch vocab"]:
    """Return logits as they are stored for the gradient: on an accelerator in the layers' `dtype`.

    Writing and reading them in float32 takes longer than computing them, and the products of the
    backward pass round them in any case; sums over them are of float32. XLA for an NVIDIA GPU reads
    an array once for several sums over it, but not if a product writes it: hence the barrier. A
    training step of the base model moves 80.5 instead of 91.3 GB by XLA's count for an H100.
    """
    if backend() == "cpu":
        return logits
    logits = logits.astype(dtype)
    if backend() != "cuda":
        return logits
    flat = jax.lax.optimization_barrier(logits.reshape(-1, logits.shape[-1]))
    return flat.reshape(logits.shape)
