"""The circles "Positional Encoding": how a token knows where it stands (section 3.5)."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sinusoidal_encoding(
    positions: Int[Array, " length"],
    d_model: int,
    layout: Literal["interleaved", "halves"] = "interleaved",
) -> Float[Array, "length d_model"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same.

    `interleaved` is the paper's formula; `halves` holds the same numbers, all sines before all
    cosines (as tensor2tensor and Marian lay them out). Computed from the positions, so any length
    works, trained on or not. Raises ValueError for an odd d_model or an unknown layout.

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
    sines, cosines = jnp.sin(angle), jnp.cos(angle)
    if layout == "halves":
        return jnp.concatenate([sines, cosines], axis=-1)
    return jnp.stack([sines, cosines], axis=-1).reshape(-1, d_model)


batched_sinusoidal_encoding = jax.vmap(sinusoidal_encoding, in_axes=(0, None, None))
