"""Admission, deadlines and batches, one rule per test. The proofs over random schedules:
test_scheduler_simulation.py."""

from __future__ import annotations

import json

import pytest
from each import each

from verl.driver.scheduler import Exhausted, Scheduler, StepBatch, Wait


def scheduler(prompts: int = 2, **changes) -> Scheduler:
    return Scheduler(**{"prompts_per_step": prompts, "total_steps": 10} | changes)


def admit_all(s: Scheduler, names: str = "") -> list[str]:
    """Fill every free slot; names are letters in order, or continue from the count of groups drawn."""
    out = []
    while s.free_slots():
        group_id = names[len(out)] if names else f"g{s._admitted}"
        s.admit(group_id, 0.0)
        out.append(group_id)
    return out


def step(s: Scheduler, *, publish: bool = True) -> StepBatch:
    """Admit, complete everything, take, train, publish if due."""
    for group_id in admit_all(s):
        s.complete(group_id)
    batch = s.take()
    assert isinstance(batch, StepBatch), s.why_waiting(0.0)
    s.trained(batch.step)
    if publish and s.publish_due(batch.step):
        s.published(s.version + 1)
    return batch


@each(
    "prompts, sync_every, staleness, slots",
    [
        (4, 1, 0, 4),
        (4, 3, 0, 12),
        (4, 1, 0.3, 5),
        (4, 1, 1, 8),
        (4, 2, 1.7, 21),
        (100, 1, 0.15, 115),
        (10, 1, 0.1, 11),
        (1000, 1, 0.029, 1029),
    ],
)
def test_slots_are_exact(prompts: int, sync_every: int, staleness: float, slots: int) -> None:
    """floor((1 + staleness) x prompts x sync_every), in decimal: 1.15 x 100 is 115, not 114.99999999999999."""
    s = scheduler(prompts, sync_every=sync_every, staleness=staleness)
    assert s.slots == slots
    assert s.free_slots() == slots


def test_a_released_slot_is_free_at_once_a_trained_one_after_the_publish() -> None:
    s = scheduler()
    a, b = admit_all(s)
    assert s.free_slots() == 0
    s.release(a, "rejected")
    assert s.free_slots() == 1
    s.admit("c", 0.0)
    s.complete(b)
    s.complete("c")
    batch = s.take()
    assert isinstance(batch, StepBatch) and batch.group_ids == (b, "c")
    assert s.free_slots() == 0, "a group in training holds its slot"
    s.trained(0)
    assert s.free_slots() == 0, "and keeps it until the new weights are live"
    s.published(1)
    assert s.free_slots() == 2


def test_synchronous_batches_are_in_admission_order() -> None:
    s = scheduler(sync_every=2)
    assert admit_all(s, "abcd") == list("abcd"), "all groups of a sync period are admitted at once"
    for group_id in "dcb":
        s.complete(group_id)
        assert s.take() == Wait("running"), "the head of the order is not there yet"
    s.complete("a")
    first = s.take()
    assert isinstance(first, StepBatch) and first.group_ids == ("a", "b")
    s.trained(0)
    assert not s.publish_due(0) and s.publish_due(1)
    assert s.free_slots() == 0, "nothing is admitted in the middle of a sync period"
    second = s.take()
    assert isinstance(second, StepBatch) and second.group_ids == ("c", "d") and second.staleness == (0, 0)


def test_take_waits_for_a_group_that_is_due() -> None:
    """Two fresh groups are complete, but the two old ones would miss their deadline."""
    s = scheduler(staleness=1)
    for group_id in admit_all(s, "abcd")[:2]:
        s.complete(group_id)
    assert isinstance(s.take(), StepBatch)  # a, b
    s.trained(0)
    s.published(1)
    for group_id in admit_all(s, "ef"):
        s.complete(group_id)
    assert s.take() == Wait("deadline")
    s.complete("d")
    assert s.take() == Wait("deadline"), "c is still due now"
    s.release("c", "failed")
    batch = s.take()
    assert isinstance(batch, StepBatch) and batch.group_ids == ("d", "e") and batch.staleness == (1, 0)


