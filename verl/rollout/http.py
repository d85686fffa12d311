"""JSON over HTTP to one server. Errors distinguish a server that has died, refuses, or is late."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import aiohttp
import msgspec

from verl.rollout.base import ReplicaLost

CONNECT_S = 10.0
IDLE_S = 2.0  # a kept connection is closed after this: servers close it after 5, and would lose a request
FULL = 429  # the status of a server that takes no more requests now
PAUSED = 503  # the status of a vLLM (0.33 on) that takes no request until it is resumed
ROOM_S, MOST_S = 0.05, 1.0  # the first and the longest pause between two attempts; each is twice the last one
FILES = 65536  # open files that this process requests at most; child processes inherit the limit
NO_FILE = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)  # this process cannot open a connection now
SHOWN = 500  # characters of an error's body that are shown


class ServerGone(ReplicaLost):
    """The server does not answer: it died, was stopped, or the connection broke. It may have begun the request."""


class ServerRefused(RuntimeError):
    """The server answered with an error of this HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerLate(TimeoutError):
    """The server did not answer in time."""


class Http:
    """Connections to one server, in one pool per event loop: a script may call asyncio.run more than once."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(1)
        self._reading = set[aiohttp.ClientResponse]()
        self._closed = False

    async def get(self, path: str, *, timeout_s: float, text: bool = False) -> Any:
        """Return the parsed answer, or its plain text with `text`."""
        async with self._response("GET", path, None, timeout_s) as response:
            return await response.text() if text else _parsed(path, await response.read())

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        again: bool = False,
        text: bool = False,
    ) -> Any:
        """Return the parsed answer, or its plain text with `text`. With `again` the request is repeated if a kept
        connection closes before the first byte of the answer. The number of such requests at once is limited, so that
        control calls always find a connection."""
        async with self._response("POST", path, body or {}, timeout_s, again) as response:
            return await response.text() if text else _parsed(path, await response.read())

    async def stream(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> AsyncGenerator[Any, None]:
        """Yield the events of a stream up to its end mark. Raise ServerGone if the stream ends before it."""
        async with self._response("POST", path, body, timeout_s, again=True) as response:
            async for line in response.content:
                text = line.strip()
                if text == b"data: [DONE]":
                    return
                if text.startswith(b"data: "):
                    event = _parsed(path, text[6:])
                    if isinstance(event, dict) and "error" in event:
                        code = event["error"].get("code") if isinstance(event["error"], dict) else None
                        raise ServerRefused(f"{self.url}{path}: {_reason(text[6:])}", PAUSED if code == PAUSED else 500)
                    yield event
        raise ServerGone(f"{self.url}{path}: the stream broke off")

    async def close(self) -> None:
        """Close for good. Open requests end with ServerGone; a reader of a stream would not notice the close itself."""
        self._closed = True
        for response in self._reading:
            response.content.set_exception(aiohttp.ClientConnectionError("its client was closed"))
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, again: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        at = f"{self.url}{path}"
        limit = aiohttp.ClientTimeout(total=timeout_s, connect=min(CONNECT_S, timeout_s))
        stack, pause_s = AsyncExitStack(), ROOM_S
        given: dict[str, Any] = {"json": body, "timeout": limit, "headers": self._headers}
        pool = self._pool()
        try:
            await stack.enter_async_context(self._room if again else nullcontext())
            until_s = asyncio.get_running_loop().time() + timeout_s
            while True:
                late = asyncio.get_running_loop().time() + pause_s >= until_s
                if pool.closed:
                    raise ServerGone(f"{at}: its client was closed")
                try:
                    response = await pool.request(method, at, **given)
                    if response.status != FULL or late:
                        break
                    response.release()
                except aiohttp.ServerDisconnectedError:
                    if not again or self._session is not pool:  # closed meanwhile, or repeated already
                        raise
                    # on a new connection: a busy server closes many kept ones at once
                    pool = await stack.enter_async_context(aiohttp.ClientSession())
                    continue
                except aiohttp.ClientConnectorError as e:
                    if e.errno not in NO_FILE:
                        raise
                    if late:
                        raise TimeoutError from e
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_S)
            async with response:
                if response.status != 200:
                    why = _reason(await response.read())
                    raise ServerRefused(f"{at}: HTTP {response.status}: {why}", response.status)
                self._reading.add(response)
                try:
                    yield response
                finally:
                    self._reading.discard(response)
        except TimeoutError as e:
            raise ServerLate(f"{at}: no answer in {timeout_s:g} s") from e
        except (aiohttp.ClientError, ConnectionError) as e:
            raise ServerGone(f"{at}: {type(e).__name__}: {e}") from e
        finally:
            await stack.aclose()

    def _pool(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise ServerGone(f"{self.url}: its client was closed")
        if self._session is None or self._loop is not loop:
            if self._session is not None:
                self._session.detach()  # its event loop has ended, and its connections with it
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._loop, self._session = loop, aiohttp.ClientSession(connector=connector)
            self._room = asyncio.Semaphore(open_files() // 4)
        return self._session


def open_files() -> int:
    """Raise this process's limit of open files, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (most := min(hard, FILES)) > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most, soft, 256)


def _parsed(path: str, body: bytes) -> Any:
    """Return the JSON of an answer, or None for an empty one. Raise ServerRefused if it is not JSON."""
    if not body:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body)
    try:
        return json.loads(body)  # takes the NaN that servers in Python write
    except ValueError as e:
        message = f"{path}: the answer is no JSON: {body[:SHOWN]!r}; if a router gives it, name the servers behind it"
        raise ServerRefused(message, 200) from e


def _reason(body: bytes) -> str:
    """Return the message of an error's body: in OpenAI's shape, in FastAPI's, or the text."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", found))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:SHOWN]
