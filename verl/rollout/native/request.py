"""One generate call inside an engine, and the rows of those that are resident. Shared by the native and HF engines.

Per-token bookkeeping is vectorised over rows (structure of arrays in numpy); Python objects are touched only for rows
that finish or that have stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.rollout.base import Completion, DecodeFn
from verl.rollout.native.sampler import Draw, stream_of, uniforms
from verl.types import Sampling, StopReason

RUNNING, EOS, STOP, LENGTH, CONTEXT_FULL = range(5)  # codes of a row; the names are those of types.StopReason
REASONS: tuple[StopReason | None, ...] = (None, "eos", "stop", "length", "context_full")


NO_IDS, NO_LOGPROBS = np.zeros(0, np.int64), np.zeros(0, np.float32)  # empty: nobody can write into them


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what was sampled for it before it last lost its row (nothing, unless it was preempted)."""

    request_id: str
    prompt_ids: np.ndarray  # [P] int64
    sampling: Sampling
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    logprobs: np.ndarray = field(default_factory=lambda: NO_LOGPROBS)
    marks: list[tuple[int, int]] = field(default_factory=list)  # (version, index of its first token)
    cached_tokens: int = 0
    order: int = 0  # of submission; preempted requests go back in this order

    def mark(self, version: int, start: int) -> None:
        """Tokens from `start` on are sampled under `version`."""
        if self.marks and self.marks[-1][1] == start:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, start))

    def context(self) -> np.ndarray:
        """The ids whose KV must be resident before the next token can be sampled."""
        return np.concatenate([self.prompt_ids, self.ids]) if len(self.ids) else self.prompt_ids

    def complete(self, reason: StopReason, stop: str | None = None) -> Completion:
        ends = [start for _, start in self.marks[1:]] + [len(self.ids)]
        spans = tuple((v, start, end) for (v, start), end in zip(self.marks, ends) if end > start)
        return Completion(self.request_id, self.ids, self.logprobs, spans, reason, stop, self.cached_tokens)


def find_stop(ids: np.ndarray, stops: Sequence[str], decode: DecodeFn) -> str | None:
    """The first stop string that the last token of `ids` completed, looked for in a bounded tail.

    The tail is long enough that a match which ends in the last token lies inside it, whatever the token boundaries.
    """
    longest = max(map(len, stops))
    last = len(decode(ids[-1:].tolist()))
    tail = min(len(ids), longest + 4)
    text = decode(ids[-tail:].tolist())
    # a token may decode to nothing, or only together with its neighbours: widen until the text suffices
    while len(text) < longest + last + 1 and tail < len(ids):
        tail = min(len(ids), 2 * tail)
        text = decode(ids[-tail:].tolist())
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


