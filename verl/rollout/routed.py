"""An external router (sglang-router) in front of the servers of a run.

Requests are sent through it, all other calls to each server directly. The router may choose any server, and it does not
read the versions of weights. An answer is accepted if a server of this run sampled it with weights that were verified
there and are not older than those of the server that the request was meant for. Servers label their weights with the
mark of the client that sent them. A request with any other answer is sent again, to its own server directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from verl.errors import Refused
from verl.rollout.api import Api
from verl.rollout.base import Peers
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.wire import NotUnderstood, Span, marked

LOOK_S = 0.02  # between two checks whether weights were verified
logger = logging.getLogger(__name__)


class Routed:
    """The connection to one server through the router at `url`. The server's own URL is `own`, and `mark` labels the
    weights that this client sends to it."""

    def __init__(self, url: str, key: str | None, api: Api, peers: Peers, own: str, mark: str) -> None:
        self.http, self._api, self._peers, self._own, self._mark = Http(url, key), api, peers, own, mark
        self._warned = set[str]()  # marks with refused answers, each warned about once
        peers.urls.add(own)
        peers.marks[mark] = own
        peers.lost.difference_update([known for known, at in peers.marks.items() if at == own])

    async def check(self, timeout_s: float) -> None:
        """Raise ValueError if the router does not answer, does not know this server, or sends requests to servers of
        others."""
        at = f"rollout.engine_options.router={self.http.url}"
        try:
            known = await self._api.behind(partial(self.http.get, timeout_s=timeout_s))
        except (ServerGone, ServerLate, ServerRefused, NotUnderstood) as e:
            raise Refused(f"{at}: no router there that tells of its servers ({e}); start it first") from e
        if self._own not in known:
            others_known = ", ".join(sorted(known)) or "none"
            raise Refused(f"{at}: it does not know {self._own} (but {others_known}): name it in its --worker-urls")
        if others := sorted(known - self._peers.urls):
            fix = "name them there too, or take them out of its --worker-urls"
            raise Refused(f"{at}: it sends requests to {', '.join(others)}, which rollout.url does not name: {fix}")

    @property
    def signs(self) -> int:
        """The number of events of this server that arrived through the router, for any client of the run."""
        return self._peers.received[self._mark]

    def mark_verified(self, version: int) -> None:
        """Record that this version was verified on this server."""
        self._peers.verified[self._mark] = version

    def fence(self) -> None:
        """Record that the answers of this server are no longer valid."""
        self._peers.verified.pop(self._mark, None)
        if self._own not in {self._peers.marks[mark] for mark in self._peers.verified}:
            self._peers.lost.add(self._mark)

    def check_live(self, live: str | None, least: int) -> None:
        """Raise ServerGone early if the answering server samples with weights that will not be accepted. `live` is its
        name for its present weights."""
        if live is not None:
            number, sender = marked(live)
            self._peers.received[sender] += 1
            self._check(number, sender, least)

    async def numbers(self, versions: Sequence[Span], least: int, timeout_s: float) -> list[Span]:
        """Wait until all versions are verified, and return the spans without marks. Raise ServerGone if the request has
        to be sent again."""
        found = [(*marked(name), start, end) for name, start, end in versions]
        until_s = time.monotonic() + timeout_s
        for number, sender, _, _ in found:
            while self._check(number, sender, least) > self._peers.verified[sender]:
                if time.monotonic() > until_s:
                    raise ServerGone(f"nobody has verified version {number} of {self._peers.marks[sender]}")
                await asyncio.sleep(LOOK_S)
        return [(str(number), start, end) for number, _, start, end in found]

    def _check(self, number: int, peer: str, least: int) -> int:
        """Return the version number if an answer of this server may count, or raise ServerGone."""
        peers, at = self._peers, self._peers.marks.get(peer)
        if peer in peers.verified:
            if number < least:
                raise ServerGone(f"the router sent a request to {at}, of version {number}: {least} is live")
            return number
        if peer not in self._warned and (at is None or peer in peers.lost):
            self._warned.add(peer)
            what = "a server with weights that this run did not give it" if at is None else f"{at}, which was given up"
            logger.warning("the router %s sends requests to %s: take that out of it", self.http.url, what)
        raise ServerGone(f"the router sent a request to a server with weights ({number}) that nobody here has verified")
