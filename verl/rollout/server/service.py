"""The engine of a server: admission and deadlines of requests, and the state in which it may answer. It uses no
HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from verl.rollout.base import Completion, GenerateRequest, OnTokens, RolloutEngine, Scores
from verl.rollout.server.metrics import Metrics
from verl.rollout.server.options import ServeConfig
from verl.rollout.server.requests import ApiError, GenerationCall, check_ids, check_length, refuse_top_logprobs
from verl.rollout.server.responses import Answer, Form
from verl.rollout.server.texts import Texts
from verl.rollout.server.work import LARGE, Threads, Turns
from verl.transfer_queue.base import MediaStore
from verl.types import Sampling

if TYPE_CHECKING:
    from verl.models.pictures import Pictures

HEALTH_TIMEOUT_S = 10.0  # for a check of the engine
HEALTH_KEPT_S = 1.0  # during which the result of a check counts
HEALTH_WAIT_S = 0.05  # for an engine that passed its last check: it answers between two of its steps
KEPT_NAMES = 256  # names of the latest weights
MOST_ABORTED = 2**14  # requests that one call aborts by their ids
ABORT_TIMEOUT_S = 5.0  # for sending the answers that were aborted


class News:
    """The new tokens of the answers of a stream that are not sent yet. Those of one answer are sent together."""

    def __init__(self) -> None:
        self._held: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # ids and log-probs, by the answer's place
        self._changed, self._ended = asyncio.Event(), False

    def add(self, i: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Add tokens of answer i."""
        self._held.setdefault(i, []).append((ids, logprobs))
        self._changed.set()

    def end(self) -> None:
        """Record that there will be no more tokens."""
        self._ended = True
        self._changed.set()

    async def some(self) -> bool:
        """Wait for new tokens. Return False if none are left and the stream has ended."""
        if not self._held and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._held)

    def pieces(self, form: Form, answers: Sequence[Answer], end: float) -> list[bytes]:
        """Return the chunks, as JSON, of at least one answer with new tokens, and of more until time.monotonic()
        reaches `end`."""
        found = list[bytes]()
        while self._held:
            i = next(iter(self._held))
            ids, logprobs = map(np.concatenate, zip(*self._held.pop(i), strict=True))
            if (piece := form.piece(i, answers[i], ids, logprobs)) is not None:
                found.append(msgspec.json.encode(form.chunk([piece])))
            if time.monotonic() >= end:
                break
        return found


