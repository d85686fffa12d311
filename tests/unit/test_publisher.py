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
    def __init__(self, starts: bool) -> None:
        self.starts = starts

    async def capabilities(self) -> Any:
        if not self.starts:
            await asyncio.Event().wait()
        return SimpleNamespace(in_flight_update=True)


def publisher_of(*replicas: Any) -> Publisher:
    nobody: Any = None  # who is not asked
    given: dict[str, Any] = {"waits": Waits(), "timeout_s": 60.0, "note": print, "published": None}
    return Publisher(engine=nobody, trainer=nobody, replicas=replicas, exclusive=True, partial_rollout=False, **given)


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
