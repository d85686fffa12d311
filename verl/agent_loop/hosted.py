"""Agent loops and tools in a process of their own: what is said between it and the driver, and its side of it."""

from __future__ import annotations

import asyncio
import gc
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from verl.agent_loop.base import LoopOutput, ServerManager, Told, outputs_of
from verl.agent_loop.registry import Loops
from verl.rollout.base import Completion
from verl.sandbox.companion import Channel
from verl.types import Sampling, Task, as_ids

GC_THRESHOLD = 50_000
IS_NOT_SENT = "cannot leave its process: give plain values, or play it in the driver (agent.loop=NAME@driver)"


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """See `Loops`."""

    default: str
    names: list[str]
    tools: list[dict[str, Any]]
    notes: list[str]
    contents: dict[str, str]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    text: str
    for_user: bool  # it is a ValueError's: the user's to mend


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A call of `generate`. keep: leading ids of the trajectory's call before that stand in this one, before `ids`."""

    play: int
    call: int
    request_id: str
    keep: int
    ids: bytes  # int64
    sampling: Sampling


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Nobody waits for that call any more."""

    play: int
    call: int


class Output(msgspec.Struct, frozen=True, array_like=True):
    """An AgentLoopOutput. ids int64 · mask uint8."""

    prompt_ids: bytes
    response_ids: bytes
    mask: bytes
    reward_score: Any
    num_turns: int
    generate_s: float
    tool_s: float
    extra_fields: dict[str, Any]


class Played(msgspec.Struct, frozen=True, array_like=True, tag="played"):
    """recorded: the calls of its record, in their order."""

    play: int
    outputs: list[Output]
    recorded: list[int]
    told: Told


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    play: int
    text: str  # the error's name is in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A trajectory to play there. manager: what its ServerManager is made of."""

    task: Task
    manager: Mapping[str, Any]
    params: dict[str, Any]
    row: Mapping[str, Any]


@dataclass(eq=False, slots=True)
class Asking:
    """What a trajectory generates with: the driver's engine."""

    play: int
    say: Callable[[msgspec.Struct], None]
    waiting: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)  # of an answer's `id`; the record holds them
    known: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    made: int = 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        prefix_key: str | None = None,
        adapter: str | None = None,
        media: Sequence[str] = (),
    ) -> Completion:
        """See `RolloutEngine`; the driver knows the trajectory's key, adapter and media."""
        call, self.made = self.made, self.made + 1
        keep = agreeing(self.known, prompt_ids)
        self.known = prompt_ids.copy()  # the loop may write to its own
        self.waiting[call] = asyncio.get_running_loop().create_future()
        self.say(Ask(self.play, call, str(request_id), keep, prompt_ids[keep:].tobytes(), sampling))
        try:
            completion = await self.waiting[call]
        except asyncio.CancelledError:
            self.say(Drop(self.play, call))
            raise
        finally:
            del self.waiting[call]
        self.calls[id(completion)] = call
        return completion


def agreeing(known: np.ndarray, ids: np.ndarray) -> int:
    """How many leading ids are the same."""
    n = min(len(known), len(ids))
    differs = np.flatnonzero(known[:n] != ids[:n])
    return int(differs[0]) if len(differs) else n


async def host(given: tuple[Callable[[Any], Loops], Any], channel: Channel) -> None:
    """Makes the loops with the function that it is given, and plays until it is told to close."""

    def say(message: msgspec.Struct) -> None:
        channel.send(msgspec.msgpack.encode(message, enc_hook=_plain))

    build, config = given
    try:
        loops = build(config)
    except ValueError as e:
        return await _refuse(channel, say, Refused(_sendable(str(e)), True))
    except Exception:  # user code, as it is imported
        return await _refuse(channel, say, Refused(_sendable(traceback.format_exc()), False))
    gc.freeze()  # what lives as long as the run; and a burst of trajectories is no reason to look for cycles
    gc.set_threshold(GC_THRESHOLD)
    players = loops.players
    tools = [dict(tool) for tool in players.tools]
    say(Ready(players.default, list(players.names), tools, list(loops.notes), dict(loops.contents)))
    plays: dict[int, tuple[Asking, asyncio.Task[None]]] = {}
    async for frame in channel.frames():
        kind, play, *rest = pickle.loads(frame)
        if kind == "close":
            break
        if kind == "play":
            asking = Asking(play, say)
            plays[play] = asking, asyncio.create_task(_play(loops, rest[0], asking))
            plays[play][1].add_done_callback(lambda _, play=play: plays.pop(play))  # type: ignore[misc]
        elif play in plays:
            _pass_on(kind, rest, *plays[play])
    loops.close()


def _pass_on(kind: str, rest: Sequence[Any], asking: Asking, task: asyncio.Task[None]) -> None:
    if kind == "cancel":
        task.cancel()
    elif (waiting := asking.waiting.get(rest[0])) is not None and not waiting.done():
        if kind == "sampled":
            waiting.set_result(rest[1])
        else:
            waiting.set_exception(rest[1])


async def _refuse(channel: Channel, say: Callable[[msgspec.Struct], None], why: Refused) -> None:
    say(why)
    async for _ in channel.frames():  # until it has been heard
        return


async def _play(loops: Loops, part: Part, asking: Asking) -> None:
    manager = ServerManager(asking, **part.manager)
    try:
        returned = await loops.make(manager, part.task).run(part.params, **part.row)
        asking.say(_played(returned, manager, asking))
    except (Exception, SystemExit, asyncio.CancelledError) as e:  # a loop is user code, and what it returns
        asking.say(Failed(asking.play, _sendable(f"{type(e).__name__}: {e}")))


def _played(returned: LoopOutput, manager: ServerManager, asking: Asking) -> Played:
    outputs = [
        Output(
            prompt_ids=as_ids(one.prompt_ids).tobytes(),
            response_ids=as_ids(one.response_ids).tobytes(),
            mask=np.asarray(one.response_mask, bool).tobytes(),
            reward_score=one.reward_score,
            num_turns=int(one.num_turns),
            generate_s=float(one.metrics.generate_sequences),
            tool_s=float(one.metrics.tool_calls),
            extra_fields=one.extra_fields,
        )
        for one in outputs_of(returned)
    ]
    recorded = [asking.calls[id(call.completion)] for call in manager.record]
    message = Played(asking.play, outputs, recorded, manager.told())
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(message, enc_hook=_plain), type=Played)
    except (msgspec.DecodeError, TypeError, OverflowError, RecursionError) as e:
        raise ValueError(f"what the agent loop returned, or told its server manager, {IS_NOT_SENT} ({e})") from None
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise ValueError(f"a {type(value).__name__} in reward_score or extra_fields {IS_NOT_SENT}")


def _sendable(text: str) -> str:
    """Without lone surrogates, which have no place in UTF-8."""
    return text.encode(errors="backslashreplace").decode()
