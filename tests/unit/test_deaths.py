"""A worker's death is the cause of the errors of others about it, also if it is reported after them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from verl.driver import launch
from verl.driver.stopping import Stopped
from verl.rollout.base import ReplicaLost
from verl.workers.group import WorkerDied, first_cause

DEATH = WorkerDied("rank 0 of ref died: out of memory")


class Cluster:
    """A cluster of which one worker has died before, dies after a query, or never."""

    own_processes = True

    def __init__(self, dies: str) -> None:
        self.dies, self.asked = dies, False

    def watch(self, heard: Callable[[BaseException], None]) -> None:
        self.asked = True
        if self.dies == "before":
            heard(DEATH)
        if self.dies == "after":
            threading.Timer(0.05, heard, (DEATH,)).start()


def cause(cluster: Cluster, error: BaseException) -> BaseException:
    async def run() -> None:
        async with launch._deaths_first(cluster):  # type: ignore[arg-type]
            raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(run())
    assert caught.value is error, "it is told too"
    return first_cause(error)


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_death_is_the_cause_of_an_error_that_came_first(dies: str) -> None:
    assert cause(Cluster(dies), ConnectionError("what ref wrote is gone")) is DEATH
    assert cause(Cluster(dies), WorkerDied("the process that wrote these is gone")) is DEATH, "it says who and why"


def test_a_death_is_its_own_cause() -> None:
    death: Any = DEATH
    assert cause(Cluster("before"), death) is death and death.__cause__ is None


def test_without_a_death_an_error_is_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FENCE_S", 0.05)
    error = ValueError("of the code")
    assert cause(Cluster("never"), error) is error


@pytest.mark.parametrize("error", [Stopped("SIGTERM"), ReplicaLost("no replica is left")])
def test_nobody_waits_for_a_death_where_the_cause_is_known(error: Exception) -> None:
    cluster = Cluster("never")
    assert cause(cluster, error) is error and not cluster.asked
