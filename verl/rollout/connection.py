"""The connection to one server: its URL or its process, the mark of the weights that are sent to it, and the reason why
it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from verl.errors import Refused
from verl.rollout.api import Api, Deadlines, Expected, TokenBudget, positions_of
from verl.rollout.base import Capabilities, RolloutContext
from verl.rollout.embedded.core import check_context
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.launching import Launch
from verl.rollout.process import ServerProcess
from verl.rollout.routed import Routed
from verl.rollout.wire import ServerAnswer, Span, marked
from verl.types import Sampling

DYING_S = 3.0  # from the end of an engine process to the end of its server
HEALTH_S = 5.0  # for health and metrics of a server
PROBE_S = 30.0  # for one token of a healthy server


class ServerConnection:
    """The connection to a server at the URL `at`, or to one that `at` starts and that ends with this object.

    `able` are its declared capabilities, `api_key` is sent with every call, and `router` is the URL of a router in
    front of it. The other parts of `ServedEngine` read the state here, and call the server through `call`.
    """

    def __init__(
        self,
        context: RolloutContext,
        expected: Expected,
        api: Api,
        at: str | Launch,
        able: Capabilities,
        limits: Deadlines,
        api_key: str | None,
        router: str | None,
    ) -> None:
        check_context(context.max_context_tokens, positions_of(context))
        self.context, self.expected, self.api, self.able, self.limits = context, expected, api, able, limits
        self.vocab: int = context.hf_config.get_text_config().vocab_size
        self.launch = None if isinstance(at, str) else at
        self.process: ServerProcess | None = None
        self.tag, self._number = uuid.uuid4().hex[:8], itertools.count()
        # a server that is restarted for every version starts with the first one
        self.http = Http(at, api_key) if isinstance(at, str) else Http("") if self.restarts else self._started(None)
        self.router: Routed | None = None
        if router is not None and context.place is not None:
            self.router = Routed(router, api_key, api, context.place.peers, self.http.url, self.tag)
        self.closed = False
        self.fenced: str | None = None  # why its answers are no longer valid
        self.foreign = False  # it had weights of another run: unlabelled tokens may be from those
        self.model = "policy"  # the name at the server for requests without an adapter
        self.version = -1  # of its weights; -1: it has none
        self.identity = ""  # of its weights; "": unknown

    @property
    def name(self) -> str:
        """The server's name in error messages."""
        return self.expected.name

    @property
    def restarts(self) -> bool:
        """The server is started here, and restarted with every version of the weights."""
        return self.launch is not None and not self.api.traits.updates_weights

    @property
    def exited(self) -> bool:
        """True if the server was started here and its process has ended."""
        return self.process is not None and self.process.exit_code is not None

    @property
    def routed_events(self) -> int:
        """The number of events of this server that arrived through the router, for any client of the run."""
        return 0 if self.router is None else self.router.signs

    def new_id(self, name: str) -> str:
        """Return an id at the server that no request or adapter had before."""
        return f"{self.tag}-{next(self._number)}-{name}"

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Send a control call and return the parsed answer. An error of a server that has died names the cause, and
        one of a missing path names the way to start the server with it."""
        try:
            return await self.http.post(path, body, timeout_s=timeout_s or self.limits.control_s)
        except ServerGone as e:
            raise await self.cause(e) from e.__cause__
        except ServerRefused as e:
            fix = self.expected.needs.get(path.partition("?")[0])
            if e.status in (403, 404, 405) and fix is not None:
                raise Refused(f"{self.http.url} has no {path}: {fix}") from e
            raise

    async def probe(self, timeout_s: float = PROBE_S) -> None:
        """Check that the engine samples one token in time. `/health` is 200 even while the engine is stopped."""
        await self.short_answer(Sampling(max_tokens=1, temperature=0.0, ignore_eos=True), timeout_s)

    async def short_answer(self, sampling: Sampling, timeout_s: float | None = None) -> ServerAnswer:
        """Return a short answer to the prompt [0]."""
        room, drawn = TokenBudget(tokens=sampling.max_tokens, vocab=self.vocab, ends=()), ServerAnswer()
        body = self.api.body(self.model, self.new_id("probe"), [0], sampling, room)
        self.api.read(drawn, await self.call(self.api.generate, body, timeout_s))
        return drawn

    async def progress(self) -> Any:
        """Return a value that changes while the server samples, or None if it reports none."""
        with contextlib.suppress(ServerGone, ServerLate, ServerRefused):
            return await self.api.progress(partial(self.http.get, timeout_s=HEALTH_S))
        return None

    async def numbers(self, named: list[Span], least: int, *, routed: bool) -> list[Span]:
        """Return the spans with plain version numbers. Raise ServerGone if another run gave the weights. `least` is
        the oldest version that a router may answer with."""
        if routed and self.router is not None:
            return await self.router.numbers(named, least, self.limits.control_s)
        if not self.api.traits.takes_weight_version:
            return named
        if others := [name for name, _, _ in named if marked(name)[1] != self.tag]:
            self.foreign = True
            why = f"it has weights ({others[0]}) that this run did not give it"
            await self.give_up(f"{why}: another one uses it too, or it was restarted: it is to be left alone")
            raise ServerGone(f"{self.http.url}: {self.fenced}")
        return [(str(marked(name)[0]), start, end) for name, start, end in named]

    @asynccontextmanager
    async def deadline(self, timeout_s: float, what: str, *, tail: bool = False) -> AsyncIterator[None]:
        """Raise ServerLate, which names the server and `what`, if the block takes longer. With `tail` the error has the
        last lines of the server's log."""
        try:
            async with asyncio.timeout(timeout_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            log = f"; the last lines of {self.process.log}:\n{self.process.tail()}" if tail and self.process else ""
            raise ServerLate(f"{self.name} at {self.http.url}: waited {timeout_s:g} s for {what}{log}") from None

    # -- its end -------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        if self.closed:
            raise RuntimeError("the rollout engine is closed")

    def check_weights(self, what: str) -> None:
        """Raise an error for a server that is fenced or has no weights. The message names the call `what`."""
        if self.fenced is not None:
            raise ServerGone(f"{self.name} is out of service: {self.fenced}")
        if self.version < 0:
            raise ValueError(f"{what}: the engine has no weights (never loaded): load_weights first")

    async def give_up(self, why: str) -> None:
        """Give up the server: all waiting calls fail with this reason."""
        self.fence(why)
        await self.http.close()

    def fence(self, why: str) -> None:
        """Mark the server as lost: its answers are no longer valid."""
        self.fenced = why
        if self.router is not None:
            self.router.fence()

    async def is_ending(self) -> bool:
        """Return true if the server has ended, or ends within `DYING_S`."""
        with contextlib.suppress(ServerLate):
            async with self.deadline(DYING_S, "its end"):
                while self.process is not None and self.process.exit_code is None:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.05)
                return self.process is not None
        return False

    async def cause(self, error: ServerGone) -> Exception:
        """Return an error with the known reason why the server does not answer. A server that ends now gets `DYING_S`
        to do so."""
        if not self.closed and self.fenced is None:
            await self.is_ending()
        if self.closed:
            return RuntimeError("the rollout engine was closed")
        if self.fenced is not None:
            return ServerGone(f"{self.name} is out of service: {self.fenced}")
        if self.process is None or (code := self.process.exit_code) is None:
            return ServerGone(str(error))
        log = f"in {self.process.log}: {self.process.tail(3)}"
        return ServerGone(f"{self.name} ended with exit code {code}; {log}")

    async def relaunch(self, folder: str | None) -> None:
        """Start a new process of the server in place of the present one, with the model of `folder` (None: its
        configured model)."""
        if self.launch is None:
            raise ServerGone(f"{self.http.url} must not speak: {self.fenced}; restart that server and this run")
        await self.stop()
        await self.http.close()
        self.check_alive()  # a server that is started after a close would never be stopped
        self.http = self._started(folder)

    async def relaunch_elsewhere(self) -> None:
        """Start the same server again at another port."""
        await self.relaunch(self._folder)

    async def stop(self) -> None:
        """Stop the process, if the server was started here, and wait for its end."""
        if self.process is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.process.stop)

    async def disconnect(self) -> None:
        """Close the connections to the server and to its router."""
        await self.http.close()
        if self.router is not None:
            self.router.fence()
            await self.router.http.close()

    def _started(self, folder: str | None) -> Http:
        assert self.launch is not None
        self._folder, (self.process, url) = folder, self.launch(folder)
        return Http(url)
