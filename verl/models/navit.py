"""The image processor of Kimi K2.5: that of transformers needs torchvision, this one computes the same without it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.errors import Refused

DEFAULTS: Mapping[str, Any] = {
    "size": {"max_height": 512, "max_width": 512},
    "max_patches": 16384,
    "patch_size": 14,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}
"""The settings that a file may lack, as in transformers. The size is in patches."""
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}

_RENAMED = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}


class NavitProcessor:
    """Scales images down to a number of patches, without upscaling, and pads them at the right and below to whole
    tokens."""

    def __init__(self, file: Path) -> None:
        given = json.loads(file.read_text())
        given = _published(given.get("image_processor", given), file)
        for key, value in _FIXED.items():
            if given.get(key, value) != value:
                raise Refused(f"{file}: {key}={given[key]!r}, and images are read with {key}={value!r} only")
        self.settings = {key: given.get(key) or value for key, value in DEFAULTS.items()}
        if len({*self.settings["size"].values()}) > 1:
            raise Refused(
                f"{file}: size={self.settings['size']!r}, and images are read with one limit of both sides only"
            )

    def sides(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the height and width to which an image is scaled, and those to which it is padded then."""
        patch, most = self.settings["patch_size"], self.settings["size"]["max_height"]
        count = max(1.0, height // patch) * max(1.0, width // patch)
        scale = min(1.0, math.sqrt(self.settings["max_patches"] / count), *(most * patch / s for s in (height, width)))
        rows, columns = (min(max(1, int(side * scale)), most * patch) for side in (height, width))
        token = patch * self.settings["merge_size"]
        return (rows, columns), (math.ceil(rows / token) * token, math.ceil(columns / token) * token)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> dict[str, Tensor]:
        """Return the patches [P, 3, side, side] of one image, and its grid."""
        (image,), patch = images, self.settings["patch_size"]
        scaled, padded = self.sides(image.height, image.width)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].contiguous()
        if scaled != (image.height, image.width):
            pixels = F.interpolate(pixels, size=scaled, mode="bicubic", align_corners=False, antialias=True)
        pixels = F.pad(pixels, (0, padded[1] - scaled[1], 0, padded[0] - scaled[0])).float()
        unit = 1.0 / self.settings["rescale_factor"]  # as transformers: one scale and shift for both steps
        mean, std = (torch.tensor(self.settings[key])[:, None, None] * unit for key in ("image_mean", "image_std"))
        rows, columns = padded[0] // patch, padded[1] // patch
        cut = ((pixels - mean) / std).view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
        return {
            "pixel_values": cut.reshape(rows * columns, 3, patch, patch),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }


def _published(given: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the settings by the names of transformers. The folders that Moonshot published have others."""
    own = dict(given.get("media_proc_cfg") or {})
    if (fixed := own.get("fixed_output_tokens")) is not None:
        raise Refused(f"{file}: fixed_output_tokens={fixed!r}, and images are read without it only; set it to null")
    renamed = {new: own[old] for old, new in _RENAMED.items() if old in own}
    if (side := own.get("patch_limit_on_one_side")) is not None:
        renamed["size"] = {"max_height": side, "max_width": side}
    return {**given, **own, **renamed}
