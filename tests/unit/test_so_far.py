"""The tokens that a lost server had sampled of an answer are kept: another server continues it, and the answer is the
undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestServer
from each import each
from served import NAMES, VOCAB, Served, crashing, hanging_up
from serving import engine_of, model, serving, tokenizer

from verl.rollout import server_url
from verl.rollout.api import Deadlines, Expected
from verl.rollout.base import (
    Capabilities,
    Completion,
    GenerateRequest,
    PartialAnswer,
    ReplicaLost,
    RolloutContext,
    ServerPlace,
)
from verl.rollout.client import ServedEngine
from verl.rollout.router import Router
from verl.rollout.vllm_api import VerlApi, VllmApi
from verl.types import Sampling, derive_seed
from verl.weight_sync.base import CheckedReader, Entry, WeightSource

PROMPT = np.array([3, 4])  # answers 5, 6, 7, ...
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
GENERATE = "/inference/v1/generate"


def same(found: Completion, wanted: Completion, at: Any) -> None:
    assert found.ids.tolist() == wanted.ids.tolist(), at
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-5, err_msg=str(at))
    assert (found.spans, found.stop_reason, found.stop) == (wanted.spans, wanted.stop_reason, wanted.stop), at


def part_of(whole: Completion, tokens: int, version: int = 0, *, mixes: bool = False) -> PartialAnswer:
    found = PartialAnswer(mixes=mixes)
    found.add(whole.ids[:tokens].tolist(), whole.logprobs[:tokens].tolist(), version)
    return found


# ---- our own engine --------------------------------------------------------------------------------------------------

OURS = np.array([5, 9, 20, 33, 7])
SEEDED = Sampling(max_tokens=15, temperature=1.0, seed=11, ignore_eos=True)


@contextlib.asynccontextmanager
async def ours() -> AsyncIterator[ServedEngine]:
    """Yield the client of a server of our own in this process, with a deterministic model."""
    of, module = tokenizer(), model()
    async with serving(await engine_of(module), of, control=True, request_timeout_s=60.0) as (client, service):
        place = ServerPlace(model="none", log=Path(os.devnull), url=str(client._base_url).rstrip("/"))
        given = {"max_context_tokens": 21, "dtype": torch.float32, "eos_token_ids": (of.eos_token_id,)}
        spelled = lambda ids: "".join(f"<{i}>" for i in ids)  # noqa: E731
        context = RolloutContext(hf_config=module.config, place=place, decode=spelled, **given)
        engine = server_url.build(server_url.Options(), context)
        await engine.capabilities()
        engine.connection.version = 0  # it was started with the weights that this run would give it
        service.weights[0] = f"0-{engine.connection.tag}"
        try:
            yield engine
        finally:
            await engine.close()


@each(
    "sampling",
    [
        SEEDED,
        Sampling(max_tokens=14, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=200, temperature=1.3, top_p=0.9, top_k=50, seed=5),
    ],
)
def test_an_answer_that_was_begun_elsewhere_ends_as_it_would_have(sampling: Sampling) -> None:
    """Begun at every length: greedy and seeded draws, a full context, stop strings over the seam, stop ids."""

    async def run() -> None:
        async with ours() as engine:
            plain = await engine.generate(GenerateRequest("plain", OURS, sampling))
            assert len(plain.ids) > 12
            seam = f"{plain.ids[7]}><{plain.ids[8]}"  # two tokens are pieces of one stop string
            asked = [sampling]
            for change in ({"stop": (seam,)}, {"stop_token_ids": (int(plain.ids[10]),)}):
                asked.append(Sampling(**{n: getattr(sampling, n) for n in sampling.__dataclass_fields__} | change))
            for of in asked:
                whole = await engine.generate(GenerateRequest("whole", OURS, of))
                assert (whole.stop_reason == "stop") == (of is not sampling)
                names = {k: f"{k}" for k in range(len(whole.ids))}
                found = await asyncio.gather(
                    *(
                        engine.generate(GenerateRequest(name, OURS, of, begun=part_of(whole, k)))
                        for k, name in names.items()
                    )
                )
                for k, one in enumerate(found):
                    same(one, whole, (of, k))

    asyncio.run(asyncio.wait_for(run(), 120))


def test_what_is_kept_of_an_answer_holds_nothing_that_ends_it() -> None:
    async def run() -> None:
        async with ours() as engine:
            whole = await engine.generate(GenerateRequest("whole", OURS, SEEDED))
            kept = PartialAnswer()
            same(await engine.generate(GenerateRequest("told", OURS, SEEDED, begun=kept)), whole, "streamed")
            assert kept.ids == whole.ids[:-1].tolist()

    asyncio.run(asyncio.wait_for(run(), 60))


# ---- servers that die ------------------------------------------------------------------------------------------------


class Chained(Served):
    """Token after token is the next one, also behind a longer prompt. dies_at: after so many, of one answer · slow_s:
    for each token of a long one."""

    def __init__(self, dies_at: int | None = None, **given: Any) -> None:
        super().__init__(**given)
        self.dies_at, self.slow_s = dies_at, 0.0

    async def _tokens(self, name: str, prompt: list[int], params: Any) -> Any:
        for i in range(params["max_tokens"]):
            await asyncio.sleep(self.slow_s if params["max_tokens"] > 20 else 0.0)
            while not self.going.is_set() and not self.running[name].is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if self.running[name].is_set():
                return
            if i == self.dies_at and params["max_tokens"] > 8:  # no probe
                await self.end(name)
            token = (prompt[-1] + 1 + i) % VOCAB
            yield token
            if token in params.get("stop_token_ids", ()):
                return
        if self.dies_at == params["max_tokens"] > 8:
            await self.end(name)

    async def end(self, name: str) -> None:
        """Sent events still arrive; no other event is sent."""
        self.faults |= {GENERATE: hanging_up, "/health": crashing(503)}
        transport = self.open[name].transport
        assert transport is not None
        transport.close()
        await asyncio.sleep(3600)


def reader(version: int) -> CheckedReader:
    manifest = {name: Entry((2,), "float32", checksum=7) for name in NAMES}
    return CheckedReader(WeightSource(version, "verl.weight_sync.shm:open_weights", f"/dev/shm/x-{version}", manifest))


def engine_at(url: str, api: VllmApi) -> ServedEngine:
    text = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=512)
    able = Capabilities(logprobs="processed", max_context_tokens=64, in_flight_update=True)
    context = RolloutContext(
        hf_config=SimpleNamespace(model_type="doubled", get_text_config=lambda: text, architectures=["Doubled"]),
        max_context_tokens=64,
        dtype=torch.float32,
        decode=lambda ids: "".join(LETTERS[i] for i in ids),
    )
    return ServedEngine(context, Expected(name="vLLM"), api, url, able, Deadlines(start_s=5, request_s=20))


async def publish(router: Router, version: int, only: set[int] | None = None) -> None:
    for replica in router.replicas:
        if only is None or replica.number in only:
            await replica.load_weights(reader(version), on_inflight="keep")


def with_two(
    body: Callable[[Router, list[Chained]], Awaitable[None]],
    *,
    dies_at: int | None = None,
    mixes: bool = False,
    api: VllmApi | None = None,
) -> None:
    async def run() -> None:
        doubles = [Chained(dies_at), Chained()]
        servers = [TestServer(double.app()) for double in doubles]
        for server in servers:
            await server.start_server()
        urls = [str(server.make_url("")) for server in servers]
        starts = [lambda died, url=url: engine_at(url, api or VllmApi(resumable_stream=True)) for url in urls]
        router = Router(starts, mixes=mixes, note=lambda text: None)
        await publish(router, 0)
        router.published({})
        try:
            await asyncio.wait_for(body(router, doubles), 30)
        finally:
            await router.close()
            for server in servers:
                await server.close()

    asyncio.run(run())


def asked_of(double: Chained) -> list[Any]:
    """Return the requests for answers, without probes."""
    return [body for path, body in double.asked if path == GENERATE and body["token_ids"][:2] == PROMPT.tolist()]


@pytest.mark.parametrize(
    "dies_at, stop", [(0, ()), (1, ()), (7, ()), (11, ()), (12, ()), (1, ("kl",)), (6, ("kl",)), (7, ("kl",))]
)
def test_the_tokens_of_a_dead_server_are_not_drawn_again(dies_at: int, stop: tuple[str, ...]) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.0, seed=3, stop=stop)

    async def body(router: Router, doubles: list[Chained]) -> None:
        wanted = await router.replicas[1].engine.generate(GenerateRequest("wanted", PROMPT, sampling))
        del doubles[1].asked[:]
        found = await router.generate(GenerateRequest("r", PROMPT, sampling))
        same(found, wanted, dies_at)
        assert found.stop == (stop[0] if stop else None)
        (rest,) = asked_of(doubles[1])
        kept = min(dies_at, 6 if stop else 11)  # the one that ends it is drawn again
        assert rest["token_ids"] == [3, 4, *range(5, 5 + kept)]
        assert rest["sampling_params"]["max_tokens"] == 12 - kept
        assert rest["sampling_params"]["seed"] == (derive_seed(3, "rest", kept) if kept else 3)

    with_two(body, dies_at=dies_at)


def test_a_server_that_draws_by_position_goes_on_with_the_same_seed() -> None:
    async def body(router: Router, doubles: list[Chained]) -> None:
        await router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, seed=3)))
        params = asked_of(doubles[1])[0]["sampling_params"]
        assert (params["seed"], params["position"], params["max_tokens"]) == (3, 5, 7)

    with_two(body, dies_at=5, api=VerlApi())


@pytest.mark.parametrize("mixes", [False, True])
def test_versions_mix_where_they_may_and_spans_say_so(mixes: bool) -> None:
    """The other replica has the next version, of a publish that has not ended yet."""

    async def body(router: Router, doubles: list[Chained]) -> None:
        await publish(router, 1, {1})
        router.replicas[1].mark_verified()
        found = await router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, temperature=0.0)))
        assert found.ids.tolist() == list(range(5, 17))
        assert found.spans == (((0, 0, 5), (1, 5, 12)) if mixes else ((1, 0, 12),))

    with_two(body, dies_at=5, mixes=mixes)


def test_tokens_under_weights_that_nobody_verified_are_drawn_again() -> None:
    async def body(router: Router, doubles: list[Chained]) -> None:
        await publish(router, 1)  # and the canary is still to come
        task = asyncio.create_task(
            router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, temperature=0.0)))
        )
        while not asked_of(doubles[1]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert not task.done(), "an answer of weights that nobody has verified waits for their canary"
        router.published({})
        found = await task
        assert found.spans == ((1, 0, 12),) and asked_of(doubles[1])[0]["token_ids"] == [3, 4]

    with_two(body, dies_at=5, mixes=True)


def test_of_a_server_that_tells_whose_weights_it_has_only_tokens_of_ours_are_kept() -> None:
    """It dies before it has ended an answer, and only the end of an answer has the mark."""

    async def body(router: Router, doubles: list[Chained]) -> None:
        doubles[0].tells, doubles[0].weights = True, "0-abcdef01"
        found = await router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, temperature=0.0)))
        assert found.ids.tolist() == list(range(5, 17)) and asked_of(doubles[1])[0]["token_ids"] == [3, 4]

    with_two(body, dies_at=5)


async def drawing(double: Chained) -> None:
    while not double.running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)


def test_tokens_of_a_version_that_failed_at_one_replica_alone_are_drawn_again() -> None:
    """The publish has ended by the time that its request does, and others have that version verified."""

    async def body(router: Router, doubles: list[Chained]) -> None:
        doubles[0].slow_s = 0.02
        await publish(router, 1)
        router.replicas[1].mark_verified()
        task = asyncio.create_task(
            router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=40, temperature=0.0)))
        )
        await drawing(doubles[0])
        router.published({0: "its canary"})
        found = await asyncio.wait_for(task, 5)
        assert found.ids.tolist() == [i % VOCAB for i in range(5, 45)] and found.spans == ((1, 0, 40),)
        assert asked_of(doubles[1])[0]["token_ids"] == [3, 4]

    with_two(body, mixes=True)


@pytest.mark.parametrize("name", ["3-abcdef01", "default"])
def test_tokens_of_weights_that_others_gave_a_server_are_drawn_again(name: str) -> None:
    """This holds for running streams too, since their tokens have no mark. Tokens that another replica had sampled
    before are kept."""

    async def body(router: Router, doubles: list[Chained]) -> None:
        first, engine = doubles[0], router.replicas[0].engine
        assert isinstance(engine, ServedEngine)
        first.slow_s, first.weights = 0.02, name
        begun = PartialAnswer(mixes=True)
        begun.add([5, 6], [-1.1, -1.12], 0)
        slow = asyncio.create_task(
            engine.generate(GenerateRequest("slow", PROMPT, Sampling(max_tokens=40, temperature=0.0), begun=begun))
        )
        await drawing(first)
        found = await router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, temperature=0.0)))
        assert found.ids.tolist() == list(range(5, 17)) and asked_of(doubles[1])[0]["token_ids"] == [3, 4]
        with pytest.raises(ReplicaLost, match="not give it: another one uses it too, or it was restarted"):
            await asyncio.wait_for(slow, 5)
        assert (begun.ids, begun.spans, len(begun.logprobs)) == ([5, 6], [(0, 0, 2)], 2)
        assert router.states()[0] == "is lost"

    with_two(body, mixes=True)


def test_streams_of_a_replica_that_leaves_go_on_elsewhere_at_once() -> None:
    async def body(router: Router, doubles: list[Chained]) -> None:
        doubles[0].slow_s = 0.1
        task = asyncio.create_task(
            router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=40, temperature=0.0)))
        )
        await drawing(doubles[0])
        router.leave(0)
        found = await asyncio.wait_for(task, 5)  # of 20 that a request may take
        assert found.ids.tolist() == [i % VOCAB for i in range(5, 45)] and found.spans == ((0, 0, 40),)
        assert len(asked_of(doubles[1])[0]["token_ids"]) > 2, "what it had drawn is kept"

    with_two(body)


def test_tokens_around_an_update_are_sure_up_to_it() -> None:
    """Tokens that arrive while weights change may be of either version: they are sampled again."""

    async def body(router: Router, doubles: list[Chained]) -> None:
        first = doubles[0]
        first.going.clear()
        task = asyncio.create_task(
            router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=40, temperature=0.0)))
        )
        while not first.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for number in (1, 0):  # the first one dies at a token after its update
            await publish(router, 1, {number})
        router.published({})
        found = await task
        assert found.ids.tolist() == [i % VOCAB for i in range(5, 45)] and found.spans == ((1, 0, 40),)
        assert asked_of(doubles[1])[0]["token_ids"] == [3, 4]

    with_two(body, dies_at=9, mixes=True)


def test_a_request_that_is_held_over_an_update_is_not_mixed() -> None:
    """It went on with tokens of one version, and came to the server behind a pause for the next."""

    async def body(router: Router, doubles: list[Chained]) -> None:
        engine: Any = router.replicas[1].engine
        begun = PartialAnswer()
        begun.add([5, 6], [-1.1, -1.12], 0)
        doubles[1].weights = f"1-{engine.connection.tag}"
        found = await engine.generate(
            GenerateRequest("r", PROMPT, Sampling(max_tokens=6, temperature=0.0), begun=begun)
        )
        assert found.ids.tolist() == list(range(5, 11)) and found.spans == ((1, 0, 6),)
        assert [len(body["token_ids"]) for body in asked_of(doubles[1])[-2:]] == [4, 2]

    with_two(body)


def test_an_engine_that_tells_nothing_begins_anew() -> None:
    async def body(router: Router, doubles: list[Chained]) -> None:
        found = await router.generate(GenerateRequest("r", PROMPT, Sampling(max_tokens=12, temperature=0.0)))
        assert found.ids.tolist() == list(range(5, 17)) and asked_of(doubles[1])[0]["token_ids"] == [3, 4]
        assert not any(body.get("stream") for body in asked_of(doubles[0]))

    with_two(body, dies_at=5, api=VllmApi())
