"""The routes of tokens: the experts that compute each of them, recorded while a model samples, so that the trainer can
compute with the same ones (router replay)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from verl.errors import Refused
from verl.rollout.native.architecture import Shape
from verl.rollout.native.layers import Experts, FeedForward
from verl.rollout.native.weights import Layer
from verl.types import NO_ROUTE

GROW_STEP = 64  # tokens; the capacity of a row is a multiple


class RecordedExperts(Experts):
    """Experts that append the chosen ones [T, k] of each call to `found`."""

    def __init__(self, base: Experts, found: list[Tensor]) -> None:
        super().__init__(base.router, base.experts, base.chosen, base.normalised, base.stacked, base.shared)
        self._base, self._found = base, found

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share, expert = self._base.routed(x)
        self._found.append(expert)
        return share, expert

    def expert(self, number: int, rows: Tensor) -> FeedForward:
        return self._base.expert(number, rows)


def recording(layer: Layer, found: list[Tensor] | None) -> Layer:
    """Return the layer as it computes while the choices of its experts are appended to `found`; None: unchanged."""
    if found is None or not isinstance(layer.mlp, Experts):
        return layer
    return replace(layer, mlp=RecordedExperts(layer.mlp, found))


class RowRoutes:
    """The routes of the resident rows, [rows, tokens, layers with experts, k]. Raise Refused for a model without
    experts."""

    def __init__(self, shape: Shape, rows: int) -> None:
        if not any(shape.experts):
            raise Refused("rollout.engine_options.replay_routes=true: the model has no experts; leave it out")
        self._each = sum(map(bool, shape.experts)), shape.chosen_experts
        self._dtype = np.dtype(np.int8 if max(shape.experts) <= np.iinfo(np.int8).max + 1 else np.int16)
        self._rows = self.empty(0)[None].repeat(rows, 0)

    def empty(self, tokens: int) -> np.ndarray:
        """Return the routes [tokens, layers, k] of tokens that are not computed."""
        return np.full((tokens, *self._each), NO_ROUTE, self._dtype)

    def joined(self, found: Sequence[Tensor]) -> np.ndarray:
        """Return the routes [T, layers, k] of the tokens of a pass, from the choices [T, k] of each layer."""
        return torch.stack([*found], 1).cpu().numpy().astype(self._dtype)

    def reserve(self, tokens: int) -> None:
        """Make room for this number of tokens per row."""
        if (before := self._rows.shape[1]) < tokens:
            more = -(-max(tokens, before * 3 // 2) // GROW_STEP) * GROW_STEP - before
            self._rows = np.pad(self._rows, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=NO_ROUTE)

    def fill(self, row: int, prompt: np.ndarray) -> None:
        """Let a row begin with the routes of a prompt [P, layers, k]."""
        self.reserve(len(prompt))
        self._rows[row] = NO_ROUTE
        self._rows[row, : len(prompt)] = prompt

    def write(self, lo: int, positions: np.ndarray, found: Sequence[Tensor]) -> None:
        """Write the choices [n or more, k] of each layer for the tokens at `positions` [n] of the rows from `lo` on;
        nothing for a row at -1, which has ended."""
        live = np.flatnonzero(positions >= 0)
        self._rows[lo + live, positions[live]] = self.joined(found)[live]

    def move(self, sources: np.ndarray, holes: np.ndarray) -> None:
        """Move each row of `sources` to the row of `holes` at the same place."""
        self._rows[holes] = self._rows[sources]

    def of(self, row: int, tokens: int) -> np.ndarray:
        """Return a copy of the routes of the first tokens of a row; `NO_ROUTE` for those that are not computed."""
        self.reserve(tokens)
        return self._rows[row, :tokens].copy()
