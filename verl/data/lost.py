"""Find text for which a tokenizer has no ids: it would be dropped silently, and the model would get another
question."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.chat.template import Tokenizer
from verl.errors import Refused

MAX_LOST_SHARE = 0.01


@dataclass(slots=True)
class Coverage:
    """A tokenizer and the characters that it is known to encode; each is looked up once."""

    tokenizer: Tokenizer
    known: dict[str, bool] = field(default_factory=dict)

    def lost(self, text: str) -> str:
        """Return the characters of `text` that its ids do not represent, sorted; white space counts as a space.

        If a character by itself has no id, the whole text is encoded and decoded: a word-level tokenizer may have an id
        for a word but none for its letters.
        """
        suspects = {_plain(c) for c in set(text) if not self._knows(c)}
        if not suspects:
            return ""
        have, kept = Counter(_plain(text)), Counter(_plain(self._decoded(text)))
        return "".join(sorted(c * (have[c] - kept[c]) for c in have if c in suspects or not self._knows(c)))

    def _knows(self, character: str) -> bool:
        if character not in self.known:
            ids = self.tokenizer.encode(character, add_special_tokens=False)
            cut = bool(ids) and "\ufffd" in self.tokenizer.decode(ids) and character != "\ufffd"
            self.known[character] = bool(ids) and not cut and not set(ids) & self._unknown_ids()
        return self.known[character]

    def _decoded(self, text: str) -> str:
        ids, unknown = self.tokenizer.encode(text, add_special_tokens=False), self._unknown_ids()
        return str(self.tokenizer.decode([i for i in ids if i not in unknown]))

    def _unknown_ids(self) -> set[int]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        found = {self.tokenizer.unk_token_id}
        if backend is not None and (own := getattr(backend.model, "unk_token", None)) is not None:
            found.add(backend.token_to_id(own))
        return found - {None}


def _plain(text: str) -> str:
    """Return the text in Unicode form NFC, as many tokenizers normalise it first, with each white space as a space."""
    return "".join(" " if c.isspace() else c for c in unicodedata.normalize("NFC", text))


def texts_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the texts of the messages, including reasoning, without text of the template."""
    found: list[Any] = []
    for m in messages:
        content = m.get("content")
        parts = [p.get("text") for p in content if isinstance(p, Mapping)] if isinstance(content, list) else [content]
        found += [*parts, m.get("reasoning_content")]
    return [text for text in found if isinstance(text, str)]


def lost_lines(characters: Mapping[str, Sequence[int]], examples: Mapping[str, str]) -> list[str]:
    """Return a line for each file with lost text. Raise ValueError if more than MAX_LOST_SHARE of a file's characters
    are lost."""
    prefix = []
    for file, (total, lost) in characters.items():
        if lost:
            how_much = f"{lost} of {total} characters ({lost / total:.2%}) have no token and vanish"
            prefix.append(f"{file}: {how_much}, e.g. {examples[file]}")
            if lost > MAX_LOST_SHARE * total:
                fix = "train a model whose tokenizer knows them, or take them out of the rows"
                raise Refused(f"{prefix[-1]}. The model would be asked something else. Fix: {fix}")
    return prefix
