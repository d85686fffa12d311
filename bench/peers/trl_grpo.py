"""The same run in TRL's GRPOTrainer, with the settings that favour it on a CPU (no gradient checkpointing;
threads and compilation as a sweep found them best).

python trl_grpo.py SPEC.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from checksum import compute_score
from datasets import Dataset
from meter import Meter, clocks, elapsed
from peak_bytes import PeakBytes
from task import read_rows, score, truth
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback


def main(spec: dict[str, Any], result: Path) -> None:
    torch.set_num_threads(spec["threads"])
    rows = read_rows(spec["rows"], spec["prompts_per_step"] * spec["steps"])
    trainer = timed(trl.GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        reward_funcs=checksum if spec.get("lengths") else reward,
        args=settings(spec),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "truth": truth(row)} for row in rows]),
        peft_config=factors(spec["lora_rank"]) if spec.get("lora_rank") else None,
    )
    if spec.get("count_bytes"):
        invent_answers(trainer, json.loads(Path(spec["lengths"]).read_text()))
        count_bytes(trainer)
    elif spec.get("lengths"):
        force_lengths(trainer, json.loads(Path(spec["lengths"]).read_text()))
    measure(trainer, result)


def settings(spec: dict[str, Any], **more: Any) -> trl.GRPOConfig:
    """Return the settings of a run; more: further ones."""
    n, prompts = spec["samples_per_prompt"], spec["prompts_per_step"]
    parts = spec.get("micro_batches", 1)
    return trl.GRPOConfig(
        output_dir=spec["folder"],
        per_device_train_batch_size=prompts * n // parts,
        gradient_accumulation_steps=parts,
        num_generations=n,
        max_completion_length=spec["max_response_tokens"],
        max_steps=spec["steps"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        use_cpu=spec.get("device", "cpu") == "cpu",
        bf16=spec["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        torch_compile=spec["compiled"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        **more,
    )


def measure(trainer: Any, result: Path) -> None:
    """Train, and write what each step took."""
    meter = Meter()
    trainer.add_callback(_AtStepEnd(meter, trainer))
    trainer.train()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    meter.write(result, versions=versions)


def factors(rank: int) -> Any:
    """LoRA in all linear layers, as verl's arm has it."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def reward(completions: list[list[dict[str, str]]], truth: list[str], **_: Any) -> list[float]:
    return [score(completion[0]["content"], expected) for completion, expected in zip(completions, truth)]


def checksum(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [compute_score("", completion[0]["content"], "") for completion in completions]


def force_lengths(trainer: Any, lengths: list[list[int]]) -> None:
    """Make the n-th sampled row end after the workload's number of tokens, equal in every arm."""
    end, left, generate = trainer.processing_class.eos_token_id, chain.from_iterable(lengths), trainer.model.generate

    class Force(LogitsProcessor):
        def __init__(self, wanted: list[int], start: int) -> None:
            self.wanted, self.start = torch.tensor(wanted), start

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            last = (self.wanted.to(ids.device) <= ids.shape[1] - self.start + 1)[:, None]
            is_end = torch.arange(scores.shape[1], device=ids.device) == end
            return scores.masked_fill(
                last ^ is_end, -torch.inf
            )  # before its last token never the end, then nothing else

    def forced(*args: Any, **kwargs: Any) -> Any:
        rows, start = kwargs["input_ids"].shape
        force = Force(list(islice(left, rows)), start)
        return generate(*args, **kwargs, logits_processor=LogitsProcessorList([force]))

    trainer.model.generate = forced


def invent_answers(trainer: Any, lengths: list[list[int]]) -> None:
    """Make random answers of the workload's lengths, without generating: only the update's memory is measured."""
    end, steps, vocab = trainer.processing_class.eos_token_id, iter(lengths), trainer.model.config.vocab_size

    def invented(*_: Any, input_ids: torch.Tensor, **__: Any) -> torch.Tensor:
        wanted = torch.tensor(next(steps))[:, None]
        answers = torch.randint(end + 1, vocab, (len(wanted), int(wanted.max())))
        answers[torch.arange(answers.shape[1]) >= wanted - 1] = end
        return torch.cat([input_ids, answers.to(input_ids.device)], dim=1)

    trainer.model.generate = invented


def count_bytes(trainer: Any) -> None:
    """The most tensor bytes of a forward and backward pass, as `verl_arm.py` counts them."""
    compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward
    found: list[PeakBytes] = []

    def counted_loss(*args: Any, **kwargs: Any) -> Any:
        found.append(PeakBytes())
        found[-1].__enter__()
        return compute_loss(*args, **kwargs)

    def counted_backward(*args: Any, **kwargs: Any) -> Any:
        backward(*args, **kwargs)
        found[-1].__exit__(None, None, None)
        trainer.measured["peak_tensor_mb"] = max(trainer.measured.get("peak_tensor_mb", 0.0), found[-1].most / 1e6)

    trainer.compute_loss, trainer.accelerator.backward = counted_loss, counted_backward


def timed(trainer_class: type) -> type:
    """Return the trainer with a clock around generation and around everything before the loss."""

    class Timed(trainer_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.measured: dict[str, float] = {}
            self.scored = clocks()
            super().__init__(*args, **kwargs)

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = clocks()
            out = super()._generate_single_turn(*args, **kwargs)
            self.measured |= elapsed("rollout", began, clocks())
            return out

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            lengths = out["completion_mask"].sum(1)
            self.measured |= {
                "prompt_tokens": int(out["prompt_mask"].sum()),
                "response_tokens": int(lengths.sum()),
                "longest_response_tokens": int(lengths.max()),
            }
            self.scored = clocks()  # from here to the end of the step: loss, backward, optimizer
            return out

    return Timed


class _AtStepEnd(TrainerCallback):
    def __init__(self, meter: Meter, trainer: Any) -> None:
        self.meter, self.trainer = meter, trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.step(**self.trainer.measured, **elapsed("update", self.trainer.scored, clocks()))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
