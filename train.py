"""Train a translation model: python train.py [CONFIG] [--workdir RUN] [--model.d-ff 512 ...].

Without arguments it learns to translate embedded English phrases into Korean. CONFIG is a Python
file, or RUN/config.json: then that run is gone on with, as any run is that exists. Every setting is
listed by --help.
"""

import time

STARTED = time.perf_counter()  # before the imports, for a user waits for them too

import contextlib
import dataclasses
import functools
import itertools
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from flaxformer_min.config import Config
from flaxformer_min.data.batches import EpochBatches, TrainingRows, single_pass, split_over_devices
from flaxformer_min.data.corpora import languages_of, read_pairs
from flaxformer_min.data.corpora.pairs import is_empty
from flaxformer_min.data.encoding import WAYS, EncodedPairs, encode_pairs
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.evaluation import bleu, evaluate
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runs.checkpoint import Checkpoints, mean_of_newest, rank_of_best, steps_of
from flaxformer_min.runs.folder import RunFolder, fit_vocabulary
from flaxformer_min.runtime.devices import (
    CompileClock,
    describe,
    keep_compiled_programs,
    keep_memory,
    replicate,
    use_cores,
)
from flaxformer_min.runtime.distributed import (
    Distributed,
    first_ahead,
    gather,
    is_first,
    shared_poll,
    together,
)
from flaxformer_min.runtime.files import cache_folder, write_atomically
from flaxformer_min.runtime.signals import StopRequest
from flaxformer_min.runtime.streams import open_streams, unheard
from flaxformer_min.tokens import Batch
from flaxformer_min.training.debug import stopping_at_not_finite
from flaxformer_min.training.loop import rank_of, train
from flaxformer_min.training.metrics import MetricsLog
from flaxformer_min.training.profile import Profile
from flaxformer_min.training.schedule import learning_rate
from flaxformer_min.training.step import TrainState, init_state, make_eval_step, make_train_step

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "cldr_en_ko.py"

MUCH_PADDING = 0.05
"""Share of the places of a batch; where more are empty and need not be, the run says so."""


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    """The settings of a run, where it lives, and who takes part."""

    workdir: Path = Path("runs")
    """The run folder. Several processes must see the same one."""

    profile: int = 0
    """Record so many steps, from the 11th of this start on, as a timeline in RUN/profile; 0: none.
    The first process records its own devices."""

    distributed: Distributed = Distributed()

    def __post_init__(self):
        """Check what is no setting of the run."""
        super().__post_init__()
        if self.profile < 0:
            raise ValueError(f"--profile must be at least 0 steps; got {self.profile}.")


def say(text: str) -> None:
    """Tell the user, once."""
    if is_first():
        with unheard():
            tqdm.write(text)


