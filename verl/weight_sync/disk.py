"""Weights through a folder that both ends see: each version is a whole model folder (version_folder.py), which anything
that loads Hugging Face models can load. For servers that read their weights from a disk, here or on a machine that
shares it.

A folder is written beside its place and moved there when it is whole; it is never written again. The two latest are
kept. Ranks that all see the folder, on any number of hosts, write their parts into it."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from verl.errors import Refused
from verl.weight_sync import objects
from verl.weight_sync.base import Entry, SyncContext
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.options import Disk
from verl.weight_sync.version_folder import (
    KEPT,
    FileLayout,
    FolderForm,
    FolderParts,
    FolderStream,
    begin_folder,
    file_layout,
    fill_folder,
    folder_form,
    version_folder,
)


class DiskOutlet:
    """The `Outlet` into model folders. It can be pickled, and is used by one process. root: the parent of the folders;
    on a machine that does not see it, a folder beside it takes its place and is deleted with the outlet · model: the
    folder that each version links to for its configuration and tokenizer."""

    transport = "verl.weight_sync.disk:open_weights"

    def __init__(self, root: Path, model: Path | None = None) -> None:
        self._root, self._model = root, model
        self._form: FolderForm | None = None  # found once
        self._coming: Path | None = None

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        self.place()
        try:
            coming = Path(self.begin(version, shapes))
            fill_folder(coming, self._layout(version, shapes), shapes, tensors)
            return self.end(version)
        finally:
            self._remove_unfinished()

    def place(self) -> str:
        """Return the parent folder of the versions. Make another one if this machine does not see it."""
        if not self._root.is_dir():
            self._root = version_folder(self._root.parent)
            weakref.finalize(self, shutil.rmtree, self._root, True)
        return str(self._root)

    def sees(self, place: str) -> bool:
        """Return True if this machine sees that folder. Its name is unique, so it is the folder of the first rank."""
        return Path(place).is_dir()

    def begin(self, version: int, shapes: Mapping[str, Entry]) -> str:
        """Make the folder of a version, without tensors, and return its path."""
        self._remove_unfinished()
        self._coming = self._root / f".coming-{uuid.uuid4().hex}"
        self._coming.mkdir()
        layout = self._layout(version, shapes)
        assert self._form is not None, "the layout is made from it"
        begin_folder(self._coming, layout, self._model, self._form.config)
        return str(self._coming)

    def opened(self, path: str, version: int, shapes: Mapping[str, Entry]) -> FolderParts:
        """Open the folder that `begin` has made on the first rank."""
        return FolderParts(Path(path), self._layout(version, shapes), shapes)

    def end(self, version: int) -> str:
        """Move the folder to its place and return the address."""
        assert self._coming is not None, "the version has begun"
        folder = self._root / f"version_{version}"
        if folder.exists():
            folder.rename(self._root / f".gone-{uuid.uuid4().hex}")
        self._coming.rename(folder)
        self._coming = None
        whole = sorted(self._root.glob("version_*"), key=lambda path: path.stat().st_mtime_ns)
        others = [path for path in whole if path != folder]
        for path in (*self._root.glob(".gone-*"), *others[: len(others) - (KEPT - 1)]):
            shutil.rmtree(path, ignore_errors=True)
        return str(folder)

    def _layout(self, version: int, shapes: Mapping[str, Entry]) -> FileLayout:
        if self._form is None:
            self._form = folder_form(self._model, shapes)
        return file_layout(version, shapes, self._form.parts)

    def _remove_unfinished(self) -> None:
        if self._coming is not None:
            shutil.rmtree(self._coming, ignore_errors=True)
            self._coming = None


def open_weights(address: str) -> FolderStream:
    return FolderStream(Path(address))


def build(options: Disk, context: SyncContext) -> LocalCheckpointEngine:
    if "://" in (options.folder or ""):
        return objects.build(str(options.folder), context)
    parent = Path(options.folder or tempfile.gettempdir()).absolute()
    if not parent.is_dir():
        raise Refused(f"sync.engine_options.folder={options.folder}: no such folder; make it first")
    root = version_folder(parent)
    outlet = DiskOutlet(root, Path(context.model) if context.model else None)
    return engine_of(outlet, context, shutil.rmtree, root, True)
