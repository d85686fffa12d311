"""The client of a rollout server, against a double that answers as vLLM was seen to."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import resource
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from each import each
from families import QWEN3_MOE
from served import NAMES, SERVED, VOCAB, Fault, Served, crashing, hanging_up, logprob, silent

from verl.checkpoint.hf import skeleton_of
from verl.rollout import gate, http, liveness, wire
from verl.rollout.api import Deadlines, Expected
from verl.rollout.base import Capabilities, Completion, GenerateRequest, ReplicaLost, RolloutContext
from verl.rollout.client import ServedEngine
from verl.rollout.http import Http, ServerGone, ServerLate, ServerRefused
from verl.rollout.router import Router
from verl.rollout.traits import VERL_SERVE
from verl.rollout.vllm_api import REQUEST_PREFIX, VerlApi, VllmApi
from verl.rollout.wire import NotUnderstood
from verl.types import Medium, Sampling
from verl.weight_sync import shm, tcp
from verl.weight_sync.base import CheckedReader, Entry, SyncError, WeightSource, saved_parts
from verl.weight_sync.record import entry_of

PROMPT = np.array([3, 4])  # answers 7, 8, 9, ...
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
FAILING = {"Connection": hanging_up, "status": crashing(500)}


def letters(ids: Any) -> str:
    return "".join(LETTERS[i] for i in ids)


class Text:
    vocab_size = VOCAB
    hidden_size = 4
    max_position_embeddings = 512


HF_CONFIG = SimpleNamespace(model_type="doubled", get_text_config=Text, architectures=["Doubled"])


def context_of(**given: Any) -> RolloutContext:
    known = {"hf_config": HF_CONFIG, "max_context_tokens": 64, "dtype": torch.float32, "decode": letters}
    return RolloutContext(**{**known, **given})


def reader(version: int = 0, names: Any = NAMES) -> CheckedReader:
    manifest = {name: Entry((2,), "float32", checksum=7) for name in names}
    manifest["tied.weight"] = Entry((2,), "float32", tied_to=names[0])
    return CheckedReader(WeightSource(version, "verl.weight_sync.shm:open_weights", f"/dev/shm/x-{version}", manifest))


LEVELS = (1, 2)  # of sleep, where the double is one of a GPU


def engine_at(url: str, expected: Expected | None = None, **given: Any) -> ServedEngine:
    limits = Deadlines(start_s=5, request_s=given.pop("request_s", 20), control_s=given.pop("control_s", 10))
    able = Capabilities(logprobs="processed", max_context_tokens=64, in_flight_update=True, sleep_levels=LEVELS)
    return ServedEngine(context_of(**given), expected or Expected(name="vLLM"), VllmApi(), url, able, limits)


def with_server(
    body: Callable[[ServedEngine, Served], Awaitable[Any]],
    served: Served | None = None,
    *,
    loads: bool = True,
    expected: Expected | None = None,
    **given: Any,
) -> Any:
    async def run() -> Any:
        double = served or Served()
        async with TestServer(double.app()) as server:
            engine = engine_at(str(server.make_url("")), expected, **given)
            try:
                if loads:
                    await engine.load_weights(reader())
                return await asyncio.wait_for(body(engine, double), 30)
            finally:
                await engine.close()

    return asyncio.run(run())


def greedy(max_tokens: int, **given: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **given)


async def until(ready: Callable[[], bool]) -> None:
    while not ready():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_weights_of_another_host_are_fetched_into_a_segment_of_this_one_before_it_stands_still(tmp_path, monkeypatch):
    outlet, tensors = tcp.TcpOutlet(host="127.0.0.1"), {name: torch.randn(2) for name in NAMES}
    shapes = {name: entry_of(tensor) for name, tensor in tensors.items()}

    def sent(version: int) -> CheckedReader:
        return CheckedReader(WeightSource(version, outlet.transport, address, shapes))

    async def body(engine: ServedEngine, served: Served) -> None:
        assert await engine.load_weights(sent(3)) == 3
        info = next(given["update_info"] for path, given in served.asked if path == "/update_weights")
        found = shm.ShmStream(Path(info["path"]))
        assert Path(info["path"]).parent == tmp_path and found.version == info["version"] == 3
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.tensors())
        served.asked.clear()
        with pytest.raises(SyncError, match="version 2: the sender holds version 3 by now"):
            await engine.load_weights(sent(2))
        assert not served.asked, "its requests went on"
        assert (await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))).spans == ((3, 0, 2),)

    try:
        address = outlet.stage(3, shapes, tensors.items())
        for module in (shm, tcp):
            monkeypatch.setattr(module, "SHM", tmp_path)
        with_server(body, loads=False)
    finally:
        monkeypatch.undo()
        shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")


# ---- requests --------------------------------------------------------------------------------------------------------


def test_an_answer_and_what_was_asked_for_it() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        sampling = Sampling(
            max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=2**63 - 1, stop_token_ids=(40, VOCAB, -1)
        )
        c = await engine.generate(GenerateRequest("r", PROMPT, sampling))
        assert (c.request_id, c.ids.tolist(), c.stop_reason, c.spans) == (
            "r",
            [7, 8, 9, 10, 11],
            "length",
            ((0, 0, 5),),
        )
        assert c.ids.dtype == np.int64 and c.logprobs.dtype == np.float32
        np.testing.assert_allclose(c.logprobs, [logprob(i, 0.5) for i in c.ids], rtol=1e-6)
        sent = served.asked[-1][1]
        assert sent["model"] == "policy" and sent["token_ids"] == [3, 4] and sent["request_id"].endswith("-r")
        assert sent["sampling_params"] == {
            **{"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**63 - 1},
            # the end token is one of ours; ids that no token has are not sent: they are an index there
            **{"stop_token_ids": [20, 40], "ignore_eos": True, "logprobs": 0, "detokenize": False},
        }

    with_server(body, eos_token_ids=[20])


@each(
    "given, ids, reason",
    [
        ({}, list(range(7, 21)), "eos"),
        ({"ignore_eos": True}, list(range(7, 37)), "length"),
        ({"stop_token_ids": (12,)}, list(range(7, 13)), "stop"),
        ({"stop_token_ids": (20,)}, list(range(7, 21)), "eos"),
        ({"stop_token_ids": (20,), "ignore_eos": True}, list(range(7, 21)), "stop"),
        ({"max_tokens": 14}, list(range(7, 21)), "eos"),
        ({"max_tokens": 500, "ignore_eos": True}, [i % VOCAB for i in range(7, 69)], "context_full"),
        ({"stop": ("kl",)}, [7, 8, 9, 10, 11], "stop"),
        ({"stop": ("zzz", "l", "kl")}, [7, 8, 9, 10, 11], "stop"),
        ({"stop": ("tu",)}, list(range(7, 21)), "eos"),  # both end with the same token: the reason is the end token
        ({"stop": ("no",), "max_tokens": 4}, [7, 8, 9, 10], "length"),
        ({"stop": ("h",)}, [7], "stop"),
    ],
)
def test_where_an_answer_ends(given: dict[str, Any], ids: list[int], reason: str) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        c = await engine.generate(GenerateRequest("r", PROMPT, greedy(**{"max_tokens": 30, **given})))
        assert (c.ids.tolist(), c.stop_reason, len(c.logprobs)) == (ids, reason, len(ids))
        assert c.spans == ((0, 0, len(ids)),)
        if reason == "stop" and "stop" in given:
            assert c.stop == ("kl" if "kl" in given["stop"] else given["stop"][0])
            aborted = [body["request_ids"] for path, body in served.asked if path.endswith("abort_requests")]
            assert len(aborted) == 1 and aborted[0][0].startswith(REQUEST_PREFIX), "the server was told to stop"
        else:
            assert c.stop is None
        await until(lambda: not served.running)

    with_server(body, eos_token_ids=[20])


def test_nothing_is_sent_that_would_end_the_engine() -> None:
    """An id outside the vocabulary kills vLLM under --skip-tokenizer-init."""

    async def body(engine: ServedEngine, served: Served) -> None:
        before = len(served.asked)
        for ids, said in (([VOCAB], "vocabulary"), ([-1], "vocabulary"), ([], "0 tokens"), ([[1]], "shape")):
            with pytest.raises(ValueError, match=said):
                await engine.generate(GenerateRequest("r", np.array(ids, np.int64), greedy(2)))
        for call, said in (
            (
                engine.generate(GenerateRequest("r", np.arange(40), greedy(2, stop=("x",)), parameters="math")),
                "loads no adapters",
            ),
            (
                engine.generate(GenerateRequest("r", np.arange(40), greedy(2), media=(Medium("ab", 0, 1),))),
                "takes no media",
            ),
            (engine.generate(GenerateRequest("r", np.zeros(64, np.int64), greedy(2))), "leaves no room"),
            (engine.score(PROMPT, temperature=0.7), "temperature=0.7: vLLM scores at temperature 1 only"),
            (engine.score(np.array([VOCAB])), "vocabulary"),
            (engine.score(np.zeros(65, np.int64)), "max_context_tokens=64"),
            (engine.pause("soon"), "soon"),  # type: ignore[arg-type]
            (engine.sleep(3), "level=3"),
            (engine.wake(("cache",)), "cache"),
        ):
            with pytest.raises(ValueError, match=said):
                await call
        assert len(served.asked) == before

    with_server(body)
    with pytest.raises(ValueError, match="decode="):
        with_server(
            lambda engine, served: engine.generate(GenerateRequest("r", PROMPT, greedy(2, stop=("x",)))), decode=None
        )


def test_scores_and_health_wait_for_a_server_that_is_full() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        for ask in (lambda: engine.score(np.array([5, 6])), engine.connection.probe):
            full = [True, True]

            async def fault(request: web.Request, full: list[bool] = full) -> web.StreamResponse | None:
                return await crashing(429, "try again")(request) if full and full.pop() else None

            served.faults["/inference/v1/generate"] = fault
            await ask()
            assert not full

    with_server(body)


def test_scores_of_a_prompt() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        found = await engine.score(np.array([5, 6, 5]))
        np.testing.assert_allclose(found, [logprob(6, 1), logprob(5, 1)], rtol=1e-6)
        assert found.dtype == np.float32 and (await engine.score(np.array([5]))).shape == (0,)
        assert (await engine.score(np.array([5, 6]), temperature=0.0)).shape == (1,)

    with_server(body)


def test_aborted_requests_return_what_they_have() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        tasks = [asyncio.create_task(engine.generate(GenerateRequest(n, PROMPT, greedy(60)))) for n in "abc"]
        await until(lambda: len(served.running) == 3)
        with pytest.raises(ValueError, match="already running"):
            await engine.generate(GenerateRequest("a", PROMPT, greedy(2)))
        assert await engine.abort(["a", "unknown"]) == 1
        first = await tasks[0]
        n = len(first.ids)
        assert first.stop_reason == "abort" and first.ids.tolist() == list(range(7, 7 + n)) and n < 60
        assert not tasks[1].done() and await engine.abort() == 2 and await engine.abort() == 0
        assert [(await t).stop_reason for t in tasks] == ["abort"] * 3
        named = next(body for path, body in served.asked if path.endswith("abort_requests"))["request_ids"]
        assert len(named) == 1 and named[0].startswith(REQUEST_PREFIX) and named[0].endswith("-a")

    with_server(body, Served(step_s=0.01))


def test_an_abort_follows_a_request_that_has_not_arrived() -> None:
    async def slow(request: web.Request) -> None:
        await asyncio.sleep(0.2)

    async def body(engine: ServedEngine, served: Served) -> None:
        served.faults["/inference/v1/generate"] = slow
        task = asyncio.create_task(engine.generate(GenerateRequest("a", PROMPT, greedy(60))))
        await asyncio.sleep(0.02)
        assert await engine.abort(["a"]) == 1 and (await task).stop_reason == "abort"

    with_server(body, Served(step_s=0.05))


@pytest.mark.parametrize("stop", [(), ("zz",)], ids=["whole", "stream"])
def test_a_caller_that_gives_up_frees_its_row(stop: tuple[str, ...]) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate(GenerateRequest("a", PROMPT, greedy(60, stop=stop)))
        await until(lambda: not served.running)
        assert served.gone or stop
        assert len((await engine.generate(GenerateRequest("a", PROMPT, greedy(2)))).ids) == 2, "the id is free again"

    with_server(body, Served(step_s=0.02))


def test_ids_are_banned_by_a_server_of_rows_of_text_and_refused_by_one_that_cannot() -> None:
    """A model that reads images bans its placeholders, also in a run whose prompts have none."""

    async def body(engine: ServedEngine, served: Served) -> None:
        request = GenerateRequest("a", PROMPT, greedy(2, banned=(3, 5)))
        assert not engine.connection.api.traits.media
        await engine.generate(request)
        assert served.asked[-1][1]["sampling_params"]["logit_bias"] == {"3": -1e30, "5": -1e30}
        engine.connection.api.traits = VERL_SERVE
        with pytest.raises(ValueError, match=r"a: banned=\(3, 5\): this server bans no ids"):
            await engine.generate(request)

    with_server(body)


def test_an_answer_that_is_late_names_the_limit() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        with pytest.raises(ServerLate, match=r"/inference/v1/generate: no answer in 0.1 s"):
            await engine.generate(GenerateRequest("a", PROMPT, greedy(60)))
        await until(lambda: not served.running)

    with_server(body, Served(step_s=0.05), request_s=0.1, loads=True)


async def publish(router: Router) -> None:
    for replica in router.replicas:
        await replica.load_weights(reader())
    router.published({})


def answering(**changed: Any) -> Fault:
    """A choice of three tokens with something wrong; "0" are the weights that were loaded."""

    async def fault(request: web.Request) -> web.Response:
        choice = {
            "token_ids": [7, 8, 9],
            "logprobs": {"content": [{"logprob": -1.0}] * 3},
            "weight_versions": [{"version": "0", "start": 0, "end": 3}],
            "finish_reason": "length",
        }
        text = json.dumps({"choices": [choice | changed]}).replace('"0"', f'"{request.app[SERVED].weights}"')
        return web.Response(text=text, content_type="application/json")

    return fault


def spans(*of: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": v, "start": a, "end": b} for v, a, b in of]


@each(
    "fault, error, said",
    [
        (crashing(500), ServerGone, r"/inference/v1/generate: HTTP 500: broken"),
        (crashing(404, "no such model"), ServerRefused, "no such model"),
        (hanging_up, ServerGone, "/inference/v1/generate"),
        (answering(logprobs=None), NotUnderstood, "3 tokens with the log-probs"),
        (answering(logprobs={"content": [{"logprob": -1.0}] * 2}), NotUnderstood, "3 tokens with the log-probs"),
        (answering(logprobs={"content": [{"logprob": float("nan")}] * 3}), NotUnderstood, "non-finite"),
        (answering(weight_versions=None), NotUnderstood, "do not cover 3 tokens"),
        (answering(weight_versions=spans(("0", 0, 1), ("0", 2, 3))), NotUnderstood, "do not cover"),
        (
            answering(
                finish_reason="stop",
                token_ids=[7],
                logprobs={"content": [{"logprob": -1.0}]},
                weight_versions=spans(("0", 0, 1)),
            ),
            NotUnderstood,
            "unasked",
        ),
        (answering(token_ids="x"), NotUnderstood, "not vLLM's"),
    ],
)
def test_answers_that_are_none(fault: Fault, error: type[Exception], said: str) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        served.faults["/inference/v1/generate"] = fault
        with pytest.raises(error, match=said):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(3)))
        del served.faults["/inference/v1/generate"]
        assert len((await engine.generate(GenerateRequest("r", PROMPT, greedy(3)))).ids) == 3

    with_server(body)


def test_a_request_under_way_when_its_client_closes_is_not_asked_again() -> None:
    async def scenario() -> None:
        served, arrived = Served(), asyncio.Event()

        async def waiting(request: web.Request) -> web.StreamResponse:
            arrived.set()
            return await silent(request)

        served.faults["/inference/v1/generate"] = waiting
        async with TestServer(served.app()) as server:
            http = Http(str(server.make_url("")))
            asked = asyncio.create_task(http.post("/inference/v1/generate", {}, timeout_s=30, again=True))
            async with asyncio.timeout(10):
                await arrived.wait()
                await http.close()
                with pytest.raises(ServerGone, match="/inference/v1/generate"):
                    await asked

    asyncio.run(scenario())


def test_a_process_without_room_for_a_connection_waits_for_it() -> None:
    """The error does not blame the server."""

    async def run() -> None:
        async with TestServer(Served().app()) as server:
            door = Http(str(server.make_url("")))
            door._pool()  # it requests more files
            limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 60, limits[1]))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.dup(0))
                asked = [asyncio.create_task(door.get("/version", timeout_s=20)) for _ in range(3)]
                with pytest.raises(ServerLate):
                    await door.get("/version", timeout_s=0.1)
                assert not any(one.done() for one in asked)
                while taken:
                    os.close(taken.pop())
                assert [one["version"] for one in await asyncio.gather(*asked)] == ["0.32.0+cpu"] * 3
            finally:
                for number in taken:
                    os.close(number)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                await door.close()

    asyncio.run(run())


def test_as_many_files_as_it_may_have_are_asked_for() -> None:
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard) - 1, hard))
        assert http.open_files() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, http.FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_requests_leave_connections_for_what_controls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        most: list[int] = []

        async def counted(request: web.Request) -> None:
            most.append(len(served.running) + 1)

        served.faults["/inference/v1/generate"] = counted
        tasks = [asyncio.create_task(engine.generate(GenerateRequest(str(i), PROMPT, greedy(60)))) for i in range(5)]
        await until(lambda: len(served.running) == 2)
        await engine.load_weights(reader(1), on_inflight="keep")
        assert await engine.abort(["0", "1", "4"]) == 3
        assert [len((await task).ids) == 60 for task in tasks] == [False, False, True, True, False]
        assert len(most) >= 4 and max(most) == 2

    monkeypatch.setattr(http, "open_files", lambda: 8)
    with_server(body, Served(step_s=0.003))


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        chunk = {"choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        return response

    async def failing(request: web.Request) -> web.StreamResponse:
        return web.Response(text='data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n')

    async def body(engine: ServedEngine, served: Served) -> None:
        for fault, error, said in ((half, ServerGone, "broke off"), (failing, ServerRefused, "EngineCore died")):
            served.faults["/inference/v1/generate"] = fault
            with pytest.raises(error, match=said):
                await engine.generate(GenerateRequest("r", PROMPT, greedy(3, stop=("x",))))

    with_server(body)


async def failing(request: web.Request) -> web.StreamResponse | None:
    """Requests of the model fail; its health check succeeds."""
    return await crashing(500)(request) if (await request.json())["sampling_params"]["max_tokens"] > 1 else None


@each(
    "fault, error",
    [(failing, ServerRefused), (crashing(503), ServerGone), (crashing(429), ServerRefused), (silent, ServerGone)],
)
def test_a_server_that_fails_requests_is_gone_where_it_draws_no_token_either(
    fault: Fault, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        served.faults["/inference/v1/generate"] = fault
        with pytest.raises(error):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(3)))

    monkeypatch.setattr(liveness, "PROBE_S", 0.7)
    with_server(body, request_s=1.0)


def test_a_long_queue_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        async def queued(request: web.Request) -> web.StreamResponse | None:
            asked = (await request.json())["sampling_params"]["max_tokens"]
            if asked == 1:
                probed.set()
            return await silent(request) if asked < 20 else None

        served.faults["/inference/v1/generate"], probed = queued, asyncio.Event()
        late = asyncio.create_task(engine.generate(GenerateRequest("late", PROMPT, greedy(3))))
        await probed.wait()
        assert len((await engine.generate(GenerateRequest("served", PROMPT, greedy(20)))).ids) == 20
        with pytest.raises(ServerLate):
            await late

    monkeypatch.setattr(liveness, "PROBE_S", 4.0)
    with_server(body, request_s=2.0)


def quiet(monkeypatch: pytest.MonkeyPatch, quiet_s: float = 0.05, probe_s: float = 1.0) -> None:
    monkeypatch.setattr(liveness, "QUIET_S", quiet_s)
    monkeypatch.setattr(liveness, "PROBE_S", probe_s)


@pytest.mark.parametrize("stop", [(), ("zz",)], ids=["whole", "stream"])
def test_a_server_that_hangs_is_lost_and_its_requests_go_on_elsewhere(
    stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP is up, and its engine stopped: long before a request's own deadline."""

    async def run() -> None:
        doubles, notes = [Served(), Served()], list[str]()
        servers = [TestServer(double.app()) for double in doubles]
        for server in servers:
            await server.start_server()
        urls = [str(server.make_url("")) for server in servers]
        router = Router([lambda died, url=url: engine_at(url, request_s=3600) for url in urls], note=notes.append)
        await publish(router)
        doubles[0].faults["/inference/v1/generate"] = silent
        tasks = [
            asyncio.create_task(router.generate(GenerateRequest(str(i), PROMPT, greedy(3, stop=stop))))
            for i in range(4)
        ]
        assert [(await task).ids.tolist() for task in tasks] == [[7, 8, 9]] * 4
        assert len(notes) == 1 and "replica 0 is lost: vLLM is out of service" in notes[0]
        assert "draws no token" in notes[0]
        await router.close()
        for server in servers:
            await server.close()

    quiet(monkeypatch)
    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_server_without_a_word_is_left_alone_where_it_stands_still_or_draws_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        looks, drawn = 0, 0

        async def look(request: web.Request) -> web.Response:
            nonlocal looks, drawn
            looks, drawn = looks + 1, drawn + 5
            return web.Response(text=f"vllm:generation_tokens_total {drawn}\nvllm:num_requests_running {looks}\n")

        async def full(request: web.Request) -> web.StreamResponse | None:
            return await silent(request) if (await request.json())["sampling_params"]["max_tokens"] == 1 else None

        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await until(lambda: bool(served.running))
        await engine.pause()
        asked = len(served.asked)
        await asyncio.sleep(0.3)
        assert len(served.asked) == asked, "a server that stands still is not probed for progress"
        served.faults |= {"/metrics": look, "/inference/v1/generate": full}
        await engine.resume()
        assert len((await task).ids) == 60 and looks > 2

    quiet(monkeypatch, probe_s=0.1)
    with_server(body, Served(step_s=0.02))


