"""`verl serve` over HTTP, in this process: what it answers, what it refuses, and that it lives on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from serving import TOOL, Scripted, engine_of, events, model, serving, tokenizer, until

from verl.rollout import hf
from verl.rollout.base import GenerateRequest
from verl.rollout.native import engine as native
from verl.rollout.server import requests
from verl.rollout.server.control import PassingSegments
from verl.rollout.server.requests import NEUTRAL
from verl.rollout.server.responses import CompletionForm
from verl.rollout.server.texts import Piecewise
from verl.types import Sampling
from verl.weight_sync.base import Entry, checksum, dtype_name
from verl.weight_sync.shm import PREFIX, ShmOutlet, remove

PROMPT = [20, 21, 22, 23]


def run(body: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(100):
            await body()

    asyncio.run(limited())


async def post(client: Any, path: str, body: Any, **given: Any) -> tuple[int, Any]:
    sent = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with client.post(path, **sent, **given) as answer:
        found = await answer.json() if "json" in answer.headers["Content-Type"] else await answer.text()
        return answer.status, found


async def ok(client: Any, path: str, body: Any = None) -> Any:
    status, found = await post(client, path, body if body is not None else b"")
    assert status == 200, (path, status, found)
    return found


def tokens(client: Any, prompt: list[int], **drawn: Any) -> Any:
    """The answer of the token endpoint."""
    params = {"temperature": 0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True, **drawn}
    return ok(client, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})


# -- the same as in process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 7}])
def test_tokens_and_logprobs_are_those_of_the_engine_in_process(sampling):
    async def body():
        engine = await engine_of(model())
        wanted = await engine.generate(
            GenerateRequest("x", np.asarray(PROMPT), Sampling(max_tokens=24, ignore_eos=True, **sampling))
        )
        score = await engine.score(np.asarray(PROMPT))
        async with serving(engine) as (client, _):
            found = await tokens(client, PROMPT, max_tokens=24, prompt_logprobs=0, **sampling)
            choice = found["choices"][0]
            assert choice["token_ids"] == wanted.ids.tolist() and choice["finish_reason"] == "length"
            np.testing.assert_allclose(
                [x["logprob"] for x in choice["logprobs"]["content"]], wanted.logprobs, atol=1e-6
            )
            assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 24}]
            assert found["prompt_logprobs"][0] is None
            scored = [next(iter(x.items())) for x in found["prompt_logprobs"][1:]]
            assert [int(i) for i, _ in scored] == PROMPT[1:]
            np.testing.assert_allclose([x["logprob"] for _, x in scored], score, atol=1e-6)
            given = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
            plain = (await ok(client, "/v1/completions", {**given, **sampling}))["choices"][0]
            assert plain["token_ids"] == wanted.ids.tolist() and plain["prompt_token_ids"] == PROMPT
            np.testing.assert_allclose(plain["logprobs"]["token_logprobs"], wanted.logprobs, atol=1e-6)
            assert plain["text"] == tokenizer().decode(wanted.ids.tolist(), skip_special_tokens=True)

    run(body)


def test_the_likeliest_tokens_of_a_prompt_are_those_of_the_model():
    """By both endpoints, in vLLM's shape: the k likeliest with their ranks, and the actual token."""

    async def body():
        module = model()
        logp = module(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1).detach()
        for made in (native, hf):
            engine = await engine_of(module, made=made)
            async with serving(engine) as (client, _):
                for k in (1, 5, logp.shape[1]):
                    found = await tokens(client, PROMPT, max_tokens=1, prompt_logprobs=k)
                    plain = await ok(
                        client, "/v1/completions", {"prompt": PROMPT, "prompt_logprobs": k, "max_tokens": 1}
                    )
                    for said in (found["prompt_logprobs"], plain["choices"][0]["prompt_logprobs"]):
                        assert said[0] is None and len(said) == len(PROMPT)
                        for row, token, by_id in zip(logp, PROMPT[1:], said[1:]):
                            best = row.topk(k)
                            ranked = sorted((of["rank"], int(i)) for i, of in by_id.items() if of["rank"] is not None)
                            assert ranked == list(zip(range(1, k + 1), best.indices.tolist()))
                            assert {int(i) for i in by_id} == {*best.indices.tolist(), token}
                            for i, of in by_id.items():
                                assert of["logprob"] == pytest.approx(float(row[int(i)]), abs=2e-5)

    run(body)


def test_a_seed_is_a_function_of_itself_and_no_seed_is_a_fresh_one():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            drawn = {"temperature": 1.0, "n": 3}
            a, b = [await tokens(client, PROMPT, seed=5, **drawn) for _ in range(2)]
            c, d = [await tokens(client, PROMPT, **drawn) for _ in range(2)]
            alone = await tokens(client, PROMPT, seed=5, temperature=1.0)
            ids = [[choice["token_ids"] for choice in x["choices"]] for x in (a, b, c, d)]
            assert ids[0] == ids[1] and len({tuple(x) for x in ids[0]}) == 3, "three answers, three streams"
            assert ids[2] != ids[3] and alone["choices"][0]["token_ids"] == ids[0][0]
            assert a["usage"] | {"prompt_tokens_details": 0} == {
                "prompt_tokens": 4,
                "completion_tokens": 36,
                "total_tokens": 40,
                "prompt_tokens_details": 0,
            }

    run(body)


