"""Chat templates: load a tokenizer, render prompts, audit what a template does, and render conversations with loss masks.

A template is a program of the model's author. What is assumed of it is measured once (`audit_template`) and verified on
every row: masks come from comparing token ids of renderings, never from searching text (pitfalls 11 and 12).

    prompt  P = ids(messages[:i], generation prompt)      what the engine sees before assistant turn i
    turn    E = ids(messages[:i+1])                        P ++ [ assistant tokens, end of turn ] ++ trailing
                                                                 ^ the loss mask               ^ never trained
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
TrainOn = Literal["all_assistant", "last_assistant"]

# Arguments of apply_chat_template that this module sets itself.
RESERVED_KWARGS = frozenset(
    {
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


class RenderError(ValueError):
    """The template refused these messages (no system role, roles must alternate, a field is missing ...)."""


class RowRefused(ValueError):
    """This conversation has no exact training row. `reason` is the same for all rows of a kind, so it can be counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training row. ids [t] int64 · mask [t] bool, True where the token is an assistant's own and trained on."""

    ids: np.ndarray
    mask: np.ndarray

    def __post_init__(self) -> None:
        assert self.ids.shape == self.mask.shape and self.ids.ndim == 1, f"{self.ids.shape} ids, {self.mask.shape} mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateAudit:
    """What a chat template was measured to do. `reasons` explains every flag that is not what one hopes for.

    prefix_stable        rendering more messages never changes the tokens of the earlier ones
    append_only          and a prompt with its answer appended is what the template renders: one row per conversation
    generation_prompt_ids  what add_generation_prompt adds
    ends_turn_with       the ids after assistant content up to its special end-of-turn token, trained; () if it has none
    trailing_ids         what the template puts after that (a newline, a final eos), not trained
    """

    prefix_stable: bool
    append_only: bool
    generation_prompt_ids: tuple[int, ...]
    ends_turn_with: tuple[int, ...]
    trailing_ids: tuple[int, ...]
    supports_system: bool
    supports_tools: bool
    supports_tool_calls: bool
    reasons: tuple[str, ...] = ()


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template_file: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder; `chat_template_file` replaces its template."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"model.path={str(path)!r} is not a folder. Fix: give a local Hugging Face folder"
            " (`hf download NAME --local-dir DIR` makes one)"
        )
    from transformers import AutoTokenizer  # takes seconds and pulls torch in

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as exc:
        found = ", ".join(sorted(p.name for p in folder.iterdir() if "token" in p.name or "vocab" in p.name))
        raise ValueError(
            f"model.path={str(path)!r} has no tokenizer that can be loaded (tokenizer files there: {found or 'none'};"
            f" {type(exc).__name__}: {_one_line(exc)}). Fix: copy tokenizer.json and tokenizer_config.json of the model"
            " into the folder, or set model.tokenizer_path"
        ) from exc
    if chat_template_file is not None:
        try:
            tokenizer.chat_template = Path(chat_template_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ValueError(f"model.chat_template={chat_template_file!r} cannot be read: {_one_line(exc)}") from exc
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {str(path)!r} has no chat template, so messages cannot become a prompt."
            " Fix: model.chat_template=FILE (a Jinja file), or use an instruction-tuned model"
        )


@dataclass(frozen=True, slots=True)
class _Renderer:
    """One tokenizer with its template arguments: messages -> text or ids."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] | None = None

    def __post_init__(self) -> None:
        clash = sorted(RESERVED_KWARGS & self.template_kwargs.keys())
        if clash:
            raise ValueError(f"model.template_kwargs={clash}: set by verl itself. Fix: remove them")

    def text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        out = self._apply(messages, prompt=prompt, tokenize=False)
        assert isinstance(out, str), f"rendered text is a {type(out).__name__}"
        return out

    def ids(self, messages: Sequence[Message], *, prompt: bool) -> np.ndarray:
        return _as_ids(self._apply(messages, prompt=prompt, tokenize=True))

    def turn(self, messages: Sequence[Message], i: int) -> tuple[np.ndarray, np.ndarray]:
        """(P, E) of assistant turn i: its prompt, and everything up to and including it."""
        return self.ids(messages[:i], prompt=True), self.ids(messages[: i + 1], prompt=False)

    def _apply(self, messages: Sequence[Message], *, prompt: bool, tokenize: bool) -> Any:
        if not messages:
            raise RenderError("no messages to render")
        try:
            return self.tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in self.tools] if self.tools else None,
                add_generation_prompt=prompt,
                tokenize=tokenize,
                return_dict=tokenize,
                **self.template_kwargs,
            )
        except (jinja2.TemplateError, TypeError) as exc:  # TypeError: "..." + None inside a template
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise RenderError(
                f"the chat template refuses messages with roles [{roles}]: {type(exc).__name__}: {_one_line(exc)}"
            ) from exc


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Tool] | None = None,
) -> np.ndarray:
    """[P] int64: the messages with the generation prompt, tokenised once."""
    return _Renderer(tokenizer, template_kwargs, tools).ids(messages, prompt=True)


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The text view of a rendering: to show, never to tokenise again."""
    return _Renderer(tokenizer, template_kwargs, tools).text(messages, prompt=add_generation_prompt)


