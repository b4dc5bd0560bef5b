"""Dropout (section 5.4) with one random byte per value, because random bits dominate its cost."""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from flaxformer_min.model.target import target_platform

BY_ROW = "dropout_by_row"
"""The name of the random keys of `masks_by_row` in `rngs`."""

_ROWS: contextvars.ContextVar[Int[Array, "rows"]] = contextvars.ContextVar("rows")


def realised_rate(rate: float) -> float:
    """Return the share of values that dropout at `rate` drops: a multiple of 1/256.

    >>> realised_rate(0.1), realised_rate(0.3)
    (0.1015625, 0.30078125)
    """
    return min(round(rate * 256), 255) / 256


def keep_mask(
    key: Key[Array, ""],
    rate: float,
    shape: tuple[int, ...],
    rows: Int[Array, "rows"] | None = None,
) -> Bool[Array, "..."]:
    """Return True with probability 1 - realised_rate(rate), independently for each value.

    `rows` are numbers for the first axis: what a row gets depends on its number, not on its place.
    On a CPU each 32-bit word of the generator serves four values. Elsewhere a value has a hashed
    word of its own, because an accelerator is quick to compute but slow to store and move bytes.
    """
    least = round(realised_rate(rate) * 256)
    if target_platform() != "cpu":
        return hashed_words(key, shape, rows) >= jnp.uint32(least << 24)
    if rows is not None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows)
        return jax.vmap(lambda key: keep_mask(key, rate, shape[1:]))(keys)
    size = math.prod(shape)
    words = jax.random.bits(key, (-(-size // 4),), jnp.uint32)
    random_bytes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:size]
    return random_bytes.reshape(shape) >= least


def hashed_words(
    key: Key[Array, ""], shape: tuple[int, ...], rows: Int[Array, "rows"] | None = None
) -> UInt[Array, "..."]:
    """Return a random word for each value: a hash of its number and of two words of the key.

    Two rounds of the finaliser of MurmurHash3 (Appleby 2011), with a word of the key before each.
    `rows` as for `keep_mask`.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    along = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape))]
    if rows is not None:
        along[0] = rows.astype(jnp.uint32).reshape(-1, *[1] * (len(shape) - 1))
    numbers = [each * jnp.uint32(stride) for each, stride in zip(along, strides, strict=True)]
    word = sum(numbers, start=jnp.zeros(shape, jnp.uint32))
    # Not bits drawn from the key: an accelerator takes longer to begin with two words than to draw.
    for secret in jax.random.key_data(key)[-2:]:
        word = word ^ secret
        word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
        word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
        word = word ^ (word >> 16)
    return word


@contextlib.contextmanager
def masks_by_row(numbers: Int[Array, "rows"]) -> Iterator[None]:
    """Let dropout in the body draw the masks of each row from its number, not from its place.

    Then a row has the same masks whichever device holds it. `rngs` must have a key `BY_ROW`, too,
    the same for all devices. Values whose first axis is not that of the rows are masked as usual.
    A context, because Flax gives modules one key for all rows.
    """
    before = _ROWS.set(numbers)
    try:
        yield
    finally:
        _ROWS.reset(before)


class Dropout(nn.Module):
    """Dropout, which zeroes a share of the values and scales up the rest.

    Active if `rngs` has a key "dropout"; otherwise this is the identity. See `masks_by_row`, too.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return `x` with each value either zeroed or divided by the share that is kept."""
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        rows = _ROWS.get(None)
        if rows is not None and rows.shape == x.shape[:1]:
            keep = keep_mask(self.make_rng(BY_ROW), self.rate, x.shape, rows)
        else:
            keep = keep_mask(self.make_rng("dropout"), self.rate, x.shape)
        return jnp.where(keep, x / (1 - realised_rate(self.rate)), 0).astype(x.dtype)
