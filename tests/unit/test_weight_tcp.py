"""What goes over the network: everything to who has nothing, exact changes to who has the version before."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from verl.weight_sync import tcp
from verl.weight_sync.base import SyncError
from verl.weight_sync.sender import entry_of


@dataclass
class Counted:
    """A connection that counts what comes."""

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
    monkeypatch.setattr(tcp.socket, "create_connection", lambda *a, **k: Counted(connect(*a, **k), found))
    return found


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
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


def test_whole_versions_come_as_they_were_staged(came):
    outlet, now = tcp.TcpOutlet(host="127.0.0.1"), weights()
    for version in range(3):
        now = nudged(now)
        assert same(dict(tcp.open_weights(stage(outlet, version, now)).tensors()), now)
        assert sum(came) > sum(t.numel() * t.element_size() for t in now.values())
        came.clear()


def test_changes_are_exact_small_and_only_for_those_who_have_the_version_before(came):
    outlet, now = tcp.TcpOutlet(host="127.0.0.1", delta=True), weights()
    address = stage(outlet, 0, now)
    assert same(dict(tcp.open_weights(address).tensors()), now)
    whole = sum(came)
    for version in range(1, 4):
        now = nudged(now)
        now["b"].view(-1)[3] = float("nan")  # bits are compared, and NaN is not equal to itself
        stage(outlet, version, now)
        came.clear()
        found = dict(tcp.open_weights(address).tensors())
        assert list(found) == list(now)
        assert all(torch.equal(found[n].nan_to_num(), now[n].nan_to_num()) for n in now)
        assert sum(came) < whole / 10
        came.clear()
        tcp._kept_of.cache_clear()  # a replica that joins late
        assert dict(tcp.open_weights(address).tensors()).keys() == now.keys() and sum(came) >= whole - 100
    stage(outlet, 5, nudged(now))  # 4 was never staged: there is nothing that the changes could be of
    came.clear()
    dict(tcp.open_weights(address).tensors())
    assert sum(came) >= whole - 100


def test_many_changes_go_as_the_whole_tensor_and_minus_zero_is_a_change(came):
    outlet, now = tcp.TcpOutlet(host="127.0.0.1", delta=True), {"z": torch.zeros(1000), "r": torch.randn(1000)}
    dict(tcp.open_weights(stage(outlet, 0, now)).tensors())
    now = {"z": now["z"].clone(), "r": torch.randn(1000)}
    now["z"][7] = -0.0
    found = dict(tcp.open_weights(stage(outlet, 1, now)).tensors())
    assert torch.equal(found["r"], now["r"]) and torch.signbit(found["z"]).nonzero().tolist() == [[7]]


def test_a_reading_that_was_broken_off_is_no_base_for_changes():
    outlet, now = tcp.TcpOutlet(host="127.0.0.1", delta=True), weights()
    address = stage(outlet, 0, now)
    dict(tcp.open_weights(address).tensors())
    now = nudged(now)
    stage(outlet, 1, now)
    half = tcp.open_weights(address).tensors()
    next(half)
    half.close()
    now = nudged(now)
    stage(outlet, 2, now)
    assert same(dict(tcp.open_weights(address).tensors()), now)


def test_a_version_that_is_written_over_while_it_is_read_is_refused():
    outlet, now = tcp.TcpOutlet(host="127.0.0.1"), {f"w{i}": torch.randn(1 << 20) for i in range(16)}  # above buffers
    address = stage(outlet, 0, now)
    slow = tcp.open_weights(address).tensors()
    next(slow)
    stage(outlet, 1, now)
    stage(outlet, 2, {n: t + 1 for n, t in now.items()})
    with pytest.raises(SyncError, match="version 0 was written over by 2 while it was read"):
        dict(slow)


def test_nobody_without_the_key_gets_weights():
    outlet = tcp.TcpOutlet(host="127.0.0.1")
    place = stage(outlet, 0, weights()).rpartition("/")[0]
    with pytest.raises(SyncError, match=r"cannot be fetched from 127\.0\.0\.1:\d+: the other end closed"):
        dict(tcp.open_weights(f"{place}/{'0' * 32}").tensors())


def test_a_sender_that_is_gone_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    with pytest.raises(
        SyncError, match=r"cannot be fetched .*refused; is that address reachable .*engine_options.host"
    ):
        _ = tcp.open_weights(f"127.0.0.1:{free_port}/{'0' * 32}").version


def test_another_process_reads_what_this_one_staged():
    now = weights()
    address = stage(tcp_outlet := tcp.TcpOutlet(host="127.0.0.1"), 7, now)
    read = (
        "import sys; from verl.weight_sync.tcp import open_weights; from verl.weight_sync.base import checksum\n"
        "s = open_weights(sys.argv[1]); print(s.version, sum(checksum(t) for _, t in s.tensors()))"
    )
    out = subprocess.run([sys.executable, "-c", read, address], capture_output=True, text=True, timeout=120)
    from verl.weight_sync.base import checksum

    assert out.stdout.split() == ["7", str(sum(checksum(t) for t in now.values()))], out.stderr
    assert tcp_outlet is not None
