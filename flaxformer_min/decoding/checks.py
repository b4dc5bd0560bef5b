"""Checks of what a search and a translator are given."""

from typing import Any

import jax
from jaxtyping import Array, Key

from flaxformer_min.config import LENGTH_PENALTY_LIMIT
from flaxformer_min.decoding.choices import FIRST_REGULAR_ID, Sampling
from flaxformer_min.runtime.generator import GENERATOR


def check_search(beam_size: int, n_best: int, length_penalty: float, min_length: int) -> None:
    """Raise ValueError for numbers out of range, or that contradict each other."""
    if beam_size < 1:
        raise ValueError(f"beam_size must be at least 1, which is greedy; got {beam_size}.")
    if not 1 <= n_best <= beam_size:
        raise ValueError(
            "n_best must be from 1 to beam_size, the number of hypotheses; "
            f"got n_best={n_best}, beam_size={beam_size}. Request fewer, or widen the beam."
        )
    if not 0 <= length_penalty <= LENGTH_PENALTY_LIMIT:
        raise ValueError(
            "length_penalty must be at least 0, so that the search can stop early, and at "
            f"most {LENGTH_PENALTY_LIMIT}; got {length_penalty}. 0 prefers short translations most."
        )
    if min_length < 0:
        raise ValueError(f"min_length must be at least 0, which is no minimum; got {min_length}.")


def check_suppressed(suppressed: tuple[int, ...]) -> None:
    """Raise ValueError for a special id, which is never chosen anyway."""
    if min(suppressed, default=FIRST_REGULAR_ID) < FIRST_REGULAR_ID:
        raise ValueError(f"suppressed must be ids from {FIRST_REGULAR_ID} on; got {suppressed}.")


def check_begin(
    steps: int, sampling: Sampling | None, key: Key[Array, " batch"] | None, batch: int
) -> None:
    """Raise ValueError unless there is a step to take, and a key for each sample to draw."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, for EOS; got {steps}. Allow more new tokens.")
    if sampling is None:
        if key is not None:
            raise ValueError(
                "key is only used with sampling; got sampling=None. Pass sampling=Sampling()."
            )
        return
    shape = None if key is None else jax.random.key_data(key).shape
    if shape != (batch, 2):  # two words are a key of `GENERATOR`
        raise ValueError(
            "sampling needs a key for each sentence: key=jax.random.split(key, batch), of "
            f"jax.random.key(seed, impl={GENERATOR!r}); got data of shape {shape} for "
            f"{batch} sentences."
        )


def check_vocabulary(vocab: int, suppressed: tuple[int, ...]) -> None:
    """Raise ValueError unless logits have tokens to choose, and those that are suppressed."""
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
