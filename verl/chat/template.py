"""Render messages with a chat template, and measure the properties of the template.

A template is a program by the author of the model. The properties that other code relies on are measured once with
small conversations (`audit_template`); in addition, each training row is verified (chat/conversation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from verl.chat.encoding import encoded_text, rendered_ids
from verl.chat.kept import dropped, holds_ambiguous, with_sentinels
from verl.chat.limits import bounded_rendering
from verl.chat.messages import REASONING_KEYS, ROLES
from verl.chat.spelling import PLAIN_SPELLING, Spelling, roles_named
from verl.errors import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

MOST_SHAPES = 4096  # the size of the cache `TemplateAudit.shapes`

# Arguments of apply_chat_template that this module sets itself.
RESERVED_KWARGS = frozenset(
    {"conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs"}
)


# Exceptions of a template for input that it does not support: "..." + None, x[3], 1 / 0, too long a range.
REFUSALS = (jinja2.TemplateError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)


class RenderError(Refused):
    """The template raised an error for these messages (no system role, roles must alternate, a field is missing
    ...)."""


class RowRefused(Refused):
    """A conversation without an exact training row. `reason` is equal for all rows with the same fault, so that they
    can be counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateAudit:
    """The measured properties of a chat template."""

    append_only: bool  # a prompt with its answer appended is what every later turn renders: one row per conversation
    ends_turn_with: tuple[int, ...]  # trained: the ids after assistant content up to its special end-of-turn token
    trailing_ids: tuple[int, ...]  # not trained: what the template puts after that (a newline, a final eos)
    ends_call_with: tuple[int, ...]  # ends_turn_with and trailing_ids of a turn with tool calls
    call_trailing_ids: tuple[int, ...]
    next_turns: Mapping[str, int]  # where turns have no end token: the special token that begins the next one, by role
    last_end: int | None  # what ends the last turn of a conversation then: the end-of-sequence token
    thinking_is_optional: bool  # enable_thinking=false renders another generation prompt
    supports_system: bool
    supports_tools: bool
    supports_tool_calls: bool
    supports_parallel_calls: bool  # a turn with two calls is shown with both
    supports_uncalled_results: bool  # a tool's message may come after a turn without calls
    spelling: Spelling = PLAIN_SPELLING
    named_roles: frozenset[str] = frozenset()  # besides those of every template
    shapes: dict[Any, tuple[str, str] | None] = field(default_factory=dict, compare=False, repr=False)
    """A cache of `refuse_dropped`: for each shape of messages, (the text that its rendering lacks, an example), or
    None."""

    def ending(self, message: Message) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the (end of turn, trailing ids) of this assistant message."""
        if message.get("tool_calls"):
            return self.ends_call_with, self.call_trailing_ids
        return self.ends_turn_with, self.trailing_ids

    @property
    def ends(self) -> tuple[int, ...]:
        """Return every token that ends a turn of the assistant, in order and without repeats."""
        last = (*self.ends_turn_with[-1:], *self.ends_call_with[-1:], *self.next_turns.values())
        return tuple(dict.fromkeys(last))


@dataclass(frozen=True, slots=True)
class Renderer:
    """A tokenizer with its template arguments. It renders messages to text (for inspection) or to ids (tokenised
    once)."""

    tokenizer: Tokenizer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] | None = None
    spelling: Spelling = PLAIN_SPELLING

    def __post_init__(self) -> None:
        clash = sorted(RESERVED_KWARGS & self.template_kwargs.keys())
        if clash:
            raise Refused(f"model.template_kwargs={clash}: set by verl itself. Fix: remove them")

    def text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        out = self._apply(messages, prompt=prompt, tokenize=False)
        assert isinstance(out, str), f"rendered text is a {type(out).__name__}"
        return out

    def encode(self, text: str) -> np.ndarray:
        """Return the ids [t] int64 of a rendering, or of one with more text behind it."""
        return encoded_text(self.tokenizer, text)

    def ids(self, messages: Sequence[Message], *, prompt: bool) -> np.ndarray:
        return rendered_ids(self._apply(messages, prompt=prompt, tokenize=True))

    def both(self, messages: Sequence[Message], *, prompt: bool) -> tuple[str, np.ndarray]:
        """Return the text and the ids of one rendering."""
        text = self.text(messages, prompt=prompt)
        if self.tokenizer.apply_chat_template.__module__ != "transformers.tokenization_utils_base":
            return text, self.ids(messages, prompt=prompt)  # a template method of the tokenizer's own: other ids
        return text, self.encode(text)

    def turn(self, messages: Sequence[Message], i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the prompt of assistant turn i, and the ids of all messages up to and including that
        turn."""
        return self.ids(messages[:i], prompt=True), self.ids(messages[: i + 1], prompt=False)

    def added_text(self, messages: Sequence[Message], i: int, *, prompt: bool = False) -> str:
        """Return the text that message i adds to that of those before it, which end with the generation prompt if
        `prompt`."""
        before, after = self.text(messages[:i], prompt=prompt), self.text(messages[: i + 1], prompt=False)
        return after[shared(before, after) :]

    def _apply(self, messages: Sequence[Message], *, prompt: bool, tokenize: bool) -> Any:
        if not messages:
            raise RenderError("no messages to render")
        try:
            with bounded_rendering():
                return self.tokenizer.apply_chat_template(
                    list(map(self.spelling, messages)),
                    tools=[dict(t) for t in self.tools] if self.tools else None,
                    add_generation_prompt=prompt,
                    tokenize=tokenize,
                    return_dict=tokenize,
                    **self.template_kwargs,
                )
        except REFUSALS as exc:
            roles, why = ", ".join(str(m.get("role")) for m in messages), f"{type(exc).__name__}: {one_line(exc)}"
            raise RenderError(f"the chat template refuses messages with roles [{roles}]: {why}") from exc


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Tool] | None = None,
    audit: TemplateAudit | None = None,
) -> np.ndarray:
    """Return the ids [P] int64 of the messages with the generation prompt, tokenised once. Raise RowRefused if the
    rendering lacks text of the messages."""
    r = Renderer(tokenizer, template_kwargs, tools, audit.spelling if audit else PLAIN_SPELLING)
    text, ids = r.both(messages, prompt=True)
    refuse_dropped(r, text, messages, audit, prompt=True)
    return ids


