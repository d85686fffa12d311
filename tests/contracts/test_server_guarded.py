"""A caller of `verl serve` costs the others nothing. /health answers while any request is being computed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import zlib
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from serving import Scripted, engine_of, model, serving, texts_of, tokenizer, until

from verl.rollout.server import app, door, handling, requests, work
from verl.rollout.server import service as service_module
from verl.rollout.server.options import ServeConfig, check_serve
from verl.rollout.server.requests import CompletionBody, call_of, typed
from verl.rollout.server.responses import CompletionForm, Form
from verl.rollout.server.service import News
from verl.rollout.server.texts import Piecewise, Texts

C, H, G = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
ASKED: Any = {"messages": [{"role": "user", "content": "what is two plus two?"}], "max_tokens": 2}
KEY = "a long secret"
ROOM: Any = {"vocab_size": 320, "max_tokens": 4}


def run(body: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(100):
            await body()

    asyncio.run(limited())


async def post(client: Any, path: str, body: Any, **given: Any) -> tuple[int, str]:
    async with client.post(path, **({"data": body} if isinstance(body, bytes) else {"json": body}), **given) as answer:
        return answer.status, await answer.text()


async def healthy(client: Any) -> None:
    async with client.get("/health", timeout=aiohttp.ClientTimeout(20)) as answer:
        assert answer.status == 200


async def raw(client: Any, *lines: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
    writer.write(b"\r\n".join(lines))
    return reader, writer


# -- the event loop is free --------------------------------------------------------------------------------------------

COMPUTED = [
    (Texts, "encode", C, {"prompt": "x", "max_tokens": 1}),
    (Texts, "encode", "/tokenize", {"prompt": "x"}),
    (Texts, "render", H, ASKED),
    (Texts, "render", "/tokenize", {"messages": ASKED["messages"]}),
    (requests, "decoded", G, {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    (Form, "encoded", G, {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    (Texts, "message", H, {**ASKED, "stream": True}),
    (requests, "decoded", "/collective_rpc", {"method": "served_model"}),
    (requests, "decoded", "/init_weight_transfer_engine", {"init_info": {}}),
    (requests, "decoded", "/abort_requests", {"request_ids": ["x"]}),
]


@pytest.mark.parametrize(("of", "name", "path", "body"), COMPUTED, ids=lambda x: str(x)[-30:])
def test_health_answers_while_a_request_is_read_tokenised_or_answered(monkeypatch, of, name, path, body):
    reached, answered, plain = threading.Event(), threading.Event(), getattr(of, name)

    def held(*given: Any, **more: Any) -> Any:
        reached.set()
        assert answered.wait(20), "/health was not answered meanwhile"
        return plain(*given, **more)

    monkeypatch.setattr(handling if of is requests else of, name, held)

    async def ask() -> None:
        async with serving(Scripted(tokenizer(), "four"), control=True) as (client, _):
            asked = asyncio.ensure_future(post(client, path, body))
            await until(reached.is_set, "the request is worked on")
            await healthy(client)
            answered.set()
            assert (await asked)[0] == 200

    run(ask)


@pytest.mark.parametrize("requests", [1, 16])
def test_pieces_of_many_answers_that_are_there_leave_turns_to_others(monkeypatch, requests):
    """The pieces are of one request, and of many."""
    turns, at, plain = 0, list[int](), Form.piece

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow(self: Form, *given: Any) -> Any:
        at.append(turns)
        time.sleep(2 * work.TURN_S)
        return plain(self, *given)

    monkeypatch.setattr(Form, "piece", slow)

    async def ask() -> None:
        async with serving(await engine_of(model())) as (client, _):
            turning = asyncio.ensure_future(turn())
            asked = {"prompt": [5, 6], "n": 16 // requests, "max_tokens": 60, "ignore_eos": True, "stream": True}
            found = await asyncio.gather(*(post(client, C, asked) for _ in range(requests)))
            assert {status for status, _ in found} == {200}
            turning.cancel()
            assert len(at) >= 16 and len(set(at)) == len(at)

    run(ask)


def test_requests_that_arrive_together_begin_in_turns(monkeypatch):
    turns, at, plain = 0, list[int](), app.check_caller

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def counted(request: web.Request, *given: Any) -> None:
        if request.path != "/health":
            at.append(turns)
        plain(request, *given)

    monkeypatch.setattr(app, "check_caller", counted)
    monkeypatch.setattr(door, "MOST_WAITING", 50)

    async def ask() -> None:
        async with serving(Scripted(tokenizer())) as (client, _):
            held = [await raw(client) for _ in range(48)]
            turning = asyncio.ensure_future(turn())
            for _, writer in held:
                writer.write(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(lambda: at, "the first one begins")
            later = [await raw(client) for _ in range(24)]  # they are not in the way of those that wait for their turn
            for _, writer in later:
                writer.close()
            for reader, writer in held:
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 20)
                writer.close()
            turning.cancel()
            assert len(at) == 48 == len(set(at))

    run(ask)


def test_tokens_that_wait_for_the_event_loop_are_written_together():
    """In a chunk for each answer, and in as many as there is time for."""
    of = tokenizer()
    call = call_of(body := typed({"prompt": [5], "n": 2}, CompletionBody), body, [np.array([5])], **ROOM)
    form = CompletionForm(call=call, texts=texts_of(of), name="policy", created=0, weights={})
    answers, news = form.answers(), News()
    ids = of("what is two", add_special_tokens=False)["input_ids"]
    for i, token in ((0, ids[0]), (1, ids[0]), (0, ids[1]), (0, ids[2])):
        news.add(i, np.array([token]), np.zeros(1, np.float32))
    first, rest = (news.pieces(form, answers, 0.0) for _ in range(2))
    found = [json.loads(chunk)["choices"][0] for chunk in (*first, *rest)]
    assert (len(first), [c["index"] for c in found]) == (1, [0, 1])
    assert [c["text"] for c in found] == [of.decode(ids[:3]), of.decode(ids[:1])]


def test_health_of_an_engine_at_work_is_what_it_said_last(monkeypatch):
    """The check runs between two steps of the engine. An engine that never answers is reported."""
    held = asyncio.Event()

    class Busy(Scripted):
        async def score(self, ids: np.ndarray, **rest: Any) -> np.ndarray:
            await held.wait()
            return await Scripted.score(self, ids, **rest)

    async def ask() -> None:
        async with serving(Busy(tokenizer())) as (client, service):
            first = asyncio.ensure_future(healthy(client))
            await until(lambda: service.health is not None, "the engine is asked")
            held.set()
            await first
            held.clear()
            for _ in range(3):
                service.health_at -= 10
                await healthy(client)
            assert not service.health.done()
            service.health.cancel()
            monkeypatch.setattr(service_module, "HEALTH_TIMEOUT_S", 0.1)
            await asyncio.wait({service.health})
            service.health = None
            for wanted, age_s in ((200, 0), (503, 0), (503, 10)):
                service.health_at -= age_s
                async with client.get("/health") as answer:
                    assert answer.status == wanted
                await asyncio.wait({service.health})

    run(ask)


def test_threads_leave_the_interpreter_to_the_event_loop():
    """In a process of its own, which has fewer objects to collect than this one."""
    code = "import gc, sys; from verl.rollout.server import work; work.favour_the_event_loop(); "
    code += "assert sys.getswitchinterval() <= 0.001 and gc.get_freeze_count() > 10_000"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_no_context_holds_is_refused_before_it_is_tokenised(monkeypatch):
    """By its length, and a conversation by that of its rendering."""
    plain = Texts.encode

    def encode(self: Texts, text: str, **given: Any) -> Any:
        assert len(text) < 50_000, "it was tokenised"
        return plain(self, text, **given)

    monkeypatch.setattr(Texts, "encode", encode)
    long = "what is two " * 5_000

    async def ask() -> None:
        of = tokenizer()
        of.chat_template = of.chat_template.replace("{{ m['content'] }}", "{{ m['content'][:40] }}")
        async with serving(await engine_of(model()), of) as (client, service):
            called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": long})}}
            for path, body in (
                (C, {"prompt": long}),
                (C, {"prompt": ["x", long]}),
                ("/tokenize", {"prompt": long}),
                (H, {"messages": [*ASKED["messages"], {"role": "assistant", "content": "", "tool_calls": [called]}]}),
                (G, {"token_ids": [5] * 1_000_000}),
                (C, {"prompt": [[5] * 1_000_000]}),
            ):
                status, said = await post(client, path, body)
                assert status == 400 and json.loads(said)["error"]["code"] == "context_length_exceeded", said[:300]
            shown = {"messages": [{"role": "user", "content": long}], "max_tokens": 1}
            status, said = await post(client, H, shown)
            assert status == 400 and "which this chat template drops" in said, "what is rendered counts"
            status, said = await post(client, C, {"prompt": ["x"] * (service.options.max_sequences + 1)})
            assert status == 400 and "too_many_answers" in said

    run(ask)


MANY = [
    (C, b'{"prompt": [' + b"[]," * 200_000 + b"[]]}", "objects and lists"),
    (H, json.dumps({"messages": [{"role": "user", "content": "x"}] * 200_000}).encode(), "objects and lists"),
    (C, b'{"a": [' + b'"a",' * 700_000 + b'"a"]}', "quotes"),
    (G, json.dumps({"token_ids": [5], "request_id": "x" * 1000}).encode(), "request_id has 1000 characters"),
    (C, json.dumps({"prompt": "x", "stop": ["ab"] * 4000, "n": 128}).encode(), "4000 strings for 128 answers"),
    ("/detokenize", b'{"tokens": [' + b"5," * 2**16 + b"5]}", "at most 65,536"),
    ("/inference/v1/abort_requests", json.dumps({"request_ids": ["r"] * 20_000}).encode(), "at most 16,384"),
    (G, b'{"token_ids": [' + b"5," * (2**21 + 1) + b"5]}", "2,097,152 in one request"),
    (C, json.dumps({"prompt": '"' * 600_000}).encode(), "prompt has 600000 characters"),
    (C, b'{"prompt": "x", "colour": [' + b"5," * 1_000_000 + b"5]}", "colour=[5, 5,"),
    (C, json.dumps({"prompt": "x", "model": "m" * 100_000}).encode(), "is not here"),
    (H, json.dumps({**ASKED, "tools": json.loads("[" * 900 + "]" * 900)}).encode(), ""),
    (
        H,
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b'{"a":' * 850 + b"1" + b"}" * 850 + b"]}",
        "",
    ),
]


def test_bodies_of_too_many_parts_are_refused_in_a_line():
    async def ask() -> None:
        async with serving(await engine_of(model())) as (client, _):
            for path, body, said in MANY:
                status, answer = await post(client, path, body)
                assert 400 <= status < 500 and said in answer and len(answer) < 600, (path, status, answer[:700])
            await healthy(client)

    run(ask)


def test_a_text_is_held_back_by_its_length_where_stop_strings_are_many():
    stops = [f"{i:04}" + "x" * 40 for i in range(100)]
    pieces, said = Piecewise(lambda ids: "".join(map(chr, ids)), stops), "y" * 100 + stops[7]
    sent = "".join(pieces.add([ord(letter)]) for letter in said[:-1])
    assert said.startswith(sent) and 50 < len(sent) <= 100
    assert sent + pieces.rest(said[:100]) == said[:100]


# -- connections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY])
def test_no_body_is_inflated(key):
    class Watched:
        """zlib, unless it is used."""

        def __getattr__(self, name: str) -> Any:
            assert not name.startswith("decompress"), "a body was inflated"
            return getattr(zlib, name)

    async def ask() -> None:
        async with serving(await engine_of(model()), api_key=key) as (client, _):
            bomb = zlib.compress(b"[" * 2**24)
            for headers, wanted in (({}, 415 if key is None else 401), ({"Authorization": f"Bearer {KEY}"}, 415)):
                for encoding in ("gzip", "deflate", "br", "zstd", "identity, gzip"):
                    given = {"headers": {**headers, "Content-Encoding": encoding}}
                    async with client.post(C, data=bomb, **given) as answer:
                        assert answer.status == wanted and answer.headers["Connection"] == "close"
            head = f"POST {C} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", "Transfer-Encoding: gzip"
            reader, writer = await raw(client, *map(str.encode, head), b"", bomb)
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            plain = {"Authorization": f"Bearer {KEY}", "Content-Encoding": "identity"}
            assert (await post(client, C, {"prompt": "x", "max_tokens": 1}, headers=plain))[0] == 200

    try:
        aiohttp.set_zlib_backend(Watched())
        run(ask)
    finally:
        aiohttp.set_zlib_backend(zlib)


def test_a_head_a_body_and_a_reader_that_are_slow_have_deadlines(monkeypatch):
    monkeypatch.setattr(app, "IDLE_S", 0.3)
    monkeypatch.setattr(door, "BODY_S", 0.3)
    monkeypatch.setattr(app, "LINGER_S", 0.1)
    monkeypatch.setattr(app, "SENT_S", 0.3)

    async def ask() -> None:
        async with serving(await engine_of(model())) as (client, _):
            head = b"POST /v1/completions HTTP/1.1", b"Host: 127.0.0.1", b"Content-Length: 500"
            silent, began = await raw(client), await raw(client, *head[:2])
            body = await raw(client, *head, b"", b'{"prompt": ')
            assert b" 408 " in await asyncio.wait_for(body[0].readline(), 20)
            for reader, writer in (silent, began, body):
                await asyncio.wait_for(reader.read(), 20)
                writer.close()
            monkeypatch.setattr(web.Response, "write_eof", lambda self, data=b"": asyncio.sleep(60))
            with pytest.raises(aiohttp.ClientError):
                await client.get("/v1/models")
            monkeypatch.undo()
            await healthy(client)

    run(ask)


def test_the_oldest_of_too_many_silent_connections_makes_room(monkeypatch):
    monkeypatch.setattr(door, "MOST_WAITING", 8)

    async def ask() -> None:
        async with serving(await engine_of(model())) as (client, _):
            held = [await raw(client, b"POST /v1/completions HTTP/1.1", b"Host: x") for _ in range(24)]
            for _ in range(3):
                await healthy(client)
            for reader, _ in held[:16]:
                assert await asyncio.wait_for(reader.read(), 20) == b""
            assert not held[-1][0].at_eof()
            for _, writer in held:
                writer.close()

    run(ask)


# -- web pages ---------------------------------------------------------------------------------------------------------


def test_a_web_page_of_another_site_is_refused_where_there_is_no_key():
    """By the name that its browser sends as Host, and by its Origin."""

    async def ask() -> None:
        async with serving(await engine_of(model()), control=True) as (client, service):
            port = client._base_url.port
            own = f"127.0.0.1:{port}"
            for path, body in ((C, {"prompt": "x", "max_tokens": 1}), ("/pause", b""), ("/start_weight_update", b"{}")):
                for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "0.0.0.0"):
                    status, said = await post(client, path, body, headers={"Host": host, "Content-Type": "text/plain"})
                    assert status == 403 and "invalid_host" in said, (host, said)
                for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"http://localhost:{port}"):
                    status, said = await post(client, path, body, headers={"Host": own, "Origin": origin})
                    assert status == 403 and "invalid_origin" in said, (origin, said)
            assert not service.paused
            for host in (own, "localhost", f"LOCALHOST:{port}", "[::1]:9", "127.0.0.1"):
                for more in ({}, {"Origin": f"http://{host}"}):
                    status, said = await post(
                        client, C, {"prompt": "x", "max_tokens": 1}, headers={"Host": host, **more}
                    )
                    assert status == 200, (host, more, said)
        async with serving(await engine_of(model()), api_key=KEY) as (client, _):
            asked = {"Host": "behind.a.proxy", "Origin": "https://ui.example", "Authorization": f"Bearer {KEY}"}
            assert (await post(client, C, {"prompt": "x", "max_tokens": 1}, headers=asked))[0] == 200

    run(ask)


def test_the_control_plane_wants_a_key_everywhere():
    with pytest.raises(ValueError, match=r"serve\.control=true.*serve\.api_key"):
        check_serve(ServeConfig(control=True))
    check_serve(ServeConfig(control=True, api_key=KEY))
