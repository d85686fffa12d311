"""A frozen model behind a server, which scores the tokens of a row: `verl serve`, vLLM, and every server of OpenAI's
completions with prompt_logprobs or echo. Whole rows are sent by their token ids; a row that fails is NaN."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import math
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch, unshare
from verl.errors import Refused
from verl.model_engine.base import EngineCapabilities, EngineContext, Part, ServedAt
from verl.types import Metric, Metrics

TOKENS_IN, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
FORMS = ((TOKENS_IN, False), (COMPLETIONS, False), (COMPLETIONS, True))
"""Request forms for the log-probs of a prompt: the path, and True for `echo` with `logprobs`, as OpenAI's completions
have it."""
TRY_NEXT_FORM = (200, 400, 404, 405, 422)  # status codes after which the next form is tried
ATTEMPTS = 2  # attempts per row
RETRY_AFTER_S = 0.5  # between attempts
TOLERANCE = 0.1  # nats, between two answers of one server for the same tokens
PROBE_EVERY = 10  # calls, after which the server is probed again
logger = logging.getLogger(__name__)
OUTPUTS = ("logprobs", "topk_ids", "topk_logprobs")
A = TypeVar("A")


class Unanswered(RuntimeError):
    """The error for a request without an answer, or with one that lacks the requested fields. status: the HTTP status;
    200: fields are missing; 0: no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def build(options: ServedAt, context: EngineContext) -> ServedModel:
    """Connect to the server. Raise ValueError if it cannot be this teacher, before anything is sampled."""
    made = ServedModel(options, context.top_k, context.max_tokens_per_microbatch)
    (probed,) = run_in_threads([made.probe], 1, time.monotonic() + options.budget_s)
    if not probed.done():
        raise Refused(f"{options.url} cannot be a teacher: its first answers took more than {options.budget_s:g} s")
    probed.result()
    return made


def run_in_threads(jobs: Sequence[Callable[[], A]], threads: int, until_s: float) -> list[Future[A]]:
    """Run the jobs in daemon threads and return their futures when all are done, or at `until_s` (monotonic clock). A
    server that sends a byte now and then can block a thread for ever, so nothing waits for these threads, not even the
    end of the process."""
    found = [Future[A]() for _ in jobs]
    left = deque(zip(found, jobs, strict=True))

    def work() -> None:
        while True:
            try:
                future, job = left.popleft()
            except IndexError:
                return
            try:
                future.set_result(job())
            except BaseException as e:
                future.set_exception(e)

    for _ in range(min(threads, len(jobs))):
        threading.Thread(target=work, name="teacher", daemon=True).start()
    wait(found, max(0.0, until_s - time.monotonic()))
    left.clear()
    return found


