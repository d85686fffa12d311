"""The start of a server: the wait until it answers, and the checks of its version, its model and its log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from verl.errors import Refused
from verl.rollout.api import model_of
from verl.rollout.connection import HEALTH_S, PROBE_S, ServerConnection
from verl.rollout.http import ServerGone, ServerLate, ServerRefused
from verl.rollout.wire import raw
from verl.types import Sampling

PORTS = 3  # further ports that are tried if one is taken
LOG_LINES = 1000  # last lines of a log that are searched for the cause of an end
UNKNOWN_MODEL = ("are not supported for now", "Unknown architecture", "does not recognize this architecture")
"""Messages about an unknown architecture: of vLLM and SGLang, of TensorRT-LLM, of transformers in any of them."""
OTHER_ENGINES = "rollout.engine=native (or hf, for whatever transformers has)"


class ServerStart:
    """The start of a server. All calls before its end wait for it. `load_adapters` is called last, and loads the
    adapters that a new server needs."""

    def __init__(self, connection: ServerConnection, load_adapters: Callable[[], Awaitable[None]]) -> None:
        self._connection, self._load_adapters = connection, load_adapters
        self.waiting = connection.restarts  # it starts with its first weights
        self.found_paused = False  # it was paused before this run: it is resumed and checked with complete weights
        self._starting: asyncio.Task[None] | None = None
        self._ready, self._ports = False, PORTS

    async def up(self) -> None:
        """Wait until the server has started, unless it waits for its first weights. Concurrent callers share one
        start."""
        if self._ready or self.waiting:
            return
        loop = asyncio.get_running_loop()
        if self._starting is None or self._starting.done() or self._starting.get_loop() is not loop:
            self._starting = loop.create_task(self._start(), name="rollout-server-start")
        await asyncio.shield(self._starting)

    async def again(self) -> None:
        """Wait for the start of a new process, which has no weights."""
        self._ready, self.waiting, self._connection.fenced, self._connection.version = False, False, None, -1
        await self.up()

    def close(self) -> None:
        if self._starting is not None and not self._starting.get_loop().is_closed():
            self._starting.cancel()

    async def check_answers(self) -> None:
        """Raise Refused for a server of another model or with raw log-probs. Raise an error of rollout/http.py for one
        that does not sample."""
        connection = self._connection
        if connection.process is None:
            await self._refuse_another_model()
            if not connection.api.traits.raw_logprobs_only:
                await self._refuse_raw_logprobs()
        await connection.probe()

    async def _start(self) -> None:
        connection, self._ports = self._connection, PORTS
        try:
            async with connection.deadline(connection.limits.start_s, "it to start", tail=True):
                while not await self._answers():  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.2)
            await self._check_server()
            await self._load_adapters()
            if connection.router is not None:
                await connection.router.check(connection.limits.control_s)
        except BaseException:
            await connection.stop()
            raise
        self._ready = True

    async def _answers(self) -> bool:
        """Return true if this server answers, and not another one at its port. The port was free when it was chosen,
        but the server opens it much later, after loading its model."""
        connection, server, at = self._connection, self._connection.process, self._connection.http.url
        if server is None or server.exit_code is None:
            try:
                await connection.http.get("/health", timeout_s=HEALTH_S)
            except (ServerGone, ServerLate, ServerRefused) as e:
                if server is None and not isinstance(e, ServerLate):
                    raise Refused(f"rollout.url={at}: no healthy server there ({e}); start it first") from e
                return False
            if server is None:
                return True
        _, others = server.listens(int(at.rpartition(":")[2]))
        if others and self._ports:
            self._ports -= 1
            await connection.relaunch_elsewhere()
        elif others or (code := server.exit_code) is not None:
            how = "shares its port with another server" if others else f"ended with exit code {code} as it started"
            if lacks := _unknown_model(server.tail(LOG_LINES)):
                raise Refused(f"{connection.name} does not know this model ({lacks}): set {OTHER_ENGINES}")
            last = f"the last lines of {server.log}:\n{server.tail()}"
            raise RuntimeError(f"{connection.name} at {at} {how}; {last}")
        return not others  # no entry in the kernel's table: no other server

    async def _check_server(self) -> None:
        """Check version, model, context length, control calls and the meaning of log-probs."""
        connection, api = self._connection, self._connection.api
        url, get = connection.http.url, partial(connection.http.get, timeout_s=connection.limits.control_s)
        connection.model = await model_of(api, connection.expected, url, get, connection.context.max_context_tokens)
        try:
            await api.prepare(connection.call, connection.model, connection.vocab)
        except ServerRefused as e:
            fix = connection.expected.needs.get("transfer", "it must take weights from shared memory")
            raise Refused(f"{url} cannot be sent weights ({e}): {fix}") from e
        if connection.process is None and (paused := await api.paused(get)) is not False:
            # paused by a driver that died, perhaps in the middle of an update: resumed then, vLLM's engine would end
            self.found_paused = bool(paused)
            if not self.found_paused:
                await api.resume(connection.call)
        if not self.found_paused:
            await self.check_answers()

    async def _refuse_another_model(self) -> None:
        """Raise Refused if the server has another model than this run, as far as that can be found without weights."""
        connection, place = self._connection, self._connection.context.place
        config = connection.context.hf_config.get_text_config()
        if unlike := await connection.api.unlike(connection.call, connection.model, config):
            ours = "the model of this run" if place is None else f"model.path={place.model}"
            fix = f"{ours} has {connection.vocab} ids: start it with that folder, or name its model in model.path"
            raise Refused(f"{connection.http.url} serves another model, {connection.model!r}: {unlike}; {fix}")

    async def _refuse_raw_logprobs(self) -> None:
        """Raise Refused for a server with log-probs that are not those of the distribution that it sampled from."""
        connection = self._connection
        drawn = await connection.short_answer(Sampling(max_tokens=8, temperature=2.0, seed=1, ignore_eos=True))
        ids = np.array([0, *drawn.ids])
        plain = (await connection.api.score(connection.call, connection.model, ids, PROBE_S))[-len(drawn.ids) :]
        if raw(np.array(drawn.logprobs), plain, connection.vocab):
            other = "have it return those of the distribution that was drawn from"
            fix = connection.expected.needs.get("logprobs", other)
            raise Refused(f"{connection.http.url} returns log-probs before temperature and truncation: {fix}")


def _unknown_model(log: str) -> str:
    """Return the message about an unknown architecture from a log, without the list of the known ones, or ""."""
    found = [line for line in log.splitlines() if any(text in line for text in UNKNOWN_MODEL)]
    return (
        found[-1].partition(" Supported architectures")[0].strip().removeprefix("Value error, ")[-300:] if found else ""
    )
