"""The agent loop with tools: generate a turn, parse its calls, run them, and add their answers to the prompt.

    input        a row's prompt ids, its tools and its `tools_kwargs`
    waits for    the rollout engine, then all calls of a turn together
    output       one AgentLoopOutput: sampled ids as they were sampled, all others with mask 0, images with their places

If the template has no bridge (chat/bridge.py), every turn begins a new branch, with all messages rendered again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, ServerManager, TokenOutput, together
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.tools import Tool, Toolbox
from verl.chat.bridge import Bridge, PlainText
from verl.chat.encoding import rendered_ids
from verl.chat.messages import without_nulls
from verl.chat.parsing import Malformed, ToolCall, Turn, TurnParser
from verl.chat.renderers import PackageRenderer
from verl.chat.template import Renderer, TemplateAudit
from verl.tools.answers import Part, ShownImage, ToolAnswer
from verl.tools.pictures import IMAGE_PART, TurnPictures, without_images
from verl.types import Medium, StopReason, TaskImage

SAME_CALLS = 3  # turns in a row with the same calls and the same answers: no progress
# Fields that a loop receives in addition to the columns of the row.
NO_COLUMNS = ("raw_prompt", "prompt_ids", "index", "tools", "request_id")
CHARACTERS_PER_TOKEN = 64  # a result with more characters than this is cut before it is tokenised


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKit:
    """The tools, parser and chat template that all trajectories of a run share."""

    tools: Mapping[str, Tool]
    parser: TurnParser | None
    renderer: Renderer
    audit: TemplateAudit
    plain: PlainText
    bridge: Bridge | None
    ends: frozenset[int]  # ids that end a turn
    limits: AgentConfig
    package: PackageRenderer | None = None  # replaces parser and bridge
    pictures: TurnPictures | None = None  # shows images that tools return; None: the model reads text alone


@dataclass(slots=True)
class Play:
    """The state of one trajectory.

    held, used: the array with the ids of the present branch (its prompt and everything after it), and their number. The
        array has free space at its end, and used elements are never overwritten, so views of `ids` do not change
    mask: (number of tokens, 1 if sampled, else 0) of the ids after the prompt, in order
    """

    held: np.ndarray
    messages: list[dict[str, Any]]
    box: Toolbox
    used: int = 0
    mask: list[tuple[int, int]] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)  # the images of the present branch, with their places in `ids`
    shown: list[ShownImage] = field(default_factory=list)  # the images in `messages`, if they may be rendered again
    # for each run of tokens, True where the token is not the template's
    written: list[np.ndarray] = field(default_factory=list)
    ended: list[AgentLoopOutput] = field(default_factory=list)  # finished branches
    turns: int = 1
    calls: int = 0
    env_tokens: int = 0
    same: int = 0
    last: bytes = b""  # a hash of the calls and answers of the last turn
    generate_s: float = 0.0
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        self.used = len(self.held)

    @property
    def ids(self) -> np.ndarray:
        """Return the ids of the branch: [t] int64, a view."""
        return self.held[: self.used]

    @property
    def latest(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids before the latest sampled turn, ids of that turn)."""
        at = self.used - self.mask[-1][0]
        return self.held[:at], self.ids[at:]

    def append(self, ids: Sequence[int] | np.ndarray, sampled: int, written: np.ndarray | None = None) -> None:
        end = self.used + len(ids)
        if end > len(self.held):
            grown = np.empty(2 * end, np.int64)
            grown[: self.used] = self.ids
            self.held = grown
        self.held[self.used : end] = rendered_ids(ids)
        self.used = end
        self.mask.append((len(ids), sampled))
        self.written.append(np.ones(len(ids), bool) if written is None else written)
        self.env_tokens += 0 if sampled else len(ids)

    def output(self, **fields: Any) -> AgentLoopOutput:
        counts, flags = np.array(self.mask, np.int64).reshape(-1, 2).T
        start = len(self.ids) - int(counts.sum())
        return AgentLoopOutput(
            *(self.ids[:start], self.ids[start:], np.repeat(flags, counts)),  # type: ignore[arg-type]
            written=np.concatenate([np.ones(0, bool), *self.written]),  # type: ignore[arg-type]
            media=tuple(self.media),
            num_turns=self.turns,
            metrics=AgentLoopMetrics(generate_sequences=self.generate_s, tool_calls=self.tool_s),
            **fields,
        )


