"""Ending politely: a first signal asks, a second one ends at once."""

import contextlib
import os
import signal
from types import FrameType


class StopRequest:
    """Remembers that the process was asked to end, so that it can finish what it is doing.

    Used as a context manager in the main thread. `signal_number` is None, SIGINT or SIGTERM; a
    program that stops for it ends with status 128 + its number. A second signal ends at once.
    """

    def __init__(self, announcement: str = ""):
        """`announcement` is said on stderr when the first signal comes."""
        self.signal_number: int | None = None
        self._announcement = announcement
        self._before: dict = {}

    def __bool__(self) -> bool:
        """Whether to stop."""
        return self.signal_number is not None

    @property
    def status(self) -> int:
        """The exit status: 130 for Ctrl-C, 143 for SIGTERM, 0 if nobody asked."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def __enter__(self) -> "StopRequest":
        """Listen from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        """Leave signals as they were."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None:
            os._exit(128 + number)
        self.signal_number = number
        if self._announcement:
            # To the descriptor: who reads stderr may have gone, or a line be half written to it.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{self._announcement}\n".encode())
