"""Weights over the network: the trainer's host sends a version to every other host once.

A version is stored in shared memory (shm.py), on the trainer's host and on each host with replicas: the first replica
of a host fetches it there, and the others read it. With `delta`, a host that has the version before gets only the
changes since, bit for bit: positions and values of each tensor, or the whole tensor if that is shorter. For that the
trainer's host keeps the version before too. After the last tensor the sender confirms the version that it has."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from verl.checkpoint.safetensors_file import host_bytes
from verl.file_lock import file_lock
from verl.weight_sync.base import Entry, SyncContext, SyncError, TensorStream, dtype_name
from verl.weight_sync.connections import (
    PIECE_BYTES,
    QUIET_S,
    connected,
    filled,
    has_address,
    listening,
    received,
    tag_of,
    unreachable,
)
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.options import Tcp
from verl.weight_sync.relay import RelayOutlet
from verl.weight_sync.shm import (
    PREFIX,
    SHM,
    OneHostParts,
    ShmOutlet,
    ShmStream,
    end,
    remove_at_exit,
    remove_stale_segments,
)
from verl.weight_sync.slices import SLICED, RankSlices, SlicedVersion, put_together, slice_at

NOTHING = -1  # the version of a host that has none
TABLE = -2  # requests the table of a version in slices
FETCH_S = 600.0  # to wait for another process of this host that fetches
ASK = struct.Struct("<32sq")  # the key, and the version that the replica has
ANSWER = struct.Struct("<qq")  # the version, and the bytes of the index
VERSION = struct.Struct("<q")
POSITION = torch.int32
WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


Changes = dict[str, "tuple[Tensor, Tensor] | None"]  # name -> positions and values, None: too many


class SentTensor(msgspec.Struct, array_like=True):
    """The head of a tensor in an answer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    how: Literal["whole", "changes", "same"]
    """whole: all bytes follow · changes: positions and values of the changed elements follow · same: nothing
    follows."""
    count: int
    """The number of elements that follow."""


