"""The vision tower of a model: the module of transformers, computed with the weights that were published."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from verl.media_tokens import Picture
from verl.models.families import ImageFamily, family_of
from verl.rollout.embedded.features import Features, features_of


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
        delattr(base, family.language)
        kind: Any = type(base.get_submodule(family.tower))
        tower = kind._from_config(copy.deepcopy(config.vision_config), dtype=dtype).to(device).eval()
        setattr(base, family.tower, tower)
        self._shapes = {f"{family.tower}.{name}": t.shape for name, t in tower.state_dict().items()}
        self._encoder, self._dtype, self._device = _Encoder(base), dtype, device
        for tensor in tower.parameters():  # of the module only the structure and the buffers are used
            tensor.data = tensor.new_zeros(()).expand(tensor.shape)

    def empty(self) -> dict[str, Tensor]:
        """Return memory for the weights of a version, by name."""
        return {n: torch.empty(shape, dtype=self._dtype, device=self._device) for n, shape in self._shapes.items()}

    @torch.inference_mode()
    def encode(self, picture: Picture, weights: Mapping[str, Tensor]) -> Features:
        """Return the features of an image under these weights."""
        given = picture.patches.to(self._device), torch.tensor([picture.grid], device=self._device)
        return features_of(functional_call(self._encoder, {f"base.{name}": t for name, t in weights.items()}, given))


class _Encoder(nn.Module):
    """Calls the tower by the function of its model, which names the results."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, patches: Tensor, grid: Tensor) -> Any:
        return self.base.get_image_features(patches, grid, return_dict=True)
