"""The protocol of rollout engines: tokens in, tokens out. An engine has no notion of chat, rewards or groups.
No torch is imported here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from verl.errors import Refused
from verl.parameter_set import POLICY_SET
from verl.rollout.noise import NoiseSchedule
from verl.types import Medium, Sampling, StopReason, as_ids
from verl.wire import AS_HELD, WireFormat

if TYPE_CHECKING:
    import torch

    from verl.models.pictures import Pictures

PauseMode = Literal["keep", "wait", "abort"]
Media = Sequence[Medium]
DecodeFn = Callable[[Sequence[int]], str]
OnTokens = Callable[[np.ndarray, np.ndarray], object]  # ids [t] int64, log-probs [t] float32


class ReplicaLost(RuntimeError):
    """An engine has died, or its answers are no longer valid. The same request may be sent to another engine."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request."""

    request_id: str
    ids: np.ndarray
    """The sampled tokens [t] int64, the stop token included."""
    logprobs: np.ndarray
    """Their log-probs [t] float32 under the sampled distribution; those of greedy tokens are at temperature 1."""
    spans: tuple[tuple[int, int, int], ...]
    """(version, start, end), ...: the version of the set that sampled the tokens start..end-1. They cover `ids`."""
    stop_reason: StopReason
    """The reason of the end. An aborted answer has the tokens that were sampled before the abort."""
    stop: str | None = None  # The stop string that ended the answer.
    cached_tokens: int = 0
    """Prompt tokens with KV from earlier requests."""
    side: Mapping[str, np.ndarray] = field(default_factory=dict)  # Further values per token, [t, ...], by name.
    routes: np.ndarray | None = None
    """The experts [P + t, layers, k] of the tokens of prompt and answer, if the engine records them (types.ROUTES)."""
    parameters: str = POLICY_SET.id  # The id of the parameter set that sampled.


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The abilities of one kind of rollout engine, known without starting it. Those of servers are in traits.py.

    Traits of servers describe their HTTP API. What a server lacks the client provides, or it refuses the request."""

    server: bool = False
    """It is a server in a process of its own, with every cluster.backend. Others run in a process of the run."""
    package: str = ""
    """The Python package that the environment of a server needs. A server without one runs already, at a URL."""
    public_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the public verl under `actor_rollout_ref.rollout.`, and the option that each of them sets."""

    logprobs: Literal["processed", "raw"] = "processed"
    """The kind of log-probs that it returns. processed: with temperature and truncation applied."""
    raw_logprobs_only: bool = False
    """Its log-probs are at temperature 1 over the whole vocabulary. Other sampling settings are refused."""
    max_candidates: int = 0
    """The most tokens from which a truncated draw (top_k, top_p, min_p) with a log-prob may choose. 0: no limit."""
    score_temperatures: tuple[float, ...] | None = None
    """The temperatures at which it scores prompts. None: any. Temperature 0 (greedy) is scored at temperature 1."""
    ranks_tokens: bool = False
    """It returns the most likely tokens (`score_top`)."""
    prefix_cache: bool = False
    """The KV of common prompts is reused."""
    media: bool = False
    """It takes prompts that contain images."""
    stop_strings: bool = True
    """It ends an answer at a stop string."""
    seeds: bool = True
    """A seed gives the same tokens whatever else is in the batch."""
    float32_head: bool = False
    """It can multiply the head in float32 beside other weights in bfloat16."""
    fp8: bool = False
    """It reads projections in blocks of 8 bits (rollout.dtype=fp8)."""
    codes: bool = False  # It computes with the codes of a base in 4 or 8 bits (model.quantization).
    bans: bool = False  # Its requests may name ids that are never sampled (`Sampling.banned`).
    spans: bool = True
    """Every token is labelled with the version that sampled it, so the weights may change during a request."""
    reports_tokens: bool = False
    """It calls `GenerateRequest.on_tokens`."""
    continues: bool = False
    """It continues an answer that another engine has begun (`GenerateRequest.begun`)."""
    resumable_stream: bool = False
    """With several replicas it streams its answers, so that another replica can continue the answer of a lost one."""
    draws_by_position: bool = False
    """A token is a function of the seed and its position in the answer (`Sampling.position`)."""
    validates_token_ids: bool = True
    """It answers a request with a token id beyond its vocabulary with an error, and keeps running."""

    pause_modes: frozenset[PauseMode] = frozenset()
    """The modes of the server's pause call. The client implements `wait` and `abort` itself otherwise."""
    aborts_requests: bool = False
    """It has a call that ends a request. Otherwise the client closes the connection, and keeps what it has received."""
    sleep_keeps_weights: bool = False
    """At sleep level 1 the weights of a server are in host memory, and have to be woken too."""

    weights_from: Literal["shm", "disk"] = "shm"
    """The sync.engine from which a server reads weights by itself."""
    updates_weights: bool = True
    """It takes new weights while it runs. Otherwise it is restarted with them, or keeps its own."""
    in_flight_update: bool = False
    """New weights can be loaded while requests run."""
    prepares_weights: bool = False
    """It reads new weights while it samples with the live ones, and stops only for the switch (`prepare_weights`)."""
    streams_weights: bool = False
    """It takes weights in parts. The memory of a part is reused for the next one."""
    takes_weight_version: bool = False
    """The server labels tokens with the name that an update gives to the weights: version and mark (`Peers`)."""
    tensor_names: Literal["model", "saved"] = "model"
    """How it names tensors: as the model in memory does, or as a saved folder does (experts one by one)."""

    lora_policy: bool = False
    """It takes the policy as a base and LoRA factors, and later the factors alone."""
    lora_whole: bool = False  # With them it takes the weights that are trained whole beside them.
    lora_experts_on: frozenset[str] = frozenset(("cpu", "cuda"))  # Devices where these may be factors of experts.
    noise: bool = False  # It samples under exploration noise where a request asks for it (`Sampling.noise`).

    @property
    def own_weights(self) -> bool:
        """True for a server that keeps its own weights: a publish does not change them."""
        return self.server and not self.updates_weights and not self.package


