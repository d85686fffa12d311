"""The contract of a TransferQueue over Ray: from this process, and with rows that others made and died over."""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from contracts import test_queue_contract as contract
from contracts.test_queue_contract import *  # noqa: F403 - its tests, with the queue of this file
from contracts.test_queue_contract import pick, put, ragged, samples

from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.index import Drop
from verl.transfer_queue.options import Remote
from verl.transfer_queue.packing import parcel_of_samples
from verl.transfer_queue.rows import queued_samples
from verl.types import Refs
from verl.workers.group import WorkerDied

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")


@pytest.fixture(scope="module")
def make(ray_session) -> Callable[[], TransferQueue]:
    from verl.transfer_queue.ray import build

    return lambda: build(Remote(timeout_s=60))


@pytest.fixture(scope="module")
def kept(make) -> TransferQueue:
    return make()


@pytest.fixture
def queue(kept) -> Iterator[TransferQueue]:
    yield kept
    empty(kept)


def empty(queue: TransferQueue) -> None:
    """For the next case: the process that holds a queue takes a second to start."""
    request = queue._actor.__ray_call__.remote(lambda keeper: list(keeper._index._numbers))
    if ids := ray.get(request, timeout=60):
        queue._ask(Drop(ids))


class Worker:
    """In a process of its own."""

    def __init__(self, queue: TransferQueue) -> None:
        self.queue = queue

    async def put(self, rows: list) -> Refs:
        return await self.queue.put(rows)

    def write(self, refs: Refs, value: float) -> None:
        self.queue.write(refs, {"x": ragged([torch.full((r.loss_tokens,), value) for r in refs])})

    def until_lost(self, refs: Refs) -> str:
        for _ in range(300):
            try:
                self.seen(refs)
            except WorkerDied as error:
                return str(error)
            time.sleep(0.1)
        return ""

    def seen(self, refs: Refs) -> list[float]:
        return self.queue.read(refs, ("x",))["x"].values.tolist()


def test_workers_share_rows_and_what_one_wrote_goes_with_it(queue):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.register_pickle_by_value(contract)
    worker, reader = (ray.remote(num_cpus=0)(Worker).remote(queue) for _ in range(2))
    ours = put(queue, samples(3, "ours"))
    refs = ray.get(worker.put.remote(samples(6)), timeout=120)
    ray.get(worker.write.remote(refs, 3.0), timeout=60)
    assert set(ray.get(reader.seen.remote(refs), timeout=60)) == {3.0}
    assert set(queue.read(refs, ("x",))["x"].values.tolist()) == {3.0}
    ray.get(worker.write.remote(ours, 4.0), timeout=60)
    ray.kill(worker)
    said = ray.get(reader.until_lost.remote(refs), timeout=100)
    assert said.startswith("the process that wrote these rows or columns is gone")
    assert [s.sample_id for s in queued_samples(queue, pick(ours, 2, 0))] == ["ours2", "ours0"]
    same = pickle.loads(pickle.dumps(queue))
    same.drop(refs)
    assert len(queue) == 3


def test_dropped_rows_leave_no_object(queue):
    refs = put(queue, samples(3))
    queue.write(refs, {"x": ragged([torch.ones(n) for n in (1, 2, 3)])})
    held = ray.get(queue._actor.__ray_call__.remote(lambda self: len(self._held)), timeout=60)
    queue.write(refs, {"x": ragged([torch.zeros(n) for n in (1, 2, 3)])})
    with pytest.raises(ValueError):
        put(queue, samples(3))
    assert held == ray.get(queue._actor.__ray_call__.remote(lambda self: len(self._held)), timeout=60) == 2
    queue.drop(refs)
    assert not ray.get(queue._actor.__ray_call__.remote(lambda self: len(self._held)), timeout=60)


def test_a_keeper_that_is_gone_is_one_line(make):
    queue = make()
    refs = put(queue, samples(2))
    ray.kill(queue._actor)
    with contextlib.suppress(ray.exceptions.RayActorError):  # it may still answer a while
        for _ in range(600):
            ray.get(queue._actor.__ray_call__.remote(lambda self: None), timeout=60)
            time.sleep(0.05)
    for call in (lambda: queue.read(refs, ("ids",)), lambda: queue.drop(refs), lambda: put(queue, samples(1, "n"))):
        with pytest.raises(WorkerDied, match="^the process that holds the queue is gone$"):
            call()


def test_a_put_waits_for_room_and_says_so_when_it_waited_too_long(ray_session):
    from verl.transfer_queue.ray import build

    size = parcel_of_samples(samples(6)).nbytes
    queue = build(Remote(max_bytes=2 * size, timeout_s=5))
    first = put(queue, samples(6, "a"))
    with pytest.raises(TimeoutError, match=rf"6 new rows waited 5 s for room in the queue: {size:,} bytes are wanted"):
        put(queue, samples(6, "b"))
    queue.drop(first)
    assert put(queue, samples(6, "b")).ids[0] == "b0"
