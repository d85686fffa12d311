"""A router of others (sglang-router) before the servers of a run: requests go through it, all else to each server.

It sends a request to whom it likes, and knows nothing of weights. An answer is taken if a server of this run drew it
with weights that were verified there, none of them older than those of the server that was to be asked; each names
its weights by who gave them to it (its mark). Any other one is asked for again, at that server itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from verl.rollout.api import Api
from verl.rollout.base import Peers
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.wire import NotUnderstood, Span, marked

LOOK_S = 0.02  # between two looks at whether weights were verified
logger = logging.getLogger(__name__)


class Routed:
    """url: of the router · own: that of the server behind it · mark: of the weights that this server is given."""

    def __init__(self, url: str, key: str | None, api: Api, peers: Peers, own: str, mark: str) -> None:
        self.http, self._api, self._peers, self._own, self._mark = Http(url, key), api, peers, own, mark
        self._told = set[str]()  # marks whose answers were refused
        peers.urls.add(own)
        peers.marks[mark] = own
        peers.lost.difference_update([known for known, at in peers.marks.items() if at == own])

    async def check(self, timeout_s: float) -> None:
        """ValueError for a router that is not there, does not know the server, or has others behind it too."""
        at = f"rollout.engine_options.router={self.http.url}"
        try:
            known = await self._api.behind(partial(self.http.get, timeout_s=timeout_s))
        except (ServerGone, ServerLate, ServerRefused, NotUnderstood) as e:
            raise ValueError(f"{at}: no router there that tells of its servers ({e}); start it first") from e
        if self._own not in known:
            told = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{at}: it does not know {self._own} (but {told}): name it in its --worker-urls")
        if others := sorted(known - self._peers.urls):
            fix = "name them there too, or take them out of its --worker-urls"
            raise ValueError(f"{at}: it sends requests to {', '.join(others)}, which rollout.url does not name: {fix}")

    @property
    def heard(self) -> int:
        """Whatever came from this server through the router, asked for by whomever."""
        return self._peers.heard[self._mark]

    def vouch(self, version: int) -> None:
        """The weights of this server were verified."""
        self._peers.verified[self._mark] = version

    def fence(self) -> None:
        self._peers.verified.pop(self._mark, None)
        if self._own not in {self._peers.marks[mark] for mark in self._peers.verified}:
            self._peers.lost.add(self._mark)

    def look(self, live: str | None, least: int) -> None:
        """ServerGone for who draws with weights that will not count, before it has drawn all. live: what it names
        those that it has by now."""
        if live is not None:
            number, who = marked(live)
            self._peers.heard[who] += 1
            self._check(number, who, least)

    async def numbers(self, versions: Sequence[Span], least: int, timeout_s: float) -> list[Span]:
        """Without their marks, once all were verified. ServerGone: it is to be asked for again."""
        found = [(*marked(name), start, end) for name, start, end in versions]
        until_s = time.monotonic() + timeout_s
        for number, who, _, _ in found:
            while self._check(number, who, least) > self._peers.verified[who]:
                if time.monotonic() > until_s:
                    raise ServerGone(f"nobody has verified version {number} of {self._peers.marks[who]}")
                await asyncio.sleep(LOOK_S)
        return [(str(number), start, end) for number, _, start, end in found]

    def _check(self, number: int, who: str, least: int) -> int:
        """-> the number."""
        peers, at = self._peers, self._peers.marks.get(who)
        if who in peers.verified:
            if number < least:
                raise ServerGone(f"the router sent a request to {at}, of version {number}: {least} is live")
            return number
        if who not in self._told and (at is None or who in peers.lost):
            self._told.add(who)
            what = "a server with weights that this run did not give it" if at is None else f"{at}, which was given up"
            logger.warning("the router %s sends requests to %s: take that out of it", self.http.url, what)
        raise ServerGone(f"the router sent a request to a server with weights ({number}) that nobody here has verified")
