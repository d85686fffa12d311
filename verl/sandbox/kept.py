"""Pack the files of a session as text, and unpack them, inside of its sandbox. Standard library only."""

from __future__ import annotations

import binascii
import io
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

MAX_KEPT_BYTES = 32 << 20  # of a packed snapshot: as text it is a line of the socket


class SessionFiles:
    """Packs the files in /tmp that are not in the workspace as text, and unpacks them. The code may make files of any
    name and kind, so this happens inside of the sandbox without privileges, and outside the text is never unpacked."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, int, int]] = {}  # state of each file of the workspace, by path

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of kind "begin" or "keep"."""
        import tarfile
        import zlib

        try:
            value = self._begin(request) if request["kind"] == "begin" else self._keep(request["limits"])
        except (OSError, EOFError, ValueError, LookupError, TypeError, tarfile.TarError, zlib.error) as e:
            return {"status": "error", "why": f"{type(e).__name__}: {e}"[:500], "alive": True}
        return {"status": "ok", "value": value, "alive": True}

    def _begin(self, request: dict[str, Any]) -> str:
        import shutil
        import tarfile

        self._first = {path: _stamp(about) for path, about in _below(request["most"])}
        if request["kept"]:
            kept = json.loads(request["kept"])
            for path in (f"./{path}" for path in kept["gone"]):
                if os.path.lexists(path):
                    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
            with tarfile.open(fileobj=io.BytesIO(binascii.a2b_base64(kept["files"])), mode="r:gz") as archive:
                archive.extraction_filter = lambda member, path: member  # it can do no more than the code itself
                archive.extractall(".")
        return ""

    def _keep(self, limits: dict[str, Any]) -> str:
        import tarfile

        most, room, packed = 64 * limits["tmp_mb"], limits["tmp_mb"] << 20, _Bounded()
        missing = dict.fromkeys(self._first)
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for path, about in _below(most + len(self._first)):
                first, now = self._first.get(path), _stamp(about)
                if first == now or (first and stat.S_ISDIR(first[0]) and stat.S_ISDIR(about.st_mode)):
                    del missing[path]
                if first == now or not any(kind(about.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
                    continue  # pipes and sockets are not kept
                info = archive.gettarinfo(f"./{path}", path)
                most, room = most - 1, room - (info.size if info.isreg() else 0)
                if most < 0 or room < 0:
                    raise ValueError(f"more than tmp_mb={limits['tmp_mb']} MB, or {64 * limits['tmp_mb']} files")
                if info.isreg():  # or a pipe by now: no wait
                    with open(os.open(f"./{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                        archive.addfile(info, file)
                else:
                    archive.addfile(info)
        return json.dumps({"gone": list(missing), "files": binascii.b2a_base64(packed.getvalue()).decode()})


class _Bounded(io.BytesIO):
    def write(self, part: Any) -> int:
        if self.tell() + len(part) > MAX_KEPT_BYTES:
            raise ValueError(f"more than {MAX_KEPT_BYTES >> 20} MB when packed")
        return super().write(part)


def _stamp(about: os.stat_result) -> tuple[int, int, int]:
    """Return values of a file's status that change whenever it is written. They include the change time, which no code
    can set."""
    return about.st_mode, about.st_size, about.st_ctime_ns


def _below(most: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path in /tmp, status) of everything in /tmp, without following links. Raise ValueError for more than
    `most` entries."""
    todo = [""]
    while todo:
        folder = todo.pop()
        with os.scandir(f"./{folder}") as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                most -= 1
                if most < 0:
                    raise ValueError("too many files")
                yield folder + entry.name, about
                if stat.S_ISDIR(about.st_mode):
                    todo.append(f"{folder}{entry.name}/")
