"""The web application: LibreTranslate's API, and a page to look inside."""

import asyncio
import base64
import hashlib
import hmac
import importlib.resources
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from flaxformer_min.server.batching import QueueFull
from flaxformer_min.server.requests import Problem, read_fields
from flaxformer_min.server.service import Service

LOGGER = logging.getLogger("flaxformer_min.server")

Answer = Callable[[dict[str, Any]], Awaitable[Any]]
"""Returns the content of a response for the fields of a request."""

CLIENT_GONE = 499
"""The status in the log of a request whose client has closed the connection."""


class Access(NamedTuple):
    """Who may use the server, and what it logs.

    keys:     API keys, one of which a request must have; none: no key is needed.
    origins:  of pages elsewhere that browsers allow to read responses.
    log_text: whether texts are logged.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    log_text: bool = False


class App:
    """The application, for any ASGI server. `is_ready` is what /health reports."""

    def __init__(self, service: Service, access: Access):
        """Take what answers the requests."""
        self.service, self.access = service, access
        self.is_ready = False
        self._page, self._page_headers = _read_page()

    def starlette(self) -> Starlette:
        """Return the application for Starlette."""
        cors = Middleware(
            CORSMiddleware,
            allow_origins=self.access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Content-Type"],
        )
        app = Starlette(
            routes=[
                Route("/", self._index),
                Route("/languages", self._languages),
                Route("/health", self._health),
                Route("/frontend/settings", self._settings),
                Route("/translate", self._posted(self.service.translate), methods=["POST"]),
                Route("/detect", self._posted(self.service.detect), methods=["POST"]),
            ],
            middleware=[cors] if self.access.origins else [],
            exception_handlers={HTTPException: _http_error},
        )
        app.router.redirect_slashes = False  # to an address made from the request's own header
        return app

    async def _index(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def _languages(self, request: Request) -> Response:
        return JSONResponse(self.service.languages())

    async def _health(self, request: Request) -> Response:
        if self.is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "starting"}, 503, {"Retry-After": "1"})

    async def _settings(self, request: Request) -> Response:
        languages = {each["code"]: each for each in self.service.languages()}
        source = next(each for each in languages.values() if each["targets"])
        target = languages[source["targets"][0]]
        names = {"source": source, "target": target}
        return JSONResponse(
            {
                "charLimit": self.service.limits.characters,
                "frontendTimeout": 500,
                "apiKeys": bool(self.access.keys),
                "keyRequired": bool(self.access.keys),
                "suggestions": False,
                "filesTranslation": False,
                "supportedFilesFormat": [],
                "language": {
                    side: {"code": each["code"], "name": each["name"]}
                    for side, each in names.items()
                },
            }
        )

    def _posted(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a request with fields, which may fail in many ways."""

        async def respond(request: Request) -> Response:
            since, fields = time.monotonic(), {}
            status, headers = 200, None
            try:
                fields = await read_fields(request, self.service.limits)
                self._check_key(fields)
                content = await self._before_deadline(request, answer(fields))
            except Problem as problem:
                status, content, headers = problem.status, problem.message, problem.headers
            except QueueFull:
                status, content, headers = 503, "Too many requests wait", {"Retry-After": "1"}
            except ClientDisconnect:
                status, content = CLIENT_GONE, "Client closed the connection"
            except Exception as error:
                status, content = 500, "Cannot translate text"
                # Its message and its traceback may quote the text.
                LOGGER.error("%s: %s", request.url.path, type(error).__name__)
                if self.access.log_text:
                    LOGGER.exception("%s", request.url.path)
            self._log(request, status, time.monotonic() - since, fields, content)
            return JSONResponse(content if status == 200 else {"error": content}, status, headers)

        return respond

    async def _before_deadline(self, request: Request, work: Any) -> Any:
        """Return what the work returns; cancel it at the deadline, or if the client is gone."""
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
        seconds, first = self.service.limits.deadline, asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=first)
            if tasks[0] in done:
                return tasks[0].result()
            if tasks[1] in done:
                raise ClientDisconnect
            raise Problem(504, f"No translation within {seconds:g} seconds", {"Retry-After": "1"})
        finally:
            for task in tasks:
                task.cancel()

    def _check_key(self, fields: dict[str, Any]) -> None:
        if not self.access.keys:
            return
        given = str(fields.get("api_key") or "").encode(errors="replace")
        # All are compared, so that the time says nothing about which one is similar.
        if not any([hmac.compare_digest(given, key.encode()) for key in self.access.keys]):
            raise Problem(403, "Invalid API key" if given else "An API key is needed: api_key")

    def _log(
        self, request: Request, status: int, seconds: float, fields: Any, content: Any
    ) -> None:
        line = f"{request.method} {request.url.path} {status}, {1000 * seconds:.0f} ms"
        if self.access.log_text:
            shown = {name: value for name, value in fields.items() if name != "api_key"}
            line += f", {json.dumps(shown)[:4000]} -> {json.dumps(content)[:4000]}"
        LOGGER.info("%s", line)


async def _disconnected(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def _read_page() -> tuple[str, dict[str, str]]:
    """Return the page, and headers that let it load nothing but responses of this server."""
    page = (importlib.resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    digests = {}
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        digests[tag] = f"{tag}-src 'sha256-{digest}'"
    policy = [
        "default-src 'none'",
        *digests.values(),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return page, {
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