def test_admission_says_how_long_a_group_may_train() -> None:
    s = scheduler(sync_every=3, staleness=0.5, total_steps=8)
    first = s.admit("a", 0.0)
    assert (first.version, first.last_version, first.due_step) == (0, 1, 5)
    for _ in range(3):
        step(s)
    assert s.version == 1
    late = s.admit("late", 0.0)
    assert (late.version, late.last_version, late.due_step) == (1, 2, 7), "no later than the last step"


def test_no_group_is_admitted_that_the_run_cannot_train() -> None:
    s = scheduler(4, staleness=3, total_steps=2)
    assert s.free_slots() == 8
    step(s)
    assert s.free_slots() == 0
    step(s)
    assert s.done and s.free_slots() == 0 and not s.publish_pending
    with pytest.raises(AssertionError, match="all 2 steps"):
        s.take()


def test_a_publish_may_commit_while_the_next_step_trains() -> None:
    s = scheduler(staleness=1)
    for group_id in admit_all(s, "abcd"):
        s.complete(group_id)
    assert isinstance(s.take(), StepBatch)
    s.trained(0)
    assert s.publish_pending
    assert isinstance(s.take(), StepBatch)
    assert s.free_slots() == 0
    s.published(1)
    assert s.free_slots() == 2, "the slots of step 0, while step 1 trains"
    s.trained(1)
    assert s.publish_pending
    s.published(2)
    assert not s.publish_pending


def test_oversampling_takes_the_first_complete_and_drops_the_rest() -> None:
    s = scheduler(4, oversample=0.5)
    assert admit_all(s, "abcdef") == list("abcdef")
    for group_id in "fdb":
        s.complete(group_id)
    assert s.take() == Wait("running")
    s.complete("c")
    batch = s.take()
    assert isinstance(batch, StepBatch) and batch.group_ids == ("b", "c", "d", "f") and batch.dropped == ("a", "e")
    assert not s.holds("a")


def test_a_part_of_a_group_more_is_a_group_more() -> None:
    s = scheduler(3, oversample=0.1)
    assert s.free_slots() == 4 and s.extra == 1


def test_oversampled_surplus_is_kept_while_its_deadline_allows() -> None:
    s = scheduler(2, oversample=1.0, sync_every=2)
    assert len(admit_all(s, "abcdef")) == 6
    for group_id in "ef":
        s.complete(group_id)
    first = s.take()
    assert isinstance(first, StepBatch) and first.group_ids == ("e", "f") and first.dropped == ()
    s.trained(0)
    s.complete("c")
    s.complete("a")
    second = s.take()
    assert isinstance(second, StepBatch) and second.group_ids == ("a", "c") and second.dropped == ("b", "d")


@pytest.mark.parametrize("policy", ["stop", "smaller"])
def test_the_draw_budget_ends_a_step_as_declared(policy) -> None:
    s = scheduler(2, max_draws_per_group=2.5, on_exhausted=policy)
    s.admit("good", 0.0)
    s.complete("good")
    for i in range(4):
        assert s.free_slots() == 1
        s.admit(f"flat{i}", 0.0)
        s.release(f"flat{i}", "rejected" if i else "invalid")
    assert s.free_slots() == 0, "5 = 2.5 x 2 groups are drawn"
    got = s.take()
    if policy == "stop":
        assert got == Exhausted(0, "draws", 1, 2, {"invalid": 1, "rejected": 3})
        assert str(got) == "step 0: the draw budget is spent with 1 of 2 groups complete (1 invalid, 3 rejected)"
        return
    assert isinstance(got, StepBatch) and got.group_ids == ("good",) and got.short and got.needed == 2
    s.trained(0)
    s.published(1)
    assert s.free_slots() == 2, "the next step has a budget of its own"


