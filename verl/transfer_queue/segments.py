"""The keeper of a shared queue: its index and its segments of shared memory, in the process that made the queue.

A segment is a file of /dev/shm: a page with its generation, then the written bytes. One process at a time writes into
it. Once it is full and all of its rows are dropped, it is idle: it is reused, with the pages that it has. A reader has
a shared lock (flock) on the file as long as a view of it exists; the kernel releases the lock when the process dies. A
segment is reused only under the exclusive lock, and gets the next generation. A reader compares the generation after it
has locked: if its address is of an older one, it reads the index again."""

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
from verl.transfer_queue.index import Answer, CellIndex, Commit, Found, Full, IndexRequest, Rejected, never_fit

ROOT, PREFIX = Path("/dev/shm"), "verl-queue-"
PAGE = 4096
SMALLEST, LARGEST = 64 << 10, 16 << 20  # bytes of a segment for several writes
GENERATION = struct.Struct("<Q")
LENGTH = struct.Struct("<I")
HERE = 0  # the client number of the process that made the queue


class Reserve(msgspec.Struct, array_like=True, tag=True):
    """Request a segment with `nbytes` of free space. put: for new rows, which may use half of the queue."""

    nbytes: int
    put: bool


class Store(msgspec.Struct, array_like=True, tag=True):
    """Commit the bytes written into a segment. seal: no further writes follow."""

    commit: Commit | None
    block: int
    seal: bool


class Space(msgspec.Struct, tag=True):
    """A segment that the client may write into."""

    number: int
    size: int
    generation: int
    backed: int
    """The number of its bytes, from the first one, with allocated pages."""
    several: bool
    """Several writes fit into it."""


Request = Reserve | Store | IndexRequest
Reply = Space | Full | Answer


@dataclass(slots=True)
class _Segment:
    """A segment as the keeper knows it."""

    number: int
    size: int
    owner: int | None  # the client that writes into it
    generation: int = 1
    backed: int = 0


class Keeper:
    """The index and the segments of a queue. It answers the requests of all processes, one at a time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.segment_bytes = max(SMALLEST, min(LARGEST, max_bytes // 256 // PAGE * PAGE))
        self._index = CellIndex()
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
        """Release the segments of a process that has ended. Its committed rows remain."""
        with self._lock:
            for segment in self._segments.values():
                if segment.owner == client:
                    segment.owner = None

    def _reserve(self, client: int, request: Reserve) -> Space | Full | Rejected:
        several = request.nbytes <= self.segment_bytes // 4
        size = self.segment_bytes if several else _size_class(request.nbytes)
        limit = self.max_bytes // 2 if request.put else self.max_bytes
        if size > limit:
            return never_fit(request.nbytes, "new rows" if request.put else "columns", limit, self.max_bytes)
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
        """Take an idle segment for its next generation, or remove it, under the exclusive lock. Return False if it is
        still read, or no page is free."""
        path = self.folder / str(segment.number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # its writer may have died before the file existed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                path.unlink()
                os.ftruncate(fd, 0)  # frees the pages despite mappings
                del self._segments[segment.number]
            else:
                os.pwrite(fd, GENERATION.pack(segment.generation + 1), 0)
                segment.generation, segment.backed = segment.generation + 1, os.fstat(fd).st_blocks * 512
            return True
        except OSError:  # locked, or no page is free for its head
            return False
        finally:
            os.close(fd)


def _size_class(nbytes: int) -> int:
    """Return the size of a segment for one write: rounded up to one of four sizes per doubling, so that the segment
    fits later writes of about that size."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 3))
    return PAGE + -(-nbytes // step) * step


def make_folder() -> tuple[Path, int]:
    """Make the folder of a queue, as `own_folder` does."""
    return own_folder(ROOT, PREFIX)


# -- the socket --------------------------------------------------------------------------------------------------------


class SegmentServer:
    """Serves the keeper over a Unix socket, with a thread per connected process."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._sockets: set[socket.socket] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(keeper.folder / "index"))
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="queue", daemon=True).start()

    def close(self) -> None:
        """End all connections, in the process that made the server."""
        for one in (self._socket, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.forget()

    def forget(self) -> None:
        """Close the sockets in a forked process; they remain open in the parent."""
        for one in (self._socket, *self._sockets):
            one.close()

    def _accept(self) -> None:
        client = HERE
        with contextlib.suppress(OSError):  # the socket is closed
            while True:
                connection, _ = self._socket.accept()
                client += 1
                self._sockets.add(connection)
                threading.Thread(target=self._serve, args=(client, connection), name="queue", daemon=True).start()

    def _serve(self, client: int, connection: socket.socket) -> None:
        decode, encode = msgspec.msgpack.Decoder(Request).decode, msgspec.msgpack.Encoder().encode
        try:
            with contextlib.suppress(OSError, EOFError):  # the process has ended
                while True:
                    send_message(connection, encode(self._keeper.answer(client, decode(receive_message(connection)))))
        finally:
            self._sockets.discard(connection)
            connection.close()
            self._keeper.leave(client)


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message, preceded by its length."""
    connection.sendall(LENGTH.pack(len(message)) + message)


def receive_message(connection: socket.socket) -> bytearray:
    """Return a message. Raise EOFError if the other side has ended."""
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
