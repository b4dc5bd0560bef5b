"""The tensors of Hugging Face's MarianMTModel, and where `Transformer` has the same numbers.

MarianMTModel has no norm behind its stacks of layers; theirs are named as in MBart.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flaxformer_min.config import ModelConfig
from flaxformer_min.interop.run_model import depth

FINAL_BIAS = "final_logits_bias"
"""The bias of the logits, [1 vocab], which a model without one has as zeros."""

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


class Tensor(NamedTuple):
    """One tensor in both models.

    name:     Marian's.
    path:     ours, as keys of nested dictionaries.
    is_kernel: whether ours is [in out] and Marian's [out in].
    stream:   axes of ours along d_model of the residual stream, whose basis may be permuted.
    """

    name: str
    path: tuple[str, ...]
    is_kernel: bool
    stream: tuple[int, ...]


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Yield all tensors, but for the bias of the logits."""
    if config.embeddings == "shared":
        yield Tensor("model.shared.weight", ("embedding", "table"), False, (1,))
    else:
        for side, name in (("encoder", "source"), ("decoder", "target")):
            path = (f"{name}_embedding", "table")
            yield Tensor(f"model.{side}.embed_tokens.weight", path, False, (1,))
    if config.embeddings == "separate":
        yield Tensor("lm_head.weight", ("output_projection", "kernel"), True, (0,))
    for side in ("encoder", "decoder"):
        for number in range(depth(config, side)):
            name, path = f"model.{side}.layers.{number}", (side, f"layer_{number}")
            yield from _attention(f"{name}.self_attn", (*path, "self_attention"))
            if side == "decoder":
                yield from _attention(f"{name}.encoder_attn", (*path, "cross_attention"))
            yield from _linear(f"{name}.fc1", (*path, "feed_forward", "inner"), reads=True)
            yield from _linear(f"{name}.fc2", (*path, "feed_forward", "outer"), reads=False)
            yield from _norm(f"{name}.final_layer_norm", (*path, "feed_forward_norm", "norm"))
        if config.has_final_norm:
            yield from _norm(f"model.{side}.layer_norm", (side, "final_norm"))


def _attention(name: str, path: tuple[str, ...]) -> Iterator[Tensor]:
    for ours, theirs in PROJECTIONS.items():
        yield from _linear(f"{name}.{theirs}", (*path, ours), reads=ours != "output")
    yield from _norm(f"{name}_layer_norm", (*path[:-1], f"{path[-1]}_norm", "norm"))


def _linear(name: str, path: tuple[str, ...], reads: bool) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (*path, "kernel"), True, (0,) if reads else (1,))
    yield Tensor(f"{name}.bias", (*path, "bias"), False, () if reads else (0,))


def _norm(name: str, path: tuple[str, ...]) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (*path, "scale"), False, (0,))
    yield Tensor(f"{name}.bias", (*path, "bias"), False, (0,))


def bias_path(config: ModelConfig) -> tuple[str, ...] | None:
    """Return where our model has the bias of the logits, None if it has none."""
    if config.embeddings == "separate":
        return "output_projection", "bias"
    return ("output_bias",) if config.output_bias else None


def halves_order(d_model: int) -> np.ndarray:
    """Return the order in which interleaved sines and cosines become halves.

    >>> halves_order(6)
    array([0, 2, 4, 1, 3, 5])
    """
    return np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])
