"""Folders of files that sessions of the code sandbox begin with. Each is copied once for all its present users.

Sandboxes have the copy: later changes of the folder do not reach them. The copied files belong to the user 65534.
Anything but files, folders and links is refused. No link is followed, neither here nor when a session's files are kept:
those are packed and unpacked inside of sandboxes only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.sandbox.cell import NOBODY

MAX_FILES, MAX_BYTES = 100_000, 4 << 30  # in one workspace
PREFIX = "verl-sandbox-"


@dataclass(slots=True)
class Base:
    """A copy of a workspace, with the number of its users."""

    folder: str
    """The folder with `files`, the copy, and `at`, an empty folder to mount on."""
    digest: str
    """Hash of the copied files."""
    users: int = 0
    """Number of sessions that use the copy at present."""


class Workspaces:
    """The folders under `root`, which are copied under `scratch` while they are used. Methods may be called from any
    thread."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().resolve()
        self._bases: dict[str, Base] = {}
        self._lock = threading.Lock()
        self.check("")
        self._scratch = OwnFolder(PREFIX)
        self.scratch = str(self._scratch.path)

    def check(self, name: str) -> Path:
        """Return the folder of this name; "" is the whole root. Raises ValueError if it is not a folder in the root."""
        try:
            found = (self.root / name).resolve()
            folder = found.is_dir()
        except (OSError, ValueError, TypeError, RuntimeError) as e:  # too long, no text, links in a circle
            raise Refused(f"workspace={name!r} cannot be read: {e}. Fix: name a folder in {self.root}") from e
        if not found.is_relative_to(self.root):
            raise Refused(f"workspace={name!r} is outside of {self.root}: name a folder in it")
        if not folder:
            raise Refused(f"workspace: {found} is no folder")
        return found

    def take(self, name: str) -> Base:
        """Return a copy of the named folder, which must be given back. Raise ValueError if it cannot be copied."""
        with self._lock:
            base = self._bases.get(name)
            if base is None or not os.path.isdir(base.folder):
                folder = self.folder()
                try:
                    base = self._bases[name] = Base(folder, read_tree(self.check(name), f"{folder}/files"))
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
            base.users += 1
            return base

    def give_back(self, base: Base) -> None:
        with self._lock:
            base.users -= 1
            if base.users == 0:
                self._bases = {name: other for name, other in self._bases.items() if other is not base}
                shutil.rmtree(base.folder, ignore_errors=True)

    def folder(self) -> str:
        """Make the folder of a base, without files."""
        folder = tempfile.mkdtemp(dir=self.scratch)
        for name in ("files", "at"):
            os.mkdir(f"{folder}/{name}")
        return folder

    def close(self) -> None:
        self._scratch.cleanup()


def read_tree(top: str | os.PathLike[str], to: str = "") -> str:
    """Return a hash of names, kinds, links and contents below a folder, and copy all into `to`, if that is given.

    Raises ValueError, with the path, for too many files or bytes, and for an entry that cannot be read or is no file,
    folder or link.
    """
    found, files, size, todo = hashlib.sha256(), 0, 0, [""]
    try:
        while todo:
            folder = todo.pop()
            with os.scandir(os.path.join(top, folder)) as entries:
                rows = sorted(entries, key=lambda entry: entry.name)
            for entry in rows:
                path, about = os.path.join(folder, entry.name), entry.stat(follow_symlinks=False)
                files, size = files + 1, size + about.st_size * stat.S_ISREG(about.st_mode)
                if files > MAX_FILES or size > MAX_BYTES:
                    more = f"more than {MAX_FILES:,} files, or {MAX_BYTES:,} bytes"
                    raise Refused(f"workspace {top}: {more}. Fix: name folders in it, or take out what nobody needs")
                todo += [path] if stat.S_ISDIR(about.st_mode) else []
                what = _read(entry.path, about.st_mode, os.path.join(to, path) if to else "")
                found.update(repr((path, what)).encode())
    except OSError as e:
        raise Refused(f"workspace {top}: {e.strerror}: {e.filename}") from e
    return found.hexdigest()


def _read(path: str, mode: int, to: str) -> str:
    """Return a text for one entry: its kind, and the hash of a file or the target of a link. Copy it to `to`, owned by
    the user 65534."""
    runs = stat.S_ISDIR(mode) or bool(mode & 0o111)
    if stat.S_ISLNK(mode):
        what = f"link to {os.readlink(path)}"
        if to:
            os.symlink(os.readlink(path), to)
    elif stat.S_ISDIR(mode):
        what = "folder"
        if to:
            os.mkdir(to)
    elif stat.S_ISREG(mode):
        with open(shutil.copyfile(path, to) if to else path, "rb") as file:
            what = f"{'program' if runs else 'file'} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    else:
        raise Refused(f"workspace: {path} is no file, folder or link. Fix: take it out")
    if to and not stat.S_ISLNK(mode):
        os.chmod(to, 0o755 if runs else 0o644)
    if to and os.geteuid() == 0:
        os.chown(to, NOBODY, NOBODY, follow_symlinks=False)
    return what
