"""Buckets of weights (buckets.py) to other hosts: each of their replicas has a reader thread on the trainer's host that
forwards what it reads. The next bucket is sent when the replica's own memory holds the one before, so that a version
takes two buckets on the trainer's host and one for each remote replica, and no host has it whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Generator, Mapping
from pathlib import Path

import msgspec

from verl.weight_sync.base import Bucket, Entry, SyncError
from verl.weight_sync.buckets import BucketOutlet, BucketStream, TensorLocation, ledger_of
from verl.weight_sync.connections import PIECE_BYTES, connected, filled, listening, received, tag_of
from verl.weight_sync.shm import (
    PREFIX,
    SHM,
    TAIL_BYTES,
    ShmStream,
    blank,
    first_byte,
    remove_at_exit,
    remove_stale_segments,
)

QUIET_S = 600.0  # without progress of the other side, after which it counts as lost
ASK = struct.Struct("<32sqqq")  # the key; version, turn and reader
ROOM = struct.Struct("<qq")  # bytes of the longest index and of the largest bucket
HEAD = struct.Struct("<cqqd")  # kind; bytes of the index (or error text) and of the tensors; seconds of silence
BUCKET, WHOLE, BROKEN, READ = b"b", b"w", b"x", b"r"


class RelayOutlet(BucketOutlet):
    """A `BucketOutlet` that also serves other hosts. host: as in `TcpOutlet`."""

    transport = "verl.weight_sync.relay:open_weights"

    def __init__(self, bucket_bytes: int, *, host: str | None = None) -> None:
        super().__init__("", bucket_bytes)  # its name contains the id of the process that announces
        self._host, self._key, self._address = host, secrets.token_hex(16), ""

    @property
    def tag(self) -> str:
        """The part of file names that identifies this sender's files on all hosts."""
        return tag_of(self._key)

    def announce(self, shapes: Mapping[str, Entry]) -> str:
        if not self._address:
            remove_stale_segments()
            self.name = f"{PREFIX}-{os.getpid()}-{self.tag}"
            remove_at_exit(os.getpid(), self.name)
            super().announce(shapes)
            self._address = f"{listening(self._host, self._key, ASK, self._answer)}/{self._key}/{self.name}"
        return self._address

    def _answer(self, peer: socket.socket, version: int, turn: int, reader: int) -> None:
        """Send the buckets of a version to one reader. A connection that the reader closes is not an error."""
        with peer, contextlib.suppress(OSError):
            peer.settimeout(QUIET_S)
            self._pass_on(peer, BucketStream(f"{self.name}:{version}:{turn}:{reader}"))

    def _pass_on(self, peer: socket.socket, stream: BucketStream) -> None:
        peer.sendall(ROOM.pack(*self.room))
        try:
            with contextlib.closing(stream.buckets()) as buckets:
                for bucket in buckets:
                    found = ShmStream(Path(bucket.path))
                    parts, first = found.index
                    size = max((part.start + part.num_bytes for part in parts), default=0)
                    index = msgspec.msgpack.encode(parts)
                    peer.sendall(HEAD.pack(BUCKET, len(index), size, stream.quiet_s) + index)
                    content = memoryview(found.memory.numpy().data)[first : first + size]
                    for start in range(0, size, PIECE_BYTES):
                        peer.sendall(content[start : start + PIECE_BYTES])
                    received(peer, len(READ))
            peer.sendall(HEAD.pack(WHOLE, 0, 0, 0.0))
        except SyncError as e:
            why = str(e).encode()
            peer.sendall(HEAD.pack(BROKEN, len(why), 0, 0.0) + why)


class RelayStream(BucketStream):
    """The `TensorStream` of one reader and one version, sent by another host or by this one."""

    def __init__(self, address: str) -> None:
        at, self._key, rest = address.split("/", 2)
        super().__init__(rest)
        self._at = at

    def buckets(self) -> Generator[Bucket, None, None]:
        if ledger_of(self._name).exists():
            yield from super().buckets()
            return
        place = f"the sender of version {self._version} at {self._at}"
        with connected(self._at) as peer:
            try:
                peer.settimeout(QUIET_S)
                peer.sendall(ASK.pack(self._key.encode(), self._version, self._turn, self._reader))
                yield from self._received(peer)
            except OSError as e:
                raise SyncError(f"{place} is gone: {e}") from e

    def _received(self, peer: socket.socket) -> Generator[Bucket, None, None]:
        index_bytes, room = ROOM.unpack(received(peer, ROOM.size))
        own, first = f"{PREFIX}-{os.getpid()}-{tag_of(self._key)}-of", first_byte(index_bytes)
        remove_at_exit(os.getpid(), own)
        remove_stale_segments()
        path, segment = SHM / f"{own}-{self._reader}", None
        while True:
            kind, found, size, quiet_s = HEAD.unpack(received(peer, HEAD.size))
            index = received(peer, found)
            if kind == WHOLE:
                return
            if kind == BROKEN:
                raise SyncError(index.decode())
            peer.settimeout(quiet_s)
            segment = segment or self._blank(path, first + room + TAIL_BYTES)
            filled(peer, memoryview(segment.memory.numpy().data)[first : first + size])
            segment.describe(self._version, index, first)
            peer.sendall(READ)
            parts = msgspec.msgpack.decode(index, type=list[TensorLocation])
            yield Bucket(str(path), {part.name: part.checksum for part in parts}, segment.views)

    def _blank(self, path: Path, num_bytes: int) -> ShmStream:
        try:
            return blank(path, num_bytes)
        except OSError as e:
            raise SyncError(f"version {self._version}: {e}") from e


def open_weights(address: str) -> RelayStream:
    return RelayStream(address)