class ServedModel:
    """The frozen model of a server (`Computes`). k: the width of `topk_ids`."""

    def __init__(self, options: ServedAt, k: int, max_tokens: int) -> None:
        self._url, self._options, self._k = options.url.rstrip("/"), options, k if options.top else 0
        (self._path, self._echo), self._model = FORMS[0], ""
        self.capabilities = EngineCapabilities(
            shares_prefix=True, max_tokens_per_microbatch=max_tokens, outputs=OUTPUTS, trains=False, one_pass=True
        )
        self._warned, self._lock = threading.Event(), threading.Lock()
        self._kept, self._kept_bytes = OrderedDict[bytes, dict[str, Tensor]](), 0
        self._rows, self._hits = 0, 0
        self._calls, self._good_since = 0, 1  # calls, and the first one since the last good probe
        self._unproved, self._era = set[bytes](), 0  # keys since the last good probe, and its number

    def awake(self, *parts: Part) -> AbstractContextManager[None]:
        """Do nothing: no part of this model is on a device of this process."""
        return nullcontext()

    def check_packing(self, *, share_prefix: bool) -> float:
        """Return 0: `probe` has made the checks that a server allows."""
        return 0.0

    def infer(
        self, batch: Batch, columns: Sequence[str], average: bool = False, start: bool = False
    ) -> dict[str, Tensor]:
        """Return the columns as `Computes.infer` does, at temperature 1, at which servers score prompts. Rows for which
        this teacher is not used are not sent: they are in no loss, and have arbitrary numbers."""
        assert not average and not start, "a server has no other weights than its own"
        assert {*columns} <= {*OUTPUTS}, f"a server gives {OUTPUTS}, not {tuple(columns)}"
        flat, n, taught = unshare(batch), batch.num_loss_tokens, batch.row_columns["taught"]
        if not bool((batch.row_columns["temperature"] == 1).all()):
            raise Refused(f"{self._url} scores at temperature 1: set teacher.temperature=1")
        rows = [flat.ids[a:b].numpy() for a, b in zip(flat.seg_start, flat.seg_start[1:])]
        until_s = time.monotonic() + self._options.budget_s
        wanted = [r for r, wants in enumerate(taught.tolist()) if wants] if self._is_unchanged(until_s) else []
        jobs = [partial(self._row, rows[r], until_s, self._era) for r in wanted]
        requested = dict(zip(wanted, run_in_threads(jobs, self._options.parallel, until_s), strict=True))
        out = {"logprobs": torch.where(taught[batch.row_of], torch.nan, -math.log(self._k + 1))}
        out["topk_ids"] = torch.arange(self._k).repeat(n, 1)  # distinct ids, also in rows without an answer
        out["topk_logprobs"] = out["logprobs"][:, None].repeat(1, self._k + 1)
        for r, answer in ((r, found.result()) for r, found in requested.items() if found.done()):
            span = slice(int(flat.row_start[r]), int(flat.row_start[r + 1]))
            at = flat.target_from[span] - int(flat.seg_start[r])  # the row before a token predicts it
            for name, values in answer.items():
                out[name][span] = values[at]
        return {name: out[name] for name in columns}

    def probe(self) -> None:
        """Check that the server has a model with enough context, our tokenizer, and log-probs of prompts that belong to
        their tokens."""
        try:
            card = self._request("/v1/models")["data"][0]
            self._model, room = str(card["id"]), card.get("max_model_len")
            if room is not None and int(room) <= self._options.longest:
                fix = "start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
                raise Refused(f"{self._url} reads {room} tokens, rows have {self._options.longest} and one more: {fix}")
            for text, ours in self._options.texts:
                if found := self._tokenizer_differs(text, ours):
                    raise Refused(f"{self._url}: {found}; take a teacher with the policy's tokenizer")
            ids = self._probe_ids()
            whole = self._score_by_any_form(ids)
            part, self._first = self.score(ids[: len(ids) // 2]), whole["logprobs"]
        except (Unanswered, KeyError, IndexError, TypeError) as e:
            fix = "it must give prompt_logprobs and have /tokenize, as `verl serve` and vLLM do"
            more = f", and teacher.top_k={self._k} of them for gkd_topk (opd needs none)" if self._k else ""
            raise Refused(f"{self._url} cannot be a teacher: {type(e).__name__}: {e}; {fix}{more}") from e
        gap = float((whole["logprobs"][: len(part["logprobs"])] - part["logprobs"]).abs().max())
        if not gap <= TOLERANCE:
            found = f"its log-probs of the same tokens differ by {gap:.3g} with what comes behind them"
            raise Refused(f"{self._url}: {found}: they are of another context, or of no fixed model")

    def _score_by_any_form(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Score the ids with the first request form that the server understands, and keep that form for all later
        requests."""
        first: Unanswered | None = None
        for self._path, self._echo in FORMS:
            try:
                found = self.score(ids)
            except Unanswered as e:
                first = e if first is None or first.status in (404, 405) else first
                if e.status not in TRY_NEXT_FORM:
                    break
            else:
                if self._echo and self._k:
                    why = "its echo names the likeliest tokens by their text, which several ids may have"
                    raise Refused(f"{self._url}: {why}: set algorithm.name=opd, or serve it with vLLM or `verl serve`")
                return found
        assert first is not None
        raise first

    def _probe_ids(self) -> np.ndarray:
        return np.array([i for _, some in self._options.texts for i in some][:24], np.int64)

    def _tokenizer_differs(self, text: str, ours: Sequence[int], until_s: float = math.inf) -> str:
        """Return how the server's tokenizer splits this text if it differs from ours, else ""."""
        wanted = {"model": self._model, "prompt": text, "add_special_tokens": False}
        theirs = self._request("/tokenize", wanted, until_s)["tokens"]
        return "" if theirs == list(ours) else f"its tokenizer reads {text!r} as {theirs}, the policy's as {list(ours)}"

    def _is_unchanged(self, until_s: float) -> bool:
        """Probe the server every `PROBE_EVERY` calls, and in each call while another tokenizer or another model answers
        at its address. Returns False then, and drops the answers that the other model may have given. A server that
        does not answer counts as unchanged: its rows will fail."""
        self._calls += 1
        if self._calls % PROBE_EVERY:
            return True
        (wanted,) = run_in_threads([partial(self._model_differs, until_s)], 1, until_s)
        found = wanted.result() if wanted.done() else None
        if found is None:
            return True
        with self._lock:
            self._era += 1  # answers to running requests are not cached
            for key in self._unproved & self._kept.keys() if found else ():
                self._kept_bytes -= _bytes(self._kept.pop(key))
            self._unproved.clear()
        calls, self._good_since = self._calls - self._good_since, self._calls
        if found:
            fear = f"; in {calls} calls before this one it may have been so: what steps took of them was trained on"
            more = "no sample of this step is taught" + (fear if calls else "")
            logger.warning("teacher %s is another one than at the start: %s; %s", self._url, found, more)
            self._calls -= 1
        return not found

    def _model_differs(self, until_s: float) -> str | None:
        """Return how the server differs from the one at the start, "" if it does not, None if it does not answer."""
        try:
            found = self._tokenizer_differs(*self._options.texts[0], until_s)
            now = self.score(self._probe_ids(), until_s)["logprobs"]
        except (Unanswered, KeyError, TypeError):
            return None
        gap = float((now - self._first).abs().median())
        return found or ("" if gap <= TOLERANCE else f"its log-probs of the same tokens differ by {gap:.3g}")

    def score(self, ids: np.ndarray, until_s: float = math.inf) -> dict[str, Tensor]:
        """Score ids [t]. Returns logprobs [t-1] of ids[1:], and the likeliest ids there (`Computes.infer`). until_s:
        deadline of the request by the monotonic clock."""
        how = {"echo": True, "logprobs": 0} if self._echo else {"prompt_logprobs": self._k}
        wanted = {"max_tokens": 1, "temperature": 0.0, **how}
        if self._path == TOKENS_IN:
            params = {**wanted, "detokenize": False, "ignore_eos": True}
            body = {"model": self._model, "token_ids": ids.tolist(), "sampling_params": params}
        else:
            body = {"model": self._model, "prompt": ids.tolist(), **wanted}
        answer = self._request(self._path, body, until_s)
        try:
            found = (answer if self._path == TOKENS_IN else answer["choices"][0]).get("prompt_logprobs")
            found = echo_as_prompt_logprobs(answer, ids) if self._echo else found
        except (LookupError, TypeError, AttributeError) as e:  # errors of a proxy before the server
            raise Unanswered(f"{self._path}: no completion: {json.dumps(answer)[:200]}") from e
        return read_prompt_logprobs(found, ids, 0 if self._echo else self._k, self._options.vocab)

    def take_metrics(self) -> Metrics:
        """Return the share of rows that were in the cache since the last call."""
        found = {"cache_hits": Metric(float(self._hits), float(self._rows), "sequence")}
        self._rows = self._hits = 0
        return found if found["cache_hits"].count else {}

    def _row(self, ids: np.ndarray, until_s: float, era: int) -> dict[str, Tensor]:
        """Return a row from the cache, else from the server. A row that fails is empty and stays NaN; the first failure
        is logged. era: the counter of trusted periods at the request."""
        key, result = hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), ""
        with self._lock:
            known = self._kept.get(key)
            self._rows, self._hits = self._rows + 1, self._hits + (known is not None)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        for left in reversed(range(ATTEMPTS)):
            try:
                found = self.score(ids, until_s)
            except Unanswered as e:
                result = result or str(e)
                time.sleep(RETRY_AFTER_S if left else 0)
            else:
                if all(bool(values.isfinite().all()) for values in found.values()):  # others are not cached
                    self._keep(key, found, era)
                return found
        if not self._warned.is_set():
            self._warned.set()
            logger.warning("teacher %s: %s; its samples are Invalid while it lasts", self._url, result)
        return {}

    def _keep(self, key: bytes, found: dict[str, Tensor], era: int) -> None:
        """Cache an answer: the model is frozen, so the same ids have the same answer. The least recently used rows are
        dropped for it."""
        with self._lock:
            if era != self._era:
                return
            self._unproved.add(key)
            self._kept_bytes += 0 if key in self._kept else _bytes(found)
            self._kept[key] = found
            while self._kept_bytes > self._options.cache_mb * 2**20:
                self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])

    def _request(self, path: str, body: Mapping[str, Any] | None = None, until_s: float = math.inf) -> Any:
        timeout_s = min(self._options.timeout_s, until_s - time.monotonic())
        if timeout_s <= 0:
            raise Unanswered(f"{path}: not all rows were answered within {self._options.budget_s:g} s")
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        if self._options.key:
            head["Authorization"] = f"Bearer {self._options.key}"
        wanted = urllib.request.Request(self._url + path, data, head)
        try:
            with urllib.request.urlopen(wanted, timeout=timeout_s) as answer:
                return json.loads(_read(answer, time.monotonic() + timeout_s))
        except urllib.error.HTTPError as e:
            raise Unanswered(f"{path}: HTTP {e.code}: {_why(e)}", e.code) from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise Unanswered(f"{path}: {type(e).__name__}: {e}") from e


