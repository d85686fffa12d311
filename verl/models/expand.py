"""The tokens of images in a prompt: what replaces the token that a chat template writes for an image, and the tokens
of a family that a policy must not sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from verl.errors import Refused
from verl.models.families import ImageFamily, banned_ids, family_of
from verl.types import Grid


class Expansion(NamedTuple):
    """The tokens that replace the one token which the chat template writes for an image. The image's own are the
    `tokens` from its first to its last feature; all others are text."""

    ids: np.ndarray
    """[t] int64."""
    start: int
    tokens: int


@dataclass(frozen=True)
class Expander:
    """Writes the tokens of images for one model. Each text of a layout is tokenised beside features, as the processor
    of transformers does with the whole prompt: features are special tokens, and divide it."""

    family: ImageFamily
    config: Any
    tokenizer: Any
    _texts: dict[tuple[str, bool, bool], list[int]] = field(default_factory=dict)

    def of(self, grid: Grid) -> Expansion:
        """Return the tokens of an image with this grid."""
        (feature,), layout = self.family.feature_ids(self.config), self.family.layout(self.config, grid)
        parts, last = list[Any](), len(layout) - 1
        for k, part in enumerate(layout):
            parts.append([feature] * part if isinstance(part, int) else self._ids(part, k > 0, k < last))
        ids = np.concatenate([np.array(part, np.int64) for part in parts])
        places = np.flatnonzero(ids == feature)
        start = int(places[0])
        return Expansion(ids, start, int(places[-1]) + 1 - start)

    def _ids(self, text: str, after: bool, before: bool) -> list[int]:
        """Return the ids of a text that is after features, before features, or both."""
        if (key := (text, after, before)) not in self._texts:
            (feature,) = self.family.feature_ids(self.config)
            own = self.tokenizer.convert_ids_to_tokens(feature)
            whole = self.tokenizer(own * after + text + own * before, add_special_tokens=False)["input_ids"]
            ids = whole[int(after) : len(whole) - int(before)]
            assert feature not in ids and len(whole) == len(ids) + after + before, "features are special tokens"
            self._texts[key] = ids
        return self._texts[key]


def placeholder_positions(ids: np.ndarray, placeholders: Iterable[int]) -> np.ndarray:
    """Return the positions of placeholders in ids [P], in order."""
    found = np.zeros(len(ids), bool)
    for placeholder in placeholders:
        found |= ids == placeholder
    return found.nonzero()[0]


def expander(family: ImageFamily, config: Any, tokenizer: Any) -> Expander:
    """Return the writer of a model's images. Raise Refused if the tokenizer lacks one of its tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    (feature,) = family.feature_ids(config)
    for name, text in (("image_token_id", tokenizer.convert_ids_to_tokens(feature)), *(("", m) for m in family.marks)):
        if text not in added:
            token = f"{text} (its {name} {feature})" if name else text
            raise Refused(
                f"the tokenizer has no special token {token}, which a {config.model_type} model reads beside the "
                "features of an image. Fix: the tokenizer of this model"
            )
    return Expander(family, config, tokenizer)


def banned_tokens(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a policy of this configuration must not sample, with the marks of images that its tokenizer
    has; () if it reads text alone."""
    if (family := family_of(config)) is None:
        return ()
    rows, found = config.get_text_config().vocab_size, {*banned_ids(config)}
    for i, token in tokenizer.added_tokens_decoder.items():
        if i < rows and is_mark(family, token.content):
            found.add(i)
    return tuple(sorted(found))


def is_mark(family: ImageFamily, text: str) -> bool:
    """Return True if a token's text is a mark around or between the features of an image."""
    return text in family.marks or (family.optional_marks is not None and bool(family.optional_marks.fullmatch(text)))
