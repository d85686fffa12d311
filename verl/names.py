"""Find the names most similar to a given one, for errors about a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

NO_ALIASES: Mapping[str, str] = MappingProxyType({})
LEAST_RATIO, LAST_PART = 0.6, 0.95
"""The least similarity of a suggested name, and the weight of the similarity of last components."""


def spelled(name: str) -> str:
    """Return `name` in lower case without the separators between its letters: Reinforce++ is reinforceplusplus."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "plus"))


def nearest(name: str, names: Iterable[str], count: int = 3, aliases: Mapping[str, str] = NO_ALIASES) -> list[str]:
    """Return the names most like `name`: as a whole, or by their last component (`temprature` ->
    `rollout.temperature`). Case and separators do not count. aliases: other spellings -> one of `names`."""
    whole = difflib.SequenceMatcher(b=spelled(name))
    last = difflib.SequenceMatcher(b=spelled(name.rsplit(".", 1)[-1]))
    scores: dict[str, float] = {}
    for candidate, found in (*((name, name) for name in names), *aliases.items()):
        whole.set_seq1(spelled(candidate))
        last.set_seq1(spelled(candidate.rsplit(".", 1)[-1]))
        score = max(
            m.ratio() * w if m.quick_ratio() > LEAST_RATIO else 0.0 for m, w in ((whole, 1.0), (last, LAST_PART))
        )
        if score > LEAST_RATIO:
            scores[found] = max(score, scores.get(found, 0.0))
    return sorted(scores, key=lambda found: (-scores[found], len(found), found))[:count]


def did_you_mean(
    name: object,
    names: Iterable[str],
    count: int = 1,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
    form: str = "did you mean {}? ",
) -> str:
    """Return `form` with the most similar names, or "" if no name is similar."""
    near = nearest(str(name), names, count, aliases)
    return form.format(" or ".join(near)) if near else ""
