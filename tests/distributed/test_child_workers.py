"""The contract of a worker group in child processes, and what only processes do: they die."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.worker_contract import *  # noqa: F403
from tests.worker_contract import WAIT_S, Bench, Worker, build, note, nothing, refuses, until
from verl.model_engine.layout import Layout
from verl.workers.children.cluster import ChildCluster
from verl.workers.group import Broadcast, WorkerDied, WorkerGroup


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = ChildCluster(Layout(world_size=2), nothing, tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def kept():
    """The group of two, as long as no test has closed it: processes are slow to start."""
    return list[WorkerGroup]()


@pytest.fixture
def made(cluster, kept, tmp_path):
    if not kept or kept[0]._closed:
        kept[:] = [cluster.start("actor", build, (tmp_path,), world_size=2)]
    group, bench = kept[0], Bench(tmp_path, 2)
    group.submit(Worker.move, Broadcast((tmp_path,))).result(WAIT_S)
    yield group, bench
    bench.release()


def test_a_dead_rank_ends_the_group_and_is_named(cluster, tmp_path):
    found: list[BaseException] = []
    cluster.watch(found.append)
    group = cluster.start("ref", build, (tmp_path,), world_size=2)
    processes = [process for process, _ in group.submit(Worker.thread, Broadcast()).result(WAIT_S)]
    held, behind = group.submit(Worker.hold, Broadcast()), note(group, "behind")
    until(lambda: Bench(tmp_path, 2).entered)
    began_s = time.monotonic()
    os.kill(processes[1], signal.SIGKILL)
    for call in (held, behind):
        with pytest.raises(WorkerDied, match=rf"^rank 1 of ref \(process {processes[1]}\) died: killed by SIGKILL"):
            call.result(WAIT_S)
    assert time.monotonic() - began_s < 30 and [str(e) for e in found] == [str(held.exception())]
    until(lambda: not os.path.exists(f"/proc/{processes[0]}"))
    late: list[BaseException] = []
    cluster.watch(late.append)
    assert late == found
    group.close()


def test_a_stopped_rank_counts_as_dead(tmp_path):
    cluster = ChildCluster(Layout(), nothing, tmp_path / "logs", wait_timeout_s=4.0)
    try:
        group = cluster.start("actor", build, (tmp_path,))
        ((process, _),) = group.submit(Worker.thread, Broadcast()).result(WAIT_S)
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"has not answered for 2 s"):
            note(group, 1).result(WAIT_S)
        until(lambda: not os.path.exists(f"/proc/{process}"))
    finally:
        cluster.close()


def test_an_exit_is_reported_with_the_last_line_of_its_output(cluster, tmp_path):
    group = cluster.start("critic", build, (tmp_path,))
    group.submit(Worker.thread, Broadcast()).result(WAIT_S)
    with pytest.raises(WorkerDied, match=r"ended with exit code 3: no heads left \(log: .*critic_0\.log\)"):
        group.call_at_once(leave, ("no heads left",)).result(WAIT_S)
    group.close()


def leave(worker, text):
    os.write(2, f"{text}\n".encode())
    os._exit(3)


def test_what_cannot_be_built_is_the_answer_to_every_call(cluster):
    group = cluster.start("actor", refuses, ("no such folder",))
    for _ in range(2):
        with pytest.raises(ValueError, match="no such folder"):
            note(group, 1).result(WAIT_S)
    group.close()
