"""A Ray of three nodes on this machine, as three would be: a run over all of them, and what becomes of it when one is
missing, late, of another commit or lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import metrics_of, small_args

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
from ray.cluster_utils import Cluster  # noqa: E402

from verl.driver import driver_host  # noqa: E402
from verl.workers.ray.cluster import OWN_RAY  # noqa: E402

pytestmark = pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="minutes: make test-all")
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
WAIT_S = 240.0


class Nodes:
    """The first one, which is always there, and others that come and go; each has room for one rank."""

    def __init__(self) -> None:
        head = {**NODE, "include_dashboard": False, "_system_config": OWN_RAY}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others: list[Any] = []

    def have(self, count: int) -> None:
        while len(self.others) < count - 1:
            self.add()
        while len(self.others) > count - 1:
            self.lose()

    def add(self, **more: Any) -> None:
        self.others.append(self.cluster.add_node(**NODE, **more))

    def lose(self) -> None:
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.cluster.shutdown()


class Run:
    """`verl train` over three nodes, in a process of its own."""

    def __init__(self, nodes: Nodes, root: Path, model: Path, data: Path, *more: str) -> None:
        three = ("cluster.backend=ray", f"cluster.address={nodes.cluster.address}", "cluster.nodes=3")
        args = small_args(root, model, [data], *three, "run.save_every_steps=1", "track.sinks=[jsonl]", *more)
        self.root, self.out = root, root / "out"
        with self.out.open("w") as out:
            command = [sys.executable, "-m", "verl.cli", "train", *args]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=root)

    @property
    def said(self) -> str:
        return self.out.read_text()

    def until(self, what: Any) -> None:
        until_s = time.monotonic() + WAIT_S
        while not what():
            assert self.process.poll() is None and time.monotonic() < until_s, self.said
            time.sleep(0.2)

    def has(self, step: int) -> bool:
        return (self.root / "r" / "checkpoints" / f"step_{step}").is_dir()

    def ended(self) -> int:
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()


def last_line(run: Run) -> str:
    return run.said.strip().splitlines()[-1]


def test_a_run_over_three_nodes_waits_for_the_last_one(nodes, tmp_path, tiny_model, arithmetic_data):
    nodes.have(2)
    run = Run(nodes, tmp_path, tiny_model, arithmetic_data[0], "run.total_steps=2", "rollout.replicas=3")
    run.until(lambda: "for more nodes: cluster.pools.main asks for 3 nodes" in run.said)
    nodes.have(3)
    assert run.ended() == 0, run.said
    assert set(metrics_of(tmp_path / "r")) == {1, 2} and "3 ranks = 3 data" in run.said
    said = " ".join(run.said.split())  # lines are broken where the screen ends
    assert "cluster: 3 nodes (" in said and "has 1 CPU) hold pools main (3 x 1 ranks)" in said, said


def test_a_node_that_is_missing_is_said_with_what_the_others_have(nodes, tmp_path, tiny_model, arithmetic_data):
    nodes.have(2)
    run = Run(nodes, tmp_path, tiny_model, arithmetic_data[0], "cluster.start_timeout_s=5")
    assert run.ended() == 2 and not (tmp_path / "r" / "metrics.jsonl").exists(), run.said
    said = last_line(run)
    assert "asks for 3 nodes with 1 ranks of 1 CPU each, and no nodes hold that" in said and "PENDING" not in run.said
    assert said.count("has 1 CPU: room for 1") == 2, said


def test_a_node_of_another_commit_is_named(nodes, tmp_path, tiny_model, arithmetic_data):
    nodes.have(2)
    other = tmp_path / "other"
    shutil.copytree(driver_host.SOURCE, other / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "verl" / "bounds.py").open("a") as file:
        file.write("\n# one line more\n")
    nodes.add(env_vars={"PYTHONPATH": str(other)})
    try:
        run = Run(nodes, tmp_path, tiny_model, arithmetic_data[0])
        assert run.ended() == 2, run.said
        assert " has verl source " in last_line(run) and "install the same on every node" in last_line(run), run.said
    finally:
        nodes.lose()


@pytest.mark.parametrize("another", [True, False], ids=["another one comes", "no other comes"])
def test_a_node_that_is_lost(nodes, tmp_path, tiny_model, arithmetic_data, another):
    """The run continues from its last checkpoint if a node replaces the lost one, else it ends with the first cause."""
    nodes.have(3)
    more = (f"run.total_steps={4 if another else 50}", f"cluster.start_timeout_s={120 if another else 5}")
    run = Run(nodes, tmp_path, tiny_model, arithmetic_data[0], "data.max_rows=32", *more)
    run.until(lambda: run.has(1))
    nodes.lose()
    began_s = time.monotonic()
    run.until(lambda: "starting again from the last checkpoint (1 of 3 times)" in run.said)
    assert time.monotonic() - began_s < 60, "by Ray's own settings a lost node is noticed after a minute"
    if another:
        nodes.add()
    assert run.ended() == (0 if another else 1), run.said
    assert "died: its node is lost\nstarting again" in run.said, run.said
    if another:
        assert set(metrics_of(tmp_path / "r")) == {1, 2, 3, 4} and "resuming" in run.said
        return
    said = last_line(run)
    assert said.startswith("error: r") and "died: " in said, said
    assert "; the run cannot start again: cluster.pools.main asks for 3 nodes" in said, said


def test_weights_of_one_machine_are_refused_for_engines_on_others(nodes, tmp_path, tiny_model, arithmetic_data):
    run = Run(nodes, tmp_path, tiny_model, arithmetic_data[0], "rollout.replicas=2", "sync.engine=shm")
    assert run.ended() == 2 and "Traceback" not in run.said, run.said
    assert last_line(run).startswith(
        "error: rollout.replicas=2: sync.engine=shm goes through the memory of one machine"
    )
    assert os.listdir(tmp_path) == ["out"]
