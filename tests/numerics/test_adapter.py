"""A teacher that is a LoRA adapter is the model that PEFT makes of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl.config.adapter import read_adapter
from verl.model_engine.adapter import load_model, open_adapter
from verl.model_engine.base import EngineContext, TeacherHead
from verl.model_engine.hf_parts import open_skeleton
from verl.model_engine.lm_head import read_teacher
from verl.model_engine.options import Options
from verl.model_engine.torch_engine import build

SIZES: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    head_dim=8,
    max_position_embeddings=64,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    initializer_range=0.3,
    pad_token_id=0,
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {"target_modules": ["q_proj", "k_proj", "down_proj"], "lora_alpha": 3}),
    "patterns": (
        "llama",
        {
            "target_modules": r".*\.(q_proj|o_proj|up_proj)",
            "rank_pattern": {"layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {r"layers.\d.mlp.up_proj": 1, "o_proj": 5},
            "use_rslora": True,
        },
    ),
    "some layers": ("llama", {"target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [0, 2]}),
    "but for": ("qwen3", {"target_modules": ["v_proj", "q_proj"], "exclude_modules": ["layers.1.self_attn.v_proj"]}),
    "head and embeddings": (
        "qwen3",
        {"target_modules": ["lm_head", "v_proj"], "modules_to_save": ["embed_tokens", "norm"]},
    ),
    "[in, out]": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
            "rank_pattern": {"experts.gate_up_proj": 2},
            "alpha_pattern": {"experts": 1, "experts.down_proj": 24},
        },
    ),
    "one tensor of experts": (
        "mixtral",
        {"target_modules": [], "target_parameters": ["1.mlp.experts.gate_up_proj"], "use_rslora": True},
    ),
    "beside experts": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
}


def base_folder(folder: Path, kind: str, *, tied: bool = False) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def made_by_peft(folder: Path, base: Path, **said: Any) -> tuple[Path, Any]:
    """Return (the folder of an adapter without zero tensors, PEFT's model of it)."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed (the extra dev)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, **said))
        torch.manual_seed(1)
        for p in model.parameters():
            if p.requires_grad:
                nn.init.normal_(p, std=0.3)
        model.save_pretrained(folder)
        own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        own.set_experts_implementation("eager")  # the other takes no float64
        return folder, peft.PeftModel.from_pretrained(own, folder).eval().to(torch.float64)


def context(base: Path, adapter: Path | None) -> EngineContext:
    return EngineContext(folder=base, adapter=adapter, dtype="float32", max_tokens_per_microbatch=64)


def in_parts(base: Path, adapter: Path) -> dict[str, Tensor]:
    """The tensors of the model as a rank reads them that holds all."""
    skeleton = open_skeleton(base)
    assert skeleton is not None
    into = {n: torch.full_like(p, torch.nan, device="cpu") for n, p in skeleton.model.named_parameters()}
    open_adapter(adapter, base, skeleton.model).after(skeleton.fill)(into)
    return into


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_one_that_peft_makes(case, tmp_path):
    kind, said = CASES[case]
    base = base_folder(tmp_path / "base", kind, tied=kind == "gpt2")
    adapter, theirs = made_by_peft(tmp_path / "adapter", base, **said)
    ids = torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(2))
    ours = load_model(context(base, adapter))
    ours.set_experts_implementation("eager")
    for name, t in in_parts(base, adapter).items():
        torch.testing.assert_close(t, ours.get_parameter(name), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        expected = theirs(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
        scale = float(expected.abs().max())
        assert float((plain - expected).abs().max()) > 0.05 * scale, "an adapter that does nothing proves nothing"
        torch.testing.assert_close(ours.double()(ids).logits, expected, rtol=1e-5, atol=1e-5 * scale)
        if kind != "gpt2":  # its head is tied: nothing can be in it
            states = theirs(ids, output_hidden_states=True).hidden_states[-1][0]
            head = read_teacher(TeacherHead(base, 0.5, adapter=adapter)).head
            got = head.logprobs(states.float(), torch.ones(17))
            torch.testing.assert_close(got.double(), expected[0].log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_an_engine_of_a_folder_scores_as_peft_does(tmp_path, tiny_teacher):
    """The adapter is written without PEFT and read by it: the log-probs of a teacher's engine are equal."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed (the extra dev)")
    adapter = write_adapter(tmp_path / "adapter", tiny_teacher, seed=3)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_teacher), adapter).eval()
    engine = build(Options(), context(tiny_teacher, adapter))
    ids = torch.arange(3, 19)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    (found,) = engine.own_logprobs([ids.numpy()], "float32")
    torch.testing.assert_close(torch.from_numpy(found), expected.float(), rtol=1e-5, atol=1e-5)


def test_factors_of_experts_are_refused_and_not_missed(tmp_path):
    """In the model the experts of a layer are one tensor; the folder has each of them."""
    base = base_folder(tmp_path / "base", "qwen3_moe")
    adapter = write_adapter(tmp_path / "experts", base, "up_proj")
    with pytest.raises(ValueError, match=r"it changes model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight, which is no"):
        read_adapter(adapter, base)
    adapter = write_adapter(tmp_path / "aims", base, "q_proj")
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"target_modules": ["q_proj", "up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert [*read_adapter(adapter, base)] == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]


def test_a_weight_that_the_built_model_has_not_is_refused(tmp_path):
    """The folder has it under a name of its own."""
    base = base_folder(tmp_path / "base", "qwen3")
    adapter = write_adapter(tmp_path / "adapter", base)
    other = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**SIZES))
    with pytest.raises(ValueError, match=r"an adapter of model\.layers\.0.*, which is no weight of GPT2LMHeadModel"):
        open_adapter(adapter, base, other)
    assert len(read_adapter(adapter, base)) == 9
