"""The contract of a worker group in child processes, and what only processes do: they die."""

from __future__ import annotations

import os
import pickle
import signal
import time
from concurrent.futures import Future

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


def test_a_process_that_does_not_start_counts_as_dead(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    cluster = ChildCluster(Layout(), nothing, tmp_path / "logs", python=str(python), start_timeout_s=0.5)
    try:
        group = cluster.start("actor", build, (tmp_path,))
        with pytest.raises(
            WorkerDied, match=r"^rank 0 of actor .* within cluster\.start_timeout_s=0\.5 .*actor_0\.log"
        ):
            note(group, 1).result(WAIT_S)
    finally:
        cluster.close()


def test_a_long_call_at_once_is_no_death(tmp_path):
    cluster = ChildCluster(Layout(), nothing, tmp_path / "logs", wait_timeout_s=2.0)
    try:
        group = cluster.start("actor", build, (tmp_path,))
        assert note(group, 1).result(WAIT_S) == [1]
        assert group.call_at_once(slow, (3.0,)).result(WAIT_S) == ["awake"]
    finally:
        cluster.close()


def slow(worker, duration_s):
    time.sleep(duration_s)
    return "awake"


def test_an_answer_of_a_rank_that_counts_as_dead_is_ignored(cluster):
    died = []
    rank = cluster.open_rank("ref", 0, died.append)
    late = rank._first  # its process has not started yet
    rank._end("is late")
    assert isinstance(late.exception(WAIT_S), WorkerDied) and len(died) == 1
    after = rank._waiting[99] = Future()
    rank._channel.send(99, pickle.dumps(("alive", ())))
    assert after.result(WAIT_S).error is None, "messages are read after the late answer"
    rank.kill()
    until(lambda: rank._channel._socket.fileno() == -1)


def test_an_answer_that_cannot_be_sent_ends_the_process(cluster, tmp_path):
    for at_once in (False, True):
        group = cluster.start("critic", build, (tmp_path,))
        call = group.call_at_once(deep) if at_once else group.submit(deep, Broadcast())
        with pytest.raises(WorkerDied, match=r"ended with exit code 1: RecursionError: "):
            call.result(WAIT_S)
        group.close()


def deep(worker):
    """Return a list in lists that pickle cannot follow."""
    made = []
    for _ in range(100_000):
        made = [made]
    return made


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