def refuse_dropped(
    r: Renderer,
    text: str,
    messages: Sequence[Message],
    audit: TemplateAudit | None,
    whole: Collection[int] = (),
    *,
    prompt: bool,
) -> None:
    """Raise RowRefused if `text`, a rendering of r, lacks text of its messages or tools. A text that is short or
    repeated may occur by chance; messages with such texts are also rendered with unique texts, once for each shape of
    messages.

    whole: the indices of turns with reasoning that must be in the rendering
    """
    lacks = dropped(text, messages, r.tools, whole)
    if audit is not None and holds_ambiguous(messages):
        shape, sentinels = with_sentinels(messages)
        key = (shape, tuple(whole), prompt, bool(r.tools), repr(r.template_kwargs))
        if key not in audit.shapes:
            if len(audit.shapes) >= MOST_SHAPES:
                audit.shapes.clear()
            audit.shapes[key] = _lacking(r, sentinels, whole, prompt=prompt)
        lacks = audit.shapes[key] or lacks
    if lacks:
        raise RowRefused(f"{lacks[0]}, which this chat template drops", lacks[1])


def _lacking(
    r: Renderer, messages: Sequence[Message], whole: Collection[int], *, prompt: bool
) -> tuple[str, str] | None:
    try:
        lacks = dropped(r.text(messages, prompt=prompt), messages, None, whole)
    except RenderError:  # the template's own text is in the place of the sentinels
        return None
    return (lacks[0], lacks[1].partition(",")[0]) if lacks else None


def refuse_unsupported(messages: Sequence[Message], audit: TemplateAudit, tools: Sequence[Tool] | None) -> None:
    """Raise RowRefused for messages or tools that the template would silently drop or change."""
    for i, message in enumerate(messages, start=1):
        if (role := message["role"]) not in ROLES and role not in audit.named_roles:
            raise RowRefused("a role that neither chat templates in general nor this one know", repr(role))
        if role == "assistant" and not audit.spelling.reasoning and message.get("reasoning_content"):
            raise RowRefused("reasoning_content, which this chat template does not render", f"message {i}")
    systems = ("system", "developer") if audit.spelling.developer == "system" else ("system",)
    if not audit.supports_system and any(m["role"] in systems for m in messages):
        raise RowRefused("a system message, which this chat template has no place for")
    if not audit.supports_tools and tools:
        raise RowRefused("tools, which this chat template does not show to the model")
    results = audit.supports_tool_calls or audit.supports_uncalled_results
    if any(
        (m["role"] == "tool" and not results) or (m.get("tool_calls") and not audit.supports_tool_calls)
        for m in messages
    ):
        raise RowRefused("tool calls or tool results, which this chat template does not render")
    if not audit.supports_parallel_calls and any(len(m.get("tool_calls") or ()) > 1 for m in messages):
        raise RowRefused("several tool calls in one turn, of which this chat template renders one")


