"""The answers and scores of a server. A request is answered as a whole or as a stream, and is repeated if its
connection breaks.

Features that a server lacks are either implemented here (stop strings) or refused (scores at another temperature).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from verl.parameter_set import POLICY_SET
from verl.rollout.adapters import ServerAdapters
from verl.rollout.api import TokenBudget
from verl.rollout.base import Completion, GenerateRequest, PartialAnswer, check_request, checked_ids
from verl.rollout.calls import PendingCall, RunningCalls, first
from verl.rollout.connection import ServerConnection
from verl.rollout.embedded.images import ImageReader
from verl.rollout.gate import ServerGate
from verl.rollout.http import PAUSED, ServerGone, ServerLate, ServerRefused
from verl.rollout.liveness import QUIET_S, LivenessWatch
from verl.rollout.wire import NotUnderstood, Reading, ServerAnswer

ATTEMPTS = 3  # to send a request to a healthy server with breaking connections


class ServerAnswers:
    """The answers and scores of one server."""

    def __init__(
        self,
        connection: ServerConnection,
        calls: RunningCalls,
        gate: ServerGate,
        watch: LivenessWatch,
        adapters: ServerAdapters,
    ) -> None:
        self._connection, self._calls, self._gate, self._watch = connection, calls, gate, watch
        self._adapters = adapters

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the whole answer. If the caller is cancelled the connection is closed, and the server frees the
        request."""
        context, begun, pending = self._connection.context, request.begun, self._calls.pending
        model, _ = self._adapters.served(request.id, request.parameters)
        if request.sampling.banned and not self._connection.api.traits.bans:
            raise ValueError(f"{request.id}: banned={request.sampling.banned}: this server bans no ids")
        self._connection.check_weights("generate")
        request = replace(request, prompt_ids=checked_ids(request.id, request.prompt_ids, self._connection.vocab))
        room, decodes = context.max_context_tokens, context.decode is not None
        check_request(request, pending, max_context_tokens=room, decodes=decodes)
        call = pending[request.id] = PendingCall(request, model, routed=self._routed(request))
        known = 0 if begun is None else len(begun.ids)
        self._watch.watch()
        try:
            if request.media:
                reader = ImageReader(context)
                call.images = await asyncio.to_thread(reader.of, request.id, request.prompt_ids, request.media)
            return await self._with_retries(call)
        except (ServerRefused, ServerLate) as e:
            if (isinstance(e, ServerLate) or e.status >= 500) and (
                await self._connection.is_ending() or await self._watch.stuck()
            ):
                raise await self._connection.cause(ServerGone(str(e))) from e  # its engine died
            raise
        finally:
            if self._connection.foreign and begun is not None:
                begun.cut(known)
            del pending[request.id]
            call.ended.set()

    def _routed(self, request: GenerateRequest) -> bool:
        """Return true for a request that may be sent through a router: not every server behind it has the LoRA sets."""
        return self._connection.router is not None and request.parameters == POLICY_SET.id

    async def score(self, ids: np.ndarray, temperature: float, parameters: str) -> np.ndarray:
        """Return log-probs [t-1] of ids[1:] at temperature 1 (or 0, for greedy decoding): servers score no others."""
        connection, room = self._connection, self._connection.context.max_context_tokens
        ids = checked_ids("score", ids, connection.vocab)
        if temperature not in (0.0, 1.0):
            raise ValueError(f"temperature={temperature}: {connection.name} scores at temperature 1 only; give 1.0")
        if len(ids) > room:
            raise ValueError(f"score: {len(ids)} tokens exceed max_context_tokens={room}")
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        connection.check_weights("score")
        model, _ = self._adapters.served("score", parameters)
        self._calls.scoring[model] += 1
        try:
            return await connection.api.score(connection.call, model, ids, connection.limits.request_s)
        finally:
            self._calls.scoring[model] -= 1

    async def _with_retries(self, call: PendingCall) -> Completion:
        """Send the request, and repeat it if it has no answer although the server runs: its connection broke, a router
        returned an answer that is not accepted, or the server was paused."""
        for left in reversed(range(ATTEMPTS)):
            try:
                return await self._attempt(call)
            except (ServerGone, ServerRefused, ServerLate, NotUnderstood) as e:
                if call.routed or (left and isinstance(e, ServerRefused) and e.status == PAUSED):
                    call.routed = False  # retry at this server itself, without the router or after the pause
                    continue
                if not isinstance(e, ServerGone):
                    raise
                lost = self._connection.closed or self._connection.exited or not self._gate.may_sample
                if lost or await self._watch.failed() is not None:
                    raise await self._connection.cause(e) from e.__cause__
                if not left:  # the same would happen at another server
                    raise RuntimeError(f"{e}, {ATTEMPTS} times, and it answers others") from e.__cause__
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, call: PendingCall) -> Completion:
        call.server_id, begun = self._connection.new_id(call.request.id), call.request.begun
        while not (self._gate.open.is_set() or call.cut.is_set()):
            await first(self._gate.open.wait(), call.cut.wait())
        self._connection.check_alive()
        self._connection.check_weights("generate")
        call.model, call.version = self._adapters.served(call.request.id, call.request.parameters)
        call.sent, known = True, 0
        if begun is not None and not begun.mixes:
            begun.keep(self._connection.version, self._connection.version)
            known = len(begun.ids)
        try:
            answer = await self._answer(call)
        finally:
            call.sent = False  # it may wait for an update now, which must not wait for it
        if begun is not None and known and len(answer.spans) > 1:  # an update came between: sample from the beginning
            begun.keep(0, -1)
            return await self._attempt(call)
        return answer

    async def _answer(self, call: PendingCall) -> Completion:
        connection, context, request = self._connection, self._connection.context, call.request
        api, version, drawn = connection.api, connection.version, ServerAnswer()
        adapted = call.model != connection.model
        prompt, sampling, before = request.prompt_ids.tolist(), request.sampling, request.begun or PartialAnswer()
        room, ends = context.max_context_tokens - len(prompt), context.eos_token_ids
        reading = Reading(sampling=sampling, room=room, eos_token_ids=ends, decode=context.decode, before=before)
        budget = TokenBudget(tokens=room - len(before.ids), vocab=connection.vocab, ends=ends)
        rest = reading.rest(api.traits.draws_by_position)
        body = api.body(call.model, call.server_id, prompt + before.ids, rest, budget)
        if call.images is not None:
            body |= api.image_fields(call.images, context.dtype)
        call.routed &= api.routable(body) and not sampling.stop  # an answer that ends at a stop string has no versions
        try:
            follow = request.begun is not None and api.traits.resumable_stream
            await self._send(call, body, reading, drawn, follow=follow)
            if not api.traits.updates_weights and drawn.ids:  # its weights did not change meanwhile
                drawn.versions = [(str(version), 0, len(drawn.ids))]
            self._calls.events += not call.routed
            drawn.versions = await connection.numbers(drawn.versions, version, routed=call.routed)
            if adapted and drawn.ids:  # one version of a LoRA set; the weights under it did not change meanwhile
                drawn.versions = [(str(call.version), 0, len(drawn.ids))]
            return replace(reading.completion(request.id, drawn), parameters=request.parameters)
        finally:
            reading.keep(drawn, version)

    async def _send(
        self, call: PendingCall, body: Mapping[str, Any], reading: Reading, drawn: ServerAnswer, *, follow: bool
    ) -> None:
        """Send the request and read its answer: as a stream if `follow`, or if it can only be ended by this client."""
        connection, api = self._connection, self._connection.api
        if call.cut.is_set():  # aborted before it was sent
            drawn.finish = "abort"
        elif api.traits.aborts_requests and not (reading.sampling.stop or follow or call.routed):
            limit_s = connection.limits.request_s
            api.read(drawn, await connection.http.post(api.generate, body, timeout_s=limit_s, again=True))
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
        connection, api, version = self._connection, self._connection.api, self._connection.version
        router = connection.router if call.routed else None
        http = connection.http if router is None else router.http
        events = http.stream(api.generate, {**body, "stream": True}, timeout_s=connection.limits.request_s)
        async with aclosing(events):
            async for event in events:
                seen, call.last_event_s = len(drawn.ids), time.monotonic()
                self._calls.events += router is None
                api.read(drawn, event)
                if router is not None:
                    router.check_live(drawn.live, version)
                if self._is_of(version, drawn.live) and not call.routed:
                    drawn.sure = len(drawn.ids)
                if drawn.stopped is None:
                    drawn.stopped = reading.end_of(drawn, seen)
                    if drawn.stopped is None or drawn.finish is not None:
                        continue
                    if not api.traits.aborts_requests:
                        break  # this closes the connection
                    await self._calls.send_abort([call])

    def _is_of(self, version: int, live: str | None) -> bool:
        """Return true if the server certainly samples with this version now. `live` is its name for its weights."""
        connection = self._connection
        labels = connection.api.traits.takes_weight_version
        ours = live in (None, f"{version}-{connection.tag}") or not labels
        return ours and self._gate.open.is_set() and connection.version == version and not connection.fenced
