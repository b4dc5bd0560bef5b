"""What imported models need: another activation, another epsilon, a bias of tied logits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.tokens import Tokens

SIZES = {"vocab_size": 11, "num_layers": 1, "d_model": 8, "d_ff": 12, "num_heads": 2}

FORMULAS = {
    "relu": lambda x: max(0.0, x),
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_feed_forward_network_has_the_activation_of_its_config(name):
    """The textbook's formula, number by number; gelu is not its tanh approximation."""
    network = FeedForward(ModelConfig(**SIZES, activation=name))
    x = jnp.linspace(-4, 4, 24, dtype=jnp.float32).reshape(1, 3, 8)
    params = reference.random_params(network, x)["params"]
    inner, outer = (jax.tree.map(np.float64, params[key]) for key in ("inner", "outer"))
    activated = np.vectorize(FORMULAS[name])(np.float64(x[0]) @ inner["kernel"] + inner["bias"])
    expected = activated @ outer["kernel"] + outer["bias"]
    np.testing.assert_allclose(network.apply({"params": params}, x)[0], expected, atol=2e-6)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_every_layer_norm_has_the_epsilon_of_the_config(norm, monkeypatch):
    """One so large that each norm left with another would show in the logits."""
    monkeypatch.setattr(reference.layer_norm, "__defaults__", (0.5,))
    tiny = reference.tiny(ModelConfig(**SIZES, norm=norm, norm_epsilon=0.5))
    logits = tiny.forward(tiny.params, tiny.batch)
    params = jax.tree.map(np.float64, tiny.params["params"])
    for row in range(2):
        source, target = (Tokens(*(column[row] for column in side)) for side in tiny.batch)
        expected = reference.transformer(params, tiny.config, source, target)["logits"]
        real = np.array(target.segments) > 0
        np.testing.assert_allclose(logits[row][real], expected[real], atol=2e-5)


@pytest.mark.parametrize(
    "embeddings", [pytest.param("shared", marks=pytest.mark.slow), "target_tied"]
)
def test_a_bias_is_added_to_tied_logits(embeddings):
    """In training and in each step of decoding, which share `logits`; it begins as zeros."""
    tiny = reference.tiny(ModelConfig(**SIZES, embeddings=embeddings, output_bias=True))
    params = tiny.params["params"]
    bias = jnp.arange(11, dtype=jnp.float32)
    logits, without = (
        tiny.forward({"params": {**params, "output_bias": each}}, tiny.batch)
        for each in (bias, jnp.zeros(11))
    )
    expected = without + bias[None, None, :]
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    initial = jax.jit(tiny.model.init)(jax.random.key(0), tiny.batch)["params"]["output_bias"]
    assert not initial.any()
