"""The index of a queue that stores its bytes elsewhere: the address of every column of every row. It imports no torch.

A *block* is a numbered run of bytes in a store (a shared-memory segment, an object). A *cell* is one column of one row:
(block, first byte, number of values, kind). A *kind* is a dtype with trailing dimensions. Rows are numbered, and a
column is an array over these numbers, so a call for a thousand rows is a few array operations. Requests and answers are
messages of scalars and packed numbers, for any transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from verl.errors import Refused
from verl.types import Refs

BLOCK, AT, COUNT, KIND = range(4)
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Kind(msgspec.Struct, array_like=True, frozen=True):
    """The type of a column's values."""

    dtype: str
    """The name of a torch dtype."""
    tail: tuple[int, ...]
    """Trailing dimensions."""
    width: int
    """Bytes of one value with its trailing dimensions."""


class PackedColumn(msgspec.Struct, array_like=True, frozen=True):
    """One column of a put or write, its rows one after the other."""

    name: str
    """The column."""
    kind: Kind
    """The type of its values."""
    at: int
    """Its first byte."""
    counts: bytes
    """[n] int64: values per row."""
    rows: bytes | None = None
    """[n] int64: positions of its rows among the ids; None: all of them."""


class Commit(msgspec.Struct, array_like=True, tag=True):
    """Add the bytes of a block from byte `base` to the index: `new` rows, or columns of existing rows."""

    ids: list[str]
    block: int
    base: int
    columns: list[PackedColumn]
    new: bool
    nbytes: int = 0
    """Bytes of the block, where an object store holds it."""


class Find(msgspec.Struct, array_like=True, tag=True):
    """Request the addresses of columns of these rows."""

    ids: list[str]
    columns: list[str]


class Having(msgspec.Struct, array_like=True, tag=True):
    """Request which of these rows have a column."""

    ids: list[str]
    column: str


class Names(msgspec.Struct, array_like=True, tag=True):
    """Request the names of the columns that at least one of these rows has."""

    ids: list[str]


class Drop(msgspec.Struct, array_like=True, tag=True):
    """Remove rows."""

    ids: list[str]


class Size(msgspec.Struct, array_like=True, tag=True):
    """Request the number of rows."""

    pass


class Room(msgspec.Struct, array_like=True, tag=True):
    """Reserve `nbytes` of an object store for new rows, which a `Commit` of the same size uses. A negative number
    releases a reservation."""

    nbytes: int


class Full(msgspec.Struct, tag=True):
    """The answer if there is no space now: the bytes in use, and their limit."""

    used: int
    limit: int


IndexRequest = Commit | Find | Having | Names | Drop | Size


class CellRuns(msgspec.Struct, array_like=True):
    """The addresses of the rows of a column, in the order requested."""

    counts: bytes
    """[n] int64: values per row."""
    runs: bytes
    """[k, 4] int64: (block, first byte, values, kind); adjacent rows of a block are joined."""


class Found(msgspec.Struct, tag=True):
    """The answer to `Find`."""

    columns: dict[str, CellRuns]
    """Column -> addresses."""
    kinds: dict[int, Kind]
    """Number -> kind."""
    blocks: dict[int, int]
    """Number of a block -> its generation, for stores that reuse blocks; else 0."""


class Rejected(msgspec.Struct, tag=True):
    """The reason of a ValueError in the requesting process. Nothing has changed."""

    reason: str
    """The text of the error."""
    of_user: bool = False
    """The error is a `Refused`: the user has to change the configuration."""

    def error(self) -> ValueError:
        return Refused(self.reason) if self.of_user else ValueError(self.reason)


Answer = Found | Rejected | Full | bytes | list[str] | int | None