class Stopwatch:
    """How long each stage took."""

    def __init__(self):
        """Start the first stage."""
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def finish(self, stage: str) -> None:
        """End a stage; the next one begins."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def main(arguments: list[str]) -> int:
    """Train, then score the test set; returns the exit status."""
    try:
        settings = read_arguments(arguments)
        run = RunFolder(settings.workdir)
        config = Config(*(getattr(settings, f.name) for f in dataclasses.fields(Config)))
        keep_memory()

        def prepare(processes: int) -> None:
            use_cores(config.data.rows_per_batch // processes)

        with together(settings.distributed, prepare), explaining(), contextlib.ExitStack() as held:
            with first_ahead("lock"):
                if is_first():
                    held.enter_context(run.locked())
            return work(run, config, Profile(run.profile, settings.profile * is_first(), say))
    except (ValueError, OSError, RuntimeError) as error:
        with unheard():
            print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        with unheard():
            print("\nStopped. The same command goes on.", file=sys.stderr)
        return 128 + signal.SIGINT


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Where XLA only says that memory is full, say what takes less of it, too."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RuntimeError(
            f"the device has not enough memory for this ({str(error).splitlines()[0]}). Training "
            "needs less with --model.remat or --model.dtype bfloat16, or, in a new --workdir, with "
            "fewer --data.rows-per-batch and more --training.gradient-accumulation; translating, "
            "with a smaller --decoding.batch-size or --decoding.beam-size."
        ) from error


def read_arguments(arguments: list[str]) -> Arguments:
    """The config file's settings with the command line's put over them."""
    named = bool(arguments) and not arguments[0].startswith("-")
    path = Path(arguments[0]) if named else DEFAULT_CONFIG
    if not path.is_file():
        raise ValueError(
            "a config is a Python file that ends in `config = Config(...)`, or the config.json of "
            f"a run; no {path}."
        )
    if path.suffix == ".json":
        config, workdir = Config.from_json(path.read_text(), path), path.parent
    else:
        config, workdir = read_config(path), Path("runs") / path.stem
    groups = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return tyro.cli(
        Arguments,
        prog="train.py [CONFIG]",
        description=__doc__,
        default=Arguments(**groups, workdir=workdir),
        args=arguments[1:] if named else arguments,
    )


def read_config(path: Path) -> Config:
    """What a Python file calls `config`."""
    try:
        config = runpy.run_path(str(path)).get("config")
    except ValueError:
        raise  # the config's own rules, in a sentence
    except Exception as error:  # a file of the user may raise anything
        unknown = "unexpected keyword argument" in str(error)
        way_out = "`python train.py --help` lists the settings that there are." if unknown else ""
        raise ValueError(
            f"{path} must be a Python file that makes a config; {type(error).__name__}: {error}. "
            f"{way_out}".strip()
        ) from error
    if not isinstance(config, Config):
        raise ValueError(f"{path} must end in `config = Config(...)`; got {config!r}.")
    return config


def work(run: RunFolder, config: Config, profile: Profile) -> int:
    """One run from its text to its test score."""
    watch, compiled = Stopwatch(), CompileClock()
    keep_compiled_programs(cache_folder(config.data.cache_dir))
    with first_ahead("corpus"):
        languages = languages_of(config.data.corpus, config.data.languages, **where(config))
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, languages="-".join(languages))
        )
        pairs = {name: open_split(config, name) for name in ("train", "validation")}
    watch.finish("data")
    with first_ahead("tokenizer"):
        if is_first():
            warn_of_another_schedule(run, config)
        tokenizers = (
            run.begin(config, lambda paths: make_tokenizers(config, pairs["train"], paths))
            if is_first()
            else run.tokenizers()
        )
    watch.finish("tokenizer")
    with first_ahead("encoded"):
        encoded = {name: encode(config, name, pairs[name], tokenizers) for name in pairs}
    check_agreement(config, encoded)
    row_lengths = config.data.source_row_length, config.data.target_row_length
    share = jax.process_index(), jax.process_count()
    rows = TrainingRows(
        encoded["train"],
        row_lengths,
        config.data.rows_per_batch * config.training.gradient_accumulation,
        config.training.seed,
        config.data.workers,
        *share,
        subword_sampling=config.data.subword_sampling,
    )
    watch.finish("data")
    model = Transformer(fit_vocabulary(config.model, tokenizers))
    state, train_step = begin(run, config, model, rows)
    checkpoints = run.open_checkpoints(config)
    translator = Translator([model.config], [state.params], tokenizers, config.decoding)
    held_out = single_pass(encoded["validation"], row_lengths, config.data.rows_per_batch, *share)
    with StopRequest("finishing this step, then saving; once more to end at once") as stop:
        poll = shared_poll(lambda: bool(stop))
        validate = make_validate(config, model, held_out, pairs["validation"], translator, poll)
        state = fit(run, config, state, train_step, rows, checkpoints, validate, poll, profile)
        watch.finish("training")
        checkpoints.close()
        rows.close()
        if not max(gather("trained", stop.status)):
            if config.training.average_checkpoints > 1:
                try_average(run, config, validate, int(state.step))
                watch.finish("average")
            with first_ahead("test score"):
                if is_first():
                    score_test_set(run, config, stop=lambda: bool(stop))
            watch.finish("test")
    if status := max(gather("status", stop.status)):
        say(f"Stopped at step {int(state.step):,} and saved. To go on: {command()}")
        return status
    stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in watch.seconds.items())
    say(f"Time: {stages}; of these {compiled}.")
    say(
        f"Translate with this run:\n  echo '{example(pairs)}' | flaxformer-min translate "
        f"{shlex.quote(str(run.path))}"
    )
    return 0


def warn_of_another_schedule(run: RunFolder, config: Config) -> None:
    """Say where a run has learned at other rates than one of its new length would have."""
    steps = steps_of(run.checkpoints) if run.exists else []
    if not steps:
        return
    before, now = (
        float(learning_rate(each.model.d_model, each.training)(steps[0] - 1))
        for each in (run.config(), config)
    )
    if not np.isclose(before, now, rtol=1e-4, atol=0):
        cooling = "was cooling down" if before < now else "was not cooling down yet"
        say(
            f"warning: step {steps[0]:,} was taken at a learning rate of {before:.2e}, for the run "
            f"{cooling}; one of {config.training.steps:,} steps would have had {now:.2e} "
            "there. This is not what it would have learned."
        )


def where(config: Config) -> dict[str, Any]:
    """Where corpora are kept, and whether they may be downloaded."""
    return {"cache_dir": config.data.cache_dir, "download": config.data.download}


def open_split(config: Config, split: str) -> Any:
    """The sentence pairs of a split."""
    return read_pairs(config.data.corpus, split, config.data.languages, **where(config))


def make_tokenizers(config: Config, pairs: Any, paths: tuple[Path, Path]) -> None:
    """One tokenizer of both languages, or one of each, learned from an even sample of the pairs.

    From the cache if they were learned before; those of another run if this one begins from it.
    """
    if config.training.begin_from:
        former = RunFolder(config.training.begin_from)
        former.check_model(config.model)
        for tokenizer, path in zip(former.tokenizers(), paths, strict=True):
            write_atomically(path, tokenizer.model)
        return
    data, model = config.data, config.model
    stride = -(-len(pairs) // data.tokenizer_sample)

    @functools.cache
    def sample() -> list[tuple[str, str]]:
        chosen = pairs[::stride]
        say(f"Training the tokenizer on {len(chosen):,} pairs.")
        return chosen

    def learn(path: Path, vocab_size: int, sides: tuple[int, ...]) -> None:
        def lines() -> Iterator[str]:
            yield from (pair[side] for pair in sample() for side in sides)

        train_tokenizer(
            lines(),
            vocab_size,
            path,
            cache=cache_folder(data.cache_dir),
            fingerprint=f"{pairs.fingerprint()} {stride} {sides}",
        )

    if paths[0] == paths[1]:
        learn(paths[0], model.vocab_size, (0, 1))
        return
    for side, vocab_size in enumerate((model.source_vocab_size, model.vocab_size)):
        learn(paths[side], vocab_size, (side,))


def encode(config: Config, split: str, pairs: Any, tokenizers: Any) -> EncodedPairs:
    """A split as token ids, from the cache if it was encoded before."""
    data = config.data
    lengths = data.source_row_length, data.target_row_length
    ways = WAYS if split == "train" and data.subword_sampling else 1
    encoded = encode_pairs(
        pairs, tokenizers, lengths, cache_folder(data.cache_dir), pairs.fingerprint(), ways
    )
    say(f"{split}: {encoded.counts}.")
    return encoded


def check_agreement(config: Config, encoded: dict[str, EncodedPairs]) -> None:
    """Raise ValueError unless all processes were given the same settings and the same text.

    Else they would not take the same steps, and wait for one another for ever.
    """
    # Where each finds the text, and how it reads it, is its own affair.
    own = {"corpus": "", "cache_dir": "", "workers": 0, "download": False}
    common = dataclasses.replace(config, data=dataclasses.replace(config.data, **own))
    mine = {"settings": common.to_json()} | {
        f"{name} pairs": split.digest for name, split in encoded.items()
    }
    for process, other in enumerate(gather("agreement", mine)):
        differing = [name for name in mine if mine[name] != other[name]]
        if differing:
            raise ValueError(
                "all processes must be given the same settings and the same text; the "
                f"{' and the '.join(differing)} of process {process} are others than here."
            )


def begin(
    run: RunFolder, config: Config, model: Transformer, rows: TrainingRows
) -> tuple[TrainState, Callable]:
    """A state that has learned nothing yet, and the step that teaches it."""
    train_step = make_train_step(model, config.training)
    ended = max(steps_of(run.checkpoints), default=0) >= config.training.steps

    def meanwhile(state: TrainState) -> None:
        announce(run, model, state, rows.epoch(0))
        if not ended and jax.process_count() == 1:  # pmap of several lowers real arrays only
            train_step.lower(state, lay_out(rows.epoch(0)[0], config)).compile()

    state = init_state(model, config.training, meanwhile)
    timed = timing_the_first(train_step)
    if config.training.debug_nans:
        timed = stopping_at_not_finite(timed, model, config.training)
    return state, timed


def lay_out(batch: Batch, config: Config) -> Batch:
    """A batch of this process as the training step takes it."""
    devices, accumulation = jax.local_device_count(), config.training.gradient_accumulation
    return split_over_devices(batch, devices, accumulation)


def announce(run: RunFolder, model: Transformer, state: TrainState, epoch: EpochBatches) -> None:
    """Say what is about to happen."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    sides = epoch.encoded.source, epoch.encoded.target
    tokens = [side.lengths.sum() / len(epoch) for side in sides]
    say(
        f"{describe()}; run folder {run.path}\n"
        f"{parameters / 1e6:.1f} M parameters, vocabulary {model.config.vocab_size:,}; "
        f"a batch: {tokens[0]:,.0f} source and {tokens[1]:,.0f} target tokens, "
        f"{epoch.padding():.1%} padding; an epoch: {len(epoch):,} batches"
    )
    even = epoch.even_row_lengths()
    if epoch.padding() > MUCH_PADDING and sum(even) > 1.02 * sum(epoch.row_lengths):
        say(
            f"Rows of {even[0]} source and {even[1]} target places would suit this text better: "
            f"--data.source-row-length {even[0]} --data.target-row-length {even[1]}"
        )


