"""The contract of a worker group, on one rank and on two."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from verl.workers.group import Broadcast, WorkerGroup
from verl.workers.inproc import InprocGroup, VirtualRank


class Worker:
    """Says what it does into `log`; `hold` blocks until the gate opens. Knows the other ranks."""

    def __init__(self, ranks: VirtualRank | None = None):
        self.log: list[object] = []
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.ranks = ranks

    @property
    def rank(self) -> int:
        return self.ranks.rank if self.ranks else 0

    def note(self, what):
        self.log.append(what)
        return what

    def hold(self):
        self.entered.set()
        assert self.gate.wait(20)
        self.log.append("held")

    def fail(self, error, rank=None):
        if rank in (None, self.rank):
            raise error
        return self.meet("waits for the one that failed")

    def make(self, cls):
        return cls()

    def thread(self):
        return threading.get_ident()

    def meet(self, value):
        return self.ranks.all_gather(value) if self.ranks else [value]


def virtual(count: int) -> tuple[WorkerGroup, list[Worker]]:
    ranks = [VirtualRank(i, count) for i in range(count)]
    workers = [Worker(rank) for rank in ranks]
    return InprocGroup("actor", workers, ranks), workers


def alone() -> tuple[WorkerGroup, list[Worker]]:
    workers = [Worker()]
    return InprocGroup("actor", workers), workers


BACKENDS: dict[str, Callable[[], tuple[WorkerGroup, list[Worker]]]] = {
    "inproc": alone,
    "inproc-2-virtual-ranks": lambda: virtual(2),
}


@pytest.fixture(params=BACKENDS)
def made(request):
    group, workers = BACKENDS[request.param]()
    yield group, workers
    for worker in workers:
        worker.gate.set()
    group.close()


def note(group, what):
    return group.submit(Worker.note, Broadcast((what,)))


def hold(group, workers):
    """A call that every rank has begun and none has ended."""
    future = group.submit(Worker.hold, Broadcast())
    assert all(w.entered.wait(20) for w in workers)
    return future


def release(workers):
    for worker in workers:
        worker.gate.set()


def test_submit_enqueues_at_the_call_and_calls_run_in_that_order(made):
    group, workers = made
    group.submit(Worker.hold, Broadcast())
    futures = [note(group, i) for i in range(50)]
    assert all(w.log == [] for w in workers), "nothing overtakes the call that runs"
    release(workers)
    assert [f.result(20) for f in reversed(futures)] == [[i] * group.world_size for i in reversed(range(50))]
    assert all(w.log == ["held", *range(50)] for w in workers)
    assert (group.name, group.world_size) == ("actor", len(workers))


def test_a_rank_has_one_thread_that_is_not_the_callers(made):
    group, workers = made
    found = {tuple(group.submit(Worker.thread, Broadcast()).result(20)) for _ in range(5)}
    assert len(found) == 1 and len(set(*found)) == len(workers) and threading.get_ident() not in set(*found)


def test_submissions_of_one_thread_keep_their_order_and_all_ranks_see_one_order(made):
    group, workers = made

    def submit(me: int) -> None:
        for i in range(100):
            note(group, (me, i))

    threads = [threading.Thread(target=submit, args=(m,)) for m in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    group.submit(Worker.thread, Broadcast()).result(20)
    for worker in workers:
        assert len(worker.log) == 400 and worker.log == workers[0].log
        for me in range(4):
            assert [i for m, i in worker.log if m == me] == list(range(100))


def test_each_rank_gets_its_own_arguments_and_results_are_in_rank_order(made):
    group, workers = made
    given = [(f"rank {i}",) for i in range(group.world_size)]
    assert group.submit(Worker.note, given).result(20) == [what for (what,) in given]
    assert [w.log for w in workers] == [[what] for (what,) in given]
    with pytest.raises(AssertionError, match="sets of arguments for"):
        group.submit(Worker.note, [*given, ("one too many",)])


def test_ranks_meet_inside_a_call(made):
    group, _ = made
    given = [(i * 10,) for i in range(group.world_size)]
    for _ in range(20):
        assert group.submit(Worker.meet, given).result(20) == [[i for (i,) in given]] * group.world_size


def test_an_exception_reaches_the_future_and_the_workers_serve_the_next_call(made):
    group, _ = made
    broken = group.submit(Worker.fail, Broadcast((ValueError("no"),)))
    fine = note(group, 1)
    with pytest.raises(ValueError, match="no"):
        broken.result(20)
    assert fine.result(20) == [1] * group.world_size
    with pytest.raises(TypeError):
        group.submit(Worker.note, Broadcast(("x", "too many"))).result(20)
    with pytest.raises(SystemExit):
        group.submit(Worker.fail, Broadcast((SystemExit(3),))).result(20)
    assert note(group, 2).result(20) == [2] * group.world_size


def test_one_rank_that_raises_ends_the_wait_of_the_others_with_its_own_error(made):
    """The first cause, not the broken meeting that it left behind; and the calls behind it are whole again."""
    group, _ = made
    for rank in range(group.world_size):
        calls = [group.submit(Worker.fail, Broadcast((KeyError(rank), rank))) for _ in range(5)]
        after = group.submit(Worker.meet, Broadcast(("all",)))
        for call in calls:
            with pytest.raises(KeyError, match=str(rank)):
                call.result(20)
        assert after.result(20) == [["all"] * group.world_size] * group.world_size


@pytest.mark.parametrize(
    "error",
    [StopIteration("end"), asyncio.CancelledError("gone"), CancelledError("gone")],
    ids=lambda e: type(e).__module__ + type(e).__name__,
)
def test_an_exception_that_asyncio_cannot_carry_does_not_hang_or_cancel_the_waiter(made, error):
    """StopIteration cannot be set on an asyncio future, and a CancelledError would look like the driver's own end."""
    group, _ = made

    async def main():
        await asyncio.wait_for(asyncio.wrap_future(group.submit(Worker.fail, Broadcast((error,)))), 20)

    with pytest.raises(RuntimeError, match=r"actor\.fail ended with"):
        asyncio.run(main())


