"""The models of runs, as a search uses them."""

import dataclasses
from pathlib import Path

from flax import linen as nn

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.transformer import Transformer


def model_of_run(
    config: ModelConfig, given: nn.Module | None, run: Path, dtype: str | None
) -> nn.Module:
    """Return the model that a run was trained with, computing in `dtype`; None: as it was trained.

    Raises ValueError unless `given` is None for this package's model, and of the same class for
    another.
    """
    needed, name = config.architecture, type(given).__name__ if given is not None else ""
    if needed != name:
        raise ValueError(
            f"{run} was trained with {needed or 'the Transformer of this package'}; got model="
            f"{name or None}. "
            + (
                "Pass the same model: Translator.load(run, model=...)."
                if needed
                else "Leave it out."
            )
        )
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    if given is None:
        return Transformer(config)
    if dtype is not None and not _has_config(given):
        raise ValueError(
            f"dtype is a field of ModelConfig; {name} has no such `config`. Build the model with "
            "the type, and leave dtype out."
        )
    return fit_model(given, config)


def fit_model(model: nn.Module, config: ModelConfig) -> nn.Module:
    """Return the model with the run's own sizes, if it is built from a `ModelConfig`."""
    return model.clone(config=config) if _has_config(model) else model


def with_explicit_attention(model: nn.Module) -> nn.Module:
    """Return the model with explicit attention, which gives the weights."""
    if not _has_config(model):
        return model
    return model.clone(config=dataclasses.replace(model.config, attention="explicit"))


def _has_config(model: nn.Module) -> bool:
    return isinstance(getattr(model, "config", None), ModelConfig)
