"""A router of others (sglang-router) before the servers of a run: requests go through it, all else to each server.

It sends a request to whom it likes, and knows nothing of weights. An answer is taken if a server of this run drew it
with weights that were verified there, none of them older than those of the server that was to be asked; each names
its weights by who gave them to it (`mark`). Any other one is asked for again, at that server itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from verl.rollout.api import Api
from verl.rollout.base import Peers
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.wire import NotUnderstood, Span, marked

logger = logging.getLogger(__name__)


class Routed:
    """url: of the router · own: that of the server behind it · mark: of the weights that this server is given."""

    def __init__(self, url: str, key: str | None, api: Api, peers: Peers, own: str, mark: str) -> None:
        self.http, self._api, self._peers, self._own, self._mark = Http(url, key), api, peers, own, mark
        self._told = set[str]()  # marks whose answers were refused
        peers.urls.add(own)

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

    def vouch(self, version: int) -> None:
        """The weights of this server were verified."""
        self._peers.verified[self._mark] = version

    def fence(self) -> None:
        self._peers.verified.pop(self._mark, None)

    def look(self, live: str | None) -> None:
        """ServerGone for who draws with weights of nobody here, before it has drawn all. live: what it names them."""
        if live is not None and (who := marked(live)[1]) not in self._peers.verified:
            self._refuse(live, who)

    def numbers(self, versions: Sequence[Span], least: int) -> list[Span]:
        """Without their marks. ServerGone: it is to be asked for again."""
        found = [(*marked(name), start, end) for name, start, end in versions]
        for number, who, _, _ in found:
            if who not in self._peers.verified or number > self._peers.verified[who]:
                self._refuse(f"{number}", who)
            if number < least:
                raise ServerGone(f"the router sent a request to a server of version {number}: {least} is live")
        return [(str(number), start, end) for number, _, start, end in found]

    def _refuse(self, name: str, who: str) -> None:
        if who not in self._peers.verified and who not in self._told:
            self._told.add(who)
            why = "sends requests to a server that this run does not use (any more), and all are drawn again elsewhere"
            logger.warning("%s %s: take it out of the router", self.http.url, why)
        raise ServerGone(f"the router sent a request to a server whose weights ({name}) nobody here has verified")
