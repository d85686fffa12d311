"""Packed, shared-prefix attention against each sequence alone, by model family."""

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from each import each, matrix
from facts import use_facts
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from verl.accel import trained
from verl.accel.cuda import segments
from verl.accel.devices import device_facts
from verl.accel.operations import Use
from verl.algorithms.losses import nll
from verl.batch import pack, unshare
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.nn import attention, fused
from verl.nn.packing import probe_batch
from verl.objective import Term
from verl.types import Sample, Segment

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL, SLIDING = "full_attention", "sliding_attention"
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "qwen3_sliding": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=3, layer_types=[FULL, SLIDING])
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES, attention_bias=True, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES,
            head_dim=8,
            sliding_window=3,
            layer_types=[SLIDING, FULL],
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=3, layer_types=[SLIDING, FULL], query_pre_attn_scalar=8)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=512, bos_token_id=1, eos_token_id=2)
    ),
    "gpt2_one_head": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=1, n_positions=512, bos_token_id=1, eos_token_id=2)
    ),
}


def make(name: str):
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():  # away from the symmetric start: attention far from uniform, norms far from 1
            p.add_(torch.randn_like(p) * 0.3)
    return model


def segment(source, ids):
    logprobs = np.zeros(len(ids), np.float32) if source == "sampled" else None
    return Segment(ids=np.asarray(ids, np.int64), source=source, logprobs=logprobs, version=0)


def rows(lengths=((5, (9, 2, 14)), (11, (3, 3)), (1, (1, 20)))) -> list[Sample]:
    """Groups of a shared prompt with ragged responses; every other one has a second turn."""
    rng, out = np.random.default_rng(0), []
    for g, (prompt, responses) in enumerate(lengths):
        head = rng.integers(3, VOCAB, prompt)
        for i, n in enumerate(responses):
            turns = [segment("prompt", head), segment("sampled", rng.integers(3, VOCAB, n))]
            if i % 2:
                turns += [segment("env", rng.integers(3, VOCAB, 4)), segment("sampled", rng.integers(3, VOCAB, n))]
            out.append(
                Sample(
                    sample_id=f"{g}/{i}",
                    trajectory_id=f"{g}/{i}",
                    group_id=str(g),
                    purpose="train",
                    segments=tuple(turns),
                    temperature=0.8,
                )
            )
    return out


TERMS = (Term(name="loss", fn=nll),)


def run(model, batch, **options):
    """(log-probs, gradients) of a weighted sum of all log-probs."""
    engine = TorchEngine(
        copy.deepcopy(model), EngineSettings(optim=OptimSpec(lr=1.0), **{"dtype": "float64", **options})
    )
    weight = torch.linspace(-1, 1, batch.num_loss_tokens, dtype=torch.float64)
    out = engine.forward_backward(batch.with_columns({"w/loss": weight}), TERMS)
    return out.columns["logprobs"], {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}


@matrix(
    "small_keys, free_padding",
    [(256, 0), (12, 0), (256, 1 << 30), (0, 1 << 30)],
    quick=2,
    ids=["blocks", "mixed", "one block", "one SDPA call"],  # rows of more keys than small_keys go through SDPA
)
@each("name", MODELS)
def test_packed_and_shared_equal_each_sequence_alone(name, small_keys, free_padding, monkeypatch):
    """The oracle is one padded row per sequence through the model's own attention."""
    use_facts(monkeypatch, attention, kept_score_keys=small_keys, free_padding=free_padding)
    model, batch = make(name), pack(rows())
    expected, expected_grads = run(model, batch, attention_mode="padded")
    for what, got in (
        ("shared", run(model, batch)),
        ("flat", run(model, unshare(batch))),
        ("split", run(model, batch, max_tokens_per_microbatch=40)),
    ):
        torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=1e-6, msg=lambda m, w=what: f"{w}: {m}")
        for n, g in expected_grads.items():
            torch.testing.assert_close(
                got[1][n], g, rtol=1e-4, atol=1e-5 * float(g.abs().max()), msg=lambda m, w=what, n=n: f"{w} {n}: {m}"
            )


@each("name", MODELS)
def test_the_start_up_check_passes_whatever_the_precision(name):
    model = make(name)
    engine = TorchEngine(model, EngineSettings(optim=OptimSpec(lr=1.0), dtype="bfloat16", emulate_bf16=False))
    assert engine.check_packing(share_prefix=True) < 1e-4 and engine.check_packing(share_prefix=False) < 1e-4
    assert model.training and model.config._attn_implementation == attention.PACKED
    critic = TorchEngine(make(name), EngineSettings(head="value", dtype="float32"))
    assert critic.check_packing(share_prefix=True) < 1e-4, "a critic's body is packed too"


