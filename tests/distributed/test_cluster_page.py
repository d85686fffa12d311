"""The command of docs/cluster.md for one machine, as it stands there: it starts a Ray of its own and trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from verl.models import tiny
from verl.recipes import arithmetic

ROOT = Path(__file__).parents[2]
SMALL = (
    "run.name=page run.total_steps=1 run.eval_before=false run.eval_after=false run.eval_every_steps=0 "
    "run.keep_best=null "
    "data.train_files=[train.jsonl] data.eval_files=[] data.max_prompt_tokens=16 rollout.max_response_tokens=12 "
    f"step.prompts_per_step=4 step.samples_per_prompt=4 reward.path={ROOT}/tests/reward_length.py reward.num_workers=1 "
    "model.dtype=float32 model.device=cpu run.wait_timeout_s=120"
)


def test_the_command_of_the_page_trains(tmp_path):
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    tiny.save(
        tiny.qwen3(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, seed=1), tokenizer, tmp_path / "model"
    )
    arithmetic.write_rl(tmp_path / "train.jsonl", 16, seed=1, held=False)
    (command,) = re.findall(
        r"^verl (train .*cluster.backend=ray.*)$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE
    )
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    words = [sys.executable, "-m", "verl.cli", *command.split(), *SMALL.split()]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 ranks = 2 data" in done.stdout and "2 rollout replicas" in done.stdout
    plan = json.loads((tmp_path / "runs" / "page" / "plan.json").read_text())
    assert plan["cluster"]["queue"] == "shared" and plan["cluster"]["sync"] == "shm"
    (line,) = (tmp_path / "runs" / "page" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
