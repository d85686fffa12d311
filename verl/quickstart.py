"""The first ten minutes: create a small language model, warm it up, and watch RL improve it.

    python -m verl.quickstart run.seed=0
    python -m verl.quickstart task=tool_arithmetic tool_fail_share=0.2
    python -m verl.quickstart task=shapes
    python -m verl.quickstart task=look

All steps use the commands of real runs (`verl sft`, `verl train`); only the model, the tokenizer and the data are made
here.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verl.cli import guarded
from verl.errors import Refused
from verl.recipes import arithmetic, look, shapes, tool_arithmetic
from verl.track.samples import SampleRow

SFT_ROWS, RL_ROWS, HELD_OUT_ROWS = 32000, 4096, 256
# all other overrides belong to the RL run
OWN = ("run.seed", "run.root_dir", "warmup_steps", "task", "tool_fail_share")


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    return guarded(lambda: quickstart(argv))


@dataclass(frozen=True, slots=True)
class Start:
    """A task of the quickstart."""

    make: Callable[[Path, int], Path]  # (home, seed) -> the model's folder, with the data beside it.
    recipe: str  # The recipe of its RL run; the run has the same name. `RECIPE_warmup` is the recipe of its SFT run.
    reward: str  # The module that scores it.
    teacher: str
    model: str = "1.6M parameters"
    pictures: bool = False
    """Its rows have pictures, of which the warm-up needs an eighth as many, in Parquet. The run is evaluated with
    blanked pictures too."""

    @property
    def sft_rows(self) -> int:
        return SFT_ROWS // 8 if self.pictures else SFT_ROWS

    def file(self, home: Path, name: str) -> Path:
        """Return the file of rows with this name."""
        return home / "data" / f"{name}.{'parquet' if self.pictures else 'jsonl'}"


def quickstart(overrides: list[str]) -> int:
    from verl.config.load import load_config
    from verl.driver.launch import run_rl, run_supervised

    console = Console()
    given = dict(a.partition("=")[::2] for a in overrides if "=" in a)
    if (task := given.get("task", "arithmetic")) not in STARTS:
        raise Refused(f"task={task}: there are {', '.join(STARTS)}")
    start = STARTS[task]
    if not (number := given.get("run.seed", "0")).isdecimal():
        raise Refused(f"run.seed={number}: it is a whole number, 0 or more")
    seed, root = int(number), Path(given.get("run.root_dir", "runs"))
    home = root / start.recipe
    made = home / "seed"
    if (home / "summary.json").exists() or (made.exists() and made.read_text() != str(seed)):
        shutil.rmtree(home)  # files of an earlier quickstart; an unfinished one with this seed continues
    started = time.monotonic()
    console.rule("[bold]1 of 3[/] a model, a tokenizer and data, from nothing")
    base = start.make(home, seed)
    console.print(
        f"{home}/base: {start.model}, random. {start.sft_rows} traces of {start.teacher}; "
        f"{RL_ROWS} problems for RL; {HELD_OUT_ROWS} problems held out of both."
    )
    seconds = {"make": time.monotonic() - started}
    common = [f"run.root_dir={root}", f"run.seed={seed}"]
    held_out = ",".join(str(start.file(home, name)) for name in ("heldout", "blanked")[: 1 + start.pictures])
    files = [f"data.train_files=[{start.file(home, 'train')}]", f"data.eval_files=[{held_out}]"]
    rl = [f"recipe={start.recipe}", *files, f"reward.path={start.reward}", *common]
    if task == "tool_arithmetic":
        share = float(given.get("tool_fail_share", "0"))
        rl.append(f"agent.tools=[{tool_arithmetic.write_tools(home / 'tools.yaml', fail_share=share)}]")
    rl += [a for a in overrides if a.partition("=")[0] not in OWN]
    load_config([f"model.path={base}", *rl])  # errors in it are reported before the warm-up

    console.rule("[bold]2 of 3[/] warm-up: supervised fine-tuning on that teacher")
    args = [f"recipe={start.recipe}_warmup", f"model.path={base}", *common]
    args.append(f"data.train_files=[{start.file(home, 'sft')}]")
    args += [f"run.total_steps={given['warmup_steps']}"] if "warmup_steps" in given else []
    warm = last_export(run_supervised(load_config(args), "sft", title=f"{start.recipe}: warm-up (SFT)").dir)
    seconds["sft"] = time.monotonic() - started - seconds["make"]

    console.rule("[bold]3 of 3[/] GRPO: the reward is 1 for a right answer, 0 otherwise")
    resolved = load_config([f"model.path={warm}", *rl])
    seconds["rl"] = run_rl(resolved, title=f"{start.recipe}: GRPO", quiet=True).seconds
    _close(console, home, seed, seconds, time.monotonic() - started)
    return 0


def make_inputs(home: Path, seed: int) -> Path:
    """Make model, tokenizer and data of the arithmetic task under `home`. Return the path of the model."""
    from verl.models import tiny

    base = home / "base"
    if not (base / "tokenizer.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "seed").write_text(str(seed))
        tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
        tiny.save(tiny.qwen3(tokenizer, seed=seed), tokenizer, base)
        arithmetic.write_sft(home / "data" / "sft.jsonl", SFT_ROWS, seed=1000 + seed, forget_share=0.65)
        arithmetic.write_rl(home / "data" / "train.jsonl", RL_ROWS, seed=2000 + seed, held=False)
        arithmetic.write_rl(home / "data" / "heldout.jsonl", HELD_OUT_ROWS, seed=3000, held=True, three_digits=True)
    return base


def make_tool_inputs(home: Path, seed: int) -> Path:
    """Make model, tokenizer and data of the multiplication task with a calculator under `home`. Return the path of the
    model."""
    from verl.models import tiny

    base, words = home / "base", (tool_arithmetic.WORDS, tool_arithmetic.CHAT_TEMPLATE)
    if not (base / "tokenizer.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "seed").write_text(str(seed))
        tokenizer = tiny.character_tokenizer(tool_arithmetic.CHARACTERS, *words)
        tiny.save(tiny.qwen3(tokenizer, seed=seed), tokenizer, base)
        rows = {"sft_rows": SFT_ROWS, "rl_rows": RL_ROWS, "held_out_rows": HELD_OUT_ROWS}
        tool_arithmetic.write_inputs(home / "data", seed=seed, **rows)
    return base


def make_pictures(home: Path, seed: int) -> Path:
    """Make model, tokenizer and pictures of the task of shapes under `home`. Return the path of the model."""
    return _with_pictures(shapes.TASK, STARTS["shapes"], home, seed)


def make_albums(home: Path, seed: int) -> Path:
    """Make model, tokenizer and albums of the task of looking under `home`. Return the path of the model."""
    return _with_pictures(look.TASK, STARTS["look"], home, seed)


def _with_pictures(task: shapes.PictureTask, start: Start, home: Path, seed: int) -> Path:
    base = home / "base"
    if not (base / "tokenizer.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "seed").write_text(str(seed))
        task.write_model(base, seed=seed)
        task.write_taught(start.file(home, "sft"), start.sft_rows, seed=1000 + seed)
        task.write_problems(start.file(home, "train"), RL_ROWS, seed=2000 + seed)
        for name, blanked in (("heldout", False), ("blanked", True)):
            task.write_problems(start.file(home, name), HELD_OUT_ROWS, seed=3000, blanked=blanked)
    return base


STARTS = {
    "arithmetic": Start(make_inputs, "quickstart", "verl.recipes.arithmetic", "a teacher that forgets carries"),
    "tool_arithmetic": Start(
        make_tool_inputs,
        "tool_arithmetic",
        "verl.recipes.tool_arithmetic",
        "a teacher that guesses, or types the wrong sign into its calculator, which shows drawn numbers",
    ),
    "shapes": Start(
        make_pictures,
        "shapes",
        "verl.recipes.shapes",
        "a teacher that mostly takes triangles for squares",
        "0.5M parameters, which reads images",
        pictures=True,
    ),
    "look": Start(
        make_albums,
        "look",
        "verl.recipes.look",
        "a teacher that guesses, looks at the wrong picture, or takes triangles for squares",
        "0.5M parameters, which reads images",
        pictures=True,
    ),
}


def last_export(run_dir: Path) -> Path:
    """Return the Hugging Face folder of the last checkpoint."""
    steps = max(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").glob("step_*"))
    return run_dir / "checkpoints" / f"step_{steps}" / "hf"


def _close(console: Console, home: Path, seed: int, seconds: dict[str, float], wall_s: float) -> None:
    """Print the held-out rewards and the same three problems before and after the run, and the paths of the summary and
    the report."""
    from verl.track.samples import read_samples, sample_steps

    steps = sample_steps(home, "eval")
    every = [read_samples(home, step, "eval") for step in (steps[0], steps[-1])]
    before, after = ([row for row in rows if _number(row) < HELD_OUT_ROWS] for rows in every)
    summary: dict[str, Any] = {"seed": seed}
    binary = all(row.reward in (0, 1) for row in (*before, *after))
    word = "accuracy" if binary else "score"
    table = Table(f"held-out {word}", "before", "after", title="What RL changed", title_justify="left")
    for mode in ("greedy", "sampled"):
        rewards = [[r.reward for r in rows if f"/{mode}/" in r.group_id] for rows in (before, after)]
        scores = [sum(of_step) / max(1, len(of_step)) for of_step in rewards]
        table.add_row(mode, *(f"{score:.3f}" for score in scores))
        summary |= {f"{mode}_before": scores[0], f"{mode}_after": scores[1]}
    if blanked := [r.reward for r in every[1] if _number(r) >= HELD_OUT_ROWS and "/greedy/" in r.group_id]:
        summary["blanked_after"] = sum(blanked) / len(blanked)
        table.add_row("greedy, blanked pictures", "", f"{summary['blanked_after']:.3f}")
    console.print(table)
    greedy = list(zip(*([r for r in rows if "/greedy/" in r.group_id] for rows in (before, after))))
    changed = [(a, b) for a, b in greedy if a.reward < 1 <= b.reward] or greedy
    for pair in changed[:3]:
        problem = pair[0].prompt_text.split("=")[0].split(">")[-1] or pair[0].ground_truth
        console.print(f"[bold]{problem}[/]", highlight=False)
        for word, row in zip(("before", "after "), pair):
            mark = "[green]right[/]" if row.reward >= 1 else "[red]wrong[/]"
            console.print(f"  {word}  {row.response_text}  {mark}", highlight=False)
    summary["seconds"] = {k: round(v, 1) for k, v in {**seconds, "total": wall_s}.items()}
    (home / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.print(f"{wall_s:.0f} s in all. summary: {home}/summary.json")
    console.print(f"Open the report: {(home / 'report.html').resolve()}")


def _number(row: SampleRow) -> int:
    """Return the number of a row's problem in the files of the evaluation."""
    return int(row.group_id.rpartition("/")[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
