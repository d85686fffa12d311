"""Load the loops of a run: the built-in ones and the user's. What they share is made here once, before any task is
read. Errors of the user raise ValueError with the key of the configuration."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopFactory, ServerManager
from verl.agent_loop.load_tools import load_tools, load_user_module
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.agent_loop.tool_agent import ToolAgentLoop, ToolKit
from verl.agent_loop.tools import Environment, HeldTool, Tool, close_tools, contents_of
from verl.chat.bridge import bridge_of, plain_text
from verl.chat.parsing import FORMATS, TurnParser, format_of, opening_of
from verl.chat.renderers import PREFIX, load_package
from verl.chat.template import USER, Renderer, audit_template, shared
from verl.config.model_files import read_model_config
from verl.data.formats import SINGLE_TURN as SINGLE
from verl.data.formats import TOOL_AGENT as TOOL
from verl.data.formats import Players, played_by
from verl.errors import Refused
from verl.models.families import family_name
from verl.tools.mcp import tools_hash
from verl.tools.pictures import TurnPictures, turn_pictures
from verl.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The loops of a run and their tools."""

    players: Players  # The names that a row may choose, with their loops.
    make: AgentLoopFactory  # Makes the loop of one trajectory.
    notes: tuple[str, ...] = ()  # Messages for the user at the start.
    contents: Mapping[str, str] = field(default_factory=dict)  # the parts that define the run, by key
    close: Callable[[], Awaitable[None]]  # Ends the servers, processes and threads behind tools.
    longest_call_s: float = 0.0  # The longest deadline of a tool call.


def load_loops(config: Any, tokenizer: Any, eos_ids: tuple[int, ...], model: Path | None = None) -> Loops:
    """Load the loops and tools of the configuration. Raise ValueError for a loop or a tool that cannot be loaded, and
    for tools with a template that has no place for them.

    config: the whole configuration, which the user's loops receive · model: the folder of the model, of which images
    that tools return are read; None: it reads text alone
    """
    agent: AgentConfig = config.agent
    default, _ = played_by(agent.loop, agent.tools)
    own = {} if default in (SINGLE, TOOL) else _own_loops(default)
    tools = load_tools(agent.tools, agent.tool_timeout_s)
    kit: ToolKit | None = None
    notes: tuple[str, ...] = ()
    if tools:
        try:
            kit, notes = _kit(config, tokenizer, tools, eos_ids, model)
        except ValueError:
            close_tools(tools)
            raise

    pictures = pictures_of(config, tokenizer, model) if own else None

    def make(manager: ServerManager, task: Task) -> AgentLoopBase:
        name = task.agent or default
        if name == SINGLE:
            return SingleTurnLoop(config, manager, tokenizer)
        if name == TOOL:
            assert kit is not None, "rows that name tool_agent without tools are refused when they are read"
            return ToolAgentLoop(config, manager, tokenizer, kit=kit, images=task.images)
        manager.pictures = pictures
        return own[name](config, manager, tokenizer)

    names = (SINGLE, *((TOOL,) if tools else ()), *own)
    rewarded = any(isinstance(t.held, Environment) and t.held.rewards for t in tools.values())
    players = Players(default, names, tuple(dict(tool.schema) for tool in tools.values()), rewarded=rewarded)
    contents = {**contents_of(tools), **({"agent.tools": listed} if (listed := tools_hash(tools)) else {})}
    notes += tuple(found for t in tools.values() if isinstance(t.held, HeldTool) and (found := t.held.instance.note()))
    notes += (f"agent: the tools of MCP servers are those of now ({listed[:12]})",) if listed else ()
    return Loops(
        players=players,
        make=make,
        notes=notes,
        contents=contents,
        close=partial(asyncio.to_thread, close_tools, tools),
        longest_call_s=max((tool.limits.timeout_s or 0.0 for tool in tools.values()), default=0.0),
    )


def of_the_user(agent: AgentConfig) -> bool:
    """Return True if loops or tools are user code, which runs in another process, unless it is declared as
    `NAME@driver`."""
    name, in_driver = played_by(agent.loop, agent.tools)
    servers = all(entry.endswith(".json") for entry in agent.tools)  # they run in processes of their own
    return not in_driver and (name not in (SINGLE, TOOL) or not servers)