class CellIndex:
    """The cells of all rows. free: called with each block that has no cell any more. Only one thread may call at a
    time."""

    def __init__(self, free: Callable[[int], object] = lambda block: None) -> None:
        self._free = free
        self._numbers: dict[str, int] = {}
        self._unused: list[int] = []
        self._capacity = 0
        self._cells: dict[str, Numbers] = {}  # column -> [capacity, 4]; block -1: the row has no such column
        self._kinds: list[Kind] = []
        self._kind_numbers: dict[Kind, int] = {}
        self._held: Counter[int] = Counter()  # cells per block

    def __len__(self) -> int:
        return len(self._numbers)

    def holds(self, block: int) -> bool:
        return block in self._held

    def answer(self, request: IndexRequest) -> Answer:
        try:
            match request:
                case Commit():
                    self.commit(request)
                case Find():
                    return self.find(request)
                case Having():
                    return self.having(request)
                case Names():
                    return self.names(request)
                case Drop():
                    self.drop(request)
                case Size():
                    return len(self)
            return None
        except ValueError as exc:
            return Rejected(str(exc))

    def commit(self, request: Commit) -> None:
        numbers = self._add(request.ids) if request.new else self._find(request.ids)
        every = _at(numbers)
        distinct = numbers if request.new or isinstance(every, slice) else np.unique(numbers)
        starts: dict[bytes, Numbers] = {}  # many columns have the same layout
        for packed in request.columns:
            rows = every if packed.rows is None else numbers[np.frombuffer(packed.rows, np.int64)]
            counts = np.frombuffer(packed.counts, np.int64)
            if packed.counts not in starts:
                starts[packed.counts] = np.cumsum(counts) - counts
            cells = self._cells.get(packed.name)
            if cells is None:
                cells = self._cells[packed.name] = np.full((self._capacity, 4), -1, np.int64)
            elif not request.new:
                self._forget(cells[every if distinct is numbers else distinct, BLOCK])
            made = np.empty((len(counts), 4), np.int64)
            made[:, BLOCK], made[:, COUNT], made[:, KIND] = request.block, counts, self._kind(packed.kind)
            made[:, AT] = starts[packed.counts] * packed.kind.width + (request.base + packed.at)
            cells[rows] = made
            self._held[request.block] += len(counts) if request.new else len(distinct)

    def find(self, request: Find) -> Found:
        numbers = self._find(request.ids)
        every = _at(numbers)
        places, kinds, blocks = {}, set(), set()
        for name in request.columns:
            cells = self._cells.get(name)
            found = np.full((len(numbers), 4), -1, np.int64) if cells is None else cells[every]
            missing = found[:, BLOCK] < 0
            if missing.any():
                what = f"{int(missing.sum())} of {len(numbers)} samples, e.g. {request.ids[int(missing.argmax())]}"
                raise ValueError(f"column {name!r} was not written for {what}")
            runs = self._runs(found)
            blocks.update(runs[:, BLOCK].tolist())
            kinds.update(runs[:, KIND].tolist())
            places[name] = CellRuns(found[:, COUNT].tobytes(), runs.tobytes())
        return Found(places, {k: self._kinds[k] for k in kinds}, dict.fromkeys(blocks, 0))

    def having(self, request: Having) -> bytes:
        """Return [n] bool, packed: True for the rows that have the column."""
        numbers, cells = self._find(request.ids), self._cells.get(request.column)
        return (np.zeros(len(numbers), np.bool_) if cells is None else cells[_at(numbers), BLOCK] >= 0).tobytes()

    def names(self, request: Names) -> list[str]:
        numbers = self._find(request.ids)
        return [name for name, cells in self._cells.items() if (cells[_at(numbers), BLOCK] >= 0).any()]

    def drop(self, request: Drop) -> None:
        numbers = np.unique(self._find(request.ids))
        every = _at(numbers)
        for name, cells in list(self._cells.items()):
            self._forget(cells[every, BLOCK])
            cells[every, BLOCK] = -1
            if not (cells[:, BLOCK] >= 0).any():
                del self._cells[name]
        for sample_id in set(request.ids):
            del self._numbers[sample_id]
        self._unused += numbers.tolist()

    def _add(self, ids: list[str]) -> Numbers:
        times = Counter(ids)
        doubled = [i for i in times if times[i] > 1 or i in self._numbers]
        if doubled:
            raise ValueError(f"samples are already in the queue: {doubled[:3]}; every id is put once")
        if len(ids) > len(self._unused):
            grown = max(2 * self._capacity, len(self._numbers) + len(ids), 1024)
            self._unused += range(self._capacity, grown)
            more = np.full((grown - self._capacity, 4), -1, np.int64)
            self._cells = {name: np.concatenate([cells, more]) for name, cells in self._cells.items()}
            self._capacity = grown
        at = len(self._unused) - len(ids)
        numbers, self._unused = self._unused[at:], self._unused[:at]
        self._numbers.update(zip(ids, numbers))
        return np.array(numbers, np.int64)

    def _find(self, ids: Sequence[str]) -> Numbers:
        found = list(map(self._numbers.get, ids))
        if None in found:
            missing = [i for i, n in zip(ids, found) if n is None]
            raise ValueError(f"{len(missing)} samples are not in the queue (never put, or dropped), e.g. {missing[0]}")
        return np.array(found, np.int64)

    def _kind(self, kind: Kind) -> int:
        if kind not in self._kind_numbers:
            self._kind_numbers[kind] = len(self._kinds)
            self._kinds.append(kind)
        return self._kind_numbers[kind]

    def _runs(self, cells: Numbers) -> Numbers:
        """Join cells that are adjacent in a block and of one kind: [n, 4] -> [k, 4]."""
        if not len(cells):
            return cells
        widths = np.array([k.width for k in self._kinds], np.int64)
        ends = cells[:, AT] + cells[:, COUNT] * widths[cells[:, KIND]]
        follows = (cells[1:, BLOCK] == cells[:-1, BLOCK]) & (cells[1:, KIND] == cells[:-1, KIND])
        follows &= cells[1:, AT] == ends[:-1]
        first = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(~follows) + 1])
        runs = cells[first]
        runs[:, COUNT] = np.add.reduceat(cells[:, COUNT], first)
        return runs

    def _forget(self, blocks: Numbers) -> None:
        """Subtract removed cells, given their blocks, from the counts, and free blocks that have no cell left."""
        alike = len(blocks) and (blocks == blocks[0]).all()  # the usual case, much faster than a sort
        found = (blocks[:1], np.array([len(blocks)])) if alike else np.unique(blocks, return_counts=True)
        for block, cells in zip(*(x.tolist() for x in found)):
            if block >= 0:
                self._held[block] -= cells
                if not self._held[block]:
                    del self._held[block]
                    self._free(block)


