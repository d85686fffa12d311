"""What a model said, as calls of tools: one table of declarative response templates, read by transformers' parser.

A turn is calls, text, or malformed. A malformed turn is never executed as far as it went: every byte of a call has to
be accounted for (`body`), and every marker has to open or close one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from verl.chat.template import one_line

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

NEVER = "\0"  # a start anchor that no text holds: the prefix is read whole


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be read, with what is wrong, in words for the model."""

    reason: str


@dataclass(frozen=True, slots=True)
class Turn:
    """calls: in the order in which they stand; none where `malformed` is set · text: what is neither call nor
    reasoning."""

    calls: tuple[ToolCall, ...] = ()
    malformed: Malformed | None = None
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """How a family writes calls. open, close: around one call (or `each` of several in a region) · body: what may stand
    between them, whole · marks: texts of a chat template that teaches it · frame: what may stand around the calls."""

    open: str
    close: str
    content: str
    content_args: Mapping[str, Any]
    transform: Mapping[str, Any]
    body: str
    marks: tuple[str, ...]
    open_pattern: str = ""
    frame: tuple[str, ...] = ()

    @property
    def template(self) -> dict[str, Any]:
        """For transformers' ResponseParser."""
        opened = {"open_pattern": self.open_pattern} if self.open_pattern else {"open": self.open}
        return {
            "start_anchor": NEVER,
            "fields": {
                "reasoning_content": {"open": "<think>", "close": "</think>", "repeats": True, "join": "\n"},
                "tool_calls": {
                    **opened,
                    "close": self.close,
                    "content": self.content,
                    "content_args": dict(self.content_args),
                    "repeats": True,
                    "transform": {"type": "function", "function": dict(self.transform)},
                },
                "content": {"repeats": True, "join": "", "content_args": {"strip": False}},  # every piece of it
            },
        }


_OBJECT = r"\s*\{.*\}\s*"
_NAMED = {"name": "{content.name}", "arguments": "{content.arguments}"}
_CAPTURED = {"name": "{name}", "arguments": "{content}"}
_QWEN_TAG = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!</?parameter).)*?)\n?</parameter>"
_GLM_TAG = r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>(?:(?!</?arg_value>).)*)</arg_value>"
_KIMI_OPEN = r"<\|tool_call_begin\|>\s*functions\.(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>"
_DEEPSEEK_OPEN = r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[\w.-]+)\n```json\n"

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        # Qwen2.5, Qwen3, Hermes: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>
        "hermes": Format(
            *("<tool_call>", "</tool_call>", "json", {}, _NAMED, _OBJECT), marks=("<tool_call>", '"arguments"')
        ),
        # Qwen3-Coder, Qwen3.5: <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
        "qwen3_coder": Format(
            *("<tool_call>", "</function>\n</tool_call>", "xml-inline", {"tag_pattern": _QWEN_TAG}, _CAPTURED),
            body=rf"\s*(?:{_QWEN_TAG.replace('?P<key>', '?:').replace('?P<value>', '?:')}\s*)*",
            marks=("<tool_call>", "<function=", "<parameter="),
            open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        ),
        # GLM-4.5: <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
        "glm": Format(
            *("<tool_call>", "</tool_call>", "xml-inline", {"tag_pattern": _GLM_TAG}, _CAPTURED),
            body=rf"\s*(?:{_GLM_TAG.replace('?P<key>', '?:').replace('?P<value>', '?:')}\s*)*",
            marks=("<tool_call>", "<arg_key>", "<arg_value>"),
            open_pattern=r"<tool_call>(?P<name>[\w.-]+)\s*?(?=\n|<)",
        ),
        # Kimi-K2: ...<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
        "kimi": Format(
            *("<|tool_call_begin|>", "<|tool_call_end|>", "json", {}, _CAPTURED, _OBJECT),
            marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            open_pattern=_KIMI_OPEN,
            frame=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        # DeepSeek-V3: ...<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{...}\n```<｜tool▁call▁end｜>...
        "deepseek": Format(
            *("<｜tool▁call▁begin｜>", "\n```<｜tool▁call▁end｜>", "json", {}, _CAPTURED, _OBJECT),
            marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            open_pattern=_DEEPSEEK_OPEN,
            frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    }
)


def format_of(template: str, asked: str = "auto") -> str:
    """The format that a chat template teaches; of several that fit, the one with most marks. ValueError: none."""
    known = ", ".join(FORMATS)
    if asked != "auto":
        if asked not in FORMATS:
            raise ValueError(f"agent.format={asked}: unknown; there are auto, {known}")
        return asked
    fits = [name for name, f in FORMATS.items() if all(mark in template.replace('\\"', '"') for mark in f.marks)]
    if not fits:
        raise ValueError(
            f"agent.format=auto: the chat template shows none of the known ways to write a tool call ({known}): set "
            "agent.format to the one that the model was trained on, or model.chat_template=FILE"
        )
    return max(fits, key=lambda name: len(FORMATS[name].marks))


