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
        self._used = set[str]()  # the names of the values that were used since `mark`
        self.nbytes = 0

    def mark(self) -> None:
        """Begin a step: values that are used from now on are those of the step, beside which `has_space` counts."""
        self._used.clear()

    def has_space(self) -> bool:
        """Return True if one more value, as large as the largest, can be kept beside all that were used since
        `mark`."""
        sizes = {name: self._bytes_of(value) for name, value in self._kept.items()}
        used = sum(size for name, size in sizes.items() if name in self._used)
        return used + max(sizes.values(), default=0) <= self._max_bytes

    def get(self, name: str) -> V | None:
        """Return the value of this name, which is then the one that was used last; None if it is not kept."""
        if (found := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            self._used.add(name)
        return found

    def of(self, name: str, make: Callable[[], V]) -> V:
        """Return the value of this name, which is made if it is not kept."""
        if (kept := self.get(name)) is not None:
            return kept
        found = self._kept[name] = make()
        self._used.add(name)
        self.nbytes += self._bytes_of(found)
        while self.nbytes > self._max_bytes and len(self._kept) > self._least:
            dropped, value = self._kept.popitem(last=False)
            self._used.discard(dropped)
            self.nbytes -= self._bytes_of(value)
        return found
