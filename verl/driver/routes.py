"""The routes of a row: for each of its tokens the experts that computed it in the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verl.recorded import RecordedCall
from verl.types import NO_ROUTE, ROUTES, Segment


def with_routes(segments: Sequence[Segment], record: Sequence[RecordedCall]) -> tuple[Segment, ...]:
    """Return the segments of a row with the side channel of routes, if calls have routes. A token has those of the
    first call that computed it after the same tokens and images; `NO_ROUTE` if there is none."""
    calls = [call for call in record if call.completion.routes is not None]
    if not calls:
        return tuple(segments)
    ids = np.concatenate([s.ids for s in segments])
    starts = np.cumsum([0, *(len(s.ids) for s in segments)])
    media = [m._replace(start=m.start + int(at)) for s, at in zip(segments, starts) for m in s.media]
    routes: np.ndarray | None = None
    for call in calls:
        last = call.completion.routes
        assert last is not None
        if routes is None:
            routes = np.full((len(ids), *last.shape[1:]), NO_ROUTE, last.dtype)
        before = len(call.ids) - len(last)
        found = np.pad(last, ((before, 0), (0, 0), (0, 0)), constant_values=NO_ROUTE) if before else last
        same = call.agreeing(ids, media)
        left = np.flatnonzero((routes[:same] == NO_ROUTE).all((1, 2)))
        routes[left] = found[left]
    assert routes is not None
    return tuple(replace(s, side={**s.side, ROUTES: routes[a:b]}) for s, a, b in zip(segments, starts, starts[1:]))
