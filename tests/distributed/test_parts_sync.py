"""A version that several ranks stage together is, byte for byte, the one that one process stages."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import EXPERTS, engine
from forked import run

from verl.model_engine.layout import Layout
from verl.rollout.base import AS_HELD, WireFormat
from verl.weight_sync import shm, tcp
from verl.weight_sync.base import open_stream
from verl.weight_sync.sender import WeightSender

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_make_the_version_that_one_rank_gathers(layout: str, name: str) -> None:
    model, of = LAYOUTS[layout]

    def publish(rank: int) -> Any:
        made = engine(model, "actor", of)
        form = BF16 if layout != "three" else AS_HELD
        sender = WeightSender(shm.ShmOutlet(name), verify_first=1)
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
            assert list(read) == list(expected)
            assert read == {n: (str(t.dtype), bits(t)) for n, t in expected.items()}
        return found

    first, *others = run(of.world_size, publish)
    assert others == [[]] * (of.world_size - 1) and len(first) == 2

    def alone(rank: int) -> Any:
        made, sender = engine(model, "actor", None), WeightSender(shm.ShmOutlet(f"{name}.alone"), verify_first=1)
        sender.set_format(BF16 if layout != "three" else AS_HELD)
        sent = [sender.send(made, version, PROBES, copy=False) for version in range(2)]
        return [(s.source.manifest, s.num_bytes, s.changed, s.alarms) for s in sent]

    try:
        (expected,) = run(1, alone)
    finally:
        shm.remove(f"{name}.alone")
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
    from verl.weight_sync import together

    def publish(rank: int) -> Any:
        monkeypatch.setattr(together, "this_host", lambda: f"host {rank}")
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
