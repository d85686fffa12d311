"""The cursor: every task once per epoch, whatever the order of draws, returns and restores."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data.cursor import Curriculum, Weigh, epoch_order
from verl.data.source import Cursor, Draw


def take(cursor: Cursor, count: int) -> list[Draw]:
    return [cursor.next() for _ in range(count)]


def test_each_epoch_is_a_permutation_and_epochs_differ() -> None:
    draws = take(Cursor(7, seed=3), 21)
    assert [d.draw for d in draws] == list(range(21))
    assert [d.epoch for d in draws] == [0] * 7 + [1] * 7 + [2] * 7
    orders = [[d.index for d in draws if d.epoch == e] for e in range(3)]
    assert all(sorted(o) == list(range(7)) for o in orders) and orders[0] != orders[1]
    assert [d.index for d in take(Cursor(4, seed=3, shuffle=False), 8)] == [0, 1, 2, 3] * 2


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    # Golden: must never change, or a resumed run would draw other tasks.
    assert epoch_order(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(10, 7, 3).tolist() == [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]
    assert epoch_order(10, -1, 0).tolist() != epoch_order(10, 1, 0).tolist()
    assert sorted(epoch_order(1000, 5, 2).tolist()) == list(range(1000))


def test_given_back_draws_come_first_and_keep_their_number() -> None:
    cursor = Cursor(5, seed=1)
    drawn = take(cursor, 7)
    for k in (6, 2, 4):
        cursor.give_back(drawn[k])
    assert take(cursor, 3) == [drawn[2], drawn[4], drawn[6]]
    assert cursor.next().draw == 7


def test_the_draws_that_come_are_known_and_not_drawn() -> None:
    cursor = Cursor(5, seed=1)
    drawn = take(cursor, 4)
    for k in (3, 1):
        cursor.give_back(drawn[k])
    before, coming = cursor.state(), cursor.coming(9)
    assert cursor.state() == before and [d.draw for d in coming] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert take(cursor, 9) == coming and cursor.coming(0) == []
    chosen = Cursor(4, 0, curriculum=Curriculum(4, 0, np.ones_like))
    assert take(chosen, 3) and [d.draw for d in chosen.coming(4)] == [3], "those of an epoch are chosen at its begin"


# n: next · b: give back one in flight · t: one is trained · s: save and restore · l: all in flight come back, restore
ACTIONS = st.lists(st.tuples(st.sampled_from("nnnbtsl"), st.integers(0, 30)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(
    tasks=st.integers(1, 9),
    epochs=st.integers(1, 4),
    seed=st.integers(-5, 2**40),
    shuffle=st.booleans(),
    actions=ACTIONS,
)
def test_no_index_is_lost_or_doubled(
    tasks: int, epochs: int, seed: int, shuffle: bool, actions: list[tuple[str, int]]
) -> None:
    cursor = Cursor(tasks, seed, shuffle)
    in_flight: list[Draw] = []
    trained: list[Draw] = []

    def restored() -> Cursor:
        fresh = Cursor(tasks, seed, shuffle)
        fresh.load_state(json.loads(json.dumps(cursor.state())))
        return fresh

    for action, k in actions:
        if action == "n" and len(trained) + len(in_flight) < tasks * epochs:
            in_flight.append(cursor.next())
        elif action == "b" and in_flight:
            cursor.give_back(in_flight.pop(k % len(in_flight)))
        elif action == "t" and in_flight:
            trained.append(in_flight.pop(k % len(in_flight)))
        elif action == "s":
            cursor = restored()
        elif action == "l":
            for draw in in_flight:
                cursor.give_back(draw)
            cursor, in_flight = restored(), []
    trained += in_flight + take(cursor, tasks * epochs - len(trained) - len(in_flight))
    assert Counter((d.epoch, d.index) for d in trained) == Counter((e, i) for e in range(epochs) for i in range(tasks))
    assert sorted(trained, key=lambda d: d.draw) == take(Cursor(tasks, seed, shuffle), tasks * epochs)


def test_a_cut_at_every_point_continues_as_if_never_cut() -> None:
    straight = take(Cursor(6, seed=9), 12)
    for cut in range(13):
        before = Cursor(6, seed=9)
        head = take(before, cut)
        after = Cursor(6, seed=9)
        after.load_state(before.state())
        assert head + take(after, 12 - cut) == straight


def test_another_data_set_or_seed_is_refused() -> None:
    state = Cursor(300, seed=1).state()
    for other, name in ((Cursor(280, seed=1), "num_tasks=300"), (Cursor(300, seed=2), "seed=1")):
        with pytest.raises(ValueError, match=name):
            other.load_state(state)
    with pytest.raises(ValueError, match="shuffle=True"):
        Cursor(300, seed=1, shuffle=False).load_state(state)
    with pytest.raises(ValueError, match="damaged cursor state"):
        Cursor(300, seed=1).load_state({**state, "returned": [5]})
    with pytest.raises(ValueError, match="state version None"):
        Cursor(300, seed=1).load_state({})


def test_misuse_is_caught() -> None:
    cursor = Cursor(3, seed=1)
    draw = cursor.next()
    with pytest.raises(AssertionError, match="never drawn"):
        cursor.give_back(Draw(0, 1, 0))
    with pytest.raises(AssertionError, match="not of this cursor"):
        cursor.give_back(Draw(0, 0, (draw.index + 1) % 3))
    cursor.give_back(draw)
    with pytest.raises(AssertionError, match="already"):
        cursor.give_back(draw)
    with pytest.raises(ValueError, match="num_tasks=0"):
        Cursor(0, seed=1)


def curriculum(tasks: int, seed: int, weigh: Weigh) -> Cursor:
    return Cursor(tasks, seed, curriculum=Curriculum(tasks, seed, weigh))


def counts(cursor: Cursor, tasks: int) -> list[int]:
    """How often each task is drawn in the next epoch."""
    found = Counter(d.index for d in take(cursor, tasks))
    return [found[i] for i in range(tasks)]


def test_a_curriculum_draws_each_task_by_its_share() -> None:
    for seed in range(20):
        assert counts(curriculum(30, seed, np.ones_like), 30) == [1] * 30, "equal weights: every task once"
        weights = np.random.default_rng(seed).random(30) * (np.arange(30) % 3 > 0)
        found = counts(curriculum(30, seed, lambda scores, weights=weights: weights), 30)
        shares = 30 * weights / weights.sum()
        assert all(np.floor(s - 1e-9) <= n <= np.ceil(s + 1e-9) for n, s in zip(found, shares)) and sum(found) == 30
    one, two = (take(curriculum(30, 5, np.ones_like), 60)[k : k + 30] for k in (0, 30))
    assert [d.index for d in one] != [d.index for d in two] and [d.epoch for d in two] == [1] * 30


def unsolved(scores: np.ndarray) -> np.ndarray:
    return 1 - np.nan_to_num(scores)


def test_an_epoch_is_drawn_by_what_was_scored_before_it() -> None:
    """The latest of several draws of a task counts, in any order of scoring; the draws of a step count at its end."""
    found = []
    for order in (1, -1):
        cursor = curriculum(4, 0, unsolved)
        draws = take(cursor, 4)
        of = {d.index: d for d in draws}
        later = Draw(0, 9, 2)
        for draw, score in [(of[0], 1.0), (of[1], 1.0), (of[2], 0.0), (later, 1.0)][::order]:
            cursor.scored(draw, score)
        cursor.step_ended()
        cursor.scored(of[3], 1.0)  # of a step that has not ended
        found.append(counts(cursor, 4))
    assert found == [[0, 0, 0, 4]] * 2


@settings(max_examples=60, deadline=None)
@given(tasks=st.integers(1, 9), seed=st.integers(-5, 2**40), cut=st.integers(0, 40), given_back=st.booleans())
def test_a_curriculum_that_was_cut_goes_on_as_if_never_cut(tasks: int, seed: int, cut: int, given_back: bool) -> None:
    def play(cursor: Cursor, numbers: range) -> list[Draw]:
        out = []
        for number in numbers:
            out.append(cursor.next())
            if given_back and number % 5 == 2:
                cursor.give_back(out[-1])
            else:
                cursor.scored(out[-1], (out[-1].draw * 7 % 5) / 4)
            if number % 3 == 0:
                cursor.step_ended()
        return out

    straight = play(curriculum(tasks, seed, lambda s: 0.1 + unsolved(s)), range(41))
    first, then = (curriculum(tasks, seed, lambda s: 0.1 + unsolved(s)) for _ in range(2))
    head = play(first, range(cut))
    then.load_state(json.loads(json.dumps(first.state())))
    assert head + play(then, range(cut, 41)) == straight


def test_a_curriculum_that_cannot_be_is_refused() -> None:
    for weigh in (lambda s: s, np.zeros_like, lambda s: s[:-1], lambda s: np.arange(6) - 1.0):
        with pytest.raises(
            ValueError, match=r"algorithm.options.curriculum: it gave .* one weight for each of the 6 rows"
        ):
            curriculum(6, 0, weigh)
    with_one, without = curriculum(6, 0, np.ones_like), Cursor(6, 0)
    for cursor, other, said in (
        (with_one, without, "saved without .* run is with"),
        (without, with_one, "saved with "),
    ):
        with pytest.raises(ValueError, match=f"{said}.*resume as it was, or start a new run"):
            cursor.load_state(other.state())


def test_a_million_tasks_are_quick() -> None:
    cursor = Cursor(1_000_000, seed=1)
    indices = np.array([d.index for d in take(cursor, 1000)])
    assert len(np.unique(indices)) == 1000
