"""The run folder: all inputs and outputs of a run, as data that is never executed or unpickled.

config.json               every setting, and the version of this format
tokenizer.model           SentencePiece; or source_tokenizer.model and target_tokenizer.model
checkpoints/STEP/         Orbax: parameters, optimizer, random key, position in the training data
averaged/STEP/            Orbax: the mean of the last checkpoints, if it is better than the best
import.json               of an imported model: settings of its search that were left out
metrics.jsonl             one line per log and per validation
tensorboard/              the same as TensorBoard events
profile/                  timelines of a few steps, if requested
distilled/                what `flaxformer-min distill` made of the training text
lock                      locked by the process that trains
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flaxformer_min.config import DROPOUTS, Config, ModelConfig
from flaxformer_min.config_fields import differences, differences_of_group, fixed_settings
from flaxformer_min.data.imported_tokenizer import ImportedTokenizer
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.storage.checkpoint import Checkpoints, check_path
from flaxformer_min.storage.metadata import check_identity, read_metadata, steps_of
from flaxformer_min.storage.restore import restore_params
from flaxformer_min.system.devices import replicate
from flaxformer_min.system.files import read_file, remove_partial, write_atomically

LOGGER = logging.getLogger("flaxformer_min")

Tokenizers = tuple[Tokenizer, Tokenizer]

TOKENIZER_FILES = ("tokenizer.model", "source_tokenizer.model", "target_tokenizer.model")

DISTILLED = "distilled"
"""Folder with a student's training text, which is there before the run begins."""

OWN_NAMES = (
    *("config.json", "metrics.jsonl", "lock", *TOKENIZER_FILES),
    *("checkpoints", "averaged", "damaged", "tensorboard", "profile"),
)
"""Files and folders that training writes to."""


class Restored(NamedTuple):
    """The parameters that a run translates with.

    step:    of the checkpoint, or of the newest one if the parameters are the mean of several.
    is_mean: whether they are a mean.
    """

    step: int
    params: Any
    is_mean: bool


