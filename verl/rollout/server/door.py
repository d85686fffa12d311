"""The checks of callers of `verl serve`, and the limits on connections that have not sent a complete request.

The checks read only headers: before them no body is read or decompressed.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web

from verl.rollout.http import open_files
from verl.rollout.server.options import is_loopback
from verl.rollout.server.requests import ApiError

IDLE_S = 30.0  # for a complete request head on a connection
BODY_S = 60.0  # for a complete body
SENT_S = 60.0  # for the client to take an answer
LINGER_S = 2.0  # for reading and dropping the rest of a refused body, so that its sender reads the refusal
MOST_WAITING = 1024  # connections without a complete request; the oldest ones are closed


class Door:
    """The connections that have not sent a complete request, the oldest first. If they are too many, the oldest are
    closed."""

    def __init__(self) -> None:
        self.waiting: dict[web.RequestHandler, None] = {}
        self.most = MOST_WAITING

    def admits(self, server: web.Server) -> Callable[[], web.RequestHandler]:
        """Return the protocol factory of `server`, with at most `most` connections that wait."""
        self.most = min(MOST_WAITING, open_files() // 4)

        def made() -> web.RequestHandler:
            handler = server()
            self.waits(handler)
            return handler

        return made

    def waits(self, handler: web.RequestHandler) -> None:
        """Count a connection that waits for its next request. Closed ones do not count."""
        self.waiting[handler] = None
        if len(self.waiting) > self.most:
            self.waiting = {one: None for one in self.waiting if one is handler or one.transport is not None}
        while len(self.waiting) > self.most:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.force_close()

    def has_all(self, request: web.Request) -> None:
        """Stop counting a connection: its request has arrived."""
        self.waiting.pop(request.protocol, None)


DOOR = web.AppKey("door", Door)


async def body_of(request: web.Request) -> bytes:
    """Return the whole body. Raise ApiError if it does not arrive in time or is no HTTP."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:.0f} s", code="timeout") from None
    except (web.RequestPayloadError, ValueError) as e:
        raise ApiError(400, f"the body cannot be read: {str(e)[:100]}", code="invalid_body") from None
    request.app[DOOR].has_all(request)
    return raw


def check_caller(request: web.Request, key: str | None, host: str) -> None:
    """Raise ApiError unless the caller has the key or, without a key, is a program of this machine and no web page.

    A page in a browser may send requests to loopback. Its Origin header shows that, or the name in Host, if the page
    made its own name resolve to loopback."""
    if key is not None:
        given = request.headers.get("Authorization", "")
        if request.path != "/health" and not hmac.compare_digest(
            given.encode(errors="surrogateescape"), f"Bearer {key}".encode()
        ):
            raise ApiError(401, "a key is wanted: Authorization: Bearer KEY", code="invalid_api_key")
        return
    named = request.headers.getall("Host", [""])
    if not all(_is_own(name, host) for name in named):
        message = (
            f"Host: {named[-1][:60]} is no name of loopback; ask 127.0.0.1, or start the server with serve.api_key"
        )
        raise ApiError(403, message, code="invalid_host")
    for origin in request.headers.getall("Origin", []):
        if urlsplit(origin).netloc != named[-1]:
            message = f"Origin: {origin[:60]} is another site; a page of one may ask where it has the serve.api_key"
            raise ApiError(403, message, code="invalid_origin")


def check_encoding(request: web.Request) -> None:
    """Raise ApiError for a compressed body."""
    if any(one.strip().lower() not in ("", "identity") for one in request.headers.getall("Content-Encoding", [])):
        raise ApiError(415, "Content-Encoding: bodies are read as they are; send it without", code="invalid_encoding")


def _is_own(name: str, host: str) -> bool:
    """Return true if a Host header names loopback or the address that the server is bound to."""
    try:
        found = urlsplit(f"//{name}").hostname or ""
    except ValueError:
        return False
    return found == host or is_loopback(found)
