"""Updates of a server's weights: each is one transaction; after a failure the server is fenced, or restarted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from verl.checkpoint.hf import skeleton_of
from verl.errors import Refused
from verl.parameter_set import check_base, set_of
from verl.rollout.adapters import ServerAdapters
from verl.rollout.api import deliver_buckets, source_of
from verl.rollout.base import PauseMode, WeightReader
from verl.rollout.calls import RunningCalls
from verl.rollout.connection import ServerConnection
from verl.rollout.gate import UNDO_S, ServerGate
from verl.rollout.http import ServerGone, ServerLate, ServerRefused
from verl.rollout.policy_reader import PolicyReader
from verl.rollout.starting import OTHER_ENGINES, ServerStart
from verl.weight_sync.base import Parts, SyncError, WeightSource, saved_parts


class ServerUpdates:
    """The updates of a server's weights. After one that failed, the server is fenced for good or until it is restarted,
    so it never answers with unverified weights."""

    def __init__(
        self,
        connection: ServerConnection,
        start: ServerStart,
        calls: RunningCalls,
        gate: ServerGate,
        adapters: ServerAdapters,
    ) -> None:
        self._connection, self._start, self._calls, self._gate = connection, start, calls, gate
        self._adapters = adapters
        self._parts: Parts | None = None

    async def load(self, source: WeightReader, mode: PauseMode) -> int:
        """Load weights as one transaction: pause, load all, compare the loaded tensors, drop the prefixes, resume, and
        return their version. A failure after the first tensor fences the server; the next call restarts it, if it was
        started here."""
        connection, traits = self._connection, self._connection.api.traits
        began = time.perf_counter()
        policy = PolicyReader(source)
        folder = await self._factors_of(policy)
        if not policy.has_base:
            return await self._load_factors(source, folder, mode, began)
        reader, sent = await source_of(connection.api, source)
        sent = await self._as_read(_without(policy.names, sent))
        transferred = time.perf_counter() - began
        if not traits.updates_weights and connection.launch is None and connection.version >= 0:
            fix = f"use it for verl eval and verl generate, or train with {OTHER_ENGINES}"
            raise Refused(f"{connection.http.url} has weights of its own, and takes no others while it runs: {fix}")
        await self._start.up()
        async with self._gate.alone(partial(self._announce_early, sent, mode)) as announced:
            await self._stop_sampling(mode)
            began = time.perf_counter()
            connection.identity = ""
            try:
                await self._deliver(sent, announced=announced)
                loaded = time.perf_counter()
                await self._gate.wake(("kv",))  # only now: old weights, new weights and KV are never in memory together
                if not self._gate.paused:
                    await self._gate.end_pause()
                await self._adapters.base_changed()
                if folder is not None:
                    await self._adapters.make_live(policy.parameters, sent.version, folder, mode)
            except BaseException as e:
                await self._fence_after(sent.version, e)
                if connection.version < 0 and isinstance(e, SyncError | ServerRefused):
                    why = f"{connection.name} has taken no weights yet; if it has another model"
                    raise SyncError(f"{e}; {why}: start it with this one, or set {OTHER_ENGINES}") from e
                raise
        parts = {"transfer": transferred, "load": loaded - began, "pause": time.perf_counter() - began}
        reader.delivered, reader.seconds = reader.delivered | set(sent.delivered), parts
        connection.version, connection.identity = sent.version, sent.identity
        return sent.version

    async def _factors_of(self, policy: PolicyReader) -> Path | None:
        """Read the LoRA factors of a policy into the folder of an adapter, and return it; None for a policy without
        factors. Raise ValueError for factors that do not belong to the server's weights."""
        if policy.parameters.whole:
            return None
        connection = self._connection
        check_base(
            policy.parameters,
            policy.identity or connection.identity,
            connection.able.lora_rank,
            connection.able.lora_experts,
        )
        await asyncio.to_thread(policy.read)
        return await self._adapters.written(policy.parameters, policy.factors.items())

    async def _load_factors(self, source: WeightReader, folder: Path | None, mode: PauseMode, began: float) -> int:
        """Load a version of the policy's LoRA factors on top of the server's weights, while it samples: running
        requests finish under the version that they began with. A failure fences the server."""
        assert folder is not None, "factors without their base"
        connection, transferred = self._connection, time.perf_counter() - began
        connection.check_weights("load_weights")
        async with self._gate.alone():
            began = time.perf_counter()
            try:
                await self._gate.wake(("weights",))  # freed weights have no memory for factors either
                await self._adapters.make_live(set_of(source), source.version, folder, mode)
                await self._gate.wake(("kv",))
            except BaseException as e:
                await self._fence_after(source.version, e)
                raise
        source.seconds.update(transfer=transferred, load=time.perf_counter() - began)
        connection.version = source.version
        return source.version

    async def _fence_after(self, version: int, error: BaseException) -> None:
        """Stop using the server, after an error in the middle of an update."""
        await self.fence(f"the update to version {version} failed ({type(error).__name__}: {error})")

    async def _as_read(self, sent: WeightSource) -> WeightSource:
        """Return the source with the tensor names that the server uses."""
        names = self._connection.api.traits.tensor_names
        if names == "model":
            return sent
        if self._parts is None:  # equal for all versions
            config = copy.deepcopy(self._connection.context.hf_config)
            self._parts = await asyncio.to_thread(lambda: saved_parts(skeleton_of(config), sent.delivered))
        return replace(sent, names=names, parts=self._parts)

    async def _announce_early(self, sent: WeightSource, mode: PauseMode) -> bool:
        """Let the server read the new weights while it samples with the live ones, if it can. Return true if it did."""
        connection = self._connection
        samples = self._gate.may_sample and not (connection.exited or self._start.found_paused)
        if not samples or connection.version < 0 or mode != "keep":
            return False
        if not connection.api.traits.prepares_weights or sent.passes:
            return False
        try:
            await connection.api.announce(connection.call, sent)
        except BaseException as e:
            await self._fence_after(sent.version, e)
            raise
        return True

    async def _stop_sampling(self, mode: PauseMode) -> None:
        """Wake the weights and pause the server. If its engine has died or hangs, it is restarted."""
        connection, updates = self._connection, self._connection.api.traits.updates_weights
        what = "load_weights(on_inflight='wait')"
        if updates and (connection.fenced is not None or connection.exited):
            await self._restart()
        try:
            await self._gate.wake(("weights",))  # freed weights have no memory to be written to
            if mode == "keep":  # the policy's requests continue under the new weights, those of LoRA sets cannot
                stopped = self._gate.paused or self._gate.asleep
                await (self._adapters.abort() if stopped else self._adapters.finish())
            await self._gate.stop_sampling(mode, what)
        except (ServerGone, ServerLate, ServerRefused):
            if connection.launch is None or not updates:
                raise
            await self._restart()
            await self._gate.stop_sampling(mode, what)

    async def _deliver(self, sent: WeightSource, *, announced: bool) -> None:
        """Make the weights live in the paused server. `announced`: it has read them already."""
        connection, api = self._connection, self._connection.api
        if api.traits.updates_weights:
            if sent.passes:
                await deliver_buckets(api, connection.call, sent)
            elif not announced:
                await api.announce(connection.call, sent)
            marked = f"{sent.version}-{connection.tag}" if api.traits.takes_weight_version else f"{sent.version}"
            await api.deliver(connection.call, sent, marked)
        elif connection.restarts:
            await self._restart(sent.address)

    async def _restart(self, folder: str | None = None) -> None:
        """Start a new process in place of the present one, in the same state of pause."""
        await self._connection.relaunch(folder)
        self._gate.asleep.clear()
        await self._start.again()
        if self._gate.paused and "keep" in self._connection.api.traits.pause_modes:
            await self._gate.pause_again()

    async def fence(self, why: str) -> None:
        """Stop using the server: its answers no longer count, and it is not woken. Its paused requests end, and are
        sent to another server."""
        self._gate.asleep.clear()
        self._start.waiting = self._connection.restarts
        self._connection.fence(why)
        if self._connection.process is not None:
            await asyncio.shield(asyncio.ensure_future(self._connection.stop()))
        else:
            with contextlib.suppress(ServerGone, ServerLate, ServerRefused, TimeoutError):
                async with asyncio.timeout(UNDO_S):
                    await self._calls.send_abort(list(self._calls.pending.values()))


def _without(names: Set[str], sent: WeightSource) -> WeightSource:
    """Return the same weights without these tensors."""
    return replace(sent, manifest={name: entry for name, entry in sent.manifest.items() if name not in names})
