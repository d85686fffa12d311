"""RoPE that transformers chooses by the longest row of a pass: no row's log-probs depend on its neighbours."""

import copy

import numpy as np
import pytest
import torch
from each import each
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

from verl.batch import pack
from verl.config.model_folder import rope_note
from verl.model_engine import local_model
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn.rope import fix_rope
from verl.rollout.base import RolloutContext
from verl.rollout.embedded.hf_runner import HfRunner
from verl.rollout.vllm import Options as VllmOptions
from verl.rollout.vllm import serve_command
from verl.types import Sample, Segment

FIRST = 14  # tokens of a row that is short
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": FIRST,
}
MODELS = {
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(
            **SIZES, max_position_embeddings=64, original_max_position_embeddings=FIRST, rope_parameters=dict(LONG)
        )
    ),
    "phimoe": lambda: PhimoeForCausalLM(
        PhimoeConfig(
            **SIZES,
            max_position_embeddings=64,
            num_local_experts=2,
            original_max_position_embeddings=FIRST,
            rope_parameters={**LONG, "short_mscale": 1.1, "long_mscale": 1.6},
        )
    ),
    "dynamic": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            max_position_embeddings=FIRST,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        )
    ),
}
SHORT, OTHER, LONGEST = 9, 11, 40


def make(name: str):
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def rows(*lengths: int):
    """Rows with 2 tokens of prompt."""
    out = []
    for i, n in enumerate(lengths):
        ids = np.arange(n) * 7 % 37 + 3
        answer = Segment(ids=ids[2:], source="sampled", logprobs=np.zeros(n - 2, np.float32), version=0)
        segments = (Segment(ids=ids[:2], source="prompt"), answer)
        given = {"sample_id": str(i), "trajectory_id": str(i), "group_id": str(i)}
        out.append(Sample(**given, purpose="train", segments=segments))
    return out


def alone(model, n: int, longest: int) -> torch.Tensor:
    """Transformers' own log-probs of a row of n tokens, beside one of `longest`, which the causal mask keeps apart."""
    ids = torch.from_numpy(np.arange(n) * 7 % 37 + 3)
    beside = torch.zeros(2, longest, dtype=torch.int64)
    beside[0, :n] = ids
    z = model.eval()(input_ids=beside[:, : max(n, longest)], use_cache=False).logits[0, :n].log_softmax(-1)
    return z[1:-1].gather(-1, ids[2:, None])[:, 0].detach()


def logprobs(engine: TorchEngine, *lengths: int) -> torch.Tensor:
    """Return the log-probs of the first row."""
    return engine.infer(pack(rows(*lengths)), ("logprobs",))["logprobs"][: lengths[0] - 2]


@each("name, mode", [(name, mode) for name in MODELS for mode in ("auto", "padded")])
def test_a_row_has_the_factors_of_the_longest_row_of_the_run(name, mode):
    model = make(name)
    for longest in (LONGEST, FIRST):
        expected = alone(copy.deepcopy(model), SHORT, longest)
        engine = TorchEngine(
            copy.deepcopy(model), EngineSettings(dtype="float32", attention_mode=mode, longest=longest)
        )
        together = (SHORT, OTHER, LONGEST) if longest == LONGEST else (SHORT, OTHER)
        for lengths in ((SHORT,), together, (SHORT,)):
            torch.testing.assert_close(logprobs(engine, *lengths), expected, rtol=0, atol=1e-4)
        if longest == LONGEST:
            assert float((alone(copy.deepcopy(model), SHORT, SHORT) - expected).abs().max()) > 0.01, "or all is one"
        assert engine.check_packing(share_prefix=mode == "auto") < 1e-4
        assert sorted(engine.model.state_dict()) == sorted(model.state_dict()), "nothing of it is exported"


def test_a_row_that_would_change_the_factors_is_refused():
    engine = TorchEngine(make("phi3"), EngineSettings(dtype="float32", longest=FIRST))
    with pytest.raises(ValueError, match=f"a row has {LONGEST} tokens; the model's RoPE is fixed for {FIRST}"):
        logprobs(engine, SHORT, LONGEST)


@each("name", ["phi3", "phimoe"])
def test_what_is_not_fixed_is_refused_at_start(name, monkeypatch):
    monkeypatch.setattr(local_model, "fix_rope", lambda model, longest: None)
    engine = TorchEngine(make(name), EngineSettings(dtype="float32", longest=LONGEST))
    with pytest.raises(ValueError, match=f"a row of {LONGEST} tokens changes the log-probs of the short rows"):
        engine.check_packing(share_prefix=True)


def test_rollout_has_the_same_factors():
    """The hf engine's own pass, and what vLLM is started with: it chooses by its longest sequence."""
    model = make("phi3")
    for longest in (FIRST, LONGEST):
        context = RolloutContext(hf_config=model.config, max_context_tokens=longest, dtype=torch.float32)
        runner = HfRunner(context, copy.deepcopy(model), max_prefill_tokens=64)
        runner._loaded = True
        found = runner.score(np.arange(SHORT) * 7 % 37 + 3, 1.0).logprobs[1:]
        trained = logprobs(TorchEngine(copy.deepcopy(model), EngineSettings(dtype="float32", longest=longest)), SHORT)
        np.testing.assert_allclose(found, trained.numpy(), atol=1e-4)
        command = serve_command("python", VllmOptions(), context, "model", 1)
        served = int(command[command.index("--max-model-len") + 1])
        assert (served > FIRST) == (longest > FIRST)


def test_a_model_of_one_rope_is_left_as_it_is(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=64))
    assert fix_rope(model, 40) is None and not model.model.rotary_emb._forward_hooks
    model.config.save_pretrained(tmp_path)
    assert rope_note(str(tmp_path), 40) is None
    make("phi3").config.save_pretrained(tmp_path)
    assert (
        rope_note(str(tmp_path), 40)
        == "model: longrope RoPE is fixed for all rows as the longest row of this run, 40 tokens, has it"
    )
