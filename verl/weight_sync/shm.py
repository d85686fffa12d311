"""Weights through the shared memory of one host: the trainer writes a version, and every replica maps and reads it.

A file records its version. A reader checks it before the first tensor and after the last, and copies each tensor that
it keeps. Once all replicas have a version, or were given up, the next one is written into the same file; until then it
is written into a second one. Both ends keep a file mapped, since mapping its memory again takes as long as copying
it."""

from __future__ import annotations

import atexit
import contextlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from verl.weight_sync import device
from verl.weight_sync.base import Entry, SyncError, TensorStream

SHM = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_PIDS = Path("/proc/self/ns/pid")
PIDS = _PIDS.stat().st_ino if _PIDS.exists() else 0  # identifies the process-id namespace
PREFIX = f"verl-weights.{PIDS}"
"""Prefix of the files of processes in this process-id namespace; containers that share the memory have one each. An
older verl reads the word after `verl-weights-` as a process id, and removes files of processes that do not exist."""
HEAD_BYTES, VERSION_BYTES = 32, 8  # version, bytes of the index, offset of the tensors, bytes of a handle; one word
FIRST_AT = 16  # of the offset of the tensors
TAIL_BYTES = 8  # the version that all replicas have
ALIGN_BYTES = 64
WRITING = -1  # the version of a file that is being written


class TensorLocation(msgspec.Struct, array_like=True):
    """The location of a tensor in a segment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte from the first tensor's."""
    num_bytes: int
    checksum: int | None = None
    """crc32 of its bytes in a bucket, since the manifest of a stream has none."""


class OneHostParts:
    """The methods of an outlet with which all ranks of a host write one segment (together.py)."""

    def place(self) -> str:
        """Return the identity of this host's shared memory."""
        return this_host()

    def sees(self, place: str) -> bool:
        """Return True if this process is on the host with that shared memory."""
        return place == this_host()

    def opened(self, path: str, version: int, shapes: Mapping[str, Entry]) -> SegmentParts:
        """Open the segment that `begin` has made on the first rank."""
        return SegmentParts(path)


