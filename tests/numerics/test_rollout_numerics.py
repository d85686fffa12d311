"""The native forward pass against transformers: every architecture row, RoPE variant, layout and precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from each import check_each, matrix
from on_device import ON_CPU, close_to
from rollouts import context_of, finish, native_core, products_of, source_of
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from verl.rollout.base import GenerateRequest
from verl.rollout.embedded.core import EngineCore
from verl.rollout.embedded.hf_runner import HfRunner
from verl.rollout.embedded.requests import ActiveRequest
from verl.types import Sampling

SIZES: dict[str, Any] = dict(
    vocab_size=67,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=512,
    initializer_range=0.12,
)


def rope(kind: str, **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
HYBRID: dict[str, Any] = SIZES | dict(
    num_hidden_layers=3,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    initializer_range=0.05,  # the norm on outputs amplifies the rounding of small ones
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
SHARED: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20
)
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=20, tie_word_embeddings=True),
    "qwen3 bias": Qwen3Config(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama mha": LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama mqa": LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "linear rope": LlamaConfig(**SIZES, rope_parameters=rope("linear")),
    "yarn rope": Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope("yarn", original_max_position_embeddings=64)),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral window": MistralConfig(**SIZES, sliding_window=256),
    "mistral narrow window": MistralConfig(**SIZES, sliding_window=24),
    "mistral layer types": MistralConfig(
        **SIZES, sliding_window=24, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen2 window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=20,
        query_pre_attn_scalar=31,
        sliding_window=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": rope("linear"),
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "qwen3 moe": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen3 moe window": Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        use_sliding_window=True,
        sliding_window=24,
    ),
    "qwen3 moe raw": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=40
    ),
}
HYBRIDS: dict[str, Any] = {
    "qwen3.5": Qwen3_5TextConfig(**HYBRID, attention_bias=True, tie_word_embeddings=True),
    "qwen3.5 moe": Qwen3_5MoeTextConfig(**HYBRID, **SHARED),
    "qwen3 next": Qwen3NextConfig(**HYBRID, **SHARED, mlp_only_layers=[1]),
}
CONFIGS |= HYBRIDS
LAYOUTS = ("plain", "packed", "panels")
PROMPTS = [np.random.default_rng(i).integers(0, 67, n) for i, n in enumerate((3, 90, 17, 40, 1))]


def reference(config: Any, rounded: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32) -> Any:
    """Parameters rounded, then kept in `dtype`; buffers (the RoPE frequencies) stay in float32."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.2)
        parameter.data = parameter.data.to(rounded).to(dtype)
    return module


def engine(config: Any, module: Any, **options: Any) -> EngineCore:
    sizes = {"rows": 8, "max_prefill_tokens": 64, "prefix_cache_tokens": 0}
    return native_core(config, source_of(module), **{**sizes, **options})


def sampled(core: EngineCore, temperature: float = 1.0) -> dict[str, Any]:
    return finish(
        core,
        (
            ActiveRequest(GenerateRequest(str(i), prompt, Sampling(max_tokens=40, temperature=temperature, seed=i)))
            for i, prompt in enumerate(PROMPTS)
        ),
    )


