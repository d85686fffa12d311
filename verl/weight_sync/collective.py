"""Weights by broadcast: as over tcp.py, but all hosts that wait for a version receive it at once, in a
torch.distributed group of the trainer and one process of each host.

The group is kept from version to version while the same processes join; for others a new one is built. A host that is
late gets a broadcast of its own. If one dies or breaks off, the others send their requests again and continue without
it. After the last byte the trainer confirms the version in its memory; until then a host's file counts as empty.

Ranks of several hosts each broadcast the slices that they hold (slices.py), one rank after the other, in a group of
that rank and the hosts."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import Refused
from verl.weight_sync.base import SyncContext, SyncError
from verl.weight_sync.connections import LOOK_S, PIECE_BYTES, has_input, received
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.options import Collective
from verl.weight_sync.shm import PREFIX, VERSION_BYTES, ShmStream, blank, end, this_host
from verl.weight_sync.slices import SLICED, RankSlices, SlicedVersion, slices_in
from verl.weight_sync.tcp import ANSWER, FETCH_S, NOTHING, TABLE, VERSION, HostStream, TcpOutlet, request_version

MEMBER_S = 30.0  # for the members of a group to connect, and for the broadcast of a piece
SETTLE_S = 0.1  # for further hosts, if the waiting ones are not those of the version before
HEAD_START_S = 0.2  # for the process of a host that is in the group, before another one takes its place
TRIES = 3  # attempts per host, if broadcasts break off
BROKEN = (OSError, RuntimeError)  # errors of connections and torch.distributed
T = TypeVar("T")


class Offer(msgspec.Struct, array_like=True):
    """The trainer's answer to the request of a host."""

    num_bytes: int
    backend: str
    """The backend of torch.distributed."""


class JoinRequest(msgspec.Struct, array_like=True):
    """The request of a process to join the next broadcast."""

    host: str
    """The identity of its host's shared memory."""
    process: str
    """The identity of the process."""


class RoundStart(msgspec.Struct, array_like=True):
    """The trainer's message to each member of a broadcast that begins."""

    version: int
    num_bytes: int
    """The size of the version's file."""
    group: str
    """The name of the process group."""
    rank: int
    """The member's rank in it."""
    size: int
    port: int
    """The port of the group's store on the trainer's host."""


@dataclass(slots=True)
class Member:
    """A process that waits for a broadcast."""

    joined: JoinRequest
    peer: socket.socket
    over: threading.Event = field(default_factory=threading.Event)
    """Set when its broadcast has ended, successfully or not."""


class BroadcastGroup:
    """A process group of torch.distributed, separate from the process's default group. Rank 0 is the sender."""

    def __init__(self, name: str, store: dist.Store, rank: int, size: int, backend: str) -> None:
        self.name, self._root = name, rank == 0
        kind = vars(dist)["ProcessGroupNCCL" if backend == "nccl" else "ProcessGroupGloo"]
        self._group = kind(dist.PrefixStore(name, store), rank, size, timedelta(seconds=MEMBER_S))
        self._bucket = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda") if backend == "nccl" else None

    def broadcast(self, memory: Tensor) -> None:
        """Broadcast memory [n] uint8 in place, from rank 0 to all others, in pieces."""
        for piece in memory.split(PIECE_BYTES):
            if self._bucket is None:
                self._group.broadcast(piece, 0).wait(timedelta(seconds=MEMBER_S))
                continue
            bucket = self._bucket[: len(piece)]
            if self._root:
                bucket.copy_(piece)
            self._wait_for(self._group.broadcast(bucket, 0))
            if not self._root:
                piece.copy_(bucket)

    def _wait_for(self, work: Any) -> None:
        """Wait until a broadcast on a device has completed; torch's own `wait` does not block the host. Raise
        TimeoutError after `MEMBER_S`."""
        until_s = time.monotonic() + MEMBER_S
        while not work.is_completed():
            if time.monotonic() > until_s:
                self._group.abort()
                raise TimeoutError(f"a piece was not broadcast in {MEMBER_S:g} s")
            time.sleep(LOOK_S / 10)
        work.wait()


class CollectiveOutlet(TcpOutlet):
    """A `TcpOutlet` that broadcasts. gather_s: how long a broadcast waits for the hosts that received the version
    before."""

    transport = "verl.weight_sync.collective:open_weights"

    def __init__(self, *, host: str | None = None, backend: str = "gloo", gather_s: float = 2.0) -> None:
        super().__init__(host=host)
        self._backend, self._gather_s = backend, gather_s
        self._rounds: Rounds | None = None

    def _serve(self) -> None:
        require_backend(self._backend, "the trainer")
        super()._serve()
        assert self._held is None, "who asks finds the rounds"
        at = self._address.rpartition("/")[0].rpartition(":")[0]
        listener = socket.create_server((at, 0), family=socket.AF_INET6 if ":" in at else socket.AF_INET)
        limit, port = timedelta(seconds=MEMBER_S), listener.getsockname()[1]
        store = dist.TCPStore(
            at, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
        )
        self._rounds = Rounds(store, self._backend, self._gather_s, self._latest)
        threading.Thread(target=self._rounds.run, name="weights", daemon=True).start()

    def _latest(self) -> ShmStream:
        assert self._held is not None, "an address is known when a version is staged"
        return self._held[0]

    def _send_version(self, peer: socket.socket, has: int) -> None:
        now, rounds = self._latest(), self._rounds
        assert rounds is not None
        index = msgspec.msgpack.encode(Offer(now.memory.numel(), self._backend))
        peer.sendall(ANSWER.pack(now.version, len(index)) + index)
        peer.settimeout(FETCH_S)
        rounds.join(Member(_receive_message(peer, JoinRequest), peer))


