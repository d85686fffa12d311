"""A run under a virtual clock: the real scheduler, with given times of rollout and update in place of the work.

`verl plan rollout_s=120 update_s=60` predicts the pace of a run with it; the tests of the scheduler play ten thousand
random runs."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from verl.config.devices import colocated
from verl.config.schema import Config
from verl.driver.scheduler import Exhausted, Scheduler, StepBatch

STEPS, WARM_STEPS = 120, 20
"""Steps of a predicted run, and those at its start that do not count."""


class VirtualRun:
    """Does the driver's work for a scheduler: groups are admitted, end, are trained and published, at virtual times. A
    subclass names the groups and their durations in seconds, and may check or record events."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.running: set[str] = set()
        self.complete: set[str] = set()
        self.batch: StepBatch | None = None
        self.publishing = False
        self._events: list[tuple[float, int, str, str]] = []
        self._count = 0

    # -- for a subclass

    def draw(self) -> str | None:
        """Return the id of the next group; None at the end of the data."""
        raise NotImplementedError

    def rollout_s(self, group_id: str) -> float:
        """Return the seconds from now to the end of a group."""
        raise NotImplementedError

    def update_s(self) -> float:
        """Return the seconds from now to the end of the update of the batch that was taken."""
        raise NotImplementedError

    def publish_s(self) -> float:
        return 0.0

    def may_take(self) -> bool:
        """Return True if the next batch may be taken now."""
        return not self.publishing

    def admitted(self, group_id: str, version: int) -> None:
        """Record an admission."""

    def taken(self, batch: StepBatch) -> None:
        """Record a batch, before its update begins."""

    def ended(self, group_id: str) -> None:
        """Give the outcome of a running group to the scheduler."""
        self.complete.add(group_id)
        self.scheduler.complete(group_id)

    def trained(self, batch: StepBatch) -> None:
        """Record an update that has ended."""

    def published(self) -> int:
        """Record a publish, and return the new version."""
        return self.scheduler.version + 1

    def happened(self, event: str, name: str) -> None:
        """Handle an event that the subclass has scheduled, with the name that it gave."""
        raise NotImplementedError

    # -- the driver's moves

    def at(self, after_s: float, event: str, group_id: str = "") -> None:
        """Schedule an event `after_s` seconds from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + after_s, self._count, event, group_id))

    def play(self, group_id: str) -> None:
        self.running.add(group_id)
        self.at(self.rollout_s(group_id), "ended", group_id)

    def publish(self) -> None:
        self.publishing = True
        self.at(self.publish_s(), "published")

    def admit(self) -> None:
        while self.scheduler.free_slots():
            group_id = self.draw()
            if group_id is None:
                self.scheduler.no_more_tasks()
                return
            admission = self.scheduler.admit(group_id, self.now_s)
            self.play(group_id)
            self.admitted(group_id, admission.version)

    def take(self) -> Exhausted | None:
        """Take a batch if one is complete. Return `Exhausted` if there will be no further batch, else None."""
        if self.batch or self.scheduler.done or not self.may_take():
            return None
        got = self.scheduler.take()
        if isinstance(got, Exhausted):
            return got
        if isinstance(got, StepBatch):
            self.taken(got)
            self.batch = got
            self.complete -= {*got.group_ids, *got.dropped}
            self.running -= {*got.dropped}
            self.at(self.update_s(), "trained")
        return None

    @property
    def stuck(self) -> bool:
        """True if no event is scheduled."""
        return not self._events

    def advance(self) -> None:
        """Move the clock to the next event, and process it."""
        self.now_s, _, event, group_id = heapq.heappop(self._events)
        if event == "ended":
            if group_id in self.running:  # it may have been dropped
                self.running.discard(group_id)
                self.ended(group_id)
        elif event == "trained":
            batch, self.batch = self.batch, None
            assert batch is not None
            self.scheduler.trained(batch.step)
            self.trained(batch)
            if self.scheduler.publish_due(batch.step) and not self.publishing:
                self.publish()
        elif event == "published":
            self.publishing = False
            self.scheduler.published(self.published())
            if self.scheduler.publish_pending:
                self.publish()
        else:
            self.happened(event, group_id)


@dataclass(frozen=True, slots=True)
class Pace:
    """The predicted pace of a run."""

    rollout_s: float
    """Given: the rollout of the groups of one step, by all replicas."""
    update_s: float
    """Given: everything from a complete batch to the new weights in the replicas."""
    step_s: float
    """The time of a step in the long run."""
    rollout_idle_share: float
    """The share of the time in which the rollout has no work."""


class _PacedRun(VirtualRun):
    """A run with replicas that are always full: the groups of a step take `rollout_s`, however many are in flight. If
    rollout and training share devices, only one of them works at a time."""

    def __init__(self, scheduler: Scheduler, rollout_s: float, update_s: float, shared: bool) -> None:
        super().__init__(scheduler)
        self.group_s, self.step_update_s, self.shared = rollout_s / scheduler.prompts_per_step, update_s, shared
        self.drawn, self.free_at_s = 0, 0.0
        self.ends: list[tuple[float, int]] = []  # for each step: the time of its end, and the groups drawn so far

    def draw(self) -> str:
        self.drawn += 1
        return str(self.drawn)

    def rollout_s(self, group_id: str) -> float:
        self.free_at_s = max(self.free_at_s, self.now_s) + self.group_s
        return self.free_at_s - self.now_s

    def update_s(self) -> float:
        if not self.shared:
            return self.step_update_s
        self.free_at_s = max(self.free_at_s, self.now_s) + self.step_update_s  # after the groups that still run
        return self.free_at_s - self.now_s

    def trained(self, batch: StepBatch) -> None:
        self.ends.append((self.now_s, self.drawn))


def pace_of(config: Config, rollout_s: float, update_s: float) -> Pace:
    """Predict the pace of a run from the seconds of the rollout and of the update of one step: which part of them
    overlaps follows from `pipeline.*`. All groups of a step count as equally long."""
    p = config.pipeline
    scheduler = Scheduler(
        prompts_per_step=config.step.prompts_per_step,
        total_steps=(STEPS + 1 + math.ceil(p.staleness)) * p.sync_every,  # no look-ahead is missing at the end
        sync_every=p.sync_every,
        staleness=p.staleness,
        oversample=p.oversample,
    )
    run = _PacedRun(scheduler, rollout_s, update_s, colocated(config))
    while len(run.ends) < (STEPS - 1) * p.sync_every:
        run.admit()
        run.take()
        run.admit()  # a batch frees the look-ahead at once
        assert not run.stuck, scheduler.why_waiting(run.now_s)
        run.advance()
    (begin_s, before), (end_s, drawn) = run.ends[WARM_STEPS * p.sync_every - 1], run.ends[-1]
    step_s = (end_s - begin_s) / (len(run.ends) - WARM_STEPS * p.sync_every)
    idle = 1 - (drawn - before) * run.group_s / (end_s - begin_s)
    return Pace(rollout_s, update_s, step_s, max(0.0, idle))