def make_validate(
    config: Config,
    model: Transformer,
    batches: EpochBatches,
    pairs: Any,
    translator: Translator,
    stop: Callable[[], bool],
) -> Callable[[Any, int], dict[str, float] | None]:
    """The function that measures loss on all, and BLEU on some, of the validation pairs.

    Once `stop()` it gives up, between two batches, and gives None.
    """
    number = itertools.count()
    eval_step, devices = make_eval_step(model), jax.local_device_count()
    usable = [pair for pair in pairs if not is_empty(pair)]
    stride = max(len(usable) // max(config.training.validation_sentences, 1), 1)
    some = usable[::stride][: config.training.validation_sentences]

    def validate(params: Any, step: int) -> dict[str, float] | None:
        sums = []
        for i in range(len(batches)):
            if stop():
                return None
            sums.append(eval_step(params, split_over_devices(batches[i], devices)))
        total = np.sum(jax.device_get(sums), axis=0)
        loss = float(total[1] / total[3])
        scores = {
            "validation_loss": loss,
            "validation_perplexity": float(np.exp(loss)),
            "validation_accuracy": float(total[2] / total[3]),
        }
        text = f"validation: loss {loss:.3f} nats, perplexity {np.exp(loss):.2f}"
        if some:
            translator.use_params([params])
            sources, references = zip(*some, strict=True)
            try:
                found = translator.translate(sources, stop=stop)
            except KeyboardInterrupt:
                return None
            score = bleu(found, references, target_language=target_language(config))
            scores["validation_bleu"] = score.value
            text += f", BLEU {score.value:.2f} on {len(some)} sentences"
            for i in np.random.default_rng(step).choice(len(some), min(3, len(some)), False):
                text += "\n" + compared(some[i], found[i])
        say(text)
        return gather(f"scores {next(number)}", scores)[0]

    return validate


def fit(
    run: RunFolder,
    config: Config,
    state: TrainState,
    train_step: Callable,
    rows: TrainingRows,
    checkpoints: Checkpoints,
    validate: Callable[[Any, int], dict[str, float] | None],
    stop: Callable[[], bool],
    profile: Profile,
) -> TrainState:
    """Train from the newest checkpoint, or from nothing."""
    before = None
    found = checkpoints.restore(state.to_dict(), lambda text: say(f"warning: {text}"))
    if found is not None:
        step, restored, before = found
        state = TrainState(**restored)
        if rows.is_of_other_text(before["rows"]):
            say("warning: the training text is not what it was; going on at the same place of it.")
        rows.set_state(before["rows"])
        say(f"Going on from step {step:,}.")
    elif config.training.begin_from:
        state = begun_from(RunFolder(config.training.begin_from), state)
    log = MetricsLog(run.metrics, run.tensorboard, int(state.step), active=is_first())
    if int(state.step) < config.training.steps or config.training.average_checkpoints == 1:
        forget_average(run, "of a former end")
    with contextlib.closing(log), profile:
        return train(
            state,
            profile.of(train_step),
            rows,
            lambda batch: lay_out(batch, config),
            config.training,
            checkpoints,
            log,
            validate,
            stop=stop,
            before=before,
            say=say,
        )


def begun_from(former: RunFolder, state: TrainState) -> TrainState:
    """A new state with what another run translates with."""
    found = former.params(warn=lambda text: say(f"warning: {text}"))
    say(f"Beginning from step {found.step:,} of {former.path}.")
    params = replicate(found.params, jax.local_devices())
    # A copy, for a buffer cannot be donated twice.
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, average=average)


