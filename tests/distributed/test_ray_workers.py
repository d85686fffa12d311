"""The contract of a worker group on Ray, and what only processes do: they die."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
from small_runs import metrics_of, small_run

from tests.worker_contract import *  # noqa: F403
from tests.worker_contract import WAIT_S, Bench, Worker, build, note, nothing, only_one, place, refuses, until
from verl.model_engine.layout import Layout
from verl.workers.group import Broadcast, WorkerDied
from verl.workers.pools import Pool, Shortage
from verl.workers.ray.cluster import RayCluster
from verl.workers.ray.group import RayGroup

TWO = Pool(ranks_per_node=2)


@pytest.fixture(scope="module")
def home(ray_session):
    made = RayCluster(
        {"main": Pool(ranks_per_node=2, cpus_per_rank=4.0)},
        {"actor": "main", "other": "main"},
        layout=Layout(world_size=2),
        set_up=nothing,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def groups():
    """By their size, as long as no test has closed them: processes are slow to start."""
    found: dict[int, RayGroup] = {}
    yield found
    for group in found.values():
        group.close()


@pytest.fixture
def cluster(home, groups):
    """With its room: groups that were kept give theirs back."""
    while groups:
        groups.popitem()[1].close()
    return home


@pytest.fixture(params=[1, 2] if os.environ.get("FULL_GRID") else [2])  # of one: test_ray_run, and in this process
def made(request, home, groups, tmp_path):
    size = request.param
    if size not in groups or groups[size]._closed:
        groups[size] = home.start("actor", build, (tmp_path,), world_size=size)
    group, bench = groups[size], Bench(tmp_path, size)
    group.submit(Worker.move, Broadcast((tmp_path,))).result(WAIT_S)
    yield group, bench
    bench.release()


def test_a_pool_has_devices_and_variables_of_its_own(ray_session, tmp_path):
    chips = Pool(ranks_per_node=2, cpus_per_rank=0.25, resource="chip", resource_per_rank=0.5, env={"VERL_POOL": 7})
    roles, two = {"actor": "main", "ref": "chips"}, Layout(world_size=2)
    cluster = RayCluster({"main": TWO, "chips": chips}, roles, layout=two, set_up=nothing)
    try:
        actor, ref = (cluster.start(role, build, (tmp_path,), world_size=2) for role in roles)
        assert actor.submit(place, Broadcast()).result(WAIT_S) == [(None, {"CPU": 1.0})] * 2
        assert ref.submit(place, Broadcast()).result(WAIT_S) == [("7", {"CPU": 0.25, "chip": 0.5})] * 2
    finally:
        cluster.close()
    with pytest.raises(Shortage, match=r"cluster.pools.chips asks for 1 nodes with 2 ranks of .*1.5 chip each"):
        RayCluster({"chips": replace(chips, resource_per_rank=1.5)}, {}, layout=two, set_up=nothing)


def test_a_dead_rank_ends_the_group_and_everybody_hears_why(cluster, tmp_path):
    heard: list[BaseException] = []
    cluster.watch(heard.append)
    group = cluster.start("actor", build, (tmp_path,), world_size=2)
    processes = [process for process, _ in group.submit(Worker.thread, Broadcast()).result(WAIT_S)]
    meeting = group.submit(Worker.fail, [(ValueError("never"), 9)] * 2)
    assert meeting.result(WAIT_S) == [["waits for the one that failed"] * 2] * 2
    held, behind = group.submit(Worker.hold, Broadcast()), note(group, "behind")
    until(lambda: Bench(tmp_path, 2).entered)
    began_s = time.monotonic()
    os.kill(processes[1], signal.SIGKILL)
    for call in (held, behind):
        with pytest.raises(WorkerDied, match=rf"rank 1 of actor \(process {processes[1]}"):
            call.result(WAIT_S)
    assert time.monotonic() - began_s < 30 and [str(e) for e in heard] == [str(held.exception())]
    with pytest.raises(WorkerDied, match="rank 1"):
        note(group, "later").result(WAIT_S)
    until(lambda: not alive(processes[0]))
    group.close()


def test_a_rank_that_dies_between_two_calls_is_heard_of(cluster, tmp_path):
    heard: list[BaseException] = []
    cluster.watch(heard.append)
    before = len(heard)  # of other tests
    group = cluster.start("actor", build, (tmp_path,))
    ((process, _),) = group.submit(Worker.thread, Broadcast()).result(WAIT_S)
    os.kill(process, signal.SIGKILL)
    until(lambda: heard[before:])
    assert f"rank 0 of actor (process {process} " in str(heard[-1])
    late: list[BaseException] = []
    cluster.watch(late.append)
    assert late == heard, "whoever asks later hears of it too"
    group.close()


def test_what_cannot_be_built_is_the_answer_to_every_call(cluster, tmp_path):
    group = cluster.start("actor", refuses, ("no such folder",))
    for _ in range(2):
        with pytest.raises(ValueError, match="no such folder"):
            note(group, 1).result(WAIT_S)
    group.close()


def test_one_rank_that_cannot_be_built_ends_the_wait_of_the_others(ray_session, tmp_path):
    """They wait for it to come to where ranks find each other, for minutes."""
    cluster = RayCluster({"main": TWO}, {}, layout=Layout(world_size=2), set_up=partial(only_one, tmp_path / "first"))
    try:
        group = cluster.start("actor", build, (tmp_path,), world_size=2)
        for _ in range(2):
            with pytest.raises(ValueError, match="the second cannot work here"):
                note(group, 1).result(60)
        processes = [life._place[1] for life in group._lives]
        until(lambda: not any(map(alive, processes)))
    finally:
        cluster.close()


def test_a_stopped_process_is_given_up_and_ended(ray_session, tmp_path):
    cluster = RayCluster({"main": TWO}, {}, layout=Layout(world_size=2), set_up=nothing, wait_timeout_s=16.0)
    heard: list[BaseException] = []
    cluster.watch(heard.append)
    try:
        group = cluster.start("actor", build, (tmp_path,), world_size=2)
        processes = [process for process, _ in group.submit(Worker.thread, Broadcast()).result(WAIT_S)]
        behind = group.submit(Worker.hold, Broadcast())  # it is at work: that is no silence
        os.kill(processes[1], signal.SIGSTOP)
        with pytest.raises(
            WorkerDied, match=rf"rank 1 of actor \(process {processes[1]} on .*has not answered for 8 s"
        ):
            behind.result(WAIT_S)
        assert heard == [behind.exception()]
        until(lambda: not any(map(alive, processes)))
    finally:
        cluster.close()


def test_what_cannot_be_pickled_is_refused_at_the_call(made):
    group, _ = made
    with pytest.raises(ValueError, match=r"Worker.note goes to another process.*define functions"):
        note(group, lambda: 1)


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="two runs: make test-all; unit/test_config_cluster asks")
def test_models_of_a_pool_compute_in_its_dtype(ray_session, tmp_path, tiny_model, arithmetic_data):
    """At the first step the reference is the policy: what is between them is what bfloat16 rounds."""
    more = ("run.total_steps=1", "algorithm.kl_loss_coef=0.01")
    apart = ("cluster.backend=ray", "cluster.pools={frozen: {resource: chip, device: cpu, dtype: bfloat16}}")
    small_run(tmp_path / "float32", tiny_model, arithmetic_data[:1], *more)
    small_run(tmp_path / "bfloat16", tiny_model, arithmetic_data[:1], *more, *apart, "cluster.roles={ref: frozen}")
    exact, rounded = (metrics_of(tmp_path / dtype / "r")[1]["actor/kl_loss"] for dtype in ("float32", "bfloat16"))
    assert abs(exact) < 1e-12 and 1e-9 < rounded < 1e-2, (exact, rounded)
