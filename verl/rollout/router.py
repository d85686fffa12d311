"""Several replicas as one rollout engine. A request is sent to the least loaded replica; requests with the same prefix
key are sent to the same replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from verl.errors import Refused
from verl.parameter_set import POLICY_SET
from verl.rollout.base import (
    Capabilities,
    Completion,
    GenerateRequest,
    Media,
    PartialAnswer,
    PauseMode,
    ReplicaLost,
    WeightReader,
)
from verl.rollout.replica import Replica
from verl.rollout.supervisor import Start
from verl.rollout.wrapper import FOLLOWED, EngineWrapper
from verl.wire import WireFormat

KEPT_KEYS = 4096  # the number of latest prefix keys with a remembered replica
SET_S = 60.0  # for a LoRA set to be published again, on new weights
MAX_LEAD = 8  # requests that the replica of a prefix key may have more than the least loaded one


class Router(EngineWrapper):
    """The engine in front of all replicas.

    `load_weights` is refused: a publish is sent to each of `replicas`, as its own transaction. A replica that is lost,
    or that did not take the last publish, gets no requests. Its running requests continue at other replicas, with the
    tokens that were sampled under verified weights, or else from their beginning. Without a serving replica the run
    cannot continue, and the callback of `watch` is called with the reason.

    Each replica may be restarted `restarts` times. `at_urls` is for servers that were not started by this run. With
    `mixes` an answer may contain tokens of several versions. `note` prints a line for the user.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        *,
        restarts: int = 0,
        at_urls: bool = False,
        mixes: bool = False,
        note: Callable[[str], None] = print,
    ) -> None:
        assert starts, "a router needs a replica"
        self._note, self._mixes = note, mixes
        self._verified = -1  # the latest version that a publish has ended with
        self._on_failure: Callable[[BaseException], None] | None = None
        self._failure: BaseException | None = None
        self._load = [0] * len(starts)  # requests that run or wait, by replica
        self._homes: OrderedDict[str, int] = OrderedDict()  # the replica of a prefix key
        self._running: dict[str, int] = {}  # the replica of a request id
        self._serving = frozenset(range(len(starts)))
        self._sets = set[str]()  # the LoRA sets that were published
        self._made = partial(Replica, starts=restarts, at_url=at_urls)
        self.replicas = [self._made(i, start, lost=self._lost) for i, start in enumerate(starts)]

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.id in self._running:
            raise ValueError(f"request_id={request.id!r} is already running: every call needs its own id")
        prefix_key, policy = request.prefix_key, request.parameters == POLICY_SET.id
        begun = PartialAnswer(mixes=self._mixes) if len(self._serving) > 1 and policy else None
        request = replace(request, begun=begun, on_tokens=None)  # a lost replica's tokens may be sampled again
        while True:
            chosen = self._choose(prefix_key, await self._having(request.id, request.parameters))
            self._running[request.id] = chosen
            self._load[chosen] += 1
            try:
                return await self.replicas[chosen].generate(request)
            except ReplicaLost:  # another replica samples the same tokens: the seed belongs to the request
                if begun is not None:
                    begun.keep(0, self._verified)
            except BaseException:  # also a cancelled request: if it is sent again, another replica gets it
                others = self._serving - {chosen}
                if prefix_key is not None and others and self._homes.get(prefix_key) == chosen:
                    self._homes[prefix_key] = min(sorted(others), key=self._load.__getitem__)
                raise
            finally:
                self._load[chosen] -= 1
                del self._running[request.id]

    def published(self, failed: Mapping[int, str]) -> None:
        """Record the result of a publish. `failed` has the reason of each replica that failed it: these are given up,
        the others serve from now on."""
        for i, why in failed.items():
            self.replicas[i].lose(ReplicaLost(why))
        ready = [one for one in self.replicas if one.ready and one.number not in failed]
        for one in ready:
            if one.supervisor.current.judging is None:  # a LoRA set is verified by its own publish
                one.mark_verified()
        self._verified = max((one.version for one in ready), default=self._verified)
        self._serve(frozenset(one.number for one in ready))

    async def join(self, start: Start) -> Capabilities:
        """Add a replica at the end of `replicas` once its engine is up. It gets requests after its first publish. If it
        does not start, nothing is added and the error is raised. Only one may be added at a time."""

        def lost(number: int, why: BaseException) -> None:
            if one in self.replicas:
                self._lost(number, why)

        for other in self.replicas:
            await other.supervisor.woken.wait()  # while the replicas sleep, the trainer uses the device
        one = self._made(len(self.replicas), start, lost=lost)
        try:
            able = await one.capabilities()
            if level := max(other.supervisor.asleep for other in self.replicas):
                await one.sleep(level)
        except BaseException:
            await one.close()
            raise
        self._load.append(0)
        self.replicas.append(one)
        return able

    def leave(self, number: int) -> None:
        """Remove a replica from the run. Its number is never used again."""
        if not 0 <= number < len(self.replicas) or self.replicas[number].supervisor.left:
            raise Refused(f"replica {number}: none has this number; `verl replicas RUN list` shows them")
        if self._serving <= {number}:
            raise Refused(f"replica {number} is the only one that serves: add another, and wait for its publish")
        self.replicas[number].supervisor.leave()

    def states(self) -> list[str]:
        """Return the state of each replica, in the order of their numbers."""
        return [self._state_of(one) for one in self.replicas]

    def _state_of(self, one: Replica) -> str:
        if one.supervisor.left:
            return "left"
        if one.number in self._serving:
            return "serves"
        return "is lost" if one.supervisor.over and not one.supervisor.serves else "waits for a publish"

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure` once, when no replica is left."""
        self._on_failure = on_failure
        if self._failure is not None:
            on_failure(self._failure)

    def _lost(self, number: int, why: BaseException) -> None:
        left = self._serving - {number}
        one = self.replicas[number].supervisor
        then = "stays out of service" if one.over else "is started again"
        after = f"its requests go on elsewhere, and it {then}" if left else "no other one serves"
        what = "left the run" if one.left else f"is lost: {why}"
        self._note(f"{'' if one.left else 'warning: '}rollout replica {number} {what}; {after}")
        self._serve(left, why)

    def _serve(self, replicas: frozenset[int], why: BaseException | None = None) -> None:
        self._serving = replicas
        if not replicas and self._failure is None:
            self._failure = why or ReplicaLost("no rollout replica took the weights")
            if self._on_failure is not None:
                self._on_failure(self._failure)

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Media = ()
    ) -> np.ndarray:
        chosen = self._choose(None, await self._having("score", parameters))
        return await self.replicas[chosen].score(ids, temperature=temperature, parameters=parameters, media=media)

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        raise ValueError("a router loads no weights: publish to each of its replicas")

    async def drop_set(self, name: str) -> None:
        """Drop a LoRA set everywhere. Requests for it are refused from now on."""
        self._sets.discard(name)
        live = [one for one in self.replicas if one.number in self._serving]
        results = await asyncio.gather(*(one.drop_set(name) for one in live), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, ReplicaLost):  # a lost one has no sets
                raise error

    def set_published(self, name: str) -> None:
        """Record that a LoRA set was published: requests for it wait while no replica has it on its new weights."""
        self._sets.add(name)

    async def _having(self, what: str, parameters: str) -> frozenset[int]:
        """Return the serving replicas that have a parameter set, verified. Wait for a published one. Raise ValueError
        if none of the serving replicas has it."""
        if parameters == POLICY_SET.id:
            return self._serving
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SET_S):
                while parameters in self._sets and self._serving:
                    if found := frozenset(i for i in self._serving if parameters in self.replicas[i].sets):
                        return found
                    await asyncio.sleep(0.02)
        if not self._serving:
            return self._serving
        there = ", ".join(sorted(self._sets)) or "none"
        raise ValueError(f"{what}: no replica has a LoRA set {parameters!r} (published are: {there}); publish it")

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        """Call the method of all replicas and return the sum of the results; a method outside `FOLLOWED` is called at
        one replica only."""
        if method not in FOLLOWED:
            return await getattr(self.replicas[self._choose(None, self._serving)], method)(*args, **named)
        results = await asyncio.gather(*(getattr(replica, method)(*args, **named) for replica in self.replicas))
        return sum(result or 0 for result in results)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        if request_ids is None:
            return await super().abort()
        names = {i: [name for name in request_ids if self._running.get(name) == i] for i in range(len(self.replicas))}
        return sum(await asyncio.gather(*(self.replicas[i].abort(of) for i, of in names.items() if of)))

    async def capabilities(self) -> Capabilities:
        """Return the abilities that all replicas have. Raise ValueError if their log-probs mean different things."""
        every = await asyncio.gather(*(replica.capabilities() for replica in self.replicas))
        if len(kinds := {one.logprobs for one in every}) > 1:
            raise Refused(f"replicas return {' and '.join(sorted(kinds))} log-probs: one run needs one kind")
        able = {f.name: [getattr(one, f.name) for one in every] for f in fields(Capabilities) if f.name != "notes"}
        able["reports_tokens"] = [False]
        unlike = [f"{name} ({', '.join(map(str, of))})" for name, of in able.items() if any(x != of[0] for x in of)]
        at = [set(of) for of in able["score_temperatures"] if of is not None]
        note = [f"rollout: replicas differ, what all of them can do is used: {'; '.join(unlike)}"] if unlike else []
        common: dict[str, Any] = {name: all(of) for name, of in able.items() if isinstance(of[0], bool)}
        common["raw_logprobs_only"] = any(able["raw_logprobs_only"])
        common["sleep_levels"] = tuple(sorted(set.intersection(*map(set, able["sleep_levels"]))))
        common["score_temperatures"] = tuple(sorted(set.intersection(*at))) if at else None
        common |= {name: min(able[name]) for name in ("max_context_tokens", "lora_rank")}
        common["weights"] = WireFormat.widest(able["weights"])
        notes = tuple(dict.fromkeys([*note, *(line for one in every for line in one.notes)]))
        return replace(every[0], notes=notes, **common)

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    @property
    def version(self) -> int:
        """The oldest live version of a serving replica, or -1 without one."""
        return min((self.replicas[i].version for i in self._serving), default=-1)

    def _choose(self, prefix_key: str | None, among: frozenset[int]) -> int:
        """Return the least loaded replica of `among`, or the replica of the prefix key unless that has more than
        `MAX_LEAD` requests more. Raise ReplicaLost if `among` is empty."""
        if not among:
            raise ReplicaLost(f"no rollout replica serves: {self._failure}") from self._failure
        least = min(sorted(among), key=self._load.__getitem__)
        if prefix_key is None:
            return least
        home = self._homes.pop(prefix_key, least)
        if home not in among or self._load[home] > self._load[least] + MAX_LEAD:
            home = least
        self._homes[prefix_key] = home
        if len(self._homes) > KEPT_KEYS:
            self._homes.popitem(last=False)
        return home
