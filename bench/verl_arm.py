"""The same run in verl: `verl train recipe=quickstart` as it ships, with its logs, samples and verified weight syncs.

    python bench/verl_arm.py SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.meter import Meter


def main(spec: dict[str, Any], result: Path) -> None:
    meter = Meter()
    import torch
    import transformers

    import verl
    from verl.config.load import load_config
    from verl.driver.launch import run_rl

    rows_per_step = spec["prompts_per_step"] * spec["samples_per_prompt"]

    def on_step(number: int, values: Mapping[str, float]) -> None:
        prompt_tokens = values["prompt_length/mean"] * rows_per_step
        phases = {name.removeprefix("timing_s/"): s for name, s in values.items() if name.startswith("timing_s/")}
        meter.step(
            rollout_s=phases["rollout"], update_s=phases["update"], prompt_tokens=prompt_tokens,
            response_tokens=values["perf/total_num_tokens"] - prompt_tokens,
            longest_response_tokens=values["response_length/max"],
            **{f"phase_{name}_s": s for name, s in phases.items()},
        )  # fmt: skip

    run_rl(load_config(overrides(spec)), on_step=on_step, quiet=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "verl": verl.__version__}
    meter.write(result, versions=versions, drop_last_steps=1)  # the last step holds the checkpoint


def overrides(spec: Mapping[str, Any]) -> list[str]:
    """One step more than the peers: the last is dropped. The rows are taken in the order of the file, as they do."""
    return [
        "recipe=quickstart", f"model.path={spec['model']}", f"model.dtype={spec['dtype']}", "model.device=cpu",
        f"data.train_files=[{spec['rows']}]", "data.shuffle=false", "reward.path=verl.recipes.arithmetic",
        f"step.prompts_per_step={spec['prompts_per_step']}", f"step.samples_per_prompt={spec['samples_per_prompt']}",
        f"rollout.max_response_tokens={spec['max_response_tokens']}", f"optim.lr={spec['lr']}",
        f"run.root_dir={spec['folder']}", "run.name=verl", "run.resume=never", f"run.total_steps={spec['steps'] + 1}",
        f"run.threads={spec['threads']}", "run.eval_every_steps=0", "run.eval_before=false", "run.eval_after=false",
    ]  # fmt: skip


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
