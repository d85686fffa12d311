"""The queue in shared memory when processes die, memory runs out, and everybody works at once."""

from __future__ import annotations

import asyncio
import errno
import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.test_queue_contract import ragged, sample, samples
from fakes import put

from verl.batch import Columns, Ragged
from verl.transfer_queue import packing, segments, shared
from verl.transfer_queue.index import Find, Found
from verl.transfer_queue.options import Shared
from verl.transfer_queue.rows import queued_samples
from verl.types import Ref, Refs, ref_of
from verl.workers.compute import Compute

MB = 1 << 20
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def no_helper_stays():
    """End the helper process of multiprocessing, since tests of other files count processes."""
    yield
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


PROCESSES.set_forkserver_preload(["torch", "verl.transfer_queue.shared", "contracts.test_queue_contract"])


@pytest.fixture(autouse=True)
def root(monkeypatch) -> Iterator[Path]:
    """A folder of this test's own in /dev/shm: queues of other processes come and go beside it."""
    with tempfile.TemporaryDirectory(dir=segments.ROOT) as made:
        monkeypatch.setattr(segments, "ROOT", Path(made))
        yield Path(made)
        gc.collect()


def queue_of(max_bytes: int = 64 * MB, timeout_s: float = 20) -> shared.SharedQueue:
    return shared.build(Shared(max_bytes=max_bytes, timeout_s=timeout_s))


def folders() -> set[str]:
    return {p.name for p in segments.ROOT.iterdir() if segments.PREFIX in p.name}


def wide(refs: Refs, value: float, nbytes: int) -> dict[str, Ragged]:
    """A column of so many bytes, the same for each row."""
    n = nbytes // 4 // len(refs)
    return {"x": Ragged(torch.full((n * len(refs),), value), np.arange(len(refs) + 1, dtype=np.int64) * n)}


def started(target: Any, *args: Any) -> Any:
    process = PROCESSES.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def ended(process: Any) -> int:
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


# -- who dies ----------------------------------------------------------------------------------------------------------


def _stops_in_the_middle(queue: shared.SharedQueue, refs: Refs | None, said: Any) -> None:
    fill = packing.Parcel.fill

    def half(self: packing.Parcel, target: np.ndarray) -> None:
        fill(self, target)
        said.send(True)
        time.sleep(600)

    packing.Parcel.fill = half  # type: ignore[method-assign]
    if refs is None:
        put(queue, samples(4, "late"))
    else:
        queue.write(refs, wide(refs, 2.0, 24 * MB))


@pytest.mark.parametrize("what", ["put", "write"])
def test_a_writer_killed_in_the_middle_leaves_nothing(what):
    queue = queue_of()
    refs = put(queue, samples(4))
    queue.write(refs, wide(refs, 1.0, 4 * MB))
    heard, said = PROCESSES.Pipe(duplex=False)
    writer = started(_stops_in_the_middle, queue, None if what == "put" else refs, said)
    assert heard.poll(60) and heard.recv()
    os.kill(writer.pid, signal.SIGKILL)
    assert ended(writer) == -signal.SIGKILL
    assert len(queue) == 4 and bool((queue.read(refs, ("x",))["x"].values == 1.0).all())
    end_s = time.monotonic() + 20
    while any(s.owner not in (None, segments.HERE) for s in queue._process._keeper._segments.values()):  # type: ignore[union-attr]
        assert time.monotonic() < end_s, "what it had reserved is free again"
        time.sleep(0.01)
    queue.write(refs, wide(refs, 3.0, 40 * MB))  # which does not fit beside the dead one's 24 MB
    assert put(queue, samples(4, "late")).ids[0] == "late0"


def _asks(queue: shared.SharedQueue, refs: Refs, said: Any) -> None:
    said.send(len(queue))
    said.recv()
    for call in (lambda: queue.read(refs, ("ids",)), lambda: len(queue), lambda: put(queue, samples(1, "new"))):
        try:
            call()
        except ConnectionError as error:
            said.send(str(error))


MAKER = """
import os, pickle, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from contracts.test_queue_contract import samples
from fakes import put
from verl.transfer_queue import segments, shared
segments.ROOT = Path({root!r})
from verl.transfer_queue.options import Shared
queue = shared.build(Shared(max_bytes=1 << 24, timeout_s=20))
refs = put(queue, samples(3))
early = pickle.loads(pickle.dumps(queue))
assert len(early) == 3  # a connection that the fork inherits
child = os.fork()
if child:
    print(pickle.dumps((queue, refs, child)).hex(), flush=True)
time.sleep(600)
"""


