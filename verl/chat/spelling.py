"""The spelling of messages for one chat template: the names and forms in which it reads their content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.chat.messages import REASONING_KEYS

THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """The names and forms in which a chat template reads the content of messages."""

    parts: frozenset[str] = frozenset()
    """Roles for which the template reads text only from a list of content parts."""
    text_arguments: bool = False
    """The template expects the arguments of a call as JSON text instead of an object."""
    reasoning: str = REASONING_KEYS[0]
    """The key in which the template reads a turn's reasoning; "" if it renders none."""
    developer: str = "system"
    """The role that replaces `developer`."""
    splits: bool = False
    """Text before `</think>` in a turn's content has to be given as its reasoning."""

    def __call__(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a message in this spelling, without the key `weight`."""
        made = {key: value for key, value in message.items() if key != "weight"}
        role = made.get("role")
        if role == "developer":
            made["role"] = role = self.developer
        elif role == "assistant":
            self._turn(made)
        if role in self.parts and isinstance(made.get("content"), str):
            made["content"] = [{"type": "text", "text": made["content"]}]
        return made

    def _turn(self, made: dict[str, Any]) -> None:
        content = str(made.get("content") or "")
        found = THOUGHT.match(content) if self.splits else None
        if found and "reasoning_content" not in made:
            made |= {"reasoning_content": found.group(1).strip(), "content": content[found.end() :]}
        if self.reasoning not in ("", REASONING_KEYS[0]) and REASONING_KEYS[0] in made:
            made[self.reasoning] = made.pop(REASONING_KEYS[0])
        if self.text_arguments and (calls := made.get("tool_calls")):
            made["tool_calls"] = [_with_text(call) for call in calls]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


PLAIN_SPELLING = Spelling()


def roles_named(template: str) -> frozenset[str]:
    """Return the quoted words in a template's source. The roles that the template reads are among them."""
    return frozenset(re.findall(r"['\"](\w+)['\"]", template))
