"""The features of images: each image is encoded once, and prompts take theirs in the place of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.media_tokens import Picture
from verl.models.encode import encode_pictures
from verl.models.families import ImageFamily
from verl.models.kept import KEPT_BYTES, KeptByBytes
from verl.rollout.embedded.images import RequestImages


@dataclass(frozen=True, slots=True)
class Features:
    """The features of an image of n tokens."""

    tokens: Tensor
    """[n, hidden], in place of embeddings."""
    deeper: tuple[Tensor, ...]
    """[n, hidden] for each of the first layers, added to its output."""

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(states.nbytes for states in self.deeper)


def encoded_alone(base: Any, family: ImageFamily, config: Any, picture: Picture, device: torch.device) -> Features:
    """Return the features of one image. base: the model without its head."""
    (tokens,), deeper = encode_pictures(base, family, config, [picture], device)
    return Features(tokens, tuple(deeper))


@dataclass(frozen=True, slots=True)
class SeenImages:
    """The images of T tokens."""

    positions: Tensor
    """The positions [axes, T] of the tokens."""
    where: np.ndarray
    """The indices [m] of the tokens that are features, in order."""
    features: Tensor
    """The features [m, hidden] in place of the embeddings of these tokens."""
    deeper: tuple[Tensor, ...]
    """The features [m, hidden] that are added to the output of each of the first layers."""

    def replace_in(self, embeddings: Tensor) -> None:
        """Write the features over the embeddings [T, hidden] of their tokens."""
        embeddings.index_copy_(0, self._index(embeddings.device), self.features.to(embeddings.dtype))

    def add_to(self, states: Tensor, layer: int) -> None:
        """Add the features of a layer to its output [T, hidden]."""
        states.index_add_(0, self._index(states.device), self.deeper[layer].to(states.dtype))

    def _index(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.where).to(device)

    def part(self, start: int, end: int) -> SeenImages:
        """Return the images of tokens start .. end-1."""
        a, b = np.searchsorted(self.where, (start, end))
        deeper = tuple(states[a:b] for states in self.deeper)
        return SeenImages(self.positions[:, start:end], self.where[a:b] - start, self.features[a:b], deeper)


def packed(
    parts: Sequence[SeenImages | None], spans: Sequence[tuple[int, int]], device: torch.device
) -> SeenImages | None:
    """Return the images of packed chunks from those of each, or None if none has any. spans: the first token of each
    chunk in its sequence, and the one after its last."""
    some = [part for part in parts if part is not None]
    if not some:
        return None
    positions, where, start = [], [], 0
    for part, span in zip(parts, spans, strict=True):
        if part is None:
            positions.append(torch.arange(*span, device=device).expand(len(some[0].positions), -1))
        else:
            positions.append(part.positions)
            where.append(part.where + start)
        start += span[1] - span[0]
    return SeenImages(
        torch.cat(positions, dim=1),
        np.concatenate(where),
        torch.cat([part.features for part in some]),
        tuple(torch.cat(states) for states in zip(*(part.deeper for part in some), strict=True)),
    )


class EncodedImages:
    """The features of images under the live weights: each image is encoded once, whichever requests have it. If there
    is no space, the least recently used ones are dropped."""

    def __init__(self, encode: Callable[[Picture], Features], max_bytes: int = KEPT_BYTES) -> None:
        self._encode, self._kept = encode, KeptByBytes[Features](max_bytes, lambda found: found.nbytes)
        self.encoded = 0
        """The number of images that were encoded."""

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def clear(self) -> None:
        """Drop all features, since the weights change or memory is needed."""
        self._kept.clear()

    def seen(self, images: RequestImages, tokens: int) -> SeenImages:
        """Return the images of a prompt with the text after it, of `tokens` tokens in all."""
        own = self.own(images)
        features = [own[m.reference] for m in images.media]
        device = features[0].tokens.device
        return SeenImages(
            torch.from_numpy(images.positions_of(tokens)).to(device),
            images.features,
            torch.cat([one.tokens for one in features]),
            tuple(torch.cat(states) for states in zip(*(one.deeper for one in features), strict=True)),
        ).part(0, tokens)

    def own(self, images: RequestImages) -> dict[str, Features]:
        """Return the features of a prompt's images, by reference."""
        return {name: self._of(name, picture) for name, picture in images.pictures.items()}

    def _of(self, name: str, picture: Picture) -> Features:
        return self._kept.of(name, partial(self._made, picture))

    def _made(self, picture: Picture) -> Features:
        self.encoded += 1
        return self._encode(picture)
