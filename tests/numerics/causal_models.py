"""Tiny random models of the causal language models that transformers has, with a sliding window where they have one."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 5
SIZES: dict[str, Any] = {
    **{"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "n_inner", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "query_pre_attn_scalar", "rotary_dim"), 8),
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0},
}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {**_BOTH, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "cohere_compass_text": _BOTH,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _DELTA),
}
LARGE = frozenset(("blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4"))
"""Models that also see or hear: what they are made of has sizes that are not among `SIZES`."""


def families() -> list[str]:
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - LARGE)


def build(name: str, **more: Any) -> Any:
    """A model of this model_type, or None where the sizes above do not make one."""
    for attempt in ({"num_key_value_heads": 2}, {"num_key_value_heads": 4}, {"num_key_value_heads": 2, "head_dim": 8}):
        try:
            return _build(name, {**SIZES, **attempt, **OWN.get(name, {}), **more})
        except Exception:  # a family that wants sizes of another kind
            continue
    return None


def _build(name: str, sizes: dict[str, Any]) -> Any:
    kind = CONFIG_MAPPING[name]
    known = {*vars(kind()), *inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
    config = kind(**{key: value for key, value in sizes.items() if key in known})
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters()
    assert parameters < 2e6, parameters
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    return model
