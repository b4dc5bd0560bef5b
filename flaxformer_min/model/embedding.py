"""The boxes "Input Embedding", "Output Embedding" and the last "Linear" (section 3.4)."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.linear import project
from flaxformer_min.model.positions import batched_sinusoidal_encoding
from flaxformer_min.tokens import Tokens


class Embedding(nn.Module):
    """A vector for each piece of the vocabulary: on the way in and, if tied, on the way out."""

    config: ModelConfig
    vocab_size: int

    def setup(self):
        """One row a piece; 1/√d_model wide, so that times √d_model a value is about 1."""
        d_model = self.config.d_model
        self.table = self.param(
            "table", nn.initializers.normal(d_model**-0.5), (self.vocab_size, d_model)
        )
        self.dropout = Dropout(self.config.dropout)

    def __call__(self, tokens: Tokens) -> Float[Array, "batch length d_model"]:
        """Vectors for tokens: √d_model times their row, plus their position, then dropout."""
        config = self.config
        x = jnp.take(self.table, tokens.ids, axis=0, mode="clip") * config.d_model**0.5
        if config.positional_encoding != "none":
            x += batched_sinusoidal_encoding(
                tokens.positions, config.d_model, config.positional_encoding
            )
        return self.dropout(x.astype(config.dtype))

    def logits(self, x: Float[Array, "batch length d_model"]) -> Float[Array, "batch length vocab"]:
        """The box "Linear" with the table's own weights: how well each piece fits, in float32."""
        return project(x, jnp.asarray(self.table, x.dtype).T)


class OutputProjection(nn.Module):
    """The box "Linear" with weights and a bias of its own, for `embeddings="separate"`."""

    vocab_size: int

    @nn.compact
    def logits(self, x: Float[Array, "batch length d_model"]) -> Float[Array, "batch length vocab"]:
        """How well each piece of the vocabulary fits, in float32."""
        shape = (x.shape[-1], self.vocab_size)
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape).astype(x.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
        return project(x, kernel) + bias[None, None, :]
