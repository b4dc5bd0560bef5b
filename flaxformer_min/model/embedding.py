"""Input and output embeddings, and the output projection (section 3.4)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.backend import compute_dtype
from flaxformer_min.kernels.linear import linear
from flaxformer_min.model.dropout import Dropout, Rows
from flaxformer_min.model.parameters import parameter
from flaxformer_min.model.positions import PositionalEncoding, PositionFunction
from flaxformer_min.tokens import CUT, Tokens

TIED_TABLES = {"shared": "embedding", "target_tied": "target_embedding"}
"""Parameters that are embeddings and output projection, by `config.embeddings`."""

OUTPUT_KERNEL = "output_kernel"
"""A parameter that a search may add to the tied table: the same transposed, in any type."""


class Embedding(nn.Module):
    """A vector for each piece of the vocabulary; if tied, also the output projection's weights."""

    config: ModelConfig
    vocab_size: int
    position_function: PositionFunction | None = None

    def setup(self):
        """Create the table: standard deviation 1/√d_model, so that scaled values are near 1."""
        d_model = self.config.d_model
        initializer = nn.initializers.normal(d_model**-0.5)
        self.table = parameter(self, "table", initializer, (self.vocab_size, d_model))
        self.positional_encoding = PositionalEncoding(self.config, self.position_function)
        self.dropout = Dropout(self.config.dropout)

    def __call__(self, tokens: Tokens, rows: Rows = None) -> Float[Array, "batch length d_model"]:
        """Return √d_model times each token's vector plus its positional encoding, with dropout.

        The vector of CUT is zero.
        Raises ValueError for an id outside the vocabulary; inside jit, the nearest one is taken.
        """
        config = self.config
        _check_ids(tokens.ids, self.vocab_size)
        x = jnp.take(self.table, tokens.ids, axis=0, mode="clip") * config.d_model**0.5
        x = jnp.where((tokens.ids == CUT)[..., None], 0.0, x) + self.positional_encoding(tokens)
        return self.dropout(x.astype(compute_dtype(config.dtype)), rows)

    def logits(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of each piece, in float32, from the tied table."""
        if self.has_variable("params", OUTPUT_KERNEL):
            return linear(x, self.get_variable("params", OUTPUT_KERNEL))
        return linear(x, self.table.T)


def _check_ids(ids: Int[Array, "batch length"], vocab_size: int) -> None:
    if isinstance(ids, jax.core.Tracer) or not ids.size:
        return
    ids = jax.device_get(ids)  # inside jit, arithmetic on a constant is traced, too
    ids = ids[ids != CUT]
    least, greatest = int(ids.min()), int(ids.max())
    if least < 0 or greatest >= vocab_size:
        raise ValueError(
            f"token ids must be from 0 to {vocab_size - 1}, the pieces of the vocabulary; got "
            f"{least if least < 0 else greatest}."
        )


class OutputProjection(nn.Module):
    """The output projection with its own weights and bias, for `embeddings="separate"`."""

    vocab_size: int

    @nn.compact
    def logits(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of each piece, in float32."""
        shape = (x.shape[-1], self.vocab_size)
        kernel = parameter(self, "kernel", nn.initializers.xavier_uniform(), shape)
        bias = parameter(self, "bias", nn.initializers.zeros, (self.vocab_size,))
        return linear(x, kernel, bias)
