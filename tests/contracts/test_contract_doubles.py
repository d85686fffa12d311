"""The contract of rollout engines for adapters of servers that do not run here: SGLang and TensorRT-LLM, by doubles
(tests/doubles.py) over the native engine; and the adapter of any completions API, over `verl serve`. The tests that are
left out need abilities that these servers lack; such requests are refused."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doubles import Process, SglangDouble, TrtllmDouble
from each import matrix
from serving import texts_of, tokenizer

from verl.rollout import openai, sglang, trtllm
from verl.rollout.api import Deadlines, Expected
from verl.rollout.base import Capabilities, GenerateRequest, RolloutContext, ServerPlace
from verl.rollout.client import ServedEngine
from verl.rollout.http import ServerGone
from verl.rollout.native import engine as native
from verl.rollout.native.options import Options
from verl.rollout.openai_api import TrtllmApi
from verl.rollout.server.app import make_app
from verl.rollout.server.options import ServeConfig
from verl.rollout.server.service import Service
from verl.serve import FolderWeights, bound
from verl.weight_sync import disk, local
from verl.weight_sync.base import CheckedReader, WeightSource, checksum
from verl.weight_sync.record import entry_of

SUITE = Path(__file__).parent / "test_rollout_contract.py"
ANSWERS = (
    *("test_greedy_equals_hf_generate", "test_samples_of_one_prompt_differ", "test_eos_stop_ids_and_limits"),
    *("test_a_response_of_only_eos", "test_stop_strings_across_token_boundaries", "test_abort_returns_partial_tokens"),
    *("test_the_context_can_be_filled_to_its_last_token", "test_cancelled_callers_free_their_rows"),
    *("test_an_answer_does_not_wait_for_the_longer_ones", "test_weights_are_a_snapshot"),
)
DRAWS = (
    *("test_logprobs_are_those_of_the_temperature", "test_truncation_and_its_logprobs"),
    *("test_samples_follow_the_distribution", "test_a_seed_gives_its_tokens_whatever_the_batch"),
)
UPDATES = ("test_no_stale_prefix_after_an_update",)
PAUSES = ("test_what_cannot_finish_is_not_waited_for", "test_a_cancelled_wait_is_given_up", "test_user_faults")
OF_SGLANG = [
    ("sglang", name) for name in (*ANSWERS, *DRAWS, *UPDATES, *PAUSES, "test_one_engine_over_several_event_loops")
]
CASES = [
    *OF_SGLANG,
    *(("trtllm", name) for name in (*ANSWERS, *UPDATES)),
    *(("openai", name) for name in (*ANSWERS, *DRAWS)),
]


class Running:
    """A server, in a thread with an event loop of its own."""

    def __init__(self, kind: str, suite: ModuleType) -> None:
        self.kind, self.suite, self.began, self.up = kind, suite, 0, threading.Event()
        self.came = 0  # tokens, to the engine that was made last
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        assert self.up.wait(60)

    async def _run(self) -> None:
        from aiohttp import web

        self.loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()
        module = self.suite.reference()
        context = RolloutContext(hf_config=module.config, max_context_tokens=512, dtype=torch.float32)
        self.engine = native.build(Options(), context, lanes=1)
        await self.engine.load_weights(FolderWeights(module, 0))
        vocab = module.config.vocab_size
        options = ServeConfig(port=0, max_sequences=10_000)
        if self.kind == "openai":
            given: dict[str, Any] = {"vocab_size": vocab, "max_context_tokens": 512, "texts": texts_of(tokenizer())}
            app = make_app(Service(engine=self.engine, options=options, **given))
        else:
            made = {"sglang": SglangDouble, "trtllm": TrtllmDouble}[self.kind]
            self.double = made(self.engine, vocab=vocab, room=513)
            app = self.double.app()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        with bound(options) as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            await web.SockSite(runner, sock).start()
            self.up.set()
            await self.stopping.wait()
            await runner.cleanup()
        await self.engine.close()

    def renew(self) -> None:
        """As when it was started, whatever was done to it."""
        self.do(self.engine.load_weights(FolderWeights(self.suite.reference(), 0), on_inflight="abort"))
        self.do(self.engine.wake())
        self.do(self.engine.resume())

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stopping.set)
        self.thread.join(30)

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def stats_of(self, engine: Any) -> dict[str, int]:
        found = self.engine.stats()
        return {**found, "sampled_tokens": found["sampled_tokens"] - self.began}

    def launch(self, folder: str | None) -> tuple[Any, str]:
        """Start a new server with the model of this folder, which does not have the name of a version."""
        assert folder is not None, "one that restarts for every version is not started before the first"
        self.do(self.double.take(folder, 0))
        self.do(self.engine.sleep(1))
        self.do(self.engine.wake(("kv",)))
        return Process(), self.url


def engine_of(kind: str, running: Running, context: RolloutContext) -> ServedEngine:
    if kind == "sglang":
        return sglang.build(sglang.Options(), context)
    if kind == "openai":
        return openai.build(openai.Options(), context)
    able = Capabilities(logprobs="processed", max_context_tokens=context.max_context_tokens)
    expected = Expected(name="TensorRT-LLM", versions=(trtllm.AT_LEAST, trtllm.BELOW))
    return ServedEngine(context, expected, TrtllmApi(), running.launch, able, Deadlines())


@pytest.fixture(scope="module", params=["sglang", "trtllm", "openai"])
def contract(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    kind = request.param
    spec = importlib.util.spec_from_file_location(f"contract_of_{kind}", SUITE)
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = suite
    spec.loader.exec_module(suite)
    running, outlet = Running(kind, suite), disk.DiskOutlet(tmp_path_factory.mktemp("weights"))

    def build(_: str, model: str = "qwen3", *, max_prefill_tokens: int = 0, **given: Any) -> ServedEngine:
        place = ServerPlace(model="none", log=Path(os.devnull), url=running.url)
        known = {"max_context_tokens": 512, "dtype": torch.float32, **given}
        context = RolloutContext(hf_config=suite.reference(model).config, place=place, **known)
        made = engine_of(kind, running, context)
        read, running.came = made.connection.api.read, 0

        def counting(drawn: Any, answer: Any) -> None:
            before = len(drawn.ids)
            read(drawn, answer)
            running.came += len(drawn.ids) - before

        made.connection.api.read = counting  # type: ignore[method-assign]
        return made

    async def until_here(engine: Any, tokens: int) -> None:
        """A client that closes a connection has the tokens that it received, perhaps fewer than were sampled."""
        while running.came < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def load(engine: ServedEngine, source: Any, **options: Any) -> int:
        held = {name: tensor.detach() for name, tensor in source.tensors()}
        if source.module.config.tie_word_embeddings:
            held.pop("lm_head.weight")
        shapes = {name: entry_of(tensor) for name, tensor in held.items()}
        sums = {name: checksum(tensor) for name, tensor in held.items()}
        manifest = {name: type(e)(e.shape, e.dtype, checksum=sums[name]) for name, e in shapes.items()}
        if kind == "openai":  # it has them by itself
            await asyncio.to_thread(running.do, running.engine.load_weights(FolderWeights(source.module, 0)))
            transport, address = local.LocalOutlet.transport, "none"
        else:
            transport, address = outlet.transport, outlet.stage(source.version, shapes, held.items())
        reader = CheckedReader(WeightSource(source.version, transport, address, manifest))
        version = await engine.load_weights(reader, **options)
        assert reader.delivered == set(manifest)
        running.began, running.came = running.engine.stats()["sampled_tokens"], 0
        return version

    suite.DRAWS = 1000  # that the settings came is to be seen; the draws are the native engine's
    suite.build, suite.stats_of, suite.load = build, running.stats_of, load  # type: ignore[attr-defined]
    if kind != "sglang":
        suite.until_sampled = until_here  # type: ignore[attr-defined]
    suite.kind, suite.running = kind, running  # type: ignore[attr-defined]
    yield suite
    running.stop()


@matrix(
    "contract, name",
    CASES,
    quick=[case for case in CASES if case[0] == "sglang"],
    indirect=["contract"],
    scope="module",
)
def test_contract(contract: ModuleType, name: str) -> None:
    test = vars(contract)[name]
    if "model" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        test("server", "qwen3")
    else:
        test("server")


@pytest.mark.parametrize("contract", ["sglang"], indirect=True, scope="module")
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(contract: ModuleType, mode: str) -> None:
    contract.test_pause("server", mode)


@matrix("contract", ["trtllm", "openai"], indirect=True, scope="module")
def test_waiting_without_the_server(contract: ModuleType) -> None:
    contract.test_pause("server", "wait")


@matrix("contract", ["trtllm", "openai"], indirect=True, scope="module")
def test_aborting_without_the_server(contract: ModuleType) -> None:
    """It notices the end of a connection in its own time; here the answer has ended, and later requests are held."""
    a, b = contract.prompts((5, 6))

    async def body(engine: Any) -> None:
        running = asyncio.create_task(engine.generate(GenerateRequest("a", a, contract.greedy(480))))
        await contract.until_sampled(engine, 3)
        await engine.pause("abort")
        done = await running
        assert done.stop_reason == "abort" and done.ids.tolist() == contract.hf_greedy(a, 480)[: len(done.ids)]
        late = [asyncio.create_task(engine.generate(GenerateRequest(name, b, contract.greedy(5)))) for name in "bc"]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in late) and await engine.abort(["c"]) == 1
        assert ((await late[1]).stop_reason, len((await late[1]).ids)) == ("abort", 0)
        await engine.resume()
        assert (await late[0]).ids.tolist() == contract.hf_greedy(b, 5)

    contract.with_engine(contract.build("server"), body)


@matrix("contract", ["sglang", "trtllm"], indirect=True, scope="module")
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_update_that_waits_or_aborts(contract: ModuleType, mode: str) -> None:
    contract.test_update_that_waits_or_aborts("server", mode)


@pytest.mark.parametrize("contract", ["sglang"], indirect=True, scope="module")
@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_lose_and_double_nothing(contract: ModuleType, seed: int) -> None:
    contract.test_random_schedules_lose_and_double_nothing("server", seed)


@pytest.mark.parametrize("contract", ["trtllm"], indirect=True, scope="module")
def test_a_start_that_fails_is_not_the_last_one(contract: ModuleType) -> None:
    """With the weights of a version that did not come up nothing speaks; the next version's server does."""
    prompt, running = contract.prompts((7,))[0], contract.running

    class Dead(Process):
        exit_code = 1
        log = Path("server.log")

    async def body(engine: Any) -> list[int]:
        engine.connection.launch = lambda folder: (Dead(), running.url)
        with pytest.raises(RuntimeError, match="ended with exit code 1 as it started"):
            await contract.load(engine, contract.Source(contract.reference(seed=1), 1))
        with pytest.raises(ServerGone, match="out of service: the update to version 1 failed"):
            await engine.generate(GenerateRequest("r", prompt, contract.greedy(5)))
        engine.connection.launch = running.launch
        assert await contract.load(engine, contract.Source(contract.reference(seed=2), 2)) == 2
        return (await engine.generate(GenerateRequest("r", prompt, contract.greedy(5)))).ids.tolist()

    assert contract.with_engine(contract.build("server"), body) == contract.hf_greedy(prompt, 5, seed=2)
