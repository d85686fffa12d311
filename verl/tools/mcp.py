"""Tools of MCP servers (the package `mcp`), over standard input and output or streamable HTTP.

A server's sessions live in a thread of its own with an event loop, from the start of the run on: its list of tools is
read once, and stays what the model is shown. One session serves all trajectories, unless the server is declared
stateful: then each trajectory that calls it has one. A session that ends is opened again, at most so often.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from verl.agent_loop.tools import LIMITS, Tool, ToolAnswer
from verl.chat.template import one_line
from verl.errors import Refused
from verl.sandbox import attended
from verl.tools.function_tool import ToolBroken, ToolLimits

START_S = 7.0  # for a server to be there and to tell its tools; one that says nothing takes 2 s more to end
RETRY_S = 5.0  # a call waits so long for a server that is down, and half of its tool's limit at most
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 4.0  # between two attempts to reach a server that is down; doubled each time
CLOSE_S = 8.0  # for sessions to end: the package waits for the server, then kills it
KEYS = ("command", "args", "env", "cwd", "url", "headers", "type", "stateful", "tools", *LIMITS)
LOST = ("Connection closed", "Session terminated", "No valid session ID", "Server returned an error response")
"""What the package says where a server has ended, has begun anew, or is down behind a gateway."""
CUT_OFF = "SSE stream ended"  # it says where one answer ended too early
PING_S = 3.0  # for a server to say that it lives, after a call that it did not answer
MOST_SAID_BYTES = 1 << 20  # kept of what a server writes to its standard error
T = TypeVar("T")


class Unreachable(Exception):
    """No session with a server, and why."""


def _unnamed_file() -> TextIO:
    with tempfile.NamedTemporaryFile() as made:  # opened by its name: only so do writes of others go to its end
        return open(made.name, "a+", errors="replace")


@dataclass(slots=True, eq=False)
class Session:
    """One connection, entered and left by one task; over: it is of no more use."""

    client: Any
    task: asyncio.Task[None]
    over: asyncio.Event


@dataclass(slots=True, eq=False, weakref_slot=True)
class McpServer:
    """Given by `agent.tools=[servers.json]`; behind all tools of it. changed: what is new in its list of tools since
    the start, until a call has told it · limit_s: of a call, once the run has begun."""

    name: str
    entry: Mapping[str, Any]
    listed: Sequence[Mapping[str, Any]] = ()
    changed: str = ""
    limit_s: float = 4 * START_S
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop, repr=False)
    _shared: Session | None = None
    _trying: asyncio.Task[Session] | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _pause_s: float = 0.0
    _not_before_s: float = 0.0
    _why: str = ""
    _said: TextIO = field(default_factory=_unnamed_file, repr=False)
    _garbage: str = ""
    _begun: list[asyncio.Task[Session]] = field(default_factory=list, repr=False)
    _tasks: dict[asyncio.Task[Any], Any] = field(default_factory=dict, repr=False)  # and what cancels them
    _pings: set[asyncio.Task[None]] = field(default_factory=set, repr=False)
    close: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what it has to say comes as errors
        threading.Thread(target=_serve, args=(self._loop,), name=f"mcp {self.name}", daemon=True).start()
        self.close = weakref.finalize(self, _end, self._loop, self._tasks)

    def start(self) -> None:
        """Reads the list of tools; ValueError if there is none after START_S."""
        where = f"agent.tools: MCP server {self.name!r}"
        try:
            asyncio.run_coroutine_threadsafe(self._ready(), self._loop).result(2 * START_S)
        except (Unreachable, TimeoutError) as e:
            self.close()
            raise Refused(
                f"{where}: {str(e) or 'no answer'}. Fix: start it, or mend its entry: {_how(self.entry)}"
            ) from e

    # -- what a toolbox calls, in the run's event loop -----------------------------------------------------------------

    async def open(self, given: Mapping[str, Any]) -> Session | None:
        return await self._there(self._own()) if self.entry.get("stateful") else None

    async def call(self, state: Session | None, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> Any:
        return await self._there(self._call(state, tool, arguments))

    async def score(self, state: Session | None, given: Mapping[str, Any]) -> float | None:
        return None

    async def release(self, state: Session | None, given: Mapping[str, Any]) -> None:
        if state is not None:
            await self._there(_left(state))

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except Unreachable as e:
            raise ToolBroken(f"MCP server {self.name}: {e}") from e

    # -- in the thread of the server -----------------------------------------------------------------------------------

    async def _call(self, state: Session | None, tool: str, arguments: dict[str, Any]) -> ToolAnswer:
        from mcp import MCPError

        if self._said.seek(0, os.SEEK_END) > MOST_SAID_BYTES:  # a server may log for weeks
            self._said.truncate(0)
        session = state or await self._ready()
        if session.over.is_set():
            raise Unreachable("its session of this trajectory has ended")
        call = asyncio.ensure_future(session.client.call_tool(tool, arguments))
        over = asyncio.ensure_future(session.over.wait())
        try:
            await asyncio.wait((call, over), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Unreachable("it went away during the call")
            return _answer(call.result(), self._news())
        except MCPError as e:
            if str(e).startswith(CUT_OFF):
                raise Unreachable("its answer was cut off") from e
            if not str(e).startswith(LOST):
                return ToolAnswer(f"Error: {one_line(e)}", error="exception", note=self._news())
            session.over.set()
            raise Unreachable(f"it went away during the call ({one_line(e)})") from e
        except asyncio.CancelledError:  # it did not answer in time: does it answer anything?
            task = self._loop.create_task(_pinged(session))
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)
            raise
        except (OSError, RuntimeError, ValueError) as e:  # a broken pipe, an answer that is none
            return ToolAnswer(f"Error: {type(e).__name__}: {one_line(e)}", error="exception", note=self._news())
        finally:
            for one in (call, over):
                one.cancel()

    def _news(self) -> str:
        news, self.changed = self.changed, ""
        return news

    async def _ready(self) -> Session:
        """The session that all share; opened again where it ended, by one caller at a time. An attempt goes on when
        its caller may wait no longer: past the tool's limit, a server that is down would be an answer to the model."""
        came_s = time.monotonic()
        until_s, end_s = came_s + min(RETRY_S, self.limit_s / 2), came_s + self.limit_s / 2
        while True:
            async with self._opening:
                if self._shared is not None and not self._shared.over.is_set():
                    return self._shared
                if self._trying is None and time.monotonic() >= self._not_before_s:
                    self._trying = self._attempt()
                if self._trying is not None:
                    await asyncio.wait({self._trying}, timeout=end_s - time.monotonic())
                    if not self._trying.done():
                        raise Unreachable(f"no answer in {self.limit_s / 2:g} s")
                    trying, self._trying = self._trying, None
                    try:
                        self._shared = trying.result()
                        self._pause_s = 0.0
                        continue
                    except Unreachable as e:
                        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
                        self._not_before_s, self._why = time.monotonic() + self._pause_s, str(e)
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self.listed:
                raise Unreachable(self._why)
            await asyncio.sleep(max(0.01, min(left_s, self._not_before_s - time.monotonic())))

    async def _own(self) -> Session:
        """A session of one trajectory. One that its caller could not wait for is the next caller's: a server that
        begins slower than a call may last would never be there."""
        begun = [one for one in self._begun if not one.done() or _of_use(one)]
        begun.sort(key=asyncio.Task.done)
        attempt, self._begun = begun.pop() if begun else self._attempt(), begun
        try:
            await asyncio.wait({attempt}, timeout=self.limit_s / 2)
        except asyncio.CancelledError:
            self._begun.append(attempt)
            raise
        if attempt.done():
            return attempt.result()
        self._begun.append(attempt)
        raise Unreachable(f"no answer in {self.limit_s / 2:g} s{self._last_words()}")

    def _attempt(self) -> asyncio.Task[Session]:
        attempt = self._loop.create_task(self._connected())
        self._tasks[attempt] = attempt
        attempt.add_done_callback(self._tasks.pop)
        attempt.add_done_callback(lambda made: made.cancelled() or made.exception())  # its caller may be gone
        return attempt

    async def _connected(self) -> Session:
        """A new session whose tools have been read."""
        from anyio import CancelScope

        made: asyncio.Future[Session] = self._loop.create_future()
        scope = CancelScope()  # the package's own clean-up withstands its cancellation, and not a task's
        task = self._loop.create_task(self._hold(made, scope))
        self._tasks[task] = scope
        task.add_done_callback(self._tasks.pop)
        try:
            return await asyncio.wait_for(asyncio.shield(made), START_S)
        except TimeoutError:
            why = f"no answer in {START_S:g} s{self._last_words()}"
        except Exception as e:  # whatever the package raises for a server that is none
            why = f"{_innermost(e)}{self._last_words()}"
        except asyncio.CancelledError:
            scope.cancel()
            raise
        scope.cancel()
        raise Unreachable(why)

    async def _hold(self, made: asyncio.Future[Session], scope: Any) -> None:
        over = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(scope)
                client = await self._client(stack)
                found = await _tools_of(client)
                if not self.listed:
                    self.listed = found
                elif (now := _hash(found)) != _hash(self.listed):
                    self.changed = f"tools of {self.name}: {_hash(self.listed)[:12]} -> {now[:12]}"
                made.set_result(Session(client, task, over))
                await over.wait()
        except Exception as e:  # whatever the package raises, at the beginning or the end
            if not made.done():
                made.set_exception(e)
        finally:
            over.set()

    async def _client(self, stack: contextlib.AsyncExitStack) -> Any:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared import _httpx_utils as theirs
        from mcp_types import ToolListChangedNotification

        async def heard(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                self.changed = f"tools of {self.name}: it says that they changed; the model is shown those of the start"
            elif isinstance(message, Exception):
                self._garbage = one_line(message)[:120]

        entry = self.entry
        if "url" in entry:
            web = httpx2.AsyncClient(
                headers=dict(entry.get("headers") or {}),
                timeout=httpx2.Timeout(theirs.MCP_DEFAULT_TIMEOUT, read=theirs.MCP_DEFAULT_SSE_READ_TIMEOUT),
                limits=httpx2.Limits(),  # a tool's concurrency is the limit, not a hundred connections
            )
            await stack.enter_async_context(web)
            transport = streamable_http_client(entry["url"], http_client=web)
        else:
            command = ["-I", "-S", attended.__file__, str(os.getpid()), entry["command"]]
            command += map(str, entry.get("args") or ())
            more: Any = {"env": dict(entry.get("env") or {}), "cwd": entry.get("cwd")}
            self._said.truncate(0)
            transport = stdio_client(StdioServerParameters(command=sys.executable, args=command, **more), self._said)
        client: Any = await stack.enter_async_context(Client(transport, message_handler=heard))
        client.session.validate_tool_result = _not_validated
        return client

    def _last_words(self) -> str:
        self._said.seek(0)
        tail = " ".join(self._said.read()[-4000:].split())[-300:]
        garbage = f"; no message of the protocol: {self._garbage}" if self._garbage else ""
        return garbage + (f"; it said: {tail}" if tail else "")


async def _not_validated(name: str, result: Any) -> None:
    """Take an answer as it is, whatever its server declared of its structure: the model reads its text, and checking it
    would run the server's own patterns in this process, without an end."""


def _of_use(attempt: asyncio.Task[Session]) -> bool:
    return not (attempt.cancelled() or attempt.exception() or attempt.result().over.is_set())


async def _pinged(session: Session) -> None:
    """A server that hangs is asked for again, as one that has ended is."""
    asked = asyncio.ensure_future(_tools_of(session.client))
    asked.add_done_callback(lambda told: told.cancelled() or told.exception())  # an error is an answer, too
    await asyncio.wait({asked}, timeout=PING_S)
    if not asked.done():
        session.over.set()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, tasks: dict[asyncio.Task[Any], Any]) -> None:
    """Every session is left, and the thread ends; waits for it, so that servers are gone."""

    async def leave() -> None:
        for scope in list(tasks.values()):
            scope.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=CLOSE_S)

    if loop.is_running():
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(leave(), loop).result(CLOSE_S + 1)
        loop.call_soon_threadsafe(loop.stop)