@dataclass(frozen=True, slots=True)
class TurnParser:
    """Reads the turns of one model. opening: what the generation prompt has begun (`<think>`) · template: of a
    tokenizer that carries its own, which wins over the format's."""

    format: Format | None
    opening: str = ""
    template: Mapping[str, Any] | None = None
    _loaded: list[ResponseTemplate] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        wanted = self.template if self.template is not None else self.format.template if self.format else None
        assert wanted is not None, "a format or a template of the tokenizer's own"
        self._loaded.append(load_response_template(dict(wanted)))

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
        """One turn, without its end-of-turn token. tools: schemas, by which text becomes numbers. Never raises."""
        from transformers.utils.chat_parsing import ResponseParser

        try:
            parser = ResponseParser(self._loaded[0], self.opening, tools=[dict(t) for t in tools])
            events = parser.feed(text)
            message, left = parser.finalize()
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            return Turn(malformed=Malformed(_why(e)), text=text)
        said = str(message.get("content", ""))
        for mark in self.format.frame if self.format else ():
            said = said.replace(mark, "")
        said = said.strip()
        reason = self._unread(said, [*parser.initial_events, *events], left)
        calls: list[ToolCall] = []
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(name, str) or not name.strip():
                reason = reason or "the name of the function is missing"
            elif not isinstance(arguments, dict):
                reason = reason or f"the arguments of {name} are no JSON object"
            else:
                calls.append(ToolCall(name.strip(), arguments))
        if reason:
            return Turn(malformed=Malformed(reason), text=text)
        return Turn(tuple(calls), text=said, reasoning=str(message.get("reasoning_content", "")))

    def _unread(self, said: str, events: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]) -> str:
        """Why what was read as calls is not all that was written as such; "" if it is."""
        if any(e["type"] == "region_close" and e["field"] == "tool_calls" for e in left):
            return "the call is not closed"
        if self.format is None or self.template is not None:
            return ""
        body = ""
        for event in events:
            if event["field"] != "tool_calls":
                continue
            if event["type"] == "region_chunk":
                body += event["text"]
            elif event["type"] == "region_close":
                if not re.fullmatch(self.format.body, body, re.DOTALL) or self._marker(body):
                    return f"between the markers of the call stands something else: {one_line(ValueError(body))[:80]}"
                body = ""
        found = self._marker(said)
        return f"{found} does not belong to a call" if found else ""

    def _marker(self, text: str) -> str:
        assert self.format is not None
        return next((m for m in (self.format.open, self.format.close.strip().rpartition("\n")[2]) if m in text), "")


def _why(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, RecursionError):
        return "the arguments are nested too deeply"
    return f"the call cannot be read: {one_line(cause if isinstance(cause, ValueError) else error)[:200]}"


# -- arguments ---------------------------------------------------------------------------------------------------------

_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "array": (list,),
        "object": (dict,),
        "null": (type(None),),
    }
)


def wrong_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call by its tool's JSON schema, in words for the model; "": nothing."""
    properties = schema.get("properties") or {}
    if missing := [name for name in schema.get("required") or () if name not in arguments]:
        return f"missing: {', '.join(missing)}"
    if unknown := sorted(arguments.keys() - properties.keys()):
        return f"unknown: {', '.join(unknown)[:200]}; it takes {', '.join(properties) or 'no arguments'}"
    return next(filter(None, (_wrong(name, properties[name], value) for name, value in arguments.items())), "")


def _wrong(name: str, schema: Any, value: Any) -> str:
    if not isinstance(schema, Mapping):
        return ""
    options = [option for key in ("anyOf", "oneOf") for option in schema.get(key) or ()]
    if options:
        wrong = [_wrong(name, option, value) for option in options]
        return "" if not all(wrong) else wrong[0]
    if value is None and schema.get("nullable"):
        return ""
    declared = schema.get("type")
    kinds = [k for k in ([declared] if isinstance(declared, str) else declared or ()) if k in _KINDS]
    if kinds and not any(isinstance(value, _KINDS[k]) and (k == "boolean" or type(value) is not bool) for k in kinds):
        return f"{name} must be {' or '.join(kinds)}, not {type(value).__name__}"
    if schema.get("enum") and value not in schema["enum"]:
        return f"{name} must be one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, list):
        return next(filter(None, (_wrong(f"{name}[{i}]", schema.get("items"), v) for i, v in enumerate(value))), "")
    if isinstance(value, dict) and schema.get("properties"):
        return (why := wrong_arguments(schema, value)) and f"{name}: {why}"
    return ""
