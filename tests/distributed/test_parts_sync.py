"""A version that several ranks stage together is, byte for byte, the one that one process stages."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import EXPERTS, engine
from forked import run

from verl.model_engine.layout import Layout
from verl.rollout.base import AS_HELD, WireFormat
from verl.weight_sync import disk, shm, tcp
from verl.weight_sync.base import SyncError, open_stream
from verl.weight_sync.sender import WeightSender
from verl.weight_sync.version_folder import FolderParts, slice_runs

BF16 = WireFormat("bfloat16", {"model.norm.weight": "float32"})
LAYOUTS = {
    "two": ("qwen3, tied", Layout(world_size=2)),
    "three": ("llama, biases", Layout(world_size=3)),
    "copies": ("qwen3, tied", Layout(world_size=4, replicate=2)),
    "slices": ("llama, biases", Layout(world_size=6, tensor=2)),
    "slices of a tied head": ("qwen3, tied", Layout(world_size=4, tensor=2)),
    "stages": ("qwen3, tied", Layout(world_size=2, pipeline=2)),
    "stages of two": ("llama, biases", Layout(world_size=4, pipeline=2)),
    "tokens": ("qwen3, tied", Layout(world_size=2, sequence=2)),
    "experts": (EXPERTS, Layout(world_size=4, expert=2)),
}
PROBES = [np.arange(2, 12)]


@pytest.fixture
def name() -> Iterator[str]:
    made = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    yield made
    shm.remove(made)


def bits(t: torch.Tensor) -> bytes:
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("layout", "place"), [(n, "memory") for n in LAYOUTS] + [(n, "folder") for n in LAYOUTS])
def test_parts_make_the_version_that_one_rank_gathers(
    layout: str, place: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the memory of one host, or in a folder that every host sees."""
    model, of = LAYOUTS[layout]
    made_in = {kind: tmp_path / kind for kind in ("together", "alone")}
    for folder in made_in.values():
        folder.mkdir()

    def outlet_of(kind: str) -> Any:
        return shm.ShmOutlet(f"{name}.{kind}") if place == "memory" else disk.DiskOutlet(made_in[kind])

    def publish(rank: int) -> Any:
        made = engine(model, "actor", of)
        form = BF16 if layout != "three" else AS_HELD
        if place == "folder":
            monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")
        sender = WeightSender(outlet_of("together"), verify_first=1)
        sender.set_format(form)
        whole = {n: t.clone() for n, t in made.weights()}
        made.weights = lambda: pytest.fail("a rank gathers")
        found = []
        for version in range(2):
            sent = sender.send(made, version, PROBES, copy=False, first=rank == 0)
            if sent is None:
                continue
            found.append((sent.source.manifest, sent.num_bytes, sent.changed, sent.alarms))
            read = {n: (str(t.dtype), bits(t)) for n, t in open_stream(sent.source).tensors()}
            expected = {n: t.to(getattr(torch, form.dtype_of(n) or "float32")) for n, t in whole.items()}
            assert list(read) == list(expected) if place == "memory" else read.keys() == expected.keys()
            assert read == {n: (str(t.dtype), bits(t)) for n, t in expected.items()}
        return found

    first, *others = run(of.world_size, publish)
    assert others == [[]] * (of.world_size - 1) and len(first) == 2

    def alone(rank: int) -> Any:
        made, sender = engine(model, "actor", None), WeightSender(outlet_of("alone"), verify_first=1)
        sender.set_format(BF16 if layout != "three" else AS_HELD)
        sent = [sender.send(made, version, PROBES, copy=False) for version in range(2)]
        return [(s.source.manifest, s.num_bytes, s.changed, s.alarms) for s in sent]

    try:
        (expected,) = run(1, alone)
    finally:
        shm.remove(f"{name}.alone")
        shm.remove(f"{name}.together")
    if place == "folder":
        files = [folder / "version_1" / "model.safetensors" for folder in made_in.values()]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert [path.name for path in made_in["together"].iterdir() if path.name.startswith(".")] == []
    assert first == expected, "manifest, checksums, bytes and verdict are those of one process"


def test_a_full_shared_memory_is_the_error_of_every_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, version: int, shapes: Any) -> str:
        raise OSError(28, "0 MB of weights do not fit")

    monkeypatch.setattr(shm.ShmOutlet, "begin", full)

    def publish(rank: int) -> str:
        made, sender = engine("qwen3, tied", "actor", Layout(world_size=2)), WeightSender(shm.ShmOutlet(name))
        with pytest.raises(OSError, match="do not fit") as error:
            sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        return str(error.value)

    assert len({*run(2, publish)}) == 1


