"""Exploration noise in the native engine: the norms before attention and feed-forward have two sets of weights, of
which one is in the memory that the forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.rollout.native.architecture import Shape
from verl.rollout.native.projections import input_norms
from verl.rollout.native.weights import Weights
from verl.rollout.noise import NoiseSchedule


@dataclass(slots=True)
class NoisyNorm:
    """The weight [hidden] of a norm."""

    name: str
    """Its Hugging Face name."""
    live: Tensor
    """The memory that the forward pass reads."""
    clean: Tensor
    noisy: Tensor


class NormNoise:
    """Puts noise on the norms of a version of the weights, and takes it off again. The products read the same weights
    either way: noise on the input of a product is noise on all columns of its weight."""

    def __init__(self, schedule: NoiseSchedule, shape: Shape) -> None:
        self._schedule, self._shape = schedule, shape
        self._norms: list[NoisyNorm] = []
        self.sigma = 0.0  # of the version that was drawn last
        self._acts = False

    def attach(self, weights: Weights) -> None:
        """Take these weights, which have just been read and have no noise."""
        self._norms = [
            NoisyNorm(name, norm.weight, norm.weight.clone(), norm.weight.clone())
            for i, layer in enumerate(weights.layers)
            for name, norm in zip(input_norms(self._shape, i), (layer.norm, layer.mlp_norm))
        ]
        self._acts = False

    def draw(self, version: int) -> None:
        """Draw the noise of a version, in place of that of an earlier one."""
        self.sigma = self._schedule.sigma_of(version)
        for one in self._norms:
            noise = torch.from_numpy(self._schedule.drawn(version, one.name, len(one.clean)))
            one.noisy.copy_(one.clean.float() + noise.to(one.clean.device))
        before, self._acts = self._acts, False
        self.use(before)

    def use(self, acts: bool) -> None:
        """Compute with noise from now on, or without it."""
        if acts != self._acts:
            self._acts = acts
            for one in self._norms:
                one.live.copy_(one.noisy if acts else one.clean)
