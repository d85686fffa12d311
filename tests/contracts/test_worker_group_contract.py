"""The contract of a worker group in this process, on one rank and on two."""

from __future__ import annotations

import gc
import pickle
import time
import weakref

import pytest

from tests.worker_contract import *  # noqa: F403
from tests.worker_contract import WAIT_S, Bench, Worker, build
from verl.workers.group import Broadcast
from verl.workers.inproc import InprocCluster


@pytest.fixture(params=[1, 2])
def made(request, tmp_path):
    group = InprocCluster().start("actor", build, (tmp_path,), world_size=request.param)
    bench = Bench(tmp_path, request.param)
    yield group, bench
    bench.release()
    group.close()


class Big:
    """Something that can be watched."""


def test_a_group_holds_neither_arguments_nor_results_of_a_call_that_has_ended(made):
    """A copy of the weights must not live until the next call."""
    group, _ = made
    argument = Big()
    seen = [weakref.ref(argument)]
    seen += [weakref.ref(x) for x in group.submit(Worker.make, Broadcast((Big,))).result(WAIT_S)]
    group.submit(Worker.thread, Broadcast()).result(WAIT_S)
    with pytest.raises(RuntimeError):
        group.submit(Worker.fail, Broadcast((RuntimeError(argument),))).result(WAIT_S)
    del argument
    for _ in range(200):
        gc.collect()
        if all(r() is None for r in seen):
            return
        time.sleep(0.01)
    raise AssertionError("something of an ended call is still held")


def test_a_call_can_be_pickled():
    """The arguments of `submit` may be sent to another process: a function of the worker's class, and its arguments."""
    assert pickle.loads(pickle.dumps(Worker.note)) is Worker.note
    assert pickle.loads(pickle.dumps(Broadcast(("x",)))) == Broadcast(("x",))
