"""Screening in bfloat16: greedy decoding's next token is that of float32."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import LINES, make_tiny_run

from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding import screening
from flaxformer_min.decoding.choices import best_of
from flaxformer_min.decoding.ensemble import search_of
from flaxformer_min.decoding.models import suited_to_device
from flaxformer_min.decoding.search import Rules
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runtime import devices
from flaxformer_min.tokens import EOS


def params_of(table, bias=None, embeddings="shared"):
    """What a search needs of a model's parameters, with a tied table."""
    name = screening.TIED_TABLES[embeddings]
    tied = {"table": jnp.asarray(table), screening.OUTPUT_KERNEL: jnp.asarray(table.T)}
    found = {name: tied | screening.screening_parameters(table)}
    return found if bias is None else found | {"output_bias": jnp.asarray(bias)}


def expected_best(table, x, bias=0.0, suppressed=()):
    """By numpy in float64: the likeliest regular token, its logit, and that of EOS."""
    logits = np.float64(x) @ np.float64(table).T + bias
    end = logits[:, EOS].copy()
    logits[:, [0, 1, 2, 3, *suppressed]] = -np.inf
    return logits.argmax(1), logits.max(1), end


def screened(params, x, suppressed=(), embeddings="shared"):
    vocab = params[screening.TIED_TABLES[embeddings]]["table"].shape[0]
    model = Transformer(
        ModelConfig(vocab_size=vocab, d_model=x.shape[1], num_heads=1, embeddings=embeddings)
    )
    assert screening.has_screening(model, params)
    found = jax.jit(
        lambda params, x: screening.screened_best(model, params, x[:, None], suppressed)
    )(params, jnp.asarray(x))
    return jax.tree.map(lambda each: np.asarray(each)[:, 0], found)


