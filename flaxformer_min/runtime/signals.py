"""Graceful stopping: the first signal requests it, a second one ends the process at once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

StopCheck = Callable[[], bool] | None
"""Called between two pieces of work; returns whether to stop. None: never stop."""


class Stopped(Exception):
    """Work ended early, because its `StopCheck` returned true."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What stops a program: Ctrl-C, kill, and a terminal that is closed."""


AT_ONCE = 0.5
"""Seconds in which a repeated signal is the same one: `timeout` sends it to a process and, a moment
later, to its group, and a scheduler may do the same."""


class StopRequest:
    """Records the first SIGINT, SIGTERM or SIGHUP, so that the current work can be finished.

    A context manager for the main thread, and a `StopCheck`. `signal_number` is None or that of the
    signal; a program that ends because of it should exit with `status`. A second signal, `AT_ONCE`
    later or more, ends the process at once, unless it is SIGHUP: a terminal that is closed may send
    it twice, once from the system and once from the shell. Where SIGHUP is ignored, as under nohup,
    it stays ignored.
    """

    def __init__(self, announcement: str = ""):
        """Take a text to write to stderr at the first signal."""
        self.signal_number: int | None = None
        self._announcement, self._since = announcement, 0.0
        self._before: dict = {}

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self.signal_number is not None

    @property
    def status(self) -> int:
        """The exit status: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 0 without a signal."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def __enter__(self) -> "StopRequest":
        """Install the handlers."""
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        """Restore the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None:
            if number == signal.SIGHUP or time.monotonic() - self._since < AT_ONCE:
                return
            os._exit(128 + number)
        self.signal_number, self._since = number, time.monotonic()
        if self._announcement:
            # To the descriptor, because the signal may interrupt a write to sys.stderr.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._announcement}\n".encode())


class InterruptOnSignal(StopRequest):
    """Raises KeyboardInterrupt at the first signal, with its number as argument."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.signal_number is None
        super()._handle(number, frame)
        if is_first:
            raise KeyboardInterrupt(number)
