"""Requests in LibreTranslate's form: their limits, fields and errors."""

import asyncio
import json
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from starlette.requests import Request


class Limits(NamedTuple):
    """What a request may ask for, and how long it may take.

    characters:     of all its texts.
    texts:          in a list.
    waiting:        sentences of all requests that wait to be translated.
    deadline:       seconds for a response.
    header_seconds: for the header of a request; for its body as many again.
    """

    characters: int = 20_000
    texts: int = 256
    waiting: int = 1_000
    deadline: float = 30.0
    header_seconds: float = 10.0

    @property
    def body(self) -> int:
        """Most bytes of a body: a character takes up to twelve in JSON, as in \\ud83d\\ude00."""
        return 12 * self.characters + 16_384


class Problem(Exception):
    """A response that is an error: its status, its message and its headers."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        """Take what the response says."""
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


class Query(NamedTuple):
    """The fields of a request to /translate."""

    texts: list[str]
    is_list: bool
    source: str
    target: str
    is_html: bool
    alternatives: int
    confidence: bool
    attention: bool


async def read_fields(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the fields of a JSON object or a form. A repeated field of a form is a list."""
    body = await _read_body(request, limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            raise Problem(400, "Invalid request: the body is not JSON") from None
        if not isinstance(fields, dict):
            raise Problem(400, "Invalid request: the body must be a JSON object")
        return fields
    pairs: list[tuple[str, Any]] = []
    if kind == "application/x-www-form-urlencoded":
        # Starlette would read bytes that are not percent-encoded as Latin-1.
        try:
            text = body.decode()
            pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=1000)
        except ValueError:
            raise Problem(400, "Invalid request: the body is not a form in UTF-8") from None
    elif kind == "multipart/form-data":
        pairs = await _multipart(request, body, limits)
    fields = {}
    for name, value in pairs:
        fields[name] = [*_as_list(fields[name]), value] if name in fields else value
    return fields


async def _read_body(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(limits.header_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body:
                    raise Problem(
                        413,
                        f"Invalid request: the body exceeds the limit of {limits.body} bytes",
                        {"Connection": "close"},
                    )
    except TimeoutError:
        raise Problem(408, "The body did not arrive in time", {"Connection": "close"}) from None
    return bytes(body)


async def _multipart(request: Request, body: bytes, limits: Limits) -> list[tuple[str, Any]]:
    async def replay() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        parsed = await Request(request.scope, replay).form(max_files=0, max_part_size=limits.body)
        return parsed.multi_items()
    except Exception:  # of the parser, which has many kinds
        raise Problem(400, "Invalid request: the body is not a form without files") from None


def parse_texts(fields: dict[str, Any], limits: Limits) -> tuple[list[str], bool]:
    """Return the texts of the field q, and whether it is a list."""
    q = fields.get("q")
    if not q:
        raise Problem(400, "Invalid request: missing q parameter")
    texts = _as_list(q)
    if not all(isinstance(text, str) for text in texts):
        raise Problem(400, "Invalid request: q parameter must be a text or a list of texts")
    if len(texts) > limits.texts:
        raise _over_limit(f"{len(texts)} texts", limits.texts)
    if (size := sum(map(len, texts))) > limits.characters:
        raise _over_limit(f"{size} characters", limits.characters)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise Problem(400, "Invalid request: q parameter is not valid Unicode") from None
    return texts, isinstance(q, list)


def parse_query(fields: dict[str, Any], limits: Limits) -> Query:
    """Return the fields of a request to /translate; others are ignored, as LibreTranslate does."""
    texts, is_list = parse_texts(fields, limits)
    languages = [_text(fields, name) for name in ("source", "target")]
    form = fields.get("format") or "text"
    if form not in ("text", "html"):
        raise Problem(400, f"{form!s:.40} format is not supported")
    try:
        alternatives = max(0, int(fields.get("alternatives") or 0))
    except (TypeError, ValueError, OverflowError):
        name = "alternatives"
        raise Problem(400, f"Invalid request: {name} parameter is not a number") from None
    shown = [_switch(fields, name) for name in ("confidence", "attention")]
    return Query(texts, is_list, *languages, form == "html", alternatives, *shown)


def _over_limit(what: str, limit: int) -> Problem:
    return Problem(413, f"Invalid request: request ({what}) exceeds text limit ({limit})")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not value:
        raise Problem(400, f"Invalid request: missing {name} parameter")
    if not isinstance(value, str):
        raise Problem(400, f"Invalid request: {name} parameter must be a text")
    return value


def _switch(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    known = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
    if not isinstance(value, (bool, str)) or value not in known:
        raise Problem(400, f"Invalid request: {name} parameter must be true or false")
    return known[value]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
