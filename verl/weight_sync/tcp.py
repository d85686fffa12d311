"""Weights over the network: the trainer keeps a version in its memory, and replicas of any host fetch it.

Two sets of buffers take turns, so that a version is written while a late replica may still read the one before; after
the last tensor the sender says which version the buffers hold by now. With `delta`, a replica that has the version
before gets what changed since, bit for bit: positions and values of each tensor, or the tensor where that is shorter.
"""

from __future__ import annotations

import functools
import hmac
import math
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
import torch
from torch import Tensor

from verl.weight_sync.base import Entry, SyncContext, SyncError
from verl.weight_sync.local import LocalCheckpointEngine
from verl.weight_sync.options import Tcp

NOTHING = -1  # a version
QUIET_S = 60.0  # to connect, and of a peer for a piece
PIECE_BYTES = 16 << 20
ASK = struct.Struct("<32sq")  # the key, and the version that the replica has
ANSWER = struct.Struct("<qq?")  # the version, the bytes of the index, and whether changes will be told of
VERSION = struct.Struct("<q")
POSITION = torch.int32
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(msgspec.Struct, array_like=True):
    """A tensor of an answer. how: its bytes follow · positions and values of `count` elements follow · nothing does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    how: Literal["whole", "changes", "same"]
    count: int


class TcpOutlet:
    """See `Outlet`; it can be pickled until it has staged something, and is used by one process. host: the address by
    which replicas reach this machine; None: that of its way out."""

    transport = "verl.weight_sync.tcp:open_weights"

    def __init__(self, *, host: str | None = None, delta: bool = False) -> None:
        self._host, self._delta = host, delta
        self._sets: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._holds = [NOTHING, NOTHING]
        self._changes: dict[str, tuple[Tensor, Tensor] | None] = {}  # since the version before; None: too many
        self._based_on = NOTHING  # the version that the changes are since
        self._key, self._address = b"", ""

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        if not self._address:
            self._address = self._serve()
        at = version % 2
        before = self._sets[1 - at] if self._delta and self._holds[1 - at] == version - 1 else {}
        self._holds[at], self._based_on, self._changes = NOTHING, NOTHING, {}
        kept = self._sets[at]
        for name in kept.keys() - shapes.keys():
            del kept[name]
        for name, tensor in tensors:
            into = kept.get(name)
            if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
                into = kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            into.copy_(tensor.detach())
            if name in before:
                self._changes[name] = _changes(before[name], into)
        if before:
            self._based_on = version - 1
        self._holds[at] = version
        return self._address

    def _serve(self) -> str:
        host = self._host or _way_out()
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._key = secrets.token_hex(16).encode()
        threading.Thread(target=self._accept, args=(listener,), name="weights", daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}/{self._key.decode()}"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=self._answer, args=(peer,), name="weights", daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        """One version for one replica. A peer that goes away or has no key is nobody's fault here."""
        with peer:
            peer.settimeout(QUIET_S)
            try:
                key, has = ASK.unpack(_received(peer, ASK.size))
                if hmac.compare_digest(key, self._key):
                    self._send(peer, has)
            except OSError:
                return

    def _send(self, peer: socket.socket, has: int) -> None:
        at = self._holds.index(max(self._holds))
        version, kept = self._holds[at], self._sets[at]
        changes = self._changes if has == self._based_on != NOTHING else {}
        parts, payload = [], []
        for name, tensor in list(kept.items()):
            found = changes.get(name)
            how: Literal["whole", "changes", "same"] = "whole"
            if found is not None:
                how = "changes" if len(found[0]) else "same"
            count = len(found[0]) if found is not None else tensor.numel()
            parts.append(Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), how, count))
            payload += [tensor] if found is None else [*found] if len(found[0]) else []
        index = msgspec.msgpack.encode(parts)
        peer.sendall(ANSWER.pack(version, len(index), self._delta) + index)
        for tensor in payload:
            content = _bytes(tensor) if tensor.numel() else memoryview(b"")
            for start in range(0, len(content), PIECE_BYTES):
                peer.sendall(content[start : start + PIECE_BYTES])
        peer.sendall(VERSION.pack(self._holds[at]))


