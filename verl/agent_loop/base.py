"""Agent loops: the code that makes one attempt at a task. The signatures are verl's. A recorder checks what loops
return.

A loop may rewrite text as it likes; the trained tokens are taken from the record of the server manager. A mask=1 token
that was not sampled there, after exactly the tokens that precede it in the output, is an error. Log-probs, versions,
media and side channels are the recorded ones. A loop with a branched history returns one output per branch: each is
checked (driver/checked.py), and a token that occurs in several branches is trained in the first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from verl.agent_loop.templates import RendersMessages
from verl.parameter_set import POLICY_SET
from verl.recorded import RecordedCall
from verl.rollout.base import GenerateRequest, Generates
from verl.types import Medium, Sampling, StopReason, Task, as_ids, derive_seed

if TYPE_CHECKING:
    from verl.chat.template import Renderer, TemplateAudit
    from verl.transfer_queue.base import MediaStore

T = TypeVar("T")


@dataclass(slots=True)
class AgentLoopMetrics:
    generate_sequences: float = 0.0  # seconds
    tool_calls: float = 0.0  # seconds


@dataclass(slots=True)
class AgentLoopOutput:
    """The result of an agent loop: one branch of a trajectory."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]  # 1: sampled by the model, 0: from a tool or the environment.
    response_logprobs: Sequence[float] | None = None
    routed_experts: Any = None
    multi_modal_data: Mapping[str, Any] | None = None
    reward_score: float | None = None  # None: the reward function is called.
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] | None = None
    written: Sequence[int] | None = None
    """Per token with mask 0: 1 if a tool wrote it, 0 if the template did. None: a tool wrote all."""
    media: Sequence[Medium] | None = None
    """The images of the row, with their places in `prompt_ids` and `response_ids` together. None: those of the longest
    call with which it begins, or else of the task."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class LoopNotes:
    """The data that a loop records in its server manager besides its calls, in a form that can be sent
    (`ServerManager`)."""

    counts: dict[str, int | float]
    timeline: list[dict[str, Any]]
    credits: dict[int, float]
    states: dict[int, str]
    ended_by: StopReason | None
    taken: int


class LoopFailed(RuntimeError):
    """An agent loop in a process of its own raised an error, or that process died. The text contains the error's
    name."""


@dataclass(frozen=True, slots=True)
class LoopMedia:
    """Where a loop puts the content of the images that its tools return: files, whose hashes alone go to the driver.
    Either side of a loop's process opens the store.

    owner: the name of the attempt, to which the content belongs until it ends
    refused: why no image of a tool can be trained in this run; "" if it can
    """

    store: MediaStore
    owner: str
    refused: str = ""


class ReadsImages(Protocol):
    """Reads images that a loop gives (`verl.tools.pictures.TurnPictures`)."""

    async def prompt(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any], renderer: Renderer, audit: TemplateAudit
    ) -> list[int]: ...
    async def placed(self, ids: np.ndarray, images: Sequence[Any], media: LoopMedia | None) -> tuple[Medium, ...]: ...
    def check_places(self, ids: np.ndarray, media: Sequence[Medium]) -> None: ...


NEUTRAL: Mapping[str, float] = {"repetition_penalty": 1, "n": 1}  # parameters with these values have no effect


@dataclass(eq=False)
class ServerManager:
    """The interface through which a loop generates; one per trajectory. It keeps every completion.

    The `max_tokens` of the sampling are the budget of the whole trajectory, including the tokens of the environment. A
    call without room samples nothing and ends with `context_full`. Calls after `max_turns` calls or after `wall_s`
    seconds sample nothing either.

    counts: further counts of the loop, for `agent/NAME` in the metrics
    credits_turns: the algorithm reads rewards of single turns (`credit`)
    routes: its tokens are trained, with the experts of the rollout where the engine records them
    media, returned: the images of the task, and the store of those that tools return; None: the queue stores none
    timeline: the turns and tool calls with their times
    """

    engine: Generates
    sampling: Sampling
    seed_parts: Sequence[object]
    prefix_key: str | None = None
    parameters: str = POLICY_SET.id
    media: tuple[Medium, ...] = ()
    returned: LoopMedia | None = None
    max_turns: int | None = None
    credits_turns: bool = False
    wall_s: float = math.inf
    routes: bool = False

    def __post_init__(self) -> None:
        self._credits: dict[int, float] = {}
        self._states: dict[int, object] = {}
        self._calls = 0
        self._limit = 0  # context tokens, counted from the first prompt
        self.taken = 0  # tokens of the budget that are part of the first prompt
        self.record: list[RecordedCall] = []
        # the budget that left no room for the last call, or the loop's own reason
        self.ended_by: StopReason | None = None
        self.counts: Counter[str] = Counter()
        self.timeline: list[dict[str, Any]] = []
        self.pictures: ReadsImages | None = None  # of the model of the run, in which loops play
        self._born_s = time.monotonic()

    def take(self, tokens: int) -> None:
        """Count tokens that an environment adds to the first prompt before the first call. Raise ValueError if there is
        no room."""
        assert not self.record
        self.taken += max(0, tokens)
        if self.taken >= self.sampling.max_tokens:
            most = self.sampling.max_tokens
            raise ValueError(f"an environment adds {self.taken} tokens to a prompt: rollout.max_response_tokens={most}")

    def begin(self, kind: Literal["turn", "tool"], **facts: float | str) -> dict[str, Any]:
        """Begin an entry of the timeline; `end` completes it."""
        entry = {"kind": kind, "start_s": time.monotonic() - self._born_s, **facts}
        self.timeline.append(entry)
        return entry

    def end(self, entry: dict[str, Any], **facts: float | str) -> None:
        entry.update(took_s=time.monotonic() - self._born_s - entry["start_s"], **facts)

    def credit(self, reward: float, *, turn: int = -1, state: object = None) -> None:
        """Add a reward to one turn (the last one by default). It is placed at the turn's last token, and rewards of a
        turn add up. `state` is the state in which the turn was played, for algorithms that compare turns in the same
        state; by default it is the text and the images that the model saw since its previous turn."""
        if not -len(self.record) <= turn < len(self.record):
            raise ValueError(f"turn={turn}: the model has played {len(self.record)} turns; credit one of them")
        k = turn % len(self.record)
        if not math.isfinite(reward):
            raise ValueError(f"turn {k}: a reward of {reward}; give a finite number")
        self._credits[k] = self._credits.get(k, 0.0) + float(reward)
        if state is not None:
            self._states[k] = state

    def turn_side(self, k: int) -> dict[str, np.ndarray]:
        """Return the side channels [t] of call k: its number, a hash of its state, and zeros for its reward."""
        if not self.credits_turns:
            return {}
        call, n = self.record[k], len(self.record[k].completion.ids)
        if k in self._states:
            key = derive_seed("state", str(self._states[k]))
        else:
            before = self.record[k - 1] if k else None
            known = np.concatenate([before.prompt_ids, before.completion.ids]) if before else call.prompt_ids[:0]
            same_ids = np.array_equal(call.prompt_ids[: len(known)], known)
            same_media = tuple(m for m in call.media if m.start < len(known)) == (before.media if before else ())
            first = len(known) if same_ids and same_media else 0  # 0: the history was rendered anew
            shown = [m.reference for m in call.media if m.start >= first]  # images of one size have equal ids
            key = derive_seed("shown", call.prompt_ids[first:].tobytes().hex(), *shown)
        channels = {"turn": np.full(n, k, np.int64), "turn_state": np.full(n, key & (2**62 - 1), np.int64)}
        return {**channels, "turn_reward": np.zeros(n, np.float32)}

    def turn_reward(self, k: int) -> float:
        return self._credits.get(k, 0.0)

    def made_of(self) -> dict[str, Any]:
        """Return the constructor arguments of an equal manager over another engine."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "engine"}

    def notes(self) -> LoopNotes:
        states = {k: str(state) for k, state in self._states.items()}
        return LoopNotes(dict(self.counts), self.timeline, self._credits, states, self.ended_by, self.taken)

    def take_over(self, record: Sequence[RecordedCall], notes: LoopNotes) -> None:
        """Take over the record and notes of a loop that was played elsewhere."""
        self.record, self.timeline, self.counts = list(record), notes.timeline, Counter(notes.counts)
        self._credits, self._states = notes.credits, dict(notes.states)
        self.ended_by, self.taken = notes.ended_by, notes.taken

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        media: Sequence[Medium] | None = None,
    ) -> TokenOutput:
        """Sample an answer. image_data: all images of the prompt, in order · media: the same with their places; None:
        those of the task, at their places in its prompt."""
        if video_data:
            raise ValueError("video_data: a loop adds no videos to those of its row; give their frames as images")
        wanted, ids = self._merged(sampling_params), as_ids(prompt_ids)
        if image_data:
            if self.pictures is None:
                raise ValueError("image_data: this model takes no images; leave them out")
            media = await self.pictures.placed(ids, image_data, self.returned)
        elif media is None and self.pictures is not None:
            self.pictures.check_places(ids, self.media)
        turn, self._calls = self._calls, self._calls + 1
        self._limit = self._limit or len(ids) + self.sampling.max_tokens - self.taken
        room = self._limit - len(ids)
        spent = self.max_turns is not None and len(self.record) >= self.max_turns
        late = bool(self.record) and time.monotonic() - self._born_s >= self.wall_s
        self.ended_by = "max_turns" if spent else "context_full" if room < 1 else "wall" if late else None
        if self.ended_by is not None:
            if spent:
                self.counts["turn_limit"] = 1
            return TokenOutput([], [], self.ended_by)
        sampling = wanted.of_call(min(wanted.max_tokens, room), derive_seed(*self.seed_parts, turn))
        entry = self.begin("turn", number=turn, prompt_tokens=len(ids))
        request = self.request(request_id, ids, sampling, media)
        completion = await self.engine.generate(request)
        call = RecordedCall.of(request, completion, self.record)
        self.record.append(call)
        self.end(entry, tokens=len(completion.ids), why=completion.stop_reason)
        return TokenOutput(call.token_ids.copy(), completion.logprobs.tolist(), completion.stop_reason)

    def request(
        self, request_id: str, ids: np.ndarray, sampling: Sampling, media: Sequence[Medium] | None = None
    ) -> GenerateRequest:
        """Return a request to the engine, with the prefix key and the parameter set of this trajectory. media: as in
        `generate`."""
        key, parameters, seen = self.prefix_key, self.parameters, self.media if media is None else tuple(media)
        return GenerateRequest(
            request_id, ids, sampling, prefix_key=key, parameters=parameters, media=seen, routes=self.routes
        )

    def _merged(self, params: Mapping[str, Any]) -> Sampling:
        """Return the run's sampling, with the loop's changes that leave the distribution as it is, because the trainer
        applies the same distribution."""
        run = self.sampling
        if params == sampling_params_of(run):  # the loop passed its parameters on unchanged
            return run
        given = {name: value for name, value in params.items() if value is not None and name != "logprobs"}
        length = int(given.pop("max_tokens", given.pop("max_new_tokens", run.max_tokens)))
        if length < 1:
            raise ValueError(f"max_tokens={length}: at least one token must be sampled")
        stop, stop_ids = given.pop("stop", run.stop), tuple(given.pop("stop_token_ids", run.stop_token_ids))
        fixed = {name: getattr(run, name) for name in ("temperature", "top_p", "top_k", "min_p", "ignore_eos")}
        if given.get("top_k") == -1:  # verl's value for no limit
            given["top_k"] = 0
        for name, value in given.items():
            if name in NEUTRAL and value != NEUTRAL[name]:
                raise ValueError(f"{name}={value} is not supported; leave it at {NEUTRAL[name]}")
            if name in fixed and value != fixed[name]:
                change = f"{fixed[name]} -> {value}"
                raise ValueError(f"an agent loop cannot change {name} of a sample ({change}); set rollout.{name}")
        if unknown := sorted(given.keys() - fixed.keys() - NEUTRAL.keys()):
            known = sorted({"max_tokens", "max_new_tokens", "stop", "stop_token_ids", *fixed, *NEUTRAL})
            raise ValueError(f"sampling_params {unknown} are unknown; known: {known}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return replace(run, max_tokens=min(length, run.max_tokens), stop=stops, stop_token_ids=stop_ids)


def sampling_params_of(sampling: Sampling) -> dict[str, Any]:
    """Return the `sampling_params` of a loop, by verl's names."""
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    return {"max_tokens": sampling.max_tokens, **drawn, "repetition_penalty": 1.0, "logprobs": True}


def register(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Return verl's decorator of a loop, with which rows may also select the class by `name`."""

    def named(cls: type[AgentLoopBase]) -> type[AgentLoopBase]:
        cls.registered = name
        return cls

    return named


class AgentLoopBase(RendersMessages):
    """The base class of loops: subclass it and write `run`. There is one instance per trajectory."""

    ends_when_cancelled = False
    """True if the loop surely ends when it is cancelled, so that it can run in the caller's task. Not inherited."""

    registered = ""
    """The name that `register` gave to this class itself."""

    def __init_subclass__(cls) -> None:
        cls.registered = ""
        cls.ends_when_cancelled = cls.__dict__.get("ends_when_cancelled", False)

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
    ) -> None:
        self.config, self.server_manager = trainer_config, server_manager
        self.tokenizer, self.processor = tokenizer, processor

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> LoopOutput:
        raise AssertionError(f"{type(self).__name__} does not define run()")


LoopOutput = AgentLoopOutput | Sequence[AgentLoopOutput]
"""A sequence contains the branches of one trajectory in the order of play; the last one contains the answer."""
AgentLoopFactory = Callable[[ServerManager, Task], AgentLoopBase]


def outputs_of(output: LoopOutput) -> Sequence[AgentLoopOutput]:
    """Return the branches. Raise ValueError for an output without branches, and for a reward of a branch before the
    last."""
    if isinstance(output, AgentLoopOutput):
        return (output,)
    listed = isinstance(output, list | tuple)
    if not listed or not output or not all(isinstance(one, AgentLoopOutput) for one in output):
        kinds = (
            f"list of {', '.join(type(o).__name__ for o in output) or 'nothing'}" if listed else type(output).__name__
        )
        raise ValueError(f"the agent loop returned a {kinds}: return one AgentLoopOutput, or a list of them")
    if early := {one.reward_score for one in output[:-1]} - {None, output[-1].reward_score}:
        raise ValueError(
            f"reward_score={early.pop()} of a branch: a trajectory has one reward; set it on the last branch"
        )
    return output


async def together(plays: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. If one coroutine raises, the others are cancelled, and its error is raised after
    they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play) for play in plays]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
