"""LoRA adapters in PEFT's layout, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from verl.config.model_files import read_weight_headers


def write_adapter(
    folder: Path, base: Path, *targets: str, seed: int = 0, size: float = 0.3, without: Sequence[str] = (), **more: Any
) -> Path:
    """Random factors of the base's modules that end so. without: keys that are left out of the weights · more: keys of
    its configuration."""
    said: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "target_modules": list(targets or ("q_proj", "v_proj", "down_proj")),
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "inference_mode": True,
        **more,
    }
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, header in sorted(read_weight_headers(base).items()):
        module = name.removesuffix(".weight")
        if module.endswith(tuple(said["target_modules"])):
            out, into = header.shape
            for factor, shape in (("A", (said["r"], into)), ("B", (out, said["r"]))):
                found[f"base_model.model.{module}.lora_{factor}.weight"] = size * torch.randn(shape, generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(said))
    save_file({k: t for k, t in found.items() if not k.endswith(tuple(without))}, folder / "adapter_model.safetensors")
    return folder
