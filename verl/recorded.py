"""The record of the calls of a trajectory: what was sampled, and the experts that computed each of its tokens, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl.rollout.base import Completion, GenerateRequest
from verl.types import NO_ROUTE, Medium


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One generate call of a trajectory: its prompt and the sampled completion."""

    prompt_ids: np.ndarray
    completion: Completion
    """Its routes are those of its last tokens: `of` leaves out the ones that earlier calls have."""
    token_ids: list[int]  # the ids as the loop received them
    media: tuple[Medium, ...] = ()  # the images of its prompt

    @staticmethod
    def of(request: GenerateRequest, completion: Completion, earlier: Iterable[RecordedCall]) -> RecordedCall:
        """Return the record of a completed request. Routes of tokens that one of the `earlier` calls has computed after
        the same tokens and images are left out, so that a trajectory has those of each token once."""
        call = RecordedCall(request.prompt_ids, completion, completion.ids.tolist(), request.media)
        if (routes := completion.routes) is None:
            return call
        ids, known = call.ids, 0
        for other in reversed([*earlier]):
            known = max(known, min(other.tokens_with_routes, other.agreeing(ids, request.media)))
            if known and known == other.tokens_with_routes:  # the latest part of the same history
                break
        return replace(call, completion=replace(completion, routes=routes[known:].copy())) if known else call

    @property
    def ids(self) -> np.ndarray:
        """The ids of prompt and answer."""
        return np.concatenate([self.prompt_ids, self.completion.ids])

    @property
    def tokens_with_routes(self) -> int:
        """The number of first tokens that have routes here or in an earlier call."""
        if (routes := self.completion.routes) is None:
            return 0
        unknown = np.flatnonzero((routes == NO_ROUTE).any((1, 2)))
        return len(self.ids) - len(routes) + (int(unknown[0]) if len(unknown) else len(routes))

    def agreeing(self, ids: np.ndarray, media: Sequence[Medium]) -> int:
        """Return how many first tokens of `ids`, with these images, are those of this call, with the same images."""
        whole = self.ids
        n = min(len(ids), len(whole))
        differs = np.flatnonzero(ids[:n] != whole[:n])
        same = int(differs[0]) if len(differs) else n
        given, own = (tuple(m for m in every if m.start < same) for every in (media, self.media))
        return same if given == own else min((m.start for m in (*given, *own)), default=0)
