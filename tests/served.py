"""A server that answers as vLLM 0.32 was seen to (or, by its version, as 0.33 is written to), without a model: token i
behind a prompt is (sum of the prompt + i) modulo the vocabulary. Tests can make it fail, and its engine ends where
vLLM's does: updated while a step runs, or resumed amid an update, as one that failed leaves it. `python served.py PORT`
is a child like `vllm serve`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

VOCAB = 50
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
NAMES = ["a.weight", "b.weight"]  # of its model's tensors


def logprob(token: int, temperature: float) -> float:
    """Return the log-prob of that token, which does not depend on the text before it."""
    return -1.0 - token / VOCAB / (temperature or 1.0)


SERVED: web.AppKey[Served] = web.AppKey("served")


class Served:
    """rounded: what its log-probs of an answer are off by."""

    def __init__(
        self,
        *,
        step_s: float = 0.0005,
        room: int = 512,
        version: str = "0.32.0+cpu",
        raw: bool = False,
        rounded: float = 0.0,
    ) -> None:
        self.step_s, self.room, self.version, self.raw, self.rounded = step_s, room, version, raw, rounded
        self.asked: list[tuple[str, Any]] = []  # path with query, body
        self.faults: dict[str, Fault] = {}  # by path: answers in its place; None: it continues
        self.loaded = list(NAMES)
        self.missing: list[str] = []
        self.model: dict[str, Any] = {"model": "/models/a", "vocab_size": VOCAB}
        self.workers: list[dict[str, Any]] = []  # the answer of each about the model; empty: one, `model`
        self.reset = True  # what /reset_prefix_cache answers
        self.weights, self.updating = "default", False
        self.tells = False  # the name of its weights with each token
        self.dead: str | None = None  # of what its engine ended
        self.gone: list[str] = []  # requests of callers that hung up
        self.refuses = False  # what arrives in a pause, as 0.33 does unless its mode is keep
        self.going = asyncio.Event()
        self.going.set()
        self.running: dict[str, asyncio.Event] = {}  # id -> aborted
        self.open: dict[str, web.Request] = {}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faulty])
        app[SERVED] = self
        app.add_routes(
            [
                web.get("/health", self._ok),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/init_weight_transfer_engine", self._ok),
                web.post("/start_weight_update", self._start),
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish),
                web.post("/collective_rpc", self._rpc),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/sleep", self._ok),
                web.post("/wake_up", self._ok),
            ]
        )
        return app

    def die(self) -> None:
        """As a process that is killed."""
        self.faults["/inference/v1/generate"] = hanging_up
        for request in self.open.values():
            assert request.transport is not None
            request.transport.abort()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path_qs, body))
        if self.dead is not None:
            return web.json_response({"error": {"message": f"EngineDeadError: {self.dead}"}}, status=500)
        fault = self.faults.get(request.path)
        answer = None if fault is None else await fault(request)
        answer = await handler(request) if answer is None else answer
        self.updating &= request.path != "/finish_weight_update" or answer.status != 200
        return answer

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.room}]})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        self.refuses = mode != "keep" and self.version.startswith("0.33")
        if mode == "abort":
            for aborted in self.running.values():
                aborted.set()
        while mode == "wait" and self.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.going.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        if self.updating:
            return self._ends("resumed amid an update")
        self.refuses = False
        self.going.set()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.going.is_set()})

    def _ends(self, why: str) -> web.Response:
        """End the engine: running requests are cut off, and all callers get the error (from vLLM, up to a minute
        later)."""
        self.dead = why
        for request in self.open.values():
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"error": {"message": f"EngineDeadError: {why}"}}, status=500)

    async def _update(self, request: web.Request) -> web.Response:
        if self.going.is_set() and self.running:
            return self._ends("updated while a step runs")
        return web.json_response({})

    async def _start(self, request: web.Request) -> web.Response:
        self.updating = True
        return await self._update(request)

    async def _finish(self, request: web.Request) -> web.Response:
        if (answer := await self._update(request)).status != 200:
            return answer
        self.weights = (await request.json())["weight_version"]
        return web.json_response({"message": "Weight update finished"})

    async def _rpc(self, request: web.Request) -> web.Response:
        if (await request.json())["method"] == "served_model":
            return web.json_response({"results": self.workers or [self.model]})
        return web.json_response({"results": [{"loaded": self.loaded, "missing": self.missing}]})

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": self.reset})

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:  # an unknown one is 200, too
            if name in self.running:
                self.running[name].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params, prompt = body["sampling_params"], body["token_ids"]
        name = f"generate-tokens-{body.get('request_id') or id(request)}"
        if self.refuses:
            error = {"error": {"message": "Request failed; please retry", "code": 503}}
            if body.get("stream"):
                return web.Response(text=f"data: {json.dumps(error)}\n\n", content_type="text/event-stream")
            return web.json_response(error, status=503)
        self.running[name], self.open[name] = asyncio.Event(), request
        try:
            if body.get("stream"):
                return await self._streamed(request, name, prompt, params)
            ids: list[int] = []
            versions: list[dict[str, Any]] = []
            async for token in self._tokens(name, prompt, params):
                self._drawn(ids, versions, token)
            choice = self._choice(ids, versions, self._finished(name, ids, params), params)
            answer: dict[str, Any] = {"request_id": name, "choices": [choice]}
            if params.get("prompt_logprobs") is not None:
                rows = [None, *({str(i): {"logprob": logprob(i, 1.0)}} for i in prompt[1:])]
                answer["prompt_logprobs"] = rows
            return web.json_response(answer)
        except asyncio.CancelledError:
            self.gone.append(name)
            raise
        finally:
            del self.running[name], self.open[name]

    async def _streamed(self, request: web.Request, name: str, prompt: Any, params: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids: list[int] = []
        versions: list[dict[str, Any]] = []
        async for token in self._tokens(name, prompt, params):
            self._drawn(ids, versions, token)
            told = {"weight_version": self.weights} if self.tells else {}
            chunk = {"choices": [self._choice([token], None, None, params) | told]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        last = {"choices": [self._choice([], versions, self._finished(name, ids, params), params)]}
        await response.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def _tokens(self, name: str, prompt: list[int], params: Any) -> Any:
        for i in range(params["max_tokens"]):
            await asyncio.sleep(self.step_s)
            while not self.going.is_set() and not self.running[name].is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if self.running[name].is_set():
                return
            token = (sum(prompt) + i) % VOCAB
            yield token
            if token in params.get("stop_token_ids", ()):
                return

    def _drawn(self, ids: list[int], versions: list[dict[str, Any]], token: int) -> None:
        if not versions or versions[-1]["version"] != self.weights:
            versions.append({"version": self.weights, "start": len(ids), "end": len(ids)})
        ids.append(token)
        versions[-1]["end"] = len(ids)

    def _finished(self, name: str, ids: list[int], params: Any) -> str:
        if self.running[name].is_set():
            return "abort"
        return "stop" if ids and ids[-1] in params.get("stop_token_ids", ()) else "length"

    def _choice(self, ids: list[int], versions: Any, finish: str | None, params: Any) -> dict[str, Any]:
        at = 1.0 if self.raw else params["temperature"]
        content = [{"token_id": i, "logprob": logprob(i, at) + self.rounded * (-1) ** i} for i in ids]
        told = {"content": content} if params.get("logprobs") is not None else None
        return {"index": 0, "token_ids": ids, "logprobs": told, "finish_reason": finish, "weight_versions": versions}


def crashing(status: int, text: str = "broken") -> Fault:
    async def fault(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=status)

    return fault


async def hanging_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(math.inf)
    raise AssertionError


if __name__ == "__main__":
    if os.environ.get("SERVED_FAILS"):
        print("the model cannot be loaded: no such thing", os.environ["SERVED_FAILS"], sep="\n")
        sys.exit(3)
    shared = bool(os.environ.get("SERVED_SHARES"))  # the port, with other processes that share it
    served = Served(step_s=float(os.environ.get("SERVED_STEP_S", "0.0005")))
    web.run_app(served.app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, reuse_port=shared)
