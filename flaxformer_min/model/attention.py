"""The box "Scaled Dot-Product Attention" (figure 2, section 3.2.1): the maths, for one head."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention_weights(
    query: Float[Array, "queries d_k"],
    key: Float[Array, "keys d_k"],
    mask: Bool[Array, "queries keys"],
) -> Float[Array, "queries keys"]:
    """How much each query attends to each key: softmax(Q Kᵀ / √d_k), equation 1.

    Rows sum to one; a masked key gets exactly zero; a query that may attend to nothing gets zeros,
    and finite gradients. The softmax is taken in float32 whatever the inputs are.

    >>> attention_weights(jnp.ones((1, 4)), jnp.ones((3, 4)), jnp.array([[True, True, False]]))
    Array([[0.5, 0.5, 0. ]], dtype=float32)
    """
    scores = jnp.matmul(query, key.T, preferred_element_type=jnp.float32) / query.shape[-1] ** 0.5
    # The lowest number instead of -inf: a row of -inf would make NaN on the way to its zeros.
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jnp.where(mask, jax.nn.softmax(scores), 0.0).astype(query.dtype)


def scaled_dot_product_attention(
    query: Float[Array, "queries d_k"],
    key: Float[Array, "keys d_k"],
    value: Float[Array, "keys d_v"],
    mask: Bool[Array, "queries keys"],
) -> tuple[Float[Array, "queries d_v"], Float[Array, "queries keys"]]:
    """Each query's mean of the values, weighted by how much it attends to their keys; equation 1.

    Returns the output and the weights. Written for one head of one sentence;
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


# heads stand before places: [heads length d_k]; weights come as [heads queries keys]
weights_of_all_heads = jax.vmap(attention_weights, in_axes=(0, 0, None))
batched_attention_weights = jax.jit(jax.vmap(weights_of_all_heads))
batched_weighted_sum = jax.jit(jax.vmap(jax.vmap(jnp.matmul)))
batched_scaled_dot_product_attention = jax.jit(
    jax.vmap(jax.vmap(scaled_dot_product_attention, in_axes=(0, 0, 0, None)))
)


BLOCK = 128
"""Queries whose weights are in memory at a time, where rows are longer than that."""


def attention_by_blocks(
    query: Float[Array, "batch heads queries d_k"],
    key: Float[Array, "batch heads keys d_k"],
    value: Float[Array, "batch heads keys d_k"],
    mask: Bool[Array, "batch queries keys"],
) -> Float[Array, "batch heads queries d_k"]:
    """The output of `batched_scaled_dot_product_attention`, `BLOCK` queries after the other.

    Weights grow with the square of a row. Here those of one block are in memory at a time, and are
    computed again on the way back (Rabe and Staats 2021). `BLOCK` must divide the queries.
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
    """The output of `batched_scaled_dot_product_attention`, whose weights nobody sees.

    On an NVIDIA GPU it is cuDNN's flash attention (Dao et al. 2022), where that serves: weights are
    computed block by block and never stored. Elsewhere XLA computes equation 1 as written above.
    """
    flash = _flash_attention_serves(query, key)
    output = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),
        mask=mask[:, None],
        implementation="cudnn" if flash else "xla",
    )
    # For a query that may attend to nothing it takes the mean of all values.
    attends = mask.any(axis=-1)[:, None, :, None]
    return jnp.where(attends, output.swapaxes(1, 2), 0)


def _flash_attention_serves(query: Array, key: Array) -> bool:
    """Whether cuDNN is there and takes [batch heads places d_k] of this kind: it refuses others."""
    places_are_even = query.shape[2] % 2 == key.shape[2] % 2 == 0
    heads_fit = query.shape[3] % 8 == 0 and query.shape[3] <= 128
    on_nvidia = "cuda" in jax.local_devices()[0].client.platform_version
    return on_nvidia and query.dtype == jnp.bfloat16 and places_are_even and heads_fit


class KeyValue(NamedTuple):
    """What is attended to. In training: a sentence. In decoding: what was written so far.

    Keys are kept as Kᵀ, as equation 1 reads them: a step of decoding would otherwise transpose all
    that was written before it, which costs a CPU more than attention itself.
    """

    transposed_keys: Float[Array, "batch heads d_k places"]
    values: Float[Array, "batch heads places d_k"]

    @classmethod
    def of(
        cls,
        keys: Float[Array, "batch heads places d_k"],
        values: Float[Array, "batch heads places d_k"],
    ) -> "KeyValue":
        """From keys and values that lie in the same way."""
        return cls(keys.swapaxes(2, 3), values)

    @property
    def keys(self) -> Float[Array, "batch heads places d_k"]:
        """Beside the values."""
        return self.transposed_keys.swapaxes(2, 3)

    def write(self, new: "KeyValue", place: Int[Array, ""]) -> "KeyValue":
        """The same, with `new` from `place` on.

        >>> empty, new = (KeyValue.of(*(jnp.full((1, 1, n, 1), n - 1.0),) * 2) for n in (1, 2))
        >>> empty.grow(2).write(new, jnp.int32(1)).values.ravel()
        Array([0., 1., 1.], dtype=float32)
        """
        update = jax.lax.dynamic_update_slice_in_dim
        return KeyValue(
            update(self.transposed_keys, new.transposed_keys, place, axis=3),
            update(self.values, new.values, place, axis=2),
        )

    def grow(self, places: int) -> "KeyValue":
        """The same, with so many more places behind it, all zero."""
        none, more = (0, 0), (0, places)
        return KeyValue(
            jnp.pad(self.transposed_keys, (none, none, none, more)),
            jnp.pad(self.values, (none, none, more, none)),
        )
