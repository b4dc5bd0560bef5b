"""Linear layers over tokens, and between tokens and heads (sections 3.2.2-3.4)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flaxformer_min.kernels.backend import backend


def linear(
    x: Float[Array, "*batch d_in"],
    kernel: Float[Array, "d_in d_out"],
    bias: Float[Array, " d_out"] | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "*batch d_out"]:
    """Return x · kernel + bias as `dtype`.

    Both are multiplied in the type of `x`, or in bfloat16 if the kernel is stored in it. Tokens are
    flattened to one axis, so that the gradient of the kernel is a single matrix product, too. Over
    several axes XLA transposes the operands first, which makes a training step on a CPU take 1.11
    to 1.14 times as long.
    """
    kernel = _weights(kernel, x.dtype)
    flat = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    if backend() == "cuda" and kernel.dtype != dtype:
        product = _as_float32(flat, kernel)
    else:
        product = jnp.matmul(flat, kernel, preferred_element_type=dtype)
    if bias is not None:
        product += bias.astype(dtype)[None, :]
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


def to_heads(
    x: Float[Array, "batch length d_in"],
    kernel: Float[Array, "d_in d_out"],
    bias: Float[Array, " d_out"],
    heads: int,
    dtype: Any,
) -> Float[Array, "batch heads length d_k"]:
    """Return x · kernel + bias, divided among heads: head i has the i-th of equal parts.

    A TPU would take almost as long to move the features to the layout of heads as for the product,
    so the product writes that layout: 7.85 instead of 8.51 ms for a training step of two layers of
    the base model, by the compiler's estimate for a v5e.
    """
    d_k = kernel.shape[1] // heads
    if backend() != "tpu":
        output = linear(x, kernel, bias, dtype)
        return output.reshape(*x.shape[:2], heads, d_k).swapaxes(1, 2)
    kernel = _weights(kernel, x.dtype).reshape(-1, heads, d_k)
    product = jnp.einsum("btd,dhk->bhtk", x.astype(kernel.dtype), kernel)
    return product.astype(dtype) + bias.astype(dtype).reshape(1, heads, 1, d_k)


def from_heads(
    heads: Float[Array, "batch heads length d_v"],
    kernel: Float[Array, "d_in d_out"],
    bias: Float[Array, " d_out"],
    dtype: Any,
) -> Float[Array, "batch length d_out"]:
    """Return x · kernel + bias, where x are the features of all heads side by side.

    On a TPU the product reads the features of a sentence by rows, a layout that attention can
    write: 23.76 instead of 25.09 ms for a training step of the base model, estimated for a v5e.
    """
    batch, number, length, d_v = heads.shape
    if backend() != "tpu":
        x = heads.swapaxes(1, 2).reshape(batch, length, number * d_v)
        return linear(x, kernel, bias, dtype)
    kernel = _weights(kernel, heads.dtype)
    by_rows = heads.swapaxes(2, 3).reshape(batch, number * d_v, length).astype(kernel.dtype)
    product = jnp.einsum("bkl,ke->ble", by_rows, kernel).astype(dtype)
    return product + bias.astype(dtype)[None, None, :]


def _weights(kernel: Float[Array, "d_in d_out"], dtype: Any) -> Float[Array, "d_in d_out"]:
    """Return the kernel in the type of the product: `dtype`, unless it is stored in bfloat16."""
    return kernel if kernel.dtype == jnp.bfloat16 else kernel.astype(dtype)


@jax.custom_jvp
def _as_float32(
    x: Float[Array, "tokens d_in"], kernel: Float[Array, "d_in d_out"]
) -> Float[Array, "tokens d_out"]:
    """Return x · kernel in float32, with a gradient that is rounded to the type of both.

    Otherwise the gradient would be float32, and XLA would convert the other operand to multiply
    both as TF32: 42.2 instead of 35.2 ms for a training step of the base model on an H200.
    """
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


@_as_float32.defjvp
def _as_float32_and_change(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, kernel), (of_x, of_kernel) = primals, tangents
    change = jnp.matmul(of_x, kernel) + jnp.matmul(x, of_kernel)
    return _as_float32(x, kernel), change.astype(jnp.float32)