class Rows:
    """The resident requests, one row each; rows 0..n-1 are live. Columns are numpy arrays over rows."""

    def __init__(self, max_rows: int, eos_token_ids: Sequence[int], decode: DecodeFn | None) -> None:
        self.n = 0
        self.requests: list[Request] = []
        self._eos = np.asarray(sorted(set(eos_token_ids)), np.int64)
        self._decode = decode
        self._strings = 0  # rows with stop strings
        self.prompt_tokens = np.zeros(max_rows, np.int64)
        self.count = np.zeros(max_rows, np.int64)  # tokens of the response so far
        self.limit = np.zeros(max_rows, np.int64)
        self.last = np.zeros(max_rows, np.int64)  # sampled, its KV not yet computed
        self._overflow = np.zeros(max_rows, np.int8)  # code of reaching the limit
        self._ignore_eos = np.zeros(max_rows, bool)
        self._stop_ids = np.full((max_rows, 1), -1, np.int64)  # [rows, K], -1 is none
        self._temperature = np.ones(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._stream = np.zeros(max_rows, np.uint64)
        self._ids = np.zeros((max_rows, 64), np.int64)  # [rows, response capacity]
        self._logprobs = np.zeros((max_rows, 64), np.float32)

    def add(self, request: Request, max_context_tokens: int) -> None:
        row, sampling, tokens = self.n, request.sampling, len(request.ids)
        room = max_context_tokens - len(request.prompt_ids)
        self.prompt_tokens[row] = len(request.prompt_ids)
        self.count[row] = tokens
        self.limit[row] = min(sampling.max_tokens, room)
        self._overflow[row] = LENGTH if sampling.max_tokens <= room else CONTEXT_FULL
        self._ignore_eos[row] = sampling.ignore_eos
        if len(sampling.stop_token_ids) > self._stop_ids.shape[1]:
            extra = len(sampling.stop_token_ids) - self._stop_ids.shape[1]
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._stream[row] = stream_of(sampling.seed)
        self._reserve(tokens + 1)
        self._ids[row, :tokens] = request.ids
        self._logprobs[row, :tokens] = request.logprobs
        self._strings += bool(sampling.stop)
        self.requests.append(request)
        self.n += 1

    def draw(self, lo: int, hi: int) -> Draw:
        return Draw(
            self._temperature[lo:hi],
            self._top_k[lo:hi],
            self._top_p[lo:hi],
            self._min_p[lo:hi],
            uniforms(self._stream[lo:hi], self.count[lo:hi]),
        )

    def draw_ahead(self, rows: np.ndarray, ahead: np.ndarray) -> Draw:
        """The draws of the tokens that stand `ahead` [m] places after the next one of `rows` [m]."""
        return Draw(
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            uniforms(self._stream[rows], self.count[rows] + ahead),
        )

    def answer(self, row: int) -> np.ndarray:
        """[count] what was sampled so far: a view."""
        return self._ids[row, : self.count[row]]

    def context(self, row: int) -> np.ndarray:
        return np.concatenate([self.requests[row].prompt_ids, self.answer(row)])

    def positions(self) -> np.ndarray:
        """[n] context position of each row's last token, which is also how many tokens of KV are resident."""
        return self.prompt_tokens[: self.n] + self.count[: self.n] - 1

    def advance(self, lo: int, hi: int, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """Append one token to rows lo..hi-1 -> code of each of these rows [hi - lo], the stop string of some rows."""
        count = self.count[lo:hi]
        self._reserve(int(count.max()) + 1)
        rows = np.arange(lo, hi)
        self._ids[rows, count] = ids
        self._logprobs[rows, count] = logprobs
        count += 1
        self.last[lo:hi] = ids
        code = np.where(count >= self.limit[lo:hi], self._overflow[lo:hi], np.int8(RUNNING))
        stops: dict[int, str] = {}
        if self._strings:
            stops = self._match_strings(lo, hi)
            code[[row - lo for row in stops]] = STOP
        code[(self._stop_ids[lo:hi] == ids[:, None]).any(1)] = STOP
        code[(ids[:, None] == self._eos).any(1) & ~self._ignore_eos[lo:hi]] = EOS
        return code, stops

    def save(self, row: int) -> Request:
        """The request of a row with everything sampled so far."""
        request = self.requests[row]
        tokens = int(self.count[row])
        request.ids = self._ids[row, :tokens].copy()
        request.logprobs = self._logprobs[row, :tokens].copy()
        return request

    def remove(self, gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop the rows `gone` (sorted) and close the holes with the last rows -> (moved from, moved to)."""
        kept = self.n - len(gone)
        holes = gone[gone < kept]
        stays = np.ones(self.n, bool)
        stays[gone] = False
        movers = kept + np.flatnonzero(stays[kept:])
        for request in (self.requests[row] for row in gone):
            self._strings -= bool(request.sampling.stop)
        for source, hole in zip(movers, holes):
            self.requests[hole] = self.requests[source]
        del self.requests[kept:]
        for column in self._columns():
            column[holes] = column[movers]
        self.n = kept
        return movers, holes

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (
            self.prompt_tokens,
            self.count,
            self.limit,
            self.last,
            self._overflow,
            self._ignore_eos,
            self._stop_ids,
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._stream,
            self._ids,
            self._logprobs,
        )

    def _match_strings(self, lo: int, hi: int) -> dict[int, str]:
        assert self._decode is not None, "a request with stop strings was admitted without a decode function"
        found: dict[int, str] = {}
        for row in range(lo, hi):
            if strings := self.requests[row].sampling.stop:
                match = find_stop(self._ids[row, : self.count[row]], strings, self._decode)
                if match is not None:
                    found[row] = match
        return found

    def _reserve(self, tokens: int) -> None:
        if tokens > self._ids.shape[1]:
            extra = max(tokens, 2 * self._ids.shape[1]) - self._ids.shape[1]
            self._ids = np.pad(self._ids, ((0, 0), (0, extra)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, extra)))
