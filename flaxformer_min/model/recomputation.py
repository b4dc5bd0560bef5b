"""What the backward pass computes again instead of storing it (Chen et al. 2016)."""

import inspect
from typing import Any

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig

_STORED = "stored"


def stored(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x`, marked as what selective recomputation stores: it is small, or takes long."""
    return checkpoint_name(x, _STORED)


def recomputed(layer: type[nn.Module], config: ModelConfig) -> type[nn.Module]:
    """Return the class of a layer whose backward pass recomputes what `config.remat` says.

    The first argument of a layer must be its input: only what depends on that is recomputed.
    """
    if config.remat == "none":
        return layer
    _self, _input, *others = inspect.signature(layer.__call__).parameters
    return nn.remat(
        layer,
        policy=_is_stored if config.remat == "selective" else None,
        # Of variables, random keys and arguments. Casts of weights, keys and masks are then shared
        # with the forward pass: recomputed, they would be a hundred kernels of a GPU.
        prevent_cse=(False, False, True, *[False] * len(others)),
    )


def _is_stored(operation: Any, *_: Any, **parameters: Any) -> bool:
    """Return whether to store the results of an operation: of `stored`, or of cuDNN's attention."""
    is_attention = operation.name.startswith("dot_product_attention_fwd")
    return is_attention or parameters.get("name") == _STORED
