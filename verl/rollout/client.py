"""A rollout engine that is a server, over HTTP (`RolloutEngine`); what kind of server, its `Api` knows.

What the server does not do is done here (stop strings, waiting) or refused (scores at another temperature, adapters,
media). It never speaks under weights that nobody verified: a transaction that fails fences it, for good or until it is
restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np

from verl.checkpoint.hf import skeleton_of
from verl.rollout.adapted import AdaptedServer
from verl.rollout.api import Api, Deadlines, Expected, Room, poured, source_of
from verl.rollout.base import (
    Capabilities,
    Completion,
    PauseMode,
    RolloutContext,
    SoFar,
    WeightReader,
    check_inputs,
    checked_ids,
)
from verl.rollout.calls import Call, after, ended, first
from verl.rollout.connected import OTHERS, PROBE_S
from verl.rollout.http import PAUSED, ServerGone, ServerLate, ServerRefused
from verl.rollout.launching import Launch
from verl.rollout.life import QUIET_S, Life
from verl.rollout.wire import Drawn, NotUnderstood, Reading
from verl.types import Sampling
from verl.weight_sync.base import Parts, SyncError, WeightSource, saved_parts

AGAIN_S = 0.05  # between two words to abort a request that may not have arrived yet
UNDO_S = 10.0  # for a server to give back what is given up
SETTLE_S = 2.0  # for the answers of a server that has finished its requests to arrive
ASKED = 3  # times that a request is asked of a server that is well, and whose connections break


class ServedEngine(AdaptedServer):
    """See `RolloutEngine`. at: the URL of a server that runs, or what starts one, which then ends with this engine ·
    router: of others, before this server and those of the other replicas, that requests go through."""

    goes_on = True

    def __init__(
        self,
        context: RolloutContext,
        expected: Expected,
        api: Api,
        at: str | Launch,
        able: Capabilities,
        deadlines: Deadlines | None = None,
        api_key: str | None = None,
        router: str | None = None,
    ) -> None:
        super().__init__(context, expected, api, at, able, deadlines, api_key, router)
        self._paused = False
        self._asleep = set[str]()  # its memory that was put away
        self._control = asyncio.Lock()  # pauses, updates and restarts do not mix
        self._open = asyncio.Event()  # closed while one of these is under way: later requests wait for its end
        self._open.set()
        self._behind: set[asyncio.Task[None]] = set()
        self._parts: Parts | None = None
        elsewhere = lambda: 0 if self._router is None else self._router.heard  # noqa: E731
        self._life = Life(self._pending, elsewhere, self._shown, self._progress, self._going, self._gone)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        *,
        prefix_key: str | None = None,
        adapter: str | None = None,
        media: Sequence[str] = (),
        so_far: SoFar | None = None,
    ) -> Completion:
        """See `Resuming`. `prefix_key` is not needed: a server finds equal prompts by their ids. A caller that gives up
        takes the connection with it, on which the server gives the row back."""
        self._check_alive()
        check_inputs(self._able, request_id, adapter, media)
        model, prompt = self._drawn_by(request_id, adapter), self._checked(request_id, prompt_ids, sampling)
        call = self._pending[request_id] = Call("", model, routed=self._router is not None)
        begun = 0 if so_far is None else len(so_far.ids)
        self._life.watch()
        try:
            for left in reversed(range(ASKED)):
                try:
                    return await self._asked(request_id, call, prompt, sampling, so_far)
                except (ServerGone, ServerRefused, ServerLate, NotUnderstood) as e:
                    if call.routed or (left and isinstance(e, ServerRefused) and e.status == PAUSED):
                        call.routed = False  # the router, or another server: this one does as well; or after the pause
                        continue
                    if not isinstance(e, ServerGone):
                        raise
                    if self._closed or not self._going() or self._ended or await self._life.failed() is not None:
                        raise await self._cause(e) from e.__cause__
                    if not left:  # another server would do no better
                        raise RuntimeError(f"{e}, {ASKED} times, and it answers others") from e.__cause__
            raise AssertionError("the last time returns or raises")
        except (ServerRefused, ServerLate) as e:
            if (isinstance(e, ServerLate) or e.status >= 500) and (await self._ends() or await self._life.stuck()):
                raise await self._cause(ServerGone(str(e))) from e  # its engine died
            raise
        finally:
            if self._foreign and so_far is not None:
                so_far.cut(begun)
            del self._pending[request_id]
            call.ended.set()

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, adapter: str | None = None, media: Sequence[str] = ()
    ) -> np.ndarray:
        """See `RolloutEngine`; at temperature 1 (or 0, the greedy one's), as servers score prompts."""
        self._check_alive()
        check_inputs(self._able, "score", adapter, media)
        ids = checked_ids("score", ids, self._vocab)
        if temperature not in (0.0, 1.0):
            raise ValueError(f"temperature={temperature}: {self._expected.name} scores at temperature 1 only; give 1.0")
        if len(ids) > (room := self._context.max_context_tokens):
            raise ValueError(f"score: {len(ids)} tokens exceed max_context_tokens={room}")
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        self._check_weights("score")
        model = self._drawn_by("score", adapter)
        self._scoring[model] += 1
        try:
            return await self._api.score(self._call, model, ids, self._limits.request_s)
        finally:
            self._scoring[model] -= 1

    async def _asked(
        self, request_id: str, call: Call, prompt: np.ndarray, sampling: Sampling, so_far: SoFar | None
    ) -> Completion:
        call.server_id = f"{self._tag}-{next(self._number)}-{request_id}"
        while not (self._open.is_set() or call.cut.is_set()):
            await first(self._open.wait(), call.cut.wait())
        self._check_alive()
        self._check_weights("generate")
        call.asked, begun = True, 0
        if so_far is not None and not so_far.mixes:
            so_far.keep(self._version, self._version)
            begun = len(so_far.ids)
        answer = await self._generate(request_id, call, prompt, sampling, so_far)
        if so_far is not None and begun and len(answer.spans) > 1:  # held there over an update: from the beginning
            so_far.keep(0, -1)
            return await self._asked(request_id, call, prompt, sampling, so_far)
        return answer

    async def _generate(
        self, request_id: str, call: Call, prompt: np.ndarray, sampling: Sampling, so_far: SoFar | None
    ) -> Completion:
        context, version, drawn, before = self._context, self._version, Drawn(), so_far or SoFar()
        n, eos = len(before.ids), context.eos_token_ids
        tokens = context.max_context_tokens - len(prompt)
        reading = Reading(sampling=sampling, room=tokens, eos_token_ids=eos, decode=context.decode, before=before)
        room, rest = Room(tokens=tokens - n, vocab=self._vocab, ends=eos), reading.rest(self._api.by_position)
        body = self._api.body(call.model, call.server_id, prompt.tolist() + before.ids, rest, room)
        call.routed &= self._api.routable(body) and not sampling.stop  # which ends it before all is told of its tokens
        try:
            await self._ask(call, body, reading, drawn, follow=so_far is not None and self._api.follows)
            if not self._api.updates and drawn.ids:  # it had these weights all the time
                drawn.versions = [(str(version), 0, len(drawn.ids))]
            self._life.heard += not call.routed
            drawn.versions = await self._numbered(call, drawn.versions, version)
            return reading.completion(request_id, drawn)
        finally:
            reading.keep(drawn, version)

    async def _ask(self, call: Call, body: Mapping[str, Any], reading: Reading, drawn: Drawn, *, follow: bool) -> None:
        if call.cut.is_set():  # before it was asked
            drawn.finish = "abort"
        elif self._api.aborts and not (reading.sampling.stop or follow or call.routed):
            limit_s = self._limits.request_s
            self._api.read(drawn, await self._http.post(self._api.generate, body, timeout_s=limit_s, again=True))
        else:
            call.heard_s = time.monotonic()
            call.reading = asyncio.ensure_future(self._streamed(call, body, reading, drawn))
            try:
                await call.reading
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not (call.cut.is_set() or call.quiet) or (task is not None and task.cancelling()):
                    raise
                if call.quiet and not call.cut.is_set():
                    raise ServerGone(f"{QUIET_S:g} s without a word from who has it behind the router") from None
                if call.routed:  # which weights drew them was not said yet
                    drawn.ids, drawn.logprobs = [], []
                drawn.finish = "abort"

    async def _streamed(self, call: Call, body: Mapping[str, Any], reading: Reading, drawn: Drawn) -> None:
        """The last event says which weights drew what, so that it is waited for."""
        version, asked = self._version, {**body, "stream": True}
        router = self._router if call.routed else None
        http = self._http if router is None else router.http
        events = http.stream(self._api.generate, asked, timeout_s=self._limits.request_s)
        async with aclosing(events):
            async for event in events:
                seen, call.heard_s = len(drawn.ids), time.monotonic()
                self._life.heard += router is None
                self._api.read(drawn, event)
                if router is not None:
                    router.look(drawn.live, version)
                ours = drawn.live in (None, f"{version}-{self._tag}") or not self._api.marks
                if ours and self._open.is_set() and self._version == version and not (self._fenced or call.routed):
                    drawn.sure = len(drawn.ids)
                if drawn.stopped is None:
                    drawn.stopped = reading.end_of(drawn, seen)
                    if drawn.stopped is None or drawn.finish is not None:
                        continue
                    if not self._api.aborts:
                        break  # which closes the connection
                    await self._abort_there([call])

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Requests (None: all) return with their partial tokens -> how many did."""
        self._check_alive()
        names = self._pending.keys() if request_ids is None else self._pending.keys() & set(request_ids)
        calls = [self._pending[name] for name in names]
        await self._returned(calls)
        return len(calls)

    async def _returned(self, calls: Sequence[Call]) -> None:
        """Abort them until they have returned: one may not have arrived there yet."""
        async with self._deadline(self._limits.control_s, f"{len(calls)} aborted requests to return"):
            while waiting := [call for call in calls if not call.ended.is_set()]:
                await self._abort_there(waiting)
                await ended(waiting, AGAIN_S)

    async def _abort_there(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.cut.set()
            if call.reading is not None and (call.routed or not self._api.aborts):
                call.reading.cancel()
        if self._api.aborts and (here := [call.server_id for call in calls if not call.routed]):
            await self._api.abort(self._call, here)

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """keep: running requests stand still · wait: they finish first · abort: they return. New ones are held."""
        self._check_alive()
        await self._up()
        async with self._alone():
            await self._stand_still(mode, "pause('wait')")
            self._paused = True

    async def resume(self) -> None:
        self._check_alive()
        await self._up()
        async with self._control:
            if self._fenced is not None:
                raise RuntimeError(f"{self._expected.name} must not go on: {self._fenced}")
            if not self._left or self._version >= 0:
                await self._resumed()
            self._paused = False
            self._open.set()

    async def _resumed(self) -> None:
        await self._api.resume(self._call)
        if self._left:
            await self._proved()
            self._left = False

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """One transaction: stand still, load all, compare what was loaded, drop the prefixes, go on. Whatever fails
        after the first tensor leaves a replica that is fenced; the next call restarts it, if it is ours."""
        self._check_alive()
        began = time.perf_counter()
        reader, sent = await source_of(self._api, source)
        sent = await self._as_read(sent)
        transferred = time.perf_counter() - began
        if not self._api.updates and self._launch is None and self._version >= 0:
            fix = "use it for verl eval and verl generate, or train with rollout.engine=vllm, sglang or server"
            raise ValueError(f"{self._http.url} has weights of its own, and takes no others while it runs: {fix}")
        await self._up()
        async with self._alone(partial(self._announced, sent, on_inflight)) as announced:
            if self._api.updates and (self._fenced is not None or self._ended):
                await self._restart()
            what = "load_weights(on_inflight='wait')"
            try:
                await self.wake(("weights",))  # what was put away has no memory to be written to
                await self._stand_still(on_inflight, what)
            except (ServerGone, ServerLate, ServerRefused):  # its engine has died, or hangs
                if self._launch is None or not self._api.updates:
                    raise
                await self._restart()
                await self._stand_still(on_inflight, what)
            try:
                still = time.perf_counter()
                if self._api.updates:
                    if sent.passes:
                        await poured(self._api, self._call, sent)
                    elif not announced:
                        await self._api.announce(self._call, sent)
                    name = f"{sent.version}-{self._tag}" if self._api.marks else f"{sent.version}"
                    await self._api.deliver(self._call, sent, name)
                elif self._launch is not None:
                    await self._restart(sent.address)
                loaded = time.perf_counter()
                await self.wake(("kv",))  # not before: old weights, new ones and KV are never there together
                if not self._paused:
                    await self._resumed()
            except BaseException as e:
                await self._fence(_failed(sent, e))
                if self._version < 0 and isinstance(e, SyncError | ServerRefused):
                    why = f"{self._expected.name} has taken no weights yet; if it has another model"
                    raise SyncError(f"{e}; {why}: start it with this one, or set {OTHERS}") from e
                raise
        parts = {"transfer": transferred, "load": loaded - still, "pause": time.perf_counter() - still}
        reader.delivered, reader.seconds = reader.delivered | set(sent.delivered), parts
        self._version = sent.version
        return sent.version

    def vouch(self) -> None:
        """See `Vouched`."""
        if self._router is not None and self._fenced is None:
            self._router.vouch(self._version)

    async def _as_read(self, sent: WeightSource) -> WeightSource:
        """By the names that the server knows."""
        if self._api.names == "model":
            return sent
        if self._parts is None:  # the same for all versions
            config = copy.deepcopy(self._context.hf_config)
            self._parts = await asyncio.to_thread(lambda: saved_parts(skeleton_of(config), sent.delivered))
        return replace(sent, names=self._api.names, parts=self._parts)

    async def _announced(self, sent: WeightSource, mode: PauseMode) -> bool:
        """Whether it has read the new weights while it draws by those that it has."""
        draws = self._going() and not (self._ended or self._left) and self._version >= 0
        if not draws or mode != "keep" or not self._api.ahead or sent.passes:
            return False
        try:
            await self._api.announce(self._call, sent)
        except BaseException as e:
            await self._fence(_failed(sent, e))
            raise
        return True

    async def _stand_still(self, mode: PauseMode, what: str) -> None:
        """Given up by its caller, it is undone: after its own end, as a server hears of no caller that left."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r}: it is one of {', '.join(get_args(PauseMode))}")
        if self._paused and mode == "wait" and self._pending:
            raise ValueError(
                f"{what}: {len(self._pending)} requests stand still and cannot finish; resume or abort them"
            )
        calls, modes, pausing = list(self._pending.values()), self._api.modes, None
        if mode == "keep" and mode not in modes:
            raise ValueError(f"{what}: {self._expected.name} cannot make running requests stand still; wait, or abort")
        if self._left:
            return
        try:
            if mode in modes:
                limit_s = self._limits.request_s if mode == "wait" else self._limits.control_s
                pausing = asyncio.ensure_future(self._api.pause(partial(self._call, timeout_s=limit_s), mode))
                await asyncio.shield(pausing)
            if mode == "abort":
                await self._returned(calls)
            elif mode == "wait" and mode in modes:  # what has not arrived there is held: it is not waited for
                await ended(calls, SETTLE_S)
            elif mode == "wait":
                async with self._deadline(self._limits.request_s, "running requests to end"):
                    await ended([call for call in calls if call.asked], None)
            if mode not in modes and "keep" in modes:
                pausing = asyncio.ensure_future(self._api.pause(self._call, "keep"))
                await asyncio.shield(pausing)
        except asyncio.CancelledError:
            if not self._paused:
                undoing = asyncio.create_task(after(pausing, partial(self._api.resume, self._call)))
                self._behind.add(undoing)
                undoing.add_done_callback(self._behind.discard)
            raise

    @asynccontextmanager
    async def _alone(self, first: Callable[[], Awaitable[bool]] | None = None) -> AsyncIterator[bool]:
        """first: what needs no stand-still."""
        async with self._control:
            if self._behind:  # what an earlier caller left is undone first
                await asyncio.wait(self._behind)
            done = first is not None and await first()
            self._open.clear()
            try:
                yield done
            finally:
                self._life.heard += 1
                if not self._paused:
                    self._open.set()

    async def _fence(self, why: str) -> None:
        """No word of it is believed any more, nor is it woken. What stands still there ends, and goes on elsewhere."""
        self._fenced, self._waiting, self._asleep = why, self._launch is not None and not self._api.updates, set()
        if self._router is not None:
            self._router.fence()
        if self._server is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._server.stop))
        else:
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused, TimeoutError):
                async with asyncio.timeout(UNDO_S):
                    await self._abort_there(list(self._pending.values()))

    async def sleep(self, level: int = 1) -> int:
        """-> bytes; 0 where the server cannot, as its memory stays, and where it does not say."""
        if level not in (1, 2):
            raise ValueError(f"sleep level={level}: 1 frees the KV, 2 the weights too")
        if level == 2 and 2 not in self._able.sleep_levels and self._api.offloads:
            level = 1  # at which the device has its room back as well
        if level not in self._able.sleep_levels:
            return 0
        self._asleep |= {"kv", "weights"} if level == 2 or self._api.offloads else {"kv"}
        return await self._api.sleep(self._call, level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        if unknown := set(tags) - {"weights", "kv"}:
            raise ValueError(f"wake tags {sorted(unknown)}: known are 'weights' and 'kv'")
        for part in ("weights", "kv"):  # whose KV is awake can serve: so are its weights
            if part in self._asleep and {part, "kv"} & set(tags):
                await self._api.wake(self._call, part)
                self._asleep.remove(part)
                if self._paused and not self._asleep:  # all awake, it went on
                    await self._api.pause(self._call, "keep")

    async def capabilities(self) -> Capabilities:
        """Waits until the server is up."""
        await self._up()
        stops = self._context.decode is not None  # which are looked for here
        return replace(self._able, stop_strings=stops, score_temperatures=self._api.scores)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._life.close()
        if self._starting is not None and not self._starting.get_loop().is_closed():
            self._starting.cancel()
        for undoing in self._behind if self._launch is not None else ():  # that server ends, in whatever state
            undoing.cancel()
        try:
            if self._behind:
                await asyncio.wait(self._behind, timeout=UNDO_S)
        finally:  # what is left of it ends with the connection
            await self._hung_up()
        if self._server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._server.stop)

    @property
    def version(self) -> int:
        return self._version

    # -- start, restart and errors -------------------------------------------------------------------------------------

    async def _restart(self, folder: str | None = None) -> None:
        if self._launch is None:
            raise ServerGone(f"{self._http.url} must not speak: {self._fenced}; restart that server and this run")
        await self._launched_anew(folder)
        self._ready, self._waiting, self._asleep, self._fenced, self._version = False, False, set(), None, -1
        await self._up()
        if self._paused and "keep" in self._api.modes:
            await self._api.pause(self._call, "keep")

    def _going(self) -> bool:
        return self._open.is_set() and self._fenced is None and not (self._paused or self._asleep)

    async def _shown(self) -> None:
        """Its health. A probe is not drawn before a row is free, and who tells no progress could not say that others
        are: behind more requests than it has rows the server alone is asked."""
        if len(self._pending) > self._context.max_concurrent_sequences and await self._progress() is None:
            await self._http.get("/health", timeout_s=PROBE_S)
        else:
            await self.probe(PROBE_S)

    def _checked(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling) -> np.ndarray:
        self._check_weights("generate")
        if request_id in self._pending:
            raise ValueError(f"request_id={request_id!r} is already running: every call needs its own id")
        ids, room = checked_ids(request_id, prompt_ids, self._vocab), self._context.max_context_tokens
        if not 0 < len(ids) < room:
            fix = f"max_context_tokens={room}; shorten it or raise the limit"
            raise ValueError(f"{request_id}: a prompt of {len(ids)} tokens leaves no room to sample in {fix}")
        if sampling.stop and self._context.decode is None:
            raise ValueError(f"stop={sampling.stop} needs text: give the engine decode=, or use stop_token_ids")
        return ids


def _failed(sent: WeightSource, e: BaseException) -> str:
    return f"the update to version {sent.version} failed ({type(e).__name__}: {e})"
