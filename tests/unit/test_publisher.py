"""What the driver waits for when it publishes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl.driver import publisher
from verl.driver.publisher import Publisher
from verl.workers.waits import DeadlineExpired, Waits


class Replica:
    def __init__(self, starts: bool) -> None:
        self.starts = starts

    async def capabilities(self) -> Any:
        if not self.starts:
            await asyncio.Event().wait()
        return SimpleNamespace(in_flight_update=True)


def test_a_replica_that_does_not_start_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "START_TIMEOUT_S", 0.05, raising=False)
    made: Any = Publisher(
        engine=None,  # type: ignore[arg-type]  # it is not asked
        trainer=None,  # type: ignore[arg-type]
        replicas=[Replica(True), Replica(False), Replica(True)],  # type: ignore[list-item]
        waits=Waits(),
        timeout_s=60.0,
        exclusive=True,
        partial_rollout=False,
        note=print,
        published=None,
    )
    with pytest.raises(DeadlineExpired, match="driver waited 0.05 s for rollout replica 1 to start"):
        asyncio.run(asyncio.wait_for(made.start(0), 10))
