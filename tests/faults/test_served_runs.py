"""Whole runs over two servers, one of which fails while requests run: no sample is lost or doubled, and the run is the
undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from each import FULL_GRID, matrix
from serving import CONTROLLED, KEY, server_process
from small_runs import dispatched, metrics_of, small_run, trained

from verl.rollout import liveness

GENERATE = "/inference/v1/generate"
STEPS = 3


class Door:
    """A proxy before a server. It passes requests on, except those to which a fault applies; requests are numbered by
    path, those for answers without health checks and probes."""

    def __init__(self) -> None:
        self.to, self.url, self.asked = "", "", Counter[str]()
        self.fault: Callable[[str, int], Awaitable[web.StreamResponse | None]] | None = None
        self.slow_s = self.cut = 0.0  # for each part of an answer · after so many parts the connection is reset
        self._up = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        assert self._up.wait(30)

    async def _run(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*runner.addresses[0])
        self._up.set()
        await asyncio.Event().wait()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body, number = await request.read(), 0
        if request.path != GENERATE or b'"max_tokens":12' in body.replace(b" ", b""):
            self.asked[request.path] += 1
            number = self.asked[request.path] * (request.path == GENERATE)
            found = None if self.fault is None else await self.fault(request.path, self.asked[request.path])
            if found is not None:
                return found
        limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=limit) as session:
            try:
                head = {"Authorization": request.headers["Authorization"]}
                async with session.request(request.method, self.to + request.path_qs, data=body, headers=head) as found:
                    answer = web.StreamResponse(status=found.status)
                    answer.content_type = found.content_type
                    await answer.prepare(request)
                    async for part in found.content.iter_any():
                        await asyncio.sleep(self.slow_s * (number > 0))
                        await answer.write(part)
                        if number and number == self.cut:
                            reset(request)
                    await answer.write_eof()
                    return answer
            except aiohttp.ClientError:
                reset(request)
                return web.Response()


def reset(request: web.Request) -> None:
    if request.transport is not None:
        line: Any = request.transport.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()


class Pair:
    """Two servers behind doors. One that was killed is started again."""

    def __init__(self, model: Path, folder: Path, stack: contextlib.ExitStack) -> None:
        self.model, self.folder, self.stack = model, folder, stack
        self.doors = [Door(), Door()]
        self.processes: list[Any] = [None, None]
        for number in range(2):
            self.start(number)

    def start(self, number: int) -> None:
        log = self.folder / f"serve-{number}-{os.urandom(2).hex()}.log"
        made = server_process(self.model, log, *CONTROLLED)
        self.processes[number], self.doors[number].to = self.stack.enter_context(made)

    def well(self) -> None:
        for number, (door, process) in enumerate(zip(self.doors, self.processes, strict=True)):
            door.fault, door.asked, door.slow_s, door.cut = None, Counter(), 0.0, 0
            if process.poll() is not None:
                self.start(number)
            else:
                os.kill(process.pid, signal.SIGCONT)

    @property
    def args(self) -> tuple[str, ...]:
        urls = ",".join(door.url for door in self.doors)
        two = "rollout.engine=server", "rollout.replicas=2", f'rollout.url="{urls}"', f"run.total_steps={STEPS}"
        return *two, f"rollout.engine_options={{start_timeout_s: 5, request_timeout_s: 3600, api_key: {KEY}}}"


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(tiny_model, tmp_path_factory.mktemp("pair"), stack)


@pytest.fixture(scope="module")
def straight(pair: Pair, tiny_model: Path, arithmetic_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    small_run(folder, tiny_model, arithmetic_data, *pair.args)
    return folder / "r"


UPDATE = ("/start_weight_update", "/update_weights", "/finish_weight_update")
OFTEN = ["reset", "errors", "killed at /update_weights, buckets"]
FAULTS = [*OFTEN, "stopped", "killed", "killed in an evaluation", "slow", "killed at /start_weight_update"]
FAULTS += ["killed at /update_weights", "stopped at /update_weights, buckets"]
FAULTS += ["killed at /finish_weight_update", *(f"stopped at {path}" for path in UPDATE)]


@matrix("how", FAULTS if FULL_GRID else OFTEN)
def test_one_of_two_servers_fails_and_the_run_is_the_undisturbed_one(
    how: str,
    pair: Pair,
    straight: Path,
    tmp_path: Path,
    tiny_model: Path,
    arithmetic_data: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At a path: inside the update after the first step."""
    pair.well()
    door, process = pair.doors[1], pair.processes[1]
    evaluated = 4  # requests of the first evaluation, at least so many, at this door
    what, _, path = how.removesuffix(", buckets").partition(" at ")
    path, at = path or GENERATE, 2 if how == "killed in an evaluation" or path else evaluated + 8

    async def fault(asked: str, number: int) -> web.StreamResponse | None:
        if asked != path:
            return None
        if what in ("killed", "killed in an evaluation") and number == at:
            process.kill()
        elif what == "stopped" and number == at:
            os.kill(process.pid, signal.SIGSTOP)
        elif what == "errors" and at <= number < at + 3:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return None

    door.fault, door.slow_s, door.cut = fault, 0.05 * (how == "slow"), at * (how == "reset")
    monkeypatch.setattr(liveness, "QUIET_S", 0.3)
    monkeypatch.setattr(liveness, "PROBE_S", 1.0)
    late = ("run.wait_timeout_s=30",) if how.startswith("stopped at") else ()  # a publish waits so long for one
    buckets = ("sync.engine=shm", "sync.engine_options.bucket_mb=1") if how.endswith(", buckets") else ()
    small_run(tmp_path, tiny_model, arithmetic_data, *pair.args, *late, *buckets)
    assert door.asked[path] >= at, "the fault was met"
    run = tmp_path / "r"
    ids = [name for names in trained(run).values() for name in names]
    assert len(ids) == len(set(ids)) == 16 * STEPS
    assert {name.partition("/")[0] for name in ids} <= set(dispatched(run))
    steps = metrics_of(run)
    assert max(steps[i]["sync/canary_mean_abs"] for i in range(1, STEPS + 1)) <= 1e-5
    if how != "errors":  # an attempt that failed is followed by another one, with draws of its own
        assert trained(run) == trained(straight)
        for name in ("critic/score/mean", "response_length/mean"):
            assert [m.get(name) for m in steps.values()] == [m.get(name) for m in metrics_of(straight).values()], name
    lost = "rollout replica 1 is lost" in capsys.readouterr().out
    assert lost == (what in ("stopped", "killed", "killed in an evaluation"))
    pair.well()
