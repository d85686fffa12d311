"""SGLang, TensorRT-LLM and any completions API as engines: how they are started, and what is refused. What they answer
is played by doubles (tests/doubles.py); the contract over these is in tests/contracts/test_contract_doubles.py."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from doubles import SGLANG, SglangDouble
from each import each
from safetensors.torch import save_file
from small_runs import small_args
from test_rollout_client import context_of
from test_rollout_vllm import CONFIG

from verl.config.backends import ROLLOUT, engine_of
from verl.config.load import load_config
from verl.config.validate import validate
from verl.rollout import openai, sglang, trtllm
from verl.rollout.api import Room
from verl.rollout.base import Completion, ServerPlace
from verl.rollout.client import ServedEngine
from verl.rollout.http import ServerGone
from verl.rollout.launching import flags
from verl.rollout.openai_api import CompletionsApi, TrtllmApi
from verl.rollout.sglang_api import MASKS, SglangApi
from verl.rollout.wire import Drawn, NotUnderstood
from verl.types import Sampling
from verl.weight_sync.base import CheckedReader, Entry, SyncError, WeightSource

ROOM = Room(tokens=40, vocab=50, ends=(2,))
PROMPT = np.array([3, 4])


# ---- how they are started --------------------------------------------------------------------------------------------


def words(command: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in command:
        if word.startswith("--"):
            last = word
            found[last] = ""
        elif found:
            found[last] = word
    return found


def test_the_line_that_starts_sglang() -> None:
    context = context_of(hf_config=CONFIG, max_context_tokens=200, dtype=torch.bfloat16)
    more = sglang.Options(tensor_parallel_size=2, deterministic_inference=True, args={"attention-backend": "triton"})
    line = sglang.serve_command("py", more, context, "/m", 1234)
    assert line[:3] == ["py", "-m", "sglang.launch_server"]
    assert words(line) == {
        **{"--model-path": "/m", "--served-model-name": "policy", "--host": "127.0.0.1", "--port": "1234"},
        **{"--dtype": "bfloat16", "--context-length": "201", "--max-running-requests": "256", "--tp-size": "2"},
        **{"--mem-fraction-static": "0.5", "--skip-tokenizer-init": "", "--sampling-mask-max-tokens": "4096"},
        **{"--enable-deterministic-inference": "", "--attention-backend": "triton"},
    }
    on_gpu = context_of(hf_config=CONFIG, max_context_tokens=200, device="cuda")
    assert "--enable-memory-saver" in sglang.serve_command("py", more, on_gpu, "/m", 1), "it can sleep"
    assert "--enable-deterministic-inference" not in sglang.serve_command("py", sglang.Options(), context, "/m", 1)


def test_the_line_that_starts_tensorrt_llm() -> None:
    context = context_of(hf_config=CONFIG, max_context_tokens=200)
    line = trtllm.serve_command("/e/bin/python", trtllm.Options(args={"max-num-tokens": 8192}), context, "/m", 1234)
    assert line[:3] == ["/e/bin/trtllm-serve", "serve", "/m"]
    assert words(line[3:]) == {
        **{"--host": "127.0.0.1", "--port": "1234", "--backend": "pytorch", "--max_batch_size": "256"},
        **{"--max_seq_len": "200", "--tp_size": "1", "--kv_cache_free_gpu_memory_fraction": "0.5"},
        **{"--max_num_tokens": "8192"},
    }


def test_flags_of_ours_are_not_the_users() -> None:
    with pytest.raises(ValueError, match=r"args\.--tp_size=3: verl sets --tp-size itself; leave it out"):
        flags({"tp-size": 1}, {"--tp_size": 3})
    assert flags({"a": True, "b": False, "c": {"d": 1}}, None) == ["--a", "--c", '{"d": 1}']


@pytest.mark.parametrize(
    ("build", "options", "says", "wanted"),
    [
        (sglang.build, sglang.Options(), "0.5.22", "SGLang 0.5.22 is there, this adapter was made for >=0.5.23,<0.6"),
        (trtllm.build, trtllm.Options(), "0.20.0", "TensorRT-LLM 0.20.0 is there, this adapter was made for >=1.1,<2"),
    ],
)
def test_an_environment_of_another_version(tmp_path: Path, build: Any, options: Any, says: str, wanted: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {says}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    place = ServerPlace(model="/m", log=tmp_path / "log", python=str(python))
    with pytest.raises(ValueError, match=wanted):
        build(options, context_of(hf_config=CONFIG, place=place))


def test_tensorrt_llm_computes_in_what_the_folder_says(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1.1.0\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    place = ServerPlace(model=str(tmp_path), log=tmp_path / "log", python=str(python))
    with pytest.raises(ValueError, match=r"says, bfloat16, and not in float32: set rollout.dtype=bfloat16"):
        trtllm.build(trtllm.Options(), context_of(hf_config=CONFIG, place=place))
    assert trtllm.build(trtllm.Options(), context_of(hf_config=CONFIG, place=place, dtype=torch.bfloat16))


# ---- what they are asked ---------------------------------------------------------------------------------------------


def test_what_sglang_is_asked() -> None:
    api = SglangApi()
    body = api.body(
        "policy", "n-1", [3, 4], Sampling(max_tokens=60, temperature=0.5, seed=9, stop_token_ids=(7, 99)), ROOM
    )
    assert body == {
        "rid": "n-1",
        "input_ids": [3, 4],
        "return_logprob": True,
        "sampling_params": {
            **{"max_new_tokens": 40, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
            **{"stop_token_ids": [2, 7], "ignore_eos": True, "sampling_seed": 9},
        },
    }
    assert body["sampling_params"].keys() <= SGLANG["structs"]["SamplingParams"].keys()
    assert {*body, "return_sampling_mask", "stream", "logprob_start_len"} <= SGLANG["structs"]["GenerateRequest"].keys()
    wide = Room(tokens=40, vocab=100_000, ends=())
    for given, top_k in (({"top_p": 0.9}, 50), ({"top_k": 5}, 5), ({"min_p": 0.1, "top_k": 9}, 9)):
        asked = api.body("policy", "n", [3], Sampling(max_tokens=3, **given), ROOM)
        assert asked["return_sampling_mask"] is True and asked["sampling_params"]["top_k"] == top_k
    for given in ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000}):
        with pytest.raises(ValueError, match="for top_k from 1 to 4096 alone; set top_k too"):
            api.body("policy", "n", [3], Sampling(max_tokens=3, **given), wide)
    assert "return_sampling_mask" not in api.body("p", "n", [3], Sampling(max_tokens=3, top_p=0.9, temperature=0), wide)


@each("given", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_what_tensorrt_llm_and_servers_without_scores_refuse(given: dict[str, float]) -> None:
    for api in (TrtllmApi(), CompletionsApi()):
        with pytest.raises(ValueError, match="log-probs are those at temperature 1 of all tokens"):
            api.body("m", "n", [3], Sampling(max_tokens=3, **given), ROOM)  # type: ignore[arg-type]
        api.body("m", "n", [3], Sampling(max_tokens=3, temperature=0.0, top_p=0.5), ROOM)


def told(**changed: Any) -> dict[str, Any]:
    meta = {
        "completion_tokens": 2,
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "finish_reason": {"type": "length", "length": 2},
    }
    return {"output_ids": [5, 6], "meta_info": meta | changed}


def test_what_sglang_answers() -> None:
    drawn, api = Drawn(), SglangApi()
    first = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 5, None]], "finish_reason": None}
    api.read(drawn, {"output_ids": [5], "meta_info": first})
    api.read(drawn, told())
    assert (drawn.ids, drawn.logprobs, drawn.versions, drawn.finish) == ([5, 6], [-1.0, -2.0], [("3", 0, 2)], "length")
    masked = Drawn()
    api.read(masked, told(output_token_sampling_logprobs=[-0.5, -0.25]))
    assert masked.logprobs == [-0.5, -0.25]
    for changed in (
        {"output_token_logprobs": [[-1.0, 5, None]]},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-1.0, 5, None], [None, 6, None]]},
        {"completion_tokens": 3},
        {"weight_versions": [{"version": "3"}]},
    ):
        with pytest.raises(NotUnderstood, match="not SGLang's"):
            api.read(Drawn(), told(**changed))


# ---- over a double ---------------------------------------------------------------------------------------------------


class Model:
    """Stands for an engine: token i behind a prompt is (sum of the prompt + i) modulo 50."""

    version = 0

    async def generate(self, name: str, prompt: np.ndarray, sampling: Sampling) -> Completion:
        ids = (int(prompt.sum()) + np.arange(sampling.max_tokens)) % 50
        return Completion(name, ids, np.full(len(ids), -1.5, np.float32), ((self.version, 0, len(ids)),), "length")

    async def stream(self, name: str, prompt: np.ndarray, sampling: Sampling, on_tokens: Any) -> Completion:
        whole = await self.generate(name, prompt, sampling)
        for i in range(len(whole.ids)):
            on_tokens(whole.ids[i : i + 1], whole.logprobs[i : i + 1])
            await asyncio.sleep(0)
        return whole

    async def score(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids) - 1, -2.5, np.float32)

    async def load_weights(self, source: Any, *, on_inflight: str) -> int:
        self.version = source.version
        return self.version

    async def nothing(self, *given: Any) -> None: ...

    pause = resume = abort = sleep = wake = nothing


def reader(folder: Path, version: int = 0, *, missing: str = "") -> CheckedReader:
    """Of a folder with two tensors; `missing` is in the manifest and not there."""
    folder.mkdir(exist_ok=True)
    held = {"a.weight": torch.ones(2), "b.weight": torch.ones(3)}
    save_file(
        {n: t for n, t in held.items() if n != missing}, folder / "model.safetensors", {"verl_version": str(version)}
    )
    manifest = {name: Entry(tuple(t.shape), "float32") for name, t in held.items()}
    return CheckedReader(WeightSource(version, "verl.weight_sync.disk:open_weights", str(folder), manifest))


def with_sglang(
    body: Callable[[ServedEngine, SglangDouble], Awaitable[Any]], change: Callable[[SglangDouble], object] = id
) -> None:
    async def run() -> None:
        double = SglangDouble(Model(), vocab=50, room=65)
        change(double)
        async with TestServer(double.app()) as server:
            place = ServerPlace(model="none", log=Path("/dev/null"), url=str(server.make_url("")))
            engine = sglang.build(sglang.Options(start_timeout_s=5), context_of(place=place))
            try:
                await asyncio.wait_for(body(engine, double), 30)
            finally:
                await engine.close()

    asyncio.run(run())


def test_an_update_of_sglang_is_one_transaction(tmp_path: Path) -> None:
    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        assert await engine.load_weights(reader(tmp_path / "v4", 4), on_inflight="keep") == 4
        assert [path for path, _ in double.asked[-3:]] == [
            *("/pause_generation", "/update_weights_from_disk", "/continue_generation")
        ]
        sent = dict(double.asked)["/update_weights_from_disk"]
        assert sent == {
            **{"model_path": str(tmp_path / "v4"), "load_format": "auto", "weight_version": "4", "flush_cache": True}
        }
        found = await engine.generate("r", PROMPT, Sampling(max_tokens=3, temperature=0.0))
        assert (found.ids.tolist(), found.spans) == ([7, 8, 9], ((4, 0, 3),))
        assert (await engine.score(np.array([1, 2, 3]))).tolist() == [-2.5, -2.5]
        with pytest.raises(ValueError, match=r"set sync\.engine=disk"):
            shm = WeightSource(5, "verl.weight_sync.shm:open_weights", "x", {})
            await engine.load_weights(CheckedReader(shm))

    with_sglang(body)


@pytest.mark.parametrize("level", [1, 2])
def test_sglang_sleeps_by_parts_and_wakes_what_sleeps(tmp_path: Path, level: int) -> None:
    """Told to wake what does not sleep, its scheduler would end. Its KV comes back after the weights are loaded."""

    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        engine._able = replace(engine._able, sleep_levels=(1, 2))
        await engine.load_weights(reader(tmp_path / "0"))
        for version in (1, 2):
            await engine.sleep(level)
            assert double.asleep == ({"kv_cache", "weights"} if level == 2 else {"kv_cache"})
            asked = len(double.asked)
            assert await engine.load_weights(reader(tmp_path / str(version), version)) == version
            told = [body["tags"][0] if body and "tags" in body else path for path, body in double.asked[asked:]]
            update = ["/pause_generation", "/update_weights_from_disk", "kv_cache"]
            assert told[: len(told) - 2] == [*(["weights"] if level == 2 else []), *update] and not double.asleep
            found = await engine.generate("r", PROMPT, Sampling(max_tokens=3, temperature=0.0))
            assert found.spans == ((version, 0, 3),)
        await engine.sleep(1)
        await engine.wake(("kv",))
        assert not double.asleep and double.going.is_set()

    with_sglang(body)


@each("fault", ["refused", "unsuccessful", "incomplete", "gone"])
def test_a_failed_update_fences_sglang(tmp_path: Path, fault: str) -> None:
    """A folder that lacks a tensor would leave old weights in place, and SGLang says nothing of it."""

    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        await engine.load_weights(reader(tmp_path / "0"))
        asked = len(double.asked)
        bad = reader(tmp_path / "1", 1, missing="b.weight" if fault == "incomplete" else "")
        if fault == "refused":
            double.fails = "Failed to update weights: size mismatch. Rolling back to original weights."
        if fault == "unsuccessful":  # with status 200
            double.fails, double.failing = "Failed to update weights: size mismatch.", 200
        if fault == "gone":
            (tmp_path / "1" / "model.safetensors").unlink()
        said = {
            "refused": "size mismatch",
            "unsuccessful": "size mismatch",
            "incomplete": r"did not deliver 1 tensors.*b\.weight",
            "gone": "is not here",
        }
        with pytest.raises(SyncError, match=said[fault]):
            await engine.load_weights(bad)
        paths = [path for path, _ in double.asked[asked:]]
        assert "/continue_generation" not in paths
        assert ("/update_weights_from_disk" in paths) == (fault in ("refused", "unsuccessful"))
        with pytest.raises(ServerGone, match="out of service: the update to version 1 failed"):
            await engine.generate("r", PROMPT, Sampling(max_tokens=3))
        with pytest.raises(ServerGone, match="restart that server"):
            await engine.load_weights(reader(tmp_path / "2", 2))

    with_sglang(body)


@pytest.mark.parametrize("incremental", [False, True])
def test_streams_of_sglang_whole_or_in_pieces(tmp_path: Path, incremental: bool) -> None:
    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        double.incremental = incremental
        await engine.load_weights(reader(tmp_path / "0"))
        found = await engine.generate("r", PROMPT, Sampling(max_tokens=9, temperature=0.0, stop=("zzz",)))
        assert found.ids.tolist() == list(range(7, 16)) and len(found.logprobs) == 9 and found.spans == ((0, 0, 9),)

    with_sglang(body)


@each("vocab, said", [(49, r"it does not take id 49 \("), (51, "it takes id 50")])
def test_an_sglang_of_another_vocabulary_is_refused(vocab: int, said: str) -> None:
    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        with pytest.raises(
            ValueError, match=rf"serves another model, 'policy': {said}.*; model.path=none has 50 ids: st"
        ):
            await engine.capabilities()

    with_sglang(body, lambda double: setattr(double, "vocab", vocab))


def test_what_sglang_can_do_is_told() -> None:
    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        able = await engine.capabilities()
        assert (able.seeds, able.stop_strings, able.spans, able.score_temperatures) == (False, True, True, (0.0, 1.0))
        assert any("--enable-deterministic-inference" in note for note in able.notes)

    with_sglang(body)
    assert SglangApi.scores == (0.0, 1.0) and TrtllmApi().scores == () and ROLLOUT["sglang"].among == MASKS


def test_another_sglang_is_refused() -> None:
    async def body(engine: ServedEngine, double: SglangDouble) -> None:
        with pytest.raises(ValueError, match=r"is SGLang 0\.4\.9: this adapter was made for SGLang >=0\.5\.23,<0\.6"):
            await engine.capabilities()

    with_sglang(body, lambda double: setattr(double, "version", "0.4.9"))


# ---- any completions API ---------------------------------------------------------------------------------------------


class Completions:
    """A server that follows OpenAI's API as far as it is told to. asked: bodies."""

    def __init__(
        self, *, ids: bool = True, stops: bool = True, scores: str = "prompt_logprobs", vocab: int = 64
    ) -> None:
        self.ids, self.stops, self.scores, self.vocab = ids, stops, scores, vocab
        self.asked: list[Any] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/health", self._ok), web.get("/v1/models", self._models)])
        app.add_routes([web.post("/v1/completions", self._answer)])
        return app

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "theirs"}]})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.headers.get("Authorization"), body))
        prompt, given = body["prompt"], []
        if max(prompt) >= self.vocab:
            return web.json_response({"error": {"message": "out of vocabulary"}}, status=400)
        for i in range(body["max_tokens"]):
            given.append((sum(prompt) + i) % 50)
            if self.stops and given[-1] in body.get("stop_token_ids", ()):
                break
        logprobs = [-1.0 - token / 50 / (body["temperature"] or 1.0) for token in given]
        known = [None, *(-1.0 - token / 50 for token in prompt[1:])]
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        echoed = body.get("echo") and self.scores == "echo"
        if "logprobs" in body:
            choice["logprobs"] = {"token_logprobs": [*(known if echoed else []), *logprobs]}
        if self.ids and body.get("return_token_ids"):
            choice["token_ids"] = given
        if "prompt_logprobs" in body and self.scores == "prompt_logprobs":
            rows = [None, *({str(i): {"logprob": x}} for i, x in zip(prompt[1:], known[1:]))]
            choice["prompt_logprobs"] = rows
        if body.get("stream"):
            return web.Response(text=f"data: {web.json_response({'choices': [choice]}).text}\n\ndata: [DONE]\n\n")
        return web.json_response({"choices": [choice]})


