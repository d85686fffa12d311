"""Tools of MCP servers (the package `mcp`), over standard input and output or streamable HTTP.

The sessions of a server run in a thread with an event loop, from the start of the run on. The list of its tools is read
once, and prompts show this list for the whole run. All trajectories share one session, unless the server is declared
stateful: then each trajectory that calls it has its own. A session that ends is opened again, with growing pauses
between the attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from verl.agent_loop.tools import LIMITS, Tool
from verl.chat.template import one_line
from verl.errors import Refused
from verl.processes.child import command_line
from verl.processes.guard import Order
from verl.tools.answers import Part, ReturnedImage, ToolAnswer, of_parts
from verl.tools.function_tool import ToolBroken, ToolLimits

START_S = 7.0  # for a server to start and list its tools; a silent one takes 2 s more to end
RETRY_S = 5.0  # longest wait of a call for a server that is down; at most half of its tool's limit
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 4.0  # between two attempts to reach a server that is down; doubled each time
CLOSE_S = 8.0  # for sessions to end: the package waits for the server, then kills it
KEYS = ("command", "args", "env", "cwd", "url", "headers", "type", "stateful", "tools", *LIMITS)
LOST = ("Connection closed", "McpSession terminated", "No valid session ID", "Server returned an error response")
"""Error texts of the package after which the session is lost: the server has ended, has restarted, or is down behind a
gateway."""
CUT_OFF = "SSE stream ended"  # its text for an answer that ended too early
PING_S = 3.0  # for a server to answer anything, after a call that it did not answer
MOST_LOG_BYTES = 1 << 20  # of a server's standard error that is kept
T = TypeVar("T")


class Unreachable(Exception):
    """No session with a server can be opened. The text has the reason."""


def _unnamed_file() -> TextIO:
    """Return a temporary file for the standard error of a server."""
    with tempfile.NamedTemporaryFile() as made:  # opened by name: only so is all that others write appended
        return open(made.name, "a+", errors="replace")


@dataclass(slots=True, eq=False)
class McpSession:
    """One connection to a server."""

    client: Any
    """The session object of the package."""
    task: asyncio.Task[None]
    """The task that opened the connection and will close it."""
    over: asyncio.Event
    """Set when the connection cannot be used any more."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class McpServer:
    """One server of `agent.tools=[servers.json]`, which all of its tools share."""

    name: str
    """The server's name in the file."""
    entry: Mapping[str, Any]
    """The server's entry in the file."""
    listed: Sequence[Mapping[str, Any]] = ()
    """The server's tools at the start of the run."""
    changed: str = ""
    """A note to add to the next call's result if the server's list of tools has changed; else ""."""
    limit_s: float = 4 * START_S
    """Time limit of a call, once the run has begun."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop, repr=False)
    _shared: McpSession | None = None
    _trying: asyncio.Task[McpSession] | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _pause_s: float = 0.0
    _not_before_s: float = 0.0
    _why: str = ""
    _log: TextIO = field(default_factory=_unnamed_file, repr=False)
    _garbage: str = ""
    _begun: list[asyncio.Task[McpSession]] = field(default_factory=list, repr=False)
    _tasks: dict[asyncio.Task[Any], Any] = field(default_factory=dict, repr=False)  # value: its task or cancel scope
    _pings: set[asyncio.Task[None]] = field(default_factory=set, repr=False)
    close: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # its errors are raised anyway
        threading.Thread(target=_serve, args=(self._loop,), name=f"mcp {self.name}", daemon=True).start()
        self.close = weakref.finalize(self, _end, self._loop, self._tasks)

    def start(self) -> None:
        """Connect and read the list of tools. Raises ValueError if there is none after START_S."""
        where = f"agent.tools: MCP server {self.name!r}"
        try:
            asyncio.run_coroutine_threadsafe(self._ready(), self._loop).result(2 * START_S)
        except (Unreachable, TimeoutError) as e:
            self.close()
            raise Refused(
                f"{where}: {str(e) or 'no answer'}. Fix: start it, or mend its entry: {_how(self.entry)}"
            ) from e

    # -- called by a toolbox, in the run's event loop ------------------------------------------------------------------

    async def open(self, given: Mapping[str, Any]) -> McpSession | None:
        return await self._in_thread(self._own()) if self.entry.get("stateful") else None

    async def call(
        self, state: McpSession | None, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]
    ) -> Any:
        return await self._in_thread(self._call(state, tool, arguments))

    async def score(self, state: McpSession | None, given: Mapping[str, Any]) -> float | None:
        return None

    async def release(self, state: McpSession | None, given: Mapping[str, Any]) -> None:
        if state is not None:
            await self._in_thread(_left(state))

    async def _in_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's thread. Raises ToolBroken where there is no session."""
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except Unreachable as e:
            raise ToolBroken(f"MCP server {self.name}: {e}") from e

    # -- in the thread of the server -----------------------------------------------------------------------------------

    async def _call(self, state: McpSession | None, tool: str, arguments: dict[str, Any]) -> ToolAnswer:
        from mcp import MCPError

        if self._log.seek(0, os.SEEK_END) > MOST_LOG_BYTES:  # a server may write to it for weeks
            self._log.truncate(0)
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
        except asyncio.CancelledError:  # no answer in time: find out if it answers anything
            task = self._loop.create_task(_pinged(session))
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)
            raise
        except (OSError, RuntimeError, ValueError) as e:  # a broken pipe, a malformed answer
            return ToolAnswer(f"Error: {type(e).__name__}: {one_line(e)}", error="exception", note=self._news())
        finally:
            for one in (call, over):
                one.cancel()

    def _news(self) -> str:
        news, self.changed = self.changed, ""
        return news

    async def _ready(self) -> McpSession:
        """Return the session that all trajectories share. If it has ended, one caller opens it again and the others
        wait.

        They wait at most half of the tool's time limit and then raise: a longer wait would count as a failed call of
        the tool, which the model gets as an answer. The attempts to connect continue meanwhile.
        """
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

    async def _own(self) -> McpSession:
        """Open a session for one trajectory. If the caller stops waiting, the next caller gets the session: otherwise a
        server that needs longer to start than a call may take could never be used."""
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

    def _attempt(self) -> asyncio.Task[McpSession]:
        attempt = self._loop.create_task(self._connected())
        self._tasks[attempt] = attempt
        attempt.add_done_callback(self._tasks.pop)
        attempt.add_done_callback(lambda made: made.cancelled() or made.exception())  # its caller may not wait any more
        return attempt

    async def _connected(self) -> McpSession:
        """Open a new session and read the list of its tools."""
        from anyio import CancelScope

        made: asyncio.Future[McpSession] = self._loop.create_future()
        scope = CancelScope()  # the package can clean up when this is cancelled, and not when the task is
        task = self._loop.create_task(self._hold(made, scope))
        self._tasks[task] = scope
        task.add_done_callback(self._tasks.pop)
        try:
            return await asyncio.wait_for(asyncio.shield(made), START_S)
        except TimeoutError:
            why = f"no answer in {START_S:g} s{self._last_words()}"
        except Exception as e:  # any error of the package, for a program that is no MCP server
            why = f"{_innermost(e)}{self._last_words()}"
        except asyncio.CancelledError:
            scope.cancel()
            raise
        scope.cancel()
        raise Unreachable(why)

    async def _hold(self, made: asyncio.Future[McpSession], scope: Any) -> None:
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
                made.set_result(McpSession(client, task, over))
                await over.wait()
        except Exception as e:  # any error of the package, at the beginning or the end
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

        async def on_message(message: Any) -> None:
            if isinstance(message, ToolListChangedNotification):
                self.changed = f"tools of {self.name}: it says that they changed; the model is shown those of the start"
            elif isinstance(message, Exception):
                self._garbage = one_line(message)[:120]

        entry = self.entry
        if "url" in entry:
            web = httpx2.AsyncClient(
                headers=dict(entry.get("headers") or {}),
                timeout=httpx2.Timeout(theirs.MCP_DEFAULT_TIMEOUT, read=theirs.MCP_DEFAULT_SSE_READ_TIMEOUT),
                limits=httpx2.Limits(),  # without its limit of a hundred connections: a tool's concurrency is the limit
            )
            await stack.enter_async_context(web)
            transport = streamable_http_client(entry["url"], http_client=web)
        else:
            command = [entry["command"], *map(str, entry.get("args") or ())]
            program, *args = command_line(Order(command, parent=os.getpid()))
            more: Any = {"env": dict(entry.get("env") or {}), "cwd": entry.get("cwd")}
            self._log.truncate(0)
            transport = stdio_client(StdioServerParameters(command=program, args=args, **more), self._log)
        client: Any = await stack.enter_async_context(Client(transport, message_handler=on_message))
        client.session.validate_tool_result = _not_validated
        return client

    def _last_words(self) -> str:
        self._log.seek(0)
        tail = " ".join(self._log.read()[-4000:].split())[-300:]
        garbage = f"; no message of the protocol: {self._garbage}" if self._garbage else ""
        return garbage + (f"; it said: {tail}" if tail else "")


