"""The quickstart's RL run with LoRA, and with LoRA on a base in NF4, beside the run of all weights: the steps until an
accuracy is reached; a part of bench/lora.py."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.laptop import ROOT, arm_env
from bench.start_checkpoint import ensure_start
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.track.metrics import read_metrics

WARMUP_STEPS = 600
"""Of the model that all begin with: those of the recipe. After 400, RL has too few right answers to learn from (.07 to
.11 in 25 steps)."""
HELD_OUT = 256
"""Held-out problems of an evaluation."""
STEPS, EVERY = 25, 5
"""Steps of the run of all weights (those of the recipe), and between evaluations."""
LR = 1e-3
"""Of factors: 10 times the recipe's."""
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "all weights": (STEPS, ()),
    "rank 8": (35, ("model.lora.rank=8", f"optim.lr={LR}")),
    "rank 8 on a base in NF4": (40, ("model.lora.rank=8", f"optim.lr={LR}", "model.quantization=nf4")),
}
"""The most steps and the settings of each run."""


def learned() -> Iterator[tuple[str, dict[int, float]]]:
    """Yield (way, accuracy of greedy answers to held-out problems by step) of each run; all begin with one model."""
    folder, threads = ROOT / "runs" / "bench", os.cpu_count() or 1
    start = ensure_start(folder, arm_env(threads), threads, steps=WARMUP_STEPS)
    for way, (steps, more) in WAYS.items():
        home = folder / "learn" / way.replace(" ", "_")
        shutil.rmtree(home, ignore_errors=True)
        given = {
            "recipe": "quickstart",
            "model.path": start.model,
            "data.train_files": f"[{start.rows}]",
            "data.eval_files": f"[{start.rows.parent / 'heldout.jsonl'}]",
            "reward.path": "verl.recipes.arithmetic",
            "eval.also_sampled": "false",
            "run.eval_every_steps": EVERY,
            "run.total_steps": steps,
            "run.root_dir": home.parent,
            "run.name": home.name,
            "run.threads": threads,
            "model.device": "cpu",
        }
        run_rl(load_config([*(f"{key}={value}" for key, value in given.items()), *more]), quiet=True)
        yield way, accuracies(home)


def accuracies(run_dir: Path) -> dict[int, float]:
    """Return the accuracy of greedy answers by step of a run."""
    found = dict[int, float]()
    for line in read_metrics(run_dir):
        every = (value for name, value in line.values.items() if name.startswith("val-core/"))
        if (value := next(every, None)) is not None:
            found[line.step] = value
    return found


def noise_of(accuracy: float, problems: int = HELD_OUT) -> float:
    """Return the standard error of the difference of two accuracies near this one, each over so many problems."""
    return math.sqrt(2 * accuracy * (1 - accuracy) / problems)


def steps_to(accuracy: float, found: Mapping[int, float]) -> float:
    """Return the first step with this accuracy; infinity if it was not reached."""
    return min((step for step, value in found.items() if value >= accuracy), default=math.inf)
