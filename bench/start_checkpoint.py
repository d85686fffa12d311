"""The model that every arm starts from: the quickstart's warm-up, made by verl's own SFT and kept."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.environments import run_logged

SEED = 0
STEPS = 600  # those of the quickstart: as many of its groups have a signal
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Start:
    model: Path
    rows: Path
    """The RL problems, in the quickstart's format."""


def ensure_start(folder: Path, env: dict[str, str], threads: int, *, steps: int = STEPS) -> Start:
    """Made under `folder` on first use (about a minute on two quiet cores)."""
    home = folder / f"start_{steps}"
    model = home / "sft" / "checkpoints" / f"step_{steps}" / "hf"
    if not (model / "config.json").exists():
        from verl.quickstart import make_inputs

        base = make_inputs(home, SEED)
        command = [
            sys.executable,
            "-m",
            "verl",
            "sft",
            "recipe=quickstart_warmup",
            f"model.path={base}",
            f"run.seed={SEED}",
            f"data.train_files=[{home}/data/sft.jsonl]",
            f"run.root_dir={home}",
            "run.name=sft",
            f"run.total_steps={steps}",
            f"run.threads={threads}",
            "model.device=cpu",
        ]
        run_logged(command, folder / "logs" / "start.log", timeout_s=TIMEOUT_S, env=env)
    return Start(model, home / "data" / "train.jsonl")
