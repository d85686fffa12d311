"""Sounds of a model family: how many of them a model reads, and the tokens in their place. No torch.

The content of a sound in a store begins with what was decided when its row was read (`SoundHead`), as that of a
video."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from verl.errors import Refused

MARK = b"verl sound 1 "
"""The first bytes of the content of a sound in a store."""


@dataclass(frozen=True, slots=True)
class SoundHead:
    """The decision about a sound that was made when its row was read."""

    samples: int
    """The samples of one channel, at the rate of the model."""

    def packed(self) -> bytes:
        """Return the first bytes of the content of the sound, in front of its file."""
        return MARK + json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


def is_sound(content: bytes) -> bool:
    """Return True if the content of a medium, or its beginning, is that of a sound."""
    return content.startswith(MARK)


def unpacked_sound(content: bytes) -> tuple[SoundHead, bytes]:
    """Return what was decided about a sound, and its file."""
    head, _, rest = content.removeprefix(MARK).partition(b"\n")
    return SoundHead(**json.loads(head)), rest


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundRules:
    """How a family reads sounds."""

    tower: str
    """The audio tower with its projection, below the base model."""
    features: Callable[[Any, int], int]
    """(config, frames of the spectrogram) -> the number of a sound's features."""
    padded: bool
    """The processor adds silence up to its longest sound, so a frame that has begun counts; else it does not."""
    alone: bool = False
    """The features of a short sound depend on the longest one that is encoded with it: each is encoded by itself."""


def halved_thrice(config: Any, frames: int) -> int:
    """Return the number of features of a tower that halves frames by three convolutions, within parts of 100 frames,
    each of which has 13 features if it is whole. Raise Refused for parts of another size: transformers counts 13 there
    too."""
    if (window := config.audio_config.n_window) != 50:
        raise Refused(f"audio_config.n_window={window}: sounds are read in parts of 2 x 50 frames, as in Qwen3-Omni")
    whole, rest = divmod(frames, 2 * window)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + 13 * whole


def halved_twice(config: Any, frames: int) -> int:
    """Return the number of features of a tower that halves frames by a convolution, and then by means of pairs."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
