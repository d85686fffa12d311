"""The parts that all handlers of `verl serve` share: the service of an app, and JSON bodies of requests and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from verl.rollout.server.door import body_of
from verl.rollout.server.requests import ApiError, decoded
from verl.rollout.server.service import Service

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SERVICE = web.AppKey("service", Service)


def as_json(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return as_bytes(msgspec.json.encode(content), status=status, headers=headers)


def as_bytes(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def computed(request: web.Request, compute: Callable[[dict[str, Any]], T], *, absent: bytes = b"") -> T:
    """Return compute(the body's JSON object), run in a thread. An empty body is read as `absent`."""
    raw = await body_of(request) or absent
    try:
        return await request.app[SERVICE].threads.run(len(raw), lambda: compute(decoded(raw)))
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_value") from None
