"""TransferQueue of several processes on one host: the columns are in shared memory, their index is in the process that
made the queue.

The queue object is a handle that can be pickled or forked: it sends ids and receives addresses (`segments.py`), in one
round trip per call. Bytes are written once, into a segment of /dev/shm, and are read in place."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from verl.batch import Ragged
from verl.errors import Refused
from verl.transfer_queue.index import (
    Commit,
    Drop,
    Find,
    Full,
    Having,
    Names,
    Rejected,
    Size,
    encoded,
    full,
    pick,
    waited,
)
from verl.transfer_queue.media import FolderMedia
from verl.transfer_queue.options import Shared
from verl.transfer_queue.packing import Parcel, parcel_of_columns, parcel_of_samples, unpack
from verl.transfer_queue.segments import (
    GENERATION,
    HERE,
    PAGE,
    ROOT,
    Keeper,
    Reply,
    Request,
    Reserve,
    SegmentServer,
    Space,
    Store,
    make_folder,
    receive_message,
    send_message,
)
from verl.types import Refs, Sample, ref_of

RETRY_S = 0.02  # between two attempts of a put to get space
STRIDE = 1 << 20  # the fewest bytes of a segment that are allocated at a time


def build(options: Shared) -> SharedQueue:
    """Return a new queue, which removes its segments when it ends. Raise Refused if /dev/shm has no space for it."""
    if not ROOT.is_dir():
        raise Refused(f"queue.engine=shared needs {ROOT}, which this machine does not have; use queue.engine=memory")
    folder, lock = make_folder()
    room = os.statvfs(ROOT)
    free = room.f_bavail * room.f_frsize
    max_bytes = options.max_bytes or min(free, psutil.virtual_memory().available) // 2
    if max_bytes > free or max_bytes < 1 << 20:
        shutil.rmtree(folder)
        os.close(lock)
        raise Refused(
            f"queue.engine_options.max_bytes={max_bytes:,}: {ROOT} has {free:,} bytes free, and a queue needs "
            "at least 1 MiB; give it more (docker: --shm-size) or lower the number"
        )
    keeper = Keeper(folder, max_bytes)
    server = SegmentServer(keeper)
    queue = SharedQueue(folder, options.timeout_s, keeper)
    end = weakref.finalize(queue, _close, os.getpid(), folder, server, lock)
    os.register_at_fork(after_in_child=partial(_forget, weakref.ref(server), lock, end))
    return queue


def _close(pid: int, folder: Path, server: SegmentServer, lock: int) -> None:
    if os.getpid() == pid:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _forget(server: Callable[[], SegmentServer | None], lock: int, end: weakref.finalize) -> None:
    """Close the server's socket and the lock in a forked process: other processes use them to detect the parent's
    end."""
    if end.detach() and (found := server()):
        found.forget()
        os.close(lock)


class SharedQueue:
    """A `TransferQueue` in shared memory. A read result may be a view of shared memory, which is unchanged until the
    reader releases it. It must not be written: an attempt ends the process."""

    def __init__(self, folder: Path, timeout_s: float, keeper: Keeper | None = None) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self.media = FolderMedia(folder / "media")
        self._process = _Process(folder, timeout_s, keeper)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedQueue, (self._folder, self._timeout_s)

    @property
    def _here(self) -> _Process:
        if self._process.pid != os.getpid():  # a fork
            self._process = _Process(self._folder, self._timeout_s, None)
        return self._process

    async def put(self, samples: Sequence[Sample]) -> Refs:
        refs, parcel = Refs(ref_of(s) for s in samples), parcel_of_samples(samples)
        deadline_s = time.monotonic() + self._timeout_s
        while isinstance(region := self._here.reserve(parcel.nbytes, put=True), Full):
            if time.monotonic() > deadline_s:
                raise waited(len(refs), self._timeout_s, region, parcel.nbytes)
            await asyncio.sleep(RETRY_S)
        self._here.store(region, parcel, refs.ids, new=True)
        return refs

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        request, before = Find(refs.ids, list(columns)), None
        while True:
            found = self._here.ask(request)
            blocks = self._here.lease(found.blocks)
            if blocks is not None:
                return unpack(columns, found, blocks)
            if found.blocks == before:
                raise FileNotFoundError(f"somebody else has removed what the queue holds in {self._folder}")
            before = found.blocks

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        parcel = parcel_of_columns(len(refs), columns)
        region = self._here.reserve(parcel.nbytes, put=False)
        if isinstance(region, Full):
            raise MemoryError(f"columns {', '.join(columns)} do not fit into the queue: {full(region, parcel.nbytes)}")
        self._here.store(region, parcel, refs.ids, new=False)

    def having(self, refs: Refs, column: str) -> Refs:
        return pick(refs, self._here.ask(Having(refs.ids, column)))

    def columns(self, refs: Refs) -> list[str]:
        return self._here.ask(Names(refs.ids))

    def drop(self, refs: Refs) -> None:
        self._here.ask(Drop(refs.ids))

    def __len__(self) -> int:
        return self._here.ask(Size())


# -- one process's side ------------------------------------------------------------------------------------------------


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Mapped:
    """A segment in this process's memory, mapped as long as an array over it exists."""

    def __init__(self, fd: int, size: int, protection: int) -> None:
        address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)  # the mmap module would keep the file open
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {size:,} bytes of shared memory failed")
        self._size = size
        self._address = address
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    def __del__(self) -> None:
        if "_address" in vars(self):
            _libc.munmap(self._address, self._size)


class _Lease:
    """A reader's lock on a segment, which is not reused until the last view of its bytes is released."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        fcntl.flock(fd, fcntl.LOCK_SH)

    def show(self, mapped: _Mapped) -> None:
        self._mapped, self.__array_interface__ = mapped, mapped.__array_interface__

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a fork the lock is the parent's
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment that this process writes into."""

    space: Space
    at: int = PAGE
    """The first free byte."""
    writers: int = 0
    """Threads that still write into their regions."""


