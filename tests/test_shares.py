"""Each device updates its share of the parameters, and all together the whole."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.config import Config, ModelConfig, TrainingConfig
from flaxformer_min.model.target import compiling_for
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.training import shares
from flaxformer_min.training.step import TrainState, init_state

TREE = {
    "half": np.arange(5, dtype=np.float16),
    "matrix": np.ones((3, 2), np.float32),
    "scalar": np.float32(2),
    "vector": np.arange(6, dtype=np.float32),
}
"""Arrays that two devices cannot halve; scalar and vector, in float32, are one vector of seven."""

TWICE = {**TREE, "another matrix": 2 * TREE["matrix"], "another vector": 10 + TREE["vector"]}
"""Two float32 arrays of a shape, which a GPU computes together."""


def on_two(function, *trees):
    """Call a function of what both devices have, on both."""
    mapped = jax.pmap(
        lambda _, *trees: function(*trees), "devices", in_axes=(0, *[None] * len(trees))
    )
    return mapped(np.zeros(2), *trees)


def test_a_share_is_a_block_of_rows_and_zeros_follow_the_last():
    found = on_two(shares.own, TREE)
    np.testing.assert_array_equal(found[0], [[0, 1, 2], [3, 4, 0]])
    np.testing.assert_array_equal(found[1], [[[1, 1], [1, 1]], [[1, 1], [0, 0]]])
    np.testing.assert_array_equal(found[2], [[2, 0, 1, 2], [3, 4, 5, 0]])


def test_a_tree_without_vectors_is_summed_by_shares():
    found = on_two(shares.sum_of_share, {"matrix": TREE["matrix"]})
    assert jax.tree.map(jnp.shape, found) == [(2, 2, 2)]


def test_shares_of_a_sum_are_those_of_twice_the_array():
    found = on_two(shares.sum_of_share, TREE)
    np.testing.assert_array_equal(found[0], [[0, 2, 4], [6, 8, 0]])
    np.testing.assert_array_equal(found[1], [[[2, 2], [2, 2]], [[2, 2], [0, 0]]])
    np.testing.assert_array_equal(found[2], [[4, 0, 2, 4], [6, 8, 10, 0]])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "tree", [TREE, {"matrix": TREE["matrix"]}, TWICE], ids=["all", "no vector", "twice"]
)
def test_gathered_shares_are_the_array(tree, platform):
    def back(tree):
        return shares.gathered(shares.own(tree), tree)

    with compiling_for([SimpleNamespace(platform=platform, compute_capability="9.0")]):
        found = on_two(back, tree)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, [y, y]), found, tree)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_norm_of_the_shares_is_that_of_the_whole(platform):
    tree = {name: np.float32(array) for name, array in TREE.items()}
    tree["another matrix"] = 2 * tree["matrix"]
    with compiling_for([SimpleNamespace(platform=platform, compute_capability="9.0")]):
        found = on_two(lambda tree: shares.norm(shares.own(tree)), tree)
    expected = (0 + 1 + 4 + 9 + 16 + 6 + 4 + 0 + 1 + 4 + 9 + 16 + 25 + 24) ** 0.5
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_checkpoint_does_not_depend_on_the_number_of_devices(clip_norm):
    """A vocabulary of 13 words, which no number of devices divides."""
    model = Transformer(ModelConfig(vocab_size=13, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    training = TrainingConfig(clip_norm=clip_norm, ema_decay=0.9)
    state = init_state(model, Config(model=model.config, training=training))
    content = jax.device_get({**state.to_dict(), "key": None})
    adam = content["opt_state"][-1] if clip_norm else content["opt_state"]
    shapes = jax.tree.map(jnp.shape, state.params)
    assert jax.tree.map(jnp.shape, [adam.mu, adam.nu]) == [shapes, shapes]
    random = np.random.default_rng(0)
    mu, nu = (
        jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), state.params)
        for _ in range(2)
    )
    adam = adam._replace(count=np.int32(5), mu=mu, nu=nu)
    opt_state = (content["opt_state"][0], adam) if clip_norm else adam
    divided = TrainState.from_dict({**content, "key": state.key, "opt_state": opt_state})
    table = jax.tree.leaves(divided.opt_state)[1]
    assert {shard.data.shape[0] for shard in table.addressable_shards} == {1}
    back = divided.to_dict()["opt_state"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), opt_state)
