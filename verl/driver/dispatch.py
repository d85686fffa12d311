"""The division of rows over ranks: from refs to one share per rank. Pure functions over numbers.

A group stays on one rank (its answers share a prompt, and a preference pair is compared inside a term), so a rank's
share is whole groups. Shares are balanced by predicted cost. Every rank gets the same number of micro-batches: in a
sharded engine each micro-batch is a collective, and a rank with fewer of them would block the others for ever."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from verl.types import Refs

T = TypeVar("T")
ATTENTION_TOKENS = 8192.0
"""The length of a row at which attention, which is quadratic, costs as much as everything else."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of an optimizer step or of an inference pass."""

    refs: Refs
    """The rows of this rank."""
    rows: tuple[int, ...]
    """The positions of these rows among all rows."""
    num_microbatches: int
    """The number of micro-batches, the same on every rank; 0 with a single rank, which follows the token budget."""
    idle: bool = False
    """The rank has no row of its own. It computes one row with weight 0, since the collectives of a pass need every
    rank."""


def shares(refs: Refs, ranks: int, *, max_tokens: int, shares_prefix: bool = True) -> list[Share]:
    """Return one share per rank, of whole groups and with costs as equal as possible: in the order of their cost, the
    highest first, groups are given to the rank with the lowest cost so far.

    With one rank the rows keep their order. `max_tokens` is the token budget of a micro-batch."""
    if not refs:
        return [Share(refs, (), 0) for _ in range(ranks)]
    places: dict[str, list[int]] = {}
    for i, ref in enumerate(refs):
        places.setdefault(ref.group_id, []).append(i)
    costs = {name: _cost(refs, rows, shares_prefix) for name, rows in places.items()}
    load = [(0.0, rank) for rank in range(ranks)]  # a heap; among equal loads the first rank is taken
    held: list[list[int]] = [[] for _ in range(ranks)]
    for name in sorted(costs, key=lambda name: -costs[name]):  # stable: groups of equal cost keep their order
        least, rank = load[0]
        heapq.heapreplace(load, (least + costs[name], rank))
        held[rank] += places[name]
    mine = [tuple(sorted(rows)) for rows in held]
    chosen = [Refs(refs[i] for i in rows) for rows in mine]
    count = 0
    if ranks > 1:
        count = max(count_microbatches(rows, max_tokens, shares_prefix=shares_prefix) for rows in chosen)
    return [
        Share(rows, at, count) if rows else Share(Refs(refs[:1]), (), count, idle=True)
        for rows, at in zip(chosen, mine)
    ]


def in_order(parts: Sequence[tuple[Share, Sequence[T]]]) -> list[T]:
    """Return the results of all shares in the order of the rows before they were divided."""
    found = {at: value for share, values in parts for at, value in zip(share.rows, values)}
    return [found[at] for at in range(len(found))]


def count_microbatches(refs: Refs, max_tokens: int, *, shares_prefix: bool = True) -> int:
    """Return the number of micro-batches of at most `max_tokens` tokens that these rows make. The rule is that of
    `batch.make_microbatches`: a prompt counts once per group and micro-batch."""
    trajectories: dict[str, dict[str, list[int]]] = {}
    for i, ref in enumerate(refs):
        trajectories.setdefault(ref.group_id, {}).setdefault(ref.trajectory_id, []).append(i)
    count, used, prompt_of = 0, 0, ""
    for group_id, members in trajectories.items():
        for rows in members.values():
            prompt = refs[rows[0]].prompt_tokens
            own = sum(refs[i].total_tokens - prompt for i in rows)
            shared = shares_prefix and count > 0 and prompt_of == group_id
            cost = own + (0 if shared else prompt if shares_prefix else prompt * len(rows))
            if count and used + cost <= max_tokens:
                used += cost
            else:
                count += 1
                used = own + (prompt if shares_prefix else prompt * len(rows))
            prompt_of = group_id
    return count


def _cost(refs: Refs, rows: Sequence[int], shares_prefix: bool) -> float:
    """Return the predicted work of a group: its distinct tokens, and attention over each row."""
    prompt = refs[rows[0]].prompt_tokens
    total = 0.0
    for k, i in enumerate(rows):
        own = refs[i].total_tokens - (prompt if shares_prefix and k else 0)
        total += own * (1 + refs[i].total_tokens / ATTENTION_TOKENS)
    return total