class TcpOutlet(OneHostParts):
    """The `Outlet` over connections. It can be pickled until it has staged something, and is used by one process. host:
    the address by which replicas reach this machine; None: that of its default route."""

    transport = "verl.weight_sync.tcp:open_weights"
    per_rank = True

    def __init__(self, *, host: str | None = None, delta: bool = False) -> None:
        self._host, self._delta = host, delta
        self._table: tuple[int, bytes] = (NOTHING, b"")  # of the latest version in slices
        self._key, self._address = secrets.token_hex(16), ""
        self._shm: ShmOutlet | None = None
        self._held: tuple[ShmStream, Changes] | None = None  # a version, and the changes since the one before

    @property
    def tag(self) -> str:
        """The part of file names that identifies this sender's files on all hosts."""
        return tag_of(self._key)

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        self._memory().stage(version, shapes, tensors)
        return self.end(version)

    def begin(self, version: int, shapes: Mapping[str, Entry]) -> str:
        """Allocate the segment of a version, without tensors, and return its path."""
        return self._memory().begin(version, shapes)

    def begin_slices(self, version: int) -> str:
        """Return "": each rank stores its slices in the memory of its own host."""
        return ""

    def stage_slices(
        self, place: str, rank: int, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
    ) -> str:
        """Store the slices of this rank and return the address at which this process serves them."""
        if rank and self._host is not None and not has_address(self._host):
            self._host = None  # it is of the first rank's machine
        self._memory("-slices").stage(version, shapes, tensors)
        return self.end(version)

    def join_slices(self, place: str, table: SlicedVersion) -> str:
        """Serve the table of a version, of which all ranks have stored their slices, and return its address."""
        self._memory("-slices")
        self._table = table.version, msgspec.msgpack.encode(table)
        return SLICED + self._address

    def release_slices(self, version: int) -> None:
        """Mark the slices of this rank as read by all replicas: their memory may be reused."""
        if self._held is not None:
            self._held[0].release(version)

    def end(self, version: int) -> str:
        """Mark the version as whole, with `delta` find what changed since the version before, and return the
        address."""
        assert self._shm is not None
        now, changes = ShmStream(Path(self._shm.end(version))), Changes({})
        if self._delta and self._held is not None and self._held[0].version == version - 1:
            old = dict(self._held[0].views())
            both = {name: (old[name], new) for name, new in now.views() if name in old}
            with ThreadPoolExecutor(torch.get_num_threads(), "changes") as pool:
                changes = dict(zip(both, pool.map(_changes, *zip(*both.values())), strict=True))
        self._held = (now, changes)
        return self._address

    def _memory(self, kind: str = "") -> ShmOutlet:
        """Return the outlet into this host's memory; serve it from now on. kind: the end of its name, for segments that
        are no whole versions."""
        if not self._address:
            self._serve()
        if self._shm is None:
            self._shm = ShmOutlet(f"{PREFIX}-{os.getpid()}-{self.tag}{kind}", two=self._delta)
        return self._shm

    def _serve(self) -> None:
        at = listening(self._host, self._key, ASK, self._answer)
        self._address = f"{at}/{self._key}"

    def _answer(self, peer: socket.socket, has: int) -> None:
        """Send the latest version to one host, or `NOTHING` if no version is whole. A connection that the host closes
        is not an error."""
        with peer, contextlib.suppress(OSError):
            peer.settimeout(QUIET_S)
            if has == TABLE:
                version, table = self._table
                peer.sendall(ANSWER.pack(version, len(table)) + table)
            elif self._held is not None and self._held[0].version > NOTHING:
                self._send_version(peer, has)
            else:
                peer.sendall(ANSWER.pack(NOTHING, 0))

    def _send_version(self, peer: socket.socket, has: int) -> None:
        """Send the latest version to a host that has version `has`."""
        assert self._held is not None
        now, changes = self._held
        _send(peer, now, changes if has == now.version - 1 else {})


class TcpStream:
    """The `TensorStream` of one transfer of the trainer's latest version. has: the version that the reader has already
    · before: its tensors."""

    def __init__(self, address: str, has: int = NOTHING, before: Mapping[str, Tensor] | None = None) -> None:
        self._address, self._has, self._before = address, has, before or {}
        self._peer: socket.socket | None = None  # connected, its index received
        self._parts: list[SentTensor] = []
        self._coming = NOTHING

    @property
    def version(self) -> int:
        if self._peer is None:
            self._ask()
        return self._coming

    @property
    def shapes(self) -> dict[str, Entry]:
        """The entries of the tensors that follow."""
        return {part.name: Entry(part.shape, part.dtype) for part in self._parts}

    def _ask(self) -> None:
        self._peer, self._coming, index = request_version(self._address, self._has)
        self._parts = msgspec.msgpack.decode(index, type=list[SentTensor])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        version = self.version
        assert self._peer is not None
        with self._peer as peer:
            try:
                for part in self._parts:
                    yield part.name, _read(peer, part, self._before.get(part.name))
                (holds,) = VERSION.unpack(received(peer, VERSION.size))
            except OSError as e:
                raise SyncError(f"version {version}: the trainer's weights ended on the way: {e}") from e
        if holds != version:
            raise SyncError(f"version {version} was written over by {holds} while it was read")

    def close(self) -> None:
        """End the connection of a version that is not read, or not to the end."""
        if self._peer is not None:
            self._peer.close()


