"""Linear layers over tokens (sections 3.2.2-3.4)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.model.parameters import for_tokens, parameter, vector
from flaxformer_min.model.target import target_platform


def project(
    x: Float[Array, "*batch d_in"], kernel: Float[Array, "d_in d_out"], dtype: Any = jnp.float32
) -> Float[Array, "*batch d_out"]:
    """Return x · kernel as `dtype`; both are multiplied in the kernel's type.

    Tokens are flattened to one axis, so that the kernel's gradient is a single matrix product too.
    Over several axes XLA transposes the operands first, which makes a CPU step a fifth slower.
    """
    flat = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    if target_platform() == "cuda" and kernel.dtype != dtype:
        flat = _as_float32(flat, kernel)
    else:
        flat = jnp.matmul(flat, kernel, preferred_element_type=dtype)
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


@jax.custom_jvp
def _as_float32(
    x: Float[Array, "tokens d_in"], kernel: Float[Array, "d_in d_out"]
) -> Float[Array, "tokens d_out"]:
    """Return x · kernel in float32, with a gradient that is rounded to the type of both.

    Otherwise the gradient would be float32, and XLA would convert the other operand to multiply
    both as TF32, which takes an NVIDIA GPU three times as long.
    """
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


@_as_float32.defjvp
def _as_float32_and_change(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, kernel), (of_x, of_kernel) = primals, tangents
    change = jnp.matmul(of_x, kernel) + jnp.matmul(x, of_kernel)
    return _as_float32(x, kernel), change.astype(jnp.float32)


def as_weights(weights: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Return the matrix of a product in the type of the layers, unless it is stored in bfloat16.

    Then products alone are in bfloat16, with sums in the type of the layers.
    """
    return weights if weights.dtype == jnp.bfloat16 else weights.astype(dtype)


class Linear(nn.Module):
    """x W + b, applied to each token."""

    features: int
    dtype: str

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        """Return `features` values for each token."""
        return _linear(x, *self.weights(x.shape[-1]))

    @nn.compact
    def weights(self, d_in: int) -> tuple[Float[Array, "d_in d_out"], Float[Array, "*rows d_out"]]:
        """Return the kernel (see `as_weights`) and the bias (see `vector`)."""
        shape = (d_in, self.features)
        kernel = parameter(self, "kernel", nn.initializers.xavier_uniform(), shape)
        bias = vector(self, "bias", nn.initializers.zeros, self.features)
        return as_weights(kernel, self.dtype), jnp.asarray(bias, self.dtype)


def _linear(
    x: Float[Array, "*batch d_in"],
    kernel: Float[Array, "d_in d_out"],
    bias: Float[Array, "*rows d_out"],
) -> Float[Array, "*batch d_out"]:
    """Return x W + b in the type of the bias, which is that of the layers."""
    x = jnp.asarray(x, bias.dtype)
    return project(x, kernel, bias.dtype) + for_tokens(bias, x.shape)


def project_to_heads(
    x: Float[Array, "batch length d_in"], linears: Sequence[Linear], heads: int
) -> list[Float[Array, "batch heads length d_k"]]:
    """Return linear layers of `x`, divided among heads: head i has the i-th of equal parts.

    A TPU would spend as much time on moving the features of a product to the layout of heads as on
    the product. There the product writes that layout itself. On an NVIDIA GPU all layers are one
    product, so that the gradient of `x` is one, too.
    """
    if target_platform() == "tpu":
        return [_written_by_heads(x, *linear.weights(x.shape[-1]), heads) for linear in linears]
    if target_platform() == "cuda":
        kernels, biases = zip(*(linear.weights(x.shape[-1]) for linear in linears), strict=True)
        whole = _linear(x, jnp.concatenate(kernels, axis=1), jnp.concatenate(biases, axis=-1))
        outputs = jnp.split(whole, len(linears), axis=-1)
    else:
        outputs = [linear(x) for linear in linears]
    d_k = outputs[0].shape[-1] // heads
    return [y.reshape(*y.shape[:-1], heads, d_k).swapaxes(1, 2) for y in outputs]


def _written_by_heads(
    x: Float[Array, "batch length d_in"],
    kernel: Float[Array, "d_in d_out"],
    bias: Float[Array, " d_out"],
    heads: int,
) -> Float[Array, "batch heads length d_k"]:
    """Return x W + b in the layout of heads, which the product writes."""
    kernel, bias = kernel.reshape(x.shape[-1], heads, -1), bias.reshape(1, heads, 1, -1)
    return jnp.einsum("btd,dhk->bhtk", jnp.asarray(x, kernel.dtype), kernel) + bias


def project_from_heads(
    heads: Float[Array, "batch heads length d_k"], linear: Linear
) -> Float[Array, "batch length d_out"]:
    """Return the linear layer of the concatenated heads.

    On a TPU the product reads each sentence's features by rows, [heads · d_k, length], a layout
    that attention can write: moving the heads next to each other would take as long as a product.
    """
    batch, number, length, d_k = heads.shape
    if target_platform() != "tpu":
        return linear(heads.swapaxes(1, 2).reshape(batch, length, number * d_k))
    kernel, bias = linear.weights(number * d_k)
    by_rows = heads.swapaxes(2, 3).reshape(batch, number * d_k, length)
    return jnp.einsum("bkl,ke->ble", by_rows.astype(kernel.dtype), kernel) + bias.reshape(1, 1, -1)