def test_a_cancelled_call_that_has_not_begun_never_runs(made):
    group, workers = made
    hold(group, workers)
    gone = [note(group, "gone") for _ in range(2)]
    kept = note(group, "kept")
    assert all(f.cancel() for f in gone)
    release(workers)
    assert kept.result(20) == ["kept"] * group.world_size
    assert all(w.log == ["held", "kept"] for w in workers) and all(f.cancelled() for f in gone)


def test_close_finishes_what_was_submitted_and_refuses_what_comes_after(made):
    group, workers = made
    group.submit(Worker.hold, Broadcast())
    futures = [note(group, i) for i in range(20)]
    release(workers)
    group.close(20)
    assert [f.result(0) for f in futures] == [[i] * group.world_size for i in range(20)]
    with pytest.raises(RuntimeError, match=r"'actor' is closed; Worker\.note was not submitted"):
        note(group, 99)
    group.close(20)
    assert all(99 not in w.log for w in workers)


def test_close_does_not_wait_for_ever_and_leaves_no_future_behind(made):
    group, workers = made
    running = hold(group, workers)
    waiting = [note(group, 1), note(group, 2)]
    group.close(timeout_s=0.05)
    assert all(f.cancelled() for f in waiting), "nobody waits for a call that will never begin"
    assert not running.done()
    release(workers)
    assert running.result(20) == [None] * group.world_size and all(w.log == ["held"] for w in workers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_is_lost_between_submit_and_close(backend):
    """Threads submit while another closes: every submit is either refused or answered."""
    for _ in range(20):
        (group, _), futures, refused = BACKENDS[backend](), [], []

        def submit(group=group, futures=futures, refused=refused):
            for i in range(30):
                try:
                    futures.append(note(group, i))
                except RuntimeError:
                    refused.append(i)

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for t in threads:
            t.start()
        group.close(20)
        for t in threads:
            t.join(20)
        assert all(f.result(20) is not None for f in futures)
        assert len(futures) + len(refused) == 90


def test_the_event_loop_goes_on_while_a_long_call_runs(made):
    group, workers = made

    async def main() -> int:
        call = asyncio.wrap_future(group.submit(Worker.hold, Broadcast()))
        turns = 0
        while not all(w.entered.is_set() for w in workers) or turns < 100:
            assert not call.done()
            await asyncio.sleep(0)
            turns += 1
        release(workers)
        await asyncio.wait_for(call, 20)
        return turns

    assert asyncio.run(main()) >= 100


class Big:
    """Something that can be watched."""


def test_a_group_holds_neither_arguments_nor_results_of_a_call_that_has_ended(made):
    """A copy of the weights must not live until the next call comes."""
    group, _ = made
    argument = Big()
    seen = [weakref.ref(argument)]
    seen += [weakref.ref(x) for x in group.submit(Worker.make, Broadcast((Big,))).result(20)]
    group.submit(Worker.thread, Broadcast()).result(20)
    with pytest.raises(RuntimeError):
        group.submit(Worker.fail, Broadcast((RuntimeError(argument),))).result(20)
    del argument
    for _ in range(200):
        gc.collect()
        if all(r() is None for r in seen):
            return
        time.sleep(0.01)
    raise AssertionError("something of an ended call is still held")


def test_a_call_can_be_pickled():
    """What crosses `submit` goes to another process one day: a function of the worker's class, and its arguments."""
    assert pickle.loads(pickle.dumps(Worker.note)) is Worker.note
    assert pickle.loads(pickle.dumps(Broadcast(("x",)))) == Broadcast(("x",))