IN_PROCESS = Traits(  # of engines that run in a process of the run
    in_flight_update=True,
    prepares_weights=True,
    reports_tokens=True,
    ranks_tokens=True,
    lora_policy=True,
    lora_whole=True,
    bans=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities(Traits):
    """The traits as a running engine confirms them, and its sizes. They are read once, at the start."""

    max_context_tokens: int
    """The longest sequence, prompt and answer together."""
    lora_rank: int = 0  # The highest rank of LoRA sets that it takes. 0: it takes none.
    lora_experts: bool = False  # LoRA sets may have factors of experts.
    sleep_levels: tuple[int, ...] = ()
    """The sleep levels that it has. 1 frees the KV, 2 the weights too."""
    weights: WireFormat = AS_HELD
    """The format in which it reads weights."""
    notes: tuple[str, ...] = ()
    """Lines that are printed for the user at the start."""


def capabilities_of(traits: Traits, **sizes: Any) -> Capabilities:
    """Return the capabilities of an engine with these traits. `sizes` are fields of `Capabilities`."""
    return Capabilities(**{f.name: getattr(traits, f.name) for f in fields(Traits)} | sizes)


@dataclass(frozen=True, slots=True)
class Peers:
    """The state that connections to the servers of a run share. Each has a mark: a random tag in names of weights."""

    urls: set[str] = field(default_factory=set)
    """URLs of all servers that were ever part of the run."""
    marks: dict[str, str] = field(default_factory=dict)
    """The URL of the server, by mark."""
    verified: dict[str, int] = field(default_factory=dict)
    """The latest verified version, by mark. A connection that is given up has no entry."""
    lost: set[str] = field(default_factory=set)
    """Marks that were given up, unless a later connection to the same server exists."""
    received: Counter[str] = field(default_factory=Counter)
    """Events that arrived from a server through a router, by mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """The place of an engine that is a server: its model, its log, and its interpreter or its URL."""

    model: str
    """The folder of its model."""
    log: Path
    """The file for its output."""
    python: str | None = None
    """The interpreter of the environment that starts it. None: this one."""
    url: str | None = None
    """The server runs already at this URL, and is not started here."""
    peers: Peers = field(default_factory=Peers)
    """The state that is shared with the other servers of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """The settings that every backend is built from, besides its own options."""

    hf_config: Any
    """The model's transformers config."""
    max_context_tokens: int
    """The longest sequence, prompt and answer together."""
    dtype: torch.dtype
    """The dtype that the model is computed in."""
    fp8: bool = False  # Projections are read in blocks of 8 bits (`nn/fp8.py`).
    eos_token_ids: Sequence[int] = ()  # Tokens that end an answer.
    decode: DecodeFn | None = None  # Turns ids into text, for stop strings. None: stop strings are refused.
    device: torch.device | str = "cpu"
    max_concurrent_sequences: int = 256  # The number of requests that are decoded together.
    deterministic: bool = False  # The result of a sequence is bitwise independent of what else is in the batch.
    float32_head: bool = False  # The head multiplies in float32, and the logits are float32.
    lora_rank: int = 0
    """The rank of the policy's LoRA factors, if it is served as a base and factors; else 0."""
    lora_versions: int = 0  # The most versions of those factors with running requests, and one that is loaded.
    noise: NoiseSchedule | None = None
    """The exploration noise of each version of the policy. None: there is none."""
    place: ServerPlace | None = None
    """The place of the server, for an engine that is one."""
    pictures: Pictures | None = None  # The content of the images of requests. None: requests have no images.
    banned: tuple[int, ...] | None = None  # The ids that a policy must not sample. None: those of its configuration.

    def __post_init__(self) -> None:
        check_positive(max_context_tokens=self.max_context_tokens)
        check_positive(max_concurrent_sequences=self.max_concurrent_sequences)


def check_positive(**sizes: int) -> None:
    """Raise Refused if one of the named sizes is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise Refused(f"{name}={value}: must be at least 1")


def check_inputs(able: Capabilities, what: str, parameters: str, media: Media, noise: bool = False) -> None:
    """Raise ValueError for a LoRA set, media or exploration noise that the engine does not take."""
    if noise and not able.noise:
        raise ValueError(f"{what}: noise=True, but this rollout engine has no exploration noise; leave it out")
    if parameters != POLICY_SET.id and not able.lora_rank:
        raise ValueError(f"{what}: adapter={parameters!r}, but this rollout engine loads no adapters; leave it out")
    if media and not able.media:
        raise ValueError(f"{what}: {len(media)} media, but this rollout engine takes no media; remove them")


def check_live(what: str, name: str, sets: Collection[str]) -> None:
    """Raise ValueError if `name` is a LoRA set that is not among the live `sets`. `what` names the caller."""
    if name not in {POLICY_SET.id, *sets}:
        known = ", ".join(sorted(sets)) or "none"
        raise ValueError(f"{what}: no LoRA set {name!r} is live on these weights (there are: {known}); publish it")


def checked_ids(what: str, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return one sequence [t] int64. Raise ValueError for ids outside the vocabulary."""
    ids = as_ids(ids)
    if ids.ndim != 1:
        raise ValueError(f"{what}: ids must be one sequence [t], got shape {ids.shape}")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"{what}: ids in [{ids.min()}, {ids.max()}], vocabulary is [0, {vocab_size})")
    return ids


