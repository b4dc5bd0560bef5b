"""Under jax_enable_x64 and strict promotion of types everything works, with float32 parameters."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.config import ModelConfig, SearchConfig
from flaxformer_min.decoding.batches import _search
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, Tokens

TESTS = Path(__file__).parent

MODELS = [
    {},
    {"norm": "pre", "embeddings": "separate", "source_vocab_size": 30, "dropout": 0.1},
    {"positional_encoding": "learned", "max_positions": 64, "dtype": "bfloat16"},
    {"positional_encoding": "halves", "attention": "fused", "feed_forward_dropout": 0.1},
]

SEARCHES = [
    {},
    {"beam_size": 1},
    {"sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9},
    # Numbers of numpy become Python's, or they would make all results float64.
    {"length_penalty": np.float64(0.7)},
    {"sample": True, "temperature": np.float64(0.4), "top_p": np.float64(0.8)},
]


@pytest.fixture(autouse=True)
def x64():
    """The two settings of jax that a program may have chosen before it imports this package."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


def shapes_of(model):
    row = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    batch = Batch(Tokens(row, row, row), Tokens(row, row, row))
    return jax.eval_shape(model.init, jax.random.key(0), batch)["params"]


def dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("settings", MODELS)
def test_parameters_are_float32(settings):
    config = ModelConfig(30, num_layers=1, d_model=8, d_ff=8, num_heads=2, **settings)
    assert dtypes(shapes_of(Transformer(config))) == {"float32"}


@pytest.mark.parametrize("settings, prefix", [*zip(SEARCHES, (3, 0, 3, 0, 0), strict=True)])
def test_a_search_can_be_traced(settings, prefix):
    model = Transformer(ModelConfig(90, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    settings = SearchConfig(**settings)
    arrays = {
        "source": jax.ShapeDtypeStruct((4, 40), jnp.int32),
        "max_length": jax.ShapeDtypeStruct((4,), jnp.int32),
        "line": jax.ShapeDtypeStruct((4,), jnp.int32),
        "prefix": jax.ShapeDtypeStruct((4, prefix), jnp.int32) if prefix else None,
        "seed": jax.ShapeDtypeStruct((4, 2), jnp.uint32) if settings.sample else None,
    }
    search = partial(_search, model, settings, 90, 49, 1, True)
    assert dtypes(jax.eval_shape(search, shapes_of(model), arrays)) == {"float32", "int32", "bool"}


PROGRAM = """
import dataclasses, sys
import jax
from pathlib import Path
from flaxformer_min import Translator, train
from flaxformer_min.storage.restore import restore_params
from training_jobs import small_config

assert jax.numpy.arange(1).dtype == "int64"
config = small_config(Path(sys.argv[1]), validation_sentences=2)
short = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=6))
run = Path(sys.argv[1]) / "run"
assert train(short, run).step == 6
result = train(config, run)
assert result.step == 9, "it must continue"
params = restore_params(run / "checkpoints")[1]
assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
translator = Translator.load(run)
assert len(translator.translate(["one two", ""])) == 2
assert len(translator.attention("one two").source_tokens) > 1
print(translator.score([("one", "uno")])[0].log_prob)
"""


@pytest.mark.slow
def test_a_run_is_trained_continued_and_used(tmp_path):
    settings = {"JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        check=True,
        env={**os.environ, **settings, "PYTHONPATH": paths},
    )