def test_a_killed_maker_is_one_line_to_its_clients_and_its_leftovers_go_at_the_next_start(root):
    before = folders()
    code = MAKER.format(path=[str(Path(__file__).parents[1])], root=str(root))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout
        queue, refs, child = pickle.loads(bytes.fromhex(maker.stdout.readline()))
        view = queue.read(refs, ("ids",))["ids"].values
        expected = view.clone()
        heard, said = PROCESSES.Pipe()
        client = started(_asks, queue, refs, said)
        assert heard.poll(60) and heard.recv() == 3
        maker.kill()
        assert maker.wait(20) == -signal.SIGKILL
        heard.send(True)
    assert [heard.recv() for _ in range(3)] == ["the process that holds the queue is gone"] * 3
    assert ended(client) == 0
    with pytest.raises(ConnectionError, match="^the process that holds the queue is gone$"):
        queue.read(refs, ("ids",))
    left = folders() - before
    assert len(left) == 1, "nobody could clean up after a kill"
    os.kill(child, 0)  # a fork of the maker lives: it is no maker
    alive = queue_of()
    os.kill(child, signal.SIGKILL)
    assert not left & folders() and len(folders() - before) == 1, "the next start does, and spares who lives"
    assert torch.equal(view, expected), "a view outlives all of it"
    del alive
    gc.collect()
    assert folders() == before


