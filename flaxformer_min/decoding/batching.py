"""Batches of sentences and the programs that are compiled for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_min.decoding.choices import Sampling
from flaxformer_min.decoding.search import Hypotheses, Prefix, search
from flaxformer_min.model.transformer import first_tokens
from flaxformer_min.tokens import PAD, Batch, one_sentence_per_row

LENGTHS = (12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens a sentence is padded to. A longer source is cut to the last of them, with a warning."""


LONGEST_PREFIX = 2 * LENGTHS[-1]
"""Tokens that a translation may be forced to begin with."""


BATCHES = (1, 8, 64)
"""Sentences a batch is padded to, on each device; the configured batch size is the last."""


ON_ONE_CORE = {"xla_cpu_multi_thread_eigen": False}
"""How XLA is to compile what runs beside other batches: without threads of its own."""


PLACES = 64 * 128
"""Source tokens a batch may hold at most: longer sentences come in smaller batches."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to search; the defaults are the paper's (section 6.1)."""

    beam_size: int = 4
    n_best: int = 1
    length_penalty: float = 0.6
    max_extra_tokens: int = 50
    min_length: int = 0
    sampling: Sampling | None = None
    seed: int = 0


def _search(
    models, params, source, max_length, lines, seeds, prefix=None, *, options: Options
) -> Hypotheses:
    """The search for a batch on one device: encode, read the prefixes, and loop."""
    if prefix is None:
        prefix = jnp.zeros((source.shape[0], 0), jnp.int32)
    width = source.shape[1]
    steps = width + options.max_extra_tokens
    # Attention looks at all the room there is; few translations need more than this. Of a short
    # source half the room is not worth its compiling, nor the copy of what lies in it.
    rooms = [width // 2] * (width > 32) + [width + width // 8 + 4]
    rooms = [room for room in rooms if room < steps]
    tokens = one_sentence_per_row(source)
    caches, forced = [], []
    for model, weights in zip(models, params, strict=True):
        memory = model.apply({"params": weights}, tokens, method="remember")
        # Without the barrier XLA moves a transposition of these keys into every step.
        memory = jax.lax.optimization_barrier(memory)
        start = (memory, options.beam_size, [*rooms, steps][0], prefix)
        cache, log_probs = model.apply({"params": weights}, *start, method="start")
        caches.append((memory, cache))
        forced.append(log_probs)

    def step(tokens, caches):
        log_probs, after = [], []
        for model, weights, (memory, cache) in zip(models, params, caches, strict=True):
            logits, cache = model.apply({"params": weights}, tokens, memory, cache, method="step")
            log_probs.append(logits if len(models) == 1 else jax.nn.log_softmax(logits))
            after.append((memory, cache))
        return _mean_probability(log_probs), after

    def reorder(caches, parents):
        return [(memory, cache.reorder(parents)) for memory, cache in caches]

    def grow(caches, room):
        return [(memory, cache.grow(prefix.shape[1] + room)) for memory, cache in caches]

    begin = Prefix(first_tokens(prefix), (prefix != PAD).sum(1), _mean_probability(forced).sum(1))
    keys = None
    if options.sampling is not None:
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seeds), lines)
    return search(
        step,
        reorder,
        caches,
        begin,
        max_length,
        steps=steps,
        rooms=rooms,
        grow=grow,
        beam_size=options.beam_size,
        n_best=options.n_best,
        length_penalty=options.length_penalty,
        min_length=options.min_length,
        sampling=options.sampling,
        key=keys,
    )


def _score(models, params, source, target):
    """Log-probability of each target token, in nats; 0 for padding."""
    batch = Batch(one_sentence_per_row(source), one_sentence_per_row(target))
    log_probs = []
    for model, weights in zip(models, params, strict=True):
        of_all = jax.nn.log_softmax(model.apply({"params": weights}, batch))
        log_probs.append(jnp.take_along_axis(of_all, target[:, :, None], axis=-1)[:, :, 0])
    return jnp.where(target != PAD, _mean_probability(log_probs), 0.0)


def _mean_probability(log_probs: list) -> Any:
    """The logarithm of the models' mean probability."""
    if len(log_probs) == 1:
        return log_probs[0]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - np.log(len(log_probs))


def _bucket(length: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= length)


def _padded(sentences: list[list[int]], rows: int, lengths: Sequence[int]) -> np.ndarray:
    width = _bucket(max(map(len, sentences)), lengths)
    ids = np.full((rows, width), PAD, np.int32)
    for row, sentence in zip(ids, sentences, strict=False):
        row[: len(sentence)] = sentence
    return ids
