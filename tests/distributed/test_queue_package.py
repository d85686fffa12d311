"""The contract of a TransferQueue over the TransferQueue package, where it is installed; FULL_GRID=1: over each of its
stores that runs without devices."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_queue_ray as over_ray
import torch
from contracts import test_queue_contract as contract
from contracts.test_queue_contract import *  # noqa: F403 - its tests, with the queue of this file
from contracts.test_queue_contract import put, ragged, samples

from verl.transfer_queue.base import TransferQueue
from verl.transfer_queue.options import Package
from verl.transfer_queue.rows import queued_samples

FULL = bool(os.environ.get("FULL_GRID"))
kept, queue, Worker = over_ray.kept, over_ray.queue, over_ray.Worker


def port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


@contextlib.contextmanager
def mooncake_master() -> Iterator[str]:
    """The address of one that this test has started: what the package starts by itself ends all others of the host."""
    pytest.importorskip("mooncake.store", reason="make mooncake-package", exc_type=ImportError)
    command, door = Path(sys.executable).with_name("mooncake_master"), port()
    own = ["--rpc_address=127.0.0.1", f"--rpc_port={door}", f"--metrics_port={port()}", "-default_kv_lease_ttl=999999"]
    with subprocess.Popen([command, *own], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            until_s = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", door)):
                assert master.poll() is None and time.monotonic() < until_s, "it does not listen"
                time.sleep(0.1)
            yield f"127.0.0.1:{door}"
        finally:
            master.kill()


@pytest.fixture(scope="module", params=["SimpleStorage", "RayStore", "MooncakeStore"] if FULL else ["SimpleStorage"])
def store(request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a store of the package by its configuration; each unit of SimpleStorage takes a CPU."""
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"num_data_storage_units": 1} if request.param == "SimpleStorage" else {}
        if request.param == "RayStore":
            pytest.importorskip("nixl", reason="make nixl-package")
        if request.param == "MooncakeStore":
            address = stack.enter_context(mooncake_master())
            options = {"auto_init": False, "metadata_server": "P2PHANDSHAKE", "master_server_address": address}
            options |= {"local_hostname": "127.0.0.1", "global_segment_size": 128 << 20, "local_buffer_size": 64 << 20}
        yield request.param, options


@pytest.fixture(scope="module")
def tq(ray_session, store):
    tq = pytest.importorskip("transfer_queue", exc_type=ImportError)
    yield tq
    tq.close()


@pytest.fixture(scope="module")
def make(tq, store, tmp_path_factory) -> Callable[[], TransferQueue]:
    from verl.transfer_queue.package import build

    config = tmp_path_factory.mktemp("tq") / "tq.yaml"
    config.write_text(json.dumps({"backend": {"storage_backend": store[0], store[0]: store[1]}}))
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


def test_workers_share_rows(ray_session, queue, store):
    """Each worker finds the package's store by itself. In SimpleStorage the bytes outlive their writer; in the others
    they are in a process, and reported as lost when it ends."""
    ray = ray_session
    for module in (over_ray, contract, sys.modules[put.__module__]):
        ray.cloudpickle.register_pickle_by_value(module)
    writer, reader = (ray.remote(num_cpus=0)(Worker).remote(queue) for _ in range(2))
    ours = put(queue, samples(3, "ours"))
    refs = ray.get(writer.put.remote(samples(6)), timeout=120)
    ray.get(writer.write.remote(refs, 3.0), timeout=60)
    ray.get(writer.write.remote(ours, 4.0), timeout=60)
    for rows, value in ((refs, 3.0), (ours, 4.0)):
        assert set(ray.get(reader.seen.remote(rows), timeout=60)) == {value}
        assert set(queue.read(rows, ("x",))["x"].values.tolist()) == {value}
    ray.kill(writer)
    if store[0] == "RayStore":
        said = ray.get(reader.until_lost.remote(refs), timeout=100)
        assert said.startswith("the process that wrote these rows or columns is gone")
    if store[0] == "SimpleStorage":
        assert set(ray.get(reader.seen.remote(refs), timeout=60)) == {3.0}
        assert [s.sample_id for s in queued_samples(queue, refs)] == refs.ids
    queue.drop(refs)
    assert [s.sample_id for s in queued_samples(queue, ours)] == ["ours0", "ours1", "ours2"]
