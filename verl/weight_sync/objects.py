"""Weights through an object store, or any other storage with an fsspec URL: s3://, gs://, file://, memory:// (one
process).

A version is a model folder (version_folder.py), uploaded file by file; of a trainer with several ranks it is one file
of slices for each rank (slices.py), which that rank uploads. `verl_version.json`, the list of its files, is uploaded
last, and a reader refuses a version without it. The two latest versions are kept. A host fetches a version once, into
its shared memory (tcp.py), and compares size and checksum; its other replicas read it there."""

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
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from verl.data.files import filesystem, storage_errors
from verl.errors import Refused
from verl.weight_sync.base import Entry, SyncContext, SyncError, dtype_name
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.shm import ShmOutlet, ShmStream, end
from verl.weight_sync.slices import RankSlices, SlicedVersion, put_together
from verl.weight_sync.tcp import HostStream
from verl.weight_sync.version_folder import (
    KEPT,
    PREFIX,
    WEIGHTS,
    FolderForm,
    FolderStream,
    begin_folder,
    file_layout,
    fill_folder,
    folder_form,
    version_folder,
)

INDEX, PROBE = "verl_version.json", "verl_probe"
PIECE_BYTES = 16 << 20


FileFacts = tuple[int, int]


class VersionIndex(msgspec.Struct):
    """The content of `verl_version.json`."""

    version: int
    files: dict[str, FileFacts]
    """Name -> (bytes, crc32)."""
    slices: SlicedVersion | None = None
    """The table of a version in slices, in which the address of a rank is the name of its file. None: the version is a
    model folder."""


class ObjectOutlet:
    """The `Outlet` into an object store. It can be pickled, and is used by one process. root: the parent URL of the
    versions · model: as in `disk.DiskOutlet`."""

    transport = "verl.weight_sync.objects:open_weights"
    per_rank = True

    def __init__(self, root: str, model: Path | None = None) -> None:
        self._root, self._model = root, model
        self._under, self._latest = "", -1
        self._whole: list[str] = []
        self._coming = ""  # a version in slices that has begun
        self._form: FolderForm | None = None

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        address = self._address(version)
        if self._form is None:
            self._form = folder_form(self._model, shapes)
        with _filled(version, shapes, self._form, self._model, tensors) as made, _store_at(address, "written") as at:
            _put(*at, made, version)
            self._keep(*at)
        return address

    def begin_slices(self, version: int) -> str:
        """Return the URL of a version, after the remains of one that was not published are deleted."""
        address = self._address(version)
        with _store_at(address, "written") as (fs, path):
            if self._coming:
                _delete_version(fs, self._coming)
            self._coming = path
            _make(fs, path)
        return address

    def stage_slices(
        self, place: str, rank: int, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]
    ) -> str:
        """Upload the slices of this rank. Returns the file's name, its bytes and its crc32, joined by slashes."""
        name = f"rank_{rank:05}.safetensors"
        with _filled(version, shapes, FolderForm(), None, tensors) as made, _store_at(place, "written") as (fs, path):
            size, crc = _facts(made / WEIGHTS)
            fs.put_file(str(made / WEIGHTS), f"{path}/{name}")
        return f"{name}/{size}/{crc}"

    def join_slices(self, place: str, table: SlicedVersion) -> str:
        """Upload the index of a version whose slices are uploaded, and return its address."""
        files: dict[str, FileFacts] = {}
        for of_rank in table.ranks:
            of_rank.address, size, crc = of_rank.address.split("/")
            files[of_rank.address] = int(size), int(crc)
        with _store_at(place, "written") as (fs, path):
            fs.pipe_file(f"{path}/{INDEX}", msgspec.json.encode(VersionIndex(table.version, files, table)))
            self._coming = ""
            self._keep(fs, path)
        return place

    def release_slices(self, version: int) -> None:
        """Do nothing: the two latest versions are kept."""

    def _address(self, version: int) -> str:
        """Return the URL for a version, which was never used before."""
        if version <= self._latest or not self._under:  # the run was reset: hosts that have that number fetch anew
            self._under = f"{self._root}/{uuid.uuid4().hex}"
        self._latest = version
        return f"{self._under}/version_{version}"

    def _keep(self, fs: Any, path: str) -> None:
        """Keep a version that is whole, and delete all but the latest ones."""
        self._whole.append(path)
        while len(self._whole) > KEPT:
            _delete_version(fs, self._whole.pop(0))


