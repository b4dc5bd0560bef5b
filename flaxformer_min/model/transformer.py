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
from flaxformer_min.kernels.key_value import KeyValue
from flaxformer_min.model.cache import Cache, CrossAttentionCache
from flaxformer_min.model.decoder import Decoder, DecoderLayer
from flaxformer_min.model.dropout import Rows
from flaxformer_min.model.embedding import Embedding, OutputProjection
from flaxformer_min.model.encoder import Encoder, EncoderLayer
from flaxformer_min.model.masks import batched_look_ahead_mask, batched_segment_mask
from flaxformer_min.model.parameters import parameter
from flaxformer_min.model.positions import PositionFunction
from flaxformer_min.tokens import BOS, Batch, Places, Tokens, one_sentence_per_row, shift_right


class Transformer(nn.Module):
    """The encoder-decoder Transformer: from source and target so far to logits of the next token.

    encoder_layer, decoder_layer: classes of the layers, built from a `ModelConfig`.
    position_function: used instead of `config.positional_encoding`, if given.

    >>> model = Transformer(ModelConfig(vocab_size=10, num_layers=1, d_model=8, d_ff=8))
    >>> source = one_sentence_per_row(jnp.array([[5, 6, 3]]))
    >>> target = one_sentence_per_row(jnp.array([[7, 3]]))
    >>> params = model.init(jax.random.key(0), Batch(source, target))
    >>> model.apply(params, Batch(source, target)).shape
    (1, 2, 10)
    """

    config: ModelConfig
    encoder_layer: type[nn.Module] = EncoderLayer
    decoder_layer: type[nn.Module] = DecoderLayer
    position_function: PositionFunction | None = None

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
        self.encoder = Encoder(config, self.encoder_layer)
        self.decoder = Decoder(config, self.decoder_layer)

    def __call__(self, batch: Batch) -> Float[Array, "batch target vocab"]:
        """Return logits of every target token, given the source and the target before it."""
        return self.logits(self.hidden_states(batch))

    def hidden_states(
        self, batch: Batch, rows: Rows = None
    ) -> Float[Array, "batch target d_model"]:
        """Return the decoder's output for every target token (teacher forcing).

        `rows` are the numbers of the rows, by which dropout draws its masks.
        """
        cross = self.precompute_cross_attention(self.encode(batch.source, rows), batch.source)
        x, _ = self._decode_all(shift_right(batch.target), cross, rows)
        return x

    def logits(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch vocab"]:
        """Apply the output projection, in float32. The softmax is part of loss and search."""
        logits = self.output.logits(x)
        if not self.config.output_bias:
            return logits
        return logits + self.output_bias.reshape(*[1] * (x.ndim - 1), -1)

    def encode(self, source: Tokens, rows: Rows = None) -> Float[Array, "batch source d_model"]:
        """Return the encoder's output; `rows` as for `hidden_states`."""
        mask = batched_segment_mask(source.segments, source.segments)
        x = self.embed_source(source, rows)
        return self.encoder(x, mask, Places(source.positions, rows))

    def precompute_cross_attention(
        self, encoded: Float[Array, "batch source d_model"], source: Tokens
    ) -> CrossAttentionCache:
        """Project the encoded source to keys and values once, for all steps of decoding."""
        keys_values = self.decoder.cross_attention_kv(encoded, Places(source.positions))
        return CrossAttentionCache(source.segments, keys_values)

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
        if prefix is None:
            prefix = jnp.zeros((cross.segments.shape[0], 0), jnp.int32)
        tokens = one_sentence_per_row(prefix)
        batch, length = prefix.shape
        if length:
            x, prefix_kv = self._decode_all(shift_right(tokens), cross)
            of_all = jax.nn.log_softmax(self.logits(x))
            log_probs = jnp.take_along_axis(of_all, prefix[:, :, None], axis=-1)[:, :, 0]
            log_probs = jnp.where(tokens.segments > 0, log_probs, 0.0)
        else:
            nothing = jnp.zeros((batch, 0, self.config.d_model), jnp.float32)
            prefix_kv = self.decoder.self_attention_kv(nothing, Places(tokens.positions))
            log_probs = jnp.zeros(prefix.shape, jnp.float32)
        visible = jnp.broadcast_to(tokens.segments[:, None] > 0, (batch, beam_size, length))
        cache = Cache(prefix_kv, visible, tokens.segments.sum(1, dtype=jnp.int32))
        return cache.resize(length + capacity), log_probs

    def decode_step(
        self, tokens: Int[Array, "batch beam"], cross: CrossAttentionCache, cache: Cache
    ) -> tuple[Float[Array, "batch beam vocab"], Cache]:
        """Return logits of the token after `tokens`, the newest token of each hypothesis.

        The hypotheses of a sentence take the axis that a sentence's tokens have in training: they
        are the queries of one attention over the tokens of all of them, and the mask keeps them
        apart.
        """
        visible, entries = cache.claim()
        positions = jnp.broadcast_to(cache.positions[:, None], tokens.shape)
        newest = Tokens(tokens, positions, jnp.ones_like(tokens))
        cross_mask = batched_segment_mask(newest.segments, cross.segments)
        x, self_attention_kv = self.decoder(
            self.embed_target(newest),
            cross.keys_values,
            visible,
            cross_mask,
            Places(positions),
            cache.self_attention_kv,
            entries,
        )
        return self.logits(x), Cache(self_attention_kv, visible, cache.positions + 1)

    def _decode_all(
        self, target: Tokens, cross: CrossAttentionCache, rows: Rows = None
    ) -> tuple[Float[Array, "batch target d_model"], tuple[KeyValue, ...]]:
        """Run the decoder over all target tokens at once, under the look-ahead mask."""
        self_mask = batched_segment_mask(target.segments, target.segments)
        self_mask &= batched_look_ahead_mask(target.positions, target.positions)
        cross_mask = batched_segment_mask(target.segments, cross.segments)
        x, places = self.embed_target(target, rows), Places(target.positions, rows)
        return self.decoder(x, cross.keys_values, self_mask, cross_mask, places)


def first_tokens(prefix: Int[Array, "batch prefix"]) -> Int[Array, " batch"]:
    """Return the input of the first `decode_step` after `prefill`: the last prefix token, or BOS.

    >>> first_tokens(jnp.array([[5, 6, 0], [0, 0, 0]]))
    Array([6, 2], dtype=int32)
    """
    length = (prefix != 0).sum(1, dtype=jnp.int32)
    padded = jnp.concatenate([jnp.full((prefix.shape[0], 1), BOS, prefix.dtype), prefix], axis=1)
    return jnp.take_along_axis(padded, length[:, None], axis=1)[:, 0]
