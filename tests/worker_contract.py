"""The contract of a worker group: the guarantees of `WorkerGroup`, for any workers.

The files that import these tests bring a fixture `made`: a group of `Worker`s, and the `Bench` that follows them
through files, since they may be in other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl.workers.group import Broadcast

WAIT_S = 60.0
COUNT = 50  # calls of a thread


class Worker:
    """Records its calls in a file; `hold` blocks until there is a file `open`. It can exchange values with the other
    ranks."""

    def __init__(self, folder, ranks):
        self.folder, self.ranks = Path(folder), ranks

    def move(self, folder):
        self.folder = Path(folder)

    def note(self, what):
        with open(self.folder / f"log.{self.ranks.rank}", "a") as log:
            log.write(f"{what}\n")
        return what

    def hold(self):
        (self.folder / f"entered.{self.ranks.rank}").touch()
        until(lambda: (self.folder / "open").exists())
        self.note("held")

    def fail(self, error, rank=None):
        if rank in (None, self.ranks.rank):
            raise error
        return self.meet("waits for the one that failed")

    def make(self, cls):
        return cls()

    def thread(self):
        return os.getpid(), threading.get_ident()

    def meet(self, value):
        return self.ranks.all_gather(value)


def build(folder, *, ranks):
    return [Worker(folder, rank) for rank in ranks]


def interpreter(worker):
    """Return the interpreter of a process, and whether it has the module that the environment of a test has alone."""
    return sys.executable, importlib.util.find_spec("only_there") is not None


def place(worker):
    """Return the resources that this rank has from its pool."""
    import ray

    return os.environ.get("VERL_POOL"), ray.get_runtime_context().get_assigned_resources()


def nothing(place):
    """Set nothing up."""


def refuses(what, *, ranks):
    raise ValueError(what)


def only_one(mark, place):
    try:
        mark.open("x")
    except FileExistsError:
        raise ValueError("the second cannot work here") from None


@dataclass
class Bench:
    folder: Path
    world_size: int

    @property
    def logs(self):
        paths = [self.folder / f"log.{rank}" for rank in range(self.world_size)]
        return [p.read_text().splitlines() if p.exists() else [] for p in paths]

    @property
    def entered(self):
        return all((self.folder / f"entered.{rank}").exists() for rank in range(self.world_size))

    def release(self):
        (self.folder / "open").touch()


def until(true, timeout_s=WAIT_S):
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.002)


def note(group, what):
    return group.submit(Worker.note, Broadcast((what,)))


def hold(group, bench):
    """A call that every rank has begun and none has ended."""
    future = group.submit(Worker.hold, Broadcast())
    until(lambda: bench.entered)
    return future


def test_submit_enqueues_at_the_call_and_calls_run_in_that_order(made):
    group, bench = made
    group.submit(Worker.hold, Broadcast())
    futures = [note(group, i) for i in range(50)]
    assert not any(bench.logs), "nothing overtakes the call that runs"
    bench.release()
    assert [f.result(WAIT_S) for f in reversed(futures)] == [[i] * group.world_size for i in reversed(range(50))]
    assert bench.logs == [["held", *map(str, range(50))]] * group.world_size
    assert (group.name, group.world_size) == ("actor", bench.world_size)


def test_a_rank_has_one_thread_that_is_not_the_callers(made):
    group, bench = made
    found = {tuple(group.submit(Worker.thread, Broadcast()).result(WAIT_S)) for _ in range(5)}
    assert (
        len(found) == 1
        and len(set(*found)) == bench.world_size
        and (os.getpid(), threading.get_ident()) not in set(*found)
    )


def test_submissions_of_one_thread_keep_their_order_and_all_ranks_see_one_order(made):
    group, bench = made

    def submit(me: int) -> None:
        for i in range(COUNT):
            note(group, (me, i))

    threads = [threading.Thread(target=submit, args=(m,)) for m in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT_S)
    group.submit(Worker.thread, Broadcast()).result(WAIT_S)
    for log in bench.logs:
        assert len(log) == 4 * COUNT and log == bench.logs[0]
        for me in range(4):
            assert [line for line in log if line.startswith(f"({me}, ")] == [str((me, i)) for i in range(COUNT)]


def test_each_rank_gets_its_own_arguments_and_results_are_in_rank_order(made):
    group, bench = made
    given = [(f"rank {i}",) for i in range(group.world_size)]
    assert group.submit(Worker.note, given).result(WAIT_S) == [what for (what,) in given]
    assert bench.logs == [[what] for (what,) in given]
    with pytest.raises(AssertionError, match="sets of arguments for"):
        group.submit(Worker.note, [*given, ("one too many",)])


def test_ranks_meet_inside_a_call(made):
    group, _ = made
    given = [(i * 10,) for i in range(group.world_size)]
    for _ in range(20):
        assert group.submit(Worker.meet, given).result(WAIT_S) == [[i for (i,) in given]] * group.world_size


def test_an_exception_reaches_the_future_and_the_workers_serve_the_next_call(made):
    group, _ = made
    broken = group.submit(Worker.fail, Broadcast((ValueError("no"),)))
    fine = note(group, 1)
    with pytest.raises(ValueError, match="no"):
        broken.result(WAIT_S)
    assert fine.result(WAIT_S) == [1] * group.world_size
    with pytest.raises(TypeError):
        group.submit(Worker.note, Broadcast(("x", "too many"))).result(WAIT_S)
    with pytest.raises(SystemExit):
        group.submit(Worker.fail, Broadcast((SystemExit(3),))).result(WAIT_S)
    assert note(group, 2).result(WAIT_S) == [2] * group.world_size


def test_one_rank_that_raises_ends_the_wait_of_the_others_with_its_own_error(made):
    """The first cause, not the broken meeting that it left behind; and the calls behind it are whole again."""
    group, _ = made
    for rank in range(group.world_size):
        calls = [group.submit(Worker.fail, Broadcast((KeyError(rank), rank))) for _ in range(5)]
        after = group.submit(Worker.meet, Broadcast(("all",)))
        for call in calls:
            with pytest.raises(KeyError, match=str(rank)):
                call.result(WAIT_S)
        assert after.result(WAIT_S) == [["all"] * group.world_size] * group.world_size


@pytest.mark.parametrize(
    "error",
    [StopIteration("end"), asyncio.CancelledError("gone"), CancelledError("gone")],
    ids=lambda e: type(e).__module__ + type(e).__name__,
)
def test_an_exception_that_asyncio_cannot_carry_does_not_hang_or_cancel_the_waiter(made, error):
    """StopIteration cannot be set on an asyncio future, and a CancelledError would look like the driver's own end."""
    group, _ = made

    async def main():
        await asyncio.wait_for(asyncio.wrap_future(group.submit(Worker.fail, Broadcast((error,)))), WAIT_S)

    with pytest.raises(RuntimeError, match=r"actor\.fail ended with"):
        asyncio.run(main())


