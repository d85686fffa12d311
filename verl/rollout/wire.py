"""What a server has answered, and what becomes of it here; no connection is made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.rollout.base import Completion, DecodeFn, SoFar
from verl.rollout.embedded.requests import find_stop
from verl.types import Sampling, StopReason, derive_seed

SAME = 0.02  # of a log-prob; less is rounding


Span = tuple[str, int, int]
"""(version, start, end), as a server names it."""


class NotUnderstood(RuntimeError):
    """A server's answer is not what its API promises."""


@dataclass(slots=True)
class Drawn:
    """What a server has drawn for one request so far; versions: [(version, start, end)], as it names them · live: the
    version that it has by now, where it tells of it before the end · finish: its own reason · stopped: (tokens up to
    the end of a stop string, the string) · sure: so many tokens are of the version that it had at the beginning."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Span] = field(default_factory=list)
    live: str | None = None
    finish: str | None = None
    cached_tokens: int = 0
    stopped: tuple[int, str] | None = None
    sure: int = 0

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """More tokens. ValueError for numbers that are none."""
        given = [float(value) for value in logprobs]
        if len(given) != len(ids) or not all(map(math.isfinite, given)):
            raise ValueError(f"{len(ids)} tokens with the log-probs {given[-8:]} (non-finite logits?)")
        self.ids += ids
        self.logprobs += given


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How what a server drew becomes an answer. room: tokens that fit behind the prompt · before: what others drew of
    it; counts of tokens are of both."""

    sampling: Sampling
    room: int
    eos_token_ids: Sequence[int]
    decode: DecodeFn | None
    before: SoFar

    @property
    def limit(self) -> int:
        return min(self.sampling.max_tokens, self.room)

    def rest(self, by_position: bool) -> Sampling:
        """How the server draws what is left. by_position: as a function of the seed and the position; else of another
        seed, as the same numbers behind a longer prompt would be those of the beginning."""
        s, n = self.sampling, len(self.before.ids)
        if n == 0:
            return s
        seed = s.seed if by_position else derive_seed(s.seed, "rest", n)
        return replace(s, max_tokens=s.max_tokens - n, seed=seed, position=n if by_position else 0)

    def keep(self, drawn: Drawn, version: int) -> None:
        """Add to `before` what is sure, without what ends the answer: that is drawn again."""
        end = min(self.limit, self.limit if drawn.stopped is None else drawn.stopped[0]) - 1 - len(self.before.ids)
        ids, s = drawn.ids[: min(drawn.sure, end)], self.sampling
        if ids and (ids[-1] in s.stop_token_ids or (ids[-1] in self.eos_token_ids and not s.ignore_eos)):
            ids.pop()
        self.before.add(ids, drawn.logprobs[: len(ids)], version)

    def end_of(self, drawn: Drawn, seen: int) -> tuple[int, str] | None:
        """(tokens up to and with the one that completes a stop string, the string); `seen` of the drawn ones were
        looked through."""
        if not self.sampling.stop:
            return None
        assert self.decode is not None, "a request with stop strings was let through without a decode function"
        ids = np.asarray(self.before.ids + drawn.ids, np.int64)
        for end in range(len(self.before.ids) + seen + 1, len(ids) + 1):
            if (stop := find_stop(ids[:end], self.sampling.stop, self.decode)) is not None:
                return end, stop
        return None

    def completion(self, request_id: str, drawn: Drawn) -> Completion:
        """The server does not know stop strings."""
        before, n = self.before, len(self.before.ids)
        end = n + len(drawn.ids) if drawn.stopped is None else drawn.stopped[0]
        ids = np.asarray((before.ids + drawn.ids)[:end], np.int64)
        logprobs = np.asarray((before.logprobs + drawn.logprobs)[:end], np.float32)
        if named := [v for v, _, _ in drawn.versions if not v.isdecimal()]:
            raise NotUnderstood(f"the server's weights have the version {named[0]!r}: nobody published it")
        told = [*before.spans, *((int(v), n + a, n + b) for v, a, b in drawn.versions)]
        spans = joined((v, a, min(b, end)) for v, a, b in told if a < min(b, end))
        if [0, *(b for _, _, b in spans)] != [*(a for _, a, _ in spans), end]:
            raise NotUnderstood(f"the server's weight_versions {drawn.versions} do not cover {end} tokens")
        stop = None if drawn.stopped is None else drawn.stopped[1]
        reason = self._reason(ids, drawn, stop)
        return Completion(
            request_id, ids, logprobs, spans, reason, stop if reason == "stop" else None, drawn.cached_tokens
        )

    def _reason(self, ids: np.ndarray, drawn: Drawn, stop: str | None) -> StopReason:
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
    """Neighbours of one version are one span."""
    found = list[tuple[int, int, int]]()
    for version, start, end in spans:
        if found and found[-1][::2] == (version, start):
            start = found.pop()[1]
        found.append((version, start, end))
    return tuple(found)


def prompt_scores(rows: Any, ids: np.ndarray) -> np.ndarray:
    """Log-probs [t-1] float32 of ids[1:], from vLLM's `prompt_logprobs`."""
    if not isinstance(rows, list) or len(rows) != len(ids):
        raise NotUnderstood("the server's answer has no prompt_logprobs")
    try:
        return np.array([float(row[str(i)]["logprob"]) for row, i in zip(rows[1:], ids[1:].tolist())], np.float32)
    except (KeyError, TypeError) as e:
        raise NotUnderstood(f"the server's prompt_logprobs are not those of the prompt: {e}") from e


def raw(told: np.ndarray, plain: np.ndarray, vocab: int) -> bool:
    """Whether these log-probs [n] of tokens drawn at temperature 2 are those at 1 of the same tokens, but for rounding:
    of bfloat16, a part in a thousand or so. The temperature changes those of a sure token by several times, and those
    of a model that knows nothing by half their distance from a uniform guess."""
    found = np.abs(told - plain).mean()
    return bool(found < min(SAME * np.abs(plain).mean(), 5 * SAME * np.abs(plain + np.log(vocab)).mean()))


def marked(name: str) -> tuple[int, str]:
    """(version, mark of who gave it: "" for none) of the name of weights; of one that nobody here has given, it is the
    mark."""
    number, _, mark = name.partition("-")
    return (int(number), mark) if number.isdecimal() else (-1, name)


def version_of(text: str) -> tuple[int, ...]:
    """(0, 32, 0) of "0.32.0+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
