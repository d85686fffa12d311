"""A second engine on the frozen base of another engine's model: factors, head and optimizer of its own."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.model_engine.base import EngineContext
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.options import Options
from verl.model_engine.torch_engine import TorchEngine, build
from verl.nn.expert_lora import without_factors
from verl.nn.fused import unfuse


def build_sibling(engine: TorchEngine, options: Options, context: EngineContext) -> TorchEngine:
    """Build the engine of another role of the same folder. It reads the tensors of the first engine's base, which LoRA
    never changes, and their copies that compute; of weights that the first trains whole it has its own. The two engines
    take turns: a pass may replace the values of the base meanwhile (emulated bfloat16)."""
    assert engine.local.lora is not None and context.lora is not None, "only the base of LoRA is shared"
    assert not engine.settings.offload, "offloaded weights have one owner"
    own = _own_weights(engine, context)
    model = _same_tensors(engine, own)
    _fill_own(model, own, context)
    built = build(replace(options, offload_frozen=False), context, model=model)
    built.passes.use_copy_of(engine.passes)
    assert built.local.lora is not None and {*built.local.lora.parameters.replaced} <= {*own}, "trained for one role"
    return built


def _own_weights(engine: TorchEngine, context: EngineContext) -> list[str]:
    """Return the names of the weights that another role with these settings does not share: it computes with them, and
    the engine trains them whole."""
    assert engine.local.lora is not None
    inside = "" if context.head == "lm" else f"{engine.model.base_model_prefix}."
    return [name for name in engine.local.lora.parameters.replaced if name.startswith(inside)]


def _fill_own(model: Any, names: Collection[str], context: EngineContext) -> None:
    """Give a model the values of the folder for these weights."""
    if not names:
        return
    folder, trusted, head = context.folder, context.trust_remote_code, context.head == "lm"
    own: dict[str, Tensor] = {name: model.get_parameter(name).detach() for name in names}
    for name in names:
        model.get_parameter(name).grad = None
    found = open_skeleton(folder, trust_remote_code=trusted, needs_lm_head=head, quantised=True)
    if found is not None:
        found.fill(own)
        return
    loaded = load_causal_lm(folder, trust_remote_code=trusted, needs_lm_head=head)
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(loaded.get_parameter(name))


def _same_tensors(engine: TorchEngine, own: Collection[str]) -> Any:
    """Return the model of an engine as it was loaded, with modules of its own and the same parameters and buffers, and
    without factors. own: the names of weights that are copies"""
    model, lora = engine.model, engine.local.lora
    assert lora is not None
    parameters = [p for name, p in model.named_parameters() if name not in own]
    shared: dict[int, Any] = {id(t): t for t in (*parameters, *model.buffers())} | {id(lora): lora}
    found: Any = copy.deepcopy(model, shared)
    unfuse(found)
    for module in found.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        without_factors(module)
    for name in lora.names:
        module, _, leaf = name.rpartition(".")
        del found.get_submodule(module)._parameters[leaf]
    found.set_attn_implementation(engine.passes.models_attention)
    return found