async def _left(session: Session) -> None:
    session.over.set()
    await asyncio.wait([session.task], timeout=CLOSE_S)


async def _tools_of(client: Any) -> list[dict[str, Any]]:
    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [
            {"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            return found


def _hash(listed: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def _answer(result: Any, note: str) -> ToolAnswer:
    parts = []
    for block in result.content:
        held = getattr(block, "resource", block)  # an embedded one
        parts.append(held.text if hasattr(held, "text") else f"[{block.type} left out: the model takes text]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    text = "\n".join(parts).encode("utf-8", "replace").decode("utf-8")
    return (
        ToolAnswer(f"Error: {text}", error="exception", note=note) if result.is_error else ToolAnswer(text, note=note)
    )


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {one_line(error)}"


def _how(entry: Mapping[str, Any]) -> str:
    return str(entry.get("url") or " ".join([str(entry.get("command")), *map(str, entry.get("args") or ())]))


# -- from the configuration --------------------------------------------------------------------------------------------


def tools_of_servers(file: str, timeout_s: float) -> list[Tool]:
    """The tools of a file with `mcpServers`, {name: {command, args, env, cwd} or {url, headers}, and what is ours:
    stateful, tools (those of its tools that are wanted), and the limits of a tool}. ValueError: no such server.
    timeout_s: of a call, where they say no other."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    where = f"agent.tools={file}"
    try:
        read: Any = OmegaConf.to_container(OmegaConf.create(json.loads(Path(file).read_text())), resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as e:
        raise Refused(f"{where}: cannot be read: {one_line(e)}") from e
    servers = read.get("mcpServers") if isinstance(read, dict) else None
    if not isinstance(servers, dict) or not all(isinstance(entry, dict) for entry in servers.values()):
        raise Refused(f'{where}: a file of MCP servers holds {{"mcpServers": {{NAME: {{command, args}} or {{url}}}}}}')
    for name, entry in servers.items():
        if unknown := sorted(entry.keys() - set(KEYS)):
            raise Refused(f"{where}: {name}: {', '.join(unknown)}: unknown; there are {', '.join(KEYS)}")
        if ("command" in entry) == ("url" in entry):
            raise Refused(f"{where}: {name}: give command (and args), or url")
    try:
        import mcp  # noqa: F401
    except ImportError as e:
        raise Refused(f"{where}: the package mcp is not installed. Fix: pip install '.[mcp]' in verl's folder") from e
    made = [McpServer(name, entry) for name, entry in servers.items()]
    try:
        for server in made:
            server.start()
            server.limit_s = server.entry.get("timeout_s") or timeout_s
        return [tool for server in made for tool in _tools(server, where)]
    except BaseException:
        for server in made:
            server.close()
        raise


def _tools(server: McpServer, where: str) -> list[Tool]:
    there, wanted = [t["name"] for t in server.listed], server.entry.get("tools")
    if missing := sorted(set(wanted or ()) - set(there)):
        raise Refused(f"{where}: {server.name} has no tool {', '.join(missing)}; it has {', '.join(there)}")
    limits = ToolLimits(**{key: server.entry[key] for key in LIMITS if key in server.entry})
    kept = [t for t in server.listed if wanted is None or t["name"] in wanted]
    return [Tool(t["name"], {"type": "function", "function": dict(t)}, limits, held=server) for t in kept]


def tools_hash(tools: Mapping[str, Tool]) -> str:
    """Of what the servers listed at the start; "" without servers."""
    servers = {t.held.name: _hash(t.held.listed) for t in tools.values() if isinstance(t.held, McpServer)}
    return hashlib.sha256(json.dumps(servers, sort_keys=True).encode()).hexdigest() if servers else ""
