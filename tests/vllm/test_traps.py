"""Known faults of vLLM 0.32 on a CPU, each tested against the real server."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from each import FULL_GRID
from real_server import Running, context_of, own_server, staged

from verl.processes.guard import MAPS_S, SHM
from verl.rollout import vllm
from verl.rollout.base import GenerateRequest, ServerPlace
from verl.rollout.client import ServedEngine
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.process import OURS
from verl.rollout.vllm_api import ABORT, REQUEST_PREFIX
from verl.types import Sampling
from verl.weight_sync.base import SyncError, check_canary
from verl.weight_sync.canary import Probed


def probed(suite: ModuleType, ids: np.ndarray, seed: int) -> Probed:
    """The trainer's side of the canary for that reference model."""
    logits = suite.hf_logits(ids, seed=seed)[:-1]
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].numpy()
    entropy = -(every.exp() * every).sum(-1).numpy()
    return Probed(ids[1:], logprobs, entropy, logprobs, torch.finfo(torch.float32).eps)


# ---- on the shared server --------------------------------------------------------------------------------------------


def test_scores_are_those_of_hf_and_at_temperature_1_only(contract: ModuleType) -> None:
    ids = contract.prompts((50,))[0]

    async def body(engine: Any) -> None:
        np.testing.assert_allclose(await engine.score(ids), contract.hf_logprobs(ids[:1], ids[1:], 1.0), atol=1e-5)
        full = contract.prompts((511,))[0]
        assert (await engine.score(full)).shape == (510,)
        with pytest.raises(ValueError, match="scores at temperature 1 only"):
            await engine.score(ids, temperature=0.7)

    contract.with_engine(contract.build("vllm"), body)


def test_another_model_is_refused_and_the_server_goes_on(contract: ModuleType, running: Running) -> None:
    """An id outside of its vocabulary would end it, so its own sizes are requested instead."""

    async def body(engine: Any) -> None:
        place = ServerPlace(model="/models/other", log=running.process.log, url=running.url)
        context = context_of(contract, place)
        config = copy.deepcopy(context.hf_config)
        config.vocab_size, config.num_hidden_layers = 63, 2
        other = vllm.build(vllm.Options(), replace(context, hf_config=config))
        sizes = "vocab_size=61 and not 63, num_hidden_layers=8 and not 2"
        with pytest.raises(ValueError, match=f"{running.model} has {sizes}; model.path=/models/other has 63 ids"):
            await other.capabilities()
        await other.close()
        assert (await engine.score(contract.prompts((5,))[0])).shape == (4,)

    contract.with_engine(contract.build("vllm"), body)


def test_many_long_prompts_with_seeds(contract: ModuleType) -> None:
    """A request with a seed kills the engine if its prefill is split over steps, so it must not be split."""
    jobs = {str(i): (contract.prompts((500,), seed=i)[0], Sampling(max_tokens=3, seed=2**62 + i)) for i in range(40)}

    async def body(engine: Any) -> None:
        done = await contract.generate_all(engine, jobs)
        assert all(len(c.ids) == 3 for c in done.values())

    contract.with_engine(contract.build("vllm"), body)


def test_a_tied_head_follows_its_embedding(contract: ModuleType) -> None:
    """Its packed copy kept the old weights: 1.2 nats, and HTTP 200."""
    ids = contract.prompts((40,))[0]

    async def body(engine: Any) -> None:
        for version, seed in ((1, 1), (2, 0), (3, 2)):
            await contract.load(engine, contract.Source(contract.reference(seed=seed), version))
            canary = await check_canary("here", engine, [ids], probed(contract, ids, seed), None)
            assert canary < 1e-5
            with pytest.raises(SyncError, match="does not run the trainer's weights"):
                await check_canary("here", engine, [ids], probed(contract, ids, seed + 1), None)

    contract.with_engine(contract.build("vllm"), body)


