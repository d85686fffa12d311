"""The contract of a TransferQueue over the TransferQueue package, where it is installed."""

from __future__ import annotations

import pytest
import torch
from contracts.test_queue_contract import *  # noqa: F403 - its tests, with the queue of this file
from contracts.test_queue_contract import put, ragged, samples

from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.options import Package


@pytest.fixture(scope="module")
def tq(ray_session):
    tq = pytest.importorskip("transfer_queue", exc_type=ImportError)
    yield tq
    tq.close()


@pytest.fixture
def queue(tq, tmp_path) -> TransferQueue:
    from verl.transfer_queue.package import build

    config = tmp_path / "tq.yaml"
    config.write_text("backend:\n  SimpleStorage:\n    num_data_storage_units: 1\n")  # each takes a CPU
    return build(Package(timeout_s=60, config=str(config)))


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
