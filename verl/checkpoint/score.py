"""Reward models as folders: sequence classifiers of transformers with one label; the other weights have the names of
the language model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from verl.config.model_files import SCORE
from verl.errors import Refused
from verl.models.families import family_name, family_of

WEIGHT = SCORE
ADAPTER_SCORE = f"base_model.model.{SCORE}"
"""The name of the head in the folder of an adapter."""
_KINDS, _OF_IMAGES, _CLASSIFIER = (
    ("ForCausalLM", "LMHeadModel"),
    "ForConditionalGeneration",
    "ForSequenceClassification",
)


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
    """Return the fields of config.json for the model of `folder` as a classifier. Raise ValueError for a language model
    if transformers has no such class; it has it for few models that read images, whose class is named alike."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    names, reads_images = list(config.get("architectures") or []), family_name(config) is not None
    for kind in (*_KINDS, _OF_IMAGES) if reads_images else _KINDS:
        names = [n.replace(kind, _CLASSIFIER) for n in names]
    known = names and names[0].endswith(_CLASSIFIER)
    if not known or not (reads_images or hasattr(transformers, names[0])):
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


def is_scored(config: Any) -> bool:
    """Return True for the configuration of a reward model that reads images."""
    return family_of(config) is not None and str(config.architectures[0]).endswith(_CLASSIFIER)


def with_score(model: Any) -> nn.Module:
    """Return the language model with a scalar head in place of its own."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    assert "." not in name, name
    delattr(model, name)
    model.score = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
    model.all_tied_weights_keys = {}
    found: nn.Module = model
    return found


def classifier_tensors(body: str, tensors: Iterable[tuple[str, Tensor]], head: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights below `body` (the model's base_model_prefix), without the language-model head, and the scalar
    head."""
    for name, tensor in tensors:
        if name.startswith(f"{body}."):
            yield name, tensor
    yield WEIGHT, head.detach().to(torch.float32)
