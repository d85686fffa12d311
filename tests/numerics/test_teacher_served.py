"""A teacher behind a server: its outputs are those of the model in process, by the APIs of vLLM and OpenAI; missing
ones are NaN, and a server that is no teacher is refused at the start."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from each import each, matrix
from test_teacher import engine
from test_virtual_ranks import config_of, samples

from verl.algorithms.sections import split_key
from verl.batch import pack
from verl.chat import load_tokenizer
from verl.config.load import dump_config, load_config, validate
from verl.config.tree import changed
from verl.driver.assemble import offline_learner
from verl.driver.models import drawn_texts
from verl.model_engine.base import EngineContext, ServedAt
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.served import OUTPUTS, PROBE_EVERY, ServedModel, Unanswered, _bytes, build, read_prompt_logprobs

K = 5
VOCAB = 64
OTHER: list[Any] = []
"""For an answer of another kind."""
Change = Callable[[list[int], list[Any]], Any]


class Stand:
    """A server of a folder. paths: that it has · change: what it makes of an answer about these ids · room: tokens."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = load_causal_lm(folder).double(), load_tokenizer(folder, trust_remote_code=False)
        self.paths = {"/v1/models", "/tokenize", "/inference/v1/generate", "/v1/completions"}
        self.change: Change = lambda ids, found: found
        self.room, self.shift, self.asked = 256, 0, list[str]()
        self.key = ""  # that it wants
        self.echoes = False  # in place of prompt_logprobs, which it does not know
        self.before = 0  # tokens that it puts before a prompt
        self.cut = ""  # its errors' bodies: reset, or stalled until `released`
        self.released = threading.Event()
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "t", "max_model_len": self.room}]}
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return {"tokens": [i + self.shift for i in ids]}
        tokens_in = path.endswith("generate")
        ids = body["token_ids"] if tokens_in else body["prompt"]
        wanted = body["sampling_params"] if tokens_in else body
        assert wanted["max_tokens"] == 1 and wanted["temperature"] == 0
        if self.echoes:
            return self.echo(ids, wanted)
        found = {"prompt_logprobs": self.change(ids, self.said(ids, wanted["prompt_logprobs"]))}
        if found["prompt_logprobs"] is OTHER:
            return ["no completion"]
        return found if tokens_in else {"choices": [found]}

    def echo(self, ids: list[int], wanted: dict[str, Any]) -> Any:
        """As OpenAI's completions were: the prompt's log-probs and that of the token drawn behind it."""
        assert wanted.get("logprobs", 0) == 0
        whole, there = [1] * self.before + ids, wanted.get("echo", False)
        said = self.change(whole, self.said(whole, 0))
        told = [row and row[str(i)]["logprob"] for i, row in zip(whole, said)] * there + [-0.5]
        texts = [self.tokenizer.decode([i]) for i in whole] * there + ["?"]
        named = {"tokens": texts, "token_logprobs": told, "top_logprobs": None, "text_offset": []}
        return {
            "choices": [{"text": "".join(texts), "logprobs": named if "logprobs" in wanted else None}],
            "usage": {"prompt_tokens": len(whole), "completion_tokens": 1},
        }

    def said(self, ids: list[int], k: int) -> list[Any]:
        with torch.no_grad(), self.lock:
            logp = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        out: list[Any] = [None]
        for row, token in zip(logp, ids[1:]):
            named = {*row.topk(k).indices.tolist(), token}
            out.append({str(i): {"logprob": float(row[i]), "rank": None, "decoded_token": None} for i in named})
        return out


