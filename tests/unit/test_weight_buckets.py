"""Two buckets between a sender and readers of different speed: what each reads, the waits, and the memory."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from started import Program

from verl.rollout.api import deliver_buckets
from verl.rollout.process import free_port
from verl.weight_sync import buckets, relay, shm
from verl.weight_sync.base import Bucket, Passed, Readers, SyncError, WeightSource, checksum
from verl.weight_sync.buckets import BucketOutlet, BucketStream, Ledger, bucket_plan
from verl.weight_sync.record import entry_of
from verl.weight_sync.relay import RelayOutlet, RelayStream

Tensors = dict[str, torch.Tensor]
BUCKET = 1000  # bytes


FAR = dict[str, str]()  # where the buckets of a name are read over the network


@pytest.fixture(params=["here", "far"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """far: by readers of another host, as all here are then."""
    made = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex}"  # else others remove them as those of the dead
    if request.param == "far":
        FAR[made] = ""
        monkeypatch.setattr(relay, "ledger_of", lambda name: Path("/nowhere") / name)
    yield made
    FAR.pop(made, None)
    shm.remove(made)


@pytest.fixture
def near() -> Iterator[str]:
    made = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex}"
    yield made
    shm.remove(made)


def tensors(seed: int, count: int = 40) -> Tensors:
    """Return tensors of different sizes: some share a bucket, some are larger than one, one is empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(7,), (11, 13), (64, 8), (3, 5), (0,)]
    found = {f"t{i}": torch.randn(sizes[i % 5], generator=generator) for i in range(count)}
    found["half"] = torch.randn(33, generator=generator).bfloat16()
    return found


def outlet(name: str, of: Tensors, size: int = BUCKET) -> BucketOutlet:
    made = RelayOutlet(size, host="127.0.0.1") if name in FAR else BucketOutlet(name, size)
    at = made.announce({n: entry_of(t) for n, t in of.items()})
    if name in FAR:
        FAR[name] = at
    return made


def opened(address: str) -> BucketStream:
    name, _, rest = address.partition(":")
    return RelayStream(f"{FAR[name]}:{rest}") if name in FAR else BucketStream(address)


def address(name: str, turn: int, reader: int = 0, version: int | None = None) -> str:
    return f"{name}:{turn if version is None else version}:{turn}:{reader}"


def passing(of: Tensors, slow: Callable[[], object] = lambda: None) -> Iterator[Passed]:
    for n, t in of.items():
        slow()
        yield Passed(n, t, checksum(t))


def test_a_plan_keeps_the_order_and_no_bucket_is_larger_than_it_must_be() -> None:
    shapes = {n: entry_of(t) for n, t in tensors(0).items()}
    found = bucket_plan(shapes, BUCKET)
    assert [n for names in found for n in names] == list(shapes)
    sizes = [sum(shm.num_bytes_of(shapes[n]) for n in names) for names in found]
    assert all(size <= BUCKET or len(names) == 1 for size, names in zip(sizes, found))
    for before, after in zip(found, found[1:]):  # the next one's first did not fit
        assert sum(shm.num_bytes_of(shapes[n]) for n in [*before, after[0]]) > BUCKET
    assert bucket_plan({}, BUCKET) == []


@pytest.mark.parametrize("seed", range(4))
def test_readers_of_unlike_speed_get_every_bit_of_every_version(name: str, seed: int) -> None:
    """Each tensor as it was when the reader took its bits, which it does at a moment of its own choice."""
    readers, turns = 3, 4
    out, draw = outlet(name, tensors(0)), random.Random(seed)
    pauses = [[draw.choice((0.0, 0.0, 0.002)) for _ in range(50)] for _ in range(readers + 1)]

    def read(turn: int, reader: int) -> Tensors:
        came = {}
        for i, (n, t) in enumerate(opened(address(name, turn, reader)).tensors()):
            time.sleep(pauses[reader][i])
            came[n] = t.clone()
        return came

    with ThreadPoolExecutor(readers) as pool:
        for turn in range(turns):
            sent = tensors(turn)
            reading = [pool.submit(read, turn, reader) for reader in range(readers)]
            slow = iter(pauses[-1])
            out.stream(turn, passing(sent, lambda s=slow: time.sleep(next(s))), Readers(turn, readers, 60.0))
            out.commit(turn)
            for one in reading:
                came = one.result(60)
                assert came.keys() == sent.keys() and all(torch.equal(came[n], sent[n]) for n in sent)


