"""Uniform random numbers by a counter: each is a pure function of a stream and a position in it (splitmix64).

The host computes them by numpy and a device by torch or Triton, with the same bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def mixed(z: np.ndarray) -> np.ndarray:
    """Return the output function of splitmix64 for each uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a uniform number in [0, 1) per row, float64 [n], from streams uint64 [n] and the position [n] of the drawn
    token in its response."""
    z = mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def plain_uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Do the same on a device: streams [n] as int64 with the bits of the uint64, positions int64 [n]."""
    z = streams + (positions + 1) * _signed(GAMMA)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).to(torch.float64) * 2.0**-53


def _signed(bits: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return bits - (1 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift the bits of int64 to the right and fill up with 0, as for uint64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