@pytest.fixture
def stand(tiny_teacher) -> Iterator[tuple[Stand, str]]:
    made = Stand(tiny_teacher)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            made.asked.append(self.path)
            status, found = (200, None) if self.path in made.paths else (404, None)
            if made.key and self.headers["Authorization"] != f"Bearer {made.key}":
                status = 401
            try:
                found = made.answer(self.path, body) if status == 200 else {"error": "no such path"}
            except ZeroDivisionError:
                status, found = 500, {"error": "it fell over"}
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if status == 200 or not made.cut:
                self.wfile.write(data)
            elif made.cut == "stalled":
                self.wfile.flush()
                made.released.wait(600)
            else:  # closed with a reset
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.wfile.flush()
                self.connection.close()

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def served(url: str, folder: Path, *, top: bool = True, longest: int = 64, **more: Any) -> ServedModel:
    texts = tuple(drawn_texts(load_tokenizer(folder, trust_remote_code=False), texts=20))
    options = ServedAt(url=url, longest=longest, vocab=VOCAB, texts=texts, top=top, timeout_s=30.0, parallel=4, **more)
    return build(options, EngineContext(folder=folder, top_k=K))


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_it_says_what_the_model_says(path, stand, tiny_teacher):
    made, url = stand
    made.paths -= {"/inference/v1/generate", "/v1/completions"} - {path}
    model, batch = served(url, tiny_teacher), pack(samples(0))
    names = ("logprobs", "topk_ids", "topk_logprobs")
    found, expected = model.infer(batch, names), engine(tiny_teacher, top_k=K).infer(batch, names)
    assert found.keys() == {*names} and torch.equal(found["topk_ids"], expected["topk_ids"])
    for name in ("logprobs", "topk_logprobs"):
        torch.testing.assert_close(found[name], expected[name].float(), rtol=1e-5, atol=1e-5)
    assert model.infer(batch, ("logprobs",)).keys() == {"logprobs"}
    assert made.asked.count("/tokenize") == 20 and path in made.asked
    assert not model.capabilities.trains


def test_a_server_that_echoes_says_what_the_model_says(stand, tiny_teacher):
    """It has no prompt_logprobs; its likeliest tokens are given as texts, which are no ids."""
    made, url = stand
    made.paths.discard("/inference/v1/generate")
    made.echoes, batch = True, pack(samples(0))
    model = served(url, tiny_teacher, top=False)
    found, expected = (m.infer(batch, ("logprobs",))["logprobs"] for m in (model, engine(tiny_teacher)))
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="names the likeliest tokens by their text.*set algorithm.name=opd"):
        served(url, tiny_teacher)
    made.before = 1
    with pytest.raises(ValueError, match="no prompt_logprobs of 24 tokens"):
        served(url, tiny_teacher, top=False)
    with pytest.raises(Unanswered, match="a prompt of 4 tokens, where 3 were sent"):
        model.score(np.array([1, 5, 6]))


def broken(kind: str, row: dict[str, Any], ids: list[int]) -> Any:
    last = str(ids[-1])
    if kind == "nan":
        row[last]["logprob"] = float("nan")
    elif kind == "-inf":
        row[last]["logprob"] = float("-inf")
    elif kind == "missing":
        del row[last]
    elif kind == "few":
        return {last: row[last]}
    return row


@each("kind", ["nan", "-inf", "missing", "few", "short", "none", "error", "other"])
def test_a_row_that_it_fails_on_has_no_number_and_the_others_do(kind, stand, tiny_teacher, caplog):
    made, url = stand
    model, rows = served(url, tiny_teacher), samples(0)
    bad = np.concatenate([s.ids for s in rows[5].segments]).tolist()

    def change(ids: list[int], found: list[Any]) -> Any:
        if ids != bad:
            return found
        if kind == "error":
            raise ZeroDivisionError
        if kind == "other":
            return OTHER
        if kind in ("short", "none"):
            return found[:-1] if kind == "short" else None
        return [*found[:-1], broken(kind, found[-1], ids)]

    made.change, batch = change, pack(rows)
    found = model.infer(batch, ("logprobs", "topk_logprobs"))
    finite = torch.isfinite(found["topk_logprobs"]).all(-1) & torch.isfinite(found["logprobs"])
    per_row = [bool(finite[a:b].all()) for a, b in zip(batch.row_start, batch.row_start[1:])]
    assert per_row == [i != 5 for i in range(len(rows))]
    assert ("Invalid while it lasts" in caplog.text) == (kind not in ("nan", "-inf"))


