"""The vision and the audio tower of a model: the modules of transformers, computed with the weights that were
published."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from verl.media_tokens import Picture
from verl.models.families import ImageFamily, family_of
from verl.rollout.embedded.features import Features, encoded_alone


def tower_of(config: Any, dtype: torch.dtype, device: torch.device) -> Tower | None:
    """Return the vision tower of a model, and its audio tower; None: the model reads text alone."""
    family = family_of(config)
    return None if family is None else Tower(config, family, dtype, device)


class Tower:
    """The part of a model that encodes images, without weights of its own."""

    def __init__(self, config: Any, family: ImageFamily, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModel

        with torch.device("meta"):
            base = AutoModel.from_config(copy.deepcopy(config), dtype=dtype)
        delattr(base, family.language)
        self._shapes = dict[str, torch.Size]()
        for name in family.encoder:
            sound = family.sounds is not None and name == family.sounds.tower
            part = _built(type(base.get_submodule(name)), config, dtype, sound=sound).to(device).eval()
            setattr(base, name, part)
            self._shapes |= {f"{name}.{key}": tensor.shape for key, tensor in part.state_dict().items()}
            for tensor in part.parameters():  # of the module only the structure and the buffers are used
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
        for name in family.bare:
            self._shapes[name] = (shape := getattr(base, name).shape)
            setattr(base, name, nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), False))
        self._encoder, self._dtype, self._device = _Encoder(base, family, config), dtype, device

    def empty(self) -> dict[str, Tensor]:
        """Return memory for the weights of a version, by name."""
        return {n: torch.empty(shape, dtype=self._dtype, device=self._device) for n, shape in self._shapes.items()}

    @torch.inference_mode()
    def encode(self, picture: Picture, weights: Mapping[str, Tensor]) -> Features:
        """Return the features of an image under these weights."""
        named = {f"base.{name}": tensor for name, tensor in weights.items()}
        found: Features = functional_call(self._encoder, named, (picture, self._device))
        return found


def _built(kind: Any, config: Any, dtype: torch.dtype, *, sound: bool) -> nn.Module:
    """Return a module of this class: a tower, by its own configuration, or a projector by that of the whole model.
    sound: it is the audio tower"""
    from transformers import PreTrainedModel

    if issubclass(kind, PreTrainedModel):
        own = config.audio_config if sound else config.vision_config
        tower: nn.Module = kind._from_config(copy.deepcopy(own), dtype=dtype)
        return tower
    projector: nn.Module = kind(copy.deepcopy(config))
    return projector.to(dtype)


class _Encoder(nn.Module):
    """Calls the tower by the function of its model, which names the results."""

    def __init__(self, base: Any, family: ImageFamily, config: Any) -> None:
        super().__init__()
        self.base, self._family, self._config = base, family, config

    def forward(self, picture: Picture, device: torch.device) -> Features:
        return encoded_alone(self.base, self._family, self._config, picture, device)
