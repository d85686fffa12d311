"""A second engine on the frozen base of another engine's model: factors, head and optimizer of its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from verl.model_engine.base import EngineContext
from verl.model_engine.options import Options
from verl.model_engine.torch_engine import TorchEngine, build
from verl.nn.expert_lora import without_factors
from verl.nn.fused import unfuse


def build_sibling(engine: TorchEngine, options: Options, context: EngineContext) -> TorchEngine:
    """Build the engine of another role of the same folder. It reads the tensors of the first engine's base, which LoRA
    never changes, and their copies that compute. The two engines take turns: a pass may replace the values of the base
    meanwhile (emulated bfloat16)."""
    assert engine.local.lora is not None and context.lora is not None, "only the base of LoRA is shared"
    assert not engine.settings.offload, "offloaded weights have one owner"
    built = build(replace(options, offload_frozen=False), context, model=_same_tensors(engine))
    built.passes.use_copy_of(engine.passes)
    return built


def _same_tensors(engine: TorchEngine) -> Any:
    """Return the model of an engine as it was loaded, with modules of its own and the same parameters and buffers, and
    without factors."""
    model, lora = engine.model, engine.local.lora
    assert lora is not None
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())} | {id(lora): lora}
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
