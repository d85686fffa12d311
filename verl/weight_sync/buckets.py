"""Weights through two buckets, in shared memory or on a GPU, so that a whole version is stored nowhere on the way: the
trainer fills one bucket while the replicas read the other. Both sides keep their state in a ledger, a file of shared
memory beside the buckets.

Trainer and replicas delay each other. A replica overwrites its weights while it samples nothing, and samples again when
the trainer has confirmed the version. The trainer does not wait for a replica that breaks off or is given up. A tensor
is never split: a bucket is at least as large as the largest tensor."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from torch import Tensor

from verl.weight_sync import device
from verl.weight_sync.base import Bucket, Entry, Passed, Readers, SyncError, TensorStream, WeightSource, checksum
from verl.weight_sync.shm import (
    SHM,
    TAIL_BYTES,
    ShmStream,
    TensorLocation,
    blank,
    first_byte,
    num_bytes_of,
    place_tensors,
    this_host,
)

TRANSPORT = "verl.weight_sync.buckets:open_weights"
QUIET_S = 600.0  # without progress of the other side, after which it counts as lost
SOON_S, LATER_S, SPINS = 0.0002, 0.002, 200  # pauses between reads of the ledger: the second one after SPINS reads
AFTER_SHARE = 0.8  # the share of the timeout for readers that had to wait for another one
MOST_READERS = 1024
NO_TURN = -1
MOST_CHECKSUM = 2**32 - 1
COMING, WHOLE, BROKEN = range(3)


class Ledger:
    """The state of a stream: 64-bit words of a file, each written by one side alone.

    The sender writes the turn (the number of its publish), the number of buckets, how many of them are filled, the
    state, and the seconds of silence that readers must allow. For each reader the file has three words: the number of
    buckets that it has read and of which turn, the turn in which it was given up, and the last turn that it left. No
    word returns to an earlier turn, since an abandoned reader may be closed turns later, when it is garbage
    collected."""

    TURN, BUCKETS, FILLED, STATE, QUIET = range(5)
    HEAD = 8
    READ, GIVEN_UP, LEFT = range(3)
    OF_READER = 3
    STEP = 1 << 20  # buckets of a turn, at most

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @staticmethod
    def new(path: Path) -> Ledger:
        path.write_bytes(NO_TURN.to_bytes(8, "little", signed=True) * Ledger._word(MOST_READERS, Ledger.READ))
        return Ledger(path)

    @classmethod
    def _word(cls, reader: int, what: int) -> int:
        return cls.HEAD + cls.OF_READER * reader + what

    def begin(self, turn: int, buckets: int, quiet_s: float = 0.0) -> None:
        """Begin a turn, as the sender. quiet_s: the silence that readers must allow."""
        assert buckets < self.STEP
        self._words[self.QUIET] = math.ceil(quiet_s)
        self._words[self.FILLED], self._words[self.STATE], self._words[self.BUCKETS] = 0, COMING, buckets
        self._words[self.TURN] = turn  # written last, since the other words belong to this turn

    def fill(self, buckets: int) -> None:
        """Record how many buckets the sender has filled."""
        self._words[self.FILLED] = buckets

    def end(self, state: int) -> None:
        """Record that the version is `WHOLE` or `BROKEN`."""
        self._words[self.STATE] = state

    def give_up(self, turn: int, reader: int) -> None:
        """Record that the sender waits no more for this reader."""
        self._words[self._word(reader, self.GIVEN_UP)] = turn

    def read(self, turn: int, reader: int, buckets: int) -> None:
        """Record how many buckets this reader has read."""
        self._raise(self._word(reader, self.READ), turn * self.STEP + buckets)

    def leave(self, turn: int, reader: int) -> None:
        """Record that this reader reads no more."""
        self._raise(self._word(reader, self.LEFT), turn)

    def _raise(self, word: int, value: int) -> None:
        if self._words[word] < value:
            self._words[word] = value

    @property
    def turn(self) -> int:
        return self._words[self.TURN]

    @property
    def buckets(self) -> int:
        return self._words[self.BUCKETS]

    @property
    def filled(self) -> int:
        return self._words[self.FILLED]

    @property
    def quiet_s(self) -> int:
        return self._words[self.QUIET]

    @property
    def state(self) -> int:
        return self._words[self.STATE]

    def given_up(self, turn: int, reader: int) -> bool:
        return self._words[self._word(reader, self.GIVEN_UP)] == turn

    def left(self, turn: int, reader: int) -> bool:
        return self._words[self._word(reader, self.LEFT)] >= turn

    def behind(self, turn: int, readers: int, buckets: int) -> list[int]:
        """Return the readers that have read fewer than `buckets` buckets of that turn, and were not given up and did
        not leave."""
        wanted = turn * self.STEP + buckets
        there = [i for i in range(readers) if self._words[self._word(i, self.READ)] < wanted]
        return [i for i in there if not self.given_up(turn, i) and not self.left(turn, i)]


class BucketOutlet:
    """The `StreamingOutlet` of two buckets. It can be pickled until `announce` is called, and is used by one
    process."""

    transport = TRANSPORT

    def __init__(self, name: str, bucket_bytes: int, *, on_gpu: bool = False) -> None:
        self.name, self._bucket_bytes, self._on_gpu = name, bucket_bytes, on_gpu
        self._shapes: dict[str, Entry] = {}
        self._plan: list[list[str]] = []
        self._slots: Sequence[Slot] = ()
        self._ledger: Ledger | None = None
        self.room = (0, 0)  # bytes of the longest index, and of the largest bucket

    def source(self, version: int, turn: int, reader: int, manifest: Mapping[str, Entry], at: str) -> WeightSource:
        assert reader < MOST_READERS, f"{MOST_READERS} replicas at most read one version at a time"
        return WeightSource(version, self.transport, f"{at}:{version}:{turn}:{reader}", manifest, passes=True)

    def announce(self, shapes: Mapping[str, Entry]) -> str:
        if self._ledger is not None:
            return self.name
        self._shapes, self._plan = dict(shapes), bucket_plan(shapes, self._bucket_bytes)
        buckets = [place_tensors({name: shapes[name] for name in names}) for names in self._plan]
        index_bytes = max((len(_encoded(parts, longest=True)) for parts, _ in buckets), default=0)
        room = max((room for _, room in buckets), default=0)
        self._slots = [Slot(_at(self.name, turn), index_bytes, room, on_gpu=self._on_gpu) for turn in range(2)]
        self._ledger, self.room = Ledger.new(ledger_of(self.name)), (index_bytes, room)
        return self.name

    def stage(self, version: int, shapes: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> str:
        raise AssertionError("who reads it is known before: it is streamed")

    def stream(self, version: int, tensors: Iterable[Passed], readers: Readers) -> None:
        ledger, coming = self._ledger, iter(tensors)
        assert ledger is not None, "it was not announced"
        # the sender may wait this long for another reader
        ledger.begin(readers.turn, len(self._plan), 2 * readers.timeout_s)
        until_s = time.monotonic() + readers.timeout_s
        for number, names in enumerate(self._plan):
            self._wait(ledger, readers, number - 1, until_s)  # its content has been read
            parts, _ = place_tensors({name: self._shapes[name] for name in names})
            self._slots[number % 2].fill(version, parts, islice(coming, len(names)))
            ledger.fill(number + 1)
        assert next(coming, None) is None, "more came than was announced"

    def _wait(self, ledger: Ledger, readers: Readers, buckets: int, until_s: float) -> None:
        """Wait until all readers have read this number of buckets, and give up those that have not by `until_s`.
        Readers get AFTER_SHARE of the timeout in any case, since they may have waited, like the sender, for a reader
        that was given up."""
        looks = _looks(max(until_s, time.monotonic() + readers.timeout_s * AFTER_SHARE))
        while buckets > 0 and (late := ledger.behind(readers.turn, readers.count, buckets)):
            if not next(looks):
                for reader in late:
                    ledger.give_up(readers.turn, reader)

    def commit(self, turn: int) -> None:
        assert self._ledger is not None and self._ledger.turn == turn
        self._ledger.end(WHOLE)

    def break_off(self, turn: int) -> None:
        if self._ledger is not None:
            self._ledger.begin(turn, 0)  # its readers need the turn, even if the stream had not begun
            self._ledger.end(BROKEN)

    def lose(self, turn: int, reader: int) -> None:
        if self._ledger is not None:
            self._ledger.give_up(turn, reader)


class Slot:
    """One bucket: in a file of shared memory, laid out like a version (shm.py), or on a GPU, with a handle in that
    file."""

    def __init__(self, path: Path, index_bytes: int, room: int, *, on_gpu: bool) -> None:
        self._first = first_byte(index_bytes)
        self._memory = device.allocated(room) if on_gpu else None
        self._handle = b"" if self._memory is None else device.handle_of(self._memory)
        self._file = blank(path, self._first + (len(self._handle) if on_gpu else room) + TAIL_BYTES)

    def fill(self, version: int, parts: Sequence[TensorLocation], tensors: Iterable[Passed]) -> None:
        offset = self._file.memory[self._first :] if self._memory is None else self._memory
        sums = dict[str, int | None]()
        for part, (name, tensor, found) in zip(parts, tensors, strict=True):
            assert name == part.name, f"{name} comes where {part.name} was told of"
            sums[name] = found
            into = offset[part.start : part.start + part.num_bytes].view(tensor.dtype).view(part.shape)
            into.copy_(tensor.detach())
        if self._memory is not None:
            device.synchronize(self._memory)
        self._file.describe(
            version, _encoded([_with_checksum(part, sums) for part in parts]), self._first, self._handle
        )


class BucketStream(TensorStream):
    """The `TensorStream` of one reader and one version, which the sender may not have begun yet."""

    def __init__(self, address: str) -> None:
        self._name, version, turn, reader = address.rsplit(":", 3)
        self._version, self._turn, self._reader = int(version), int(turn), int(reader)
        self.quiet_s = QUIET_S  # at least

    @property
    def version(self) -> int:
        return self._version

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with contextlib.closing(self.buckets()) as buckets:
            for bucket in buckets:
                for name, tensor in bucket.tensors():
                    found = bucket.checksums[name]
                    if found is not None and checksum(tensor) != found:
                        raise SyncError(f"version {self._version}: {name} is not what its checksum says")
                    yield name, tensor

    def buckets(self) -> Generator[Bucket, None, None]:
        """Yield the buckets, and end when the sender has confirmed the version. The sender does not wait for a reader
        that closes the generator earlier."""
        try:
            ledger = Ledger(ledger_of(self._name))
        except FileNotFoundError:
            raise SyncError(
                f"{ledger_of(self._name)} is not on this host ({this_host()}): buckets pass through the memory of "
                "one host, that of the trainer's first rank"
            ) from None
        whole = False
        try:
            self._until(ledger)
            self.quiet_s = max(QUIET_S, ledger.quiet_s)
            for number in range(ledger.buckets):
                self._until(ledger, filled=number + 1)
                yield self._opened(_at(self._name, number % 2))
                ledger.read(self._turn, self._reader, number + 1)
            self._until(ledger, whole=True)
            whole = True
        finally:
            if not whole:
                ledger.leave(self._turn, self._reader)

    def _opened(self, path: Path) -> Bucket:
        found = ShmStream(path)
        if found.version != self._version:
            raise SyncError(f"version {self._version} was expected in {path}, and {found.version} is there")
        return Bucket(str(path), {part.name: part.checksum for part in found.index[0]}, found.views)

    def _until(self, ledger: Ledger, *, filled: int = 0, whole: bool = False) -> None:
        """Wait until the sender has begun the version, has filled this number of buckets, and with `whole` has
        confirmed the version. Raise SyncError if it breaks off, gives this reader up, or is silent for `quiet_s`."""
        looks, at = _looks(time.monotonic() + self.quiet_s), f"version {self._version}"
        while True:
            ready = ledger.turn == self._turn and ledger.filled >= filled
            ready &= not whole or ledger.state == WHOLE
            if ledger.turn > self._turn:  # read after the other words, which may be of that turn
                raise SyncError(f"{at}: its sender sends another version by now")
            if ledger.given_up(self._turn, self._reader):
                raise SyncError(f"{at}: its sender waits no more for this reader")
            if ledger.turn == self._turn and ledger.state == BROKEN:
                raise SyncError(f"{at}: its sender broke it off")
            if ready:
                return
            if not next(looks):
                raise SyncError(f"{at}: nothing came of it for {self.quiet_s:g} s")


def open_weights(address: str) -> BucketStream:
    return BucketStream(address)


def bucket_plan(shapes: Mapping[str, Entry], bucket_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of each bucket, in their order. A larger tensor has a bucket of its own."""
    found: list[list[str]] = []
    room = 0
    for name, entry in shapes.items():
        needs = num_bytes_of(entry)
        if not found or needs > room:
            found.append([])
            room = bucket_bytes
        found[-1].append(name)
        room -= needs
    return found


def _encoded(parts: Sequence[TensorLocation], *, longest: bool = False) -> bytes:
    if longest:
        parts = [_with_checksum(part, {part.name: MOST_CHECKSUM}) for part in parts]
    return msgspec.msgpack.encode(parts)


def _with_checksum(part: TensorLocation, sums: Mapping[str, int | None]) -> TensorLocation:
    return TensorLocation(part.name, part.dtype, part.shape, part.start, part.num_bytes, sums[part.name])


def _at(name: str, what: object) -> Path:
    return SHM / f"{name}-{what}"


def ledger_of(name: str) -> Path:
    """Return the path of the ledger of the stream with this name."""
    return _at(name, "ledger")


def _looks(until_s: float) -> Iterator[bool]:
    """Sleep before each value, and yield False once the deadline `until_s` has passed."""
    spins = 0
    while True:
        time.sleep(SOON_S if spins < SPINS else LATER_S)
        spins += 1
        yield time.monotonic() < until_s
