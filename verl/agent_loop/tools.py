"""Tools: Python functions with hints, verl's BaseTool classes with their YAML, TRL's environment classes, and MCP
servers, behind one `Tool`.

A call has a deadline and waits for one of the tool's places. Anything a tool does (it raises, hangs, returns an odd
value, calls sys.exit) becomes an answer to the model. Functions that are not async run in threads, never on the event
loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol
from uuid import uuid4

from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.threads import Ended, Places, in_thread, started, value_of
from verl.bounds import bounded_yaml
from verl.chat.arguments import as_declared, wrong_arguments
from verl.chat.parsing import ToolCall
from verl.chat.template import one_line
from verl.errors import Refused
from verl.sandbox.worker import Unloadable, load_module
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import MARK, ToolBroken, ToolLimits
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

THREADED_CALLS, ASYNC_CALLS = 32, 1024  # parallel calls of a tool that declares no number
LIMITS = ("timeout_s", "concurrency", "retries", "stop", "max_result_tokens")  # in files of tools


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer to a tool call, for the model."""

    text: str
    error: str = ""  # The kind of failure in one word, or "".
    reward: float | None = None  # The reward of this call.
    queue_s: float = 0.0  # The time that the call waited for a place.
    note: str = ""  # A note for the events.


class Held(Protocol):
    """The owner of a tool's state for each trajectory that calls the tool. `given` is the tool's part of the row's
    `tools_kwargs`."""

    async def open(self, given: Mapping[str, Any]) -> Any: ...
    async def call(self, state: Any, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> Any: ...
    async def score(self, state: Any, given: Mapping[str, Any]) -> float | None: ...
    async def release(self, state: Any, given: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeldTool:
    """verl's class of tools, with its state under an id."""

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
    """The object of an environment, and the text that its reset returned for the model (`greeting`).

    turn: the lock of its calls, which run one after another
    busy: its last call in a thread, which may continue after its deadline
    """

    made: Any
    greeting: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    busy: asyncio.Future[Ended] | None = None

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object. A call begins only after the previous one has ended, even if that one was given
        up."""
        function = getattr(self.made, method)
        async with self.turn:
            if self.busy is not None:
                await asyncio.shield(self.busy)
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            self.busy = started(functools.partial(function, **arguments), f"environment {method}")
            return value_of(await asyncio.shield(self.busy))


@dataclass(frozen=True, slots=True, eq=False)
class Environment:
    """TRL's class of environments, with one object per trajectory. Its public methods are tools. `reset` begins it with
    the row's columns. The result of `get_reward`, if it has one, is the trajectory's reward."""

    made_by: type

    @property
    def name(self) -> str:
        return self.made_by.__name__

    @property
    def rewards(self) -> bool:
        return hasattr(self.made_by, "get_reward")

    async def open(self, given: Mapping[str, Any]) -> Episode:
        state = Episode(await in_thread(self.made_by, f"environment {self.name}"))
        said = await state.call("reset", **given)
        if not isinstance(said, str | None):
            kind = type(said).__name__
            raise TypeError(f"{self.name}.reset returned a {kind}: return text for the model, or None")
        state.greeting = answer_of(said).text
        return state

    async def call(self, state: Episode, tool: str, arguments: dict[str, Any], given: Mapping[str, Any]) -> Any:
        return await state.call(tool, **arguments, **given)

    async def score(self, state: Episode, given: Mapping[str, Any]) -> float | None:
        return float(await state.call("get_reward")) if self.rewards else None

    async def release(self, state: Episode, given: Mapping[str, Any]) -> None:
        """Drop the object: TRL's class has no method for its end."""

    def close(self) -> None:
        """Do nothing, because no object outlives its trajectory."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of the run.

    schema: its description for templates
    function, held: its implementation, one of the two
    keeps_time: the implementation ends late calls itself
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
    """The tools of one trajectory. `kwargs` is the row's `tools_kwargs`, {tool: {create_kwargs, execute_kwargs,
    ...}}."""

    tools: Mapping[str, Tool]
    kwargs: Mapping[str, Any]
    timeout_s: float
    rewards: list[float] = field(default_factory=list)  # the rewards of calls that returned one
    _open: dict[Held, tuple[str, asyncio.Task[Any]]] = field(
        default_factory=dict
    )  # -> the tool called first, its state

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Run a call and return its answer. Raises nothing for a failure of the tool, except ToolBroken."""
        tool = self.tools.get(call.name)
        if tool is None:
            return _failed("unknown", f"there is no tool {call.name[:80]!r}; there are {', '.join(self.tools)}")
        if wrong := wrong_arguments(tool.parameters, call.arguments):
            return _failed("arguments", f"wrong arguments for {call.name}: {wrong}")
        call = ToolCall(call.name, as_declared(tool.parameters, call.arguments))
        answer = _failed("timeout", "")
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
            return _failed("timeout", f"{tool.name} gave no answer in {limit_s:g} s")
        except (Exception, SystemExit) as e:  # a tool is user code
            return _failed("exception", f"{tool.name} failed: {type(e).__name__}: {one_line(e)}")
        finally:
            tool.places.give_back(*threads)

    async def _run(self, tool: Tool, arguments: dict[str, Any], threads: list[asyncio.Future[Ended]]) -> Any:
        """Run the tool. If the call has a thread, it is appended to `threads`."""
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
        threads.append(started(called, f"tool {tool.name}"))
        return value_of(await asyncio.shield(threads[0]))

    def _begin(self, held: Held, name: str, given: Mapping[str, Any]) -> None:
        """Open the state of a tool, once in a trajectory if that does not fail."""

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

    async def begin(self, row: Mapping[str, Any]) -> str:
        """Begin the environments with the row's columns, and return their texts for the model before its first turn."""
        said = ""
        for held in dict.fromkeys(tool.held for tool in self.tools.values()):
            if isinstance(held, Environment):
                self._begin(held, held.name, row)
                said += (await self._ended(self._open[held][1], f"{held.name}.reset")).greeting
        return said

    def reward(self, scores: Mapping[str, float]) -> float | None:
        """Return the sum of the environments' rewards, or None if the reward function is needed."""
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
        """Release every tool that was opened, whatever the others do, and return the errors."""
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
        """Await a call with no answer for the model: its failure fails the attempt."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await call
        except TimeoutError as e:
            raise TimeoutError(f"{what}: no end in {self.timeout_s:g} s (agent.tool_timeout_s)") from e
        except SystemExit as e:
            raise RuntimeError(f"{what}: it called sys.exit({e.code})") from e


def _failed(kind: str, text: str) -> ToolAnswer:
    return ToolAnswer(f"Error: {text}", error=kind)


def answer_of(value: Any) -> ToolAnswer:
    """Convert the result of a tool: text, a dict, a ToolResponse, None, or one of them with a reward and metrics."""
    reward = None
    if isinstance(value, ToolAnswer):
        return value
    if isinstance(value, tuple):
        value, reward = value[0], value[1] if len(value) > 1 else None
    if isinstance(value, ToolResponse):
        if value.image or value.video:
            raise ValueError("it returned images or videos, which this model does not take in a turn")
        value = value.text
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair has no ids
    return ToolAnswer(text, reward=None if reward is None else float(reward))


# -- from the configuration --------------------------------------------------------------------------------------------


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
    """Return the settings that define the answers of verl's tools, by key, if the tools declare them."""
    held = {name: tool.held.instance for name, tool in tools.items() if isinstance(tool.held, HeldTool)}
    return {f"agent.tools ({name})": said for name, instance in held.items() if (said := instance.content())}


