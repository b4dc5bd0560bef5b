"""The encoder-decoder Transformer of "Attention Is All You Need" in JAX and Flax."""

from flaxformer_min.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TrainingConfig,
)
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.attention import (
    KeyValue,
    attention_weights,
    batched_scaled_dot_product_attention,
    scaled_dot_product_attention,
)
from flaxformer_min.model.decoder import Decoder, DecoderLayer
from flaxformer_min.model.encoder import Encoder, EncoderLayer
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.masks import look_ahead_mask, padding_mask, segment_mask
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.model.positions import sinusoidal_encoding
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, Tokens, one_sentence_per_row, shift_right

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Config",
    "DataConfig",
    "Decoder",
    "DecoderLayer",
    "DecodingConfig",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "KeyValue",
    "ModelConfig",
    "MultiHeadAttention",
    "Tokens",
    "TrainingConfig",
    "Transformer",
    "Translator",
    "attention_weights",
    "batched_scaled_dot_product_attention",
    "look_ahead_mask",
    "one_sentence_per_row",
    "padding_mask",
    "scaled_dot_product_attention",
    "segment_mask",
    "shift_right",
    "sinusoidal_encoding",
]