def test_one_that_tells_no_progress_is_asked_for_its_health_alone_behind_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        probes = 0

        async def full(request: web.Request) -> web.StreamResponse | None:
            nonlocal probes
            probe = (await request.json())["sampling_params"]["max_tokens"] == 1
            probes += probe
            return await silent(request) if probe else None

        served.faults["/inference/v1/generate"] = full
        tasks = [asyncio.create_task(engine.generate(GenerateRequest(str(i), PROMPT, greedy(60)))) for i in range(3)]
        assert [len((await task).ids) for task in tasks] == [60] * 3
        assert not probes and served.paths.count("/health") > 1

    quiet(monkeypatch)
    with_server(body, Served(step_s=0.01), max_concurrent_sequences=2)


@pytest.mark.parametrize("stop", [(), ("zz",)], ids=["whole", "stream"])
def test_a_connection_that_is_reset_at_a_healthy_server_is_no_loss(stop: tuple[str, ...]) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(30, stop=stop))))
        other = asyncio.create_task(engine.generate(GenerateRequest("other", PROMPT, greedy(60))))
        await until(lambda: len(served.running) == 2)
        name = next(name for name in served.open if name.endswith("-r"))
        reset(served.open[name])
        assert (await task).ids.tolist() == list(range(7, 37)) and len((await other).ids) == 60
        asked = [body["request_id"] for _, body in served.asked if body and "-r" in body.get("request_id", "")]
        assert len(asked) == len(set(asked)) == 2, "under a name of its own"

    with_server(body, Served(step_s=0.005))