@pytest.mark.parametrize("cut", ["stalled", "reset"])
def test_an_error_whose_reason_never_comes_costs_its_row(cut, stand, tiny_teacher, caplog):
    made, url = stand
    model, rows = served(url, tiny_teacher), samples(0)[:3]
    bad = np.concatenate([s.ids for s in rows[1].segments]).tolist()
    model.infer(pack([rows[0], rows[2]]), ("logprobs",))  # known from here on, however busy this machine is
    model._options = replace(model._options, timeout_s=2.0 if cut == "stalled" else 30.0)
    made.cut, made.change = cut, lambda ids, found: 1 / 0 if ids == bad else found
    batch = pack(rows)
    try:
        found = model.infer(batch, ("logprobs",))["logprobs"]
    finally:
        made.released.set()
    per_row = [bool(found[a:b].isfinite().all()) for a, b in zip(batch.row_start, batch.row_start[1:])]
    assert per_row == [True, False, True] and "Invalid while it lasts" in caplog.text


def test_a_server_that_is_gone_says_nothing(stand, tiny_teacher):
    made, url = stand
    model = served(url, tiny_teacher)
    model._url = "http://127.0.0.1:9"
    assert not torch.isfinite(model.infer(pack(samples(0)[:2]), ("logprobs",))["logprobs"]).any()


def behind(ids: list[int], found: list[Any]) -> list[Any]:
    """Start a server of a model that reads later tokens, or another context."""
    return [row and {i: {"logprob": of["logprob"] - 0.3 * (len(ids) % 5)} for i, of in row.items()} for row in found]


REFUSED: list[tuple[str, Callable[[Stand], None], str]] = [
    ("no path", lambda s: s.paths.clear(), r"cannot be a teacher.*HTTP 404.*as `verl serve` and vLLM do"),
    ("no tokens", lambda s: s.paths.discard("/tokenize"), r"/tokenize: HTTP 404"),
    ("words", lambda s: setattr(s, "shift", 1), r"its tokenizer reads '.*' as \[.*the policy's as \["),
    ("room", lambda s: setattr(s, "room", 64), r"reads 64 tokens, rows have 64 and one more"),
    ("silent", lambda s: setattr(s, "change", lambda ids, found: None), r"no prompt_logprobs of 24 tokens"),
    (
        "few",
        lambda s: setattr(s, "change", lambda ids, f: [r and dict([*r.items()][:2]) for r in f]),
        "teacher.top_k=5",
    ),
    ("context", lambda s: setattr(s, "change", behind), r"differ by 0\.\d+ with what comes behind them"),
    ("nan", lambda s: setattr(s, "change", lambda ids, f: [r and {i: {"logprob": "x"} for i in r} for r in f]), "x"),
]


