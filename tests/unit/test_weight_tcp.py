"""Data over the network: everything to a host without a version, exact changes to one with the version before."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from started import Program

from verl.algorithms.losses import nll
from verl.batch import pack
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.objective import Term
from verl.types import Sample, Segment
from verl.weight_sync import connections, shm, tcp
from verl.weight_sync.base import SyncError, checksum
from verl.weight_sync.record import entry_of
from verl.weight_sync.sender import WeightSender
from verl.wire import WireFormat


@dataclass
class Counted:
    """A connection that counts the received bytes."""

    inner: Any
    came: list[int] = field(default_factory=list)

    def recv_into(self, into: memoryview) -> int:
        self.came.append(self.inner.recv_into(into))
        return self.came[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.inner.close()


@pytest.fixture
def came(monkeypatch) -> list[int]:
    found: list[int] = []
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: Counted(connect(*a, **k), found))
    return found


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Callable[..., dict[str, torch.Tensor]]:
    """Read as a process of another host does, with another folder as shared memory."""

    def read(address: str, host: str = "b") -> dict[str, torch.Tensor]:
        (tmp_path / host).mkdir(exist_ok=True)
        with monkeypatch.context() as there:
            for module in (shm, tcp):
                there.setattr(module, "SHM", tmp_path / host)
            return {name: tensor.clone() for name, tensor in tcp.open_weights(address).tensors()}

    return read


@pytest.fixture
def outlet_of() -> Iterator[Callable[..., tcp.TcpOutlet]]:
    made: list[tcp.TcpOutlet] = []

    def make(**options: Any) -> tcp.TcpOutlet:
        made.append(tcp.TcpOutlet(host="127.0.0.1", **options))
        return made[-1]

    yield make
    for outlet in made:
        shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(300, 100),
        "b": torch.randn(20_000).bfloat16(),
        "scalar": torch.tensor(2.0),
        "none": torch.zeros(0, 3),
        "still": torch.randn(1000),
    }


def stage(outlet: tcp.TcpOutlet, version: int, tensors: dict[str, torch.Tensor]) -> str:
    return outlet.stage(version, {n: entry_of(t) for n, t in tensors.items()}, tensors.items())


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(two) and all(
        torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype and one[n].shape == two[n].shape for n in one
    )


def nudged(tensors: dict[str, torch.Tensor], every: int = 50) -> dict[str, torch.Tensor]:
    out = {n: t.clone() for n, t in tensors.items()}
    for name in ("a", "b"):
        out[name].view(-1)[::every] += 1
    return out


def test_whole_versions_come_as_they_were_staged_once_to_each_host(came, elsewhere, outlet_of):
    outlet, now = outlet_of(), weights()
    for version in range(3):
        now = nudged(now)
        address = stage(outlet, version, now)
        whole = sum(t.numel() * t.element_size() for t in now.values())
        for host in ("b", "c"):
            assert same(elsewhere(address, host), now) and sum(came) > whole
            came.clear()
            assert same(elsewhere(address, host), now) and sum(came) < 500, "it is there already"
            came.clear()
        assert same(dict(tcp.open_weights(address).tensors()), now) and sum(came) < 500, "and here it always is"
        came.clear()


def test_changes_are_exact_small_and_only_for_those_who_have_the_version_before(came, elsewhere, outlet_of):
    outlet, now = outlet_of(delta=True), weights()
    address = stage(outlet, 0, now)
    assert same(elsewhere(address), now)
    whole = sum(came)
    for version in range(1, 4):
        now = nudged(now)
        now["b"].view(-1)[3] = float("nan")  # bits are compared, and NaN is not equal to itself
        stage(outlet, version, now)
        came.clear()
        found = elsewhere(address)
        assert list(found) == list(now)
        assert all(torch.equal(found[n].nan_to_num(), now[n].nan_to_num()) for n in now)
        assert sum(came) < whole / 10
        came.clear()
        assert elsewhere(address, f"late {version}").keys() == now.keys() and sum(came) >= whole - 100
    stage(outlet, 5, nudged(now))  # 4 was never staged: there is nothing that the changes could be of
    came.clear()
    elsewhere(address)
    assert sum(came) >= whole - 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.bool])
def test_changes_are_those_that_comparing_one_by_one_finds(dtype):
    """Tensors of any length, since eight bytes are compared at once."""
    for n in (0, 1, 3, 7, 8, 9, 16, 1003):
        for share in (0.0, 0.02, 0.2):
            before = torch.randint(0, 2, (n,)).to(dtype)
            now, changed = before.clone(), torch.rand(n) < share
            now[changed] = 1 - now[changed] if dtype != torch.bool else ~now[changed]
            found = tcp._changes(before, now)
            one_by_one = [i for i in range(n) if before[i] != now[i]]
            if 2 * len(one_by_one) * (4 + now.element_size()) > n * now.element_size():
                assert found is None
                continue
            positions, values = found
            assert positions.tolist() == one_by_one and values.tolist() == now[one_by_one].tolist()
            assert (positions.dtype, values.dtype) == (torch.int32, dtype)


def test_many_changes_go_as_the_whole_tensor_and_minus_zero_is_a_change(elsewhere, outlet_of):
    outlet, now = outlet_of(delta=True), {"z": torch.zeros(1000), "r": torch.randn(1000)}
    elsewhere(stage(outlet, 0, now))
    now = {"z": now["z"].clone(), "r": torch.randn(1000)}
    now["z"][7] = -0.0
    found = elsewhere(stage(outlet, 1, now))
    assert torch.equal(found["r"], now["r"]) and torch.signbit(found["z"]).nonzero().tolist() == [[7]]


def test_a_fetch_that_was_broken_off_is_no_base_for_changes(elsewhere, outlet_of, monkeypatch):
    outlet, now = outlet_of(delta=True), weights()
    address = stage(outlet, 0, now)
    elsewhere(address)
    now = nudged(now)
    stage(outlet, 1, now)
    read, calls = tcp._read, []

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("reset by peer")
        return read(*args)

    monkeypatch.setattr(tcp, "_read", broken)
    with pytest.raises(SyncError, match="version 1: the trainer's weights ended on the way: reset by peer"):
        elsewhere(address)
    assert same(elsewhere(address), now), "the same version, asked again"
    now = nudged(now)
    stage(outlet, 2, now)
    assert same(elsewhere(address), now)


def test_a_version_that_is_written_over_while_it_is_fetched_is_refused(outlet_of):
    outlet, now = outlet_of(), {f"w{i}": torch.randn(1 << 20) for i in range(16)}  # above a connection's buffers
    address = stage(outlet, 0, now)
    slow = tcp.TcpStream(address).tensors()
    next(slow)
    stage(outlet, 1, now)
    stage(outlet, 2, now)
    with pytest.raises(SyncError, match="version 0 was written over by 2 while it was read"):
        dict(slow)


def test_nobody_without_the_key_gets_weights(elsewhere, outlet_of):
    place = stage(outlet_of(), 0, weights()).rpartition("/")[0]
    with pytest.raises(SyncError, match=r"cannot be fetched from 127\.0\.0\.1:\d+: the other end closed"):
        elsewhere(f"{place}/{'0' * 32}")


def test_peers_without_the_key_cost_no_thread_and_are_left_after_a_time(elsewhere, outlet_of, monkeypatch):
    monkeypatch.setattr(connections, "MOST_SILENT", 8)
    now = weights()
    address = stage(outlet_of(), 1, now)
    threads, silent = threading.active_count(), []
    host, _, port = address.partition("/")[0].rpartition(":")
    for i in range(24):
        silent.append(socket.create_connection((host, int(port)), timeout=20))
        silent[-1].sendall(b"x" * i)
    wrong = socket.create_connection((host, int(port)), timeout=20)
    wrong.sendall(b"x" * tcp.ASK.size)
    assert wrong.recv(1) == b"" and threading.active_count() <= threads
    assert same(elsewhere(address), now)
    assert [peer.recv(1) for peer in silent[:16]] == [b""] * 16, "the oldest make room"
    monkeypatch.setattr(connections, "ASK_S", 0.1)
    late = socket.create_connection((host, int(port)), timeout=20)
    assert late.recv(1) == b""
    for peer in (*silent, wrong, late):
        peer.close()


def test_neither_end_collects_short_messages_before_it_sends_them():
    """Otherwise every bucket to another host waits 40 ms for an acknowledgement."""
    found: list[int] = []
    answered = threading.Event()

    def answer(peer: socket.socket) -> None:
        with peer:
            found.append(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        answered.set()

    place = connections.listening("127.0.0.1", "k" * 32, struct.Struct("<32s"), answer)
    with connections.connected(place) as peer:
        peer.sendall(b"k" * 32)
        assert answered.wait(20) and found[0] and peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_sender_that_is_gone_is_one_line(elsewhere):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        SyncError, match=r"cannot be fetched .*refused; is that address reachable .*engine_options.host"
    ):
        elsewhere(f"127.0.0.1:{port}/{'0' * 32}")


def test_processes_of_a_host_fetch_once_and_what_the_dead_left_goes(tmp_path, outlet_of):
    now = weights()
    address = stage(outlet_of(), 7, now)
    read = (
        "import os, sys; from pathlib import Path; from verl.weight_sync import shm, tcp\n"
        "from verl.weight_sync.base import checksum\n"
        "shm.SHM = tcp.SHM = Path(sys.argv[2]); read, calls = tcp._read, []\n"
        "tcp._read = lambda *a: (calls.append(1), read(*a))[1]\n"
        "s = tcp.open_weights(sys.argv[1])\n"
        "print(s.version, sum(checksum(t) for _, t in s.tensors()), len(calls), flush=True)\n"
        "if sys.argv[3] == 'killed': os._exit(9)"
    )
    folder = tmp_path / "shm"
    folder.mkdir()
    runs = [Program(read, address, folder, "killed", log=tmp_path / f"{i}.log") for i in range(2)]
    told = [run.output(120).split() for run in runs]
    expected = str(sum(checksum(t) for t in now.values()))
    assert [t[:2] for t in told] == [["7", expected]] * 2
    left = [path.name for path in folder.glob(f"{shm.PREFIX}-*")]
    assert len(left) == 1
    again = Program(read, address, folder, "ends", log=tmp_path / "again.log")
    assert again.output(120).split() == ["7", expected, "5"], "whose maker is gone is fetched again"
    assert not list(folder.glob(f"{shm.PREFIX}-*")), "what the killed one left is gone, and this one left nothing"


def test_a_late_reader_on_the_host_of_the_trainer_takes_no_older_version(outlet_of):
    """A version is staged there before it is published: the published one must not be written over it."""
    outlet, now = outlet_of(), weights()
    address = stage(outlet, 0, now)
    told = outlet._held
    stage(outlet, 1, {name: tensor + 1 for name, tensor in now.items()})
    outlet._held = told
    found = tcp.open_weights(address)
    assert found.version == 1
    for name, tensor in found.tensors():
        assert torch.equal(tensor, now[name] + 1), name
    assert sorted(path.name[-1] for path in shm.SHM.glob(f"{shm.PREFIX}-*-{outlet.tag}-?")) == ["0", "1"]


@pytest.mark.parametrize("delta", [False, True])
def test_the_trainers_host_keeps_the_version_before_for_changes_alone(elsewhere, outlet_of, delta):
    outlet, now = outlet_of(delta=delta), weights()
    for version in range(4):
        now = nudged(now)
        address = stage(outlet, version, now)
        assert same(elsewhere(address), now) and same(dict(tcp.open_weights(address).tensors()), now)
        tcp.open_weights(address).release(version)
        files = len(list(shm.SHM.glob(f"{shm.PREFIX}-*-{outlet.tag}-?")))
        assert files == (2 if delta and version else 1)


def test_while_a_version_is_staged_the_answer_is_not_yet(elsewhere, outlet_of):
    outlet, now = outlet_of(), weights()
    address = stage(outlet, 0, now)
    tcp.open_weights(address).release(0)

    def passing() -> Iterator[tuple[str, torch.Tensor]]:
        for item in now.items():
            for read in (elsewhere, lambda at: dict(tcp.open_weights(at).tensors())):
                with pytest.raises(SyncError, match="has no whole version yet: it stages the next one"):
                    read(address)
            yield item

    outlet.stage(1, {n: entry_of(t) for n, t in now.items()}, passing())
    assert same(elsewhere(address), now)


def test_changes_of_an_optimizer_step_are_at_least_five_times_shorter_than_bfloat16_weights(monkeypatch, outlet_of):
    """AdamW at lr 1e-6 from weights of the usual size. In float32 nearly every element changes."""
    model = tiny.qwen3(tiny.character_tokenizer("abc"), hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, seed=1)
    engine, came = TorchEngine(model, EngineSettings(optim=OptimSpec(lr=1e-6), dtype="float32")), [0]
    real = tcp.filled

    def counted(peer: Any, into: memoryview) -> None:
        came[0] += len(into)
        real(peer, into)

    def step() -> None:
        ids = np.arange(40) % 5
        drawn = Segment(ids=ids[1:], source="sampled", logprobs=np.zeros(39, np.float32), version=0)
        segments = (Segment(ids=ids[:1], source="prompt"), drawn)
        row = Sample(sample_id="0", trajectory_id="0", group_id="0", purpose="train", segments=segments)
        batch = pack([row], share_prefix=False).with_columns({"w/nll": torch.full((39,), 1 / 39, dtype=torch.float64)})
        engine.forward_backward(batch, [Term(name="nll", fn=nll)])
        engine.optim_step()

    monkeypatch.setattr(tcp, "filled", counted)
    monkeypatch.setattr(connections, "filled", counted)
    sent: dict[tuple[str, bool], int] = {}
    for dtype, delta in product(("float32", "bfloat16"), (False, True)):
        sender, before, has = WeightSender(outlet_of(delta=delta)), dict[str, torch.Tensor](), tcp.NOTHING
        sender.set_format(WireFormat(dtype))
        for version in range(3):
            step()
            told, came[0] = sender.send(engine, version, (), copy=False), 0
            assert told is not None
            stream = tcp.TcpStream(told.source.address, has, before)
            before, has = {name: tensor.clone() for name, tensor in stream.tensors()}, version
            assert all(torch.equal(before[n], t.to(before[n].dtype)) for n, t in engine.weights())
        sent[dtype, delta] = came[0]
    assert sent["float32", True] > 0.95 * sent["float32", False], "a delta of float32 saves nothing"
    assert sent["bfloat16", False] < 0.51 * sent["float32", False]
    assert sent["bfloat16", True] * 5 <= sent["bfloat16", False], sent
