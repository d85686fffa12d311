"""Load the tools of `agent.tools`: functions with hints, verl's BaseTool classes from YAML, TRL's environment classes,
and MCP servers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from verl.agent_loop.processes import InProcesses
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.tools import ASYNC_CALLS, LIMITS, Environment, HeldTool, Tool
from verl.bounds import bounded_yaml
from verl.chat.template import one_line
from verl.errors import Refused
from verl.sandbox.worker import Unloadable, load_module
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import MARK, ToolLimits
from verl.tools.mcp import tools_of_servers
from verl.tools.schemas import OpenAIFunctionToolSchema


def load_tools(entries: Sequence[str], timeout_s: float = AgentConfig.tool_timeout_s) -> Mapping[str, Tool]:
    """Load the tools of `agent.tools` by name. Raise ValueError for a tool that cannot be loaded, and for two tools of
    one name.

    timeout_s: the deadline of a call for verl's classes that have none in their own configuration
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
