"""Graceful stopping: the first signal requests it, a second one ends the process at once."""

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType

StopCheck = Callable[[], bool] | None
"""Called between two pieces of work; returns whether to stop. None: never stop."""


class Stopped(Exception):
    """Work ended early, because its `StopCheck` returned true."""


class StopRequest:
    """Records the first SIGINT or SIGTERM, so that the process can finish its current work.

    A context manager for the main thread, and a `StopCheck`. `signal_number` is None, SIGINT or
    SIGTERM; a program that ends because of it should exit with `status`. A second signal ends the
    process at once.
    """

    def __init__(self, announcement: str = ""):
        """Take a text to write to stderr at the first signal."""
        self.signal_number: int | None = None
        self._announcement = announcement
        self._before: dict = {}

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self.signal_number is not None

    @property
    def status(self) -> int:
        """The exit status: 130 for Ctrl-C, 143 for SIGTERM, 0 without a signal."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def __enter__(self) -> "StopRequest":
        """Install the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        """Restore the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None:
            os._exit(128 + number)
        self.signal_number = number
        if self._announcement:
            # To the descriptor, because the signal may interrupt a write to sys.stderr.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._announcement}\n".encode())


class InterruptOnSignal(StopRequest):
    """Raises KeyboardInterrupt at the first SIGINT or SIGTERM, with its number as argument."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        super()._handle(number, frame)
        raise KeyboardInterrupt(number)