def test_running_requests_go_on_under_new_weights(contract: ModuleType) -> None:
    """Spans name the weights that sampled a token. Later tokens are as if the new weights had read the whole text: vLLM
    computes the keys and values again."""
    prompt, long = contract.prompts((9,))[0], contract.LONG

    async def body(engine: Any) -> Any:
        weights = staged(contract.Source(contract.reference(seed=1), 1))
        task = asyncio.create_task(engine.generate(GenerateRequest("r", prompt, contract.greedy(long))))
        await contract.until_sampled(engine, 5)
        assert await engine.load_weights(weights, on_inflight="keep") == 1
        c = await task
        if len(c.spans) == 1:
            contract.still(task)
        return c

    c = contract.meets(lambda: contract.with_engine(contract.build("vllm"), body))()
    (_, start, switch), (_, resumed, end) = c.spans
    assert [v for v, _, _ in c.spans] == [0, 1] and (start, end) == (0, long) and 0 < resumed == switch < long
    assert c.ids[:switch].tolist() == contract.hf_greedy(prompt, long)[:switch]
    old = contract.hf_logprobs(prompt, c.ids, 1.0)[:switch]
    np.testing.assert_allclose(c.logprobs[:switch], old, atol=1e-5)
    logits = contract.hf_logits(np.concatenate([prompt, c.ids]), seed=1)[len(prompt) - 1 : -1]
    new = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(c.ids)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(c.logprobs[switch:], new[switch:], atol=1e-5)


def test_an_abort_names_a_request_as_the_server_does(contract: ModuleType, running: Running) -> None:
    """By the plain id it is 200 and does nothing."""

    async def body(engine: Any) -> None:
        task = asyncio.create_task(
            engine.generate(GenerateRequest("r", contract.prompts((5,))[0], contract.greedy(contract.LONG)))
        )
        await contract.until_sampled(engine, 5)
        await engine.pause("keep")
        contract.still(task)
        (call,) = engine.calls.pending.values()
        http = Http(running.url)
        await http.post(ABORT, {"request_ids": [call.server_id]}, timeout_s=30)
        await asyncio.sleep(0.1)
        assert not task.done()
        await http.post(ABORT, {"request_ids": [REQUEST_PREFIX + call.server_id]}, timeout_s=30)
        await http.close()
        assert (await task).stop_reason == "abort"
        await engine.resume()

    contract.meets(lambda: contract.with_engine(contract.build("vllm"), body))()


def test_prefixes_are_not_dropped_while_requests_run(contract: ModuleType, running: Running) -> None:
    """200, with `success: false`: so it is done while they stand still, and the answer is read."""

    async def body(engine: Any) -> None:
        http, over = Http(running.url), asyncio.Event()

        async def one_by_one(tokens: int) -> None:
            while not over.is_set():
                await engine.generate(
                    GenerateRequest(f"r{tokens}", contract.prompts((40,))[0], contract.greedy(tokens))
                )

        tasks = [asyncio.create_task(one_by_one(tokens)) for tokens in (400, 300)]  # one of them runs
        await contract.until_sampled(engine, 5)
        while_it_runs = await http.post("/reset_prefix_cache", timeout_s=30)
        await engine.pause("keep")
        then = await http.post("/reset_prefix_cache", timeout_s=30)
        over.set()
        await engine.resume()
        await engine.abort()
        await asyncio.gather(*tasks)
        await http.close()
        assert then == {"success": True}
        if while_it_runs != {"success": False}:
            raise contract.Ended

    contract.meets(lambda: contract.with_engine(contract.build("vllm"), body))()


def test_a_prefix_is_shared_and_reported(contract: ModuleType) -> None:
    prompt = contract.prompts((100,))[0]

    async def body(engine: Any) -> None:
        assert (await engine.generate(GenerateRequest("a", prompt, contract.greedy(2)))).cached_tokens == 0
        assert (await engine.generate(GenerateRequest("b", prompt, contract.greedy(2)))).cached_tokens == 96
        able = await engine.capabilities()
        assert able.prefix_cache and able.in_flight_update and able.sleep_levels == () and not able.lora_rank

    contract.with_engine(contract.build("vllm"), body)