class Registry:
    """An index together with the handles of its blocks (object references, keys) and their sizes. It is in this module,
    which imports little, because it runs as a Ray actor. max_bytes: the size of the store; new rows may use half of
    it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._limit = max_bytes, max_bytes // 2
        self._used = 0  # by blocks, and reserved for those that are being written
        self._held: dict[int, tuple[Any, int]] = {}
        self._freed: list[Any] = []
        self._index = CellIndex(free=self._free)
        self._made = 0

    def answer(self, message: bytes, held: list[Any]) -> tuple[Answer, list[Any], list[Any]]:
        """Answer a message. held: the handle of the committed block, in a list because Ray would fetch a bare
        reference. Return (the answer, the handles of the blocks in it, the handles of blocks that were freed)."""
        request = msgspec.msgpack.decode(message, type=IndexRequest | Room)
        if isinstance(request, Room):
            if request.nbytes > self._limit:
                return never_fit(request.nbytes, "new rows", self._limit, self._max_bytes), [], []
            if request.nbytes > 0 and self._used + request.nbytes > self._limit:
                return Full(self._used, self._limit), [], []
            self._used += request.nbytes
            return None, [], []
        if isinstance(request, Commit):
            self._made += 1
            request.block, self._held[self._made] = self._made, (held[0], request.nbytes)
            self._used += 0 if request.new else request.nbytes
        answer = self._index.answer(request)
        if isinstance(request, Commit) and not self._index.holds(request.block):  # refused, or no row
            self._free(request.block)
        freed, self._freed = self._freed, []
        return answer, [self._held[b][0] for b in answer.blocks] if isinstance(answer, Found) else [], freed

    def _free(self, block: int) -> None:
        held, nbytes = self._held.pop(block)
        self._used -= nbytes
        self._freed.append(held)


def _at(numbers: Numbers) -> Numbers | slice:
    """Return an index of numpy for these rows: a slice if they are adjacent, which is much faster."""
    n = len(numbers)
    if n and numbers[-1] - numbers[0] == n - 1 and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[0]) + n)
    return numbers


def encoded(message: object) -> bytes:
    """Encode a request or an answer with msgpack."""
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def _plain(name: object) -> str:
    """Encode a str subclass, such as numpy's, as a str."""
    if not isinstance(name, str):
        raise NotImplementedError(f"{type(name).__name__} in a message of the queue")
    return str(name)


def pick(refs: Refs, having: bytes) -> Refs:
    """Return the refs for which `having`, one byte per ref, is true."""
    return Refs(ref for ref, has in zip(refs, having, strict=True) if has)


def full(found: Full, wanted: int) -> str:
    """Return the error text for `wanted` bytes that do not fit now."""
    return (
        f"{wanted:,} bytes are wanted and {found.used:,} of {found.limit:,} in use, by rows that were not "
        "dropped yet or are still read; raise queue.engine_options.max_bytes, or let a step have fewer rows"
    )


def never_fit(nbytes: int, what: str, limit: int, max_bytes: int) -> Rejected:
    """Return the answer for bytes that are above the limit of an empty queue. what: `new rows` or `columns`."""
    return Rejected(
        f"{nbytes:,} bytes never fit into the queue: {what} may take {limit:,} "
        f"(queue.engine_options.max_bytes={max_bytes:,}); raise it, or let a step have fewer rows",
        of_user=True,
    )


def waited(rows: int, timeout_s: float, found: Full, wanted: int) -> TimeoutError:
    """Return the error for new rows that got no space within `timeout_s`."""
    message = f"{rows} new rows waited {timeout_s:g} s for room in the queue"
    return TimeoutError(f"{message}: {full(found, wanted)}")