class ToolAgentLoop(AgentLoopBase):
    """verl's loop of this name: it plays a row with tools. `kit` is made once per run (agent_loop/registry.py)."""

    ends_when_cancelled = True

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        *,
        kit: ToolKit,
        images: Sequence[TaskImage] = (),
    ) -> None:
        """images: those of the task's prompt"""
        super().__init__(trainer_config, server_manager, tokenizer)
        self._kit, self._images = kit, images

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        kit, extra = self._kit, kwargs.get("extra_info") or {}
        names = [tool["function"]["name"] for tool in kwargs["tools"]] or list(kit.tools)
        box = Toolbox(
            {name: kit.tools[name] for name in names},
            without_nulls(kwargs.get("tools_kwargs") or extra.get("tools_kwargs") or {}),
            kit.limits.tool_timeout_s,
        )
        media, messages = list(self.server_manager.media), [dict(m) for m in kwargs["raw_prompt"]]
        play = Play(rendered_ids(kwargs["prompt_ids"]), self._own(messages), box, media=media)
        try:
            columns = {name: value for name, value in kwargs.items() if name not in NO_COLUMNS}
            if greetings := await box.begin({**columns, "prompt": messages}):
                self._greet(play, {name: await self._seen(found, name) for name, found in greetings.items()})
            while await self._turn(play, await self._generate(play, kwargs["request_id"], sampling_params)):
                pass
            scores = await box.scores()
            reward = box.reward(scores)
        finally:
            for wrong in await box.close():
                self.server_manager.counts["release_errors"] += bool(wrong)
        self._count(play)
        fields = {"tool_rewards": box.rewards, "rollout_reward_scores": scores}
        report = {k: v for k, v in fields.items() if v} | {
            "malformed_calls": self.server_manager.counts["malformed_calls"]
        }
        return [*play.ended, play.output(extra_fields=report, reward_score=reward)]

    async def _turn(self, play: Play, out: TokenOutput) -> bool:
        """Run the calls of a turn and add their answers. Return True if the model is called again."""
        began = time.monotonic()
        turn = self._parse(play, out)
        if out.token_ids:
            self.server_manager.timeline[-1]["parse_s"] = time.monotonic() - began
        if turn is None:
            return False
        answers = await self._act(play, turn)
        if self._over(play, turn, answers):
            return False
        began = time.monotonic()
        self._observe(play, turn, answers)
        self.server_manager.timeline[-1]["render_s"] = time.monotonic() - began
        return True

    def _own(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages of the row or of the model as they are rendered."""
        return [*map(dict, messages)] if self._kit.pictures is None else self._kit.pictures.marked(messages)

    def _greet(self, play: Play, greetings: Mapping[str, ToolAnswer]) -> None:
        """Append what environments show the model to the last user message of the prompt. Its tokens count in the
        budget."""
        last, parts = play.messages[-1], list[Part]()
        for name, found in greetings.items():
            if found.error:
                raise ValueError(f"{name}: {found.text}")
            parts += found.parts or [found.text]
        what = "text" if any(isinstance(part, str) for part in parts) else "an image"
        if last.get("role") != "user":
            raise ValueError(f"reset returned {what}, and the row ends with no text of a user: {str(last)[:200]}")
        given = play.ids.copy()
        self._render(play)
        if not np.array_equal(play.ids, given):
            raise ValueError(f"reset returned {what}, and the row's prompt is not the rendering of its messages")
        play.messages[-1] = {**last, "content": self._with_parts(last["content"], parts)}
        self._render(play, [part for part in parts if isinstance(part, ShownImage)])
        self.server_manager.take(play.used - len(given))

    def _with_parts(self, content: str | list[dict[str, Any]], parts: Sequence[Part]) -> str | list[dict[str, Any]]:
        """Return the content of a message with texts, which are shortened, and images behind it."""
        texts = [self._kit.plain.marked(self._cut(part)) if isinstance(part, str) else None for part in parts]
        if isinstance(content, str) and None not in texts:
            return "".join([content, *filter(None, texts)])
        before = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return [*before, *(IMAGE_PART if text is None else {"type": "text", "text": text} for text in texts)]

    async def _generate(self, play: Play, request_id: str, sampling_params: dict[str, Any]) -> TokenOutput:
        began = time.monotonic()
        manager = self.server_manager
        given: dict[str, Any] = {"prompt_ids": play.ids, "sampling_params": sampling_params, "media": play.media}
        out = await manager.generate(request_id, **given)
        play.generate_s += time.monotonic() - began
        play.append(out.token_ids, 1)
        play.turns += bool(out.token_ids)
        return out

    def _parse(self, play: Play, out: TokenOutput) -> Turn | None:
        """Parse the turn. Return None if the trajectory ends with it: it has no calls, or was cut by a limit."""
        if out.stop_reason not in ("eos", "stop") or not out.token_ids:
            return None
        kit, tools = self._kit, self._kit.renderer.tools or ()
        ids = out.token_ids[:-1] if out.token_ids[-1] in kit.ends else out.token_ids
        text = self.tokenizer.decode(ids)
        if kit.package is not None:
            turn = kit.package.parse(*play.latest, tools)
        else:
            assert kit.parser is not None, "a kit has a parser or the package"
            turn = kit.parser.parse(text, tools)
        if len(turn.calls) > 1 and kit.bridge is None and not kit.audit.supports_parallel_calls:
            why = f"{len(turn.calls)} calls in one turn, and none was run: this model's chat template shows one a turn"
            turn = Turn(malformed=Malformed(why, (0, len(text))), text=text)
        return turn if turn.calls or turn.malformed else None

    async def _act(self, play: Play, turn: Turn) -> list[ToolAnswer]:
        """Run the calls of a turn at the same time, and return their answers in the order of the calls."""
        counts, limits = self.server_manager.counts, self._kit.limits
        if isinstance(turn.malformed, Malformed):
            counts["malformed_calls"] += 1
            first, end = turn.malformed.span
            self.server_manager.timeline[-1].update(malformed=turn.malformed.reason, first=first, end=end)
            return [ToolAnswer(f"Error: {turn.malformed.reason}", error="malformed")]
        allowed = turn.calls[: limits.max_parallel_calls]
        if limits.max_tool_calls is not None:
            allowed = allowed[: max(0, limits.max_tool_calls - play.calls)]
        play.calls += len(allowed)
        began = time.monotonic()
        answers = await together(self._call(play, call) for call in allowed)
        play.tool_s += time.monotonic() - began
        counts["tool_calls"] += len(allowed)
        counts["tool_errors"] += sum(bool(a.error) for a in answers)
        if rewards := [a.reward for a in answers if a.reward is not None]:
            self.server_manager.credit(sum(rewards))
        text = f"Error: at most {limits.max_parallel_calls} calls of one turn are run, and this was one more"
        return answers + [ToolAnswer(text, error="too_many")] * (len(turn.calls) - len(allowed))

    async def _call(self, play: Play, call: ToolCall) -> ToolAnswer:
        entry = self.server_manager.begin("tool", name=call.name[:80])
        answer = await self._seen(await play.box.call(call), call.name)
        note: dict[str, float | str] = {"note": answer.note} if answer.note else {}
        if images := sum(isinstance(part, ShownImage) for part in answer.parts):
            note["images"] = images
        self.server_manager.end(entry, error=answer.error, queue_s=answer.queue_s, characters=len(answer.text), **note)
        return answer

    async def _seen(self, answer: ToolAnswer, name: str) -> ToolAnswer:
        """Return an answer with its images stored; for a model of text without them, or as a failure."""
        if not answer.parts:
            return answer
        if self._kit.pictures is None:
            return without_images(answer, name)
        return await self._kit.pictures.shown(answer, name, self.server_manager.returned)

    def _over(self, play: Play, turn: Turn, answers: Sequence[ToolAnswer]) -> bool:
        """Return True if the trajectory ends with this turn, and report the reason to the server manager."""
        why: StopReason | None = None
        found = [part for c in turn.calls for part in (c.name, _canonical(c.arguments))] or [turn.text]
        one = hashlib.sha256()
        images = (part.reference for a in answers for part in a.parts if isinstance(part, ShownImage))
        for part in (*found, *(a.text for a in answers), *images):
            one.update(f"{len(part)} {part}".encode(errors="replace"))
        play.same, play.last = (play.same + 1 if one.digest() == play.last else 1), one.digest()
        if any(call.name in play.box.tools and play.box.tools[call.name].limits.stop for call in turn.calls):
            why = "tool"
        elif (
            self._kit.limits.max_tool_calls is not None and play.calls >= self._kit.limits.max_tool_calls and turn.calls
        ):
            why = "max_tool_calls" if any(a.error == "too_many" for a in answers) else None
        if why is None and play.same >= SAME_CALLS:
            why = "no_progress"
            self.server_manager.counts["no_progress"] += 1
        self.server_manager.ended_by = why
        return why is not None

    def _observe(self, play: Play, turn: Turn, answers: Sequence[ToolAnswer]) -> None:
        """Add the answers to the prompt as tool messages: by the bridge, by the renderer of a package, or in a new
        branch."""
        kit, names = self._kit, [c.name for c in turn.calls] or [""]
        new: list[dict[str, Any]] = [
            {"role": "tool", "name": n, "tool_call_id": f"call{play.calls:03d}{k:02d}"[:9], "content": t}
            for k, (n, t) in enumerate(zip(names, (self._content(a, n) for a, n in zip(answers, names)), strict=True))
        ]
        images = [part for a in answers for part in a.parts if isinstance(part, ShownImage)]
        if not turn.calls and kit.bridge is None and not kit.audit.supports_uncalled_results:
            new = [{"role": "user", "content": m["content"]} for m in new]
        play.turns += 1
        if kit.bridge is not None:
            ids, written = kit.bridge.after(play.ids, new)
            if images:
                assert kit.pictures is not None, "it has read them"
                ids, lengths, media = kit.pictures.expanded(ids, images, play.used)
                written = np.repeat(written, lengths)
                play.media += media
            play.append(ids, 0, written)
            return
        added = kit.package.ids(*play.latest, new) if kit.package is not None else None
        marked = [{**m, "content": kit.plain.marked_content(m["content"])} for m in new]
        play.messages += [*self._own([_assistant(turn)]), *marked]
        if added is not None:
            return play.append(added, 0)
        play.ended.append(play.output())
        play.env_tokens += sum(len(kit.plain.encode(text)) for m in marked for text in _texts(m["content"]))
        play.env_tokens += sum(len(image.expansion.ids) for image in images)
        self._render(play, images)

    def _render(self, play: Play, images: Sequence[ShownImage] = ()) -> None:
        """Begin a new branch with a rendering of all messages. images: those of the messages since the last one."""
        kit = self._kit
        shown = replace(kit.renderer, tools=[dict(tool.schema) for tool in play.box.tools.values()])
        play.mask, play.written = [], []
        if kit.pictures is None:
            play.held = kit.plain.encode(shown.text(play.messages, prompt=True))
        else:
            if not play.shown:
                play.shown = kit.pictures.of_task(self.server_manager.media, self._images)
            play.shown += images
            ids = kit.plain.encode(kit.pictures.text(shown, play.messages))
            play.held, _, play.media = kit.pictures.expanded(ids, play.shown)
        play.used = len(play.held)

    def _content(self, answer: ToolAnswer, name: str) -> str | list[dict[str, Any]]:
        """Return an answer as the content of a message, with its texts shortened."""
        if not answer.parts:
            return self._cut(answer.text, name)
        return [
            {"type": "text", "text": self._cut(part, name)} if isinstance(part, str) else IMAGE_PART
            for part in answer.parts
        ]

    def _cut(self, text: str, name: str = "") -> str:
        """Return a result shortened to its maximum number of tokens: its beginning and end, with a note of the number
        of tokens that were left out."""
        tool, most = self._kit.tools.get(name), self._kit.limits.max_tool_result_tokens
        most = (tool and tool.limits.max_result_tokens) or most
        size = most * CHARACTERS_PER_TOKEN
        if len(text) > 2 * size:
            text = f"{text[:size]}\n[{len(text) - 2 * size} characters cut]\n{text[-size:]}"
        ids = rendered_ids(self.tokenizer(text, add_special_tokens=False)).tolist()
        if len(ids) <= most:
            return text
        head = (most + 1) // 2
        ends = self.tokenizer.decode(ids[:head]), self.tokenizer.decode(ids[len(ids) - (most - head) :])
        return f"{ends[0]}\n[{len(ids) - most} tokens cut]\n{ends[1]}"

    def _count(self, play: Play) -> None:
        counts = self.server_manager.counts
        if play.calls or counts:
            counts.update({"env_tokens": play.env_tokens, "tool_s": play.tool_s})


def _texts(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def _assistant(turn: Turn) -> dict[str, Any]:
    """Return a turn as an assistant message, for a new rendering."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_call_message(k, call) for k, call in enumerate(turn.calls)]
    return message


def _call_message(k: int, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": f"call{k:05d}", "type": "function", "function": function}


def _canonical(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)