def test_a_request_whose_connection_breaks_at_a_healthy_server_every_time_fails_alone() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        async def breaks(request: web.Request) -> web.StreamResponse | None:
            if (await request.json())["sampling_params"]["max_tokens"] == 3:
                reset(request)
                await asyncio.sleep(0)
            return None

        served.faults["/inference/v1/generate"] = breaks
        with pytest.raises(RuntimeError, match="3 times, and it answers others") as caught:
            await engine.generate(GenerateRequest("r", PROMPT, greedy(3)))
        assert not isinstance(caught.value, ReplicaLost)
        assert len((await engine.generate(GenerateRequest("r", PROMPT, greedy(4)))).ids) == 4

    with_server(body)


def reset(request: web.Request) -> None:
    """As one lost packet too many."""
    assert request.transport is not None
    line: socket.socket = request.transport.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()


# ---- weights ---------------------------------------------------------------------------------------------------------

UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc", "/reset_prefix_cache"]


def test_an_update_is_one_transaction() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        with pytest.raises(ValueError, match="no weights"):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))
        sent = reader(4)
        assert await engine.load_weights(sent, on_inflight="keep") == engine.version == 4
        assert sent.delivered == set(NAMES)
        assert served.paths[-7:] == ["/pause?mode=keep", *UPDATE, "/resume"]
        info = dict(served.asked)["/update_weights"]["update_info"]
        assert info == {"path": "/dev/shm/x-4", "version": 4, "names": None, "checksums": dict.fromkeys(NAMES, 7)}
        assert dict(served.asked)["/finish_weight_update"] == {"weight_version": f"4-{engine.connection.tag}"}
        with pytest.raises(ValueError, match=r"sync\.engine=shm"):
            await engine.load_weights(SimpleNamespace(version=5, tensors=list))  # type: ignore[arg-type]

    with_server(body, loads=False)


