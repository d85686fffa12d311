"""The routes of packed tokens: the experts that computed each token in the rollout, for the trainer to compute with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.types import NO_ROUTE, ROUTES, Segment


def routes_of(run: Sequence[Segment]) -> np.ndarray | None:
    """Return the routes [t, layers, k] of a run of segments; None if no segment has any."""
    if not any(ROUTES in s.side for s in run):
        return None
    whole = joined_routes([(s.side.get(ROUTES), len(s.ids)) for s in run])
    return None if whole is None else whole.permute(2, 0, 1).numpy()


def joined_routes(parts: Sequence[tuple[np.ndarray | None, int]]) -> Tensor | None:
    """Return the routes [layers, k, T] of consecutive runs, each (routes [t, layers, k], t), with `NO_ROUTE` for a run
    without routes; None if no run has any. Raise ValueError for routes of different models."""
    given = [routes for routes, _ in parts if routes is not None]
    if not given:
        return None
    if len(shapes := {routes.shape[1:] for routes in given}) > 1:
        raise ValueError(f"routes of [layers, experts] {sorted(shapes)} in one batch: they are of different models")
    each, kind = given[0].shape[1:], np.result_type(*given)
    whole = [np.full((n, *each), NO_ROUTE, kind) if routes is None else routes for routes, n in parts]
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(whole).transpose(1, 2, 0)))


def concat_routes(parts: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Return the routes of consecutive batches, each (routes [layers, k, t], t), as `joined_routes` does."""
    return joined_routes([(None if r is None else r.permute(2, 0, 1).numpy(), n) for r, n in parts])