def test_the_draw_budget_thins_the_look_ahead_before_the_step() -> None:
    s = scheduler(2, staleness=2, max_draws_per_group=2)  # 6 slots, 2 refills
    groups = admit_all(s, "abcdef")
    for i, group_id in enumerate(groups[:5]):
        s.release(group_id, "rejected")
        assert s.free_slots() == min(i + 1, 2)
    assert s._overdrawn() == 3 and s.free_slots() == 2 and len(s._groups) == 1


def test_every_step_of_a_period_pays_for_lost_groups() -> None:
    """One refill per step: in the second step before a publish two groups may have been lost."""
    s = scheduler(2, sync_every=2, max_draws_per_group=1.5)
    admit_all(s, "abcd")
    for group_id in "ab":
        s.complete(group_id)
    assert isinstance(s.take(), StepBatch)
    s.trained(0)
    for group_id in "cd":
        s.release(group_id, "rejected")
    assert s.free_slots() == 2


def test_an_empty_step_ends_the_run_whatever_the_policy() -> None:
    s = scheduler(2, max_draws_per_group=1, on_exhausted="smaller")
    for group_id in admit_all(s):
        s.release(group_id, "rejected")
    assert isinstance(got := s.take(), Exhausted) and got.complete == 0


@pytest.mark.parametrize("policy", ["stop", "smaller"])
def test_end_of_data(policy) -> None:
    s = scheduler(2, on_exhausted=policy)
    step(s)
    s.admit("last", 0.0)
    s.no_more_tasks()
    assert s.free_slots() == 0 and s.take() == Wait("running")
    s.complete("last")
    got = s.take()
    if policy == "stop":
        assert got == Exhausted(1, "data", 1, 2, {})
    else:
        assert isinstance(got, StepBatch) and got.group_ids == ("last",)
        s.trained(1)
        s.published(2)
        s.no_more_tasks()
        assert isinstance(s.take(), Exhausted)


def test_a_released_group_asks_the_cursor_again() -> None:
    s = scheduler(2)
    s.admit("a", 0.0)
    s.no_more_tasks()
    s.release("a", "cancelled")
    assert s.free_slots() == 2, "its task may be back in the cursor"


def test_a_dropped_group_asks_the_cursor_again() -> None:
    s = scheduler(2, oversample=0.5, on_exhausted="smaller")
    admit_all(s, "abc")
    s.no_more_tasks()
    for group_id in "ab":
        s.complete(group_id)
    batch = s.take()
    assert isinstance(batch, StepBatch) and batch.dropped == ("c",)
    s.trained(0)
    s.published(1)
    assert s.free_slots() == 3, "the dropped task may be back in the cursor"
    assert s.take() == Wait("admission"), "what was dropped runs no more"


def test_waits_name_what_must_happen() -> None:
    s = scheduler(2)
    assert s.take() == Wait("admission")
    s.admit("a", 100.0)
    assert s.take() == Wait("running")
    assert s.why_waiting(112.5) == (
        "step 0 needs 2 groups: 0 complete, 1 running, 1 slots free;"
        " oldest running: a, 12.5 s, admitted at version 0, due by step 0"
    )
    s.release("a", "failed")
    step(s, publish=False)
    assert s.take() == Wait("publish")
    assert "2 of 2 slots wait for the publish of version 1" in s.why_waiting(0.0)


def test_a_batch_says_how_old_its_groups_are() -> None:
    s = scheduler(2, staleness=1)
    for group_id in admit_all(s, "abcd"):
        s.complete(group_id)
    for number in range(2):
        batch = s.take()
        assert isinstance(batch, StepBatch) and batch.staleness == (number, number)
        s.trained(number)
        s.published(number + 1)


# ---- resume


def in_the_middle() -> Scheduler:
    s = scheduler(2, staleness=1, sync_every=2)  # 8 slots
    admit_all(s, "abcdefgh")
    for group_id in "adh":
        s.complete(group_id)
    batch = s.take()
    assert isinstance(batch, StepBatch) and batch.group_ids == ("a", "d")
    s.trained(0)
    s.release("b", "rejected")
    return s


