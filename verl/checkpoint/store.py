"""Checkpoints of a run: written whole or not at all, verified before use, pruned only after the next one is safe.

    <directory>/step_12/                    committed: everything in manifest.json is on disk, with size and sha256
    <directory>/step_12.tmp-<host>-<pid>/   being written
    <directory>/step_12.old-<host>-<pid>/   set aside while a new one takes its name
    <directory>/step_12.trash-<host>-<pid>/ pruned

A directory gets the name step_N by one atomic rename, after every file in it, its manifest and the directories were
synced. A process killed at any moment therefore leaves the committed checkpoints and at most some leftovers, which the
next store on this directory removes. Torch-free.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from verl.bounds import size_text
from verl.config.model_files import check_weights_file
from verl.errors import Refused
from verl.track.files import sync_folder

MANIFEST = "manifest.json"
FORMAT = 1
_STEP = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"(step_\d+)\.(tmp|old|trash)-(.+)-(\d+)")
_HASH_THREADS = 4
_MOST_BYTES = 64 << 20  # the longest manifest that is read
SLACK_BYTES = 16 << 20  # beside the checkpoints: directories, manifest, other writers on the same disk
_ABANDONED_S = 3600.0  # after this time without a write the writer counts as dead, also on another host
logger = logging.getLogger(__name__)


class SaveFailed(OSError):
    """The checkpoint was not written. Earlier ones are untouched and nothing of this one remains, so the run can
    continue."""


class DiskFull(SaveFailed):
    """A `SaveFailed` for lack of space, detected before the first byte or while writing."""


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The manifest of a checkpoint: its step, metrics and files."""

    step: int
    serial: int  # counts saves: a run that was rewound to an earlier step saves lower steps later
    meta: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]  # relative path -> {"bytes": int, "sha256": str}


class _Entry(msgspec.Struct):
    """The size and the hash of a file in a manifest."""

    bytes: int
    sha256: str


class _Fields(msgspec.Struct):
    """The fields of a manifest."""

    step: int
    serial: int
    meta: dict[str, Any]
    files: dict[str, _Entry]