def wrong_offsets(batch, device, **options):
    plan = real_plan(batch, device, **options)
    for block in plan.blocks:
        block.offset.add_(1)  # each query sees one token of the future
    plan.varlen = None  # blocks compute it
    return plan


def one_tree(batch, device, **options):
    parent = np.where(np.arange(len(batch.parent)) > 0, 0, -1)  # the probe's second tree hangs under the first
    return real_plan(replace(batch, parent=parent), device, **options)


def joined(batch, device, **options):
    return real_plan(replace(batch, seg_start=batch.seg_start[[0, -1]], parent=batch.parent[:1]), device, **options)


real_plan = attention.plan_attention


@each("name, leak", product(["qwen3", "gpt2"], [wrong_offsets, one_tree, joined]))
def test_a_planted_leak_is_caught_at_start(name, leak, monkeypatch):
    engine = TorchEngine(make(name), EngineSettings(dtype="float32"))
    monkeypatch.setattr(attention, "plan_attention", leak)
    with pytest.raises(ValueError, match=r"packed log-probs differ .* Set model\.engine_options\.attention=padded"):
        engine.check_packing(share_prefix=True)


def recurrent_gemma():
    """Its logits are capped under another name than Gemma 2's, and half of its layers are recurrent."""
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(**SIZES, attention_window_size=8, lru_width=16, logits_soft_cap=2.0)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def test_a_padded_pass_is_proven_at_start_too():
    engine = TorchEngine(make("gpt2"), EngineSettings(dtype="float32", attention_mode="padded"))
    assert engine.check_packing(share_prefix=False) < 1e-4
    engine = TorchEngine(recurrent_gemma(), EngineSettings(dtype="float32", attention_mode="padded"))
    with pytest.raises(ValueError, match=r"RecurrentGemmaForCausalLM: padded log-probs differ .* no way to train"):
        engine.check_packing(share_prefix=False)


@each("name", ["qwen3", "mistral", "gemma3", "gpt2"])
def test_the_loss_of_one_sequence_has_no_gradient_in_another(name, monkeypatch):
    """In one pass with rows that nothing depends on, which an engine computes without a backward pass."""
    monkeypatch.setattr("verl.model_engine.passes.trained_rows", lambda batch, terms: np.ones(batch.num_rows, bool))
    engine = TorchEngine(make(name), EngineSettings(optim=OptimSpec(lr=1.0), dtype="float32"))
    seen = []
    engine.model.get_input_embeddings().register_forward_hook(lambda m, i, out: seen.append(out) or out.retain_grad())
    batch = probe_batch(VOCAB, share_prefix=True)
    weight = torch.zeros(batch.num_loss_tokens, dtype=torch.float64)
    weight[int(batch.row_start[1]) : int(batch.row_start[2])] = 1.0  # the second response to the shared prompt
    engine.forward_backward(batch.with_columns({"w/loss": weight}), TERMS)
    per_token = seen[0].grad.reshape(batch.num_tokens, -1).abs().sum(-1)
    own = torch.zeros(batch.num_tokens, dtype=torch.bool)
    segment_of = int(batch.leaf[1])
    while segment_of >= 0:
        own[batch.seg_start[segment_of] : batch.seg_start[segment_of + 1]] = True
        segment_of = int(batch.parent[segment_of])
    assert float(per_token[~own].max()) == 0.0 and float(per_token[own].max()) > 0