def test_many_prompts_in_every_form():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            text = {"max_tokens": 4, "temperature": 0}
            ids = (await ok(client, "/tokenize", {"prompt": "what is"}))["tokens"]
            forms = ["what is", ["what is"], ids, [ids]]
            found = [(await ok(client, "/v1/completions", {"prompt": p, **text}))["choices"][0]["text"] for p in forms]
            assert len(set(found)) == 1
            both = await ok(client, "/v1/completions", {"prompt": ["what is", "two"], "n": 2, **text})
            assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
            assert both["choices"][0]["text"] == both["choices"][1]["text"] == found[0]
            assert (await ok(client, "/detokenize", {"tokens": ids}))["prompt"] == "what is"

    run(body)


def test_stops_end_an_answer_and_are_left_out_unless_asked_for():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            given = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            whole = (await ok(client, "/v1/completions", given))["choices"][0]
            stop = whole["text"][5:7]
            cut = (await ok(client, "/v1/completions", {**given, "stop": [stop]}))["choices"][0]
            assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
            assert cut["text"] == whole["text"][: whole["text"].index(stop)]
            kept = {**given, "stop": stop, "include_stop_str_in_output": True}
            assert (await ok(client, "/v1/completions", kept))["choices"][0]["text"].startswith(cut["text"] + stop)
            by_id = {**given, "stop_token_ids": [whole["token_ids"][3]]}
            ended = (await ok(client, "/v1/completions", by_id))["choices"][0]
            assert ended["stop_reason"] == whole["token_ids"][3] and ended["finish_reason"] == "stop"

    run(body)


