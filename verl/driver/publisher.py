"""Publishes versions of the policy: in order, verified, and live on the replicas before anything is sampled with
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from verl.driver.lora_publisher import LoraPublisher
from verl.errors import Refused
from verl.parameter_set import Delivery
from verl.rollout.base import Capabilities, PauseMode, RolloutEngine
from verl.types import Metric, Metrics
from verl.weight_sync.base import CheckpointEngine, SyncReport
from verl.wire import AS_HELD, WireFormat
from verl.workers.model_workers import START_TIMEOUT_S, ModelWorkers
from verl.workers.waits import Waits

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Publisher:
    """Publishes the policy's weights and counts the versions."""

    engine: CheckpointEngine
    """Transfers and verifies the weights."""
    trainer: ModelWorkers
    """The workers that hold the weights."""
    replicas: Sequence[RolloutEngine]
    """The rollout engines that get the weights; more are appended when replicas join."""
    waits: Waits
    """The waits of the run, with their reports."""
    timeout_s: float
    """Limit of one publish."""
    exclusive: bool
    """Rollout pauses during an update, so a publish can read the trainer's weights in place."""
    partial_rollout: bool
    """Running requests continue under new weights, on replicas that support it."""
    note: Callable[[str], None]
    """Prints a line for the user."""
    published: Callable[[Mapping[int, str]], None] | None
    """Called after every publish with the replicas that do not have it, and the reasons."""
    lora: LoraPublisher
    """Publishes LoRA sets on top of the weights."""
    trained_rank: int = 0
    """The rank of the policy's own LoRA factors; 0: all its weights are trained."""
    trained_experts: bool = False
    """Experts are among what has these factors."""
    trained_whole: bool = False
    """Some weights are trained whole beside them."""
    quantised_base: bool = False
    """The frozen base has codes, beside which there is no room for merged weights."""
    sends_factors: bool = True
    """Replicas get the policy's base and its factors unmerged: so the run is configured, and all of them can."""
    version: int = field(default=0, init=False)
    """The number of publishes so far."""
    _requested: int = field(default=0, init=False)
    """The number of replicas that got the latest publish."""
    _modes: list[PauseMode] = field(default_factory=list, init=False)
    """For each replica that gets weights: running requests wait during a publish, or continue."""
    _formats: list[WireFormat] = field(default_factory=list, init=False)
    """For each replica that gets weights: the format in which it reads them."""
    _wire_format: WireFormat = field(default=AS_HELD, init=False)
    """The format of all publishes from now on."""
    _under_way: asyncio.Task[Any] | None = field(default=None, init=False)
    _metrics: Metrics = field(default_factory=dict, init=False)

    async def start(self, version: int) -> None:
        """Read the capabilities of the replicas, and publish the weights of `version` to them."""
        can = list[Capabilities]()

        async def ask() -> None:
            for replica in self.replicas:
                can.append(await replica.capabilities())

        await self.waits.wait(
            ask(), waiter="driver", what=lambda: f"rollout replica {len(can)} to start", timeout_s=START_TIMEOUT_S
        )
        for able in can:
            self.join(able)
        self.version = version
        report = await self._awaited(self._enqueue(version), version)
        self._report(report)
        if self.trained_rank and self.sends_factors:
            more = " and the modules that are trained whole" if self.trained_whole else ""
            self.note(f"rollout: it gets the base once, then the LoRA factors of each version, unmerged{more}")
        elif self.trained_rank:
            by = f"log-probs of the canary change by {report.canary_mean_abs:.2g} on average"
            self.note(f"rollout: LoRA factors are added to the weights that it gets, which are rounded once: {by}")

    def join(self, able: Capabilities) -> None:
        """Include the next of `replicas` in every publish from now on. Later publishes are in a format that all
        replicas read."""
        self._formats.append(able.weights)
        if (form := WireFormat.widest(self._formats)) != self._wire_format:
            self._wire_format = self.trainer.wire_format = form
        if self.trained_rank:
            self.sends_factors &= able.lora_policy and able.lora_rank >= self.trained_rank
            self.sends_factors &= able.lora_experts or not self.trained_experts
            if self.quantised_base and self.trained_whole and self.sends_factors and not able.lora_whole:
                raise Refused(
                    "model.lora.modules_to_save on a quantised base: the rollout engine takes no modules trained whole "
                    "beside factors (native on a CPU: without a C compiler), and the plan has no room for merged "
                    "weights; install gcc, leave modules_to_save out, or set model.quantization=none"
                )
            self.sends_factors &= able.lora_whole or not self.trained_whole
        self._modes.append("keep" if self.partial_rollout and able.in_flight_update else "wait")

    def publish(self, committed: Callable[[SyncReport], None], failed: Callable[[BaseException], None]) -> None:
        """Read the weights as they are at this call as the next version, and deliver them in the background.

        Only one publish is under way at a time: call `settle` first."""
        assert self._under_way is None, "a publish is under way"
        version = self.version + 1
        pending = self._enqueue(version)
        sets = self.lora.follow(pending, self.replicas[: self._requested])
        self._under_way = asyncio.ensure_future(self._commit(pending, version, committed, sets))

        def note(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                failed(error)

        self._under_way.add_done_callback(note)

    async def publish_adapter(self, name: str, folder: Path) -> SyncReport:
        """Publish a LoRA adapter in PEFT's layout as a parameter set of this name, for requests with
        `parameters=name`. It is verified as the policy's weights are, and published again with each later version of
        them. Raise an error if no replica takes it, and Refused beside a policy that is trained with LoRA, or for a
        name that another folder has."""
        if self.trained_rank:
            why = "the policy of this run is a LoRA set itself, on which no other is added"
            raise Refused(f"LoRA set {name!r}: {why}; publish it in a run that trains all weights")
        return await self._between(lambda: self.lora.open(name, folder, self.replicas[: len(self._modes)]))

    async def drop_set(self, name: str) -> None:
        """Drop a LoRA set from all replicas. It is published no more."""
        await self._between(lambda: self.lora.close(name))

    async def _between(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Change the sets while no publish is under way: the next one waits until the change has ended. A caller that
        is cancelled ends its own change, and no publish."""
        while (task := self._under_way) is not None and not task.done():
            await asyncio.wait({task})
        if task is not None:
            task.result()  # of a failed publish
        changing = asyncio.ensure_future(change())
        self._under_way = asyncio.ensure_future(asyncio.wait({changing}))
        return await changing

    async def settle(self) -> None:
        """Wait for the publish under way, or the change of a set. Several callers may wait."""
        while (task := self._under_way) is not None:
            try:
                await self.waits.wait(task, waiter="driver", what="the publish under way", timeout_s=3 * self.timeout_s)
            finally:
                if self._under_way is task:
                    self._under_way = None

    async def close(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    def take_metrics(self) -> Metrics:
        """Return the metrics of the last publish, once."""
        found, self._metrics = self._metrics, {}
        return found

    def _enqueue(self, version: int) -> asyncio.Future[SyncReport]:
        self._requested = len(self._modes)
        if self.trained_rank:
            self.trainer.delivery = self._delivery()
        return self.engine.publish(
            self.trainer,
            self.replicas[: self._requested],
            version=version,
            exclusive=self.exclusive,
            on_inflight=tuple(self._modes),
            timeout_s=self.timeout_s,
        )

    def _delivery(self) -> Delivery:
        """Return how the next version is sent: a replica without the base, as after a restart, needs it too."""
        if not self.sends_factors:
            return "merged"
        return "factors" if all(one.base for one in self.replicas[: self._requested]) else "base and factors"

    async def _awaited(self, pending: asyncio.Future[SyncReport], version: int) -> SyncReport:
        what = f"the publish of version {version}"
        return await self.waits.wait(pending, waiter="driver", what=what, timeout_s=2 * self.timeout_s)

    async def _commit(
        self,
        pending: asyncio.Future[SyncReport],
        version: int,
        committed: Callable[[SyncReport], None],
        sets: Sequence[asyncio.Future[SyncReport]],
    ) -> None:
        try:
            report = await self._awaited(pending, version)
        except BaseException:
            for one in sets:
                one.cancel()
            raise
        self._report(report)
        self.version = version
        committed(report)
        await self.lora.settled(sets)

    def _report(self, report: SyncReport) -> None:
        if self.published is not None:
            self.published(report.failed_replicas)
        for text in report.alarms:
            self.note(f"warning: weight sync: {text}")
        self._metrics = {
            "sync/replicas": Metric(self._requested - len(report.failed_replicas), 1, "step", "last"),
            "sync/version": Metric(report.version, 1, "step", "last"),
            "sync/canary_mean_abs": Metric(report.canary_mean_abs, 1, "step", "max"),
            "sync/bytes": Metric(report.num_bytes, 1, "step", "last"),
            "sync/seconds": Metric(report.whole_s, 1, "step", "sum"),
        }
        self._metrics |= {f"sync/{part}_s": Metric(s, 1, "step", "sum") for part, s in report.seconds.items()}
