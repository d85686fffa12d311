"""The bodies of requests: OpenAI's and vLLM's fields are read as prompts and `Sampling`, or refused by an error that
names the field.

A field that this server does not follow is refused, never dropped.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from verl.types import Medium, Sampling, derive_seed

Body = TypeVar("Body", bound=msgspec.Struct)
Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Strings = str | list[str]
MAX_TOP_K = 2**31 - 1  # more ids than any vocabulary has
MAX_STOPS = 4096  # stop ids, stop strings, or characters of a stop string
MAX_STOP_ROWS = 2**18  # stop strings of all answers of one request together
MAX_PARTS = MappingProxyType({"objects and lists": 2**17, "quotes": 2**19, "commas": 2**21})
MAX_NAME = 256  # characters of a request's id
MAX_SCORES = 2**22  # log-probs of a prompt in one answer, which is built in memory
KINDS = MappingProxyType(
    {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 429: "rate_limit_error"}
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **{key: (0,) for key in ("presence_penalty", "frequency_penalty", "min_tokens", "priority", "top_logprobs")},
        **{key: (1,) for key in ("repetition_penalty", "length_penalty", "best_of")},
        **{key: (False,) for key in ("echo", "use_beam_search", "store", "continue_final_message")},
        **{key: (True,) for key in ("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt")},
        **{key: ([],) for key in ("bad_words", "functions")},
        "parallel_tool_calls": (True,),
        "logit_bias": ({},),
        "suffix": ("",),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "output_mode": ("tokens",),
    }
)
"""Fields and the values at which they change nothing."""
ABOUT_THE_CALLER = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "session_id", "detokenize"})
"""Fields that change no answer, with any value."""


class ApiError(Exception):
    """An error that is sent to the client, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(msgspec.Struct):
    """OpenAI's options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling fields that all endpoints share. `top_k` -1 and 0 are off."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10_000)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Strings | None = None
    stop_token_ids: list[Id] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False


class PromptFields(SamplingFields, kw_only=True):
    """The fields that completions and chat share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionBody(PromptFields, kw_only=True):
    """The body of a request to /v1/completions."""

    prompt: str | list[str | Id | list[Id]]  # a text, texts, ids, or lists of ids
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    add_special_tokens: bool = True


class ChatBody(PromptFields, kw_only=True):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class TokenSampling(SamplingFields, kw_only=True):
    """The sampling settings of a request with token ids."""

    logprobs: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    position: Annotated[int, Meta(ge=0)] = 0  # as in `Sampling`


class TokenBody(msgspec.Struct, kw_only=True):
    """The body of a request to /inference/v1/generate: a prompt of token ids."""

    token_ids: list[Id]
    sampling_params: dict[str, Any] = {}
    stream_interval_s: Annotated[float, Meta(ge=0)] = 0.0
    """The least seconds between two events of a stream; the tokens in between are sent together."""
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """The part of an HTTP request that the engine computes: prompts, sampling, and the form of the answer."""

    prompts: tuple[np.ndarray, ...]
    """The ids of each prompt, [P] int64."""
    sampling: Sampling
    n: int
    """The number of answers to each prompt."""
    request_id: str
    media: tuple[Medium, ...] = ()
    """The images of a chat, with their places in its prompt."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """The content of the images by its hash."""
    room: bool = False
    """True if no limit was given: answers may fill the context."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    prompt_logprobs: int | None = None
    """The number of most likely tokens at each position of the prompts that are scored too. None: prompts are not
    scored."""
    with_ids: bool = False
    """True if the answer has the ids of its tokens."""
    tokens_as_ids: bool = False
    """True if tokens are written as `token_id:ID` in place of their text."""
    include_stop: bool = False
    """True if the text contains the stop string that ended it."""
    interval_s: float = 0.0
    """The least seconds between two events of a stream."""

    def samplings(self, max_context_tokens: int) -> list[tuple[np.ndarray, Sampling]]:
        """Return prompt and sampling of every answer. The first answer to a prompt has the given seed."""
        found = []
        for ids in self.prompts:
            most = max_context_tokens - len(ids) if self.room else self.sampling.max_tokens
            for i in range(self.n):
                seed = self.sampling.seed if i == 0 else derive_seed(self.sampling.seed, "choice", i)
                found.append((ids, self.sampling.of_call(most, seed)))
        return found


