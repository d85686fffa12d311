"""What kinds of server differ in: what they are asked, and how their answers are read. No connection is made here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from verl.rollout.base import PauseMode, RolloutContext, WeightReader
from verl.rollout.http import ServerRefused
from verl.rollout.wire import Drawn, version_of
from verl.types import Sampling
from verl.weight_sync.base import Bucket, CheckedReader, InBuckets, SyncError, WeightSource, open_stream

SEGMENTS = "verl.weight_sync.shm:open_weights"

Post = Callable[..., Awaitable[Any]]
"""(path, body, timeout in seconds) -> what it answered. Without a body an empty one, without a timeout that
of control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a server must be. name: in errors · versions: from, below; None: any · needs: how it gets a path that it
    lacks."""

    name: str
    versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    needs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds: to start · for one answer, however long · for a control call."""

    start_s: float = 600.0
    request_s: float = 600.0
    control_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """tokens: that fit behind the prompt · vocab: its size · ends: the model's end tokens."""

    tokens: int
    vocab: int
    ends: Sequence[int]

    def stops(self, sampling: Sampling) -> list[int]:
        """Every end is asked for by its id: what the server thinks of its own end token does not matter. Ids that no
        token has are left out: some servers make an index of them."""
        asked = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.ends)]
        return sorted({i for i in asked if 0 <= i < self.vocab})

    def asked(self, sampling: Sampling) -> dict[str, Any]:
        """The fields of a draw that servers of completions have in common."""
        return {
            "max_tokens": min(sampling.max_tokens, self.tokens),
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stop_token_ids": self.stops(sampling),
            "ignore_eos": True,
        }


class Api:
    """`post` and `get` reach the server. A server's refusals and deaths are raised by them (rollout/http.py); what it
    says and does not mean, by these functions: `NotUnderstood`, `SyncError`. What has no body here is not asked of a
    server whose fields say that it cannot."""

    generate: str
    """The path that answers a request, also as a stream of events."""
    modes: frozenset[PauseMode] = frozenset()
    """What its own pause can do; the rest is done by the client, but for `keep`."""
    aborts = False
    """It can be told to end a request. Without, the connection is closed, and what came by then is the answer."""
    updates = False
    """It takes new weights as it runs. Without, it is started anew with them, or keeps its own."""
    ahead = False
    """It reads new weights while it draws by the old ones, before it is made to stand still for the rest."""
    offloads = False
    """Asleep at level 1, its weights lie in the host's memory, and are to be woken too."""
    plain = False
    """Its log-probs are those at temperature 1 of all tokens, and other draws are refused."""
    follows = False
    """Its answers come as streams where it is one of several, so that another one can go on with them."""
    marks = False
    """It names weights as it is told to: by their version, and by who gave them to it."""
    pours = False
    """It takes weights in parts, each of which is gone when the next one comes."""
    by_position = False
    """What it draws is a function of the seed and the position in the answer (`Sampling.position`)."""
    exact = True
    """It refuses the first id behind its vocabulary, and goes on."""
    scores: tuple[float, ...] = (0.0, 1.0)
    """Temperatures at which it tells log-probs of prompts (0: the greedy one's are those at 1)."""
    names: Literal["model", "saved"] = "model"
    """Of tensors, that it knows: those of the model in memory, or those of a saved folder (experts one by one)."""
    transport: str
    """How the address of weights that it reads must begin, and the sync.engine that makes such."""
    sync: str

    def body(self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: Room) -> dict[str, Any]:
        """ValueError for what it cannot honour. With `stream` true the same request is answered as a stream."""
        raise NotImplementedError

    def read(self, drawn: Drawn, answer: Any) -> None:
        """Note a whole answer, or the next event of a stream."""
        raise NotImplementedError

    async def score(self, post: Post, model: str, ids: np.ndarray, timeout_s: float) -> np.ndarray:
        """Log-probs [t-1] float32 of ids[1:] at temperature 1."""
        raise NotImplementedError

    async def abort(self, post: Post, names: Sequence[str]) -> None:
        raise NotImplementedError

    async def pause(self, post: Post, mode: PauseMode) -> None:
        raise NotImplementedError

    async def resume(self, post: Post) -> None:
        """Nothing, where it cannot stand still."""

    async def announce(self, post: Post, sent: WeightSource) -> None:
        """What comes before new weights are live, and need not wait until the server stands still if it is `ahead`."""

    async def pour(self, post: Post, sent: WeightSource, buckets: AsyncIterator[Bucket]) -> None:
        """Instead of that, where the weights lie nowhere as a whole: one bucket after the other, each as it comes, into
        a server that stands still. It has read one when the next one is asked for."""
        raise NotImplementedError

    async def deliver(self, post: Post, sent: WeightSource, name: str) -> None:
        """New weights, which were announced, into a server that stands still, and no prefix of older ones after. name:
        of them, in its answers."""
        raise NotImplementedError

    async def sleep(self, post: Post, level: int) -> int:
        """Bytes, as far as it says."""
        raise NotImplementedError

    async def wake(self, post: Post, part: str) -> None:
        """`weights` or `kv`, which is asleep. With the last one it goes on."""
        raise NotImplementedError

    def adapting(self, name: str, folder: str) -> tuple[str, dict[str, Any]]:
        """What it is asked to load an adapter, by a name that no other one had."""
        raise NotImplementedError

    def dropping(self, name: str) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError

    def routable(self, body: dict[str, Any]) -> bool:
        """A router passes it on as it is."""
        return False

    async def behind(self, get: Post) -> set[str]:
        """The URLs of the servers that a router knows."""
        raise NotImplementedError

    async def paused(self, get: Post) -> bool | None:
        """Whether it stands still; None: it does not tell."""
        return None

    async def progress(self, get: Post) -> Any:
        """What changes whenever it has drawn a token; None: it does not tell."""
        return None

    async def release(self, get: Post) -> str:
        """Its own version, as text."""
        return str((await get("/version"))["version"])

    async def model(self, get: Post) -> tuple[str, int | None]:
        """The name that requests give, and how many tokens a sequence may have (None: it does not say)."""
        first = (await get("/v1/models"))["data"][0]
        room = first.get("max_model_len")
        return str(first["id"]), None if room is None else int(room)

    async def unlike(self, post: Post, model: str, config: Any) -> str:
        """What shows that its model is not that of this config; nothing: "". Asked of servers that run already: by ids
        at the edge of the vocabulary, which it refuses."""
        vocab, one = int(config.vocab_size), Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        for token, known in ((vocab - 1, True), *([(vocab, False)] if self.exact else [])):
            room = Room(tokens=1, vocab=token + 1, ends=())
            try:
                await post(self.generate, self.body(model, f"edge-{token}", [token], one, room))
            except ServerRefused as e:
                if e.status >= 500:
                    raise
                if known:
                    return f"it does not take id {token} ({e})"
            else:
                if not known:
                    return f"it takes id {token}"
        return ""

    async def prepare(self, post: Post, model: str, vocab: int) -> None:
        """Once, when it is up: ValueError for a server that cannot do what it must, `ServerRefused` where it says so
        itself."""