@pytest.mark.parametrize("stop", [None, "e", "s a"])
def test_a_stream_is_the_whole_answer_in_pieces(stop):
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            for seed in range(6):
                given = {"max_tokens": 60, "seed": seed, "stop": stop, "n": 2, "logprobs": 0}
                given |= {"prompt": PROMPT, "return_token_ids": True, "stream_options": {"include_usage": True}}
                whole = await ok(client, "/v1/completions", {k: v for k, v in given.items() if k != "stream_options"})
                sent = events(await ok(client, "/v1/completions", {**given, "stream": True}))
                assert sent.pop() == "[DONE]"
                chunks = [json.loads(x) for x in sent]
                assert chunks.pop()["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
                for i, choice in enumerate(whole["choices"]):
                    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
                    assert "".join(c["text"] for c in own) == choice["text"]
                    assert [t for c in own for t in c["token_ids"]] == choice["token_ids"]
                    logprobs = [x for c in own for x in c["logprobs"]["token_logprobs"]]
                    np.testing.assert_allclose(logprobs, choice["logprobs"]["token_logprobs"], atol=1e-5)
                    assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
                    assert own[-1]["finish_reason"] == choice["finish_reason"]

    run(body)


@pytest.mark.parametrize("before", ["", "o", "ok", "much more than it is long"])
def test_the_beginning_of_a_stop_string_is_held_back_wherever_it_stands(before):
    stop = "</answer>"
    pieces = Piecewise(lambda ids: "".join(map(chr, ids)), [stop, "###"])
    sent = [pieces.add([ord(letter)]) for letter in before + stop[:-1]]
    assert "".join(sent) == before and pieces.rest(before) == ""


def test_a_stream_comes_while_the_answer_is_made():
    async def body():
        engine = await engine_of(model(max_positions=4096), max_context_tokens=4096)
        async with serving(engine, max_context_tokens=4096) as (client, _):
            asked = {"token_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
            async with client.post("/inference/v1/generate", json=asked) as answer:
                first = json.loads((await answer.content.readline()).decode().removeprefix("data: "))
                assert 0 < len(first["choices"][0]["token_ids"]) < 3000
                assert first["choices"][0]["finish_reason"] is None

    run(body)


def test_a_stream_may_come_in_large_pieces():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            params = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0}
            asked = {"token_ids": PROMPT, "stream": True, "stream_interval_s": 3600.0, "sampling_params": params}
            sent = [json.loads(x) for x in events(await ok(client, "/inference/v1/generate", asked))[:-1]]
            assert [len(chunk["choices"][0]["token_ids"]) for chunk in sent] == [60]
            assert len(sent[0]["choices"][0]["logprobs"]["content"]) == 60

    run(body)


# -- chat and tools ----------------------------------------------------------------------------------------------------

CALL = 'sure <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
ASKED = {"messages": [{"role": "user", "content": "what is two plus two?"}]}


def test_chat_renders_the_template_and_parses_tool_calls():
    async def body():
        of = tokenizer()
        engine = Scripted(of, CALL, CALL, CALL, "four", "<tool_call>{broken</tool_call>", "quatre")
        async with serving(engine, of) as (client, _):
            found = await ok(client, "/v1/chat/completions", {**ASKED, "tools": [TOOL], "logprobs": True})
            choice = found["choices"][0]
            called = choice["message"]["tool_calls"][0]["function"]
            assert called == {"name": "add", "arguments": '{"a": 2}'} and choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "sure" and "add" in of.decode(engine.prompts[0])
            assert len(choice["logprobs"]["content"]) == found["usage"]["completion_tokens"]
            sent = events(await ok(client, "/v1/chat/completions", {**ASKED, "tools": [TOOL], "stream": True}))
            deltas = [c for x in sent[:-1] for c in json.loads(x)["choices"]]
            assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
            assert deltas[-1]["delta"]["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'
            plain = await ok(client, "/v1/chat/completions", {**ASKED, "tools": [TOOL], "tool_choice": "none"})
            assert "tool_call>" in plain["choices"][0]["message"]["content"], "no tools shown, none looked for"
            assert "tools" not in of.decode(engine.prompts[2])
            answer = {"role": "tool", "tool_call_id": "1", "content": "4"}
            call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
            turns = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
            await ok(client, "/v1/chat/completions", {"messages": turns, "tools": [TOOL]})
            assert '"arguments": {"a": 2}' in of.decode(engine.prompts[3]), "an object, as templates expect"
            broken = await ok(client, "/v1/chat/completions", {**ASKED, "tools": [TOOL]})
            assert broken["choices"][0]["message"]["content"] == "<tool_call>{broken</tool_call>"
            rule = [{"type": "text", "text": "French "}, {"type": "text", "text": "only"}]
            developer = {"messages": [{"role": "developer", "content": rule}, *ASKED["messages"]]}
            await ok(client, "/v1/chat/completions", developer)
            assert of.decode(engine.prompts[5]).startswith("<|user|>system: French only<|end|>")

    run(body)


def test_half_a_character_in_a_call_is_told_as_its_escape():
    async def body():
        of = tokenizer()
        written = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
        async with serving(Scripted(of, written, written), of) as (client, _):
            asked = {**ASKED, "tools": [TOOL]}
            call = (await ok(client, "/v1/chat/completions", asked))["choices"][0]["message"]["tool_calls"][0]
            assert json.loads(call["function"]["arguments"]) == {"a": "\ud83d"}
            sent = events(await ok(client, "/v1/chat/completions", {**asked, "stream": True}))
            last = json.loads(sent[-2])["choices"][0]["delta"]["tool_calls"][0]
            assert json.loads(last["function"]["arguments"]) == {"a": "\ud83d"} and sent[-1] == "[DONE]"

    run(body)


def test_a_fault_amid_a_stream_ends_it_with_an_error(monkeypatch):
    """It contains no second answer, for which its reader would wait for ever."""

    def broken(*_: Any) -> Any:
        raise KeyError("a fault of ours")

    async def body():
        async with serving(await engine_of(model())) as (client, service):
            monkeypatch.setattr(CompletionForm, "last", broken)
            asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
            sent = events(await asyncio.wait_for(ok(client, C, asked), 20))
            assert len(sent) > 2 and json.loads(sent[-2])["error"]["code"] == "internal_error" and sent[-1] == "[DONE]"
            monkeypatch.undo()
            assert (await post(client, C, {**asked, "stream": False}))[0] == 200 and service.sequences == 0

    run(body)


def test_no_request_takes_the_memory_of_the_server(monkeypatch):
    monkeypatch.setattr(requests, "MAX_SCORES", 100)
    monkeypatch.setattr(requests, "MAX_STOPS", 10)

    async def body():
        engine = await engine_of(model())
        async with serving(engine) as (client, _):
            params = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
            for more, said in (
                ({"prompt_logprobs": 26}, "prompt_logprobs=26: 104 of them for all tokens, at most 100"),
                ({"stop_token_ids": [*range(11)]}, "stop_token_ids: 11 of them, at most 10"),
                ({"stop": ["x"] * 11}, "stop: 11 of them, at most 10"),
                ({"stop": "x" * 11}, "stop: 11 characters, at most 10"),
            ):
                status, error = await post(client, G, {"token_ids": PROMPT, "sampling_params": params | more})
                assert status == 400 and said in error["error"]["message"], (status, error)
            await tokens(client, PROMPT, prompt_logprobs=25, max_tokens=1)
            await tokens(client, PROMPT, stop_token_ids=[300] * 1000, max_tokens=2)
            assert engine._core.running._stop_ids.shape[1] == 1, "what comes twice is one"

    run(body)


def test_calls_are_read_as_the_chat_template_writes_them():
    """A family with a special token as marker; and if one of two calls is broken, none is returned."""

    async def body():
        of = tokenizer()
        of.chat_template = "{# [TOOL_CALLS] name [ARGS] #}" + of.chat_template
        of.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
        whole = '[TOOL_CALLS]add[ARGS]{"a": 2}'
        async with serving(Scripted(of, f"so {whole}{whole}", f"{whole}[TOOL_CALLS]add[ARGS]{{"), of) as (client, _):
            asked = {**ASKED, "tools": [TOOL]}
            message = (await ok(client, "/v1/chat/completions", asked))["choices"][0]["message"]
            assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"a": 2}'] * 2
            assert message["content"] == "so"
            broken = (await ok(client, "/v1/chat/completions", asked))["choices"][0]["message"]
            assert "tool_calls" not in broken and broken["content"] == 'add{"a": 2}add{'

    run(body)


def test_the_models_own_response_template_is_used():
    async def body():
        of = tokenizer()
        of.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor": "<|assistant|>",
            "fields": {"thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|end|>"}},
        }
        async with serving(Scripted(of, "<think>two and two</think>four"), of) as (client, _):
            message = (await ok(client, "/v1/chat/completions", ASKED))["choices"][0]["message"]
            assert message == {"role": "assistant", "content": "four", "reasoning_content": "two and two"}

    run(body)


