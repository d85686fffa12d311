"""The keeper of a shared queue: its index and its segments of shared memory, in the process that made it.

A segment is a file of /dev/shm: a page with its generation, then what was written. One process at a time writes into
it; once it is full, and all of its rows are gone, it is idle and is used again while its pages are warm.
Who reads holds a shared lock (flock) on the file as long as a view of it lives; the kernel takes it back when a process
dies. A segment is given out again only under the exclusive lock, with the next generation: a reader that was told of
an older one sees so after it has locked, and asks again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl.leftovers import own_folder
from verl.transfer_queue.index import Answer, Asked, Commit, Found, Full, Index, Refused, never_fit

ROOT, PREFIX = Path("/dev/shm"), "verl-queue-"
PAGE = 4096
SMALLEST, LARGEST = 64 << 10, 16 << 20  # bytes of a segment that takes several writes
GENERATION = struct.Struct("<Q")
LENGTH = struct.Struct("<I")
HERE = 0  # the client number of the process that made the queue


class Reserve(msgspec.Struct, array_like=True, tag=True):
    """A segment for `nbytes`. put: for new rows."""

    nbytes: int
    put: bool


class Store(msgspec.Struct, array_like=True, tag=True):
    """What was written into a segment. seal: it takes no further writes."""

    commit: Commit | None
    block: int
    seal: bool


class Space(msgspec.Struct, tag=True):
    """A segment that is now the client's. backed: its first bytes that have pages · several: writes fit into it."""

    number: int
    size: int
    generation: int
    backed: int
    several: bool


Request = Reserve | Store | Asked
Reply = Space | Full | Answer


@dataclass(slots=True)
class _Segment:
    number: int
    size: int
    owner: int | None  # the client that writes into it
    generation: int = 1
    backed: int = 0


class Keeper:
    """Answers the requests of all processes, one at a time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.segment_bytes = max(SMALLEST, min(LARGEST, max_bytes // 256 // PAGE * PAGE))
        self._index = Index()
        self._segments: dict[int, _Segment] = {}
        self._made = 0
        self._lock = threading.Lock()

    def answer(self, client: int, request: Request) -> Reply:
        with self._lock:
            match request:
                case Reserve():
                    return self._reserve(client, request)
                case Store():
                    reply = None if request.commit is None else self._index.answer(request.commit)
                    if request.seal:
                        self._segments[request.block].owner = None
                    return reply
            reply = self._index.answer(request)
            if isinstance(reply, Found):
                reply.blocks = {b: self._segments[b].generation for b in reply.blocks}
            return reply

    def leave(self, client: int) -> None:
        """A process is gone: what it wrote and told of stays, the rest is free."""
        with self._lock:
            for segment in self._segments.values():
                if segment.owner == client:
                    segment.owner = None

    def _reserve(self, client: int, asked: Reserve) -> Space | Full | Refused:
        several = asked.nbytes <= self.segment_bytes // 4
        size = self.segment_bytes if several else _size_class(asked.nbytes)
        limit = self.max_bytes // 2 if asked.put else self.max_bytes
        if size > limit:
            return never_fit(asked.nbytes, "new rows" if asked.put else "columns", limit, self.max_bytes)
        idle = [s for s in self._segments.values() if s.owner is None and not self._index.holds(s.number)]
        used = sum(s.size for s in self._segments.values())
        if used - sum(s.size for s in idle) + size > limit:
            return Full(used - sum(s.size for s in idle), limit)
        for segment in sorted((s for s in idle if size <= s.size <= 4 * size), key=lambda s: (s.size, -s.backed)):
            if self._take_back(segment):
                segment.owner = client
                return Space(segment.number, segment.size, segment.generation, segment.backed, several)
        for segment in idle:
            if used + size > self.max_bytes and self._take_back(segment, remove=True):
                used -= segment.size
        if used + size > self.max_bytes:
            return Full(used, self.max_bytes)
        self._made += 1
        made = self._segments[self._made] = _Segment(self._made, size, client)
        return Space(made.number, size, made.generation, 0, several)

    def _take_back(self, segment: _Segment, *, remove: bool = False) -> bool:
        """Under the exclusive lock, the next generation or the end of a segment; False while somebody reads it."""
        path = self.folder / str(segment.number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # its writer may have died before it made the file
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                path.unlink()
                os.ftruncate(fd, 0)  # the pages go, whoever has a mapping
                del self._segments[segment.number]
            else:
                os.pwrite(fd, GENERATION.pack(segment.generation + 1), 0)
                segment.generation, segment.backed = segment.generation + 1, os.fstat(fd).st_blocks * 512
            return True
        except OSError:  # locked, or not a page is left for its head
            return False
        finally:
            os.close(fd)


def _size_class(nbytes: int) -> int:
    """Four to a doubling, so that a segment suits the next write of about that size."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 3))
    return PAGE + -(-nbytes // step) * step


def make_folder() -> tuple[Path, int]:
    """See `own_folder`."""
    return own_folder(ROOT, PREFIX)


# -- the socket --------------------------------------------------------------------------------------------------------


class Server:
    """The keeper over a Unix socket, a thread per process that has connected."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._sockets: set[socket.socket] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(keeper.folder / "index"))
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="queue", daemon=True).start()

    def close(self) -> None:
        """Of the process that made it: who is connected sees the end."""
        for one in (self._socket, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """In a fork: the sockets are the parent's, and end with it."""
        for one in (self._socket, *self._sockets):
            one.close()

    def _accept(self) -> None:
        client = HERE
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                client += 1
                self._sockets.add(connection)
                threading.Thread(target=self._serve, args=(client, connection), name="queue", daemon=True).start()

    def _serve(self, client: int, connection: socket.socket) -> None:
        decode, encode = msgspec.msgpack.Decoder(Request).decode, msgspec.msgpack.Encoder().encode
        try:
            with contextlib.suppress(OSError, EOFError):  # the process is gone
                while True:
                    send(connection, encode(self._keeper.answer(client, decode(receive(connection)))))
        finally:
            self._sockets.discard(connection)
            connection.close()
            self._keeper.leave(client)


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytearray:
    """A message; EOFError where the other side has ended."""
    return _exactly(connection, LENGTH.unpack(_exactly(connection, LENGTH.size))[0])


def _exactly(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
