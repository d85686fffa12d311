"""Find special tokens that rows spell out in their own text. They are read as control tokens, like those of the chat
template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.chat.template import Tokenizer

MOST_NAMED = 4  # the most tokens that a file's warning lists


@dataclass(slots=True)
class SpecialTokens:
    """Finds a tokenizer's special tokens in a text by a search for their spelling, before anything is tokenised."""

    tokenizer: Tokenizer
    pattern: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        added = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        every = {**dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids)), **added}
        made = [t for t, i in every.items() if t and i in self.tokenizer.encode(t, add_special_tokens=False)]
        longest_first = sorted(made, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first))) if made else None

    def held(self, text: str) -> set[str]:
        return set(self.pattern.findall(text)) if self.pattern else set()


Found = dict[str, dict[str, list[Any]]]
"""File -> special token -> [number of rows with the token in their own text, place of the first of them]."""


def add_found(found: Found, more: Found) -> None:
    """Add to `found`, in place, the findings of later rows of the same files."""
    for file, tokens in more.items():
        mine = found.setdefault(file, {})
        for token, (rows, where) in tokens.items():
            mine[token] = [mine[token][0] + rows, mine[token][1]] if token in mine else [rows, where]


def special_lines(found: Found, names: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Return a warning for each file with special tokens in its rows.

    names: the tokenizer's special_tokens_map, name -> token
    """
    called = {token: f" ({name})" for name, token in names.items() if isinstance(token, str)}
    prefix = []
    for file, tokens in found.items():
        most = sorted(tokens.items(), key=lambda item: -item[1][0])
        parts = [
            f"{token!r}{called.get(token, '')} in {rows} row{'s' if rows > 1 else ''} (first {where})"
            for token, (rows, where) in most[:MOST_NAMED]
        ]
        more = f" and {len(most) - MOST_NAMED} more" if len(most) > MOST_NAMED else ""
        what = (
            "they are read as control tokens, as if the chat template had written them (a turn may end in its middle)"
        )
        prefix.append(f"{file}: special tokens in the rows' own text, {', '.join(parts)}{more}: {what}")
    return prefix
