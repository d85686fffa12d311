"""The formats in which engines of transformers' models read weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from verl.checkpoint.block_fp8 import quantization_config, unreadable
from verl.checkpoint.hf import skeleton_of
from verl.errors import Refused
from verl.wire import AS_HELD, WireFormat

ROUTERS = {"gate", "router", "shared_expert_gate", "router_mlp"}
"""Names of modules that are, or contain, the routers of experts in transformers' models."""
UNKNOWN = "its class is not part of transformers, so the names of its layers are not known"
ALWAYS = {"A_log", "D", "dt_bias", "e_score_correction_bias"}
"""Last parts of names that servers keep in float32, whatever their shape: decay, skip and step of recurrent layers, and
the correction of a router's scores."""


def format_of_module(module: nn.Module, dtype: torch.dtype) -> WireFormat:
    """Return the format of an engine that holds parameters in `dtype`, and buffers in their own dtype."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = {name: t for name, t in module.state_dict().items() if t.is_floating_point() and name not in parameters}
    return WireFormat(_name(dtype), {name: _name(t.dtype) for name, t in state.items() if t.dtype != dtype})


def format_of_server(config: Any, dtype: torch.dtype, wide: Set[str] = frozenset(), *, fp8: bool = False) -> WireFormat:
    """Return the format of a server that computes in `dtype`. wide: the tensors that it keeps in float32, by its own
    names; empty where it does not report them · fp8: it was started with `block_fp8`.

    Servers keep some tensors in float32, each by a rule of its own: norms, biases, router gates, constants of recurrent
    layers, and those that the model's class declares. They are sent in float32, which adds few bytes, and the server
    rounds them if it keeps them otherwise. A model of an unknown class is sent in the trainer's own dtypes."""
    model = skeleton_of(copy.deepcopy(config))
    if model is None or dtype == torch.float32:
        return AS_HELD if model is None else WireFormat("float32")
    declared = [re.compile(rf"(^|\.){re.escape(part)}(\.|$)") for part in _declared(model)]
    held = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
    reported = _in_float32(wide, held.keys())
    kept = [name for name, t in held.items() if t.ndim < 2 or _wide(name, declared) or name in reported]
    return WireFormat(_name(dtype), dict.fromkeys(kept, "float32"), fp8, fp8_inputs=fp8)


def block_fp8(config: Any) -> dict[str, Any]:
    """Return the `quantization_config` with which a server of this model reads projections in blocks of 8 bits. Raise
    Refused for a model of which servers read none."""
    model = skeleton_of(copy.deepcopy(config))
    why = UNKNOWN if model is None else unreadable(model)
    if model is None or why:
        raise Refused(f"rollout.dtype=fp8 with a server: {why}; set rollout.engine=native, or rollout.dtype=bfloat16")
    return quantization_config(model)


def _wide(name: str, declared: Sequence[re.Pattern[str]]) -> bool:
    """Return True for a name that servers keep in float32."""
    *parents, last = name.split(".")
    return last in ALWAYS or bool({*parents} & ROUTERS) or any(one.search(name) for one in declared)


def _in_float32(wide: Set[str], names: Set[str]) -> set[str]:
    """Return our names of the tensors that become tensors which the server reports. A server joins some tensors and
    renames others. For these the result has all names below the closest module with a tensor of ours."""
    found = set(wide & names)
    for name in wide - names:
        below = set[str]()
        while not below and name:
            name = name.rpartition(".")[0]
            below = {one for one in names if one.startswith(f"{name}.") or not name}
        found |= below
    return found


def _declared(model: nn.Module) -> set[str]:
    """Return the parts of names that transformers loads in float32 whatever the model's dtype is."""
    both = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {part for m in model.modules() for attribute in both for part in getattr(m, attribute, None) or ()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
