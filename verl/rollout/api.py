"""The differences between kinds of servers: their requests, and how their answers are read. No connection is made
here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import Refused
from verl.rollout.base import PauseMode, RolloutContext, Traits, WeightReader
from verl.rollout.http import ServerRefused
from verl.rollout.wire import ServerAnswer, version_of
from verl.types import Sampling
from verl.weight_sync.base import (
    Bucket,
    CheckedReader,
    InBuckets,
    SyncError,
    WeightSource,
    open_stream,
    with_whole_checksums,
)

if TYPE_CHECKING:
    import torch

    from verl.rollout.embedded.images import RequestImages

SEGMENTS = "verl.weight_sync.shm:open_weights"

Post = Callable[..., Awaitable[Any]]
"""A function that sends (path, body, timeout in seconds) and returns the parsed answer. The default body is empty, the
default timeout is that of control calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The requirements on a server."""

    name: str
    """The server's name in error messages."""
    versions: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The lowest version, and the first one that is too new. None: any version."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Advice on how to start the server, by the missing HTTP path or part (adapters, logprobs, transfer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The seconds that the client waits for a server."""

    start_s: float = 600.0
    """Until the server has started."""
    request_s: float = 600.0
    """For one answer, however long it is."""
    control_s: float = 300.0
    """For one control call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The tokens that an answer may have."""

    tokens: int
    """The number of tokens that fit after the prompt."""
    vocab: int
    """The size of the vocabulary."""
    ends: Sequence[int]
    """The end tokens of the model."""

    def stops(self, sampling: Sampling) -> list[int]:
        """Return the ids at which the server must end an answer. The model's end tokens are among them, so the server's
        own configuration of end tokens has no effect. Ids outside the vocabulary are left out, because some servers
        index an array with them."""
        wanted = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.ends)]
        return sorted({i for i in wanted if 0 <= i < self.vocab})

    def request_fields(self, sampling: Sampling) -> dict[str, Any]:
        """Return the sampling fields that all servers of completions have in common."""
        return {
            "max_tokens": min(sampling.max_tokens, self.tokens),
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stop_token_ids": self.stops(sampling),
            "ignore_eos": True,
        }


