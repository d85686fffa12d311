"""The formats in which engines of transformers' models read weights."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from verl.checkpoint.hf import skeleton_of
from verl.wire import AS_HELD, WireFormat

ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Module names of the routers of experts in transformers' models."""


def format_of_module(module: nn.Module, dtype: torch.dtype) -> WireFormat:
    """Return the format of an engine that holds parameters in `dtype`, and buffers in their own dtype."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = {name: t for name, t in module.state_dict().items() if t.is_floating_point() and name not in parameters}
    return WireFormat(_name(dtype), {name: _name(t.dtype) for name, t in state.items() if t.dtype != dtype})


def format_of_server(config: Any, dtype: torch.dtype) -> WireFormat:
    """Return the format of a server that computes in `dtype`.

    Servers keep some tensors in float32, each by a rule of its own: norms, biases, router gates, and those that the
    model's class declares. They are sent in float32, which adds few bytes, and the server rounds them if it keeps them
    otherwise. A model of an unknown class is sent in the trainer's own dtypes."""
    model = skeleton_of(copy.deepcopy(config))
    if model is None or dtype == torch.float32:
        return AS_HELD if model is None else WireFormat("float32")
    declared = [re.compile(rf"(^|\.){re.escape(part)}(\.|$)") for part in _declared(model)]
    kept = [
        name
        for name, t in model.state_dict().items()
        if t.is_floating_point()
        and (t.ndim < 2 or {*name.split(".")[:-1][-1:]} & ROUTERS or any(one.search(name) for one in declared))
    ]
    return WireFormat(_name(dtype), dict.fromkeys(kept, "float32"))


def _declared(model: nn.Module) -> set[str]:
    """Return the parts of names that transformers loads in float32 whatever the model's dtype is."""
    both = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {part for m in model.modules() for attribute in both for part in getattr(m, attribute, None) or ()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
