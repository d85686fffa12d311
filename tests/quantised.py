"""Folders as transformers and bitsandbytes write them: codes, scales, and the method in config.json."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from verl.nn.quant_linear import quantise_linears

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def quantised_copy(source: Path, path: Path, kind: str, described: dict = BITSANDBYTES) -> Path:
    """Write the model of `source` in 4 or 8 bits, with its tokenizer. described: quantization_config"""
    shutil.copytree(source, path)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantise_linears(model, kind)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return path
