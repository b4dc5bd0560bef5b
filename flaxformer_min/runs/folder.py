"""The run folder: all that a run needs and leaves, as data that is never executed or unpickled.

config.json               every setting, and the version of this format
tokenizer.model           SentencePiece; or source_tokenizer.model and target_tokenizer.model
checkpoints/STEP/         Orbax: parameters, optimizer, random key; where the rows stand
averaged/STEP/            Orbax: the mean of the last checkpoints, where it was found to be better
metrics.jsonl             one line per log and per validation
tensorboard/              the same as TensorBoard events
profile/                  timelines of a few steps, where they were asked for
lock                      held by the process that trains
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flaxformer_min.config import DROPOUTS, Config, ModelConfig, differences
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.runs.checkpoint import Checkpoints, steps_of
from flaxformer_min.runs.restore import restore_params
from flaxformer_min.runtime.devices import replicate
from flaxformer_min.runtime.files import remove_partial, write_atomically

LOGGER = logging.getLogger("flaxformer_min")

Tokenizers = tuple[Tokenizer, Tokenizer]


TOKENIZER_FILES = ("tokenizer.model", "source_tokenizer.model", "target_tokenizer.model")


class Restored(NamedTuple):
    """What a run translates with.

    step:    of the checkpoint; of the newest one where they are the mean of several.
    is_mean: whether they are.
    """

    step: int
    params: Any
    is_mean: bool


class RunFolder:
    """One run, by its path. Nothing is read or made before it is asked for."""

    def __init__(self, path: str | Path):
        """Name the folder; it need not exist."""
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.averaged = self.path / "averaged"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.json").exists()

    def config(self) -> Config:
        """The settings the run was made with.

        Raises ValueError when this is no folder, no run, or a run of a newer format.
        """
        file = self.path / "config.json"
        if not self.path.is_dir():
            raise ValueError(f"a run is a folder; there is none at {self.path}.")
        if not file.exists():
            raise ValueError(f"{self.path} is no run: it has no config.json. train.py makes one.")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file} cannot be read: {error}. Make it readable, or copy it back from elsewhere."
            ) from error
        return Config.from_json(text, file)

    def tokenizers(self) -> Tokenizers:
        """Source and target tokenizer; one object where the languages share it.

        Raises ValueError when one is missing or is no SentencePiece model of ours.
        """
        names = self._tokenizer_names(self.config())
        missing = [name for name in names if not (self.path / name).exists()]
        if missing:
            raise ValueError(
                f"{self.path} is incomplete: it has no {missing[0]}. Copy it back from elsewhere."
            )
        loaded = {name: Tokenizer.load(self.path / name) for name in set(names)}
        return loaded[names[0]], loaded[names[1]]

    def model_config(self) -> ModelConfig:
        """The model's sizes, with the vocabularies the tokenizers really have."""
        return fit_vocabulary(self.config().model, self.tokenizers())

    def params(self, step: int | None = None) -> Restored:
        """Return the parameters of a checkpoint, on this machine's first device.

        `step` None: those to translate with, which are the mean that `keep_average` kept, else the
        best checkpoint by validation, else the newest. A damaged one is logged as a warning and
        the next is tried. Raises ValueError if none is intact, or the one of `step` is missing.
        """
        self.config()
        if step is None and steps_of(self.averaged):
            try:
                return Restored(*restore_params(self.averaged), is_mean=True)
            except ValueError:
                LOGGER.warning("the mean cannot be used; a single checkpoint is.")
        return Restored(*restore_params(self.checkpoints, step), is_mean=False)

    def keep_average(self, params: Any, step: int) -> None:
        """Translate with these parameters from now on."""
        checkpoints = Checkpoints(self.averaged, keep=1)
        checkpoints.save(step, {"params": replicate(params, jax.local_devices())}, {})
        checkpoints.close()

    def drop_average(self) -> None:
        """Translate with the best checkpoint."""
        shutil.rmtree(self.averaged, ignore_errors=True)

    def begin(
        self, config: Config, make_tokenizers: Callable[[tuple[Path, Path]], Tokenizers]
    ) -> Tokenizers:
        """Begin the run, or go on with it; returns its tokenizers.

        `make_tokenizers` is called with the paths to write. While there is no checkpoint, nothing
        is lost by beginning anew, with other settings too. Raises ValueError when the folder holds
        something else, or a run that has learned with other settings.
        """
        if not self.exists:
            self._check_empty()
        differing = differences(self.config(), config) if self.exists else []
        if differing and self._has_checkpoint():
            file = self.path / "config.json"
            moved = f" If the same text lies elsewhere now, say where in {file}."
            raise ValueError(
                f"{self.path} holds a run with other settings:\n  "
                + "\n  ".join(differing)
                + f"\nGo on with the settings of the run, `python train.py {file}`, or choose "
                "another --workdir." + moved * (self.config().data.corpus != config.data.corpus)
            )
        if not self._has_checkpoint():  # the text may be another one, too
            names = self._tokenizer_names(config)
            make_tokenizers((self.path / names[0], self.path / names[1]))
        write_atomically(self.path / "config.json", config.to_json())
        return self.tokenizers()

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError unless `model` has this run's settings; dropout may differ."""
        # Fused attention goes with some dropout only, so it comes from the same side.
        may_differ = {name: getattr(model, name) for name in (*DROPOUTS, "attention")}
        own = dataclasses.replace(self.config().model, **may_differ)
        if differing := differences(Config(model=own), Config(model=model)):
            raise ValueError(
                f"a run begins from one of the same model; {self.path} has another:\n  "
                + "\n  ".join(differing)
                + "\nTake the settings of that run, or begin without it."
            )

    def open_checkpoints(self, config: Config) -> Checkpoints:
        """The checkpoints, for writing."""
        training = config.training
        return Checkpoints(self.checkpoints, training.keep_checkpoints, training.save_every)

    @contextlib.contextmanager
    def locked(self) -> Iterator["RunFolder"]:
        """Hold the run for this process. The system lets go when the process ends, however.

        Raises ValueError when another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "lock", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise ValueError(
                    "one process trains a run at a time; process "
                    f"{file.read(20).strip()} holds {self.path}. End it first, or choose another "
                    "--workdir."
                ) from error
            file.truncate(0)
            print(os.getpid(), file=file, flush=True)
            for name in ("config.json", "metrics.jsonl", *TOKENIZER_FILES):
                remove_partial(self.path / name)  # and no output that others write here
            yield self

    def _check_empty(self) -> None:
        """Only what a start that was cut off leaves may be there."""
        ours = {"lock", *TOKENIZER_FILES}
        names = set(os.listdir(self.path)) if self.path.is_dir() else set()
        others = sorted(name for name in names - ours if not name.startswith("."))
        if others:
            raise ValueError(
                f"a run starts in an empty folder or goes on in its own; {self.path} holds "
                f"{', '.join(others[:3])}. Choose another --workdir."
            )

    def _has_checkpoint(self) -> bool:
        folder = self.checkpoints
        return folder.is_dir() and any(path.name.isdecimal() for path in folder.iterdir())

    @staticmethod
    def _tokenizer_names(config: Config) -> tuple[str, str]:
        if config.model.source_vocab_size is None:
            return "tokenizer.model", "tokenizer.model"
        return "source_tokenizer.model", "target_tokenizer.model"


def fit_vocabulary(config: ModelConfig, tokenizers: Tokenizers) -> ModelConfig:
    """The same model for the vocabularies that the tokenizers really have."""
    source, target = (tokenizer.vocab_size for tokenizer in tokenizers)
    separate = config.source_vocab_size is not None
    return dataclasses.replace(
        config, vocab_size=target, source_vocab_size=source if separate else None
    )
