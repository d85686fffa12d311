"""GRPO steps with images beside TRL's, in the workload of the recipe `shapes` with random weights and larger pictures;
a part of bench/vlm.py."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.environments import Environment, ensure
from bench.laptop import ROOT, TRL, read_settings, run_arm
from bench.lora_beside_trl import Steps

TRL_WITH_IMAGES = Environment(
    TRL.folder.with_name(".venv-bench-trl-images"), (*TRL.requirements, "pillow==13.0.0"), TRL.constraints
)
ROUNDS, STEPS = 2, 3
PROMPTS, SIDE = 8, 448
"""The prompts of a step, of 8 answers each, and the pixels of a side of each picture, which is 256 tokens."""


def measured_pictures() -> Steps:
    """Return the measured steps of verl and of TRL, the two in turn. Raise Unavailable if TRL cannot be installed, or
    does not run."""
    settings = read_settings(["--rounds", str(ROUNDS), "--steps", str(STEPS), "--threads", "1"])
    python = ensure(TRL_WITH_IMAGES, settings.folder / "logs" / "install_trl_images.log")
    programs = {
        "verl": [sys.executable, str(ROOT / "bench" / "verl_arm.py")],
        "TRL": [str(python), str(ROOT / "bench" / "peers" / "trl_vlm.py")],
    }
    home = settings.folder / "shapes"
    spec = spec_of_pictures(home, settings.steps + 1, settings.threads)
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in programs}
    for _ in range(settings.rounds):
        for name, program in programs.items():
            found[name] += run_arm(program, spec | {"folder": str(home / name)}, settings, f"{name} with images")[
                "steps"
            ]
    return found


def spec_of_pictures(home: Any, steps: int, threads: int) -> dict[str, Any]:
    """Make the model and the rows of the recipe under `home`, with larger pictures. Return the settings of both
    arms."""
    from verl.recipes import shapes

    rows = enlarged(shapes.write_problems(home / "train.parquet", PROMPTS * (steps + 1), seed=0))
    return {
        "model": str(shapes.write_model(home / "base", seed=0)),
        "rows": str(rows),
        "recipe": "shapes",
        "reward": "verl.recipes.shapes",
        "threads": threads,
        "compiled": False,
        "lr": 1e-6,
        "dtype": "float32",
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": 8,
        "max_response_tokens": 12,
        "steps": steps,
        "overrides": ["data.max_prompt_tokens=288"],
    }


def enlarged(path: Path) -> Path:
    """Scale the pictures in a file of rows to `SIDE` pixels."""
    import pyarrow.parquet as pq
    from PIL import Image

    from verl.recipes import shapes

    rows = pq.read_table(path).to_pylist()
    for row in rows:
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        row["images"] = [shapes.image_item(picture.resize((SIDE, SIDE)))]
    return shapes.write_parquet(path, rows)
