"""All of figure 1.

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
|   Multi-Head    |   |     Masked      |     (3.2.3)  never sees its future
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
from flaxformer_min.model.attention import KeyValue
from flaxformer_min.model.cache import NOT_WRITTEN, Cache, Memory
from flaxformer_min.model.decoder import Decoder
from flaxformer_min.model.embedding import Embedding, OutputProjection
from flaxformer_min.model.encoder import Encoder
from flaxformer_min.model.masks import (
    batched_ancestor_mask,
    batched_look_ahead_mask,
    batched_segment_mask,
)
from flaxformer_min.tokens import BOS, Batch, Tokens, one_sentence_per_row, shift_right


class Transformer(nn.Module):
    """From a source and the target so far to scores for the next token.

    >>> model = Transformer(ModelConfig(vocab_size=10, num_layers=1, d_model=8, d_ff=8))
    >>> source = one_sentence_per_row(jnp.array([[5, 6, 3]]))
    >>> target = one_sentence_per_row(jnp.array([[7, 3]]))
    >>> params = model.init(jax.random.key(0), Batch(source, target))
    >>> model.apply(params, Batch(source, target)).shape
    (1, 2, 10)
    """

    config: ModelConfig

    def setup(self):
        """The boxes of the figure; which embeddings are one matrix is the config's choice."""
        config = self.config
        source_vocab_size = config.source_vocab_size or config.vocab_size
        if config.embeddings == "shared":
            self.embedding = Embedding(config, config.vocab_size)
            source, target, output = self.embedding, self.embedding, self.embedding
        else:
            self.source_embedding = source = Embedding(config, source_vocab_size)
            self.target_embedding = target = output = Embedding(config, config.vocab_size)
        if config.embeddings == "separate":
            self.output_projection = output = OutputProjection(config.vocab_size)
        self.embed_source, self.embed_target, self.output = source, target, output
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def __call__(self, batch: Batch) -> Float[Array, "batch target vocab"]:
        """Scores for every target token, each seeing the source and the target before it."""
        return self.logits(self.features(batch))

    def features(self, batch: Batch) -> Float[Array, "batch target d_model"]:
        """What the output projection reads, for every target token (teacher forcing)."""
        x, _ = self._read(shift_right(batch.target), self.remember(batch.source))
        return x

    def logits(self, x: Float[Array, "batch target d_model"]) -> Float[Array, "batch target vocab"]:
        """The box "Linear", in float32. The softmax is the loss's and the search's."""
        return self.output.logits(x)

    def encode(self, source: Tokens) -> Float[Array, "batch source d_model"]:
        """The left half of the figure."""
        mask = batched_segment_mask(source.segments, source.segments)
        return self.encoder(self.embed_source(source), mask)

    def remember(self, source: Tokens) -> Memory:
        """Encode the source, and project once what every decoder layer will attend to."""
        return Memory(source.segments, self.decoder.keys_values(self.encode(source)))

    def start(
        self,
        memory: Memory,
        beam_size: int,
        max_length: int,
        prefix: Int[Array, "batch prefix"] | None = None,
    ) -> tuple[Cache, Float[Array, "batch prefix"]]:
        """Room for `beam_size` hypotheses of `max_length` tokens, after a forced `prefix` if given.

        A prefix holds target ids, without BOS and EOS, padded at the end with PAD. It is read in
        one pass. Returns the cache and the log-probability of each of its tokens in nats, 0 for
        PAD. The first `step` reads the prefix's last token, or BOS: see `first_tokens`.
        """
        batch, config = memory.segments.shape[0], self.config
        if prefix is None:
            prefix = jnp.zeros((batch, 0), jnp.int32)
        length = prefix.shape[1]
        columns = length + max_length
        shape = (batch, config.num_heads, columns * beam_size, config.d_model // config.num_heads)
        empty = KeyValue.of(*(jnp.zeros(shape, config.dtype),) * 2)
        ancestors = jnp.full((batch, beam_size, columns), NOT_WRITTEN)
        if not length:
            cache = Cache((empty,) * config.num_layers, ancestors, jnp.int32(0), prefix.sum(1))
            return cache, jnp.zeros((batch, 0))
        tokens = one_sentence_per_row(prefix)
        x, own = self._read(shift_right(tokens), memory)
        log_probs = jax.nn.log_softmax(self.logits(x))
        chosen = jnp.take_along_axis(log_probs, prefix[:, :, None], axis=-1)[:, :, 0]
        first_slot = slice(0, length * beam_size, beam_size)
        written = tuple(
            KeyValue.of(
                empty.keys.at[:, :, first_slot].set(new.keys),
                empty.values.at[:, :, first_slot].set(new.values),
            )
            for new in own
        )
        ancestors = ancestors.at[:, :, :length].set(tokens.segments[:, None, :] - 1)
        cache = Cache(written, ancestors, jnp.int32(length), tokens.segments.sum(1))
        return cache, chosen * tokens.segments

    def step(
        self, tokens: Int[Array, "batch beam"], memory: Memory, cache: Cache
    ) -> tuple[Float[Array, "batch beam vocab"], Cache]:
        """Scores for what follows `tokens`, the newest token of each hypothesis.

        The hypotheses of a sentence stand where in training its tokens stand: they are the queries
        of one attention over what any of them has written, and the mask keeps them apart. There may
        be fewer of them than the cache has room for.
        """
        slots = jnp.arange(cache.ancestors.shape[1])
        newest = jnp.broadcast_to(slots[None, : tokens.shape[1], None], (*tokens.shape, 1))
        ancestors = jax.lax.dynamic_update_slice(cache.ancestors, newest, (0, 0, cache.column))
        positions = jnp.broadcast_to(cache.positions[:, None], tokens.shape)
        x, written = self.decoder(
            self.embed_target(Tokens(tokens, positions, jnp.ones_like(tokens))),
            memory.keys_values,
            batched_ancestor_mask(ancestors[:, : tokens.shape[1]], slots),
            batched_segment_mask(jnp.ones_like(tokens), memory.segments),
            cache.written,
            cache.column * slots.size,
        )
        cache = Cache(written, ancestors, cache.column + 1, cache.positions + 1)
        return self.logits(x), cache

    def _read(
        self, target: Tokens, memory: Memory
    ) -> tuple[Float[Array, "batch target d_model"], tuple[KeyValue, ...]]:
        self_mask = batched_segment_mask(target.segments, target.segments)
        self_mask &= batched_look_ahead_mask(target.positions, target.positions)
        cross_mask = batched_segment_mask(target.segments, memory.segments)
        return self.decoder(self.embed_target(target), memory.keys_values, self_mask, cross_mask)


def first_tokens(prefix: Int[Array, "batch prefix"]) -> Int[Array, " batch"]:
    """What the first `Transformer.step` after `start` reads: the prefix's last token, or BOS.

    >>> first_tokens(jnp.array([[5, 6, 0], [0, 0, 0]]))
    Array([6, 2], dtype=int32)
    """
    length = (prefix != 0).sum(1)
    padded = jnp.concatenate([jnp.full((prefix.shape[0], 1), BOS), prefix], axis=1)
    return jnp.take_along_axis(padded, length[:, None], axis=1)[:, 0]
