"""Read tool calls from a model's text, with one table of declarative response templates and the parser of transformers.

A turn is parsed as calls, as text, or as malformed. No call of a malformed turn is executed: all text between the
markers of a call must match the `body` of the format, and every marker must open or close a call.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from verl.chat.python_calls import python_calls
from verl.chat.template import one_line
from verl.errors import Refused

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

NEVER = "\0"  # a start anchor that occurs in no text, so the parser reads the text from its beginning


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be read.

    reason: the fault, in a text for the model
    span: [first, end) of its characters in the turn, as far as they are known
    """

    reason: str
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One parsed turn.

    calls: in the order of the text; empty if `malformed` is set
    text: the turn without its calls and reasoning
    """

    calls: tuple[ToolCall, ...] = ()
    malformed: Malformed | None = None
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """The syntax with which a family of models writes tool calls."""

    open: str
    """The text before one call (before the list of calls, if `each`)."""
    close: str
    """The text after one call."""
    content: str
    content_args: Mapping[str, Any]
    transform: Mapping[str, Any]
    body: str
    """The pattern of the text between them, whole."""
    marks: tuple[str, ...]
    """Texts of a chat template that teaches this format."""
    open_pattern: str = ""
    """In place of `open`, where a text is not enough."""
    close_pattern: str = ""
    """In place of `close`; a call with it may end with the turn, and only its content shows if it is whole."""
    frame: tuple[str, ...] = ()
    """Texts that may be around the calls."""
    stray: str = ""
    """The pattern of text that belongs to a call wherever it is."""
    each: bool = False
    """Calls are items of one list."""
    read: Callable[[str], list[dict[str, Any]]] | None = None
    """Reads calls that no content parser of transformers reads."""
    reasoning: Mapping[str, str] = field(default_factory=lambda: {"open": "<think>", "close": "</think>"})
    answer: Mapping[str, str] | None = None
    """The region of the text, where it has one of its own."""
    value: str = ""
    """The pattern of a text between marks that may hold markers of the format; in JSON, strings may."""

    @property
    def template(self) -> dict[str, Any]:
        """Return the template for transformers' ResponseParser."""
        opened = {"open_pattern": self.open_pattern} if self.open_pattern else {"open": self.open}
        closed = {"close_pattern": self.close_pattern} if self.close_pattern else {"close": self.close}
        function = {"transform": {"type": "function", "function": dict(self.transform)}, "transform_each": self.each}
        calls = {"content": self.content, "content_args": dict(self.content_args), "repeats": True}
        pieces = {"repeats": True, "join": "", "content_args": {"strip": False}}
        return {
            "start_anchor": NEVER,
            "fields": {
                "reasoning_content": {**self.reasoning, "repeats": True, "join": "\n"},
                "tool_calls": {**opened, **closed, **calls, **({} if self.read else function)},
                **({"answer": {**self.answer, **pieces}} if self.answer else {}),
                "content": pieces,  # every piece of it
            },
        }

    @property
    def opening(self) -> str:
        """Return a pattern for the text that opens a call. Its named groups are numbered, so that alternatives may
        share a name."""
        number = itertools.count()
        return re.sub(r"\?P<name>", lambda _: f"?P<name{next(number)}>", self.open_pattern or re.escape(self.open))

    @property
    def closing(self) -> str:
        """Return a pattern for the text that closes a call."""
        return self.close_pattern or re.escape(self.close.strip())

    def strays(self, text: str) -> str:
        """Return the first piece of the text that belongs to a call; "" if there is none."""
        pattern = self.stray or "|".join(map(re.escape, (self.open, self.close.strip().rpartition("\n")[2])))
        found = re.search(pattern, text)
        return found.group().strip() if found else ""