# ---- audit -----------------------------------------------------------------------------------------------------------

_USER = {"role": "user", "content": "What is six times seven?"}
_AGAIN = {"role": "user", "content": "And minus two?"}
_PLAIN = {"role": "assistant", "content": "It is 42."}
_THINK = {"role": "assistant", "content": "<think>\nsix sevens, forty-two\n</think>\n\nIt is 42."}
_SYSTEM = {"role": "system", "content": "Reply as a quokka."}
_FUNCTION = {"name": "quokka_sum", "arguments": {"a": 6}}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": _FUNCTION}],
}
_ANSWER = {"role": "tool", "name": "quokka_sum", "tool_call_id": "abcdef123", "content": "wombat 42"}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}}
_TOOL = {"type": "function", "function": {"name": "quokka_sum", "description": "Adds.", "parameters": _PARAMETERS}}


def audit_template(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> TemplateAudit:
    """Measure the tokenizer's chat template with a few small conversations. Costs some milliseconds."""
    plain = _Renderer(tokenizer, template_kwargs or {})
    with_tools = _Renderer(tokenizer, template_kwargs or {}, (_TOOL,))
    reasons: list[str] = []
    generation_prompt = _after_common(plain.ids([_USER], prompt=False), plain.ids([_USER], prompt=True))
    if not len(generation_prompt):
        reasons.append("there is no generation prompt: a prompt looks the same with and without it")
    ending, trailing = _turn_ending(plain, reasons)
    system = _supports_role(plain, [_SYSTEM, _USER], "system", reasons)
    tools = _shows_tool(lambda: with_tools.text([_USER], prompt=True), "tool definitions", reasons)
    caller = with_tools if tools else plain
    called: list[dict[str, Any]] = [_USER, _CALL]
    calls = _shows_tool(
        lambda: _tail(caller.text([_USER], prompt=False), caller.text(called, prompt=False)), "tool calls", reasons
    ) and _supports_role(caller, [*called, _ANSWER], "tool", reasons)

    probes: dict[str, list[dict[str, Any]]] = {
        "plain turns": [_USER, _PLAIN, _AGAIN, _PLAIN],
        "<think> blocks": [_USER, _THINK, _AGAIN, _THINK],
    }
    if system:
        probes["a system message"] = [_SYSTEM, _USER, _PLAIN, _AGAIN, _PLAIN]
    if calls:
        probes["tool calls"] = [_USER, _CALL, _ANSWER, _PLAIN, _AGAIN, _THINK]
    stable, append_only = True, True
    for name, messages in probes.items():
        r = caller if name == "tool calls" else plain
        probe_stable, probe_appends = _audit_history(r, messages, len(trailing), name, reasons)
        stable, append_only = stable and probe_stable, append_only and probe_appends
    return TemplateAudit(
        prefix_stable=stable,
        append_only=stable and append_only,
        reasons=tuple(reasons),
        generation_prompt_ids=tuple(generation_prompt.tolist()),
        ends_turn_with=ending,
        trailing_ids=trailing,
        supports_system=system,
        supports_tools=tools,
        supports_tool_calls=calls,
    )


def _turn_ending(r: _Renderer, reasons: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(end of turn, trailing): what follows assistant content, cut after its first special token."""
    # Three contents that share no last token: what their renderings have in common at the end is the template's.
    turns = [r.ids([_USER, {"role": "assistant", "content": c}], prompt=False) for c in ("Kea", "It is 7", "why?")]
    shortest = min(len(t) for t in turns)
    common = next((k for k in range(shortest) if len({int(t[-1 - k]) for t in turns}) > 1), shortest)
    suffix = turns[0][len(turns[0]) - common :].tolist()
    added = r.tokenizer.added_tokens_decoder
    special = {*r.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    cut = _first_in(suffix, special) or _first_in(suffix, set(added))
    if not cut:
        reasons.append(
            "no special token ends an assistant turn: everything the template puts after it is trained, and a model"
            " trained so stops only at a stop string"
        )
        return (), ()
    if suffix[cut - 1] != r.tokenizer.eos_token_id:
        reasons.append(
            f"assistant turns end with {r.tokenizer.convert_ids_to_tokens(suffix[cut - 1])!r} (id {suffix[cut - 1]}),"
            f" not with the tokenizer's eos_token {r.tokenizer.eos_token!r}: generation must stop at both"
        )
    return tuple(suffix[:cut]), tuple(suffix[cut:])


def _first_in(ids: Sequence[int], wanted: set[int]) -> int:
    """One past the first id that is wanted; 0 if none is."""
    return next((k + 1 for k, i in enumerate(ids) if i in wanted), 0)


def _supports_role(r: _Renderer, messages: list[dict[str, Any]], role: str, reasons: list[str]) -> bool:
    """True if the one message with this role is rendered, and not as if the assistant had said it."""
    content = next(m["content"] for m in messages if m["role"] == role)
    try:
        text = r.text(messages, prompt=True)
    except RenderError as exc:
        reasons.append(f"no {role} role: {exc}")
        return False
    try:
        as_assistant = r.text([{**m, "role": "assistant"} if m["role"] == role else m for m in messages], prompt=True)
    except RenderError:
        as_assistant = ""
    if content in text and text != as_assistant:
        return True
    how = "it is rendered as if the assistant had said it" if content in text else "its text is not in the rendering"
    reasons.append(f"no {role} role: {how}")
    return False


def _shows_tool(render: Callable[[], str], what: str, reasons: list[str]) -> bool:
    try:
        shown = "quokka_sum" in render()
    except RenderError as exc:
        reasons.append(f"no {what}: {exc}")
        return False
    if not shown:
        reasons.append(f"no {what}: the template ignores them")
    return shown


def _audit_history(
    r: _Renderer, messages: list[dict[str, Any]], trailing: int, name: str, reasons: list[str]
) -> tuple[bool, bool]:
    """(prefix_stable, append_only) for one conversation; the trailing tokens of a turn may differ."""
    try:
        full, full_text = r.ids(messages, prompt=False), r.text(messages, prompt=False)
        turns = [(i, *r.turn(messages, i)) for i, m in enumerate(messages) if m["role"] == "assistant"]
    except RenderError as exc:
        reasons.append(f"with {name}, not rendered at all, so never one row per conversation: {exc}")
        return True, False
    for i, prompt, turn in turns:
        if not _is_prefix(turn[: len(turn) - trailing], full):
            reasons.append(
                f"with {name}, history is rewritten: the tokens of the first {i + 1} messages are not a prefix of"
                f" the tokens of all {len(messages)}"
            )
            return False, False
        if not _is_prefix(prompt, turn):
            reasons.append(f"with {name}, an answer does not follow its prompt: the generation prompt is not kept")
            return True, False
        if not _keeps(messages[i], full_text):
            reasons.append(f"with {name}, part of the assistant's own text is dropped from its turn")
            return True, False
    return True, True


# ---- conversations ---------------------------------------------------------------------------------------------------


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    audit: TemplateAudit,
    *,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Tool] | None = None,
    train_on: TrainOn = "all_assistant",
    train_from: int = 0,
) -> list[Rendered]:
    """Training rows of a conversation: one for an append-only template, else one per assistant turn, as at inference.

    Assistant turns before message `train_from`, or without any prompt, are context. RowRefused if no exact row exists.
    """
    if train_on not in ("all_assistant", "last_assistant"):
        raise ValueError(f"train_on={train_on!r}: must be all_assistant or last_assistant")
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(train_from, 1)]
    if not turns:
        raise RowRefused("no assistant turn after a prompt", f"{len(messages)} messages")
    if train_on == "last_assistant":
        turns = turns[-1:]
    refuse_unsupported(messages, audit, tools)
    r = _Renderer(tokenizer, template_kwargs, tools)
    try:
        if audit.append_only:
            return [_span_row(r, messages, turns, audit)]
        return [_turn_row(r, messages, i, audit) for i in turns]
    except RenderError as exc:
        raise RowRefused("the chat template refuses the messages", str(exc)) from exc


def refuse_unsupported(messages: Sequence[Message], audit: TemplateAudit, tools: Sequence[Tool] | None) -> None:
    """RowRefused for what the template would drop, or render as something else, without a word."""
    if not audit.supports_system and any(m["role"] == "system" for m in messages):
        raise RowRefused("a system message, which this chat template has no place for")
    if not audit.supports_tools and tools:
        raise RowRefused("tools, which this chat template does not show to the model")
    if not audit.supports_tool_calls and any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
        raise RowRefused("tool calls or tool results, which this chat template does not render")


def _span_row(r: _Renderer, messages: Sequence[Message], turns: Sequence[int], audit: TemplateAudit) -> Rendered:
    """One row, every span verified to be what incremental rendering says it is. Never trusts the audit alone."""
    ids = r.ids(messages[: turns[-1] + 1], prompt=False)
    mask = np.zeros(len(ids), bool)
    for i in turns:
        prompt = r.ids(messages[:i], prompt=True)
        turn = ids if i == turns[-1] else r.ids(messages[: i + 1], prompt=False)
        end = _end_of_turn(turn, audit, i)
        if not _is_prefix(turn[:end], ids):
            raise RowRefused("history is rewritten or its tokens merge across a turn boundary", f"message {i + 1}")
        if not _is_prefix(prompt, turn[:end]):
            raise RowRefused("the prompt's tokens merge with the first of the answer", f"message {i + 1}")
        if messages[i].get("reasoning_content") and not _keeps(messages[i], r.text(messages[: i + 1], prompt=False)):
            raise RowRefused("reasoning_content, which this chat template does not render", f"message {i + 1}")
        mask[len(prompt) : end] = True
    return Rendered(ids, mask)


def _turn_row(r: _Renderer, messages: Sequence[Message], i: int, audit: TemplateAudit) -> Rendered:
    """One assistant turn after its prompt, rendered as at inference (history as the template shows it then)."""
    prompt, turn = r.turn(messages, i)
    if _is_prefix(prompt, turn):
        prompt_text, turn_text = r.text(messages[:i], prompt=True), r.text(messages[: i + 1], prompt=False)
        if _keeps(messages[i], _tail(prompt_text, turn_text)):
            end = _end_of_turn(turn, audit, i)
            if end <= len(prompt):
                raise RowRefused("an assistant turn without any token", f"message {i + 1}")
            mask = np.zeros(len(turn), bool)
            mask[len(prompt) : end] = True
            return Rendered(turn, mask)
    return _appended_row(r, messages, i, prompt, audit)


def _appended_row(
    r: _Renderer, messages: Sequence[Message], i: int, prompt: np.ndarray, audit: TemplateAudit
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
    prompt_text = r.text(messages[:i], prompt=True)
    opening = _tail(r.text(messages[:i], prompt=False), prompt_text)
    answer = _after_opening(opening, message["content"])
    encoded = _as_ids(r.tokenizer(prompt_text + answer, add_special_tokens=False))
    if not _is_prefix(prompt, encoded) or len(encoded) == len(prompt):
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


def _end_of_turn(turn: np.ndarray, audit: TemplateAudit, i: int) -> int:
    """One past the end-of-turn token of the last turn in `turn`."""
    suffix = audit.ends_turn_with[-1:] + audit.trailing_ids
    if tuple(turn[len(turn) - len(suffix) :].tolist()) != suffix:
        raise RowRefused("an assistant turn does not end as the template's turns do", f"message {i + 1}")
    return len(turn) - len(audit.trailing_ids)


def _keeps(message: Message, rendered: str) -> bool:
    """False if the rendering of a turn lacks part of its text. Whitespace may change: templates trim."""
    parts = [message.get("reasoning_content"), message.get("content")]
    squeezed = _squeeze(rendered)
    return all(_squeeze(p) in squeezed for p in parts if isinstance(p, str))


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _tail(before: str, after: str) -> str:
    """What `after` has beyond the part it shares with `before`."""
    shared = min(len(before), len(after))
    return after[next((k for k in range(shared) if before[k] != after[k]), shared) :]


def _after_common(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    shared = min(len(before), len(after))
    differs = np.flatnonzero(before[:shared] != after[:shared])
    return after[differs[0] if len(differs) else shared :]


def _is_prefix(head: np.ndarray, whole: np.ndarray) -> bool:
    return len(head) <= len(whole) and bool(np.array_equal(head, whole[: len(head)]))


def _as_ids(encoded: Any) -> np.ndarray:
    """transformers 5 returns a BatchEncoding, older ones and some tokenizers a list."""
    ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
    out = np.asarray(ids, dtype=np.int64)
    assert out.ndim == 1, f"one conversation gives one row of ids, got shape {out.shape}"
    return out


def _one_line(exc: BaseException, limit: int = 300) -> str:
    return " ".join(str(exc).split())[:limit]
