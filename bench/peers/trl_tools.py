"""Rollouts with a slow tool in TRL's GRPOTrainer, by its own tool loop: `generate`, or with `continuous` its continuous
batching; the tool is an environment class (`tool` of the spec, in countdown.py).

python trl_tools.py SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import countdown
import torch
import transformers
import trl
from datasets import Dataset
from meter import Meter, clocks, elapsed
from task import read_rows, score, truth
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def main(spec: dict[str, Any], result: Path) -> None:
    meter, measured = Meter(), dict[str, float]()
    torch.set_num_threads(spec["threads"])
    n, prompts = spec["samples_per_prompt"], spec["prompts_per_step"]
    rows = read_rows(spec["rows"], prompts * spec["steps"])
    config = trl.GRPOConfig(
        output_dir=spec["folder"],
        per_device_train_batch_size=prompts * n,
        num_generations=n,
        max_completion_length=spec["max_response_tokens"],
        max_tool_calling_iterations=countdown.CALLS,
        use_transformers_continuous_batching=spec["continuous"],
        max_steps=spec["steps"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )

    class Timed(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def _generate(self, prompts: list[Any]) -> Any:
            began = clocks()
            out = super()._generate(prompts)
            measured.update(elapsed("rollout", began, clocks()))
            return out

        def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
            out = super()._tool_call_loop(*args, **kwargs)
            measured["sampled_tokens"] = sum(map(sum, out[0]))
            measured["calls"], measured["failed_calls"] = out[4:6]
            return out

    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    tokenizer.response_template = spec["response_template"]
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        environment_factory=vars(countdown)[spec["tool"]],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "truth": truth(row)} for row in rows]),
        callbacks=[_AtStepEnd(meter, measured)],
    )
    trainer.train()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    meter.write(result, versions=versions)


def reward(completions: list[list[dict[str, str]]], truth: list[str], **_: Any) -> list[float]:
    return [score(completion[-1]["content"], expected) for completion, expected in zip(completions, truth)]


class _AtStepEnd(TrainerCallback):
    def __init__(self, meter: Meter, measured: dict[str, float]) -> None:
        self.meter, self.measured = meter, measured

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.step(**self.measured)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
