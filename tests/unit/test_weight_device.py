"""Weights through the memory of a GPU, with a double of it (gpu_memory.py), and of the calls of torch that it is made
of: CUDA itself runs where there is some."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_memory import FakeGpu, fake_gpu

from verl.weight_sync import buckets, device, shm
from verl.weight_sync.base import Passed, Readers, SyncError, checksum
from verl.weight_sync.buckets import BucketOutlet, BucketStream, Ledger
from verl.weight_sync.record import entry_of

GPUS = ("GPU-a", "GPU-b", "GPU-c")


@pytest.fixture
def name() -> Iterator[str]:
    made = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex}"  # else others remove them as those of the dead
    yield made
    shm.remove(made)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return fake_gpu(monkeypatch)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"t{i}": torch.randn((50, 7, 0)[i % 3], generator=generator) for i in range(20)}
    return found | {"half": torch.randn(3, 5, generator=generator).bfloat16()}


def test_every_bit_comes_and_the_files_hold_none_of_it(name: str, gpu: FakeGpu) -> None:
    out = BucketOutlet(name, 300, on_gpu=True)
    out.announce({n: entry_of(t) for n, t in tensors(0).items()})
    with ThreadPoolExecutor(2) as pool:
        for turn in range(3):
            of = tensors(turn)
            reading = [
                pool.submit(lambda a: {n: t.clone() for n, t in BucketStream(a).tensors()}, f"{name}:{turn}:{turn}:{i}")
                for i in range(2)
            ]
            out.stream(turn, (Passed(n, t, checksum(t)) for n, t in of.items()), Readers(turn, 2, 60.0))
            out.commit(turn)
            for one in reading:
                came = one.result(60)
                assert came.keys() == of.keys() and all(torch.equal(came[n], of[n]) for n in of)
    for path in shm.SHM.glob(f"{name}-[01]"):
        file = path.read_bytes()
        assert not [n for n, t in tensors(2).items() if t.numel() and t.view(torch.uint8).numpy().tobytes() in file]


def test_a_bucket_is_said_to_be_read_when_its_copies_have_ended(
    name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies continue after the call that began them, and the owner would write over the memory that they read."""
    said: list[int] = []

    class Noted(Ledger):
        def read(self, turn: int, reader: int, buckets: int) -> None:
            said.append(len(gpu.read))
            super().read(turn, reader, buckets)

    monkeypatch.setattr(buckets, "Ledger", Noted)
    out, of = BucketOutlet(name, 300, on_gpu=True), tensors(0)
    out.announce({n: entry_of(t) for n, t in of.items()})
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, BucketStream(f"{name}:0:0:0").tensors())
        out.stream(0, (Passed(n, t, None) for n, t in of.items()), Readers(0, 1, 60.0))
        out.commit(0)
        reading.result(60)
    assert said == [*range(1, len(said) + 1)] and len(said) > 2


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The calls of torch: the GPUs of the process, and the handles that were opened."""
    found: dict[str, Any] = {"seen": GPUS, "asked": []}

    def rebuilt(*given: Any) -> torch.Tensor:
        found["asked"].append(given)
        return torch.arange(given[1][0]).to(torch.uint8)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found["seen"]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=found["seen"][index]))
    monkeypatch.setattr(device, "rebuild_cuda_tensor", rebuilt)
    monkeypatch.setattr(device, "reduce_tensor", reduced)
    device._mapped.cache_clear()
    return found


def reduced(memory: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """As torch.multiprocessing.reductions.reduce_tensor gives it for a tensor on cuda:1."""
    storage = type(memory._typed_storage())
    shared = (b"allocation", 4096, 512, False, b"counter", 3, b"event", True)
    return None, (type(memory), memory.size(), memory.stride(), 0, storage, memory.dtype, 1, *shared)


def test_a_handle_names_the_gpu_and_not_its_number_in_one_process(torchs: dict[str, Any]) -> None:
    handle = device.handle_of(torch.empty(5, dtype=torch.uint8))
    torchs["seen"] = ("GPU-c", "GPU-a", "GPU-b")  # of another process
    found = device.open_handle(handle)
    assert found.tolist() == [*range(5)] and device.open_handle(handle) is found
    wanted = list(reduced(torch.empty(5, dtype=torch.uint8))[1])
    wanted[6] = 2
    assert torchs["asked"] == [tuple(wanted)]


def test_a_gpu_that_the_reader_does_not_see_is_one_line(torchs: dict[str, Any]) -> None:
    handle = device.handle_of(torch.empty(5, dtype=torch.uint8))
    for seen, said in (((), "none"), (("GPU-a", "GPU-c"), "GPU-a, GPU-c")):
        torchs["seen"] = seen
        with pytest.raises(SyncError, match=f"lie on GPU GPU-b, and this process sees {said}: .*set sync.engine=shm"):
            device.open_handle(handle)


def test_its_owner_opens_what_it_has(torchs: dict[str, Any]) -> None:
    """CUDA opens no memory in the process that allocated it: a rank with its replica in it."""
    memory = torch.empty(5, dtype=torch.uint8)
    handle = device.handle_of(memory)
    assert device.open_handle(handle) is memory and not torchs["asked"]
    del memory
    assert device.open_handle(handle).tolist() == [*range(5)], "another process's"


def test_a_gpu_that_shares_no_memory_is_one_line_with_the_fix(
    torchs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(memory: torch.Tensor) -> Any:
        raise RuntimeError("expandable_segments: no handle")

    monkeypatch.setattr(device, "reduce_tensor", refuses)
    with pytest.raises(ValueError, match=r"no handle\): leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        device.handle_of(torch.empty(5, dtype=torch.uint8))


def test_torch_takes_what_is_sent_in_this_order() -> None:
    """It gives it in the same one: reduce_tensor returns this function with its arguments."""
    names = [*inspect.signature(device.rebuild_cuda_tensor).parameters]
    assert names == [
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
        *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
        *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_none(name: str) -> None:
    out = BucketOutlet(name, 300, on_gpu=True)
    with pytest.raises(ValueError, match="memory of a GPU, and torch sees none here: set sync.engine=shm"):
        out.announce({"t": entry_of(torch.zeros(3))})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_process_reads_what_lies_on_the_gpu_of_another() -> None:
    memory = device.allocated(1 << 20)
    memory.copy_(torch.arange(1 << 20, device="cuda") % 251)
    device.synchronize(memory)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sum_of, (device.handle_of(memory),)) == int(memory.long().sum())


def _sum_of(handle: bytes) -> int:
    return int(device.open_handle(handle).long().sum())