def test_weights_that_a_server_never_took_name_the_fix() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        served.faults["/update_weights"] = crashing(500, "no parameter model.layers.7.mlp.w3.weight")
        said = (
            "w3.weight.*; vLLM has taken no weights yet; if it has another model: start it with this one, or set roll"
        )
        with pytest.raises(SyncError, match=said) as caught:
            await engine.load_weights(reader())
        assert "\n" not in str(caught.value)

    with_server(body, loads=False)


@each(
    "model, said",
    [
        (
            {"vocab_size": 51},
            "serves another model, 'policy': /models/a has vocab_size=51 and not 50; the model of this run",
        ),
        (
            {"hidden_size": 8},
            r"/models/a has hidden_size=8 and not 4; .* has 50 ids: start it with that folder, or name",
        ),
        ({"splits": True}, "this vLLM splits prefills: .*; start it with --no-enable-chunked-prefill"),
    ],
)
def test_a_server_of_another_model_is_refused_before_anything_is_sent(model: dict[str, Any], said: str) -> None:
    served = Served()
    served.model |= model

    async def body(engine: ServedEngine, served: Served) -> None:
        with pytest.raises(ValueError, match=said) as caught:
            await engine.capabilities()
        assert "\n" not in str(caught.value)
        ids = [i for _, asked in served.asked for i in (asked or {}).get("token_ids", ())]
        assert not ids and "/start_weight_update" not in served.paths, "an unknown id would end vLLM"

    with_server(body, served, loads=False)


