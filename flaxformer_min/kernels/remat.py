"""What the backward pass computes again instead of storing it (Chen et al. 2016)."""

import inspect
from typing import Any

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.target import target_platform

_STORED = "stored"


def stored(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x`, marked as what selective recomputation stores: it is small, or takes long."""
    return checkpoint_name(x, _STORED)


def recomputed(layer: type[nn.Module], config: ModelConfig) -> type[nn.Module]:
    """Return the class of a layer whose backward pass recomputes what `config.remat` says.

    An NVIDIA GPU recomputes only what depends on the layer's input, which must be its first
    argument: casts of weights, keys of dropout and masks would be a hundred kernels.
    """
    if config.remat == "none":
        return layer
    prevent_cse: bool | tuple[bool, ...] = True
    if target_platform() == "cuda":
        _self, _input, *others = inspect.signature(layer.__call__).parameters
        # Of variables, keys and arguments, the input alone: the forward pass shares the rest.
        prevent_cse = (False, False, True, *[False] * len(others))
    policy = _is_stored if config.remat == "selective" else None
    return nn.remat(layer, policy=policy, prevent_cse=prevent_cse)


def _is_stored(operation: Any, *_: Any, **parameters: Any) -> bool:
    """Return whether to store the results of an operation: of `stored`, or of cuDNN's attention."""
    is_attention = operation.name.startswith("dot_product_attention_fwd")
    return is_attention or parameters.get("name") == _STORED
