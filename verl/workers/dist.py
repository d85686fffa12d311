"""Ranks in separate processes: how they connect with torch.distributed, and how the ranks of one call exchange
values."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from verl.model_engine.layout import Layout
from verl.workers.answers import MeetingEnded, RankLate, typed_error

T = TypeVar("T")
POLL_S = 0.0005  # the first pause between two checks of the store; grows to MOST_POLL_S
MOST_POLL_S = 0.02


class ProcessRanks:
    """`Ranks` of a group of processes, as `layout` arranges them.

    The ranks synchronize in a store before they exchange anything. So a rank that raises outside of a model's own
    collectives ends the wait of the others at once, and the group can serve the next call."""

    def __init__(self, store: dist.Store, layout: Layout, number: int, timeout_s: float) -> None:
        place = layout.place(number)
        self.rank, self.world_size, self.primary = place.data, layout.data, place.primary
        self._store, self._timeout_s, self._number = store, timeout_s, number
        self._call, self._met, self._last = -1, 0, ""
        self._peers: Any = None
        columns: dict[tuple[int, int, int], list[int]] = {}
        for other in range(layout.world_size):
            p = layout.place(other)
            columns.setdefault((p.pipeline, p.sequence, p.tensor), []).append(other)
        for name, ranks in columns.items():  # every process must create every group, in one order
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
            if number in ranks:
                self._peers, self._column = group, "-".join(map(str, name))

    def begin(self, call: int) -> None:
        """Start call number `call`: the exchanges that follow belong to it."""
        self._call, self._met = call, 0

    def abort(self, why: str) -> None:
        """Report to the other ranks, through the store, that this rank has failed in this call."""
        self._store.set(f"abort/{self._call}", f"rank {self._number}: {why}")

    def all_gather(self, value: T, timeout_s: float | None = None) -> list[T]:
        self._met += 1
        key = f"meet/{self._column}/{self._call}/{self._met}"
        self._meet(key, timeout_s or self._timeout_s)
        if self.rank == 0 and self._last:  # every rank has left the last exchange
            self._store.delete_key(self._last)
        self._last = key
        found: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(found, value, group=self._peers)
        except RuntimeError as e:
            raise typed_error(e) from None
        return found

    def _meet(self, key: str, timeout_s: float) -> None:
        come, pause_s, until_s = self._store.add(key, 1), POLL_S, time.monotonic() + timeout_s
        while come < self.world_size:
            if self._store.check([f"abort/{self._call}"]):
                raise MeetingEnded(self._store.get(f"abort/{self._call}").decode())
            if time.monotonic() > until_s:
                raise RankLate(
                    f"rank {self._number} waited {timeout_s:g} s for {self.world_size - come} of "
                    f"{self.world_size} ranks"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_POLL_S)
            come = self._store.add(key, 0)


def serve_store(host: str) -> tuple[dist.TCPStore, str]:
    """Start a store with which ranks can connect, and return it with its address."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def group_backend(device: str) -> str:
    """Return the torch.distributed backend for ranks with models on this device: gloo for the host, and torch's default
    backend for the device."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def join_ranks(address: str, layout: Layout, number: int, *, device: str, timeout_s: float) -> ProcessRanks:
    """Join the process group at `address` as rank `number`. Raise RankLate if not all ranks join in time."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    become(store, layout, number, backend=group_backend(device), timeout_s=timeout_s, start_s=timeout_s)
    return ProcessRanks(dist.PrefixStore("calls", store), layout, number, timeout_s)


def become(store: dist.Store, layout: Layout, number: int, *, backend: str, timeout_s: float, start_s: float) -> None:
    """Initialize the default process group of this process as rank `number`. Raise RankLate if not all ranks join in
    time.

    start_s: the time for all ranks to join, some of which may start late; the collectives begin afterwards · timeout_s:
    the deadline of each collective."""
    wait, come = timedelta(seconds=timeout_s), [f"come/{n}" for n in range(layout.world_size)]
    store.set(come[number], "")
    try:
        store.wait(come, timedelta(seconds=start_s))
    except dist.DistStoreError:
        late = [n for n, key in enumerate(come) if not store.check([key])]
        raise RankLate(f"rank {number} waited {start_s:g} s for ranks {late} of {layout.world_size} to come") from None
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=number, world_size=layout.world_size, timeout=wait
    )
