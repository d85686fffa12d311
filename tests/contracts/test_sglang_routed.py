"""sglang-router before servers of SGLang, which are doubles: requests go through it, all else to each server itself."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_contract_doubles as contract_doubles
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from routing import router

from verl.rollout import liveness, sglang
from verl.rollout.base import GenerateRequest, Peers, ReplicaLost, RolloutContext, ServerPlace
from verl.rollout.calls import PendingCall, RunningCalls
from verl.rollout.http import ServerLate
from verl.rollout.process import free_port
from verl.types import Sampling
from verl.weight_sync import disk
from verl.weight_sync.base import CheckedReader, Sent, WeightSource, checksum
from verl.weight_sync.local import LocalCheckpointEngine
from verl.weight_sync.record import entry_of

pytest.importorskip("sglang_router", reason="pip install sglang-router==0.3.2")
PROMPT = np.array([1, 2, 3, 4], np.int64)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two doubles of SGLang, and the router before them."""
    spec = importlib.util.spec_from_file_location("contract_of_routed", contract_doubles.SUITE)
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = suite
    spec.loader.exec_module(suite)
    servers = [contract_doubles.Running("sglang", suite) for _ in range(2)]
    folder = tmp_path_factory.mktemp("fleet")
    with router([one.url for one in servers], folder / "router.log", "--policy", "round_robin") as url:
        yield SimpleNamespace(url=url, servers=servers, suite=suite, outlet=disk.DiskOutlet(folder / "weights"))
    for one in servers:
        one.stop()


def routed(fleet: Any, number: int = 0, url: str = "", peers: Peers | None = None) -> Any:
    """peers: of a run; None: all servers of the fleet are this one's."""
    peers = Peers({one.url for one in fleet.servers}) if peers is None else peers
    place = ServerPlace(model="none", log=Path(os.devnull), url=fleet.servers[number].url, peers=peers)
    config = fleet.suite.reference().config
    context = RolloutContext(hf_config=config, max_context_tokens=512, dtype=torch.float32, place=place)
    return sglang.build(sglang.Options(router=url or fleet.url, start_timeout_s=20), context)


@contextlib.asynccontextmanager
async def engines_of(fleet: Any) -> AsyncIterator[list[Any]]:
    """One for each server, up."""
    peers = Peers()
    engines = [routed(fleet, number, peers=peers) for number in range(2)]
    try:
        for one in engines:
            await one.capabilities()
        yield engines
    finally:
        for one in engines:
            await one.close()


async def staged(fleet: Any, version: int, seed: int) -> tuple[Any, WeightSource]:
    """-> the model, and where its weights lie."""
    torch.manual_seed(seed)
    module = fleet.suite.reference()
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    held = {name: tensor.detach() for name, tensor in module.named_parameters()}
    manifest = {name: replace(entry_of(tensor), checksum=checksum(tensor)) for name, tensor in held.items()}
    address = fleet.outlet.stage(version, {n: replace(e, checksum=None) for n, e in manifest.items()}, held.items())
    return module, WeightSource(version, disk.DiskOutlet.transport, address, manifest)


async def publish(fleet: Any, engines: Sequence[Any], version: int, seed: int, *, verified: int = 2) -> Any:
    """-> the model. verified: so many engines pass their canaries."""
    module, source = await staged(fleet, version, seed)
    for one in engines:
        assert await one.load_weights(CheckedReader(source), on_inflight="keep") == version
    for one in engines[:verified]:
        one.mark_verified()
    return module


def rids(fleet: Any) -> list[int]:
    return [one.double.numbers for one in fleet.servers]


async def ask(one: Any, tag: str, count: int = 24, **sampling: Any) -> list[Any]:
    settings = {"max_tokens": 6, "ignore_eos": True, **sampling}
    asked = (one.generate(GenerateRequest(f"{tag}{i}", PROMPT, Sampling(seed=i, **settings))) for i in range(count))
    return await asyncio.gather(*asked)


async def directly(one: Any, tag: str, count: int = 24) -> list[Any]:
    one.connection.router, through = None, one.connection.router
    try:
        return await ask(one, tag, count)
    finally:
        one.connection.router = through


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return all(
        a.ids.tolist() == b.ids.tolist() and np.allclose(a.logprobs, b.logprobs, atol=1e-5)
        for a, b in zip(found, wanted)
    )