async def _not_validated(name: str, result: Any) -> None:
    """Replace the package's check of an answer by the schema that its server declared. The model reads only the text,
    and the check would run the server's regular expressions in this process without a time limit."""


def _of_use(attempt: asyncio.Task[McpSession]) -> bool:
    return not (attempt.cancelled() or attempt.exception() or attempt.result().over.is_set())


async def _pinged(session: McpSession) -> None:
    """End the session if its server does not answer within PING_S, so that the next call opens another one."""
    listing = asyncio.ensure_future(_tools_of(session.client))
    listing.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error is an answer, too
    await asyncio.wait({listing}, timeout=PING_S)
    if not listing.done():
        session.over.set()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop, tasks: dict[asyncio.Task[Any], Any]) -> None:
    """Close all sessions, which ends their servers, then end the thread."""

    async def leave() -> None:
        for scope in list(tasks.values()):
            scope.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=CLOSE_S)

    if loop.is_running():
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(leave(), loop).result(CLOSE_S + 1)
        loop.call_soon_threadsafe(loop.stop)


async def _left(session: McpSession) -> None:
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
    parts: list[Part] = []
    for block in result.content:
        held = getattr(block, "resource", block)  # an embedded resource
        if block.type == "image":
            url = f"data:{block.mime_type};base64,{block.data}"
            parts.append(ReturnedImage(url, without="[image left out: the model takes text]"))
        else:
            parts.append(held.text if hasattr(held, "text") else f"[{block.type} left out: the model takes text]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    parts = [part.encode("utf-8", "replace").decode("utf-8") if isinstance(part, str) else part for part in parts]
    error = "exception" if result.is_error else ""
    if any(isinstance(part, ReturnedImage) for part in parts):
        return ToolAnswer(**of_parts([*(["Error:"] if error else []), *parts]), error=error, note=note)
    text = "\n".join(map(str, parts))
    return ToolAnswer(f"Error: {text}" if error else text, error=error, note=note)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {one_line(error)}"


def _how(entry: Mapping[str, Any]) -> str:
    return str(entry.get("url") or " ".join([str(entry.get("command")), *map(str, entry.get("args") or ())]))


# -- from the configuration --------------------------------------------------------------------------------------------


def tools_of_servers(file: str, timeout_s: float) -> list[Tool]:
    """Connect to the servers of a file and return their tools. Raises ValueError where that is not possible.

    file: {"mcpServers": {NAME: {command, args, env, cwd} or {url, headers}}}. An entry may also have keys of ours:
        stateful, tools (names of the wanted ones), and the limits of a tool
    timeout_s: time limit of a call, if an entry has none
    """
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
    """Return a hash of the tools that the servers listed at the start; "" without servers."""
    servers = {t.held.name: _hash(t.held.listed) for t in tools.values() if isinstance(t.held, McpServer)}
    return hashlib.sha256(json.dumps(servers, sort_keys=True).encode()).hexdigest() if servers else ""
