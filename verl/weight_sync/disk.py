"""Weights through a folder that both ends see: each version is a whole model folder, which anything that loads Hugging
Face models can load. For servers that read their weights from a disk, here or on a machine that shares it.

Its tensors have the names of a saved folder: experts that are one tensor in memory are stored one by one there, as runs
of its rows; our own replicas read them as that one tensor. A folder is written beside its place and moved there when it
is whole; it is never written again. The two latest are kept."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from verl.checkpoint.hf import skeleton
from verl.checkpoint.safetensors_file import DTYPES, host_bytes
from verl.errors import Refused
from verl.weight_sync.base import Entry, Parts, SyncContext, SyncError, TensorStream, saved_parts
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.options import Disk
from verl.weight_sync.shm import PIDS

PREFIX = "verl-versions"
WEIGHTS = "model.safetensors"
KEPT = 2  # versions: a late reader may still read the one before
VERSION, WHOLE = "verl_version", "verl_whole"  # metadata keys; the second lists tensors that are stored in parts
NOT_LINKED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


class DiskOutlet:
    """The `Outlet` into model folders. It can be pickled, and is used by one process. root: the parent of the folders;
    on a machine that does not see it, a folder beside it takes its place and is deleted with the outlet · model: the
    folder that each version links to for its configuration and tokenizer."""

    transport = "verl.weight_sync.disk:open_weights"

    def __init__(self, root: Path, model: Path | None = None) -> None:
        self._root, self._model = root, model
        self.parts: Parts | None = None  # by the name that the engine delivers, found once

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        if not self._root.is_dir():
            self._root = version_folder(self._root.parent)
            weakref.finalize(self, shutil.rmtree, self._root, True)
        folder, coming = self._root / f"version_{version}", self._root / f".coming-{uuid.uuid4().hex}"
        coming.mkdir()
        try:
            if self.parts is None:
                self.parts = saved_parts(skeleton(self._model) if self._model else None, shapes)
            _write(coming / WEIGHTS, version, shapes, tensors, self.parts)
            for path in self._model.iterdir() if self._model else ():
                if path.is_file() and not path.name.endswith(NOT_LINKED):
                    (coming / path.name).symlink_to(path.resolve())
            if folder.exists():
                folder.rename(self._root / f".gone-{uuid.uuid4().hex}")
            coming.rename(folder)
        finally:
            shutil.rmtree(coming, ignore_errors=True)
            self._remove_but(folder)
        return str(folder)

    def _remove_but(self, latest: Path) -> None:
        whole = sorted(self._root.glob("version_*"), key=lambda path: path.stat().st_mtime_ns)
        others = [path for path in whole if path != latest]
        for path in (*self._root.glob(".gone-*"), *others[: len(others) - (KEPT - 1)]):
            shutil.rmtree(path, ignore_errors=True)


def _write(
    path: Path, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]], in_parts: Parts
) -> None:
    """Write one file, tensor by tensor. The widest dtypes are first in it: so each tensor starts at a multiple of its
    item size."""
    about = {"format": "pt", VERSION: str(version)}
    header: dict[str, object] = {"__metadata__": about}
    whole: dict[str, tuple[str, tuple[int, ...], int]] = {}
    starts, end = {}, 0
    for name, entry in sorted(shapes.items(), key=lambda item: -vars(torch)[item[1].dtype].itemsize):
        dtype = vars(torch)[entry.dtype]
        starts[name], end = end, end + prod(entry.shape) * dtype.itemsize
        for part, shape, row in in_parts.get(name, [(name, entry.shape, 0)]):
            at = starts[name] + row * prod(entry.shape[-1:]) * dtype.itemsize
            offsets = [at, at + prod(shape) * dtype.itemsize]
            header[part] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
        if name in in_parts:
            whole[name] = (entry.dtype, entry.shape, starts[name])
    if end > (free := shutil.disk_usage(path.parent).free):
        raise OSError(f"{end / 1e6:.0f} MB of weights do not fit into {path.parent.parent} ({free / 1e6:.0f} MB free)")
    if whole:
        about[WHOLE] = json.dumps([whole, [part for parts in in_parts.values() for part, _, _ in parts]])
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (expected, entry), (name, tensor) in zip(shapes.items(), tensors, strict=True):
            assert name == expected, f"{name} comes where {expected} was told of"
            if prod(entry.shape):
                file.seek(8 + len(text) + starts[name])
                file.write(host_bytes(tensor))


class DiskStream(TensorStream):
    """The `TensorStream` of one model folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS
        if not self._path.is_file():
            raise SyncError(
                f"{folder} is not here: with sync.engine=disk the trainer and its replicas see one folder; on several "
                "machines set sync.engine_options.folder to a shared one"
            )

    @property
    def version(self) -> int:
        with safe_open(self._path, framework="pt") as file:
            return int(file.metadata()[VERSION])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self._path, framework="pt") as file, self._path.open("rb") as raw:
            whole, parts = json.loads(file.metadata().get(WHOLE, "[{}, []]"))
            for name in sorted({*file.keys()} - {*parts}):
                yield name, file.get_tensor(name)
            first = 8 + int.from_bytes(raw.read(8), "little")
            for name, (dtype, shape, start) in whole.items():
                found = torch.empty(shape, dtype=vars(torch)[dtype])
                raw.seek(first + start)
                raw.readinto(found.view(-1).view(torch.uint8).numpy().data)
                yield name, found


def open_weights(address: str) -> DiskStream:
    return DiskStream(Path(address))


def remove_stale_folders(parent: Path) -> None:
    """Delete the folders that killed processes of this machine left; other machines may share the parent, with similar
    names."""
    for path in parent.glob(f"{PREFIX}-{_machine()}-*"):
        machine, pid, _ = path.name.removeprefix(f"{PREFIX}-").rsplit("-", 2)
        if machine == _machine() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)


def _machine() -> str:
    """Return the identity of a process-id namespace: containers may share one host name."""
    return f"{socket.gethostname()}.{PIDS}"


def version_folder(parent: Path) -> Path:
    """Make a folder of this process; if it is killed, the next process on this machine deletes it. Among temporary
    files it is closed to other users; in a folder that the user named it has the default permissions."""
    remove_stale_folders(parent)
    root = parent / f"{PREFIX}-{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    root.mkdir(parents=True, mode=0o700 if parent == Path(tempfile.gettempdir()).absolute() else 0o777)
    return root


def build(options: Disk, context: SyncContext) -> LocalCheckpointEngine:
    if "://" in (options.folder or ""):
        from verl.weight_sync import objects

        return objects.build(str(options.folder), context)
    parent = Path(options.folder or tempfile.gettempdir()).absolute()
    if not parent.is_dir():
        raise Refused(f"sync.engine_options.folder={options.folder}: no such folder; make it first")
    root = version_folder(parent)
    outlet = DiskOutlet(root, Path(context.model) if context.model else None)
    return engine_of(outlet, context, shutil.rmtree, root, True)