def check_request(request: GenerateRequest, running: Container[str], *, max_context_tokens: int, decodes: bool) -> None:
    """Raise ValueError for an id in use, a prompt without room for an answer, stop strings without decode function."""
    if request.id in running:
        raise ValueError(f"request_id={request.id!r} is already running: every call needs its own id")
    if not 0 < len(request.prompt_ids) < max_context_tokens:
        room = f"max_context_tokens={max_context_tokens}; shorten it or raise the limit"
        raise ValueError(
            f"{request.id}: a prompt of {len(request.prompt_ids)} tokens leaves no room to sample in {room}"
        )
    if (stop := request.sampling.stop) and not decodes:
        raise ValueError(f"stop={stop} needs text: give the engine decode=, or use stop_token_ids")


@dataclass(slots=True, kw_only=True)
class PartialAnswer:
    """The beginning of an answer, sampled by engines that were lost. None of its tokens is one that ends an answer."""

    mixes: bool = False
    """True if an answer may contain tokens of several versions."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """The version of each run of tokens, as in `Completion`."""

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that were sampled by `version`, with their log-probs."""
        if ids:
            self.spans.append((version, len(self.ids), len(self.ids) + len(ids)))
            self.ids += ids
            self.logprobs += logprobs

    def cut(self, end: int) -> None:
        """Drop the tokens from index `end` on."""
        self.spans = [(version, a, min(b, end)) for version, a, b in self.spans if a < end]
        del self.ids[end:], self.logprobs[end:]

    def keep(self, least: int, most: int) -> None:
        """Drop the first token with a version outside [least, most], and all tokens after it."""
        ok = list(itertools.takewhile(lambda span: least <= span[0] <= most, self.spans))
        self.cut(ok[-1][2] if ok else 0)


