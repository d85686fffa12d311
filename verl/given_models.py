"""Models that a Python program has loaded: from a folder by verl's class, or by transformers, as the trainers accept
them."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from verl.config.model_files import find_model_folder
from verl.errors import Refused
from verl.model_engine.hf_model import load_causal_lm


class AutoModelForCausalLMWithValueHead:
    """A causal LM from a Hugging Face folder. The value head belongs to the critic and is made when an algorithm needs
    one."""

    def __init__(self, pretrained_model: nn.Module, path: Path) -> None:
        self.pretrained_model = pretrained_model
        self.path = path

    @classmethod
    def from_pretrained(cls, path: str | Path) -> AutoModelForCausalLMWithValueHead:
        """Load a folder, or a hub id from the local cache. Raise ValueError otherwise; no request is sent to the
        hub."""
        folder = find_model_folder(str(path))
        return cls(load_causal_lm(folder), folder)


def wrapped(model: AutoModelForCausalLMWithValueHead | nn.Module) -> AutoModelForCausalLMWithValueHead:
    """Return the model. A model of transformers is copied with its present weights in float32, into the model class
    with which the folder of its origin is loaded. Raise ValueError if that folder does not exist."""
    if isinstance(model, AutoModelForCausalLMWithValueHead):
        return model
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not isinstance(model, nn.Module) or not name:
        fix = "give AutoModelForCausalLMWithValueHead.from_pretrained(FOLDER), or a model of transformers from a folder"
        raise Refused(f"model is a {type(model).__name__} without a folder: {fix}")
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(name)
    try:
        wrapped.pretrained_model.load_state_dict(model.state_dict())
    except RuntimeError as exc:
        fix = "give the causal language model itself, not one with another head or an adapter around it"
        raise Refused(f"model is a {type(model).__name__} with other tensors than {name}: {fix}") from exc
    return wrapped


def create_reference_model(model: AutoModelForCausalLMWithValueHead | nn.Module) -> AutoModelForCausalLMWithValueHead:
    """Return a frozen copy of the model with its present weights."""
    model = wrapped(model)
    copied = copy.deepcopy(model.pretrained_model)
    for p in copied.parameters():
        p.requires_grad_(False)
    return AutoModelForCausalLMWithValueHead(copied, model.path)
