"""The position of a run in its data. The state of this cursor can be saved and restored, and a draw that was not used
can be returned to it.

A draw is identified by a serial number. The number alone determines the task of the draw, so the whole state is (next
number, returned numbers) and does not depend on how the run was interleaved or interrupted. With a curriculum, the
tasks of an epoch are chosen by earlier scores; this choice and the scores are part of the state too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np

from verl.errors import Refused

STATE_VERSION = 1
KEPT_DRAWS = 1 << 16  # unfinished draws are assumed to be among the last KEPT_DRAWS
Weigh = Callable[[np.ndarray], Any]


@dataclass(frozen=True, slots=True, order=True)
class Draw:
    """One draw of a task from the data."""

    epoch: int
    """The number of the pass over the data: draw // num_tasks."""
    draw: int
    """The serial number of the draw in the run."""
    index: int
    """The row of the task in the table."""


class Cursor:
    """Draws every task once per epoch, without end, in an order that is a pure function of (seed, epoch).

    `next` first returns the draws that were given back, the oldest first, under their old numbers. With a curriculum,
    an epoch has the same number of draws, and the curriculum chooses their tasks.
    """

    def __init__(
        self, num_tasks: int, seed: int, shuffle: bool = True, *, curriculum: Curriculum | None = None
    ) -> None:
        if num_tasks < 1:
            raise Refused(f"num_tasks={num_tasks}: there is nothing to draw from")
        self.num_tasks, self.seed, self.shuffle, self._curriculum = num_tasks, seed, shuffle, curriculum
        self._next = 0
        self._returned: list[int] = []  # a heap: the oldest draw is handed out first

    def next(self) -> Draw:
        if self._returned:
            return self._draw(heapq.heappop(self._returned))
        self._next += 1
        return self._draw(self._next - 1)

    def coming(self, count: int) -> list[Draw]:
        """Return the draws that `next` will return, without drawing them: at most `count`, and none of an epoch whose
        tasks a curriculum has not chosen yet."""
        numbers = chain(sorted(self._returned), range(self._next, self._next + count))
        chosen = self._curriculum.chosen if self._curriculum is not None else None
        known = takewhile(lambda number: chosen is None or chosen(number // self.num_tasks), numbers)
        return [self._draw(number) for number in islice(known, count)]

    def give_back(self, draw: Draw) -> None:
        """Return a draw that will not be finished (over-sampling surplus, a cancelled group), so that `next` draws it
        again."""
        assert 0 <= draw.draw < self._next, f"{draw} was never drawn (next is {self._next})"
        assert draw.draw not in self._returned, f"{draw} was given back already"
        assert draw == self._draw(draw.draw), f"{draw} is not of this cursor"
        heapq.heappush(self._returned, draw.draw)

    def scored(self, draw: Draw, score: float) -> None:
        """Record the mean score of the answers to a draw. The curriculum uses it from the end of the step on."""
        if self._curriculum is not None:
            self._curriculum.new.append((draw.draw, draw.index, score))

    def step_ended(self) -> None:
        if self._curriculum is not None:
            self._curriculum.settle()

    def state(self) -> dict[str, Any]:
        """Return the state in plain JSON types."""
        same = {"state_version": STATE_VERSION, "num_tasks": self.num_tasks, "seed": self.seed, "shuffle": self.shuffle}
        more = {} if self._curriculum is None else {"curriculum": self._curriculum.state()}
        return {**same, "next_draw": self._next, "returned": sorted(self._returned), **more}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raise ValueError if it is damaged, or was saved with other data, another order or
        curriculum."""
        if state.get("state_version") != STATE_VERSION:
            raise Refused(f"cursor state version {state.get('state_version')!r}: this verl reads {STATE_VERSION}")
        for name in ("num_tasks", "seed", "shuffle"):
            if state[name] != (value := getattr(self, name)):
                raise Refused(
                    f"the data cursor was saved with {name}={state[name]} and this run has {value}: its draws would be"
                    " other tasks. Fix: resume with the same data and seed, or start a new run"
                )
        if ("curriculum" in state) != (self._curriculum is not None):
            was, now = ("with", "without") if "curriculum" in state else ("without", "with")
            fix = "resume as it was, or start a new run"
            raise Refused(f"the data cursor was saved {was} algorithm.options.curriculum, this run is {now}: {fix}")
        next_draw, returned = int(state["next_draw"]), sorted(int(d) for d in state["returned"])
        if next_draw < 0 or len(set(returned)) < len(returned) or any(not 0 <= d < next_draw for d in returned):
            raise Refused(f"damaged cursor state: next_draw={next_draw}, returned={returned[:8]}")
        self._next, self._returned = next_draw, returned  # a sorted list is a heap
        if self._curriculum is not None:
            self._curriculum.load_state(state["curriculum"])

    def _draw(self, number: int) -> Draw:
        epoch, position = divmod(number, self.num_tasks)
        if self._curriculum is not None:
            order = self._curriculum.order(epoch)
        else:
            order = epoch_order(self.num_tasks, self.seed, epoch) if self.shuffle else np.arange(self.num_tasks)
        return Draw(epoch, number, int(order[position]))


class Curriculum:
    """Chooses the tasks of each epoch by the scores that are known at the first draw of the epoch.

    weigh: a function of the scores [num_tasks] (the score of each task's latest draw, NaN without one) that returns
        weights [num_tasks]. The number of draws of a task is proportional to its weight, rounded up or down.
    """

    def __init__(self, num_tasks: int, seed: int, weigh: Weigh) -> None:
        self.num_tasks, self.seed, self._weigh = num_tasks, seed, weigh
        self.scores = np.full(num_tasks, np.nan)
        self.new: list[tuple[int, int, float]] = []  # (draw, task, score) of the step under way
        self._of = np.full(num_tasks, -1)  # the draw of each score
        self._orders: dict[int, np.ndarray] = {}
        self.order(0)  # raises an error of the function before the first draw

    def settle(self) -> None:
        """Take over the scores of a step. If a task was drawn several times, the score of its latest draw counts,
        regardless of the order in which the answers were scored."""
        for draw, task, score in self.new:
            if draw >= self._of[task]:
                self._of[task], self.scores[task] = draw, score
        self.new.clear()

    def chosen(self, epoch: int) -> bool:
        """Return True if the tasks of this epoch are chosen."""
        return epoch in self._orders

    def order(self, epoch: int) -> np.ndarray:
        """Return the tasks [num_tasks] int64 of an epoch's draws, in their order."""
        if epoch not in self._orders:
            assert epoch > max(self._orders, default=-1), f"the order of epoch {epoch} was forgotten"
            first = np.random.Philox(key=np.array([self.seed % 2**64, 2**63 + epoch], np.uint64)).random_raw()
            ends = np.cumsum(self._weights())
            at = (np.arange(self.num_tasks) + int(first) / 2**64) * (ends[-1] / self.num_tasks)
            drawn = np.searchsorted(ends, at, side="right").clip(max=self.num_tasks - 1)
            self._orders[epoch] = drawn[epoch_order(self.num_tasks, self.seed, epoch)]
            oldest = epoch - 1 - KEPT_DRAWS // self.num_tasks
            self._orders = {e: order for e, order in self._orders.items() if e >= oldest}
        return self._orders[epoch]

    def _weights(self) -> np.ndarray:
        found = np.asarray(self._weigh(self.scores.copy()), np.float64)
        if found.shape != (self.num_tasks,) or not np.isfinite(found).all() or (found < 0).any() or not found.any():
            prefix = f"it gave {found.shape} with {found.min(initial=0):g} to {found.max(initial=0):g}"
            fix = f"return one weight for each of the {self.num_tasks} rows, none below 0, some above it"
            raise Refused(f"algorithm.options.curriculum: {prefix}; {fix}")
        return found

    def state(self) -> dict[str, Any]:
        scores = [None if np.isnan(score) else score for score in self.scores.tolist()]
        orders = {str(epoch): order.tolist() for epoch, order in self._orders.items()}
        return {"scores": scores, "of": self._of.tolist(), "new": [*map(list, self.new)], "orders": orders}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.scores, self._of = np.array(state["scores"], np.float64), np.array(state["of"], np.int64)
        self.new = [(int(draw), int(task), float(score)) for draw, task, score in state["new"]]
        self._orders = {int(epoch): np.array(order, np.int64) for epoch, order in state["orders"].items()}


@lru_cache(maxsize=2)  # draws given back are of this epoch or the last
def epoch_order(num_tasks: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation [num_tasks] int64 for an epoch, by sorting random words of the Philox generator: numpy
    guarantees that these streams stay the same between versions, but not those of `permutation`."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_tasks), kind="stable")