def check(found, expected):
    token, logit, end = expected
    np.testing.assert_array_equal(found.token, token)
    np.testing.assert_allclose(found.logit, logit, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.end, end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("embeddings", ["shared", "target_tied"])
def test_the_next_token_is_the_likeliest_in_float32(embeddings):
    rng = np.random.default_rng(0)
    table, x = (np.float32(rng.normal(size=size)) for size in ((203, 32), (50, 32)))
    bias = np.float32(rng.normal(size=203))
    for given, suppressed in ((None, ()), (bias, ()), (bias, (7, 202))):
        found = screened(params_of(table, given, embeddings), x, suppressed, embeddings)
        check(found, expected_best(table, x, 0.0 if given is None else given, suppressed))


@pytest.mark.parametrize("equal", [2, 9, 20])
def test_tokens_that_bfloat16_cannot_tell_apart_are_decided_in_float32(equal):
    """Among the candidates if those are all, else among all tokens."""
    rng = np.random.default_rng(1)
    table = np.float32(rng.normal(size=(64, 16)))
    table[20 : 20 + equal] = 3 * np.abs(table[20])  # the likeliest for positive hidden states
    table[20 + equal // 2] *= 1 + 2**-14
    x = np.float32(np.abs(rng.normal(size=(8, 16))))
    rounded = np.float32(jnp.asarray(table).astype(jnp.bfloat16))
    assert (rounded[20 : 20 + equal] == rounded[20]).all(), "not what the test is about"
    found = screened(params_of(table), x)
    assert (found.token == 20 + equal // 2).all()
    check(found, expected_best(table, x))


def test_the_lowest_of_equal_tokens_is_chosen():
    table = np.ones((40, 8), np.float32)
    found = screened(params_of(table), np.ones((2, 8), np.float32))
    assert found.token.tolist() == [4, 4]
    table[9:12] = 2
    assert screened(params_of(table), np.ones((2, 8), np.float32)).token.tolist() == [9, 9]


def test_a_vocabulary_of_fewer_tokens_than_candidates_has_its_likeliest():
    rng = np.random.default_rng(2)
    table, x = (np.float32(rng.normal(size=size)) for size in ((6, 8), (30, 8)))
    check(screened(params_of(table), x), expected_best(table, x))
    found = screened(params_of(table), x, suppressed=(4, 5))
    assert (found.logit == -np.inf).all()


def test_hidden_states_that_are_not_numbers_find_what_float32_finds():
    rng = np.random.default_rng(3)
    table, x = (np.float32(rng.normal(size=size)) for size in ((40, 8), (4, 8)))
    x[1, 2], x[2] = np.nan, np.inf
    found = screened(params_of(table), x)
    expected = jax.vmap(best_of)(jnp.asarray(x) @ jnp.asarray(table).T)
    np.testing.assert_array_equal(found.token[[0, 3]], expected.token[np.array([0, 3])])
    assert found.logit[1] == -np.inf == expected.logit[1]


@pytest.mark.parametrize("d_model", [8, 128, 1_024])
def test_no_logit_differs_by_more_than_the_bound(d_model):
    """Of random numbers, and of those that bfloat16 rounds most, all in one direction."""
    rng = np.random.default_rng(4)
    worst = np.full((64, d_model), 1 + 2**-8 - 2**-16, np.float32)
    for table in (np.float32(rng.normal(size=(64, d_model))), worst):
        for x in (np.float32(rng.normal(size=(64, d_model))), worst):
            added = screening.screening_parameters(table)
            rough = screening.project(jnp.asarray(x), added[screening.KERNEL])
            error = np.abs(np.float64(rough) - np.float64(x) @ np.float64(table).T)
            bound = added[screening.ERROR] * np.linalg.norm(x, axis=1)
            assert (error.max(1) <= bound).all()
    assert error.max() > 0.7 * bound.max(), "far from the bound, so this shows little"


def translators(run, monkeypatch):
    """One of a CPU with units for bfloat16, and one of a CPU without."""
    for has_units in (True, False):
        monkeypatch.setattr(
            "flaxformer_min.decoding.models.has_bfloat16_units", lambda has=has_units: has
        )
        yield Translator.load(run)


@pytest.mark.parametrize(
    "options", [{}, {"min_length": 6}, {"suppressed": (40, 41, 42)}, {"max_extra_tokens": 2}]
)
def test_translations_are_those_without_screening(tmp_path, monkeypatch, options):
    run = make_tiny_run(tmp_path / "run", norm="pre", num_layers=2, d_model=32, d_ff=64)
    with_units, without = translators(run, monkeypatch)
    has = [
        screening.has_screening(each.models[0], each.runner.params[0])
        for each in (with_units, without)
    ]
    assert has == [True, False]
    options = {"beam_size": 1, "max_extra_tokens": 6} | options
    found = with_units.translate(LINES[:20], **options)
    assert found == without.translate(LINES[:20], **options)
    assert len({*found}) > 10


@pytest.mark.parametrize(
    "rules, screens",
    [
        ({"scores": False}, True),
        ({"scores": True}, False),
        ({"scores": False, "beam_size": 2}, False),
    ],
)
def test_only_a_search_for_the_likeliest_tokens_screens(monkeypatch, rules, screens):
    monkeypatch.setattr("flaxformer_min.decoding.models.has_bfloat16_units", lambda: True)
    config = ModelConfig(vocab_size=30, num_layers=1, d_model=8, d_ff=8, num_heads=2)
    model = Transformer(config)
    table = np.float32(np.random.default_rng(5).normal(size=(30, 8)))
    _, params = suited_to_device(model, {"embedding": {"table": jnp.asarray(table)}})
    for models, expected in (([model], screens), ([model] * 2, False)):
        found = search_of(models, [params] * len(models), Rules(**{"beam_size": 1} | rules))
        assert (found.decode_step.func.__name__ == "_screened_step") is expected


def test_a_larger_model_is_not_screened(monkeypatch):
    """It was not measured with one; 40,000 pieces of 128 features alone are 5 million."""
    monkeypatch.setattr("flaxformer_min.decoding.models.has_bfloat16_units", lambda: True)
    for vocab, expected in ((8_000, True), (40_000, False)):
        model = Transformer(ModelConfig(vocab_size=vocab, d_model=128, num_heads=2))
        table = jnp.zeros((vocab, 128))
        _, params = suited_to_device(model, {"embedding": {"table": table}})
        assert screening.has_screening(model, params) is expected


def test_a_cpu_has_units_for_bfloat16_if_linux_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    has_units = inspect.unwrap(devices.has_bfloat16_units)  # which reads them once
    assert not has_units(), "the system tells nothing"
    for flags, expected in (("fpu avx2", False), ("fpu avx512_bf16", True), ("amx_bf16", True)):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags} sse\n\n")
        assert has_units() is expected