def test_a_server_that_says_by_itself_what_it_loaded_is_not_asked() -> None:
    async def finish(request: web.Request) -> web.Response:
        return web.json_response({"loaded": NAMES})

    async def body(engine: ServedEngine, served: Served) -> None:
        served.faults["/finish_weight_update"] = finish
        await engine.load_weights(reader(1))
        assert served.paths.count("/collective_rpc") == 2, "at the start, and the first time"

    with_server(body)


def test_a_server_that_reads_ahead_stands_still_for_the_rest_alone() -> None:
    """Where requests are to go on; and what fails before that fences it, too."""

    async def body(engine: ServedEngine, served: Served) -> None:
        engine.connection.api = VerlApi()
        for version, mode, paths in ((1, "keep", [*UPDATE[:2], "/pause?mode=keep", *UPDATE[2:]]), (2, "wait", None)):
            served.asked.clear()
            assert await engine.load_weights(reader(version), on_inflight=mode) == version  # type: ignore[arg-type]
            assert served.paths == [*(paths or ["/pause?mode=wait", *UPDATE]), "/resume"]
            sent = next(body for path, body in served.asked if path == "/update_weights")
            assert sent["update_info"]["whole"] is True
        served.asked.clear()
        served.faults["/update_weights"] = crashing(500, "other bytes")
        with pytest.raises(ServerRefused, match="other bytes"):
            await engine.load_weights(reader(3), on_inflight="keep")
        assert not {"/pause?mode=keep", "/resume"} & {*served.paths}
        with pytest.raises(ServerGone, match="out of service: the update to version 3 failed"):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))

    with_server(body)


def test_experts_that_are_one_tensor_in_memory_are_read_as_a_saved_folder_has_them() -> None:
    """One by one, of the same bytes; of each of them the server has to tell."""
    model = skeleton_of(copy.deepcopy(QWEN3_MOE))
    assert model is not None
    fused = {name: Entry(tuple(t.shape), "float32") for name, t in model.state_dict().items()}
    source = WeightSource(1, "verl.weight_sync.shm:open_weights", "/dev/shm/x-1", fused)

    async def body(engine: ServedEngine, served: Served) -> None:
        saved = [part for name in fused for part, _, _ in saved_parts(model, fused).get(name, [(name, (), 0)])]
        served.loaded = saved
        assert await engine.load_weights(CheckedReader(source)) == 1
        sent = next(body for path, body in served.asked if path == "/update_weights")["update_info"]["parts"]
        up = "model.layers.0.mlp.experts.gate_up_proj"
        assert sent.keys() == {name for name in fused if "mlp.experts" in name} and len(sent[up]) == 8
        assert sent[up][1] == ["model.layers.0.mlp.experts.0.up_proj.weight", [24, QWEN3_MOE.hidden_size], 24]
        served.loaded = [name for name in saved if ".experts.3.down" not in name]
        with pytest.raises(SyncError, match=r"did not load 2 of .* tensors, e.g. \['model.layers.0.mlp.experts.3.down"):
            await engine.load_weights(CheckedReader(replace(source, version=2)))

    with_server(body, loads=False, hf_config=QWEN3_MOE)


def test_tokens_around_an_update_say_which_weights_drew_them() -> None:
    async def body(engine: ServedEngine, served: Served) -> Completion:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(40))))
        await until(lambda: bool(served.running))
        await asyncio.sleep(0.05)
        await engine.load_weights(reader(1), on_inflight="keep")
        return await task

    (old, start, switch), (new, resumed, end) = with_server(body, Served(step_s=0.005)).spans
    assert (old, new, start, end) == (0, 1, 0, 40) and 0 < switch == resumed < 40


async def lost(request: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"loaded": NAMES, "missing": []}, {"loaded": NAMES[:1], "missing": []}]})


async def extra(request: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"loaded": [*NAMES, "c.weight"], "missing": []}]})


async def unfilled(request: web.Request) -> web.StreamResponse:
    return web.json_response({"results": [{"loaded": NAMES, "missing": ["model.norm.weight"]}]})


async def not_reset(request: web.Request) -> web.StreamResponse:
    return web.json_response({"success": False})


