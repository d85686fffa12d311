"""Ranks in processes of their own: how they find each other (torch.distributed), and where those of one call meet."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from verl.model_engine.layout import Layout
from verl.workers.answers import RankLate, late

T = TypeVar("T")
POLL_S = 0.0005  # between two looks at who has come; grows to MOST_POLL_S
MOST_POLL_S = 0.02


class MeetingEnded(RuntimeError):
    """Another rank of this call has failed: it will not come."""


class ProcessRanks:
    """See `Ranks`: the ranks of a group of processes, as `layout` arranges them.

    They come together in a store before anything is exchanged. So a rank that raises outside of a model's own
    collectives ends the wait of the others at once, and the group serves the next call.
    """

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
        for name, ranks in columns.items():  # every process must make every group, in one order
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
            if number in ranks:
                self._peers, self._column = group, "-".join(map(str, name))

    def begin(self, call: int) -> None:
        """What comes now belongs to this call."""
        self._call, self._met = call, 0

    def abort(self, why: str) -> None:
        """This rank will not come any more in this call."""
        self._store.set(f"abort/{self._call}", f"rank {self._number}: {why}")

    def all_gather(self, value: T, timeout_s: float | None = None) -> list[T]:
        self._met += 1
        key = f"meet/{self._column}/{self._call}/{self._met}"
        self._meet(key, timeout_s or self._timeout_s)
        if self.rank == 0 and self._last:  # everybody has come from there
            self._store.delete_key(self._last)
        self._last = key
        found: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(found, value, group=self._peers)
        except RuntimeError as e:
            raise late(e) from None
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


def serve(host: str) -> tuple[dist.TCPStore, str]:
    """A store for ranks to find each other, held by this process, and its address."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def backend_of(device: str) -> str:
    """What ranks with models there talk through: gloo on the host, and what torch has for the device."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def join(address: str, layout: Layout, number: int, *, device: str, timeout_s: float) -> ProcessRanks:
    """Become rank `number` of those who find each other at `address`; TimeoutError where not all come."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    become(store, layout, number, backend=backend_of(device), timeout_s=timeout_s, start_s=timeout_s)
    return ProcessRanks(dist.PrefixStore("calls", store), layout, number, timeout_s)


def become(store: dist.Store, layout: Layout, number: int, *, backend: str, timeout_s: float, start_s: float) -> None:
    """Rank `number` of this process's default group. start_s: for all to come, who may have begun late; what follows
    begins when they are there · timeout_s: of each collective. TimeoutError where not all come."""
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
