"""Reward models as folders: sequence classifiers of transformers with one label; the other weights have the names of
the language model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from verl.config.model_files import SCORE
from verl.errors import Refused

WEIGHT = SCORE
ADAPTER_SCORE = f"base_model.model.{SCORE}"
"""The name of the head in the folder of an adapter."""
_KINDS = ("ForCausalLM", "LMHeadModel")


def read_score(folder: Path) -> Tensor | None:
    """Return the head's weight [1, H] float32 of the folder of a reward model, or of its adapter; None if it has no
    such head (a language model)."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            if name := next((n for n in (WEIGHT, ADAPTER_SCORE) if n in {*f.keys()}), None):
                weight = f.get_tensor(name).float()
                if weight.shape[0] != 1:
                    raise Refused(f"{folder}: {name} has {weight.shape[0]} labels; a reward model has one")
                return weight
    return None


def classifier_config(folder: Path, pad_token_id: int | None) -> dict[str, Any]:
    """Return the fields of config.json for the model of `folder` as a classifier. Raise ValueError if transformers has
    no such class."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    names = list(config.get("architectures") or [])
    for kind in _KINDS:
        names = [n.replace(kind, "ForSequenceClassification") for n in names]
    if not names or not names[0].endswith("ForSequenceClassification") or not hasattr(transformers, names[0]):
        raise Refused(
            f"model.path={folder}: transformers has no sequence classifier for {config.get('architectures')}, so a"
            " reward model of it could not be saved. Fix: a causal language model whose family has a"
            " ...ForSequenceClassification class"
        )
    pad = config.get("pad_token_id")
    return {
        "architectures": names,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad_token_id if pad is None else pad,
    }


def classifier_tensors(body: str, tensors: Iterable[tuple[str, Tensor]], head: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights below `body` (the model's base_model_prefix), without the language-model head, and the scalar
    head."""
    for name, tensor in tensors:
        if name.startswith(f"{body}."):
            yield name, tensor
    yield WEIGHT, head.detach().to(torch.float32)