def decoded(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raise ApiError 400 for anything else, and for an object with more parts than
    `MAX_PARTS`: decoding it would block every thread."""
    lists, quotes = raw.count(b"{") + raw.count(b"["), raw.count(b'"') - raw.count(b'\\"')
    for what, count in (("objects and lists", lists), ("quotes", quotes), ("commas", raw.count(b","))):
        if count > MAX_PARTS[what]:
            message = (
                f"the body has {count:,} {what}, those in texts included; at most {MAX_PARTS[what]:,} in one request"
            )
            raise ApiError(400, message, code="too_many_parts")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}: a JSON object is wanted", code="invalid_json")
    return body


def typed(fields: Mapping[str, Any], kind: type[Body], *, prefix: str = "") -> Body:
    """Return the fields as `kind`. A null field has its default. Raise ApiError 400 for an unknown field and for one of
    another type."""
    known = kind.__struct_fields__
    given = {}
    for name, value in fields.items():
        if value is None or (name not in known and (name in ABOUT_THE_CALLER or _means_nothing(name, value))):
            continue
        if name not in known:
            found = f"{prefix}{shown(name)}={shown(value)}: this server does not honour it; leave it out"
            raise ApiError(400, found, param=name, code="unsupported_parameter")
        given[name] = value
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        found, _, where = str(e).partition(" - at `$.")
        param: str | None = where.rstrip("`").split("[")[0] if where else _quoted(found)
        raise ApiError(
            400, f"{prefix}{param}: {found}" if param else found, param=param, code="invalid_value"
        ) from None


def shown(value: Any) -> str:
    """Return the beginning of a value, at little cost however large it is."""
    return (value if isinstance(value, str) else reprlib.repr(value))[:60]


def _means_nothing(name: str, value: Any) -> bool:
    """Return true if this value of an unknown field changes nothing (`NEUTRAL`)."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())
    )


def _quoted(text: str) -> str | None:
    """Return the name in a message such as: Object missing required field `prompt`."""
    parts = text.split("`")
    return parts[-2] if "field" in text and len(parts) > 2 else None


def requested_sampling(
    drawn: SamplingFields, *, max_tokens: int, vocab_size: int, banned: tuple[int, ...] = ()
) -> Sampling:
    """Return the sampling of a request. Raise ApiError for values that the engine cannot sample with."""
    if 0 < drawn.temperature < 1e-3:
        message = f"temperature={drawn.temperature} is too close to 0 to be computed; 0 is greedy"
        raise ApiError(400, message, param="temperature", code="invalid_value")
    if drawn.top_p < 1e-6:
        raise ApiError(400, f"top_p={drawn.top_p}: at least 1e-6; temperature=0 is greedy", param="top_p")
    stop = (drawn.stop,) if isinstance(drawn.stop, str) else tuple(drawn.stop or ())
    if not all(stop):
        raise ApiError(400, "stop holds an empty string, which would end every answer at once", param="stop")
    if beyond := [i for i in drawn.stop_token_ids if i >= vocab_size]:
        raise ApiError(400, f"stop_token_ids={beyond[:3]}: the vocabulary is [0, {vocab_size})", param="stop_token_ids")
    ends = tuple(dict.fromkeys(drawn.stop_token_ids))
    longest = max(map(len, stop), default=0)
    stops = (("stop_token_ids", len(ends), "of them"), ("stop", len(stop), "of them"), ("stop", longest, "characters"))
    for what, count, kind in stops:
        if count > MAX_STOPS:  # they are compared after each token
            raise ApiError(400, f"{what}: {count} {kind}, at most {MAX_STOPS}", param=what, code="invalid_value")
    return Sampling(
        max_tokens=max_tokens,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=min(max(drawn.top_k, 0), MAX_TOP_K),
        min_p=drawn.min_p,
        stop=stop,
        stop_token_ids=ends,
        ignore_eos=drawn.ignore_eos,
        seed=secrets.randbits(63) if drawn.seed is None else drawn.seed,
        position=drawn.position if isinstance(drawn, TokenSampling) else 0,
        banned=banned,
    )