class Rounds:
    """The trainer's broadcasts, one after the other, each to all hosts that wait at its beginning. latest: returns the
    version to send."""

    def __init__(self, store: Any, backend: str, gather_s: float, latest: Callable[[], ShmStream]) -> None:
        self._store, self._backend, self._gather_s, self._latest = store, backend, gather_s, latest
        self._changed = threading.Condition()
        self._waiting: list[Member] = []
        self._group: tuple[tuple[str, ...], BroadcastGroup] | None = None  # and its member processes
        self._tried = NOTHING  # the version of the last round
        self._took: tuple[int, frozenset[str]] = (NOTHING, frozenset())  # a version, and the hosts that received it

    def join(self, member: Member) -> None:
        """Add a member to the waiting ones, and return when its broadcast has ended, successfully or not."""
        with self._changed:
            self._waiting.append(member)
            self._changed.notify_all()
        member.over.wait(FETCH_S)
        with self._changed:  # its connection ends and must not be read
            self._waiting = [one for one in self._waiting if one is not member]

    def run(self) -> None:
        while True:
            members = self._gathered()
            try:
                self._broadcast(members)
            except BROKEN:  # the members see their connections close, and ask again
                self._group = None
            finally:
                for member in members:
                    member.over.set()

    def _gathered(self) -> list[Member]:
        """Wait for members and return them: once all hosts that received the version before are among them, or after
        the time limit for them."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            known = frozenset() if self._latest().version == self._tried else self._took[1]
            self._changed.wait_for(lambda: known <= self._hosts(), self._gather_s)
            if known != self._hosts():
                self._changed.wait_for(lambda: False, SETTLE_S)
            found, self._waiting = self._waiting, []
        for missing in (
            one for one in found if has_input(one.peer)
        ):  # a waiting member sends nothing, so it has closed
            missing.over.set()
        return sorted((one for one in found if not one.over.is_set()), key=lambda one: one.joined.process)

    def _hosts(self) -> frozenset[str]:
        return frozenset(one.joined.host for one in self._waiting)

    def _broadcast(self, members: Sequence[Member]) -> None:
        now, processes = self._latest(), tuple(one.joined.process for one in members)
        version = self._tried = now.version
        if not members:
            return
        kept = self._group[1] if self._group is not None and self._group[0] == processes else None
        name, size = kept.name if kept is not None else uuid.uuid4().hex, len(members) + 1
        for rank, member in enumerate(members, 1):
            _send_message(member.peer, RoundStart(version, now.memory.numel(), name, rank, size, self._store.port))
        if kept is None:
            self._group = None  # its connections end first
            kept = BroadcastGroup(name, self._store, 0, size, self._backend)
            self._group = processes, kept
        kept.broadcast(now.memory[VERSION_BYTES:])
        for member in members:
            with contextlib.suppress(OSError):  # it closed its connection with all that it wanted
                member.peer.sendall(VERSION.pack(now.version))
        hosts = frozenset(one.joined.host for one in members)
        self._took = version, hosts | (self._took[1] if self._took[0] == version else frozenset())


@dataclass(slots=True)
class MemberState:
    """The broadcast groups of this process, which are kept from version to version, by the address of their sender: the
    trainer's first rank, or each rank that broadcasts its slices."""

    groups: dict[str, BroadcastGroup] = field(default_factory=dict)


