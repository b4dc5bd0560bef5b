"""docs/extending.md is true: its code runs from top to bottom, and does what the page says."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min import Batch, one_sentence_per_row, search
from flaxformer_min.config import SearchConfig
from flaxformer_min.kernels.key_value import KeyValue

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def the_log_stays_as_it_is():
    """A block of the page switches on the log, for the whole process."""
    root, package = logging.getLogger(), logging.getLogger("flaxformer_min")
    handlers, levels = root.handlers[:], (root.level, package.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    package.setLevel(levels[1])


@pytest.mark.slow
@pytest.mark.usefixtures("the_log_stays_as_it_is")
def test_the_code_of_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, block in enumerate(BLOCKS, start=1):
        exec(compile(block, f"docs/extending.md, block {number}", "exec"), names)
    assert names["result"].run.config().model.architecture == "BagOfWords"
    check_linear_attention(names)
    check_rotation(names)
    check_gate_and_norm(names)
    for name in ("linear", "rotary", "gated", "rms"):
        check_decoding(names[name])
    check_binary_encoding(names)
    check_focal_loss(names)
    check_orthogonal(names)


def check_linear_attention(names):
    """A loop over queries and keys: feature maps, weights over their sum, masked keys left out."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 4, 2))  # [position d_k] each
    mask = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)

    def feature(x):
        return np.where(x > 0, x, np.expm1(x)) + 1

    expected = np.zeros((3, 2))
    for q in range(3):
        weights = [feature(query[q]) @ feature(key[k]) * mask[q, k] for k in range(4)]
        for k in range(4):
            expected[q] += weights[k] * value[k] / (sum(weights) or 1)
    attended = KeyValue(
        jnp.asarray(key, jnp.float32)[None, None], jnp.asarray(value, jnp.float32)[None, None]
    )
    module = names["LinearAttention"](names["config"].model)
    query = jnp.asarray(query[:3], jnp.float32)[None, None]
    found = module.attend(query, attended, mask[None], None)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-5, atol=1e-6)


def check_rotation(names):
    """Pairs of features are complex numbers, turned by an angle for each position."""
    x = np.random.default_rng(0).normal(size=(1, 1, 3, 4)).astype(np.float32)
    turned = (x[..., :2] + 1j * x[..., 2:]) * np.exp(
        1j * np.array([0, 5, 7])[:, None] * np.array([1, 0.01])
    )
    found = names["rotate"](jnp.asarray(x), jnp.array([[0, 5, 7]]))
    np.testing.assert_allclose(found[..., :2] + 1j * found[..., 2:], turned, rtol=1e-5, atol=1e-6)


def check_gate_and_norm(names):
    """Shazeer 2020, equation 6, and a division by the root of the mean of squares, in numpy."""
    x = np.random.default_rng(1).normal(size=(2, 3, 32)).astype(np.float32)
    module = names["GatedFeedForward"](names["config"].model)
    params = module.init(jax.random.key(0), jnp.asarray(x))
    inner, outer, gate = (params["params"][name]["kernel"] for name in ("inner", "outer", "gate"))
    opened = x @ gate
    expected = (opened / (1 + np.exp(-opened)) * (x @ inner)) @ outer
    np.testing.assert_allclose(module.apply(params, jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)
    box = names["AddAndRMSNorm"](names["config"].model)
    found, _ = box.init_with_output(jax.random.key(0), *(jnp.asarray(x),) * 2, method="add")
    norm = np.sqrt(np.square(2 * x).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found, 2 * x / norm, rtol=1e-4)


def check_decoding(model):
    """Decoding with a cache gives each hypothesis the log-probability of teacher forcing."""
    source, config = jnp.array([[5, 6, 7, 3]]), SearchConfig(beam_size=3, max_extra_tokens=3)
    batch = Batch(*(one_sentence_per_row(source),) * 2)
    params = jax.jit(model.init)(jax.random.key(1), batch)["params"]
    found = jax.jit(lambda params: search(model, params, source, config))(params)
    ids = found.ids[:, 0]
    batch = Batch(batch.source, one_sentence_per_row(ids))
    log_probs = jax.nn.log_softmax(jax.jit(model.apply)({"params": params}, batch))
    each = jnp.take_along_axis(log_probs, ids[:, :, None], axis=-1)[:, :, 0]
    total = jnp.where(ids > 0, each, 0).sum()
    np.testing.assert_allclose(found.log_prob[0, 0], total, rtol=1e-5)


def check_binary_encoding(names):
    encoding = names["binary_encoding"](jnp.array([5]), 10)
    assert encoding.tolist() == [[1, 0, 1, 0, 0, 0, 0, 0, 1, 0]]


def check_focal_loss(names):
    """Of probability 1/4: (3/4)² ln 4."""
    logits = jnp.log(jnp.array([0.25, 0.5, 0.25]))
    assert abs(names["focal_loss"](logits, 0) - 0.5625 * np.log(4)) < 1e-6
    assert isinstance(names["metrics"]["loss"], jax.Array)


def check_orthogonal(names):
    """U S Vᵀ becomes nearly U Vᵀ, as large as an update of Adam."""
    matrix = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    found = np.asarray(names["orthogonal"](jnp.asarray(matrix))) / (0.2 * 3)
    assert np.linalg.norm(found - u @ v, 2) < 0.4