class HostStream(TensorStream):
    """The `TensorStream` of a sender's version in this host's shared memory, which is fetched first if the host does
    not have it."""

    ranks_at_once = 8
    """The number of ranks that slices are read from at the same time."""

    def __init__(self, address: str) -> None:
        self._address, self._tag = address, tag_of(address.rpartition("/")[2])
        self._found: ShmStream | None = None

    @property
    def version(self) -> int:
        if self._found is None:
            with _one_at_a_time():
                remove_stale_segments()
                self._found = self._fetched()
        return self._found.version

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._fetched_once().tensors()

    def segment(self) -> str:
        return self._fetched_once().segment()

    def release(self, version: int) -> None:
        for path in self._files():
            ShmStream(path).release(version)

    def _fetched_once(self) -> ShmStream:
        assert self.version > NOTHING and self._found is not None
        return self._found

    def _files(self) -> Iterator[Path]:
        """Return this sender's files on this host."""
        return SHM.glob(f"{PREFIX}-*-{self._tag}-?")

    def _fetched(self) -> ShmStream:
        paths = {path.name[-1]: path for path in self._files()}
        here = max((ShmStream(path) for path in paths.values()), default=None, key=lambda found: found.version)
        own = f"{PREFIX}-{os.getpid()}-{self._tag}"
        remove_at_exit(os.getpid(), own)
        return self._newer(here, lambda turn: paths.get(turn, SHM / f"{own}-{turn}"))

    def _newer(self, here: ShmStream | None, place: Callable[[str], Path]) -> ShmStream:
        """Fetch the trainer's version and return its file. `place` returns the path of the file for a turn ("0", "1").
        Return `here`, the file that this host has, if its version is the same or later: on the trainer's own host a
        version is staged before it is published."""
        if self._address.startswith(SLICED):
            return self._assembled(here, place)
        has, before = (NOTHING, None) if here is None else (here.version, dict(here.views()))
        stream = TcpStream(self._address, has, before)
        try:
            if here is not None and stream.version <= has:
                return here
            outlet = ShmOutlet(place(str(stream.version % 2)).name.rpartition("-")[0])
            return ShmStream(Path(outlet.stage(stream.version, stream.shapes, stream.tensors())))
        finally:
            stream.close()

    def _assembled(self, here: ShmStream | None, place: Callable[[str], Path]) -> ShmStream:
        """Read the slices of the trainer's version from every rank. The result is as that of `_newer`."""
        peer, version, found = request_version(self._address.removeprefix(SLICED), TABLE)
        peer.close()
        if here is not None and version <= here.version:
            return here
        table = msgspec.msgpack.decode(found, type=SlicedVersion)
        outlet = ShmOutlet(place(str(version % 2)).name.rpartition("-")[0])
        return put_together(table, outlet, partial(self._slices, table, here), at_once=self.ranks_at_once)

    def _slices(self, table: SlicedVersion, here: ShmStream | None, of: RankSlices) -> Iterator[tuple[str, Tensor]]:
        """Yield the slices of one rank. here: the version that this host has, of which the rank may send changes."""
        has, before = NOTHING, dict[str, Tensor]()
        if here is not None and here.version == table.version - 1:
            views, has = dict(here.views()), here.version
            before = {str(number): slice_at(views[name], spans) for number, (name, spans) in enumerate(of.slices)}
        stream = TcpStream(of.address, has, before)
        try:
            if stream.version != table.version:
                raise SyncError(f"it holds version {stream.version} by now")
            yield from stream.tensors()
        finally:
            stream.close()


def request_version(address: str, has: int) -> tuple[socket.socket, int, bytes]:
    """Request the latest version from the trainer, for a host that has version `has`. Return (the connection, the
    version, its encoded index). Raise SyncError if no version is whole."""
    place, _, key = address.rpartition("/")
    peer = connected(place)
    try:
        peer.sendall(ASK.pack(key.encode(), has))
        version, size = ANSWER.unpack(received(peer, ANSWER.size))
        if version > NOTHING:
            return peer, version, received(peer, size)
    except OSError as e:
        peer.close()
        raise unreachable(place, e) from e
    peer.close()
    raise SyncError(f"the trainer at {place} has no whole version yet: it stages the next one")


def open_weights(address: str) -> HostStream:
    return HostStream(address)


