"""Train a translation model, or continue a run: flaxformer-min train [CONFIG] [--workdir RUN] ...

Without arguments it learns to translate embedded English phrases into Korean. CONFIG is a Python
file that ends in `config = Config(...)`, or RUN/config.json to continue that run. A run that exists
continues from its newest checkpoint.
"""

import dataclasses
import logging
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro

from flaxformer_min.cli.terminal import log_to_terminal
from flaxformer_min.config import Config
from flaxformer_min.experiment.run import TrainResult, train
from flaxformer_min.storage.run_folder import without_caches
from flaxformer_min.system.compilation import enable_compilation_cache
from flaxformer_min.system.devices import configure_cpu_devices
from flaxformer_min.system.distributed import (
    Distributed,
    distributed_session,
    gather,
    is_main_process,
)
from flaxformer_min.system.files import read_file
from flaxformer_min.system.memory import tune_malloc
from flaxformer_min.system.signals import InterruptOnSignal
from flaxformer_min.system.streams import (
    CLOSED_PIPE,
    drop_unwritable,
    ignore_broken_pipe,
    visible,
)

LOGGER = logging.getLogger("flaxformer_min")

DEFAULT_CONFIG = Path(__file__).with_name("cldr_en_ko.py")


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    """The settings of a run, its folder, and the processes that train it."""

    workdir: Path = Path("runs")
    """The run folder. Several processes must share it."""

    profile: int = 0
    """Record a profile of this many steps, from the 11th of this start on, in RUN/profile; 0: none.
    The main process records its own devices."""

    distributed: Distributed = Distributed()

    def __post_init__(self):
        """Validate what is not a setting of the run."""
        super().__post_init__()
        if self.profile < 0:
            raise ValueError(f"--profile must be at least 0 steps; got {self.profile}.")


def main(argv: Sequence[str], prog: str = "flaxformer-min train") -> int:
    """Run the command and return its exit status, as `run_command`."""
    return run_command(argv, prog, read_arguments, lambda config: config)


def run_command(
    argv: Sequence[str],
    prog: str,
    read: Callable[[Sequence[str], str], Arguments],
    prepare: Callable[[Config], Config],
) -> int:
    """Read the arguments, train with the settings that `prepare` returns, and give the exit status.

    0 when training has ended, 2 for an error, 130, 143 and 129 after Ctrl-C, SIGTERM and
    a closed terminal, 141 when the reader of the help has gone.
    """
    with InterruptOnSignal() as signals, log_to_terminal(prog, only_if=is_main_process):
        try:
            try:
                settings = read(argv, prog)
            except BrokenPipeError:  # nobody reads the help; training continues
                drop_unwritable()
                return CLOSED_PIPE
            tune_malloc()

            def configure(processes: int) -> None:
                configure_cpu_devices(settings.data.rows_per_batch // processes)

            with distributed_session(settings.distributed, configure):
                result = _train(settings, prepare)
                status = max(gather("status", signals.status))
                with ignore_broken_pipe():
                    _print_next_command(result, [prog, *argv])
                return status
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            with ignore_broken_pipe():
                reason = "there is too little memory." if isinstance(error, MemoryError) else error
                print(f"{prog}: error: {visible(str(reason))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            with ignore_broken_pipe():
                print("\nStopped. The same command continues.", file=sys.stderr)
            return signals.status


def _train(settings: Arguments, prepare: Callable[[Config], Config]) -> TrainResult:
    config = Config(*(getattr(settings, field.name) for field in dataclasses.fields(Config)))
    enable_compilation_cache(config.data.cache_dir)
    return train(prepare(config), settings.workdir, profile=settings.profile)


def _print_next_command(result: TrainResult, command: list[str]) -> None:
    if not is_main_process():
        return
    if result.stopped:
        program = "python train.py" if command[0] == "train.py" else command[0]
        again = shlex.join(command[1:])
        when = f"at step {result.step:,} and saved" if result.step else "before the first step"
        print(visible(f"Stopped {when}. To continue: {program} {again}".rstrip()))
        return
    run = shlex.quote(str(result.run.path))
    command = f"echo '{result.example}' | flaxformer-min translate {run}"
    print(visible(f"Translate with this run:\n  {command}"))


def read_arguments(argv: Sequence[str], prog: str) -> Arguments:
    """Return the settings of the config file, overridden by those of the command line."""
    named = bool(argv) and not argv[0].startswith("-")
    path = Path(argv[0]) if named else DEFAULT_CONFIG
    if (path / "config.json").is_file():
        raise ValueError(f"{path} is a run folder; continue it with {path / 'config.json'}.")
    if not path.is_file():
        raise ValueError(
            "a config is a Python file that ends in `config = Config(...)`, or the config.json of "
            f"a run; there is no {path}."
        )
    if path.suffix == ".json":
        config, workdir = _config_of_run(path), path.parent
    else:
        config, workdir = read_config(path), Path("runs") / path.stem
    groups = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return tyro.cli(
        Arguments,
        prog=f"{prog} [CONFIG]",
        description=__doc__,
        default=Arguments(**groups, workdir=workdir),
        args=list(argv[1:] if named else argv),
    )


def _config_of_run(path: Path) -> Config:
    """Return the settings of a run's config.json, which do not choose where caches are."""
    try:
        config = Config.from_json(read_file(path).decode(), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text; {error}.") from error
    if config.data.cache_dir:
        LOGGER.info(
            "%s names %s for caches. It is not used, because a run folder may come from anybody; "
            "--data.cache-dir uses it.",
            path,
            config.data.cache_dir,
        )
    return without_caches(config)


def read_config(path: Path) -> Config:
    """Return the `config` of a Python file."""
    try:
        config = runpy.run_path(str(path)).get("config")
    except ValueError:
        raise  # the config's own validation
    except Exception as error:  # a user's file may raise anything
        unknown = "unexpected keyword argument" in str(error)
        way_out = "`flaxformer-min train --help` lists all settings." if unknown else ""
        raise ValueError(
            f"{path} must be a Python file that makes a config; {type(error).__name__}: {error}. "
            f"{way_out}".strip()
        ) from error
    if not isinstance(config, Config):
        raise ValueError(f"{path} must end in `config = Config(...)`; got {config!r}.")
    return config