def _own_loops(text: str) -> dict[str, type[AgentLoopBase]]:
    """Return the loop class that the key names, and the other loop classes of its file by name, which rows may
    select."""
    path, _, name = text.partition(":") if ":" in text else text.rpartition(".")
    module = load_user_module(path, f"agent.loop={text}")
    found = vars(module).get(name)
    if not inspect.isclass(found) or not issubclass(found, AgentLoopBase):
        raise Refused(f"agent.loop={text}: {name} is no subclass of verl.agent_loop.base.AgentLoopBase")
    there = {n: c for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__}
    there |= {c.registered: c for c in there.values() if issubclass(c, AgentLoopBase) and c.registered}
    return {text: found, **{n: c for n, c in there.items() if issubclass(c, AgentLoopBase)}}


def pictures_of(config: Any, tokenizer: Any, model: Path | None) -> TurnPictures | None:
    """Return what reads the images that loops of the user's own give to the model; None if it reads text alone."""
    if model is None or family_name(read_model_config(model)) is None:
        return None
    kwargs = config.model.template_kwargs
    renderer = Renderer(tokenizer, kwargs, spelling=audit_template(tokenizer, kwargs).spelling)
    return turn_pictures(model, tokenizer, plain_text(tokenizer), renderer, None, False)[0]


def _refused(tokenizer: Any, template_kwargs: Mapping[str, Any], tool: Tool) -> bool:
    try:
        Renderer(tokenizer, template_kwargs, [dict(tool.schema)]).text([USER], prompt=True)
    except ValueError:
        return True
    return False


def _kit(
    config: Any, tokenizer: Any, tools: Mapping[str, Tool], eos_ids: tuple[int, ...], model: Path | None = None
) -> tuple[ToolKit, tuple[str, ...]]:
    agent, template_kwargs = config.agent, config.model.template_kwargs
    audit = audit_template(tokenizer, template_kwargs)
    if not (audit.supports_tools and audit.supports_tool_calls):
        lacks = "tools" if not audit.supports_tools else "tool calls and their results"
        raise Refused(
            f"agent.tools: the chat template of {tokenizer.name_or_path or 'this model'} does not render {lacks}: take "
            "a model that was trained with tools, or set model.chat_template=FILE"
        )
    plain, renderer = plain_text(tokenizer), Renderer(tokenizer, template_kwargs, spelling=audit.spelling)
    shown = replace(renderer, tools=[dict(t.schema) for t in tools.values()])
    try:
        shown.text([USER], prompt=True)
    except ValueError as e:
        one = next((t.name for t in tools.values() if _refused(tokenizer, template_kwargs, t)), "")
        what = f"the schema of {one}" if one else "the tools together"
        owner = f"the chat template of {tokenizer.name_or_path or 'this model'}"
        raise Refused(f"agent.tools: {owner} cannot render {what}: {e}. Fix: plainer hints, or no such tool") from e
    package, parser, bridge, name = None, None, None, agent.format
    if name.startswith(PREFIX):
        package = load_package(name.removeprefix(PREFIX), plain, template_kwargs, shown)
    else:
        own = getattr(tokenizer, "response_template", None)
        name = "of the tokenizer" if own else format_of(str(tokenizer.chat_template), name)
        history, prompt = (renderer.text([USER], prompt=p) for p in (False, True))
        parser = TurnParser(FORMATS.get(name), opening_of(name, prompt[shared(history, prompt) :]), own)
        bridge = bridge_of(tokenizer, audit, template_kwargs)
    pictures, bridge = turn_pictures(model, tokenizer, plain, renderer, bridge, package is not None)
    ends = frozenset((*eos_ids, *audit.ends))
    kit = ToolKit(
        tools=tools,
        parser=parser,
        renderer=shown,
        audit=audit,
        plain=plain,
        bridge=bridge,
        ends=ends,
        limits=agent,
        package=package,
        pictures=pictures,
    )
    notes = [f"agent: {', '.join(tools)}; calls are written as {name}"]
    if bridge is None and package is None:
        notes.append("agent: the chat template rewrites earlier turns: every turn is a branch, rendered anew")
    if bridge is None and not audit.supports_parallel_calls:
        notes.append("agent: the chat template shows one call a turn: a turn with more goes back to the model")
    if pictures is not None and pictures.refused:
        notes.append(f"agent: a tool cannot return an image: {pictures.refused}")
    return kit, tuple(notes)
