"""The report and its live server: self-contained, bounded, and safe whatever the samples hold."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from each import each

from verl.report.data import RunReader, series, summary, thin, time_ledger
from verl.report.live import LiveServer
from verl.report.page import json_in_script, render_page, write_report
from verl.report.samples import (
    HEAD_TOKENS,
    LIMITS,
    TAIL_TOKENS,
    _column,
    choose_groups,
    evenly_spaced,
    find_decoder,
    token_pieces,
)
from verl.show import _runs
from verl.track.events import EventLog
from verl.track.metrics import MetricLine, MetricsLog
from verl.track.samples import SampleRow, samples_path, write_samples

HOSTILE = '</script><script>document.title="pwned"</script><img src=x onerror="alert(1)"><!-- {{data}} & \u2028 \ud83d'


def sample(step, group, index, tokens=12, text="it is 4", **changes):
    row = SampleRow(
        step=step,
        sample_id=f"s{step}-{group}-{index}#0",
        trajectory_id=f"s{step}-{group}-{index}",
        group_id=f"s{step}-{group}",
        task_id=str(group),
        purpose="train",
        prompt_text=f"question {group}?",
        response_text=text,
        prompt_ids=np.arange(4),
        response_ids=np.arange(tokens),
        response_mask=np.ones(tokens, np.uint8),
        tokens={
            "rollout_logprobs": np.linspace(-2, 0, tokens, dtype=np.float32),
            "old_logprobs": np.linspace(-2, 0.01, tokens, dtype=np.float32),
            "advantages": np.full(tokens, index - 1.5, np.float32),
        },
        reward=float(index % 2),
        components={"acc": 1.0},
    )
    return dataclasses.replace(row, **changes)


def make_run(folder, steps=6, text="it is 4", **changes):
    sink = MetricsLog(folder, 0, clock=lambda: 1000.0)
    for step in range(steps + 1):
        values = {
            "critic/score/mean": 0.1 * step,
            "timing_s/rollout": 2.0,
            "timing_s/other": 0.5,
            "perf/time_per_step": 2.5,
        }
        if step % 3 == 0:
            values["eval/acc/greedy"] = 0.3 + 0.05 * step
        if step == 4:
            values["mismatch/k3"] = 0.2
            values["actor/grad_norm"] = float("nan")
        sink.log(step, values)
    sink.close()
    for step in range(1, steps + 1):
        write_samples(folder, step, [sample(step, g, i, text=text, **changes) for g in range(3) for i in range(4)])
    for step in (0, steps):
        write_samples(folder, step, [sample(step, g, 0, purpose="eval", text=text) for g in range(5)], "eval")
    (folder / "config.yaml").write_text(f"run:\n  name: {json.dumps(text)}\nalgorithm:\n  name: grpo\n")
    log = EventLog(folder, 0)
    log.append("resumed", 1, {"told": ["code sandbox of rewards: bubblewrap"]})
    log.append("alarm", 2, {"level": "warn", "name": "canary", "message": text, "metric": ""})
    log.close()
    return folder


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1])


def test_the_report_is_one_file_that_asks_for_nothing(tmp_path):
    path = write_report(make_run(tmp_path))
    page = path.read_text()
    assert path == tmp_path / "report.html" and "{{" not in page.replace("${", "")
    urls = set(re.findall(r"https?://[^\s\"'`<>)]+", page))
    assert urls == {"http://www.w3.org/2000/svg"}, "a name space, not a request"
    assert not re.findall(r"<(?:link|img|iframe|object|embed)\b|\bsrc=|@import|url\(", page)
    assert "default-src 'none'" in page and "connect-src 'none'" in page
    for href in re.findall(r'href="([^"]*)"', page):
        assert href.startswith("#")


def test_the_report_holds_what_the_run_did(tmp_path):
    data = data_of(write_report(make_run(tmp_path)).read_text())
    assert data["run"]["name"] == "it is 4" and data["run"]["steps"] == 6
    sandbox = {"label": "code sandbox of rewards", "key": "at the start", "value": "bubblewrap"}
    assert data["highlights"] == [{"label": "algorithm", "key": "algorithm.name", "value": "grpo"}, sandbox]
    accuracy = data["summary"][0]
    assert (accuracy["before"], accuracy["after"], accuracy["better"]) == (0.3, 0.6, "up")
    assert data["series"]["eval/acc/greedy"]["x"] == [0, 3, 6]
    assert data["series"]["actor/grad_norm"] == {"x": [4], "y": [None]}
    assert data["time"]["phases"] == ["rollout", "other"] and data["time"]["totals"] == [14.0, 3.5]
    assert [(a["name"], a["first"], a["last"]) for a in data["alarms"]] == [
        ("canary", 2, 2),
        ("gradient_not_finite", 4, 4),
        ("mismatch_warn", 4, 4),
    ]
    files = {(f["kind"], f["step"]): f for f in data["samples"]["files"]}
    assert set(files) == {("train", s) for s in range(1, 7)} | {("eval", 0), ("eval", 6)}
    row = files["train", 6]["groups"][0]["rows"][3]
    assert row["adv"] == 1.5 or row["adv"] in (-1.5, -0.5, 0.5)
    assert len(row["lp"]) == 12 and row["mask"] == 1 and row["gap"][-1] == 0.01


def test_hostile_strings_stay_text(tmp_path):
    make_run(tmp_path, steps=2, text=HOSTILE)
    page = write_report(tmp_path).read_text()
    assert page.count("</script>") == 3 and page.count("<script") == 3
    assert "<img" not in page and 'onerror="alert' not in page
    assert "\u2028" not in page[page.index('<script id="data"') :]
    assert "<title>&lt;/script&gt;" in page
    data = data_of(page)
    shown = HOSTILE.replace("\ud83d", "?")
    assert data["samples"]["files"][0]["groups"][0]["rows"][0]["text"] == shown
    assert json.loads(json_in_script({"a": HOSTILE.encode("utf-8", "replace").decode()})) == {"a": shown}


def other_columns(path):
    pq.write_table(pa.table({"sample_id": [1, 2], "components": ["{", "{"]}), path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def dangling(path):
    path.unlink()
    path.symlink_to(path.with_name("gone.parquet"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder_of(path):
    path.unlink()
    path.mkdir()


@each(
    "damage",
    [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"PAR1"), cut, other_columns, dangling, pipe, folder_of],
)
def test_a_damaged_file_of_samples_costs_that_file_and_is_named_once(tmp_path, damage):
    make_run(tmp_path)
    path = samples_path(tmp_path, 3)
    damage(path)
    noted = []
    reader = RunReader(tmp_path, noted.append)
    for _ in range(2):
        steps = [file["step"] for file in reader.payload()["samples"]["files"] if file["kind"] == "train"]
        assert steps == [1, 2, 4, 5, 6]
    assert len(noted) == 1 and str(path) in noted[0] and "\n" not in noted[0]


def test_other_damaged_files_cost_themselves_and_a_trained_run_has_not_failed(tmp_path, capsys):
    make_run(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "tokenizer.json").write_text("{")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("junk\n" + '{"step":6,"attempt":0,"time_s":1,"loss":0.25}\n')
    samples_path(tmp_path, 2).write_bytes(b"x")
    _runs([str(tmp_path)])
    found = capsys.readouterr()
    for name in ("config.yaml", "tokenizer.json", "metrics.jsonl", "step_000002.parquet"):
        assert len([line for line in found.err.splitlines() if name in line]) == 1, found.err
    assert "report: " in found.out and data_of((tmp_path / "report.html").read_text())["run"]["steps"] == 6


def test_the_page_is_bounded_and_says_so(tmp_path):
    many = HEAD_TOKENS + TAIL_TOKENS + 300
    rng = np.random.default_rng(0)
    noise = {
        name: rng.normal(size=many).astype(np.float32)
        for name in ("rollout_logprobs", "old_logprobs", "advantages", "entropy")
    }
    sink = MetricsLog(tmp_path, 0)
    sink.log(2, {"critic/score/mean": 0.5})
    sink.close()
    for step in (1, 2):
        rows = [sample(step, g, i, tokens=many, text="x" * 40000) for g in range(24) for i in range(4)]
        rows = [dataclasses.replace(row, tokens=noise) for row in rows]
        write_samples(tmp_path, step, rows)
    path = write_report(tmp_path)
    data = data_of(path.read_text())
    size = sum(len(json.dumps(f["groups"])) for f in data["samples"]["files"])
    assert 2_000_000 < size <= LIMITS["train"].total_bytes and path.stat().st_size < 8_000_000
    row = data["samples"]["files"][0]["groups"][0]["rows"][0]
    assert row["cut"] == {"at": HEAD_TOKENS, "left_out": 300} and len(row["ids"]) == many - 300
    assert "characters left out" in row["text"] and len(row["text"]) < 6200
    assert "from 2 of 2 steps" in data["samples"]["note"] and "first 900 and last 300 tokens" in data["samples"]["note"]
    assert {f["step"] for f in data["samples"]["files"]} == {1, 2}


def test_many_steps_and_samples_of_a_past_attempt(tmp_path):
    sink = MetricsLog(tmp_path, 0)
    sink.log(30, {"critic/score/mean": 0.5})
    sink.close()
    for step in range(1, 41):
        write_samples(tmp_path, step, [sample(step, 0, 0)])
    shown = [f["step"] for f in RunReader(tmp_path).payload()["samples"]["files"]]
    assert len(shown) == 12 and shown[0] == 1 and shown[-1] == 30


def test_groups_are_spread_over_the_rewards_and_eval_tasks_stay_the_same():
    rows = [
        {"group_id": f"g{g}", "sample_id": f"{g}-{i}", "task_id": str(g), "reward": g / 10}
        for g in range(11)
        for i in range(2)
    ]
    chosen = choose_groups(rows, 3, 16, by_reward=True)
    assert [ids[0].split("-")[0] for ids in chosen] == ["10", "0", "5"]
    rows.append({"group_id": "bad", "sample_id": "bad-0", "task_id": "x", "reward": float("nan")})
    assert choose_groups(rows, 2, 16, by_reward=True)[1] == ["bad-0"]
    assert [ids[0] for ids in choose_groups(rows, 3, 1, by_reward=False)] == ["0-1", "1-1", "2-1"]
    assert choose_groups([], 3, 16, by_reward=True) == choose_groups([], 3, 16, by_reward=False) == []
    assert evenly_spaced(range(100), 3) == [0, 50, 99] and evenly_spaced([1, 2], 5) == [1, 2]


def make_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"he": 256, "llo": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_numbers_of_tokens_keep_four_digits():
    keep = np.arange(7)
    values = np.array([-1.23456, 0, np.nan, 12345.6, 1e-9, -np.inf, 0.1], np.float32)
    assert _column(values, keep) == [-1.235, 0.0, None, 12350.0, 1e-9, None, 0.1]
    assert _column(np.full(9, 0.3, np.float32), keep) == 0.3 and _column(None, keep) is None
    assert _column(np.array([1, 0, 1, 1, 1, 1, 1], np.uint8), keep) == [1, 0, 1, 1, 1, 1, 1]
    rng = np.random.default_rng(0)
    many = (rng.normal(size=2000) * 10.0 ** rng.integers(-9, 6, 2000)).astype(np.float32)
    assert all(
        short == float(f"{short:.4g}") and short == pytest.approx(v, rel=6e-4)
        for short, v in zip(_column(many, np.arange(2000)), many.tolist())
    )


def test_tokens_get_their_own_text(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "checkpoints" / "step_12" / "hf")
    decode = find_decoder(tmp_path, [])
    text = "a é 🙂\n中"
    ids = tokenizer.encode(text).ids
    pieces = token_pieces(ids, decode)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert pieces[:5] == ["a", " ", "", "é", " "] and pieces[5:9] == ["", "", "", "🙂"]
    assert token_pieces([256, 257], decode) == ["he", "llo"]
    assert "".join(token_pieces([ids[2]], decode)) == "\ufffd" and token_pieces([], decode) == []
    rows = [sample(1, 0, 0, response_ids=np.array([256, 257] * 6), text="hello" * 6)]
    write_samples(tmp_path, 1, rows)
    (tmp_path / "metrics.jsonl").write_text("")
    samples = RunReader(tmp_path).payload()["samples"]
    assert samples["decoded"] and samples["files"][0]["groups"][0]["rows"][0]["pieces"] == ["he", "llo"] * 6
    assert find_decoder(tmp_path / "nowhere", [tmp_path / "checkpoints" / "step_12" / "hf"]) is not None
    assert find_decoder(tmp_path / "nowhere", []) is None


def lines_of(name, values):
    return [MetricLine(i, 0, float(i), {name: v}) for i, v in enumerate(values)]


def test_long_curves_keep_their_spikes_and_the_time_stays_exact():
    points = [(i, 0.0) for i in range(10_000)]
    points[5000] = (5000, 9.0)
    kept = thin(points, 1000)
    assert len(kept) <= 1000 and (5000, 9.0) in kept and kept[0] == (0, 0.0) and kept[-1] == (9999, 0.0)
    assert series(lines_of("a", [0.0] * 3000), {"a": "mean per token"})["a"]["thinned"] == 3000
    ledger = time_ledger(lines_of("timing_s/update", [1.0 + (i % 7) for i in range(2000)]))
    assert ledger["totals"] == [sum(1.0 + (i % 7) for i in range(2000))] and len(ledger["bars"]) <= 180
    whole = sum(bar["parts"][0] * (bar["to"] - bar["from"] + 1) for bar in ledger["bars"])
    assert whole == pytest.approx(ledger["totals"][0], rel=1e-4)


def test_summary_compares_what_can_be_compared():
    assert summary([]) == []
    [card] = summary(lines_of("critic/score/mean", [float(i) for i in range(20)]))
    assert (card["before"], card["after"], card["note"]) == (2.0, 17.0, "mean of the first and last 5 steps")
    [card] = summary(lines_of("eval/acc/greedy", [0.5]))
    assert card["before"] is None and card["note"] == "at step 0"
    [card] = summary(lines_of("eval/openai/gsm8k/acc/greedy", [0.5, 0.25]))
    assert card["label"] == "Held-out accuracy, openai/gsm8k greedy" and card["note"].endswith("best 50.0% at step 0")


def test_a_mean_of_other_rewards_than_0_and_1_is_a_score_and_no_percentage(tmp_path):
    mean = "eval/acc/greedy"
    for records in (
        [{mean: 0.5}, {mean: 1.188}],  # as old records have it
        [{mean: 0.5, "eval/graded_share/greedy": 0.1}, {mean: 0.75}],  # once is enough
        [{mean: -1.0}, {mean: 0.5}],
    ):
        lines = [MetricLine(step, 1, 0.0, values) for step, values in enumerate(records)]
        [card, *_] = summary(lines)
        assert card["label"] == "Held-out score, greedy" and card["form"] == "number", card
        assert "%" not in card["note"] and f"best {max(r[mean] for r in records):.4g} at step 1" in card["note"]
    [card] = summary(lines_of(mean, [0.0, 1.0]))
    assert card["label"] == "Held-out accuracy, greedy" and card["form"] == "percent"
    folder = make_run(tmp_path)
    assert data_of(write_report(folder).read_text())["held_out"] == "accuracy"
    with (folder / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": 7, "attempt": 1, "time_s": 0.0, mean: 1.188}) + "\n")
    assert data_of(write_report(folder).read_text())["held_out"] == "score"


def test_an_empty_run_and_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a run directory"):
        LiveServer(tmp_path)
    (tmp_path / "config.yaml").write_text("run:\n  name: odd  # command line\n")
    data = data_of(write_report(tmp_path).read_text())
    assert data["run"]["name"] == "odd" and data["series"] == {} and data["alarms"] == []
    assert data["config"].endswith("odd  # command line\n"), "with the origins"


def get(url, host=None):
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    with server:
        yield server
        server.shutdown()
    thread.join(timeout=10)


def test_the_live_server_serves_and_follows(tmp_path):
    make_run(tmp_path, steps=2)
    with running(LiveServer(tmp_path, poll_s=0.5)) as server:
        page = get(server.url)
        live = json.loads(re.search(r'<script id="live" type="application/json">(.*?)</script>', page)[1])
        assert live["poll_s"] == 0.5 and "connect-src 'self'" in page and data_of(page)["run"]["steps"] == 2
        assert json.loads(get(server.url + "version.json")) == {"version": live["version"]}
        sink = MetricsLog(tmp_path, 0)
        sink.log(3, {"critic/score/mean": 0.9})
        sink.close()
        assert json.loads(get(server.url + "version.json"))["version"] != live["version"]
        fresh = json.loads(get(server.url + "data.json"))
        assert fresh["payload"]["run"]["steps"] == 3
        assert json.loads(get(server.url + "version.json"))["version"] == fresh["version"]
        for path in ("report.html", "../config.yaml", "config.yaml", "metrics.jsonl", "data.json?x=1", "%2e%2e/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(server.url + path)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.url, host="evil.example")
        port = int(server.url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            LiveServer(tmp_path, port)
        (tmp_path / "metrics.jsonl").write_bytes(b"{broken\n{}\n")
        assert data_of(get(server.url))["run"]["steps"] == 0, "what is damaged is left out"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass


def test_ctrl_c_stops_the_live_server(tmp_path):
    make_run(tmp_path, steps=1)
    code = f"from pathlib import Path; from verl.report.live import serve_page; serve_page(Path({str(tmp_path)!r}))"
    child = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        url = child.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:") and "Samples" in get(url)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=10) == 0 and child.stdout.read() == "stopped\n"
    finally:
        child.kill()
        child.wait(timeout=10)


@pytest.fixture(scope="module")
def browser():
    """Any Chromium of the system; `make browser` installs one where it can."""
    from playwright.sync_api import sync_playwright

    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        said = "no Chromium here (make browser installs one): the page's script is not run"
        pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report in a page; every error of its script fails the test."""
    faults, page = [], browser.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)

    def open_report(**changes):
        page.goto(write_report(make_run(tmp_path, **changes)).as_uri())
        return page

    yield open_report
    page.close()
    assert not faults