def test_nobody_has_all_before_the_sender_has_said_so(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)
    for turn, end in enumerate((out.commit, out.break_off)):
        came: list[str] = []
        with ThreadPoolExecutor(1) as pool:
            stream = opened(address(name, turn))
            reading = pool.submit(lambda s=stream, c=came: c.extend(n for n, _ in s.tensors()))
            out.stream(turn, passing(of), Readers(turn, 1, 60.0))
            while Ledger(shm.SHM / f"{out.name}-ledger").behind(turn, 1, len(bucket_plan(out._shapes, BUCKET))):
                time.sleep(0.001)
            with pytest.raises(TimeoutError):  # all is there
                reading.result(0.1)
            end(turn)
            if turn:
                with pytest.raises(SyncError, match="its sender broke it off"):
                    reading.result(60)
            else:
                reading.result(60)
                assert came == list(of)


def test_a_reader_that_reads_more_than_it_may_is_told_by_the_checksum(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, opened(address(name, 0)).tensors())
        out.stream(0, (Passed(n, t, checksum(t) ^ (n == "t6")) for n, t in of.items()), Readers(0, 1, 60.0))
        with pytest.raises(SyncError, match="version 0: t6 is not what its checksum says"):
            reading.result(60)


def test_who_leaves_in_the_middle_is_waited_for_no_more(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)

    def some() -> int:
        stream = opened(address(name, 0, 1)).tensors()
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        return 1

    with ThreadPoolExecutor(2) as pool:
        reading, left = pool.submit(list, opened(address(name, 0)).tensors()), pool.submit(some)
        out.stream(0, passing(of), Readers(0, 2, 60.0))
        out.commit(0)
        assert left.result(60) == 1 and len(reading.result(60)) == len(of)


def test_who_does_not_come_is_given_up_and_hears_of_it(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, opened(address(name, 0)).tensors())
        out.stream(0, passing(of), Readers(0, 2, 0.5))
        out.commit(0)
        assert len(reading.result(60)) == len(of), "the other one was not given up with it"
    with pytest.raises(SyncError, match="version 0: its sender waits no more for this reader"):
        list(opened(address(name, 0, 1)).tensors())


def test_who_is_given_up_by_others_holds_up_nobody(name: str) -> None:
    """From another thread, while the sender waits for it."""
    of = tensors(0)
    out = outlet(name, of)
    lose = threading.Timer(0.2, out.lose, (0, 0))
    lose.start()
    out.stream(0, passing(of), Readers(0, 1, 600.0))
    lose.join()


def test_what_was_broken_off_is_never_whole(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)

    def breaks() -> Iterator[Passed]:
        yield from list(passing(of))[:3]
        raise FloatingPointError("diverged")

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, opened(address(name, 0)).tensors())
        with pytest.raises(FloatingPointError):
            out.stream(0, breaks(), Readers(0, 1, 60.0))
        out.break_off(0)
        with pytest.raises(SyncError, match="version 0: its sender broke it off"):
            reading.result(60)
        # it may be broken off when all was read, or before it began
        reading = pool.submit(list, opened(address(name, 1)).tensors())
        out.stream(1, passing(of), Readers(1, 1, 60.0))
        out.break_off(1)
        with pytest.raises(SyncError, match="version 1: its sender broke it off"):
            reading.result(60)
        out.break_off(2)
        with pytest.raises(SyncError, match="version 2: its sender broke it off"):
            list(opened(address(name, 2)).tensors())


def test_who_comes_after_the_next_one_has_begun_reads_nothing_of_it(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)
    for turn in range(2):
        out.stream(turn, passing(of), Readers(turn, 0, 60.0))
        out.commit(turn)
    with pytest.raises(SyncError, match="version 0: its sender sends another version by now"):
        next(opened(address(name, 0)).tensors())


def test_a_version_that_is_sent_again_is_another_turn(name: str) -> None:
    """The entries of the readers of the first turn do not count."""
    of = tensors(0)
    out = outlet(name, of)
    with ThreadPoolExecutor(1) as pool:
        for turn in range(3):
            reading = pool.submit(list, opened(address(name, turn, version=7)).tensors())
            if turn == 0:
                out.lose(0, 0)
                with pytest.raises(SyncError, match="version 7: its sender waits no more"):
                    reading.result(60)
            out.stream(7, passing(of), Readers(turn, 1, 60.0))
            out.commit(turn)
            if turn:
                assert len(reading.result(60)) == len(of)


def test_another_host_is_told_of_at_once(near: str) -> None:
    with pytest.raises(SyncError, match="buckets pass through the memory of one host"):
        next(opened(address(near, 0)).tensors())


