"""The recipe with a calculator: what its warm-up shows, a small run of it that is killed, and (FULL_GRID=1) the whole
of it, which has to learn."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from each import FULL_GRID
from small_runs import launch, metrics_of, same_tensors, saved, summary, tensors_of, trained, wait_for
from started import Started, short_quickstart

from verl import quickstart
from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Toolbox
from verl.chat.parsing import ToolCall
from verl.config.load import load_config
from verl.driver.launch import run_rl, run_supervised
from verl.recipes import tool_arithmetic
from verl.recipes.arithmetic import answer
from verl.track.samples import read_samples

BIT = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 2
"""
"""A reward that differs within every group: this small model is never right, and would be updated by nothing."""
whole = pytest.mark.skipif(not FULL_GRID, reason="minutes: make test-all")


def test_the_warm_up_shows_the_form_and_no_answer(tmp_path):
    tool_arithmetic.write_inputs(tmp_path, sft_rows=400, rl_rows=200, held_out_rows=50, seed=3)
    rows = {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in tmp_path.glob("*.jsonl")}
    asked = {name: [(r.get("messages") or r["prompt"])[0]["content"] for r in found] for name, found in rows.items()}
    assert {name: len(set(found)) for name, found in asked.items()} == {"sft": 400, "train": 200, "heldout": 50}
    assert not set(asked["heldout"]) & {*asked["sft"], *asked["train"]}
    guessed, signs, failed = 0, [], 0
    for row, problem in zip(rows["sft"], asked["sft"], strict=True):
        a, b = map(int, problem.rstrip("=").split("*"))
        said, final = [m["content"] for m in row["messages"][1:]], row["messages"][-1]["content"]
        assert not any(text.lstrip("#") == str(a * b) for text in said), "no product is read or written"
        calls = [m["tool_calls"][0]["function"] for m in row["messages"] if m.get("tool_calls")]
        guessed += not calls
        failed += sum(tool_arithmetic.BUSY in text for text in said)
        assert len(calls) <= tool_arithmetic.MAX_CALLS
        signs += [sign for call in calls for sign in "+-*" if call["arguments"]["expression"] == f"{a}{sign}{b}"]
        if calls and tool_arithmetic.BUSY not in said[-2]:
            assert final == f"#{said[-2]}", "the answer is what the calculator showed"
    assert 200 < guessed < 280 and failed > 60 and set(signs) == {"+", "-", "*"}
    assert 0.35 < signs.count("*") / len(signs) < 0.65
    for problem in itertools.islice(tool_arithmetic.products(5, held=False), 20):
        assert answer(problem) == problem[0] * problem[1] >= 1100


def test_a_calculator_fails_as_often_as_it_is_told_and_alike_each_time(tmp_path):
    def play(share: float, expressions: list[str]) -> list[str]:
        (tool,) = load_tools([str(tool_arithmetic.write_tools(tmp_path / "t.yaml", fail_share=share))]).values()

        async def ask() -> list[str]:
            box = Toolbox({tool.name: tool}, {}, 5)
            said = [await box.call(ToolCall("calculator", {"expression": e})) for e in expressions]
            assert await box.close() == []
            return [a.text for a in said]

        return asyncio.run(ask())

    assert play(0.0, ["12*34", "5-17", "1+2"]) == ["408", "-12", "3"]
    for wrong in ("12*", "2**9", "__import__('os')", "9" * 99 + "*1"):
        assert play(0.0, [wrong])[0].startswith("Error: calculator failed: ValueError: it takes NUMBER*NUMBER")
    many = [f"{k}*7" for k in range(500)]
    found = play(0.2, many)
    busy = [text.endswith(tool_arithmetic.BUSY) for text in found]
    assert 70 < sum(busy) < 130 and found == play(0.2, many)
    again = [play(0.2, [text, text])[1] for text in many[:50]]
    assert 1 < sum(text.endswith(tool_arithmetic.BUSY) for text in again) < 25, "asked again, it mostly answers"
    with pytest.raises(ValueError, match="fail_share=20"):
        play(20.0, [])


def test_an_unknown_task_is_refused(capsys):
    assert quickstart.main(["task=chess"]) == 2
    assert "task=chess: there are arithmetic, tool_arithmetic, shapes, look" in capsys.readouterr().err


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> tuple[Path, Path]:
    """(folder of the task's files, a smaller model after some steps of its warm-up, which calls now and then)."""
    from verl.models import tiny

    home = tmp_path_factory.mktemp("recipe")
    words = (tool_arithmetic.WORDS, tool_arithmetic.CHAT_TEMPLATE)
    tokenizer = tiny.character_tokenizer(tool_arithmetic.CHARACTERS, *words)
    base = tiny.save(tiny.qwen3(tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, ffn=128), tokenizer, home / "base")
    tool_arithmetic.write_inputs(home / "data", sft_rows=1280, rl_rows=64, held_out_rows=8, seed=0)
    tool_arithmetic.write_tools(home / "tools.yaml", fail_share=0.2)
    (home / "bit.py").write_text(BIT)
    args = ["recipe=tool_arithmetic_warmup", f"model.path={base}", f"data.train_files=[{home}/data/sft.jsonl]"]
    sizes = ["step.prompts_per_step=32", "run.total_steps=120", "run.threads=1", "optim.lr=4e-3"]
    warm = run_supervised(load_config([*args, *sizes, f"run.root_dir={home}"]), "sft")
    return home, quickstart.last_export(warm.dir)


