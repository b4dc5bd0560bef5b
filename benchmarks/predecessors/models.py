"""Two recurrent encoder-decoders: through one vector, and with attention.

          fixed vector                            with attention

       y_1    y_2    EOS                       y_1    y_2    EOS
        |      |      |                         |      |      |
       h_1 -> h_2 -> h_3                     [c_1;h_1]-[c_2;h_2]-[c_3;h_3]
        |                                       each c_t is a weighted sum
        | one vector                            of all the source states
        |                                       |      |      |
       s_1 <- s_2 <- s_3                       s_1 <- s_2 <- s_3
        |      |      |                         |      |      |
       x_1    x_2    EOS                       x_1    x_2    EOS

The encoder reads the source from its end, so that the first words of both sentences are near each
other (Sutskever et al. 2014, "Sequence to Sequence Learning with Neural Networks", section 3.3).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.embedding import Embedding
from flaxformer_min.model.linear import Linear
from flaxformer_min.model.masks import batched_segment_mask
from flaxformer_min.tokens import Batch, Tokens, one_sentence_per_row, shift_right
from predecessors.global_attention import batched_global_attention
from predecessors.gru import GRU


class Encoded(NamedTuple):
    """The source as the decoder reads it: the state of each layer after each token."""

    source: Tokens
    states: Float[Array, "rows source layers width"]

    def sentence_vectors(
        self, segments: Int[Array, "rows target"]
    ) -> Float[Array, "rows target layers width"]:
        """Return, for each target token, the state after all of its source: zeros for padding."""
        own = batched_segment_mask(segments, self.source.segments)
        last_read = own & (self.source.positions == 0)[:, None, :]
        return jnp.einsum("rts,rslw->rtlw", last_read.astype(jnp.float32), self.states)


class RecurrentCache(NamedTuple):
    """The state of each hypothesis, as large after a hundred tokens as after one."""

    states: Float[Array, "batch beam layers width"]

    def reorder(self, parents: Int[Array, "batch beam"]) -> "RecurrentCache":
        """Return the cache in which hypothesis i continues hypothesis `parents[i]`."""
        return RecurrentCache(jnp.take_along_axis(self.states, parents[:, :, None, None], axis=1))

    def resize(self, capacity: int) -> "RecurrentCache":
        """Return the cache as it is."""
        return self

    def is_full(self) -> Bool[Array, " batch"]:
        """Return that there is always room."""
        return jnp.zeros(self.states.shape[0], bool)


class FixedVectorRNN(nn.Module):
    """An encoder-decoder through one vector (Sutskever et al. 2014; Cho et al. 2014).

        s_i = GRU(s_{i+1}, x_i)             the source, from its end
        h_0 = s_1                           all that the decoder knows of it
        h_t = GRU(h_{t-1}, y_{t-1})         the target so far
        p(y_t) = softmax(E tanh(W h_t))     E is the table of the embeddings

    `config.d_model` is the width of the embeddings, `config.d_ff` that of the states. Each of
    `config.num_layers` layers passes on a vector of its own.
    """

    config: ModelConfig

    def setup(self):
        """Create the modules."""
        config = self.config
        self.embedding = Embedding(config, config.vocab_size)
        self.encoder = [GRU(config.d_ff) for _ in range(config.num_layers)]
        self.decoder = [GRU(config.d_ff) for _ in range(config.num_layers)]
        self.output = Linear(config.d_model, "float32")
        self.dropout = Dropout(config.dropout)

    def __call__(self, batch: Batch) -> Float[Array, "rows target vocab"]:
        """Return logits of every target token, given the source and the target before it."""
        return self.logits(self.hidden_states(batch))

    def hidden_states(self, batch: Batch) -> Float[Array, "rows target d_model"]:
        """Return the decoder's output for every target token (teacher forcing)."""
        encoded = self.precompute_cross_attention(self.encode(batch.source), batch.source)
        states = self._read_target(batch.target, encoded)
        return self._output(states[:, :, -1], batch.target.segments, encoded)

    def logits(self, x: Float[Array, "rows target d_model"]) -> Float[Array, "rows target vocab"]:
        """Return float32 logits of the vocabulary."""
        return self.embedding.logits(x)

    def encode(self, source: Tokens) -> Float[Array, "rows source layers width"]:
        """Return the states of all layers after every source token."""
        next_segments = jnp.pad(source.segments[:, 1:], ((0, 0), (0, 1)))
        first = source.segments != next_segments  # the first that is read is the last that is said
        zeros = jnp.zeros((*first.shape, self.config.d_ff), jnp.float32)
        x, states = self.embedding(source), []
        for layer in self.encoder:
            x = layer(x, first, zeros, reverse=True)
            states.append(x)
            x = self.dropout(x)
        return jnp.stack(states, axis=2)

    def precompute_cross_attention(
        self, encoded: Float[Array, "rows source layers width"], source: Tokens
    ) -> Encoded:
        """Return the encoded source with its tokens; nothing is left to compute."""
        return Encoded(source, encoded)

    def prefill(
        self,
        cross: Encoded,
        beam_size: int,
        capacity: int,
        prefix: Int[Array, "batch prefix"] | None = None,
    ) -> tuple[RecurrentCache, Float[Array, "batch prefix"]]:
        """Return the state after a forced prefix, and the log-probability of each of its tokens.

        The first `decode_step` reads the prefix's last token, or BOS, as with the Transformer.
        """
        batch = cross.states.shape[0]
        state = cross.sentence_vectors(jnp.ones((batch, 1), jnp.int32))
        log_probs = jnp.zeros((batch, 0), jnp.float32)
        if prefix is not None and prefix.shape[1]:
            tokens = one_sentence_per_row(prefix)
            states = self._read_target(tokens, cross)
            x = self._output(states[:, :, -1], tokens.segments, cross)
            chosen = jnp.take_along_axis(
                jax.nn.log_softmax(self.logits(x)), prefix[:, :, None], axis=-1
            )
            log_probs = chosen[:, :, 0] * tokens.segments.astype(jnp.float32)
            length = tokens.segments.sum(1, dtype=jnp.int32)[:, None, None, None]
            before = jnp.concatenate([state, states], axis=1)
            state = jnp.take_along_axis(before, length, axis=1)
        return RecurrentCache(jnp.repeat(state, beam_size, axis=1)), log_probs

    def decode_step(
        self, tokens: Int[Array, "batch beam"], cross: Encoded, cache: RecurrentCache
    ) -> tuple[Float[Array, "batch beam vocab"], RecurrentCache]:
        """Return logits of the token after `tokens`, the newest token of each hypothesis."""
        ones = jnp.ones_like(tokens)
        x, states = self.embedding(Tokens(tokens, 0 * tokens, ones)), []
        for number, layer in enumerate(self.decoder):
            x = layer.step(x, cache.states[:, :, number])
            states.append(x)
        logits = self.logits(self._output(x, ones, cross))
        return logits, RecurrentCache(jnp.stack(states, axis=2))

    def _read_target(
        self, target: Tokens, encoded: Encoded
    ) -> Float[Array, "rows target layers width"]:
        """Return the states of all layers after every token of the target, shifted right."""
        x, states = self.embedding(shift_right(target)), []
        first, initial = target.positions == 0, encoded.sentence_vectors(target.segments)
        for number, layer in enumerate(self.decoder):
            x = layer(x, first, initial[:, :, number])
            states.append(x)
            x = self.dropout(x)
        return jnp.stack(states, axis=2)

    def _output(
        self,
        states: Float[Array, "rows target width"],
        segments: Int[Array, "rows target"],
        encoded: Encoded,
    ) -> Float[Array, "rows target d_model"]:
        """Return tanh(W h_t) for the last layer's states."""
        return jnp.tanh(self.output(states))


class AttentionalRNN(FixedVectorRNN):
    """The same, with attention over the encoder's states (Luong et al. 2015).

        c_t = Σ a_t(s) s_s                       see `global_attention`
        p(y_t) = softmax(E tanh(W [c_t; h_t]))   equations 5 and 6

    Attention reads the states and is not read by them (no input feeding), so it is computed for all
    target tokens at once. Its weights are sown as "attention": [rows target source].
    """

    def _output(
        self,
        states: Float[Array, "rows target width"],
        segments: Int[Array, "rows target"],
        encoded: Encoded,
    ) -> Float[Array, "rows target d_model"]:
        mask = batched_segment_mask(segments, encoded.source.segments)
        context, weights = batched_global_attention(states, encoded.states[:, :, -1], mask)
        self.sow("intermediates", "attention", weights)
        return jnp.tanh(self.output(jnp.concatenate([context, states], axis=-1)))
