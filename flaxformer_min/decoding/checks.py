"""Checks of what a search and a translator are given."""

from typing import Any

import jax
from jaxtyping import Array, Key

from flaxformer_min.config import SearchConfig
from flaxformer_min.decoding.choices import FIRST_REGULAR_ID
from flaxformer_min.system.generator import GENERATOR


def check_begin(
    config: SearchConfig, keys: Key[Array, " batch"] | None, batch: int, steps: int
) -> None:
    """Raise ValueError unless there is a step to take, and a key for each sentence to sample."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, for EOS; got {steps}. Allow more new tokens.")
    if not config.sample:
        if keys is not None:
            raise ValueError("keys are for samples; got keys without sample=True in the config.")
        return
    shape = None if keys is None else jax.random.key_data(keys).shape
    if shape != (batch, 2):  # two words are a key of `GENERATOR`
        raise ValueError(
            "samples need a key for each sentence: keys=jax.random.split(key, batch), of "
            f"jax.random.key(seed, impl={GENERATOR!r}); got data of shape {shape} for "
            f"{batch} sentences."
        )


def check_logits(vocab: int, suppressed: tuple[int, ...]) -> None:
    """Raise ValueError unless the vocabulary has regular tokens, and all suppressed ones."""
    if vocab <= FIRST_REGULAR_ID:
        raise ValueError(
            "decode_step must return logits of more than the special tokens, which are "
            f"{FIRST_REGULAR_ID}; got {vocab}."
        )
    if max(suppressed, default=0) >= vocab:
        raise ValueError(
            f"suppressed must be ids of the vocabulary, which has {vocab:,}; got {suppressed}."
        )


def check_parts(models: Any, params: Any, tokenizers: Any = (None, None)) -> None:
    """Raise ValueError unless there are parameters for each model, and two tokenizers."""
    if not all(isinstance(each, (list, tuple)) for each in (models, params)):
        raise ValueError(
            "models and params must be lists, with the parameters of each model; got "
            f"{type(models).__name__} and {type(params).__name__}. For one, give [model] and "
            "[params]."
        )
    if len(models) != len(params) or not models:
        raise ValueError(
            "there must be at least one model, and the parameters of each; got "
            f"{len(models)} models and {len(params)} parameters."
        )
    if not isinstance(tokenizers, (list, tuple)) or len(tokenizers) != 2:
        raise ValueError(
            "tokenizers must be two, of source and target; got "
            f"{type(tokenizers).__name__}. For one of both, give (tokenizer, tokenizer)."
        )
