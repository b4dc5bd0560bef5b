"""Models that decode together: at each step, the mean of their probabilities counts."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flaxformer_min.decoding.screening import has_screening, screened_best
from flaxformer_min.decoding.search import Rules, Search


def search_of(models: Sequence[Any], params: Sequence[Any], rules: Rules) -> Search:
    """Return the search with these models; its cache is a list of each one's two caches."""
    decode_step = partial(_decode_step, models, params)
    if rules.only_likeliest and len(models) == 1 and has_screening(models[0], params[0]):
        decode_step = partial(_screened_step, models[0], params[0], rules.suppressed)
    return Search(decode_step, _reorder, rules)


def log_mean_probability(log_probs: Sequence[Float[Array, "*shape"]]) -> Float[Array, "*shape"]:
    """Return the logarithm of the models' mean probability."""
    if len(log_probs) == 1:
        return log_probs[0]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(log_probs))


def _decode_step(models, params, tokens, caches):
    """Take a step of each model; return the log of their mean probability."""
    logits, after = [], []
    for model, weights, (cross, cache) in zip(models, params, caches, strict=True):
        of_model, cache = model.apply(
            {"params": weights}, tokens, cross, cache, method="decode_step"
        )
        logits.append(of_model if len(models) == 1 else jax.nn.log_softmax(of_model))
        after.append((cross, cache))
    return log_mean_probability(logits), after


def _screened_step(model, params, suppressed, tokens, caches):
    """Take a step of the only model; return the `Best` of its logits."""
    ((cross, cache),) = caches
    x, cache = model.apply({"params": params}, tokens, cross, cache, method="next_hidden_states")
    return screened_best(model, params, x, suppressed), [(cross, cache)]


def _reorder(caches, parents):
    return [(cross, cache.reorder(parents)) for cross, cache in caches]