def args_of(root: Path, taught: tuple[Path, Path], *more: str) -> list[str]:
    home, model = taught
    files = [f"model.path={model}", f"data.train_files=[{home}/data/train.jsonl]", f"agent.tools=[{home}/tools.yaml]"]
    sizes = ["step.prompts_per_step=4", "step.samples_per_prompt=4", "run.total_steps=5", "run.save_every_steps=1"]
    plain = [
        "run.eval_before=false",
        "run.eval_after=false",
        "run.eval_every_steps=0",
        "run.threads=1",
        "track.sinks=[jsonl]",
    ]
    reward = [f"reward.path={home}/bit.py", f"run.root_dir={root}"]
    return ["recipe=tool_arithmetic", *files, *sizes, *plain, *reward, *more]


def killed(args: list[str], run_dir: Path, log: Path, after_steps: list[int], seed: int) -> None:
    """The run, killed some moments after each of these steps was saved, to its end."""
    rng = random.Random(seed)
    for wanted in after_steps:
        process = launch(args, log)
        said = f"step {wanted}: {log.read_text()[-2000:]}"
        wait_for(lambda p=process, w=wanted: p.poll() is not None or saved(run_dir) >= w, 400, said)
        time.sleep(rng.random())
        process.kill()
        process.wait(30)
    last = launch(args, log)
    assert last.wait(600) == 0, log.read_text()[-3000:]


def equal(straight: Path, cut: Path, steps: int) -> None:
    assert trained(straight) == trained(cut) and sorted(trained(cut)) == list(range(1, steps + 1))
    for step in range(1, steps + 1):
        one, other = ({r.sample_id: r for r in read_samples(run, step)} for run in (straight, cut))
        assert one.keys() == other.keys()
        for name, row in one.items():
            assert row.response_ids.tolist() == other[name].response_ids.tolist(), (step, name)
            assert row.response_mask.tolist() == other[name].response_mask.tolist() and row.reward == other[name].reward
    same_tensors(tensors_of(straight, steps), tensors_of(cut, steps))


@pytest.mark.timeout(300)
@pytest.mark.full("test_agents.py: a cut run with turns equals a straight one bitwise")
def test_a_killed_run_with_a_failing_tool_samples_the_same_ids(tmp_path, taught):
    run_rl(load_config(args_of(tmp_path / "straight", taught)), quiet=True)
    straight, cut = (tmp_path / name / "tool_arithmetic" for name in ("straight", "cut"))
    metrics = metrics_of(straight)
    assert sum(m["agent/tool_calls"] for m in metrics.values()) > 10, "it calls its tool"
    assert sum(m["agent/tool_errors"] for m in metrics.values()) > 0, "which fails"
    assert all(m["actor/grad_norm"] > 0 for m in metrics.values()), "every step moves the weights"
    killed(args_of(tmp_path / "cut", taught), cut, tmp_path / "log", [2, 3], seed=11)
    equal(straight, cut, 5)


@pytest.mark.timeout(240)
@pytest.mark.full("test_agents.py: a run with a tool trains what was sampled between its results")
def test_the_recipe_tells_its_story(tmp_path):
    """All of it with four warm-up steps and two of RL; that it learns is shown below."""
    more = ("task=tool_arithmetic", "tool_fail_share=0.5", "run.total_steps=2", "run.threads=1", "warmup_steps=4")
    code = Started([f"run.root_dir={tmp_path}", *more], log := tmp_path / "log", entry=short_quickstart).wait(220)
    assert code == 0, log.read_text()[-4000:]
    home = tmp_path / "tool_arithmetic"
    assert set(summary(home)) >= {"greedy_before", "greedy_after", "sampled_before", "sampled_after", "seconds"}
    assert "fail_share: 0.5" in (home / "tools.yaml").read_text() and (home / "report.html").exists()
    for words in ("held-out accuracy", "calls are written as glm", "calculator"):
        assert words in log.read_text()


@whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_the_recipe_learns(tmp_path, share):
    command = [sys.executable, "-m", "verl.quickstart", "task=tool_arithmetic", f"tool_fail_share={share}"]
    done = subprocess.run([*command, f"run.root_dir={tmp_path}"], capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    found = summary(tmp_path / "tool_arithmetic")
    print(share, found)
    assert found["greedy_before"] <= 0.3 and found["greedy_after"] >= (0.9 if share == 0 else 0.7)


@whole
@pytest.mark.timeout(1800)
def test_a_longer_run_that_is_killed_six_times_samples_the_same_ids(tmp_path, taught):
    more = ("run.total_steps=20", "step.prompts_per_step=8")
    run_rl(load_config(args_of(tmp_path / "straight", taught, *more)), quiet=True)
    straight, cut = (tmp_path / name / "tool_arithmetic" for name in ("straight", "cut"))
    assert all(m["actor/grad_norm"] > 0 for m in metrics_of(straight).values()), "every step moves the weights"
    killed(args_of(tmp_path / "cut", taught, *more), cut, tmp_path / "log", [1, 4, 7, 10, 13, 17], seed=5)
    equal(straight, cut, 20)
