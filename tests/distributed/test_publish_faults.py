"""A rank that dies or raises while a version is staged: all other ranks get an error that names it, and none waits for
torch's deadline, which is ten times that of these tests."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from cases import engine
from forked import run

from verl.errors import Refused
from verl.model_engine.layout import Layout
from verl.weight_sync import buckets, shm, tcp, together
from verl.weight_sync.base import CheckedReader, Entry, Readers, SyncError
from verl.weight_sync.sender import WeightSender

RANKS = 4  # with three, every rank is a neighbour of the dead one in torch's rings
WAIT_S = 60.0


@pytest.fixture
def name() -> Iterator[str]:
    made = f"{shm.PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    yield made
    shm.remove(made)


def outlet_of(kind: str, name: str) -> Any:
    return tcp.TcpOutlet(host="127.0.0.1") if kind == "slices" else shm.ShmOutlet(name)


def harmful(harm: str, after: int) -> Any:
    """A conversion of tensors that ends this process, or fails, in the middle of a version."""
    real, calls = together.converted, []

    def converted(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == after:
            if harm == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("planted")
        return real(*args)

    return converted


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kind", ["memory", "slices"])
@pytest.mark.parametrize("harm", ["killed", "raises"])
def test_a_rank_that_ends_while_it_stages_is_named_to_all_others(
    harm: str, kind: str, victim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(rank: int) -> Any:
        if kind == "slices":
            monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")
        made, outlet = engine("qwen3, tied", "actor", Layout(world_size=RANKS)), outlet_of(kind, name)
        sender = WeightSender(outlet)
        if rank == victim:
            monkeypatch.setattr(together, "converted", harmful(harm, after=5))
        with pytest.raises(SyncError) as error:
            sender.send(made, 0, [], copy=False, first=rank == 0)
        if harm == "raises":  # the ranks are still in step: the next version is whole
            sent = sender.send(made, 1, [], copy=False, first=rank == 0)
            if sent is not None:
                assert len(dict(CheckedReader(sent.source).tensors())) == len(sent.source.delivered)
            torch.distributed.barrier()
        if kind == "slices":
            shm.remove(f"{shm.PREFIX}-{os.getpid()}-{outlet.tag}")
        return str(error.value)

    died = frozenset({victim} if harm == "killed" else ())
    said = [one for one in run(RANKS, publish, timeout_s=WAIT_S, killed=died) if one is not None]
    do = "store" if kind == "slices" else "write"
    wanted = f"rank {victim} could not {do} its slices: ZeroDivisionError: planted"
    wanted = wanted if harm == "raises" else f"rank {victim} ended in the middle of the publish (Connection "
    assert len(said) == RANKS - len(died) and all(one.startswith(f"version 0: {wanted}") for one in said), said


@pytest.mark.parametrize("kind", ["whole", "buckets"])
def test_an_outlet_that_fails_while_the_first_rank_gathers_is_the_error_of_all(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> str:
        tensors = args[3] if kind == "whole" else args[2]
        list(islice(tensors, 3))
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(shm.ShmOutlet, "stage", fails)
    monkeypatch.setattr(buckets.BucketOutlet, "stream", fails)

    def publish(rank: int) -> Any:
        monkeypatch.setattr(shm, "this_host", lambda: f"host {rank}")
        made = engine("qwen3, tied", "actor", Layout(world_size=RANKS))
        sender = WeightSender(shm.ShmOutlet(name) if kind == "whole" else buckets.BucketOutlet(name, 1 << 20))
        with pytest.raises(SyncError) as error:
            if kind == "whole":
                sender.send(made, 0, [], copy=False, first=rank == 0)
            elif rank == 0:
                sender.stream(made, 0, [], Readers(0, 1, WAIT_S))
            else:
                sender.attend(made, 0, [])
        return str(error.value)

    assert {*run(RANKS, publish, timeout_s=WAIT_S)} == {
        "version 0: rank 0 could not send it: ZeroDivisionError: planted"
    }


def test_a_mistake_of_the_user_stays_one_on_all_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Any, version: int, shapes: dict[str, Entry]) -> str:
        raise Refused("rollout.dtype=octal: set another one")

    monkeypatch.setattr(shm.ShmOutlet, "begin", refused)

    def publish(rank: int) -> str:
        made = engine("qwen3, tied", "actor", Layout(world_size=2))
        with pytest.raises(Refused) as error:
            WeightSender(shm.ShmOutlet(name)).send(made, 0, [], copy=False, first=rank == 0)
        return str(error.value)

    assert {*run(2, publish)} == {"version 0: rank 0 could not begin the version: rollout.dtype=octal: set another one"}
