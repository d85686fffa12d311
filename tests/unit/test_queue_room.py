"""New rows of a queue over a store wait for room by bytes, and say so when they waited too long; without Ray."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.test_queue_contract import pick, put, ragged, samples

from verl.transfer_queue import ray as over_ray
from verl.transfer_queue.index import Registry
from verl.transfer_queue.packing import parcel_of_samples
from verl.workers.group import WorkerDied


class Held(over_ray.RayQueue):
    """Its store is a list, and its keeper is in this process."""

    broken = False

    def __init__(self, max_bytes: int, timeout_s: float = 0.2) -> None:
        self.registry, self.stored = Registry(max_bytes), 0
        keeper = SimpleNamespace(answer=SimpleNamespace(remote=self.registry.answer))
        super().__init__("held", timeout_s, keeper)

    def _store(self, packed: np.ndarray) -> Any:
        if self.broken:
            raise OSError("the store is full")
        self.stored += 1
        return packed

    def _get(self, awaited: Any, what: str) -> Any:
        return awaited


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())


def test_a_put_waits_for_room_and_says_so_when_it_waited_too_long() -> None:
    size = parcel_of_samples(samples(6)).nbytes
    queue = Held(4 * size)  # of which new rows have the half
    first = put(queue, samples(6, "a"))
    put(queue, samples(6, "b"))
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"6 new rows waited 0.2 s for room .*{size:,} bytes .*max_bytes"):
        put(queue, samples(6, "c"))
    assert 0.2 <= time.monotonic() - began_s < 5 and queue.stored == 2 and len(queue) == 12

    with pytest.raises(ValueError, match=rf"bytes never fit .*new rows may take {2 * size:,} .*max_bytes={4 * size:,}"):
        put(queue, samples(18, "d"))  # at once

    async def waits() -> None:
        waiting = asyncio.create_task(queue.put(samples(6, "c")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        queue.drop(first)
        await waiting

    asyncio.run(waits())
    assert len(queue) == 12


def test_columns_of_rows_that_are_there_never_wait_and_count() -> None:
    size = parcel_of_samples(samples(3)).nbytes
    queue = Held(2 * size)
    refs = put(queue, samples(3))
    queue.write(refs, {"x": ragged([torch.ones(n) for n in (1, 2, 3)])})
    assert queue.registry._used > size and queue.having(refs, "x").ids == refs.ids
    queue.drop(pick(refs, 0, 1))
    assert queue.registry._used > size, "a block stays for the last of its rows"
    queue.drop(pick(refs, 2))
    assert queue.registry._used == 0


def test_what_fails_gives_its_room_back() -> None:
    queue = Held(1 << 20)
    queue.broken = True
    with pytest.raises(OSError, match="the store is full"):
        put(queue, samples(3))
    queue.broken = False
    refs = put(queue, samples(3))
    used = queue.registry._used
    with pytest.raises(ValueError, match="already in the queue"):
        put(queue, samples(3))
    assert queue.registry._used == used
    queue.drop(refs)
    assert queue.registry._used == 0


@pytest.mark.parametrize("step", ["Room", "Commit"])
def test_a_put_that_is_cancelled_leaves_neither_rows_nor_room(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    queue, entered, goes_on = Held(1 << 20), threading.Event(), threading.Event()

    def slow(request: Any, held: Any = ()) -> tuple[Any, list[Any]]:
        if type(request).__name__ == step:
            entered.set()
            assert goes_on.wait(30)
        return over_ray.RayQueue._ask(queue, request, held)

    async def cancelled() -> None:
        putting = asyncio.create_task(queue.put(samples(3)))
        await asyncio.to_thread(entered.wait, 30)
        putting.cancel()
        asyncio.get_running_loop().call_later(0.05, goes_on.set)
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert goes_on.is_set(), "it stays until nothing of it is under way"

    monkeypatch.setattr(queue, "_ask", slow)
    asyncio.run(cancelled())
    assert len(queue) == 0 and queue.registry._used == 0
    put(queue, samples(3))  # the same ids


@pytest.mark.parametrize(
    "name, said", [("RayActorError", "holds the queue is gone"), ("ObjectLostError", "wrote these")]
)
def test_a_process_of_the_queue_that_is_gone_is_a_death(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    kinds = {kind: type(kind, (Exception,), {}) for kind in ("GetTimeoutError", "RayActorError", "ObjectLostError")}

    def get(awaited: Any, timeout: float) -> Any:
        raise kinds[name]

    def get_actor(*request: str) -> Any:
        raise ValueError("Failed to look up actor")

    kinds_of = SimpleNamespace(**kinds)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, get_actor=get_actor, exceptions=kinds_of))
    keeper = SimpleNamespace(answer=SimpleNamespace(remote=lambda *_: None))
    with pytest.raises(WorkerDied, match=said):  # after which a run starts again
        len(over_ray.RayQueue("gone", 1.0, keeper))
    with pytest.raises(WorkerDied, match="holds the queue is gone"):
        len(over_ray.RayQueue("gone", 1.0))  # in a process that has not request before


def test_a_queue_starts_a_ray_of_its_own_and_joins_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    request: list[dict[str, Any]] = []
    made = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda most: (most, given)))
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **given: request.append(given),
        remote=lambda **_: lambda cls: made,
        cluster_resources=lambda: {"object_store_memory": 100.0},
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "the driver's"),
        util=SimpleNamespace(scheduling_strategies=strategies),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    name, (most, given) = over_ray.start(None)
    assert (most, given["name"]) == (100, name) and over_ray.start(7)[1][0] == 7
    assert given["scheduling_strategy"] == ("the driver's", False), "its index does not go with another node"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    over_ray.start(None)
    assert [given["address"] for given in request] == ["local", "local", "10.0.0.1:6379"]
