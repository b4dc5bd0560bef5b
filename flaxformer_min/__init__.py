"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxformer_min.config import (
        Config,
        DataConfig,
        ModelConfig,
        SearchConfig,
        TrainingConfig,
    )
    from flaxformer_min.data.batches import shard_batch
    from flaxformer_min.decoding.search import Hypotheses, search
    from flaxformer_min.decoding.translator import Translator
    from flaxformer_min.experiment.run import TrainResult, train
    from flaxformer_min.interop import export, import_model
    from flaxformer_min.model.attention import (
        attention_weights,
        batched_scaled_dot_product_attention,
        scaled_dot_product_attention,
    )
    from flaxformer_min.model.decoder import Decoder, DecoderLayer
    from flaxformer_min.model.encoder import Encoder, EncoderLayer
    from flaxformer_min.model.feed_forward import FeedForward
    from flaxformer_min.model.key_value import KeyValue
    from flaxformer_min.model.masks import look_ahead_mask, padding_mask, segment_mask
    from flaxformer_min.model.multi_head_attention import MultiHeadAttention
    from flaxformer_min.model.positions import sinusoidal_encoding
    from flaxformer_min.model.transformer import Transformer
    from flaxformer_min.runs.folder import RunFolder
    from flaxformer_min.tokens import Batch, Tokens, one_sentence_per_row, shift_right
    from flaxformer_min.training.loss import cross_entropy
    from flaxformer_min.training.step import (
        TrainState,
        init_state,
        make_eval_step,
        make_train_step,
    )

__version__ = "0.1.0"

_MODULE_OF = {
    "Batch": "tokens",
    "Config": "config",
    "DataConfig": "config",
    "Decoder": "model.decoder",
    "DecoderLayer": "model.decoder",
    "Encoder": "model.encoder",
    "EncoderLayer": "model.encoder",
    "FeedForward": "model.feed_forward",
    "Hypotheses": "decoding.search",
    "KeyValue": "model.key_value",
    "ModelConfig": "config",
    "MultiHeadAttention": "model.multi_head_attention",
    "RunFolder": "runs.folder",
    "SearchConfig": "config",
    "Tokens": "tokens",
    "TrainResult": "experiment.run",
    "TrainState": "training.step",
    "TrainingConfig": "config",
    "Transformer": "model.transformer",
    "Translator": "decoding.translator",
    "attention_weights": "model.attention",
    "batched_scaled_dot_product_attention": "model.attention",
    "cross_entropy": "training.loss",
    "export": "interop",
    "import_model": "interop",
    "init_state": "training.step",
    "look_ahead_mask": "model.masks",
    "make_eval_step": "training.step",
    "make_train_step": "training.step",
    "one_sentence_per_row": "tokens",
    "padding_mask": "model.masks",
    "scaled_dot_product_attention": "model.attention",
    "search": "decoding.search",
    "segment_mask": "model.masks",
    "shard_batch": "data.batches",
    "shift_right": "tokens",
    "sinusoidal_encoding": "model.positions",
    "train": "experiment.run",
}
"""The module of each public name, imported on first use: `flaxformer-min --help` needs no jax."""

__all__ = [
    "Batch",
    "Config",
    "DataConfig",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Hypotheses",
    "KeyValue",
    "ModelConfig",
    "MultiHeadAttention",
    "RunFolder",
    "SearchConfig",
    "Tokens",
    "TrainResult",
    "TrainState",
    "TrainingConfig",
    "Transformer",
    "Translator",
    "attention_weights",
    "batched_scaled_dot_product_attention",
    "cross_entropy",
    "export",
    "import_model",
    "init_state",
    "look_ahead_mask",
    "make_eval_step",
    "make_train_step",
    "one_sentence_per_row",
    "padding_mask",
    "scaled_dot_product_attention",
    "search",
    "segment_mask",
    "shard_batch",
    "shift_right",
    "sinusoidal_encoding",
    "train",
]


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import and return a public name."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
