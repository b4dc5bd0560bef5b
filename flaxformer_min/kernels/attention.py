"""Equation 1 without all attention weights in memory at a time.

The plain version is `scaled_dot_product_attention` in model/attention.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flaxformer_min.kernels.backend import backend

BLOCK = 128
"""Queries per block."""


def attention_by_blocks(
    attention: Callable[[Array, Array, Array, Array], tuple[Array, Array]],
    query: Float[Array, "batch heads queries d_k"],
    key: Float[Array, "batch heads keys d_k"],
    value: Float[Array, "batch heads keys d_v"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch heads queries d_v"]:
    """Return the output of `attention`, computed block by block.

    Attention weights grow with the square of the row length. Only those of one block are in memory
    at a time, and the backward pass recomputes them (Rabe and Staats 2021). `BLOCK` must divide the
    number of queries.
    """
    parts = query.shape[2] // BLOCK
    queries = jnp.stack(jnp.split(query, parts, axis=2))
    masks = jnp.stack(jnp.split(mask, parts, axis=1))

    @jax.checkpoint
    def of_block(block: tuple[Array, Array]) -> Array:
        return attention(block[0], key, value, block[1])[0]

    return jnp.concatenate(jax.lax.map(of_block, (queries, masks)), axis=2)


def fused_attention(
    query: Float[Array, "batch heads queries d_k"],
    key: Float[Array, "batch heads keys d_k"],
    value: Float[Array, "batch heads keys d_v"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch heads queries d_v"]:
    """Return the output of equation 1, except for queries that may attend to nothing.

    If cuDNN supports the shapes, an NVIDIA GPU uses flash attention (Dao et al. 2022), which
    computes the weights block by block and never stores them: 80 instead of 167 GB are moved in a
    training step of the base model, by XLA's count for an H100. Elsewhere XLA computes equation 1.

    A query that may attend to nothing gets the mean of all values instead of zeros, as in jax.nn.
    With this package's masks only padding is such a query, and nothing reads its output.
    """
    flash = _cudnn_supports(query, key)
    output = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),
        mask=mask[:, None],
        implementation="cudnn" if flash else "xla",
    )
    return output.swapaxes(1, 2)


def _cudnn_supports(query: Array, key: Array) -> bool:
    """Return whether cuDNN supports these shapes, [batch heads length d_k], and this dtype."""
    lengths_are_even = query.shape[2] % 2 == key.shape[2] % 2 == 0
    heads_fit = query.shape[3] % 8 == 0 and query.shape[3] <= 128
    return backend() == "cuda" and query.dtype == jnp.bfloat16 and lengths_are_even and heads_fit
