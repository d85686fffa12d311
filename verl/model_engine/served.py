"""A frozen model behind a server, which says how likely the tokens of a row are: `verl serve`, vLLM, and what speaks
OpenAI's completions with prompt_logprobs or echo. It is asked for whole rows, by their ids; a row that it fails on is
NaN."""

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
from verl.model_engine.base import EngineCapabilities, EngineContext, Part, ServedAt
from verl.types import Metric, Metrics

TOKENS_IN, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
WAYS = ((TOKENS_IN, False), (COMPLETIONS, False), (COMPLETIONS, True))
"""To ask for the log-probs of a prompt: the path, and whether by `echo` with `logprobs`, as OpenAI's completions do."""
OTHERWISE = (200, 400, 404, 405, 422)  # of an answer: it may be asked for in another way
AGAIN = 2  # times that a row is asked for
AGAIN_S = 0.5  # between them
TOLERANCE = 0.1  # nats, between two answers of one server about the same tokens
PROBE_EVERY = 10  # calls, after which it is asked whether it is who it was
logger = logging.getLogger(__name__)
OUTPUTS = ("logprobs", "topk_ids", "topk_logprobs")
A = TypeVar("A")


class Unanswered(RuntimeError):
    """No answer, or not the one that was asked for. status: of HTTP; 200: nothing of what was asked for; 0: none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def build(options: ServedAt, context: EngineContext) -> ServedModel:
    """ValueError for a server that cannot be this teacher, before anything is sampled."""
    made = ServedModel(options, context.top_k, context.max_tokens_per_microbatch)
    (probed,) = beside([made.probe], 1, time.monotonic() + options.budget_s)
    if not probed.done():
        raise ValueError(f"{options.url} cannot be a teacher: its first answers took more than {options.budget_s:g} s")
    probed.result()
    return made


def beside(jobs: Sequence[Callable[[], A]], threads: int, until_s: float) -> list[Future[A]]:
    """What they return or raise, where it is there by then (monotonic clock). Who is sent a byte now and then may be
    held for ever: nobody waits for these threads, not even the end of the process."""
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
    """Of a `ModelEngine` what a frozen model does. k: of `topk_ids`."""

    def __init__(self, options: ServedAt, k: int, max_tokens: int) -> None:
        self._url, self._options, self._k = options.url.rstrip("/"), options, k if options.top else 0
        (self._path, self._echo), self._model = WAYS[0], ""
        self.capabilities = EngineCapabilities(
            shares_prefix=True, max_tokens_per_microbatch=max_tokens, outputs=OUTPUTS, trains=False, one_pass=True
        )
        self._told, self._lock = threading.Event(), threading.Lock()
        self._kept, self._kept_bytes = OrderedDict[bytes, dict[str, Tensor]](), 0
        self._rows, self._hits = 0, 0
        self._calls, self._known_at = 0, 1  # calls, and the first that nobody has vouched for yet
        self._unsure, self._era = set[bytes](), 0  # what was kept since it was known, and a number of that time

    def awake(self, *parts: Part) -> AbstractContextManager[None]:
        """Nothing of it is on a device of ours."""
        return nullcontext()

    def infer(self, batch: Batch, columns: Sequence[str], average: bool = False) -> dict[str, Tensor]:
        """See `ModelEngine.infer`; at temperature 1, as servers score prompts. It is not asked for untaught rows, which
        are in no loss: any number stands there."""
        assert not average, "a server has no moving average of our weights"
        assert {*columns} <= {*OUTPUTS}, f"a server gives {OUTPUTS}, not {tuple(columns)}"
        flat, n, untaught = unshare(batch), batch.num_loss_tokens, batch.row_columns["untaught"]
        if not bool((batch.row_columns["temperature"] == 1).all()):
            raise ValueError(f"{self._url} scores at temperature 1: set teacher.temperature=1")
        rows = [flat.ids[a:b].numpy() for a, b in zip(flat.seg_start, flat.seg_start[1:])]
        until_s = time.monotonic() + self._options.budget_s
        wanted = [r for r, left in enumerate(untaught.tolist()) if not left] if self._is_who_it_was(until_s) else []
        jobs = [partial(self._row, rows[r], until_s, self._era) for r in wanted]
        asked = dict(zip(wanted, beside(jobs, self._options.parallel, until_s), strict=True))
        out = {"logprobs": torch.where(untaught[batch.row_of], -math.log(self._k + 1), torch.nan)}
        out["topk_ids"] = torch.arange(self._k).repeat(n, 1)  # which differ, also where nothing is known
        out["topk_logprobs"] = out["logprobs"][:, None].repeat(1, self._k + 1)
        for r, answer in ((r, found.result()) for r, found in asked.items() if found.done()):
            span = slice(int(flat.row_start[r]), int(flat.row_start[r + 1]))
            at = flat.target_from[span] - int(flat.seg_start[r])  # what predicts a token stands before it
            for name, values in answer.items():
                out[name][span] = values[at]
        return {name: out[name] for name in columns}

    def probe(self) -> None:
        """The server has a model with room enough, our tokenizer, and log-probs of prompts that mean what they say."""
        try:
            card = self._ask("/v1/models")["data"][0]
            self._model, room = str(card["id"]), card.get("max_model_len")
            if room is not None and int(room) <= self._options.longest:
                fix = "start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
                raise ValueError(
                    f"{self._url} reads {room} tokens, rows have {self._options.longest} and one more: {fix}"
                )
            for text, ours in self._options.texts:
                if said := self._reads_otherwise(text, ours):
                    raise ValueError(f"{self._url}: {said}; take a teacher with the policy's tokenizer")
            ids = self._probe_ids()
            whole = self._asked_somehow(ids)
            part, self._first = self.score(ids[: len(ids) // 2]), whole["logprobs"]
        except (Unanswered, KeyError, IndexError, TypeError) as e:
            fix = "it must give prompt_logprobs and have /tokenize, as `verl serve` and vLLM do"
            more = f", and teacher.top_k={self._k} of them for gkd_topk (opd needs none)" if self._k else ""
            raise ValueError(f"{self._url} cannot be a teacher: {type(e).__name__}: {e}; {fix}{more}") from e
        gap = float((whole["logprobs"][: len(part["logprobs"])] - part["logprobs"]).abs().max())
        if not gap <= TOLERANCE:
            said = f"its log-probs of the same tokens differ by {gap:.3g} with what comes behind them"
            raise ValueError(f"{self._url}: {said}: they are of another context, or of no fixed model")

    def _asked_somehow(self, ids: np.ndarray) -> dict[str, Tensor]:
        """What it says of them in the first way that it understands, which it is asked in from now on."""
        first: Unanswered | None = None
        for self._path, self._echo in WAYS:
            try:
                found = self.score(ids)
            except Unanswered as e:
                first = e if first is None or first.status in (404, 405) else first
                if e.status not in OTHERWISE:
                    break
            else:
                if self._echo and self._k:
                    why = "its echo names the likeliest tokens by their text, which several ids may have"
                    raise ValueError(
                        f"{self._url}: {why}: set algorithm.name=opd, or serve it with vLLM or `verl serve`"
                    )
                return found
        assert first is not None
        raise first

    def _probe_ids(self) -> np.ndarray:
        return np.array([i for _, some in self._options.texts for i in some][:24], np.int64)

    def _reads_otherwise(self, text: str, ours: Sequence[int], until_s: float = math.inf) -> str:
        """How its tokenizer cuts this text, where not as ours does."""
        asked = {"model": self._model, "prompt": text, "add_special_tokens": False}
        theirs = self._ask("/tokenize", asked, until_s)["tokens"]
        return "" if theirs == list(ours) else f"its tokenizer reads {text!r} as {theirs}, the policy's as {list(ours)}"

    def _is_who_it_was(self, until_s: float) -> bool:
        """Asked every so many calls, and again in the next one while another tokenizer or another model is behind the
        address. One that does not answer may be who it was: its rows will show. What another one may have said of rows
        is forgotten."""
        self._calls += 1
        if self._calls % PROBE_EVERY:
            return True
        (asked,) = beside([partial(self._differs, until_s)], 1, until_s)
        said = asked.result() if asked.done() else None
        if said is None:
            return True
        with self._lock:
            self._era += 1  # who is still reading adds nothing
            for key in self._unsure & self._kept.keys() if said else ():
                self._kept_bytes -= _bytes(self._kept.pop(key))
            self._unsure.clear()
        calls, self._known_at = self._calls - self._known_at, self._calls
        if said:
            fear = f"; in {calls} calls before this one it may have been so: what steps took of them was trained on"
            more = "no sample of this step is taught" + (fear if calls else "")
            logger.warning("teacher %s is another one than at the start: %s; %s", self._url, said, more)
            self._calls -= 1
        return not said

    def _differs(self, until_s: float) -> str | None:
        """From the one at the start; None: it does not say."""
        try:
            said = self._reads_otherwise(*self._options.texts[0], until_s)
            now = self.score(self._probe_ids(), until_s)["logprobs"]
        except (Unanswered, KeyError, TypeError):
            return None
        gap = float((now - self._first).abs().median())
        return said or ("" if gap <= TOLERANCE else f"its log-probs of the same tokens differ by {gap:.3g}")

    def score(self, ids: np.ndarray, until_s: float = math.inf) -> dict[str, Tensor]:
        """Of ids [t]: logprobs [t-1] of ids[1:], and what is likeliest there (see `ModelEngine.infer`). until_s: by the
        monotonic clock, when nobody waits for it any more."""
        how = {"echo": True, "logprobs": 0} if self._echo else {"prompt_logprobs": self._k}
        wanted = {"max_tokens": 1, "temperature": 0.0, **how}
        if self._path == TOKENS_IN:
            params = {**wanted, "detokenize": False, "ignore_eos": True}
            body = {"model": self._model, "token_ids": ids.tolist(), "sampling_params": params}
        else:
            body = {"model": self._model, "prompt": ids.tolist(), **wanted}
        answer = self._ask(self._path, body, until_s)
        try:
            found = (answer if self._path == TOKENS_IN else answer["choices"][0]).get("prompt_logprobs")
            found = echoed(answer, ids) if self._echo else found
        except (LookupError, TypeError, AttributeError) as e:  # of who stands before the server
            raise Unanswered(f"{self._path}: no completion: {json.dumps(answer)[:200]}") from e
        return read_answer(found, ids, 0 if self._echo else self._k, self._options.vocab)

    def take_metrics(self) -> Metrics:
        """The share of rows that were known, since it was asked last."""
        found = {"cache_hits": Metric(float(self._hits), float(self._rows), "sequence")}
        self._rows = self._hits = 0
        return found if found["cache_hits"].count else {}

    def _row(self, ids: np.ndarray, until_s: float, era: int) -> dict[str, Tensor]:
        """What is known of a row, else what the server says. Nothing where it fails: that row stays NaN. The first
        failure is told. era: in which it was asked for."""
        key, said = hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), ""
        with self._lock:
            known = self._kept.get(key)
            self._rows, self._hits = self._rows + 1, self._hits + (known is not None)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        for left in reversed(range(AGAIN)):
            try:
                found = self.score(ids, until_s)
            except Unanswered as e:
                said = said or str(e)
                time.sleep(AGAIN_S if left else 0)
            else:
                if all(bool(values.isfinite().all()) for values in found.values()):  # else it is asked again
                    self._keep(key, found, era)
                return found
        if not self._told.is_set():
            self._told.set()
            logger.warning("teacher %s: %s; its samples are Invalid while it lasts", self._url, said)
        return {}

    def _keep(self, key: bytes, found: dict[str, Tensor], era: int) -> None:
        """The model is frozen: the same ids have the same answer. What was read longest ago makes room."""
        with self._lock:
            if era != self._era:
                return
            self._unsure.add(key)
            self._kept_bytes += 0 if key in self._kept else _bytes(found)
            self._kept[key] = found
            while self._kept_bytes > self._options.cache_mb * 2**20:
                self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, until_s: float = math.inf) -> Any:
        timeout_s = min(self._options.timeout_s, until_s - time.monotonic())
        if timeout_s <= 0:
            raise Unanswered(f"{path}: not all rows were answered within {self._options.budget_s:g} s")
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        if self._options.key:
            head["Authorization"] = f"Bearer {self._options.key}"
        asked = urllib.request.Request(self._url + path, data, head)
        try:
            with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
                return json.loads(_read(answer, time.monotonic() + timeout_s))
        except urllib.error.HTTPError as e:
            raise Unanswered(f"{path}: HTTP {e.code}: {_why(e)}", e.code) from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise Unanswered(f"{path}: {type(e).__name__}: {e}") from e


def _read(answer: http.client.HTTPResponse, until_s: float) -> bytes:
    """The body, however it is dealt out: the socket's own limit is of every piece."""
    parts = []
    while part := answer.read1(2**20):
        parts.append(part)
        if time.monotonic() > until_s:
            raise TimeoutError("the answer did not end in time")
    return b"".join(parts)


