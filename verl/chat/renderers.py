"""The package `renderers` as a replacement of our call formats and our bridge: `agent.format=renderers:NAME`.

It has code per model family that writes and reads turns as ids. Two assumptions are checked at the start: that it
writes the prompts of this model's chat template, and that no text of a tool becomes a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.chat.bridge import PlainText
from verl.chat.parsing import Malformed, ToolCall, Turn
from verl.chat.template import ANSWER, CALL, USER, Message, Renderer, Tool, is_prefix, one_line, shared
from verl.errors import Refused

PREFIX, VERSION = "renderers:", "0.1.12"
INSTALL = f"pip install '.[renderers]' in verl's folder (renderers {VERSION})"


@dataclass(frozen=True)
class Marked:
    """The tokenizer that is given to the package. Text of tools has markers (chat/bridge.py), so it yields no control
    token."""

    plain: PlainText

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(i) for i in self.plain.encode(text)]

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":  # for offsets of characters, which are of no use here
            raise AttributeError(name)
        return getattr(self.plain.tokenizer, name)


@dataclass(frozen=True, slots=True)
class PackageRenderer:
    """A renderer of the package for one model. In its methods, `prompt` [t] are the ids before a turn, and `sampled`
    [t] the ids of the turn."""

    renderer: Any
    plain: PlainText

    def parse(self, prompt: np.ndarray, sampled: np.ndarray, tools: Sequence[Tool]) -> Turn:
        """Parse one turn. Errors give a malformed turn and are not raised."""
        try:
            found = self.renderer.parse_response(sampled.tolist(), tools=list(tools), prompt_ids=prompt.tolist())
        except (ValueError, TypeError, LookupError, RecursionError) as e:
            span = 0, len(self.plain.tokenizer.decode(sampled.tolist()))
            return Turn(malformed=Malformed(f"the call cannot be read: {one_line(e)}", span))
        calls = []
        for call in found.tool_calls:
            if call.status not in ("ok", "unknown_tool") or not call.name or not isinstance(call.arguments, dict):
                why = "no arguments" if call.status == "ok" else call.status.replace("_", " ")
                first, end = call.token_span or (0, len(sampled))
                place = [len(self.plain.tokenizer.decode(sampled[:n].tolist())) for n in (first, end)]
                prefix = f"the call cannot be read ({why}): {call.raw[:200]}"
                return Turn(malformed=Malformed(prefix, (place[0], place[1])), text=call.raw)
            calls.append(ToolCall(call.name, call.arguments))
        return Turn(tuple(calls), text=(found.content or "").strip(), reasoning=found.reasoning_content or "")

    def ids(self, prompt: np.ndarray, sampled: np.ndarray, messages: Sequence[Message]) -> np.ndarray | None:
        """Return the ids [t] int64 between the sampled ids and the next turn of the model; None if the package would
        have to change earlier ids."""
        marked = [{**m, "content": self.plain.marked(str(m["content"]))} for m in messages]
        found = self.renderer.bridge_to_next_turn(prompt.tolist(), sampled.tolist(), marked)
        whole = np.array([] if found is None else found.token_ids, np.int64)
        before = np.concatenate([prompt, sampled])
        return whole[len(before) :] if is_prefix(before, whole) else None


def load_package(name: str, plain: PlainText, template_kwargs: Mapping[str, Any], shown: Renderer) -> PackageRenderer:
    """Load the named renderer of the package. Raise ValueError if the package is not installed, has no such renderer,
    or writes other prompts than this model's template.

    shown: the renderer of the model's chat template with its tools
    """
    key = f"agent.format={PREFIX}{name}"
    try:
        import renderers
    except ImportError as e:
        raise Refused(f"{key}: {one_line(e)}. Fix: {INSTALL}") from e
    if renderers.__version__ != VERSION:
        raise Refused(f"{key}: the package is renderers {renderers.__version__}. Fix: {INSTALL}")
    try:
        config = renderers.config_from_name(name)
        made = renderers.create_renderer(Marked(plain), config, chat_template_kwargs=dict(template_kwargs))
    except Exception as e:  # of another's package: of tokens that are not there, names, files that it loads
        raise Refused(f"{key}: the package makes no renderer for this model: {one_line(e)}") from e
    package = PackageRenderer(made, plain)
    _check(package, key, shown)
    return package


def _check(package: PackageRenderer, key: str, shown: Renderer) -> None:
    """Raise ValueError if the package's prompts, or its texts after a call, differ from those of the template, or if it
    yields control tokens for text of tools."""
    plain, stops, tools = (
        package.plain,
        package.renderer.get_stop_token_ids(),
        [dict(tool) for tool in shown.tools or ()],
    )

    def same(ours: list[int], theirs: list[int]) -> None:
        if ours != theirs:
            at = shared(ours, theirs)
            one, other = (repr(plain.tokenizer.decode(ids[max(0, at - 4) : at + 8])) for ids in (ours, theirs))
            raise Refused(f"{key}: the chat template writes {one} where this renderer writes {other}: not this model's")

    probes: list[list[Message]] = [[USER], [USER, CALL, ANSWER]]
    prompt, full = (shown.ids(messages, prompt=True) for messages in probes)
    for ids, messages in ((prompt, probes[0]), (full, probes[1])):
        written = package.renderer.render_ids([dict(m) for m in messages], tools=tools, add_generation_prompt=True)
        same(ids.tolist(), written)
    at = next((i + 1 for i in range(len(prompt), len(full)) if full[i] in stops), len(full))
    texts = (ANSWER["content"], ANSWER["content"] + "".join(plain.control))
    found, forged = (package.ids(prompt, full[len(prompt) : at], [{**ANSWER, "content": text}]) for text in texts)
    if found is not None and at < len(full) and is_prefix(prompt, full):
        same(full[at:].tolist(), found.tolist())
    control = {plain.tokenizer.convert_tokens_to_ids(text) for text in plain.control}
    one, other = ([] if ids is None else [i for i in ids.tolist() if i in control] for ids in (found, forged))
    if one != other:
        raise Refused(f"{key}: with this renderer a tool's text could open or close a turn")
