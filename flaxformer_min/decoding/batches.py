"""Runs a model over many sentences: sorted by length, in batches, padded to a few widths.

Each shape of a batch is compiled once. All local devices are used: accelerators share the rows of a
batch, while each CPU core computes batches of its own. What a sentence gets depends neither on its
place nor on the others.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError
from jaxtyping import Array, Float, Int

from flaxformer_min.config import SearchConfig
from flaxformer_min.decoding.search import Hypotheses, search
from flaxformer_min.kernels.backend import backend
from flaxformer_min.system.devices import on_each_device, replicate
from flaxformer_min.system.generator import GENERATOR
from flaxformer_min.system.memory import returning_freed_memory
from flaxformer_min.system.signals import StopCheck, Stopped
from flaxformer_min.tokens import PAD, Batch, one_sentence_per_row

WIDTHS = (16, 24, 48, 96, 192, 384, 768, 1024)
"""Tokens that the sentences of a batch are padded to."""

LONGEST_SOURCE = WIDTHS[-1]
"""Most tokens of a source, EOS included."""

LONGEST_PREFIX = 2 * LONGEST_SOURCE
"""Most tokens of a forced prefix."""

ROWS = {"cpu": 32, "accelerator": 256}
"""Most sentences of a batch on each device, unless a number is configured."""

WIDEST_OF_ALL_ROWS = 128
"""Width up to which a batch has all its rows; wider ones have fewer, of as many tokens."""

FEW = 8
"""Sentences that are searched without halving: compiling that takes longer than it saves them."""

HALVINGS = 2
"""A third would gain 4 %, and take half as long again, and more memory, to compile."""

WIDEST = 4
"""A sentence is padded to at most this many times its own width."""

OPTIONS = {
    "cpu": {"xla_disable_hlo_passes": "tree_reduction_rewriter"},
    "cuda": {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
        )
    },
}
"""Options of the compiler for a platform.

On a CPU that pass splits each sum into two operations, to reduce rounding errors. Sums over
features or keys are short, and each operation takes time and memory of its own. On an NVIDIA GPU,
CONDITIONAL and WHILE make a graph of each loop, which would otherwise wait for the host at each
turn, for a quarter of a step.
"""

SINGLE_THREADED = {"xla_cpu_multi_thread_eigen": False}
"""A further one for programs that run beside each other, one on each core."""


def compiler_options(cores: int) -> dict[str, Any]:
    """Return the compiler's options for `cores` cores, except for options that XLA_FLAGS sets."""
    options = OPTIONS.get(backend(), {}) | (SINGLE_THREADED if cores > 1 else {})
    chosen = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if f"--{name}" not in chosen}


class SentenceBatch(NamedTuple):
    """Sentences that are computed together.

    numbers: which ones.
    rows:    sentences that the batch is padded to.
    width:   tokens that each is padded to.
    """

    numbers: list[int]
    rows: int
    width: int


def bucket(length: int, widths: Sequence[int]) -> int:
    """Return the first of the increasing `widths` that is at least `length`.

    >>> bucket(30, WIDTHS)
    48
    """
    return next(width for width in widths if width >= length)