def test_chat_streams_its_text():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            asked = {**ASKED, "max_tokens": 50, "seed": 3, "logprobs": True}
            whole = (await ok(client, "/v1/chat/completions", asked))["choices"][0]
            sent = events(await ok(client, "/v1/chat/completions", {**asked, "stream": True}))
            deltas = [c for x in sent[:-1] for c in json.loads(x)["choices"]]
            assert "".join(d["delta"].get("content") or "" for d in deltas) == whole["message"]["content"]
            told = [t["token"] for d in deltas if d["logprobs"] for t in d["logprobs"]["content"]]
            assert told == [t["token"] for t in whole["logprobs"]["content"]]

    run(body)


# -- what is refused ---------------------------------------------------------------------------------------------------

C, H, G = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
BAD: list[tuple[str, Any, int, str]] = [
    (C, b"{", 400, "not JSON"),
    (C, b"[1]", 400, "JSON object"),
    (C, b'{"prompt": "\\ud800"}', 400, "not JSON"),
    (C, b"[" * 100_000, 400, "not JSON"),
    (C, {}, 400, "prompt"),
    (C, {"prompt": "x", "model": "other"}, 404, "model='other'"),
    (C, {"prompt": ""}, 400, "prompt is empty"),
    (C, {"prompt": []}, 400, "prompt is empty"),
    (C, {"prompt": [[]]}, 400, "prompt is empty"),
    (C, {"prompt": [5] * 300}, 400, "300 tokens"),
    (C, {"prompt": [5, 320]}, 400, "320"),
    (C, {"prompt": [5, -1]}, 400, "prompt"),
    (C, {"prompt": [5, 10**30]}, 400, "prompt"),
    (C, {"prompt": ["x", [5]]}, 400, "prompt"),
    (C, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (C, {"prompt": "x", "max_tokens": -5}, 400, "max_tokens"),
    (C, {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    (C, {"prompt": "x", "temperature": -1}, 400, "temperature"),
    (C, {"prompt": "x", "temperature": 1e-30}, 400, "too close to 0"),
    (C, {"prompt": "x", "top_p": 0}, 400, "top_p"),
    (C, {"prompt": "x", "top_p": 1e-40}, 400, "top_p"),
    (C, {"prompt": "x", "n": 0}, 400, "n"),
    (C, {"prompt": "x", "n": 65}, 400, "serve.max_sequences=64"),
    (C, {"prompt": "x", "seed": 2**70}, 400, "seed"),
    (C, {"prompt": "x", "stop": [""]}, 400, "stop"),
    (C, {"prompt": "x", "stop_token_ids": [320]}, 400, "stop_token_ids"),
    (C, {"prompt": "x", "logprobs": 3}, 400, "logprobs=3"),
    (C, {"prompt": "x", "prompt_logprobs": 321}, 400, "the vocabulary has 320"),
    (C, {"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    (C, {"prompt": "x", "echo": True}, 400, "echo=True"),
    (C, {"prompt": "x", "best_of": 3}, 400, "best_of"),
    (C, {"prompt": "x", "presence_penalty": 0.5}, 400, "presence_penalty"),
    (C, {"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    (C, {"prompt": "x", "guided_json": {}}, 400, "guided_json"),
    (C, {"prompt": "x", "min_tokens": 3}, 400, "min_tokens"),
    (C, {"prompt": "x", "colour": "red"}, 400, "colour"),
    (H, {"messages": []}, 400, "messages"),
    (H, {"messages": [{"content": "x"}]}, 400, "role"),
    (H, {"messages": [{"role": "user", "content": 5}]}, 400, "no text"),
    (H, {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]}, 400, "tool_calls is no list"),
    (H, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "more than text"),
    (H, {"messages": [{"role": "assitant", "content": "x"}]}, 400, "a role that neither"),
    (H, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "has no text"),
    (H, {"messages": [{"role": "assistant", "content": "x", "reasoning": "y"}]}, 400, "reasoning_content, which"),
    (H, {"messages": [{"role": "user", "content": "x", "images": ["a.png"]}]}, 400, "looks like media"),
    (H, {**ASKED, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (H, {**ASKED, "top_logprobs": 2, "logprobs": True}, 400, "top_logprobs=2"),
    (H, {**ASKED, "tool_choice": "required", "tools": [TOOL]}, 400, "tool_choice"),
    (H, {**ASKED, "chat_template_kwargs": {"tokenize": False}}, 400, "chat_template_kwargs"),
    (G, {"token_ids": []}, 400, "token_ids is empty"),
    (G, {"token_ids": [5], "sampling_params": {"top_k": -2}}, 400, "top_k"),
    (G, {"token_ids": [5], "sampling_params": {"repetition_penalty": 1.1}}, 400, "repetition_penalty"),
    (G, {"token_ids": [5], "sampling_params": []}, 400, "sampling_params"),
    (G, {"token_ids": [5], "stream": True, "sampling_params": {"prompt_logprobs": 0}}, 400, "prompt_logprobs"),
    ("/inference/v1/abort_requests", {}, 400, "request_ids"),
    ("/detokenize", {"tokens": [320]}, 400, "320"),
    ("/tokenize", {}, 400, "prompt or messages"),
    ("/v1/embeddings", {}, 404, "no such endpoint"),
    ("/health", {}, 405, "method"),
    ("/pause", b"", 404, "serve.control=true"),
    ("/update_weights", {}, 404, "serve.control=true"),
]


def test_every_mistake_has_its_status_and_names_itself_and_the_server_lives_on():
    async def body():
        async with serving(await engine_of(model()), max_sequences=64) as (client, service):
            for path, sent, status, said in BAD:
                got, error = await post(client, path, sent)
                assert got == status, (path, sent if len(str(sent)) < 200 else "...", got, error)
                assert set(error["error"]) == {"message", "type", "param", "code"}, error
                assert said in error["error"]["message"], (said, error)
                assert len(error["error"]["message"]) < 400 and "\n" not in error["error"]["message"], error
            assert service.sequences == 0 and not service.running
            assert len((await tokens(client, PROMPT))["choices"][0]["token_ids"]) == 12

    run(body)


def test_what_means_nothing_is_taken():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            neutral = {key: values[0] for key, values in NEUTRAL.items()}
            asked = {"prompt": "x", "max_tokens": 2, "user": "me", "seed": None, **neutral}
            await ok(client, "/v1/completions", asked)
            assert (await post(client, "/v1/completions", {**asked, "echo": 0}))[0] == 400, "0 is not false"

    run(body)


def test_a_body_that_is_too_large_and_a_key_that_is_wrong():
    async def body():
        async with serving(await engine_of(model()), api_key="a long secret", max_body_mb=0.001) as (client, _):
            key = {"headers": {"Authorization": "Bearer a long secret"}}
            for headers in ({}, {"Authorization": "Bearer a long secrex"}, {"Authorization": "\u00e9"}):
                status, error = await post(client, C, {"prompt": "x"}, headers=headers)
                assert (status, error["error"]["code"]) == (401, "invalid_api_key")
            reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 401 "), "no UTF-8 is no key"
            writer.close()
            status, error = await post(client, C, {"prompt": "x" * 2000}, **key)
            assert (status, error["error"]["code"]) == (413, "body_too_large")
            assert (await post(client, C, {"prompt": "x", "max_tokens": 1}, **key))[0] == 200
            async with client.get("/health") as answer:
                assert answer.status == 200, "a probe has no key"
            async with client.get("/metrics") as answer:
                assert answer.status == 401

    run(body)


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    2**70,
    -(2**70),
    0.5,
    1e-320,
    1e308,
    "",
    "x",
    "\0",
    [],
    [[]],
    [1],
    {},
    {"a": 1},
]


def test_mutated_bodies_never_break_the_server():
    async def body():
        rng = random.Random(0)
        plain = {
            C: {"prompt": [5, 6], "max_tokens": 3, "temperature": 1.0, "top_p": 0.9, "stop": ["x"], "logprobs": 0},
            H: {**ASKED, "max_tokens": 3, "tools": [TOOL], "logprobs": True, "seed": 5},
            G: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 0}, "request_id": "r"},
        }
        names = ["n", "seed", "top_k", "min_p", "stop_token_ids", "ignore_eos", "stream", "stream_options", "model"]
        engine = await engine_of(model(), max_context_tokens=64)
        async with serving(engine, max_context_tokens=64, max_sequences=8) as (client, service):
            for _ in range(250):
                path = rng.choice(list(plain))
                sent = json.loads(json.dumps(plain[path]))
                inside = sent["sampling_params"] if path == G and rng.random() < 0.7 else sent
                for _ in range(rng.randint(1, 2)):
                    inside[rng.choice([*inside, *names])] = rng.choice(VALUES)
                raw = bytearray(json.dumps(sent).encode())
                if rng.random() < 0.2:
                    raw[rng.randrange(len(raw))] = rng.randrange(256)
                status, found = await post(client, path, bytes(raw))
                assert status in (200, 400, 404), (path, bytes(raw), status, found)
                assert "error" not in found or isinstance(found, str) or found["error"]["message"]
            assert service.sequences == 0 and engine.stats()["resident"] == 0
            assert len((await tokens(client, PROMPT))["choices"][0]["token_ids"]) == 12

    run(body)


# -- load, deadlines, ends ---------------------------------------------------------------------------------------------

LONG = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 200, "ignore_eos": True}}


def test_a_client_that_goes_away_frees_its_rows():
    async def body():
        engine = await engine_of(model())
        async with serving(engine) as (client, service):
            for more in ({}, {"stream": True}):
                asked = asyncio.ensure_future(post(client, G, {**LONG, **more}))
                await until(lambda: engine.stats()["resident"] == 1, "a row")
                await engine.pause("keep")
                asked.cancel()
                await until(lambda: service.sequences == 0, "the request is given up")
                await until(lambda: engine.stats()["resident"] == 0, "its row is free")
                await engine.resume()

    run(body)


def test_more_than_fits_is_told_to_come_back():
    async def body():
        engine = await engine_of(model())
        async with serving(engine, max_sequences=2) as (client, service):
            await engine.pause("keep")
            two = [asyncio.ensure_future(tokens(client, PROMPT)) for _ in range(2)]
            await until(lambda: service.sequences == 2, "two run")
            async with client.post(G, json=LONG) as answer:
                assert answer.status == 429 and answer.headers["Retry-After"]
                assert (await answer.json())["error"]["type"] == "rate_limit_error"
            await engine.resume()
            assert len(await asyncio.gather(*two)) == 2

    run(body)


def test_an_answer_that_is_late_is_given_up():
    async def body():
        engine = await engine_of(model())
        async with serving(engine, request_timeout_s=0.2) as (client, service):
            await engine.pause("keep")
            status, error = await post(client, G, LONG)
            assert (status, error["error"]["code"]) == (504, "timeout")
            status, error = await post(client, H, {**ASKED, "stream": True})
            assert status == 200 and '"code":"timeout"' in error, "the stream had begun: its last event says so"
            assert service.sequences == 0

    run(body)


def test_draining_lets_answers_end_and_then_cuts_them_short():
    async def body():
        engine = await engine_of(model())
        async with serving(engine, grace_s=0.2) as (client, service):
            asked = asyncio.ensure_future(ok(client, G, LONG))
            await until(lambda: engine.stats()["resident"] == 1, "a row")
            await engine.pause("keep")
            drained = asyncio.ensure_future(service.drain())
            await until(lambda: service.draining, "it drains")
            for path, sent in ((G, LONG), (H, ASKED)):
                status, error = await post(client, path, sent)
                assert (status, error["error"]["code"]) == (503, "shutting_down")
            await drained
            choice = (await asked)["choices"][0]
            assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < 200

    run(body)


def test_an_answer_is_cut_short_by_its_id():
    async def body():
        engine = await engine_of(model())
        async with serving(engine) as (client, service):
            for name in ("mine", "generate-tokens-mine"):
                asked = asyncio.ensure_future(ok(client, G, {**LONG, "request_id": "mine"}))
                await until(lambda: engine.stats()["resident"] == 1, "a row")
                await engine.pause("keep")
                other = await ok(client, "/inference/v1/abort_requests", {"request_ids": ["other"]})
                again, error = await post(client, G, {**LONG, "request_id": "mine"})
                assert other["aborted"] == 0 and again == 400 and "is running" in error["error"]["message"]
                assert (await ok(client, "/inference/v1/abort_requests", {"request_ids": [name]}))["aborted"] == 1
                assert (await asked)["choices"][0]["finish_reason"] == "abort"
                await engine.resume()

    run(body)


def test_health_asks_the_engine():
    async def body():
        engine = await engine_of(model())
        async with serving(engine, control=True) as (client, service):
            async with client.get("/health") as answer:
                assert answer.status == 200 and (await answer.json())["weight_version"] == "0"
            await ok(client, "/pause?mode=keep")
            async with client.get("/health") as answer:
                assert (await answer.json())["status"] == "paused"
            await ok(client, "/resume")
            service.health_at -= 10
            engine._fail(RuntimeError("out of memory"))
            async with client.get("/health") as answer:
                assert answer.status == 503 and "out of memory" in (await answer.json())["error"]["message"]
            status, error = await post(client, G, LONG)
            assert (status, error["error"]["code"]) == (500, "engine_failed")

    run(body)


def test_metrics_count():
    async def body():
        async with serving(await engine_of(model())) as (client, _):
            await tokens(client, PROMPT)
            await post(client, C, {})
            async with client.get("/metrics") as answer:
                found = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#")
            assert found['verl_requests_total{path="/v1/completions",status="400"}'] == "1"
            assert (found["verl_generated_tokens_total"], found["verl_prompt_tokens_total"]) == ("12", "4")
            assert found["verl_request_seconds_count"] == found['verl_request_seconds_bucket{le="+Inf"}'] == "1"
            assert (found["verl_ready"], found["verl_sequences_running"]) == ("1", "0")

    run(body)


# -- the control plane -------------------------------------------------------------------------------------------------


class Publisher:
    """Stages weights as the trainer's side of sync.engine=shm does."""

    def __init__(self) -> None:
        self.outlet = ShmOutlet(f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:12]}")

    def info(self, module: Any, version: int, **more: Any) -> dict[str, Any]:
        tensors = dict(module.named_parameters())
        shapes = {name: Entry(tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors.items()}
        path = self.outlet.stage(version, shapes, tensors.items())
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        return {"update_info": {"path": path, "version": version, "names": None, "checksums": sums} | more}

    def close(self) -> None:
        remove(self.outlet.name)


@pytest.fixture
def publisher():
    made = Publisher()
    yield made
    made.close()


async def update(client: Any, info: Any, version: int) -> tuple[int, Any]:
    await ok(client, "/start_weight_update")
    status, found = await post(client, "/update_weights", info)
    if status != 200:
        return status, found
    return await post(client, "/finish_weight_update", {"weight_version": str(version)})


@pytest.mark.parametrize("whole", [False, True])
def test_an_update_is_live_at_its_end_and_not_before(whole, publisher):
    """Also where it was read by then."""

    async def body():
        a, b = model(1), model(2)
        reference = await engine_of(b)
        wanted = await reference.generate(
            GenerateRequest("x", np.asarray(PROMPT), Sampling(max_tokens=12, temperature=0.0, ignore_eos=True))
        )
        await reference.close()
        async with serving(await engine_of(a), control=True) as (client, _):
            old = (await tokens(client, PROMPT))["choices"][0]["token_ids"]
            told = await ok(client, "/collective_rpc", {"method": "served_model"})
            assert told["results"] == [{"model": "policy", "vocab_size": 320}]
            await ok(client, "/init_weight_transfer_engine", {"init_info": {}})
            await ok(client, "/start_weight_update")
            await ok(client, "/update_weights", publisher.info(b, 7, whole=whole))
            if whole:  # it is not looked at again
                remove(publisher.outlet.name)
            assert (await tokens(client, PROMPT))["choices"][0]["token_ids"] == old, "announced, not live"
            found = await ok(client, "/finish_weight_update", {"weight_version": "7"})
            assert set(found["loaded"]) == set(dict(b.named_parameters())) and found["weight_version"] == "7"
            choice = (await tokens(client, PROMPT))["choices"][0]
            assert choice["token_ids"] == wanted.ids.tolist() != old
            np.testing.assert_allclose(
                [x["logprob"] for x in choice["logprobs"]["content"]], wanted.logprobs, atol=1e-6
            )
            assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 12}]
            async with client.get("/weight_info") as answer:
                assert (await answer.json())["weight_version"] == "7"

    run(body)


def test_an_update_in_flight_shows_in_the_spans_and_the_kv_is_computed_again(publisher):
    async def body():
        b = model(2)
        engine, reference = await engine_of(model(1)), await engine_of(b)
        async with serving(engine, control=True) as (client, _):
            asked = asyncio.ensure_future(tokens(client, PROMPT, max_tokens=200))
            await until(lambda: engine.stats()["resident"] == 1, "a row")
            await ok(client, "/pause?mode=keep")
            async with client.get("/is_paused") as answer:
                assert (await answer.json())["is_paused"] is True
            assert (await update(client, publisher.info(b, 4), 4))[0] == 200
            assert (await ok(client, "/reset_prefix_cache"))["success"] is True
            await ok(client, "/resume")
            choice = (await asked)["choices"][0]
            spans = choice["weight_versions"]
            assert [s["version"] for s in spans] == ["0", "4"] and spans[0]["end"] == spans[1]["start"]
            assert (spans[0]["start"], spans[1]["end"]) == (0, 200)
            after = spans[1]["start"]
            score = await reference.score(np.asarray(PROMPT + choice["token_ids"]))
            found = [x["logprob"] for x in choice["logprobs"]["content"][after:]]
            np.testing.assert_allclose(found, score[len(PROMPT) - 1 + after :], atol=2e-5)
        await reference.close()

    run(body)


def test_a_caller_that_leaves_while_prefixes_are_dropped_leaves_no_engine_asleep():
    async def body():
        engine = await engine_of(model(1))
        asleep, woken = asyncio.Event(), asyncio.Event()
        sleeps, wakes = engine.sleep, engine.wake

        async def slept(level: int) -> int:
            freed = await sleeps(level)
            asleep.set()
            await asyncio.sleep(0.2)
            return freed

        async def wake(tags: Any) -> None:
            await wakes(tags)
            woken.set()

        engine.sleep, engine.wake = slept, wake
        async with serving(engine, control=True) as (client, _):
            left = asyncio.ensure_future(ok(client, "/reset_prefix_cache"))
            await asleep.wait()
            left.cancel()
            async with asyncio.timeout(20):
                await woken.wait()
            assert len((await tokens(client, PROMPT, max_tokens=3))["choices"][0]["token_ids"]) == 3

    run(body)


def _some(info: Any) -> Any:
    return {"update_info": {**info["update_info"], "names": ["model.norm.weight"], "checksums": {}}}


def _garbage(info: Any) -> Any:
    path = Path(info["update_info"]["path"] + "x")
    path.write_bytes((5).to_bytes(8, "little") + (40).to_bytes(8, "little") + b"\xc1" * 64)
    return {"update_info": {**info["update_info"], "path": str(path)}}


BROKEN = {
    "another version": lambda info: {"update_info": {**info["update_info"], "version": 9}},
    "other bytes": lambda info: {"update_info": {**info["update_info"], "checksums": {"model.norm.weight": 1}}},
    "names that are not there": lambda info: {"update_info": {**info["update_info"], "checksums": {"x": 1}}},
    "tensors that are missing": _some,
    "a file of something else": _garbage,
    "no such file": lambda info: {"update_info": {**info["update_info"], "path": f"/dev/shm/{PREFIX}-gone"}},
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", BROKEN)
def test_a_failed_update_silences_the_server_until_one_has_succeeded(how, whole, publisher):
    async def body():
        b = model(2)
        async with serving(await engine_of(model(1)), control=True) as (client, _):
            info = publisher.info(b, 5, whole=whole)
            status, error = await update(client, BROKEN[how](info), 5)
            assert (status, error["error"]["code"]) == (500, "weight_update_failed")
            for path, sent in ((G, LONG), (C, {"prompt": "x"})):
                status, error = await post(client, path, sent)
                assert (status, error["error"]["code"]) == (503, "no_weights")
                assert "a weight update failed" in error["error"]["message"]
            async with client.get("/health") as answer:
                assert answer.status == 503
            await ok(client, "/resume")
            assert (await post(client, G, LONG))[0] == 503, "resuming does not mend it"
            assert (await update(client, info, 5))[0] == 200
            assert (await tokens(client, PROMPT))["choices"][0]["weight_versions"][0]["version"] == "5"

    run(body)


def waiting() -> bool:
    """Some thread, for the next bucket."""
    return any(
        frame.f_code is PassingSegments._next.__code__ for top in sys._current_frames().values() for frame in stack(top)
    )


def stack(frame: Any) -> Any:
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_a_server_that_waits_for_a_bucket_says_that_it_updates_and_ends_at_once(publisher):
    async def body():
        async with serving(await engine_of(model(1)), control=True, request_timeout_s=60.0) as (client, service):
            await ok(client, "/start_weight_update")
            info = publisher.info(model(2), 4)
            info["update_info"]["passes"] = True
            await ok(client, "/update_weights", info)
            service.health_at -= 10
            async with client.get("/health") as answer:
                assert (answer.status, (await answer.json())["status"]) == (200, "updating")
            await until(waiting, "the engine's thread")  # which has reported the one before by then
        await until(lambda: not waiting(), "the end of its thread")

    run(body)


def test_what_an_update_refuses_without_harm(publisher):
    async def body():
        async with serving(await engine_of(model(1)), control=True) as (client, _):
            info = publisher.info(model(2), 5)
            assert (await post(client, "/update_weights", info))[0] == 409
            assert (await post(client, "/finish_weight_update", {}))[0] == 409
            await ok(client, "/start_weight_update")
            for wrong in (
                {},
                {"update_info": {"path": 3, "version": 5}},
                {"update_info": {"path": "/etc/passwd", "version": 1}},
            ):
                assert (await post(client, "/update_weights", wrong))[0] == 400
            assert len((await tokens(client, PROMPT))["choices"][0]["token_ids"]) == 12
            status, error = await post(client, "/finish_weight_update", {"weight_version": "5"})
            assert status == 500 and "before any update_weights" in error["error"]["message"]
            assert (await post(client, G, LONG))[0] == 503, "its trainer believes that version 5 is live"

    run(body)


@pytest.mark.parametrize("whole", [False, True])
def test_parts_of_an_update_make_one(whole, publisher):
    async def body():
        b = model(2)
        async with serving(await engine_of(model(1)), control=True) as (client, _):
            info = publisher.info(b, 6)
            names = list(info["update_info"]["checksums"])
            await ok(client, "/start_weight_update")
            for part in (names[:3], names[3:]):
                sums = {name: info["update_info"]["checksums"][name] for name in part}
                more = {"names": part, "checksums": sums, "whole": whole and part != names[:3]}
                await ok(client, "/update_weights", {"update_info": {**info["update_info"], **more}})
            assert (await ok(client, "/finish_weight_update", {}))["loaded"] == names
            assert (await tokens(client, PROMPT))["choices"][0]["weight_versions"][0]["version"] == "6"

    run(body)


def test_pause_and_sleep(publisher):
    async def body():
        engine = await engine_of(model(1))
        async with serving(engine, control=True) as (client, _):
            asked = asyncio.ensure_future(ok(client, G, LONG))
            await until(lambda: engine.stats()["resident"] == 1, "a row")
            await ok(client, "/pause?mode=abort")
            assert (await asked)["choices"][0]["finish_reason"] == "abort"
            assert (await post(client, "/pause?mode=later", b""))[0] == 400
            await ok(client, "/resume")
            await ok(client, "/sleep?level=1")
            async with client.get("/is_sleeping") as answer:
                assert (await answer.json())["is_sleeping"] is True
            assert (await post(client, G, LONG))[1]["error"]["code"] == "asleep"
            await ok(client, "/wake_up")
            assert len((await tokens(client, PROMPT))["choices"][0]["token_ids"]) == 12
            await ok(client, "/sleep?level=2")
            await ok(client, "/wake_up?tags=weights&tags=kv_cache")
            assert (await post(client, G, LONG))[1]["error"]["code"] == "no_weights"
            assert (await post(client, "/sleep?level=3", b""))[0] == 400
            assert (await post(client, "/wake_up?tags=x", b""))[0] == 400
            assert (await update(client, publisher.info(model(2), 2), 2))[0] == 200
            assert len((await tokens(client, PROMPT))["choices"][0]["token_ids"]) == 12

    run(body)


def test_models_and_version():
    async def body():
        async with serving(await engine_of(model()), name="mine") as (client, _):
            async with client.get("/v1/models") as answer:
                card = (await answer.json())["data"][0]
            assert (card["id"], card["max_model_len"]) == ("mine", 256)
            async with client.get("/v1/models/other") as answer:
                assert answer.status == 404
            async with client.get("/version") as answer:
                assert (await answer.json())["engine"] == "verl"
            assert (await ok(client, "/v1/completions", {"prompt": "x", "model": "mine"}))["model"] == "mine"
            with pytest.raises(aiohttp.ClientResponseError):
                await client.get("/v1/models/other", raise_for_status=True)

    run(body)
