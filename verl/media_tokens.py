"""The tokens of a pack that are placeholders of media: which feature of which medium replaces the embedding of each.

A medium that several rows read is stored once, however often its tokens are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from verl.models.clips import Clip
from verl.types import Grid, Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image, a video or a sound as a tower reads it, in float32."""

    patches: Tensor
    """Its patches [P, D], its pixels [1, 3, H, W], its tiles [P, 3, H, W], or its spectrogram [mels, frames]."""
    grid: Grid
    """The frames, rows and columns of its patches; of tiles their number, and the rows and columns that they form; of
    a sound its frames, and 1."""
    clip: Clip | None = None
    """The places of the tokens of a video's frames; None: it is none."""
    sound: bool = False
    """It is a sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """The media of a pack of T tokens."""

    references: tuple[str, ...]
    """The distinct media."""
    medium: Tensor
    """[T] int64: the index of each token's medium in `references`; -1: the token is text."""
    feature: Tensor
    """[T] int64: which of that medium's tokens it is; 0 where the token is text."""
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    """The content of the media by reference; empty until a worker has read it."""

    def at(self, tokens: Tensor) -> MediaTokens | None:
        """Return the media of the tokens with these indices, in this order; None if they are all text."""
        medium, feature = self.medium[tokens], self.feature[tokens]
        used = torch.unique(medium[medium >= 0])
        if not len(used):
            return None
        number = torch.full((len(self.references) + 1,), -1)  # the last one is for text, whose medium is -1
        number[used] = torch.arange(len(used))
        references = tuple(self.references[i] for i in used.tolist())
        pictures = {name: self.pictures[name] for name in references if name in self.pictures}
        return MediaTokens(references=references, medium=number[medium], feature=feature, pictures=pictures)

    def with_pictures(self, pictures: Mapping[str, Picture]) -> MediaTokens:
        return replace(self, pictures={name: pictures[name] for name in self.references})


def place_media(of_segments: Sequence[Sequence[Medium]], seg_start: np.ndarray) -> MediaTokens | None:
    """Return the media of a pack from those of each of its segments; None if there are none."""
    if not any(of_segments):
        return None
    numbers: dict[str, int] = {}
    medium, feature = np.full(int(seg_start[-1]), -1, np.int64), np.zeros(int(seg_start[-1]), np.int64)
    for start, media in zip(seg_start, of_segments):
        for m in media:
            tokens = slice(int(start) + m.start, int(start) + m.end)
            medium[tokens] = numbers.setdefault(m.reference, len(numbers))
            feature[tokens] = np.arange(m.tokens)
    return MediaTokens(references=tuple(numbers), medium=torch.from_numpy(medium), feature=torch.from_numpy(feature))


def joined_media(parts: Sequence[tuple[MediaTokens | None, int]]) -> MediaTokens | None:
    """Return the media of packs that are joined, from those of each pack and its number of tokens. A medium of several
    packs is stored once."""
    if all(media is None for media, _ in parts):
        return None
    numbers: dict[str, int] = {}
    mediums, features, pictures = [], [], dict[str, Picture]()
    for media, tokens in parts:
        if media is None:
            mediums.append(torch.full((tokens,), -1))
            features.append(torch.zeros(tokens, dtype=torch.int64))
            continue
        mine = [numbers.setdefault(name, len(numbers)) for name in media.references]
        mediums.append(torch.tensor([*mine, -1])[media.medium])
        features.append(media.feature)
        pictures |= media.pictures
    return MediaTokens(
        references=tuple(numbers), medium=torch.cat(mediums), feature=torch.cat(features), pictures=pictures
    )
