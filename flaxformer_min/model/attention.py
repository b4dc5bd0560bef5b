"""Scaled dot-product attention (figure 2, section 3.2.1): pure functions of one head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flaxformer_min.model.masks import check_mask
from flaxformer_min.model.target import target_platform


def attention_weights(
    query: Float[Array, "queries d_k"],
    key: Float[Array, "keys d_k"],
    mask: Bool[Array, "queries keys"],
) -> Float[Array, "queries keys"]:
    """Return how much each query attends to each key: softmax(Q Kᵀ / √d_k), equation 1.

    Rows sum to one; a masked key gets exactly zero; a query that may attend to nothing gets zeros,
    and finite gradients. The softmax is taken in float32 whatever the inputs are. Raises ValueError
    for a mask that is not of booleans, such as one to be added to the scores.

    >>> attention_weights(jnp.ones((1, 4)), jnp.ones((3, 4)), jnp.array([[True, True, False]]))
    Array([[0.5, 0.5, 0. ]], dtype=float32)
    """
    check_mask(mask, (query.shape[0], key.shape[0]))
    scores = jnp.matmul(query, key.T, preferred_element_type=jnp.float32) / query.shape[-1] ** 0.5
    # The lowest number instead of -inf, because a row of -inf would give NaN, in gradients too.
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.where(mask, jax.nn.softmax(scores), 0.0).astype(query.dtype)


def scaled_dot_product_attention(
    query: Float[Array, "queries d_k"],
    key: Float[Array, "keys d_k"],
    value: Float[Array, "keys d_v"],
    mask: Bool[Array, "queries keys"],
) -> tuple[Float[Array, "queries d_v"], Float[Array, "queries keys"]]:
    """Return the mean of the values for each query, weighted by attention, and the weights.

    Equation 1. Written for one head of one sentence;
    `batched_scaled_dot_product_attention` is the same for all heads of all sentences.

    >>> import jax.numpy as jnp
    >>> key, value = jnp.eye(2) * 100, jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> output, weights = scaled_dot_product_attention(key, key, value, jnp.ones((2, 2), bool))
    >>> output
    Array([[1., 2.],
           [3., 4.]], dtype=float32)
    >>> weights
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    weights = attention_weights(query, key, mask)
    return weights @ value, weights


# The head axis comes first: [heads length d_k]; weights are [heads queries keys].
weights_of_all_heads = jax.vmap(attention_weights, in_axes=(0, 0, None))
batched_attention_weights = jax.jit(jax.vmap(weights_of_all_heads))
batched_weighted_sum = jax.jit(jax.vmap(jax.vmap(jnp.matmul)))
batched_scaled_dot_product_attention = jax.jit(
    jax.vmap(jax.vmap(scaled_dot_product_attention, in_axes=(0, 0, 0, None)))
)
"""`scaled_dot_product_attention` of all heads, [batch heads length d_k], with the mask of each
sentence, [batch queries keys]."""


BLOCK = 128
"""Queries per block. In longer rows, the weights of only one block are in memory at a time."""


def attention_by_blocks(
    query: Float[Array, "batch heads queries d_k"],
    key: Float[Array, "batch heads keys d_k"],
    value: Float[Array, "batch heads keys d_k"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch heads queries d_k"]:
    """Return the output of `batched_scaled_dot_product_attention`, computed block by block.

    Attention weights grow with the square of the row length. Only those of one block are in memory
    at a time, and the backward pass recomputes them (Rabe and Staats 2021). `BLOCK` must divide the
    number of queries.
    """
    parts = query.shape[2] // BLOCK
    queries = jnp.stack(jnp.split(query, parts, axis=2))
    masks = jnp.stack(jnp.split(mask, parts, axis=1))

    @jax.checkpoint
    def of_block(block: tuple[Array, Array]) -> Array:
        return batched_scaled_dot_product_attention(block[0], key, value, block[1])[0]

    return jnp.concatenate(jax.lax.map(of_block, (queries, masks)), axis=2)


def fused_attention(
    query: Float[Array, "batch heads queries d_k"],
    key: Float[Array, "batch heads keys d_k"],
    value: Float[Array, "batch heads keys d_k"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch heads queries d_k"]:
    """Return the output of `batched_scaled_dot_product_attention`, save for padding.

    If cuDNN supports the shapes, an NVIDIA GPU uses flash attention (Dao et al. 2022), which
    computes the weights block by block and never stores them. Elsewhere XLA computes equation 1.

    A query that may attend to nothing gets the mean of all values instead of zeros, as in jax.nn.
    With this package's masks only padding is such a query, and nothing reads what it gets; to write
    zeros there, a GPU would go through its memory twice more, forward and backward.
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
    return (
        target_platform() == "cuda"
        and query.dtype == jnp.bfloat16
        and lengths_are_even
        and heads_fit
    )
