"""Random runs of the scheduler under the planner's clock, with an independent ledger. Used by
test_scheduler_simulation.py.

`World` draws tasks, ends groups at random times, trains, publishes, saves, crashes and resumes. It keeps its own books
(versions, slots, fate of every id) and never asks the scheduler what is true.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from verl.driver.scheduler import Scheduler, StepBatch
from verl.planner.clock import VirtualRun


class Violation(Exception):
    """A promise of the scheduler was broken."""


@dataclass(frozen=True)
class Spec:
    seed: int
    prompts: int
    sync_every: int
    staleness: float
    oversample: float
    steps: int
    max_draws: float | None
    on_exhausted: str
    reject: float = 0.0
    invalid: float = 0.0
    cancel: float = 0.0
    tasks: int | None = None
    tail: str = "pareto"
    train_s: float = 1.0
    publish_s: float = 0.0
    overlap: bool = False  # the next take does not wait for the publish
    save: float = 0.0
    crash: float = 0.0

    @property
    def extra(self) -> int:
        return math.ceil(round(self.oversample * self.prompts, 6))

    @property
    def slots(self) -> int:
        return math.floor(round((1 + self.staleness) * self.prompts * self.sync_every, 6))


def random_spec(seed: int) -> Spec:
    r = random.Random(seed)
    prompts = r.choice((1, 2, 2, 3, 4))
    reject = r.choice((0, 0, 0.2, 0.5, 0.8, 0.95))
    return Spec(
        seed=seed,
        prompts=prompts,
        sync_every=r.choice((1, 1, 2, 3, 4)),
        staleness=r.choice((0, 0, 0.3, 0.5, 1, 1.7, 3)),
        oversample=r.choice((0, 0, 0, 0.25, 0.5, 1.0)),
        steps=r.randint(1, 12 // prompts + 1),
        max_draws=r.choice((1, 2, 5, 40, 20 if reject > 0.8 else None)),
        on_exhausted=r.choice(("stop", "smaller")),
        reject=reject,
        invalid=r.choice((0, 0, 0.1)),
        cancel=r.choice((0, 0, 0.1)),
        tasks=r.choice((None, None, None, r.randint(0, 3 * prompts * 4))),
        tail=r.choice(("pareto", "uniform", "equal", "bimodal")),
        train_s=r.choice((0, 0.3, 1, 10)),
        publish_s=r.choice((0, 0.5, 5)),
        overlap=r.random() < 0.4,
        save=r.choice((0, 0.1, 0.4)),
        crash=r.choice((0, 0, 0.03)),
    )


@dataclass
class Books:
    """The state of a checkpoint besides that of the scheduler."""

    next_task: int = 0
    returned: deque[str] = field(default_factory=deque)
    draws: Counter[int] = field(default_factory=Counter)
    drawn: list[str] = field(default_factory=list)
    admitted_at: dict[str, int] = field(default_factory=dict)
    fate: dict[str, str] = field(default_factory=dict)  # trained | rejected | invalid | cancelled | dropped
    batches: list[tuple[str, ...]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the trainer, at each batch
    published: int = 0
    unpublished: int = 0

    def copy(self) -> Books:
        return Books(
            self.next_task,
            deque(self.returned),
            Counter(self.draws),
            list(self.drawn),
            dict(self.admitted_at),
            dict(self.fate),
            list(self.batches),
            list(self.versions),
            self.published,
            self.unpublished,
        )


class World(VirtualRun):
    def __init__(self, spec: Spec, kind: type[Scheduler] = Scheduler, timing: int = 0) -> None:
        self.spec, self.kind = spec, kind
        self.slots, self.extra = spec.slots, spec.extra
        self.rng = random.Random(spec.seed * 7919 + timing)
        self.books = Books()
        self.saved: tuple[str, Books] | None = None
        self.crashes_left = 3
        self.start(None)

    def start(self, state: str | None) -> None:
        s = self.spec
        scheduler = self.kind(
            prompts_per_step=s.prompts,
            sync_every=s.sync_every,
            staleness=s.staleness,
            oversample=s.oversample,
            total_steps=s.steps,
            max_draws_per_group=s.max_draws,
            on_exhausted=s.on_exhausted,
        )
        super().__init__(scheduler)
        if state is None:
            return
        parsed = json.loads(state)
        lost = {g for g, _, complete in parsed["groups"] if complete and self.rng.random() < 0.3}
        parsed["groups"] = [[g, version, complete and g not in lost] for g, version, complete in parsed["groups"]]
        resumed = self.scheduler.load_state(parsed, self.now_s)
        self.expect(not resumed.dropped, "a resume under the same settings drops nothing")
        in_flight = set(self.books.drawn) - set(self.books.fate)
        self.expect({*resumed.running, *resumed.complete} == in_flight, "the groups in flight come back")
        self.complete = set(resumed.complete)
        for group_id in resumed.running:
            self.play(group_id)
        if self.scheduler.publish_pending:
            self.publish()

    def expect(self, truth: bool, what: str) -> None:
        if not truth:
            raise Violation(f"{what}\n{self.spec}\n{self.scheduler.why_waiting(self.now_s)}")

    # ---- what the clock asks for

    def draw(self) -> str | None:
        b = self.books
        if b.returned:
            task = int(b.returned.popleft().split(".")[0])
        elif self.spec.tasks is None or b.next_task < self.spec.tasks:
            task, b.next_task = b.next_task, b.next_task + 1
        else:
            return None
        b.draws[task] += 1
        return f"{task}.{b.draws[task]}"

    def rollout_s(self, group_id: str) -> float:
        r = self.rng
        return {
            "pareto": lambda: min(r.paretovariate(0.8), 1e4),
            "uniform": r.random,
            "equal": lambda: 1.0,
            "bimodal": lambda: 100.0 if r.random() < 0.1 else r.random(),
        }[self.spec.tail]()

    def update_s(self) -> float:
        return self.spec.train_s

    def publish_s(self) -> float:
        return self.spec.publish_s

    def may_take(self) -> bool:
        self.expect(len(self.books.batches) < self.spec.steps, "a step more than the run has")
        return self.spec.overlap or not self.publishing

    # ---- the ledger

    def admitted(self, group_id: str, version: int) -> None:
        b, s = self.books, self.spec
        self.expect(version == b.published, "admitted at the version that is live")
        b.drawn.append(group_id)
        b.admitted_at[group_id] = b.published
        in_training = len(self.batch.group_ids) if self.batch else 0
        held = len(self.running) + len(self.complete) + in_training + b.unpublished
        self.expect(held <= self.slots + self.extra, f"{held} slots held of {self.slots} + {self.extra}")
        live = len(self.running) + len(self.complete)
        steps_left = s.steps - len(b.batches) - (self.batch is not None)
        self.expect(live <= s.prompts * steps_left + self.extra, "admitted more than the run can still train")

    def taken(self, batch: StepBatch) -> None:
        self.check(batch)
        for group_id in batch.dropped:
            self.books.fate[group_id] = "dropped"
            self.books.returned.append(group_id)

    def check(self, batch: StepBatch) -> None:
        b, s = self.books, self.spec
        trainer_version = len(b.batches) // s.sync_every  # publishes that were due so far, committed or not
        self.expect(batch.step == len(b.batches), "steps in order")
        self.expect(len(set(batch.group_ids)) == len(batch.group_ids), "an id twice in a batch")
        self.expect(set(batch.group_ids) <= self.complete, "trained a group that is not complete")
        for group_id in batch.group_ids:
            lag = trainer_version - b.admitted_at[group_id]
            self.expect(0 <= lag <= math.ceil(s.staleness), f"{group_id} trains {lag} versions late")
        if len(batch.group_ids) < s.prompts:
            self.expect(s.on_exhausted == "smaller" and not self.running and batch.short, "a batch that is too small")
        self.expect(len(batch.group_ids) <= s.prompts, "a batch that is too large")
        self.expect(
            len(batch.dropped) <= self.extra, f"{len(batch.dropped)} groups thrown away, {self.extra} over-sampled"
        )
        order = {g: i for i, g in enumerate(b.drawn)}
        self.expect(sorted(batch.group_ids, key=order.__getitem__) == list(batch.group_ids), "admission order")

    def trained(self, batch: StepBatch) -> None:
        b = self.books
        b.batches.append(batch.group_ids)
        b.versions.append(batch.step // self.spec.sync_every)
        b.fate.update(dict.fromkeys(batch.group_ids, "trained"))
        b.unpublished += len(batch.group_ids)

    def published(self) -> int:
        b = self.books
        b.published += 1
        b.unpublished = sum(len(ids) for ids, v in zip(b.batches, b.versions) if v >= b.published)
        if len(b.batches) == self.spec.steps and b.published == math.ceil(self.spec.steps / self.spec.sync_every):
            b.unpublished = 0
        return b.published

    def ended(self, group_id: str) -> None:
        fate = outcome(self.spec, group_id)
        if fate == "ok" and self.rng.random() < self.spec.cancel:
            fate = "cancelled"
            self.books.returned.append(group_id)
        if fate == "ok":
            super().ended(group_id)
        else:
            self.books.fate[group_id] = fate
            self.scheduler.release(group_id, fate)

    # ---- time

    def run(self) -> str:
        while True:
            self.admit()
            exhausted = self.take()
            if self.batch:
                self.admit()  # a batch frees the look-ahead at once
            if exhausted is not None:
                self.expect(not self.running, "gave up although groups still run")
                self.expect(self.spec.on_exhausted == "stop" or not self.complete, "smaller: trains what there is")
            if ended := "done" if self.finished else exhausted and exhausted.cause:
                self.audit(ended)
                return ended
            self.expect(not self.stuck, "deadlock")
            if self.spec.save and self.batch is None and self.rng.random() < self.spec.save:
                self.saved = (json.dumps(self.scheduler.state()), self.books.copy())
            if self.spec.crash and self.crashes_left and self.rng.random() < self.spec.crash:
                self.crashes_left -= 1
                state, books = self.saved or (None, Books())
                self.books = books.copy()
                self.start(state)
                continue
            self.advance()

    @property
    def finished(self) -> bool:
        return len(self.books.batches) == self.spec.steps and not self.publishing

    def audit(self, ended: str) -> None:
        b = self.books
        in_flight = self.running | self.complete
        self.expect(len(set(b.drawn)) == len(b.drawn), "an id was drawn twice")
        self.expect(
            set(b.drawn) == set(b.fate) | in_flight and not set(b.fate) & in_flight, "an id was lost or doubled"
        )
        trained = [g for ids in b.batches for g in ids]
        self.expect(len(set(trained)) == len(trained), "a group was trained twice")
        self.expect(sorted(trained) == sorted(g for g, f in b.fate.items() if f == "trained"), "trained as booked")
        if ended == "done":
            self.expect(not in_flight, f"finished with groups in flight: {in_flight}")
            self.expect(b.published == math.ceil(self.spec.steps / self.spec.sync_every), "every publish happened")
            self.expect(
                self.scheduler.done and not self.scheduler.publish_pending, "the scheduler knows that it is done"
            )
        if self.batch is None:
            self.expect(self.scheduler.state()["admitted"] == len(b.drawn), "drawn as booked")
        if ended == "draws":
            lost = sum(fate not in ("trained", "dropped") for fate in b.fate.values())
            self.expect(self.spec.max_draws is not None and lost > 0, "no draw was lost")


def outcome(spec: Spec, group_id: str) -> str:
    """A function of the group alone, so that a replay ends as the first play did."""
    u = int.from_bytes(hashlib.blake2b(f"{spec.seed}/{group_id}".encode(), digest_size=4).digest(), "little") / 2**32
    return "rejected" if u < spec.reject else "invalid" if u < spec.reject + spec.invalid else "ok"


def synchronous(spec: Spec) -> list[tuple[str, ...]]:
    """The reference for staleness 0: draw in order, drop what is not admissible, cut into steps."""
    accepted, task, batches = [], 0, []
    while len(batches) < spec.steps:
        while len(accepted) < spec.prompts:
            if outcome(spec, f"{task}.1") == "ok":
                accepted.append(f"{task}.1")
            task += 1
        batches.append(tuple(accepted[: spec.prompts]))
        accepted = accepted[spec.prompts :]
    return batches