@pytest.mark.slow
def test_nothing_is_left_of_a_queue_that_ended(root):
    before = folders()
    queue = queue_of()
    refs = put(queue, samples(4))
    view = queue.read(refs, ("ids",))["ids"].values
    expected = view.clone()
    assert len(folders() - before) == 1
    del queue
    gc.collect()
    assert folders() == before and torch.equal(view, expected)
    code = (
        "from pathlib import Path; from verl.transfer_queue import segments, shared\n"
        f"segments.ROOT = Path({str(root)!r}); queue = shared.build(shared.Shared(max_bytes=1 << 24))\n"
        "assert list(segments.ROOT.iterdir())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert folders() == before, "nor of a process that ended with one"


def test_a_fork_is_a_process_of_its_own():
    queue, before = queue_of(), folders()
    refs = put(queue, samples(3))
    read = queue.read(refs, ("ids",))["ids"].values
    expected = read.tolist()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            same = queue.read(refs, ("ids",))["ids"].values.tolist() == expected
            queue.write(refs, {"x": ragged([torch.full((n,), 7.0) for n in (1, 2, 3)])})
            put(queue, samples(2, "fork"))
            del read
            gc.collect()
            code = 0 if same else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bool((queue.read(refs, ("x",))["x"].values == 7.0).all()) and len(queue) == 5
    queue.drop(refs)
    assert folders() == before and read.tolist() == expected


# -- views -------------------------------------------------------------------------------------------------------------


def _writes_in_place(queue: shared.SharedQueue, refs: Refs) -> None:
    queue.read(refs, ("x",))["x"].values.mul_(2)


def test_a_reader_cannot_write_into_what_others_read():
    queue = queue_of()
    refs = put(queue, samples(4))
    queue.write(refs, wide(refs, 1.0, MB))
    assert ended(started(_writes_in_place, queue, refs)) == -signal.SIGSEGV
    assert bool((queue.read(refs, ("x",))["x"].values == 1.0).all())


def _halves(columns: Columns) -> dict[str, torch.Tensor]:
    return {"half": columns["x"].mul_(0.5)}


def _computes(queue: shared.SharedQueue, refs: Refs) -> None:
    Compute(queue).compute(refs, _halves, ("x",), ("half",))


def test_a_users_function_may_write_into_what_it_is_given():
    queue = queue_of()
    refs = put(queue, samples(4))
    queue.write(refs, {"x": ragged([torch.ones(r.loss_tokens) for r in refs])})
    assert ended(started(_computes, queue, refs)) == 0
    found = queue.read(refs, ("x", "half"))
    assert set(found["x"].values.tolist()) == {1.0} and set(found["half"].values.tolist()) == {0.5}


def _holds(queue: shared.SharedQueue, refs: Refs, line: Any) -> None:
    view = queue.read(refs, ("x",))["x"].values
    line.send(True)
    assert line.recv()
    line.send(set(view.tolist()))
    del view
    assert line.recv()
    line.send(True)
    line.recv()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another process"])
def test_a_reader_keeps_its_view_and_its_segment_is_used_again_when_it_lets_go(elsewhere):
    queue = queue_of()
    refs = put(queue, samples(4))
    queue.write(refs, wide(refs, 1.0, 4 * MB))
    ours, theirs = PROCESSES.Pipe()
    view = queue.read(refs, ("x",))["x"].values
    assert queue.read(refs, ("x",))["x"].values.data_ptr() == view.data_ptr(), "no copy was made"
    if elsewhere:
        reader = started(_holds, queue, refs, theirs)
        assert ours.poll(60) and ours.recv()
        del view
    queue.drop(refs)

    def turn(value: float) -> None:
        refs = put(queue, samples(4))
        queue.write(refs, wide(refs, value, 4 * MB))
        assert bool((queue.read(refs, ("x",))["x"].values == value).all())
        queue.drop(refs)

    for i in range(5):
        turn(2.0 + i)
    files = set(os.listdir(queue._folder))
    if elsewhere:
        ours.send(True)
        assert ours.recv() == {1.0}
        ours.send(True)
        assert ours.recv()
    else:
        assert set(view.tolist()) == {1.0}
        del view
    for i in range(5):
        turn(7.0 + i)
        first, second = put(queue, samples(4, "a")), put(queue, samples(4, "b"))
        queue.write(first, wide(first, 1.0, 4 * MB))
        queue.write(second, wide(second, 1.0, 4 * MB))  # two at once need the one that was held, too
        queue.drop(first)
        queue.drop(second)
    assert set(os.listdir(queue._folder)) == files, "freed segments are used again"
    if elsewhere:
        ours.send(True)
        assert ended(reader) == 0


def test_a_segment_that_was_given_out_again_between_question_and_lock_is_asked_for_again(monkeypatch):
    queue = queue_of()
    refs = put(queue, samples(4))
    queue.write(refs, wide(refs, 1.0, 4 * MB))
    lease, held = shared._Process.lease, []

    def late(self: Any, blocks: Any) -> Any:
        if not held:
            held.append(blocks)
            queue.write(refs, wide(refs, 4.0, 4 * MB))
            others = put(queue, samples(4, "other"))
            queue.write(others, wide(others, 9.0, 4 * MB))
            request = queue._process._keeper.answer(segments.HERE, Find(others.ids, ["x"]))  # type: ignore[union-attr]
            assert isinstance(request, Found) and request.blocks.keys() == blocks.keys(), "where the first column was"
        return lease(self, blocks)

    monkeypatch.setattr(shared._Process, "lease", late)
    assert bool((queue.read(refs, ("x",))["x"].values == 4.0).all()) and held


def test_a_segment_is_nobody_elses_while_somebody_fills_it():
    """A segment is not reused while a thread fills a region that it has reserved: neither one for several writes after
    its rows were dropped, nor a full one."""
    queue = queue_of(16 * MB)
    other = pickle.loads(pickle.dumps(queue))
    queue.drop(put(queue, samples(4)))
    theirs, ours = put(other, [sample("b", 1500)]), put(queue, [sample("a", 1500)])
    parcel, row = packing.parcel_of_samples([sample("late", 900)]), sample("late", 900)
    earlier, region = (queue._here.reserve(parcel.nbytes, put=True) for _ in range(2))
    assert isinstance(earlier, shared._Region) and isinstance(region, shared._Region)
    assert earlier.segment is region.segment
    for handle, refs, tokens in ((other, theirs, 1500), (queue, ours, 1500)):
        assert np.array_equal(queued_samples(handle, refs)[0].segments[1].ids, np.arange(tokens))
    queue.drop(theirs)
    queue.drop(ours)
    while queue._here._filled is region.segment:
        queue.drop(put(queue, [sample("filler", 900)]))
    queue._here.store(earlier, parcel, ["late"], new=True)
    queue.drop(Refs([ref_of(row)]))
    more = [put(other, [replace(sample(f"more{i}", 900), temperature=0.5)]) for i in range(40)]
    queue._here.store(region, parcel, ["late"], new=True)
    assert np.array_equal(queued_samples(queue, Refs([ref_of(row)]))[0].segments[1].ids, np.arange(900))
    assert all(queued_samples(queue, refs)[0].temperature == 0.5 for refs in more)


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_put_waits_for_room_and_says_so_when_it_waited_too_long():
    queue = queue_of(2 * MB, timeout_s=0.3)
    kept: list[Refs] = []
    with pytest.raises(
        TimeoutError, match=r"waited 0.3 s for room in the queue: [\d,]+ bytes are wanted and [\d,]+ of"
    ):
        for i in range(200):
            kept.append(put(queue, [sample(f"{i}/{j}", 1000) for j in range(4)]))
    assert len(kept) > 3 and len(queue) == 4 * len(kept), "half of it was filled, and the put that waited left nothing"
    queue.write(kept[0], wide(kept[0], 1.0, 100_000))  # the other half is for columns
    queue = queue_of(2 * MB)
    kept = [put(queue, [sample(f"{i}/{j}", 1000) for j in range(4)]) for i in range(len(kept))]

    async def both() -> Refs:
        waiting = asyncio.ensure_future(queue.put([sample(f"new/{j}", 1000) for j in range(4)]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        for refs in kept:
            queue.drop(refs)
        return await waiting

    assert asyncio.run(both()).ids[0] == "new/0" and len(queue) == 4


def test_a_write_without_room_is_refused_and_changes_nothing():
    queue = queue_of(8 * MB)
    refs = put(queue, samples(4))
    queue.write(refs, wide(refs, 1.0, 4 * MB))
    with pytest.raises(MemoryError, match=r"columns x do not fit.*4,194,304 bytes are wanted and [\d,]+ of 8,388,608"):
        queue.write(refs, wide(refs, 2.0, 4 * MB))
    with pytest.raises(ValueError, match=r"16,777,216 bytes never fit .*max_bytes=8,388,608"):
        queue.write(refs, wide(refs, 2.0, 16 * MB))
    assert bool((queue.read(refs, ("x",))["x"].values == 1.0).all())
    queue.drop(refs)
    refs = put(queue, samples(4))
    queue.write(refs, wide(refs, 3.0, 6 * MB))  # what is idle and does not suit gives way
    assert sum(os.stat(queue._folder / n).st_blocks * 512 for n in os.listdir(queue._folder)) < 8 * MB


def test_a_full_shm_is_one_message_and_no_bus_error(monkeypatch):
    queue = queue_of()
    refs = put(queue, samples(4))

    def full(fd: int, at: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryError, match=r"/dev/shm is full: no room for 8,388,608 bytes"):
            queue.write(refs, wide(refs, 1.0, 8 * MB))
    assert queue.columns(refs) and not queue.having(refs, "x")
    queue.write(refs, wide(refs, 1.0, 8 * MB))
    assert bool((queue.read(refs, ("x",))["x"].values == 1.0).all())
    with pytest.raises(ValueError, match=r"max_bytes=1,125,899,906,842,624: /dev/shm has [\d,]+ bytes free"):
        queue_of(1 << 50)


# -- everybody at once -------------------------------------------------------------------------------------------------


def _hammer(queue: shared.SharedQueue, me: str, seed: int, turns: int, everybody: Refs) -> None:
    """Random puts, writes, reads and drops of own rows, against a model; and columns of rows that all have."""
    rng, model = random.Random(seed), dict[str, tuple[Ref, dict[str, np.ndarray]]]()
    for turn in range(turns):
        act = rng.choice(("put", "put", "write", "write", "read", "read", "read", "drop", "all"))
        own = rng.sample(sorted(model), rng.randint(0, len(model)))
        refs = Refs(model[i][0] for i in own)
        if act == "put" and len(model) < 60:
            rows = [sample(f"{me}/{turn}/{i}", rng.randint(1, 300)) for i in range(rng.randint(1, 8))]
            for ref, row in zip(put(queue, rows), rows, strict=True):
                model[ref.sample_id] = (ref, {"ids": np.concatenate([s.ids for s in row.segments])})
        elif act == "write" and own:
            name, dtype = rng.choice([("a", np.float32), ("b", np.int16), ("c", np.float64)])
            rows = [np.array([rng.randint(0, 9)] * rng.randint(0, 200), dtype) for _ in own]
            queue.write(refs, {name: ragged([torch.from_numpy(r) for r in rows])})
            for i, row in zip(own, rows):
                model[i][1][name] = row
        elif act == "read" and own:
            name = rng.choice(("ids", "a", "b", "c"))
            have = queue.having(refs, name)
            assert have.ids == [i for i in own if name in model[i][1]]
            found = queue.read(have, (name,))[name]
            for i, row in zip(have.ids, found.rows() if have else (), strict=True):
                assert np.array_equal(row.numpy(), model[i][1][name]), (me, turn, i, name)
        elif act == "drop" and own:
            queue.drop(refs)
            for i in own:
                del model[i]
        elif act == "all":
            value = float(rng.randint(0, 10**6))
            queue.write(everybody, {me: ragged([torch.full((5,), value)] * len(everybody))})
            assert set(queue.read(everybody, (me,))[me].values.tolist()) == {value}
            assert len(queued_samples(queue, everybody)) == len(everybody)
    queue.drop(Refs(ref for ref, _ in model.values()))


@pytest.mark.slow
def test_threads_and_processes_at_the_same_time_see_what_they_wrote():
    queue = queue_of(16 * MB)  # small: segments are used again all the time
    everybody = put(queue, samples(8, "everybody"))
    failures: list[BaseException] = []

    def thread(i: int) -> None:
        try:
            _hammer(queue, f"thread{i}", i, 150, everybody)
        except BaseException as error:
            failures.append(error)

    processes = [started(_hammer, queue, f"process{i}", 100 + i, 250, everybody) for i in range(3)]
    threads = [threading.Thread(target=thread, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert [ended(p) for p in processes] == [0, 0, 0] and not failures, failures
    assert len(queue) == 8
    queue.drop(everybody)
    assert not queue._process._keeper._index._held, "no cell is left"  # type: ignore[union-attr]
