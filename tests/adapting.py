"""A server with vLLM's calls for weights, requests and adapters, in a thread: `verl serve`'s application over a native
engine. A request names an adapter in place of the model. Adapters are read from their folders, and they act."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from doubles import SGLANG, BadRequest, SglangDouble
from serving import Running, texts_of, tokenizer

from verl.model_engine.lora import read_lora
from verl.parameter_set import POLICY_SET
from verl.rollout import sglang
from verl.rollout.api import Deadlines
from verl.rollout.base import Capabilities, RolloutContext, ServerPlace, WeightReader, capabilities_of
from verl.rollout.client import ServedEngine
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.server.app import make_app
from verl.rollout.server.options import ServeConfig
from verl.rollout.server.service import Service
from verl.rollout.vllm import expected
from verl.rollout.vllm_api import VllmApi
from verl.rollout.wrapper import EngineWrapper
from verl.serve import FolderWeights, bound

GENERATE, LOAD, UNLOAD = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BASE = "the weights of this server"
ADAPTER: ContextVar[str] = ContextVar("ADAPTER", default=POLICY_SET.id)


class OfServer:
    """The weights of an update, with an identity (`WeightReader`)."""

    parameters, identity = POLICY_SET, BASE

    def __init__(self, source: WeightReader) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class Factors:
    """The factors of an adapter's folder (`WeightReader`)."""

    passes, version = False, 0

    def __init__(self, name: str, folder: Path, base: Path) -> None:
        found, self._tensors = read_lora(name, folder, base)
        self.parameters, self.identity, self.seconds = replace(found, base=BASE), "", dict[str, float]()

    def tensors(self) -> Any:
        yield from self._tensors.items()