class RunFolder:
    """A run, given by its path. Files are read and written by its methods only."""

    def __init__(self, path: str | Path):
        """Take the path, which need not exist. Raises ValueError as `check_path`."""
        self.path = Path(path)
        self.absolute = self.path.absolute()  # wherever the process goes later
        check_path(self.path, writes=False)
        self.checkpoints = self.path / "checkpoints"
        self.averaged = self.path / "averaged"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.profile = self.path / "profile"

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "config.json").exists()

    def config(self) -> Config:
        """Return the settings of the run, without its folder for caches (see `without_caches`).

        Raises ValueError if the folder is missing, or does not hold a run of a known format.
        """
        file = self.path / "config.json"
        if not self.path.is_dir():
            raise ValueError(f"a run is a folder; {self._what_is_there()}")
        if not file.exists():
            raise ValueError(
                f"{self.path} is not a run: it has no config.json. `flaxformer-min train` creates "
                "one."
            )
        try:
            text = read_file(file).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{file} cannot be read: {error}. Make it readable, or restore it from a backup."
            ) from error
        return without_caches(Config.from_json(text, file))

    def _what_is_there(self) -> str:
        """Return what a path is that is not a folder, and what to give instead."""
        if not self.path.is_file():
            return f"there is none at {self.path}."
        if self.path.name == "config.json":
            return f"{self.path} is a file. Give its folder: {self.path.parent}"
        return f"{self.path} is a file."

    def tokenizers(self) -> Tokenizers:
        """Return source and target tokenizer; one object if the languages share it.

        Raises ValueError if one is missing or is not a valid tokenizer.
        """
        config = self.config()
        names = self._tokenizer_names(config)
        missing = [name for name in names if not (self.path / name).exists()]
        if missing:
            raise ValueError(
                f"{self.path} is incomplete: it has no {missing[0]}. Restore it from a backup."
            )
        if config.data.tokenizers == "imported":
            sizes = (
                config.model.source_vocab_size or config.model.vocab_size,
                config.model.vocab_size,
            )
            source, target = (
                ImportedTokenizer.load(self.path / name, size)
                for name, size in zip(names, sizes, strict=True)
            )
            return source, target
        loaded = {name: Tokenizer.load(self.path / name) for name in set(names)}
        return loaded[names[0]], loaded[names[1]]

    def model_config(self) -> ModelConfig:
        """Return the model's settings, with the actual vocabulary sizes of the tokenizers."""
        return fit_vocabulary(self.config().model, self.tokenizers())

    def identity(self) -> dict[str, Any]:
        """Return what parameters must be used with: settings of the model, digests of tokenizers.

        Part of each checkpoint's description (see `check_identity`). Settings that change only the
        speed or training are left out.
        """
        config = self.config()
        settings = fixed_settings("model", config.model)
        for name in DROPOUTS:
            del settings[f"model.{name}"]
        names = self._tokenizer_names(config)
        tokenizers = self.tokenizers()
        return settings | {
            name: tokenizer.fingerprint for name, tokenizer in zip(names, tokenizers, strict=True)
        }

    def params(self, step: int | None = None) -> Restored:
        """Return the parameters of a checkpoint, on this machine's first device.

        `step` None: those to translate with, which are the mean that `keep_average` kept, else the
        best checkpoint by validation, else the newest. A damaged one is logged as a warning and
        the next is tried. Raises ValueError if none is intact, or the one of `step` is missing.
        """
        identity = self.identity()
        for folder in (self.checkpoints, self.averaged):
            check_identity(folder, identity)
        if step is None and steps_of(self.averaged):
            try:
                return Restored(*restore_params(self.averaged), is_mean=True)
            except ValueError:
                LOGGER.warning("the mean cannot be used; using a single checkpoint instead.")
        return Restored(*restore_params(self.checkpoints, step), is_mean=False)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        return max(steps_of(self.checkpoints), default=0)

    def keep_average(self, params: Any, step: int) -> None:
        """Save these parameters as the mean, to translate with from now on."""
        meta = {"identity": self.identity()} if self.exists else {}
        with contextlib.closing(Checkpoints(self.averaged, keep=1)) as checkpoints:
            checkpoints.save(step, {"params": replicate(params, jax.local_devices())}, meta)

    def drop_average(self) -> None:
        """Remove the mean, to translate with the best checkpoint."""
        shutil.rmtree(self.averaged, ignore_errors=True)

    def begin(
        self, config: Config, make_tokenizers: Callable[[tuple[Path, Path]], Any]
    ) -> Tokenizers:
        """Begin or continue the run, and return its tokenizers.

        `make_tokenizers` is called with the paths to write. Without a checkpoint, a run begins
        anew, also with other settings. Raises ValueError if the folder holds something else, or a
        run with checkpoints and other settings, or whose training cannot be continued.
        """
        self._check_ours()
        self._check_continues()
        differing = differences(self.config(), config) if self.exists else []
        if differing and self._has_checkpoint():
            file = self.path / "config.json"
            has_moved = self.config().data.corpus != config.data.corpus
            moved = f" If the same text has moved, change data.corpus in {file}."
            raise ValueError(
                f"{self.path} holds a run with other settings:\n  "
                + "\n  ".join(differing)
                + f"\nContinue with the settings of the run, `flaxformer-min train {file}`, or "
                "choose another --workdir." + (moved if has_moved else "")
            )
        newest = self.newest_step()
        if newest > config.training.steps:
            raise ValueError(
                f"training.steps must not be less than the steps already taken; {self.path} is at "
                f"step {newest:,}, got {config.training.steps:,}. Leave it out, or choose another "
                "--workdir."
            )
        if not self._has_checkpoint():  # the text may have changed, too
            names = self._tokenizer_names(config)
            make_tokenizers((self.path / names[0], self.path / names[1]))
        write_atomically(self.path / "config.json", config.to_json())
        return self.tokenizers()

    def _check_continues(self) -> None:
        """Raise ValueError if the newest checkpoint lacks what training continues from."""
        steps = steps_of(self.checkpoints)
        description = read_metadata(self.checkpoints, steps[0]) if steps else None
        if description is not None and "batches" not in description:
            raise ValueError(
                f"the training of {self.path} cannot be continued: its checkpoints have no "
                "position in the training data, as those of an imported model. Begin a new run "
                "with their parameters: another --workdir and "
                f"--training.init-from {self.path}."
            )

    def check_model(self, model: ModelConfig) -> None:
        """Raise ValueError unless `model` has this run's settings; dropout may differ."""
        # Fused attention excludes attention dropout, so both come from the same model.
        may_differ = {name: getattr(model, name) for name in (*DROPOUTS, "attention")}
        own = dataclasses.replace(self.config().model, **may_differ)
        if differing := differences_of_group("model", own, model):
            raise ValueError(
                f"training.init_from needs a run of the same model; {self.path} differs:\n  "
                + "\n  ".join(differing)
                + "\nUse the model settings of that run, or leave out training.init_from."
            )

    def open_checkpoints(self, config: Config) -> Checkpoints:
        """Return the checkpoints for reading and writing."""
        training = config.training
        return Checkpoints(self.checkpoints, training.keep_checkpoints, training.save_every)

    @contextlib.contextmanager
    def locked(self) -> Iterator["RunFolder"]:
        """Lock the run for this process. The system unlocks it when the process ends or is killed.

        A folder that it creates is removed again if nothing is written to it. Raises ValueError if
        another process has locked it, and, before anything is written, for a folder that is not a
        run and cannot become one; OSError if it cannot be written to.
        """
        self._check_ours()
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._open_lock()
        except OSError as error:
            raise OSError(
                f"a run needs a folder to write in; {self.path}: {error.strerror}. Choose another "
                "--workdir."
            ) from error
        with os.fdopen(lock, "r+", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._trained_by(file.read(20).strip()) from error
            except OSError as error:
                raise OSError(
                    f"a run needs a folder that can be locked; {self.path}: {error.strerror}. "
                    "Choose a --workdir on another file system."
                ) from error
            self._write_id(lock)
            for name in ("config.json", "metrics.jsonl", *TOKENIZER_FILES):
                remove_partial(self.path / name)  # but no output that others write here
            try:
                yield self
            finally:
                if is_new and [path.name for path in self.path.glob("*")] == ["lock"]:
                    shutil.rmtree(self.path, ignore_errors=True)

    def _write_id(self, lock: int) -> None:
        """Write the id of this process into the open lock file."""
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise OSError(
                f"a run needs a folder to write in; {self.path}: {error.strerror}. Free some "
                "space, or choose another --workdir."
            ) from error

    def _trained_by(self, owner: str) -> ValueError:
        """Return the error that the process of this id trains the run."""
        advice = "End it first, or choose another --workdir."
        if owner == str(os.getppid()):
            advice = (
                "It started this one, as it does for data.workers: then a script must call train "
                'below `if __name__ == "__main__":`.'
            )
        return ValueError(
            f"only one process may train a run at a time; process {owner} trains {self.path}. "
            f"{advice}"
        )

    def _open_lock(self) -> int:
        """Open the lock file, or create it; another file of that name is left as it is."""
        lock = self.path / "lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(lock, flags, 0o666)
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_size < 20
        if not ours or os.pread(descriptor, 20, 0).strip(b"0123456789\n"):
            os.close(descriptor)
            raise ValueError(
                f"{lock} must be the lock file of a run, which contains only a process id; it is "
                "another file. Choose another --workdir."
            )
        return descriptor

    def _check_ours(self) -> None:
        """Raise ValueError unless the folder is a run, or can become one."""
        check_path(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"a run is a folder; {self.path} is a file. Choose another --workdir.")
        names = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        links = [name for name in names if name in OWN_NAMES and (self.path / name).is_symlink()]
        if links:
            raise ValueError(
                f"the files of a run folder must not be links; {self.path / links[0]} is a link to "
                f"{os.readlink(self.path / links[0])}. Replace it by its target, or choose another "
                "--workdir."
            )
        own = [self.path / name for name in names if name in OWN_NAMES]
        odd = [path for path in own if not (path.is_file() or path.is_dir())]
        if odd:
            raise ValueError(
                f"the files of a run folder must be regular ones; {odd[0]} is a pipe or a device. "
                "Remove it, or choose another --workdir."
            )
        if self.exists:
            self.config()
        else:
            self._check_empty(names)

    def _check_empty(self, names: Sequence[str]) -> None:
        """Raise ValueError unless the folder has at most the files of an interrupted start."""
        ours = {"lock", DISTILLED, *TOKENIZER_FILES}
        others = [name for name in names if name not in ours and not name.startswith(".")]
        if others:
            raise ValueError(
                f"a new run needs an empty folder; {self.path} holds {', '.join(others[:3])}. "
                "Choose another --workdir."
            )

    def _has_checkpoint(self) -> bool:
        return bool(steps_of(self.checkpoints))

    @staticmethod
    def _tokenizer_names(config: Config) -> tuple[str, str]:
        if config.model.source_vocab_size is None and config.data.tokenizers == "trained":
            return "tokenizer.model", "tokenizer.model"
        return "source_tokenizer.model", "target_tokenizer.model"


def without_caches(config: Config) -> Config:
    """Return the settings of a run without `data.cache_dir` and `data.download`.

    A run folder may be untrusted, and cached programs are executed. So only the user decides where
    caches are, and whether to download.
    """
    data = dataclasses.replace(config.data, cache_dir="", download=False)
    return dataclasses.replace(config, data=data)


def fit_vocabulary(config: ModelConfig, tokenizers: Tokenizers) -> ModelConfig:
    """Return the model's settings with the actual vocabulary sizes of the tokenizers."""
    source, target = (tokenizer.vocab_size for tokenizer in tokenizers)
    separate = config.source_vocab_size is not None
    return dataclasses.replace(
        config, vocab_size=target, source_vocab_size=source if separate else None
    )