def test_models_that_scale_or_sink_are_refused_in_words():
    with pytest.raises(ValueError, match=r"CohereForCausalLM changes its logits after the head \(logit_scale=0\.0625"):
        TorchEngine(CohereForCausalLM(CohereConfig(**SIZES)), EngineSettings(dtype="float32"))

    def gpt_oss(**options):
        return TorchEngine(
            GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1)),
            EngineSettings(dtype="float32", **options),
        )

    with pytest.raises(ValueError, match=r"has sinks; use model\.engine_options\.attention=padded"):
        gpt_oss().infer(pack(rows()), ("logprobs",))
    padded = gpt_oss(attention_mode="padded")
    assert padded.infer(pack(rows()), ("logprobs",))["logprobs"].isfinite().all(), "the way out that the message names"


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free_padding", [0, 500, 1 << 30])
def test_every_token_is_a_query_once_and_sees_its_ancestors(free_padding, monkeypatch):
    use_facts(monkeypatch, attention, free_padding=free_padding)
    batch = pack(rows())
    plan = attention.plan_attention(batch, torch.device("cpu"))
    assert (len(plan.blocks) == 1) == (free_padding == 1 << 30)
    queries = torch.cat([b.q_index[b.real] for b in plan.blocks])
    assert sorted(queries.tolist()) == list(range(batch.num_tokens))
    flat = unshare(batch)
    origin = unshare(replace(batch, ids=torch.arange(batch.num_tokens))).ids
    place = {int(t): i for i, t in enumerate(origin)}  # of some row that holds the token
    start_of = np.repeat(flat.seg_start[:-1], np.diff(flat.seg_start))
    for b in plan.blocks:
        allowed, windowed = b.mask(None, torch.bool)[:, 0], b.mask(2, torch.bool)[:, 0]
        for i, t in b.real.nonzero().tolist():
            at = place[int(b.q_index[i, t])]
            assert b.k_index[i][allowed[i, t]].tolist() == origin[start_of[at] : at + 1].tolist()
            assert b.k_index[i][windowed[i, t]].tolist() == origin[max(start_of[at], at - 1) : at + 1].tolist()
        assert allowed.any(-1).all() and windowed.any(-1).all(), "a padded query sees something: no NaN anywhere"
        assert b.mask(2, torch.float32).isfinite().any(-1).all()


