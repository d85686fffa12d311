"""A GRPO step of TRL beside verl's in bench/gpu.py: the same model, prompts and number and length of answers."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.environments import Unavailable, run_logged
from bench.gpu_parts import STEPS, Bench, Row

PROGRAM = Path(__file__).resolve().parent / "peers" / "trl_grpo.py"


def trl_here() -> str | None:
    """Return this interpreter if TRL is installed for it, else None."""
    return sys.executable if importlib.util.find_spec("trl") else None


def trl_step(bench: Bench, python: str, folder: Path, timeout_s: float) -> Iterator[Row]:
    """Yield the seconds of TRL's step and of its parts, the median without the first step. python: the interpreter with
    TRL · folder: where a run of verl has left its model and rows."""
    if timeout_s <= 0:
        yield Row("step", "TRL's step", None, "s", note="no time is left: raise --limit-s, or use --only step")
        return
    prompts, answers, tokens = bench.sizes.step
    spec = {
        "model": str(folder / "model"),
        "rows": str(folder / "rows.jsonl"),
        "threads": torch.get_num_threads(),
        "compiled": False,
        "lr": 1e-6,
        "dtype": "bfloat16",
        "device": bench.device.type,
        "prompts_per_step": prompts,
        "samples_per_prompt": answers,
        "micro_batches": answers,  # the logits of all answers at once would be larger than a card
        "max_response_tokens": tokens,
        "steps": STEPS,
        "folder": str(folder / "trl"),
    }
    given, result = folder / "trl.json", folder / "trl_result.json"
    given.write_text(json.dumps(spec))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if bench.device.type == "cpu" else {}
    command = [python, str(PROGRAM), str(given), str(result)]
    try:
        run_logged(command, folder / "trl.log", timeout_s=timeout_s, env={**os.environ, **hidden})
    except Unavailable as e:
        yield Row("step", "TRL's step", None, "s", note=str(e))
        return
    found = json.loads(result.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    versions += "; float32 weights under bfloat16 autocast"
    for name, key in (("TRL's step", "wall_s"), ("TRL's rollout", "rollout_s"), ("TRL's update", "update_s")):
        yield Row("step", name, statistics.median(step[key] for step in found["steps"]), "s", note=versions)
