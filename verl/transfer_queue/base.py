"""The table of samples through which roles exchange data: rows are samples, columns are fields. Roles read and write
columns; the driver passes on refs only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.batch import Ragged
from verl.types import Refs, Sample


class MediaStore(Protocol):
    """The content of media by its hash. Content is stored once, however many owners it has (rows of the queue, recorded
    steps), and is deleted with its last owner. Any thread may call."""

    readers: dict[str, Any]
    """The readers of this content for a model in this process (`Pictures`), by the model's folder."""

    def put(self, content: bytes, owner: str) -> str:
        """Store content for an owner and return its hash, the reference in `Segment.media`."""
        ...

    def get(self, reference: str) -> bytes:
        """Return the content. Raise ValueError if the store does not have it, or if it is damaged."""
        ...

    def hold(self, references: Iterable[str], owner: str) -> None:
        """Add an owner to content that is stored. Raise ValueError, and change nothing, if some is missing."""
        ...

    def drop(self, owners: Iterable[str]) -> None:
        """Remove owners, and the content that has no other owner. An unknown owner is not an error."""
        ...

    def __len__(self) -> int:
        """Return the number of stored contents."""
        ...


class MediaFiles(MediaStore, Protocol):
    """A store of media in the files of a folder, which several processes open."""

    root: Path

    def path(self, reference: str) -> Path:
        """Return the file with this content."""
        ...


class TransferQueue(Protocol):
    """A table of samples. A row exists from `put` until `drop`. Reading a row or column that does not exist is a
    ValueError that names it. Each queue of a run is a partition of its own: other queues in the same store may hold the
    same ids.

    Every array of a sample is a column (verl/columns.py lists them): the sampled tokens, the outputs of models,
    advantages and the weights of the loss. Its facts are one column. The producer of a value writes it once;
    nothing is put a second time. Any thread may call. A write copies its values. A read result stays unchanged
    until the reader releases it, also when rows are written or dropped meanwhile; it may be a view, so readers must
    not write into it. A refused call changes nothing.
    """

    @property
    def media(self) -> MediaStore | None:
        """The store of the content that the media of the rows refer to, shared by all processes of the queue; None: the
        queue refuses rows with media."""
        ...

    async def put(self, samples: Sequence[Sample]) -> Refs:
        """Store new rows and return their refs. Raise ValueError if an id exists already, so that no sample is doubled.
        The bytes stay on the caller's node."""
        ...

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        """Return these columns, with rows in the order of `refs`."""
        ...

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        """Set columns of these rows; existing values are replaced."""
        ...

    def having(self, refs: Refs, column: str) -> Refs:
        """Return the refs of the rows that have the column, in the given order."""
        ...

    def columns(self, refs: Refs) -> list[str]:
        """Return the names of the columns that at least one of these rows has."""
        ...

    def drop(self, refs: Refs) -> None: ...

    def __len__(self) -> int: ...


def copy_media(source: MediaStore, into: MediaStore, references: Iterable[str], owner: str) -> None:
    """Copy these references' content from `source` into `into` and add an owner there. Content that `into` has already
    is not read."""
    for reference in sorted(set(references)):
        try:
            into.hold([reference], owner)
        except ValueError:
            into.put(source.get(reference), owner)