@each("window, share", product([None, 3], [True, False]))
def test_the_flash_path_of_the_gpu_is_the_blocks_attention(share, window):
    batch = pack(rows(), share_prefix=share)
    t = batch.num_tokens
    q, k, v = (torch.randn(t, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    upstream = torch.randn(t, 4, 8, dtype=torch.float64)
    found = []
    for attend in (
        lambda: attention.attend(attention.plan_attention(batch, torch.device("cpu")), q, k, v, 0.3, window),
        lambda: attention.attend_varlen(
            attention.make_varlen(batch, torch.device("cpu")), q, k, v, 0.3, window, trained.trained_attention
        ),
    ):
        out = attend()
        found.append((out, *torch.autograd.grad(out, (q, k, v), upstream)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@each("window, share", product([None, 3], [True, False]))
def test_a_run_of_queries_over_the_keys_of_all_is_its_part_of_the_whole(share, window):
    """Through the blocks and through the flash path, wherever the run begins and ends."""
    batch = pack(rows(), share_prefix=share)
    t, device = batch.num_tokens, torch.device("cpu")
    q, k, v = (torch.randn(t, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    whole = attention.attend(attention.plan_attention(batch, device), q, k, v, 0.3, window)
    for size in (1, 3, t // 2, t):
        for first in range(0, t, size):
            run = slice(first, min(first + size, t))
            plan = attention.plan_attention(batch, device, queries=(run.start, run.stop))
            torch.testing.assert_close(attention.attend(plan, q[run], k, v, 0.3, window), whole[run])
            lengths = attention.make_varlen(batch, device, queries=(run.start, run.stop))
            out = attention.attend_varlen(lengths, q[run], k, v, 0.3, window, trained.trained_attention)
            torch.testing.assert_close(out, whole[run])


def test_the_flash_kernels_take_the_arguments_we_give(monkeypatch):
    """No GPU here: torch's own signature is bound; flash_attn is not installed, its documented one is written out."""
    import inspect
    import sys
    import types

    import torch.nn.attention.varlen as torch_varlen

    lengths = replace(attention.make_varlen(pack(rows()), torch.device("cpu")), k_index=None)
    q, k = torch.zeros(2, 4, 8), torch.zeros(2, 2, 8)
    calls = {}

    def bound_to(name, signature):
        def kernel(*args, **kwargs):
            calls[name] = signature.bind(*args, **kwargs).arguments
            return q

        return kernel

    monkeypatch.setattr(torch_varlen, "varlen_attn", bound_to("torch", inspect.signature(torch_varlen.varlen_attn)))
    fake = types.ModuleType("flash_attn")  # as flash-attn-4 alone leaves it: without the function
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    here = Use(torch.device("meta"), torch.bfloat16)
    assert segments.load_flash_attn(here) == "flash-attn 2 is not installed"
    assert segments.load_torch(here) is segments.torch_segments

    def documented(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
    ): ...

    fake.flash_attn_varlen_func = bound_to("flash_attn", inspect.signature(documented))
    assert segments.load_flash_attn(here) is segments.flash_attn_segments
    too_wide = Use(torch.device("meta"), torch.bfloat16, {"head_dim": 264})
    assert (
        segments.load_flash_attn(too_wide)
        == segments.load_torch(too_wide)
        == "head_dim=264: flash kernels compute up to 256"
    )
    for kernel in (segments.torch_segments, segments.flash_attn_segments):
        assert attention.attend_varlen(lengths, q, k, k, 0.5, 3, kernel) is q
    assert calls["torch"]["window_size"] == calls["flash_attn"]["window_size"] == (2, 0)
    assert calls["flash_attn"]["causal"] and calls["torch"].get("enable_gqa", "not in torch 2.11")
    assert calls["torch"]["cu_seq_k"] is calls["flash_attn"]["cu_seqlens_k"] is lengths.bounds[1]
    assert (calls["torch"]["scale"], calls["flash_attn"]["softmax_scale"]) == (0.5, 0.5)
    assert not calls["flash_attn"]["deterministic"]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    attention.attend_varlen(lengths, q, k, k, 0.5, 3, segments.flash_attn_segments)
    assert calls["flash_attn"]["deterministic"], "torch's own kernel reads the setting itself"


def test_padding_is_bounded():
    batch = pack(rows(tuple((p, (r,) * 4) for p, r in ((4, 30), (8, 200), (300, 12), (64, 64), (2, 500)))))
    plan = attention.plan_attention(batch, torch.device("cpu"), max_waste=0.2)
    for b in plan.blocks:
        area, lengths = b.q_index.numel() * b.k_index.shape[1], b.real.sum(1)
        assert (
            area - int((lengths * (b.offset + lengths)).sum())
            <= max(device_facts("cpu").free_padding, 0.2 * area) + 8 * b.q_index.numel()
        )
    assert len(plan.blocks) < len(batch.parent) / 2, "like segments are computed together"


# -- the fused modules -----------------------------------------------------------------------------------------------


def test_fused_norm_and_rotary_are_the_models_own():
    """In float64 against their definitions, values and gradients (transformers' own norm rounds to float32)."""
    torch.manual_seed(0)
    x, w = (
        torch.randn(7, 3, 8, dtype=torch.float64, requires_grad=True),
        torch.randn(8, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(lambda a, b: trained.trained_rms_norm(a, b, 1e-5), (x, w))
    torch.testing.assert_close(trained.trained_rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (8,), w, 1e-5))
    cos, sin = torch.randn(2, 7, 1, 8, dtype=torch.float64)
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    torch.testing.assert_close(trained.trained_rotation(x, cos, sin), x * cos + half * sin)
    assert torch.autograd.gradcheck(lambda a: trained.trained_rotation(a, cos, sin), (x,))


def test_fused_norm_keeps_the_dtype_rules_of_the_module():
    torch.manual_seed(0)
    w = torch.rand(8) + 0.5
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(5, 8).to(dtype).requires_grad_()
        own = w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        got = trained.trained_rms_norm(x, w, 1e-6)
        assert got.dtype == own.dtype == torch.float32
        torch.testing.assert_close(got, own, rtol=0.01, atol=0.01)
        got.sum().backward()
        assert x.grad.dtype == dtype


@each("name", MODELS)
def test_fusing_is_for_known_models_and_undone_without_trace(name):
    model = make(name)
    known = fused.fuse(model, packed=True)
    assert known == (not name.startswith(("gemma", "gpt2")))
    assert any("forward" in vars(m) for m in model.modules()) == known
    fused.unfuse(model)
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "mistral"])
def test_fused_in_float32_equals_the_models_own_in_float64(name, monkeypatch):
    """In float32 norms and gates are compiled; without a compiler they are torch's operations in few passes."""
    model, batch = make(name), pack(rows())
    exact, exact_grads = run(model, batch, attention_mode="padded")
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr("verl.accel.cpu.rows.load_kernels", lambda dtype: "no C compiler")
        got, grads = run(model, batch, dtype="float32")
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        for n, g in exact_grads.items():
            torch.testing.assert_close(grads[n].double(), g, rtol=1e-3, atol=2e-5 * float(g.abs().max()) + 1e-6)