def with_completions(
    served: Completions, body: Callable[[ServedEngine], Awaitable[Any]], options: openai.Options | None = None
) -> None:
    async def run() -> None:
        async with TestServer(served.app()) as server:
            place = ServerPlace(model="none", log=Path("/dev/null"), url=str(server.make_url("")))
            engine = openai.build(options or openai.Options(start_timeout_s=5), context_of(place=place))
            try:
                await asyncio.wait_for(body(engine), 30)
            finally:
                await engine.close()

    asyncio.run(run())


def source(version: int) -> CheckedReader:
    return CheckedReader(WeightSource(version, "verl.weight_sync.shm:open_weights", "x", {"a": Entry((1,), "float32")}))


@pytest.mark.parametrize("scores", ["prompt_logprobs", "echo"])
def test_a_server_with_weights_of_its_own(scores: str) -> None:
    served = Completions(scores=scores)

    async def body(engine: ServedEngine) -> None:
        assert await engine.load_weights(source(3)) == 3  # nothing is sent: the canary compares
        found = await engine.generate("r", PROMPT, Sampling(max_tokens=4, temperature=0.5, top_p=0.9, top_k=3, seed=5))
        assert (found.ids.tolist(), found.spans, found.stop_reason) == ([7, 8, 9, 10], ((3, 0, 4),), "length")
        np.testing.assert_allclose(await engine.score(np.array([5, 6, 5])), [-1.12, -1.1], rtol=1e-5)
        key, asked = served.asked[-2]
        assert key == "Bearer k" and asked["model"] == "theirs" and (asked["top_k"], asked["seed"]) == (3, 5)
        with pytest.raises(ValueError, match="has weights of its own, and takes no others while it runs"):
            await engine.load_weights(source(4))
        with pytest.raises(ValueError, match="cannot make running requests stand still"):
            await engine.pause("keep")
        assert engine.version == 3

    with_completions(served, body, openai.Options(start_timeout_s=5, api_key="k"))


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (Completions(ids=False), "ids come|does not give"),
        (Completions(stops=False), "does not give an end where stop_token_ids say"),
        (
            Completions(vocab=49),
            r"serves another model, 'theirs': it does not take id 49 \(.*model.path=none has 50 ids",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_at_start(served: Completions, said: str) -> None:
    async def body(engine: ServedEngine) -> None:
        with pytest.raises(ValueError, match=said):
            await engine.capabilities()

    with_completions(served, body)


def test_a_server_without_scores_draws_plainly_and_has_no_canary() -> None:
    async def body(engine: ServedEngine) -> None:
        await engine.load_weights(source(0))
        assert len((await engine.generate("r", PROMPT, Sampling(max_tokens=4))).ids) == 4
        with pytest.raises(ValueError, match="temperature 1 of all tokens"):
            await engine.generate("r", PROMPT, Sampling(max_tokens=4, temperature=0.5))
        with pytest.raises(ValueError, match="tells no log-probs of prompts"):
            await engine.score(PROMPT)

    with_completions(Completions(scores="none"), body)


# ---- the configuration -----------------------------------------------------------------------------------------------

URL = "rollout.url=http://127.0.0.1:1"
STORE = ["sync.engine=disk", "sync.engine_options.folder=s3://bucket/run"]
FAR = "rollout.url=http://10.1.2.3:80"


TRTLLM = ["rollout.engine=trtllm", "rollout.python=/bin/sh", "sync.canary=false"]


def config_of(tmp_path: Path, tiny_model: Path, data: Any, *more: str) -> Any:
    return load_config(small_args(tmp_path, tiny_model, data, *more)).config


def test_what_each_reads_its_weights_from(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    for engine, wanted in (("sglang", "disk"), ("trtllm", "disk"), ("openai", "shm"), ("server", "shm")):
        config = config_of(tmp_path, tiny_model, arithmetic_data, f"rollout.engine={engine}", URL)
        assert engine_of(config, "sync") == wanted, engine


@each(
    "more, said",
    [
        (["rollout.engine=sglang"], "sglang is not installed beside verl; set rollout.python=ENVIRONMENT/bin/python"),
        (["rollout.engine=sglang", URL, "sync.engine=shm"], "it reads weights from a folder; set sync.engine=disk"),
        (["rollout.engine=sglang", FAR], "weights go through a folder (sync.engine=disk)"),
        (["rollout.engine=sglang", URL, *STORE], "it reads weights from a folder of its machine, and none from a URL"),
        (["rollout.engine=trtllm", URL], "it takes no weights while it runs; set rollout.python"),
        (["rollout.engine=trtllm", "rollout.python=/bin/sh"], "set sync.canary=false"),
        (
            ["rollout.engine=trtllm", "rollout.python=/bin/sh", "sync.canary=false", "rollout.temperature=0.7"],
            "rollout.temperature=0.7 top_p=1 top_k=0 min_p=0 with rollout.engine=trtllm",
        ),
        (
            [*TRTLLM, "eval.temperature=0.6"],
            "eval.temperature=0.6 top_p=1 top_k=0 min_p=0 with rollout.engine=trtllm: its",
        ),
        ([*TRTLLM, "eval.temperature=1.0", "eval.top_p=0.9"], "set 1, 1, 0 and 0, or temperature 0"),
        (
            ["rollout.engine=sglang", URL, "eval.temperature=1", "eval.top_k=5000"],
            "eval.temperature=1 top_p=1 top_k=5000 min_p=0 with rollout.engine=sglang: it tells the log-probs of "
            "truncated draws for top_k from 1 to 4096 alone; set eval.top_k=1024, or leave top_p, top_k and min_p out",
        ),
        (["rollout.engine=openai"], "one that runs already: set rollout.url"),
        (["rollout.engine=openai", URL], "its weights are its own, and cannot be trained; use it with verl eval"),
    ],
)
def test_what_the_configuration_refuses(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, more: list[str], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        validate(config_of(tmp_path, tiny_model, arithmetic_data, *more))
    assert said in str(caught.value)


def test_what_the_configuration_takes(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    shared = ["sync.engine=disk", f"sync.engine_options.folder={tmp_path}"]
    validate(config_of(tmp_path, tiny_model, arithmetic_data, "rollout.engine=sglang", FAR, *shared))
    validate(config_of(tmp_path, tiny_model, arithmetic_data, "rollout.engine=server", URL, *STORE))
    for more in ([], ["eval.temperature=1.0"], ["eval.top_p=0.5"]):  # greedy, whatever is cut off
        validate(config_of(tmp_path, tiny_model, arithmetic_data, *TRTLLM, *more))
    cut = ["rollout.engine=sglang", URL, "eval.temperature=1", "eval.top_p=0.9"]  # of a small vocabulary
    validate(config_of(tmp_path, tiny_model, arithmetic_data, *cut))
    off = ["run.eval_before=false", "run.eval_after=false", "eval.temperature=1", "eval.top_k=5000"]
    validate(config_of(tmp_path, tiny_model, arithmetic_data, "rollout.engine=sglang", URL, *off))
    fixed = config_of(tmp_path, tiny_model, arithmetic_data, "rollout.engine=openai", FAR)
    validate(fixed, "eval")
    with pytest.raises(ValueError, match="nothing else shows that it serves"):
        validate(
            config_of(tmp_path, tiny_model, arithmetic_data, "rollout.engine=openai", FAR, "sync.canary=false"), "eval"
        )