def logprobs_of(module: Any, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> np.ndarray:
    whole = torch.from_numpy(np.concatenate([prompt, ids]))[None]
    logits = module(whole).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()


@pytest.mark.on_device
@matrix("compiled, short", [(True, 256), *([(True, 0), (False, 0)] if ON_CPU else [])])  # all are one on a GPU
def test_float32_matches_transformers(compiled: bool, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.rollout.native.prefill.SHORT_PROMPT", short)

    def check(name: str) -> None:
        module = reference(CONFIGS[name])
        # prompts of 90 tokens in passes of 64: chunks with a past as well
        core = engine(CONFIGS[name], module, compiled=compiled)
        for i, c in sampled(core, 0.7).items():
            expected = logprobs_of(module, PROMPTS[int(i)], c.ids, 0.7)
            np.testing.assert_allclose(c.logprobs, expected, atol=close_to(1e-5))
        scored = core.runner.score(PROMPTS[1], 0.7).logprobs
        expected = logprobs_of(module, PROMPTS[1][:1], PROMPTS[1][1:], 0.7)
        np.testing.assert_allclose(scored, expected, atol=close_to(1e-5))

    check_each(CONFIGS, check)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "qwen3 moe", "qwen3.5"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name: str, emulate: bool) -> None:
    """Same rounded weights: the engine's distance to exact arithmetic is at most that of transformers in bf16."""
    module = reference(CONFIGS[name], dtype=torch.bfloat16)
    exact = reference(CONFIGS[name], rounded=torch.bfloat16)
    core = engine(CONFIGS[name], module, dtype=torch.bfloat16, emulate_bf16=emulate)
    assert core.runner.compute_dtype == (torch.float32 if emulate else torch.bfloat16)  # type: ignore[attr-defined]
    ours, theirs = [], []
    for i, c in sampled(core).items():
        truth = logprobs_of(exact, PROMPTS[int(i)], c.ids, 1.0)
        ours.append(c.logprobs - truth)
        theirs.append(logprobs_of(module, PROMPTS[int(i)], c.ids, 1.0) - truth)
    error, bound = np.abs(np.concatenate(ours)), np.abs(np.concatenate(theirs))
    assert error.mean() < 1.2 * bound.mean() and error.max() < 2 * bound.max()
    if emulate:
        assert error.max() < 1e-5


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), reason="this torch has no oneDNN linear")
@pytest.mark.parametrize("bias", [False, True])
def test_every_layout_of_a_linear_equals_plain(bias: bool) -> None:
    torch.manual_seed(0)
    for rows, width, out in ((1, 48, 96), (7, 192, 384), (256, 64, 67), (33, 513, 31), (5, 66000, 16), (12, 9, 1)):
        weight, b = torch.randn(out, width), torch.randn(out) if bias else None
        x, residual = torch.randn(rows, width), torch.randn(rows, out)
        exact = x.double() @ weight.double().t() + (b.double() if b is not None else 0)
        with torch.inference_mode():
            for layout in LAYOUTS:
                linear = products_of(layout).make(weight, b)
                torch.testing.assert_close(linear(x).double(), exact, atol=2e-4 * max(1, width / 500), rtol=1e-5)
                total = linear.add_to(residual.clone(), x).double()
                torch.testing.assert_close(total, exact + residual, atol=2e-4 * max(1, width / 500), rtol=1e-5)


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), reason="this torch has no oneDNN linear")
@pytest.mark.parametrize("name", ["qwen3", "llama bias"])
def test_the_engine_in_every_layout_equals_plain(name: str) -> None:
    module = reference(CONFIGS[name])
    plain, *others = (sampled(engine(CONFIGS[name], module, layout=layout)) for layout in LAYOUTS)
    for i, other in ((i, other) for i in plain for other in others):
        assert plain[i].ids.tolist() == other[i].ids.tolist()
        np.testing.assert_allclose(plain[i].logprobs, other[i].logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_give_a_row_the_same_bits_whatever_the_other_rows_and_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    products = products_of("panels", dtype)
    for width, out in ((192, 1024), (513, 67), (2048, 40)):
        weight, x = torch.randn(out, width).to(dtype), torch.randn(300, width).to(dtype)
        linear = products.make(weight, None)
        whole, threads = linear(x), torch.get_num_threads()
        for lo, hi in ((0, 1), (3, 8), (17, 30), (100, 300)):
            assert torch.equal(linear(x[lo:hi]), whole[lo:hi])
        try:
            torch.set_num_threads(2 if threads == 1 else 1)
            assert torch.equal(linear(x), whole)
        finally:
            torch.set_num_threads(threads)


def test_panels_of_bfloat16_sum_in_float32() -> None:
    """Added to a residual in float32 the result has no rounding of bfloat16; written, it has one. Beside each tile:
    rows and columns that end within one, zeros, a bias, infinities that another row does not see."""
    torch.manual_seed(0)
    products, half = products_of("panels", torch.bfloat16), torch.bfloat16
    for rows, width, out in ((1, 1, 1), (16, 32, 32), (17, 48, 33), (40, 129, 96), (70, 320, 31), (130, 544, 17)):
        weight, x, bias = (torch.randn(*size).to(half) for size in ((out, width), (rows, width), (out,)))
        residual = torch.randn(rows, out)
        linear = products.make(weight, bias)
        exact = x.double() @ weight.double().t() + bias.double()
        total = linear.add_to(residual.clone(), x)
        torch.testing.assert_close(total.double(), exact + residual, atol=2e-5, rtol=1e-6)
        torch.testing.assert_close(linear(x).double(), exact, atol=1e-4, rtol=2**-8)
        x[-1] = torch.inf
        assert torch.equal(linear.add_to(residual.clone(), x)[:-1], total[:-1])
    wide, pairs = torch.randn(96, 70).to(half).float(), 12
    panels = [products.empty(100, 70) for _ in range(2)]
    for one, weight in zip(panels, (wide, wide.to(half)), strict=True):
        one.memory.fill_(0)
        one.fill(weight, first=4, pairs=pairs)
    x = torch.eye(70, dtype=half)
    reordered = wide.view(-1, 2, pairs, 70).transpose(1, 2).reshape(96, 70)
    assert all(torch.equal(one(x)[:, 4:].T.float(), reordered) and not one(x)[:, :4].any() for one in panels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_in_one_call_give_the_bits_of_a_call_each(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.rollout.native.prefill.SHORT_PROMPT", 0)  # the same prefill for both
    products_of("panels", dtype)  # there are some

    def check(name: str) -> None:
        module = reference(CONFIGS[name])
        given: Any = {"compiled": True, "dtype": dtype}
        whole, single = engine(module.config, module, **given), engine(module.config, module, **given)
        single_calls = "moe" in name or name in HYBRIDS
        assert (whole.runner.model.weights.joined is None) == single_calls
        single.runner.model.weights = replace(single.runner.model.weights, joined=None)
        expected = sampled(single)
        for key, completion in sampled(whole).items():
            assert np.array_equal(completion.ids, expected[key].ids), key
            assert np.array_equal(completion.logprobs, expected[key].logprobs), key

    check_each(CONFIGS, check)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral narrow window"])
def test_the_bits_of_a_short_prompt_do_not_depend_on_passes_neighbours_and_lanes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.accel.cpu.lanes.LANE_WORK", 1.0)  # a tiny model pays for all lanes
    monkeypatch.setattr("verl.rollout.native.prefill.EVEN_SHARES", 100)
    module = reference(CONFIGS[name])
    alone: dict[str, Any] = {}
    for i, prompt in enumerate(PROMPTS):
        core = engine(module.config, module)
        core.add(ActiveRequest(GenerateRequest(str(i), prompt, Sampling(max_tokens=40, seed=i))))
        while core.busy:
            alone |= {c.request_id: c for _, c in core.step()}
    for options in ({"max_prefill_tokens": 7}, {"max_prefill_tokens": 512}, {"max_prefill_tokens": 512, "lanes": 3}):
        for key, completion in sampled(engine(module.config, module, **options)).items():
            assert np.array_equal(completion.ids, alone[key].ids), (options, key)
            assert np.array_equal(completion.logprobs, alone[key].logprobs), (options, key)


def test_hf_engine_in_bfloat16_over_a_given_module() -> None:
    """Parameters in bf16, RoPE frequencies in float32; sleep(2) and a reload work on a module that is not rebuilt."""
    module = reference(CONFIGS["qwen3"], dtype=torch.bfloat16)
    own = AutoModelForCausalLM.from_config(CONFIGS["qwen3"])
    context = context_of(CONFIGS["qwen3"], 8, dtype=torch.bfloat16)
    runner = HfRunner(context, own, max_prefill_tokens=512)
    core = EngineCore(runner, (), None)
    weights = source_of(module)
    core.load(weights)
    assert own.lm_head.weight.dtype == torch.bfloat16 and own.model.rotary_emb.inv_freq.dtype == torch.float32
    first = sampled(core)
    for i, c in first.items():
        np.testing.assert_allclose(c.logprobs, logprobs_of(module, PROMPTS[int(i)], c.ids, 1.0), atol=0.15)
    assert core.sleep(2) == 2 * sum(p.numel() for p in module.parameters()) and not runner.ready
    core.load(weights)
    assert own.lm_head.weight is own.model.embed_tokens.weight
    for i, c in sampled(core).items():
        assert (c.ids == first[i].ids).all() and (c.logprobs == first[i].logprobs).all()
