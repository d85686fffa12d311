"""The workloads of `bench/ragged.py`: random models, prompts and answer lengths that every arm is given alike."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB = 32_000
IDEOGRAPHS = 20_900


@dataclass(frozen=True, slots=True)
class Workload:
    hidden: int
    layers: int
    ffn: int
    prompts_per_step: int
    samples_per_prompt: int
    prompt_tokens: tuple[int, int]
    """Least and most."""
    response_tokens: tuple[int, int, int]
    """Mean of the exponential distribution, least and most. Forced: random weights have no sense of an end."""


_RAGGED = {"prompts_per_step": 8, "samples_per_prompt": 8, "prompt_tokens": (32, 64), "response_tokens": (96, 8, 384)}
_LONG = {
    "prompts_per_step": 4,
    "samples_per_prompt": 8,
    "prompt_tokens": (1024, 1024),
    "response_tokens": (128, 128, 128),
}
_SIZES = {"10M": {"hidden": 256, "layers": 6, "ffn": 768}, "100M": {"hidden": 768, "layers": 12, "ffn": 2048}}
WORKLOADS = {
    f"{name}-{size}": Workload(**_SIZES[size], **shape)  # type: ignore[arg-type]
    for name, shape in (("ragged", _RAGGED), ("long", _LONG))
    for size in _SIZES
}


@dataclass(frozen=True, slots=True)
class Inputs:
    model: Path
    rows: Path
    lengths: Path
    """JSON [steps, sequences of a step] of response tokens."""


def make_inputs(folder: Path, name: str, steps: int, seed: int = 0) -> Inputs:
    """Model, prompts and lengths of `steps` steps, under `folder`; the model is made once."""
    from verl.models import tiny

    work = WORKLOADS[name]
    model = folder / name / "model"
    # one token per character: the first CJK ideographs and Hangul syllables
    characters = [chr(0x4E00 + i) for i in range(IDEOGRAPHS)] + [
        chr(0xAC00 + i) for i in range(VOCAB - IDEOGRAPHS - len(tiny.SPECIAL_TOKENS))
    ]
    if not (model / "config.json").exists():
        tokenizer = tiny.character_tokenizer(characters)
        heads = work.hidden // 64
        tiny.save(
            tiny.qwen3(
                tokenizer,
                hidden=work.hidden,
                layers=work.layers,
                heads=heads,
                kv_heads=heads // 2,
                ffn=work.ffn,
                max_positions=2048,
            ),
            tokenizer,
            model,
        )
    rng = np.random.default_rng(seed)
    rows, lengths = [], []
    mean, least, most = work.response_tokens
    for _ in range(steps):
        drawn = (
            np.clip(rng.exponential(mean, work.prompts_per_step * work.samples_per_prompt), least, most)
            if least < most
            else None
        )
        count = work.prompts_per_step * work.samples_per_prompt
        lengths.append([int(n) for n in drawn] if drawn is not None else [mean] * count)
        for _ in range(work.prompts_per_step):
            tokens = int(rng.integers(work.prompt_tokens[0], work.prompt_tokens[1] + 1)) - 3  # the template's markers
            text = "".join(characters[i] for i in rng.integers(0, len(characters), tokens))
            rows.append(
                {
                    "prompt": [{"role": "user", "content": text}],
                    "data_source": "bench",
                    "reward_model": {"ground_truth": ""},
                }
            )
    inputs = Inputs(model, folder / name / "train.jsonl", folder / name / "lengths.json")
    inputs.rows.write_text("".join(json.dumps(r) + "\n" for r in rows))
    inputs.lengths.write_text(json.dumps(lengths))
    return inputs


if __name__ == "__main__":
    sys.exit(__doc__)