def test_answers_through_the_router_are_those_of_the_servers_and_updates_reach_each(fleet: Any) -> None:
    async def run() -> None:
        async with engines_of(fleet) as engines:
            for version in (1, 2):
                module = await publish(fleet, engines, version, seed=version)
                before = rids(fleet)
                found = await ask(engines[0], f"v{version}-")
                assert all(now > was for now, was in zip(rids(fleet), before)), "both servers were asked"
                assert all([v for v, _, _ in one.spans] == [version] for one in found)
                assert same(found, await directly(engines[0], f"d{version}-"))
                for one in engines:
                    ids = np.array([*PROMPT, *found[0].ids])
                    logits = module(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
                    wanted = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                    assert np.abs(await one.score(ids) - wanted.detach().numpy()).max() < 1e-4

    asyncio.run(run())


def test_what_the_router_would_drop_and_what_ends_early_goes_to_the_server_itself(fleet: Any) -> None:
    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 3, seed=3)
            other = rids(fleet)[1]
            for tag, more in (("mask", {"top_k": 5}), ("top-p", {"top_p": 0.9})):
                found = await ask(engines[0], tag, **more)
                assert all(np.isfinite(one.logprobs).all() and (one.logprobs > -50).all() for one in found)
            assert rids(fleet)[1] == other

    asyncio.run(run())


def test_an_answer_of_a_server_with_older_weights_is_asked_for_again(fleet: Any) -> None:
    """A server with a failed update is fenced here, and the router does not have that information."""

    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 4, seed=4)
            await publish(fleet, engines[:1], 5, seed=5)
            before = rids(fleet)
            found = await ask(engines[0], "stale")
            assert rids(fleet)[1] > before[1], "the one with older weights was asked"
            assert all([v for v, _, _ in one.spans] == [5] for one in found)
            assert same(found, await directly(engines[0], "again"))

    asyncio.run(run())


@pytest.mark.parametrize("what", ["canary", "fenced", "closed", "other run"])
def test_no_answer_is_taken_of_weights_that_this_run_has_not_verified(
    fleet: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The router sends to that server what it always did; its numbers of versions may be those of the others."""

    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 8, seed=8)
            await publish(fleet, engines[1:], 9, seed=99, verified=0)
            await publish(fleet, engines[:1], 9, seed=9)
            if what == "fenced":
                await engines[1].updates.fence("its canary failed")
                await engines[1].connection.api.resume(engines[1].connection.call)
            elif what == "closed":
                await engines[1].close()
            elif what == "other run":
                engines[1].mark_verified()
                other = routed(fleet, 1)
                await publish(fleet, [other], 9, seed=98)
                await other.close()
            before = rids(fleet)
            asked = asyncio.ensure_future(ask(engines[0], "own"))
            if what == "canary":
                while rids(fleet)[1] < before[1] + 10:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                assert not asked.done(), "they wait for what its canary says"
                await engines[1].close()
            found = await asked
            assert rids(fleet)[1] > before[1], "it was asked"
            assert all([v for v, _, _ in one.spans] == [9] for one in found)
            assert same(found, await directly(engines[0], "direct"))
            (said,) = [one.message for one in caplog.records if "take that out of it" in one.message]
            other = "a server with weights that this run did not give it"
            assert (other if what == "other run" else f"{fleet.servers[1].url}, which was given up") in said

    asyncio.run(run())


def test_an_answer_of_weights_that_are_verified_meanwhile_counts(fleet: Any) -> None:
    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 20, seed=20, verified=1)
            before = rids(fleet)
            engines[1].mark_verified()
            await publish(fleet, engines[1:], 21, seed=21, verified=0)
            asked = asyncio.ensure_future(ask(engines[0], "held"))
            while rids(fleet)[1] < before[1] + 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert not asked.done()
            engines[1].mark_verified()
            found = await asked
            assert {v for one in found for v, _, _ in one.spans} == {20, 21}
            assert sum(rids(fleet)) - sum(before) < 24 + 12, "they were not drawn again"

    asyncio.run(run())


def test_an_engine_without_a_router_of_ours_is_vouched_for_by_its_publish(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As `verl generate` has it."""

    async def run() -> None:
        one = routed(fleet)
        sync = LocalCheckpointEngine(probes=())
        _, source = await staged(fleet, 30, seed=30)
        sent = asyncio.get_running_loop().create_future()
        sent.set_result(Sent(source, None, 0, True))
        try:
            until_s = asyncio.get_running_loop().time() + 60
            await sync._to_replica(one, CheckedReader(source), "wait", sent, until_s)
            before = rids(fleet)[0]
            await ask(one, "r", 8)
            assert rids(fleet)[0] == before + 8, "half of them after the other server, whose weights are nobody's"
            assert any("take that out of it" in at.message for at in caplog.records)
        finally:
            await one.close()

    asyncio.run(run())


def test_one_that_streams_for_others_is_alive_though_its_probe_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is long, and all its answers are sent to other clients, through the router."""
    monkeypatch.setattr(liveness, "QUIET_S", 0.1)

    class Streams:
        """A connection with events for others, if it is busy, and no token for the probe."""

        context = SimpleNamespace(max_concurrent_sequences=8)

        def __init__(self, *, busy: bool) -> None:
            self.busy, self.routed_events, self.lost = busy, 0, list[str]()

        async def probe(self, timeout_s: float) -> None:
            self.routed_events += self.busy
            await asyncio.sleep(0.05)
            raise ServerLate("no answer")

        async def progress(self) -> None:
            return None

        async def give_up(self, why: str) -> None:
            self.lost.append(why)

    async def run() -> None:
        request = GenerateRequest("a", np.zeros(1, np.int64), Sampling(max_tokens=1))
        for busy in (True, False):
            connection: Any = Streams(busy=busy)
            calls = RunningCalls(connection)
            calls.pending["a"] = PendingCall(request, "policy", routed=True)
            watched = liveness.LivenessWatch(connection, calls, SimpleNamespace(may_sample=True))  # type: ignore[arg-type]
            watched.watch()
            await asyncio.sleep(0.8)
            watched.close()
            assert bool(connection.lost) is not busy

    asyncio.run(run())


def test_a_server_that_another_run_gave_its_weights_is_out_of_service(fleet: Any) -> None:
    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 10, seed=10)
            other = routed(fleet, 1)
            await publish(fleet, [other], 10, seed=97)
            await other.close()
            with pytest.raises(ReplicaLost, match="that this run did not give it: another one uses it too"):
                await directly(engines[1], "x", 1)
            with pytest.raises(ReplicaLost, match="is out of service"):
                await ask(engines[1], "y", 1)
            assert all([v for v, _, _ in one.spans] == [10] for one in await ask(engines[0], "own"))

    asyncio.run(run())


def test_an_answer_that_does_not_come_is_asked_for_again(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that has the request hangs: this is found long before the request's own deadline."""
    monkeypatch.setattr(liveness, "QUIET_S", 0.3)

    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 11, seed=11)
            server = fleet.servers[1].double
            server.silent = True
            try:
                found = await asyncio.wait_for(ask(engines[0], "held"), 60)
            finally:
                server.silent = False
            assert all([v for v, _, _ in one.spans] == [11] for one in found)
            assert same(found, await directly(engines[0], "again"))

    asyncio.run(run())