def test_ranks_of_several_hosts_gather_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(rank: int) -> Any:
        monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")
        made, sender = engine("qwen3, tied", "actor", Layout(world_size=2)), WeightSender(shm.ShmOutlet(name))
        sent = sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        assert not sender._together
        whole = dict(made.weights())
        if sent is None:
            return None
        read = dict(open_stream(sent.source).tensors())
        return all(torch.equal(read[n], t) for n, t in whole.items())

    assert run(2, publish) == [True, None]


def test_versions_of_parts_reach_another_host_with_their_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def publish(rank: int) -> Any:
        made = engine("qwen3, tied", "actor", Layout(world_size=2))
        outlet = tcp.TcpOutlet(host="127.0.0.1", delta=True)
        sender, has, before, sizes = WeightSender(outlet), tcp.NOTHING, dict[str, torch.Tensor](), []
        sender.set_format(WireFormat("bfloat16"))
        for version in range(3):
            with torch.no_grad():
                for p in made.masters.values():
                    if p.numel():
                        p.view(-1)[0] += 1.0
            whole = {n: t.clone() for n, t in made.weights()}
            sent = sender.send(made, version, PROBES, copy=False, first=rank == 0)
            if sent is None:
                continue
            stream = tcp.TcpStream(sent.source.address, has, before)
            assert stream.version == version
            sizes.append(sum(part.count for part in stream._parts if part.how != "same"))
            before, has = {n: t.clone() for n, t in stream.tensors()}, version
            assert all(torch.equal(before[n], t.bfloat16()) for n, t in whole.items())
        if rank == 0:
            shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
        return sizes

    first, _ = run(2, publish)
    assert first[1] < first[0] / 10 and first[2] < first[0] / 10, "changes alone"


def test_a_slice_is_written_where_it_belongs() -> None:
    """Compared with the positions that indexing gives, for slices of up to four dimensions."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(0, 5)))
        edges = [sorted(int(n) for n in rng.choice(size + 1, 2, replace=False)) for size in shape]
        index = tuple(slice(a, b) for a, b in edges)
        length, starts = slice_runs(shape, index)
        found = [start + at for start in starts for at in range(length)]
        expected = np.arange(int(np.prod(shape))).reshape(shape)[index].reshape(-1)
        assert found == expected.tolist(), (shape, index)
        assert len(starts) == 1 or len(shape) > 1
    assert slice_runs((4, 3, 5), (slice(1, 3), slice(0, 3), slice(0, 5))) == (30, [15]), "one run, not one for each row"


@pytest.mark.parametrize("harm", ["another byte", "missing", "twice"])
def test_a_version_whose_slices_do_not_read_as_written_is_an_error_of_every_rank(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that loses what another host wrote, or with an engine that delivers wrong parts."""
    real = FolderParts.write

    def harmful(self: FolderParts, name: str, index: Any, tensor: torch.Tensor) -> None:
        real(self, name, index, tensor + 1 if name == "model.norm.weight" else tensor)

    def publish(rank: int) -> str:
        made = engine("qwen3, tied", "actor", Layout(world_size=2))
        sender, parts = WeightSender(disk.DiskOutlet(tmp_path)), made.weight_parts
        if harm == "another byte":
            monkeypatch.setattr(FolderParts, "write", harmful)
        elif rank == 1:
            lost = {"model.norm.weight"} if harm == "missing" else set()
            found = lambda: [replace(p, mine=None) if p.name in lost else p for p in parts()]  # noqa: E731
            made.weight_parts = lambda: iter(found() * 2 if harm == "twice" else found())
        with pytest.raises(SyncError) as error:
            sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        return str(error.value)

    said = {*run(2, publish)}
    assert len(said) == 1
    wanted = "version 0: model.norm.weight does not read as it was written, in 2 of its 2 slices; the file system"
    assert said.pop().startswith(wanted) if harm == "another byte" else "and its ranks delivered" in said.pop()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("version_")]


def test_ranks_that_do_not_see_the_folder_of_the_first_one_gather(tmp_path: Path, monkeypatch: Any) -> None:
    def publish(rank: int) -> Any:
        outlet = disk.DiskOutlet(tmp_path)
        if rank:
            monkeypatch.setattr(outlet, "sees", lambda place: False)
        made, sender = engine("qwen3, tied", "actor", Layout(world_size=2)), WeightSender(outlet)
        sent = sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        whole = dict(made.weights())
        if sent is None:
            return None
        read = dict(open_stream(sent.source).tensors())
        return all(torch.equal(read[n], t) for n, t in whole.items())

    assert run(2, publish) == [True, None]
