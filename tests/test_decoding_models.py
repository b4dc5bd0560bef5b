"""Models as the device of a search computes them fastest."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import random_params

from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding.models import prepare_for_decoding
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.model.embedding import OUTPUT_KERNEL
from flaxformer_min.model.linear import Linear
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, one_sentence_per_row

CONFIG = ModelConfig(vocab_size=50, num_layers=1, d_model=32, d_ff=64, num_heads=4)
BATCH = Batch(
    one_sentence_per_row(jnp.array([[5, 6, 7, 3], [9, 3, 0, 0]])),
    one_sentence_per_row(jnp.array([[8, 4, 3], [11, 12, 3]])),
)


def model_and_params(**changes):
    model = Transformer(dataclasses.replace(CONFIG, **changes))
    return model, jax.tree.map(lambda leaf: leaf / 4, random_params(model.config))


def logits(model, params):
    return model.apply({"params": params}, BATCH)


def paths(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_a_product_with_a_bfloat16_kernel_rounds_its_operands_and_sums_in_float32():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.float32(rng.normal(size=size)) for size in ((6, 64), (64, 8)))
    params = {"kernel": kernel.astype(jnp.bfloat16), "bias": jnp.zeros(8)}
    found = Linear(8, "float32").apply({"params": params}, x)
    rounded = [np.float64(each.astype(jnp.bfloat16)) for each in (x, kernel)]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, rounded[0] @ rounded[1], rtol=1e-5, atol=1e-5)
    assert np.abs(found - x @ kernel).max() > 1e-3


@pytest.mark.parametrize("embeddings", ["shared", "target_tied", "separate"])
def test_on_a_cpu_a_bfloat16_model_has_bfloat16_products_with_weights_alone(embeddings):
    model, params = model_and_params(dtype="bfloat16", embeddings=embeddings)
    suited, suited_params = prepare_for_decoding(model, params)
    assert suited.config.dtype == "float32"
    for path, leaf in paths(suited_params).items():
        in_bfloat16 = path.endswith(("/kernel", OUTPUT_KERNEL))
        assert leaf.dtype == (jnp.bfloat16 if in_bfloat16 else jnp.float32), path
    assert any(path.endswith(OUTPUT_KERNEL) for path in paths(suited_params)) == (
        embeddings != "separate"
    )
    exact = Transformer(dataclasses.replace(model.config, dtype="float32"))
    expected, found = logits(exact, params), logits(suited, suited_params)
    assert found.dtype == jnp.float32
    assert 0 < np.abs(found - expected).max() < 0.05


@pytest.mark.parametrize("embeddings", ["shared", "target_tied", "separate"])
def test_on_a_cpu_a_float32_model_has_its_tied_table_transposed_and_the_same_logits(embeddings):
    model, params = model_and_params(dtype="float32", embeddings=embeddings)
    suited, suited_params = prepare_for_decoding(model, params)
    added = {path: x for path, x in paths(suited_params).items() if path not in paths(params)}
    tied = {"shared": "embedding", "target_tied": "target_embedding"}.get(embeddings)
    assert [*added] == ([f"{tied}/{OUTPUT_KERNEL}"] if tied else [])
    for kernel in added.values():
        np.testing.assert_array_equal(kernel, np.asarray(params[tied]["table"]).T)
    expected, found = logits(model, params), logits(suited, suited_params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("embeddings", ["shared", "target_tied", "separate"])
def test_on_accelerators_a_bfloat16_model_stores_the_weights_that_it_multiplies(
    platform, embeddings
):
    model, params = model_and_params(dtype="bfloat16", embeddings=embeddings)
    with compiling_for([SimpleNamespace(platform=platform, compute_capability="9.0")]):
        kept, suited_params = prepare_for_decoding(model, params)
        found, expected = logits(kept, suited_params), logits(model, params)
    assert kept is model
    for path, leaf in paths(suited_params).items():
        in_bfloat16 = path.endswith(("/kernel", OUTPUT_KERNEL))
        assert leaf.dtype == (jnp.bfloat16 if in_bfloat16 else jnp.float32), path
    np.testing.assert_array_equal(found, expected)


def test_accelerators_keep_a_float32_model_and_its_parameters():
    model, params = model_and_params(dtype="float32")
    with compiling_for([SimpleNamespace(platform="tpu")]):
        kept, kept_params = prepare_for_decoding(model, params)
    assert kept is model and kept_params is params
