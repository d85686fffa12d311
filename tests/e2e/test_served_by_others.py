"""Runs over the adapters of other servers. SGLang's, by a double over the native engine, trains as a run in this
process does; any completions API, here `verl serve`, evaluates as the engine of this process does."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from doubles import SglangDouble
from safetensors.torch import load_file
from serving import server_process
from small_runs import metrics_of, same_tensors, small_args, small_run, tensors_of, trained
from transformers import AutoModelForCausalLM

from verl.config.load import load_config
from verl.driver.launch import run_eval, run_rl
from verl.models import tiny
from verl.recipes import arithmetic
from verl.rollout.base import RolloutContext
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.server.options import ServeConfig
from verl.serve import bound
from verl.weight_sync.base import SyncError


@contextlib.contextmanager
def sglang_server(folder: Path) -> Iterator[tuple[SglangDouble, str]]:
    """In a thread with an event loop of its own, with other weights than the folder's."""
    up, found = threading.Event(), SimpleNamespace()

    async def run() -> None:
        found.loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        found.stop = stopping.set
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = module.config
        context = RolloutContext(
            hf_config=config, max_context_tokens=config.max_position_embeddings, dtype=torch.float32
        )
        engine = native.build(Options(), context, lanes=1)
        state = {name: torch.randn_like(tensor) for name, tensor in module.state_dict().items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        await engine.load_weights(SimpleNamespace(version=0, passes=False, seconds={}, tensors=state.items))
        found.double = SglangDouble(engine, vocab=config.vocab_size, room=config.max_position_embeddings + 1)
        runner = web.AppRunner(found.double.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        with bound(ServeConfig(port=0)) as sock:
            found.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            await web.SockSite(runner, sock).start()
            up.set()
            await stopping.wait()
            await runner.cleanup()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield found.double, found.url
    finally:
        found.loop.call_soon_threadsafe(found.stop)
        thread.join(30)


def test_a_run_over_sglangs_api_is_the_run_in_process(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    """Weights go through folders, and the same seeds give the same tokens: so the same weights, up to rounding."""
    small_run(tmp_path / "here", tiny_model, arithmetic_data)
    (tmp_path / "versions").mkdir()
    folder = ("sync.engine=disk", f"sync.engine_options.folder={tmp_path / 'versions'}")
    with sglang_server(tiny_model) as (double, url):
        served = ("rollout.engine=sglang", f"rollout.url={url}", *folder)
        small_run(tmp_path / "there", tiny_model, arithmetic_data, *served)
    here, there = (tmp_path / place / "r" for place in ("here", "there"))
    assert trained(here) == trained(there)
    steps = metrics_of(there)
    assert max(steps[i]["sync/canary_mean_abs"] for i in (1, 2, 3)) <= 1e-5
    same_tensors(tensors_of(here, 3), tensors_of(there, 3))
    assert not list((tmp_path / "versions").iterdir()), "its folders go with the run"
    sent = [body for path, body in double.asked if path == "/update_weights_from_disk"]
    numbers, marks = zip(*(body["weight_version"].split("-") for body in sent))
    assert numbers == ("0", "1", "2", "3") and len({*marks}) == 1


def test_a_server_without_adapters_gets_the_factors_added_and_the_start_gives_their_rounding(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an adapter whose factors are not 0. What it learns is what the rollout with unmerged factors learns."""
    lora = ("model.lora.rank=4", "model.lora.alpha=8", "optim.lr=3e-3")
    small_run(tmp_path / "before", tiny_model, arithmetic_data[:1], *lora, "run.total_steps=2")
    adapter = tmp_path / "before/r/checkpoints/step_2/hf"
    further = (f"model.lora.path={adapter}", "optim.lr=3e-3")
    small_run(tmp_path / "here", tiny_model, arithmetic_data[:1], *further)
    capsys.readouterr()
    with sglang_server(tiny_model) as (_, url):
        args = small_args(
            tmp_path / "there", tiny_model, arithmetic_data[:1], *further, "rollout.engine=sglang", f"rollout.url={url}"
        )
        run_rl(load_config(args))
    (line,) = re.findall(
        r"LoRA factors are added to the weights that it gets, which are rounded once: log-probs of the canary "
        r"change by (\S+) on average",
        " ".join(capsys.readouterr().out.split()),
    )
    assert 0 < float(line) < 1e-5
    here, there = (tmp_path / place / "r" for place in ("here", "there"))
    assert trained(here) == trained(there)
    first, second = (load_file(d / "checkpoints/step_3/hf/adapter_model.safetensors") for d in (here, there))
    same_tensors(first, second)


@pytest.mark.slow
def test_updates_reach_requests_in_flight_at_sglang(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    ahead = ("pipeline.staleness=1", "pipeline.partial_rollout=true", "rollout.max_response_tokens=64")
    with sglang_server(tiny_model) as (double, url):
        served = ("rollout.engine=sglang", f"rollout.url={url}", 'rollout.stop=["+++"]', "run.total_steps=4")
        small_run(tmp_path, tiny_model, arithmetic_data, *served, *ahead)
    steps = metrics_of(tmp_path / "r")
    assert {1, 2, 3, 4} <= steps.keys() and max(steps[i]["sync/canary_mean_abs"] for i in (1, 2, 3, 4)) <= 1e-5


def test_an_update_that_changes_nothing_is_found_by_the_canary(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any
) -> None:
    async def ignored(folder: str, version: int) -> None:
        """200, and the old weights."""

    with sglang_server(tiny_model) as (double, url):
        double.take = ignored  # type: ignore[method-assign]
        with pytest.raises(
            SyncError, match="trainer's weights: serve this model by another one .rollout.engine=native or hf"
        ):
            small_run(tmp_path, tiny_model, arithmetic_data, "rollout.engine=sglang", f"rollout.url={url}")


@pytest.mark.slow
def test_a_server_with_weights_of_its_own_is_evaluated(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    def evaluated(root: Path, *more: str) -> dict[str, float]:
        return run_eval(load_config(small_args(root, tiny_model, arithmetic_data, *more))).values

    other = tmp_path / "other"
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    tiny.save(tiny.qwen3(tokenizer, seed=11), tokenizer, other)
    expected = evaluated(tmp_path / "here")
    with server_process(tiny_model, tmp_path / "serve.log") as (_, url):
        found = evaluated(tmp_path / "there", "rollout.engine=openai", f"rollout.url={url}")
    scores = [name for name in expected if name.startswith("eval/") and "acc" in name]
    assert scores and {name: found[name] for name in scores} == {name: expected[name] for name in scores}
    with (
        server_process(other, tmp_path / "other.log") as (_, url),
        pytest.raises(
            SyncError, match="trainer's weights: serve this model by another one .rollout.engine=native or hf"
        ),
    ):
        evaluated(tmp_path / "wrong", "rollout.engine=openai", f"rollout.url={url}")
