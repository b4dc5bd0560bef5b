"""What the backward pass computes again instead of keeping it (Chen et al. 2016)."""

from typing import Any, Literal

from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

_RESIDUAL = "residual"


def residual(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `x`, marked as a value that selective rematerialization keeps."""
    return checkpoint_name(x, _RESIDUAL)


def remat(layer: type[nn.Module], kind: Literal["none", "selective", "full"]) -> type[nn.Module]:
    """Return the class of a layer whose backward pass recomputes what `ModelConfig.remat` says.

    "selective" keeps the results of `residual` and those of cuDNN's attention; "full" keeps the
    layer's inputs alone.
    """
    if kind == "none":
        return layer
    return nn.remat(layer, policy=_is_kept if kind == "selective" else None)


def _is_kept(operation: Any, *_: Any, **parameters: Any) -> bool:
    is_attention = operation.name.startswith("dot_product_attention_fwd")
    return is_attention or parameters.get("name") == _RESIDUAL
