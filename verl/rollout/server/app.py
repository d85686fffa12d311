"""The HTTP of `verl serve`: routes, checks of callers, errors in OpenAI's shape, streams.

The bodies of requests and answers are in requests.py and responses.py, the calls of the engine in service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from verl import __version__
from verl.rollout.server.door import DOOR, IDLE_S, LINGER_S, SENT_S, Door, check_caller, check_encoding
from verl.rollout.server.handling import SERVICE, Handler, as_bytes, as_json, computed
from verl.rollout.server.requests import (
    ApiError,
    ChatBody,
    CompletionBody,
    Id,
    TokenBody,
    TokenSampling,
    call_of,
    refuse_top_logprobs,
    shown,
    typed,
)
from verl.rollout.server.responses import ChatForm, CompletionForm, Form, TokenForm
from verl.rollout.server.service import Service
from verl.rollout.server.texts import tools_of

DEFAULT_MAX_TOKENS = 16  # a completion's default, as in OpenAI and vLLM; chat answers may fill the context
RETRY_AFTER_S = "1"
MOST_TOKENS = 2**16  # tokens that are turned into text in one request, or the length of a context
CLOSING = (401, 403, 408, 415)  # statuses after which the body was not read, or not completely
FAULT = ApiError(500, "the server failed at this request; its log says why", code="internal_error")
log = logging.getLogger("verl.serve")


def make_app(service: Service) -> web.Application:
    """Return the application with all endpoints; those of the control plane only with serve.control=true."""
    options = service.options
    app = web.Application(middlewares=[guard], client_max_size=int(options.max_body_mb * 2**20))
    app[SERVICE], app[DOOR] = service, Door()
    app.add_routes(
        [
            web.post("/v1/completions", generates(completion_form)),
            web.post("/v1/chat/completions", generates(chat_form)),
            web.post("/inference/v1/generate", generates(token_form)),
            web.post("/inference/v1/abort_requests", abort_requests),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/v1/models", models),
            web.get("/v1/models/{name}", model),
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/version", version),
        ]
    )
    if options.control:
        from verl.rollout.server.control import ControlPlane, routes

        plane = ControlPlane()
        app.add_routes(routes(plane))
        app.on_shutdown.append(plane.end)
    return app


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the caller, give every error one shape, and close a connection if its client does not read the answer in
    time."""
    answer = await _answered(request, handler)
    request.app[DOOR].waits(request.protocol)
    try:
        async with asyncio.timeout(SENT_S):
            await answer.prepare(request)
            await answer.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return answer


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the answer of a request, which may be an error of this server, and count it in the metrics."""
    service, answer, entrance = request.app[SERVICE], None, request.app[DOOR]
    if request.path != "/health":
        entrance.has_all(request)  # it is not the caller that takes time here
        await service.starts.next()
        entrance.waits(request.protocol)
    try:
        check_caller(request, service.options.api_key, service.options.host)
        check_encoding(request)
        if not request.can_read_body:
            entrance.has_all(request)
        answer = await handler(request)
    except ApiError as e:
        answer = refusal(e)
        if e.status in CLOSING:
            answer.force_close()
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is larger than serve.max_body_mb={service.options.max_body_mb:g}"
        answer = refusal(ApiError(413, message, code="body_too_large"))
        answer.force_close()
    except web.HTTPException as e:
        answer = refusal(ApiError(e.status, _no_route(request, e.status), code="not_found"))
    except ConnectionError:  # the client has disconnected
        raise
    except Exception:  # a bug of ours is logged, and the server continues
        log.exception("%s %s", request.method, request.path)
        answer = refusal(FAULT)
    finally:
        known = request.match_info.route.resource
        path = known.canonical if known is not None else "other"
        service.metrics.requests[path, answer.status if answer is not None else 499] += 1
    return answer


def _no_route(request: web.Request, status: int) -> str:
    from verl.rollout.server.control import PATHS

    if request.path in PATHS and not request.app[SERVICE].options.control:
        return f"{request.path} is of the control plane, which is off: start the server with serve.control=true"
    return f"{request.method} {request.path}: no such endpoint" + (" with this method" if status == 405 else "")


def refusal(error: ApiError) -> web.Response:
    """Return the response for an error."""
    headers = {"Retry-After": RETRY_AFTER_S} if error.status in (429, 503) else None
    return as_json(error.body(), status=error.status, headers=headers)


# -- generation --------------------------------------------------------------------------------------------------------


def generates(form_of: Callable[[Service, Mapping[str, Any]], Form]) -> Handler:
    """Return the handler of an endpoint: it makes a form from the body, and from the form an answer or a stream."""

    async def handle(request: web.Request) -> web.StreamResponse:
        service = request.app[SERVICE]
        service.check_able()
        form = await computed(request, lambda fields: form_of(service, fields))
        service.check_able()  # again, since reading the body may take long
        with service.admitted(form.call) as names:
            if form.call.stream:
                return await _streamed(request, service, form, names)
            return as_bytes(await service.whole(form, names))

    return handle


async def _streamed(request: web.Request, service: Service, form: Form, names: tuple[str, ...]) -> web.StreamResponse:
    """Send server-sent events. The status is sent after the first chunk, so that an early error has its own status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async with contextlib.aclosing(service.chunks(form, names)) as chunks:
        try:
            async for there in chunks:
                if not response.prepared:
                    await response.prepare(request)
                if there:
                    await response.write(b"".join(b"data: " + chunk + b"\n\n" for chunk in there))
        except ConnectionError:
            raise
        except Exception as e:  # a second answer cannot begin inside this one
            if not response.prepared:
                raise
            if not isinstance(e, ApiError):
                log.exception("%s %s", request.method, request.path)
                e = FAULT
            await response.write(b"data: " + msgspec.json.encode(e.body()) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def completion_form(service: Service, fields: Mapping[str, Any]) -> Form:
    """Return the form of a request to /v1/completions. Raise ApiError if it is not valid."""
    body = typed(fields, CompletionBody)
    _check_model(service, body.model)
    _refuse_other_logprobs(body)
    prompts = _prompts(service, body)
    service.check_prompts(prompts, "prompt")
    most = body.max_tokens or DEFAULT_MAX_TOKENS
    call = call_of(body, body, prompts, vocab_size=service.vocab_size, max_tokens=most, banned=service.banned)
    return CompletionForm(call=call, **_common(service))


def _prompts(service: Service, body: CompletionBody) -> list[np.ndarray]:
    """Return the ids [P] of each prompt of a request: a text, texts, ids, or lists of ids."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(kinds := {type(one) for one in given}) > 1:
        message = "prompt mixes texts, ids and lists of ids; one kind at a time"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    if kinds != {int}:
        service.check_count(len(given) * body.n)
    if kinds == {str}:
        service.check_texts(map(str, given), "prompt")
        return [service.texts.encode(text, special_tokens=body.add_special_tokens) for text in map(str, given)]
    many: list[Any] = [given] if kinds == {int} else given
    service.check_lengths(map(len, many), "prompt")
    return [np.asarray(ids, np.int64) for ids in many]


def chat_form(service: Service, fields: Mapping[str, Any]) -> Form:
    """Return the form of a request to /v1/chat/completions. Raise ApiError if it is not valid."""
    count = fields.get("top_logprobs")
    refuse_top_logprobs(count if isinstance(count, int) else 0, "top_logprobs", "logprobs=true gives that")
    body = typed(fields, ChatBody)
    _check_model(service, body.model)
    prompt = service.texts.render(body, service.max_context_tokens)
    service.check_prompts([prompt.ids], "messages")
    most = body.max_completion_tokens or body.max_tokens
    call = call_of(body, body, [prompt.ids], vocab_size=service.vocab_size, max_tokens=most, banned=service.banned)
    call = replace(call, media=prompt.media, contents=prompt.contents)
    return ChatForm(call=call, tools=tools_of(body), **_common(service))


def token_form(service: Service, fields: Mapping[str, Any]) -> Form:
    """Return the form of a request to /inference/v1/generate. Raise ApiError if it is not valid."""
    body = typed(fields, TokenBody)
    _check_model(service, body.model)
    drawn = typed(body.sampling_params, TokenSampling, prefix="sampling_params.")
    _refuse_other_logprobs(drawn)
    service.check_lengths([len(body.token_ids)], "token_ids")
    prompt = np.asarray(body.token_ids, np.int64)
    service.check_prompts([prompt], "token_ids")
    call = call_of(
        body, drawn, [prompt], vocab_size=service.vocab_size, max_tokens=drawn.max_tokens, banned=service.banned
    )
    return TokenForm(call=call, **_common(service))


def _refuse_other_logprobs(drawn: CompletionBody | TokenSampling) -> None:
    refuse_top_logprobs(drawn.logprobs, "logprobs", "logprobs=0 gives that")


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.options.name):
        message = f"model={shown(repr(name))} is not here; this server has {service.options.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _common(service: Service) -> dict[str, Any]:
    given = {"texts": service.texts, "name": service.options.name, "weights": service.weights}
    return {**given, "created": int(time.time())}


# -- the rest ----------------------------------------------------------------------------------------------------------


class AbortRequestsBody(msgspec.Struct):
    """The body of a request to /inference/v1/abort_requests."""

    request_ids: list[str]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of a request to /tokenize. Either `prompt` or `messages` is given."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of a request to /detokenize."""

    model: str | None = None
    tokens: list[Id]


async def abort_requests(request: web.Request) -> web.Response:
    body = await computed(request, lambda fields: typed(fields, AbortRequestsBody))
    return as_json({"status": "aborted", "aborted": await request.app[SERVICE].abort(body.request_ids)})


async def tokenize(request: web.Request) -> web.Response:
    return as_bytes(await computed(request, lambda fields: _tokenized(request.app[SERVICE], fields)))


def _tokenized(service: Service, fields: Mapping[str, Any]) -> bytes:
    body = typed(fields, TokenizeBody)
    _check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt", code="invalid_value")
    if body.messages is not None:
        chat = {"messages": body.messages, "tools": body.tools, "chat_template_kwargs": body.chat_template_kwargs}
        ids = service.texts.render(typed(chat, ChatBody), service.max_context_tokens).ids
    else:
        service.check_texts([body.prompt or ""], "prompt")
        ids = service.texts.encode(body.prompt or "", special_tokens=body.add_special_tokens)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_context_tokens, "tokens": ids.tolist()}
    if body.return_token_strs:
        found["token_strs"] = [service.texts.token(i, as_id=False)["token"] for i in ids.tolist()]
    return msgspec.json.encode(found)


