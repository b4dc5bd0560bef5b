"""One training job: from settings and text to a run folder that translates."""

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import linen as nn

from flaxformer_min.config import Config
from flaxformer_min.config_fields import has_type, plain
from flaxformer_min.data.batches import TrainingBatches, shard_batch, single_pass
from flaxformer_min.data.corpora import GIVEN
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.evaluation import Evaluation
from flaxformer_min.experiment.averaging import drop_average, validate_average
from flaxformer_min.experiment.model import build_model, can_decode, with_architecture, with_dtype
from flaxformer_min.experiment.parts import Parts, check_function
from flaxformer_min.experiment.prepare import Prepared, open_split, prepare
from flaxformer_min.experiment.report import (
    MEMORY_ADVICE,
    Stopwatch,
    report_start,
    reporting_first_step,
)
from flaxformer_min.experiment.state import init_from, restore, training_identity
from flaxformer_min.experiment.validation import (
    Validator,
    score_test_set,
    what_is_compared,
)
from flaxformer_min.storage.metadata import check_identity
from flaxformer_min.storage.run_folder import RunFolder, Tokenizers, fit_vocabulary
from flaxformer_min.system.compilation import CompileClock, check_jit
from flaxformer_min.system.distributed import (
    any_process,
    count,
    is_main_process,
    main_process_first,
)
from flaxformer_min.system.memory import with_oom_hint
from flaxformer_min.system.signals import Interrupt, StopCheck
from flaxformer_min.tokens import Batch
from flaxformer_min.training.loop import BatchIterator, OnStep, Trainer
from flaxformer_min.training.loss import TokenLoss
from flaxformer_min.training.metrics import MetricsLog, read_metrics
from flaxformer_min.training.optimizer import complete_optimizer
from flaxformer_min.training.profile import Profile
from flaxformer_min.training.step import TrainState, init_state, make_train_step

LOGGER = logging.getLogger("flaxformer_min")

TRAINING = threading.Lock()
"""Held by the training of this process."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of `train`.

    run:        the run folder.
    step:       steps taken so far, in all starts together.
    stopped:    whether a stop request came before the end; the same call continues.
    validation: the newest scores: "loss", "perplexity", "accuracy", "bleu"; those not measured are
                missing.
    test:       scores of the test split, translated with `translator`; None without a test split,
                if stopped, and for a model that cannot decode.
    example:    a source sentence of the validation split, to try.
    """

    run: RunFolder
    step: int
    stopped: bool
    validation: Mapping[str, float]
    test: Evaluation | None = None
    example: str = ""
    model: nn.Module | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def translator(self) -> Translator:
        """The best model so far, as `Translator.load` restores it."""
        return Translator.load(self.run.absolute, model=self.model)