@dataclass(frozen=True, slots=True)
class _Region:
    """A reserved range of bytes in a segment."""

    segment: _Segment
    start: int
    nbytes: int


class _Process:
    """The state of a queue in one process: its connection, its mappings, the segment that it fills."""

    def __init__(self, folder: Path, timeout_s: float, keeper: Keeper | None) -> None:
        self.pid = os.getpid()
        self._folder, self._timeout_s, self._keeper = folder, timeout_s, keeper
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._decode = msgspec.msgpack.Decoder(Reply).decode
        self._filled: _Segment | None = None
        self._written: dict[int, np.ndarray] = {}  # by number
        self._read: dict[int, _Mapped] = {}

    def ask(self, request: Request) -> Any:
        """Send a request to the keeper and return its answer. Raise ValueError if the index rejects it, TimeoutError if
        the answer is late, and ConnectionError if the keeper's process has ended."""
        if self._keeper is not None:
            reply: Reply = self._keeper.answer(HERE, request)
        else:
            try:
                reply = self._round_trip(request)
            except TimeoutError:
                what = f"{type(request).__name__.lower()} was not answered in {self._timeout_s:g} s"
                raise TimeoutError(f"the process that holds the queue is busy or stopped: {what}") from None
            except (OSError, EOFError):
                raise ConnectionError("the process that holds the queue is gone") from None
        if isinstance(reply, Rejected):
            raise reply.error()
        return reply

    def _round_trip(self, request: Request) -> Reply:
        with self._lock, contextlib.ExitStack() as broken:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(self._timeout_s)
                self._socket.connect(str(self._folder / "index"))
            broken.callback(self._socket.close)  # a late answer must not become the answer to the next call
            send_message(self._socket, encoded(request))
            reply = self._decode(receive_message(self._socket))
            broken.pop_all()
            return reply

    # -- writing -------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, put: bool) -> _Region | Full:
        """Reserve shared memory for this thread to fill before it calls `store`; return `Full` if there is no space."""
        with self._lock:
            segment, before = self._filled, self._filled
            if segment is None or segment.at + nbytes > segment.space.size:
                space = self.ask(Reserve(nbytes, put))
                if isinstance(space, Full):
                    self._filled, segment = None, None
                else:
                    segment = _Segment(space)
                    self._filled = segment if space.several else before
            if before is not None and before is not self._filled and not before.writers:
                self.ask(Store(None, before.space.number, True))
            if segment is None:
                return space
            region = _Region(segment, segment.at, nbytes)
            segment.at += nbytes
            segment.writers += 1
            try:
                self._back(segment, region.start + nbytes)
            except OSError as exc:
                self._end(segment, None)
                if exc.errno != errno.ENOSPC:
                    raise
                raise MemoryError(f"{ROOT} is full: no room for {nbytes:,} bytes of the queue; see df {ROOT}") from None
            return region

    def store(self, region: _Region, parcel: Parcel, ids: list[str], *, new: bool) -> None:
        """Fill a reserved region, then commit it to the index: the index never names a row that is not written."""
        commit, number = None, region.segment.space.number
        try:
            parcel.fill(self._written[number][region.start : region.start + region.nbytes])
            commit = Commit(ids, number, region.start, parcel.columns, new)
        finally:
            with self._lock:
                self._end(region.segment, commit)

    def _end(self, segment: _Segment, commit: Commit | None) -> None:
        """End a write; the caller holds the lock. The last writer of a segment that is full seals it."""
        segment.writers -= 1
        seal = not segment.writers and segment is not self._filled
        if commit or seal:
            self.ask(Store(commit, segment.space.number, seal))

    def _back(self, segment: _Segment, end: int) -> None:
        """Allocate pages for the segment's first `end` bytes, and map it. Raise OSError if the disk is full: without
        this, a write to a page that cannot be allocated would end the process."""
        space = segment.space
        if end <= space.backed and space.number in self._written:
            return
        fd = os.open(self._folder / str(space.number), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, space.size)
            if end > space.backed:
                end = min(space.size, max(end, space.backed + STRIDE))
                os.posix_fallocate(fd, space.backed, end - space.backed)
                os.pwrite(fd, GENERATION.pack(space.generation), 0)
                space.backed = end
            if space.number not in self._written:
                self._prune()
                mapped = _Mapped(fd, space.size, mmap.PROT_READ | mmap.PROT_WRITE)
                self._written[space.number] = np.asarray(mapped)
        finally:
            os.close(fd)

    # -- reading -------------------------------------------------------------------------------------------------------

    def lease(self, blocks: Mapping[int, int]) -> dict[int, np.ndarray] | None:
        """Lock these segments (number -> generation) for reading and return their bytes; None if one of them was reused
        or removed since the index was read."""
        leased = {}
        for number, generation in blocks.items():
            try:
                fd = os.open(self._folder / str(number), os.O_RDONLY)
            except FileNotFoundError:
                return None
            lease = _Lease(fd)
            if os.pread(fd, GENERATION.size, 0) != GENERATION.pack(generation):
                return None
            with self._lock:
                if number not in self._read:
                    self._prune()
                    self._read[number] = _Mapped(fd, os.fstat(fd).st_size, mmap.PROT_READ)
                lease.show(self._read[number])
            leased[number] = np.asarray(lease)
        return leased

    def _prune(self) -> None:
        """Unmap segments that do not exist any more."""
        for mapped in (self._written, self._read):
            for number in [n for n in mapped if not (self._folder / str(n)).exists()]:
                del mapped[number]
