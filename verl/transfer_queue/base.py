"""The sample data plane: rows are samples, columns are fields. Roles read and write; the driver routes refs only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from verl.batch import Ragged
from verl.types import Refs, Sample


class MediaStore(Protocol):
    """The content of media by its hash. Content exists as long as it has an owner: a row of the queue, a recorded step.
    Equal content is stored once. Any thread may call."""

    def put(self, content: bytes, owner: str) -> str:
        """Store content for an owner and return its hash, the reference in `Segment.media`."""
        ...

    def get(self, reference: str) -> bytes:
        """Return the content. ValueError where the store does not have it, or has it damaged."""
        ...

    def hold(self, references: Iterable[str], owner: str) -> None:
        """Add an owner to content that is there. ValueError, and no change, if some is not."""
        ...

    def drop(self, owners: Iterable[str]) -> None:
        """Remove owners, and the content that has no other one. An owner that is not there is no error."""
        ...

    def __len__(self) -> int:
        """Return the number of contents."""
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
        """The store of what the rows' media refer to, for all processes of the queue; None: it takes no such rows."""
        ...

    async def put(self, samples: Sequence[Sample]) -> Refs:
        """Store new rows. An id that exists already is a ValueError (no sample is doubled). The bytes stay with the
        caller's node."""
        ...

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        """Return these columns, with rows in the order of `refs`."""
        ...

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        """Set columns of these rows; existing values are replaced."""
        ...

    def having(self, refs: Refs, column: str) -> Refs:
        """Return those of these rows that have the column, in this order."""
        ...

    def columns(self, refs: Refs) -> list[str]:
        """Return the names of the columns that all or some of these rows have."""
        ...

    def drop(self, refs: Refs) -> None: ...

    def __len__(self) -> int: ...


def copy_media(source: MediaStore, into: MediaStore, references: Iterable[str], owner: str) -> None:
    """Give an owner in `into` this content of `source`; content that is in both is not read."""
    for reference in sorted(set(references)):
        try:
            into.hold([reference], owner)
        except ValueError:
            into.put(source.get(reference), owner)
