"""A cluster of child processes on this machine: they are the ranks of models, by an interpreter that may be of another
environment. Workers without a model, and the rollout engines, are in this process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl.model_engine.base import OneRank
from verl.model_engine.layout import Layout
from verl.processes.environment import foreign_variables
from verl.rollout.base import RolloutEngine
from verl.workers.answers import RankAnswer
from verl.workers.children.rank import ChildRank
from verl.workers.group import Build, ClusterContext, DevicePlace, Died, WorkerGroup
from verl.workers.inproc import InprocGroup
from verl.workers.pools import NO_MODEL
from verl.workers.process_group import ProcessGroup, pickled
from verl.workers.sections import ClusterConfig

HOST, INTERFACE = "127.0.0.1", "lo"  # at which the ranks of one machine connect
LOOK_S = 1.0  # the pause between two checks of every process


@dataclass(eq=False)
class ChildCluster:
    """A `Cluster` of child processes."""

    own_processes = True
    drivers = None

    layout: Layout  # The layout of the ranks of a model.
    set_up: Callable[[DevicePlace], None]  # Called in every worker before it is built.
    logs: Path  # The folder with the output of each process.
    python: str = sys.executable  # The interpreter of the processes.
    device: str = "cpu"  # The device of the models.
    wait_timeout_s: float = 600.0
    """The deadline of a rank for other ranks. A process that answers nothing for half of it counts as dead."""
    start_timeout_s: float = 60.0  # The deadline of a process for its first answer, before its worker is built.
    _ranks: list[ChildRank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deaths: list[BaseException] = []
        self._on_failure: Callable[[BaseException], None] = lambda error: None
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="verl-look", daemon=True).start()

    def start(
        self, name: str, build: Build, args: tuple[Any, ...], *, world_size: int = 1, died: Died | None = None
    ) -> WorkerGroup:
        if name in NO_MODEL:
            return InprocGroup(name, build(*args, ranks=[OneRank()]))
        return ChildGroup(self, name, pickled(build, (self.set_up, args)), world_size, died or self._died)

    def place(self, name: str) -> str:
        return "here" if name in NO_MODEL else "children"

    def replica(
        self, number: int, build: Callable[..., RolloutEngine], args: tuple[Any, ...], died: Died | None = None
    ) -> RolloutEngine:
        return build(*args)

    def watch(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure`, in any thread, for every death from now on and for those before."""
        self._on_failure = on_failure
        for death in self._deaths:
            on_failure(death)

    def close(self) -> None:
        self._closed.set()
        for rank in self._ranks:
            rank.kill()

    def open_rank(self, name: str, number: int, died: Callable[[str], None]) -> ChildRank:
        """Start the process of one rank, which is not built yet."""
        env = {"GLOO_SOCKET_IFNAME": INTERFACE, **foreign_variables(os.environ)}
        if self.device == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = device_number(os.environ, number)
        log = self.logs / f"{name}_{number}.log"
        limit_s = self.start_timeout_s
        rank = ChildRank(f"rank {number} of {name}", self.python, log=log, env=env, died=died, start_timeout_s=limit_s)
        self._ranks.append(rank)
        return rank

    def _died(self, error: BaseException) -> None:
        self._deaths.append(error)
        self._on_failure(error)

    def _look(self) -> None:
        silent_s = self.wait_timeout_s / 2
        while not self._closed.wait(min(silent_s / 8, LOOK_S)):
            for rank in list(self._ranks):
                rank.look(silent_s)


class ChildGroup(ProcessGroup):
    """A `WorkerGroup` of child processes. made: the pickled (build, (set_up, arguments)) of each rank."""

    def __init__(self, cluster: ChildCluster, name: str, made: bytes, world_size: int, on_death: Died) -> None:
        self._made, self._cluster = made, cluster
        self._layout = cluster.layout if world_size == cluster.layout.world_size else Layout(world_size=world_size)
        self._children = list[ChildRank]()
        super().__init__(name, world_size, on_death)
        for rank in range(world_size):
            self._children.append(child := cluster.open_rank(name, rank, self.died))
            self.add(child)
        if world_size > 1:
            self._children[0].request("serve_at", HOST).add_done_callback(self._serve)
        else:
            self._build("")

    def _serve(self, found: Future[RankAnswer]) -> None:
        """Build the ranks, which meet at the store of the first one. An error of the store is the answer of each."""
        if found.exception() is None and found.result().error is None:
            self._build(found.result().value)
        else:
            for rank in range(self.world_size):
                self.built(rank, found)

    def _build(self, address: str) -> None:
        for rank, child in enumerate(self._children):
            another = self._cluster.python != sys.executable
            place = DevicePlace(self._cluster.device, rank, self.world_size, another_python=another)
            args = (address, rank, self._layout, place, self._cluster.wait_timeout_s, self._made)
            child.request("build", *args).add_done_callback(partial(self._child_built, rank))

    def _child_built(self, rank: int, found: Future[RankAnswer]) -> None:
        self._children[rank].ready = found.exception() is None
        self.built(rank, found)


def device_number(env: Mapping[str, str], number: int) -> str:
    """Return the name of a rank's GPU for CUDA_VISIBLE_DEVICES, among those that this process sees; of one that does
    not exist, "none"."""
    if not (given := env.get("CUDA_VISIBLE_DEVICES")):
        return str(number)
    names = given.split(",")
    return names[number] if number < len(names) else "none"


def build(section: ClusterConfig, context: ClusterContext) -> ChildCluster:
    return ChildCluster(
        context.layout,
        context.set_up,
        logs=context.logs,
        python=context.python or sys.executable,
        device=context.device,
        wait_timeout_s=context.wait_timeout_s,
        start_timeout_s=section.start_timeout_s,
    )
