"""Small real runs for the end-to-end tests."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from on_device import RUN
from started import Started

from verl.config.load import load_config
from verl.driver.launch import Finished, run_rl, run_supervised

REWARD = Path(__file__).parent / "reward_length.py"


def small_args(root: Path, model: Path, data: Sequence[Path], *more: str) -> list[str]:
    """A GRPO run of a few steps on the tiny model: 4 prompts x 4 answers of at most 12 tokens, float32."""
    base = {
        "run.root_dir": root,
        "run.name": "r",
        "run.total_steps": 3,
        "run.threads": 1,
        "run.wait_timeout_s": 120,
        "model.path": model,
        "model.dtype": "float32",
        "data.train_files": f"[{data[0]}]",
        "data.max_prompt_tokens": 16,
        "data.cache_dir": Path(data[0]).parent / "cache",
        "algorithm.name": "grpo",
        "algorithm.kl_loss_coef": 0.0,
        "step.prompts_per_step": 4,
        "step.samples_per_prompt": 4,
        "step.max_tokens_per_microbatch": 512,
        "optim.lr": 1e-3,
        "rollout.max_response_tokens": 12,
        "reward.path": REWARD,
        "reward.num_workers": 1,
        "run.eval_before": "false",
        "run.eval_after": "false",
        **RUN,
    }
    if len(data) > 1:
        base["data.eval_files"] = f"[{data[1]}]"
        base |= {"run.eval_before": "true", "run.eval_after": "true"}
    given = {a.partition("=")[0] for a in more}
    return [f"{k}={v}" for k, v in base.items() if k not in given] + list(more)


def small_run(root: Path, model: Path, data: Sequence[Path], *more: str) -> Finished:
    return run_rl(load_config(small_args(root, model, data, *more)), quiet=True)


def small_supervised(command: Any, root: Path, folder: Path, data: Path, *more: str) -> Finished:
    """One step of SFT, of a reward model or of preferences on all rows of a file, which are evaluated too."""
    base = {
        "run.root_dir": root,
        "run.name": "r",
        "run.total_steps": 1,
        "run.threads": 1,
        "model.path": folder,
        "model.dtype": "float32",
        "data.train_files": f"[{data}]",
        "data.eval_files": f"[{data}]",
        "data.cache_dir": root / "cache",
        "data.max_tokens_per_row": 64,
        "data.shuffle": "false",
        "step.prompts_per_step": len(data.read_text().splitlines()),
        "optim.lr": 1e-12,
        "track.sinks": "[jsonl]",
    }
    given = {a.partition("=")[0] for a in more}
    args = [f"{k}={v}" for k, v in base.items() if k not in given]
    return run_supervised(load_config([*args, *more]), command)


def same_tensors(a: dict, b: dict) -> None:
    import torch

    assert set(a) == set(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics, of the last attempt that wrote it."""
    from verl.track.metrics import read_metrics

    return {line.step: dict(line.values) for line in read_metrics(run_dir)}


def dispatched(run_dir: Path) -> list[str]:
    from verl.track.events import read_events

    return [e.data["group_id"] for e in read_events(run_dir) if e.kind == "dispatched"]


def trained(run_dir: Path) -> dict[int, list[str]]:
    from verl.track.events import read_events

    return {e.step: list(e.data["sample_ids"]) for e in read_events(run_dir) if e.kind == "trained"}


def tensors_of(run_dir: Path, step: int, role: str = "actor") -> dict:
    """Weights and optimizer moments of a checkpoint by their names."""
    from safetensors import safe_open

    out = {}
    for path in sorted((run_dir / "checkpoints" / f"step_{step}" / "state" / role).glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a mapping
    return out


def roles_of(run_dir: Path, step: int) -> list[str]:
    """Return the roles with a state in a checkpoint."""
    return sorted(p.name for p in (run_dir / "checkpoints" / f"step_{step}" / "state").iterdir() if p.is_dir())


def state_of(run_dir: Path, step: int):
    """Return the saved state of the driver."""
    from verl.driver.state import read_state

    return read_state(run_dir / "checkpoints" / f"step_{step}")


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def launch(args: Sequence[str], log: Path) -> Started:
    """`verl train` in a process of its own, which writes to `log`."""
    return Started(["train", *args], log)


def wait_for(predicate, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def saved(run_dir: Path) -> int:
    """The step of the last whole checkpoint; 0 for none."""
    return max(
        (int(p.name.split("_")[1]) for p in (run_dir / "checkpoints").glob("step_*") if "." not in p.name), default=0
    )
