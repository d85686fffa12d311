"""Rollouts with a slow tool: verl's tool loop and TRL's, on one model, the same prompts and the same tool."""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.environments import Unavailable, ensure, run_logged
from bench.laptop import ROOT, TRL, Settings, arm_env, run_arm
from bench.peers.countdown import CALLS, MEAN_S, TRAJECTORIES, waits_s
from bench.results import NOT_RUN, Spread, Table
from bench.sweep import Tried, best, sweep
from bench.sweep import table as sweep_table
from verl.chat.parsing import FORMATS
from verl.recipes import tool_arithmetic
from verl.recipes.arithmetic import write_jsonl

SFT_ROWS, SFT_STEPS, SFT_TIMEOUT_S = 4000, 300, 900.0
PROMPTS, SAMPLES = TRAJECTORIES // 2, 2
TOOL = ROOT / "bench" / "peers" / "countdown.py"
WITHIN, TIMES = 1.15, 4.0  # of the longer of generation and the longest chain; of TRL's time
FOR_TRL = {"start_anchor": "<|assistant|>", "defaults": {"role": "assistant"}}
ALONE, WAITING = "AtOnce", "Countdown"


def conversation(number: int, calls: int) -> list[dict[str, Any]]:
    """Return the calls of the tool of peers/countdown.py, and its answers."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"{number}*{calls}="}]
    for left in range(calls, 0, -1):
        call = {"name": "calculator", "arguments": {"expression": f"{number}*{left}"}}
        asked += [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
        asked += [{"role": "tool", "content": f"{number}*{left - 1}"}]
    return [*asked, {"role": "assistant", "content": f"#{number}"}]


def ensure_model(folder: Path, threads: int) -> tuple[Path, Path]:
    """(a model of the quickstart's size that counts down by its tool, the rows of the rollouts), made on first use."""
    from verl.models import tiny

    home = folder / "countdown"
    model, rows = home / "sft" / "checkpoints" / f"step_{SFT_STEPS}" / "hf", home / "data" / "train.jsonl"
    if not (model / "config.json").exists():
        rng = random.Random(0)
        words = (tool_arithmetic.WORDS, tool_arithmetic.CHAT_TEMPLATE)
        tokenizer = tiny.character_tokenizer(tool_arithmetic.CHARACTERS, *words)
        base = tiny.save(tiny.qwen3(tokenizer, seed=0), tokenizer, home / "base")
        drawn = [conversation(rng.randint(10, 99), rng.randint(1, CALLS)) for _ in range(SFT_ROWS)]
        shown = [{"messages": messages, "tools": [tool_arithmetic.SCHEMA]} for messages in drawn]
        sft = write_jsonl(home / "data" / "sft.jsonl", shown)
        asked = [row_of(rng.randint(10, 99)) for _ in range(64 * PROMPTS)]
        write_jsonl(rows, asked)
        command = [sys.executable, "-m", "verl", "sft", "recipe=tool_arithmetic_warmup", f"model.path={base}"]
        command += [f"data.train_files=[{sft}]", f"run.root_dir={home}", "run.name=sft", "model.device=cpu"]
        command += [f"run.total_steps={SFT_STEPS}", f"run.threads={threads}"]
        run_logged(command, folder / "logs" / "countdown.log", timeout_s=SFT_TIMEOUT_S, env=arm_env(threads))
    return model, rows


def row_of(number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{number}*{CALLS}="}]
    return {"data_source": "countdown", "prompt": prompt, "reward_model": {"ground_truth": str(number)}}


def spec_of(settings: Settings, arm: str, tool: str, model: Path, rows: Path) -> dict[str, Any]:
    played = [f"agent.tools=[{TOOL}:{tool}]", f"agent.max_turns={CALLS + 1}"]
    return {
        "recipe": "tool_arithmetic",
        "model": str(model),
        "rows": str(rows),
        "tool": tool,
        "threads": settings.threads,
        "lr": 1e-6,
        "dtype": "float32",
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_response_tokens": 256,
        "steps": settings.steps + 1,
        "folder": str(settings.folder / "arms" / f"tools-{arm}"),
        "overrides": played,
        "response_template": {**FORMATS["glm"].template, **FOR_TRL},
        "continuous": False,
    }


def rollouts(program: list[str], spec: dict[str, Any], settings: Settings, name: str) -> list[dict[str, float]]:
    return run_arm(program, spec, settings, f"tools-{name}")["steps"]


def ours(settings: Settings, model: Path, rows: Path) -> dict[str, list[dict[str, float]]]:
    program = [sys.executable, str(ROOT / "bench" / "verl_arm.py")]
    specs = {tool: spec_of(settings, "verl", tool, model, rows) for tool in (ALONE, WAITING)}
    return {tool: rollouts(program, spec, settings, "verl") for tool, spec in specs.items()}


def trl(settings: Settings, model: Path, rows: Path) -> tuple[dict[str, list[dict[str, float]]], Table]:
    """Its loop at the best of its settings, which are tried with a tool that answers at once."""
    tried: dict[str, list[Tried]] = {}
    python = ensure(TRL, settings.folder / "logs" / "install_trl.log")
    program = [str(python), str(ROOT / "bench" / "peers" / "trl_tools.py")]
    specs = {tool: spec_of(settings, "TRL", tool, model, rows) for tool in (ALONE, WAITING)}

    def short(spec: dict[str, Any]) -> list[dict[str, float]]:
        return [{"wall_s": one["rollout_s"]} for one in rollouts(program, spec, settings, "TRL")]

    for name, continuous in (("generate", False), ("continuous batching", True)):
        spec = {**specs[ALONE], "continuous": continuous, "steps": 3}
        tried[name] = sweep(settings.threads, spec, short, compiled=(False,))
    ran = {n: min(t.wall_s for t in tried[n] if t.wall_s is not None) for n in tried if best(tried[n]) is not None}
    if not ran:
        raise Unavailable(next(iter(tried.values()))[0].reason)
    fastest = min(ran, key=ran.__getitem__)
    setting = best(tried[fastest])
    assert setting is not None
    chosen = {**asdict(setting), "continuous": fastest == "continuous batching"}
    specs[WAITING]["steps"] = 2  # minutes each: one is measured
    found = {tool: rollouts(program, {**spec, **chosen}, settings, "TRL") for tool, spec in specs.items()}
    title = "TRL's tool loop, its settings with a tool that answers at once"
    return found, sweep_table(title, tried)


def tables(settings: Settings) -> list[Table]:
    model, rows = ensure_model(settings.folder, settings.threads)
    chains = [waits_s(number) for number in range(TRAJECTORIES)]
    longest_s, together_s = max(map(sum, chains)), sum(max(turn) for turn in zip(*chains))
    mine = ours(settings, model, rows)
    wall, alone = (Spread.of([s["rollout_s"] for s in mine[tool]]) for tool in (WAITING, ALONE))
    bound_s = max(alone.median, longest_s)
    calls = statistics.mean(s["agent/tool_calls"] for s in mine[WAITING]) / TRAJECTORIES
    rows_ = [("verl", wall.text(2), alone.text(2), f"{calls:.2f}", f"{wall.median / bound_s:.2f}", "")]
    notes = [
        f"The longest chain of waits is {longest_s:.2f} s, all of them together {sum(map(sum, chains)):.0f} s. Wanted "
        f"of verl: at most {WITHIN:g} times the longer of its generation alone and that chain; of TRL: at least "
        f"{TIMES:g} times verl's wall."
    ]
    more: list[Table] = []
    try:
        found, settings_table = trl(settings, model, rows)
    except Unavailable as e:
        notes.append(f"TRL: {NOT_RUN}: {e}")
    else:
        theirs, bare = (Spread.of([s["rollout_s"] for s in found[tool]]) for tool in (WAITING, ALONE))
        made = statistics.mean(s["calls"] for s in found[WAITING]) / TRAJECTORIES
        synchronous_s = bare.median + together_s
        rows_ += [
            ("TRL", theirs.text(2), bare.text(2), f"{made:.2f}", "", f"{theirs.median / wall.median:.1f}×"),
            (
                "TRL, were its waits of a turn together",
                f"{synchronous_s:.2f}",
                "",
                "",
                "",
                f"{synchronous_s / wall.median:.1f}×",
            ),
        ]
        notes.append(
            "TRL 1.16 asks the tools of one trajectory after those of another, async or not. The last row is not run: "
            f"TRL's generation alone, and the slowest wait of every turn ({together_s:.2f} s). TRL ran as the "
            "fastest of the settings below."
        )
        more.append(settings_table)
    head = ("", "wall of a rollout, s", "tool at once, s", "calls each", "× the longer of the two", "× verl's wall")
    title = f"{TRAJECTORIES} trajectories of {CALLS + 1} turns, a tool that takes {MEAN_S:g} s on average (exponential)"
    return [Table(title, head, tuple(rows_), tuple(notes)), *more]
