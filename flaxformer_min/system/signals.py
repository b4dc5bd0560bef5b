"""Graceful stopping: the first signal requests it, a second one ends the process at once."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType
from typing import Any

LOGGER = logging.getLogger("flaxformer_min")

StopCheck = Callable[[], bool] | None
"""Called between two pieces of work; returns whether to stop. None: never stop."""


class Stopped(Exception):
    """Work ended early, because its `StopCheck` returned true."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What stops a program: Ctrl-C, kill, and a terminal that is closed."""


AT_ONCE = 0.5
"""Seconds in which a repeated signal is the same one: `timeout` sends it to a process and, a moment
later, to its group, and a scheduler may do the same."""


POLL_SECONDS = 0.2
"""The main thread checks for an interrupt at least this often while work runs in a thread."""


class StopRequest:
    """Records the first SIGINT, SIGTERM or SIGHUP, so that the current work can be finished.

    A context manager for the main thread, and a `StopCheck`. `signal_number` is the signal's
    number, or None; a program that ends because of it should exit with `status`. A second signal,
    `AT_ONCE` later or more, ends the process at once, unless it is SIGHUP: a terminal that is
    closed may send it twice, once from the system and once from the shell. Where SIGHUP is ignored,
    as under nohup, it stays ignored.
    """

    def __init__(self):
        """Begin without a signal."""
        self.signal_number: int | None = None
        self._since = 0.0
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


class InterruptOnSignal(StopRequest):
    """Raises KeyboardInterrupt at the first signal, with its number as argument."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.signal_number is None
        super()._handle(number, frame)
        if is_first:
            raise KeyboardInterrupt(number)


class Interrupt:
    """Turns the first KeyboardInterrupt into a stop request. A `StopCheck`, as is `stop`."""

    def __init__(self, stop: StopCheck):
        """Combine it with the caller's own request."""
        self._stop, self._came = stop, threading.Event()

    def __call__(self) -> bool:
        """Return whether to stop, also after a request that `stop` does not repeat."""
        if self._stop is not None and not self._came.is_set() and self._stop():
            self._came.set()
        return self._came.is_set()

    def shield(self, work: Callable[[], Any], held: contextlib.ExitStack) -> Any:
        """Run `work` in a thread, where KeyboardInterrupt cannot interrupt a step.

        Python raises it in the main thread, between any two operations. Within a step, the state
        that the step has donated would be lost. After a second one, `held` is released by the
        thread, which may still be in a step.
        """
        pool = ThreadPoolExecutor(1, "train")
        running = pool.submit(work)
        try:
            try:
                return _result_of(running)
            except KeyboardInterrupt:
                self._came.set()
                LOGGER.info("Finishing this step, then saving. Interrupt again to stop at once.")
                return _result_of(running)
        finally:
            pool.shutdown(wait=False)
            if not running.done():
                release = held.pop_all().close
                running.add_done_callback(lambda _: release())


def _result_of(running: Future) -> Any:
    """Wait for the result. Poll, because not every interrupt ends a wait."""
    while not running.done():
        wait([running], timeout=POLL_SECONDS)
    return running.result()
