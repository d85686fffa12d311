"""The vision tower of a model: the module of transformers, computed with the weights that were published."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from verl.models.families import ImageFamily, family_of


def tower_of(config: Any, dtype: torch.dtype, device: torch.device) -> Tower | None:
    """Return the vision tower of a model; None: the model reads text alone."""
    family = family_of(config)
    return None if family is None else Tower(config, family, dtype, device)


class Tower:
    """The part of a model that encodes images, without weights of its own."""

    def __init__(self, config: Any, family: ImageFamily, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModel

        with torch.device("meta"):
            base = AutoModel.from_config(copy.deepcopy(config), dtype=dtype)
        tower = base.get_submodule(family.tower).state_dict(prefix=f"{family.tower}.")
        self._shapes = {name: tuple(t.shape) for name, t in tower.items()}
        self._dtype, self._device = dtype, device

    def empty(self) -> dict[str, Tensor]:
        """Return memory for the weights of a version, by name."""
        return {n: torch.empty(shape, dtype=self._dtype, device=self._device) for n, shape in self._shapes.items()}
