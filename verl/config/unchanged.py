"""Facts of files that are read once for as long as these do not change."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

_Facts = TypeVar("_Facts")
_FactsOf = TypeVar("_FactsOf", covariant=True)
_Stamp = tuple[tuple[str, int, int, int], ...]


class Describes(Protocol[_FactsOf]):
    """A function from a model's folder, and that of another tokenizer, to facts of them."""

    def __call__(self, path: str, tokenizer_path: str | None = None) -> _FactsOf: ...


def while_unchanged(describe: Callable[[str, str | None], _Facts]) -> Describes[_Facts]:
    """Return the function with a memory: it reads a model's folder, and that of a tokenizer, again once a file of them
    has another size, time or place. A search over placements asks for the same facts thousands of times."""

    @functools.lru_cache(maxsize=32)
    def kept(path: str, tokenizer_path: str | None, stamps: tuple[_Stamp, _Stamp]) -> _Facts:
        return describe(path, tokenizer_path)

    def described(path: str, tokenizer_path: str | None = None) -> _Facts:
        if not Path(path).expanduser().is_dir():  # the name of a model in a cache, or an error
            return describe(path, tokenizer_path)
        return kept(path, tokenizer_path, (_stamp(path), _stamp(tokenizer_path)))

    functools.update_wrapper(described, describe)
    return described


def file_while_unchanged(read: Callable[[Path], _Facts]) -> Callable[[Path], _Facts]:
    """Return the function with a memory: it reads a file again once it has another size, time or place. Callers do not
    change the result."""

    @functools.lru_cache(maxsize=256)
    def kept(file: Path, stamp: tuple[int, int, int]) -> _Facts:
        return read(file)

    def found(file: Path) -> _Facts:
        of = file.stat()
        return kept(file, (of.st_size, of.st_mtime_ns, of.st_ino))

    functools.update_wrapper(found, read)
    return found


def _stamp(path: str | None) -> _Stamp:
    """Return (name, bytes, time, inode) of each file of a folder; () without one."""
    folder = None if path is None else Path(path).expanduser()
    if folder is None or not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, of.st_size, of.st_mtime_ns, of.st_ino) for name, of in stats))