def load_tools(entries: Sequence[str], timeout_s: float = AgentConfig.tool_timeout_s) -> Mapping[str, Tool]:
    """Load the tools of `agent.tools` by name. Raise ValueError for a tool that cannot be loaded, and for two tools of
    one name.

    timeout_s: the deadline of a call, which verl's classes find in their config unless it has its own
    """
    found: dict[str, Tool] = {}
    for entry in entries:
        tools = _of_entry(entry, timeout_s)
        if not tools:
            raise Refused(f"agent.tools={entry}: no function there is under @function_tool. Fix: {entry}:NAME")
        for tool in tools:
            if tool.name in found:
                raise Refused(f"agent.tools={entry}: two tools are called {tool.name!r}: rename one of them")
            found[tool.name] = tool
    return MappingProxyType(found)


def _of_entry(entry: str, timeout_s: float) -> list[Tool]:
    if entry.endswith(".json"):
        from verl.tools.mcp import tools_of_servers

        return tools_of_servers(entry, timeout_s)
    return _of_yaml(entry, timeout_s) if entry.endswith((".yaml", ".yml")) else _of_module(entry, timeout_s)


def load_user_module(text: str, given: str, fix: str = "FILE.py, or a module in the current folder") -> ModuleType:
    """Load a `.py` file or a module. Raise ValueError with `given`, the user's own text, if there is none."""
    if text.endswith(".py") and not Path(text).expanduser().is_file():
        raise Refused(f"{given}: no such file. Fix: {fix}")
    try:
        return load_module(text, "agent")
    except (Unloadable, ImportError) as e:
        raise Refused(f"{given}: {one_line(e).partition(' Fix:')[0]} Fix: {fix}, or on PYTHONPATH") from e