class SegmentParts:
    """A segment that several processes write. Each sees at once what the others have written."""

    def __init__(self, path: str) -> None:
        self._tensors = dict(ShmStream(Path(path)).views())

    def write(self, name: str, index: Sequence[slice], tensor: Tensor) -> None:
        """Write a slice of a tensor, which may be a view with more dimensions, in the same order."""
        self._tensors[name][tuple(index)].view(tensor.shape).copy_(tensor)

    def flush(self) -> None:
        """Do nothing: memory is shared."""

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in place."""
        return self._tensors[name]


class ShmOutlet(OneHostParts):
    """The `Outlet` into shared memory. It can be pickled, and is used by one process. two: always keep the version
    before too."""

    transport = "verl.weight_sync.shm:open_weights"

    def __init__(self, name: str, *, two: bool = False) -> None:
        self.name, self._two = name, two
        self._latest: Path | None = None

    def __reduce__(self) -> tuple[partial[ShmOutlet], tuple[str]]:
        return partial(ShmOutlet, two=self._two), (self.name,)

    def _place(self, version: int) -> Path:
        """Return the file to write a version into. If all replicas have the version before, that is the file of the
        version before, and the other file is deleted; otherwise it is the other file, over the version in it."""
        turn = version % 2
        if self._latest is not None and self._latest.exists():
            before, turn = ShmStream(self._latest), int(self._latest.name[-1])
            if self._two or not before.released:
                turn = (turn + version - before.version) % 2
            else:
                _end(SHM / f"{self.name}-{1 - turn}")
        self._latest = SHM / f"{self.name}-{turn}"
        return self._latest

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        segment = ShmStream(Path(self.begin(version, shapes)))
        for (expected, into), (name, tensor) in zip(segment.views(), tensors, strict=True):
            assert name == expected, f"{name} comes where {expected} was told of"
            assert tensor.dtype == into.dtype, f"{name} is {tensor.dtype}, {into.dtype} was told of"
            into.copy_(tensor.detach())
        return self.end(version)

    def begin(self, version: int, shapes: Mapping[str, Entry]) -> str:
        """Allocate the segment of a version, without tensors, and return its path."""
        parts, room = place_tensors(shapes)
        index = msgspec.msgpack.encode(parts)
        first = first_byte(len(index))
        path = self._place(version)
        found = _memory(path, first + room + TAIL_BYTES)
        found[:8] = found[-TAIL_BYTES:] = _word(WRITING)
        _describe(found, index, first)
        return str(path)

    def end(self, version: int) -> str:
        """Mark the version as whole and return its path."""
        assert self._latest is not None, "the version has begun"
        ShmStream(self._latest).hold(version)
        return str(self._latest)


def place_tensors(shapes: Mapping[str, Entry]) -> tuple[list[TensorLocation], int]:
    """Place tensors one after the other. Returns their locations and the total number of bytes."""
    parts, at = [], 0
    for name, entry in shapes.items():
        num_bytes = num_bytes_of(entry)
        parts.append(TensorLocation(name, entry.dtype, entry.shape, at, num_bytes))
        at += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return parts, at


def _describe(found: mmap.mmap, index: bytes, first: int, handle: bytes = b"") -> None:
    """Write the head and the index of a file. handle: of the GPU memory (device.py) that has the tensors, if they are
    not in this file."""
    assert HEAD_BYTES + len(index) <= first
    found[8:HEAD_BYTES] = b"".join(n.to_bytes(8, "little") for n in (len(index), first, len(handle)))
    found[HEAD_BYTES : HEAD_BYTES + len(index)] = index
    found[first : first + len(handle)] = handle


def num_bytes_of(entry: Entry) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(entry.shape) * int(vars(torch)[entry.dtype].itemsize)


def first_byte(index_bytes: int) -> int:
    """Return the offset of the first tensor, behind an index of that length."""
    return -(-(HEAD_BYTES + index_bytes) // ALIGN_BYTES) * ALIGN_BYTES


class ShmStream(TensorStream):
    """The `TensorStream` of one file of shared memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._found = _there(path)
        except FileNotFoundError:
            raise SyncError(
                f"{path} is not on this host: sync.engine=shm serves replicas of the trainer's host"
            ) from None

    @property
    def version(self) -> int:
        return int.from_bytes(self._found[:8], "little", signed=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        version = self.version
        yield from self.views()
        if self.version != version:
            raise SyncError(f"version {version} was written over by {self.version} while it was read")

    def segment(self) -> str:
        return str(self._path)

    def describe(self, version: int, index: bytes, first: int, handle: bytes = b"") -> None:
        """Record a version. Its tensors are already at the offset `first`, or in the GPU memory of that handle."""
        _describe(self._found, index, first, handle)
        self.hold(version)

    def hold(self, version: int) -> None:
        """Mark the file as holding that version."""
        self._found[:VERSION_BYTES] = _word(version)

    @property
    def released(self) -> bool:
        """True if all replicas have the version in the file, or were given up."""
        return self.version != WRITING and self._found[-TAIL_BYTES:] == _word(self.version)

    def release(self, version: int) -> None:
        self._found[-TAIL_BYTES:] = _word(version)

    @property
    def memory(self) -> Tensor:
        """The file as uint8: head, index, tensors or a handle, and the version that all replicas have."""
        return torch.frombuffer(self._found, dtype=torch.uint8)

    @property
    def index(self) -> tuple[list[TensorLocation], int]:
        """The locations of the tensors, and the byte that they count from."""
        size, first, _ = self._head()
        return msgspec.msgpack.decode(self._found[HEAD_BYTES : HEAD_BYTES + size], type=list[TensorLocation]), first

    def _head(self) -> tuple[int, ...]:
        return tuple(int.from_bytes(self._found[at : at + 8], "little") for at in range(8, HEAD_BYTES, 8))

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in place; a later version is written over them."""
        parts, first = self.index
        length = self._head()[-1]
        handle = self._found[first : first + length]
        offset = device.open_handle(handle) if handle else self.memory[first:]
        for part in parts:
            dtype = vars(torch)[part.dtype]
            yield part.name, offset[part.start : part.start + part.num_bytes].view(dtype).view(part.shape)
        if handle:  # the reader has copied what it took
            device.synchronize(offset)


def open_weights(address: str) -> ShmStream:
    return ShmStream(Path(address))


def blank(path: Path, num_bytes: int) -> ShmStream:
    """Return a file of this size that holds no version yet."""
    _memory(path, num_bytes)
    (made := ShmStream(path)).hold(WRITING)
    return made


def _memory(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file of this size: the existing one, or a new one."""
    if path.exists() and path.stat().st_size == num_bytes:
        return _there(path)
    return _mapped(path, num_bytes)


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    """Map a new file of this size with its memory allocated: a full /dev/shm is an OSError here, not a crash later."""
    if path.exists() and path.stat().st_size != num_bytes:
        path.unlink()  # a late reader keeps its mapping
    with open(path, "a+b", opener=_private) as file:
        try:
            if not path.stat().st_size:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as e:
            path.unlink()
            free = f"{shutil.disk_usage(path.parent).free / 1e6:.0f} MB free"
            raise OSError(e.errno, f"{num_bytes / 1e6:.0f} MB of weights do not fit into {path.parent} ({free})") from e
    return _there(path)


def _private(path: str, flags: int) -> int:
    """Open a file that other users of the machine cannot read: a policy belongs to its owner."""
    return os.open(path, flags, 0o600)


def _there(path: Path) -> mmap.mmap:
    found = path.stat()
    return _kept(path, found.st_ino, found.st_size)


@lru_cache(maxsize=2)  # a sender has two files
def _kept(path: Path, inode: int, num_bytes: int) -> mmap.mmap:
    """Map a file. While it is mapped no other file has its inode, so the inode identifies it in the cache."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes)


def _word(version: int) -> bytes:
    return version.to_bytes(VERSION_BYTES, "little", signed=True)


def this_host() -> str:
    """Return the identity of this host's shared memory; each container of a machine may have its own."""
    found = SHM.stat()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{found.st_dev}-{found.st_ino}"


def end(prefix: str) -> None:
    """Delete the files with this prefix, which no process reads any more. Their memory is freed even if other processes
    still map it."""
    for path in SHM.glob(f"{prefix}-*"):
        _end(path)


def _end(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # it was deleted, or is smaller
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as found:
            found[:VERSION_BYTES] = _word(WRITING)
            found.madvise(mmap.MADV_REMOVE, mmap.PAGESIZE)
    path.unlink(missing_ok=True)


def remove(prefix: str) -> None:
    """Delete the files with this prefix. A process that maps one of them keeps its content."""
    for path in SHM.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


@cache
def remove_at_exit(pid: int, own: str) -> None:
    """Delete the files with the prefix `own`, which this process has fetched, at its exit. If it is killed, the next
    process that fetches on this host deletes them."""
    atexit.register(_remove_own, pid, own)


def _remove_own(pid: int, own: str) -> None:
    if pid == os.getpid():  # not in a forked child
        remove(own)


def remove_stale_segments() -> None:
    """Delete the files of this user's processes that were killed."""
    for path in SHM.glob(f"{PREFIX}-*"):
        pid = path.name.removeprefix(f"{PREFIX}-").partition("-")[0]
        with contextlib.suppress(OSError):  # deleted meanwhile, or owned by another user
            if path.stat().st_uid == os.geteuid() and not Path("/proc", pid).exists():
                _end(path)  # a running server
