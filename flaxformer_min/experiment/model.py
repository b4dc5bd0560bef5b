"""The model of a job: this package's Transformer, or one given by the caller."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_min.config import Config, ModelConfig
from flaxformer_min.decoding.models import fit_model, name_of_model
from flaxformer_min.kernels.backend import compute_dtype
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.run_folder import Tokenizers, fit_vocabulary
from flaxformer_min.tokens import Batch, Tokens

TRAINING_METHODS = ("hidden_states", "logits")
"""Methods that training and validation call: hidden_states(batch) and logits(x)."""

DECODING_METHODS = ("encode", "precompute_cross_attention", "prefill", "decode_step")
"""Methods that a search calls, besides `logits` (docs/extending.md)."""


def build_model(given: nn.Module | None, config: Config, tokenizers: Tokenizers) -> nn.Module:
    """Return the model with the vocabulary that the tokenizers have.

    Raises ValueError for a given model without the methods that training or `best_by` needs, of
    other settings than `config.model`, or of another vocabulary.
    """
    fitted = fit_vocabulary(config.model, tokenizers)
    if given is None:
        return Transformer(fitted)
    missing = [name for name in TRAINING_METHODS if not hasattr(given, name)]
    if missing:
        raise ValueError(
            f"model must have the methods {' and '.join(TRAINING_METHODS)}; "
            f"{type(given).__name__} has no {missing[0]}. See docs/extending.md."
        )
    if config.training.best_by == "bleu" and not can_decode(given):
        raise ValueError(
            f"training.best_by='bleu' needs translations; {type(given).__name__} cannot decode, "
            f"which takes the methods {', '.join(DECODING_METHODS)}. Add them, or choose "
            "best_by='loss'."
        )
    _check_settings(given, config.model)
    model = fit_model(given, fitted)
    vocab_size = _vocab_size(model)
    if vocab_size != fitted.vocab_size:
        raise ValueError(
            f"the model must have one logit for each of the {fitted.vocab_size:,} pieces of the "
            f"target vocabulary; got {vocab_size:,}. Build it with that size, or give it a field "
            "`config` of type ModelConfig, which is then set to the size."
        )
    return model


def _check_settings(given: nn.Module, config: ModelConfig) -> None:
    """Raise ValueError if the model is built from settings other than those of the run.

    Sizes of vocabularies are set to those of the tokenizers, and "auto" may stand for the type.
    """
    own = getattr(given, "config", None)
    if not isinstance(own, ModelConfig):
        return
    own = dataclasses.replace(own, dtype=compute_dtype(own.dtype))
    set_here = ("vocab_size", "source_vocab_size", "architecture")
    names = [field.name for field in dataclasses.fields(own) if field.name not in set_here]
    differing = [
        f"{name} {getattr(own, name)!r} instead of {getattr(config, name)!r}"
        for name in names
        if getattr(own, name) != getattr(config, name)
    ]
    if differing:
        raise ValueError(
            f"a model must have the settings of config.model; {type(given).__name__} has "
            f"{', '.join(differing)}. Build it from config.model."
        )


def _vocab_size(model: nn.Module) -> int:
    tokens = Tokens(*(jnp.ones((1, 8), jnp.int32),) * 3)

    def logits(module: nn.Module, batch: Batch) -> jax.Array:
        return module.logits(module.hidden_states(batch))

    shapes = jax.eval_shape(
        lambda key: model.init_with_output(key, Batch(tokens, tokens), method=logits)[0],
        jax.random.key(0),
    )
    return shapes.shape[-1]


def can_decode(model: nn.Module) -> bool:
    """Return whether the model has the methods that the search calls."""
    return all(hasattr(model, name) for name in DECODING_METHODS)


def with_architecture(config: Config, model: nn.Module | None) -> Config:
    """Return the settings with the name of the given model, which loading the run requires."""
    if model is None:
        return config
    named: ModelConfig = dataclasses.replace(config.model, architecture=name_of_model(model))
    return dataclasses.replace(config, model=named)


def with_dtype(config: Config) -> Config:
    """Return the settings with the type that the layers compute in instead of "auto"."""
    model = dataclasses.replace(config.model, dtype=compute_dtype(config.model.dtype))
    return dataclasses.replace(config, model=model)
