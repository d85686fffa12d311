"""Conversations as training rows: token ids, and a loss mask that covers exactly the tokens of the assistant.

Masks are computed by comparing the token ids of renderings, never by searching in text, and every row is verified
by itself, in addition to the audit of the template (chat/template.py).

    prompt   P = ids(messages[:i], generation prompt)        the engine's input for assistant turn i
    turn     E = ids(messages[:i+1])
    P ++ [ assistant tokens, end of turn ] ++ trailing
           ^ the loss mask                  ^ never trained

If a template has no token that ends a turn, the special token that begins the next turn is used as the end
(GLM-4.5: `<|user|>`); after the last turn it is the end-of-sequence token at which inference stops. Each turn is then
a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.chat.template import (
    Message,
    Renderer,
    RenderError,
    RowRefused,
    TemplateAudit,
    Tokenizer,
    Tool,
    audit_template,
    is_prefix,
    keeps_text,
    refuse_dropped,
    refuse_unsupported,
    shared,
)
from verl.types import Sample, Segment, TaskImage


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training row."""

    ids: np.ndarray
    """[t] int64."""
    mask: np.ndarray
    """[t] bool, True where the token is an assistant's own and trained on."""
    unthinking: bool = False
    """True if the row's prompt was rendered with enable_thinking=false."""
    last: int = -1
    """The index of the last message in it; -1 if it is not made of messages."""
    images: tuple[TaskImage, ...] = ()
    """Its images, once their tokens are in the place of their placeholders."""

    def __post_init__(self) -> None:
        assert self.ids.shape == self.mask.shape and self.ids.ndim == 1, f"{self.ids.shape} ids, {self.mask.shape} mask"


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    audit: TemplateAudit,
    template_kwargs: Mapping[str, Any],
    *,
    tools: Sequence[Tool] | None = None,
    train_from: int = 0,
    last_only: bool = False,
    may_skip_thinking: bool = False,
    renderer: Callable[..., Renderer] = Renderer,
) -> list[Rendered]:
    """Return the training rows of a conversation: one row if the template is append-only, else one row per assistant
    turn, each with the prompt that inference would have.

    Assistant turns are context, not trained, if they are before message `train_from`, have no prompt, or have weight 0;
    with `last_only`, only the last turn is trained. Raise RowRefused if no exact row exists.
    may_skip_thinking: if a turn has no reasoning but its generation prompt opens a reasoning block, render it with
        enable_thinking=false, if the template supports that
    renderer: the class of the renderer
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(train_from, 1)]
    if not turns:
        raise RowRefused("no assistant turn after a prompt", f"{len(messages)} messages")
    turns = [i for i in (turns[-1:] if last_only else turns) if messages[i].get("weight") != 0]
    if not turns:
        raise RowRefused("all assistant turns are marked as not trained")
    refuse_unsupported(messages, audit, tools)
    r = renderer(tokenizer, template_kwargs, tools, audit.spelling)

    def each() -> list[Rendered]:
        return [replace(row(r, messages, i, audit), last=i) for i in turns]

    try:
        row = _row_without_thinking if may_skip_thinking and audit.thinking_is_optional else _turn_row
        if not audit.append_only or not all(audit.ending(messages[i])[0] for i in turns):
            return each()
        try:
            return [replace(_whole_row(r, messages, turns, audit), last=turns[-1])]
        except RowRefused as whole:  # a thought that later turns drop, or tokens that merge between two turns
            try:
                return each()
            except RowRefused:
                raise whole from None
    except RenderError as exc:
        raise RowRefused("the chat template refuses the messages", str(exc)) from exc


def _whole_row(r: Renderer, messages: Sequence[Message], turns: Sequence[int], audit: TemplateAudit) -> Rendered:
    """Return one row for all turns, after checking that every trained span equals the one of the turn rendered by
    itself."""
    text, ids = r.both(messages[: turns[-1] + 1], prompt=False)
    refuse_dropped(r, text, messages[: turns[-1] + 1], audit, turns, prompt=False)
    mask = np.zeros(len(ids), bool)
    for i in turns:
        prompt = r.ids(messages[:i], prompt=True)
        turn = ids if i == turns[-1] else r.ids(messages[: i + 1], prompt=False)
        end = _end_of_turn(turn, messages[i], audit, i)
        if not is_prefix(turn[:end], ids):
            raise RowRefused("history is rewritten or its tokens merge across a turn boundary", f"message {i + 1}")
        if not is_prefix(prompt, turn[:end]):
            raise RowRefused("the prompt's tokens merge with the first of the answer", f"message {i + 1}")
        if "</" in str(messages[i].get("content")):
            _refuse_doubled(messages[i], *(r.text(messages[:n], prompt=n == i) for n in (i, i + 1)))
        if messages[i].get("tool_calls") and messages[i].get("content"):
            _refuse_misplaced_text(messages[i], r.added_text(messages, i, prompt=True), i)
        mask[len(prompt) : end] = True
    return Rendered(ids, mask)


def _turn_row(r: Renderer, messages: Sequence[Message], i: int, audit: TemplateAudit) -> Rendered:
    """Return the row of assistant turn i after its prompt, with the history as the template renders it at that turn."""
    wanted, prompt = r.both(messages[:i], prompt=True)
    text, turn = r.both(messages[: i + 1], prompt=False)
    if not is_prefix(prompt, turn) or not keeps_text(messages[i], text[shared(wanted, text) :]):
        refuse_dropped(r, wanted, messages[:i], audit, prompt=True)
        return _appended_row(r, messages, i, prompt, audit)
    refuse_dropped(r, text, messages[: i + 1], audit, (i,), prompt=False)
    _refuse_doubled(messages[i], wanted, text)
    if messages[i].get("tool_calls") and messages[i].get("content"):
        _refuse_misplaced_text(messages[i], text[shared(wanted, text) :], i)
    end = _end_of_turn(turn, messages[i], audit, i)
    if end <= len(prompt):
        raise RowRefused("an assistant turn without any token", f"message {i + 1}")
    if not audit.ending(messages[i])[0]:
        turn = np.append(turn, _end_by_the_next(messages, i, audit))
        end = len(turn)
    positions = np.arange(len(turn))
    return Rendered(turn, (positions >= len(prompt)) & (positions < end))


def _end_by_the_next(messages: Sequence[Message], i: int, audit: TemplateAudit) -> int:
    """Return the token that ends turn i of a template without an end token of its own."""
    role = messages[i + 1]["role"] if i + 1 < len(messages) else None
    end = audit.next_turns.get(role, audit.last_end) if role else audit.last_end
    if end is None:
        fix = "Fix: eos_token in tokenizer_config.json"
        raise RowRefused(f"the template ends turns with no token, and the tokenizer has no eos_token. {fix}")
    return end


def _row_without_thinking(r: Renderer, messages: Sequence[Message], i: int, audit: TemplateAudit) -> Rendered:
    """Return the row of `_turn_row`. It may refuse a turn without reasoning because the prompt opens a reasoning block:
    then return the row rendered with enable_thinking=false, if that is exactly the prompt followed by the turn."""
    try:
        return _turn_row(r, messages, i, audit)
    except RowRefused:
        message = messages[i]
        thought = message.get("reasoning_content") or "<think>" in str(message.get("content"))
        if thought or "</think>" in str(message.get("content")) or "enable_thinking" in r.template_kwargs:
            raise
        r = replace(r, template_kwargs={**r.template_kwargs, "enable_thinking": False})
        prompt, turn = r.turn(messages, i)
        if not is_prefix(prompt, turn) or not keeps_text(message, r.added_text(messages, i, prompt=True)):
            raise
        return replace(_turn_row(r, messages, i, audit), unthinking=True)


def _appended_row(
    r: Renderer, messages: Sequence[Message], i: int, prompt: np.ndarray, audit: TemplateAudit
) -> Rendered:
    """Return the prompt with the message's own text and an end of turn appended, which is what the engine would have
    sampled.

    It serves templates that drop part of a turn (R1: the reasoning) or that open it in the prompt (`<think>`).
    """
    message = messages[i]
    if (row := _row_behind_its_prompt(r, messages, i, prompt, audit)) is not None:
        return row
    if not isinstance(message.get("content"), str) or message.get("tool_calls") or message.get("reasoning_content"):
        raise RowRefused(
            "the template rewrites the assistant turn, and it is not plain text that could be appended to its prompt",
            f"message {i + 1}",
        )
    history, text = (r.text(messages[:i], prompt=p) for p in (False, True))
    answer = _after_opening(text[shared(history, text) :], message["content"])
    encoded = r.encode(text + answer)
    if not is_prefix(prompt, encoded) or len(encoded) == len(prompt):
        raise RowRefused("the prompt's tokens merge with the first of the answer", f"message {i + 1}")
    end = audit.ends_turn_with or (_end_by_the_next(messages, i, audit),)
    ids = np.concatenate([encoded, np.asarray(end, np.int64)])
    return Rendered(ids, np.arange(len(ids)) >= len(prompt))


def _row_behind_its_prompt(
    r: Renderer, messages: Sequence[Message], i: int, prompt: np.ndarray, audit: TemplateAudit
) -> Rendered | None:
    """Return the engine's prompt followed by the turn as it is rendered after a history without reasoning; None if that
    rendering lacks text of the turn too. It serves templates that remove reasoning from the history once this turn is
    present (gpt-oss: the reasoning of calls before an answer)."""
    bare = [*map(_without_thought, messages[:i]), messages[i]]
    if bare == [*messages[: i + 1]]:
        return None
    before, turn = r.turn(bare, i)
    whole = is_prefix(before, turn) and keeps_text(messages[i], r.added_text(bare, i, prompt=True))
    if not whole or not len(prompt) or before[-1] != prompt[-1]:
        return None
    row = _turn_row(r, bare, i, audit)
    ids = np.concatenate([prompt, row.ids[len(before) :]])
    mask = np.concatenate([np.zeros(len(prompt), bool), row.mask[len(before) :]])
    return Rendered(ids, mask)


def _without_thought(message: Message) -> Message:
    """Return the message without its reasoning. In an assistant turn with tool calls, its text is removed too, since
    such text counts as reasoning."""
    if message["role"] != "assistant":
        return message
    kept = {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
    return {**kept, "content": ""} if message.get("tool_calls") else kept


def _refuse_misplaced_text(message: Message, added: str, i: int) -> None:
    """Raise RowRefused if the template writes the text of a turn after its tool calls, where no model writes it (Gemma
    4)."""
    squeezed, text = "".join(added.split()), "".join(str(message["content"]).split())
    name = str(message["tool_calls"][-1].get("function", {}).get("name"))
    if name not in squeezed[squeezed.find(text) + len(text) :]:
        raise RowRefused("text beside a tool call, which this chat template writes behind the call", f"message {i + 1}")


def _after_opening(opening: str, content: str) -> str:
    """Return `content` without the beginning that the generation prompt already holds (`<think>\\n`)."""
    for size in range(min(len(opening), len(content)), 0, -1):
        if re.match(r"\s*<\w+>", content[:size]) and opening.endswith(content[:size]):
            return content[size:]
    opened = re.search(r"<(\w+)>\s*\Z", opening)
    if opened:
        tag, rest = opened.group(0).strip(), content.lstrip()
        if rest.startswith(tag):
            return rest[len(tag) :].lstrip()
        if f"</{opened.group(1)}>" not in content:
            raise RowRefused(f"the generation prompt opens {tag}, and the assistant message never closes it")
    closed = re.search(r"</(\w+)>\s*\Z", opening)
    if closed and f"<{closed.group(1)}>" in content:
        raise RowRefused(f"the generation prompt closes <{closed.group(1)}>, and the assistant message opens it again")
    return content


def _refuse_doubled(message: Message, prompt: str, turn: str) -> None:
    """Raise RowRefused if the prompt opens a block (`<think>`) that the turn's content closes, and the template closes
    it a second time."""
    opened, content = re.search(r"<(\w+)>\s*\Z", prompt), str(message.get("content"))
    tag, close = (f"<{opened.group(1)}>", f"</{opened.group(1)}>") if opened else ("", "")
    if not close or close not in content or message.get("reasoning_content"):
        return
    if turn[shared(prompt, turn) :].count(close) > content.count(close):
        fix = "give the block as reasoning_content"
        raise RowRefused(f"the generation prompt opens {tag}, and so does the assistant message", fix)


def _end_of_turn(turn: np.ndarray, message: Message, audit: TemplateAudit, i: int) -> int:
    """Return the index after the end-of-turn token of the last turn in `turn`; the length of `turn` if turns have no
    such token."""
    end, trailing = audit.ending(message)
    suffix = end[-1:] + trailing
    if tuple(turn[len(turn) - len(suffix) :].tolist()) != suffix:
        raise RowRefused("an assistant turn does not end as the template's turns do", f"message {i + 1}")
    return len(turn) - len(trailing)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end-of-turn token of a template, and the ids that it writes after that token (a newline, a final eos)."""

    token: int | None = None
    trailing: tuple[int, ...] = ()

    def closed(self, sample: Sample) -> Sample:
        """Return the row with the template's trailing ids appended if its answer ended with the end-of-turn token.

        A reward model reads its score at the last token of this row (in `verl rm`, in RL, and in published reward
        models).
        """
        last = next((int(s.ids[-1]) for s in reversed(sample.segments) if len(s.ids)), None)
        if last is None or last != self.token or not self.trailing:
            return sample
        behind = Segment(ids=np.array(self.trailing, np.int64), source="env")
        return replace(sample, segments=(*sample.segments, behind))


NO_TURN_END = TurnEnd()


def turn_end(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> TurnEnd:
    """Return the `TurnEnd` of the tokenizer's own chat template; an empty one if it has no template."""
    if not tokenizer.chat_template:
        return NO_TURN_END
    audit = audit_template(tokenizer, template_kwargs)
    return TurnEnd(audit.ends_turn_with[-1] if audit.ends_turn_with else None, audit.trailing_ids)
