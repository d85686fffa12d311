"""Servers that answer as SGLang 0.5.23 and TensorRT-LLM 1.x document, with the native engine for a model. No line of
theirs runs here: what a request may hold is read from SGLang's own structs (data/sglang_api.json), the rest from their
sources and documents."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.torch import load_file

from verl.rollout.base import Completion, GenerateRequest
from verl.types import Sampling

SGLANG = json.loads((Path(__file__).parent / "data" / "sglang_api.json").read_text())
MASKS = 4096  # --sampling-mask-max-tokens
TYPES = {"int": int, "str": str, "bool": bool, "float": (int, float)}


class BadRequest(Exception):
    """400."""


def checked(body: Any, struct: str, *, strict: bool) -> dict[str, Any]:
    """As SGLang's generated decoder: wrong types of plain fields are refused, unknown ones too where `strict`."""
    known = SGLANG["structs"][struct]
    for name, value in body.items():
        if name not in known:
            if strict:
                raise BadRequest(f"unknown field `{name}`, expected one of {', '.join(known)}")
            continue
        plain = TYPES.get(known[name].removeprefix("Optional[").removesuffix("]"))
        if plain and value is not None and (not isinstance(value, plain) or (plain is int and value is True)):
            raise BadRequest(f"{name}: {value!r} is no {known[name]}")
    return dict(body)


def in_pieces(
    engine: Any, name: str, prompt: np.ndarray, sampling: Sampling
) -> tuple[asyncio.Future[Completion], asyncio.Queue[tuple[np.ndarray, np.ndarray] | None]]:
    """Start a request. Return its completion, and a queue of its tokens with their log-probs; None is the end."""
    pieces = asyncio.Queue[Any]()
    request = GenerateRequest(
        name, prompt, sampling, on_tokens=lambda ids, logprobs: pieces.put_nowait((ids, logprobs))
    )
    whole = asyncio.ensure_future(engine.generate(request))
    whole.add_done_callback(lambda task: pieces.put_nowait(None))
    return whole, pieces


class Process:
    """A stand-in for a child process: a restart ends it, and the next launch begins another one."""

    exit_code = None
    log = Path(os.devnull)

    def stop(self) -> None:
        pass

    def tail(self, lines: int = 12) -> str:
        return ""

    def listens(self, port: int) -> tuple[bool, bool]:
        return True, False


class Double:
    """engine: of `rollout/native`, with weights. In `names`, the tensors of its model: those of a folder that it does
    not know are refused, those that a folder lacks keep their values, without a word."""

    def __init__(self, engine: Any, *, version: str, vocab: int, room: int) -> None:
        self.engine, self.version, self.vocab, self.room = engine, version, vocab, room
        self.asked: list[tuple[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.numbers = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._faults], client_max_size=1 << 26)
        app.add_routes(self.routes())
        return app

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/health", self._health), web.get("/v1/models", self._models)]

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        try:
            return await handler(request)
        except (BadRequest, ValueError) as e:
            return web.json_response({"error": {"message": str(e)}}, status=400)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.room}]})

    def _check_prompt(self, ids: Any) -> np.ndarray:
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < self.vocab for i in ids):
            raise BadRequest("ids of the vocabulary are needed")
        if len(ids) >= self.room:
            raise BadRequest(f"The input ({len(ids)} tokens) is longer than the model's context length ({self.room})")
        return np.array(ids, np.int64)

    async def take(self, folder: str, version: int) -> None:
        """The weights of a model folder."""
        state = self.state | load_file(Path(folder) / "model.safetensors")
        source = SimpleNamespace(version=version, passes=False, seconds={}, tensors=state.items)
        await self.engine.load_weights(source, on_inflight="keep")
        self.state = state


