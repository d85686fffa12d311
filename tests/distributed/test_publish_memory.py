"""What the plan says that publishes need, against the shared memory and the tensors that they allocate."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cases import MODELS, engine, model
from forked import run
from test_loading import peak_bytes
from test_memory import WIDE_MODELS

from verl.config.model_files import describe_model
from verl.config.schema import Config
from verl.config.tree import changed
from verl.model_engine.layout import Layout
from verl.planner.cluster import cluster_plan
from verl.planner.memory import role_items
from verl.weight_sync import buckets, collective, shm, slices, tcp
from verl.weight_sync.base import Readers
from verl.weight_sync.sender import WeightSender
from verl.wire import WireFormat

BF16 = WireFormat("bfloat16")
OUTLETS = {"tcp": tcp.TcpOutlet, "collective": collective.CollectiveOutlet}
CLUSTER = {
    "cluster.backend": "ray",
    "cluster.address": "auto",
    "rollout.dtype": "bfloat16",
    "rollout.engine": "native",
    "model.device": "cpu",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(MODELS, "wide", WIDE_MODELS["wide"])
    model("wide").save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.fixture
def name() -> Iterator[str]:
    made = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    yield made
    shm.remove(made)


class InThisThread(contextlib.nullcontext[None]):
    """An executor in the calling thread, of which a profile counts the memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __enter__(self) -> Any:
        return self

    def submit(self, fn: Any, *args: Any) -> Future[Any]:
        found = Future[Any]()
        found.set_result(fn(*args))
        return found


def allocated(pattern: str) -> int:
    """The bytes of shared memory of these files."""
    return sum(512 * path.stat().st_blocks for path in shm.SHM.glob(pattern))


@pytest.mark.parametrize("transport", OUTLETS)
def test_ranks_of_two_hosts_keep_their_slices_in_the_memory_that_is_planned(
    transport: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions of slices, and on a host with replicas two whole versions. The process that fetches them has a
    tensor, or the share of a rank, besides."""
    given = {"cluster.nodes": 2, "cluster.ranks_per_node": 1, "sync.engine": transport, "model.path": str(folder)}
    placement = cluster_plan(changed(Config(), CLUSTER | given), 64)
    assert placement is not None
    planned = placement.sent

    monkeypatch.setattr(slices, "ThreadPoolExecutor", InThisThread)

    def publish(rank: int) -> Any:
        monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")
        made, outlet = engine("wide", "actor", Layout(world_size=2)), OUTLETS[transport](host="127.0.0.1")
        sender, most = WeightSender(outlet), 0
        sender.set_format(BF16)
        for version in range(2):
            sent = sender.send(made, version, [], copy=False, first=rank == 0)
            if sent is not None:
                stream = (tcp if transport == "tcp" else collective).open_weights(sent.source.address)
                most, found = peak_bytes(lambda stream=stream: stream.version, tmp_path)
                assert found == version
            dist.barrier()
        files = f"{shm.PREFIX}-{os.getpid()}-{outlet.tag}"
        of_rank, of_host = allocated(f"{files}-slices-?"), allocated(f"{files}-?")
        shm.remove(files)
        return of_rank, of_host, most

    (first, host, most), (second, none, _) = run(2, publish)
    assert none == 0 and planned.trainer_bytes == 0
    for found, wanted in ((first, planned.rank_bytes), (second, planned.rank_bytes), (host, planned.replica_bytes)):
        assert 0.98 < found / wanted < 1.02, (first, second, host, planned)
    assert (0.9 if transport == "collective" else 0.4) < most / planned.arriving_bytes < 1.1, (most, planned)


def test_a_stream_needs_two_buckets_and_a_gathered_tensor_as_planned(
    folder: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"cluster.ranks_per_node": 2, "sync.engine": "shm", "sync.engine_options": {"bucket_mb": 1}}
    config = changed(Config(), CLUSTER | given | {"cluster.address": None, "model.path": str(folder)})
    layout, placement = Layout(world_size=2), cluster_plan(config, 64)
    assert placement is not None
    whole = role_items(config, "actor", layout, 1)["largest whole weight"]
    version = 2 * describe_model(str(folder)).parameters

    def publish(rank: int) -> Any:
        made, sender = engine("wide", "actor", layout), WeightSender(buckets.BucketOutlet(name, 1 << 20))
        sender.set_format(BF16)
        manifest = sender.manifest(made)
        if rank:
            return sender.attend(made, 0, [])
        source = sender._outlet.source(0, 1, 0, manifest, sender.announce(made))
        reader = threading.Thread(target=lambda: [None for _ in buckets.open_weights(source.address).tensors()])
        reader.start()
        most, _ = peak_bytes(lambda: sender.stream(made, 0, [], Readers(1, 1, 60.0)), tmp_path)
        reader.join()
        return allocated(f"{name}-[01]"), most

    (shared, most), _ = run(2, publish)
    assert 0.98 < shared / placement.sent.trainer_bytes < 1.02 and shared < version / 2, (shared, placement.sent)
    assert 0.5 < most / whole < 1.1, (most, whole)


@pytest.mark.parametrize("kind", WIDE_MODELS)
def test_the_largest_tensor_of_a_folder_is_that_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    """The experts of a layer are many tensors in a folder, and two in memory."""
    made = WIDE_MODELS[kind]()
    made.save_pretrained(tmp_path)
    assert describe_model(str(tmp_path)).largest_parameters == max(p.numel() for p in made.parameters())