def one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300]


# What templates are measured with.
USER = {"role": "user", "content": "What is six times seven?"}
AGAIN = {"role": "user", "content": "And minus two?"}
PLAIN = {"role": "assistant", "content": "It is 42."}
THINK = {"role": "assistant", "content": "<think>\nsix sevens, forty-two\n</think>\n\nIt is 42."}
SYSTEM = {"role": "system", "content": "Reply as a quokka."}
FUNCTION = {"name": "quokka_sum", "arguments": {"a": 6}}
CALLS = [{"id": "abcdef123", "type": "function", "function": FUNCTION}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
TWICE = {**CALL, "tool_calls": [*CALLS, {**CALLS[0], "function": {**FUNCTION, "name": "dingo_sum"}}]}
ANSWER = {"role": "tool", "name": "quokka_sum", "tool_call_id": "abcdef123", "content": "wombat 42"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}}
TOOL = {"type": "function", "function": {"name": "quokka_sum", "description": "Adds.", "parameters": PARAMETERS}}


def audit_template(
    tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None, stops: Sequence[int] = ()
) -> TemplateAudit:
    """Measure the tokenizer's chat template with a few small conversations. It takes some milliseconds.

    stops: the tokens that end an answer at inference, besides the tokenizer's end-of-sequence token
    """
    kwargs, eos = dict(template_kwargs or {}), tokenizer.eos_token_id
    plain = _spelled(Renderer(tokenizer, kwargs))
    with_tools = replace(plain, tools=(TOOL,))
    stops = (*((eos,) if eos is not None else ()), *stops)
    ending, trailing = _turn_ending(plain, stops)
    system = _shows_role(plain, [SYSTEM, USER], "system")
    tools = _shows(lambda: with_tools.text([USER], prompt=True), "quokka_sum")
    r = _spelled_calls(with_tools if tools else plain)
    plain = replace(plain, spelling=r.spelling)
    called: list[dict[str, Any]] = [USER, CALL]
    calls = _shows(lambda: r.added_text(called, 1), "quokka_sum") and _shows_role(r, [*called, ANSWER], "tool")
    call_ending, call_trailing = _call_ending(r, ending, trailing) if calls else ((), ())
    turns = [USER, PLAIN, AGAIN, PLAIN]
    probes = [(plain, turns), (plain, [USER, THINK, AGAIN, THINK])]
    if system:
        probes.append((plain, [SYSTEM, *turns]))
    if calls:
        probes.append((r, [*called, ANSWER, PLAIN, AGAIN, THINK]))
    cuts = len(trailing), len(call_trailing)
    follows = {} if ending else {"user": _next_turn(plain, [USER, PLAIN], AGAIN)}
    if calls and not call_ending:
        follows["tool"] = _next_turn(r, called, ANSWER)
    return TemplateAudit(
        append_only=all(_appends(renderer, messages, cuts) for renderer, messages in probes),
        ends_turn_with=ending,
        trailing_ids=trailing,
        ends_call_with=call_ending,
        call_trailing_ids=call_trailing,
        next_turns={role: token for role, token in follows.items() if token is not None},
        last_end=next(iter(stops), None),
        thinking_is_optional="enable_thinking" not in kwargs and _is_silenced(plain),
        supports_system=system,
        supports_tools=tools,
        supports_tool_calls=calls,
        supports_parallel_calls=calls and _shows(lambda: r.added_text([USER, TWICE], 1), "quokka_sum", "dingo_sum"),
        supports_uncalled_results=_shows_role(r, [USER, PLAIN, ANSWER], "tool"),
        spelling=r.spelling,
        named_roles=roles_named(str(tokenizer.chat_template)),
    )