def test_a_sender_that_says_nothing_is_not_waited_for_for_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "QUIET_S", 0.05)
    outlet(name, tensors(0))
    with pytest.raises(SyncError, match=r"version 0: nothing came of it for 0\.05 s"):
        next(opened(address(name, 0)).tensors())


def test_two_buckets_are_all_the_memory_that_it_takes(name: str) -> None:
    of = {f"t{i}": torch.zeros(1 << 18) for i in range(32)}  # 32 MB in tensors of 1 MB
    out = outlet(name, of, 4 << 20)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: sum(t.numel() for _, t in opened(address(name, 0)).tensors()))
        out.stream(0, passing(of), Readers(0, 1, 60.0))
        out.commit(0)
        assert reading.result(60) == 32 << 18
    files = list(shm.SHM.glob(f"{out.name}-[!o]*"))
    assert len(files) == 3 and sum(path.stat().st_blocks * 512 for path in files) < 2 * (4 << 20) + (1 << 17)
    if name in FAR:
        (there,) = shm.SHM.glob(f"{out.name}-of-*")
        assert there.stat().st_blocks * 512 < (4 << 20) + (1 << 17), "of the reader's host"


def test_words_of_the_ledger_are_each_of_one_side(near: str) -> None:
    ledger = Ledger.new(shm.SHM / f"{near}-ledger")
    assert ledger.turn == -1 and ledger.behind(0, 2, 1) == [0, 1]
    ledger.begin(5, 3)
    ledger.read(5, 0, 2)
    assert ledger.behind(5, 2, 2) == [1] and ledger.behind(5, 2, 3) == [0, 1] and ledger.behind(6, 1, 1) == [0]
    ledger.give_up(5, 1)
    assert ledger.given_up(5, 1) and not ledger.given_up(6, 1) and ledger.behind(5, 2, 2) == []
    ledger.leave(5, 0)
    assert ledger.behind(5, 2, 3) == [] and ledger.behind(6, 2, 1) == [0, 1]
    ledger.read(6, 0, 1)
    ledger.read(5, 0, 3)  # late
    ledger.leave(6, 1)
    ledger.leave(5, 1)
    assert ledger.behind(6, 2, 1) == [] and ledger.behind(6, 2, 2) == [0] and ledger.behind(7, 2, 1) == [0, 1]
    assert (ledger.buckets, ledger.filled, ledger.state) == (3, 0, buckets.COMING)