class _Kept:
    """What this process read last from a sender that tells of changes."""

    def __init__(self) -> None:
        self.version = NOTHING
        self.tensors: dict[str, Tensor] = {}


class TcpStream:
    """See `TensorStream`: one reading of one version."""

    def __init__(self, address: str, kept: _Kept) -> None:
        self._address, self._kept = address, kept
        self._before = kept.tensors
        self._peer: socket.socket | None = None  # that has answered, and will send
        self._parts: list[Part] = []
        self._coming, self._keeps = NOTHING, False

    @property
    def version(self) -> int:
        if self._peer is None:
            self._ask()
        return self._coming

    def _ask(self) -> None:
        place, _, key = self._address.rpartition("/")
        host, _, port = place.rpartition(":")
        try:
            self._peer = socket.create_connection((host, int(port)), timeout=QUIET_S)
            self._peer.sendall(ASK.pack(key.encode(), self._kept.version))
            self._coming, size, self._keeps = ANSWER.unpack(_received(self._peer, ANSWER.size))
            self._parts = msgspec.msgpack.decode(_received(self._peer, size), type=list[Part])
        except OSError as e:
            raise SyncError(
                f"the trainer's weights cannot be fetched from {place}: {e}; is that address reachable from "
                f"{socket.gethostname()}? (sync.engine_options.host)"
            ) from e

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        version, kept = self.version, dict[str, Tensor]()
        assert self._peer is not None
        with self._peer as peer:
            try:
                for part in self._parts:
                    tensor = _read(peer, part, self._before.get(part.name))
                    if self._keeps:
                        kept[part.name] = tensor
                    yield part.name, tensor
                (holds,) = VERSION.unpack(_received(peer, VERSION.size))
            except OSError as e:
                raise SyncError(f"version {version}: the trainer's weights ended on the way: {e}") from e
        if holds != version:
            raise SyncError(f"version {version} was written over by {holds} while it was read")
        if self._keeps:
            self._kept.version, self._kept.tensors = version, kept

    def release(self, version: int) -> None:
        """The buffers are used again."""


@functools.cache
def _kept_of(address: str) -> _Kept:
    return _Kept()


def open_weights(address: str) -> TcpStream:
    return TcpStream(address, _kept_of(address))


def _changes(before: Tensor, now: Tensor) -> tuple[Tensor, Tensor] | None:
    """(positions [c] int32, values [c]) of the elements whose bits differ; None where these are not half as long."""
    if before.shape != now.shape or before.dtype != now.dtype or now.numel() > torch.iinfo(POSITION).max:
        return None
    word = WORDS[now.element_size()]
    differs = (before.view(-1).view(word) != now.view(-1).view(word)).nonzero().view(-1)
    if 2 * len(differs) * (POSITION.itemsize + now.element_size()) > now.numel() * now.element_size():
        return None
    return differs.to(POSITION), now.view(-1)[differs]


def _read(peer: socket.socket, part: Part, before: Tensor | None) -> Tensor:
    dtype = vars(torch)[part.dtype]
    if part.how == "whole":
        return _fetched(peer, part.shape, dtype)
    if before is None or tuple(before.shape) != part.shape or before.dtype != dtype:
        raise SyncError(f"{part.name}: the trainer tells its changes, and what they are of is not here")
    if part.how == "same":
        return before
    positions, values = _fetched(peer, (part.count,), POSITION), _fetched(peer, (part.count,), dtype)
    now = before.clone()  # the engine may hold the one before
    now.view(-1)[positions.long()] = values
    return now


def _fetched(peer: socket.socket, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    if math.prod(shape):
        _receive(peer, _bytes(out))
    return out


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _received(peer: socket.socket, size: int) -> bytes:
    into = bytearray(size)
    _receive(peer, memoryview(into))
    return bytes(into)


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("the other end closed the connection")
        into = into[count:]


def _way_out() -> str:
    """The address of this machine that others see; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of no machine (RFC 5737)
        except OSError:  # no network but its own
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def build(options: Tcp, context: SyncContext) -> LocalCheckpointEngine:
    outlet = TcpOutlet(host=options.host, delta=options.delta)
    return LocalCheckpointEngine(probes=context.probes, tolerance=context.tolerance, outlet=outlet, copies=True)