def _is_silenced(r: Renderer) -> bool:
    """Return whether enable_thinking=false renders another generation prompt."""
    silent = replace(r, template_kwargs={**r.template_kwargs, "enable_thinking": False})
    try:
        return silent.text([USER], prompt=True) != r.text([USER], prompt=True)
    except RenderError:
        return False


def _spelled(r: Renderer) -> Renderer:
    """Return the renderer with the spelling of contents, roles and reasoning that the template renders without loss.
    Raise RenderError if the template cannot render a user message, or drops its text."""
    parts = set[str]()
    for message, before in ((USER, []), (PLAIN, [USER]), (SYSTEM, []), (ANSWER, [USER, CALL])):
        after = [USER] if message is SYSTEM else []
        keeps = [
            _keeps(
                replace(r, spelling=Spelling(parts=frozenset({*parts, *roles}))), [*before, message, *after], message
            )
            for roles in ((), (message["role"],))
        ]
        if keeps == [False, True]:
            parts.add(message["role"])
    r = replace(r, spelling=Spelling(parts=frozenset(parts)))
    text = r.text([USER], prompt=True)
    if not keeps_text(USER, text):
        prefix = "the chat template drops the text of a question, given as text and as a content part"
        raise RenderError(f"{prefix}. Fix: model.chat_template=FILE")
    developer = {**SYSTEM, "role": "developer"}
    thoughts = [(key, {**turn, key: "six sevens"}) for turn in (PLAIN, CALL) for key in REASONING_KEYS]
    read = [key for key, turn in thoughts if _shows(partial(r.text, [USER, turn], prompt=False), "six sevens")]
    named = "developer" in roles_named(str(r.tokenizer.chat_template))
    own = replace(r, spelling=replace(r.spelling, developer="developer"))
    spelling = replace(
        r.spelling,
        reasoning=read[0] if read else "",
        developer="developer" if named and _shows_role(own, [developer, USER], "developer") else "system",
    )
    return replace(r, spelling=replace(spelling, splits=bool(read) and _doubles(replace(r, spelling=spelling))))


def _keeps(r: Renderer, messages: list[Message], message: Message) -> bool:
    try:
        return keeps_text(message, r.text(messages, prompt=False))
    except RenderError:
        return False


def _doubles(r: Renderer) -> bool:
    """Return True if the template writes a second `<think>` before a turn that has a `<think>` block in its content,
    but none if the block is given as reasoning."""
    prefix = {**PLAIN, "reasoning_content": "six sevens, forty-two"}
    try:
        block, reasoning = (r.text([USER, turn], prompt=False).count("<think>") for turn in (THINK, prefix))
    except RenderError:
        return False
    return 0 < reasoning < block


def _spelled_calls(r: Renderer) -> Renderer:
    """Return the renderer with the spelling of tool calls that the template renders without loss; the usual one if
    there is none."""
    for text_arguments in (False, True):
        spelled = replace(r, spelling=replace(r.spelling, text_arguments=text_arguments))
        try:
            text = spelled.added_text([USER, CALL], 1)
        except RenderError:
            continue
        if "quokka_sum" in text and "{'a': 6}" not in text:  # not as Python writes it
            return spelled
    return r


def _special_ids(tokenizer: Tokenizer) -> tuple[set[int], set[int]]:
    """Return the ids of the special tokens, and those of all added tokens."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}, {*added}


def _common_suffix(turns: Sequence[list[int]]) -> list[int]:
    """Return the longest common suffix of these lists of ids."""
    return turns[0][len(turns[0]) - min(shared(turns[0][::-1], t[::-1]) for t in turns[1:]) :]


def _turn_ending(r: Renderer, stops: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (end of turn, trailing): the ids that follow assistant content, divided after the first special token, or
    after a later one that is among the stops if inference does not stop at the first."""
    # Three contents that share no last token: what their renderings have in common at the end is the template's.
    answers = [{"role": "assistant", "content": c} for c in ("Kea", "It is 7", "why?")]
    suffix = _common_suffix([r.ids([USER, answer], prompt=False).tolist() for answer in answers])
    ends = [k for wanted in _special_ids(r.tokenizer) for k, i in enumerate(suffix, start=1) if i in wanted]
    if not ends:
        return (), ()
    cut = ends[0]
    if suffix[cut - 1] not in stops and (later := next((k for k in ends if suffix[k - 1] in stops), 0)):
        try:  # Cohere's templates write it behind every turn, Phi-3's only behind the last
            whole, follows = (r.ids(m, prompt=False) for m in ([USER, answers[0]], [USER, answers[0], AGAIN]))
            cut = later if is_prefix(whole[: len(whole) - len(suffix) + later], follows) else cut
        except RenderError:
            pass
    return tuple(suffix[:cut]), tuple(suffix[cut:])


