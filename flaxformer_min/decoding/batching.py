"""Batches of sentences of similar length, and the programs compiled for their shapes.

Sentences are sorted by length and padded to a few shapes, each of which is compiled once. All local
devices are used: a batch is split among accelerators, while each CPU core has batches of its own.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError

from flaxformer_min.decoding.choices import Sampling
from flaxformer_min.decoding.search import Hypotheses, Prefix, search
from flaxformer_min.model.transformer import first_tokens
from flaxformer_min.runtime.devices import replicate
from flaxformer_min.runtime.signals import StopCheck, Stopped
from flaxformer_min.tokens import PAD, Batch, Tokens, one_sentence_per_row

LENGTHS = (12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that sentences are padded to; no source may be longer than the last."""

LONGEST_PREFIX = 2 * LENGTHS[-1]
"""Most tokens of a forced prefix."""

BATCHES = (1, 8, 64)
"""Sentences that a batch is padded to, on each device; the configured batch size is the last."""

MAX_BATCH_TOKENS = 64 * 128
"""Most source tokens of a batch on one device: long sentences come in smaller batches."""

SINGLE_THREADED = {"xla_cpu_multi_thread_eigen": False}
"""Compiler option for programs that run beside each other, one on each core."""


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

    def __post_init__(self):
        """Raise ValueError for numbers of another type or out of range."""
        least = {"beam_size": 1, "n_best": 1, "max_extra_tokens": 1, "min_length": 0, "seed": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number; got {value!r}.")
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}; got {value}.")