async def detokenize(request: web.Request) -> web.Response:
    return as_bytes(await computed(request, lambda fields: _detokenized(request.app[SERVICE], fields)))


def _detokenized(service: Service, fields: Mapping[str, Any]) -> bytes:
    body = typed(fields, DetokenizeBody)
    _check_model(service, body.model)
    if len(body.tokens) > (most := max(service.max_context_tokens, MOST_TOKENS)):
        message = f"tokens holds {len(body.tokens):,}; at most {most:,} in one request"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    if beyond := [i for i in body.tokens if i >= service.vocab_size]:
        message = f"tokens holds {beyond[:3]}; the vocabulary is [0, {service.vocab_size})"
        raise ApiError(400, message, param="tokens", code="invalid_value")
    return msgspec.json.encode({"prompt": service.texts.spell(body.tokens)})


async def models(request: web.Request) -> web.Response:
    return as_json({"object": "list", "data": [_card(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    _check_model(request.app[SERVICE], request.match_info["name"])
    return as_json(_card(request.app[SERVICE]))


def _card(service: Service) -> dict[str, Any]:
    """Return the description of the model, as /v1/models lists it."""
    name, most = service.options.name, service.max_context_tokens
    return {"id": name, "object": "model", "created": 0, "owned_by": "verl", "root": name, "max_model_len": most}


async def health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    await service.check_health()
    busy = "paused" if service.paused else "updating" if service.loading else "ok"
    state = "asleep" if service.asleep else busy
    return as_json({"status": state, "weight_version": service.live})


async def metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    text = service.metrics.render(
        running=service.sequences,
        weight_version=service.engine.version,
        can_speak=service.failed is None and not service.draining and not service.asleep,
    )
    return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def version(request: web.Request) -> web.Response:
    return as_json({"version": __version__, "engine": "verl"})


async def run_app(app: web.Application, sock: Any, stopping: asyncio.Event) -> None:
    """Serve on a bound socket until `stopping`, then drain. A request is cancelled when its client disconnects, which
    frees its rows in the engine."""
    given: dict[str, Any] = {"keepalive_timeout": IDLE_S, "lingering_time": LINGER_S, "auto_decompress": False}
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0, **given)
    await runner.setup()
    assert runner.server is not None, "it was set up"
    server = await asyncio.get_running_loop().create_server(app[DOOR].admits(runner.server), sock=sock)
    try:
        await stopping.wait()
        await app[SERVICE].drain()
    finally:
        server.close()
        await runner.cleanup()
        app[SERVICE].threads.close()