def try_average(
    run: RunFolder,
    config: Config,
    validate: Callable[[Any, int], dict[str, float] | None],
    step: int,
) -> None:
    """Hold the mean of the newest checkpoints against the best one; keep it where it is better."""
    training = config.training
    steps, mean = mean_of_newest(
        run.checkpoints, training.average_checkpoints, say, training.save_every
    )
    say(f"The mean of the checkpoints of steps {', '.join(map(str, reversed(steps)))}:")
    scores = validate(mean, step)
    if scores is None:
        return
    rank = rank_of(scores, config.training.best_by)
    best = rank_of_best(run.checkpoints)
    forget_average(run, "of this end")
    if rank is not None and (best is None or rank < best):
        run.keep_average(mean, steps[0])
        say("It is better than the best checkpoint, and what this run translates with.")
    else:
        say("The best checkpoint is better, and what this run translates with.")


def forget_average(run: RunFolder, which: str) -> None:
    """Its checkpoints will not be the newest any more, or no mean is asked for now."""
    with first_ahead(f"mean {which}"):
        if is_first():
            run.drop_average()


def timing_the_first(train_step: Callable) -> Callable:
    """The same step; the first one says how long the start took, compiling included."""
    waiting = True

    def step(state: TrainState, batch: Any) -> Any:
        nonlocal waiting
        result = train_step(state, batch)
        if waiting:
            jax.block_until_ready(result)
            say(f"The first step is done {time.perf_counter() - STARTED:.1f} s after the start.")
            waiting = False
        return result

    return step


