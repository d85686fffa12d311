"""Where a run is in its data: a cursor that can be saved, restored and handed draws back.

A draw is a serial number. Which task it is follows from the number alone, so the whole state is (next number, numbers
handed back): no iterator, nothing that depends on how the run was interleaved or cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, order=True)
class Draw:
    """`draw` is global and serial; epoch = draw // num_tasks; `index` is the task's row in the table."""

    epoch: int
    draw: int
    index: int


class Cursor:
    """Draws every task once per epoch, without end, in an order that is a pure function of (seed, epoch).

    A draw that was given back is the next one to be handed out, with the same number.
    """

    def __init__(self, num_tasks: int, seed: int, shuffle: bool = True) -> None:
        if num_tasks < 1:
            raise ValueError(f"num_tasks={num_tasks}: there is nothing to draw from")
        self.num_tasks, self.seed, self.shuffle = num_tasks, seed, shuffle
        self._next = 0
        self._returned: list[int] = []  # a heap: the oldest draw goes out first

    def next(self) -> Draw:
        if self._returned:
            return self._draw(heapq.heappop(self._returned))
        self._next += 1
        return self._draw(self._next - 1)

    def give_back(self, draw: Draw) -> None:
        """A draw that nobody will finish (over-sampling surplus, a cancelled group) is handed out again, first."""
        assert 0 <= draw.draw < self._next, f"{draw} was never drawn (next is {self._next})"
        assert draw.draw not in self._returned, f"{draw} was given back already"
        assert draw == self._draw(draw.draw), f"{draw} is not of this cursor"
        heapq.heappush(self._returned, draw.draw)

    def state(self) -> dict[str, Any]:
        """Plain JSON types."""
        same = {"state_version": STATE_VERSION, "num_tasks": self.num_tasks, "seed": self.seed, "shuffle": self.shuffle}
        return {**same, "next_draw": self._next, "returned": sorted(self._returned)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. The data and the order must be the same."""
        if state.get("state_version") != STATE_VERSION:
            raise ValueError(f"cursor state version {state.get('state_version')!r}: this verl reads {STATE_VERSION}")
        for name in ("num_tasks", "seed", "shuffle"):
            if state[name] != (value := getattr(self, name)):
                raise ValueError(
                    f"the data cursor was saved with {name}={state[name]} and this run has {value}: its draws would be"
                    " other tasks. Fix: resume with the same data and seed, or start a new run"
                )
        next_draw, returned = int(state["next_draw"]), sorted(int(d) for d in state["returned"])
        if next_draw < 0 or len(set(returned)) < len(returned) or any(not 0 <= d < next_draw for d in returned):
            raise ValueError(f"damaged cursor state: next_draw={next_draw}, returned={returned[:8]}")
        self._next, self._returned = next_draw, returned  # a sorted list is a heap

    def _draw(self, number: int) -> Draw:
        epoch, position = divmod(number, self.num_tasks)
        order = epoch_order(self.num_tasks, self.seed, epoch) if self.shuffle else range(self.num_tasks)
        return Draw(epoch, number, int(order[position]))


@lru_cache(maxsize=2)  # draws given back are of this epoch or the last
def epoch_order(num_tasks: int, seed: int, epoch: int) -> np.ndarray:
    """[num_tasks] int64, a permutation. Sorted Philox words: numpy keeps these streams, not those of `permutation`."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_tasks), kind="stable")
