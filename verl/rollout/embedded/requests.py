"""The requests inside an engine: one generate call, and the resident requests as rows of arrays.

Python objects are used only for rows that finish or that have stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.parameter_set import POLICY_SET
from verl.rollout.base import Completion, DecodeFn, GenerateRequest
from verl.rollout.embedded.images import RequestImages
from verl.rollout.embedded.sampler import SamplingMetadata, stream_of
from verl.types import NO_ROUTE, NOISE_SIDE, Medium, StopReason

RUNNING, EOS, STOP, LENGTH, CONTEXT_FULL = range(5)  # codes of a row; the names are those of types.StopReason
REASONS: tuple[StopReason | None, ...] = (None, "eos", "stop", "length", "context_full")
NO_IDS, NO_LOGPROBS = np.zeros(0, np.int64), np.zeros(0, np.float32)  # shared, since nothing can be written into them
PromptKey = tuple[str, tuple[Medium, ...], bool, bytes]  # parameter set, media, under noise, bytes of the ids


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in an engine. `ids` and `logprobs` are the tokens that were sampled before it last lost its row (none,
    unless it was preempted)."""

    given: GenerateRequest
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    logprobs: np.ndarray = field(default_factory=lambda: NO_LOGPROBS)
    span_starts: list[tuple[int, int]] = field(default_factory=list)
    """(version, index of the first token that it sampled), in order."""
    cached_tokens: int = 0
    """Prompt tokens with KV from earlier requests."""
    order: int = 0
    """The order of submission; preempted requests wait again in this order."""
    sigmas: dict[int, float] = field(default_factory=dict)
    """The standard deviation of the noise of each version that has sampled, if it explores."""
    reported: int = 0
    """The number of tokens that `on_tokens` was called with."""
    routes: np.ndarray | None = None
    """The experts of each token of prompt and answer, if the runner records them, as they were first computed."""
    images: RequestImages | None = None
    """The content of the images of its prompt."""

    @property
    def explores(self) -> bool:
        """True if its tokens are sampled under exploration noise, which is on the policy alone."""
        return self.given.sampling.noise and self.given.parameters == POLICY_SET.id

    def start_span(self, version: int, start: int, sigma: float = 0.0) -> None:
        """Record that tokens from `start` on are sampled under `version`, with noise of this standard deviation."""
        if self.span_starts and self.span_starts[-1][1] == start:
            self.span_starts.pop()
        if not self.span_starts or self.span_starts[-1][0] != version:
            self.span_starts.append((version, start))
        if self.explores:
            self.sigmas[version] = sigma

    def add_routes(self, found: np.ndarray | None) -> None:
        """Store the experts `found` [P + t, layers, k] of all tokens until now. Tokens whose KV is computed again,
        maybe with newer weights, keep the experts that they were sampled with."""
        if self.routes is not None and found is not None:
            n, known = len(self.routes), self.routes != NO_ROUTE
            found[:n][known] = self.routes[known]
        self.routes = found

    def context(self) -> np.ndarray:
        """Return the ids that need resident KV before the next token can be sampled."""
        prompt = self.given.prompt_ids
        return np.concatenate([prompt, self.ids]) if len(self.ids) else prompt

    def key(self) -> PromptKey:
        """Return the key by which the KV of its context is found."""
        return self.given.parameters, self.given.media, self.explores, self.context().tobytes()

    def completion(self, reason: StopReason, stop: str | None = None) -> Completion:
        """Return the completion with the tokens of `ids`."""
        ends = [start for _, start in self.span_starts[1:]] + [len(self.ids)]
        spans = tuple((v, start, end) for (v, start), end in zip(self.span_starts, ends) if end > start)
        side = {}
        if self.explores:
            sigmas = [np.full(end - start, self.sigmas[v], np.float32) for v, start, end in spans]
            side[NOISE_SIDE] = np.concatenate([NO_LOGPROBS, *sigmas])
        given, name = (self.given.id, self.ids, self.logprobs, spans, reason, stop), self.given.parameters
        return Completion(*given, self.cached_tokens, side, routes=self.routes, parameters=name)