def _why(error: urllib.error.HTTPError) -> str:
    """What stands in the body, which may stall or be cut off as any other."""
    try:
        return " ".join(error.read(400).decode(errors="replace").split())
    except (OSError, http.client.HTTPException) as e:
        return f"no reason ({type(e).__name__})"


def _bytes(found: Mapping[str, Tensor]) -> int:
    return sum(x.nbytes for x in found.values())


def echoed(answer: Any, ids: np.ndarray) -> list[Any]:
    """The prompt of an echo as vLLM's prompt_logprobs. It stands before the one token that was to be drawn, and is as
    long as we have it: nothing was put before it."""
    told = list((answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or ())
    read = (answer.get("usage") or {}).get("prompt_tokens", len(ids))
    if read != len(ids) or len(told) not in (len(ids), len(ids) + 1):
        raise Unanswered(
            f"an echo of {len(told)} log-probs and a prompt of {read} tokens, where {len(ids)} were sent", 200
        )
    return [None, *({str(i): {"logprob": of}} for i, of in zip(ids[1:].tolist(), told[1:]))]


def read_answer(found: Any, ids: np.ndarray, k: int, vocab: int) -> dict[str, Tensor]:
    """vLLM's prompt_logprobs: nothing for the first token, then {id: {logprob}} with the token that stands there and
    the k likeliest, all below `vocab`. The probability of all others is what is left of 1."""
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
