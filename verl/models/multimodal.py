"""Model families that read images, one row for each: the number and positions of an image's tokens, and the part of the
model that reads them. A family without a row is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.errors import Refused
from verl.media_tokens import Grid, MediaTokens, Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFamily:
    """The facts of a model family that reads images."""

    axes: int
    """The number of positions of each token."""
    tokens: Callable[[Any, Grid], int]
    """(config, grid) -> the number of tokens of an image."""
    positions: Callable[[Any, Grid], tuple[np.ndarray, int]]
    """(config, grid) -> the positions [axes, tokens] of an image's tokens, of which the first is 0, and the position
    of the token after them."""
    language: str
    """The language model, below the base model."""


def _merged(config: Any, grid: Grid) -> Grid:
    """Return the grid of an image's tokens, each of which has the content of several patches."""
    size, (frames, rows, columns) = config.vision_config.spatial_merge_size, grid
    return frames, rows // size, columns // size


def _merged_tokens(config: Any, grid: Grid) -> int:
    return int(np.prod(_merged(config, grid)))


def _grid_positions(config: Any, grid: Grid) -> tuple[np.ndarray, int]:
    """Return the frame, row and column of each token. The text goes on after the larger side of the image."""
    merged = _merged(config, grid)
    return np.indices(merged).reshape(3, -1), max(merged[1:])


_QWEN = ImageFamily(axes=3, tokens=_merged_tokens, positions=_grid_positions, language="language_model")
FAMILIES: Mapping[str, ImageFamily] = {"qwen2_vl": _QWEN, "qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN}
"""The families by the `model_type` of config.json."""


def family_of(config: Any) -> ImageFamily | None:
    """Return the row of a model's configuration; None: the model reads text alone, as far as verl knows."""
    return FAMILIES.get(config.model_type)


def with_pictures(batch: Batch, pictures: Mapping[str, Picture], config: Any) -> Batch:
    """Return the batch with the content of its media, and with the positions [axes, T] of the model's family. Raise
    ValueError for media of a model that reads none, and for an image with another number of tokens than its
    placeholders."""
    family = family_of(config)
    if batch.media is None:
        return batch if family is None else replace(batch, positions=batch.positions.expand(family.axes, -1))
    if family is None:
        known = ", ".join(FAMILIES)
        raise Refused(f"model_type {config.model_type!r} has no row for images; those with one are {known}")
    media = batch.media.with_pictures(pictures)
    places = {name: family.positions(config, picture.grid) for name, picture in media.pictures.items()}
    return replace(batch, media=media, positions=_positions(batch, media, places, family.axes))


def _positions(batch: Batch, media: MediaTokens, places: Mapping[str, tuple[np.ndarray, int]], axes: int) -> Tensor:
    """Return the positions [axes, T] of all tokens. Text counts on from where the parent of its segment ends; an image
    has its own positions from there."""
    medium, feature = media.medium.numpy(), media.feature.numpy()
    out = np.zeros((axes, batch.num_tokens), np.int64)
    after = np.zeros(len(batch.parent), np.int64)  # the position of the token after each segment
    for s, parent in enumerate(batch.parent):
        start, end = int(batch.seg_start[s]), int(batch.seg_start[s + 1])
        now = int(after[parent]) if parent >= 0 else 0
        kind = medium[start:end]
        begins = (np.diff(kind, prepend=-2) != 0) | ((kind >= 0) & (feature[start:end] == 0))
        edges = [*(start + np.flatnonzero(begins)).tolist(), end]
        for a, b in zip(edges, edges[1:]):
            if medium[a] < 0:
                out[:, a:b] = now + np.arange(b - a)
                now += b - a
                continue
            name = media.references[medium[a]]
            own, length = places[name]
            if own.shape[1] != b - a:
                raise ValueError(f"image {name} has {own.shape[1]} tokens by its size, and {b - a} placeholders")
            out[:, a:b] = now + own
            now += length
        after[s] = now
    return torch.from_numpy(out)
