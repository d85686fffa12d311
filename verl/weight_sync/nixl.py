"""Weights over NIXL: as over tcp.py, but each host reads the version directly from the trainer's memory (one-sided
reads, through the transport that UCX finds between the two: shared memory, TCP, RDMA). Connections carry only the
address of that memory.

After the read the trainer confirms the version in its memory; until then the reader's file counts as empty."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from verl.weight_sync.base import SyncContext, SyncError
from verl.weight_sync.connections import has_input, received
from verl.weight_sync.local import LocalCheckpointEngine, engine_of
from verl.weight_sync.options import Nixl
from verl.weight_sync.shm import PREFIX, VERSION_BYTES, ShmStream, blank, end
from verl.weight_sync.slices import SLICED, RankSlices, SlicedVersion, slices_in
from verl.weight_sync.tcp import ANSWER, FETCH_S, NOTHING, VERSION, HostStream, TcpOutlet, request_version

LOOK_S = 0.0005
DONE = b"."  # a reader's message


class MemoryRegion(msgspec.Struct, array_like=True):
    """The memory of a version on the trainer's host."""

    agent: bytes
    """The metadata of the NIXL agent that owns it."""
    memory: bytes
    """The serialized descriptors of the part that is read."""
    num_bytes: int
    """The size of the version's file."""


@functools.cache
def agent(pid: int) -> Any:
    """Return the NIXL agent of this process (`pid`), which registers and transfers memory."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # by default it writes to the standard output of this process
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(f"verl-{pid}-{uuid.uuid4().hex[:12]}", nixl_agent_config(backends=["UCX"]))


class NixlOutlet(TcpOutlet):
    """A `TcpOutlet` that lets hosts read its memory. The two latest versions stay registered."""

    transport = "verl.weight_sync.nixl:open_weights"

    def __init__(self, *, host: str | None = None) -> None:
        super().__init__(host=host)
        self._registered: deque[Any] = deque()
        self._current: tuple[ShmStream, bytes] | None = None  # a version and its address, replaced together

    def end(self, version: int) -> str:
        address = super().end(version)
        assert self._held is not None
        if len(self._registered) == 2:
            _agent().deregister_memory(self._registered.popleft())
        memory = self._held[0].memory[VERSION_BYTES:]
        self._registered.append(_agent().register_memory([memory]))
        descs = _agent().get_serialized_descs(_agent().get_xfer_descs([memory]))
        place = MemoryRegion(_agent().get_agent_metadata(), descs, VERSION_BYTES + memory.numel())
        self._current = (self._held[0], msgspec.msgpack.encode(place))
        return address

    def _send_version(self, peer: socket.socket, has: int) -> None:
        assert self._current is not None, "an address is known when a version is staged"
        now, index = self._current
        peer.sendall(ANSWER.pack(now.version, len(index)) + index)
        peer.settimeout(FETCH_S)
        if received(peer, len(DONE)) == DONE:
            peer.sendall(VERSION.pack(now.version))


class NixlStream(HostStream):
    """A `HostStream` that reads the trainer's memory."""

    ranks_at_once = 1  # a whole share of a rank is in memory until it is put in its place

    def _newer(self, here: ShmStream | None, place: Callable[[str], Path]) -> ShmStream:
        if self._address.startswith(SLICED):
            return self._assembled(here, place)
        peer, version, index = request_version(self._address, NOTHING)
        with peer:
            if here is not None and version <= here.version:
                return here
            found = msgspec.msgpack.decode(index, type=MemoryRegion)
            into = blank(place(str(version % 2)), found.num_bytes)
            _read_version(found, into.memory[VERSION_BYTES:], peer, version)
        into.hold(version)
        return into

    def _slices(self, table: SlicedVersion, here: ShmStream | None, of: RankSlices) -> Iterator[tuple[str, Tensor]]:
        peer, version, index = request_version(of.address, NOTHING)
        with peer:
            if version != table.version:
                raise SyncError(f"it holds version {version} by now")
            found = msgspec.msgpack.decode(index, type=MemoryRegion)
            memory = torch.empty(found.num_bytes, dtype=torch.uint8)
            _read_version(found, memory[VERSION_BYTES:], peer, version)
        return slices_in(memory, of.entries(table.tensors))


def open_weights(address: str) -> NixlStream:
    return NixlStream(address)


def _read_version(found: MemoryRegion, into: Tensor, peer: socket.socket, version: int) -> None:
    """Read the trainer's memory into `into`. Raise SyncError if that fails, or if the trainer does not confirm the
    version afterwards."""
    try:
        _read(found, into, peer, version)
        peer.sendall(DONE)
        (holds,) = VERSION.unpack(received(peer, VERSION.size))
    except _errors() as e:
        raise SyncError(f"version {version}: the trainer's memory could not be read: {e}") from e
    if holds != version:
        raise SyncError(f"version {version} was written over by {holds} while it was read")


def _read(found: MemoryRegion, into: Tensor, peer: socket.socket, version: int) -> None:
    """Read the trainer's memory into `into`. Raise SyncError if the trainer's connection breaks, or after FETCH_S."""
    with contextlib.ExitStack() as undo:
        mine = _agent().register_memory([into])
        undo.callback(_agent().deregister_memory, mine)
        owner = _agent().add_remote_agent(found.agent)
        undo.callback(_agent().remove_remote_agent, owner)
        there = _agent().deserialize_descs(found.memory)
        handle = _agent().initialize_xfer("READ", _agent().get_xfer_descs([into]), there, owner)
        undo.callback(_agent().release_xfer_handle, handle)
        state, until_s = _agent().transfer(handle), time.monotonic() + FETCH_S
        while state == "PROC":
            if has_input(peer):
                raise SyncError(f"version {version}: the trainer went away while its memory was read")
            if time.monotonic() > until_s:
                raise SyncError(f"version {version}: the trainer's memory was not read in {FETCH_S:g} s")
            time.sleep(LOOK_S)
            state = _agent().check_xfer_state(handle)
        if state != "DONE":
            raise SyncError(f"version {version}: reading the trainer's memory ended with {state}")


def build(options: Nixl, context: SyncContext) -> LocalCheckpointEngine:
    outlet = NixlOutlet(host=options.host)
    return engine_of(outlet, context, end, f"{PREFIX}-*-{outlet.tag}")  # the files of this host


def _agent() -> Any:
    return agent(os.getpid())


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that the package and the connection raise."""
    from nixl import _bindings

    return OSError, *(error for name, error in vars(_bindings).items() if name.endswith("Error"))
