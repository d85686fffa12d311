"""A version that several ranks stage together is, byte for byte, the one that one process stages."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import EXPERTS, LORA, engine
from far_hosts import all_of, host
from forked import run
from fsspec.implementations.local import LocalFileSystem

from verl.model_engine.layout import Layout
from verl.model_engine.lora_source import FrozenBase, PolicyFactors
from verl.model_engine.lora_spec import LoraSpec
from verl.model_engine.sharded import part_of_rank
from verl.weight_sync import collective, disk, nixl, objects, shm, tcp
from verl.weight_sync.base import CheckedReader, SyncError, checksum, open_stream, with_whole_checksums
from verl.weight_sync.sender import WeightSender
from verl.weight_sync.version_folder import FolderParts, slice_runs
from verl.wire import AS_HELD, WireFormat

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
    "slices of factors": ("llama, biases" + LORA, Layout(world_size=6, tensor=2)),
    "stages of factors": ("qwen3, tied" + LORA, Layout(world_size=4, pipeline=2)),
    "factors of experts": (EXPERTS + LORA, Layout(world_size=4, expert=2)),
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
            made.published(version)
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
        with pytest.raises(SyncError) as error:
            sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        return str(error.value)

    wanted = "version 0: rank 0 could not begin the version: [Errno 28] 0 MB of weights do not fit"
    assert {*run(2, publish)} == {wanted}


def test_ranks_of_several_hosts_gather_where_nothing_takes_their_slices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(rank: int) -> Any:
        monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")
        made, sender = engine("qwen3, tied", "actor", Layout(world_size=2)), WeightSender(shm.ShmOutlet(name))
        sent = sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        assert sender._together is None
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


def apart(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this rank be on a host of its own."""
    monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_several_hosts_make_the_version_that_one_process_stages(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank gathers. Later versions are sent as changes, which each rank finds in its slices."""
    model, of = LAYOUTS[layout]
    form = BF16 if layout != "three" else AS_HELD

    def publish(rank: int) -> Any:
        apart(rank, monkeypatch)
        made, outlet = engine(model, "actor", of), tcp.TcpOutlet(host="127.0.0.1", delta=layout == "slices")
        sender, found = WeightSender(outlet, verify_first=2), []
        sender.set_format(form)
        for version in range(3):
            whole = {n: t.clone() for n, t in made.weights()}
            made.published(version)
            with monkeypatch.context() as alone:
                alone.setattr(made, "weights", lambda: pytest.fail("a rank gathers"))
                sent = sender.send(made, version, PROBES, copy=False, first=rank == 0)
            if sent is not None:
                read = {n: (str(t.dtype), bits(t)) for n, t in CheckedReader(sent.source).tensors()}
                expected = {n: t.to(getattr(torch, form.dtype_of(n) or "float32")) for n, t in whole.items()}
                assert read == {n: (str(t.dtype), bits(t)) for n, t in expected.items()} and list(read) == list(whole)
                found.append((sent.source.manifest, sent.num_bytes, sent.changed, sent.alarms))
                served = with_whole_checksums(sent.source, open_stream(sent.source))
                checked = {n: e.checksum for n, e in served.items() if e.checksum is not None}
                assert checked == {n: checksum(expected[n]) for n in checked} and (len(checked) > 3 or version == 2)
            dist.barrier()
            sender.release(version)
            with torch.no_grad():
                for p in made.masters.values():
                    if p.numel() and version == 0:
                        p.view(-1)[0] += 1.0
        files = [path for path in shm.SHM.glob(f"{shm.PREFIX}-{os.getpid()}-{outlet.tag}-*")]
        shm.remove(f"{shm.PREFIX}-{os.getpid()}-{outlet.tag}")
        return found, len([path for path in files if "-slices-" in path.name])

    (first, _), *others = results = run(of.world_size, publish)
    assert [found for found, _ in others] == [[]] * (of.world_size - 1)
    assert max(kept for _, kept in results) == (2 if layout == "slices" else 1), "a released version is written over"

    def alone(rank: int) -> Any:
        made, sender = engine(model, "actor", None), WeightSender(shm.ShmOutlet(f"{shm.PREFIX}-{os.getpid()}-alone"))
        sender.set_format(form)
        sent = sender.send(made, 0, PROBES, copy=False)
        shm.remove(f"{shm.PREFIX}-{os.getpid()}-alone")
        return sent.source.manifest, sent.num_bytes

    ((expected, num_bytes),) = run(1, alone)
    manifests = [manifest for manifest, *_ in first]
    assert [(number, changed, alarms) for _, number, changed, alarms in first] == [
        (num_bytes, True, ()),
        (num_bytes, True, ()),
        (num_bytes, False, ()),
    ]
    assert [{n: replace(e, slices=()) for n, e in found.items()} for found in manifests] == [
        {n: replace(e, checksum=None) for n, e in expected.items()}
    ] * 3
    held = {n for n, e in expected.items() if e.tied_to is None and np.prod(e.shape)}
    assert {n for n, e in manifests[0].items() if e.slices} == held
    for name in held:
        assert sum(np.prod([b - a for a, b in s.spans]) for s in manifests[0][name].slices) == np.prod(
            expected[name].shape
        )


@pytest.mark.parametrize("layout", ["slices of factors", "stages of factors"])
@pytest.mark.parametrize("with_base", [True, False])
def test_factors_that_are_not_merged_are_staged_as_by_one_process(layout: str, with_base: bool, name: str) -> None:
    """And norms that are trained whole."""
    model, of = LAYOUTS[layout]
    spec = LoraSpec(rank=5, alpha=10.0, modules_to_save=["norm"])

    def publish(rank: int | None) -> Any:
        made = engine(model, "actor", None if rank is None else of, lora=spec)
        source = PolicyFactors(made, with_base=with_base)
        whole = {n: t.clone() for n, t in source.weights()}
        outlet = shm.ShmOutlet(f"{name}.{'alone' if rank is None else 'together'}")
        sender = WeightSender(outlet, verify_first=1)
        sender = sender.for_factors(source.parameters, FrozenBase(made), with_base=with_base)
        made.published(0)
        sent = sender.send(source, 0, PROBES, copy=False, first=not rank)
        if sent is None:
            return None
        read = {n: bits(t) for n, t in open_stream(sent.source).tensors()}
        assert read == {n: bits(t) for n, t in whole.items()}
        shm.remove(f"{name}.{'alone' if rank is None else 'together'}")
        return sent.source.manifest, sent.num_bytes, read

    first, *others = run(of.world_size, publish)
    ((*expected, read),) = run(1, lambda rank: publish(None))
    assert [*first[:2]] == expected and first[2] == read and others == [None] * (of.world_size - 1)
    assert ("model.embed_tokens.weight" in read) == with_base and "model.norm.weight" in read


def test_a_part_without_the_present_factors_is_delivered_by_no_rank() -> None:
    """Shapes are read at any time, on one rank alone. The tensors want the factors of all ranks."""

    def read(rank: int) -> tuple[int, list[str]]:
        made, faults = engine("qwen3, tied" + LORA, "actor", Layout(world_size=2)), []

        def parts() -> dict[str, torch.Tensor]:
            return {part.name: part.mine() for part in made.weight_parts() if part.mine is not None}

        def refused() -> None:
            with pytest.raises(AssertionError) as error:
                parts()
            faults.append(str(error.value))

        shapes = [part.shape for part in made.weight_parts()] if rank else []
        refused()
        made.published(0)
        before = parts()
        with torch.no_grad():
            part_of_rank(made.model.model.layers[0].mlp.up_proj.lora_A).add_(1.0)
        refused()
        made.published(1)
        after, whole = parts(), dict(made.weights())
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert changed == ["model.layers.0.mlp.up_proj.weight"]
        for part in made.weight_parts():
            assert part.mine is None or torch.equal(part.mine(), whole[part.name][part.index])
        return len(shapes), faults

    for number, faults in zip((0, 24), run(2, read), strict=True):
        assert number == faults[0], faults
        first, second = faults[1]
        assert re.match(r"model.layers.0.self_attn.q_proj.lora_A was not gathered", first), first
        assert re.match(r"model.layers.0.mlp.up_proj.lora_A has changed since", second), second


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_a_part_may_be_a_view_with_more_dimensions(place: str, name: str, tmp_path: Path) -> None:
    """As heads of queries are between those of keys: it is copied once, into the version."""

    def apart(t: torch.Tensor) -> torch.Tensor:
        if t.ndim < 2 or len(t) % 2:
            return t
        halves = t.view(2, -1, *t.shape[1:])
        wide = torch.cat([halves, torch.full_like(halves, torch.nan)], 1)[:, : halves.shape[1]]
        assert not wide.is_contiguous()
        return wide

    def publish(rank: int) -> Any:
        made = engine("qwen3, tied", "actor", Layout(world_size=2))
        expected, parts = {n: t.clone() for n, t in made.weights()}, made.weight_parts
        made.weight_parts = lambda: (  # type: ignore[method-assign]
            part if (mine := part.mine) is None else replace(part, mine=lambda mine=mine: apart(mine()))
            for part in parts()
        )
        outlet = shm.ShmOutlet(name) if place == "memory" else disk.DiskOutlet(tmp_path)
        sender = WeightSender(outlet, verify_first=1)
        for version in range(2):  # with all checksums, and with those of some tensors
            sent = sender.send(made, version, PROBES, copy=False, first=rank == 0)
            if sent is not None:
                read = {n: bits(t) for n, t in open_stream(sent.source).tensors()}
                assert read == {n: bits(t) for n, t in expected.items()}
        return len(expected)

    assert run(2, publish)[0] > 20


HARMS = {
    "another byte": r"version 0: model.norm.weight\[\d+:\d+\], the slice of rank 1, changed between",
    "lost on the way": "version 0: rank 1: it did not deliver its slice of model.norm.weight",
    "of another version": "version 0: rank 1: it holds version 7 by now",
    "gone": "version 0: rank 1: the trainer's weights cannot be fetched from",
    "breaks off": "version 0: rank 1: version 0: the trainer's weights ended on the way",
    "a table without it": r"version 0: model.norm.weight has \d+ elements, and its ranks delivered",
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_or_missing_slice_of_one_rank_is_refused_by_name(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(rank: int) -> str:
        apart(rank, monkeypatch)
        made, outlet = engine("qwen3, tied", "actor", Layout(world_size=2)), tcp.TcpOutlet(host="127.0.0.1")
        number = [part.name for part in made.weight_parts() if part.mine is not None].index("model.norm.weight")
        send, join = tcp._send, outlet.join_slices

        def harmful(peer: Any, now: shm.ShmStream, changes: Any) -> None:
            views = dict(now.views())
            if harm == "another byte":
                views[str(number)].add_(1)
            elif harm == "lost on the way":
                del views[str(number)]
                monkeypatch.setattr(now, "views", lambda: iter(views.items()))
            elif harm == "of another version":
                now.hold(7)
            elif harm == "breaks off":
                monkeypatch.setattr(tcp, "host_bytes", lambda tensor: pytest.fail("it dies"))
            send(peer, now, changes)

        def told(place: str, table: Any) -> str:
            if harm == "gone":
                table.ranks[1].address = "127.0.0.1:9/" + table.ranks[1].address.rpartition("/")[2]
            address = join(place, table)
            if harm == "a table without it":
                table.ranks[1].slices = [one for one in table.ranks[1].slices if one[0] != "model.norm.weight"]
                outlet._table = 0, msgspec.msgpack.encode(table)
            return address

        monkeypatch.setattr(outlet, "join_slices", told)
        if rank == 1:
            monkeypatch.setattr(tcp, "_send", harmful)
        sent = WeightSender(outlet).send(made, 0, PROBES, copy=False, first=rank == 0)
        found = ""
        if sent is not None:
            with pytest.raises(SyncError) as error:
                dict(CheckedReader(sent.source).tensors())
            found = str(error.value)
        dist.barrier()
        shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
        return found

    first, _ = run(2, publish)
    assert re.match(HARMS[harm], first), first


@pytest.mark.parametrize("harm", ["missing", "twice", "moved", "no room", "no table"])
def test_slices_that_are_no_version_are_an_error_of_every_rank(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(rank: int) -> str:
        apart(rank, monkeypatch)
        made, outlet = engine("qwen3, tied", "actor", Layout(world_size=2)), tcp.TcpOutlet(host="127.0.0.1")
        sender, parts = WeightSender(outlet), made.weight_parts

        def harmed() -> Iterator[Any]:
            for part in parts():
                if part.name != "model.norm.weight" or harm not in ("missing", "twice", "moved"):
                    yield part
                elif harm == "moved":  # over the slice of the other rank
                    yield replace(part, index=(slice(0, len(part.mine())),))
                else:
                    yield from [replace(part, mine=None)] if harm == "missing" else [part, part]

        if rank == 1:
            made.weight_parts = harmed
        full = OSError(28, "0 MB of weights do not fit")
        if harm == "no room" and rank == 1:
            monkeypatch.setattr(shm.ShmOutlet, "stage", lambda *args: (_ for _ in ()).throw(full))
        if harm == "no table":
            monkeypatch.setattr(outlet, "join_slices", lambda *args: (_ for _ in ()).throw(full))
        with pytest.raises(SyncError) as error:
            sender.send(made, 0, PROBES, copy=False, first=rank == 0)
        shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
        return str(error.value)

    said = {*run(2, publish)}
    assert len(said) == 1
    wanted = {
        "missing": "and its ranks delivered",
        "twice": "and its ranks delivered",
        "moved": "version 0: model.norm.weight: two slices that its ranks delivered overlap",
        "no room": "version 0: rank 1 could not store its slices: [Errno 28] 0 MB of weights do not fit",
        "no table": "version 0: [Errno 28] 0 MB of weights do not fit",
    }
    assert wanted[harm] in said.pop()


def test_weights_that_are_not_finite_in_one_slice_are_those_of_a_diverged_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def publish(rank: int) -> bool:
        apart(rank, monkeypatch)
        made, outlet = engine("qwen3, tied", "actor", Layout(world_size=2)), tcp.TcpOutlet(host="127.0.0.1")
        if rank == 1:
            with torch.no_grad():
                next(p for p in made.masters.values() if p.numel()).view(-1)[-1] = torch.inf
        refused = pytest.raises(FloatingPointError, match="hold NaN or infinity") if rank == 0 else nullcontext()
        with refused:
            WeightSender(outlet).send(made, 0, [], copy=False, first=rank == 0)
        shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
        return True

    assert run(2, publish) == [True, True]


NO_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl is not installed (make nixl-package)")
FAR: dict[str, tuple[Any, str]] = {
    "nixl;": (nixl.NixlOutlet, "b"),
    "collective;PIECE_BYTES=9000": (collective.CollectiveOutlet, "bc"),
}


@pytest.mark.parametrize("transport", [pytest.param(t, marks=NO_NIXL if t == "nixl;" else []) for t in FAR])
def test_slices_are_read_or_broadcast_from_the_memory_of_every_rank(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes, with another folder as shared memory, read them. No rank has more than its slices in memory."""
    kind, names = FAR[transport]

    def publish(rank: int, readers: list[Any]) -> Any:
        os.environ["UCX_TLS"] = "tcp,sm,self"
        apart(rank, monkeypatch)
        groups, group = [], collective.BroadcastGroup
        monkeypatch.setattr(collective, "BroadcastGroup", lambda *args: (groups.append(args[3]), group(*args))[1])
        monkeypatch.setattr(collective, "PIECE_BYTES", 9000)
        made, outlet = engine("qwen3, tied", "actor", Layout(world_size=2)), kind(host="127.0.0.1")
        sender, found = WeightSender(outlet), []
        sender.set_format(BF16)
        for version in range(3):
            whole = {n: t.to(getattr(torch, BF16.dtype_of(n) or "float32")) for n, t in made.weights()}
            made.weights, gather = (lambda: pytest.fail("a rank gathers")), made.weights
            sent = sender.send(made, version, [], copy=False, first=rank == 0)
            made.weights = gather
            held = sum(tensor.nbytes for _, tensor in outlet._held[0].views())
            assert 0.4 < held / sum(t.nbytes for t in whole.values()) < 0.6
            if version == 2 and rank == 1:
                outlet._held[0].hold(7)
            dist.barrier()
            if sent is not None:
                raw = [(n, str(t.dtype), tuple(t.shape), bits(t)) for n, t in whole.items()]
                found.append((all_of(readers, sent.source.address), hashlib.sha256(repr(raw).encode()).hexdigest()))
            dist.barrier()
        shm.remove(f"{shm.PREFIX}-{os.getpid()}-{outlet.tag}")
        return found, groups

    with ExitStack() as stack:
        readers = [stack.enter_context(host(transport, tmp_path / name)) for name in names]
        (first, groups), (_, others) = run(2, lambda rank: publish(rank, readers))
    for version, (said, digest) in enumerate(first[:2]):
        for one in said:
            assert one.startswith(f"{version} {digest} {2 * (version + 1)} |"), "read from both ranks"
    assert all(one.startswith("error version 2: rank 1: it holds version 7 by now |") for one in first[2][0])
    if kind is collective.CollectiveOutlet:
        assert groups == others == [3], "each rank keeps a group of itself and the two hosts"


@pytest.mark.parametrize("layout", ["two", "copies", "experts"])
def test_each_rank_uploads_its_slices_to_an_object_store(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one host too. The two latest versions stay, and a damaged file of a rank is refused by its name."""
    model, of = LAYOUTS[layout]
    (tmp_path / "there").mkdir()

    def publish(rank: int) -> Any:
        made, outlet = engine(model, "actor", of), objects.ObjectOutlet(f"file://{tmp_path}/there")
        sender = WeightSender(outlet)
        sender.set_format(BF16)
        whole = {n: t.to(getattr(torch, BF16.dtype_of(n) or "float32")) for n, t in made.weights()}
        made.weights = lambda: pytest.fail("a rank gathers")
        for version in range(3):
            sent = sender.send(made, version, PROBES, copy=False, first=rank == 0)
        dist.barrier()
        if sent is None:
            return None
        folder = Path(sent.source.address.removeprefix("file://"))
        stored = sorted(path.name for path in folder.iterdir()), sorted(path.name for path in folder.parent.iterdir())
        read = {n: (str(t.dtype), bits(t)) for n, t in CheckedReader(sent.source).tensors()}
        assert read == {n: (str(t.dtype), bits(t)) for n, t in whole.items()}
        objects.open_weights(sent.source.address).end()
        raw = (last := folder / stored[0][-2]).read_bytes()
        said = []
        for content in (raw[:-1] + bytes([raw[-1] ^ 1]), None):
            last.unlink() if content is None else last.write_bytes(content)
            with pytest.raises(SyncError) as error:
                dict(CheckedReader(sent.source).tensors())
            said.append(str(error.value))
        return stored, said

    (stored, said), *_ = run(of.world_size, publish)
    files, versions = stored
    assert versions == ["version_1", "version_2"] and files[-1] == objects.INDEX
    holders = [int(name.removeprefix("rank_").removesuffix(".safetensors")) for name in files[:-1]]
    assert len(holders) == of.world_size // of.replicate and holders[0] == 0
    at = f"version 2: rank {holders[-1]}: version 2"
    assert re.match(
        rf"{at}: .*rank_0000{holders[-1]}.safetensors is not what was written: version 2, \d+ bytes", said[0]
    )
    assert re.match(rf"{at} is not at .*rank_0000{holders[-1]}.safetensors: it was never whole", said[1])


def test_an_upload_of_one_rank_that_fails_is_the_error_of_all_and_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()

    def publish(rank: int) -> Any:
        made = engine("qwen3, tied", "actor", Layout(world_size=2))
        sender, put = WeightSender(objects.ObjectOutlet(f"file://{tmp_path}/there")), LocalFileSystem.put_file
        before = sender.send(made, 0, [], copy=False, first=rank == 0)

        def breaks(*given: Any, **named: Any) -> None:
            raise ConnectionResetError("the store went away")

        if rank == 1:
            monkeypatch.setattr(LocalFileSystem, "put_file", breaks)
        with pytest.raises(SyncError) as error:
            sender.send(made, 1, [], copy=False, first=rank == 0)
        monkeypatch.setattr(LocalFileSystem, "put_file", put)
        if before is not None:
            assert len(dict(CheckedReader(before.source).tensors())) == len(before.source.delivered)
            objects.open_weights(before.source.address).end()
        dist.barrier()
        after = sender.send(made, 2, [], copy=False, first=rank == 0)
        return str(error.value), after and sorted(path.name for path in Path(after.source.address[7:]).parent.iterdir())

    (said, stored), (of_other, _) = run(2, publish)
    assert said == of_other and stored == ["version_0", "version_2"], "the remains of the one that broke are deleted"
    at = r"version 1: rank 1 could not store its slices: file://.*/version_1"
    assert re.match(rf"{at} could not be written: ConnectionResetError: the store went away", said)


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
