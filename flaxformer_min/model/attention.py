"""Scaled dot-product attention (figure 2, section 3.2.1): pure functions of one head."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flaxformer_min.model.masks import check_mask


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


batched_scaled_dot_product_attention = jax.jit(
    jax.vmap(jax.vmap(scaled_dot_product_attention, in_axes=(0, 0, 0, None)))
)
"""`scaled_dot_product_attention` of all heads, [batch heads length d_k], with the mask of each
sentence, [batch queries keys]."""
