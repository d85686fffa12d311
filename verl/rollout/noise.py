"""Exploration noise: Gaussian noise on weights of norms while an engine samples (QeRL's adaptive quantisation noise,
arXiv 2510.11696). No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl.types import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """The noise of each version of the policy. It is a function of these numbers and the version alone, so that
    replicas, and a run that continues, have the same noise."""

    seed: int
    """That of the run."""
    sigma_start: float
    """The standard deviation in the first stage."""
    sigma_end: float
    """The standard deviation in the last stage. It falls exponentially between them."""
    steps: int
    """The number of steps of all stages together. Later steps are in the last stage."""
    sync_every: int
    """The number of steps between two versions."""
    stages: int = 10
    """The number of stages of equal length."""

    def sigma_of(self, version: int) -> float:
        """Return the standard deviation of the noise on this version."""
        stage = min(self.stages - 1, version * self.sync_every * self.stages // self.steps)
        share = stage / max(1, self.stages - 1)
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** share

    def drawn(self, version: int, name: str, size: int) -> np.ndarray:
        """Return the noise [size] float32 that is added to the weight of this name in this version."""
        generator = np.random.default_rng(derive_seed(self.seed, "noise", version, name))
        return generator.standard_normal(size, np.float32) * np.float32(self.sigma_of(version))
