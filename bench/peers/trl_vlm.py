"""GRPO with images in TRL's GRPOTrainer, with the settings of trl_grpo.py.

python trl_vlm.py SPEC.json RESULT.json

The processor has no part for videos, which would need torchvision. Answers have no image tokens: transformers takes
each of them for an image, and stops.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import trl
from datasets import Dataset, Features, Image, List, Value
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, Qwen3VLProcessor
from trl_grpo import measure, settings, timed

QUESTION = "shapes?"


class WithoutVideos(Qwen3VLProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def main(spec: dict[str, Any], result: Path) -> None:
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    processor = WithoutVideos(
        image_processor=AutoImageProcessor.from_pretrained(spec["model"], backend="pil"),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    model = AutoModelForImageTextToText.from_pretrained(spec["model"], dtype=torch.float32)
    config = model.config
    banned = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    trainer = timed(trl.GRPOTrainer)(
        model=model,
        processing_class=processor,
        reward_funcs=reward,
        args=settings(spec, generation_kwargs={"suppress_tokens": banned}),
        train_dataset=rows_of(Path(spec["rows"]), spec["prompts_per_step"] * spec["steps"]),
    )
    measure(trainer, result)


def rows_of(path: Path, count: int) -> Dataset:
    """Return the first rows of the recipe's file as TRL reads them."""
    rows = [
        {
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": row["images"][0]["bytes"], "path": None}],
            "truth": row["reward_model"]["ground_truth"],
        }
        for row in pq.read_table(path).slice(0, count).to_pylist()
    ]
    message = {"role": Value("string"), "content": Value("string")}
    features = Features({"prompt": List(message), "images": List(Image()), "truth": Value("string")})
    return Dataset.from_list(rows, features=features)


def reward(completions: list[list[dict[str, str]]], truth: list[str], **_: Any) -> list[float]:
    return [float(completion[0]["content"].strip() == expected) for completion, expected in zip(completions, truth)]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
