"""The JSON of answers, whole and as a stream of chunks, of each endpoint: OpenAI's completions and chat, and vLLM's
endpoint with token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np

from verl.rollout.base import Completion, Scores
from verl.rollout.server.requests import GenerationCall
from verl.rollout.server.texts import Piecewise, Texts

FINISH: Mapping[str, str] = MappingProxyType(
    {"eos": "stop", "stop": "stop", "length": "length", "context_full": "length", "abort": "abort"}
)


@dataclass(slots=True)
class Answer:
    """One answer of a stream, as far as it was sent."""

    prompt: np.ndarray
    text: Piecewise
    """Its text, in the pieces that can be sent."""
    sent: int = 0
    """The number of tokens that were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The JSON of one endpoint. Subclasses define the content of a choice, whole and in pieces."""

    call: GenerationCall
    texts: Texts
    name: str
    created: int
    weights: dict[int, str]  # names of the weights by version, the live one last; others have the version as name
    kinds: ClassVar[tuple[str, str]] = ("", "")  # whole, chunk
    prefix: ClassVar[str] = ""

    def whole(self, completions: Sequence[Completion], scores: Sequence[Scores] = ()) -> dict[str, Any]:
        """Return a whole answer. `scores` are those of each prompt, if they were requested."""
        prompts = self._prompts()
        choices = [self.choice(i, prompt, c) for i, (prompt, c) in enumerate(zip(prompts, completions, strict=True))]
        return {**self.envelope(0), "choices": choices, "usage": self.usage(completions)}

    def encoded(self, completions: Sequence[Completion], scores: Sequence[Scores] = ()) -> bytes:
        """Return the JSON of `whole`, encoded in parts: encoding all at once would block every other thread."""
        found = self.whole(completions, scores)
        return msgspec.json.encode({**found, "choices": [_raw(choice) for choice in found["choices"]]})

    def chunk(self, choices: Sequence[Any], usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a chunk of a stream with these choices."""
        found = {**self.envelope(1), "choices": list(choices)}
        return {**found, "usage": usage} if self.call.include_usage else found

    def envelope(self, kind: int) -> dict[str, Any]:
        """Return the fields around the choices of a whole answer (kind 0) or of a chunk (1)."""
        head = {"id": f"{self.prefix}{self.call.request_id}", "object": self.kinds[kind]}
        return {**head, "created": self.created, "model": self.name}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the numbers of tokens."""
        wanted, drawn = sum(map(len, self.call.prompts)), sum(len(c.ids) for c in completions)
        cached = {"cached_tokens": sum(c.cached_tokens for c in completions)}
        tokens = {"prompt_tokens": wanted, "completion_tokens": drawn, "total_tokens": wanted + drawn}
        return {**tokens, "prompt_tokens_details": cached}

    def answers(self) -> list[Answer]:
        """Return the answers of a stream, of which nothing was sent yet."""
        return [Answer(p, Piecewise(self.texts.decode, self.call.sampling.stop)) for p in self._prompts()]

    def opening(self, i: int, answer: Answer) -> dict[str, Any] | None:
        """Return the choice that is sent before the first token, or None."""
        return None

    def choice(self, i: int, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        """Return the choice of a whole answer: number i, of this prompt."""
        raise NotImplementedError

    def piece(self, i: int, answer: Answer, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any] | None:
        """Return a chunk's choice for new tokens [t], or None if nothing can be sent yet."""
        text = answer.text.add(ids.tolist())
        answer.sent += len(ids)
        if not text and not self.call.logprobs and not self.call.with_ids:
            return None
        return {"index": i, **self.content(text, ids, logprobs), "finish_reason": None, **self._ids(ids)}

    def content(self, text: str, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
        """Return the text and the log-probs of tokens, as a choice has them."""
        raise NotImplementedError

    def last(self, i: int, answer: Answer, completion: Completion) -> dict[str, Any]:
        """Return the last chunk's choice: the tokens that were not sent, and why the answer ended."""
        raise NotImplementedError

    def _prompts(self) -> list[np.ndarray]:
        return [prompt for prompt in self.call.prompts for _ in range(self.call.n)]

    def _end(self, completion: Completion) -> dict[str, Any]:
        """Return the reasons of the end of an answer."""
        by_id = int(completion.ids[-1]) if completion.stop_reason == "stop" and completion.stop is None else None
        return {"finish_reason": FINISH[completion.stop_reason], "stop_reason": completion.stop or by_id}

    def _ids(self, ids: np.ndarray, completion: Completion | None = None) -> dict[str, Any]:
        """Return the fields that `return_token_ids` adds."""
        if not self.call.with_ids:
            return {}
        return {"token_ids": ids.tolist()} | ({"weight_versions": self._versions(completion)} if completion else {})

    def _versions(self, completion: Completion) -> list[dict[str, Any]]:
        """Return the spans of tokens that each version of the weights has sampled."""
        spans = ((self.weights.get(version, str(version)), start, end) for version, start, end in completion.spans)
        return [{"version": name, "start": start, "end": end} for name, start, end in spans]

    def _content(self, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any] | None:
        """Return the log-probs of tokens in the shape of chat."""
        if not self.call.logprobs:
            return None
        report = [self.texts.token(i, as_id=self.call.tokens_as_ids) for i in ids.tolist()]
        found = [
            {**token, "logprob": x, "top_logprobs": []} for token, x in zip(report, logprobs.tolist(), strict=True)
        ]
        return {"content": found}


class CompletionForm(Form):
    """OpenAI's completions. With `prompt_logprobs` each choice has the scores of its prompt, as in vLLM."""

    kinds = ("text_completion", "text_completion")
    prefix = "cmpl-"

    def whole(self, completions: Sequence[Completion], scores: Sequence[Scores] = ()) -> dict[str, Any]:
        found = Form.whole(self, completions, scores)
        for i, choice in enumerate(found["choices"] if scores else ()):
            of = i // self.call.n
            choice["prompt_logprobs"] = prompt_logprobs(self.call.prompts[of], scores[of])
        return found

    def choice(self, i: int, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        text = self.texts.answer(completion, include_stop=self.call.include_stop)
        wanted = {"prompt_token_ids": prompt.tolist()} if self.call.with_ids else {}
        return {**self._ended(i, text, completion), **wanted}

    def last(self, i: int, answer: Answer, completion: Completion) -> dict[str, Any]:
        text = answer.text.rest(self.texts.answer(completion, include_stop=self.call.include_stop))
        return self._ended(i, text, completion, answer.sent)

    def _ended(self, i: int, text: str, completion: Completion, since: int = 0) -> dict[str, Any]:
        ids, logprobs = completion.ids[since:], completion.logprobs[since:]
        found = {"index": i, **self.content(text, ids, logprobs)}
        return {**found, **self._end(completion), **self._ids(ids, completion)}

    def content(self, text: str, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
        if not self.call.logprobs:
            return {"text": text, "logprobs": None}
        tokens = [self.texts.token(i, as_id=self.call.tokens_as_ids)["token"] for i in ids.tolist()]
        starts = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
        columns = {"tokens": tokens, "token_logprobs": logprobs.tolist(), "top_logprobs": None, "text_offset": starts}
        return {"text": text, "logprobs": columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm(Form):
    """OpenAI's chat. If an answer may contain tool calls, a stream sends it whole, at its end."""

    tools: Sequence[Any] | None = None
    """The tools that the model was shown."""
    kinds = ("chat.completion", "chat.completion.chunk")
    prefix = "chatcmpl-"

    def whole(self, completions: Sequence[Completion], scores: Sequence[Scores] = ()) -> dict[str, Any]:
        found = Form.whole(self, completions, scores)
        return {**found, "prompt_token_ids": self.call.prompts[0].tolist()} if self.call.with_ids else found

    def opening(self, i: int, answer: Answer) -> dict[str, Any] | None:
        return {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, i: int, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        message, end = self._message(prompt, completion)
        content = self._content(completion.ids, completion.logprobs)
        return {"index": i, "message": message, "logprobs": content, **end, **self._ids(completion.ids, completion)}

    def piece(self, i: int, answer: Answer, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any] | None:
        if self.tools or self.texts.tokenizer.response_template is not None:
            return None
        return Form.piece(self, i, answer, ids, logprobs)

    def content(self, text: str, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": self._content(ids, logprobs)}

    def last(self, i: int, answer: Answer, completion: Completion) -> dict[str, Any]:
        message, end = self._message(answer.prompt, completion)
        ids, logprobs = completion.ids[answer.sent :], completion.logprobs[answer.sent :]
        delta = {key: value for key, value in message.items() if key != "role" and value is not None}
        if answer.sent:
            delta = {"content": answer.text.rest(message["content"])}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        found = {"index": i, "delta": delta, "logprobs": self._content(ids, logprobs)}
        return {**found, **end, **self._ids(ids, completion)}

    def _message(self, prompt: np.ndarray, completion: Completion) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the message of an answer, and the reasons of its end."""
        text, end = self.texts.answer(completion, include_stop=self.call.include_stop), self._end(completion)
        message = self.texts.message(completion, text, prompt, self.tools)
        if message.get("tool_calls") and end["finish_reason"] == "stop":
            end["finish_reason"] = "tool_calls"
        return message, end


class _Token(msgspec.Struct):
    """A sampled token in vLLM's shape, without its text, which would cost more than the rest of the answer."""

    token: str
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: tuple[()] = ()


class _Known(msgspec.Struct):
    """A token of a prompt, or one of the most likely tokens at its position, in vLLM's shape."""

    logprob: float
    rank: int | None = None
    decoded_token: None = None


class TokenForm(Form):
    """vLLM's /inference/v1/generate: token ids in, token ids out."""

    def whole(self, completions: Sequence[Completion], scores: Sequence[Scores] = ()) -> dict[str, Any]:
        score = scores[0] if scores else None
        return {**Form.whole(self, completions), "prompt_logprobs": prompt_logprobs(self.call.prompts[0], score)}

    def envelope(self, kind: int) -> dict[str, Any]:
        wanted = {"prompt_token_ids": self.call.prompts[0].tolist()} if self.call.with_ids and not kind else {}
        return {"request_id": self.call.request_id, "created": self.created, "model": self.name, **wanted}

    def choice(self, i: int, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        return self._ended(i, completion)

    def piece(self, i: int, answer: Answer, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any] | None:
        answer.sent += len(ids)
        found = {"index": i, "token_ids": ids.tolist(), "logprobs": self._content(ids, logprobs)}
        live = next(reversed(self.weights.values()), None)  # a client can check it before the end
        return {**found, "finish_reason": None, **({} if live is None else {"weight_version": live})}

    def last(self, i: int, answer: Answer, completion: Completion) -> dict[str, Any]:
        return self._ended(i, completion, answer.sent)

    def _ended(self, i: int, completion: Completion, since: int = 0) -> dict[str, Any]:
        ids, logprobs = completion.ids[since:], completion.logprobs[since:]
        found = {"index": i, "token_ids": ids.tolist(), "logprobs": self._content(ids, logprobs)}
        return {**found, **self._end(completion), "weight_versions": self._versions(completion)}

    def _content(self, ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any] | None:
        if not self.call.logprobs:
            return None
        found = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return {"content": [_Token(f"token_id:{i}", i, x) for i, x in found]}


def prompt_logprobs(prompt: np.ndarray, scores: Scores | None) -> list[Any] | None:
    """Return the scores of a prompt in vLLM's shape: None for the first token, then {id: {logprob, rank,
    decoded_token}} of the most likely tokens and of the token itself, with its rank if it is one of them. They are at
    temperature 1."""
    if scores is None:
        return None
    rows: list[Any] = [None]
    columns = (x.tolist() for x in (prompt[1:], scores.logprobs, scores.top_ids, scores.top_logprobs))
    for token, logprob, ids, best in zip(*columns, strict=True):
        known = {str(i): _Known(x, rank) for rank, (i, x) in enumerate(zip(ids, best, strict=True), 1)}
        known.setdefault(str(token), _Known(logprob))
        rows.append(_raw(known))
    return rows


def _raw(part: Any) -> msgspec.Raw:
    """Return a part of an answer that is encoded already."""
    return msgspec.Raw(msgspec.json.encode(part))
