"""A rollout engine that is a server: vLLM's token-in-token-out API and control plane, over HTTP (`RolloutEngine`).

What the server does not do is done here (stop strings) or refused (scores at another temperature, adapters, media). It
never speaks under weights that nobody verified: a transaction that fails fences it, for good or until it is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from verl.rollout.base import (
    Capabilities,
    Completion,
    PauseMode,
    RolloutContext,
    WeightReader,
    check_inputs,
    checked_ids,
)
from verl.rollout.handover import Deadlines, Expected, compare, of_shm
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.process import ServerProcess
from verl.rollout.wire import Drawn, Reading, sampling_params, scores, scoring_params, version_of
from verl.types import Sampling
from verl.weight_sync.base import SyncError, WeightSource

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
REQUEST_PREFIX = "generate-tokens-"  # of the id that a server gives a request, and that an abort must name
AGAIN_S = 0.05  # between two words to abort a request that may not have arrived yet
SETTLE_S = 2.0  # for the answers of a server that has finished its requests to arrive
DYING_S = 3.0  # from the end of an engine to that of the server before it
PROBE_S = 30.0  # for one token of a healthy server


Launch = Callable[[], tuple[ServerProcess, str]]
"""Starts the server: its process and its URL."""


class ServedEngine:
    """See `RolloutEngine`. at: the URL of a server that runs, or what starts one, which then ends with this engine."""

    def __init__(
        self,
        context: RolloutContext,
        expected: Expected,
        at: str | Launch,
        able: Capabilities,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._context, self._expected, self._able = context, expected, able
        self._limits = deadlines or Deadlines()
        self._vocab: int = context.hf_config.get_text_config().vocab_size
        self._launch = None if isinstance(at, str) else at
        self._server: ServerProcess | None = None
        self._http = Http(at) if isinstance(at, str) else self._launched()
        self._tag, self._number = uuid.uuid4().hex[:8], itertools.count()
        self._pending: dict[str, _Call] = {}
        self._starting: asyncio.Task[None] | None = None
        self._ready = self._closed = self._paused = False
        self._fenced: str | None = None  # why it must not speak
        self._control = asyncio.Lock()  # pauses, updates and restarts do not mix
        self._open = asyncio.Event()  # closed while one of these is under way: later requests wait for its end
        self._open.set()
        self._behind: set[asyncio.Task[None]] = set()
        self._model = "policy"
        self._version = -1

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
    ) -> Completion:
        """`prefix_key` is not needed here: a server finds equal prompts by their ids. A caller that gives up takes the
        connection with it, on which the server gives the row back."""
        self._check_alive()
        check_inputs(self._able, request_id, adapter, media)
        prompt = self._checked(request_id, prompt_ids, sampling)
        call = self._pending[request_id] = _Call(f"{self._tag}-{next(self._number)}-{request_id}")
        try:
            await self._open.wait()
            self._check_weights("generate")
            return await self._generate(request_id, call, prompt, sampling)
        except ServerGone as e:
            raise self._cause(e) from e
        except ServerRefused as e:
            if e.status >= 500 and await self._ends():  # its engine died, and it follows
                raise self._cause(ServerGone(str(e))) from e
            raise
        finally:
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
        return await self._score(ids)

    async def _score(self, ids: np.ndarray) -> np.ndarray:
        body = {"model": self._model, "token_ids": ids.tolist(), "sampling_params": scoring_params()}
        return scores(await self._call(GENERATE, body, self._limits.request_s), ids)

    async def _generate(self, request_id: str, call: _Call, prompt: np.ndarray, sampling: Sampling) -> Completion:
        eos, room = self._context.eos_token_ids, self._context.max_context_tokens - len(prompt)
        reading = Reading(sampling=sampling, room=room, eos_token_ids=eos, decode=self._context.decode)
        params = sampling_params(sampling, room=room, vocab=self._vocab, eos_token_ids=eos)
        body = {
            "model": self._model,
            "request_id": call.server_id,
            "token_ids": prompt.tolist(),
            "sampling_params": params,
        }
        drawn, ended = Drawn(), None
        if not sampling.stop:
            drawn.add(await self._http.post(GENERATE, body, timeout_s=self._limits.request_s, again=True))
            return reading.completion(request_id, drawn, None)
        events = self._http.stream(GENERATE, body | {"stream": True}, timeout_s=self._limits.request_s)
        async with aclosing(events):
            async for event in events:
                seen = len(drawn.ids)
                drawn.add(event)
                if ended is None and (ended := reading.end_of(drawn, seen)) and drawn.finish is None:
                    await self._abort_there([call])  # the last event says which weights drew what
        return reading.completion(request_id, drawn, ended)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Requests (None: all) return with their partial tokens -> how many did."""
        self._check_alive()
        names = self._pending.keys() if request_ids is None else self._pending.keys() & set(request_ids)
        calls = [self._pending[name] for name in names]
        await self._returned(calls)
        return len(calls)

    async def _returned(self, calls: Sequence[_Call]) -> None:
        """Abort them until they have returned: one may not have arrived there yet."""
        async with self._deadline(self._limits.control_s, f"{len(calls)} aborted requests to return"):
            while waiting := [call for call in calls if not call.ended.is_set()]:
                await self._abort_there(waiting)
                await _ended(waiting, AGAIN_S)

    async def _abort_there(self, calls: Sequence[_Call]) -> None:
        ids = [REQUEST_PREFIX + call.server_id for call in calls]
        await self._http.post(ABORT, {"request_ids": ids}, timeout_s=self._limits.control_s)

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
            await self._call("/resume")
            self._paused = False

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """One transaction: stand still, load all, compare what was loaded, drop the prefixes, go on. Whatever fails
        after the first tensor leaves a replica that is fenced; the next call restarts it, if it is ours."""
        self._check_alive()
        reader, sent = of_shm(source)
        await self._up()
        async with self._alone():
            if self._fenced is not None or (self._server is not None and self._server.exit_code is not None):
                await self._restart()
            what = "load_weights(on_inflight='wait')"
            try:
                await self._stand_still(on_inflight, what)
            except (ServerGone, ServerLate, ServerRefused):  # its engine has died, or hangs
                if self._launch is None:
                    raise
                await self._restart()
                await self._stand_still(on_inflight, what)
            try:
                await self._deliver(sent)
                if not self._paused:
                    await self._call("/resume")
            except BaseException as e:
                await self._fence(f"the update to version {sent.version} failed ({type(e).__name__}: {e})")
                raise
        reader.delivered |= set(sent.delivered)
        self._version = sent.version
        return sent.version

    async def _deliver(self, sent: WeightSource) -> None:
        """Into a server that stands still."""
        checksums = {name: e.checksum for name, e in sent.delivered.items() if e.checksum is not None}
        info = {"path": sent.address, "version": sent.version, "names": None, "checksums": checksums}
        await self._call("/start_weight_update")
        await self._call("/update_weights", {"update_info": info})
        told = await self._call("/finish_weight_update", {"weight_version": str(sent.version)})
        if not isinstance(told, dict) or "loaded" not in told:
            found = await self._call("/collective_rpc", {"method": "loaded_weights"})
            workers = found["results"]
        else:
            workers = [told]
        for worker in workers:
            compare(sent, worker)
        told = await self._call("/reset_prefix_cache")
        if not isinstance(told, dict) or told.get("success") is False:
            raise SyncError(f"version {sent.version}: the server keeps prefixes of older weights ({told})")

    async def _stand_still(self, mode: PauseMode, what: str) -> None:
        """Given up by its caller, it is undone."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={mode!r}: it is one of {', '.join(get_args(PauseMode))}")
        if self._paused and mode == "wait" and self._pending:
            raise ValueError(
                f"{what}: {len(self._pending)} requests stand still and cannot finish; resume or abort them"
            )
        calls = list(self._pending.values())
        try:
            await self._call(f"/pause?mode={mode}")
            if mode == "abort":
                await self._returned(calls)
            elif mode == "wait":  # what has not arrived there is held: it is not waited for
                await _ended(calls, SETTLE_S)
        except asyncio.CancelledError:
            if not self._paused:
                self._later(self._call("/resume"))
            raise

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._control:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()

    async def _fence(self, why: str) -> None:
        """Nothing it says from now on is believed. Requests that stand still there end: elsewhere they can go on."""
        self._fenced = why
        if self._server is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._server.stop))
        else:
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                await self._abort_there(list(self._pending.values()))

    async def sleep(self, level: int = 1) -> int:
        """0 where the server cannot: its memory stays. What it frees, a server does not say."""
        if level not in (1, 2):
            raise ValueError(f"sleep level={level}: 1 frees the KV, 2 the weights too")
        if level in self._able.sleep_levels:
            await self._call(f"/sleep?level={level}")
        return 0

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        if unknown := set(tags) - {"weights", "kv"}:
            raise ValueError(f"wake tags {sorted(unknown)}: known are 'weights' and 'kv'")
        if self._able.sleep_levels:
            await self._call("/wake_up")

    async def capabilities(self) -> Capabilities:
        """Waits until the server is up."""
        await self._up()
        return self._able

    async def probe(self, timeout_s: float = PROBE_S) -> None:
        """Health that the engine itself has shown: one token in time (`/health` is 200 while it is stopped)."""
        one = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        await self._call(GENERATE, {"model": self._model, "token_ids": [0], "sampling_params": one}, timeout_s)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._starting is not None and not self._starting.get_loop().is_closed():
            self._starting.cancel()
        await asyncio.gather(*self._behind, return_exceptions=True)
        await self._http.close()
        if self._server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._server.stop)

    @property
    def version(self) -> int:
        return self._version

    # -- start, restart and errors -------------------------------------------------------------------------------------

    async def _up(self) -> None:
        if self._ready:
            return
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting.done() or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self._start(), name="rollout-server-start")
        await asyncio.shield(self._starting)

    def _launched(self) -> Http:
        assert self._launch is not None
        self._server, url = self._launch()
        return Http(url)

    async def _start(self) -> None:
        """Wait until it answers; then ValueError for a server that is not what was asked for."""
        try:
            async with self._deadline(self._limits.start_s, "it to start", tail=True):
                while not await self._answers():  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.2)
            await self._known()
        except BaseException:
            if self._server is not None:
                await asyncio.get_running_loop().run_in_executor(None, self._server.stop)
            raise
        self._ready = True

    async def _answers(self) -> bool:
        if self._server is not None and (code := self._server.exit_code) is not None:
            last = f"the last lines of {self._server.log}:\n{self._server.tail()}"
            raise RuntimeError(f"{self._expected.name} ended with exit code {code} as it started; {last}")
        try:
            await self._http.get("/health", timeout_s=5.0)
        except (ServerGone, ServerLate, ServerRefused) as e:
            if self._server is None and not isinstance(e, ServerLate):
                raise ValueError(f"rollout.url={self._http.url}: no healthy server there ({e}); start it first") from e
            return False
        return True

    async def _known(self) -> None:
        """Version, model, context, control plane and the meaning of its log-probs."""
        url, name, limit_s = self._http.url, self._expected.name, self._limits.control_s
        if self._expected.versions is not None:
            at_least, below = self._expected.versions
            said = str((await self._http.get("/version", timeout_s=limit_s))["version"])
            if not at_least <= version_of(said) < below:
                wanted = f">={'.'.join(map(str, at_least))},<{'.'.join(map(str, below))}"
                raise ValueError(f"{url} is {name} {said}: this adapter was made for {name} {wanted}; install that")
        model = (await self._http.get("/v1/models", timeout_s=limit_s))["data"][0]
        self._model, room = str(model["id"]), model.get("max_model_len")
        if room is not None and int(room) < (wants := self._context.max_context_tokens):
            fix = "start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
            raise ValueError(f"{url} serves sequences of at most {room} tokens, and {wants} are asked for; {fix}")
        await self._transfer()
        if self._server is None:
            await self._call("/resume")  # whoever was here before may have left it standing
            await self._refuse_raw_logprobs()
        await self.probe()

    async def _transfer(self) -> None:
        try:
            await self._call("/init_weight_transfer_engine", {"init_info": {}})
        except ServerRefused as e:
            fix = self._expected.needs.get("transfer", "it must take weights from shared memory")
            raise ValueError(f"{self._http.url} cannot be sent weights ({e}): {fix}") from e

    async def _refuse_raw_logprobs(self) -> None:
        """ValueError for a server whose log-probs are not those of the distribution that it drew from."""
        params = {"max_tokens": 8, "temperature": 2.0, "seed": 1, "logprobs": 0, "detokenize": False}
        body = {"model": self._model, "token_ids": [0], "sampling_params": params | {"ignore_eos": True}}
        drawn = Drawn()
        drawn.add(await self._call(GENERATE, body))
        plain = (await self._score(np.array([0, *drawn.ids])))[-len(drawn.ids) :]
        uniform = -np.log(self._vocab)
        if np.abs(plain - drawn.logprobs).max() < 1e-3 < np.abs(plain - uniform).max():
            fix = self._expected.needs.get("logprobs", "have it return those of the distribution that was drawn from")
            raise ValueError(f"{self._http.url} returns log-probs before temperature and truncation: {fix}")

    async def _restart(self) -> None:
        if self._launch is None:
            raise ServerGone(f"{self._http.url} must not speak: {self._fenced}; restart that server and this run")
        if self._server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._server.stop)
        await self._http.close()
        self._http = self._launched()
        self._ready, self._fenced, self._version = False, None, -1
        await self._up()
        if self._paused:
            await self._call("/pause?mode=keep")

    async def _call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        try:
            return await self._http.post(path, body, timeout_s=timeout_s or self._limits.control_s)
        except ServerGone as e:
            raise self._cause(e) from e
        except ServerRefused as e:
            fix = self._expected.needs.get(path.partition("?")[0])
            if e.status in (403, 404, 405) and fix is not None:
                raise ValueError(f"{self._http.url} has no {path}: {fix}") from e
            raise

    async def _ends(self) -> bool:
        """The server is gone, or goes within `DYING_S`."""
        with contextlib.suppress(ServerLate):
            async with self._deadline(DYING_S, "its end"):
                while self._server is not None and self._server.exit_code is None:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.05)
                return self._server is not None
        return False

    def _cause(self, error: ServerGone) -> Exception:
        """Why nobody answers, as far as it is known here: another error, which has this one for its cause."""
        if self._closed:
            return RuntimeError("the rollout engine was closed")
        if self._fenced is not None:
            return ServerGone(f"{self._expected.name} is out of service: {self._fenced}")
        if self._server is None or (code := self._server.exit_code) is None:
            return ServerGone(str(error))
        return ServerGone(
            f"{self._expected.name} ended with exit code {code}; in {self._server.log}: {self._server.tail(3)}"
        )

    def _check_alive(self) -> None:
        if self._closed:
            raise RuntimeError("the rollout engine is closed")

    def _check_weights(self, what: str) -> None:
        if self._fenced is not None:
            raise ServerGone(f"{self._expected.name} is out of service: {self._fenced}")
        if self._version < 0:
            raise ValueError(f"{what}: the engine has no weights (never loaded): load_weights first")

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

    @asynccontextmanager
    async def _deadline(self, timeout_s: float, what: str, *, tail: bool = False) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            said = f"; the last lines of {self._server.log}:\n{self._server.tail()}" if tail and self._server else ""
            at = f"{self._expected.name} at {self._http.url}"
            raise ServerLate(f"{at}: waited {timeout_s:g} s for {what}{said}") from None

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        """For a caller that is gone."""

        async def quietly() -> None:
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)


async def _ended(calls: Sequence[_Call], timeout_s: float) -> None:
    """Wait for their ends, so long at most."""
    if waits := [asyncio.ensure_future(call.ended.wait()) for call in calls]:
        _, late = await asyncio.wait(waits, timeout=timeout_s)
        for wait in late:
            wait.cancel()


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way; server_id: the name that it has there."""

    server_id: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