async def model_of(api: Api, expected: Expected, url: str, get: Post, wants: int) -> str:
    """The name of its model; ValueError for a server of another version, or of shorter sequences than `wants`."""
    if expected.versions is not None:
        at_least, below = expected.versions
        said, name = await api.release(get), expected.name
        if not at_least <= version_of(said) < below:
            wanted = f">={'.'.join(map(str, at_least))},<{'.'.join(map(str, below))}"
            raise ValueError(f"{url} is {name} {said}: this adapter was made for {name} {wanted}; install that")
    model, room = await api.model(get)
    if room is not None and room < wants:
        fix = "start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        raise ValueError(f"{url} serves sequences of at most {room} tokens, and {wants} are asked for; {fix}")
    return model


async def source_of(api: Api, source: WeightReader) -> tuple[CheckedReader, WeightSource]:
    """A server reads the weights by itself, from where both see them: where the trainer put them, or a segment of this
    host, into which they are fetched first. SyncError: the trainer has another version by now."""
    if isinstance(source, CheckedReader):
        sent = source.source
        if sent.passes:
            if not api.pours:
                raise ValueError("this rollout engine reads whole versions: leave sync.engine_options.bucket_mb out")
            return source, sent
        if sent.transport.startswith(api.transport):
            return source, sent
        if api.sync == "shm" and (found := await asyncio.to_thread(_segment_of, sent)) is not None:
            return source, found
    raise ValueError(f"this rollout engine is a server that reads weights by itself: set sync.engine={api.sync}")


def _segment_of(sent: WeightSource) -> WeightSource | None:
    """The same weights in this host's shared memory; None where the transport brings them nowhere."""
    stream = open_stream(sent)
    if (path := stream.segment()) is None:
        return None
    if stream.version != sent.version:
        raise SyncError(f"version {sent.version}: the sender holds version {stream.version} by now")
    return replace(sent, transport=SEGMENTS, address=path)


async def poured(api: Api, post: Post, sent: WeightSource) -> None:
    """The buckets into the server; what ends it in the middle is told to the sender, who waits for them."""
    stream = open_stream(sent)
    assert isinstance(stream, InBuckets), "nothing else passes"
    buckets = stream.buckets()
    own = ThreadPoolExecutor(1, "weights")  # those who wait for a bucket would keep each other's threads

    async def each() -> AsyncIterator[Bucket]:
        while (bucket := await asyncio.get_running_loop().run_in_executor(own, next, buckets, None)) is not None:
            yield bucket

    try:
        await api.pour(post, sent, each())
    finally:
        own.shutdown(wait=False)
        with contextlib.suppress(ValueError):  # a thread waits in it: it hears that it is waited for no more
            buckets.close()


def positions_of(context: RolloutContext) -> int | None:
    """That the model was made for, if it says so."""
    return getattr(context.hf_config.get_text_config(), "max_position_embeddings", None)
