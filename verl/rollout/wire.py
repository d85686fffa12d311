"""The tokens that a server has answered, and how they become a completion. No connection is made here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.rollout.base import Completion, DecodeFn, PartialAnswer
from verl.rollout.embedded.requests import find_stop
from verl.types import Sampling, StopReason, derive_seed

SAME = 0.02  # the relative difference of log-probs up to which they differ by rounding only

Span = tuple[str, int, int]
"""(version, start, end), with the server's name of the version."""


class NotUnderstood(RuntimeError):
    """Raised if a server's answer does not follow its API."""


@dataclass(slots=True)
class ServerAnswer:
    """The tokens that a server has sampled for one request until now."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Span] = field(default_factory=list)
    """The spans of tokens of each version of the weights."""
    live: str | None = None
    """The server's present version, if it is reported before the end."""
    finish: str | None = None
    """The server's reason for the end."""
    cached_tokens: int = 0
    """Prompt tokens with KV from earlier requests."""
    stopped: tuple[int, str] | None = None
    """The number of tokens up to the end of a stop string, and that string; None without one."""
    sure: int = 0
    """The number of first tokens that were certainly sampled by the version that was live at the beginning."""

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens. Raise ValueError for log-probs that are not finite."""
        given = [float(value) for value in logprobs]
        if len(given) != len(ids) or not all(map(math.isfinite, given)):
            raise ValueError(f"{len(ids)} tokens with the log-probs {given[-8:]} (non-finite logits?)")
        self.ids += ids
        self.logprobs += given


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The settings by which the tokens of a server are read as an answer."""

    sampling: Sampling
    room: int
    """The number of tokens that fit after the prompt."""
    eos_token_ids: Sequence[int]
    decode: DecodeFn | None
    before: PartialAnswer
    """The beginning of the answer, sampled by other servers. Limits count it too."""

    @property
    def limit(self) -> int:
        """The most tokens that the answer may have."""
        return min(self.sampling.max_tokens, self.room)

    def rest(self, by_position: bool) -> Sampling:
        """Return the sampling of the rest of the answer. With `by_position` the server's random numbers are a function
        of seed and position. Otherwise the rest gets another seed, because the same seed after a longer prompt would
        repeat the random numbers of the beginning."""
        s, n = self.sampling, len(self.before.ids)
        if n == 0:
            return s
        seed = s.seed if by_position else derive_seed(s.seed, "rest", n)
        return replace(s, max_tokens=s.max_tokens - n, seed=seed, position=n if by_position else 0)

    def keep(self, drawn: ServerAnswer, version: int) -> None:
        """Append the tokens of `drawn` that `version` has certainly sampled (`sure`) to `before`, so that another
        server can continue the answer. A last token that would end the answer is left out and sampled again."""
        end = min(self.limit, self.limit if drawn.stopped is None else drawn.stopped[0]) - 1 - len(self.before.ids)
        ids, s = drawn.ids[: min(drawn.sure, end)], self.sampling
        if ids and (ids[-1] in s.stop_token_ids or (ids[-1] in self.eos_token_ids and not s.ignore_eos)):
            ids.pop()
        self.before.add(ids, drawn.logprobs[: len(ids)], version)

    def end_of(self, drawn: ServerAnswer, seen: int) -> tuple[int, str] | None:
        """Return the number of tokens up to and including the one that completes a stop string, and that string, or
        None. The first `seen` sampled tokens were searched before."""
        if not self.sampling.stop:
            return None
        assert self.decode is not None, "a request with stop strings was let through without a decode function"
        ids = np.asarray(self.before.ids + drawn.ids, np.int64)
        for end in range(len(self.before.ids) + seen + 1, len(ids) + 1):
            if (stop := find_stop(ids[:end], self.sampling.stop, self.decode)) is not None:
                return end, stop
        return None

    def completion(self, request_id: str, drawn: ServerAnswer) -> Completion:
        """Return the completion, ended at the first stop string: the server does not match stop strings."""
        before, n = self.before, len(self.before.ids)
        end = n + len(drawn.ids) if drawn.stopped is None else drawn.stopped[0]
        ids = np.asarray((before.ids + drawn.ids)[:end], np.int64)
        logprobs = np.asarray((before.logprobs + drawn.logprobs)[:end], np.float32)
        if named := [v for v, _, _ in drawn.versions if not v.isdecimal()]:
            raise NotUnderstood(f"the server's weights have the version {named[0]!r}: nobody published it")
        parts = [*before.spans, *((int(v), n + a, n + b) for v, a, b in drawn.versions)]
        spans = joined((v, a, min(b, end)) for v, a, b in parts if a < min(b, end))
        if [0, *(b for _, _, b in spans)] != [*(a for _, a, _ in spans), end]:
            raise NotUnderstood(f"the server's weight_versions {drawn.versions} do not cover {end} tokens")
        stop = None if drawn.stopped is None else drawn.stopped[1]
        reason = self._reason(ids, drawn, stop)
        return Completion(
            request_id, ids, logprobs, spans, reason, stop if reason == "stop" else None, drawn.cached_tokens
        )

    def _reason(self, ids: np.ndarray, drawn: ServerAnswer, stop: str | None) -> StopReason:
        s, last = self.sampling, int(ids[-1]) if len(ids) else -1
        if last in self.eos_token_ids and not s.ignore_eos:
            return "eos"
        if stop is not None or last in s.stop_token_ids:
            return "stop"
        if drawn.finish == "abort":
            return "abort"
        if len(ids) == self.limit:
            return "length" if s.max_tokens <= self.room else "context_full"
        raise NotUnderstood(f"the server ended an answer of {len(ids)} tokens with {drawn.finish!r}, unasked")


def joined(spans: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the spans with neighbouring ones of the same version joined."""
    found = list[tuple[int, int, int]]()
    for version, start, end in spans:
        if found and found[-1][::2] == (version, start):
            start = found.pop()[1]
        found.append((version, start, end))
    return tuple(found)


def prompt_scores(rows: Any, ids: np.ndarray) -> np.ndarray:
    """Return log-probs [t-1] float32 of ids[1:], from vLLM's `prompt_logprobs`."""
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise NotUnderstood("the server's answer has no prompt_logprobs")
    try:
        return np.array([float(row[str(i)]["logprob"]) for row, i in zip(rows[1:], ids[1:].tolist())], np.float32)
    except (KeyError, TypeError) as e:
        raise NotUnderstood(f"the server's prompt_logprobs are not those of the prompt: {e}") from e


def raw(given: np.ndarray, plain: np.ndarray, vocab: int) -> bool:
    """Return true if the log-probs `given` [n] of tokens sampled at temperature 2 equal those at temperature 1, except
    for rounding (of bfloat16: about a part in a thousand). Temperature 2 changes the log-prob of a confident token
    several times, and that of a uniform model by half of its distance from a uniform guess."""
    found = np.abs(given - plain).mean()
    return bool(found < min(SAME * np.abs(plain).mean(), 5 * SAME * np.abs(plain + np.log(vocab)).mean()))


def marked(name: str) -> tuple[int, str]:
    """Split the server's name of weights into (version, mark of the client that sent them, "" for none). A name that no
    client made is returned as the mark, with version -1."""
    number, _, mark = name.partition("-")
    return (int(number), mark) if number.isdecimal() else (-1, name)


def version_of(text: str) -> tuple[int, ...]:
    """Return (0, 32, 0) for "0.32.0+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