def test_a_browser_draws_the_page_and_its_script_answers(opened):
    page = opened(text=HOSTILE, ground_truth="4", prompt_text="<|user|>2+2=<|end|>")
    assert page.locator("svg").count() >= 4 and page.locator(".tk").count() > 5
    assert page.title().startswith("</script>") and page.locator("body img").count() == 0
    lines = page.locator("[data-id]:not(.tk)")
    assert lines.count() > 3 and page.locator(".sample-line.chosen").count() == 1
    facts = page.locator(".sample-facts").inner_text()
    assert "ground truth 4" in facts and "<|user|>2+2=<|end|>" in page.locator("details.prompt pre").inner_text()
    page.locator(".sample-list").focus()
    page.keyboard.press("j")
    assert page.locator(".sample-facts").inner_text() != facts, "the next sample is shown"
    page.get_by_label("Filter by text").fill("nothing has this text")
    assert "No sample matches" in page.locator(".sample-list").inner_text()


def test_neighbouring_ticks_of_an_axis_read_differently(opened):
    page = opened()
    wrong = []
    for curve, form in (
        ([0.12341, 0.12349], "number"),
        ([1000.1, 1000.9], "number"),
        ([1.0e-5, 1.2e-5], "number"),
        ([20100, 20140], "number"),
        ([0.5, 0.5004], "percent"),
        ([61.0, 61.4], "seconds"),
        ([3, 3.4], "tokens"),
        ([0, 1], "percent"),
    ):
        ticks = page.evaluate("([y, form]) => yScale([{y}], {form}).ticks", [curve, form])
        labels = [label for _, label in ticks]
        wrong += [] if len(labels) > 1 and len(set(labels)) == len(labels) else [(curve, labels)]
        worth = [float(re.sub(r"[^-0-9.e]", "", label)) for label in labels]
        scale = 100 if form == "percent" else 1
        exact = all(w == pytest.approx(v * scale, rel=1e-9, abs=1e-9) for w, (v, _) in zip(worth, ticks))
        wrong += [] if exact else [(curve, labels)]
    assert not wrong
    assert page.evaluate("yScale([{y: [0, 1]}], {form: 'percent'}).ticks.at(-1)[1]") == "100%"


def test_the_page_names_the_mean_of_graded_rewards_a_score(opened, tmp_path):
    page = opened()
    text = page.locator("body").inner_text().lower()
    assert "held-out accuracy" in text and "held-out score" not in text
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": 7, "attempt": 1, "time_s": 0.0, "eval/acc/greedy": 1.188}) + "\n")
    page.goto(write_report(tmp_path).as_uri())
    text = page.locator("body").inner_text().lower()
    assert "held-out accuracy" not in text and "held-out score" in text and "118" not in text and "1.188" in text


def test_render_page_refuses_numbers_that_json_cannot_hold():
    with pytest.raises(ValueError):
        render_page({"run": {"name": "x"}, "bad": float("nan")})


def test_assets_are_packaged():
    room = Path(sys.modules["verl.report"].__file__).parent
    assert {"report.html", "report.css", "report.js", "charts.js", "samples.js"} <= {p.name for p in room.iterdir()}
    for asset in room.iterdir():
        if asset.suffix in (".js", ".css", ".html", ".py"):
            assert len(asset.read_text().splitlines()) < 500, asset.name
