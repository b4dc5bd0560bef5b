"""Running the application with uvicorn, until it is stopped."""

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flaxformer_min.server.app import Access, App
from flaxformer_min.server.pair import Pair
from flaxformer_min.server.requests import Limits
from flaxformer_min.server.service import Service

LOGGER = logging.getLogger("flaxformer_min.server")

POLL_SECONDS = 0.2
"""How often the main thread looks for a signal."""


class Server:
    """A server of language pairs, in a thread of its own. It runs from `start` to `stop`."""

    def __init__(self, pairs: Sequence[Pair], access: Access, limits: Limits):
        """Take what is served; nothing is opened yet."""
        self._pairs, self._limits = list(pairs), limits
        self.app = App(Service(pairs, limits), access)
        self._stopping, self._ended = threading.Event(), threading.Event()
        self.address = ""
        self._uvicorn: uvicorn.Server | None = None
        self._threads: list[threading.Thread] = []

    def start(self, host: str, port: int) -> None:
        """Listen; programs are compiled from now on."""
        listener = _listen(host, port)
        protocol = type("Protocol", (_PatientProtocol,), {"seconds": self._limits.header_seconds})
        config = uvicorn.Config(
            self.app.starlette(),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(self._limits.deadline + self._limits.header_seconds) + 1,
        )
        # Their warnings are about clients, and errors have been logged by the application.
        for name in ("uvicorn", "python_multipart"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._uvicorn = uvicorn.Server(config)
        name = f"[{host}]" if ":" in host else host
        names = ", ".join(f"{pair.source} to {pair.target}" for pair in self._pairs)
        self.address = f"http://{name}:{listener.getsockname()[1]}"
        LOGGER.info("Serving %s at %s", names, self.address)
        for target, arguments in ((self._answer, [listener]), (self._compile, [])):
            thread = threading.Thread(target=target, args=arguments, daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait until the server ends, which it does by itself only after an error.

        A signal may interrupt it. `Thread.join` would then take the thread for ended (Python 3.11).
        """
        while not self._ended.wait(POLL_SECONDS):
            pass
        raise RuntimeError("the server has ended by itself.")

    def stop(self) -> None:
        """Accept no more requests, answer the pending ones, and return."""
        self._stopping.set()
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        for thread in self._threads:
            thread.join()
        self.app.service.batcher.close()

    def _answer(self, listener: socket.socket) -> None:
        try:
            self._uvicorn.run([listener])
        finally:
            self._ended.set()

    def _compile(self) -> None:
        """Compile the programs for a first request of each pair, and then the other usual ones."""
        since = time.monotonic()
        programs = [pair.programs() for pair in self._pairs]
        for number, each in enumerate(programs):
            LOGGER.info("Compiling for a first request: pair %d of %d.", number + 1, len(programs))
            next(each)()
            if self._stopping.is_set():
                return
        self.app.is_ready = True
        LOGGER.info("Ready. Programs for longer sentences and batches are compiled meanwhile.")
        for each in programs:
            for compile_one in each:
                if self._stopping.is_set():
                    return
                compile_one()
        LOGGER.info("All usual programs are compiled; that took %.0f s.", time.monotonic() - since)


class _PatientProtocol(H11Protocol):
    """HTTP with a limit to the time that the header of a request takes.

    uvicorn has one for the time between two requests only.
    """

    seconds = 10.0
    _timer: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_header()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_header(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can connect to an address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"the server cannot listen on {host}, port {port}: {error.strerror or error}. Choose "
            "another --port, or a --host of this machine."
        ) from error