def score_test_set(run: RunFolder, config: Config, stop: Callable[[], bool] = bool) -> None:
    """Translate the test split with what a user would restore, and print the scores."""
    try:
        pairs = [pair for pair in open_split(config, "test") if not is_empty(pair)]
    except ValueError as error:
        say(f"No test score: {error}")
        return
    if not pairs:
        say("No test score: no pair of the test split has text on both sides.")
        return
    translator = Translator.load(run.path, warn=say)
    sources, references = zip(*pairs, strict=True)
    try:
        found = translator.translate(sources, stop=stop)
    except KeyboardInterrupt:
        return
    say("Test set:")
    for line in evaluate(found, references, target_language=target_language(config)).lines():
        say(f"  {line}")
    for i in range(0, len(pairs), max(len(pairs) // 5, 1)):
        say(compared(pairs[i], found[i]))


def target_language(config: Config) -> str:
    """Of the run: `ko` of `en-ko`."""
    return config.data.languages.split("-")[-1]


def compared(pair: tuple[str, str], found: str) -> str:
    """A source, what was made of it, and what the corpus says."""
    source, reference = pair
    return f"    {source}\n      -> {found}\n       ({reference})"


def example(pairs: dict[str, Any]) -> str:
    """A sentence to try, without a quote in it."""
    return next((pair[0] for pair in pairs["validation"] if "'" not in pair[0]), "")


def command() -> str:
    """What the user typed."""
    return shlex.join(["python", *sys.argv])


if __name__ == "__main__":
    open_streams()
    # Until training listens itself: an exception, so that nothing half written stays behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