def train(
    config: Config,
    workdir: str | Path,
    *,
    pairs: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    model: nn.Module | None = None,
    optimizer: optax.GradientTransformation | None = None,
    token_loss: TokenLoss | None = None,
    batches: BatchIterator | Callable[[Tokenizers], BatchIterator] | None = None,
    on_step: OnStep | None = None,
    on_validation: OnStep | None = None,
    stop: StopCheck = None,
    profile: int = 0,
) -> TrainResult:
    """Train a translation model in the folder `workdir`, or continue the run in it.

    pairs:      sentence pairs as {"train": ..., "validation": ..., "test": ...}, instead of
                `config.data.corpus`; "test" may be missing. Lists, or any objects with `len` and
                `[i]`; with a `fingerprint()` of their content they are not read again when cached.
    model:      any Linen module with `hidden_states(batch)` and `logits(x)`, instead of the
                Transformer of `config.model` (see docs/extending.md).
    optimizer:  any of optax, learning rate included, instead of `config.training.optimizer`.
    token_loss: used instead of label-smoothed cross-entropy.
    batches:    an iterator over `Batch` with `get_state` and `set_state`, or a function of the
                source and target tokenizer that returns one, instead of packed rows of the pairs.
    on_step, on_validation: called in the main process with the number of a step and its metrics,
                or the scores of a validation, from the thread that trains.
    stop:       called between steps; returns whether to save and return.
    profile:    record this many steps, from the 11th of this start on, in the run folder.

    Ctrl-C (or Stop in a notebook) finishes the step, saves, and returns `stopped=True`; a second
    one is raised. The same call then continues as if there had been no interruption: on a CPU bit
    for bit, on other devices up to rounding.
    The call changes no process-wide settings and installs no signal handlers. What it compiled
    stays in jax's caches; after many calls, `jax.clear_caches()` frees it. Progress is logged to
    "flaxformer_min" at level INFO. Training runs in a thread of its own, where options of jax count
    that `jax.config.update` sets, but not those of a `with` block around the call.

    Raises ValueError for arguments, text or a folder that cannot be used, RuntimeError if training
    diverges or memory does not suffice, OSError if the disk is full.

    >>> config = Config(...)                                    # doctest: +SKIP
    >>> train(config, "runs/mine").translator.translate(["Hi"])  # doctest: +SKIP
    """
    _check_arguments(config, workdir, stop, profile)
    check_jit()
    parts = Parts(model, optimizer, token_loss, batches, on_step, on_validation)
    run, interrupt = RunFolder(workdir), Interrupt(stop)
    with with_oom_hint(MEMORY_ADVICE), contextlib.ExitStack() as held:
        with main_process_first("lock"):
            if is_main_process():
                held.enter_context(run.locked())
        held.enter_context(_alone())
        watch, compiled = Stopwatch(), held.enter_context(CompileClock())
        try:
            prepared = prepare(run, with_dtype(with_architecture(config, model)), pairs)
        except KeyboardInterrupt:
            if count() > 1:
                raise  # the other processes must end, too
            return TrainResult(run, run.newest_step(), True, {}, model=model)
        watch.finish("data and tokenizer")
        job = TrainingJob(run, prepared, parts, interrupt, profile, watch)
        result = interrupt.shield(job.run_to_end, held)
        if not result.stopped:
            LOGGER.info("Time: %s; %s.", watch, compiled)
        return result


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second training in this process, whose checkpoints Orbax would mix up."""
    if not TRAINING.acquire(blocking=False):
        raise ValueError(
            "a process trains one run at a time, and another is being trained. Wait for its end, "
            "or start another process."
        )
    try:
        yield
    finally:
        TRAINING.release()


def _check_arguments(config: Any, workdir: Any, stop: Any, profile: Any) -> None:
    """Raise ValueError for an argument of another type than `train` takes."""
    if not isinstance(config, Config):
        raise ValueError(
            "config must be a Config, as Config(training=TrainingConfig(steps=100)); got "
            f"{type(config).__name__}."
        )
    if not isinstance(workdir, (str, Path)):
        raise ValueError(f"workdir must be a folder, as text or a Path; got {workdir!r}.")
    if not has_type(plain(profile), int) or profile < 0:
        raise ValueError(f"profile must be a number of steps, at least 0; got {profile!r}.")
    check_function("stop", stop)


def usable_example(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the first source that a shell can take between apostrophes as one line."""
    sources = (source for source, _ in pairs)
    usable = (each for each in sources if each.strip() and "'" not in each and each.isprintable())
    return next(usable, "")


