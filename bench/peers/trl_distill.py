"""The same distillation in TRL's DistillationTrainer or its GKDTrainer (`trainer` of the spec), with the settings that
favour them on a CPU: no gradient checkpointing, on-policy answers alone, the batch in as many passes as is fastest.

python trl_distill.py SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from meter import Meter, clocks, elapsed
from task import read_rows, truth
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_grpo import force_lengths

Measured = dict[str, float]


def main(spec: dict[str, Any], result: Path) -> None:
    meter, measured = Meter(), Measured()
    torch.set_num_threads(spec["threads"])
    asked = read_rows(spec["rows"], spec["prompts_per_step"] * spec["steps"])
    rows = [row for row in asked for _ in range(spec["samples_per_prompt"])]  # each prompt as often as it is answered
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(spec[of], dtype=torch.float32) for of in ("model", "teacher")
    )
    build = {"DistillationTrainer": distillation, "GKDTrainer": gkd}[spec["trainer"]]
    trainer = build(spec, rows, measured, model=student, teacher_model=teacher, processing_class=tokenizer)
    if spec["lengths"]:
        force_lengths(trainer, json.loads(Path(spec["lengths"]).read_text()))
    trainer.add_callback(_AtStepEnd(meter, measured))
    trainer.train()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    meter.write(result, versions=versions)


def common(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": spec["folder"],
        "per_device_train_batch_size": spec["prompts_per_step"] * spec["samples_per_prompt"] // spec["micro_batches"],
        "gradient_accumulation_steps": spec["micro_batches"],
        "max_steps": spec["steps"],
        "temperature": 1.0,
        "beta": spec["beta"],
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "torch_compile": spec["compiled"],
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }


def distillation(spec: dict[str, Any], rows: list[dict[str, Any]], measured: Measured, **models: Any) -> Any:
    class Timed(trl.DistillationTrainer):  # type: ignore[misc, name-defined]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return _clocked(measured, super()._generate_single_turn, *args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            _count(measured, out["prompt_mask"], out["completion_mask"])
            return out

    config = trl.DistillationConfig(
        **common(spec), max_completion_length=spec["max_response_tokens"], shuffle_dataset=False, disable_dropout=True
    )
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    return Timed(args=config, train_dataset=data, **models)


def gkd(spec: dict[str, Any], rows: list[dict[str, Any]], measured: Measured, **models: Any) -> Any:
    class Timed(GKDTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        @staticmethod
        def generate_on_policy_outputs(model: Any, inputs: Any, generation_config: Any) -> Any:
            out = _clocked(measured, GKDTrainer.generate_on_policy_outputs, model, inputs, generation_config)
            _count(measured, inputs["prompt_attention_mask"], out[2] != -100)
            return out

    config = GKDConfig(**common(spec), lmbda=1.0, max_new_tokens=spec["max_response_tokens"])
    messages = [[*row["prompt"], {"role": "assistant", "content": truth(row)}] for row in rows]
    return Timed(args=config, train_dataset=Dataset.from_list([{"messages": m} for m in messages]), **models)


def _clocked(measured: Measured, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    began = clocks()
    out = generate(*args, **kwargs)
    _add(measured, elapsed("rollout", began, clocks()))
    return out


def _count(measured: Measured, prompts: torch.Tensor, answers: torch.Tensor) -> None:
    lengths = answers.sum(1)
    longest = max(int(lengths.max()), int(measured.pop("longest_response_tokens", 0)))
    _add(measured, {"prompt_tokens": int(prompts.sum()), "response_tokens": int(lengths.sum())})
    measured["longest_response_tokens"] = longest


def _add(measured: Measured, found: Measured) -> None:
    """A step may draw its answers in several parts."""
    for name, value in found.items():
        measured[name] = measured.get(name, 0) + value


class _AtStepEnd(TrainerCallback):
    def __init__(self, meter: Meter, measured: Measured) -> None:
        self.meter, self.measured = meter, measured

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.step(**self.measured)
        self.measured.clear()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