def _of_module(entry: str, timeout_s: float) -> list[Tool]:
    path, _, name = entry.partition(":")
    module = load_user_module(path, f"agent.tools={entry}")
    if name and not callable(vars(module).get(name)):
        there = ", ".join(n for n, f in vars(module).items() if inspect.isfunction(f)) or "none"
        raise Refused(f"agent.tools={entry}: no function {name!r} there; there are {there}")
    if name and inspect.isclass(vars(module)[name]):
        return _of_environment(vars(module)[name], entry)
    names = [name] if name else [n for n, f in vars(module).items() if hasattr(f, MARK)]
    return [_of_function(path, n, function_as_tool(vars(module)[n]), timeout_s) for n in names]


def _of_function(path: str, name: str, tool: Tool, timeout_s: float) -> Tool:
    if not (processes := tool.limits.processes):
        return tool
    from verl.agent_loop.processes import InProcesses

    assert tool.function is not None
    named, limit_s = inspect.signature(tool.function).parameters, tool.limits.timeout_s or timeout_s
    held = InProcesses(path, name, named, timeout_s=limit_s, processes=processes)
    limits = replace(tool.limits, concurrency=processes)
    return replace(tool, limits=limits, function=None, held=held, keeps_time=True)


def _of_environment(made_by: type, entry: str) -> list[Tool]:
    methods = dict(inspect.getmembers(made_by, inspect.isfunction))
    if "reset" not in methods:
        raise Refused(f"agent.tools={entry}: a class here is an environment of TRL's kind, with reset(**columns)")
    needs = inspect.signature(methods["reset"]).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD or p.name == "prompt" for p in needs):
        raise Refused(f"agent.tools={entry}: reset is given the columns of its row: write reset(self, **columns)")
    if wanted := [p for p in inspect.signature(made_by).parameters.values() if _must_be_given(p)]:
        raise Refused(f"agent.tools={entry}: {made_by.__name__}() is called without its {wanted[0].name!r}")
    found = [(n, f) for n, f in methods.items() if not n.startswith("_") and n not in ("reset", "get_reward")]
    if not found:
        raise Refused(f"agent.tools={entry}: no public method besides reset and get_reward is a tool")
    held = Environment(made_by)
    return [replace(function_as_tool(f), function=None, held=held) for _, f in found]


def _must_be_given(parameter: inspect.Parameter) -> bool:
    varied = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not varied and parameter.default is parameter.empty


def function_as_tool(function: Callable[..., Any]) -> Tool:
    """Return the function as a tool. Raise ValueError if its hints and docstring do not give a schema."""
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as e:  # transformers has several classes for this error, some of them private
        called = getattr(function, "__name__", type(function).__name__)
        fix = "give every argument a type hint and a line under `Args:` in the docstring"
        raise Refused(f"the tool {called}: no schema can be made of it ({one_line(e)}). Fix: {fix}") from e
    schema["function"].pop("return", None)
    limits: ToolLimits = vars(function).get(MARK, ToolLimits())
    if inspect.iscoroutinefunction(function):
        limits = replace(limits, concurrency=limits.concurrency or ASYNC_CALLS)
    return Tool(schema["function"]["name"], schema, limits, function=function)


def _of_yaml(entry: str, timeout_s: float) -> list[Tool]:
    """Load the tools of verl's file `tools: [{class_name, config: {type: native}, tool_schema}]`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        bounded_yaml(Path(entry).read_text(encoding="utf-8"))
        read: Any = OmegaConf.to_container(OmegaConf.load(entry), resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as e:
        raise Refused(f"agent.tools={entry}: cannot be read: {one_line(e)}") from e
    rows = read.get("tools") if isinstance(read, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "class_name" in row for row in rows):
        raise Refused(
            f"agent.tools={entry}: verl's tool files hold `tools:`, a list of class_name, config, tool_schema"
        )
    return [_of_row(row, entry, timeout_s) for row in rows]


def _of_row(row: Mapping[str, Any], entry: str, timeout_s: float) -> Tool:
    path, _, name = str(row["class_name"]).rpartition(".")
    given, folder = f"agent.tools={entry}: class_name={row['class_name']}", Path(entry).expanduser().absolute().parent
    if str(folder) not in sys.path:  # at the end of the path: a module beside the file is found and hides no other
        sys.path.append(str(folder))
    found = vars(load_user_module(path, given, "a module beside this file")).get(name) if path else None
    if not inspect.isclass(found) or not issubclass(found, BaseTool):
        raise Refused(f"{given} is no verl.tools.base_tool.BaseTool")
    config = dict(row.get("config") or {})
    if (kind := config.get("type", "native")) != "native":
        raise Refused(
            f"agent.tools={entry}: type={kind}: only native tools are played here; MCP servers: agent.tools=[FILE.json]"
        )
    schema = row.get("tool_schema")
    made = found(
        {"timeout_s": timeout_s, **config}, OpenAIFunctionToolSchema.model_validate(schema) if schema else None
    )
    limits = {key: config[key] for key in LIMITS if key in config}
    plain = dict(schema) if schema else made.tool_schema.model_dump()
    return Tool(made.name, plain, ToolLimits(**limits), held=HeldTool(made))
