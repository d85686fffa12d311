"""The contract of a checkpoint engine where the replica is a server: our own (the client of `rollout.engine=server`,
HTTP, `verl serve`'s application and control plane, the native engine), and the double of SGLang, by folders. One server
for each model, for all of these tests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_contract_doubles
import test_weight_sync_contract as contract
from gpu_memory import fake_gpu
from serving import Running
from test_weight_sync_contract import (
    CHANGES,
    NORM,
    PARTS,
    PROBES,
    TOLERANCE,
    World,
    distance,
    marked,
    run,
    scores,
    tampered,
    trainer,
)

from verl.rollout import server_url, sglang
from verl.rollout.base import GenerateRequest, RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.types import Sampling
from verl.weight_sync import relay
from verl.weight_sync.base import SyncError, checksum
from verl.weight_sync.record import entry_of

REACH = (
    "shm",
    "shm, buckets",
    "ipc",
    "tcp",
    "tcp, buckets",
    "tcp, delta",
    "collective",
    "nixl",
)  # a server reads weights by itself
FIRST = (
    ("server", "shm"),
    ("server", "shm, buckets"),
    ("server", "ipc"),
    ("server", "tcp, buckets"),
    ("sglang", "disk"),
)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[dict[bool, Running]]:
    """By whether the model's head is tied."""
    started: dict[bool, Running] = {}

    def rollout(context: RolloutContext) -> ServedEngine:
        tied = context.hf_config.tie_word_embeddings
        if tied not in started:
            started[tied] = Running(trainer(tied=tied).model, 256)
        started[tied].renew()
        place = ServerPlace(model="none", log=Path(os.devnull), url=started[tied].url)
        made = server_url.build(server_url.Options(), replace(context, place=place))
        made.connection.able = replace(made.connection.able, sleep_levels=(1, 2))
        return made

    def double(context: RolloutContext) -> ServedEngine:
        tied = context.hf_config.tie_word_embeddings
        if tied not in doubles:
            suite: Any = SimpleNamespace(reference=lambda: trainer(tied=tied).model)
            doubles[tied] = test_contract_doubles.Running("sglang", suite)
        doubles[tied].renew()
        place = ServerPlace(model="none", log=Path(os.devnull), url=doubles[tied].url)
        return sglang.build(sglang.Options(), replace(context, place=place))

    doubles = dict[bool, test_contract_doubles.Running]()
    contract.ROLLOUTS |= {"server": rollout, "sglang": double}  # type: ignore[dict-item]
    yield started
    del contract.ROLLOUTS["server"], contract.ROLLOUTS["sglang"]
    for running in (*started.values(), *doubles.values()):
        running.stop()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    monkeypatch.setattr(relay, "ledger_of", lambda name: Path("/nowhere") / name)


def case(name: str, *given: Any) -> None:
    """A test of the contract, of this row."""
    vars(contract)[name].__wrapped__(*given)


@pytest.mark.parametrize("backend", [*marked(REACH), "disk"])
def test_after_a_large_step_the_server_scores_as_the_trainer_does(backend: str) -> None:
    """The report has each part of the time."""
    kind = "sglang" if backend == "disk" else "server"
    case("test_after_a_large_step_the_rollout_scores_as_the_trainer_does", backend, kind, backend == "tcp", True)


@pytest.mark.parametrize(("kind", "backend"), FIRST)
def test_a_prefix_computed_under_old_weights_is_never_used_after_a_publish(kind: str, backend: str) -> None:
    case("test_a_prefix_computed_under_old_weights_is_never_used_after_a_publish", backend, kind)


@pytest.mark.parametrize(("kind", "backend"), FIRST)
@pytest.mark.parametrize("change", [name for name in CHANGES if not name.startswith("neither")])
def test_a_tensor_that_does_not_match_its_manifest_raises(change: str, kind: str, backend: str) -> None:
    case("test_a_tensor_that_does_not_match_its_manifest_raises", backend, "full", kind, change)


@pytest.mark.parametrize(("kind", "backend"), FIRST)
def test_a_tensor_that_nobody_tells_of_raises(kind: str, backend: str) -> None:
    """SGLang silently keeps the old values; its log-probs differ."""
    said = r"input_layernorm" if kind == "server" else "log-probs of the canary differ"

    async def test() -> None:
        before = World(trainer(), backend)
        replica = before.rollout(kind)
        await before.publish([replica], 2)
        world = World(trainer(), backend, sender=tampered(CHANGES["neither sent nor in the manifest"], NORM))
        await world.update()
        with pytest.raises(SyncError, match=rf"version 3.*{said}"):
            await world.publish([replica], 3)
        await replica.close()

    run(test)


@pytest.mark.parametrize(("kind", "backend"), FIRST)
def test_the_canary_trips_where_wrong_weights_are_delivered_without_a_fault(kind: str, backend: str) -> None:
    def wrong(manifest: dict[str, Any], tensors: dict[str, Any], name: str) -> None:
        tensors[name] = tensors[name] + 0.5
        manifest[name] = replace(entry_of(tensors[name]), checksum=checksum(tensors[name]))

    async def test() -> None:
        world = World(trainer(), backend, sender=tampered(wrong, NORM))
        replica = world.rollout(kind)
        with pytest.raises(SyncError, match=r"version 1: rollout and trainer log-probs of the canary differ by \d"):
            await world.publish([replica], 1)
        await replica.close()

    run(test)


def test_requests_go_on_while_the_server_reads_new_weights(server: dict[bool, Running]) -> None:
    """And stand still for the switch alone."""
    reading, go = threading.Event(), threading.Event()

    async def test() -> None:
        world = World(trainer(), "shm")
        replica = world.rollout("server")
        await world.publish([replica], 0)
        await world.update()
        runner = server[True].engine._runner
        prepare = runner.prepare

        def held(source: Any) -> Any:
            reading.set()
            assert go.wait(60), "nobody let it go on"
            return prepare(source)

        runner.prepare = held
        try:
            publish = asyncio.ensure_future(world.publish([replica], 1, on_inflight="keep"))
            assert await asyncio.to_thread(reading.wait, 60)
            c = await replica.generate(GenerateRequest("old", PROBES[0], Sampling(max_tokens=9, seed=3)))
            assert c.spans == ((0, 0, 9),) and not publish.done()
            go.set()
            await publish
        finally:
            go.set()
            runner.prepare = prepare
        c = await replica.generate(GenerateRequest("new", PROBES[0], Sampling(max_tokens=9, seed=3)))
        assert c.spans == ((1, 0, 9),) and distance(await scores(replica), world.logprobs()) < TOLERANCE
        await replica.close()

    run(test)


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_slept_has_the_new_weights_when_it_wakes(level: int) -> None:
    async def test() -> None:
        world = World(trainer(), "shm")
        replica = world.rollout("server")
        await world.publish([replica], 0)
        for version in (1, 2):
            assert await replica.sleep(level) > 0, "it says what it freed"
            await world.update()
            report = await world.publish([replica], version)
            assert report.failed_replicas == {} and set(report.seconds) == PARTS
            await replica.wake(("kv",))
            assert distance(await scores(replica), world.logprobs()) < TOLERANCE
        await replica.close()

    run(test)


@pytest.mark.parametrize("backend", ["local", "disk"])
def test_weights_that_no_server_of_ours_reads_are_refused(backend: str) -> None:
    async def test() -> None:
        world = World(trainer(), backend)
        replica = world.rollout("server")
        with pytest.raises(SyncError, match=r"a server that reads weights by itself: set sync\.engine=shm"):
            await world.publish([replica], 0)
        await replica.close()

    run(test)
