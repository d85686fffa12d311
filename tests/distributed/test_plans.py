"""Which models tensor parallelism can cut, as the configuration says it without torch."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl.model_engine.options import TENSOR_PLANS
from verl.nn.tensor_parallel import _COLUMNS, _HEADS, _ROWS, _styles

SIZES = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=64,
    vocab_size=64,
    head_dim=16,
    pad_token_id=0,
)


def test_the_table_of_the_configuration_is_what_the_engine_can_cut():
    found = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        cls = CONFIG_MAPPING[model_type]
        plan = getattr(cls, "base_model_tp_plan", None) or {}
        if plan and set(plan.values()) <= {_COLUMNS, _ROWS, _HEADS}:
            try:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(cls(**SIZES))
                _styles(model, 2)
                found.add(model_type)
            except (ValueError, KeyError):  # the plan leaves something out, or there is no such small model
                continue
    assert found == set(TENSOR_PLANS)
