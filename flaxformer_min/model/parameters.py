"""The parameters of modules, and those with one axis: biases, and the scales of norms."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.errors import ScopeParamShapeError
from jaxtyping import Array, Float

from flaxformer_min.model.target import target_platform

COPIES = "vectors_by_row"
"""The collection of variables that `copies_by_row` returns."""


def parameter(
    module: nn.Module, name: str, initializer: nn.initializers.Initializer, shape: tuple[int, ...]
) -> Float[Array, "*shape"]:
    """Return a parameter of `module`, in float32 unless it is given in another type.

    `nn.Module.param` traces the initializer of a parameter that is there, too, to check its shape,
    which takes a quarter of the time of tracing. Raises ScopeParamShapeError for another shape.
    """
    if not module.has_variable("params", name):
        return module.param(name, initializer, shape, jnp.float32)
    value = module.get_variable("params", name)
    if jnp.shape(value) != shape:
        raise ScopeParamShapeError(name, module.scope.path_text, jnp.shape(value), shape)
    return jnp.asarray(value)  # outside jit it may be of numpy


def vector(
    module: nn.Module, name: str, initializer: nn.initializers.Initializer, size: int
) -> Float[Array, "*rows size"]:
    """Return a parameter of `module`, or, where there are, a copy of it for each row.

    For use with `for_tokens`. See `copies_by_row`.
    """
    value = parameter(module, name, initializer, (size,))
    if module.has_variable(COPIES, name):
        return module.get_variable(COPIES, name)
    return value


def for_tokens(
    vector: Float[Array, "*rows size"], shape: tuple[int, ...]
) -> Float[Array, "*rows_and_ones size"]:
    """Return a vector, or its copies, with the axes of an array [rows ... size] of this shape.

    If the first axis of the array is another one, all of it gets the first copy.
    """
    if vector.ndim == 2 and (len(shape) < 2 or shape[0] != vector.shape[0]):
        vector = vector[0]
    *rows, size = vector.shape
    return vector.reshape(*rows, *[1] * (len(shape) - vector.ndim), size)


def copies_by_row(params: Any, rows: int) -> dict[str, Any]:
    """Return variables beside `params` with which an NVIDIA GPU needs fewer kernels.

    The gradient of a vector is a sum over all tokens, which takes two kernels: one alone cannot add
    up so long a column fast. With copies of the vector for each row, the first computes their
    gradients, and the second is one for all vectors of all layers. Other devices get no copies, and
    modules use the parameters themselves.
    """
    vectors = [leaf for leaf in jax.tree.leaves(params) if _is_vector(leaf)]
    if target_platform() != "cuda" or not vectors:
        return {}
    whole = jnp.concatenate(vectors)
    copies = jnp.broadcast_to(whole, (rows, whole.size))
    parts = iter(jax.lax.split(copies, [each.size for each in vectors], axis=1))
    return {COPIES: jax.tree.map(lambda leaf: next(parts) if _is_vector(leaf) else None, params)}


def _is_vector(leaf: Array) -> bool:
    return leaf.ndim == 1 and leaf.dtype == jnp.float32
