"""The features of images by a tower that is frozen: they never change, and are kept across passes and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from verl.media_tokens import Picture
from verl.models.kept import KEPT_BYTES, KeptByBytes

Encoded = tuple[Tensor, tuple[Tensor, ...]]
"""The features [n, H] of an image, and those that layers of the decoder add, each [n, H]."""


class KeptFeatures:
    """Features of images in host memory. Each image is encoded alone, so that its bits do not depend on what else a
    pass has. encode: encodes one image."""

    def __init__(self, encode: Callable[[Picture], Encoded], max_bytes: int = KEPT_BYTES) -> None:
        self._encode, self._kept = encode, KeptByBytes[Encoded](max_bytes, _nbytes)

    def of(self, pictures: Mapping[str, Picture], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Return the features [n, H] of each image, and those that layers of the decoder add, of all images [N, H]."""
        found = [self._kept.of(name, partial(self._on_host, picture)) for name, picture in pictures.items()]
        deeper = [torch.cat(states).to(device) for states in zip(*(deeper for _, deeper in found), strict=True)]
        return [features.to(device) for features, _ in found], deeper

    def _on_host(self, picture: Picture) -> Encoded:
        with torch.no_grad():
            features, deeper = self._encode(picture)
        return features.cpu(), tuple(states.cpu() for states in deeper)


def _nbytes(encoded: Encoded) -> int:
    return encoded[0].nbytes + sum(states.nbytes for states in encoded[1])
