"""The models of runs, as a search uses them."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.backend import backend, compute_dtype
from flaxformer_min.model.embedding import OUTPUT_KERNEL, TIED_TABLES
from flaxformer_min.model.transformer import Transformer

ATTENTION_RULE = "attention needs a model whose layers sow `weights`, as MultiHeadAttention does"


def model_of_run(
    config: ModelConfig, given: nn.Module | None, run: Path, dtype: str | None
) -> nn.Module:
    """Return the model that a run was trained with, computing in `dtype`; None: as it was trained.

    Raises ValueError unless `given` is None for this package's model, and of the same class with
    the same parts for another.
    """
    needed, name = config.architecture, name_of_model(given)
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


def name_of_model(model: nn.Module | None) -> str:
    """Return the name recorded for a custom model; empty for None.

    It has the names of the class, and of all classes, functions and modules that the model was
    built with. A `partial` counts as its function.

    >>> name_of_model(Transformer(ModelConfig(), position_function=partial(jnp.sin)))
    'Transformer(position_function=sin)'
    """
    if model is None:
        return ""
    parts = []
    for field in dataclasses.fields(model):
        part = getattr(model, field.name)
        if field.name == "parent" or part is getattr(type(model), field.name, None):
            continue
        while isinstance(part, partial):
            part = part.func
        if isinstance(part, nn.Module):
            parts.append(f"{field.name}={name_of_model(part)}")
        elif callable(part):
            parts.append(f"{field.name}={getattr(part, '__name__', type(part).__name__)}")
    return type(model).__name__ + (f"({', '.join(parts)})" if parts else "")


def prepare_for_decoding(model: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """Return a model and its parameters in the types and layouts that decode fastest here.

    A model of this package that computes in bfloat16 stores the weights of products in it, so that
    no step converts them. A tied table stays float32 for embeddings; the output projection gets a
    transposed copy. On a CPU a float32 model has this copy, too: for few hypotheses, transposing
    the table at each step takes longer than the product. A CPU may have units for products of
    bfloat16, but none for anything else. So there only products with weights are in bfloat16.
    """
    if type(model) is not Transformer:
        return model, params
    config, on_cpu = model.config, backend() == "cpu"
    dtype = jnp.dtype(compute_dtype(config.dtype))
    if not on_cpu and dtype != jnp.bfloat16:
        return model, params

    # By numpy: a program for it would take 25 MB.
    def cast(x: Any) -> Array:
        return jax.device_put(np.asarray(x).astype(dtype, order="C", copy=False))

    if dtype == jnp.bfloat16:
        if on_cpu:
            model = model.clone(config=dataclasses.replace(config, dtype="float32"))
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: cast(x) if path[-1].key == "kernel" else x, params
        )
    if tied := TIED_TABLES.get(config.embeddings):
        table = np.asarray(params[tied]["table"])
        params = {**params, tied: {**params[tied], OUTPUT_KERNEL: cast(table.T)}}
    return model, params


def fit_model(model: nn.Module, config: ModelConfig) -> nn.Module:
    """Return the model with the run's own sizes, if it is built from a `ModelConfig`."""
    return model.clone(config=config) if _has_config(model) else model


def with_explicit_attention(model: nn.Module) -> nn.Module:
    """Return the model with explicit attention, which gives the weights."""
    if not _has_config(model):
        return model
    return model.clone(config=dataclasses.replace(model.config, attention="explicit"))


def check_sows(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot sow the weights of attention."""
    if not callable(model):
        raise ValueError(f"{ATTENTION_RULE}; {type(model).__name__} has no __call__.")


def weights_of_layers(sown: Any, side: str, box: str) -> np.ndarray:
    """Return the weights that an attention of each layer has sown, [layer head query key].

    Raises ValueError if it has sown none.
    """
    layers, of_layers = sown.get(side, {}), []
    while "weights" in (own := layers.get(f"layer_{len(of_layers)}", {}).get(box, {})):
        of_layers.append(np.asarray(own["weights"][0][0], np.float32))
    if not of_layers:
        raise ValueError(f"{ATTENTION_RULE}; {side}, layer_0, {box} has sown none.")
    return np.stack(of_layers)


def _has_config(model: nn.Module) -> bool:
    return isinstance(getattr(model, "config", None), ModelConfig)
