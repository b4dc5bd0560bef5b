"""The parts of a training job that the caller of `train` may replace or add."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import optax
from flax import linen as nn

from flaxformer_min.storage.run_folder import Tokenizers
from flaxformer_min.training.loop import BatchIterator, OnStep
from flaxformer_min.training.loss import TokenLoss
from flaxformer_min.training.optimizer import check_optimizer

ITERATOR_METHODS = ("__next__", "get_state", "set_state")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What `train` was given; None stands for this package's part."""

    model: nn.Module | None = None
    optimizer: optax.GradientTransformation | None = None
    token_loss: TokenLoss | None = None
    batches: BatchIterator | Callable[[Tokenizers], BatchIterator] | None = None
    on_step: OnStep | None = None
    on_validation: OnStep | None = None

    def __post_init__(self):
        """Raise ValueError for a part of another type than `train` takes."""
        if not isinstance(self.model, nn.Module | None):
            is_class = isinstance(self.model, type)
            found = f"the class {self.model.__name__}" if is_class else type(self.model).__name__
            raise ValueError(
                "model must be an instance of a Linen module, as Transformer(config.model); got "
                f"{found}."
            )
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        for name in ("token_loss", "on_step", "on_validation"):
            check_function(name, getattr(self, name))

    def open_batches(self, tokenizers: Tokenizers) -> BatchIterator:
        """Return the given iterator, or the one that the given function makes.

        Raises ValueError for something else, and for a position that JSON cannot hold.
        """
        batches = self.batches(tokenizers) if callable(self.batches) else self.batches
        missing = [name for name in ITERATOR_METHODS if not hasattr(batches, name)]
        if missing:
            raise ValueError(
                f"batches must be an iterator with the methods {', '.join(ITERATOR_METHODS)}, or a "
                "function of the tokenizers that returns one; "
                f"{type(batches).__name__} has no {missing[0]}. See docs/extending.md."
            )
        try:
            json.dumps(batches.get_state())
        except TypeError as error:
            raise ValueError(
                f"batches.get_state() must return what JSON can hold; {error}. Return numbers, "
                "text, lists or dictionaries."
            ) from error
        return batches


def check_function(name: str, function: Any) -> None:
    """Raise ValueError for an argument that is neither a function nor None."""
    if function is not None and not callable(function):
        raise ValueError(f"{name} must be a function or None; got {function!r}.")