class BatchRunner:
    """Runs a model, or an ensemble of several, over sentences of token ids.

    models:         Linen modules with the methods that decoding uses (see docs/extending.md).
    params:         the parameters of each.
    batch_size:     most sentences at once on each device.
    max_positions:  positions that the models have learned vectors for; 0: no limit.
    compilations:   how many programs have been compiled so far.
    """

    def __init__(
        self, models: Sequence[Any], params: Sequence[Any], batch_size: int, max_positions: int = 0
    ):
        """Put the parameters on the devices; nothing is compiled yet."""
        self.models, self.batch_size = list(models), batch_size
        self.max_positions = max_positions
        self.lengths = LENGTHS
        if max_positions:
            self.lengths = (*(each for each in LENGTHS if each < max_positions), max_positions)
        devices = jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        # Cores share one device: programs are compiled once, and weights are in the cache once.
        self.devices, self.cores = (devices[:1], len(devices)) if on_cpu else (devices, 1)
        self.compilations = 0
        self._programs: dict[Any, Callable] = {}
        self.use_params(params)

    def use_params(self, params: Sequence[Any]) -> None:
        """Replace the parameters, keeping the compiled programs."""
        self.params = replicate(list(params), self.devices)

    def batch_sizes(self) -> list[int]:
        """Return the numbers of sentences that batches are padded to, on each device."""
        return [*(size for size in BATCHES if size < self.batch_size), self.batch_size]

    def search(
        self,
        sources: dict[int, list[int]],
        prefixes: dict[int, list[int]],
        options: Options,
        stop: StopCheck = None,
    ) -> Iterator[tuple[list[int], Hypotheses]]:
        """Search for translations, longest sources first.

        `sources` and `prefixes` are token ids by line number, which seeds the samples of a line.
        Yields the line numbers of a batch and their hypotheses. Raises Stopped between two batches
        once `stop()`.
        """

        def prepare(batch: list[int]) -> Callable[[], Hypotheses]:
            return self._prepare_search(
                [sources[line] for line in batch],
                [prefixes[line] for line in batch],
                batch,
                options,
            )

        lengths = {line: len(ids) for line, ids in sources.items()}
        return self._run_all(prepare, self._batches(lengths), stop)

    def score(
        self, pairs: Sequence[tuple[list[int], list[int]]], stop: StopCheck = None
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Score given targets. Yields the numbers of pairs, and [pair target] log-probabilities."""
        lengths = {number: max(map(len, pair)) for number, pair in enumerate(pairs)}

        def prepare(batch: list[int]) -> Callable[[], np.ndarray]:
            rows = self._rows(len(batch), max(lengths[number] for number in batch))
            source, target = (
                self._padded([pairs[number][side] for number in batch], rows) for side in (0, 1)
            )
            return self._program("score", _score, source, target)

        return self._run_all(prepare, self._batches(lengths), stop)

    def _batches(self, lengths: dict[int, int]) -> Iterator[list[int]]:
        """Yield batches, longest sentences first, so that those of a batch have similar lengths.

        Few sentences are divided among the cores, because padding rows cost as much.
        """
        waiting = sorted(lengths, key=lambda number: (-lengths[number], number))
        share = -(-len(waiting) // self.cores)
        while waiting:
            size = self._rows(share, lengths[waiting[0]])
            yield waiting[:size]
            waiting = waiting[size:]

    def _run_all(
        self,
        prepare: Callable[[list[int]], Callable[[], Any]],
        batches: Iterable[list[int]],
        stop: StopCheck,
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield each batch with its result, while the next batches are running."""
        waiting: list[tuple[list[int], Future]] = []
        pool = ThreadPoolExecutor(self.cores)
        try:
            for batch in batches:
                if stop is not None and stop():
                    raise Stopped
                waiting.append((batch, pool.submit(prepare(batch))))
                if len(waiting) > self.cores:
                    batch, running = waiting.pop(0)
                    yield batch, running.result()
            for batch, running in waiting:
                yield batch, running.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _rows(self, sentences: int, longest: int) -> int:
        """Return the rows that a batch is padded to: one of a few sizes on each device."""
        full = min(self.batch_size, max(MAX_BATCH_TOKENS // bucket(longest, self.lengths), 1))
        sizes = [*(size for size in BATCHES if size < full), full]
        each = min(-(-sentences // len(self.devices)), full)
        return bucket(each, sizes) * len(self.devices)

    def _padded(
        self, sentences: list[list[int]], rows: int, lengths: Sequence[int] | None = None
    ) -> np.ndarray:
        width = bucket(max(map(len, sentences)), lengths or self.lengths)
        ids = np.full((rows, width), PAD, np.int32)
        for row, sentence in zip(ids, sentences, strict=False):
            row[: len(sentence)] = sentence
        return ids

    def _prepare_search(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]],
        lines: list[int],
        options: Options,
    ) -> Callable[[], Hypotheses]:
        rows = self._rows(len(sources), max(map(len, sources)))
        source = self._padded(sources, rows)
        # Without any prefix there is no such argument: jax 0.11 cannot compile an empty array.
        longest = (*self.lengths, LONGEST_PREFIX)
        prefix = [self._padded(prefixes, rows, longest)] if any(prefixes) else []
        # Rows of padding end after one step.
        limits = [len(ids) + options.max_extra_tokens for ids in sources]
        if self.max_positions:
            limits = [min(limit, self.max_positions) for limit in limits]
        limits = np.array(limits + [1] * (rows - len(lines)), np.int32)
        numbers = np.array(lines + [0] * (rows - len(lines)), np.int32)
        seeds = np.zeros((rows, 1), np.uint32)
        if options.sampling is not None:
            # An argument of the program: as a constant, each seed would need its own compilation.
            key = jax.random.key_data(jax.random.key(options.seed))
            seeds = np.broadcast_to(key, (rows, *key.shape))
        options = dataclasses.replace(options, seed=0)
        program = partial(_search, options=options, max_positions=self.max_positions)
        return self._program(options, program, source, limits, numbers, seeds, *prefix)

    def _program(self, name: Any, program: Callable, *arrays: np.ndarray) -> Callable[[], Any]:
        """Return the compiled program for these arrays, whose rows are split among the devices."""
        devices = len(self.devices)
        split = [
            array.reshape(devices, len(array) // devices, *array.shape[1:]) for array in arrays
        ]
        shape = (name, *(array.shape for array in arrays))
        if shape not in self._programs:
            self._programs[shape] = self._compile(partial(program, self.models), split)
            self.compilations += 1

        def run() -> Any:
            result = jax.device_get(self._programs[shape](self.params, *split))
            return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), result)

        return run

    def _compile(self, program: Callable, arrays: list[np.ndarray]) -> Callable:
        in_axes = (None, *[0] * len(arrays))
        mapped = jax.pmap(program, "devices", in_axes=in_axes, devices=self.devices)
        try:
            lowered = mapped.lower(self.params, *arrays)
        except (ScopeParamShapeError, ScopeParamNotFoundError) as error:
            raise ValueError(
                "settings, tokenizers and checkpoint must be those of one run; "
                f"{str(error).partition(' (http')[0]} Restore the files that belong together."
            ) from error
        return lowered.compile(SINGLE_THREADED if self.cores > 1 else None)


def _search(
    models,
    params,
    source,
    max_length,
    lines,
    seeds,
    prefix=None,
    *,
    options: Options,
    max_positions: int,
) -> Hypotheses:
    """Search for a batch on one device: encode, read the prefixes, and run the loop."""
    if prefix is None:
        prefix = jnp.zeros((source.shape[0], 0), jnp.int32)
    steps = source.shape[1] + options.max_extra_tokens
    if max_positions:
        steps = min(steps, max_positions)
    capacities = _capacities(source.shape[1], steps)
    given = one_sentence_per_row(source), options.beam_size, [*capacities, steps][0], prefix
    begun = [
        _encode_and_prefill(partial(model.apply, {"params": weights}), *given)
        for model, weights in zip(models, params, strict=True)
    ]
    caches, forced = (list(each) for each in zip(*begun, strict=True))
    keys = None
    if options.sampling is not None:
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seeds), lines)
    log_prob = _log_mean_probability(forced).sum(1)
    return search(
        partial(_decode_step, models, params),
        _reorder,
        caches,
        Prefix(first_tokens(prefix), (prefix != PAD).sum(1, dtype=jnp.int32), log_prob),
        max_length,
        steps=steps,
        capacities=capacities,
        resize=lambda caches, capacity: _resize(caches, prefix.shape[1] + capacity),
        beam_size=options.beam_size,
        n_best=options.n_best,
        length_penalty=options.length_penalty,
        min_length=options.min_length,
        sampling=options.sampling,
        key=keys,
    )


