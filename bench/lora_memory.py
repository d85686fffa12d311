"""The peak memory of runs with a quantised base: the model that they train, and the process that is measured.

A process of its own runs `verl train` (`python bench/lora_memory.py KEY=VALUE ...`) and prints its peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PEAK = "peak resident memory in GiB:"
TIMEOUT_S = 4 * 3600.0
SHAPES: Mapping[str, Mapping[str, int]] = {
    "1.5B": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""The shape of Qwen2.5-1.5B, and a small one for tests."""


def write_base(folder: Path, shape: Mapping[str, int]) -> Path:
    """Write a model of this shape with random weights in NF4, as bitsandbytes does, layer by layer, with a tokenizer.
    Return its folder, which is written once."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl.models import tiny
    from verl.nn.quant import quantise_weight
    from verl.recipes import arithmetic

    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tiny.character_tokenizer(arithmetic.CHARACTERS).save_pretrained(folder)
    config = Qwen2Config.from_dict({**shape, "tie_word_embeddings": True})
    config.architectures = ["Qwen2ForCausalLM"]
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    files, random = dict[str, str](), torch.Generator().manual_seed(0)
    parts = {"rest": [], **{f"layers.{i}.": [] for i in range(config.num_hidden_layers)}}  # type: ignore[var-annotated]
    for name, p in model.named_parameters():
        parts[next((part for part in parts if part in name), "rest")].append((name, p.shape))
    for number, named in enumerate(parts.values()):
        tensors = dict[str, torch.Tensor]()
        for name, size in named:
            module = name.removesuffix(".weight")
            values = torch.ones(size) if "norm" in name else torch.randn(size, generator=random) * 0.02
            if module.endswith("_proj"):
                codes = quantise_weight(values.bfloat16(), "nf4").tensors()
                tensors |= {f"{module}.{part}": t for part, t in codes.items()}
            else:
                tensors[name] = values.bfloat16()
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    described = config.to_dict() | {"dtype": "bfloat16", "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def run_arguments(base: Path, home: Path, algorithm: str, tokens: int, threads: int) -> list[str]:
    """Return the arguments of a run of one step of 8 prompts with 8 answers of so many tokens."""
    from verl.recipes import arithmetic

    rows = home / "rows.jsonl"
    if not rows.is_file():
        arithmetic.write_rl(rows, 64, seed=0, held=False)
    of: Mapping[str, Sequence[str]] = {
        "grpo": ("algorithm.kl_loss_coef=0",),
        "ppo": ("algorithm.kl_loss_coef=0.1", "critic.lr=1e-4"),
    }
    return [
        "train",
        f"model.path={base}",
        f"data.train_files=[{rows}]",
        f"reward.path={Path(__file__).with_name('random_reward.py')}",
        f"run.root_dir={home}",
        f"run.name={algorithm}-{os.getpid()}",
        f"run.threads={threads}",
        f"algorithm.name={algorithm}",
        f"rollout.max_response_tokens={tokens}",
        *of[algorithm],
        *("model.device=cpu", "model.lora.rank=32", "model.gradient_checkpointing=full", "optim.lr=1e-4"),
        *("step.prompts_per_step=8", "step.samples_per_prompt=8", "step.max_tokens_per_microbatch=1024"),
        *("rollout.ignore_eos=true", "run.total_steps=1", "run.eval_before=false", "run.eval_after=false"),
        *("data.max_prompt_tokens=16", "reward.num_workers=1", "run.wait_timeout_s=7200"),
    ]


def peak_gib(arguments: Sequence[str]) -> float:
    """Run `verl train` in a process of its own and return its peak resident memory. Raise RuntimeError with the end of
    its output if it fails."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    found = [line for line in done.stdout.splitlines() if line.startswith(PEAK)]
    if done.returncode or not found:
        raise RuntimeError(f"the run ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return float(found[-1].removeprefix(PEAK))


def main(argv: Sequence[str]) -> int:
    from verl.cli import main as verl

    code: Any = verl([*argv])
    # ru_maxrss begins with the memory of the process that started this one
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(PEAK, int(line.split()[1]) / 2**20, flush=True)
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
