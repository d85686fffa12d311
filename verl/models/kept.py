"""Values that are kept within a number of bytes: processed images, and what a tower returns for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KEPT_BYTES = 256 << 20
"""The bytes of one kind of value that a model keeps, at most."""
V = TypeVar("V")


class KeptByBytes(Generic[V]):
    """Values by name. If there is no space, the least recently used ones are dropped. bytes_of: the size of a value ·
    least: as many are kept whatever their size is"""

    def __init__(self, max_bytes: int, bytes_of: Callable[[V], int], *, least: int = 0) -> None:
        self._max_bytes, self._bytes_of, self._least = max_bytes, bytes_of, least
        self.clear()

    def clear(self) -> None:
        """Drop all values."""
        self._kept = OrderedDict[str, V]()
        self.nbytes = 0

    def of(self, name: str, make: Callable[[], V]) -> V:
        """Return the value of this name, which is made if it is not kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        found = self._kept[name] = make()
        self.nbytes += self._bytes_of(found)
        while self.nbytes > self._max_bytes and len(self._kept) > self._least:
            self.nbytes -= self._bytes_of(self._kept.popitem(last=False)[1])
        return found