def test_state_lists_what_is_in_flight_and_resumes_with_the_original_versions() -> None:
    s = in_the_middle()
    state = json.loads(json.dumps(s.state()))
    s2 = scheduler(2, staleness=1, sync_every=2)
    resumed = s2.load_state(state, 0.0)
    assert (resumed.complete, resumed.running, resumed.dropped) == (("h",), ("c", "e", "f", "g"), ())
    assert s2.next_step == 1 and s2.free_slots() == s.free_slots() == 1
    assert s2.why_waiting(0.0) == s.why_waiting(0.0)
    assert s2.state() == state


def test_state_in_the_middle_of_training_is_refused() -> None:
    s = scheduler(2)
    for group_id in admit_all(s):
        s.complete(group_id)
    s.take()
    with pytest.raises(AssertionError, match="step 0 is in training"):
        s.state()


def test_resume_with_a_lower_staleness_drops_what_cannot_train_any_more() -> None:
    s = in_the_middle()
    strict = scheduler(2, staleness=0, sync_every=2)
    resumed = strict.load_state(s.state(), 0.0)
    assert resumed.running == ("c", "e") and resumed.dropped == ("f", "g", "h"), "latest admitted first"
    for group_id in ("c", "e"):
        strict.complete(group_id)
    assert isinstance(strict.take(), StepBatch)


def test_resume_between_publishes_keeps_the_shape_of_a_step() -> None:
    with pytest.raises(ValueError, match="between two publishes with 2 and 2; keep those values"):
        scheduler(4, staleness=1, sync_every=2).load_state(in_the_middle().state(), 0.0)


def test_resume_at_a_publish_may_change_everything() -> None:
    s = scheduler(2, staleness=1, sync_every=2)
    step(s), step(s)
    other = scheduler(3, staleness=0.5, sync_every=1)
    resumed = other.load_state(s.state(), 0.0)
    assert resumed.complete == ("g4", "g5", "g6") and resumed.dropped == ("g7",), "four are due at one step of three"
    assert other.version == 1 and other.next_step == 2
    for _ in range(8):
        step(other)
    assert other.done and other.version == 9


def test_a_finished_run_goes_on_with_more_steps() -> None:
    """5 steps with a publish every 2: the last publish is off the grid, and versions go on from there."""
    s = scheduler(2, staleness=1, sync_every=2, total_steps=5)
    for _ in range(5):
        step(s)
    assert s.version == 3 and not s.publish_pending
    longer = scheduler(2, staleness=1, sync_every=2, total_steps=9)
    longer.load_state(s.state(), 0.0)
    for _ in range(4):
        batch = step(longer)
        assert max(batch.staleness) <= 1
    assert longer.done and longer.version == 3 + 3


# ---- user faults


@each(
    "changes, message",
    [
        ({"prompts_per_step": 0}, "prompts_per_step=0"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"total_steps": -1}, "total_steps=-1"),
        ({"staleness": -0.5}, "staleness=-0.5"),
        ({"staleness": float("nan")}, "staleness=nan"),
        ({"oversample": float("inf")}, "oversample=inf"),
        ({"max_draws_per_group": 0.5}, "max_draws_per_group=0.5"),
        ({"on_exhausted": "fill"}, "must be stop or smaller"),
    ],
)
def test_settings_are_checked(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(**changes)


def test_our_own_mistakes_are_asserted() -> None:
    s = scheduler(1)
    s.admit("a", 0.0)
    with pytest.raises(AssertionError, match="already in flight"):
        s.admit("a", 0.0)
    with pytest.raises(AssertionError, match="no free slot for group b: step 0 needs 1"):
        s.admit("b", 0.0)
    with pytest.raises(AssertionError, match="not in flight"):
        s.release("b", "failed")
    with pytest.raises(AssertionError, match="before its step is trained"):
        s.published(1)
    s.complete("a")
    with pytest.raises(AssertionError, match="not running"):
        s.complete("a")
    s.take()
    with pytest.raises(AssertionError, match="not trained yet"):
        s.take()
    with pytest.raises(AssertionError, match="not the one in training"):
        s.trained(1)
