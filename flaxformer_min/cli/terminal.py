"""Log records on a terminal: messages on stdout, warnings on stderr."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from flaxformer_min.system.files import naming
from flaxformer_min.system.streams import ignore_broken_pipe, visible

LOGGER = logging.getLogger("flaxformer_min")


class TerminalHandler(logging.Handler):
    """Writes log records as lines, and each warning only once.

    Lines appear above a progress bar, if there is one. A closed pipe is ignored.
    """

    def __init__(self, prog: str, only_if: Callable[[], bool]):
        """Take the program's name for warnings. Records are dropped unless `only_if()`."""
        super().__init__()
        self._prog, self._only_if = prog, only_if
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if not self._only_if():
            return
        text = visible(record.getMessage())
        with naming("the program's output"), ignore_broken_pipe():
            if record.levelno < logging.WARNING:
                _write(text, sys.stdout)
            elif text not in self._warned:
                self._warned.add(text)
                _write(f"{self._prog}: warning: {text}", sys.stderr)


def _write(text: str, stream) -> None:
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file=stream)
    else:
        print(text, file=stream)


@contextlib.contextmanager
def log_to_terminal(
    prog: str, level: int = logging.INFO, only_if: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Write the package's log records of at least this level to the terminal."""
    handler, before, propagate = TerminalHandler(prog, only_if), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)
        LOGGER.propagate = propagate
