"""The contract of a TransferQueue over the TransferQueue package, where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import test_queue_ray as over_ray
import torch
from contracts.test_queue_contract import *  # noqa: F403 - its tests, with the queue of this file
from contracts.test_queue_contract import put, ragged, samples

from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.options import Package
from verl.transfer_queue.rows import read_samples

kept, queue, Worker = over_ray.kept, over_ray.queue, over_ray.Worker


@pytest.fixture(scope="module")
def tq(ray_session):
    tq = pytest.importorskip("transfer_queue", exc_type=ImportError)
    yield tq
    tq.close()


@pytest.fixture(scope="module")
def make(tq, tmp_path_factory) -> Callable[[], TransferQueue]:
    from verl.transfer_queue.package import build

    config = tmp_path_factory.mktemp("tq") / "tq.yaml"
    config.write_text("backend:\n  SimpleStorage:\n    num_data_storage_units: 1\n")  # each takes a CPU
    return lambda: build(Package(timeout_s=60, config=str(config)))


def test_dropped_rows_leave_no_key(tq, queue):
    def keys() -> int:
        return len(tq.kv_list(partition_id=queue._name).get(queue._name, {}))

    refs = put(queue, samples(3))
    queue.write(refs, {"x": ragged([torch.ones(n) for n in (1, 2, 3)])})
    assert keys() == 2
    queue.write(refs, {"x": ragged([torch.zeros(n) for n in (1, 2, 3)])})
    with pytest.raises(ValueError):
        put(queue, samples(3))
    assert keys() == 2
    queue.drop(refs)
    assert keys() == 0


def test_workers_share_rows_and_what_one_wrote_outlives_it(ray_session, queue):
    """Each finds the package's store by itself; the bytes are there and not with who wrote them."""
    ray = ray_session
    ray.cloudpickle.register_pickle_by_value(sys.modules[Worker.__module__])
    ray.cloudpickle.register_pickle_by_value(sys.modules[put.__module__])
    ray.cloudpickle.register_pickle_by_value(sys.modules[samples.__module__])
    writer, reader = (ray.remote(num_cpus=0)(Worker).remote(queue) for _ in range(2))
    ours = put(queue, samples(3, "ours"))
    refs = ray.get(writer.put.remote(samples(6)), timeout=120)
    ray.get(writer.write.remote(refs, 3.0), timeout=60)
    ray.get(writer.write.remote(ours, 4.0), timeout=60)
    ray.kill(writer)
    for rows, value in ((refs, 3.0), (ours, 4.0)):
        assert set(ray.get(reader.seen.remote(rows), timeout=60)) == {value}
        assert set(queue.read(rows, ("x",))["x"].values.tolist()) == {value}
    assert [s.sample_id for s in read_samples(queue, refs)] == refs.ids
    queue.drop(refs)
    assert len(queue) == 3
