"""Reward models as folders: the body as for any model, and the scalar head as transformers' sequence classifiers keep it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHT = "score.weight"
_SHARD = "model-score.safetensors"


def read_score(folder: Path) -> Tensor | None:
    """The head's weight [1, H] float32 of a reward-model folder; None where it has none (a plain language model)."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            if WEIGHT in f.keys():  # noqa: SIM118 - not a mapping
                weight = f.get_tensor(WEIGHT).float()
                if weight.shape[0] != 1:
                    raise ValueError(f"{folder}: {WEIGHT} has {weight.shape[0]} labels; a reward model has one")
                return weight
    return None


def add_score(folder: Path, weight: Tensor, *, pad_token_id: int | None) -> None:
    """Make an exported causal-LM folder a one-label sequence classifier with this head."""
    index = folder / "model.safetensors.index.json"
    head = {WEIGHT: weight.detach().to("cpu", torch.float32).contiguous()}
    if index.is_file():
        found = json.loads(index.read_text())
        save_file(head, folder / _SHARD, metadata={"format": "pt"})
        found["weight_map"][WEIGHT] = _SHARD
        index.write_text(json.dumps(found, indent=2) + "\n")
    else:
        path = folder / "model.safetensors"
        save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = [n.replace("ForCausalLM", "ForSequenceClassification").replace("LMHeadModel", "ForSequenceClassification") for n in config.get("architectures") or []]
    config |= {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if config.get("pad_token_id") is None and pad_token_id is not None:
        config["pad_token_id"] = pad_token_id
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