@each(
    "path, fault, said",
    [
        *((path, crashing(500, "Attempted to load weight [3] into [4]"), "Attempted to load") for path in UPDATE),
        ("/update_weights", hanging_up, "update_weights"),
        ("/update_weights", silent, "no answer in 3 s"),
        ("/collective_rpc", lost, r"version 1: the server did not load 1 of 2 tensors, e.g. \['b.weight'\]"),
        ("/collective_rpc", extra, "loaded 1 tensors that nobody sent"),
        ("/collective_rpc", unfilled, r"1 parts of the server's model got no weights, e.g. \['model.norm.weight'\]"),
        ("/reset_prefix_cache", not_reset, "keeps prefixes of older weights"),
        ("/resume", crashing(500, "gone"), "gone"),
    ],
)
def test_a_failed_update_leaves_a_server_that_is_never_asked_again(path: str, fault: Fault, said: str) -> None:
    """vLLM answers 200 to half of an update; after a failed one /resume ends its engine."""

    async def body(engine: ServedEngine, served: Served) -> None:
        running = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await until(lambda: bool(served.running))
        await asyncio.sleep(0.02)
        served.faults[path] = fault
        before = len(served.asked)
        with pytest.raises((SyncError, ServerGone, ServerRefused, ServerLate), match=said):
            await engine.load_weights(reader(1), on_inflight="keep")
        done = await running
        assert done.stop_reason == "abort" and {v for v, _, _ in done.spans} == {0}
        assert path == "/resume" or "/resume" not in served.paths[before:]
        del served.faults[path]
        asked = len(served.asked)
        for call in (engine.generate(GenerateRequest("n", PROMPT, greedy(2))), engine.score(PROMPT)):
            with pytest.raises(ServerGone, match="out of service: the update to version 1 failed"):
                await call
        with pytest.raises(RuntimeError, match="must not go on"):
            await engine.resume()
        with pytest.raises(ServerGone, match="restart that server"):
            await engine.load_weights(reader(2))
        assert len(served.asked) == asked and engine.version == 0

    with_server(body, Served(step_s=0.01), control_s=3 if fault is silent else 10)


@pytest.mark.parametrize("path", UPDATE[:3])
def test_the_double_ends_where_it_is_updated_while_a_step_runs_as_vllm_does(path: str) -> None:
    """So that all tests here fail with a client that does not make it stand still first."""

    async def body(engine: ServedEngine, served: Served) -> None:
        running = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await until(lambda: bool(served.running))
        with pytest.raises(ServerRefused, match="EngineDeadError: updated while a step runs"):
            await engine.connection.http.post(path, {"weight_version": "1"}, timeout_s=5)
        with pytest.raises((ServerGone, ServerRefused)):
            await running
        with pytest.raises(ServerRefused, match="EngineDeadError"):
            await engine.connection.probe(5)

    with_server(body, Served(step_s=0.01))


def test_the_double_ends_where_it_is_resumed_after_a_load_that_failed_as_vllm_does() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        for path in ("/pause?mode=keep", "/start_weight_update"):
            await engine.connection.http.post(path, timeout_s=5)
        served.faults["/update_weights"] = crashing(500, "Attempted to load weight [3] into [4]")
        with pytest.raises(ServerRefused, match="Attempted to load"):
            await engine.connection.http.post("/update_weights", {}, timeout_s=5)
        with pytest.raises(ServerRefused, match="EngineDeadError: resumed amid an update"):
            await engine.connection.http.post("/resume", timeout_s=5)
        assert served.dead is not None and not served.going.is_set()

    with_server(body)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_what_comes_after_an_update_is_drawn_after_it(mode: Any, version: str) -> None:
    """Also where the words overtake each other on their way to the server."""

    async def slow(request: web.Request) -> None:
        await asyncio.sleep(0.1)

    async def body(engine: ServedEngine, served: Served) -> None:
        first = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(30))))
        await until(lambda: bool(served.running))
        served.faults["/pause"] = slow
        update = asyncio.create_task(engine.load_weights(reader(1), on_inflight=mode))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(GenerateRequest("late", PROMPT, greedy(3))))
        assert await update == 1 and (await late).spans == ((1, 0, 3),)
        c = await first
        assert c.stop_reason == ("abort" if mode == "abort" else "length")
        assert {v for v, _, _ in c.spans} == ({0, 1} if mode == "keep" else {0})

    with_server(body, Served(step_s=0.01, version=version))


@pytest.mark.parametrize("stop", [(), ("zz",)])  # with a stop string the answer is a stream
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_request_that_arrives_in_a_pause_of_vllm_033_is_made_again_or_aborted(mode: Any, stop: Any) -> None:
    """0.33 refuses it with 503, where 0.32 kept it until it was resumed."""

    async def body(engine: ServedEngine, served: Served) -> None:
        sent = asyncio.Event()

        async def overtaken(request: web.Request) -> None:
            sent.set()
            await until(lambda: served.refuses)
            del served.faults["/inference/v1/generate"]

        served.faults["/inference/v1/generate"] = overtaken
        early = asyncio.create_task(engine.generate(GenerateRequest("early", PROMPT, greedy(3, stop=stop))))
        await sent.wait()
        await engine.pause(mode)
        late = asyncio.create_task(engine.generate(GenerateRequest("late", PROMPT, greedy(3))))
        await asyncio.sleep(0.02)
        assert not late.done() and early.done() == (mode == "abort")
        await engine.resume()
        assert (await early).stop_reason == ("abort" if mode == "abort" else "length")
        assert len((await late).ids) == 3

    with_server(body, Served(version="0.33.0"), decode=lambda ids: "a" * len(ids))


@pytest.mark.parametrize("paused", [False, True])
def test_a_server_that_a_dead_driver_left_standing_goes_on_with_whole_weights_alone(paused: bool) -> None:
    """The driver may have died amid an update: vLLM's engine ends where it is resumed then."""

    async def body(engine: ServedEngine, served: Served) -> None:
        served.going.clear()
        await engine.capabilities()
        if paused:  # by its new driver
            await engine.pause()
            await engine.resume()
            await engine.pause()
        assert "/resume" not in served.paths
        assert await engine.load_weights(reader(3), on_inflight="abort") == 3
        if paused:
            assert "/resume" not in served.paths
            await engine.resume()
        assert served.paths.index("/finish_weight_update") < served.paths.index("/resume")
        assert (await engine.generate(GenerateRequest("r", PROMPT, greedy(3)))).spans == ((3, 0, 3),)
        assert await engine.load_weights(reader(4)) == 4 and served.paths.count("/resume") == 2

    with_server(body, loads=False)