@pytest.mark.parametrize("kind, change, said", REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_a_server_that_is_no_teacher_is_refused_at_the_start(kind, change, said, stand, tiny_teacher):
    made, url = stand
    change(made)
    with pytest.raises(ValueError, match=said):
        served(url, tiny_teacher)


def test_what_is_left_of_1_is_the_others():
    row = {"7": {"logprob": np.log(0.5)}, "3": {"logprob": np.log(0.25)}, "9": {"logprob": np.log(0.125)}}
    found = read_prompt_logprobs([None, row], np.array([1, 9]), 2, 10)
    assert found["topk_ids"].tolist() == [[7, 3]]
    assert found["topk_logprobs"].exp()[0].tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert float(found["logprobs"].exp()) == pytest.approx(0.125)
    whole = {"7": {"logprob": np.log(0.5)}, "3": {"logprob": np.log(0.5)}}
    assert read_prompt_logprobs([None, whole], np.array([1, 3]), 2, 10)["topk_logprobs"][0, -1] < -16
    with pytest.raises(Unanswered, match="of which the first has none"):
        read_prompt_logprobs([row, row], np.array([1, 9]), 2, 10)
    with pytest.raises(Unanswered, match="token 7 is among the likeliest, and the policy has 7: take a teacher whose"):
        read_prompt_logprobs([None, row], np.array([1, 9]), 2, 7)
    assert read_prompt_logprobs([None, row], np.array([1, 9]), 0, 7)["topk_ids"].shape == (1, 0)


def test_other_temperatures_are_refused(stand, tiny_teacher):
    _, url = stand
    batch = pack(samples(0)[:1])
    with pytest.raises(ValueError, match=r"scores at temperature 1: set teacher\.temperature=1"):
        served(url, tiny_teacher).infer(batch.with_row_columns({"temperature": torch.full((1,), 0.7)}), ("logprobs",))


@matrix("name", ["opd", "gkd_topk"])
def test_a_turn_with_it_is_a_turn_with_the_folder(name, stand, tiny_model, tiny_teacher):
    from test_several_teachers import one_turn

    made, url = stand
    made.room, said = 4096, []
    for path in (str(tiny_teacher), url):
        config = config_of(name, tiny_model, tiny_teacher, 1, 64)
        config = changed(config, {"teacher.path": path})
        step, _, _ = one_turn(config, samples(0))
        said.append({n: m.value for n, m in step.metrics.items() if n.startswith(("actor/", "teacher/"))})
    assert said[1].pop("teacher/cache_hits") == 0 and said[1] == pytest.approx(said[0], rel=1e-4, abs=1e-5)


@matrix("given, share", [((1, False), 3), ((1, True), 2), ((0, False), 2)])
def test_a_step_that_waits_for_two_calls_hears_of_both_in_time(given, share, stand, tiny_model):
    config = config_of("opd", tiny_model, tiny_model, 1, 64)
    stand[0].room, (staleness, deterministic) = 4096, given
    own = {"teacher.path": stand[1], "pipeline.staleness": staleness, "run.deterministic": deterministic}
    config = changed(config, own)
    learner = offline_learner(config, 1, tiny_model)
    try:
        (role,) = learner.models["teacher"]._group._workers
        assert role.engine._options.budget_s == config.run.wait_timeout_s / share
    finally:
        learner.close()


def test_what_a_server_cannot_be(tiny_model, arithmetic_data):
    base = [f"model.path={tiny_model}", f"data.train_files=[{arithmetic_data[0]}]", "teacher.path=http://127.0.0.1:9"]
    for more, said in (
        (["algorithm.name=gkd"], "a server gives no hidden states; set algorithm.name=gkd_topk or opd"),
        (["algorithm.name=opd", "rollout.temperature=0.7"], "servers score at temperature 1, and 0.7 is asked for"),
    ):
        with pytest.raises(ValueError, match=said):
            validate(load_config([*base, *more]).config)


def test_a_server_that_wants_a_key(stand, tiny_model, tiny_teacher, tmp_path, monkeypatch):
    """The key is in the URL, from the environment; no written or printed text contains it."""
    made, url = stand
    made.key, secret = "sk-not-for-you", "sk-not-for-you"
    with pytest.raises(ValueError, match="HTTP 401"):
        served(url, tiny_teacher)
    monkeypatch.setenv("TEACHER_KEY", secret)
    with_key = url.replace("http://", "http://:${oc.env:TEACHER_KEY}@")
    base = [f"model.path={tiny_model}", "algorithm.name=opd", "data.train_files=[x.jsonl]"]
    found = load_config([*base, f"teacher.path='{with_key}'"])
    assert secret in str(found.config.teacher.path) and secret not in dump_config(found)
    assert "oc.env:TEACHER_KEY" in dump_config(found)
    bare, key = split_key(str(found.config.teacher.path))
    assert (bare, key) == (url, secret) and split_key(url) == (url, "") and split_key("a@b/c") == ("a@b/c", "")
    assert split_key("https://user:a%40b@host:1/x?y=1") == ("https://host:1/x?y=1", "a@b")
    for odd in ("a/b?c#d%41", "e@f", "9"):  # as it came from the environment
        assert split_key(f"http://:{odd}@host:1/x") == ("http://host:1/x", odd)
    assert split_key("http://:8000/v1") == ("http://:8000/v1", "")
    model = served(bare, tiny_teacher, key=key)
    assert not model.infer(pack(samples(0)[:1]), ("logprobs",))["logprobs"].isnan().any()
    assert secret not in repr(model._options)
    for more in (["algorithm.name=gkd"], ["rollout.temperature=0.7"], ["algorithm.name=grpo"]):
        with pytest.raises(ValueError) as told:
            validate(load_config([*base, f"teacher.path='{with_key}'", *more]).config)
        assert "teacher.path=http://127.0.0.1" in str(told.value) and secret not in str(told.value)


def test_a_turn_with_a_key_in_the_url(stand, tiny_model, tiny_teacher):
    from test_several_teachers import one_turn

    made, url = stand
    made.room, made.key = 4096, "sk-not-for-you"
    config = config_of("opd", tiny_model, tiny_teacher, 1, 64)
    config = changed(config, {"teacher.path": url.replace("http://", f"http://:{made.key}@")})
    step, _, _ = one_turn(config, samples(0))
    assert step.metrics["teacher/invalid"].value == 0 and step.metrics["teacher/cache_hits"].value == 0


def test_it_is_not_asked_for_rows_that_nobody_teaches(stand, tiny_teacher):
    """And of rows that it fails on the ids differ, as those do of which log-probs are read beside the drawn token's."""
    made, url = stand
    rows, names = samples(0)[:4], ("logprobs", "topk_ids", "topk_logprobs")
    model, asked = served(url, tiny_teacher), len(made.asked)
    batch = pack([replace(s, taught=i % 2 == 0) for i, s in enumerate(rows)])
    found, whole = model.infer(batch, names), model.infer(pack(rows), names)
    assert len(made.asked) - asked == 2 + 2 and all(found[n].isfinite().all() for n in ("logprobs", "topk_logprobs"))
    taught = torch.from_numpy(batch.row_of.numpy() % 2 == 0)
    for name in names:
        assert torch.equal(found[name][taught], whole[name][taught])
    made.change = lambda ids, found: 1 / 0
    silent = served_after(model).infer(pack(rows), names)
    for ids in (found["topk_ids"], silent["topk_ids"]):
        assert all(len({*row}) == K for row in ids.tolist())
    assert silent["logprobs"].isnan().all() and silent["topk_logprobs"].isnan().all()


def served_after(model: ServedModel) -> ServedModel:
    """The same connection, with an empty cache."""
    model._kept.clear()
    return model


def test_what_was_said_of_a_row_is_known(stand, tiny_teacher):
    """A cached row is bitwise the server's answer, without a request. A failed row is requested again, and the least
    recently used row is dropped."""
    made, url = stand
    model, rows = served(url, tiny_teacher), samples(0)[:4]
    names = ("logprobs", "topk_ids", "topk_logprobs")
    made.change = lambda ids, found: 1 / 0 if len(ids) == len(whole[0]) else found
    whole = [np.concatenate([s.ids for s in row.segments]) for row in rows]
    failing = sum(len(ids) == len(whole[0]) for ids in whole)
    model.take_metrics()
    first = model.infer(pack(rows), names)
    assert model.take_metrics()["cache_hits"].value == 0 and model.take_metrics() == {}
    made.change, asked = (lambda ids, found: found), len(made.asked)
    again = model.infer(pack(rows), names)
    assert len(made.asked) - asked == failing and model.take_metrics()["cache_hits"].value == 1 - failing / 4
    there = ~first["logprobs"].isnan()
    assert there.any() and not again["logprobs"].isnan().any()
    for name in names:
        assert torch.equal(first[name][there], again[name][there])
    prompt, drawn = rows[1].segments
    alike = [replace(rows[1], segments=(prompt, replace(drawn, ids=(drawn.ids + k) % 15 + 4))) for k in range(3)]
    small = served(url, tiny_teacher, cache_mb=2.5 * _bytes(model.score(whole[1])) / 2**20)
    for k in (0, 1, 0, 2, 0):  # the first is read again and again: the second makes room for the third
        small.infer(pack(alike[k : k + 1]), names)
        assert sum(map(_bytes, small._kept.values())) == small._kept_bytes <= small._options.cache_mb * 2**20
    assert small.take_metrics()["cache_hits"].value == 2 / 5 and len(small._kept) == 2


def test_a_server_that_accepts_and_hangs_costs_the_rows_that_it_did_not_answer(stand, tiny_teacher):
    """One time for all rows of a call, whatever one answer and a second try may take: the driver's wait is longer."""
    made, url = stand
    released, rows = threading.Event(), samples(0)
    model = served(url, tiny_teacher)
    model._options = replace(model._options, timeout_s=900.0, budget_s=5.0, parallel=2)
    whole = [np.concatenate([s.ids for s in row.segments]).tolist() for row in rows]
    hangs = [ids != whole[0] for ids in whole]
    made.change = lambda ids, found: found if ids == whole[0] else released.wait(600) and found
    said: Future[Any] = Future()
    threading.Thread(target=lambda: said.set_result(model.infer(pack(rows), OUTPUTS)), daemon=True).start()
    try:
        found = said.result(120)["logprobs"]
        batch = pack(rows)
        per_row = [bool(found[a:b].isnan().all()) for a, b in zip(batch.row_start, batch.row_start[1:])]
        assert per_row == hangs and not found[: batch.row_start[1]].isnan().any()
    finally:
        released.set()
    made.change = lambda ids, found: found
    assert not model.infer(pack(rows[-1:]), ("logprobs",))["logprobs"].isnan().any()


DRIPS = """
import sys
import numpy as np
from verl.batch import pack
from verl.model_engine.base import ServedAt
from verl.model_engine.served import ServedModel
from verl.types import Sample, Segment
drawn = Segment(ids=np.array([5, 6]), source="sampled", logprobs=np.zeros(2, np.float32), version=0)
row = (Segment(ids=np.array([1, 4]), source="prompt"), drawn)
sample = Sample(sample_id="s", trajectory_id="t", group_id="g", purpose="train", segments=row, reward=1.0)
model = ServedModel(ServedAt(url=sys.argv[1], longest=9, vocab=9, texts=(), budget_s=1.0), 0, 64)
print(model.infer(pack([sample]), ("logprobs",))["logprobs"].isnan().all())
"""


@pytest.mark.slow
def test_a_server_that_drips_holds_no_process_at_its_end():
    """A byte now and then, in the head of an answer where no limit of ours is looked at: for as long as it lives."""
    ended = threading.Event()

    class Drip(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
            while not ended.wait(0.2):
                self.wfile.write(b".")

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Drip)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [sys.executable, "-c", DRIPS, f"http://127.0.0.1:{server.server_port}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
    assert done.returncode == 0 and done.stdout.split() == ["tensor(True)"], done.stderr


def test_a_body_that_drips_ends_with_the_time_of_its_answer(stand, tiny_teacher, monkeypatch):
    made, url = stand
    model, clock = served(url, tiny_teacher), iter(range(0, 10**6, 40))
    monkeypatch.setattr("verl.model_engine.served.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(Unanswered, match="TimeoutError: the answer did not end in time"):
        model.score(np.array([1, 5, 6]))


def test_one_of_two_that_hangs_costs_its_own_rows(stand, tiny_model, tiny_teacher):
    """And what it may take for a step is less than the driver waits for it."""
    from test_several_teachers import one_turn, rows, several

    made, url = stand
    made.room, released = 4096, threading.Event()
    config = several("opd", tiny_model, {"a": tiny_teacher, "b": url})
    config = changed(config, {"pipeline.max_invalid_share": 0.6})

    def hang(learner) -> None:
        made.change = lambda ids, found: released.wait(600) and found
        engine = learner.models["teacher"]._members["b"]._group._workers[0].engine
        assert learner.models["teacher"].places - learner.models["actor"].places == {"teacher_b"}, (
            "on no device of ours"
        )
        assert engine._options.budget_s < learner.models["teacher"]._timeout_s < config.run.wait_timeout_s
        engine._options = replace(engine._options, budget_s=0.5)

    try:
        step, refs, _ = one_turn(config, rows(), hang)
    finally:
        released.set()
    gone = {r.sample_id for r in refs if r.teacher == "b"}
    assert step.metrics["teacher/invalid"].value == len(gone) / len(refs) and step.metrics["actor/grad_norm"].value > 0
    assert {r.sample_id for r in step.trained if r.outcome == "invalid"} >= gone


@pytest.mark.parametrize("kind", ["tokenizer", "model", "silent"])
def test_another_model_behind_the_address_is_seen_and_its_rows_are_invalid(kind, stand, tiny_teacher, caplog):
    """Every so many calls, by one text; until it is the old one again."""
    made, url = stand
    model, batch, calls = served(url, tiny_teacher), pack(samples(0)[:2]), len(made.asked)
    for _ in range(PROBE_EVERY - 1):
        assert not model.infer(batch, ("logprobs",))["logprobs"].isnan().any()
    assert len(made.asked) - calls == 2 and "/tokenize" not in made.asked[calls:]
    if kind == "tokenizer":
        made.shift = 1
    elif kind == "model":
        made.change = behind
    else:
        made.paths.discard("/tokenize")  # without an answer it counts as unchanged: its rows are used
    for _ in range(2):
        assert bool(model.infer(batch, ("logprobs",))["logprobs"].isnan().all()) == (kind != "silent")
    said = {"tokenizer": r"its tokenizer reads '.*' as \[", "model": r"of the same tokens differ by \d", "silent": "^$"}
    assert re.search(said[kind], caplog.text) and (url in caplog.text) == (kind != "silent")
    made.shift, made.change = 0, lambda ids, found: found
    made.paths.add("/tokenize")
    assert not model.infer(batch, ("logprobs",))["logprobs"].isnan().any()


def test_what_another_model_said_before_it_was_seen_is_forgotten(stand, tiny_teacher, caplog):
    """Verified answers are kept; an answer from that time that arrives later is not cached."""
    made, url = stand
    model, rows = served(url, tiny_teacher), samples(0)
    batches = [pack(rows[i : i + 1]) for i in range(4)]
    true = [served(url, tiny_teacher).infer(batch, ("logprobs",))["logprobs"] for batch in batches]

    def said(i: int) -> torch.Tensor:
        return model.infer(batches[i], ("logprobs",))["logprobs"]

    for _ in range(PROBE_EVERY):
        assert torch.equal(said(0), true[0])
    made.change = behind
    for call in range(1, PROBE_EVERY):
        i = 1 + call % 3
        assert not torch.equal(said(i), true[i])
    era = model._era
    for calls in (PROBE_EVERY, 0):
        caplog.clear()
        assert said(1).isnan().all()
        assert (f"in {calls} calls before this one" in caplog.text) == (calls > 0)
    made.change = lambda ids, found: found
    model._row(np.concatenate([s.ids for s in rows[1].segments]), np.inf, era)
    asked = len(made.asked)
    for i, wanted in enumerate(true):
        assert torch.equal(said(i), wanted)
    assert made.asked[asked:].count("/tokenize") == 1 and len(made.asked) - asked == 2 + 3, "the first row was known"
