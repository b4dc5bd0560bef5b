"""The command `flaxformer-min`: translate, score, evaluate and plot with a run that was trained.

What comes out is line-aligned with what went in, and streams: a million lines never lie in memory.
A user's mistake is one sentence on stderr and status 2. Heavy imports wait until they are needed,
so that `--help` is there at once.
"""

import os
import sys

from flaxformer_min.cli.arguments import make_parser
from flaxformer_min.cli.lines import Stop
from flaxformer_min.runtime.streams import drop_unwritable, open_streams, unheard

CLOSED_PIPE = 141
"""The status of a program that a closed pipe ends, as a shell sees it: 128 + SIGPIPE."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` None: what the shell gave.

    0 when all is done, 2 for a mistake of the user, 130 and 143 after Ctrl-C and SIGTERM, 141 when
    the reader of a pipe has gone.
    """
    if argv is None:
        open_streams()
    try:
        with Stop() as stop:
            try:
                args = make_parser().parse_args(argv)
                if argv is None:
                    _prepare_jax()
                return args.command(args, stop)
            except KeyboardInterrupt:
                if stop.came_twice and argv is None:
                    drop_unwritable()
                    os._exit(stop.status)  # Python's own end waits for a batch that is running
                return stop.status or 130
    except BrokenPipeError:
        drop_unwritable()
        return CLOSED_PIPE
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        drop_unwritable()
        with unheard():
            print(f"flaxformer-min: error: {_sentence(error)}", file=sys.stderr)
        return 2


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if "RESOURCE_EXHAUSTED" in str(error):
        return (
            "the device has not enough memory for this; choose a smaller --batch-size, --beam-size "
            "or --max-extra-tokens where there are such, or shorter text."
        )
    return str(error)


def _prepare_jax() -> None:
    from flaxformer_min.runtime.devices import keep_compiled_programs, keep_memory, use_cores
    from flaxformer_min.runtime.files import cache_folder

    use_cores()
    keep_memory()
    keep_compiled_programs(cache_folder())