def call_of(
    body: PromptFields | TokenBody,
    drawn: CompletionBody | ChatBody | TokenSampling,
    prompts: Sequence[np.ndarray],
    *,
    vocab_size: int,
    max_tokens: int | None,
    banned: tuple[int, ...] = (),
) -> GenerationCall:
    """Return the work of a request. Without `max_tokens` an answer may fill the context. banned: ids that the model
    must not sample."""
    scored = None if isinstance(drawn, ChatBody) else drawn.prompt_logprobs
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        message = "stream_options.continuous_usage_stats: usage comes once, at the end (include_usage)"
        raise ApiError(400, message, param="stream_options", code="unsupported_parameter")
    if (scored or 0) > vocab_size:
        message = f"prompt_logprobs={scored}: the vocabulary has {vocab_size} tokens"
        raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
    if (rows := 0 if scored is None else sum(map(len, prompts)) * max(scored, 1)) > MAX_SCORES:
        message = f"prompt_logprobs={scored}: {rows:,} of them for all tokens, at most {MAX_SCORES:,} in one answer"
        raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
    if len(body.request_id or "") > MAX_NAME:
        message = f"request_id has {len(body.request_id or '')} characters; at most {MAX_NAME}"
        raise ApiError(400, message, param="request_id", code="invalid_value")
    sampling = requested_sampling(drawn, max_tokens=max_tokens or 1, vocab_size=vocab_size, banned=banned)
    if (rows := len(sampling.stop) * len(prompts) * drawn.n) > MAX_STOP_ROWS:
        message = (
            f"stop: {len(sampling.stop)} strings for {len(prompts) * drawn.n} answers, at most {MAX_STOP_ROWS:,} of all"
        )
        raise ApiError(400, message, param="stop", code="invalid_value")
    if body.stream and scored is not None:
        raise ApiError(400, "prompt_logprobs are not streamed; set stream=false", param="stream")
    return GenerationCall(
        prompts=tuple(prompts),
        sampling=sampling,
        n=drawn.n,
        request_id=body.request_id or secrets.token_hex(12),
        room=max_tokens is None,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        logprobs=drawn.logprobs if isinstance(drawn, ChatBody) else drawn.logprobs is not None,
        prompt_logprobs=scored,
        with_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        include_stop=drawn.include_stop_str_in_output,
        interval_s=body.stream_interval_s if isinstance(body, TokenBody) else 0.0,
    )


def refuse_top_logprobs(count: int | None, param: str, instead: str) -> None:
    """Raise ApiError if log-probs of other tokens than the sampled one are requested. `instead` is the advice."""
    if count:
        message = (
            f"{param}={count}: this engine knows the log-prob of the token that was drawn, and no others; {instead}"
        )
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def check_ids(ids: np.ndarray, param: str, *, vocab_size: int, max_context_tokens: int) -> None:
    """Raise ApiError for a prompt that cannot be answered."""
    if not len(ids):
        raise ApiError(400, f"{param} is empty: at least one token is needed", param=param, code="empty_prompt")
    check_length(len(ids), param, max_context_tokens)
    if int(ids.max()) >= vocab_size:
        message = f"{param} holds the id {int(ids.max())}; the vocabulary is [0, {vocab_size})"
        raise ApiError(400, message, param=param, code="invalid_value")


def check_length(tokens: int, param: str, max_context_tokens: int) -> None:
    """Raise ApiError for a prompt without room for an answer in the context."""
    if tokens >= max_context_tokens:
        message = f"{param} has {tokens} tokens; the context of {max_context_tokens} leaves no room for an answer"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