@contextlib.contextmanager
def _filled(
    version: int,
    shapes: Mapping[str, Entry],
    form: FolderForm,
    model: Path | None,
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[Path]:
    """Yield a temporary folder with these tensors, and links to the other files of the model."""
    made = version_folder(Path(tempfile.gettempdir()))
    try:
        layout = file_layout(version, shapes, form.parts)
        begin_folder(made, layout, model, form.config)
        fill_folder(made, layout, shapes, tensors)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(fs: Any, path: str, folder: Path, version: int) -> None:
    """Upload the files of a folder to `path`, which was never used before, and then their index. If that fails, delete
    what was uploaded."""
    try:
        index = VersionIndex(version, {of.name: _facts(of) for of in folder.iterdir()})
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


def _facts(path: Path) -> FileFacts:
    """Return the size and the crc32 of a file."""
    with path.open("rb") as file:
        pieces = iter(lambda: file.read(PIECE_BYTES), b"")
        return path.stat().st_size, functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)


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
        outlet = ShmOutlet(place(str(version % 2)).name.rpartition("-")[0])
        with _store_at(self._address, "read") as (fs, path):
            index = _index(fs, path, version)
        if index.slices is not None:
            return put_together(index.slices, outlet, partial(self._of_rank, index), at_once=self.ranks_at_once)
        with self._fetched_file(index, WEIGHTS) as found:
            shapes = {name: Entry(tuple(t.shape), dtype_name(t)) for name, t in found.tensors()}
            return ShmStream(Path(outlet.stage(version, shapes, found.tensors())))

    def _of_rank(self, index: VersionIndex, of: RankSlices) -> Iterator[tuple[str, Tensor]]:
        """Yield the slices of one rank."""
        with self._fetched_file(index, of.address) as found:
            yield from found.tensors()

    @contextlib.contextmanager
    def _fetched_file(self, index: VersionIndex, name: str) -> Iterator[FolderStream]:
        """Download a file of tensors, and yield its stream while it exists."""
        folder = version_folder(Path(tempfile.gettempdir()))
        try:
            with _store_at(self._address, "read") as (fs, path):
                _get(fs, f"{path}/{name}", folder / WEIGHTS, index.version, index.files[name])
            yield FolderStream(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def open_weights(address: str) -> ObjectStream:
    return ObjectStream(address)


def _index(fs: Any, path: str, version: int) -> VersionIndex:
    """Return the index of a version. Raise SyncError if it is missing, is of another version, or has no tensors."""
    fs.invalidate_cache()
    try:
        index = msgspec.json.decode(fs.cat_file(f"{path}/{INDEX}"), type=VersionIndex)
    except FileNotFoundError as e:
        raise _missing(path, version) from e
    except msgspec.DecodeError as e:
        raise SyncError(f"version {version}: {path}/{INDEX} does not tell of its tensors: {e}") from e
    wanted = {WEIGHTS} if index.slices is None else {of_rank.address for of_rank in index.slices.ranks}
    if lost := sorted(wanted - index.files.keys()):
        raise SyncError(f"version {version}: {path}/{INDEX} does not tell of its tensors: {lost[0]!r}")
    if index.version != version:
        raise SyncError(f"version {version}: {path} is not what was written: version {index.version}")
    return index


def _get(fs: Any, path: str, into: Path, version: int, expected: FileFacts) -> None:
    """Download a file. Raise SyncError if it is missing, or has another size or crc32."""
    try:
        fs.get_file(path, str(into))
    except FileNotFoundError as e:
        raise _missing(path, version) from e
    if (found := _facts(into)) != expected:
        raise SyncError(
            f"version {version}: {path} is not what was written: version {version}, {found[0]} bytes with crc32 "
            f"{found[1]:08x}, not {expected[0]} with {expected[1]:08x}"
        )


def _missing(path: str, version: int) -> SyncError:
    why = "it was never whole, two later ones have come, or this process does not see that store"
    return SyncError(f"version {version} is not at {path}: {why}")


@contextlib.contextmanager
def _store_at(url: str, what: str) -> Iterator[tuple[Any, str]]:
    """Yield (the file system of the URL, the path there). Turn errors of the store into SyncError. what: the failed
    action, for its text."""
    try:
        yield filesystem(url)
    except storage_errors() as e:
        found = " ".join(str(e).split())[:300]
        raise SyncError(f"{url} could not be {what}: {type(e).__name__}: {found}") from e


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
        found, fix = " ".join(str(e).split())[:300], "make it first, with a key that may write and remove there"
        raise Refused(f"sync.engine_options.folder={folder}: {type(e).__name__}: {found}; {fix}") from e
    return engine_of(ObjectOutlet(root, Path(context.model) if context.model else None), context, _delete_all, fs, path)
