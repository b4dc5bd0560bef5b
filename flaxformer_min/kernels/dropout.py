"""Random masks of dropout (section 5.4)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, UInt


def keep_mask(
    key: Key[Array, ""], rate: float, shape: tuple[int, ...], rows: Int[Array, " rows"]
) -> Bool[Array, "..."]:
    """Return True with probability 1 - rate, independently for each value.

    `rows` are the numbers of the first axis: the mask of a row depends on its number, not on its
    place. The same as `jax.random.bernoulli` with a key for each row, but hashed: a training step
    of the base model takes 18.6 instead of 21.3 ms, by the compiler's estimate for a v5e, and 2 %
    less on a CPU.
    """
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return hashed_words(key, shape, rows) >= jnp.uint32(threshold)


def hashed_words(
    key: Key[Array, ""], shape: tuple[int, ...], rows: Int[Array, " rows"]
) -> UInt[Array, "..."]:
    """Return a random word for each value: a hash of its number and of two words of the key.

    Two rounds of the finaliser of MurmurHash3 (Appleby 2011), with a word of the key before each.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    along = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape))]
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