class Adapting(EngineWrapper):
    """A native engine that samples with the adapter of the call under way. Its adapters outlast the weights under
    them, as in vLLM. again: loads them anew."""

    def __init__(self, inner: Any, again: Callable[[], Awaitable[None]]) -> None:
        self.inner, self._again = inner, again
        self.holds = False  # back what it has sampled
        self.held = 0

    async def forward(self, method: str, *args: Any, **named: Any) -> Any:
        return await getattr(self.inner, method)(*args, **named)

    async def generate(self, request: Any) -> Any:
        found = await self.inner.generate(replace(request, parameters=ADAPTER.get()))
        self.held += 1
        while self.holds:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return replace(found, parameters=POLICY_SET.id)

    async def capabilities(self) -> Capabilities:
        return replace(await self.inner.capabilities(), ranks_tokens=False)

    async def score(self, ids: np.ndarray, *, temperature: float = 1.0, **_: Any) -> np.ndarray:
        return await self.inner.score(ids, temperature=temperature, parameters=ADAPTER.get())

    async def load_weights(self, source: WeightReader, *, on_inflight: Any = "wait") -> int:
        version: int = await self.inner.load_weights(OfServer(source), on_inflight=on_inflight)
        await self._again()
        return version

    async def prepare_weights(self, source: WeightReader) -> Any:
        return await self.inner.prepare_weights(OfServer(source))

    async def close(self) -> None:
        await self.inner.close()

    @property
    def version(self) -> int:
        return self.inner.version

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AdaptingServer(Running):
    """The running server of the model in the folder `base`."""

    def __init__(self, module: Any, base: Path, room: int = 64) -> None:
        self.base, self.loaded = base, dict[str, str]()  # the folders of its adapters
        self.refused: dict[str, str] = {}  # path -> why it answers with an error
        self.asked: list[str] = []
        super().__init__(module, room)

    async def _make_engine(self) -> Any:
        """Make the engine with the weights of the module. Return the model's configuration."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        config = copy.deepcopy(self.module.config)
        config._attn_implementation = "sdpa"
        context = RolloutContext(hf_config=config, max_context_tokens=self._room, dtype=torch.float32)
        self.engine = Adapting(native.build(Options(), context, lanes=1), self._add_all)
        await self.engine.load_weights(FolderWeights(self.module, 0))
        return config

    async def _run(self) -> None:
        config = await self._make_engine()
        sizes = {"vocab_size": config.vocab_size, "max_context_tokens": self._room}
        options = ServeConfig(port=0, control=True, max_sequences=10_000)
        self.service = Service(engine=self.engine, texts=texts_of(tokenizer()), options=options, **sizes)
        app = make_app(self.service)
        app.middlewares.append(self._named)
        app.add_routes([web.post(LOAD, self._load), web.post(UNLOAD, self._unload)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        with bound(options) as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            await web.SockSite(runner, sock).start()
            self._up.set()
            await self._stopping.wait()
            await runner.cleanup()
        await self.engine.close()

    @web.middleware
    async def _named(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(request.path)
        if why := self.refused.get(request.path):
            return web.json_response({"error": {"message": why}}, status=400)
        if request.path == GENERATE:
            body = await request.json()
            if body["model"] in self.loaded:
                ADAPTER.set(body.pop("model"))
                request._read_bytes = json.dumps(body).encode()
        return await handler(request)

    async def _load(self, request: web.Request) -> web.Response:
        given = await request.json()
        name, folder = given["lora_name"], given["lora_path"]
        assert name not in self.loaded, "a name is used once"
        self.loaded[name] = folder
        await self._add(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        del self.loaded[name]
        await self.engine.drop_set(name)
        return web.Response(text="Success")

    async def _add(self, name: str) -> None:
        await self.engine.inner.load_weights(Factors(name, Path(self.loaded[name]), self.base))

    async def _add_all(self) -> None:
        for name in self.loaded:
            await self._add(name)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the loop of this server, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def adapters(self) -> Sequence[str]:
        """Return the names of the loaded sets, as they are published."""
        return [name.rpartition("-")[2] for name in self.loaded]

    def client(self, rank: int = 8, **more: Any) -> ServedEngine:
        """Return an engine of a run at this server, which it takes for vLLM."""
        place = ServerPlace(model=str(self.base), log=self.base / "log", url=self.url)
        config = copy.deepcopy(self.module.config)
        given = {"max_context_tokens": self._room, "dtype": torch.float32, "place": place, **more}
        able = capabilities_of(VllmApi().traits, max_context_tokens=self._room, lora_rank=rank)
        limits = Deadlines(start_s=20, request_s=20, control_s=20)
        context = RolloutContext(hf_config=config, **given)
        return ServedEngine(context, replace(expected(), versions=None), VllmApi(), self.url, able, limits)


class SglangAdapters(SglangDouble):
    """SGLang's double with adapters: requests name one in `lora_path`, and a call that drops one waits for none."""

    server: SglangServer

    def routes(self) -> list[web.RouteDef]:
        more = {"/load_lora_adapter": self._load, "/unload_lora_adapter": self._unload}
        assert more.keys() <= set(SGLANG["paths"])
        return [*super().routes(), *(web.post(path, handler) for path, handler in more.items())]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json()).get("lora_path")
        if name is not None and name not in self.server.loaded:
            raise BadRequest(f"The following requested LoRA adapters are not loaded: {name}")
        ADAPTER.set(POLICY_SET.id if name is None else name)
        return await super()._generate(request)

    async def _load(self, request: web.Request) -> web.Response:
        await self.server._load(request)
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.server.loaded})

    async def _unload(self, request: web.Request) -> web.Response:
        await self.server._unload(request)
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": self.server.loaded})


class SglangServer(AdaptingServer):
    """The same behind SGLang's API."""

    async def _run(self) -> None:
        config = await self._make_engine()
        self.double = SglangAdapters(self.engine, vocab=config.vocab_size, room=self._room + 1)
        self.double.server = self
        app = self.double.app()
        app.middlewares.append(self._named)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        with bound(ServeConfig(port=0)) as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            await web.SockSite(runner, sock).start()
            self._up.set()
            await self._stopping.wait()
            await runner.cleanup()
        await self.engine.close()

    def client(self, rank: int = 8, **more: Any) -> ServedEngine:
        place = ServerPlace(model=str(self.base), log=self.base / "log", url=self.url)
        given = {"max_context_tokens": self._room, "dtype": torch.float32, "place": place, **more}
        context = RolloutContext(hf_config=copy.deepcopy(self.module.config), **given)
        return sglang.build(sglang.Options(lora_policy="adapter", max_lora_rank=rank), context)
