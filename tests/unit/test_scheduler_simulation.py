"""Ten thousand random schedules under a virtual clock, and mutants of the scheduler that this must catch."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import pytest
from each import matrix
from scheduler_world import Spec, Violation, World, random_spec, synchronous

from verl.driver.scheduler import Scheduler, StepBatch

# ---- the proofs


@matrix("block", range(10), quick=2)
def test_ten_thousand_random_schedules(block: int) -> None:
    ends = Counter(World(random_spec(seed)).run() for seed in range(block * 1000, (block + 1) * 1000))
    assert ends["done"] > 300 and ends["draws"] > 30 and ends["data"] > 30, ends


@pytest.mark.parametrize("sync_every", [1, 2, 3])
def test_staleness_0_is_the_synchronous_run(sync_every: int) -> None:
    for seed in range(300):
        spec = replace(random_spec(seed), staleness=0, oversample=0, cancel=0, sync_every=sync_every)
        spec = replace(spec, tasks=None, max_draws=None, reject=min(spec.reject, 0.8))
        world = World(spec)
        assert world.run() == "done"
        assert world.books.batches == synchronous(spec)
        assert all(
            world.books.admitted_at[g] == s // sync_every for s, ids in enumerate(world.books.batches) for g in ids
        )


def test_staleness_0_does_not_depend_on_time_even_when_it_gives_up() -> None:
    """Draw budgets, smaller batches, the end of the data and crashes included: same tasks, same batches, same end."""
    short = 0
    for seed in range(300):
        spec = replace(random_spec(seed), staleness=0, oversample=0, cancel=0, max_draws=(1, 2, 4)[seed % 3])
        spec = replace(spec, reject=(0.2, 0.4, 0.6)[seed % 7 % 3], on_exhausted="stop" if seed % 5 == 0 else "smaller")
        runs = []
        for timing, tail, crash in ((0, "equal", 0.0), (1, "pareto", 0.0), (2, "bimodal", 0.05)):
            world = World(replace(spec, tail=tail, crash=crash, save=0.3), timing=timing)
            runs.append((world.run(), world.books.batches, sorted(world.books.fate.items())))
        assert runs[0] == runs[1] == runs[2], spec
        short += any(len(ids) < spec.prompts for ids in runs[0][1])
    assert short > 20, "the test never saw a smaller batch"


def test_trained_ids_after_crashes_are_those_without_a_crash() -> None:
    """No task is skipped or trained twice, at any staleness: every task up to the last drawn has exactly one fate."""
    for seed in range(300):
        spec = replace(random_spec(seed), crash=0.05, save=0.3, cancel=0, oversample=0, tasks=None)
        world = World(spec)
        world.run()
        books = world.books
        assert [g.split(".")[0] for g in books.drawn] == [str(i) for i in range(len(books.drawn))]


def test_oversampling_at_staleness_0_admits_and_drops_the_surplus() -> None:
    spec = Spec(1, 4, 1, 0, 0.5, 6, None, "stop", tail="pareto")
    world = World(spec)
    world.run()
    fates = Counter(world.books.fate.values())
    assert fates == {"trained": 24, "dropped": 12}
    assert len(world.books.drawn) == 6 * 6


def test_no_finished_work_is_discarded_without_oversampling() -> None:
    for seed in range(300):
        world = World(replace(random_spec(seed), oversample=0))
        world.run()
        assert "dropped" not in world.books.fate.values()


def test_acceptance_rates_of_dynamic_sampling_end_as_declared() -> None:
    for accept in (0, 0.01, 0.5, 1):
        for policy in ("stop", "smaller"):
            spec = Spec(3, 4, 1, 0, 0, 5, 10, policy, reject=1 - accept)
            world = World(spec)
            ended = world.run()
            per_step = [len(ids) for ids in world.books.batches]
            if accept >= 0.5:
                assert ended == "done" and per_step == [4] * 5
            elif accept == 0:
                assert ended == "draws" and per_step == [] and len(world.books.drawn) == 40
            else:
                assert ended == "draws" and len(world.books.drawn) <= 40 * (len(per_step) + 1)


# ---- mutants: the simulator must see each of them fail


class CompletionOrder(Scheduler):
    """Takes whatever completed first, and asks nothing."""

    def complete(self, group_id):
        super().complete(group_id)
        self.__dict__.setdefault("finished", []).append(group_id)

    def _choose(self):
        first = [g for g in self.__dict__.get("finished", []) if g in self._groups][: self.prompts_per_step]
        return [g for i, g in self._groups.items() if i in first] if len(first) == self.prompts_per_step else None

    def _overdue_after(self, chosen):
        return []


class NoFeasibility(Scheduler):
    """Earliest deadline first among the complete ones, without a look at the rest."""

    def _overdue_after(self, chosen):
        return []


class DropsTheLate(Scheduler):
    """Meets every deadline by throwing late groups away, over-sampled or not."""

    def _overdue_after(self, chosen):
        taken = {g.group_id for g in chosen}
        return [g for g in self._groups.values() if g.group_id not in taken and self._due(g.version) <= self.next_step]


class FreesAtTraining(Scheduler):
    """A slot is free when its group is trained, not when the new weights are live."""

    def trained(self, step):
        super().trained(step)
        self._unpublished.clear()


class KeepsSlotsOfRejected(Scheduler):
    def release(self, group_id, reason):
        super().release(group_id, reason)
        self._unpublished[self.version] = self._unpublished.get(self.version, 0) + 1


class NoHorizon(Scheduler):
    """Admits as long as slots are free, also for steps that will not come."""

    def _room(self):
        return (
            self.slots
            + self.extra
            - sum(self._unpublished.values())
            - (len(self._batch.group_ids) if self._batch else 0)
        )


class ForgetsVersions(Scheduler):
    """Re-admits what was in flight as if it were new."""

    def load_state(self, state, now_s):
        groups = [[g, state["version"], complete] for g, _, complete in state["groups"]]
        return super().load_state({**state, "groups": groups}, now_s)


class LosesCompleted(Scheduler):
    """Saves only what still runs."""

    def state(self):
        state = super().state()
        return {**state, "groups": [g for g in state["groups"] if not g[2]]}


class AnyCompleteAtStaleness0(Scheduler):
    def _choose(self):
        self.in_order = False
        return super()._choose()


@pytest.mark.parametrize(
    "mutant",
    [
        CompletionOrder,
        NoFeasibility,
        DropsTheLate,
        FreesAtTraining,
        KeepsSlotsOfRejected,
        NoHorizon,
        ForgetsVersions,
        LosesCompleted,
    ],
)
def test_the_simulator_catches(mutant: type[Scheduler]) -> None:
    caught = 0
    for seed in range(300):
        spec = random_spec(seed)
        if mutant in (ForgetsVersions, LosesCompleted):
            spec = replace(spec, save=0.5, crash=0.1, steps=10, staleness=max(0.5, spec.staleness))
        try:
            World(spec, mutant).run()
        except (Violation, AssertionError):
            caught += 1
    assert caught >= 5, f"{mutant.__name__} was caught in {caught} of 300 schedules"


def test_the_order_test_catches_completion_order_at_staleness_0() -> None:
    spec = Spec(0, 2, 2, 0, 0, 4, None, "stop", tail="pareto")
    orders = []
    for seed in range(20):
        world = World(replace(spec, seed=seed), AnyCompleteAtStaleness0)
        world.run()
        orders.append(world.books.batches == synchronous(world.spec))
    assert not all(orders)


def test_naive_taking_is_late_without_bound() -> None:
    """Completion-order taking lags far beyond the bound; earliest-deadline-first never does."""

    class Lag(World):
        worst = 0

        def check(self, batch: StepBatch) -> None:
            now = len(self.books.batches) // self.spec.sync_every
            self.worst = max(self.worst, *(now - self.books.admitted_at[g] for g in batch.group_ids))

    spec = Spec(5, 4, 1, 1, 0, 80, None, "stop", tail="pareto", train_s=0.1)
    naive, ours = Lag(spec, CompletionOrder), Lag(spec)
    with contextlib.suppress(Violation, AssertionError):
        naive.run()
    ours.run()
    assert ours.worst == 1
    assert naive.worst >= 5, naive.worst
