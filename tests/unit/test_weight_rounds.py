"""The broadcasts of sync.engine=collective: the hosts that wait for one, and those that have left before it."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from verl.weight_sync import collective
from verl.weight_sync.collective import JoinRequest, Member, Rounds


def test_a_host_that_waited_too_long_holds_up_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast takes longer than a host that came meanwhile may wait; its connection is closed then."""
    monkeypatch.setattr(collective, "FETCH_S", 0.3)
    monkeypatch.setattr(collective, "SETTLE_S", 0.01)
    rounds = Rounds(None, "gloo", 0.01, lambda: SimpleNamespace(version=0))  # type: ignore[arg-type, return-value]
    gate, served = threading.Event(), list[list[str]]()

    def broadcast(members: list[Member]) -> None:
        served.append([one.joined.host for one in members])
        gate.wait(20)

    monkeypatch.setattr(rounds, "_broadcast", broadcast)
    threading.Thread(target=rounds.run, daemon=True).start()

    def host(name: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            rounds.join(Member(joined(name), ours))

    def joined(name: str) -> JoinRequest:
        given: Any = {field: name for field in JoinRequest.__struct_fields__}
        return JoinRequest(**given)

    first = threading.Thread(target=host, args=("first",), daemon=True)
    first.start()
    while not served:
        time.sleep(0.001)
    host("late")  # until it has waited for too long
    assert not rounds._waiting
    gate.set()
    first.join(20)
    monkeypatch.setattr(collective, "FETCH_S", 20.0)
    host("next")
    assert served == [["first"], ["next"]]