_OBJECT = r"\s*\{.*\}\s*"
_NAMED = {"name": "{content.name}", "arguments": "{content.arguments}"}
_CAPTURED = {"name": "{name}", "arguments": "{content}"}
_QWEN_TAG = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!</?parameter).)*?)\n?</parameter>"
_GLM_TAG = r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>(?:(?!</?arg_value>).)*)</arg_value>"
_KIMI_OPEN = r"<\|tool_call_begin\|>\s*functions\.(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>"
_QUOTE = '<|"|>'
_START = r"(?:\A|(?<=</think>))\s*"  # of a turn, for calls that have no marker of their own
_LLAMA_NAME = r"\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:"
_PYTHON_TEXT = (  # what is outside of the calls; or a text between quotes
    r"(?:\A|<\|tool_call_end\|>)(?:(?!<\|tool_call_start\|>).)*"
    r"""|[=\[{,:]\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
)
_PYTHON_NAME = r"\[\s*[A-Za-z_][\w.]*\s*\("
_HARMONY_START = r"(?:<\|start\|>assistant)?\s*"
_HARMONY_OPEN = (
    rf"{_HARMONY_START}(?:to=functions\.(?P<name>[\w.-]+)\s*<\|channel\|>(?:commentary|analysis)"
    r"|<\|channel\|>(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.-]+))\s*"
    r"(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
)
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
            value=r"(?<=<parameter=)[^<>\n]+>((?:(?!<parameter=).)*?)</parameter>",
        ),
        # GLM-4.5: <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
        "glm": Format(
            *("<tool_call>", "</tool_call>", "xml-inline", {"tag_pattern": _GLM_TAG}, _CAPTURED),
            body=rf"\s*(?:{_GLM_TAG.replace('?P<key>', '?:').replace('?P<value>', '?:')}\s*)*",
            marks=("<tool_call>", "<arg_key>", "<arg_value>"),
            open_pattern=r"<tool_call>(?P<name>[\w.-]+)\s*?(?=\n|<)",
            value=r"<arg_value>((?:(?!<arg_(?:key|value)>).)*?)</arg_value>",
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
        # Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, one call, which is the whole turn
        "llama3_json": Format(
            *("<|python_tag|>", "}", "json", {}, {"name": "{content.name}", "arguments": "{content.parameters}"}),
            body=_OBJECT,
            marks=("<|start_header_id|>", '{"name": function name, "parameters":'),
            open_pattern=rf"{_START}(?:<\|python_tag\|>\s*)?(?={_LLAMA_NAME})",
            close_pattern=r"\Z",
            stray=rf"<\|python_tag\|>|{_LLAMA_NAME}\s*\"[^\"]*\"\s*,\s*\"parameters\"",
        ),
        # Llama 3.2 to 4 with functions as Python: [f(a=1), g()], which is the whole turn
        "pythonic": Format(
            *("<|python_start|>", "<|python_end|>", "text", {}, {}, ".*"),
            marks=("[func_name1(params_name1=params_value1",),
            open_pattern=rf"{_START}(?:<\|python_(?:start|tag)\|>\s*)?(?={_PYTHON_NAME})",
            close_pattern=r"<\|python_end\|>\s*\Z|\Z",
            stray=rf"<\|python_(?:start|end|tag)\|>|(?m:^)\s*{_PYTHON_NAME}",
            read=python_calls,
        ),
        # LFM2: <|tool_call_start|>[f(a='x', n=1), g()]<|tool_call_end|>; lists and objects as JSON
        "lfm2": Format(
            *("<|tool_call_start|>", "<|tool_call_end|>", "text", {}, {}, ".*"),
            marks=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            read=python_calls,
            value=_PYTHON_TEXT,
        ),
        # Mistral's tokenizers up to v7: [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]
        "mistral": Format(
            *("[TOOL_CALLS]", "", "json", {}, {"name": "{name}", "arguments": "{arguments}"}, r"\s*\[.*\]\s*"),
            marks=("[TOOL_CALLS]",),
            close_pattern=r"\Z",
            stray=r"\[TOOL_CALLS\]",
            each=True,
        ),
        # From v11 on: [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}
        "mistral_v11": Format(
            *("[TOOL_CALLS]", "", "json", {}, _CAPTURED, _OBJECT),
            marks=("[TOOL_CALLS]", "[ARGS]"),
            open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]",
            close_pattern=r"(?=\[TOOL_CALLS\])|\Z",
            stray=r"\[(?:TOOL_CALLS|ARGS|CALL_ID)\]",
            reasoning={"open": "[THINK]", "close": "[/THINK]"},
        ),
        # gpt-oss: <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>; its text before a
        # call in channels without a recipient is reasoning to its template
        "gpt-oss": Format(
            *("<|channel|>commentary to=functions.", "<|call|>", "json", {}, _CAPTURED, _OBJECT),
            marks=("<|channel|>commentary", "<|call|>"),
            open_pattern=_HARMONY_OPEN,
            close_pattern=r"<\|call\|>|\Z",
            stray=r"<\|(?:start|end|channel|message|constrain|call|return)\|>",
            reasoning={
                "open_pattern": rf"{_HARMONY_START}<\|channel\|>(?:analysis|commentary)\s*<\|message\|>",
                "close": "<|end|>",
            },
            answer={
                "open_pattern": rf"{_HARMONY_START}<\|channel\|>final\s*(?:<\|constrain\|>\w+)?\s*<\|message\|>",
                "close_pattern": r"<\|(?:end|return)\|>|\Z",
            },
        ),
        # Gemma 4: <|tool_call>call:f{a:<|"|>text<|"|>,n:1}<tool_call|>
        "gemma4": Format(
            *("<|tool_call>", "<tool_call|>", "json", {"string_delims": [[_QUOTE, _QUOTE]], "unquoted_keys": True}),
            *(_CAPTURED, _OBJECT),
            marks=("<|tool_call>call:", _QUOTE),
            open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]+)\s*(?=\{)",
            frame=("<|tool_response>",),
            reasoning={"open": "<|channel>thought", "close": "<channel|>"},
            value=rf"{re.escape(_QUOTE)}(.*?){re.escape(_QUOTE)}",
        ),
    }
)


def opening_of(name: str, prompt: str) -> str:
    """Return the tag that opens a reasoning block (`<think>`) if a prompt's text ends with it, in the named format;
    else ""."""
    mark = FORMATS[name].reasoning.get("open", NEVER) if name in FORMATS else "<think>"
    found = re.search(rf"{re.escape(mark)}\s*\Z", prompt)
    return found.group() if found else ""


def format_of(template: str, name: str = "auto") -> str:
    """Return the name of the format that a chat template shows; if several fit, the one with the most marks. Raise
    ValueError if none fits, or if there is no format of that `name`."""
    known = ", ".join(FORMATS)
    if name != "auto":
        if name not in FORMATS:
            raise Refused(f"agent.format={name}: unknown; there are auto, {known}, renderers:NAME")
        return name
    fits = [name for name, f in FORMATS.items() if all(mark in template.replace('\\"', '"') for mark in f.marks)]
    if not fits:
        raise Refused(
            f"agent.format=auto: the chat template shows none of the known ways to write a tool call ({known}): set "
            "agent.format to the one that the model was trained on, or model.chat_template=FILE"
        )
    return max(fits, key=lambda name: len(FORMATS[name].marks))


@dataclass(frozen=True, slots=True)
class TurnParser:
    """Reads the turns of one model.

    opening: the text of a reasoning tag that the generation prompt has opened (`<think>`), or ""
    template: the response template of a tokenizer that has its own; it is used in place of the format's
    """

    format: Format | None
    opening: str = ""
    template: Mapping[str, Any] | None = None
    _loaded: list[ResponseTemplate] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        wanted = self.template if self.template is not None else self.format.template if self.format else None
        assert wanted is not None, "a format or a template of the tokenizer's own"
        self._loaded.append(load_response_template(dict(wanted)))

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = (), opening: str | None = None) -> Turn:
        """Parse one turn, given without its end-of-turn token. Errors give a malformed turn and are not raised.

        tools: schemas, by which arguments are converted from text
        opening: replaces the parser's own for this turn, if prompts differ in it
        """
        from transformers.utils.chat_parsing import ResponseParser

        shown = _as_it_is if _holds_placeholders(text) else _shown
        try:
            opening = self.opening if opening is None else opening
            parser = ResponseParser(self._loaded[0], opening, tools=[dict(t) for t in tools])
            events = parser.feed(self._hidden(text, tools, opening))
            message, left = parser.finalize()
            written = self._functions(message.get("tool_calls", ()))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            return Turn(malformed=Malformed(_why(e), self._span(text)), text=text)
        prefix = str(message.get("content", "")) + str(message.get("answer", ""))
        for mark in self.format.frame if self.format else ():
            prefix = prefix.replace(mark, "")
        prefix = prefix.strip()
        reason = self._unread(prefix, [*parser.initial_events, *events], left)
        calls: list[ToolCall] = []
        for function in written:
            name, arguments = function["name"], shown(function["arguments"])
            if not isinstance(name, str) or not name.strip():
                reason = reason or "the name of the function is missing"
            elif not isinstance(arguments, dict):
                reason = reason or f"the arguments of {name} are no JSON object"
            else:
                calls.append(ToolCall(name.strip(), arguments))
        if reason:
            return Turn(malformed=Malformed(shown(reason), self._span(text)), text=text)
        return Turn(tuple(calls), text=shown(prefix), reasoning=shown(str(message.get("reasoning_content", ""))))

    def _hidden(self, text: str, tools: Sequence[Mapping[str, Any]], opening: str) -> str:
        """Return the text prepared for the parser of transformers: characters in the values of calls that could begin a
        marker are replaced by placeholders, and calls of tools without parameters that omit the arguments get some.
        `_shown` reverses both."""
        f = self.format
        if f is None or self.template is not None or _holds_placeholders(text):
            return text
        if f.value:
            return _masked_groups(f.value, text, "<")  # not "[": a value that is a list begins with it
        if f.content != "json":
            return text
        bare = {t["name"] for t in (tool.get("function", tool) for tool in tools) if not _takes(t)}
        spoken = _end_of_thought(text, f.reasoning, bool(opening))
        pieces, at = list[str](), 0
        for opened in re.finditer(f.opening, text):
            start = re.compile(r"\s*").match(text, opened.end()).end()  # type: ignore[union-attr]  # it always matches
            if opened.start() < at:
                continue
            name = next(filter(None, opened.groupdict().values()), None)
            takes_none = bare if opened.start() >= spoken else set[str]()
            if name in takes_none and not text.startswith("{", start) and re.compile(f.closing).match(text, start):
                pieces += [text[at : opened.end()], _NO_ARGUMENTS]
                at = opened.end()
            elif (end := _end_of_json(text, start)) > start:
                pieces += [text[at:start], self._filled(_masked_strings(text[start:end]), takes_none)]
                at = end
        return "".join([*pieces, text[at:]])

    def _filled(self, body: str, bare: Collection[str]) -> str:
        """Return the JSON of a call, or of a list of calls, with arguments added for the tools in `bare`, which take
        none."""
        assert self.format is not None
        key = self.format.transform.get("arguments", "").strip("{}").rpartition(".")[2]
        if key not in ("arguments", "parameters"):
            return body
        found = json.loads(body)
        rows = found if isinstance(found, list) else [found]
        lacks = [isinstance(r, dict) and r.get("name") in bare and r.get(key) is None for r in rows]
        if not any(lacks):
            return body
        filled = [r | {key: json.loads(_NO_ARGUMENTS)} if lack else r for r, lack in zip(rows, lacks, strict=True)]
        return json.dumps(filled if isinstance(found, list) else filled[0], ensure_ascii=False)

    def _span(self, text: str) -> tuple[int, int]:
        """Return (index of the first text that belongs to a call, length of the text)."""
        found = self.format.strays(text) if self.format is not None and self.template is None else ""
        return text.find(found), len(text)

    def _functions(self, found: Sequence[Any]) -> list[dict[str, Any]]:
        """Return {name, arguments} of each call, in order."""
        if self.format is not None and self.format.read is not None:
            return [call for body in found for call in self.format.read(body)]
        return [call["function"] for one in found for call in (one if isinstance(one, list) else [one])]

    def _unread(self, prefix: str, events: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]) -> str:
        """Return the reason why a turn that was parsed without an exception is malformed (an open call, other text
        between the markers, a marker outside of a call); "" if it is well formed."""
        own = self.format is None or self.template is not None
        may_end = self.format is not None and bool(self.format.close_pattern) and not own
        if not may_end and any(e["type"] == "region_close" and e["field"] == "tool_calls" for e in left):
            return "the call is not closed"
        if self.format is None or own:
            return ""
        body = ""
        for event in (*events, *left):
            if event["field"] != "tool_calls":
                continue
            if event["type"] == "region_chunk":
                body += event["text"]
            elif event["type"] == "region_close":
                inside = not may_end and self.format.strays(body)
                if inside or not re.fullmatch(self.format.body, body, re.DOTALL):
                    return f"between the markers of the call stands something else: {one_line(ValueError(body))[:80]}"
                body = ""
        found = self.format.strays(prefix)
        return f"{found} does not belong to a call" if found else ""


_PLACEHOLDERS = {"<": "\ue010", "[": "\ue011", "": "\ue012"}
_NO_ARGUMENTS = '{"\ue012": null}'


def _holds_placeholders(text: str) -> bool:
    return any(mark in text for mark in _PLACEHOLDERS.values())


def _as_it_is(value: Any) -> Any:
    return value


def _masked_groups(pattern: str, text: str, marks: str) -> str:
    """Return the text with the characters `marks` replaced by placeholders in the first group of every match of the
    pattern."""
    pieces, at = list[str](), 0
    for found in re.finditer(pattern, text, re.DOTALL):
        if found[1] is None:
            continue
        first, end = found.span(1)
        pieces += [text[at:first], found[1].translate({ord(mark): _PLACEHOLDERS[mark] for mark in marks})]
        at = end
    return "".join([*pieces, text[at:]])


def _masked_strings(text: str) -> str:
    """Return JSON with the characters `<` and `[` inside its strings replaced by placeholders."""
    return _masked_groups(r'("(?:[^"\\]|\\.)*")', text, "<[")


def _shown(value: Any) -> Any:
    """Return the value without the characters that `TurnParser._hidden` inserted."""
    if isinstance(value, dict):
        return {_shown(k): _shown(v) for k, v in value.items() if k != _PLACEHOLDERS[""]}
    if isinstance(value, list):
        return [_shown(v) for v in value]
    if isinstance(value, str):
        for mark, placeholder in _PLACEHOLDERS.items():
            value = value.replace(placeholder, mark)
    return value


def _end_of_json(text: str, start: int) -> int:
    """Return the end index of the JSON object or list that begins at `start`; `start` if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1] if text[start : start + 1] in ("{", "[") else start
    except (ValueError, RecursionError):
        return start


def _end_of_thought(text: str, marks: Mapping[str, str], opened: bool) -> int:
    """Return the index after the last reasoning block of a turn: 0 without one, the length of the text if it is not
    closed.

    opened: True if the prompt has opened the block
    """
    if (at := text.rfind(marks["close"])) >= 0:
        return at + len(marks["close"])
    return len(text) if opened or text.lstrip().startswith(marks.get("open", NEVER)) else 0


def _takes(function: Mapping[str, Any]) -> bool:
    """Return whether a tool takes arguments."""
    schema = function.get("parameters") or {}
    return bool(schema.get("properties") or schema.get("additionalProperties"))


def _why(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, RecursionError):
        return "the arguments are nested too deeply"
    return f"the call cannot be read: {one_line(cause if isinstance(cause, ValueError) else error)[:200]}"
