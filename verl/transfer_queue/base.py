"""The sample data plane: rows are samples, columns are fields. Roles read and write; the driver routes refs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from verl.batch import Ragged
from verl.types import Refs, Sample


class TransferQueue(Protocol):
    """A row exists from `put` until `drop`. Reading a row or column that is not there is a ValueError that names it.
    Each queue of a run is a partition of its own: others of the same store may hold the same ids.

    Everything of a sample is a column (see `rows.py`): what was sampled, its reward, the outputs of models,
    advantages and the weights of the loss. Whoever made something writes it once; nothing is put a second time. Any
    thread may call. What was written is a copy. What was read stays as it was until the reader lets go of it, whatever
    is written or dropped meanwhile; it may be a view, and nobody writes into it. A call that is refused has changed
    nothing.
    """

    async def put(self, samples: Sequence[Sample]) -> Refs:
        """Store new rows, where they were made; an id that is already there is a ValueError (no sample is doubled)."""
        ...

    def read(self, refs: Refs, columns: Sequence[str]) -> dict[str, Ragged]:
        """These columns, rows in the order of `refs`."""
        ...

    def write(self, refs: Refs, columns: Mapping[str, Ragged]) -> None:
        """Set columns of these rows; written again, they are replaced."""
        ...

    def having(self, refs: Refs, column: str) -> Refs:
        """Those of these rows that have the column, in this order."""
        ...

    def columns(self, refs: Refs) -> list[str]:
        """The names of what is stored of these rows: of all, or of some of them."""
        ...

    def drop(self, refs: Refs) -> None: ...

    def __len__(self) -> int: ...