class SglangDouble(Double):
    def __init__(self, engine: Any, **given: Any) -> None:
        super().__init__(engine, **{"version": SGLANG["version"], **given})
        self.going = asyncio.Event()  # requests that come while it is paused wait
        self.going.set()
        self.running: set[str] = set()
        self.known: set[str] = set()  # also those that have not reached the scheduler
        self.sent: set[str] = set()  # aborted requests; a second abort is not passed on
        self.asleep: set[str] = set()
        self.incremental = False  # --incremental-streaming-output
        self.raw = False  # SGLANG_RETURN_ORIGINAL_LOGPROB
        self.names: dict[int, str] = {}  # of weights, by their versions
        self.silent = False  # it takes requests, and does not answer
        self.fails: str | None = None  # the error of an update
        self.failing = 400  # and its status

    def routes(self) -> list[web.RouteDef]:
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        assert posts.keys() <= set(SGLANG["paths"])
        made = [web.post(path, handler) for path, handler in posts.items()]
        return [*super().routes(), *made, web.get("/server_info", self._info)]

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "skip_tokenizer_init": True})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = checked(await request.json(), "PauseGenerationReqInput", strict=True).get("mode", "abort")
        self.going.clear()
        if mode == "abort":
            await self.engine.abort()
        else:
            await self.engine.pause("keep")
            if mode == "retract":  # back to the queue, without keys and values
                await self.engine.sleep(1)
                await self.engine.wake(("kv",))
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        checked(await request.json(), "ContinueGenerationReqInput", strict=True)
        await self.engine.resume()
        self.going.set()
        return web.json_response({"status": "ok"})

    async def _release(self, request: web.Request) -> web.Response:
        tags = checked(await request.json(), "ReleaseMemoryOccupationReqInput", strict=True)["tags"]
        assert not (self.going.is_set() and self.running), "it should be called only when the server is idle"
        self.asleep |= set(tags)
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        for tag in checked(await request.json(), "ResumeMemoryOccupationReqInput", strict=True)["tags"]:
            self.asleep.remove(tag)  # or its scheduler ends
        return web.Response()

    async def _abort(self, request: web.Request) -> web.Response:
        """By the beginning of the name; an unknown one is 200."""
        rid = checked(await request.json(), "AbortReq", strict=True)["rid"]
        if rid in self.known - self.sent:
            self.sent.add(rid)
            await self.engine.abort([name for name in self.running if name.startswith(rid)])
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = checked(await request.json(), "UpdateWeightFromDiskReqInput", strict=True)
        failed = self.fails
        assert "weights" not in self.asleep, "they have no memory"
        if not (Path(body["model_path"]) / "model.safetensors").exists():
            failed = "Failed to get weights iterator: no such folder."
        elif self.going.is_set() and self.running:
            failed = "Weights were updated, but the cache was not flushed because requests are still running or queued."
        if failed is None:
            number = int(body["weight_version"].partition("-")[0])
            self.names[number] = body["weight_version"]
            await self.take(body["model_path"], number)
            if body.get("flush_cache", True):
                await self.engine.sleep(1)
                await self.engine.wake(("kv",))
        said = {"success": failed is None, "message": failed or "Succeeded", "num_paused_requests": 0}
        return web.json_response(said, status=200 if failed is None else self.failing)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = checked(await request.json(), "GenerateRequest", strict=False)
        params = checked(body.get("sampling_params") or {}, "SamplingParams", strict=True)
        prompt, self.numbers = self._check_prompt(body.get("input_ids")), self.numbers + 1
        rid = body.get("rid") or f"own-{self.numbers}"
        top_k = params.get("top_k", -1)
        truncated = top_k > 0 or params.get("top_p", 1) < 1 or params.get("min_p", 0) > 0
        if body.get("return_sampling_mask") and not 0 < top_k <= MASKS:
            raise BadRequest(f"return_sampling_mask requires finite 1 < top_k <= {MASKS}; got top_k={top_k}")
        if len(prompt) + params.get("max_new_tokens", 128) > self.room:
            raise BadRequest("Requested token count exceeds the model's maximum context length")
        self.known.add(rid)
        if self.silent:
            await asyncio.sleep(3600)
        while not self.going.is_set():
            await self.going.wait()
        scored = body.get("return_logprob") and body.get("logprob_start_len", -1) == 0
        entries = [[None, int(prompt[0]), None]] if scored else []
        if scored and len(prompt) > 1:
            scores = await self.engine.score(prompt)
            entries += [[float(x), int(i), None] for x, i in zip(scores, prompt[1:], strict=True)]
        told = {"body": body, "truncated": truncated, "entries": entries, "rid": rid}
        if not params.get("max_new_tokens", 128):
            nothing = Completion(rid, np.zeros(0, np.int64), np.zeros(0, np.float32), (), "length")
            return web.json_response(self._answer(nothing, told))
        if not params.get("ignore_eos"):
            raise AssertionError("the double has no end token of its own")
        sampling = Sampling(
            max_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            top_p=params.get("top_p", 1.0),
            top_k=max(top_k, 0),
            min_p=params.get("min_p", 0.0),
            stop_token_ids=tuple(params.get("stop_token_ids") or ()),
            ignore_eos=True,
            seed=params.get("sampling_seed") or 0,
        )
        self.running.add(rid)
        try:
            if body.get("stream"):
                return await self._streamed(request, rid, prompt, sampling, told)
            return web.json_response(
                self._answer(await self.engine.generate(GenerateRequest(rid, prompt, sampling)), told)
            )
        finally:
            self.running.discard(rid)
            self.known.discard(rid)
            self.sent.discard(rid)

    async def _streamed(
        self, request: web.Request, rid: str, prompt: np.ndarray, sampling: Sampling, told: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        whole, pieces = in_pieces(self.engine, rid, prompt, sampling)
        ids, logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
        try:
            while (piece := await pieces.get()) is not None:
                ids, logprobs = np.append(ids, piece[0]), np.append(logprobs, piece[1])
                begun = Completion(rid, ids, logprobs, (), "length")
                await self._event(response, self._answer(begun, told, new=len(piece[0]), last=False))
            done = whole.result()
            await self._event(response, self._answer(done, told, new=len(done.ids) - len(ids)))
        finally:
            whole.cancel()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _name(self, version: int) -> str:
        return self.names.get(version, "default")

    async def _event(self, response: web.StreamResponse, answer: Any) -> None:
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")

    def _answer(
        self, c: Completion, told: dict[str, Any], *, new: int | None = None, last: bool = True
    ) -> dict[str, Any]:
        start = len(c.ids) - new if self.incremental and new is not None else 0
        ids = c.ids.tolist()
        of_all = [-99.0] * len(ids) if told["truncated"] or self.raw else c.logprobs.tolist()  # before truncation
        meta: dict[str, Any] = {
            "id": told["rid"],
            "finish_reason": {"type": {"eos": "stop", "context_full": "length"}.get(c.stop_reason, c.stop_reason)},
            "prompt_tokens": 1,
            "completion_tokens": len(ids),
            "cached_tokens": c.cached_tokens,
            "weight_version": self._name(self.engine.version),
        }
        if told["body"].get("return_logprob"):
            meta["output_token_logprobs"] = [[x, i, None] for x, i in zip(of_all, ids)][start:]
            meta["input_token_logprobs"] = told["entries"]
        if told["body"].get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = c.logprobs.tolist()[start:]
        if last:
            spans = c.spans or ((self.engine.version, 0, 0),)
            meta["weight_versions"] = [{"version": self._name(v), "start": a, "end": b} for v, a, b in spans]
        else:
            meta["finish_reason"] = None
        return {"output_ids": ids[start:], "meta_info": meta}


class TrtllmDouble(Double):
    """`trtllm-serve`'s /v1/completions: fields that it does not know are refused; log-probs are those at temperature 1;
    the token that ended an answer is cut where `include_stop_str_in_output` is not set."""

    FIELDS = (
        *("model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n"),
        *("presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
        *("lora_request", "prompt_ignore_length", "use_beam_search", "top_k", "top_p_min", "min_p"),
        *("repetition_penalty", "length_penalty", "early_stopping", "stop_token_ids", "include_stop_str_in_output"),
        *("ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
        *("truncate_prompt_tokens", "return_context_logits", "detokenize", "add_special_tokens", "response_format"),
    )

    def __init__(self, engine: Any, **given: Any) -> None:
        super().__init__(engine, **{"version": "1.2.0", **given})

    def routes(self) -> list[web.RouteDef]:
        return [*super().routes(), web.get("/version", self._version), web.post("/v1/completions", self._completions)]

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "object": "model", "owned_by": "tensorrt_llm"}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if unknown := body.keys() - set(self.FIELDS):
            raise BadRequest(f"{sorted(unknown)}: Extra inputs are not permitted")
        prompt, self.numbers = self._check_prompt(body["prompt"]), self.numbers + 1
        sampling = Sampling(
            max_tokens=body.get("max_tokens") or 16,
            temperature=body.get("temperature", 1.0),
            top_k=body.get("top_k", 0),
            stop_token_ids=tuple(body.get("stop_token_ids") or ()),
            ignore_eos=True,
            seed=body.get("seed") or 0,
        )
        if body.get("stream"):
            return await self._streamed(request, f"own-{self.numbers}", prompt, sampling, body)
        done = await self.engine.generate(GenerateRequest(f"own-{self.numbers}", prompt, sampling))
        return web.json_response({"choices": [self._choice(done.ids, done.logprobs, body, done)]})

    async def _streamed(
        self, request: web.Request, name: str, prompt: np.ndarray, sampling: Sampling, body: Any
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        whole, pieces = in_pieces(self.engine, name, prompt, sampling)
        told = 0
        try:
            while (piece := await pieces.get()) is not None:
                told += len(piece[0])
                await self._event(response, self._choice(piece[0], piece[1], body, None))
            done = whole.result()
            await self._event(response, self._choice(done.ids[told:], done.logprobs[told:], body, done))
        finally:
            whole.cancel()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, choice: Any) -> None:
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def _choice(self, ids: np.ndarray, logprobs: np.ndarray, body: Any, done: Completion | None) -> dict[str, Any]:
        given, known = ids.tolist(), logprobs.tolist()
        if done is not None and done.stop_reason == "stop" and not body.get("include_stop_str_in_output"):
            given, known = given[:-1], known[:-1]
        told = {"tokens": ["?"] * len(given), "token_logprobs": known} if body.get("logprobs") else None
        reason = None if done is None else {"stop": "stop"}.get(done.stop_reason, "length")
        found = {"index": 0, "text": "", "logprobs": told, "finish_reason": reason}
        return found | ({} if body.get("detokenize", True) else {"token_ids": given})
