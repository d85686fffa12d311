"""`verl serve` as a process, with requests of the official `openai` client."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from serving import TOOL, engine_of, model, run_serve, server_process, tokenizer

from verl.models import tiny
from verl.rollout.base import GenerateRequest
from verl.types import Sampling

KEY = "a key of some length"
ASKED: Any = [{"role": "user", "content": "what is two plus two?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(model(1), tokenizer(), tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with server_process(folder, log, f"serve.api_key='{KEY}'") as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url):
    import openai  # here: every worker that collects would pay the seconds that it takes

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def test_completions(client):
    assert [m.id for m in client.models.list()] == ["policy"]
    found = client.completions.create(model="policy", prompt="what is", max_tokens=8, temperature=0, logprobs=0, n=2)
    assert len(found.choices) == 2 and found.choices[0].text == found.choices[1].text
    assert found.usage.completion_tokens == 2 * len(found.choices[0].logprobs.token_logprobs)
    parts = client.completions.create(model="policy", prompt="what is", max_tokens=8, temperature=0, stream=True)
    assert "".join(c.text for part in parts for c in part.choices) == found.choices[0].text


def test_it_is_the_engine_in_process(client):
    async def wanted() -> Any:
        engine = await engine_of(model(1))
        sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
        found = await engine.generate(GenerateRequest("x", np.asarray([20, 21, 22]), sampling))
        await engine.close()
        return found

    extra = {"ignore_eos": True, "return_token_ids": True}
    drawn = {"max_tokens": 20, "temperature": 0, "logprobs": 0}
    choice = client.completions.create(model="policy", prompt=[20, 21, 22], extra_body=extra, **drawn).choices[0]
    here = asyncio.run(wanted())
    assert choice.token_ids == here.ids.tolist()
    np.testing.assert_allclose(choice.logprobs.token_logprobs, here.logprobs, atol=1e-6)


def test_chat_and_its_stream(client):
    asked: Any = {"model": "policy", "messages": ASKED, "max_tokens": 30, "seed": 4}
    found = client.chat.completions.create(**asked, logprobs=True, extra_body={"return_token_ids": True})
    choice = found.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.content) == len(choice.token_ids) == found.usage.completion_tokens
    assert tokenizer().decode(found.prompt_token_ids).endswith("<|assistant|>")
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.delta.content or "" for part in parts for c in part.choices) == choice.message.content
    assert parts[-1].usage.completion_tokens == found.usage.completion_tokens


def test_tools_are_shown_to_the_model(client):
    asked: Any = {"model": "policy", "messages": ASKED, "max_tokens": 4, "extra_body": {"return_token_ids": True}}
    shown = client.chat.completions.create(**asked, tools=[TOOL])
    hidden = client.chat.completions.create(**asked)
    assert '"add"' in tokenizer().decode(shown.prompt_token_ids) not in tokenizer().decode(hidden.prompt_token_ids)


def test_errors_are_those_that_the_client_knows(client, url):
    import openai

    with pytest.raises(openai.NotFoundError, match="model='other' is not here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="presence_penalty=1"):
        client.completions.create(model="policy", prompt="x", presence_penalty=1)
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        client.completions.create(model="policy", prompt=[5] * 600)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="another key", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError):
            other.models.list()


def test_what_nobody_reads_any_more_is_not_made(client, url):
    parts = client.completions.create(
        model="policy", prompt=[20], max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(parts))
    parts.close()
    end = time.monotonic() + 20
    while _metric(url, "verl_sequences_running") != 0:
        assert time.monotonic() < end, "the answer goes on for nobody"
        time.sleep(0.02)


def _metric(url: str, name: str) -> float:
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def _ask(url: str, results: list[Any], tokens: int) -> None:
    body = {"prompt": [20], "max_tokens": tokens, "ignore_eos": True, "n": 8}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        results.append((answer.status, json.load(answer)))


@pytest.mark.parametrize("grace_s", [30, 0])
def test_a_server_that_is_told_to_end_answers_first(folder, tmp_path, grace_s):
    with server_process(folder, tmp_path / "log", f"run.grace_s={grace_s}") as (process, url):
        results: list[Any] = []
        asking = threading.Thread(target=_ask, args=(url, results, 500))
        asking.start()
        while not _running(url):
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    (status, found) = results[0]
    reasons = {c["finish_reason"] for c in found["choices"]}
    assert status == 200 and reasons <= ({"length"} if grace_s else {"abort", "length"}), reasons


def _running(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        return b"verl_sequences_running 8" in answer.read()


def test_many_clients_at_once(client):
    def ask(seed: int) -> tuple[int, str]:
        found = client.completions.create(model="policy", prompt="what", max_tokens=16, seed=seed)
        return seed, found.choices[0].text

    with ThreadPoolExecutor(16) as pool:
        first, again = dict(pool.map(ask, range(32))), dict(pool.map(ask, reversed(range(32))))
    assert first == again, "an answer is a function of its seed, whoever else asks"


def test_starts_that_are_refused(folder, tmp_path):
    errors = tmp_path / "errors"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = run_serve(errors, f"model.path={folder}", f"serve.port={port}")
        assert code == 2 and f"serve.port={port}: Address already in use; choose another" in said, said
    code, said = run_serve(errors, f"model.path={folder}", "serve.host=0.0.0.0")
    assert code == 2 and "serve.host=0.0.0.0 can be reached from other machines" in said, said
    code, said = run_serve(errors, f"model.path={folder}", "serve.prot=1")
    assert code == 2 and "serve.port" in said, said
    code, said = run_serve(errors, f"model.path={tmp_path / 'none'}")
    assert code == 2 and "none" in said, said
    code, said = run_serve(
        tmp_path / "errors", f"model.path={folder}", "serve.port=0", "serve.max_context_tokens=100000"
    )
    assert code == 2 and "made for 512 (max_position_embeddings)" in said, said
