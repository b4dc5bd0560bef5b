"""The gated recurrent unit (Cho et al. 2014, "Learning Phrase Representations using RNN
Encoder-Decoder for Statistical Machine Translation", section 2.3)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.model.linear import Linear


def gru_step(
    state: Float[Array, "*batch width"],
    x: Float[Array, "*batch gates"],
    kernel: Float[Array, "width gates"],
    bias: Float[Array, " width"],
) -> Float[Array, "*batch width"]:
    """Return the state after one more token; `x` is W x + b of the token, for three gates.

        r = σ(W_r x + b_r + U_r h)
        z = σ(W_z x + b_z + U_z h)
        n = tanh(W_n x + b_n + r ∘ (U_n h + b))
        h' = z ∘ h + (1 - z) ∘ n

    The reset gate r is applied after the product with U_n, so that one product serves all gates.
    Where z is near one the state is copied, and so is its gradient.

    A bias of 100 opens the update gate z, and the state stays:

    >>> x = jnp.concatenate([jnp.zeros(2), jnp.full(2, 100.0), jnp.ones(2)])
    >>> gru_step(jnp.array([0.5, -1.0]), x, jnp.zeros((2, 6)), jnp.zeros(2))
    Array([ 0.5, -1. ], dtype=float32)
    """
    x_reset, x_update, x_new = jnp.split(x, 3, axis=-1)
    h_reset, h_update, h_new = jnp.split(state @ kernel, 3, axis=-1)
    bias = bias.reshape((1,) * (state.ndim - 1) + bias.shape)
    reset, update = jax.nn.sigmoid(x_reset + h_reset), jax.nn.sigmoid(x_update + h_update)
    new = jnp.tanh(x_new + reset * (h_new + bias))
    return update * state + (1 - update) * new


class GRU(nn.Module):
    """A layer of gated recurrent units.

    width: the size of its state.
    """

    width: int

    def setup(self):
        """Create the weights; the recurrent ones of each gate are orthogonal."""
        self.input = Linear(3 * self.width, "float32")
        orthogonal = nn.initializers.orthogonal()

        def three_gates(key: Array, shape: tuple[int, int]) -> Array:
            keys = jax.random.split(key, 3)
            return jnp.concatenate([orthogonal(key, shape, jnp.float32) for key in keys], axis=1)

        self.kernel = self.param("kernel", three_gates, (self.width, self.width))
        self.bias = self.param("bias", nn.initializers.zeros, (self.width,), jnp.float32)

    def __call__(
        self,
        x: Float[Array, "rows length features"],
        first: Bool[Array, "rows length"],
        initial: Float[Array, "rows length width"],
        reverse: bool = False,
    ) -> Float[Array, "rows length width"]:
        """Return the state after each token, read from left to right or in `reverse`.

        A token that is the `first` of its sentence is read from its `initial` state, whatever was
        read before it: another sentence of the row, or padding. The products with the input are
        computed for all tokens at once; those with the state wait for the token before.
        """

        def read(state: Array, token: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            x, first, initial = token
            state = self._step(jnp.where(first, initial, state), x)
            return state, state

        tokens = self.input(x), first[:, :, None], initial
        tokens = jax.tree.map(lambda column: column.swapaxes(0, 1), tokens)
        nothing = jnp.zeros((x.shape[0], self.width), jnp.float32)
        _, states = jax.lax.scan(read, nothing, tokens, reverse=reverse)
        return states.swapaxes(0, 1)

    def step(
        self, x: Float[Array, "*batch features"], state: Float[Array, "*batch width"]
    ) -> Float[Array, "*batch width"]:
        """Return the state after one more token, for decoding."""
        return self._step(state, self.input(x))

    def _step(self, state: Array, x: Array) -> Array:
        return gru_step(state, x, self.kernel, self.bias)
