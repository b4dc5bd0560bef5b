"""Positional encodings, which represent the order of the tokens (section 3.5)."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.parameters import parameter
from flaxformer_min.tokens import Tokens

PositionFunction = Callable[[Int[Array, " length"], int], Float[Array, "length d_model"]]
"""Return one vector per position, given positions and d_model."""


def sinusoidal_encoding(
    positions: Int[Array, " length"],
    d_model: int,
    layout: Literal["interleaved", "halves"] = "interleaved",
) -> Float[Array, "length d_model"]:
    """Return the sinusoidal encoding of each position.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same.

    `interleaved` is the paper's layout; `halves` has all sines before all cosines (the layout of
    tensor2tensor and Marian). Any length is possible, not only those of the training data. Raises
    ValueError for an odd d_model or an unknown layout.

    >>> sinusoidal_encoding(jnp.array([0]), d_model=4)
    Array([[0., 1., 0., 1.]], dtype=float32)
    >>> sinusoidal_encoding(jnp.array([0]), d_model=4, layout="halves")
    Array([[0., 0., 1., 1.]], dtype=float32)
    """
    if d_model % 2:
        raise ValueError(f"d_model must be even: sines and cosines come in pairs; got {d_model}.")
    if layout not in ("interleaved", "halves"):
        raise ValueError(f"layout must be 'interleaved' or 'halves'; got {layout!r}.")
    rate = 10_000.0 ** (-jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    angle = positions[:, None].astype(jnp.float32) * rate[None, :]
    both = [jnp.sin(angle), jnp.cos(angle)]
    if layout == "halves":
        return jnp.concatenate(both, axis=-1)
    return jnp.stack(both, axis=-1).reshape(-1, d_model)


batched_sinusoidal_encoding = jax.vmap(sinusoidal_encoding, in_axes=(0, None, None))


class PositionalEncoding(nn.Module):
    """The encoding that `config.positional_encoding` selects, or `function` if it is given."""

    config: ModelConfig
    function: PositionFunction | None = None

    @nn.compact
    def __call__(self, tokens: Tokens) -> Float[Array, "*batch d_model"]:
        """Return the vectors to be added to the embeddings of tokens.

        With "learned" (table 3, row E), positions from `config.max_positions` on were never
        learned: ValueError outside jit, NaN inside. Padding may be there.
        """
        config, positions = self.config, tokens.positions
        if self.function is not None:
            return jax.vmap(self.function, in_axes=(0, None))(positions, config.d_model)
        if config.positional_encoding == "none":
            return jnp.zeros((1, 1, config.d_model), jnp.float32)
        if config.positional_encoding == "learned":
            _check_learned(tokens, config.max_positions)
            positions = jnp.where(tokens.segments > 0, positions, 0)
            init = nn.initializers.normal(0.02)
            shape = (config.max_positions, config.d_model)
            table = parameter(self, "table", init, shape)
            return jnp.take(table, positions, axis=0, mode="fill", fill_value=jnp.nan)
        return batched_sinusoidal_encoding(positions, config.d_model, config.positional_encoding)


def _check_learned(tokens: Tokens, learned: int) -> None:
    if any(isinstance(each, jax.core.Tracer) for each in (tokens.positions, tokens.segments)):
        return
    # Inside jit, arithmetic on a constant is traced, too.
    positions, segments = jax.device_get((tokens.positions, tokens.segments))
    first = int(positions.min(initial=0, where=segments > 0))
    last = int(positions.max(initial=0, where=segments > 0))
    if first < 0 or last >= learned:
        raise ValueError(
            f"positional_encoding='learned' has vectors for positions 0 to {learned - 1}; got "
            f"position {first if first < 0 else last}. Shorten the sentence, or train with a "
            "larger model.max_positions."
        )
