"""The gate of the Megatron engine: loss, outputs and all gradients are those of one process, to 1e-5 of a tensor's
largest value, in every layout; and weights are the folder's, bit by bit, in and out."""

from __future__ import annotations

import pytest
from cases import EXPERTS, HEADS, MODELS, SIZES, Case, differences, one_process, together
from forked import run
from megatron_engines import LAYOUTS, folder, on_rank
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

TIED, BIASES = "qwen3, tied", "llama, biases"
WINDOW = SIZES | {"sliding_window": 5}
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
SCALED |= {"original_max_position_embeddings": 16}
PLAIN = {name: value for name, value in SIZES.items() if name != "head_dim"}
MODELS["qwen2"] = lambda: Qwen2ForCausalLM(Qwen2Config(**PLAIN))
MODELS["mistral, window"] = lambda: MistralForCausalLM(MistralConfig(**WINDOW))
MODELS["llama, scaled"] = lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED))

GRID = [  # layout, model, role, a shared prompt, a rank without rows
    ("one", TIED, "actor", True, False),
    ("one", BIASES, "critic", False, False),
    ("one", "mistral, window", "actor", True, False),
    ("one", "llama, scaled", "actor", True, False),
    ("TP", TIED, "actor", True, False),
    ("TP", BIASES, "critic", True, False),
    ("TP", "qwen2", "reward_model", True, False),
    ("PP", TIED, "actor", True, False),
    ("PP", BIASES, "actor", False, False),
    ("PP", "qwen2", "critic", True, False),
    ("DP", TIED, "actor", True, True),
    ("DP", "qwen2", "reference", True, False),
    ("EP", EXPERTS, "actor", True, False),
    ("TP x PP", TIED, "actor", True, False),
    ("TP x PP", BIASES, "reference", False, False),
    ("TP x DP", "qwen2", "actor", False, True),
    ("PP x DP", TIED, "actor", True, True),
    ("TP x EP", EXPERTS, "actor", True, True),
    ("PP x EP", EXPERTS, "actor", True, False),
]


@pytest.mark.parametrize("layout, model, role, shared, idle", GRID)
def test_every_layout_gives_what_one_process_gives(layout, model, role, shared, idle):
    at = LAYOUTS[layout]
    case = Case(at, role, shared, idle, model)
    expected = one_process(case)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    folder(model, HEADS[role] != "lm")  # before the ranks are forked
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank)))
    assert not (wrong := differences(found, expected)), wrong