def _call_ending(r: Renderer, end: Sequence[int], trailing: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (end of turn, trailing) of a turn with tool calls: those of other turns if they fit, else ending with the
    last special token that does not close a call (gpt-oss: `<|call|>`, Gemma 4: `<|tool_response>`); empty if there is
    none."""
    made = [{**CALL, "tool_calls": [{**CALLS[0], "function": {**FUNCTION, "arguments": {"a": a}}}]} for a in (6, 7, 85)]
    try:
        turns = [r.ids([USER, turn], prompt=False).tolist() for turn in made]
    except RenderError:
        return (), ()
    suffix, wanted = _common_suffix(turns), [*end[-1:], *trailing]
    if end and suffix[len(suffix) - len(wanted) :] == wanted:
        return tuple(end), tuple(trailing)
    try:
        twice = r.ids([USER, TWICE], prompt=False).tolist()
    except RenderError:  # a template that renders one call a turn
        twice = []
    special, _ = _special_ids(r.tokenizer)
    ends = [k for k, i in enumerate(suffix, 1) if end and i in special and twice.count(i) <= turns[0].count(i)]
    return ((suffix[ends[-1] - 1],), tuple(suffix[ends[-1] :])) if ends else ((), ())


def _next_turn(r: Renderer, history: Sequence[Message], message: Message) -> int | None:
    """Return the special token with which this message begins directly after the history; None if there is none."""
    try:
        before, after = r.ids(history, prompt=False), r.ids([*history, message], prompt=False)
    except RenderError:
        return None
    found = int(after[len(before)]) if is_prefix(before, after) and len(after) > len(before) else None
    return found if found in _special_ids(r.tokenizer)[0] else None


def _shows(render: Callable[[], str], *names: str) -> bool:
    try:
        text = render()
        return all(name in text for name in names)
    except RenderError:
        return False


def _shows_role(r: Renderer, messages: list[dict[str, Any]], role: str) -> bool:
    """Return True if the message with this role is rendered, under a role other than the assistant's."""
    try:
        text = r.text(messages, prompt=True)
    except RenderError:
        return False
    if next(m["content"] for m in messages if m["role"] == role) not in text:
        return False
    try:
        return text != r.text([{**m, "role": "assistant"} if m["role"] == role else m for m in messages], prompt=True)
    except RenderError:
        return True


def _appends(r: Renderer, messages: list[dict[str, Any]], cuts: tuple[int, int]) -> bool:
    """Return True if every turn of this conversation leaves the ids before it unchanged, apart from the trailing ids of
    turns.

    cuts: the numbers of trailing ids, of a turn without and of a turn with tool calls
    """
    try:
        full, full_text = r.ids(messages, prompt=False), r.text(messages, prompt=False)
        turns = [(m, *r.turn(messages, i)) for i, m in enumerate(messages) if m["role"] == "assistant"]
    except RenderError:
        return False
    return all(
        is_prefix(turn[: len(turn) - cuts[bool(message.get("tool_calls"))]], full)
        and is_prefix(prompt, turn)
        and keeps_text(message, full_text)
        for message, prompt, turn in turns
    )


def keeps_text(message: Message, rendered: str) -> bool:
    """Return False if the rendering of a turn lacks part of its text. White space is ignored, since templates trim
    it."""
    squeezed = "".join(rendered.split())
    parts = [message.get("reasoning_content"), message.get("content")]
    return all("".join(p.split()) in squeezed for p in parts if isinstance(p, str))


def shared(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two texts or two lists of ids."""
    shorter = min(len(before), len(after))
    return next((k for k in range(shorter) if before[k] != after[k]), shorter)


def is_prefix(head: np.ndarray, whole: np.ndarray) -> bool:
    return len(head) <= len(whole) and bool(np.array_equal(head, whole[: len(head)]))