def test_a_call_beside_is_answered_in_the_middle_of_another(made):
    group, bench = made
    running = hold(group, bench)
    behind = note(group, "behind")
    assert group.call_at_once(Worker.note, ("beside",)).result(WAIT_S) == ["beside"] * group.world_size
    with pytest.raises(KeyError, match="gone"):
        group.call_at_once(Worker.fail, (KeyError("gone"),)).result(WAIT_S)
    assert bench.logs == [["beside"]] * group.world_size and not running.done()
    bench.release()
    assert behind.result(WAIT_S) == ["behind"] * group.world_size
    assert bench.logs == [["beside", "held", "behind"]] * group.world_size


def test_a_cancelled_call_that_has_not_begun_never_runs(made):
    group, bench = made
    hold(group, bench)
    gone = [note(group, "gone") for _ in range(2)]
    kept = note(group, "kept")
    assert all(f.cancel() for f in gone)
    bench.release()
    assert kept.result(WAIT_S) == ["kept"] * group.world_size
    assert bench.logs == [["held", "kept"]] * group.world_size and all(f.cancelled() for f in gone)


def test_close_finishes_what_was_submitted_and_refuses_what_comes_after(made):
    group, bench = made
    group.submit(Worker.hold, Broadcast())
    futures = [note(group, i) for i in range(20)]
    bench.release()
    group.close(WAIT_S)
    assert [f.result(0) for f in futures] == [[i] * group.world_size for i in range(20)]
    with pytest.raises(RuntimeError, match=r"'actor' is closed; Worker\.note was not submitted"):
        note(group, 99)
    group.close(WAIT_S)
    assert all("99" not in log for log in bench.logs)


def test_close_does_not_wait_for_ever_and_leaves_no_future_behind(made):
    group, bench = made
    running = hold(group, bench)
    waiting = [note(group, 1), note(group, 2)]
    group.close(timeout_s=0.05)
    assert all(f.cancelled() for f in waiting), "nobody waits for a call that will never begin"
    bench.release()  # a thread of this process can end; another process has been ended
    with contextlib.suppress(RuntimeError):
        assert running.result(WAIT_S) == [None] * group.world_size and bench.logs == [["held"]] * group.world_size
    assert running.done()


def test_no_call_is_lost_between_submit_and_close(made):
    """Threads submit while another closes: every submit is either refused or answered."""
    group, _ = made
    futures, refused = [], []

    def submit():
        for i in range(30):
            try:
                futures.append(note(group, i))
            except RuntimeError:
                refused.append(i)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for t in threads:
        t.start()
    group.close(WAIT_S)
    for t in threads:
        t.join(WAIT_S)
    assert all(f.result(WAIT_S) is not None for f in futures)
    assert len(futures) + len(refused) == 90


def test_the_event_loop_goes_on_while_a_long_call_runs(made):
    group, bench = made

    async def main() -> int:
        call = asyncio.wrap_future(group.submit(Worker.hold, Broadcast()))
        turns = 0
        while not bench.entered or turns < 100:
            assert not call.done()
            await asyncio.sleep(0.001)
            turns += 1
        bench.release()
        await asyncio.wait_for(call, WAIT_S)
        return turns

    assert asyncio.run(main()) >= 100
