"""Run tools: Python functions with type hints, verl's BaseTool classes with their YAML, TRL's environment classes, and
MCP servers, all as a `Tool`.

A call has a deadline and waits for one of the tool's places. Every fault of a tool (it raises, hangs, returns a wrong
type, calls sys.exit) becomes an answer to the model. Functions that are not async run in threads, never on the event
loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from verl.agent_loop.threads import Ended, Places, in_thread, start_thread, value_of
from verl.chat.arguments import as_declared, wrong_arguments
from verl.chat.parsing import ToolCall
from verl.chat.template import one_line
from verl.tools.answers import ToolAnswer, answer_of, failed
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import ToolBroken, ToolLimits

THREADED_CALLS, ASYNC_CALLS = 32, 1024  # parallel calls of a tool that declares no number
LIMITS = ("timeout_s", "concurrency", "retries", "stop", "max_result_tokens")  # in files of tools


NOTHING = ToolAnswer("")


class Held(Protocol):
    """The interface of a tool with a state per trajectory: `open` returns the state, `call` and `score` use it,
    `release` ends it. `given` are the arguments for this tool in the row's `tools_kwargs`."""

    async def open(self, given: Mapping[str, Any]) -> Any: ...
    async def call(self, state: Any, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> Any: ...
    async def score(self, state: Any, given: Mapping[str, Any]) -> float | None: ...
    async def release(self, state: Any, given: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeldTool:
    """A `Held` for verl's BaseTool. The state is the id under which the tool created its instance."""

    instance: BaseTool

    async def open(self, given: Mapping[str, Any]) -> str:
        name = uuid4().hex
        try:
            made: Any = await self.instance.create(name, **given)
        except asyncio.CancelledError:  # it was created and will never be called
            await self.instance.release(name)
            raise
        return str(made[0] if isinstance(made, tuple) else made)

    async def call(self, state: str, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> Any:
        return await self.instance.execute(state, arguments, **given)

    async def score(self, state: str, given: Mapping[str, Any]) -> float | None:
        return await self.instance.calc_reward(state, **given)

    async def release(self, state: str, given: Mapping[str, Any]) -> None:
        await self.instance.release(state, **given)

    def close(self) -> None:
        self.instance.end_run()


@dataclass(slots=True, eq=False)
class Episode:
    """The state of an `Environment`: an object of the user's class, and what its `reset` returned for the model
    (`greeting`).

    turn: the lock that makes calls run one after another
    busy: the latest call in a thread, which may continue after its deadline
    """

    made: Any
    greeting: ToolAnswer = NOTHING
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    busy: asyncio.Future[Ended] | None = None

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object after the previous call has ended, even if that one is no longer awaited."""
        function = getattr(self.made, method)
        async with self.turn:
            if self.busy is not None:
                await asyncio.shield(self.busy)
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            self.busy = start_thread(functools.partial(function, **arguments), f"environment {method}")
            return value_of(await asyncio.shield(self.busy))


@dataclass(frozen=True, slots=True, eq=False)
class Environment:
    """A `Held` for TRL's environment classes, with one object per trajectory. Its public methods are tools, `reset` is
    called first with the row's columns, and `get_reward`, if the class has it, returns the trajectory's reward."""

    made_by: type

    @property
    def name(self) -> str:
        return self.made_by.__name__

    @property
    def rewards(self) -> bool:
        return hasattr(self.made_by, "get_reward")

    async def open(self, given: Mapping[str, Any]) -> Episode:
        state = Episode(await in_thread(self.made_by, f"environment {self.name}"))
        found = await state.call("reset", **given)
        state.greeting = NOTHING if isinstance(found, tuple) else answer_of(found)
        if not isinstance(found, str | None) and not state.greeting.parts:
            kind = type(found).__name__
            raise TypeError(f"{self.name}.reset returned a {kind}: return text or images for the model, or None")
        return state

    async def call(self, state: Episode, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> Any:
        return await state.call(tool, **arguments, **given)

    async def score(self, state: Episode, given: Mapping[str, Any]) -> float | None:
        return float(await state.call("get_reward")) if self.rewards else None

    async def release(self, state: Episode, given: Mapping[str, Any]) -> None:
        """Do nothing: TRL's class has no method that ends it."""

    def close(self) -> None:
        """Do nothing, because no object outlives its trajectory."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of the run.

    schema: its description for templates
    function, held: its implementation; exactly one of them is set
    keeps_time: True if the implementation itself ends late calls
    """

    name: str
    schema: Mapping[str, Any]
    limits: ToolLimits
    function: Callable[..., Any] | None = None
    held: Held | None = None
    keeps_time: bool = False
    places: Places = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", Places(self.limits.concurrency or THREADED_CALLS))

    @property
    def parameters(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.schema["function"].get("parameters") or {}
        return found


@dataclass(slots=True)
class Toolbox:
    """The tools of one trajectory, with their states. `kwargs` is the row's `tools_kwargs`, {tool: {create_kwargs,
    execute_kwargs, ...}}."""

    tools: Mapping[str, Tool]
    kwargs: Mapping[str, Any]
    timeout_s: float
    rewards: list[float] = field(default_factory=list)  # the rewards of calls that returned one
    _open: dict[Held, tuple[str, asyncio.Task[Any]]] = field(
        default_factory=dict
    )  # -> the tool called first, its state

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Run a call and return its answer. A failure of the tool is an answer too; only ToolBroken is raised."""
        tool = self.tools.get(call.name)
        if tool is None:
            return failed("unknown", f"there is no tool {call.name[:80]!r}; there are {', '.join(self.tools)}")
        if wrong := wrong_arguments(tool.parameters, call.arguments):
            return failed("arguments", f"wrong arguments for {call.name}: {wrong}")
        call = ToolCall(call.name, as_declared(tool.parameters, call.arguments))
        answer = failed("timeout", "")
        for _ in range(1 + tool.limits.retries):
            answer = await self._once(tool, call)
            if answer.error not in ("exception", "timeout"):
                break
        if answer.reward is not None:
            self.rewards.append(answer.reward)
        return answer

    async def _once(self, tool: Tool, call: ToolCall) -> ToolAnswer:
        limit_s = tool.limits.timeout_s or self.timeout_s
        came_s = time.monotonic()
        await tool.places.take(tool.name, limit_s)
        queue_s, threads = time.monotonic() - came_s, list[asyncio.Future[Ended]]()
        try:
            async with asyncio.timeout(None if tool.keeps_time else limit_s):
                return replace(answer_of(await self._run(tool, dict(call.arguments), threads)), queue_s=queue_s)
        except (ToolBroken, asyncio.CancelledError):
            raise
        except TimeoutError:
            return failed("timeout", f"{tool.name} gave no answer in {limit_s:g} s")
        except (Exception, SystemExit) as e:  # a tool is user code
            return failed("exception", f"{tool.name} failed: {type(e).__name__}: {one_line(e)}")
        finally:
            tool.places.give_back(*threads)

    async def _run(self, tool: Tool, arguments: dict[str, Any], threads: list[asyncio.Future[Ended]]) -> Any:
        """Run the tool and return its value. If the call runs in a thread, append that thread to `threads`."""
        more = self._given(tool.name, "execute_kwargs")
        if tool.held is not None:
            if tool.held not in self._open:
                self._begin(tool.held, tool.name, self._given(tool.name, "create_kwargs"))
            # the end of a late call must not cancel the opening of the state
            state = await asyncio.shield(self._open[tool.held][1])
            return await tool.held.call(state, tool.name, arguments, more)
        assert tool.function is not None
        called = functools.partial(tool.function, **arguments, **more)
        if inspect.iscoroutinefunction(tool.function):
            return await called()
        threads.append(start_thread(called, f"tool {tool.name}"))
        return value_of(await asyncio.shield(threads[0]))

    def _begin(self, held: Held, name: str, given: Mapping[str, Any]) -> None:
        """Start to open the state of a tool. If that fails, the next call tries again."""

        async def opened() -> Any:
            try:
                return await held.open(given)
            except SystemExit as e:  # SystemExit would end the event loop
                raise RuntimeError(f"{name}: its start called sys.exit({e.code})") from e

        def look(task: asyncio.Task[Any]) -> None:
            if (task.cancelled() or task.exception() is not None) and self._open.get(held, (name, None))[1] is task:
                del self._open[held]

        self._open[held] = name, asyncio.create_task(opened())
        self._open[held][1].add_done_callback(look)

    async def begin(self, row: Mapping[str, Any]) -> dict[str, ToolAnswer]:
        """Call `reset` of the environments with the row's columns, and return what they show the model in its first
        prompt, by the names of the methods."""
        shown = dict[str, ToolAnswer]()
        for held in dict.fromkeys(tool.held for tool in self.tools.values()):
            if isinstance(held, Environment):
                self._begin(held, held.name, row)
                name = f"{held.name}.reset"
                greeting = (await self._ended(self._open[held][1], name)).greeting
                if greeting.text or greeting.parts:
                    shown[name] = greeting
        return shown

    def reward(self, scores: Mapping[str, float]) -> float | None:
        """Return the sum of the environments' rewards; None if there is none, so that the reward function is called."""
        names = [name for held, (name, _) in self._open.items() if isinstance(held, Environment) and name in scores]
        return sum(scores[name] for name in names) if names else None

    async def scores(self) -> dict[str, float]:
        """Return the scores that the called tools and the environments give the trajectory at its end (verl's
        `calc_reward`)."""
        found: dict[str, float] = {}
        for held, (name, opened) in list(self._open.items()):
            if not opened.done():
                continue
            score = await self._ended(
                held.score(opened.result(), self._given(name, "calc_reward_kwargs")), f"{name}'s reward"
            )
            found |= {} if score is None else {name: float(score)}
        return found

    async def close(self) -> list[str]:
        """Release the states of all tools, even if one fails, and return the errors."""
        wrong = []
        for held, (name, opened) in list(self._open.items()):
            self._open.pop(held, None)
            try:
                state = await self._ended(opened, f"{name}'s start")
                await self._ended(held.release(state, self._given(name, "release_kwargs")), f"{name}'s release")
            except (Exception, SystemExit) as e:  # user code; the trajectory is over
                wrong.append(f"{name}: {type(e).__name__}: {one_line(e)}")
        return wrong

    def _given(self, name: str, part: str) -> Mapping[str, Any]:
        return (self.kwargs.get(name) or {}).get(part) or {}

    async def _ended(self, call: Awaitable[Any], what: str) -> Any:
        """Await a call that the model does not see (`reset`, `get_reward`). Its failure fails the attempt."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await call
        except TimeoutError as e:
            raise TimeoutError(f"{what}: no end in {self.timeout_s:g} s (agent.tool_timeout_s)") from e
        except SystemExit as e:
            raise RuntimeError(f"{what}: it called sys.exit({e.code})") from e


def close_tools(tools: Mapping[str, Tool]) -> None:
    """Close all tools, then raise the first error."""
    wrong: list[Exception] = []
    for held in {tool.held for tool in tools.values() if tool.held is not None}:
        try:
            held.close()
        except Exception as e:  # user code
            wrong.append(e)
    if wrong:
        raise wrong[0]


def contents_of(tools: Mapping[str, Tool]) -> dict[str, str]:
    """Return, by key, the settings and data on which the answers of verl's tools depend, if the tools declare them."""
    held = {name: tool.held.instance for name, tool in tools.items() if isinstance(tool.held, HeldTool)}
    return {f"agent.tools ({name})": found for name, instance in held.items() if (found := instance.content())}