def _encode_and_prefill(
    apply: Callable, tokens: Tokens, beam_size: int, capacity: int, prefix: jax.Array
) -> tuple[tuple[Any, Any], jax.Array]:
    """Return what one model's steps need, and the log-probabilities of the prefixes' tokens."""
    cross = apply(apply(tokens, method="encode"), tokens, method="precompute_cross_attention")
    # Without the barrier XLA moves a transposition of these keys into every step.
    cross = jax.lax.optimization_barrier(cross)
    cache, log_probs = apply(cross, beam_size, capacity, prefix, method="prefill")
    return (cross, cache), log_probs


def _capacities(width: int, steps: int) -> list[int]:
    """Return the capacities that the cache has before its last one.

    Attention reads the whole capacity, and few translations need much more than their source.
    Half the capacity is not worth compiling for a short source.
    """
    capacities = [width // 2] * (width > 32) + [width + width // 8 + 4]
    return [capacity for capacity in capacities if capacity < steps]


def _decode_step(models, params, tokens, caches):
    """Take a step of each model; return the log of their mean probability."""
    logits, after = [], []
    for model, weights, (cross, cache) in zip(models, params, caches, strict=True):
        of_model, cache = model.apply(
            {"params": weights}, tokens, cross, cache, method="decode_step"
        )
        logits.append(of_model if len(models) == 1 else jax.nn.log_softmax(of_model))
        after.append((cross, cache))
    return _log_mean_probability(logits), after


def _reorder(caches, parents):
    return [(cross, cache.reorder(parents)) for cross, cache in caches]


def _resize(caches, columns):
    return [(cross, cache.resize(columns)) for cross, cache in caches]


def _score(models, params, source, target):
    """Return the log-probability of each target token in nats, 0 for padding."""
    batch = Batch(one_sentence_per_row(source), one_sentence_per_row(target))
    log_probs = []
    for model, weights in zip(models, params, strict=True):
        apply = partial(model.apply, {"params": weights})
        logits = apply(apply(batch, method="hidden_states"), method="logits")
        of_all = jax.nn.log_softmax(logits)
        log_probs.append(jnp.take_along_axis(of_all, target[:, :, None], axis=-1)[:, :, 0])
    return jnp.where(target != PAD, _log_mean_probability(log_probs), 0.0)


def _log_mean_probability(log_probs: list) -> Any:
    """Return the logarithm of the models' mean probability."""
    if len(log_probs) == 1:
        return log_probs[0]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(log_probs))


def bucket(length: int, sizes: Sequence[int]) -> int:
    """Return the first of the increasing `sizes` that is at least `length`.

    >>> bucket(13, LENGTHS)
    16
    """
    return next(size for size in sizes if size >= length)