@dataclass(slots=True, kw_only=True)
class Service:
    """An engine, and the state in which it serves HTTP requests."""

    engine: RolloutEngine
    texts: Texts
    options: ServeConfig
    vocab_size: int
    max_context_tokens: int
    banned: tuple[int, ...] = ()
    """Ids that the model must not sample."""
    media: MediaStore | None = None
    """The store from which the engine reads images; None: the model reads text alone."""
    pictures: Pictures | None = None
    """The reader of images that the engine has; None: the model reads text alone."""
    grace_s: float = 0.0
    """Seconds that running answers have to end after the server was stopped."""
    metrics: Metrics = field(default_factory=Metrics)
    threads: Threads = field(default_factory=Threads)
    starts: Turns = field(default_factory=Turns)
    """Turns of the event loop in which new requests begin."""
    pieces: Turns = field(default_factory=Turns)
    """Turns of the event loop in which pieces of streams are encoded."""
    running: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The ids of the engine's requests, by the id of the HTTP request."""
    sequences: int = 0
    """The number of answers that are being generated."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no answer is being generated."""
    draining: bool = False
    """True after the server was stopped: new requests are refused."""
    failed: str | None = None
    """The reason why nothing may be generated, or None."""
    paused: bool = False
    asleep: set[str] = field(default_factory=set)
    """The parts of the engine's memory that are freed."""
    weights: dict[int, str] = field(default_factory=dict)
    """The names of the latest weights, as their senders chose them, by version."""
    loading: set[asyncio.Future[int]] = field(default_factory=set)
    """The running loads of new weights."""
    health: asyncio.Task[None] | None = None
    """The last check of the engine."""
    health_at: float = 0.0
    """The time at which it began (monotonic clock, in seconds)."""
    well: bool = False
    """True if the engine has passed its last check."""

    def __post_init__(self) -> None:
        self.call_weights(self.engine.version, str(self.engine.version))

    def call_weights(self, version: int, name: str) -> None:
        """Record the name of a version of the weights."""
        self.weights.pop(version, None)
        self.weights[version] = name
        while len(self.weights) > KEPT_NAMES:
            del self.weights[next(iter(self.weights))]

    def loads(self, load: Awaitable[int]) -> asyncio.Future[int]:
        """Start a load of new weights and count it as running until it ends."""
        loading = asyncio.ensure_future(load)
        self.loading.add(loading)
        loading.add_done_callback(self.loading.discard)
        return loading

    @property
    def live(self) -> str:
        """The name of the live weights."""
        return self.weights.get(self.engine.version, str(self.engine.version))

    def check_able(self) -> None:
        """Raise ApiError if nothing can be generated now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.asleep:
            raise ApiError(503, f"the engine sleeps ({', '.join(sorted(self.asleep))}): POST /wake_up", code="asleep")
        if self.failed is not None:
            raise ApiError(503, self.failed, code="no_weights")

    def check_prompts(self, prompts: list[np.ndarray], param: str) -> None:
        """Raise ApiError if a prompt is empty, too long, or has ids outside the vocabulary, or if there is none."""
        if not prompts:
            raise ApiError(400, f"{param} is empty", param=param, code="empty_prompt")
        for ids in prompts:
            check_ids(ids, param, vocab_size=self.vocab_size, max_context_tokens=self.max_context_tokens)

    def check_count(self, wanted: int) -> None:
        """Raise ApiError for more answers than the server ever generates at once."""
        if wanted > (most := self.options.max_sequences):
            message = f"{wanted} answers in one request; serve.max_sequences={most}: ask for fewer at a time"
            raise ApiError(400, message, param="n", code="too_many_answers")

    def check_lengths(self, lengths: Iterable[int], param: str) -> None:
        """Raise ApiError for a list of ids that is longer than a context, before it is converted."""
        for length in lengths:
            check_length(length, param, self.max_context_tokens)

    def check_texts(self, texts: Iterable[str], param: str) -> None:
        """Raise ApiError for a text that is longer than any context, before it is tokenised."""
        for text in texts:
            self.texts.check_size(len(text), param, self.max_context_tokens)

    @contextlib.contextmanager
    def admitted(self, call: GenerationCall) -> Iterator[tuple[str, ...]]:
        """Reserve room for a call's answers and yield their ids in the engine. Raise ApiError if there is no room."""
        wanted, most = len(call.prompts) * call.n, self.options.max_sequences
        self.check_count(wanted)
        if self.sequences + wanted > most:
            raise ApiError(429, f"{self.sequences} answers are in the making (serve.max_sequences={most}); try again")
        if call.request_id in self.running:
            raise ApiError(400, f"request_id={call.request_id!r} is running", param="request_id", code="invalid_value")
        names = tuple(f"{call.request_id}-{i}" for i in range(wanted))
        self.running[call.request_id], started = names, time.monotonic()
        self.sequences += wanted
        self.idle.clear()
        try:
            if self.media is not None:
                for content in call.contents.values():
                    self.media.put(content, call.request_id)
            yield names
        finally:
            if self.media is not None:
                self.media.drop([call.request_id])
            self.sequences -= wanted
            if not self.sequences:
                self.idle.set()
            del self.running[call.request_id]
            self.metrics.took(time.monotonic() - started)

    async def generate(
        self, call: GenerationCall, names: tuple[str, ...], callbacks: list[OnTokens] | None = None
    ) -> list[Completion]:
        """Return all answers of a call. They share the computation of their prompt. If one fails, all are cancelled."""
        wanted, runs = call.samplings(self.max_context_tokens), list[asyncio.Future[Completion]]()
        try:
            with await self._images_of(call):
                runs += [
                    asyncio.ensure_future(self._one(names[i], ids, sampling, callbacks[i] if callbacks else None, call))
                    for i, (ids, sampling) in enumerate(wanted)
                ]
                found = await asyncio.gather(*runs)
        except ValueError as e:  # the engine refuses the request
            raise ApiError(400, str(e), code="invalid_value") from None
        except RuntimeError as e:  # it has failed, or was closed
            raise ApiError(500, str(e), code="engine_failed") from e
        finally:
            for run in runs:
                run.cancel()
        self.metrics.prompt_tokens += sum(map(len, call.prompts))
        self.metrics.generated_tokens += sum(len(c.ids) for c in found)
        return found

    async def _images_of(self, call: GenerationCall) -> contextlib.AbstractContextManager[None]:
        """Read the images of a call in a thread, and return the block in which the engine gets them at once: its own
        reading would block the event loop."""
        if self.pictures is None or not call.media:
            return contextlib.nullcontext()
        names = [m.reference for m in call.media]
        return self.pictures.holding(await self.threads.run(LARGE + 1, self.pictures.of, names))

    async def _one(
        self, name: str, ids: np.ndarray, sampling: Sampling, on_tokens: OnTokens | None, call: GenerationCall
    ) -> Completion:
        given: dict[str, Any] = {"prefix_key": call.request_id, "media": call.media, "on_tokens": on_tokens}
        return await self.engine.generate(GenerateRequest(name, ids, sampling, **given))

    async def whole(self, form: Form, names: tuple[str, ...]) -> bytes:
        """Return the JSON of an answer."""
        async with self._deadline():
            top = form.call.prompt_logprobs
            scores = [] if top is None else [await self._scores(ids, top) for ids in form.call.prompts]
            found = await self.generate(form.call, names)
            size = sum(len(c.ids) for c in found) + sum(s.top_ids.size for s in scores)
            return await self.threads.run(size, form.encoded, found, scores)

    async def _scores(self, ids: np.ndarray, top: int) -> Scores:
        """Return the scores of a prompt, with the `top` most likely tokens of each position if the engine ranks
        tokens."""
        if (await self.engine.capabilities()).ranks_tokens:
            return await self.engine.score_top(ids, top)
        refuse_top_logprobs(top, "prompt_logprobs", "prompt_logprobs=0 gives that")
        nothing = np.zeros((max(0, len(ids) - 1), 0))
        return Scores(await self.engine.score(ids), nothing, nothing)

    async def chunks(self, form: Form, names: tuple[str, ...]) -> AsyncGenerator[list[bytes], None]:
        """Yield the chunks of a streamed answer as JSON, in groups that are ready together."""
        answers, news = form.answers(), News()

        def follow(i: int) -> OnTokens:
            held, reported_s = list[tuple[np.ndarray, np.ndarray]](), time.monotonic()

            def add(ids: np.ndarray, logprobs: np.ndarray) -> None:
                nonlocal reported_s
                held.append((ids, logprobs))  # those that are held at the end are sent with the last chunk
                if (now := time.monotonic()) - reported_s >= form.call.interval_s:
                    news.add(i, *map(np.concatenate, zip(*held, strict=True)))
                    reported_s = now
                    held.clear()

            return add

        async with self._deadline():
            run = asyncio.ensure_future(self.generate(form.call, names, [follow(i) for i in range(len(answers))]))
            run.add_done_callback(lambda _: news.end())
            try:
                opened = [form.opening(i, answer) for i, answer in enumerate(answers)]
                if any(opened):
                    yield [msgspec.json.encode(form.chunk(opened))]
                while await news.some():
                    yield await self.pieces.run(partial(news.pieces, form, answers))
                completions = await run
                for i, (answer, completion) in enumerate(zip(answers, completions, strict=True)):
                    last = await self.threads.run(len(completion.ids) - answer.sent, form.last, i, answer, completion)
                    yield [msgspec.json.encode(form.chunk([last]))]
                if form.call.include_usage:
                    yield [msgspec.json.encode(form.chunk([], form.usage(completions)))]
            finally:
                run.cancel()

    async def check_health(self) -> None:
        """Raise ApiError 503 if the engine does not score one token. A result counts for a second. A busy engine that
        passed its last check has `HEALTH_TIMEOUT_S` to answer."""
        if self.draining or self.failed is not None:
            raise ApiError(503, self.failed or "the server is shutting down", code="unhealthy")
        if self.asleep or self.loading:  # it does not answer during a load
            return
        now = time.monotonic()
        if self.health is None or (self.health.done() and now - self.health_at > HEALTH_KEPT_S):
            self.health, self.health_at = asyncio.ensure_future(self._probe()), now
        done, _ = await asyncio.wait({self.health}, timeout=HEALTH_WAIT_S if self.well else None)
        if not done:
            return
        self.well = False
        try:
            self.health.result()
        except (ValueError, RuntimeError) as e:
            raise ApiError(503, f"the engine does not answer: {e}", code="unhealthy") from e
        self.well = True

    async def _probe(self) -> None:
        """Score one token. Raise RuntimeError if that takes longer than `HEALTH_TIMEOUT_S` or is not finite."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                found = await self.engine.score(np.zeros(2, np.int64))
        except TimeoutError:
            raise RuntimeError(f"no log-prob of one token within {HEALTH_TIMEOUT_S:.0f} s") from None
        if not np.isfinite(found).all():
            raise RuntimeError(f"the log-prob of a token is {found.tolist()}")

    async def abort(self, request_ids: list[str] | None) -> int:
        """Abort requests by the ids of their HTTP requests (None: all), and return the number of aborted answers."""
        if request_ids is None:
            return await self.engine.abort()
        if len(request_ids) > MOST_ABORTED:
            message = f"request_ids holds {len(request_ids):,}; at most {MOST_ABORTED:,} at one time"
            raise ApiError(400, message, param="request_ids", code="invalid_value")
        plain = {name.removeprefix("generate-tokens-") for name in request_ids}
        return await self.engine.abort([name for own in plain for name in self.running.get(own, ())])

    async def drain(self) -> None:
        """Refuse new requests. Running ones get `grace_s` to end, and are aborted then."""
        self.draining = True
        if not await self._idle(self.grace_s):
            with contextlib.suppress(RuntimeError):  # the calls of a failed engine have ended with its error
                await self.engine.abort()
            await self._idle(ABORT_TIMEOUT_S)

    async def _idle(self, within_s: float) -> bool:
        """Wait for the end of all answers, at most `within_s`, and return true if they have ended."""
        if self.sequences:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), within_s)
        return not self.sequences

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Raise ApiError 504 if the block takes longer than serve.request_timeout_s."""
        limit_s = self.options.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            message = f"the answer was not ready within serve.request_timeout_s={limit_s:g}; ask for fewer tokens"
            raise ApiError(504, message, code="timeout") from None