def test_a_reading_that_is_closed_turns_later_holds_up_no_later_one(near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of an exception holds a generator until that garbage is collected, which is at any time: here after
    each bucket that the next reading has read, and before the sender has looked."""
    of = tensors(0)
    out = outlet(near, of)
    old = [opened(address(near, 0)).tensors() for _ in range(len(of))]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(out.stream, 0, passing(of), Readers(0, 1, 60.0))
        for one in old:
            next(one)
        out.lose(0, 0)
        sending.result(20)
        out.break_off(0)
        read = Ledger.read

        def then_collects(self: Ledger, turn: int, reader: int, buckets: int) -> None:
            read(self, turn, reader, buckets)
            if turn and old:
                old.pop().close()  # type: ignore[attr-defined]

        monkeypatch.setattr(Ledger, "read", then_collects)
        reading = pool.submit(list, opened(address(near, 1)).tensors())
        out.stream(1, passing(of), Readers(1, 1, 10.0))
        out.commit(1)
        assert [n for n, _ in reading.result(20)] == list(of)


def test_those_who_wait_with_the_sender_for_another_one_wait_as_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (buckets, relay):
        monkeypatch.setattr(module, "QUIET_S", 0.5)
    of = tensors(0)
    out = outlet(name, of)
    hung = BucketStream(f"{out.name}:0:0:1").tensors()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(out.stream, 0, passing(of), Readers(0, 2, 2.0))
        while Ledger(shm.SHM / f"{out.name}-ledger").filled < 1:
            time.sleep(0.001)
        next(hung)
        stream, came = opened(address(name, 0)).tensors(), list[str]()
        for n, _ in stream:
            came.append(n)
            if len(came) == len(of):
                sending.result(20)
                out.commit(0)
        assert came == list(of)
    hung.close()  # type: ignore[attr-defined]


def test_more_or_other_tensors_than_announced_are_our_own_fault(name: str) -> None:
    of = tensors(0)
    out = outlet(name, of)
    others = {n if n != "t3" else "t3b": t for n, t in of.items()}
    with pytest.raises(AssertionError, match="t3b comes where t3 was told of"):
        out.stream(0, passing(others), Readers(0, 0, 60.0))
    with pytest.raises(AssertionError, match="more came than was announced"):
        out.stream(1, passing({**of, "more": torch.zeros(1)}), Readers(1, 0, 60.0))


def test_servers_that_read_side_by_side_do_not_wait_for_each_others_threads(near: str) -> None:
    """More of them than the event loop has threads."""
    of = tensors(1)
    out = outlet(near, of)

    async def send_buckets(post: object, sent: WeightSource, buckets: AsyncIterator[Bucket]) -> None:
        async for bucket in buckets:
            seen[sent.address] += len(bucket.checksums)

    seen = Counter[str]()
    api: Any = SimpleNamespace(send_buckets=send_buckets)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        sources = [out.source(0, 0, i, {}, near) for i in range(3)]
        pouring = [asyncio.ensure_future(deliver_buckets(api, None, source)) for source in sources]  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as own:
            await loop.run_in_executor(own, out.stream, 0, passing(of), Readers(0, 3, 60.0))
            out.commit(0)
            await asyncio.gather(*pouring)

    asyncio.run(asyncio.wait_for(run(), 50))
    assert [*seen.values()] == [len(of)] * 3


READER = """
import hashlib, sys, time
from pathlib import Path
from verl.rollout.process import free_port
from verl.weight_sync import buckets, relay, shm

shm.SHM = buckets.SHM = relay.SHM = Path(sys.argv[1])
found = hashlib.sha256()
try:
    for name, tensor in relay.open_weights(sys.argv[2]).tensors():
        found.update(name.encode() + tensor.contiguous().view(-1).view(torch_uint8).numpy().tobytes())
        print(name, flush=True)
        time.sleep(float(sys.argv[3]))
    print(found.hexdigest(), flush=True)
except Exception as e:
    print(type(e).__name__, e, flush=True)
""".replace("torch_uint8", "__import__('torch').uint8")


def reader(folder: Path, address: str, pause_s: float = 0.0) -> Program:
    """A reader on another host: its shared memory is another folder."""
    folder.mkdir(exist_ok=True)
    log = folder.parent / f"{folder.name}-{len([*folder.parent.glob('*.log')])}.log"
    return Program(READER, folder, address, pause_s, log=log)


def test_hosts_that_see_no_memory_of_ours_have_every_bit_and_one_that_is_killed_holds_up_nobody(
    near: str, tmp_path: Path
) -> None:
    of = tensors(3)
    out = RelayOutlet(BUCKET, host="127.0.0.1")
    at = out.announce({n: entry_of(t) for n, t in of.items()})
    processes = [reader(tmp_path / "a", f"{at}:0:0:0"), reader(tmp_path / "b", f"{at}:0:0:1", 0.05)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(out.stream, 0, passing(of), Readers(0, 2, 60.0))
        processes[1].first_line(60)
        processes[1].kill()
        sending.result(60)
        out.commit(0)
    said = processes[0].output(60)
    wanted = hashlib.sha256()
    for n, t in of.items():
        wanted.update(n.encode() + t.view(-1).view(torch.uint8).numpy().tobytes())
    assert said.split()[-1] == wanted.hexdigest() and not [*(tmp_path / "a").iterdir()], "it goes with its process"
    processes[1].wait(60)
    (left,) = (tmp_path / "b").iterdir()
    with ThreadPoolExecutor(1) as pool:
        next_one = reader(tmp_path / "b", f"{at}:1:1:0")
        sending = pool.submit(out.stream, 1, passing(of), Readers(1, 1, 60.0))
        sending.result(60)
        out.commit(1)
    next_one.output(60)
    assert not left.exists(), "the next one there clears up after one that was killed"


def test_a_stranger_and_a_sender_that_is_gone_are_one_line(near: str, tmp_path: Path) -> None:
    of = tensors(0)
    out = RelayOutlet(BUCKET, host="127.0.0.1")
    at, key, rest = out.announce({n: entry_of(t) for n, t in of.items()}).split("/", 2)
    for address, wanted in (
        (f"{at}/{key[::-1]}/{rest}", f"SyncError the sender of version 0 at {at} is gone: the other end closed"),
        (f"127.0.0.1:{free_port()}/{key}/{rest}", "SyncError the trainer's weights cannot be fetched from 127.0.0.1:"),
    ):
        said = reader(tmp_path / "a", f"{address}:0:0:0").output(60)
        assert said.startswith(wanted) and said.count("\n") == 1