News = tuple[ActiveRequest, np.ndarray, np.ndarray]  # ids [t], log-probs [t]


def find_stop(ids: np.ndarray, stops: Sequence[str], decode: DecodeFn) -> str | None:
    """Return the first stop string that the last token of `ids` completed, or None. Only a tail is decoded, long enough
    for any match that ends in the last token, and only matches that end in the text of that token count."""
    stops, longest, tail = tuple(stops), max(map(len, stops)), 0
    known, text = 0, ""
    # a token may decode to nothing, or only together with its neighbours: widen until the text suffices
    while tail < len(ids) and known <= longest:
        tail = min(len(ids), max(2 * tail, longest + 4))
        window = ids[-tail:].tolist()
        before, text = decode(window[:-1]), decode(window)
        known = len(before) if text.startswith(before) else _shared(before, text)
    if not any(text.endswith(stops, 0, end) for end in range(known + 1, len(text) + 1)):
        return None
    return min((at, stop) for stop in stops if (at := text.find(stop)) >= 0)[1]


def _shared(a: str, b: str) -> int:
    """Return the number of characters that two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# the columns of a row. count: tokens of the response until now; last: the last sampled token, without KV yet; stream:
# its random numbers (`stream_of`); limit_code: the code of a row that reaches its limit
_ROW = np.dtype(
    [(name, np.int64) for name in ("prompt_tokens", "count", "limit", "last", "top_k")]
    + [("stream", np.uint64), *((name, np.float32) for name in ("temperature", "top_p", "min_p"))]
    + [("limit_code", np.int8), ("ignore_eos", np.bool_), ("banned", np.bool_)],
    align=True,
)


class RunningRequests:
    """The resident requests, one per row; rows 0..n-1 are in use."""

    def __init__(self, max_rows: int, eos_token_ids: Sequence[int], decode: DecodeFn | None) -> None:
        self.n = 0
        self.requests: list[ActiveRequest] = []
        self._eos = np.asarray(sorted(set(eos_token_ids)), np.int64)
        self._decode = decode
        self._strings = 0  # rows with stop strings
        self._followed = 0  # rows with on_tokens
        self._banned = 0  # rows with banned ids
        self._rows = np.zeros(max_rows, _ROW)
        self.count, self.limit, self.last = self._rows["count"], self._rows["limit"], self._rows["last"]  # views
        self._stop_ids = np.full((max_rows, 1), -1, np.int64)  # [rows, K], -1 is none
        self._ids = np.zeros((max_rows, 64), np.int64)  # [rows, response capacity]
        self._logprobs = np.zeros((max_rows, 64), np.float32)

    def add(self, request: ActiveRequest, max_context_tokens: int) -> None:
        """Put a request into row n."""
        row, s, tokens = self.n, request.given.sampling, len(request.ids)
        prompt = len(request.given.prompt_ids)
        room = max_context_tokens - prompt
        limit, code = min(s.max_tokens, room), LENGTH if s.max_tokens <= room else CONTEXT_FULL
        drawn = (s.top_k, stream_of(s.seed, s.position), s.temperature, s.top_p, s.min_p)
        self._rows[row] = (prompt, tokens, limit, 0, *drawn, code, s.ignore_eos, bool(s.banned))
        if (extra := len(s.stop_token_ids) - self._stop_ids.shape[1]) > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(s.stop_token_ids)] = s.stop_token_ids
        self._reserve(tokens + 1)
        self._ids[row, :tokens] = request.ids
        self._logprobs[row, :tokens] = request.logprobs
        self._strings += bool(s.stop)
        self._banned += bool(s.banned)
        self._followed += request.given.on_tokens is not None
        self.requests.append(request)
        self.n += 1

    def sampling(self, lo: int, hi: int, ahead: np.ndarray | int = 0) -> SamplingMetadata:
        """Return the sampling settings of the next token of rows lo..hi-1, or with `ahead` 1 of the token after it."""
        r = self._rows[lo:hi]
        drawn = r["stream"], r["count"] + ahead
        banned = r["banned"] if self._banned else None
        return SamplingMetadata(r["temperature"], r["top_k"], r["top_p"], r["min_p"], *drawn, banned)

    def positions(self) -> np.ndarray:
        """Return the context position [n] of each row's last token, which is also the number of tokens with resident
        KV."""
        return self._rows["prompt_tokens"][: self.n] + self.count[: self.n] - 1

    def append(self, lo: int, hi: int, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """Add one token to each of rows lo..hi-1. Return the code of each row [hi - lo], and by row the stop string of
        those that end with one."""
        count, rows = self.count[lo:hi], self._rows[lo:hi]
        self._reserve(int(count.max()) + 1)
        every = np.arange(lo, hi)
        self._ids[every, count] = ids
        self._logprobs[every, count] = logprobs
        count += 1
        self.last[lo:hi] = ids
        code = np.where(count >= self.limit[lo:hi], rows["limit_code"], np.int8(RUNNING))
        stops: dict[int, str] = {}
        if self._strings:
            stops = self._match_strings(lo, hi)
            code[[row - lo for row in stops]] = STOP
        code[(self._stop_ids[lo:hi] == ids[:, None]).any(1)] = STOP
        code[(ids[:, None] == self._eos).any(1) & ~rows["ignore_eos"]] = EOS
        return code, stops

    @property
    def followed(self) -> bool:
        """True if a resident request has `on_tokens`."""
        return self._followed > 0

    def news(self) -> list[News]:
        """Return the tokens of streamed rows that were sampled since the last call."""
        found: list[News] = []
        for row, request in enumerate(self.requests if self._followed else ()):
            since, count = request.reported, int(self.count[row])
            if request.given.on_tokens is not None and count > since:
                request.reported = count
                found.append((request, self._ids[row, since:count].copy(), self._logprobs[row, since:count].copy()))
        return found

    def save(self, row: int) -> ActiveRequest:
        """Return the request of a row, with all tokens sampled until now."""
        request, tokens = self.requests[row], int(self.count[row])
        request.ids, request.logprobs = self._ids[row, :tokens].copy(), self._logprobs[row, :tokens].copy()
        return request

    def remove(self, removed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop the rows `removed` (sorted) and fill the holes with the last rows. Return the rows that were moved, and
        the rows that they were moved to."""
        kept = self.n - len(removed)
        holes = removed[removed < kept]
        stays = np.ones(self.n, bool)
        stays[removed] = False
        movers = kept + np.flatnonzero(stays[kept:])
        self._strings -= sum(bool(self.requests[row].given.sampling.stop) for row in removed)
        self._banned -= sum(bool(self.requests[row].given.sampling.banned) for row in removed)
        self._followed -= sum(self.requests[row].given.on_tokens is not None for row in removed)
        for source, hole in zip(movers, holes):
            self.requests[hole] = self.requests[source]
        del self.requests[kept:]
        for column in (self._rows, self._stop_ids, self._ids, self._logprobs):
            column[holes] = column[movers]
        self.n = kept
        return movers, holes

    def _match_strings(self, lo: int, hi: int) -> dict[int, str]:
        """Return the stop string that the last token of a row has completed, by row."""
        assert self._decode is not None, "a request with stop strings was admitted without a decode function"
        found: dict[int, str] = {}
        for row in range(lo, hi):
            strings = self.requests[row].given.sampling.stop
            if strings and (match := find_stop(self._ids[row, : self.count[row]], strings, self._decode)) is not None:
                found[row] = match
        return found

    def _reserve(self, tokens: int) -> None:
        """Make room for this number of tokens per row."""
        if tokens > self._ids.shape[1]:
            extra = max(tokens, 2 * self._ids.shape[1]) - self._ids.shape[1]
            self._ids = np.pad(self._ids, ((0, 0), (0, extra)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, extra)))
