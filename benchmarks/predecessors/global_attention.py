"""Attention over all states of the encoder (Luong et al. 2015, "Effective Approaches to
Attention-based Neural Machine Translation", section 3.1: global, score `dot`)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def global_attention(
    query: Float[Array, "queries width"],
    states: Float[Array, "source width"],
    mask: Bool[Array, "queries source"],
) -> tuple[Float[Array, "queries width"], Float[Array, "queries source"]]:
    """Return the context of each query, and its weights over the source.

        score(h_t, h_s) = h_t · h_s                        (equation 8, dot)
        a_t(s) = exp score(h_t, h_s) / Σ exp score(h_t, h_s')  (equation 7)
        c_t = Σ a_t(s) h_s

    It is equation 1 of the Transformer with keys and values that are both the encoder's states,
    and without the factor 1/√d_k. A masked state gets no weight; a query that may attend to none
    gets zeros.

    >>> states = jnp.array([[100.0, 0.0], [0.0, 100.0]])
    >>> context, weights = global_attention(states[1:], states, jnp.ones((1, 2), bool))
    >>> context, weights
    (Array([[  0., 100.]], dtype=float32), Array([[0., 1.]], dtype=float32))
    """
    scores = jnp.where(mask, query @ states.T, jnp.finfo(jnp.float32).min)
    weights = jnp.where(mask, jax.nn.softmax(scores), 0.0)
    return weights @ states, weights


batched_global_attention = jax.vmap(global_attention)
