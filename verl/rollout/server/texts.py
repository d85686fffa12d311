"""The texts of requests and answers: prompts from text and messages, text and tool calls from tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.chat.messages import REASONING_KEYS, read_message
from verl.chat.parsing import FORMATS, TurnParser, format_of, opening_of
from verl.chat.template import RESERVED_KWARGS, Renderer, RowRefused, TemplateAudit, refuse_unsupported, render_prompt
from verl.rollout.base import Completion, DecodeFn
from verl.rollout.server.images import ChatImages, ChatPrompt
from verl.rollout.server.requests import ApiError, ChatBody, shown

LARGEST_NUMBER = 2.0**31  # largest number in template arguments: a template may repeat a text that many times
OPENING_TOKENS = 16  # last tokens of a prompt that are searched for the beginning of a thought
LEAST_LONGEST = 64  # characters of a token: unknown words and runs of spaces are one, whatever the vocabulary has
COMPARED = 1024  # beginnings of stop strings that are compared with the end of a text for each piece of it
HALF = "\ufffd"  # the decoder writes it for a character with missing bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A tokenizer and its chat template, with the conversions between text and tokens."""

    tokenizer: Any
    decode: DecodeFn
    """Converts ids to text without special tokens."""
    spell: DecodeFn
    """Converts ids to text with special tokens."""
    audit: TemplateAudit
    """The measured behaviour of the template."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    images: ChatImages | None = None
    """Reads the images of requests; None: the model reads text alone."""
    format: str = field(init=False)  # of tool calls, found in the chat template; Hermes if it is not found
    longest_token: int = field(init=False)  # its characters, at least `LEAST_LONGEST`

    def __post_init__(self) -> None:
        longest = max(LEAST_LONGEST, max(map(len, self.tokenizer.get_vocab()), default=0))
        object.__setattr__(self, "longest_token", longest)
        try:
            found = format_of(str(self.tokenizer.chat_template))
        except ValueError:
            found = "hermes"
        object.__setattr__(self, "format", found)

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:
        """Return the ids [P] int64 of a text."""
        return np.asarray(self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"], np.int64)

    def check_size(self, characters: int, param: str, max_context_tokens: int) -> None:
        """Raise ApiError for a text that is longer than a context of the longest tokens."""
        if characters > self.longest_token * max_context_tokens:
            message = (
                f"{param} has {characters} characters; the context of {max_context_tokens} tokens cannot hold them"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def render(self, body: ChatBody, max_context_tokens: int) -> ChatPrompt:
        """Return the messages with the generation prompt. Raise ApiError for input that the template drops or refuses,
        or that is longer than any context."""
        kwargs = {**self.template_kwargs, **body.chat_template_kwargs}
        if clash := sorted(RESERVED_KWARGS & kwargs.keys()):
            message = f"chat_template_kwargs={clash}: set by the server itself; leave them out"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
        if (beyond := _largest(body.chat_template_kwargs)) > LARGEST_NUMBER:
            message = f"chat_template_kwargs: {beyond:.3g} is beyond {LARGEST_NUMBER:.3g}, which no template needs"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")
        reads = self.images is not None
        messages, tools = [_message(m, i, reads) for i, m in enumerate(body.messages)], tools_of(body)
        renderer = Renderer(self.tokenizer, kwargs, tools, self.audit.spelling)
        try:
            refuse_unsupported(messages, self.audit, tools)
            written = [m if isinstance(m["content"], str) else {**m, "content": _text_parts(m)} for m in messages]
            if _characters([written, tools]) > self.longest_token * max_context_tokens:
                text = renderer.text(written, prompt=True)  # the template may leave out much of them
                self.check_size(len(text), "messages", max_context_tokens)
            if self.images is not None:
                return self.images.prompt(messages, renderer, self.audit)
            return ChatPrompt(render_prompt(self.tokenizer, messages, kwargs, tools, self.audit))
        except RowRefused as e:
            raise ApiError(400, f"messages: {e}", param="messages", code="unsupported_message") from None
        except ValueError as e:
            raise ApiError(400, str(e), param="messages", code="invalid_value") from None

    def answer(self, completion: Completion, *, include_stop: bool = False, spelled: bool = False) -> str:
        """Return the text of an answer, without the token or string that ended it unless `include_stop` is given, and
        with special tokens if `spelled`."""
        ids, decode = completion.ids.tolist(), self.spell if spelled else self.decode
        if include_stop or completion.stop_reason not in ("eos", "stop"):
            return decode(ids)
        if completion.stop is None:
            return decode(ids[:-1])
        text = decode(ids)
        at = text.find(completion.stop)  # the first: an earlier one would have ended the answer
        return text[:at] if at >= 0 else text

    def message(
        self, completion: Completion, text: str, prompt: np.ndarray, tools: Sequence[Any] | None
    ) -> dict[str, Any]:
        """Return the assistant's message of an answer: content, tool_calls and reasoning_content, if the model's own
        response template separates them. Otherwise tool calls are read in the template's format, if all are valid."""
        template = self.tokenizer.response_template
        if template is None:
            return (
                self._with_calls(completion, text, prompt, tools) if tools else {"role": "assistant", "content": text}
            )
        written = self.spell(completion.ids.tolist())
        try:
            found = self.tokenizer.parse_response(written, prefix=self.spell(prompt.tolist()), tools=tools)
        except (ValueError, KeyError, TypeError, RecursionError):
            # it does not match the response template: return the text unchanged
            return {"role": "assistant", "content": text}
        return _openai_message(found)

    def _with_calls(
        self, completion: Completion, text: str, prompt: np.ndarray, tools: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the message of an answer with its tool calls, or with its text if it has none that are all valid."""
        opening = opening_of(self.format, self.spell(prompt[-OPENING_TOKENS:].tolist()))
        turn = TurnParser(FORMATS[self.format]).parse(self.answer(completion, spelled=True), tools, opening)
        if not turn.calls:
            return {"role": "assistant", "content": text}
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
        found = {"content": turn.text or None, "reasoning_content": turn.reasoning, "tool_calls": calls}
        return _openai_message(found)

    def token(self, token_id: int, *, as_id: bool) -> dict[str, Any]:
        """Return a token's text and bytes."""
        text = f"token_id:{token_id}" if as_id else self.spell([token_id])
        return {"token": text, "bytes": list(text.encode())}


def _largest(value: Any) -> float:
    """Return the largest absolute number in a value of JSON."""
    if isinstance(value, Mapping | list):
        return max(map(_largest, value.values() if isinstance(value, Mapping) else value), default=0.0)
    return min(abs(value), 1e300) if isinstance(value, int | float) else 0.0


def tools_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """Return the tools that the model is shown."""
    if body.tool_choice not in ("auto", "none"):
        message = f"tool_choice={shown(body.tool_choice)}: a call cannot be forced here; auto and none are taken"
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    return body.tools if body.tools and body.tool_choice == "auto" else None


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value, without names of fields."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, parts))


def _text_parts(message: Mapping[str, Any]) -> list[Any]:
    """Return the content of a message without its images."""
    return [part for part in message["content"] if isinstance(part.get("text"), str)]


def _message(given: Mapping[str, Any], i: int, reads_images: bool) -> dict[str, Any]:
    """Return a message of a request as templates expect it. Raise ApiError if it is not a message, or has content other
    than text though the model reads text alone."""
    try:
        message = read_message(given, f"messages[{i}]", filled=False)
    except ValueError as e:
        raise ApiError(400, str(e), param="messages", code="invalid_value") from None
    if not isinstance(message["content"], str) and not reads_images:
        reason = f"messages[{i}]: content holds more than text, which this model does not take"
        raise ApiError(400, reason, param="messages", code="unsupported_message")
    return message


def _openai_message(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed message in OpenAI's shape."""
    message: dict[str, Any] = {"role": "assistant", "content": found.get("content")}
    if reasoning := next((found[key] for key in REASONING_KEYS if found.get(key)), None):
        message["reasoning_content"] = reasoning
    calls = [call.get("function", call) for call in found.get("tool_calls") or ()]
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": _sayable(call.get("name")), "arguments": _json(call.get("arguments", {}))},
            }
            for call in calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _json(arguments: Any) -> str:
    return _sayable(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _sayable(text: Any) -> Any:
    """Return a text with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode(errors="backslashreplace").decode() if isinstance(text, str) else text


class Piecewise:
    """The text of an answer in pieces, from its tokens. All pieces together are `Texts.answer`: text that may be half a
    character or the beginning of a stop string is not returned yet."""

    def __init__(self, decode: DecodeFn, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._from = self._read = 0  # tokens from `_from` are decoded together; those before `_read` are in the text
        self._text, self._sent = "", 0

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is certain now and was not returned yet."""
        self._ids += ids
        before, now = self._decode(self._ids[self._from : self._read]), self._decode(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith(HALF):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self._take(len(self._text) - self._held_back())

    def rest(self, whole: str) -> str:
        """Return the part of the whole answer that was not returned yet."""
        piece, self._sent = whole[self._sent :], len(whole)
        return piece

    def _held_back(self) -> int:
        """Return the number of characters at the end that may begin a stop string; with many or long stop strings, the
        length of the longest one less one."""
        longest = max(map(len, self._stops), default=0)
        if longest * len(self._stops) > COMPARED:
            return min(len(self._text), longest - 1)
        tail = self._text[max(0, len(self._text) - longest) :]
        return max(
            (n for n in range(1, len(tail) + 1) if any(stop.startswith(tail[len(tail) - n :]) for stop in self._stops)),
            default=0,
        )

    def _take(self, end: int) -> str:
        """Return the text up to `end` that was not returned yet."""
        piece = self._text[self._sent : end] if end > self._sent else ""
        self._sent += len(piece)
        return piece
