"""The models that tensor and pipeline parallelism can cut, by the configuration without torch."""

from __future__ import annotations

import copy
import os

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl.model_engine.layout import layers_of_stages
from verl.model_engine.options import EXPERT_PLANS, PIPELINE_PLANS, TENSOR_PLANS
from verl.nn.pipeline_parallel import cut, owners
from verl.nn.tensor_parallel import _COLUMNS, _HEADS, _ROWS, _styles

FULL = bool(os.environ.get("FULL_GRID"))
QUICK = {"llama", "gemma2", "gpt_neox", "phi", "mixtral", "qwen3_moe"}  # of unlike plans, two of them with experts
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
MORE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, qk_rope_head_dim=16)


def test_the_table_of_the_configuration_is_what_the_engine_can_cut():
    """All models of transformers, with FULL_GRID=1."""
    found = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if FULL else QUICK:
        cls = CONFIG_MAPPING[model_type]
        plan = getattr(cls, "base_model_tp_plan", None) or {}
        if plan and (model_type in EXPERT_PLANS or set(plan.values()) <= {_COLUMNS, _ROWS, _HEADS}):
            try:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(cls(**SIZES | MORE))
                _styles(model, 2)
                found.add(model_type)
            except (ValueError, KeyError):  # the plan leaves something out, or there is no such small model
                continue
    assert found == (set(TENSOR_PLANS) if FULL else QUICK & set(TENSOR_PLANS))


def test_stages_of_every_model_in_the_table_compute_what_the_whole_does():
    """Each of the table, in three stages one behind the other; and of the models with plans no others can."""
    can = set()
    for model_type in sorted({*TENSOR_PLANS, *EXPERT_PLANS} if FULL else QUICK):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type](**SIZES | {"num_hidden_layers": 4, **MORE})
        whole = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.arange(1, 13)[None]
        stages = layers_of_stages(4, 3)
        with torch.no_grad():
            expected = whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
            try:
                owners(whole, stages)
            except ValueError:
                continue
            states: dict[str, torch.Tensor] = {"input_ids": ids}
            for number in range(3):
                model = copy.deepcopy(whole)
                cut(model, None, number, stages)
                states = {"inputs_embeds": model.base_model(**states, use_cache=False).last_hidden_state}
        if torch.allclose(states["inputs_embeds"], expected, atol=1e-6):
            can.add(model_type)
    expected = set(PIPELINE_PLANS) if FULL else QUICK & set(PIPELINE_PLANS)
    assert can == expected, can ^ expected
