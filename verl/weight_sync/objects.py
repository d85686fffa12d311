"""Weights through an object store, or any other storage with an fsspec URL: s3://, gs://, file://, memory:// (one
process).

A version is a model folder (version_folder.py), uploaded file by file. `verl_version.json`, the list of its files, is
uploaded last, and a reader refuses a version without it. The two latest versions are kept. A host fetches a version
once, into its shared memory (tcp.py), and compares size and checksum; its other replicas read it there."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from verl.checkpoint.hf import skeleton
from verl.data.files import filesystem, storage_errors
from verl.errors import Refused
from verl.weight_sync.base import Entry, Parts, SyncContext, SyncError, dtype_name, saved_parts
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.shm import ShmOutlet, ShmStream, end
from verl.weight_sync.tcp import HostStream
from verl.weight_sync.version_folder import (
    KEPT,
    PREFIX,
    WEIGHTS,
    FolderStream,
    begin_folder,
    file_layout,
    fill_folder,
    version_folder,
)

INDEX, PROBE = "verl_version.json", "verl_probe"
PIECE_BYTES = 16 << 20


class VersionIndex(msgspec.Struct):
    """The content of `verl_version.json`."""

    version: int
    files: dict[str, tuple[int, int]]
    """Name -> (bytes, crc32)."""


class ObjectOutlet:
    """The `Outlet` into an object store. It can be pickled, and is used by one process. root: the parent URL of the
    versions · model: as in `disk.DiskOutlet`."""

    transport = "verl.weight_sync.objects:open_weights"

    def __init__(self, root: str, model: Path | None = None) -> None:
        self._root, self._model = root, model
        self._under, self._latest = "", -1
        self._whole: list[str] = []
        self._parts: Parts | None = None

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        if version <= self._latest or not self._under:  # the run was reset: hosts that have that number fetch anew
            self._under = f"{self._root}/{uuid.uuid4().hex}"
        self._latest, address = version, f"{self._under}/version_{version}"
        if self._parts is None:
            self._parts = saved_parts(skeleton(self._model) if self._model else None, shapes)
        made = version_folder(Path(tempfile.gettempdir()))
        try:
            layout = file_layout(version, shapes, self._parts)
            begin_folder(made, layout, self._model)
            fill_folder(made, layout, shapes, tensors)
            with _store_at(address, "written") as (fs, path):
                _put(fs, made, path, version)
                self._whole.append(path)
                while len(self._whole) > KEPT:
                    _delete_version(fs, self._whole.pop(0))
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return address


def _put(fs: Any, folder: Path, path: str, version: int) -> None:
    """Upload the files of a folder to `path`, which was never used before, and then their index. If that fails, delete
    what was uploaded."""
    try:
        index = VersionIndex(version, {of.name: (of.stat().st_size, _crc(of)) for of in folder.iterdir()})
        _make(fs, path)
        for name in index.files:
            fs.put_file(str((folder / name).resolve()), f"{path}/{name}")
        fs.pipe_file(f"{path}/{INDEX}", msgspec.json.encode(index))
    except BaseException:
        _delete_version(fs, path)
        raise


def _make(fs: Any, path: str) -> None:
    if not fs.async_impl:  # asynchronous ones have no folders, and would make a bucket of a wrong name
        fs.makedirs(path, exist_ok=True)


def _delete_version(fs: Any, path: str) -> None:
    """Delete a version, its index first. A file that cannot be deleted costs only space, since no reader gets its
    address again."""
    fs.invalidate_cache()
    for file in (f"{path}/{INDEX}", path):
        with contextlib.suppress(RuntimeError, *storage_errors()):  # an exiting interpreter starts no threads
            fs.rm(file, recursive=True)


def _crc(path: Path) -> int:
    with path.open("rb") as file:
        return functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), iter(lambda: file.read(PIECE_BYTES), b""), 0)


class ObjectStream(HostStream):
    """A `HostStream` of an object store."""

    def __init__(self, address: str) -> None:
        super().__init__(address.rpartition("/")[0])  # a sender has one name on a host, whatever the version
        self._address = address

    def end(self) -> None:
        """Delete this sender's files on this host, which no process reads any more."""
        for path in self._files():
            end(path.name.rpartition("-")[0])

    def _newer(self, here: ShmStream | None, place: Callable[[str], Path]) -> ShmStream:
        version = int(self._address.rpartition("_")[2])
        if here is not None and version <= here.version:
            return here
        folder = version_folder(Path(tempfile.gettempdir()))
        try:
            with _store_at(self._address, "read") as (fs, path):
                _get(fs, path, folder, version)
            found = FolderStream(folder)
            shapes = {name: Entry(tuple(t.shape), dtype_name(t)) for name, t in found.tensors()}
            outlet = ShmOutlet(place(str(version % 2)).name.rpartition("-")[0])
            return ShmStream(Path(outlet.stage(version, shapes, found.tensors())))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def open_weights(address: str) -> ObjectStream:
    return ObjectStream(address)


