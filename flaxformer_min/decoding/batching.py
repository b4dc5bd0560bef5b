"""Runs models over many sentences: devices, cores, and the programs compiled for a few shapes.

Sentences are sorted by length and padded to a few shapes, each of which is compiled once. A search
runs in a pool (`pool`) that stays full: when sentences are done, the next ones take their places
(`scheduling`). All local devices are used: a pool is split among accelerators, while each CPU core
has one of its own.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError

from flaxformer_min.decoding.ensemble import log_mean_probability
from flaxformer_min.decoding.job import Job, Options
from flaxformer_min.decoding.pool import (
    Begin,
    Newcomers,
    Pool,
    PoolShape,
    begin,
    empty_pool,
    last_pools,
)
from flaxformer_min.decoding.programs import compiler_options
from flaxformer_min.decoding.scheduling import PoolScheduler, Usage
from flaxformer_min.decoding.search import Hypotheses, Rules
from flaxformer_min.decoding.shapes import (
    LEAST_BEAM,
    LENGTHS,
    LONGEST_OF_A_FULL_BATCH,
    LONGEST_PREFIX,
    USUAL_BATCH,
    bucket,
    is_small,
    largest,
    padded,
    pool_shape,
    sizes,
    small_beam_pool_shape,
    small_pool_shape,
)
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runtime.devices import on_each_device, replicate
from flaxformer_min.runtime.executables import ExecutableCache
from flaxformer_min.runtime.memory import returning_freed_memory
from flaxformer_min.runtime.signals import StopCheck, Stopped
from flaxformer_min.tokens import PAD, Batch, one_sentence_per_row


class BatchRunner:
    """Runs a model, or an ensemble of several, over sentences of token ids.

    models:         Linen modules with the methods that decoding uses (see docs/extending.md).
    params:         the parameters of each.
    batch_size:     most sentences at once on each device; None: as suits the device.
    max_positions:  positions that the models have learned vectors for; 0: no limit.
    """

    def __init__(
        self,
        models: Sequence[Any],
        params: Sequence[Any],
        batch_size: int | None = None,
        max_positions: int = 0,
    ):
        """Put the parameters on the devices; nothing is compiled yet."""
        self.models, self.max_positions = list(models), max_positions
        self.lengths = LENGTHS
        if max_positions:
            self.lengths = (*(each for each in LENGTHS if each < max_positions), max_positions)
        devices = jax.local_devices()
        on_cpu = devices[0].platform == "cpu"
        self.kind = "cpu" if on_cpu else "accelerator"
        self.batch_size = batch_size
        self.most_tokens = USUAL_BATCH[self.kind] * LONGEST_OF_A_FULL_BATCH
        # Cores share one device: programs are compiled once, and weights are in the cache once.
        self.devices, self.cores = (devices[:1], len(devices)) if on_cpu else (devices, 1)
        self.usage = Usage()
        self._executables: ExecutableCache | None = None
        self._programs: dict[Any, Callable] = {}
        self._begins: dict[Any, Begin] = {}
        self._pool_arrays: dict[Any, Pool] = {}
        self.use_params(params)

    def use_params(self, params: Sequence[Any]) -> None:
        """Replace the parameters, keeping the compiled programs."""
        self.params = replicate(list(params), self.devices)
        self.is_small = is_small(params)

    @property
    def compilations(self) -> int:
        """How many programs have been compiled so far, or loaded."""
        return len(self._programs)

    def keep_programs(self, folder: Path) -> None:
        """Load programs from a folder, and keep those there that are compiled from now on.

        Only on a CPU, and only for models without custom parts, whose code could change unnoticed.
        """
        own = [
            type(each) is Transformer and each == Transformer(each.config) for each in self.models
        ]
        if self.kind == "cpu" and all(own):
            self._executables = ExecutableCache(folder, self.devices)

    def _key_on_disk(self, key: Any) -> Any:
        """Return a key that also tells the programs of this runner from those of others."""
        weights = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), self.params)
        return key, [model.config for model in self.models], weights, self.cores

    def begin(self, rules: Rules, shape: PoolShape) -> Begin:
        """Return `pool.begin` for these models, which is traced once for each shape."""
        if (rules, shape) not in self._begins:
            program = partial(begin, self.models, rules=rules, shape=shape)
            self._begins[rules, shape] = jax.jit(program)
        return self._begins[rules, shape]

    def pool_arrays(self, rules: Rules, shape: PoolShape, newcomers: Newcomers) -> Pool:
        """Return the shapes and types of the devices' pools; those of `newcomers` are given."""
        key = "run", rules, shape
        if key not in self._pool_arrays and self._find(key):
            (_, pool, *_), _ = self._programs[key].args_info
            self._pool_arrays[key] = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pool
            )
        if key not in self._pool_arrays:
            program = partial(empty_pool, begin=self.begin(rules, shape), shape=shape)
            # On the devices as `run`, so that `begin` is traced once for both.
            mapped = on_each_device(program, self.devices, trees=1)
            with _explain_mismatch():
                self._pool_arrays[key] = jax.eval_shape(mapped, self.params, newcomers)
        return self._pool_arrays[key]

    def last_arrays(self, rules: Rules, shape: PoolShape, pool: Pool) -> tuple[Pool, ...]:
        """Return `last_pools` of the devices, which `finish` takes."""
        key = "finish", rules, shape
        if key not in self._pool_arrays:
            self._pool_arrays[key] = last_pools(pool, shape)
        return self._pool_arrays[key]

    def most_sentences(self) -> int:
        """Return the most sentences at once on each device."""
        return self.batch_size or USUAL_BATCH[self.kind]

    def suits_few(self) -> bool:
        """Return whether few sentences take no longer for each than many (`shapes.SMALL_MODEL`)."""
        return self.kind == "cpu" and self.is_small

    def has_small_pools(self) -> bool:
        """Return whether greedy pools and those of wide beams are small (`shapes.SMALL_MODEL`)."""
        return self.suits_few() and self.batch_size is None

    def few(self) -> int:
        """Return how many sentences, on all cores and devices, are too few for their own width."""
        few = self.most_sentences() * len(self.devices) * self.cores
        return few if self.has_small_pools() else few // 4  # width costs small pools less

    def pool_sizes(self) -> list[int]:
        """Return the numbers of sentences that pools are padded to, on each device."""
        return sizes(self.most_sentences())

    def search(
        self,
        sources: dict[int, list[int]],
        prefixes: dict[int, list[int]],
        options: Options,
        stop: StopCheck = None,
    ) -> Iterator[tuple[list[int], Hypotheses]]:
        """Search for translations, in the order of `Job.order`.

        `sources` and `prefixes` are token ids by line number, which seeds the samples of a line.
        Yields line numbers and their hypotheses as they are done. Raises Stopped once `stop()`.
        """
        longest = max(map(len, prefixes.values()), default=0)
        prefix = bucket(longest, sorted((0, *self.lengths, LONGEST_PREFIX)))
        job = Job(self, sources, prefixes, options, prefix)
        lines = sorted(sources, key=job.order)
        # Dealt out beforehand: shapes must not depend on which core is faster.
        schedulers = [PoolScheduler(job, lines[core :: self.cores]) for core in range(self.cores)]
        with _threads(self.cores) as executor:
            running = _start(executor, [each for each in schedulers if each.admit()])
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                if stop is not None and stop():
                    raise Stopped
                ready, results = _collect(running, finished)
                if any(each.needs_program() for each in ready):
                    # Most memory is in use as a program is loaded: others may leave their pools.
                    others, more = _collect(running, wait(running).done)
                    ready, results = ready + others, results + more
                # Before the caller does anything with what was found.
                running |= _start(executor, ready)
                for batch, hypotheses in results:
                    if batch:
                        yield batch, hypotheses

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
        with _threads(self.cores) as executor:
            for batch in batches:
                if stop is not None and stop():
                    raise Stopped
                waiting.append((batch, executor.submit(prepare(batch))))
                if len(waiting) > self.cores:
                    batch, running = waiting.pop(0)
                    yield batch, running.result()
            for batch, running in waiting:
                yield batch, running.result()

    def _rows(self, sentences: int, longest: int) -> int:
        """Return the rows that a batch is padded to: one of a few sizes on each device."""
        each = -(-sentences // len(self.devices))
        size = self._size(each, bucket(longest, self.lengths), self.most_sentences())
        return size * len(self.devices)

    def _size(self, sentences: int, width: int, most: int) -> int:
        """Return the first of a few sizes that holds so many sentences, or the largest allowed."""
        full = min(most, max(self.most_tokens // width, 1))
        return bucket(min(sentences, full), sizes(full))

    def _padded(self, sentences: list[list[int]], rows: int) -> np.ndarray:
        width = bucket(max(map(len, sentences)), self.lengths)
        return padded(sentences, rows, width)

    def shape(self, job: Job, width: int, sentences: int, at_least: int = 0) -> PoolShape:
        """Return the shape of a pool for so many sentences, `at_least` as many on each device."""
        # A slot stays idle once no sentence waits. So there are slots for three quarters of them,
        # and the rest join when others are done.
        share = -(-sentences // len(self.devices))
        most = self.most_sentences()
        slots = largest(sizes(most), 3 * share // 4)
        slots = self._size(max(min(share, slots), at_least), max(width, job.prefix), most)
        steps = width + job.options.max_extra_tokens
        if self.max_positions:
            steps = min(steps, self.max_positions)
        if slots > 1 and self.has_small_pools():
            if job.rules.beam_size == 1:
                return small_pool_shape(slots, width, steps, job.prefix)
            if job.rules.competing and job.rules.beam_size >= LEAST_BEAM:
                return small_beam_pool_shape(slots, width, steps, job.rules, job.prefix)
        return pool_shape(slots, width, steps, job.rules, job.prefix)

    def has_compiled(self, key: Any) -> bool:
        """Return whether `compiled` has the program of this key."""
        return key in self._programs

    def compiled(self, key: Any, program: Callable, *trees: Any, donate: tuple = ()) -> Callable:
        """Return the compiled program for arguments of these shapes, after the parameters.

        The first axis of all arrays is that of the devices.
        """
        if not self._find(key):
            self._programs[key] = self._compile(key, program, trees, donate)
        return self._programs[key]

    def _find(self, key: Any) -> bool:
        """Return whether `compiled` has the program of this key, loading it if it was kept."""
        if not self.has_compiled(key) and self._executables is not None:
            found = self._executables.load(self._key_on_disk(key))
            if found is not None:
                self._programs[key] = found
        return self.has_compiled(key)

    def _program(self, name: Any, program: Callable, *arrays: np.ndarray) -> Callable[[], Any]:
        """Return the compiled program for these arrays, whose rows are split among the devices."""
        devices = len(self.devices)
        split = [
            array.reshape(devices, len(array) // devices, *array.shape[1:]) for array in arrays
        ]
        key = (name, *(array.shape for array in arrays))
        compiled = self.compiled(key, partial(program, self.models), *split)

        def run() -> Any:
            result = jax.device_get(compiled(self.params, *split))
            return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), result)

        return run

    def _compile(
        self, key: Any, program: Callable, trees: Sequence[Any], donate: tuple
    ) -> Callable:
        with returning_freed_memory(), _explain_mismatch():
            # The function itself is freed before the program is compiled.
            lowered = on_each_device(program, self.devices, len(trees), donate).lower(
                self.params, *trees
            )
        options = compiler_options(self.cores)
        with returning_freed_memory():
            if self._executables is None:
                return lowered.compile(options)
            return self._executables.compile(self._key_on_disk(key), lowered, options)


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


def _start(
    executor: ThreadPoolExecutor, schedulers: list[PoolScheduler]
) -> dict[Future, PoolScheduler]:
    """Return the searches in the pools of these once they compute, or have failed."""
    for scheduler in schedulers:
        scheduler.compile()
    running: dict[Future, PoolScheduler] = {}
    launched = [Event() for _ in schedulers]
    for scheduler, event in zip(schedulers, launched, strict=True):
        future = executor.submit(scheduler.run, event)
        future.add_done_callback(lambda _, event=event: event.set())  # it may have failed
        running[future] = scheduler
    for event in launched:
        event.wait()  # or the caller would hold Python's lock, and a core would wait for it
    return running


def _collect(
    running: dict[Future, PoolScheduler], finished: set[Future]
) -> tuple[list[PoolScheduler], list[tuple[list[int], Hypotheses]]]:
    """Return the schedulers of these futures that go on, and what was found by all of them.

    They are no longer among those running.
    """
    searched = [(running.pop(future), future.result()) for future in finished]
    results = [scheduler.collect(result) for scheduler, result in searched]
    return [scheduler for scheduler, _ in searched if scheduler.admit()], results


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


def _score(models, params, source, target):
    """Return the log-probability of each target token in nats, 0 for padding."""
    batch = Batch(one_sentence_per_row(source), one_sentence_per_row(target))
    log_probs = []
    for model, weights in zip(models, params, strict=True):
        apply = partial(model.apply, {"params": weights})
        logits = apply(apply(batch, method="hidden_states"), method="logits")
        of_all = jax.nn.log_softmax(logits)
        log_probs.append(jnp.take_along_axis(of_all, target[:, :, None], axis=-1)[:, :, 0])
    return jnp.where(target != PAD, log_mean_probability(log_probs), 0.0)
