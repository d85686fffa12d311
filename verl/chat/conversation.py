"""Conversations as training rows: token ids and a loss mask that holds exactly what the assistant wrote.

Masks come from comparing token ids of renderings, never from searching text, and every row is verified: the audit of
the template (chat/template.py) is not trusted alone.

    prompt  P = ids(messages[:i], generation prompt)      what the engine sees before assistant turn i
    turn    E = ids(messages[:i+1])                        P ++ [ assistant tokens, end of turn ] ++ trailing
                                                                 ^ the loss mask               ^ never trained
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    as_ids,
    audit_template,
    is_prefix,
    keeps_text,
    refuse_dropped,
    refuse_unsupported,
    shared,
)
from verl.types import Sample, Segment


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training row. ids [t] int64 · mask [t] bool, True where the token is an assistant's own and trained on."""

    ids: np.ndarray
    mask: np.ndarray

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
) -> list[Rendered]:
    """Training rows of a conversation: one for an append-only template, else one per assistant turn, as at inference.

    Assistant turns before message `train_from`, without any prompt, or with weight 0 are context; with `last_only` all
    but the last are. RowRefused if no exact row exists.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(train_from, 1)]
    if not turns:
        raise RowRefused("no assistant turn after a prompt", f"{len(messages)} messages")
    turns = [i for i in (turns[-1:] if last_only else turns) if messages[i].get("weight") != 0]
    if not turns:
        raise RowRefused("all assistant turns are marked as not trained")
    refuse_unsupported(messages, audit, tools)
    r = Renderer(tokenizer, template_kwargs, tools, audit.spelling)
    try:
        if audit.append_only:
            return [_whole_row(r, messages, turns, audit)]
        return [_turn_row(r, messages, i, audit) for i in turns]
    except RenderError as exc:
        raise RowRefused("the chat template refuses the messages", str(exc)) from exc


def _whole_row(r: Renderer, messages: Sequence[Message], turns: Sequence[int], audit: TemplateAudit) -> Rendered:
    """One row for all turns; every trained span is verified to be what incremental rendering says it is."""
    text, ids = r.both(messages[: turns[-1] + 1], prompt=False)
    refuse_dropped(text, messages[: turns[-1] + 1], r.tools, turns)
    mask = np.zeros(len(ids), bool)
    for i in turns:
        prompt = r.ids(messages[:i], prompt=True)
        turn = ids if i == turns[-1] else r.ids(messages[: i + 1], prompt=False)
        end = _end_of_turn(turn, audit, i)
        if not is_prefix(turn[:end], ids):
            raise RowRefused("history is rewritten or its tokens merge across a turn boundary", f"message {i + 1}")
        if not is_prefix(prompt, turn[:end]):
            raise RowRefused("the prompt's tokens merge with the first of the answer", f"message {i + 1}")
        if str(messages[i].get("content")).lstrip().startswith("<"):
            _refuse_doubled(messages[i], *(r.text(messages[:n], prompt=n == i) for n in (i, i + 1)))
        mask[len(prompt) : end] = True
    return Rendered(ids, mask)


def _turn_row(r: Renderer, messages: Sequence[Message], i: int, audit: TemplateAudit) -> Rendered:
    """One assistant turn after its prompt, rendered as at inference (history as the template shows it then)."""
    asked, prompt = r.both(messages[:i], prompt=True)
    text, turn = r.both(messages[: i + 1], prompt=False)
    if not is_prefix(prompt, turn) or not keeps_text(messages[i], text[shared(asked, text) :]):
        refuse_dropped(asked, messages[:i], r.tools)
        return _appended_row(r, messages, i, prompt, audit)
    refuse_dropped(text, messages[: i + 1], r.tools, (i,))
    _refuse_doubled(messages[i], asked, text)
    end = _end_of_turn(turn, audit, i)
    if end <= len(prompt):
        raise RowRefused("an assistant turn without any token", f"message {i + 1}")
    positions = np.arange(len(turn))
    return Rendered(turn, (positions >= len(prompt)) & (positions < end))


def _appended_row(
    r: Renderer, messages: Sequence[Message], i: int, prompt: np.ndarray, audit: TemplateAudit
) -> Rendered:
    """The prompt with the message's own text and end of turn appended: what the engine saw when the model wrote it.

    For templates that drop part of a turn (R1: the reasoning) or open it in the prompt (`<think>`).
    """
    message = messages[i]
    if not isinstance(message.get("content"), str) or message.get("tool_calls") or message.get("reasoning_content"):
        raise RowRefused(
            "the template rewrites the assistant turn, and it is not plain text that could be appended to its prompt",
            f"message {i + 1}",
        )
    if not audit.ends_turn_with:
        raise RowRefused("the template rewrites the assistant turn and has no end-of-turn token", f"message {i + 1}")
    history, text = (r.text(messages[:i], prompt=p) for p in (False, True))
    answer = _after_opening(text[shared(history, text) :], message["content"])
    encoded = as_ids(r.tokenizer(text + answer, add_special_tokens=False))
    if not is_prefix(prompt, encoded) or len(encoded) == len(prompt):
        raise RowRefused("the prompt's tokens merge with the first of the answer", f"message {i + 1}")
    ids = np.concatenate([encoded, np.asarray(audit.ends_turn_with, np.int64)])
    return Rendered(ids, np.arange(len(ids)) >= len(prompt))


def _after_opening(opening: str, content: str) -> str:
    """`content` without the beginning that the generation prompt already holds (`<think>\\n`)."""
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
    """Refuse a turn whose first block (`<think>`) the prompt has opened and the rendering opens once more."""
    opened, content = re.search(r"<(\w+)>\s*\Z", prompt), str(message.get("content"))
    tag = f"<{opened.group(1)}>" if opened else ""
    if tag and content.lstrip().startswith(tag) and turn[shared(prompt, turn) :].count(tag) >= content.count(tag):
        fix = "give the block as reasoning_content, or without its first tag"
        raise RowRefused(f"the generation prompt opens {tag}, and so does the assistant message", fix)


def _end_of_turn(turn: np.ndarray, audit: TemplateAudit, i: int) -> int:
    """One past the end-of-turn token of the last turn in `turn`."""
    suffix = audit.ends_turn_with[-1:] + audit.trailing_ids
    if tuple(turn[len(turn) - len(suffix) :].tolist()) != suffix:
        raise RowRefused("an assistant turn does not end as the template's turns do", f"message {i + 1}")
    return len(turn) - len(audit.trailing_ids)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A template's end-of-turn token, and what it puts behind (a newline, a final eos): where a finished turn ends."""

    token: int | None = None
    trailing: tuple[int, ...] = ()

    def closed(self, sample: Sample) -> Sample:
        """The row as the template renders it: after an answer that ended by itself stands what the template puts there.

        A reward model is read at the last token of this, in `verl rm`, in RL and where others have trained it."""
        last = next((int(s.ids[-1]) for s in reversed(sample.segments) if len(s.ids)), None)
        if last is None or last != self.token or not self.trailing:
            return sample
        behind = Segment(ids=np.array(self.trailing, np.int64), source="env")
        return replace(sample, segments=(*sample.segments, behind))


NO_TURN_END = TurnEnd()


def turn_end(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> TurnEnd:
    """Of the tokenizer's own template; nothing where it has none."""
    if not tokenizer.chat_template:
        return NO_TURN_END
    audit = audit_template(tokenizer, template_kwargs)
    return TurnEnd(audit.ends_turn_with[-1] if audit.ends_turn_with else None, audit.trailing_ids)
