"""`verl serve`: a model folder behind OpenAI's and vLLM's HTTP, with the rollout engine that training uses."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from verl.config.backends import longest_sequence
from verl.config.lora_layers import untrained, unused_lora
from verl.config.model_files import context_tokens
from verl.config.schema import Config
from verl.errors import Refused
from verl.models.expand import banned_tokens
from verl.rollout.server.options import ServeConfig, check_serve


def serve(config: Config) -> int:
    """Serve until SIGTERM or Ctrl-C. Errors in the keys, the port or the folder are raised before the model is
    loaded."""
    check_serve(config.serve)
    for fault in unused_lora(config, "serve"):
        raise Refused(fault)
    config = with_context(untrained(config))
    with bound(config.serve) as sock:
        uvloop.run(_serve(config, sock))
    return 0


def with_context(config: Config) -> Config:
    """Return the configuration with a context of `serve.max_context_tokens`, or else the model's own length. Prompts
    and answers then have no separate limits."""
    room = context_tokens(config.model.path)
    wanted = config.serve.max_context_tokens or room or longest_sequence(config)
    if room is not None and wanted > room:
        message = f"the model was made for {room} (max_position_embeddings); lower it, or leave it out"
        raise Refused(f"serve.max_context_tokens={wanted}: {message}")
    if wanted < 2:
        raise Refused(f"serve.max_context_tokens={wanted}: a prompt and an answer are two tokens at least")
    return replace(
        config,
        data=replace(config.data, max_prompt_tokens=wanted - 1),
        rollout=replace(config.rollout, max_response_tokens=1),
        eval=replace(config.eval, max_response_tokens=None),
    )


def bound(serve: ServeConfig) -> socket.socket:
    """Return the bound socket. Raise ValueError if the port or the address cannot be used."""
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((serve.host, serve.port))  # it accepts no connection before the model is loaded
    except OSError as e:
        sock.close()
        where = f"serve.host={serve.host} serve.port={serve.port}"
        raise Refused(f"{where}: {e.strerror or e}; choose another with serve.port= (0: a free one)") from None
    return sock


@dataclass(slots=True)
class FolderWeights:
    """The weights of a model folder as version 0. Implements `WeightReader`."""

    module: Any
    version: int = 0
    passes: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> Iterable[tuple[str, object]]:
        return self.module.state_dict().items()


async def _serve(config: Config, sock: socket.socket) -> None:
    from verl.chat.template import audit_template
    from verl.driver.assemble import rollout_engine
    from verl.driver.setup import decoder, device_of, load_tokenizer_of, template_lines, with_native_dtype
    from verl.driver.worker_setup import set_up_process
    from verl.model_engine.quantised_parts import load_dequantised
    from verl.models.pictures import Pictures
    from verl.rollout.server.app import make_app, run_app
    from verl.rollout.server.images import chat_images
    from verl.rollout.server.service import Service
    from verl.rollout.server.texts import Texts
    from verl.rollout.server.work import favour_the_event_loop
    from verl.transfer_queue.media import MemoryMedia

    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    config = with_native_dtype(config)
    set_up_process(config)
    tokenizer = load_tokenizer_of(config)
    folder, store = Path(config.model.path), MemoryMedia()
    images = chat_images(folder, tokenizer)
    pictures = None if images is None else Pictures(folder, store)
    engine = rollout_engine(config, tokenizer, device_of(config), pictures=pictures)
    try:
        module = load_dequantised(folder, trust_remote_code=config.model.trust_remote_code)
        await engine.load_weights(FolderWeights(module))
        vocab_size, banned = module.config.get_text_config().vocab_size, banned_tokens(module.config, tokenizer)
        del module
        able = await engine.capabilities()
        for note in (*template_lines(config, tokenizer), *able.notes):
            print(note, flush=True)
        kwargs = config.model.template_kwargs
        texts = Texts(
            tokenizer=tokenizer,
            decode=decoder(tokenizer),
            spell=decoder(tokenizer, special_tokens=True),
            audit=audit_template(tokenizer, kwargs),
            template_kwargs=kwargs,
            images=images,
        )
        service = Service(
            engine=engine,
            texts=texts,
            options=config.serve,
            grace_s=config.run.grace_s,
            vocab_size=vocab_size,
            banned=banned,
            media=None if images is None else store,
            pictures=pictures,
            max_context_tokens=able.max_context_tokens,
        )
        favour_the_event_loop()
        sock.listen()  # a request that follows the next line at once waits, and is not refused
        _announce(config, sock, able.max_context_tokens)
        await run_app(make_app(service), sock, stopping)
    finally:
        await engine.close()


def _announce(config: Config, sock: socket.socket, max_context_tokens: int) -> None:
    s, (host, port) = config.serve, sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    message = f"model {s.name!r}, context {max_context_tokens}" + (", control plane on" if s.control else "")
    print(f"serving http://{shown}:{port} ({message})", flush=True)