class CheckpointStore:
    """Saves, finds and prunes the checkpoints in one directory, which has one writer at a time; readers pass
    read_only=True."""

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int = 2,
        keep_every_steps: int = 0,
        keep_best: str | None = None,
        read_only: bool = False,
    ) -> None:
        """Open the checkpoints in `directory`, and remove what killed writers have left. keep_last: the number of
        newest checkpoints that are kept · keep_every_steps: steps that are multiples of it are kept for ever (0: none)
        · keep_best: a key of `meta`; the checkpoint with its greatest value is kept until a better one exists ·
        read_only: change nothing."""
        if keep_last < 1:
            raise Refused(f"keep_last={keep_last}: at least the newest checkpoint is kept")
        if keep_every_steps < 0:
            raise Refused(f"keep_every_steps={keep_every_steps}: must be >= 0 (0 is off)")
        self.directory = Path(directory)
        self.keep_last, self.keep_every_steps, self.keep_best = keep_last, keep_every_steps, keep_best
        self._owner = f"{socket.gethostname()}-{os.getpid()}"
        if not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()

    def save(
        self, step: int, write: Callable[[Path], None], *, needed_bytes: int, meta: Mapping[str, Any] | None = None
    ) -> None:
        """Commit a checkpoint: `write` fills an empty directory, which then gets its name, and old checkpoints are
        pruned. Raise SaveFailed or DiskFull for an OSError (disk full, quota, I/O); earlier checkpoints stay as they
        were."""
        meta = dict(meta or {})
        json.dumps(meta)  # a meta that JSON cannot hold fails here, before anything is written
        final = self._path(step)
        tmp = self.directory / f"step_{step}.tmp-{self._owner}"
        with _reported_for(final):
            self._check_space(needed_bytes)
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir()
            try:
                write(tmp)
                assert not (tmp / MANIFEST).exists(), f"{MANIFEST} is the store's own file"
                self._seal(tmp, step, meta)
                self._commit(tmp, final)
            finally:
                shutil.rmtree(tmp, ignore_errors=True)  # after a commit it has another name
        self._prune(step)

    def _check_space(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed_bytes + SLACK_BYTES:
            what = f"a checkpoint needs about {size_text(needed_bytes + SLACK_BYTES)}, {size_text(free)} are free"
            fix = "(free some, or lower run.keep_last_checkpoints)"
            raise DiskFull(errno.ENOSPC, f"{what} {fix}", str(self.directory))

    def _seal(self, tmp: Path, step: int, meta: Mapping[str, Any]) -> None:
        """Sync every file, then write the manifest: if a manifest is visible, so are the files that it lists."""
        paths = sorted(_files(tmp))
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            entries = dict(zip((p.relative_to(tmp).as_posix() for p in paths), pool.map(_synced_entry, paths)))
        serial = max((m.serial for m in self._manifests()), default=0) + 1
        content: dict[str, Any] = {"format": FORMAT, "step": step, "serial": serial, "saved_at_s": time.time()}
        content |= {"meta": meta, "files": entries}
        content["digest"] = _digest(content)
        with open(tmp / MANIFEST, "w") as f:
            json.dump(content, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        for directory in (*(p for p in tmp.rglob("*") if p.is_dir()), tmp):
            sync_folder(directory)

    def _commit(self, tmp: Path, final: Path) -> None:
        if not final.exists():
            os.rename(tmp, final)
            return sync_folder(self.directory)
        old = self._aside(final, "old")  # saved again, after a rewind: a rename cannot replace a directory
        try:
            os.rename(tmp, final)
        except OSError:
            os.rename(old, final)
            raise
        sync_folder(self.directory)
        shutil.rmtree(old, ignore_errors=True)

    def _aside(self, path: Path, why: Literal["old", "trash"]) -> Path:
        """Rename a checkpoint in one atomic step, so that a partly removed directory never has the name of a
        checkpoint. Return the new path."""
        aside = path.with_name(f"{path.name}.{why}-{self._owner}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        return aside

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, damaged or not, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(m[1]) for p in self.directory.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir())

    def latest_valid(self, note: Callable[[str], None] = logger.warning) -> Path | None:
        """Return the newest undamaged checkpoint (the one saved last); None if there are no checkpoints. Raise
        ValueError if all are damaged, because starting over must be the user's decision. note: called with a line for
        each damaged checkpoint that is skipped."""
        readable = self._manifests()
        unreadable = [self._path(step) for step in self.steps() if step not in {m.step for m in readable}]
        skipped: list[str] = []
        for path in (*unreadable, *(self._path(m.step) for m in reversed(readable))):
            problem = damage(path)
            if problem is None and path in unreadable:
                problem = f"{MANIFEST} is of another step"
            if problem is None:
                return path
            note(f"{path} is damaged and left out: {problem}")
            skipped.append(f"{path.name}: {problem}")
        if skipped:
            raise Refused(
                f"no checkpoint in {self.directory} is usable: {'; '.join(skipped)}."
                " Restore one of them, or move them away to start from the beginning"
            )
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def _manifests(self) -> list[_Manifest]:
        """Return the manifests that can be read, in the order of saving."""
        found = ((step, _read_manifest(self._path(step))) for step in self.steps())
        return sorted((m for step, m in found if isinstance(m, _Manifest) and m.step == step), key=lambda m: m.serial)

    def _prune(self, just_saved: int) -> None:
        """Remove the checkpoints that retention does not keep, but never the last saved, the best, the kept steps, or
        one with an unreadable manifest (the user should look at it)."""
        manifests = self._manifests()
        keep = {just_saved, *(m.step for m in manifests[-self.keep_last :])}
        keep |= {m.step for m in manifests if self.keep_every_steps and m.step % self.keep_every_steps == 0}
        if self.keep_best is not None:
            values = {m.step: v for m in manifests if (v := _number(m.meta.get(self.keep_best))) is not None}
            keep |= {max(values, key=values.__getitem__)} if values else set()  # the first of equal ones
        for step in (m.step for m in manifests if m.step not in keep):
            try:
                shutil.rmtree(self._aside(self._path(step), "trash"))
            except OSError as e:
                logger.warning("%s could not be removed: %s", self._path(step), e)

    def _remove_leftovers(self) -> None:
        for path in sorted(self.directory.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or not _abandoned(path, match[3], int(match[4])):
                continue
            original = self.directory / match[1]
            if match[2] == "old" and not original.exists() and damage(path, quick=True) is None:
                os.rename(path, original)  # the writer died before the new checkpoint had its name
                sync_folder(self.directory)
            else:
                shutil.rmtree(path, ignore_errors=True)


def damage(path: Path, *, quick: bool = False) -> str | None:
    """Return a description of the checkpoint's damage; None if its files have the contents that were written and its
    weights can be read. quick: compare sizes only, no hashes."""
    manifest = _read_manifest(path)
    if isinstance(manifest, str):
        return manifest
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != entry["bytes"]:
            return f"{name} has {size} bytes instead of {entry['bytes']}"
    if not quick:
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            hashes = pool.map(_sha256, (path / name for name in manifest.files))
        for (name, entry), found in zip(manifest.files.items(), hashes):
            if found != entry["sha256"]:
                return f"{name} has another content than was written (sha256 {found[:12]}, not {entry['sha256'][:12]})"
        try:
            for name in manifest.files:
                if name.endswith(".safetensors"):
                    check_weights_file(path / name)
        except ValueError as e:
            return str(e)
    return None


def _read_manifest(path: Path) -> _Manifest | str:
    """Return the manifest of a checkpoint folder, or a description of its damage if the file of that name is anything
    else."""
    file = path / MANIFEST
    try:
        if not stat.S_ISREG((found := file.stat()).st_mode):
            return f"{MANIFEST} is no file"
        if found.st_size > _MOST_BYTES:
            return f"{MANIFEST} has {found.st_size} bytes"
        content = json.loads(file.read_text())
        if not isinstance(content, dict) or content.get("digest") != _digest(content):
            return f"{MANIFEST} was changed after it was written"
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except (ValueError, OSError, RecursionError) as e:
        return f"{MANIFEST} cannot be read: {e}"
    if content.get("format") != FORMAT:
        return f"{MANIFEST} has format {content.get('format')}, this version reads {FORMAT}"
    try:
        read = msgspec.convert(content, _Fields)
    except msgspec.ValidationError as e:
        return f"{MANIFEST} cannot be read: {e}"
    if outside := [name for name in read.files if Path(name).is_absolute() or ".." in Path(name).parts]:
        return f"{MANIFEST} names {outside[0][:80]!r}, which is no file of the checkpoint"
    entries = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in read.files.items()}
    return _Manifest(read.step, read.serial, read.meta, entries)


def _digest(content: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in content.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path}: a checkpoint holds plain files only; links and pipes do not survive a copy")
        if path.is_file():
            yield path


def _synced_entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as f:
        os.fsync(f.fileno())
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _abandoned(path: Path, host: str, pid: int) -> bool:
    """Return True if no process writes the folder any more: its writer, on this host, has ended, or nothing was written
    for an hour."""
    if host == socket.gethostname() and (pid == os.getpid() or not psutil.pid_exists(pid)):
        return True
    newest_s = max((p.lstat().st_mtime for p in (path, *path.rglob("*"))), default=0.0)
    return time.time() - newest_s > _ABANDONED_S


@contextmanager
def _reported_for(final: Path) -> Iterator[None]:
    """Raise each OSError of the block as SaveFailed or DiskFull for `final`, except a deadline that passed."""
    try:
        yield
    except OSError as e:
        if isinstance(e, SaveFailed) or is_late(e):
            raise
        kind = DiskFull if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else SaveFailed
        where = f" ({e.filename})" if e.filename else ""
        raise kind(e.errno or errno.EIO, f"checkpoint not written: {e.strerror or e}{where}", str(final)) from e


def is_late(e: OSError) -> bool:
    """Return True for a deadline that passed, an error without a number; errors of the disk have one."""
    return isinstance(e, TimeoutError) and e.errno is None


def _number(value: Any) -> float | None:
    """Return the value as a number for ranking; None if it cannot be ranked (no metric at this step, NaN)."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return value if plain else None