@pytest.mark.parametrize("status", [400, 404, 408, 429, 500])
def test_a_router_that_refuses_is_passed_by(fleet: Any, status: int) -> None:
    async def run() -> None:
        async def refuses(request: web.Request) -> web.Response:
            return web.Response(status=status, text="no")

        async def workers(request: web.Request) -> web.Response:
            return web.json_response({"workers": [{"url": one.url} for one in fleet.servers]})

        app = web.Application()
        app.add_routes([web.get("/workers", workers), web.post("/generate", refuses)])
        async with TestServer(app) as server:
            one = routed(fleet, 0, str(server.make_url("")))
            one.connection.limits = replace(one.connection.limits, request_s=2)  # the retries at a full server
            try:
                await publish(fleet, [one], 12, seed=12)
                assert all([v for v, _, _ in answer.spans] == [12] for answer in await ask(one, "r", 3))
            finally:
                await one.close()

    asyncio.run(run())


def test_an_abort_returns_and_gives_the_rows_back_wherever_they_are(fleet: Any) -> None:
    async def run() -> None:
        async with engines_of(fleet) as engines:
            await publish(fleet, engines, 6, seed=6)
            asked = [asyncio.ensure_future(ask(engines[0], f"long{i}", 1, max_tokens=400)) for i in range(8)]
            while sum(len(one.double.running) for one in fleet.servers) < 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(engines[0].abort(), 20) == 8
            answers = [one for answered in await asyncio.gather(*asked) for one in answered]
            assert [one.stop_reason for one in answers] == ["abort"] * 8
            async with asyncio.timeout(20):
                while any(one.double.running for one in fleet.servers):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_router_that_dies_costs_no_answer(fleet: Any, tmp_path: Path) -> None:
    async def run() -> None:
        with router([one.url for one in fleet.servers], tmp_path / "router.log") as url:
            one = routed(fleet, 0, url)
            await one.capabilities()
        try:
            await publish(fleet, [one], 7, seed=7)
            found = await ask(one, "after")
            assert len(found) == 24 and all([v for v, _, _ in one.spans] == [7] for one in found)
        finally:
            await one.close()

    asyncio.run(run())


def test_one_that_is_no_router_or_does_not_know_the_server_is_one_line(fleet: Any, tmp_path: Path) -> None:
    async def refused(url: str, peers: Peers | None = None) -> str:
        one = routed(fleet, 0, url, peers)
        try:
            with pytest.raises(ValueError) as e:
                await one.capabilities()
            return str(e.value)
        finally:
            await one.close()

    at = "rollout.engine_options.router="
    gone = f"http://127.0.0.1:{free_port()}"
    assert asyncio.run(refused(gone)).startswith(f"{at}{gone}: no router there that tells of its servers")
    assert "no router there" in asyncio.run(refused(fleet.servers[1].url)), "a server is none"
    with router([fleet.servers[1].url], tmp_path / "router.log") as url:
        said = asyncio.run(refused(url))
    assert said.startswith(f"{at}{url}: it does not know {fleet.servers[0].url} (but {fleet.servers[1].url}): name it")
    said = asyncio.run(refused(fleet.url, Peers()))
    assert said.startswith(f"{at}{fleet.url}: it sends requests to {fleet.servers[1].url}, which rollout.url does not")
