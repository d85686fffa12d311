"""Weights through the shared memory of one host: the trainer writes a version, every replica maps and reads it.

Two files take turns, so that a version is written while a late replica may still read the one before. A file says
which version it holds; a reader asks before its first tensor and after its last, and copies each as it comes. The
trainer keeps its files mapped: to find their memory anew takes longer than to write it.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from verl.weight_sync.base import Entry, SyncContext, SyncError, TensorStream
from verl.weight_sync.local import LocalCheckpointEngine, engine_of

SHM = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
PREFIX = "verl-weights"
HEAD_BYTES, VERSION_BYTES = 16, 8  # version and length of the index, little endian; the first of them
ALIGN_BYTES = 64
WRITING = -1


class Part(msgspec.Struct, array_like=True):
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class ShmOutlet:
    """See `Outlet`; it can be pickled, and is used by one process."""

    transport = "verl.weight_sync.shm:open_weights"

    def __init__(self, name: str) -> None:
        self.name = name
        self._mapped: dict[Path, tuple[int, mmap.mmap]] = {}  # inode and memory

    def __reduce__(self) -> tuple[type[ShmOutlet], tuple[str]]:
        return ShmOutlet, (self.name,)

    def _memory(self, path: Path, num_bytes: int) -> mmap.mmap:
        """Of a file of that size: the one that it wrote the version before the last into, where it still is."""
        inode, found = self._mapped.get(path, (-1, None))
        if found is None or len(found) != num_bytes or not path.exists() or path.stat().st_ino != inode:
            self._mapped.pop(path, None)
            found = _mapped(path, num_bytes)
            self._mapped[path] = (path.stat().st_ino, found)
        return found

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        parts, at = [], 0
        for name, entry in shapes.items():
            num_bytes = math.prod(entry.shape) * vars(torch)[entry.dtype].itemsize
            parts.append(Part(name, entry.dtype, entry.shape, at, num_bytes))
            at += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        index = msgspec.msgpack.encode(parts)
        first = -(-(HEAD_BYTES + len(index)) // ALIGN_BYTES) * ALIGN_BYTES
        path = SHM / f"{self.name}-{version % 2}"
        found = self._memory(path, max(first + at, 1))
        found[:8] = WRITING.to_bytes(8, "little", signed=True)
        found[8:16] = len(index).to_bytes(8, "little")
        found[16 : 16 + len(index)] = index
        whole = torch.frombuffer(found, dtype=torch.uint8)
        for part, (name, tensor) in zip(parts, tensors, strict=True):
            assert name == part.name, f"{name} comes where {part.name} was told of"
            if part.num_bytes:
                start = first + part.start
                into = whole[start : start + part.num_bytes].view(tensor.dtype).view(part.shape)
                into.copy_(tensor.detach())
        found[:8] = version.to_bytes(8, "little", signed=True)
        return str(path)


class ShmStream(TensorStream):
    """See `TensorStream`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("r+b") as file:
                self._found = mmap.mmap(file.fileno(), 0)
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

    def hold(self, version: int) -> None:
        """Its reader has put that version there."""
        self._found[:VERSION_BYTES] = version.to_bytes(VERSION_BYTES, "little", signed=True)

    @property
    def memory(self) -> Tensor:
        """The file, uint8: the version, the length of the index, the index, the tensors."""
        return torch.frombuffer(self._found, dtype=torch.uint8)

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors where they lie; the next version but one is written over them."""
        size = int.from_bytes(self._found[8:16], "little")
        parts = msgspec.msgpack.decode(self._found[16 : 16 + size], type=list[Part])
        first = -(-(HEAD_BYTES + size) // ALIGN_BYTES) * ALIGN_BYTES
        for part in parts:
            dtype = vars(torch)[part.dtype]
            if not part.num_bytes:
                yield part.name, torch.empty(part.shape, dtype=dtype)
                continue
            count = part.num_bytes // dtype.itemsize
            flat = torch.frombuffer(self._found, dtype=dtype, count=count, offset=first + part.start)
            yield part.name, flat.view(part.shape)


def open_weights(address: str) -> ShmStream:
    return ShmStream(Path(address))


def blank(path: Path, num_bytes: int) -> ShmStream:
    """A file of this size that holds no version yet."""
    _mapped(path, num_bytes).close()
    (made := ShmStream(path)).hold(WRITING)
    return made


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    """A file of this size, whose memory is there: a full /dev/shm is an OSError here, not a crash later."""
    if path.exists() and path.stat().st_size != num_bytes:
        path.unlink()  # a late reader keeps what it has
    with path.open("a+b") as file:
        try:
            if not path.stat().st_size:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as e:
            path.unlink()
            raise OSError(e.errno, f"{num_bytes / 1e6:.0f} MB of weights do not fit into {path.parent}") from e
        return mmap.mmap(file.fileno(), num_bytes)


def this_host() -> str:
    """By its shared memory, of which containers of a machine may have one each."""
    found = SHM.stat()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{found.st_dev}-{found.st_ino}"


def remove(prefix: str) -> None:
    for path in SHM.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


def remove_of_the_dead() -> None:
    """What processes left that were killed."""
    for path in SHM.glob(f"{PREFIX}-*"):
        if not Path(f"/proc/{path.name.removeprefix(PREFIX + '-').partition('-')[0]}").exists():
            path.unlink(missing_ok=True)


def build(options: object, context: SyncContext) -> LocalCheckpointEngine:
    remove_of_the_dead()
    name = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    return engine_of(ShmOutlet(name), context, remove, name)
