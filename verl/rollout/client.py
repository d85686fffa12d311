"""A rollout engine that is a server, over HTTP (`RolloutEngine`). Its `Api` knows which kind of server it is.

Features that a server lacks are either done here (stop strings, waiting) or refused (scores at another temperature,
adapters, media). A server never answers with unverified weights: after a failed update it is fenced, for good or until
it is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from verl.checkpoint.hf import skeleton_of
from verl.errors import Refused
from verl.rollout.adapted import AdaptedServer
from verl.rollout.api import Api, Deadlines, Expected, TokenBudget, deliver_buckets, source_of
from verl.rollout.base import (
    Capabilities,
    Completion,
    GenerateRequest,
    PartialAnswer,
    PauseMode,
    RolloutContext,
    Traits,
    WeightReader,
    check_inputs,
    check_request,
    checked_ids,
)
from verl.rollout.calls import PendingCall, after, ended, first
from verl.rollout.connected import OTHER_ENGINES, PROBE_S
from verl.rollout.http import PAUSED, ServerGone, ServerLate, ServerRefused
from verl.rollout.launching import Launch
from verl.rollout.liveness import QUIET_S, LivenessWatch
from verl.rollout.weight_format import format_of_server
from verl.rollout.wire import NotUnderstood, Reading, ServerAnswer
from verl.weight_sync.base import Parts, SyncError, WeightSource, saved_parts

AGAIN_S = 0.05  # between two aborts of a request that may not have reached the server yet
UNDO_S = 10.0  # for undoing a pause that was cancelled
SETTLE_S = 2.0  # for the last answers of a paused server to arrive
ATTEMPTS = 3  # to send a request to a healthy server with breaking connections


class ServedEngine(AdaptedServer):
    """A `RolloutEngine` that is a server at the URL `at`, or one that `at` starts and that ends with this engine.
    `router` is the URL of an external router in front of the servers of all replicas; requests are sent through it."""

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
        self._asleep = set[str]()  # the parts of its memory that are freed
        self._control = asyncio.Lock()  # one pause, update or restart at a time
        self._open = asyncio.Event()  # cleared during these: later requests wait for the end
        self._open.set()
        self._undoing: set[asyncio.Task[None]] = set()
        self._parts: Parts | None = None
        elsewhere = lambda: 0 if self._router is None else self._router.signs  # noqa: E731
        signs = (elsewhere, self._check_health, self._progress, self._may_sample)
        self._watch = LivenessWatch(self._pending, *signs, lost=self._give_up)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the whole answer. `prefix_key` is not used: a server finds equal prompts by their ids. If the caller
        is cancelled the connection is closed, and the server frees the request."""
        self._check_alive()
        check_inputs(self._able, request.id, request.parameters, request.media)
        model = self._served_name(request.id, request.parameters)
        self._check_weights("generate")
        request = replace(request, prompt_ids=checked_ids(request.id, request.prompt_ids, self._vocab))
        room, decodes, begun = self._context.max_context_tokens, self._context.decode is not None, request.begun
        check_request(request, self._pending, max_context_tokens=room, decodes=decodes)
        call = self._pending[request.id] = PendingCall(request, model, routed=self._router is not None)
        known = 0 if begun is None else len(begun.ids)
        self._watch.watch()
        try:
            for left in reversed(range(ATTEMPTS)):
                try:
                    return await self._attempt(call)
                except (ServerGone, ServerRefused, ServerLate, NotUnderstood) as e:
                    if call.routed or (left and isinstance(e, ServerRefused) and e.status == PAUSED):
                        call.routed = False  # retry at this server itself, without the router or after the pause
                        continue
                    if not isinstance(e, ServerGone):
                        raise
                    if self._closed or not self._may_sample() or self._exited or await self._watch.failed() is not None:
                        raise await self._cause(e) from e.__cause__
                    if not left:  # the same would happen at another server
                        raise RuntimeError(f"{e}, {ATTEMPTS} times, and it answers others") from e.__cause__
            raise AssertionError("the last attempt returns or raises")
        except (ServerRefused, ServerLate) as e:
            if (isinstance(e, ServerLate) or e.status >= 500) and (
                await self._is_ending() or await self._watch.stuck()
            ):
                raise await self._cause(ServerGone(str(e))) from e  # its engine died
            raise
        finally:
            if self._foreign and begun is not None:
                begun.cut(known)
            del self._pending[request.id]
            call.ended.set()

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str | None = None, media: Sequence[str] = ()
    ) -> np.ndarray:
        """Return log-probs [t-1] of ids[1:] at temperature 1 (or 0, for greedy decoding): servers score no others."""
        self._check_alive()
        check_inputs(self._able, "score", parameters, media)
        ids = checked_ids("score", ids, self._vocab)
        if temperature not in (0.0, 1.0):
            raise ValueError(f"temperature={temperature}: {self._expected.name} scores at temperature 1 only; give 1.0")
        if len(ids) > (room := self._context.max_context_tokens):
            raise ValueError(f"score: {len(ids)} tokens exceed max_context_tokens={room}")
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        self._check_weights("score")
        model = self._served_name("score", parameters)
        self._scoring[model] += 1
        try:
            return await self._api.score(self._call, model, ids, self._limits.request_s)
        finally:
            self._scoring[model] -= 1

    async def _attempt(self, call: PendingCall) -> Completion:
        call.server_id, begun = f"{self._tag}-{next(self._number)}-{call.request.id}", call.request.begun
        while not (self._open.is_set() or call.cut.is_set()):
            await first(self._open.wait(), call.cut.wait())
        self._check_alive()
        self._check_weights("generate")
        call.asked, known = True, 0
        if begun is not None and not begun.mixes:
            begun.keep(self._version, self._version)
            known = len(begun.ids)
        answer = await self._generate(call)
        if begun is not None and known and len(answer.spans) > 1:  # an update came between: sample from the beginning
            begun.keep(0, -1)
            return await self._attempt(call)
        return answer

    async def _generate(self, call: PendingCall) -> Completion:
        context, request, version, drawn = self._context, call.request, self._version, ServerAnswer()
        prompt, sampling, before = request.prompt_ids.tolist(), request.sampling, request.begun or PartialAnswer()
        room = context.max_context_tokens - len(prompt)
        ends = context.eos_token_ids
        reading = Reading(sampling=sampling, room=room, eos_token_ids=ends, decode=context.decode, before=before)
        budget = TokenBudget(tokens=room - len(before.ids), vocab=self._vocab, ends=ends)
        rest = reading.rest(self._api.traits.draws_by_position)
        body = self._api.body(call.model, call.server_id, prompt + before.ids, rest, budget)
        call.routed &= self._api.routable(body) and not sampling.stop  # ended by a stop string, it has no versions
        try:
            await self._send(
                call, body, reading, drawn, follow=request.begun is not None and self._api.traits.resumable_stream
            )
            if not self._api.traits.updates_weights and drawn.ids:  # its weights did not change meanwhile
                drawn.versions = [(str(version), 0, len(drawn.ids))]
            self._watch.signs += not call.routed
            drawn.versions = await self._numbers(call, drawn.versions, version)
            return reading.completion(request.id, drawn)
        finally:
            reading.keep(drawn, version)

    async def _send(
        self, call: PendingCall, body: Mapping[str, Any], reading: Reading, drawn: ServerAnswer, *, follow: bool
    ) -> None:
        if call.cut.is_set():  # aborted before it was sent
            drawn.finish = "abort"
        elif self._api.traits.aborts_requests and not (reading.sampling.stop or follow or call.routed):
            limit_s = self._limits.request_s
            self._api.read(drawn, await self._http.post(self._api.generate, body, timeout_s=limit_s, again=True))
        else:
            call.last_event_s = time.monotonic()
            call.reading = asyncio.ensure_future(self._stream(call, body, reading, drawn))
            try:
                await call.reading
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not (call.cut.is_set() or call.quiet) or (task is not None and task.cancelling()):
                    raise
                if call.quiet and not call.cut.is_set():
                    raise ServerGone(f"{QUIET_S:g} s without a word from who has it behind the router") from None
                if call.routed:  # the versions of these tokens have not arrived
                    drawn.ids, drawn.logprobs = [], []
                drawn.finish = "abort"

    async def _stream(self, call: PendingCall, body: Mapping[str, Any], reading: Reading, drawn: ServerAnswer) -> None:
        """Read the stream to its last event, which has the versions of all tokens."""
        version, asked = self._version, {**body, "stream": True}
        router = self._router if call.routed else None
        http = self._http if router is None else router.http
        events = http.stream(self._api.generate, asked, timeout_s=self._limits.request_s)
        async with aclosing(events):
            async for event in events:
                seen, call.last_event_s = len(drawn.ids), time.monotonic()
                self._watch.signs += router is None
                self._api.read(drawn, event)
                if router is not None:
                    router.check_live(drawn.live, version)
                ours = drawn.live in (None, f"{version}-{self._tag}") or not self._api.traits.takes_weight_version
                if ours and self._open.is_set() and self._version == version and not (self._fenced or call.routed):
                    drawn.sure = len(drawn.ids)
                if drawn.stopped is None:
                    drawn.stopped = reading.end_of(drawn, seen)
                    if drawn.stopped is None or drawn.finish is not None:
                        continue
                    if not self._api.traits.aborts_requests:
                        break  # this closes the connection
                    await self._abort_there([call])

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Make requests (None: all) return with their partial tokens, and return how many did."""
        self._check_alive()
        names = self._pending.keys() if request_ids is None else self._pending.keys() & set(request_ids)
        calls = [self._pending[name] for name in names]
        await self._abort_and_wait(calls)
        return len(calls)

    async def _abort_and_wait(self, calls: Sequence[PendingCall]) -> None:
        """Repeat the abort until the calls have returned: a request may reach the server after its abort."""
        async with self._deadline(self._limits.control_s, f"{len(calls)} aborted requests to return"):
            while waiting := [call for call in calls if not call.ended.is_set()]:
                await self._abort_there(waiting)
                await ended(waiting, AGAIN_S)

    async def _abort_there(self, calls: Sequence[PendingCall]) -> None:
        for call in calls:
            call.cut.set()
            if call.reading is not None and (call.routed or not self._api.traits.aborts_requests):
                call.reading.cancel()
        if self._api.traits.aborts_requests and (here := [call.server_id for call in calls if not call.routed]):
            await self._api.abort(self._call, here)

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause: running requests stop where they are (keep), finish first (wait) or return (abort). New ones wait."""
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
            if not self._found_paused or self._version >= 0:
                await self._resumed()
            self._paused = False
            self._open.set()

    async def _resumed(self) -> None:
        await self._api.resume(self._call)
        if self._found_paused:
            await self._check_answers()
            self._found_paused = False

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """Load weights as one transaction: pause, load all, compare the loaded tensors, drop the prefixes, resume. A
        failure after the first tensor fences the engine; the next call restarts the server, if it was started here."""
        self._check_alive()
        began = time.perf_counter()
        reader, sent = await source_of(self._api, source)
        sent = await self._as_read(sent)
        transferred = time.perf_counter() - began
        if not self._api.traits.updates_weights and self._launch is None and self._version >= 0:
            fix = "use it for verl eval and verl generate, or train with rollout.engine=vllm, sglang or server"
            raise Refused(f"{self._http.url} has weights of its own, and takes no others while it runs: {fix}")
        await self._up()
        async with self._alone(partial(self._announce_early, sent, on_inflight)) as announced:
            if self._api.traits.updates_weights and (self._fenced is not None or self._exited):
                await self._restart()
            what = "load_weights(on_inflight='wait')"
            try:
                await self.wake(("weights",))  # freed weights have no memory to be written to
                await self._stand_still(on_inflight, what)
            except (ServerGone, ServerLate, ServerRefused):  # its engine has died, or hangs
                if self._launch is None or not self._api.traits.updates_weights:
                    raise
                await self._restart()
                await self._stand_still(on_inflight, what)
            try:
                still = time.perf_counter()
                if self._api.traits.updates_weights:
                    if sent.passes:
                        await deliver_buckets(self._api, self._call, sent)
                    elif not announced:
                        await self._api.announce(self._call, sent)
                    name = f"{sent.version}-{self._tag}" if self._api.traits.takes_weight_version else f"{sent.version}"
                    await self._api.deliver(self._call, sent, name)
                elif self._launch is not None:
                    await self._restart(sent.address)
                loaded = time.perf_counter()
                await self.wake(("kv",))  # only now: old weights, new weights and KV are never in memory together
                if not self._paused:
                    await self._resumed()
            except BaseException as e:
                await self._fence(f"the update to version {sent.version} failed ({type(e).__name__}: {e})")
                if self._version < 0 and isinstance(e, SyncError | ServerRefused):
                    why = f"{self._expected.name} has taken no weights yet; if it has another model"
                    raise SyncError(f"{e}; {why}: start it with this one, or set {OTHER_ENGINES}") from e
                raise
        parts = {"transfer": transferred, "load": loaded - still, "pause": time.perf_counter() - still}
        reader.delivered, reader.seconds = reader.delivered | set(sent.delivered), parts
        self._version = sent.version
        return sent.version

    def mark_verified(self) -> None:
        """Record that the weights which were loaded last have been verified."""
        if self._router is not None and self._fenced is None:
            self._router.mark_verified(self._version)

    async def _as_read(self, sent: WeightSource) -> WeightSource:
        """Return the source with the tensor names that the server uses."""
        if self._api.traits.tensor_names == "model":
            return sent
        if self._parts is None:  # equal for all versions
            config = copy.deepcopy(self._context.hf_config)
            self._parts = await asyncio.to_thread(lambda: saved_parts(skeleton_of(config), sent.delivered))
        return replace(sent, names=self._api.traits.tensor_names, parts=self._parts)

    async def _announce_early(self, sent: WeightSource, mode: PauseMode) -> bool:
        """Let the server read the new weights while it samples with the live ones, if it can. Return true if it did."""
        draws = self._may_sample() and not (self._exited or self._found_paused) and self._version >= 0
        if not draws or mode != "keep" or not self._api.traits.prepares_weights or sent.passes:
            return False
        try:
            await self._api.announce(self._call, sent)
        except BaseException as e:
            await self._fence(f"the update to version {sent.version} failed ({type(e).__name__}: {e})")
            raise
        return True

    async def _stand_still(self, mode: PauseMode, what: str) -> None:
        """Pause the server in one of the modes. If the caller is cancelled the pause is undone after its own end, since
        the server does not notice that the caller is cancelled."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r}: it is one of {', '.join(get_args(PauseMode))}")
        if self._paused and mode == "wait" and self._pending:
            raise ValueError(
                f"{what}: {len(self._pending)} requests stand still and cannot finish; resume or abort them"
            )
        calls, modes, pausing = list(self._pending.values()), self._api.traits.pause_modes, None
        if mode == "keep" and mode not in modes:
            raise ValueError(f"{what}: {self._expected.name} cannot make running requests stand still; wait, or abort")
        if self._found_paused:
            return
        try:
            if mode in modes:
                limit_s = self._limits.request_s if mode == "wait" else self._limits.control_s
                pausing = asyncio.ensure_future(self._api.pause(partial(self._call, timeout_s=limit_s), mode))
                await asyncio.shield(pausing)
            if mode == "abort":
                await self._abort_and_wait(calls)
            elif mode == "wait" and mode in modes:  # a request that has not reached the server waits until resume
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
                self._undoing.add(undoing)
                undoing.add_done_callback(self._undoing.discard)
            raise

    @asynccontextmanager
    async def _alone(self, first: Callable[[], Awaitable[bool]] | None = None) -> AsyncIterator[bool]:
        """Hold back new requests during the block. `first` runs before, while requests still run."""
        async with self._control:
            if self._undoing:  # a cancelled pause is undone first
                await asyncio.wait(self._undoing)
            done = first is not None and await first()
            self._open.clear()
            try:
                yield done
            finally:
                self._watch.signs += 1
                if not self._paused:
                    self._open.set()

    async def _fence(self, why: str) -> None:
        """Stop using the server: its answers no longer count, and it is not woken. Its paused requests end, and are
        sent to another server."""
        self._fenced, self._asleep = why, set()
        self._waiting = self._launch is not None and not self._api.traits.updates_weights
        if self._router is not None:
            self._router.fence()
        if self._server is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._server.stop))
        else:
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused, TimeoutError):
                async with asyncio.timeout(UNDO_S):
                    await self._abort_there(list(self._pending.values()))

    async def sleep(self, level: int = 1) -> int:
        """Free memory and return the number of bytes: 0 if the server cannot sleep or does not report it."""
        if level not in (1, 2):
            raise ValueError(f"sleep level={level}: 1 frees the KV, 2 the weights too")
        if level == 2 and 2 not in self._able.sleep_levels and self._api.traits.sleep_keeps_weights:
            level = 1  # frees the device's memory as well
        if level not in self._able.sleep_levels:
            return 0
        self._asleep |= {"kv", "weights"} if level == 2 or self._api.traits.sleep_keeps_weights else {"kv"}
        return await self._api.sleep(self._call, level)

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        if unknown := set(tags) - {"weights", "kv"}:
            raise ValueError(f"wake tags {sorted(unknown)}: known are 'weights' and 'kv'")
        for part in ("weights", "kv"):  # a server with KV can serve, so it needs its weights first
            if part in self._asleep and {part, "kv"} & set(tags):
                await self._api.wake(self._call, part)
                self._asleep.remove(part)
                if self._paused and not self._asleep:  # with all parts awake the server resumes by itself
                    await self._api.pause(self._call, "keep")

    async def capabilities(self) -> Capabilities:
        """Wait until the server is up, and return its abilities."""
        await self._up()
        stops = self._context.decode is not None  # stop strings are searched here
        confirmed = {f.name: getattr(self._api.traits, f.name) for f in fields(Traits)}
        form = await asyncio.to_thread(format_of_server, self._context.hf_config, self._context.dtype)
        return replace(self._able, **confirmed | {"stop_strings": stops, "weights": form})

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        if self._starting is not None and not self._starting.get_loop().is_closed():
            self._starting.cancel()
        for undoing in self._undoing if self._launch is not None else ():  # that server is stopped in any state
            undoing.cancel()
        try:
            if self._undoing:
                await asyncio.wait(self._undoing, timeout=UNDO_S)
        finally:  # the rest ends with the connection
            await self._disconnect()
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
        if self._paused and "keep" in self._api.traits.pause_modes:
            await self._api.pause(self._call, "keep")

    def _may_sample(self) -> bool:
        return self._open.is_set() and self._fenced is None and not (self._paused or self._asleep)

    async def _check_health(self) -> None:
        """Check that the server samples. A probe needs a free row. If more requests than rows are pending and the
        server reports no progress, the check is a request to `/health`."""
        if len(self._pending) > self._context.max_concurrent_sequences and await self._progress() is None:
            await self._http.get("/health", timeout_s=PROBE_S)
        else:
            await self.probe(PROBE_S)