def _read(answer: http.client.HTTPResponse, until_s: float) -> bytes:
    """Read the body within the deadline, piece by piece, since the socket's own timeout applies to each piece only."""
    parts = []
    while part := answer.read1(2**20):
        parts.append(part)
        if time.monotonic() > until_s:
            raise TimeoutError("the answer did not end in time")
    return b"".join(parts)


def _why(error: urllib.error.HTTPError) -> str:
    """Return the beginning of an error's body, or of the failure to read it."""
    try:
        return " ".join(error.read(400).decode(errors="replace").split())
    except (OSError, http.client.HTTPException) as e:
        return f"no reason ({type(e).__name__})"


def _bytes(found: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in found.values())


def echo_as_prompt_logprobs(answer: Any, ids: np.ndarray) -> list[Any]:
    """Return the prompt of an echo in the form of vLLM's prompt_logprobs. It must be as long as the ids that were sent
    (nothing is added before it), followed by the one sampled token."""
    found = list((answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or ())
    read = (answer.get("usage") or {}).get("prompt_tokens", len(ids))
    if read != len(ids) or len(found) not in (len(ids), len(ids) + 1):
        raise Unanswered(
            f"an echo of {len(found)} log-probs and a prompt of {read} tokens, where {len(ids)} were sent", 200
        )
    return [None, *({str(i): {"logprob": of}} for i, of in zip(ids[1:].tolist(), found[1:]))]


def read_prompt_logprobs(found: Any, ids: np.ndarray, k: int, vocab: int) -> dict[str, Tensor]:
    """Convert vLLM's prompt_logprobs to tensors: nothing for the first token, then {id: {logprob}} with the actual
    token and the k likeliest, all below `vocab`. The last column is the log-probability of all other ids."""
    if not isinstance(found, list) or len(found) != len(ids) or found[0] is not None:
        raise Unanswered(f"no prompt_logprobs of {len(ids)} tokens, of which the first has none", 200)
    own, named, logs = [], [], []
    try:
        for token, row in zip(ids[1:].tolist(), found[1:]):
            known = {int(i): float(of["logprob"]) for i, of in row.items()}
            own.append(known[token])
            best = sorted(known, key=lambda i: -known[i])[:k]
            if len(best) < k:
                raise Unanswered(f"{len(best)} likeliest tokens where {k} were asked for")
            if best and max(best) >= vocab:
                fix = "take a teacher whose head is of that size, or algorithm.name=opd"
                raise Unanswered(f"token {max(best)} is among the likeliest, and the policy has {vocab}: {fix}")
            left = 1 - math.fsum(math.exp(known[i]) for i in best)
            named.append(best)
            logs.append([*(known[i] for i in best), math.log(left) if left > 1e-7 else math.log(1e-7)])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise Unanswered(f"prompt_logprobs that are not those of the prompt: {type(e).__name__}: {e}") from e
    rows = len(own)
    return {
        "logprobs": torch.tensor(own, dtype=torch.float32),
        "topk_ids": torch.tensor(named, dtype=torch.int64).view(rows, k),
        "topk_logprobs": torch.tensor(logs, dtype=torch.float32).view(rows, k + 1),
    }
