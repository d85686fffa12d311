"""The images of a request: their content, and the positions of all tokens of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl.models.families import ImageFamily, family_of, positions_from
from verl.rollout.base import RolloutContext
from verl.types import Medium, Segment

if TYPE_CHECKING:
    from verl.media_tokens import Picture


@dataclass(frozen=True, slots=True)
class RequestImages:
    """The images of a prompt of P tokens."""

    media: tuple[Medium, ...]
    pictures: Mapping[str, Picture]
    """The content of each image, by reference."""
    positions: np.ndarray
    """The positions [axes, P] of its tokens, moved so that the token after the prompt has position P. RoPE depends on
    differences alone, so every later token has the number of tokens before it as its position, as in a text."""

    features: np.ndarray
    """The indices of all tokens that are features of images, in order; other tokens of an image are text."""

    def positions_of(self, tokens: int) -> np.ndarray:
        """Return the positions [axes, tokens] of the prompt and the text after it; at least those of the prompt."""
        axes, prompt = self.positions.shape
        after = np.broadcast_to(np.arange(prompt, max(prompt, tokens)), (axes, max(0, tokens - prompt)))
        return np.concatenate([self.positions, after], axis=1)

    def numbers(self, tokens: int) -> np.ndarray:
        """Return the number of each token's image in the prompt, with the text after it, `tokens` in all; -1: text."""
        found = np.full(max(tokens, self.positions.shape[1]), -1)
        for number, m in enumerate(self.media):
            found[m.start : m.end] = number
        return found[:tokens]


class ImageReader:
    """Reads the images of requests for a model, and checks them."""

    def __init__(self, context: RolloutContext) -> None:
        self._config, self._family, self._content = context.hf_config, family_of(context.hf_config), context.pictures
        self._feature_ids = self._family.replaced_ids(self._config) if self._family is not None else ()

    @property
    def reads(self) -> bool:
        """True if the model reads images, and their content can be read."""
        return self._family is not None and self._content is not None

    def of(self, what: str, ids: np.ndarray, media: Sequence[Medium]) -> RequestImages | None:
        """Return the images of a prompt with these ids; None: it has none. Raise ValueError for media that do not fit
        its tokens. `what` names the request."""
        if not media:
            return None
        family, content = self._family, self._content
        assert family is not None and content is not None, "an engine that reads no images refuses them"
        try:
            spans = Segment(ids=ids, source="prompt", media=tuple(media)).media
            pictures = content.of({m.reference: None for m in spans})
            positions, after = np.arange(len(ids))[None], len(ids)
            if family.positions is not None:
                places = {
                    name: family.places(self._config, p.grid, p.clip, sound=p.sound) for name, p in pictures.items()
                }
                own = {name: found for name, found in places.items() if found is not None}
                positions, after = positions_from(0, len(ids), spans, own, family.axes)
            features = [self._features(ids, m, family, pictures[m.reference]) for m in spans]
        except ValueError as e:
            raise ValueError(f"{what}: {e}") from e
        return RequestImages(spans, pictures, positions + (len(ids) - after), np.concatenate(features))

    def _features(self, ids: np.ndarray, m: Medium, family: ImageFamily, picture: Picture) -> np.ndarray:
        """Return the indices of the tokens that are an image's features."""
        found = m.start + np.flatnonzero(np.isin(ids[m.start : m.end], self._feature_ids))
        if (wanted := family.features(self._config, picture.grid, sound=picture.sound)) != len(found):
            raise ValueError(f"image {m.reference} has {wanted} features by its size, and {len(found)} tokens for them")
        return found
