"""Rollout replicas that join and leave during a run. The requests are made by the program that runs it, or by the
command `verl replicas` through files in the run directory; permission to write there is permission to change the
replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.driver.publisher import Publisher
from verl.errors import Refused
from verl.replicas import FOLDER, LOOK_S
from verl.rollout.base import Capabilities
from verl.track.files import write_atomic
from verl.workers.model_workers import START_TIMEOUT_S


class Members(Protocol):
    """The part of a router that changes its members."""

    async def join(self, start: Any) -> Capabilities: ...
    def leave(self, number: int) -> None: ...
    def states(self) -> list[str]: ...


class Fleet:
    """Adds and removes rollout replicas of a run.

    members: None if the run has one engine, in its own process · urls: the addresses of the servers, by their numbers
    (empty: the run starts them) · start_of: returns a function that connects to a URL or, without one, starts the
    server of a number; raises ValueError if that is refused · record: records an event of the run."""

    def __init__(
        self,
        run_dir: Path,
        members: Members | None,
        urls: Sequence[str],
        publisher: Publisher,
        start_of: Callable[[str, int], Any],
        record: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._folder, self._members, self._urls = run_dir / FOLDER, members, list(urls)
        self._publisher, self._start_of, self._record = publisher, start_of, record
        self._alone = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def add(self, url: str = "") -> int:
        """Add a running server of the run's own kind or, without a URL, start one. Return its number. It gets requests
        after the next publish, which it must take and verify like every other replica. Raise ValueError if the request
        is refused."""
        url = url.strip().rstrip("/")
        async with self._alone:
            if self._members is None:
                raise Refused(f"replicas add {url}: the engine of this run is in its own process, and none joins")
            if bool(url) != bool(self._urls):
                given = "by others: give the URL of one" if self._urls else "by this run: leave the URL out"
                raise Refused(f"replicas add {url}: its servers are started {given}")
            states = self._members.states()
            if url and any(known == url and state != "left" for known, state in zip(self._urls, states, strict=True)):
                raise Refused(f"{url}: it is a replica of this run already")
            number, what = len(states), f"the server {url or 'that is started'} to join"
            joining = self._members.join(self._start_of(url, number))
            able = await self._publisher.waits.wait(joining, waiter="driver", what=what, timeout_s=START_TIMEOUT_S)
            self._publisher.join(able)
            self._urls += [url] if url else []
            self._record("joined", {"replica": number, "url": url or None})
            return number

    async def remove(self, number: int) -> None:
        """Remove a replica: it gets no new requests, and its requests continue on other replicas. A server that the run
        did not start keeps running. Raise ValueError if there is no such replica, or no other one serves."""
        async with self._alone:
            if self._members is None:
                raise Refused(f"replica {number} is the only one of this run")
            self._members.leave(number)
            self._record("left", {"replica": number})

    def lines(self) -> list[str]:
        """Return a line for each replica."""
        states = ["serves"] if self._members is None else self._members.states()
        return [f"{i} {state}{f' {self._urls[i]}' if self._urls else ''}" for i, state in enumerate(states)]

    def open(self) -> None:
        """Accept requests of `verl replicas` from now on."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._task = asyncio.create_task(self._listen(), name="replicas")

    async def close(self) -> None:
        listening, self._task = self._task, None  # a task would keep this object and the publisher in memory
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the command that made the request has a deadline
                for path in sorted(self._folder.glob("*.ask")):
                    answer = await self._answer(path.read_text())
                    write_atomic(path.with_suffix(".answer"), json.dumps(answer).encode())
                    path.unlink()
            await asyncio.sleep(LOOK_S)

    async def _answer(self, text: str) -> dict[str, Any]:
        try:
            wanted = json.loads(text)
            if wanted["verb"] == "add":
                await self.add(str(wanted["what"]))
            elif wanted["verb"] == "remove":
                await self.remove(int(wanted["what"]))
            return {"lines": self.lines()}
        except (ValueError, KeyError, TypeError, RuntimeError, TimeoutError) as e:  # the run does not fail
            return {"error": str(e) or type(e).__name__}
