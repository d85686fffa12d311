"""Stores of media: the encoded bytes of images and other inputs, by their hash. Segments contain the hashes, and a row
in the queue is an owner of their content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl.file_lock import file_lock
from verl.medium import media_hash

LOCK_S = 60.0  # the longest wait for a folder's lock


class MemoryMedia:
    """A `MediaStore` of one process. Any thread may call."""

    def __init__(self) -> None:
        self._content: dict[str, bytes] = {}
        self._owners: dict[str, set[str]] = {}  # by reference
        self._owned: dict[str, set[str]] = {}  # by owner
        self._lock = threading.Lock()
        self.readers: dict[str, Any] = {}

    def put(self, content: bytes, owner: str) -> str:
        reference = media_hash(content)
        with self._lock:
            self._content.setdefault(reference, content)
            self._add(reference, owner)
        return reference

    def get(self, reference: str) -> bytes:
        with self._lock:
            if reference not in self._content:
                raise _missing([reference])
            return self._content[reference]

    def hold(self, references: Iterable[str], owner: str) -> None:
        names = set(references)
        with self._lock:
            if missing := sorted(names - self._content.keys()):
                raise _missing(missing)
            for reference in names:
                self._add(reference, owner)

    def drop(self, owners: Iterable[str]) -> None:
        with self._lock:
            for owner in owners:
                for reference in self._owned.pop(owner, ()):
                    self._owners[reference].discard(owner)
                    if not self._owners[reference]:
                        del self._owners[reference], self._content[reference]

    def __len__(self) -> int:
        return len(self._content)

    def _add(self, reference: str, owner: str) -> None:
        self._owners.setdefault(reference, set()).add(owner)
        self._owned.setdefault(owner, set()).add(reference)


class FolderMedia:
    """A `MediaStore` in a folder that several processes use, on one host or on a shared file system. It can be pickled,
    and its folder is made with the first content.

    content/HASH is the content; owners/OWNER/HASH is a hard link to it. Content without a further link is deleted. A
    file is complete before it gets its name, so `get` needs no lock; a lock file orders the calls that add or remove
    links."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._owners = str(root / "owners")
        self.readers: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type[FolderMedia], tuple[Path]]:
        return FolderMedia, (self.root,)

    def put(self, content: bytes, owner: str) -> str:
        reference = media_hash(content)
        path, coming = self.path(reference), self.root / f".coming-{uuid.uuid4().hex}"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not path.exists():
                coming.write_bytes(content)
            with self._locked():
                if not path.exists():  # now, or another process has dropped it
                    if not coming.exists():
                        coming.write_bytes(content)
                    coming.rename(path)
                self._link(reference, owner)
        finally:
            coming.unlink(missing_ok=True)
        return reference

    def get(self, reference: str) -> bytes:
        try:
            content = self.path(reference).read_bytes()
        except FileNotFoundError:
            raise _missing([reference]) from None
        if media_hash(content) != reference:
            raise ValueError(f"{self.path(reference)} is damaged: its content has another hash")
        return content

    def hold(self, references: Iterable[str], owner: str) -> None:
        if not (names := sorted(set(references))):
            return
        if not self.root.is_dir():
            raise _missing(names)
        with self._locked():
            if missing := [reference for reference in names if not self.path(reference).exists()]:
                raise _missing(missing)
            for reference in names:
                self._link(reference, owner)

    def drop(self, owners: Iterable[str]) -> None:
        if not os.path.isdir(self._owners):  # nothing has an owner: every attempt of a text-only run
            return
        folders = [folder for owner in owners if (folder := self._owner(owner)).is_dir()]
        if not folders:
            return
        with self._locked():
            for folder in folders:
                names = os.listdir(folder) if folder.is_dir() else []  # another process may have dropped it
                shutil.rmtree(folder, ignore_errors=True)
                for path in map(self.path, names):
                    if path.exists() and path.stat().st_nlink == 1:
                        path.unlink()

    def __len__(self) -> int:
        return len(os.listdir(self.root / "content")) if self.root.is_dir() else 0

    def path(self, reference: str) -> Path:
        """Return the file with this content."""
        if len(reference) != 32 or not set(reference) <= set("0123456789abcdef"):
            raise ValueError(f"{reference!r} is no reference of media: 32 hexadecimal digits")
        return self.root / "content" / reference

    def _owner(self, owner: str) -> Path:
        return self.root / "owners" / hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()

    def _link(self, reference: str, owner: str) -> None:
        folder = self._owner(owner)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(self.path(reference), folder / reference)

    def _locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other processes and threads. Raise TimeoutError if another one keeps the lock for
        `LOCK_S`."""
        late = TimeoutError(f"{self.root}: another process kept its lock for {LOCK_S:g} s")
        return file_lock(self.root / "lock", LOCK_S, late)


def _missing(references: Sequence[str]) -> ValueError:
    return ValueError(f"{len(references)} media have no content in this store (never put, or dropped): {references[0]}")