def test_one_that_was_left_standing_is_refused_where_it_would_have_been_at_start() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        served.going.clear()
        with pytest.raises(ValueError, match="log-probs before temperature and truncation"):
            await engine.load_weights(reader(3))
        with pytest.raises(ServerGone, match="out of service"):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(3)))

    with_server(body, Served(raw=True), loads=False)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_paused_server_stays_paused_over_an_update(mode: Any) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        await engine.pause()
        assert await engine.load_weights(reader(1), on_inflight=mode) == 1
        late = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(3))))
        await asyncio.sleep(0.05)
        assert not late.done()
        if mode == "wait":
            with pytest.raises(ValueError, match="1 requests stand still"):
                await engine.load_weights(reader(2), on_inflight=mode)
        await engine.resume()
        assert (await late).spans == ((1, 0, 3),)

    with_server(body)


def test_answers_may_take_as_long_as_they_may_while_an_update_waits_for_them() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await until(lambda: bool(served.running))
        assert await engine.load_weights(reader(1), on_inflight="wait") == 1
        assert (await task).spans == ((0, 0, 60),)

    with_server(body, Served(step_s=0.05), control_s=1.0)


def test_a_wait_that_is_given_up_is_undone() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await until(lambda: bool(served.running))
        asked = len(served.paths)
        for wait in (engine.pause("wait"), engine.load_weights(reader(1), on_inflight="wait")):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait, 0.02)
        assert (await task).stop_reason == "length" and engine.version == 0
        assert len((await engine.generate(GenerateRequest("s", PROMPT, greedy(2)))).ids) == 2
        assert not any("update" in path for path in served.paths[asked:])

    with_server(body, Served(step_s=0.01))


def test_a_pause_that_is_given_up_on_its_way_is_undone_before_the_next() -> None:
    """A busy server reads a pause after its caller was cancelled, and after later requests on another connection."""

    async def body(engine: ServedEngine, served: Served) -> None:
        async def slow(request: web.Request) -> None:
            asyncio.get_running_loop().call_later(0.2, served.going.clear)  # also without a waiting caller
            await asyncio.sleep(0.2)

        for _ in range(2):
            served.faults["/pause"] = slow
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.pause(), 0.02)
            assert len((await engine.generate(GenerateRequest("r", PROMPT, greedy(60)))).ids) == 60
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.pause(), 0.02)
            del served.faults["/pause"]
            await engine.pause()
            await asyncio.sleep(0.3)  # whatever was on its way has arrived
            assert not served.going.is_set()
            await engine.resume()
            assert len((await engine.generate(GenerateRequest("s", PROMPT, greedy(60)))).ids) == 60

    with_server(body, Served(step_s=0.01))


def test_requests_of_a_server_that_is_gone_go_on_elsewhere() -> None:
    async def run() -> None:
        doubles = [Served(step_s=0.005), Served(step_s=0.005)]
        servers = [TestServer(double.app()) for double in doubles]
        for server in servers:
            await server.start_server()
        urls = [str(server.make_url("")) for server in servers]
        notes: list[str] = []
        failed: list[BaseException] = []
        router = Router([lambda died, url=url: engine_at(url) for url in urls], note=notes.append)
        router.watch(failed.append)
        await publish(router)
        tasks = [asyncio.create_task(router.generate(GenerateRequest(str(i), PROMPT, greedy(40)))) for i in range(8)]
        await until(lambda: all(len(double.running) == 4 for double in doubles))
        doubles[0].die()
        done = [await task for task in tasks]
        assert all(c.ids.tolist() == list(range(7, 47)) and c.stop_reason == "length" for c in done)
        assert [c.request_id for c in done] == [str(i) for i in range(8)]
        assert len(notes) == 1 and "rollout replica 0 is lost" in notes[0] and not failed
        assert len((await router.generate(GenerateRequest("late", PROMPT, greedy(2)))).ids) == 2
        doubles[1].die()
        with pytest.raises(ReplicaLost):
            await router.generate(GenerateRequest("lost", PROMPT, greedy(2)))
        assert isinstance(failed[0], ServerGone), "the run hears why"
        await router.close()
        for server in servers:
            await server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


# ---- start and end ---------------------------------------------------------------------------------------------------

NEEDS = {"/init_weight_transfer_engine": "start it with FLAG", "/inference/v1/generate": "start it with SCALE"}
STRICT = Expected(name="vLLM", versions=((0, 32), (0, 33)), needs={**NEEDS, "transfer": "start it with TRANSFER"})


@each(
    "served, fault, said",
    [
        (Served(version="0.34.1"), None, r"is vLLM 0.34.1: this adapter was made for vLLM >=0.32,<0.33"),
        (Served(version="dev"), None, "is vLLM dev"),
        (Served(room=63), None, "at most 63 tokens, and 64 are asked for; start it with a longer context"),
        (Served(raw=True), None, "log-probs before temperature and truncation"),
        (Served(raw=True, rounded=8e-3), None, "log-probs before temperature and truncation"),
        (Served(), ("/init_weight_transfer_engine", crashing(404)), "has no /init_weight.*start it with FLAG"),
        (Served(), ("/init_weight_transfer_engine", crashing(500)), "cannot be sent weights.*start it with TRANSFER"),
        (Served(), ("/inference/v1/generate", crashing(403)), "has no /inference/v1/generate: start it with SCALE"),
        (Served(), ("/health", crashing(503)), "no healthy server there"),
    ],
)
def test_a_server_that_is_another_is_refused_at_start(served: Served, fault: Any, said: str) -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        if fault is not None:
            served.faults[fault[0]] = fault[1]
        with pytest.raises(ValueError, match=said):
            await engine.capabilities()

    with_server(body, served, loads=False, expected=STRICT)


@pytest.mark.parametrize("rounded", [0.0, 8e-3])
def test_processed_logprobs_are_not_taken_for_raw_ones(rounded: float) -> None:
    """Whatever the model: the double's, and drawn ones that are sure, that know nothing, and between."""
    with_server(lambda engine, served: engine.capabilities(), Served(rounded=rounded), loads=False)
    draw = np.random.default_rng(5)
    for sharpness in (0.01, 0.3, 2.0, 8.0, 30.0):
        for _ in range(50):
            logits = draw.normal(0, sharpness, (8, VOCAB))
            at = {t: logits / t - np.log(np.exp(logits / t).sum(-1, keepdims=True)) for t in (1.0, 2.0)}
            ids = [int(draw.choice(VOCAB, p=np.exp(row) / np.exp(row).sum())) for row in at[2.0]]
            plain, told = (np.array([row[i] for row, i in zip(at[t], ids)]) for t in (1.0, 2.0))
            noise = rounded / 4 * np.abs(plain) * draw.choice([-1, 1], 8)
            assert not wire.raw(told + noise, plain, VOCAB), (sharpness, told, plain)
            assert wire.raw(plain + noise, plain, VOCAB) or sharpness < 0.1, (sharpness, plain)


