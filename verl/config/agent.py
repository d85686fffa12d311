"""Find faults of `agent.*` without a tokenizer and without loading a user's code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.chat.parsing import format_of
from verl.chat.renderers import PREFIX
from verl.config.model_files import chat_template_of, find_model_folder
from verl.config.schema import Config
from verl.config.tree import leaves, text_of
from verl.data.formats import AUTO, SINGLE_TURN, TOOL_AGENT, played_by
from verl.names import did_you_mean

BUILT_IN = (SINGLE_TURN, TOOL_AGENT)
_FILES = (".py", ".yaml", ".yml", ".json")


def agent_faults(config: Config) -> Iterator[str]:
    """Yield a line for a loop or a file of tools that does not exist, and for a template that cannot render tools."""
    agent = config.agent
    name, _ = played_by(agent.loop, agent.tools)
    if name == TOOL_AGENT and not agent.tools:
        yield f"agent.loop={agent.loop} without a tool: agent.tools=[FILE.py] (functions under @function_tool)"
    if name not in BUILT_IN:
        path, _, cls = name.partition(":") if ":" in name else name.rpartition(".")
        if not path or not cls or name.endswith(".py"):
            known = f"there are {AUTO}, {', '.join(BUILT_IN)}, and your own as FILE.py:Class or module:Class"
            yield f"agent.loop={agent.loop}: {did_you_mean(name, (AUTO, *BUILT_IN))}{known}"
        elif _is_missing(path):
            yield f"agent.loop={agent.loop}: no such file; give FILE.py:Class"
    for entry in (e for e in agent.tools if _is_missing(e.partition(":")[0])):
        what = "FILE.py, a module, verl's tool YAML, or MCP servers as FILE.json"
        yield f"agent.tools={entry}: no such file; give {what}"
    if agent.tools:
        yield from _template_faults(config)


def _is_missing(path: str) -> bool:
    return path.endswith(_FILES) and not Path(path).expanduser().is_file()


def _template_faults(config: Config) -> Iterator[str]:
    """Yield the reasons why the chat template does not show tools. Faults that only a rendering finds are reported when
    the run starts."""
    own, folder = config.model.chat_template, config.model.tokenizer_path or config.model.path
    try:
        template = Path(own).expanduser().read_text() if own else chat_template_of(find_model_folder(folder))
    except (ValueError, OSError):
        return  # named by the checks of the model's files
    fix = "take a model that was trained with tools, or set model.chat_template=FILE"
    if "tools" not in re.findall(r"\w+", template):
        lacks = "does not render tools" if template else "is missing"
        yield f"agent.tools: the chat template of {own or folder} {lacks}: {fix}"
    elif config.agent.format != AUTO and not config.agent.format.startswith(PREFIX):
        try:
            format_of(template, config.agent.format)
        except ValueError as exc:
            yield str(exc)


def idle_agent_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the `agent.*` keys that have no effect because the run has neither tools nor a user's loop."""
    if values["agent.tools"] or played_by(values["agent.loop"], ())[0] != SINGLE_TURN:
        return []
    return [key for key in leaves() if key.startswith("agent.") and key not in ("agent.loop", "agent.tools")]


def idle_line(key: str, value: Any, origin: str) -> str:
    return f"{key}={text_of(value)} ({origin}) does nothing without tools: give agent.tools=[FILE.py], or leave it out"
