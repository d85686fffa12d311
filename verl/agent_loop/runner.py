"""The driver's side of the process that plays agent loops and tools, which are user code.

The engine, the record of the sampled tokens, and the check of the trained tokens are in the driver. If the process
dies, only the attempts that it played at that time can fail.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, LoopFailed, ServerManager
from verl.agent_loop.hosted import (
    RELEASE_S,
    CancelCall,
    GenerateCall,
    GrowingIds,
    HostedTask,
    Output,
    PlayEnded,
    PlayFailed,
    Ready,
    StartFailed,
    host,
)
from verl.agent_loop.registry import Loops
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.data.formats import SINGLE_TURN, Players
from verl.errors import Refused
from verl.recorded import RecordedCall
from verl.rollout.base import ReplicaLost
from verl.sandbox.companion import CLOSE_S, Companion
from verl.types import Task

START_S = 600.0
NOTES_S = 1.0  # the time that a cancelled trajectory gets to send its counts
MESSAGES = msgspec.msgpack.Decoder(Ready | StartFailed | GenerateCall | CancelCall | PlayEnded | PlayFailed)
BROKEN = "ToolBroken: the process of agent loops and tools"


@dataclass(eq=False, slots=True)
class Playing:
    """A trajectory that is played in the process, or waits to be played."""

    manager: ServerManager
    part: HostedTask
    ended: asyncio.Future[list[AgentLoopOutput]]
    known: GrowingIds
    number: int = -1  # The number of its latest play.
    record: dict[int, RecordedCall] = field(default_factory=dict)  # The calls by their numbers.
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def end(self, how: list[AgentLoopOutput] | Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(how) if isinstance(how, Exception) else self.ended.set_result(how)

    def over(self) -> None:
        """Cancel the trajectory's calls and clear its record: its play has ended, or will be repeated from the
        beginning."""
        for task in list(self.calls.values()):
            task.cancel()
        self.known, self.record, self.calls = GrowingIds.of(self.part.task.prompt_ids), {}, {}


class LoopRunner:
    """Plays agent loops in another process. If the process dies, the next trajectory starts a new one. An object
    belongs to one event loop.

    If the process dies while it plays one trajectory, that trajectory fails. If it plays several, they are suspects and
    are played again: the first half of them, while all other trajectories wait. If that half ends without a death, it
    is cleared; if the process dies again, the suspects are the first half of it, until one trajectory or none is found
    to be the cause. The tasks of failed trajectories are then played alone. The time limit of an attempt includes all
    of this.
    build: an importable function that makes the loops in the process; its argument is the number of earlier starts
    silent_s: the longest time that its event loop may be blocked, if no tool call may take longer
    memory_mb: the memory that it may use beyond that of the loops themselves
    """

    def __init__(
        self, build: Callable[[Any, int], Loops], given: object, *, silent_s: float, memory_mb: float = math.inf
    ) -> None:
        self._build, self._given, self._silent_s, self._memory_mb = build, given, silent_s, memory_mb
        self._companion: Companion | None = None
        self._starts = 0
        self._starting: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._plays: dict[int, Playing] = {}
        self._line: list[Playing] = []  # the waiting trajectories, suspects included
        self._suspects: list[Playing] = []
        self._left: set[int] = set()  # plays that were cancelled but have not ended in the process
        self._alone: set[str] = set()  # tasks
        self._numbers = itertools.count()

    async def start(self) -> Ready:
        """Start the process and return its loops. Raise ValueError for an error of the user."""
        companion = await Companion.start(host, (self._build, self._given, self._starts))
        self._starts += 1
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Ready] = loop.create_future()
        self._listening = loop.create_task(self._listen(companion, ready))
        try:
            async with asyncio.timeout(START_S):
                found = await ready
        except BaseException as e:
            await companion.kill("it did not start")
            if isinstance(e, TimeoutError):
                raise LoopFailed(f"{BROKEN} did not start in {START_S:g} s") from None
            raise
        companion.watch(max(self._silent_s, found.longest_call_s), found.pid, self._memory_mb)
        self._companion = companion
        return found

    async def play(self, manager: ServerManager, part: HostedTask) -> list[AgentLoopOutput]:
        """Play a trajectory. Raise LoopFailed if the loop raises or ends the process."""
        known = GrowingIds.of(part.task.prompt_ids)
        playing = Playing(manager, part, asyncio.get_running_loop().create_future(), known)
        # the result may never be awaited
        playing.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._line.append(playing)
        self._start_waiting()
        try:
            await asyncio.wait({playing.ended})
            return playing.ended.result()
        except (asyncio.CancelledError, ReplicaLost) as e:
            if playing.number in self._plays and self._companion is not None:
                self._left.add(playing.number)
                self._companion.send(("cancel", playing.number))
                if isinstance(e, asyncio.CancelledError):
                    await asyncio.wait({playing.ended}, timeout=NOTES_S)  # for its notes
            raise
        finally:
            playing.over()
            self._plays.pop(playing.number, None)
            for those in (self._line, self._suspects):
                if playing in those:
                    those.remove(playing)
            self._start_waiting()

    async def close(self) -> None:
        """End the process after its trajectories have released their tools and the tools are closed."""
        companion, self._companion = self._companion, None
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if companion is not None:
            await companion.stop(("close", 0), RELEASE_S + CLOSE_S)
        if self._listening is not None:
            await asyncio.wait({self._listening})

    def _start_waiting(self) -> None:
        """Start the trajectories that may be played now."""
        if self._companion is None:
            if self._line and (self._starting is None or self._starting.done()):
                self._starting = asyncio.create_task(self._start_again())
            return
        for playing in self._next():
            self._line.remove(playing)
            playing.number = next(self._numbers)
            try:
                self._companion.send(("play", playing.number, playing.part))
            except ValueError as e:
                playing.end(LoopFailed(f"ValueError: its row, with its prompt: {e}"))
            else:
                self._plays[playing.number] = playing

    def _next(self) -> list[Playing]:
        if self._suspects:
            return [] if self._plays else self._suspects[: (len(self._suspects) + 1) // 2]
        if self._alone and any(self._is_lone(one) for one in self._plays.values()):
            return []
        if lone := [one for one in self._line if self._is_lone(one)] if self._alone else []:
            return [] if self._plays else lone[:1]
        return self._line.copy()

    def _is_lone(self, playing: Playing) -> bool:
        return playing.part.task.task_id in self._alone

    async def _start_again(self) -> None:
        try:
            await self.start()
        # the waiting trajectories get the error; the next one tries to start the process again
        except (ValueError, LoopFailed, OSError) as e:
            waiting, self._line, self._suspects = self._line, [], []
            for playing in waiting:
                playing.end(LoopFailed(f"{BROKEN} cannot be started again: {e}"))
        else:
            self._start_waiting()

    async def _listen(self, companion: Companion, ready: asyncio.Future[Ready]) -> None:
        async for frame in companion.frames():
            try:
                self._receive(companion, MESSAGES.decode(frame), ready)
            except (msgspec.DecodeError, asyncio.InvalidStateError, LookupError, ValueError):
                await companion.kill("it said what no process of ours says")
        died = LoopFailed(f"{BROKEN} is gone: {companion.ended}")
        if not ready.done():
            ready.set_exception(died)
        if self._companion is companion:
            self._companion = None
            self._died(died)

    def _died(self, died: LoopFailed) -> None:
        """Handle a death of the process: fail the trajectory, or begin to search for the one that caused it (see the
        class)."""
        there = [playing for playing in self._plays.values() if not playing.ended.done()]
        known, self._left, self._plays = len(there) == 1 and not self._left, set(), {}
        if known:
            self._suspects = []
            self._alone.add(there[0].part.task.task_id)
            return there[0].end(died)
        for playing in there:
            playing.over()
        self._line, self._suspects = there + self._line, there
        self._start_waiting()

    def _receive(
        self,
        companion: Companion,
        message: Ready | StartFailed | GenerateCall | CancelCall | PlayEnded | PlayFailed,
        ready: asyncio.Future[Ready],
    ) -> None:
        if isinstance(message, Ready):
            return ready.set_result(message)
        if isinstance(message, StartFailed):
            return ready.set_exception(Refused(message.text) if message.for_user else LoopFailed(message.text))
        if (playing := self._plays.get(message.play)) is None:  # it was cancelled
            if isinstance(message, PlayEnded | PlayFailed):
                self._left.discard(message.play)
        elif isinstance(message, GenerateCall):
            ids = playing.known.then(message.keep, np.frombuffer(message.ids, np.int64))
            playing.calls[message.call] = asyncio.create_task(self._answer(companion, playing, message, ids))
        elif isinstance(message, CancelCall):
            playing.record.pop(message.call, None)  # later calls keep the routes of its tokens
            if message.call in playing.calls:
                playing.calls[message.call].cancel()
        elif isinstance(message, PlayFailed):
            if message.notes is not None:
                playing.manager.take_over([playing.record[call] for call in message.recorded], message.notes)
            playing.end(LoopFailed(message.text))
        else:
            playing.manager.take_over([playing.record[call] for call in message.recorded], message.notes)
            playing.end([_output(one, playing.known) for one in message.outputs])

    async def _answer(self, companion: Companion, playing: Playing, message: GenerateCall, ids: np.ndarray) -> None:
        manager = playing.manager
        try:
            request = manager.request(message.request_id, ids, message.sampling, message.media)
            completion = await manager.engine.generate(request)
            playing.record[message.call] = RecordedCall.of(request, completion, playing.record.values())
            companion.send(("sampled", message.play, message.call, replace(completion, routes=None)))
        except ReplicaLost as e:
            playing.end(e)
        except Exception as e:  # the loop in the process may handle this error
            same = ValueError(str(e)) if isinstance(e, ValueError) else RuntimeError(f"{type(e).__name__}: {e}")
            companion.send(("failed", message.play, message.call, same))
        finally:
            playing.calls.pop(message.call, None)


def _output(message: Output, known: GrowingIds) -> AgentLoopOutput:
    whole = known.whole(message.keep, np.frombuffer(message.ids, np.int64))
    prompt, response = whole[: message.prompt], whole[message.prompt :]
    mask = np.frombuffer(message.mask, np.uint8)
    return AgentLoopOutput(
        *(prompt, response, mask & 1 > 0),  # type: ignore[arg-type]
        written=mask & 2 > 0,  # type: ignore[arg-type]
        reward_score=message.reward_score,
        num_turns=message.num_turns,
        metrics=AgentLoopMetrics(generate_sequences=message.generate_s, tool_calls=message.tool_s),
        extra_fields=message.extra_fields,
        media=message.media,
    )


class HostedLoop(AgentLoopBase):
    """A loop that is played in the other process."""

    ends_when_cancelled = True

    def __init__(self, manager: ServerManager, task: Task, runner: LoopRunner) -> None:
        super().__init__(None, manager, None)
        self._task, self._runner = task, runner

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        part = HostedTask(task=self._task, manager=self.server_manager.made_of(), params=sampling_params, row=kwargs)
        return await self._runner.play(self.server_manager, part)


async def hosted_loops(runner: LoopRunner, config: Any, tokenizer: Any) -> Loops:
    """Return loops that are played in the process of `runner`, as `load_loops` does. Single-turn loops stay in the
    driver, because they contain no user code."""
    ready = await runner.start()

    def make(manager: ServerManager, task: Task) -> AgentLoopBase:
        if (task.agent or ready.default) == SINGLE_TURN:
            return SingleTurnLoop(config, manager, tokenizer)
        return HostedLoop(manager, task, runner)

    players = Players(ready.default, tuple(ready.names), tuple(ready.tools), rewarded=ready.rewarded)
    contents: Mapping[str, str] = MappingProxyType(ready.contents)
    return Loops(players=players, make=make, notes=tuple(ready.notes), contents=contents, close=runner.close)
