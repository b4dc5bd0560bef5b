"""Models that decode together: at each step, the mean of their probabilities counts."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from flaxformer_min.tokens import Batch, Tokens


class EnsembleCache(tuple):
    """The caches of all models, as one."""

    def reorder(self, parents: Int[Array, "batch beam"]) -> "EnsembleCache":
        """Return the caches in which hypothesis i continues hypothesis `parents[i]`."""
        return EnsembleCache(cache.reorder(parents) for cache in self)

    def resize(self, capacity: int) -> "EnsembleCache":
        """Return the caches with this capacity."""
        return EnsembleCache(cache.resize(capacity) for cache in self)

    def is_full(self) -> Bool[Array, " batch"]:
        """Return which sentences have a cache without room for another token."""
        return jnp.stack([cache.is_full() for cache in self]).any(axis=0)


jax.tree_util.register_pytree_node(
    EnsembleCache, lambda caches: (tuple(caches), None), lambda _, caches: EnsembleCache(caches)
)


class Ensemble:
    """Several models with the methods of one that `search` uses; parameters are a list."""

    def __init__(self, models: Sequence[Any]):
        """Take models with the same target vocabulary."""
        self.models = list(models)

    def apply(self, variables: dict[str, Any], *args: Any, method: str) -> Any:
        """Call a method as `flax.linen.Module.apply` does."""
        applies = [
            partial(model.apply, {"params": params})
            for model, params in zip(self.models, variables["params"], strict=True)
        ]
        return getattr(self, method)(applies, *args)

    def encode(self, applies: list[Any], source: Tokens) -> list[Any]:
        """Return the encoded source of each model."""
        return [apply(source, method="encode") for apply in applies]

    def precompute_cross_attention(
        self, applies: list[Any], encoded: list[Any], source: Tokens
    ) -> list[Any]:
        """Return the cross-attention cache of each model."""
        return [
            apply(each, source, method="precompute_cross_attention")
            for apply, each in zip(applies, encoded, strict=True)
        ]

    def prefill(
        self,
        applies: list[Any],
        cross: list[Any],
        beam_size: int,
        capacity: int,
        prefix: Int[Array, "batch prefix"],
    ) -> tuple[EnsembleCache, Float[Array, "batch prefix"]]:
        """Return the caches, and the logarithm of the mean probability of each prefix token."""
        caches, log_probs = zip(
            *(
                apply(each, beam_size, capacity, prefix, method="prefill")
                for apply, each in zip(applies, cross, strict=True)
            ),
            strict=True,
        )
        return EnsembleCache(caches), log_mean_probability(log_probs)

    def decode_step(
        self,
        applies: list[Any],
        tokens: Int[Array, "batch beam"],
        cross: list[Any],
        caches: EnsembleCache,
    ) -> tuple[Float[Array, "batch beam vocab"], EnsembleCache]:
        """Return the logarithm of the mean probability of each next token, and the caches."""
        logits, after = zip(
            *(
                apply(tokens, *each, method="decode_step")
                for apply, *each in zip(applies, cross, caches, strict=True)
            ),
            strict=True,
        )
        return log_mean_probability(map(jax.nn.log_softmax, logits)), EnsembleCache(after)

    def hidden_states(self, applies: list[Any], batch: Batch) -> list[Any]:
        """Return the decoder's output of each model."""
        return [apply(batch, method="hidden_states") for apply in applies]

    def logits(self, applies: list[Any], x: list[Any]) -> Float[Array, "batch target vocab"]:
        """Return the logarithm of the mean probability of each token."""
        logits = [apply(each, method="logits") for apply, each in zip(applies, x, strict=True)]
        return log_mean_probability(map(jax.nn.log_softmax, logits))


def log_mean_probability(log_probs: Iterable[Float[Array, "*shape"]]) -> Float[Array, "*shape"]:
    """Return the logarithm of the models' mean probability."""
    stacked = jnp.stack(list(log_probs))
    return jax.nn.logsumexp(stacked, axis=0) - math.log(len(stacked))
