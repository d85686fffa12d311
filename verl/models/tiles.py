"""Layouts and grids of images in tiles, and of those that are scaled to a number of features. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.types import Grid


def tiles_alone(config: Any, grid: Grid) -> Sequence[int | str]:
    """The features of an image in tiles of one size are together."""
    vision, ratio = config.vision_config, config.downsample_ratio
    rows, columns = (int(side // patch * ratio) for side, patch in zip(vision.image_size, vision.patch_size))
    return ["<img>", grid[0] * rows * columns, "</img>"]


def grid_of_tiles(processor: Any, config: Any, height: int, width: int) -> Grid:
    return int(processor.get_number_of_image_patches(height, width)), 1, 1


def square_tile(config: Any, grid: Grid) -> Sequence[int]:
    """An image of one size has a feature for each patch, and the first state if it is kept."""
    vision = config.vision_config
    return [int((vision.image_size // vision.patch_size) ** 2) + (config.vision_feature_select_strategy != "default")]


def one_tile(processor: Any, config: Any, height: int, width: int) -> Grid:
    return 1, 1, 1


def one_tile_without_crops(processor: Any, config: Any, height: int, width: int) -> Grid:
    if processor.do_pan_and_scan:
        raise ValueError("do_pan_and_scan of its processor adds crops of an image, which are not read; set it to false")
    return 1, 1, 1


def pooled_patches(config: Any, grid: Grid) -> int:
    """Return the number of squares of patches that become one feature each."""
    return int(np.prod(grid)) // int(config.vision_config.pooling_kernel_size) ** 2


def filled_grid(processor: Any, config: Any, height: int, width: int) -> Grid | None:
    """Return the rows and columns of patches of an image that is scaled, up or down, to the most whole features."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    side, square = processor.patch_size, processor.pooling_kernel_size
    if not processor.do_resize:
        return None
    most = processor.max_soft_tokens * square**2
    rows, columns = (pixels // side for pixels in get_aspect_ratio_preserving_size(height, width, side, most, square))
    return 1, rows, columns


def marked_tiles(config: Any, grid: Grid) -> Sequence[int | str]:
    """Marks are before each tile, and a line ends after each row of tiles. The whole image is the last tile."""
    vision, (_, rows, columns), around = config.vision_config, grid, "<fake_token_around_image>"
    count = int((vision.image_size // vision.patch_size / config.scale_factor) ** 2)
    found, before = list[int | str](), ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            found += [f"{before}{around}<row_{row}_col_{column}>", count]
            before = ""
        before = "\n"
    return [*found, f"{before}{before}{around}<global-img>", count, around]


def grid_of_marked_tiles(processor: Any, config: Any, height: int, width: int) -> Grid:
    tiles, rows, columns = processor.get_number_of_image_patches(height, width)
    return max(1, tiles), rows, columns


def grid_of_canvas(processor: Any, config: Any, height: int, width: int) -> Grid:
    """Return the rows and columns of tiles on which the processor puts an image."""
    from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas

    side = processor.size["height"]
    sides = get_optimal_tiled_canvas(height, width, processor.max_image_tiles, side)
    rows, columns = (int(pixels) // side for pixels in sides)
    return rows * columns, rows, columns


def unpadded_tiles(config: Any, grid: Grid) -> Sequence[int]:
    """The features of the whole image, and of its tiles without their padding, each row with a learned vector at its
    end. grid: the number of tiles, the height and the width of the image in pixels"""
    from transformers.image_processing_utils import select_best_resolution

    (_, height, width), vision = grid, config.vision_config
    side = vision.image_size // vision.patch_size
    best = select_best_resolution((height, width), config.image_grid_pinpoints)
    rows, columns = (pixels // vision.image_size * side for pixels in best)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    return [side * side + rows * (columns + 1)]


def grid_of_sized_tiles(processor: Any, config: Any, height: int, width: int) -> Grid:
    from transformers.image_processing_utils import select_best_resolution

    if [*map(list, processor.image_grid_pinpoints)] != [*map(list, config.image_grid_pinpoints)]:
        raise ValueError("image_grid_pinpoints of its processor are not those of config.json; make them equal")
    side = config.vision_config.image_size
    rows, columns = select_best_resolution((height, width), config.image_grid_pinpoints)
    return 1 + rows // side * (columns // side), height, width
