"""sglang-router, a program of its own, before a server of ours: no engine can be reached through it, and each is
refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from routing import router
from serving import model, server_process, tokenizer

from verl.rollout import openai, server_url, sglang
from verl.rollout.base import RolloutContext, ServerPlace

pytest.importorskip("sglang_router", reason="pip install sglang-router==0.3.2")
ROOM = 64


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("router")
    module = model()
    module.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    args = (f"serve.max_context_tokens={ROOM}",)
    with contextlib.ExitStack() as stack:
        _, at = stack.enter_context(server_process(folder / "model", folder / "serve.log", *args))
        url = stack.enter_context(router([at], folder / "router.log"))
        yield SimpleNamespace(url=url, module=module)


def engine(world: Any, kind: Any, url: str) -> Any:
    place = ServerPlace(model="", log=Path(os.devnull), url=url)
    context = RolloutContext(
        hf_config=world.module.config, max_context_tokens=ROOM, dtype=torch.float32, place=place, eos_token_ids=()
    )
    return kind.build(kind.Options(start_timeout_s=20, request_timeout_s=60), context)


@pytest.mark.parametrize("kind", [openai, server_url, sglang])
def test_engines_are_refused_in_one_line_as_it_routes_neither_tokens_nor_their_control_plane(
    world: Any, kind: Any
) -> None:
    async def run() -> None:
        one = engine(world, kind, world.url)
        try:
            with pytest.raises(ValueError, match=r"if a router gives it, name the servers behind it") as refused:
                await asyncio.wait_for(one.capabilities(), 60)
            assert "\n" not in str(refused.value)
        finally:
            await one.close()

    asyncio.run(run())