def test_a_server_is_asked_for_the_tensors_that_it_keeps_in_float32() -> None:
    """Every worker of it, since each may have layers of its own."""
    attention = "model.layers.{}.self_attn.o_proj.weight"
    double = Served()
    double.workers = [double.model | {"float32": [attention.format(number)]} for number in range(2)]

    async def body(engine: ServedEngine, served: Served) -> None:
        form = (await engine.capabilities()).weights
        assert [form.dtype_of(attention.format(number)) for number in (0, 1)] == ["float32", "float32"]
        assert form.dtype_of("model.layers.0.self_attn.q_proj.weight") == "bfloat16"

    with_server(body, double, loads=False, hf_config=QWEN3_MOE, dtype=torch.bfloat16)


def test_nobody_listens() -> None:
    async def run() -> None:
        async with TestServer(Served().app()) as server:
            url = str(server.make_url(""))
        engine = engine_at(url)
        with pytest.raises(ValueError, match="no healthy server there"):
            await engine.capabilities()
        await engine.close()

    asyncio.run(run())


def test_health_is_shown_by_a_token() -> None:
    """/health is 200 while the engine itself is stopped."""

    async def body(engine: ServedEngine, served: Served) -> None:
        await engine.connection.probe()
        served.faults["/inference/v1/generate"] = silent
        with pytest.raises(ServerLate, match=r"no answer in 0.1 s"):
            await engine.connection.probe(0.1)

    with_server(body)


def test_after_the_end_nothing_is_asked() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await until(lambda: bool(served.running))
        await engine.close()
        for call in (
            task,
            engine.generate(GenerateRequest("n", PROMPT, greedy(2))),
            engine.resume(),
            engine.score(PROMPT),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                await call
        await engine.close()

    with_server(body, Served(step_s=0.02))


def test_an_end_waits_for_no_pause_that_a_caller_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "UNDO_S", 0.1)

    async def body(engine: ServedEngine, served: Served) -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60, stop=("never",)))))
        await until(lambda: bool(served.running))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.load_weights(reader(1), on_inflight="wait"), 0.1)
        await asyncio.wait_for(engine.close(), 5)
        for call in (task, engine.connection.http.get("/health", timeout_s=5)):
            with pytest.raises(RuntimeError, match="closed"):
                await asyncio.wait_for(call, 5)

    with_server(body, Served(step_s=0.3))


def test_one_engine_over_several_event_loops() -> None:
    """A script calls asyncio.run more than once."""
    import threading

    loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

    async def serve() -> None:
        async with TestServer(Served().app()) as server:
            found["url"] = str(server.make_url(""))
            ready.set()
            found["done"] = asyncio.Event()
            await found["done"].wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    engine = engine_at(found["url"])

    async def first() -> None:
        await engine.load_weights(reader())
        asyncio.get_running_loop().create_task(engine.generate(GenerateRequest("gone", PROMPT, greedy(60))))
        await asyncio.sleep(0.01)

    async def second() -> Completion:
        try:
            return await engine.generate(GenerateRequest("gone", PROMPT, greedy(3)))
        finally:
            await engine.close()

    try:
        asyncio.run(first())
        assert asyncio.run(second()).ids.tolist() == [7, 8, 9]
    finally:
        loop.call_soon_threadsafe(found["done"].set)
        thread.join(10)


def test_an_answer_may_hold_what_python_writes_for_no_number():
    """Servers in Python write NaN, which is no JSON: it is read, and refused where a log-prob is wanted."""
    assert http._parsed("/x", b'{"ids": [1, 20000000000000000000], "x": 0.1}') == {"ids": [1, 2 * 10**19], "x": 0.1}
    assert str(http._parsed("/x", b'{"x": [NaN, -Infinity]}')) == "{'x': [nan, -inf]}"
    assert http._parsed("/x", b"") is None
    with pytest.raises(ServerRefused, match="/x: the answer is no JSON: b'<html>'"):
        http._parsed("/x", b"<html>")


@pytest.mark.parametrize("level", LEVELS)
def test_a_server_that_sleeps_is_woken_before_its_weights_are_written(level: int) -> None:
    """A colocated run publishes before the rollout wakes: freed weights have no memory to be written to. The KV is
    allocated afterwards: old weights, new weights and KV are never in memory together."""

    async def body(engine: ServedEngine, served: Served) -> None:
        asked = len(served.asked)
        await engine.wake()
        assert len(served.asked) == asked, "it was awake"
        await engine.sleep(level)
        assert await engine.load_weights(reader(1)) == 1
        await engine.wake()
        paths = served.paths[asked:]
        said = [
            path for path in paths if path.startswith(("/sleep", "/wake_up", "/pause", "/update", "/reset", "/resume"))
        ]
        weights, kv = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"
        update = ["/pause?mode=wait", "/update_weights", "/reset_prefix_cache"]
        assert said == [f"/sleep?level={level}", weights, *update, kv, "/resume"]
        await engine.sleep(level)
        asked = len(served.asked)
        await engine.wake(("weights",))
        await engine.wake(("kv",))
        await engine.sleep(level)
        await engine.wake(("kv",))
        assert served.paths[asked:] == [weights, kv, f"/sleep?level={level}", weights, kv]
        await engine.pause()
        await engine.sleep(level)
        asked = len(served.asked)
        await engine.load_weights(reader(2))
        assert [path for path in served.paths[asked:] if not path.startswith("/health")][-2:] == [
            kv,
            "/pause?mode=keep",
        ]

    with_server(body)


def test_a_sleeping_server_whose_update_failed_is_not_woken() -> None:
    async def body(engine: ServedEngine, served: Served) -> None:
        await engine.sleep()
        served.loaded.remove(NAMES[0])
        with pytest.raises(SyncError, match="did not load 1 of 2"):
            await engine.load_weights(reader(1))
        await engine.wake()
        assert "/wake_up?tags=weights" in served.paths and "/wake_up?tags=kv_cache" not in served.paths

    with_server(body)
