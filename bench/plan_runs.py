"""Small runs whose CPU seconds are measured by stage, for the planner's calibration.

    python bench/plan_runs.py [OUT.json] [FIRST LAST]

One thread, one process, float32. CPU time moves less with the load of the machine than wall time. The record has what
the planner predicts from: the sizes of the models, the work of a step, its roles; and the medians of the measured
seconds. `bench/calibration.py` compares them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import verl.driver.run
from bench.verl_arm import step_of
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.models import tiny
from verl.planner.beside import LENGTHS, PHASES
from verl.planner.placement import planned_roles, stored_of, work_of

RECORD = Path(__file__).parent / "records" / "planner" / "runs.json"
STEPS = 5
"""Steps of a run, of which the first and the last, which saves, do not count."""
CHARACTERS = "".join(chr(0x4E00 + i) for i in range(1000))


@dataclass(frozen=True, slots=True)
class Shape:
    """A run: the sizes of its model, and those of its step."""

    layers: int
    hidden: int
    prompts: int
    samples: int
    prompt_tokens: int
    answer_tokens: int
    updates: int = 1
    micro_tokens: int = 1024
    algorithm: str = "grpo"
    more: tuple[str, ...] = ()


REF, FULL, PLAIN = ("algorithm.kl_loss_coef=0.01",), ("model.gradient_checkpointing=full",), ()
SHAPES = (
    # learned from
    Shape(2, 128, 8, 4, 24, 24),
    Shape(6, 128, 8, 8, 24, 48),
    Shape(2, 384, 8, 8, 48, 32, 2),
    Shape(4, 256, 4, 8, 24, 96, more=REF),
    Shape(8, 192, 8, 4, 96, 24, more=FULL),
    Shape(3, 512, 4, 4, 32, 32, micro_tokens=512),
    # held out
    Shape(2, 128, 16, 8, 24, 32),
    Shape(4, 128, 4, 4, 24, 96),
    Shape(8, 128, 8, 8, 24, 24, 2),
    Shape(12, 128, 4, 8, 48, 48),
    Shape(2, 256, 16, 4, 24, 48, more=REF),
    Shape(4, 256, 8, 8, 48, 48),
    Shape(6, 256, 4, 8, 24, 64, more=FULL),
    Shape(4, 256, 8, 4, 160, 16, micro_tokens=2048),
    Shape(8, 256, 4, 4, 24, 48, 2, more=REF),
    Shape(2, 384, 4, 16, 24, 64),
    Shape(4, 384, 8, 4, 48, 48, micro_tokens=512),
    Shape(6, 384, 4, 4, 24, 96),
    Shape(2, 512, 8, 4, 64, 24, 4),
    Shape(4, 512, 4, 8, 24, 32, more=REF),
    Shape(5, 320, 8, 8, 32, 40),
    Shape(3, 192, 16, 8, 24, 24, 4, algorithm="ppo"),
)
LEARNED = 6
"""The first ones are those that the figures are learned from."""


def measured(shape: Shape, folder: Path) -> dict[str, Any]:
    """Return the record of a run."""
    args = arguments_of(shape, folder)
    lines = list[Mapping[str, float]]()
    run_rl(load_config(args), on_step=lambda number, values: lines.append(dict(values)), quiet=True)
    steps = [values for values in lines if "bench_cpu_s/rollout" in values and LENGTHS[1] in values][1:-1]

    def median(names: Sequence[str], prefix: str) -> float:
        return statistics.median(sum(values.get(f"{prefix}{name}", 0.0) for name in names) for values in steps)

    config = load_config(args).config
    prompt, response = (median([name], "") for name in LENGTHS)
    seconds = {stage: median(names, "bench_cpu_s/") for stage, names in PHASES.items()}
    return {
        "shape": asdict(shape),
        "work": asdict(replace(work_of(config, response), prompt_tokens=prompt)),
        "stored": asdict(stored_of(config)),
        "roles": [asdict(role) for role in planned_roles(config)],
        "seconds": {stage: round(s, 5) for stage, s in seconds.items() if s > 0},
    }


def arguments_of(shape: Shape, folder: Path, steps: int = STEPS) -> list[str]:
    """Write the model and the rows of a run of so many steps, and return its arguments."""
    tokenizer, s = tiny.character_tokenizer(CHARACTERS), shape
    heads = s.hidden // 64
    model = tiny.qwen3(
        tokenizer, hidden=s.hidden, layers=s.layers, heads=heads, kv_heads=heads, ffn=3 * s.hidden, max_positions=1024
    )
    tiny.save(model, tokenizer, folder / "model")
    text = CHARACTERS[: s.prompt_tokens - 3]  # beside the marks of the template
    row = {"prompt": [{"role": "user", "content": text}], "data_source": "bench", "reward_model": {"ground_truth": ""}}
    lines = [{**row, "prompt": [{"role": "user", "content": CHARACTERS[i] + text[1:]}]} for i in range(steps * 16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "grade.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(sum(map(ord, solution_str)) % 7)\n"
    )
    given = {a.partition("=")[0] for a in s.more}
    base = {
        "run.root_dir": folder,
        "run.name": "run",
        "run.total_steps": steps,
        "run.threads": 1,
        "run.eval_before": "false",
        "run.eval_after": "false",
        "run.save_every_steps": 0,
        "model.path": folder / "model",
        "model.dtype": "float32",
        "model.device": "cpu",
        "data.train_files": f"[{folder / 'rows.jsonl'}]",
        "data.max_prompt_tokens": s.prompt_tokens + 8,
        "algorithm.name": s.algorithm,
        "step.prompts_per_step": s.prompts,
        "step.samples_per_prompt": s.samples,
        "step.updates_per_step": s.updates,
        "step.max_tokens_per_microbatch": s.micro_tokens,
        "optim.lr": 1e-6,
        "rollout.max_response_tokens": s.answer_tokens,
        "reward.path": folder / "grade.py",
        "reward.num_workers": 1,
        "track.sinks": "[jsonl]",
    }
    return [f"{key}={value}" for key, value in base.items() if key not in given] + list(s.more)


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    verl.driver.run.Step = step_of  # type: ignore[assignment, misc]
    record = Path(argv[0]) if argv else RECORD
    first, last = map(int, argv[1:3]) if len(argv) > 2 else (0, len(SHAPES))
    found = list[dict[str, Any]]()
    for shape in SHAPES[first:last]:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measured(shape, Path(folder)))
        print(shape, found[-1]["seconds"], flush=True)
        record.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