class CollectiveStream(HostStream):
    """A `HostStream` that receives broadcasts."""

    ranks_at_once = 1  # a whole share of a rank is in memory until it is put in its place

    @property
    def version(self) -> int:
        if self._found is None:
            self._yield_to_the_member()
        return super().version

    def _yield_to_the_member(self) -> None:
        """Wait up to HEAD_START_S for the process of this host that received the version before: its group exists
        already."""
        sliced = self._address.startswith(SLICED)
        peer, version, _ = request_version(self._address.removeprefix(SLICED), TABLE if sliced else NOTHING)
        peer.close()
        until_s = time.monotonic() + HEAD_START_S
        while time.monotonic() < until_s:
            paths = list(self._files())
            owners = {int(path.name.removeprefix(f"{PREFIX}-").partition("-")[0]) for path in paths}
            if owners <= {os.getpid()} or any(_version_of(path) >= version for path in paths):
                return
            time.sleep(LOOK_S)

    def _newer(self, here: ShmStream | None, place: Callable[[str], Path]) -> ShmStream:
        if self._address.startswith(SLICED):
            return self._assembled(here, place)

        def segment(version: int, num_bytes: int) -> Tensor:
            return blank(place(str(version % 2)), num_bytes).memory

        version, received_in = self._broadcast_of(self._address, NOTHING if here is None else here.version, segment)
        if received_in is None and here is not None:
            return here
        into = ShmStream(place(str(version % 2)))
        into.hold(version)
        return into

    def _slices(self, table: SlicedVersion, here: ShmStream | None, of: RankSlices) -> Iterator[tuple[str, Tensor]]:
        def share(version: int, num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

        version, received_in = self._broadcast_of(of.address, NOTHING, share)
        if version != table.version or received_in is None:
            raise SyncError(f"it holds version {version} by now")
        return slices_in(received_in, of.entries(table.tensors))

    def _broadcast_of(self, address: str, has: int, memory: Callable[[int, int], Tensor]) -> tuple[int, Tensor | None]:
        """Receive the latest version of the sender at this address in one of its broadcasts. Return (the version, the
        memory with it; None: it is not later than `has`). memory: returns the memory for a version of that number and
        size in bytes; its first `VERSION_BYTES` are not received."""
        groups = member_state(os.getpid(), self._address.removeprefix(SLICED)).groups
        for left in reversed(range(TRIES)):
            peer, version, index = request_version(address, NOTHING)
            with peer:
                if version <= has:
                    return version, None
                offer = msgspec.msgpack.decode(index, type=Offer)
                require_backend(offer.backend, socket.gethostname())
                memory(version, offer.num_bytes)  # a host without space fails before others wait for it
                try:
                    version, into, holds = _received(groups, address, peer, memory, offer.backend)
                except BROKEN as e:
                    groups.pop(address, None)
                    if not left:
                        raise SyncError(f"version {version}: its broadcast broke off {TRIES} times: {e}") from e
                    continue
            if holds != version:
                raise SyncError(f"version {version} was written over by {holds} while it was read")
            return version, into
        raise AssertionError("the last try ends")


def _received(
    groups: dict[str, BroadcastGroup],
    address: str,
    peer: socket.socket,
    memory: Callable[[int, int], Tensor],
    backend: str,
) -> tuple[int, Tensor, int]:
    """Take part in the next broadcast of a sender. Return (the version that was received, its memory, the version that
    the sender had afterwards). groups: those of this process, by the address of their sender."""
    peer.settimeout(FETCH_S)
    _send_message(peer, JoinRequest(this_host(), f"{this_host()}-{os.getpid()}"))
    begun = _receive_message(peer, RoundStart)
    into = memory(begun.version, begun.num_bytes)
    if address not in groups or groups[address].name != begun.group:
        groups.pop(address, None)  # its connections end first
        at = address.rpartition("/")[0].rpartition(":")[0]
        store = dist.TCPStore(at, begun.port, timeout=timedelta(seconds=MEMBER_S))
        groups[address] = BroadcastGroup(begun.group, store, begun.rank, begun.size, backend)
    groups[address].broadcast(into[VERSION_BYTES:])
    peer.settimeout(MEMBER_S)
    (holds,) = VERSION.unpack(received(peer, VERSION.size))
    return begun.version, into, holds


@functools.lru_cache(maxsize=1)
def member_state(pid: int, address: str) -> MemberState:
    """Return the state of this process (`pid`) for the trainer at this address."""
    return MemberState()


def open_weights(address: str) -> CollectiveStream:
    return CollectiveStream(address)


def require_backend(backend: str, where: str) -> None:
    """Raise Refused if the backend is nccl and this process has no CUDA device for it."""
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise Refused(f"sync.engine_options.backend=nccl: {where} has no CUDA device for NCCL; leave it out (gloo)")


def _version_of(path: Path) -> int:
    with contextlib.suppress(SyncError, ValueError):  # it was deleted, or has no bytes yet
        return ShmStream(path).version
    return NOTHING


def _send_message(peer: socket.socket, what: msgspec.Struct) -> None:
    found = msgspec.msgpack.encode(what)
    peer.sendall(VERSION.pack(len(found)) + found)


def _receive_message(peer: socket.socket, kind: type[T]) -> T:
    (size,) = VERSION.unpack(received(peer, VERSION.size))
    return msgspec.msgpack.decode(received(peer, size), type=kind)


def build(options: Collective, context: SyncContext) -> LocalCheckpointEngine:
    outlet = CollectiveOutlet(host=options.host, backend=options.backend, gather_s=options.gather_s)
    return engine_of(outlet, context, end, f"{PREFIX}-*-{outlet.tag}")  # the files of this host
