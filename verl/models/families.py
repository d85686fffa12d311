"""Model families that read images, one row for each: the number and positions of an image's tokens, the part of the
model that reads them. A family without a row is refused. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verl.types import Grid, Medium

Part = Literal["vision", "projector", "language"]
"""The parts of a model that reads images."""


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
    tower: str
    """The vision tower, below the base model."""
    projector: tuple[str, ...]
    """The modules that map the tower's features to the width of the language model, below the base model; they may be
    within the tower. The first one is always there."""

    def part_of(self, name: str) -> Part:
        """Return the part of the model to which the parameter with this name belongs."""
        name = name.removeprefix("model.")
        if name.startswith(tuple(f"{module}." for module in self.projector)):
            return "projector"
        return "vision" if name.startswith(f"{self.tower}.") else "language"

    @property
    def encoder(self) -> tuple[str, ...]:
        """The modules that encode images, below the base model, none of which is within another one."""
        return self.tower, *(module for module in self.projector if not module.startswith(f"{self.tower}."))


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


_QWEN = ImageFamily(
    axes=3,
    tokens=_merged_tokens,
    positions=_grid_positions,
    language="language_model",
    tower="visual",
    projector=("visual.merger", "visual.deepstack_merger_list"),
)
FAMILIES: Mapping[str, ImageFamily] = {"qwen2_vl": _QWEN, "qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN}
"""The families by the `model_type` of config.json."""


def family_of(config: Any) -> ImageFamily | None:
    """Return the row of a model's configuration; None: the model reads text alone, as far as verl knows."""
    return FAMILIES.get(config.model_type)


def positions_from(
    now: int, tokens: int, media: Sequence[Medium], own: Mapping[str, tuple[np.ndarray, int]], axes: int
) -> tuple[np.ndarray, int]:
    """Return the positions [axes, tokens] of a run of tokens of which the first has position `now`, and the position of
    the token after them. Text counts on, and an image has its own positions from there. own: by reference, the result
    of `ImageFamily.positions`. Raise ValueError for an image with another number of tokens than its placeholders."""
    out, at = np.empty((axes, tokens), np.int64), 0
    for m in media:
        out[:, at : m.start] = now + np.arange(m.start - at)
        now += m.start - at
        places, length = own[m.reference]
        if places.shape[1] != m.tokens:
            raise ValueError(
                f"image {m.reference} has {places.shape[1]} tokens by its size, and {m.tokens} placeholders"
            )
        out[:, m.start : m.end] = now + places
        now, at = now + length, m.end
    out[:, at:] = now + np.arange(tokens - at)
    return out, now + tokens - at


def auto_class(config: Any) -> Any:
    """Return the class of transformers that builds and loads the model of a configuration."""
    import transformers

    if family_of(config) is None:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText
