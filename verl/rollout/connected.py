"""The connection to one server: the process if it is started here, the checks at its start, and causes of its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from verl.errors import Refused
from verl.rollout.api import Api, Deadlines, Expected, TokenBudget, model_of, positions_of
from verl.rollout.base import BaseEngine, RolloutContext
from verl.rollout.calls import PendingCall
from verl.rollout.embedded.core import check_context
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.launching import Launch
from verl.rollout.process import ServerProcess
from verl.rollout.routed import Routed
from verl.rollout.wire import ServerAnswer, Span, marked, raw
from verl.types import Sampling

DYING_S = 3.0  # from the end of an engine process to the end of its server
HEALTH_S = 5.0  # for health and metrics of a server
PORTS = 3  # further ports that are tried if one is taken
PROBE_S = 30.0  # for one token of a healthy server
LOG_LINES = 1000  # last lines of a log that are searched for the cause of an end
UNKNOWN_MODEL = ("are not supported for now", "Unknown architecture", "does not recognize this architecture")
"""Messages about an unknown architecture: of vLLM and SGLang, of TensorRT-LLM, of transformers in any of them."""
OTHER_ENGINES = "rollout.engine=native (or hf, for whatever transformers has)"


def _unknown_model(log: str) -> str:
    """Return the message about an unknown architecture from a log, without the list of the known ones, or ""."""
    found = [line for line in log.splitlines() if any(text in line for text in UNKNOWN_MODEL)]
    return (
        found[-1].partition(" Supported architectures")[0].strip().removeprefix("Value error, ")[-300:] if found else ""
    )


class Server(BaseEngine):
    """A server at the URL `at`, or one that `at` starts and that ends with this object. `router` is the URL of a router
    in front of it."""

    def __init__(
        self,
        context: RolloutContext,
        expected: Expected,
        api: Api,
        at: str | Launch,
        limits: Deadlines,
        key: str | None,
        router: str | None = None,
    ) -> None:
        check_context(context.max_context_tokens, positions_of(context))
        self._context, self._expected, self._api, self._limits = context, expected, api, limits
        self._vocab: int = context.hf_config.get_text_config().vocab_size
        self._launch = None if isinstance(at, str) else at
        self._server: ServerProcess | None = None
        # a server that is restarted for every version starts with the first one
        self._waiting = self._launch is not None and not api.traits.updates_weights
        self._http = Http(at, key) if isinstance(at, str) else Http("") if self._waiting else self._launched(None)
        self._tag, self._number = uuid.uuid4().hex[:8], itertools.count()
        self._router: Routed | None = None
        if router is not None and context.place is not None:
            self._router = Routed(router, key, api, context.place.peers, self._http.url, self._tag)
        self._starting: asyncio.Task[None] | None = None
        self._ready = self._closed = False
        self._found_paused = False  # it was paused before this run: it is resumed and checked with complete weights
        self._fenced: str | None = None  # why its answers no longer count
        self._foreign = False  # it had weights of another run: unlabelled tokens may be from those
        self._model = "policy"
        self._version = -1

    async def probe(self, timeout_s: float = PROBE_S) -> None:
        """Check that the engine samples one token in time. `/health` is 200 even while the engine is stopped."""
        await self._short_answer(Sampling(max_tokens=1, temperature=0.0, ignore_eos=True), timeout_s)

    async def _short_answer(self, sampling: Sampling, timeout_s: float | None = None) -> ServerAnswer:
        """Return a short answer to the prompt [0]."""
        room, drawn = TokenBudget(tokens=sampling.max_tokens, vocab=self._vocab, ends=()), ServerAnswer()
        body = self._api.body(self._model, f"{self._tag}-{next(self._number)}-probe", [0], sampling, room)
        self._api.read(drawn, await self._call(self._api.generate, body, timeout_s))
        return drawn

    async def _up(self) -> None:
        if self._ready or self._waiting:
            return
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting.done() or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self._start(), name="rollout-server-start")
        await asyncio.shield(self._starting)

    def _launched(self, folder: str | None) -> Http:
        assert self._launch is not None
        self._folder, (self._server, url) = folder, self._launch(folder)
        return Http(url)

    async def _launched_anew(self, folder: str | None) -> None:
        if self._server is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._server.stop)
        await self._http.close()
        self._check_alive()  # a server that is started after a close would never be stopped
        self._http = self._launched(folder)

    async def _start(self) -> None:
        """Wait until the server answers. Then raise ValueError if it is not as required."""
        self._ports = PORTS
        try:
            async with self._deadline(self._limits.start_s, "it to start", tail=True):
                while not await self._answers():  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.2)
            await self._check_server()
            await self._load_adapters()
            if self._router is not None:
                await self._router.check(self._limits.control_s)
        except BaseException:
            if self._server is not None:
                await asyncio.get_running_loop().run_in_executor(None, self._server.stop)
            raise
        self._ready = True

    async def _answers(self) -> bool:
        """Return true if this server answers, and not another one at its port. The port was free when it was chosen,
        but the server opens it much later, after loading its model."""
        server, at = self._server, self._http.url
        if server is None or server.exit_code is None:
            try:
                await self._http.get("/health", timeout_s=HEALTH_S)
            except (ServerGone, ServerLate, ServerRefused) as e:
                if server is None and not isinstance(e, ServerLate):
                    raise Refused(f"rollout.url={at}: no healthy server there ({e}); start it first") from e
                return False
            if server is None:
                return True
        _, others = server.listens(int(at.rpartition(":")[2]))
        if others and self._ports:
            self._ports -= 1
            await self._launched_anew(self._folder)
        elif others or (code := server.exit_code) is not None:
            how = "shares its port with another server" if others else f"ended with exit code {code} as it started"
            if lacks := _unknown_model(server.tail(LOG_LINES)):
                raise Refused(f"{self._expected.name} does not know this model ({lacks}): set {OTHER_ENGINES}")
            last = f"the last lines of {server.log}:\n{server.tail()}"
            raise RuntimeError(f"{self._expected.name} at {at} {how}; {last}")
        return not others  # no entry in the kernel's table: no other server

    async def _check_server(self) -> None:
        """Check version, model, context length, control calls and the meaning of log-probs."""
        url, get = self._http.url, partial(self._http.get, timeout_s=self._limits.control_s)
        self._model = await model_of(self._api, self._expected, url, get, self._context.max_context_tokens)
        try:
            await self._api.prepare(self._call, self._model, self._vocab)
        except ServerRefused as e:
            fix = self._expected.needs.get("transfer", "it must take weights from shared memory")
            raise Refused(f"{url} cannot be sent weights ({e}): {fix}") from e
        if self._server is None and (paused := await self._api.paused(get)) is not False:
            # paused by a driver that died, perhaps in the middle of an update: resumed then, vLLM's engine would end
            self._found_paused = bool(paused)
            if not self._found_paused:
                await self._api.resume(self._call)
        if not self._found_paused:
            await self._check_answers()

    async def _disconnect(self) -> None:
        await self._http.close()
        if self._router is not None:
            self._router.fence()
            await self._router.http.close()

    async def _load_adapters(self) -> None:
        """Load what a new server needs for adapters. A server without adapters needs nothing."""

    async def _check_answers(self) -> None:
        if self._server is None:
            await self._refuse_another_model()
            if not self._api.traits.raw_logprobs_only:
                await self._refuse_raw_logprobs()
        await self.probe()

    async def _refuse_another_model(self) -> None:
        """Raise ValueError for a server of another model than this run's, as far as that shows without weights."""
        place, config = self._context.place, self._context.hf_config.get_text_config()
        if said := await self._api.unlike(self._call, self._model, config):
            ours = "the model of this run" if place is None else f"model.path={place.model}"
            fix = f"{ours} has {self._vocab} ids: start it with that folder, or name its model in model.path"
            raise Refused(f"{self._http.url} serves another model, {self._model!r}: {said}; {fix}")

    async def _refuse_raw_logprobs(self) -> None:
        """Raise ValueError for a server with log-probs that are not those of the distribution that it sampled from."""
        drawn = await self._short_answer(Sampling(max_tokens=8, temperature=2.0, seed=1, ignore_eos=True))
        plain = (await self._api.score(self._call, self._model, np.array([0, *drawn.ids]), PROBE_S))[-len(drawn.ids) :]
        if raw(np.array(drawn.logprobs), plain, self._vocab):
            fix = self._expected.needs.get("logprobs", "have it return those of the distribution that was drawn from")
            raise Refused(f"{self._http.url} returns log-probs before temperature and truncation: {fix}")

    async def _call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        try:
            return await self._http.post(path, body, timeout_s=timeout_s or self._limits.control_s)
        except ServerGone as e:
            raise await self._cause(e) from e.__cause__
        except ServerRefused as e:
            fix = self._expected.needs.get(path.partition("?")[0])
            if e.status in (403, 404, 405) and fix is not None:
                raise Refused(f"{self._http.url} has no {path}: {fix}") from e
            raise

    async def _numbers(self, call: PendingCall, told: list[Span], least: int) -> list[Span]:
        """Return the spans with plain version numbers. Raise ServerGone if another run gave the weights."""
        if call.routed and self._router is not None:
            return await self._router.numbers(told, least, self._limits.control_s)
        if not self._api.traits.takes_weight_version:
            return told
        if others := [name for name, _, _ in told if marked(name)[1] != self._tag]:
            self._foreign = True
            why = f"it has weights ({others[0]}) that this run did not give it"
            await self._give_up(f"{why}: another one uses it too, or it was restarted: it is to be left alone")
            raise ServerGone(f"{self._http.url}: {self._fenced}")
        return [(str(marked(name)[0]), start, end) for name, start, end in told]

    async def _give_up(self, why: str) -> None:
        """Give up the server: all waiting calls fail with this reason."""
        self._fenced = why
        if self._router is not None:
            self._router.fence()
        await self._http.close()

    @property
    def _exited(self) -> bool:
        return self._server is not None and self._server.exit_code is not None

    async def _is_ending(self) -> bool:
        """Return true if the server has ended, or ends within `DYING_S`."""
        with contextlib.suppress(ServerLate):
            async with self._deadline(DYING_S, "its end"):
                while self._server is not None and self._server.exit_code is None:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.05)
                return self._server is not None
        return False

    async def _progress(self) -> Any:
        with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
            return await self._api.progress(partial(self._http.get, timeout_s=HEALTH_S))
        return None

    async def _cause(self, error: ServerGone) -> Exception:
        """Return an error with the known reason why the server does not answer. A server that ends now gets `DYING_S`
        to do so."""
        if not self._closed and self._fenced is None:
            await self._is_ending()
        if self._closed:
            return RuntimeError("the rollout engine was closed")
        if self._fenced is not None:
            return ServerGone(f"{self._expected.name} is out of service: {self._fenced}")
        if self._server is None or (code := self._server.exit_code) is None:
            return ServerGone(str(error))
        said = f"in {self._server.log}: {self._server.tail(3)}"
        return ServerGone(f"{self._expected.name} ended with exit code {code}; {said}")

    def _check_alive(self) -> None:
        if self._closed:
            raise RuntimeError("the rollout engine is closed")

    def _check_weights(self, what: str) -> None:
        if self._fenced is not None:
            raise ServerGone(f"{self._expected.name} is out of service: {self._fenced}")
        if self._version < 0:
            raise ValueError(f"{what}: the engine has no weights (never loaded): load_weights first")

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
