"""The Transformer (figure 1).

                    logits over the vocabulary
                               |
                          Linear (3.4)
                               |
                      +-----------------+
                      |   Add & Norm    |
                      |  Feed Forward   |     (3.3)
+-----------------+   |   Add & Norm    |
|   Add & Norm    |   |   Multi-Head    |     (3.2.2)  the encoder's output:
|  Feed Forward   |-->|    Attention    |              cross-attention
|   Add & Norm    |   |   Add & Norm    |
|   Multi-Head    |   |     Masked      |     (3.2.3)  masked: no later tokens
|    Attention    |   |   Multi-Head    |
|                 |   |    Attention    |
+-----------------+   +-----------------+
    N times (3.1)         N times (3.1)
         |                     |
positional encoding   positional encoding     (3.5)
  input embedding       output embedding      (3.4)
         |                     |
       source      target, shifted right
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.cache import Cache, CrossAttentionCache
from flaxformer_min.model.decoder import Decoder
from flaxformer_min.model.embedding import Embedding, OutputProjection
from flaxformer_min.model.encoder import Encoder
from flaxformer_min.model.key_value import KeyValue
from flaxformer_min.model.masks import batched_look_ahead_mask, batched_segment_mask
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.model.parameters import for_tokens, parameter
from flaxformer_min.model.positions import PositionFunction
from flaxformer_min.model.target import compute_dtype
from flaxformer_min.tokens import BOS, Batch, Tokens, one_sentence_per_row, shift_right


class Transformer(nn.Module):
    """The encoder-decoder Transformer: from source and target so far to logits of the next token.

    position_function: used instead of `config.positional_encoding`, if given.
    encoder_attention: the attention module class of the encoder's layers (see `EncoderLayer`).

    >>> model = Transformer(ModelConfig(vocab_size=10, num_layers=1, d_model=8, d_ff=8))
    >>> source = one_sentence_per_row(jnp.array([[5, 6, 3]]))
    >>> target = one_sentence_per_row(jnp.array([[7, 3]]))
    >>> params = model.init(jax.random.key(0), Batch(source, target))
    >>> model.apply(params, Batch(source, target)).shape
    (1, 2, 10)
    """

    config: ModelConfig
    position_function: PositionFunction | None = None
    encoder_attention: type[nn.Module] = MultiHeadAttention

    def setup(self):
        """Create the modules; `config.embeddings` selects which embeddings share a table."""
        config, positions = self.config, self.position_function
        source_vocab_size = config.source_vocab_size or config.vocab_size
        if config.embeddings == "shared":
            self.embedding = Embedding(config, config.vocab_size, positions)
            source, target, output = self.embedding, self.embedding, self.embedding
        else:
            self.source_embedding = source = Embedding(config, source_vocab_size, positions)
            self.target_embedding = target = Embedding(config, config.vocab_size, positions)
            output = target
        if config.embeddings == "separate":
            self.output_projection = output = OutputProjection(config.vocab_size)
        if config.output_bias:
            zeros = nn.initializers.zeros
            self.output_bias = parameter(self, "output_bias", zeros, (config.vocab_size,))
        self.embed_source, self.embed_target, self.output = source, target, output
        self.encoder = Encoder(config, self.encoder_attention)
        self.decoder = Decoder(config)

    def __call__(self, batch: Batch) -> Float[Array, "batch target vocab"]:
        """Return logits of every target token, given the source and the target before it."""
        return self.logits(self.hidden_states(batch))

    def hidden_states(self, batch: Batch) -> Float[Array, "batch target d_model"]:
        """Return the decoder's output for every target token (teacher forcing)."""
        cross = self.precompute_cross_attention(self.encode(batch.source), batch.source)
        x, _ = self._decode_all(shift_right(batch.target), cross)
        return x

    def logits(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch vocab"]:
        """Apply the output projection, in float32. The softmax is part of loss and search."""
        logits = self.output.logits(x)
        return logits + for_tokens(self.output_bias, x.shape) if self.config.output_bias else logits

    def encode(self, source: Tokens) -> Float[Array, "batch source d_model"]:
        """Return the encoder's output."""
        mask = batched_segment_mask(source.segments, source.segments)
        return self.encoder(self.embed_source(source), mask)

    def precompute_cross_attention(
        self, encoded: Float[Array, "batch source d_model"], source: Tokens
    ) -> CrossAttentionCache:
        """Project the encoded source to keys and values once, for all steps of decoding."""
        return CrossAttentionCache(source.segments, self.decoder.cross_attention_kv(encoded))

    def prefill(
        self,
        cross: CrossAttentionCache,
        beam_size: int,
        capacity: int,
        prefix: Int[Array, "batch prefix"] | None = None,
    ) -> tuple[Cache, Float[Array, "batch prefix"]]:
        """Return a cache for `beam_size` hypotheses after a forced `prefix`.

        Besides the prefix, it has room for `capacity` tokens of all hypotheses together. Enough is
        `beam_size` times the longest translation, and less where hypotheses share ancestors.

        A prefix has target ids without BOS and EOS, padded at the end with PAD, and is read in
        one pass. Also returns the log-probability of each prefix token in nats, 0 for PAD.
        The first `decode_step` reads the prefix's last token, or BOS: see `first_tokens`.
        """
        batch, config = cross.segments.shape[0], self.config
        if prefix is None:
            prefix = jnp.zeros((batch, 0), jnp.int32)
        tokens = one_sentence_per_row(prefix)
        shape = (batch, config.num_heads, 0, config.d_model // config.num_heads)
        none = KeyValue.of(*(jnp.zeros(shape, compute_dtype(config)),) * 2)
        prefix_kv, log_probs = (none,) * config.num_layers, jnp.zeros(prefix.shape, jnp.float32)
        if prefix.shape[1]:
            x, prefix_kv = self._decode_all(shift_right(tokens), cross)
            of_all = jax.nn.log_softmax(self.logits(x))
            log_probs = jnp.take_along_axis(of_all, prefix[:, :, None], axis=-1)[:, :, 0]
            log_probs = jnp.where(tokens.segments > 0, log_probs, 0.0)
        prefix_kv = tuple(layer.suited_to(beam_size) for layer in prefix_kv)
        visible = jnp.broadcast_to(
            tokens.segments[:, None] > 0, (batch, beam_size, prefix.shape[1])
        )
        cache = Cache(prefix_kv, visible, tokens.segments.sum(1, dtype=jnp.int32))
        return cache.resize(prefix.shape[1] + capacity), log_probs

    def decode_step(
        self, tokens: Int[Array, "batch beam"], cross: CrossAttentionCache, cache: Cache
    ) -> tuple[Float[Array, "batch beam vocab"], Cache]:
        """Return logits of the token after `tokens`, the newest token of each hypothesis."""
        x, cache = self.next_hidden_states(tokens, cross, cache)
        return self.logits(x), cache

    def next_hidden_states(
        self, tokens: Int[Array, "batch beam"], cross: CrossAttentionCache, cache: Cache
    ) -> tuple[Float[Array, "batch beam d_model"], Cache]:
        """Return the decoder's output for `tokens`, whose logits are those of the token after.

        The hypotheses of a sentence take the axis that a sentence's tokens have in training: they
        are the queries of one attention over the tokens of all of them, and the mask keeps them
        apart.
        """
        visible, entries = cache.claim()
        positions = jnp.broadcast_to(cache.positions[:, None], tokens.shape)
        x, self_attention_kv = self.decoder(
            self.embed_target(Tokens(tokens, positions, jnp.ones_like(tokens))),
            cross.keys_values,
            visible,
            batched_segment_mask(jnp.ones_like(tokens), cross.segments),
            cache.self_attention_kv,
            entries,
        )
        return x, Cache(self_attention_kv, visible, cache.positions + 1)

    def _decode_all(
        self, target: Tokens, cross: CrossAttentionCache
    ) -> tuple[Float[Array, "batch target d_model"], tuple[KeyValue, ...]]:
        """Run the decoder over all target tokens at once, under the look-ahead mask."""
        self_mask = batched_segment_mask(target.segments, target.segments)
        self_mask &= batched_look_ahead_mask(target.positions, target.positions)
        cross_mask = batched_segment_mask(target.segments, cross.segments)
        return self.decoder(self.embed_target(target), cross.keys_values, self_mask, cross_mask)


def first_tokens(prefix: Int[Array, "batch prefix"]) -> Int[Array, " batch"]:
    """Return the input of the first `decode_step` after `prefill`: the last prefix token, or BOS.

    >>> first_tokens(jnp.array([[5, 6, 0], [0, 0, 0]]))
    Array([6, 2], dtype=int32)
    """
    length = (prefix != 0).sum(1, dtype=jnp.int32)
    padded = jnp.concatenate([jnp.full((prefix.shape[0], 1), BOS, prefix.dtype), prefix], axis=1)
    return jnp.take_along_axis(padded, length[:, None], axis=1)[:, 0]
