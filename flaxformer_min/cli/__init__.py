"""The command `flaxformer-min`: train, translate, score, evaluate, plot and others.

Output is line-aligned with input and streamed, so that memory does not depend on the number of
lines. Errors of usage are one sentence on stderr and status 2. Heavy modules are imported on use,
so that `--help` is fast.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from flaxformer_min.cli.arguments import make_parser
from flaxformer_min.cli.lines import Stop
from flaxformer_min.cli.terminal import log_to_terminal
from flaxformer_min.system.memory import tune_malloc, with_oom_hint
from flaxformer_min.system.signals import SIGNALS, Stopped
from flaxformer_min.system.streams import (
    CLOSED_PIPE,
    drop_unwritable,
    ignore_broken_pipe,
    open_streams,
    visible,
)

MEMORY_ADVICE = (
    "Choose a smaller --batch-size, --beam-size or --max-extra-tokens, if the command has them, or "
    "shorter text."
)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status; `argv` None: the arguments of the process.

    0 for success, 2 for an error, 130, 143 and 129 after Ctrl-C, SIGTERM and a
    closed terminal, 141 when the reader of a pipe has gone.
    """
    owns_process = argv is None
    if owns_process:
        open_streams()
        argv = sys.argv[1:]
    if argv[:1] in (["train"], ["distill"]):
        return _train(argv[1:], f"flaxformer-min {argv[0]}", owns_process)
    try:
        with Stop() as stop, log_to_terminal("flaxformer-min", level="WARNING"):
            try:
                args = make_parser().parse_args(argv)
                if owns_process:
                    with _importing(owns_process):
                        _prepare_jax(hasattr(args, "step"), getattr(args, "beam_size", None) == 1)
                with with_oom_hint(MEMORY_ADVICE):
                    return args.command(args, stop)
            except (KeyboardInterrupt, Stopped):
                if stop.came_twice and owns_process:
                    drop_unwritable()
                    os._exit(stop.status)  # a regular exit would wait for the running batch
                return stop.status or 130
    except BrokenPipeError:
        drop_unwritable()
        return CLOSED_PIPE
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        drop_unwritable()
        with ignore_broken_pipe():
            print(f"flaxformer-min: error: {visible(_sentence(error))}", file=sys.stderr)
        return 2


def train_command(prog: str) -> int:
    """Run train.py, which is called `prog` in its help, and return its exit status; as `main`."""
    open_streams()
    return _train(sys.argv[1:], prog, owns_process=True)


def _train(argv: Sequence[str], prog: str, owns_process: bool) -> int:
    with _importing(owns_process):
        if prog.endswith("distill"):
            from flaxformer_min.cli.distill import main as run
        else:
            from flaxformer_min.cli.train import main as run
    if owns_process:
        _ignore_late_writes()
    return run(argv, prog)


def _ignore_late_writes() -> None:
    """Say nothing of arrays of a checkpoint whose writes end after the first error was raised."""
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            others(unraisable)

    sys.unraisablehook = hook


@contextlib.contextmanager
def _importing(owns_process: bool) -> Iterator[None]:
    """Let signals end the process during imports, which an exception would leave half done."""
    if not owns_process:
        yield
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    gc.freeze()  # or the garbage collector would search what was imported at exit, for 0.5 s


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"there is too little memory. {MEMORY_ADVICE}"
    return str(error)


def _prepare_jax(loads_model: bool, greedy: bool) -> None:
    from flaxformer_min.system.compilation import enable_compilation_cache
    from flaxformer_min.system.devices import configure_cpu_devices, cpu_cores

    configure_cpu_devices()
    tune_malloc(heaps=cpu_cores() if greedy else 1)  # a beam gains little, and needs more memory
    enable_compilation_cache()
    if loads_model:  # now, while Ctrl-C may end the process
        import orbax.checkpoint  # noqa: F401

        import flaxformer_min.decoding.translator  # noqa: F401
