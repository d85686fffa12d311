"""The ground truth of an RL row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.data.values import kind_of, object_in, refuse_surrogates

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
GROUND_TRUTH_KEYS = ("ground_truth", "answer", "solution")


def ground_truth_of(row: Mapping[str, Any], where: str, prompt_key: str) -> Any:
    model = object_in(row.get("reward_model"), where, "reward_model")
    if model.get("ground_truth") is not None:
        return model["ground_truth"]
    return next((row[k] for k in GROUND_TRUTH_KEYS if k != prompt_key and row.get(k) is not None), None)


def gsm8k_texts(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    for key in ("question", "answer"):
        if not isinstance(row[key], str):
            raise ValueError(f"{where}: {key!r} must be a string, got {kind_of(row[key])}")
        refuse_surrogates(row[key], f"{where}: {key!r}")
    return row["question"], row["answer"]


def gsm8k_number(answer: str, where: str) -> str:
    found = GSM8K_ANSWER.search(answer)
    if not found:
        raise ValueError(
            f"{where}: 'answer' has no '#### NUMBER' as GSM8K's rows have (it ends with {answer[-40:]!r})."
            " Fix: for other question/answer data, data.prompt_key=question (the answer column is then the ground"
            " truth)"
        )
    return found.group(1).replace(",", "")