def _get(fs: Any, path: str, into: Path, version: int) -> None:
    """Download the tensors of a version into a folder. Raise SyncError if they are missing, or differ in size or crc32
    from the version's index."""
    fs.invalidate_cache()
    try:
        index = msgspec.json.decode(fs.cat_file(f"{path}/{INDEX}"), type=VersionIndex)
        expected = index.files[WEIGHTS]
        fs.get_file(f"{path}/{WEIGHTS}", str(into / WEIGHTS))
    except FileNotFoundError as e:
        why = "it was never whole, two later ones have come, or this process does not see that store"
        raise SyncError(f"version {version} is not at {path}: {why}") from e
    except (msgspec.DecodeError, KeyError) as e:
        raise SyncError(f"version {version}: {path}/{INDEX} does not tell of its tensors: {e}") from e
    found = ((into / WEIGHTS).stat().st_size, _crc(into / WEIGHTS))
    if index.version != version or found != expected:
        raise SyncError(
            f"version {version}: {path}/{WEIGHTS} is not what was written: version {index.version}, "
            f"{found[0]} bytes with crc32 {found[1]:08x}, not {expected[0]} with {expected[1]:08x}"
        )


@contextlib.contextmanager
def _store_at(url: str, what: str) -> Iterator[tuple[Any, str]]:
    """Yield (the file system of the URL, the path there). Turn errors of the store into SyncError. what: the failed
    action, for its text."""
    try:
        yield filesystem(url)
    except storage_errors() as e:
        said = " ".join(str(e).split())[:300]
        raise SyncError(f"{url} could not be {what}: {type(e).__name__}: {said}") from e


def _delete_all(fs: Any, root: str) -> None:
    """Delete all versions of the engine, and this host's copies of them."""
    fs.invalidate_cache()
    with contextlib.suppress(RuntimeError, *storage_errors()):
        for key in fs.ls(root, detail=False):
            ObjectStream(f"{key}/version_0").end()
    _delete_version(fs, root)


def build(folder: str, context: SyncContext) -> LocalCheckpointEngine:
    """Build the weight sync through an object store. Raise ValueError at the start if the store is not writable."""
    root = f"{folder.rstrip('/')}/{PREFIX}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    fs, path = filesystem(root)
    try:
        _make(fs, path)
        fs.pipe_file(f"{path}/{PROBE}", b"may be written")
        fs.rm(f"{path}/{PROBE}")
    except storage_errors() as e:
        said, fix = " ".join(str(e).split())[:300], "make it first, with a key that may write and remove there"
        raise Refused(f"sync.engine_options.folder={folder}: {type(e).__name__}: {said}; {fix}") from e
    return engine_of(ObjectOutlet(root, Path(context.model) if context.model else None), context, _delete_all, fs, path)