@dataclasses.dataclass
class TrainingJob:
    """A training job whose text is prepared."""

    run: RunFolder
    prepared: Prepared
    parts: Parts
    stop: Callable[[], bool]
    profile: int
    watch: Stopwatch

    def __post_init__(self):
        """Build the model."""
        self.config = self.prepared.config
        self.model = build_model(self.parts.model, self.config, self.prepared.tokenizers)
        self.poll = any_process(self.stop)

    def run_to_end(self) -> TrainResult:
        """Train, average, and score the test set."""
        if is_main_process() and can_decode(self.model):
            self._test_pairs()  # report what is wrong with them now, not only after training
        # Now, because a file that is written while it is mapped would end the process later.
        example = usable_example(self.prepared.pairs["validation"])
        batches = self._batches()
        with contextlib.ExitStack() as held:
            if hasattr(batches, "close"):
                held.callback(batches.close)
            state, train_step = self._initialise(batches)
            self.watch.finish("initialization")
            validate = self._validator(state)
            trainer = self._train(state, train_step, batches, validate)
        self.watch.finish("training")
        step, stopped = int(trainer.state.step), self.poll()
        if not stopped and self.config.training.average_checkpoints > 1:
            validate_average(self.run, self.config.training, validate, step)
            self.watch.finish("average")
        test = None if stopped else self._score_test_set()
        self.watch.finish("test")
        scores = self._newest_scores(trainer.scores)
        stopped = stopped or self.poll()
        return TrainResult(self.run, step, stopped, scores, test, example, self.parts.model)

    def _batches(self) -> BatchIterator:
        if self.parts.batches is not None:
            return self.parts.open_batches(self.prepared.tokenizers)
        data, training = self.config.data, self.config.training
        return TrainingBatches(
            self.prepared.encoded["train"],
            (data.source_row_length, data.target_row_length),
            data.rows_per_batch * training.gradient_accumulation,
            training.seed,
            data.workers,
            jax.process_index(),
            jax.process_count(),
            subword_sampling=data.subword_sampling,
        )

    def _initialise(self, batches: BatchIterator) -> tuple[TrainState, Callable]:
        """Return the first state and the step, which is compiled while the state is computed."""
        config, optimizer = self.config, self.parts.optimizer
        train_step = make_train_step(self.model, config, optimizer, self.parts.token_loss)
        fitted = fit_vocabulary(config.model, self.prepared.tokenizers)
        epoch = batches.epoch(0) if isinstance(batches, TrainingBatches) else None
        step = self.run.newest_step()

        def while_compiling(state: TrainState) -> None:
            report_start(self.run.path, fitted, state, epoch)
            takes_steps = step < config.training.steps
            if epoch is not None and takes_steps and count() == 1:  # several need real arrays
                train_step.lower(state, self._shard(epoch[0])).compile()

        state = init_state(self.model, config, optimizer, while_compiling)
        if config.training.init_from and not step:
            former = RunFolder(config.training.init_from)
            state = init_from(former, state, complete_optimizer(optimizer, config))
        return state, train_step

    def _shard(self, batch: Batch) -> Batch:
        accumulation = self.config.training.gradient_accumulation
        return shard_batch(batch, jax.local_device_count(), accumulation)

    def _validator(self, state: TrainState) -> Validator:
        data, tokenizers = self.config.data, self.prepared.tokenizers
        translator = None
        if can_decode(self.model) and self.config.training.validation_sentences:
            limit = self.config.model.max_positions
            decoding = self.config.decoding
            translator = Translator([self.model], [state.params], tokenizers, decoding, limit)
        held_out = single_pass(
            self.prepared.encoded["validation"],
            (data.source_row_length, data.target_row_length),
            data.rows_per_batch,
            jax.process_index(),
            jax.process_count(),
        )
        pairs = self.prepared.pairs["validation"]
        return Validator(self.config, self.model, held_out, pairs, translator, self.poll)

    def _train(
        self, state: TrainState, train_step: Callable, batches: BatchIterator, validate: Validator
    ) -> Trainer:
        run, training = self.run, self.config.training
        parts = self.parts if is_main_process() else Parts()
        with contextlib.closing(run.open_checkpoints(self.config)) as checkpoints:
            identity = training_identity(run, self.config)
            check_identity(run.checkpoints, identity)
            compared = what_is_compared(self.config, self.prepared.encoded["validation"].digest)
            state, progress = restore(checkpoints, state, batches, self.config, compared)
            step = int(state.step)
            if step < training.steps or training.average_checkpoints == 1:
                drop_average(run, "of a former end")
            profile = Profile(run.profile, self.profile if is_main_process() else 0)
            log = MetricsLog(run.metrics, run.tensorboard, step, active=is_main_process())
            with contextlib.closing(log), profile:
                trainer = Trainer(
                    state,
                    profile.wrap(train_step),
                    batches,
                    self._shard,
                    training,
                    checkpoints,
                    log,
                    validate,
                    self.poll,
                    progress,
                    identity,
                    on_step=reporting_first_step(parts.on_step, self.watch),
                    on_validation=parts.on_validation,
                )
                trainer.run()
        return trainer

    def _score_test_set(self) -> Evaluation | None:
        """Score the test split with the restored parameters, in the main process."""
        test = None
        with main_process_first("test score"):
            if is_main_process() and can_decode(self.model):
                test = self._scores_of(self._test_pairs())
            elif is_main_process():
                LOGGER.info("No test score: a %s cannot decode.", type(self.model).__name__)
        return test

    def _test_pairs(self) -> Sequence[tuple[str, str]]:
        if self.config.data.corpus == GIVEN:
            return list(self.prepared.pairs.get("test", ()))  # each is checked here
        try:
            pairs = open_split(self.config, "test")
            return [pairs[number] for number in range(len(pairs))]  # each is decoded here
        except ValueError as error:
            LOGGER.info("No test score: %s", error)
            return ()

    def _scores_of(self, pairs: Sequence[tuple[str, str]]) -> Evaluation | None:
        if not len(pairs):
            return None
        translator = Translator.load(self.run.path, model=self.parts.model)
        return score_test_set(translator, pairs, self.config, self.stop)

    def _newest_scores(self, scores: Mapping[str, float]) -> dict[str, float]:
        if not scores:  # no step was left: use the logged scores
            validated = [
                line for line in read_metrics(self.run.metrics) if "validation_loss" in line
            ]
            scores = validated[-1] if validated else {}
        prefix = "validation_"
        return {
            name.removeprefix(prefix): value
            for name, value in scores.items()
            if name.startswith(prefix) and value is not None
        }
