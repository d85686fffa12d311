"""Agent loops and tools in a process of their own: the messages between it and the driver, and its side of them."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from verl.agent_loop.base import AgentLoopOutput, LoopNotes, LoopOutput, ServerManager, outputs_of
from verl.agent_loop.registry import Loops
from verl.rollout.base import Completion, GenerateRequest
from verl.sandbox.companion import FrameChannel
from verl.types import Medium, Sampling, Task, as_ids

GC_THRESHOLD = 50_000
RELEASE_S = 10.0  # the time that cancelled trajectories get to release their tools
IS_NOT_SENT = "cannot leave its process: give plain values, or play it in the driver (agent.loop=NAME@driver)"


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The loops of the process, as `Loops` describes them."""

    pid: int
    longest_call_s: float
    default: str
    names: list[str]
    tools: list[dict[str, Any]]
    notes: list[str]
    contents: dict[str, str]
    rewarded: bool = False


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    text: str
    for_user: bool  # a ValueError, which the user has to correct


class GenerateCall(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A call of `generate` in the process, to be run by the driver's engine."""

    play: int
    call: int
    request_id: str
    keep: int  # The number of leading ids of the trajectory's previous call that precede `ids`.
    ids: bytes  # int64
    sampling: Sampling
    media: tuple[Medium, ...]


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """A request to cancel a call: its result is not needed any more."""

    play: int
    call: int


class Output(msgspec.Struct, frozen=True, array_like=True):
    """An AgentLoopOutput in a form that can be sent."""

    prompt: int  # The number of prompt ids.
    keep: int  # The number of leading ids of the trajectory's last call that precede `ids`.
    ids: bytes  # int64
    mask: bytes  # uint8: 1 sampled, 2 written by a tool.
    reward_score: Any
    num_turns: int
    generate_s: float
    tool_s: float
    extra_fields: dict[str, Any]
    media: tuple[Medium, ...] | None


class PlayEnded(msgspec.Struct, frozen=True, array_like=True, tag="played"):
    """The message that a trajectory has ended with outputs."""

    play: int
    outputs: list[Output]
    recorded: list[int]  # The calls of its record, in their order.
    notes: LoopNotes


class PlayFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The message that a trajectory has failed."""

    play: int
    text: str  # contains the error's name
    recorded: list[int]
    notes: LoopNotes | None  # The notes, as far as they can be sent.


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedTask:
    """A request to play a trajectory in the process."""

    task: Task
    manager: Mapping[str, Any]  # The constructor arguments of its ServerManager.
    params: dict[str, Any]
    row: Mapping[str, Any]


@dataclass(eq=False, slots=True)
class GrowingIds:
    """The token ids of a trajectory, in an array with free space at its end, so that appending copies only the new ids.
    Used elements are never overwritten, so returned views do not change. Driver and process each have the same history,
    and send each other only new ids."""

    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    used: int = 0

    def then(self, keep: int, new: np.ndarray) -> np.ndarray:
        """Replace the history by its first `keep` ids and `new`. Return it: [t] int64, a view."""
        end = keep + len(new)
        if keep < self.used or end > len(self.held):
            grown = np.empty(2 * end, np.int64)
            grown[:keep] = self.held[:keep]
            self.held = grown
        if len(new):  # otherwise the array may be read-only
            self.held[keep:end] = new
        self.used = end
        return self.held[:end]

    def whole(self, keep: int, new: np.ndarray) -> np.ndarray:
        """Return the first `keep` ids and `new` as `then` does, without changing the history."""
        return np.concatenate([self.held[:keep], new])

    @staticmethod
    def of(prompt: np.ndarray) -> GrowingIds:
        return GrowingIds(prompt, len(prompt))

    def agreeing(self, ids: np.ndarray) -> int:
        """Return the number of leading ids that equal those of the history."""
        n = min(self.used, len(ids))
        same = self.held[:n] == ids[:n]
        return n if same.all() else int(same.argmin())


@dataclass(eq=False, slots=True)
class DriverEngine:
    """The engine that a trajectory's server manager has in this process. It sends every call to the driver's engine."""

    play: int
    say: Callable[[msgspec.Struct], None]
    known: GrowingIds
    waiting: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    """The number of each completion, by its `id()`. The record keeps the completions alive."""
    made: int = 0
    manager: ServerManager | None = None  # The server manager of the trajectory.

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate with the driver's engine. The driver adds the trajectory's prefix key and parameter set."""
        prompt_ids, sampling, media = request.prompt_ids, request.sampling, request.media
        call, self.made = self.made, self.made + 1
        keep = self.known.agreeing(prompt_ids)
        self.known.then(keep, prompt_ids[keep:])  # a copy, because the loop may change its own array
        self.waiting[call] = asyncio.get_running_loop().create_future()
        new = prompt_ids[keep:].tobytes()
        self.say(GenerateCall(self.play, call, str(request.id), keep, new, sampling, media))
        try:
            completion = await self.waiting[call]
        except asyncio.CancelledError:
            self.say(CancelCall(self.play, call))
            raise
        finally:
            del self.waiting[call]
        self.calls[id(completion)] = call
        return completion

    def failed(self, why: BaseException) -> None:
        """Send the failure of the trajectory, with the notes that its server manager has so far."""
        recorded: list[int] = []
        notes: LoopNotes | None = None
        try:
            if self.manager is not None:
                recorded, notes = self.recorded(), replace(self.manager.notes(), ended_by=None)
        except Exception:  # user code may have changed the notes
            recorded = []
        if cannot_leave(notes, LoopNotes | None):
            recorded, notes = [], None
        self.say(PlayFailed(self.play, _sendable(f"{type(why).__name__}: {why}"), recorded, notes))

    def recorded(self) -> list[int]:
        """Return the numbers of the recorded calls, in their order."""
        assert self.manager is not None
        return [self.calls[id(call.completion)] for call in self.manager.record]


def cannot_leave(value: Any, kind: Any) -> str:
    """Return the reason why a message cannot be encoded, or not be decoded by the other side; "" if it can be sent."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_plain), type=kind)
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError) as e:
        return str(e)
    return ""


async def host(given: tuple[Callable[[Any, int], Loops], Any, int], channel: FrameChannel) -> None:
    """Build the loops with the given function, and play trajectories until the driver ends the channel."""

    def say(message: msgspec.Struct) -> None:
        channel.send(msgspec.msgpack.encode(message, enc_hook=_plain))

    build, config, start = given
    try:
        loops = build(config, start)
    except ValueError as e:
        return await _refuse(channel, say, StartFailed(_sendable(str(e)), True))
    except Exception:  # user code, while it is imported
        return await _refuse(channel, say, StartFailed(_sendable(traceback.format_exc()), False))
    gc.freeze()  # these objects live as long as the run, and a burst of trajectories is no reason to search for cycles
    gc.set_threshold(GC_THRESHOLD)
    players = loops.players
    named = players.default, list(players.names), [dict(tool) for tool in players.tools]
    say(Ready(os.getpid(), loops.longest_call_s, *named, list(loops.notes), dict(loops.contents), players.rewarded))
    plays: dict[int, tuple[DriverEngine, asyncio.Task[None]]] = {}
    async for frame in channel.frames():
        kind, play, *rest = pickle.loads(frame)
        if kind == "close":
            break
        if kind == "play":
            asking = DriverEngine(play, say, GrowingIds.of(rest[0].task.prompt_ids.copy()))
            plays[play] = asking, asyncio.create_task(_play(loops, rest[0], asking))
            plays[play][1].add_done_callback(lambda _, play=play: plays.pop(play))  # type: ignore[misc]
        elif play in plays:
            _pass_on(kind, rest, *plays[play])
    if left := [task for _, task in plays.values()]:
        for task in left:
            task.cancelling() or task.cancel()  # never cancelled twice, because that could break a release
        await asyncio.wait(left, timeout=RELEASE_S)
    await loops.close()


def _pass_on(kind: str, rest: Sequence[Any], asking: DriverEngine, task: asyncio.Task[None]) -> None:
    if kind == "cancel":
        asking.failed(asyncio.CancelledError())  # send its notes before its tools are released
        task.cancel()
    elif (waiting := asking.waiting.get(rest[0])) is not None and not waiting.done():
        if kind == "sampled":
            waiting.set_result(rest[1])
        else:
            waiting.set_exception(rest[1])


async def _refuse(channel: FrameChannel, say: Callable[[msgspec.Struct], None], why: StartFailed) -> None:
    say(why)
    async for _ in channel.frames():  # until the driver has received it
        return


async def _play(loops: Loops, part: HostedTask, asking: DriverEngine) -> None:
    asking.manager = manager = ServerManager(asking, **part.manager)
    try:
        returned = await loops.make(manager, part.task).run(part.params, **part.row)
        asking.say(_played(returned, manager, asking))
    except BaseException as e:  # a loop is user code, and so are its results and errors
        asking.failed(e)


def _played(returned: LoopOutput, manager: ServerManager, asking: DriverEngine) -> PlayEnded:
    outputs = [_output(one, asking.known) for one in outputs_of(returned)]
    message = PlayEnded(asking.play, outputs, asking.recorded(), manager.notes())
    bare = [msgspec.structs.replace(one, ids=b"", mask=b"") for one in outputs]
    if why := cannot_leave(msgspec.structs.replace(message, outputs=bare), PlayEnded):
        raise ValueError(f"what the agent loop returned, or told its server manager, {IS_NOT_SENT} ({why})")
    return message


def _output(one: AgentLoopOutput, known: GrowingIds) -> Output:
    prompt, response = as_ids(one.prompt_ids), as_ids(one.response_ids)
    whole = np.concatenate([prompt, response])
    keep = known.agreeing(whole)
    mask = np.asarray(one.response_mask, bool).astype(np.uint8)
    mask |= np.uint8(2) * (np.ones(len(mask), bool) if one.written is None else np.asarray(one.written, bool))
    return Output(
        prompt=len(prompt),
        keep=keep,
        ids=whole[keep:].tobytes(),
        mask=mask.tobytes(),
        reward_score=one.reward_score,
        num_turns=int(one.num_turns),
        generate_s=float(one.metrics.generate_sequences),
        tool_s=float(one.metrics.tool_calls),
        extra_fields=one.extra_fields,
        media=None if one.media is None else tuple(one.media),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise ValueError(f"a {type(value).__name__} in it")


def _sendable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded in UTF-8."""
    return text.encode(errors="backslashreplace").decode()