def test_stop_strings_that_the_server_would_ignore_end_the_answer(contract: ModuleType, running: Running) -> None:
    """Without a tokenizer vLLM silently ignores them, so the client matches them; the row is free at once."""
    prompt = contract.prompts((9,), seed=4)[0]
    full = contract.hf_greedy(prompt, 400)
    stop = contract.decode(full[20:24])

    async def body(engine: Any) -> None:
        c = await engine.generate(GenerateRequest("r", prompt, contract.greedy(400, stop=(stop,))))
        assert c.stop_reason == "stop" and len(c.ids) <= 24 and c.ids.tolist() == full[: len(c.ids)]
        if running.stats_of(engine)["sampled_tokens"] >= 350:
            raise contract.Ended
        while running.stats_of(engine)["resident"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    contract.meets(lambda: contract.with_engine(contract.build("vllm", decode=contract.decode), body))()


def test_a_server_with_too_short_a_context_is_refused(contract: ModuleType, running: Running) -> None:
    engine = contract.build("vllm")
    engine.connection.context = replace(engine.connection.context, max_context_tokens=600)

    async def run() -> None:
        with pytest.raises(ValueError, match="at most 512 tokens, and 600 are asked for"):
            await engine.capabilities()
        await engine.close()

    asyncio.run(run())


# ---- on servers of their own, which they break -----------------------------------------------------------------------


def on_its_own(
    suite: ModuleType, folder: Path, body: Callable[[ServedEngine], Awaitable[Any]], **options: Any
) -> ServedEngine:
    """Afterwards nothing of the server is left."""
    engine = own_server(suite, folder, **options)

    async def run() -> None:
        try:
            await asyncio.wait_for(body(engine), 800)
        finally:
            began_s = time.monotonic()
            await engine.close()
            assert time.monotonic() - began_s < 60
        assert engine.connection.process is not None and not processes(engine)

    asyncio.run(run())
    return engine


def processes(engine: ServedEngine) -> list[psutil.Process]:
    """Return the processes of its session, with their names."""
    assert engine.connection.process is not None
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == engine.connection.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def mapped(process: psutil.Process) -> set[str]:
    """The names of the shared memory that a process maps and that is still there, but for the segments of our
    weights."""
    paths = [Path(found.path) for found in process.memory_maps()]
    return {path.name for path in paths if path.parent == SHM and path.exists() and not path.name.startswith(OURS)}


def core_of(engine: ServedEngine) -> psutil.Process:
    (core,) = [p for p in processes(engine) if "EngineCore" in " ".join([p.name(), *p.cmdline()])]
    return core


def test_updates_that_fail_and_an_engine_that_hangs_or_dies(suite: ModuleType, tmp_path: Path) -> None:
    """One server after the other, as each of these ends one."""
    prompt, ids = suite.prompts((9,))[0], suite.prompts((40,))[0]
    k_proj = "model.layers.1.self_attn.k_proj.weight"

    async def answers(engine: ServedEngine, seed: int) -> None:
        c = await engine.generate(GenerateRequest("r", prompt, suite.greedy(9)))
        assert c.ids.tolist() == suite.hf_greedy(prompt, 9, seed=seed)
        assert await check_canary("here", engine, [ids], probed(suite, ids, seed), None) < 1e-5

    async def refused(engine: ServedEngine, reader: Any, said: str) -> None:
        before = engine.connection.process
        with pytest.raises((SyncError, ServerRefused, ServerGone, ValueError), match=said):
            await engine.load_weights(reader, on_inflight="keep")
        with pytest.raises(ServerGone, match="out of service"):
            await engine.generate(GenerateRequest("r", prompt, suite.greedy(3)))
        assert before is not None and before.exit_code is not None, "it is ended, and never resumed"

    async def body(engine: ServedEngine) -> None:
        with pytest.raises(ValueError, match="no weights"):
            await engine.generate(GenerateRequest("r", prompt, suite.greedy(3)))
        await engine.load_weights(staged(suite.Source(suite.reference(), 0)))
        await answers(engine, 0)
        # left out: 200 everywhere, and half of the weights are the old ones
        new = suite.Source(suite.reference(seed=1), 1)
        await refused(engine, staged(new, without=k_proj), rf"did not load 1 of .*{k_proj.replace('.', '[.]')}")
        assert await engine.load_weights(staged(new)) == 1  # a new process, with all of them
        await answers(engine, 1)
        if FULL_GRID:
            await others(engine)
        # closed while a request runs: SIGTERM alone would wait for its caller
        jobs = [GenerateRequest(f"l{i}", prompt, suite.greedy(400)) for i in range(8)]
        running = asyncio.gather(*(engine.generate(job) for job in jobs), return_exceptions=True)
        await asyncio.sleep(0.2)
        await asyncio.wait_for(engine.close(), 30)
        ended = await asyncio.wait_for(running, 30)
        assert any(isinstance(one, RuntimeError) and "closed" in str(one) for one in ended), ended

    async def others(engine: ServedEngine) -> None:
        # another shape: afterwards even the right tensors fail, so it gets none
        await refused(engine, staged(suite.Source(suite.reference(), 2), shape_of=k_proj), "HTTP 500")
        assert await engine.load_weights(staged(suite.Source(suite.reference(), 3))) == 3
        await answers(engine, 0)
        # stopped: /health is 200
        core = core_of(engine)
        core.suspend()
        await engine.connection.http.get("/health", timeout_s=30)
        with pytest.raises(ServerLate):
            await engine.connection.probe(2.0)
        core.resume()
        await engine.connection.probe(60.0)
        # killed
        task = asyncio.create_task(engine.generate(GenerateRequest("k", prompt, suite.greedy(400))))
        await asyncio.sleep(0.2)
        core.kill()
        with pytest.raises((ServerGone, ServerRefused)):
            await task
        assert await engine.load_weights(staged(suite.Source(suite.reference(seed=1), 4))) == 4
        await answers(engine, 1)

    on_its_own(suite, tmp_path, body)


def spoil(segment: Path) -> None:
    with segment.open("r+b") as file:
        file.seek(-400, os.SEEK_END)
        file.write(b"\x01" * 8)


@pytest.mark.full("test_sync_vllm.py: a bucket that changed after its manifest")
def test_bytes_that_changed_on_their_way_are_refused(suite: ModuleType, tmp_path: Path) -> None:
    async def body(engine: ServedEngine) -> None:
        reader = staged(suite.Source(suite.reference(), 0))
        spoil(Path(reader.source.address))
        with pytest.raises(SyncError, match="checksum"):
            await engine.load_weights(reader)
        assert engine.connection.process is not None
        assert "is not what the trainer sent (checksum)" in engine.connection.process.log.read_text()

    on_its_own(suite, tmp_path, body)


@pytest.mark.full("test_runs.py: two processes and updates in flight")
def test_two_processes_share_a_model_and_leave_nothing(suite: ModuleType, tmp_path: Path) -> None:
    held: set[str] = set()

    async def body(engine: ServedEngine) -> None:
        for version in (0, 1):
            await engine.load_weights(staged(suite.Source(suite.reference(seed=version), version)))
            prompt = suite.prompts((9,))[0]
            c = await engine.generate(GenerateRequest("r", prompt, suite.greedy(20)))
            assert c.ids.tolist() == suite.hf_greedy(prompt, 20, seed=version)
        assert engine.connection.process is not None
        held.update(*map(mapped, processes(engine)))
        await asyncio.sleep(MAPS_S + 1)  # the guardian has looked, too
        for process in processes(engine):
            process.send_signal(signal.SIGKILL)
        while engine.connection.process.exit_code is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    on_its_own(suite, tmp_path, body, tensor_parallel_size=2)
    assert held and not [name for name in held if (SHM / name).exists()]


@pytest.mark.full("test_traps.py: a tied head follows its embedding")
def test_an_untied_model_with_biases(suite: ModuleType, tmp_path: Path) -> None:
    async def body(engine: ServedEngine) -> None:
        prompt = suite.prompts((9,))[0]
        for version in (0, 1):
            await engine.load_weights(staged(suite.Source(suite.reference("qwen2", version), version)))
            c = await engine.generate(GenerateRequest("r", prompt, suite.greedy(20)))
            assert c.ids.tolist() == suite.hf_greedy(prompt, 20, "qwen2", version)

    engine = own_server(suite, tmp_path, "qwen2")

    async def run() -> None:
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(run())
    assert not processes(engine)