class Api:
    """The HTTP API of one kind of server: requests and how their answers are read.

    `post` and `get` send a request to the server. They raise the errors of a server that refuses or has died
    (rollout/http.py). The methods here raise `NotUnderstood` or `SyncError` for an answer that breaks the API. A method
    without a body here is never called for a server with traits that exclude it.
    """

    generate: str
    """The path that answers a request, also as a stream of events."""
    traits: Traits
    """The abilities of this kind of server; after `prepare`, those of this very server."""

    def body(
        self, model: str, name: str, prompt: Sequence[int], sampling: Sampling, room: TokenBudget
    ) -> dict[str, Any]:
        """Return the body of a request. With `stream` true the same request is answered as a stream. Raise ValueError
        for settings that the server cannot follow."""
        raise NotImplementedError

    def image_fields(self, images: RequestImages, dtype: torch.dtype) -> dict[str, Any]:
        """Return the further fields of the body of a request with images, for a server that computes in `dtype`."""
        raise NotImplementedError

    def read(self, drawn: ServerAnswer, answer: Any) -> None:
        """Add a whole answer, or the next event of a stream, to `drawn`."""
        raise NotImplementedError

    async def score(self, post: Post, model: str, ids: np.ndarray, timeout_s: float) -> np.ndarray:
        """Return log-probs [t-1] float32 of ids[1:] at temperature 1."""
        raise NotImplementedError

    async def abort(self, post: Post, names: Sequence[str]) -> None:
        """End the requests with these ids at the server."""
        raise NotImplementedError

    async def pause(self, post: Post, mode: PauseMode) -> None:
        """Pause the server in one of the `pause_modes` of its traits."""
        raise NotImplementedError

    async def resume(self, post: Post) -> None:
        """Continue after a pause. A server without pauses needs nothing."""

    async def announce(self, post: Post, sent: WeightSource) -> None:
        """Let the server read new weights, without making them live. A server with `prepares_weights` samples
        meanwhile; any other one is paused."""

    async def send_buckets(self, post: Post, sent: WeightSource, buckets: AsyncIterator[Bucket]) -> None:
        """Let a paused server read new weights bucket by bucket, where they are never in memory as a whole. The server
        has read a bucket before the next one is requested."""
        raise NotImplementedError

    async def deliver(self, post: Post, sent: WeightSource, name: str) -> None:
        """Make announced weights live in a paused server, and drop all prefixes of older ones. The server labels its
        tokens with `name`."""
        raise NotImplementedError

    async def sleep(self, post: Post, level: int) -> int:
        """Free memory and return the number of bytes, or 0 if the server does not report it."""
        raise NotImplementedError

    async def wake(self, post: Post, part: str) -> None:
        """Allocate `weights` or `kv` again. The server resumes after the last part."""
        raise NotImplementedError

    def adapting(self, name: str, folder: str) -> tuple[str, dict[str, Any]]:
        """Return path and body of the call that loads the adapter in `folder` under a name that was never used
        before."""
        raise NotImplementedError

    def dropping(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return path and body of the call that drops an adapter."""
        raise NotImplementedError

    def routable(self, body: dict[str, Any]) -> bool:
        """Return true for a request that a router passes on unchanged."""
        return False

    async def behind(self, get: Post) -> set[str]:
        """Return the URLs of the servers that a router knows."""
        raise NotImplementedError

    async def paused(self, get: Post) -> bool | None:
        """Return true if the server is paused, or None if it does not report that."""
        return None

    async def progress(self, get: Post) -> Any:
        """Return a value that changes with every sampled token, or None if the server reports none."""
        return None

    async def release(self, get: Post) -> str:
        """Return the version of the server software."""
        return str((await get("/version"))["version"])

    async def model(self, get: Post) -> tuple[str, int | None]:
        """Return the model's name for requests and the longest sequence in tokens (None: not reported)."""
        first = (await get("/v1/models"))["data"][0]
        room = first.get("max_model_len")
        return str(first["id"]), None if room is None else int(room)

    async def unlike(self, post: Post, model: str, config: Any) -> str:
        """Return why the server's model is not that of `config`, or "" if nothing shows that. It is called for servers
        that run already, and here it sends ids at the end of the vocabulary."""
        vocab, one = int(config.vocab_size), Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        for token, known in ((vocab - 1, True), *([(vocab, False)] if self.traits.validates_token_ids else [])):
            room = TokenBudget(tokens=1, vocab=token + 1, ends=())
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

    async def float32_tensors(self, post: Post) -> set[str]:
        """Return the tensors that the server keeps in float32 though it computes in another dtype, by its own names.
        Here it is not known."""
        return set()

    async def prepare(self, post: Post, model: str, vocab: int) -> None:
        """Check the server once after its start. Raise ValueError, or the server's own `ServerRefused`, if it lacks
        something that is needed."""


async def model_of(api: Api, expected: Expected, url: str, get: Post, wants: int) -> str:
    """Return the name of the server's model. Raise ValueError for a server of another version, or with sequences
    shorter than `wants`."""
    if expected.versions is not None:
        at_least, below = expected.versions
        found, name = await api.release(get), expected.name
        if not at_least <= version_of(found) < below:
            wanted = f">={'.'.join(map(str, at_least))},<{'.'.join(map(str, below))}"
            raise Refused(f"{url} is {name} {found}: this adapter was made for {name} {wanted}; install that")
    model, room = await api.model(get)
    if room is not None and room < wants:
        fix = "start it with a longer context, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        raise Refused(f"{url} serves sequences of at most {room} tokens, and {wants} are asked for; {fix}")
    return model


async def source_of(api: Api, source: WeightReader) -> tuple[CheckedReader, WeightSource]:
    """Return a source of weights that the server can read by itself: the trainer's own, or a shared-memory segment of
    this host into which they are fetched first. Raise SyncError if the trainer has another version by now."""
    if isinstance(source, CheckedReader):
        sent = source.source
        if sent.passes:
            if not api.traits.streams_weights:
                raise Refused("this rollout engine reads whole versions: leave sync.engine_options.bucket_mb out")
            return source, sent
        kind = "" if api.traits.own_weights else f"{api.traits.weights_from}:"
        if sent.transport.startswith(f"verl.weight_sync.{kind}"):
            return source, sent
        if api.traits.weights_from == "shm" and (found := await asyncio.to_thread(_segment_of, sent)) is not None:
            return source, found
    raise Refused(
        f"this rollout engine is a server that reads weights by itself: set sync.engine={api.traits.weights_from}"
    )


def _segment_of(sent: WeightSource) -> WeightSource | None:
    """Return the same weights in this host's shared memory, or None if the transport has no such segment."""
    stream = open_stream(sent)
    if (path := stream.segment()) is None:
        return None
    if stream.version != sent.version:
        raise SyncError(f"version {sent.version}: the sender holds version {stream.version} by now")
    manifest = with_whole_checksums(sent, stream)
    return replace(sent, transport=SEGMENTS, address=path, manifest=manifest)


async def deliver_buckets(api: Api, post: Post, sent: WeightSource) -> None:
    """Send all buckets into the server. If that fails in the middle, the sender, which waits for them, is released."""
    stream = open_stream(sent)
    assert isinstance(stream, InBuckets), "nothing else passes"
    buckets = stream.buckets()
    own = ThreadPoolExecutor(1, "weights")  # waits of several servers must not block the shared threads

    async def each() -> AsyncIterator[Bucket]:
        while (bucket := await asyncio.get_running_loop().run_in_executor(own, next, buckets, None)) is not None:
            yield bucket

    try:
        await api.send_buckets(post, sent, each())
    finally:
        own.shutdown(wait=False)
        with contextlib.suppress(ValueError):  # a thread still waits in it, and is released by the close
            buckets.close()


def positions_of(context: RolloutContext) -> int | None:
    """Return the longest sequence that the model was made for, or None if its config has no limit."""
    return getattr(context.hf_config.get_text_config(), "max_position_embeddings", None)
