"""The gate of the Megatron engine: loss, outputs and all gradients are those of one process, to 1e-5 of a tensor's
largest value, in every layout; and weights are the folder's, bit by bit, in and out."""

from __future__ import annotations

import pytest
from cases import EXPERTS, HEADS, MODELS, SIZES, Case, differences, one_process, together
from forked import run
from megatron_engines import LAYOUTS, built, folder, on_rank
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.errors import Refused
from verl.model_engine import megatron_shims
from verl.model_engine.megatron_shims import check_version

TIED, BIASES = "qwen3, tied", "llama, biases"
WINDOW = SIZES | {"sliding_window": 5}
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
SCALED |= {"original_max_position_embeddings": 16}
PLAIN = {name: value for name, value in SIZES.items() if name != "head_dim"}
WINDOWED = PLAIN | {"use_sliding_window": True, "sliding_window": 5}
MODELS["qwen2, layers without the window"] = lambda: Qwen2ForCausalLM(Qwen2Config(**WINDOWED))
MODELS["qwen2, windows"] = lambda: Qwen2ForCausalLM(Qwen2Config(**WINDOWED, max_window_layers=0))
MODELS["qwen2, mixed"] = lambda: Qwen2ForCausalLM(Qwen2Config(**WINDOWED, max_window_layers=1))
MODELS["qwen2"] = lambda: Qwen2ForCausalLM(Qwen2Config(**PLAIN))
MODELS["mistral, window"] = lambda: MistralForCausalLM(MistralConfig(**WINDOW))
MODELS["llama, scaled"] = lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED))

GRID = [  # layout, model, role, a shared prompt, a rank without rows
    ("one", TIED, "actor", True, False),
    ("one", BIASES, "critic", False, False),
    ("one", "mistral, window", "actor", True, False),
    ("one", "llama, scaled", "actor", True, False),
    ("one", "qwen2, layers without the window", "actor", True, False),
    ("one", "qwen2, windows", "actor", True, False),
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


@pytest.mark.parametrize("layout, model, role", [("TP x DP", TIED, "actor"), ("PP", BIASES, "critic")])
def test_bfloat16_on_a_cpu_is_that_of_one_process(layout, model, role):
    """Rounded weights in float32 arithmetic, on a CPU with products in bfloat16 too."""
    at = LAYOUTS[layout]
    case = Case(at, role, model=model)
    expected = one_process(case, dtype="bfloat16", emulate_bf16=True)
    exact = one_process(case)
    assert differences(exact, expected, rtol=1e-3), "the weights were not rounded"
    folder(model, HEADS[role] != "lm")
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank, dtype="bfloat16")))
    assert not (wrong := differences(found, expected)), wrong


def test_layers_with_different_windows_are_refused():
    folder("qwen2, mixed")

    def on(_: int) -> str:
        with pytest.raises(Refused) as caught:
            built("qwen2, mixed", "actor", LAYOUTS["one"])
        return str(caught.value)

    (line,) = run(1, on)
    assert "the qwen2 has layers with different windows (5 and none)" in line and "model.engine=sharded" in line


@pytest.mark.parametrize("module", ["transformer_engine", "apex"])
def test_an_optimizer_of_another_package_is_refused(module, monkeypatch):
    monkeypatch.setattr(megatron_shims, "find_spec", lambda name: name if name == module else None)
    with pytest.raises(Refused, match="would use the optimizer of .*, which was not run; use an environment without"):
        check_version()
