"""What the driver waits for when it publishes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl.driver import publisher
from verl.driver.publisher import Publisher
from verl.weight_sync.base import SyncReport
from verl.workers.waits import DeadlineExpired, Waits


class Replica:
    def __init__(self, starts: bool, in_flight: bool = True) -> None:
        self.starts, self.in_flight = starts, in_flight

    async def capabilities(self) -> Any:
        if not self.starts:
            await asyncio.Event().wait()
        return SimpleNamespace(in_flight_update=self.in_flight)


class Sync:
    """Delivers at once, and keeps what each publish was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int, tuple[str, ...]]] = []  # version, replicas, their modes

    def publish(self, trainer: Any, replicas: Any, *, version: int, on_inflight: Any, **_: Any) -> Any:
        self.given.append((version, len(replicas), on_inflight))
        done = asyncio.get_running_loop().create_future()
        done.set_result(SyncReport(version, 1, 1, 1, 0.0, True, whole_s=1.0))
        return done


def publisher_of(*replicas: Any, engine: Any = None, partial_rollout: bool = False) -> Publisher:
    given: dict[str, Any] = {"waits": Waits(), "timeout_s": 60.0, "note": print, "published": None, "trainer": None}
    return Publisher(engine=engine, replicas=replicas, exclusive=True, partial_rollout=partial_rollout, **given)


def test_the_parts_of_a_publish_are_metrics_of_the_step() -> None:
    made, seconds = publisher_of(), {"gather": 1.0, "stage": 2.0, "transfer": 3.0, "load": 4.0, "pause": 5.0}
    made._report(SyncReport(7, 2, 10, 2, 0.0, True, whole_s=20.0, seconds=seconds))
    found = {name: metric.total for name, metric in made.take_metrics().items() if name.endswith(("_s", "seconds"))}
    assert found == {"sync/seconds": 20.0, **{f"sync/{part}_s": value for part, value in seconds.items()}}


def test_a_replica_that_does_not_start_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "START_TIMEOUT_S", 0.05, raising=False)
    made = publisher_of(Replica(True), Replica(False), Replica(True))
    with pytest.raises(DeadlineExpired, match="driver waited 0.05 s for rollout replica 1 to start"):
        asyncio.run(asyncio.wait_for(made.start(0), 10))


def test_requests_go_on_under_new_weights_only_where_the_replica_can_and_the_run_wants_it() -> None:
    replicas = [Replica(True, in_flight=True), Replica(True, in_flight=False)]
    for partial, modes in ((True, ("keep", "wait")), (False, ("wait", "wait"))):
        sync = Sync()
        asyncio.run(publisher_of(*replicas, engine=sync, partial_rollout=partial).start(3))
        assert sync.given == [(3, 2, modes)]


def test_every_publish_has_the_next_version() -> None:
    sync, committed = Sync(), list[int]()
    failed = list[BaseException]()

    async def run() -> list[int]:
        made, seen = publisher_of(Replica(True), engine=sync), []
        await made.start(5)
        for _ in range(3):
            made.publish(lambda report: committed.append(report.version), failed.append)
            await made.settle()
            seen.append(made.version)
        return seen

    assert asyncio.run(run()) == committed == [6, 7, 8] and not failed
    assert [version for version, *_ in sync.given] == [5, 6, 7, 8]