def cut(
    lengths: Mapping[int, int], widths: Sequence[int], rows: int, cores: int = 1, devices: int = 1
) -> list[SentenceBatch]:
    """Return the batches of sentences with these lengths by number, longest first.

    rows:    most sentences of a batch on each device, less where they are long.
    cores:   how many compute batches of their own, and share what would fit into one.
    devices: how many share the rows of a batch.

    >>> cut({1: 9, 2: 30, 3: 12}, WIDTHS, rows=64)
    [SentenceBatch(numbers=[2, 3, 1], rows=8, width=48)]
    """
    waiting = sorted(lengths, key=lambda number: (-lengths[number], number))
    few, share = FEW * devices, -(-len(waiting) // cores)
    cuts: list[tuple[list[int], int, int]] = []
    while waiting:
        width = bucket(lengths[waiting[0]], widths)
        most = devices * max(min(rows, rows * WIDEST_OF_ALL_ROWS // width), 1)
        near = [
            each
            for each in waiting[: min(most, max(share, few))]
            if WIDEST * bucket(lengths[each], widths) >= width
        ]
        cuts.append((near, most, width))
        waiting = waiting[len(near) :]
    if len(lengths) <= devices:
        few = devices
    full = {width for numbers, _, width in cuts if len(numbers) > few}
    return [
        SentenceBatch(numbers, most if width in full else min(few, most), width)
        for numbers, most, width in cuts
    ]


def padded(sentences: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Return token ids as rows [rows width], PAD where there is none."""
    ids = np.full((rows, width), PAD, np.int32)
    for row, sentence in zip(ids, sentences, strict=False):
        row[: len(sentence)] = sentence
    return ids


def capacity_of(width: int, steps: int, config: SearchConfig) -> int:
    """Return the cache entries that hypotheses of sources of `width` tokens rarely need more than.

    Few translations need much more than their source. Attention reads the whole cache, in which
    the hypotheses of a beam share most of their tokens: with 2.5 entries a token for a beam of four
    none of 2,000 sentences outgrew it, with 2 nine did. An exact search continues long after the
    best translation has ended. Multiples of 16 spare a CPU's vector units a remainder.
    """
    tokens = width + width // 8 + 4
    entries = tokens * config.beam_size
    if config.beam_size > 1 and not config.sample:
        if not config.early_stopping:
            tokens = width + width // 2 + 4
        entries = tokens * (config.beam_size + 1) // 2
    return min(-(-entries // 16) * 16, steps * config.beam_size)


class BatchRunner:
    """Runs a model over sentences of token ids.

    model:         a model with the methods that decoding uses (see docs/extending.md).
    params:        its parameters.
    max_positions: positions that the model has learned vectors for; 0: no limit.
    """

    def __init__(self, model: Any, params: Any, max_positions: int = 0):
        """Put the parameters on the devices; nothing is compiled yet."""
        self.model, self.max_positions = model, max_positions
        self.widths: tuple[int, ...] = WIDTHS
        if max_positions:
            self.widths = (*(each for each in WIDTHS if each < max_positions), max_positions)
        devices = jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        self.rows = ROWS["cpu" if on_cpu else "accelerator"]
        # Cores share one device: programs are compiled once, and weights are in the cache once.
        self.devices, self.cores = (devices[:1], len(devices)) if on_cpu else (devices, 1)
        self._programs: dict[Any, Callable] = {}
        self.use_params(params)

    def use_params(self, params: Any) -> None:
        """Load new parameters, keeping the compiled programs."""
        self.params = replicate(params, self.devices)

    @property
    def compilations(self) -> int:
        """How many programs have been compiled so far."""
        return len(self._programs)

    def search(
        self,
        sources: Mapping[int, list[int]],
        prefixes: Mapping[int, list[int]],
        config: SearchConfig,
        stop: StopCheck = None,
        scores: bool = True,
    ) -> Iterator[tuple[list[int], Hypotheses]]:
        """Search for translations of sources by line number, which seeds the samples of a line.

        Yields line numbers and their hypotheses as they are found; lines whose cache filled up come
        last, from a search with all the room that there can be. Raises Stopped once `stop()`.
        """
        longest = max(map(len, prefixes.values()), default=0)
        width = bucket(longest, sorted((0, *self.widths, LONGEST_PREFIX)))
        outgrown: list[int] = []
        for full_room in (False, True):
            lines = outgrown if full_room else list(sources)
            batches = self._cut({line: len(sources[line]) for line in lines}, config.batch_size)
            prepare = partial(self._prepare, sources, prefixes, width, config, scores, full_room)
            for batch, found in self._run_all(prepare, batches, stop):
                again = found.is_outgrown[: len(batch)]
                outgrown += [batch[row] for row in np.flatnonzero(again)]
                rows = np.flatnonzero(~again)
                yield [batch[row] for row in rows], Hypotheses(*(each[rows] for each in found))

    def _prepare(
        self,
        sources: Mapping[int, list[int]],
        prefixes: Mapping[int, list[int]],
        prefix_width: int,
        config: SearchConfig,
        scores: bool,
        full_room: bool,
        batch: SentenceBatch,
    ) -> Callable[[], Hypotheses]:
        """Return the search of a batch, whose program is compiled if it is new."""
        lines, rows, width = batch
        limits = [len(sources[line]) + config.max_extra_tokens for line in lines]
        prefix = seed = None
        if prefix_width:  # jax 0.11 cannot compile an argument without elements
            prefix = padded([prefixes[line] for line in lines], rows, prefix_width)
        if config.sample:
            # An argument of the program: as a constant, each seed would need its own compilation.
            seed = np.asarray(jax.random.key_data(jax.random.key(config.seed, impl=GENERATOR)))
            seed = np.broadcast_to(seed, (rows, *seed.shape))
        arrays = {
            "source": padded([sources[line] for line in lines], rows, width),
            "max_length": padded([limits], 1, rows)[0],
            "line": padded([lines], 1, rows)[0],
            "prefix": prefix,
            "seed": seed,
        }
        if self.max_positions:
            arrays["max_length"] = np.minimum(arrays["max_length"], self.max_positions)
        steps = min(width + config.max_extra_tokens, self.max_positions or 1 << 30)
        capacity = None if full_room else capacity_of(width, steps, config)
        each = rows // len(self.devices)
        halvings = min(HALVINGS, max(each // FEW, 1).bit_length() - 1)
        settings = _compiled(config), steps, capacity, halvings, scores or config.beam_size > 1
        key = settings, prefix_width, rows, width
        return self._program(key, partial(_search, self.model, *settings), arrays)

    def score(
        self, pairs: Sequence[tuple[list[int], list[int]]], stop: StopCheck = None
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Score given targets. Yields the numbers of pairs, and [pair target] log-probabilities."""
        lengths = {number: max(map(len, pair)) for number, pair in enumerate(pairs)}

        def prepare(batch: SentenceBatch) -> Callable[[], np.ndarray]:
            numbers, rows, width = batch
            sides = [[pairs[number][side] for number in numbers] for side in (0, 1)]
            arrays = [padded(side, rows, width) for side in sides]
            return self._program(("score", rows, width), partial(_score, self.model), arrays)

        yield from self._run_all(prepare, self._cut(lengths, None), stop)

    def _cut(self, lengths: Mapping[int, int], batch_size: int | None) -> list[SentenceBatch]:
        rows = batch_size or self.rows
        return cut(lengths, self.widths, rows, self.cores, len(self.devices))

    def _run_all(
        self,
        prepare: Callable[[SentenceBatch], Callable[[], Any]],
        batches: Sequence[SentenceBatch],
        stop: StopCheck,
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield the numbers of each batch with its result, while the next batches are running."""
        waiting: list[tuple[SentenceBatch, Future]] = []
        with _threads(self.cores) as executor:
            for batch in [*batches, *[None] * self.cores]:
                if stop is not None and stop():
                    raise Stopped
                if batch is not None:
                    waiting.append((batch, executor.submit(prepare(batch))))
                if waiting and (batch is None or len(waiting) > self.cores):
                    done, running = waiting.pop(0)
                    yield done.numbers, running.result()

    def _program(self, key: Any, program: Callable, arrays: Any) -> Callable[[], Any]:
        """Return a call of the compiled program with arrays, whose rows the devices share."""
        devices = len(self.devices)

        def split(array: np.ndarray) -> np.ndarray:
            # Dealt out, so that those of each device have similar lengths.
            return array.reshape(-1, devices, *array.shape[1:]).swapaxes(0, 1)

        def joined(array: np.ndarray) -> np.ndarray:
            return array.swapaxes(0, 1).reshape(-1, *array.shape[2:])

        arrays = jax.tree.map(split, arrays)
        if key not in self._programs:
            self._programs[key] = self._compile(program, arrays)
        compiled = self._programs[key]
        return lambda: jax.tree.map(joined, jax.device_get(compiled(self.params, arrays)))

    def _compile(self, program: Callable, arrays: Any) -> Callable:
        with returning_freed_memory(), _explain_mismatch():
            # The function itself is freed before the program is compiled.
            lowered = on_each_device(program, self.devices, 1).lower(self.params, arrays)
        with returning_freed_memory():
            return lowered.compile(compiler_options(self.cores))


def _compiled(config: SearchConfig) -> SearchConfig:
    """Return the settings that a program is compiled for; the others are its arguments."""
    competing = config.beam_size > 1 and not config.sample
    return dataclasses.replace(
        config,
        # Hypotheses that do not compete are all searched to their end in either case.
        early_stopping=config.early_stopping or not competing,
        max_extra_tokens=1,
        batch_size=None,
        **({"seed": 0} if config.sample else {}),
    )


def _search(
    model: Any,
    config: SearchConfig,
    steps: int,
    capacity: int | None,
    halvings: int,
    scores: bool,
    params: Any,
    arrays: dict[str, Any],
) -> Hypotheses:
    """Search for the arrays of a batch; each line has a random key of its own."""
    keys = None
    if config.sample:
        seeds = jax.random.wrap_key_data(arrays["seed"], impl=GENERATOR)
        keys = jax.vmap(jax.random.fold_in)(seeds, arrays["line"])
    given = {name: arrays[name] for name in ("max_length", "prefix")}
    how = {"steps": steps, "capacity": capacity, "halvings": halvings, "scores": scores}
    return search(model, params, arrays["source"], config, keys=keys, **given, **how)


def _score(
    model: Any, params: Any, sides: Sequence[Int[Array, "rows width"]]
) -> Float[Array, "rows width"]:
    """Return the log-probability of each target token in nats, 0 for padding."""
    source, target = sides
    batch = Batch(one_sentence_per_row(source), one_sentence_per_row(target))
    apply = partial(model.apply, {"params": params})
    of_all = jax.nn.log_softmax(apply(apply(batch, method="hidden_states"), method="logits"))
    log_probs = jnp.take_along_axis(of_all, target[:, :, None], axis=-1)[:, :, 0]
    return jnp.where(target != PAD, log_probs, 0.0)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield an executor; after an error, what still runs is not waited for."""
    executor = ThreadPoolExecutor(count)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


@contextlib.contextmanager
def _explain_mismatch() -> Iterator[None]:
    """Raise ValueError for parameters that are not those of the model."""
    try:
        yield
    except (ScopeParamShapeError, ScopeParamNotFoundError) as error:
        raise ValueError(
            "settings, tokenizers and checkpoint must be those of one run; "
            f"{str(error).partition(' (http')[0]} Restore the files that belong together."
        ) from error
