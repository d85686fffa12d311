"""A server of ours for tests: in this process over a tiny model or a scripted engine, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import ClientSession
from rollouts import context_of
from started import Started
from tokens import bpe_tokenizer

from verl.chat.template import audit_template
from verl.driver.setup import decoder
from verl.models import tiny
from verl.models.pictures import Pictures
from verl.rollout.base import BaseEngine, Capabilities, Completion, GenerateRequest, RolloutContext
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.server.app import make_app, run_app
from verl.rollout.server.images import ChatImages
from verl.rollout.server.options import ServeConfig
from verl.rollout.server.service import Service
from verl.rollout.server.texts import Texts
from verl.serve import FolderWeights, bound
from verl.transfer_queue.base import MediaStore

KEY = "the key of a test"
CONTROLLED = ("serve.control=true", f"serve.api_key={KEY}")
WITH_KEY = f"rollout.engine_options.api_key={KEY}"  # of a run before such a server

TEMPLATE = (
    "{% if tools %}<|user|>tools {{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "{% else %}<|user|>{{ m['role'] }}: {{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def tokenizer() -> Any:
    made = bpe_tokenizer(["a server answers", "what is two plus two?", "tools <tool_call>"], vocab_size=320)
    made.chat_template = TEMPLATE
    return made


def model(seed: int = 1, max_positions: int = 512) -> Any:
    """With weights so large that greedy answers do not repeat a token, and other weights give other answers."""
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "max_positions": max_positions}
    made = tiny.qwen3(tokenizer(), **sizes, seed=seed, tied=False)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8.0)
    return made


def texts_of(of: Any, images: ChatImages | None = None) -> Texts:
    spell = decoder(of, special_tokens=True)
    return Texts(tokenizer=of, decode=decoder(of), spell=spell, audit=audit_template(of), images=images)


async def engine_of(
    module: Any, version: int = 0, *, rows: int = 64, max_context_tokens: int = 256, made: Any = native
) -> Any:
    """A native engine, or one of another module of verl.rollout, with the weights of `module`."""
    of = tokenizer()
    context = context_of(
        module.config, rows, max_context_tokens=max_context_tokens, eos_token_ids=(of.eos_token_id,), decode=decoder(of)
    )
    engine = made.build(Options(), context, lanes=1) if made is native else made.build(made.Options(), context)
    await engine.load_weights(FolderWeights(module, version))
    return engine


class Scripted(BaseEngine):
    """A rollout engine that answers with the given texts, in turn, and streams nothing."""

    version = 3

    def __init__(self, of: Any, *answers: str) -> None:
        self._ids = [[*of(text, add_special_tokens=False)["input_ids"], of.eos_token_id] for text in answers]
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.prompts.append(request.prompt_ids.tolist())
        ids = np.asarray(self._ids.pop(0), np.int64)
        return Completion(request.id, ids, np.full(len(ids), -0.5, np.float32), ((3, 0, len(ids)),), "eos")

    async def score(self, ids: np.ndarray, **rest: Any) -> np.ndarray:
        return np.full(len(ids) - 1, -1.0, np.float32)

    async def abort(self, request_ids: Any = None) -> int:
        return 0

    async def capabilities(self) -> Capabilities:
        return Capabilities(logprobs="processed", max_context_tokens=256)

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def serving(
    engine: Any,
    of: Any = None,
    *,
    max_context_tokens: int = 256,
    grace_s: float = 0.0,
    images: ChatImages | None = None,
    media: MediaStore | None = None,
    pictures: Pictures | None = None,
    banned: tuple[int, ...] = (),
    **options: Any,
) -> AsyncIterator[Any]:
    """-> client, service. The engine is closed with it."""
    of = of or tokenizer()
    service = Service(
        engine=engine,
        texts=texts_of(of, images),
        options=ServeConfig(**options),
        media=media,
        pictures=pictures,
        banned=banned,
        grace_s=grace_s,
        vocab_size=320,
        max_context_tokens=max_context_tokens,
    )
    stopping = asyncio.Event()
    with bound(ServeConfig(port=0)) as sock:
        running = asyncio.ensure_future(run_app(make_app(service), sock, stopping))
        await asyncio.sleep(0.01)  # it listens
        try:
            async with ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
                yield client, service
        finally:
            stopping.set()
            await running
            await engine.close()


class Running:
    """Our server with its control plane, over a native engine with the weights of `module`, in a thread with a
    loop of its own."""

    def __init__(self, module: Any, max_context_tokens: int = 512) -> None:
        self.module, self._room = module, max_context_tokens
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._up.wait(60)

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        context = RolloutContext(hf_config=self.module.config, max_context_tokens=self._room, dtype=torch.float32)
        self.engine = native.build(Options(), context, lanes=1)
        await self.engine.load_weights(FolderWeights(self.module, 0))
        options = ServeConfig(port=0, control=True, max_sequences=10_000)
        self.service = Service(
            engine=self.engine,
            texts=texts_of(tokenizer()),
            options=options,
            vocab_size=self.module.config.vocab_size,
            max_context_tokens=self._room,
        )
        with bound(options) as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            self._loop.call_later(0.1, self._up.set)
            await run_app(make_app(self.service), sock, self._stopping)
        await self.engine.close()

    def renew(self) -> None:
        """As when it was started, whatever was done to it."""

        async def again() -> None:
            await self.engine.load_weights(FolderWeights(self.module, 0), on_inflight="abort")
            await self.engine.wake()
            await self.engine.resume()
            self.service.failed, self.service.paused = None, False
            self.service.asleep.clear()

        asyncio.run_coroutine_threadsafe(again(), self._loop).result(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(30)


async def until(condition: Any, what: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def server_process(folder: Path, log: Path, *args: str, port: int = 0) -> Iterator[tuple[Started, str]]:
    """Yield the process and the URL of `verl serve` on this port (0: a free one), once it answers. It is ended
    afterwards."""
    small = [f"serve.port={port}", "model.dtype=float32", "run.threads=1"]
    log.unlink(missing_ok=True)
    process = Started(["serve", f"model.path={folder}", *args, *small], log)
    try:
        yield process, _url(process, log)
    finally:
        process.kill()
        process.wait(30)


def _url(process: Started, log: Path, limit_s: float = 120.0) -> str:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        said = [line for line in log.read_text().splitlines() if line.startswith("serving http")]
        if said:
            return said[0].split()[1]
        assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
        time.sleep(0.05)
    raise AssertionError(f"the server did not start in {limit_s} s: {log.read_text()[-2000:]}")


def run_serve(errors: Path, *args: str) -> tuple[int, str]:
    """A start that is refused -> exit code, last line of what it wrote to `errors`."""
    process = Started(["serve", *args], errors.with_suffix(".log"), errors=errors)
    return process.wait(120), (errors.read_text().strip().splitlines() or [""])[-1]


def events(text: str) -> list[str]:
    """The data of a stream of server-sent events."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def as_lists(rows: Sequence[np.ndarray]) -> list[list[Any]]:
    return [row.tolist() for row in rows]