class WeightReader(Protocol):
    """One publish as a replica reads it: the version and a stream of HF-named tensors."""

    version: int

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that the parts of an update take, recorded by their readers. transfer: until the tensors have
        arrived; load: into the engine; pause: while no request is decoded."""
        ...

    @property
    def passes(self) -> bool:
        """True if the tensors may never be in memory all at once: they are written over the live ones while nothing is
        sampled. Only the end of the stream shows if all of them were of one version."""
        ...

    def tensors(self) -> Iterable[tuple[str, object]]:
        """Return the tensors of the publish one by one, as (name, tensor)."""
        ...


@runtime_checkable
class KnowsTensors(Protocol):
    """A `WeightReader` that knows its tensors before it reads them."""

    @property
    def lasting(self) -> Mapping[str, bool]:
        """The tensors by name; True for one that never changes, which may be kept without a copy."""
        ...


def lasting_of(source: object) -> Mapping[str, bool]:
    """Return `KnowsTensors.lasting`; of a reader without it, nothing."""
    return source.lasting if isinstance(source, KnowsTensors) else {}


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a sequence ids [t]."""

    logprobs: np.ndarray
    """The log-probs [t-1] float32 of ids[1:]."""
    top_ids: np.ndarray
    """The k most likely ids at each position, [t-1, k] int64, the most likely one first."""
    top_logprobs: np.ndarray
    """The log-probs [t-1, k] float32 of `top_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """A request for one answer, from the agent loop to the engine."""

    id: str
    """The id of the request, unlike those of all other running requests."""
    prompt_ids: np.ndarray
    """The token ids of the prompt, [P] int64."""
    sampling: Sampling
    _: KW_ONLY
    prefix_key: str | None = None
    """Requests with the same key have a common prompt. A router sends them to one replica."""
    parameters: str = POLICY_SET.id
    """The id of the parameter set that samples: the policy's, or that of a published LoRA set on top of it."""
    media: tuple[Medium, ...] = ()
    """The images of the prompt. Every other token is text, whatever its id is."""
    routes: bool = False  # The answer has the experts of its tokens (types.ROUTES), if the engine records them.
    begun: PartialAnswer | None = None
    """The beginning of the answer, from engines that were lost: the engine continues it. When the call ends, also with
    an error, it contains the tokens with a certain version. Only for an engine that can continue answers."""
    on_tokens: OnTokens | None = None
    """Called in the event loop with the tokens since its last call, by an engine that can report tokens."""


class Generates(Protocol):
    """The one method that an agent loop needs."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one answer."""
        ...


class RolloutEngine(Generates, Protocol):
    """An engine that samples answers, scores sequences and loads published weights."""

    async def score(
        self, ids: np.ndarray, *, temperature: float = 1.0, parameters: str = POLICY_SET.id, media: Media = ()
    ) -> np.ndarray:
        """Return log-probs [t-1] float32 of ids[1:] given their prefix, under the live weights of the set."""
        ...

    async def load_weights(self, source: WeightReader, *, on_inflight: PauseMode = "wait") -> int:
        """Make the weights of `source` live and return their version. Running requests continue under them (keep),
        finish first (wait), or return with their partial tokens (abort). Every prefix that was computed under older
        weights is dropped.

        A LoRA set (`set_of`) becomes live on top of the full set; raise ValueError if its base is another full set. New
        weights of the full set end all LoRA sets, after their requests have finished."""
        ...

    async def drop_set(self, name: str) -> None:
        """Drop a LoRA set after its requests have finished. Nothing is done for one that the engine does not have."""
        ...

    async def prepare_weights(self, source: WeightReader) -> Callable[[PauseMode], Awaitable[int]]:
        """Read the weights of `source` and return a function that makes them live."""
        ...

    def mark_verified(self) -> None:
        """Record that the weights which were loaded last have been verified."""
        ...

    async def score_top(self, ids: np.ndarray, top: int) -> Scores:
        """Return the scores of a sequence with the `top` most likely tokens of each position."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling: running requests stop where they are (keep), finish first (wait) or return (abort)."""
        ...

    async def resume(self) -> None:
        """Continue after a pause."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End requests (None: all) with the tokens that they have, and return their number."""
        ...

    async def sleep(self, level: int = 1) -> int:
        """Free the KV cache (level 1) and the weights too (level 2), and return the number of bytes, 0 if unknown."""
        ...

    async def wake(self, tags: Sequence[str] = ("weights", "kv")) -> None:
        """Allocate these parts of the memory again."""
        ...

    async def capabilities(self) -> Capabilities:
        """Return the abilities of the running engine and its sizes. A server is waited for until it has started."""
        ...

    async def close(self) -> None:
        """End the engine and all its requests."""
        ...

    @property
    def version(self) -> int:
        """The version of the live weights of the full set; -1 without weights."""
        ...

    @property
    def base(self) -> str:
        """The identity of the live full set, on which the policy's factors can be published alone; "": not known."""
        ...

    @property
    def replaceable(self) -> bool:
        """True if the engine is one of several replicas: the run continues without it."""
        ...

    def lose(self, why: BaseException) -> None:
        """Give up the engine that took part in the last publish."""
        ...


class BaseEngine:
    """The optional methods of a rollout engine, for engines that do not have them."""

    replaceable = False

    @property
    def base(self) -> str:
        return ""

    async def prepare_weights(self: RolloutEngine, source: WeightReader) -> Callable[[PauseMode], Awaitable[int]]:
        """Read nothing before the returned function is called."""
        return lambda mode: self.load_weights(source, on_inflight=mode)

    def mark_verified(self) -> None:
        return

    async def drop_set(self, name: str) -> None:
        return

    async def score_top(self, ids: np.ndarray, top: int) -> Scores:
        raise ValueError("score_top: this rollout engine ranks no tokens")

    def lose(self, why: BaseException) -> None:
        raise why