def _one_at_a_time() -> AbstractContextManager[None]:
    """Let one of this user's processes on this host fetch at a time; the others wait and then find the result. Raise
    SyncError after `FETCH_S`."""
    late = SyncError(f"another process of this host was fetching weights for {FETCH_S:g} s")
    return file_lock(SHM / f"verl-fetch.{os.getuid()}.lock", FETCH_S, late)


def _send(peer: socket.socket, now: ShmStream, changes: Changes) -> None:
    """Send a version: of a tensor with known changes only these, of every other tensor the whole."""
    version, parts, payload = now.version, [], []
    for name, tensor in now.views():
        found = changes.get(name)
        how: Literal["whole", "changes", "same"] = "whole"
        if found is not None:
            how = "changes" if len(found[0]) else "same"
        count = len(found[0]) if found is not None else tensor.numel()
        parts.append(SentTensor(name, dtype_name(tensor), tuple(tensor.shape), how, count))
        payload += [tensor] if found is None else [*found] if len(found[0]) else []
    index = msgspec.msgpack.encode(parts)
    peer.sendall(ANSWER.pack(version, len(index)) + index)
    for tensor in payload:
        content = host_bytes(tensor)
        for start in range(0, len(content), PIECE_BYTES):
            peer.sendall(content[start : start + PIECE_BYTES])
    peer.sendall(VERSION.pack(now.version))


def _changes(before: Tensor, now: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (positions [c] int32, values [c]) of the elements that differ in any bit; None if these take more than
    half of the tensor's bytes."""
    if before.shape != now.shape or before.dtype != now.dtype or now.numel() > torch.iinfo(POSITION).max:
        return None
    size = now.element_size()
    old, new = (np.frombuffer(host_bytes(tensor), np.uint8) for tensor in (before, now))
    eights = len(new) // 8  # most of them are unchanged: they are skipped first
    a, b = (whole[: 8 * eights].view(np.int64) for whole in (old, new))
    at = np.flatnonzero(a != b)
    within = np.flatnonzero((a.take(at) ^ b.take(at)).view(WORDS[size]) != 0).astype(np.int32)
    shift = (8 // size).bit_length() - 1
    found = (at.astype(np.int32) << shift).take(within >> shift) + (within & (8 // size - 1))
    rest = [whole[8 * eights :].view(WORDS[size]) for whole in (old, new)]
    found = np.concatenate([found, (np.flatnonzero(rest[0] != rest[1]) + (eights << shift)).astype(np.int32)])
    if 2 * len(found) * (POSITION.itemsize + size) > len(new):
        return None
    return torch.from_numpy(found), torch.from_numpy(new.view(WORDS[size])[found]).view(now.dtype)


def _read(peer: socket.socket, part: SentTensor, before: Tensor | None) -> Tensor:
    dtype = vars(torch)[part.dtype]
    if part.how == "whole":
        return _fetched(peer, part.shape, dtype)
    if before is None or tuple(before.shape) != part.shape or before.dtype != dtype:
        raise SyncError(f"{part.name}: the trainer tells its changes, and what they are of is not here")
    if part.how == "same":
        return before
    positions, values = _fetched(peer, (part.count,), POSITION), _fetched(peer, (part.count,), dtype)
    now = before.clone(memory_format=torch.contiguous_format)  # a reader may still use it
    now.view(-1)[positions.long()] = values
    return now


def _fetched(peer: socket.socket, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    if math.prod(shape):
        filled(peer, memoryview(out.view(-1).view(torch.uint8).numpy().data))
    return out


def build(options: Tcp, context: SyncContext) -> LocalCheckpointEngine:
    if options.bucket_mb is not None:
        buckets = RelayOutlet(options.bucket_mb << 20, host=options.host)
        return engine_of(buckets, context, end, f"{PREFIX}-*-{buckets.tag}")  # the files of this host
    outlet = TcpOutlet(host=options.host, delta=options.delta)
    return engine_of(outlet, context, end, f"{PREFIX}-*-{outlet.tag}")  # the files of this host
