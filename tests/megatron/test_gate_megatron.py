"""The gate of the Megatron engine: loss, outputs and all gradients are those of one process, to 1e-5 of a tensor's
largest value, in every layout; and weights are the folder's, bit by bit, in and out."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from cases import EXPERTS, HEADS, MODELS, SIZES, Case, differences, one_process, together
from forked import run
from megatron_engines import FOUR, FOUR_BIASES, FOUR_EXPERTS, LAYOUTS, built, folder, on_rank, options_of
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.errors import Refused
from verl.model_engine import megatron_shims
from verl.model_engine.megatron import PADDED
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
    ("PP", "qwen2", "reward_model", True, False),
    ("DP", TIED, "reward_model", True, True),
    ("EP", EXPERTS, "critic", True, False),
    ("TP x DP", BIASES, "reference", True, True),
    ("PP", TIED, "actor", True, False),
    ("PP", BIASES, "actor", False, False),
    ("PP", "qwen2", "critic", True, False),
    ("DP", TIED, "actor", True, True),
    ("DP", "qwen2", "reference", True, False),
    ("EP", EXPERTS, "actor", True, False),
    ("TP x PP", TIED, "actor", True, False),
    ("TP x PP", BIASES, "reference", False, False),
    ("TP x DP", "qwen2", "actor", False, True),
    ("TP", EXPERTS, "actor", True, False),
    ("TP x ETP", EXPERTS, "actor", True, False),
    ("DP x ETP", EXPERTS, "actor", True, True),
    ("TP x EP x ETP", EXPERTS, "actor", False, True),
    ("PP x DP", TIED, "actor", True, True),
    ("TP x EP", EXPERTS, "actor", True, True),
    ("PP x EP", EXPERTS, "actor", True, False),
    ("EP over TP", EXPERTS, "actor", True, False),
    ("EP over TP x DP", EXPERTS, "actor", False, True),
    ("PP x VP", FOUR, "actor", True, False),
    ("PP x VP", FOUR_BIASES, "critic", False, False),
    ("PP x VP x DP", FOUR_EXPERTS, "actor", True, True),
]


@pytest.mark.parametrize("layout, model, role, shared, idle", GRID)
def test_every_layout_gives_what_one_process_gives(layout, model, role, shared, idle):
    at = LAYOUTS[layout]
    case = Case(at, role, shared, idle, model)
    expected = one_process(case)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    folder(model, HEADS[role] != "lm")  # before the ranks are forked
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank, options=options_of(layout))))
    assert not (wrong := differences(found, expected)), wrong


@pytest.mark.parametrize(
    "how, layout, model", [("selective", "TP", TIED), ("full", "PP", BIASES), ("full", "EP", EXPERTS)]
)
def test_what_is_computed_again_in_the_backward_pass_changes_no_gradient(how, layout, model):
    at = LAYOUTS[layout]
    case = Case(at, model=model)
    folder(model)
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank, gradient_checkpointing=how)))
    assert not (wrong := differences(found, one_process(case))), wrong


@pytest.mark.parametrize("layout, model, role", [("TP x DP", TIED, "actor"), ("PP", BIASES, "critic")])
def test_bfloat16_on_a_cpu_is_that_of_one_process(layout, model, role):
    """Rounded weights in float32 arithmetic, on a CPU with products in bfloat16 too. The check at start is of the exact
    weights."""
    at = LAYOUTS[layout]
    case = Case(at, role, model=model)
    expected = one_process(case, dtype="bfloat16", emulate_bf16=True)
    exact = one_process(case)
    assert differences(exact, expected, rtol=1e-3), "the weights were not rounded"
    folder(model, HEADS[role] != "lm")
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank, dtype="bfloat16")))
    assert not (wrong := differences(found, expected)), wrong

    def off(_: int) -> float:
        return built(model, role, at, dtype="bfloat16").check_packing(share_prefix=False)

    assert max(run(at.world_size, off)) < 1e-4


def test_layers_with_different_windows_are_refused():
    folder("qwen2, mixed")

    def on(_: int) -> str:
        with pytest.raises(Refused) as caught:
            built("qwen2, mixed", "actor", LAYOUTS["one"])
        return str(caught.value)

    (line,) = run(1, on)
    assert "the qwen2 has layers with different windows (5 and none)" in line and "model.engine=sharded" in line


@pytest.mark.parametrize("found, words", [("0.16.1", "megatron-core 0.16.1 is not 0.19.x"), (None, "is missing in")])
def test_another_version_is_refused_with_the_one_to_install(found, words, monkeypatch):
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(megatron_shims, "version", version)
    with pytest.raises(Refused, match=rf"^model.engine=megatron: [^\n]*{words}[^\n]*megatron-core==0.19.2[^\n]*$"):
        check_version()


@pytest.mark.parametrize("python, lines", [((3, 11, 7), 1), ((3, 12, 0), 0)])
def test_padded_rows_and_a_python_that_megatron_does_not_declare_are_lines_and_no_refusal(python, lines, monkeypatch):
    """In the notes of the engine, which a run prints at its start (test_child_run.py)."""
    folder(TIED)
    monkeypatch.setattr(megatron_shims.sys, "version_info", python)
    (notes,) = run(1, lambda _: built(TIED, "actor", LAYOUTS["one"]).capabilities.notes)
    assert notes[0] == PADDED and len(notes) == 1 + lines
    assert all("declares Python 3.12; it runs on 3." in line for line in notes[1:])


@pytest.mark.parametrize("module", ["transformer_engine", "apex"])
def test_an_optimizer_of_another_package_is_refused(module, monkeypatch):
    monkeypatch.setattr(megatron_shims, "find_spec", lambda name: name if name == module else None)
    with pytest.raises(Refused, match="would use the optimizer of .*, which was not run; use an environment without"):
        check_version()
