"""Admission, deadlines and batches of groups. Pure logic: no asyncio, no I/O, no clock of its own.

    admit -> running -> complete -> taken -> trained -> (publish) slot free
                \\-> released (rejected | invalid | cancelled | failed): slot free at once

Terms. `step` counts from 0; a publish is due after every `sync_every`-th step and after the last. `version` is the
number of publishes so far. A group admitted at version a is *due* at the last step that runs at version
a + ceil(staleness). Due steps never decrease in admission order, so admission order *is* earliest-deadline-first.

Invariant, for every step j >= the next one:   groups due by j  <=  prompts_per_step x steps left until j  (+ extra)

where `extra` = ceil(oversample x prompts_per_step) is what over-sampling may drop. `admit` keeps it because it counts
its own group; `release` only lowers it; `take` returns a batch only if it still holds for the rest. Hence once nothing
runs any more, the oldest complete groups are always a legal batch: no group outlives its deadline, and no deadlock.
Room to admit never runs out either: at a take at most (sync_every - 1) batches are trained but unpublished, which
leaves at least one batch of slots.

At staleness 0 (without over-sampling) the batch is the *head* of the admission order, whatever completes first: what a
step trains on is then a function of the tasks and their outcomes, not of time, and sync_every steps share one version.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Literal

from verl.errors import Refused

Released = Literal["rejected", "invalid", "cancelled", "failed"]
OnExhausted = Literal["stop", "smaller"]


@dataclass(frozen=True, slots=True)
class Admission:
    """The admission of a group, which may train while version <= last_version, that is up to and including step
    `due_step`."""

    group_id: str
    version: int
    last_version: int
    due_step: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Groups of one step, in admission order."""

    step: int
    """The step that trains on them."""
    group_ids: tuple[str, ...]
    """In admission order."""
    dropped: tuple[str, ...]
    """Over-sampled groups that can no longer train: running ones are to be cancelled, and their tasks return to the
    cursor."""
    needed: int
    """Groups of a full step."""
    staleness: tuple[int, ...]
    """For each group: version now - version at admission."""

    @property
    def short(self) -> bool:
        """True if the batch has fewer groups than a full step: denominators must count the groups that exist."""
        return len(self.group_ids) < self.needed


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no batch now. `why` is the event that must happen first: a running group ends · a running group that is
    due at this step ends · the driver admits · a publish commits. `Scheduler.why_waiting` returns a line for people."""

    why: Literal["running", "deadline", "admission", "publish"]


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The step cannot be filled: the draw budget is spent or the tasks are used up. It ends the run as configured."""

    step: int
    cause: Literal["draws", "data"]
    complete: int
    needed: int
    lost: Mapping[str, int]
    """Reason -> lost groups, since the budget began."""

    def __str__(self) -> str:
        what = "the tasks are used up" if self.cause == "data" else "the draw budget is spent"
        lost = ", ".join(f"{n} {reason}" for reason, n in self.lost.items()) or "none lost"
        return f"step {self.step}: {what} with {self.complete} of {self.needed} groups complete ({lost})"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The groups in a loaded state, in admission order. `running` groups must be played again under their own ids;
    `dropped` ones cannot train any more under the settings of this run, and their tasks return to the cursor."""

    complete: tuple[str, ...]
    running: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(slots=True)
class _Held:
    """A group that is running or complete, with the version and the time of its admission."""

    group_id: str
    version: int
    since_s: float
    complete: bool = False


@dataclass(slots=True)
class _Budget:
    """The lost groups that count against the draw budget of the steps from `first_step` on: those since the last
    publish (or short batch)."""

    first_step: int
    lost: Counter[str]


def _exact(value: float) -> Fraction:
    """Return 0.15 as 3/20, so that floor(1.15 x 100) is 115 and not 114."""
    return Fraction(repr(float(value)))


class Scheduler:
    """Admits groups and selects batches. Not thread-safe: the driver's one event loop owns it."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        total_steps: int,
        sync_every: int = 1,
        staleness: float = 0.0,
        oversample: float = 0.0,
        max_draws_per_group: float | None = None,
        on_exhausted: OnExhausted = "stop",
    ) -> None:
        """Create the scheduler of a run that begins at step 0. max_draws_per_group: groups drawn per group needed in a
        step before `Exhausted`; None: no limit (data without a single acceptable group is then drawn for ever).
        Over-sampled groups are counted in addition."""
        if min(prompts_per_step, sync_every) < 1 or total_steps < 0:
            raise Refused(f"{prompts_per_step=}, {sync_every=} must be >= 1 and {total_steps=} >= 0")
        _check_shares(staleness, oversample, max_draws_per_group, on_exhausted)
        self.prompts_per_step = prompts_per_step
        self.sync_every = sync_every
        self.staleness = staleness
        self.total_steps = total_steps
        self.on_exhausted = on_exhausted
        self.max_lag = math.ceil(staleness)
        self.slots = math.floor((1 + _exact(staleness)) * prompts_per_step * sync_every)
        self.extra = math.ceil(_exact(oversample) * prompts_per_step)
        self.in_order = staleness == 0 and self.extra == 0
        self._refills_per_step: int | None = None
        if max_draws_per_group is not None:
            self._refills_per_step = math.ceil(_exact(max_draws_per_group) * prompts_per_step) - prompts_per_step

        self.version = 0
        self.next_step = 0  # the step of the next `take`
        self._base = (0, 0)  # a step and its version
        self._groups: dict[str, _Held] = {}  # running and complete, in admission order
        self._running = 0
        self._unpublished: dict[int, int] = {}  # version trained at -> groups that hold a slot until the next one
        self._batch: StepBatch | None = None  # taken, not trained yet
        self._budget = _Budget(0, Counter())
        self._data_ended = False
        self._admitted = 0

    # ---- versions and deadlines

    @property
    def done(self) -> bool:
        return self.next_step >= self.total_steps

    def publish_due(self, step: int) -> bool:
        return (step + 1) % self.sync_every == 0 or step + 1 == self.total_steps

    @property
    def publish_pending(self) -> bool:
        """True if a publish that was due has not committed yet."""
        trained = self._trained_steps
        at_end = trained == self.total_steps and trained % self.sync_every != 0 and bool(self._unpublished)
        return self.version < self._version_at(trained) + at_end

    @property
    def _trained_steps(self) -> int:
        return self.next_step - (self._batch is not None)

    def _version_at(self, step: int) -> int:
        base_step, base_version = self._base
        return base_version + step // self.sync_every - base_step // self.sync_every

    def _due(self, version: int) -> int:
        base_step, base_version = self._base
        period = version + self.max_lag - base_version + base_step // self.sync_every
        return min((period + 1) * self.sync_every, self.total_steps) - 1

    # ---- admission

    def free_slots(self) -> int:
        """Return how many groups may be admitted now."""
        if self._data_ended:
            return 0
        return max(0, self._room() - self._overdrawn() - len(self._groups))

    def _room(self) -> int:
        """Return how many groups may be in flight, limited by the slots and by the number that can train before the
        deadline of this version."""
        steps_left = self._due(self.version) - self.next_step + 1
        if steps_left <= 0:  # the last step of this version is taken: wait for the publish
            return 0
        held = sum(self._unpublished.values()) + (len(self._batch.group_ids) if self._batch else 0)
        return min(self.slots - held, self.prompts_per_step * steps_left) + self.extra

    def _overdrawn(self) -> int:
        """Return the lost groups that the draw budget does not replace. They reduce the look-ahead first, the step
        last."""
        if self._refills_per_step is None:
            return 0
        paid = self._refills_per_step * (1 + self.next_step - self._budget.first_step)
        return max(0, self._budget.lost.total() - paid)

    def admit(self, group_id: str, now_s: float) -> Admission:
        assert group_id not in self._groups, f"group {group_id} is already in flight"
        assert self.free_slots() > 0, f"no free slot for group {group_id}: {self.why_waiting(now_s)}"
        self._groups[group_id] = _Held(group_id, self.version, now_s)
        self._admitted += 1
        self._running += 1
        return Admission(group_id, self.version, self.version + self.max_lag, self._due(self.version))

    def holds(self, group_id: str) -> bool:
        """Return whether a group is running or complete. The late result of any other group is dropped."""
        return group_id in self._groups

    def no_more_tasks(self) -> None:
        """Record that the cursor is at its end. Each released or dropped group clears this, since its task may be drawn
        again."""
        self._data_ended = True

    # ---- outcomes of groups

    def complete(self, group_id: str) -> None:
        """Mark a group as scored, selected and admissible: ready to train."""
        group = self._groups.get(group_id)
        assert group is not None and not group.complete, f"group {group_id} is not running"
        group.complete = True
        self._running -= 1

    def release(self, group_id: str, reason: Released) -> None:
        """Free the slot of a group that will not train. It counts against the draw budget."""
        group = self._groups.pop(group_id, None)
        assert group is not None, f"group {group_id} is not in flight"
        self._running -= not group.complete
        self._budget.lost[reason] += 1
        self._data_ended = False

    # ---- batches

    def take(self) -> StepBatch | Wait | Exhausted:
        """Return the batch of the next step, if it breaks no deadline of the remaining groups."""
        assert self._batch is None, f"step {self.next_step - 1} is taken and not trained yet"
        assert not self.done, f"all {self.total_steps} steps are taken"
        chosen = self._choose()
        if chosen is None:
            if (blocked := self._blocked()) is not None:
                return blocked
            chosen = list(self._groups.values())  # a smaller batch is allowed: all groups that exist
        overdue = self._overdue_after(chosen)
        if overdue is None:
            return Wait("deadline")
        return self._hand_out(chosen, overdue)

    def _choose(self) -> list[_Held] | None:
        """Return the oldest complete groups; at staleness 0 the oldest groups, once they are complete."""
        needed = self.prompts_per_step
        if len(self._groups) - self._running < needed:
            return None
        if self.in_order:
            head = list(islice(self._groups.values(), needed))
            return head if all(g.complete for g in head) else None
        return list(islice((g for g in self._groups.values() if g.complete), needed))

    def _blocked(self) -> Wait | Exhausted | None:
        """Return why there are too few complete groups; None if a smaller batch is to be trained."""
        if self._running:
            return Wait("running")
        if self.free_slots():
            return Wait("admission")
        if self.publish_pending:
            return Wait("publish")
        assert self._data_ended or self._overdrawn(), f"stuck without cause: {self._groups}"
        if self.on_exhausted == "smaller" and self._groups:
            return None
        cause: Literal["data", "draws"] = "data" if self._data_ended else "draws"
        return Exhausted(self.next_step, cause, len(self._groups), self.prompts_per_step, dict(self._budget.lost))

    def _overdue_after(self, chosen: Sequence[_Held]) -> list[_Held] | None:
        """Return the groups that cannot train any more once `chosen` is taken and must be dropped; None if that is not
        allowed."""
        step, taken = self.next_step, {g.group_id for g in chosen}
        overdue: list[_Held] = []
        later = 0
        for group in self._groups.values():  # the groups are sorted by due step
            if group.group_id in taken:
                continue
            if (due := self._due(group.version)) <= step:
                overdue.append(group)
            else:
                later += 1
            if len(overdue) > self.extra or later > self.prompts_per_step * (due - step) + self.extra:
                return None
        return overdue

    def _hand_out(self, chosen: list[_Held], overdue: list[_Held]) -> StepBatch:
        for group in (*chosen, *overdue):
            del self._groups[group.group_id]
            self._running -= not group.complete
        self._batch = StepBatch(
            step=self.next_step,
            group_ids=tuple(g.group_id for g in chosen),
            dropped=tuple(g.group_id for g in overdue),
            needed=self.prompts_per_step,
            staleness=tuple(self.version - g.version for g in chosen),
        )
        self.next_step += 1
        self._data_ended = self._data_ended and not overdue
        if self._batch.short:  # after a short step the next one starts with a fresh budget
            self._budget = _Budget(self.next_step, Counter())
        return self._batch

    def trained(self, step: int) -> None:
        """Record that the optimizer steps of `step` are done. Its groups keep their slots until the next publish has
        committed."""
        assert self._batch is not None and self._batch.step == step, f"step {step} is not the one in training"
        at = self._version_at(step)
        self._unpublished[at] = self._unpublished.get(at, 0) + len(self._batch.group_ids)
        self._batch = None

    def published(self, version: int) -> None:
        """Record that the publish has committed on the rollout side. A later step may be in training already."""
        assert version == self.version + 1, f"published version {version} after {self.version}"
        assert self.publish_pending, f"publish of version {version} before its step is trained"
        self.version = version
        if version > self._version_at(self._trained_steps):  # after the last step, in the middle of a period
            self._base = (self._trained_steps, version)
            self._unpublished.clear()
        self._unpublished = {at: n for at, n in self._unpublished.items() if at >= version}
        base_step, base_version = self._base
        first = (version - base_version + base_step // self.sync_every) * self.sync_every
        self._budget = _Budget(min(first, self.next_step), Counter())

    # ---- for people

    def why_waiting(self, now_s: float) -> str:
        """Return one line for an error message: what the next step needs, what exists, and what blocks it."""
        complete = len(self._groups) - self._running
        text = (
            f"step {self.next_step} needs {self.prompts_per_step} groups: {complete} complete, {self._running} "
            "running,"
            f" {self.free_slots()} slots free"
        )
        oldest = next((g for g in self._groups.values() if not g.complete), None)
        if oldest is not None:
            text += (
                f"; oldest running: {oldest.group_id}, {now_s - oldest.since_s:.1f} s, admitted at version"
                f" {oldest.version}, due by step {self._due(oldest.version)}"
            )
        if self._unpublished:
            held = sum(self._unpublished.values())
            text += f"; {held} of {self.slots} slots wait for the publish of version {self.version + 1}"
        if self._data_ended:
            text += "; no more tasks"
        if overdrawn := self._overdrawn():
            text += f"; draw budget exceeded by {overdrawn}"
        return text

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Return a JSON-able state of the groups in flight, running and complete, without the trained ones. It may be
        called at any time except between `take` and `trained`, when no weights match it."""
        assert self._batch is None, f"step {self._batch.step} is in training: its weights are neither old nor new"
        return {
            "prompts_per_step": self.prompts_per_step,
            "sync_every": self.sync_every,
            "next_step": self.next_step,
            "version": self.version,
            "base": list(self._base),
            "unpublished": [[at, n] for at, n in self._unpublished.items()],
            "budget": [self._budget.first_step, dict(self._budget.lost)],
            "admitted": self._admitted,
            "groups": [[g.group_id, g.version, g.complete] for g in self._groups.values()],
        }

    def load_state(self, state: Mapping[str, Any], now_s: float) -> Resumed:
        """Continue from `state`, with the same ids, original versions and deadlines. Staleness, oversample, total_steps
        and budget may differ from the run that saved it; groups that cannot train any more under them are dropped,
        latest admitted first."""
        assert not self._admitted, "load_state comes before the first admit"
        same = (state["prompts_per_step"], state["sync_every"]) == (self.prompts_per_step, self.sync_every)
        if state["unpublished"] and not same:
            raise Refused(
                f"prompts_per_step={self.prompts_per_step}, sync_every={self.sync_every}: this checkpoint was saved"
                f" between two publishes with {state['prompts_per_step']} and {state['sync_every']};"
                " keep those values, or resume from a checkpoint of a step that published"
            )
        self.next_step, self.version = state["next_step"], state["version"]
        base_step, base_version = state["base"]
        self._base = (base_step, base_version) if same else (self.next_step, self.version)
        self._unpublished = {at: n for at, n in state["unpublished"]}
        first_step, lost = state["budget"]
        self._budget = _Budget(first_step, Counter(lost)) if same else _Budget(self.next_step, Counter())
        self._admitted = state["admitted"]
        dropped = []
        for group_id, version, complete in state["groups"]:
            due = self._due(version)
            if len(self._groups) >= self.prompts_per_step * max(0, due - self.next_step + 1) + self.extra:
                dropped.append(group_id)  # admission order is due order: earlier groups fill the steps up to its due
                continue
            self._groups[group_id] = _Held(group_id, version, now_s, complete)
        self._running = sum(not g.complete for g in self._groups.values())
        return Resumed(
            complete=tuple(g.group_id for g in self._groups.values() if g.complete),
            running=tuple(g.group_id for g in self._groups.values() if not g.complete),
            dropped=tuple(dropped),
        )


def _check_shares(
    staleness: float, oversample: float, max_draws_per_group: float | None, on_exhausted: OnExhausted
) -> None:
    if not (math.isfinite(staleness) and staleness >= 0):
        raise Refused(f"staleness={staleness}: must be a finite number >= 0 (0 is synchronous)")
    if not (math.isfinite(oversample) and oversample >= 0):
        raise Refused(f"oversample={oversample}: must be a finite share >= 0 of a step (0 is off)")
    if max_draws_per_group is not None and not (math.isfinite(max_draws_per_group) and max_draws_per_group >= 1):
        raise Refused(f"max_draws_per_group={max_draws_per_group}: must be >= 1, or null for no limit")
    if on_exhausted not in ("stop", "smaller"):
        raise Refused(f"on_exhausted={on_exhausted!r}: must be stop or smaller")
