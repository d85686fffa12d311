"""The features of images by a tower that is frozen: they never change, and are kept across passes and steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verl.media_tokens import Picture

KEPT_BYTES = 256 << 20
"""The features of images that are kept, at most."""
Encoded = tuple[Tensor, tuple[Tensor, ...]]
"""The features [n, H] of an image, and those that layers of the decoder add, each [n, H]."""


class KeptFeatures:
    """Features of images in host memory. Each image is encoded alone, so that its bits do not depend on what else a
    pass has; if there is no space, the least recently used ones are dropped. encode: encodes one image."""

    def __init__(self, encode: Callable[[Picture], Encoded], max_bytes: int = KEPT_BYTES) -> None:
        self._encode, self._max_bytes = encode, max_bytes
        self._kept, self._nbytes = OrderedDict[str, Encoded](), 0

    def of(self, pictures: Mapping[str, Picture], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Return the features [n, H] of each image, and those that layers of the decoder add, of all images [N, H]."""
        found = [self._of(name, picture) for name, picture in pictures.items()]
        deeper = [torch.cat(states).to(device) for states in zip(*(deeper for _, deeper in found), strict=True)]
        return [features.to(device) for features, _ in found], deeper

    def _of(self, name: str, picture: Picture) -> Encoded:
        found = self._kept.get(name)
        if found is None:
            with torch.no_grad():
                features, deeper = self._encode(picture)
            found = self._kept[name] = features.cpu(), tuple(states.cpu() for states in deeper)
            self._nbytes += _nbytes(found)
        self._kept.move_to_end(name)
        while self._nbytes > self._max_bytes:
            self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])
        return found


def _nbytes(encoded: Encoded) -> int:
    return encoded[0].nbytes + sum(states.nbytes for states in encoded[1])
