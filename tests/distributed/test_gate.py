"""The gate: every layout equals the single process in loss, outputs and all gradients, to 1e-5 of a tensor's largest.

Each pair of (layout, packing), (layout, role), (packing, role) and (layout, a rank without rows) is in some case of the
layouts of one kind; each of their products is in one case. FULL_GRID=1 runs every combination."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace

import hybrid
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import EXPERTS, HEADS, LORA, MODELS, SIZES, Case, differences, engine, on_rank, one_process, share, together
from forked import run
from test_split import VOCAB
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from verl.batch import pack
from verl.model_engine import sharded
from verl.model_engine.layout import Layout
from verl.model_engine.objective import trained_rows
from verl.nn import attention, linear_logprob, sequence_parallel, tensor_parallel
from verl.types import Sample, Segment

LAYOUTS = {
    "DP": Layout(world_size=2, replicate=2),
    "FSDP": Layout(world_size=2),
    "FSDP, three": Layout(world_size=3),
    "FSDP, four": Layout(world_size=4),
    "HSDP": Layout(world_size=4, replicate=2),
    "TP": Layout(world_size=2, tensor=2),
    "TP, four": Layout(world_size=4, tensor=4),
    "FSDP x TP": Layout(world_size=4, tensor=2),
    "DP x TP": Layout(world_size=4, replicate=2, tensor=2),
    "SP": Layout(world_size=2, sequence=2),
    "SP, four": Layout(world_size=4, sequence=4),
    "FSDP x SP": Layout(world_size=4, sequence=2),
    "HSDP x SP": Layout(world_size=4, sequence=2, replicate=2),
    "SP x TP": Layout(world_size=4, sequence=2, tensor=2),
    "CP": Layout(world_size=2, context=2),
    "CP, four": Layout(world_size=4, context=4),
    "HSDP x CP": Layout(world_size=4, context=2, replicate=2),
    "CP x TP": Layout(world_size=4, context=2, tensor=2),
    "CP x EP": Layout(world_size=4, context=2, expert=4),
    "CP x PP": Layout(world_size=4, context=2, pipeline=2),
    "EP": Layout(world_size=2, expert=2),
    "FSDP x EP": Layout(world_size=4, expert=2),
    "HSDP x EP": Layout(world_size=4, replicate=2, expert=2),
    "SP x EP": Layout(world_size=4, sequence=2, expert=4),
    "TP x EP": Layout(world_size=4, tensor=2, expert=2),
    "PP": Layout(world_size=2, pipeline=2),
    "FSDP x PP": Layout(world_size=4, pipeline=2),
    "DP x PP": Layout(world_size=4, replicate=2, pipeline=2),
    "TP x PP": Layout(world_size=4, tensor=2, pipeline=2),
    "SP x PP": Layout(world_size=4, sequence=2, pipeline=2),
    "EP x PP": Layout(world_size=4, expert=2, pipeline=2),
}
FULL = bool(os.environ.get("FULL_GRID"))
if FULL:
    LAYOUTS["HSDP x SP x TP"] = Layout(world_size=8, sequence=2, tensor=2, replicate=2)
    LAYOUTS["TP x EP x PP"] = Layout(world_size=8, tensor=2, expert=2, pipeline=2)
OF_ONE_KIND = ("DP", "FSDP", "HSDP", "TP", "SP", "CP", "EP", "PP")
OTHERS = ((True, False), tuple(HEADS), (False, True))  # packing, role, a rank without rows


def pairwise(layouts: Sequence[str]) -> list[tuple]:
    """A small set of combinations in which each two values of different factors meet: greedy, the same every time."""
    every = list(itertools.product(layouts, *OTHERS))

    def pairs(row: tuple) -> set[tuple]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        best = max(every, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def once_each(layouts: Sequence[str]) -> list[tuple]:
    """Every layout once, each with other values of the other factors than the one before."""
    others = list(itertools.product(*OTHERS))
    return [(name, *others[7 * i % len(others)]) for i, name in enumerate(layouts)]


if FULL:
    GRID = list(itertools.product(LAYOUTS, *OTHERS))
else:
    GRID = pairwise(OF_ONE_KIND) + once_each([name for name in LAYOUTS if name not in OF_ONE_KIND])


@pytest.mark.parametrize("layout, shared, role, idle", GRID)
def test_every_layout_gives_what_one_process_gives(layout, shared, role, idle):
    at, dense = LAYOUTS[layout], [name for name in MODELS if name != EXPERTS]
    models = dense if FULL else dense[(len(role) + shared + idle) % 2 :][:1]
    for name in (EXPERTS,) if at.expert > 1 else models:
        case = Case(at, role, shared, idle and at.data > 1, name)
        expected = one_process(case)
        assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
        found = together(case, run(at.world_size, lambda rank: on_rank(case, rank)))
        wrong = differences(found, expected)
        assert not wrong, (name, wrong)


@pytest.mark.parametrize("layout", ["SP x EP", "TP x EP"])
def test_routes_of_the_rollout_are_replayed_as_in_one_process(layout, monkeypatch):
    case = Case(LAYOUTS[layout], model=EXPERTS)
    refs, batch, terms = case.batch()
    choices = np.random.default_rng(0).random((SIZES["num_hidden_layers"], batch.num_tokens, 8)).argsort(-1)[..., :2]
    routes = torch.from_numpy(choices).transpose(1, 2).to(torch.int8)
    monkeypatch.setattr(Case, "batch", lambda self: (refs, replace(batch, routes=routes), terms))
    expected, own = one_process(case, replays_routes=True), one_process(case)
    assert float((expected["loss"] - own["loss"]).abs()) > 1e-4
    found = together(case, run(case.layout.world_size, lambda rank: on_rank(case, rank, replays_routes=True)))
    wrong = differences(found, expected)
    assert not wrong, wrong


@pytest.mark.parametrize("layout", ["DP", "FSDP, three", "HSDP", "FSDP x TP", "SP", "FSDP x EP", "PP"])
def test_rows_without_a_gradient_train_nothing_on_any_rank(layout, monkeypatch):
    """The groups that need no backward pass are spread unevenly over the ranks."""
    case = Case(LAYOUTS[layout], model=EXPERTS if "EP" in layout else "qwen3, tied")
    refs, batch, terms = case.batch()
    alone = [t for t in terms if t.name == "pg_loss"]
    monkeypatch.setattr(Case, "batch", lambda self: (refs, batch, alone))
    assert 0 < trained_rows(batch, alone).sum() < batch.num_rows
    found = together(case, run(case.layout.world_size, lambda rank: on_rank(case, rank)))
    monkeypatch.setattr(Case, "batch", lambda self: (refs, batch, [replace(t, scaled_by=None) for t in alone]))
    wrong = differences(found, one_process(case))
    assert not wrong, wrong


WITH_LORA = ("DP", "FSDP, three", "HSDP", "TP", "FSDP x TP", "SP", "CP", "FSDP x EP", "TP x EP", "PP", "TP x PP")


@pytest.mark.parametrize("layout", LAYOUTS if FULL else WITH_LORA)
def test_factors_of_lora_get_the_gradients_of_one_process(layout):
    """All else is frozen, in the same groups of FSDP. A critic's head is trained too."""
    at, role = LAYOUTS[layout], "critic" if layout in ("HSDP", "PP") else "actor"
    sparse = at.expert > 1
    case = Case(at, role, model=(EXPERTS if sparse else "qwen3, tied" if at.pipeline > 1 else "llama, biases") + LORA)
    given = {} if sparse else {"dtype": "float64"}  # in which transformers cannot compute experts
    expected = one_process(case, **given)
    assert all(t.abs().max() > 0 for t in expected.values()), "a test of zeros proves nothing"
    trained = {n for n in expected if "." in n}
    assert len(trained) == 2 * (12 if sparse else 14) + 2 * (role == "critic")
    assert all(n.endswith(("lora_A", "lora_B")) or n.startswith("value_head") for n in trained)
    found = together(case, run(at.world_size, lambda rank: on_rank(case, rank, **given)))
    wrong = differences(found, expected, rtol=1e-5 if sparse else 1e-6)
    assert not wrong, wrong


def test_factors_that_saw_their_own_slice_alone_are_seen(monkeypatch):
    case = Case(LAYOUTS["TP"], model="llama, biases" + LORA)
    expected = one_process(case)
    for style, factor in tensor_parallel._PARTIAL:
        with monkeypatch.context() as patch:
            patch.setattr(tensor_parallel, "_PARTIAL", tensor_parallel._PARTIAL - {(style, factor)})
            found = run(2, lambda rank: on_rank(case, rank)["whole"])
        wrong = differences(found[0], {n: expected[n] for n in found[0]}, rtol=1e-2)
        assert wrong and all(factor in line for line in wrong), wrong


FAMILIES = {
    "qwen2": (("TP", "SP"), lambda: Qwen2ForCausalLM(Qwen2Config(**PLAIN, tie_word_embeddings=True))),
    "gemma3": (
        ("TP", "SP", "CP"),
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SIZES,
                sliding_window=9,
                query_pre_attn_scalar=8,
                layer_types=["sliding_attention", "full_attention"],
                final_logit_softcapping=20.0,
            )
        ),
    ),
    "mixtral": (("EP", "TP"), lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))),
    "olmoe": (("EP",), lambda: OlmoeForCausalLM(OlmoeConfig(**PLAIN, num_experts=4, num_experts_per_tok=2))),
    "qwen2, experts": (("EP", "TP"), lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**PLAIN, **FEW_EXPERTS))),
    "delta nets": (("DP", "FSDP"), lambda: hybrid.model("qwen3_next", vocab_size=VOCAB)),
    "gpt2": (("SP",), lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=VOCAB))),
}
FEW_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
PLAIN = {name: value for name, value in SIZES.items() if name != "head_dim"}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_packed_and_padded(family, monkeypatch):
    layouts, make = FAMILIES[family]
    monkeypatch.setitem(MODELS, family, make)
    for name in layouts:
        modes = ("auto",) if name in ("SP", "CP") else ("auto", "padded")
        for mode in modes if FULL or len(layouts) == 1 else modes[-1:] if name == layouts[0] else modes[:1]:
            case = Case(LAYOUTS[name], model=family)

            def proven(rank: int) -> dict:
                engine(family, "actor", case.layout, attention_mode=mode).check_packing(share_prefix=mode == "auto")
                return on_rank(case, rank, attention_mode=mode)

            wrong = differences(together(case, run(2, proven)), one_process(case, attention_mode=mode))
            assert not wrong, (name, mode, wrong)


@pytest.mark.parametrize("checkpointed", ["none", "selective", "full"])
def test_ranks_with_the_keys_of_all_tokens_need_no_heads_to_share(checkpointed, monkeypatch):
    """One key-value head and four ranks."""
    one = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1}
    monkeypatch.setitem(MODELS, "one key head", lambda: Qwen2ForCausalLM(Qwen2Config(**one)))
    case, given = Case(LAYOUTS["CP, four"], model="one key head"), {"gradient_checkpointing": checkpointed}
    wrong = differences(together(case, run(4, lambda rank: on_rank(case, rank, **given))), one_process(case, **given))
    assert not wrong, wrong


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_attention_of_a_run_over_the_keys_of_all(rows, window):
    """Rows with a shared prompt, cut anywhere; the runs of one row of five tokens leave the fourth rank without any."""
    batch = pack([short_row(i) for i in range(rows)])
    q, k, v = (torch.randn(batch.num_tokens, heads, 8, dtype=torch.float64) for heads in (3, 1, 1))
    upstream = torch.randn_like(q)

    def attended(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, plan: attention.AttentionPlan) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention.attend(plan, *inputs, 0.3, window)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]

    def on_run(rank: int) -> list[Tensor]:
        over = sequence_parallel.KeyGather(dist.group.WORLD, batch.num_tokens)
        plan = attention.plan_attention(batch, torch.device("cpu"), queries=over.queries)
        plan.exchange = over
        return attended(*(over.mine(x.movedim(0, -1)).movedim(-1, 0) for x in (q, k, v, upstream)), plan)

    whole = attended(q, k, v, upstream, attention.plan_attention(batch, torch.device("cpu")))
    for expected, parts in zip(whole, zip(*run(4, on_run), strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts)[: batch.num_tokens], expected)


def short_row(i: int) -> Sample:
    prompt, answer = np.array([3, 4], np.int64), np.array([5, 6, *([7] * (1 + i % 4))], np.int64)
    sampled = Segment(ids=answer, source="sampled", logprobs=np.zeros(len(answer), np.float32), version=0)
    segments = (Segment(ids=prompt, source="prompt"), sampled)
    group = str(i // 3)
    return Sample(sample_id=str(i), trajectory_id=str(i), group_id=group, purpose="train", segments=segments)


def test_gradients_of_keys_that_stay_on_their_rank_are_seen(monkeypatch):
    """The gradient of a key is the sum over the queries of all ranks."""

    def of_own_queries(ctx, d_out):
        rank, run_of = ctx.group.rank(), len(d_out) // ctx.group.size()
        return d_out[rank * run_of :][:run_of], None

    monkeypatch.setattr(sequence_parallel._GatherRuns, "backward", staticmethod(of_own_queries))
    case = Case(LAYOUTS["CP"])
    assert differences(together(case, run(2, lambda rank: on_rank(case, rank))), one_process(case), rtol=1e-2)


def test_experts_that_no_token_came_to_keep_step(monkeypatch):
    """A router that sends every token to the first rank: the other has nothing to compute, and is waited for."""
    made = MODELS[EXPERTS]

    def biased():
        model = made()
        model.set_experts_implementation("eager")  # which does not even read the weights of experts without a token
        for layer in model.model.layers:
            with torch.no_grad():
                layer.mlp.gate.weight.copy_(torch.ones_like(layer.mlp.gate.weight))  # a tie: the first experts win
        return model

    monkeypatch.setitem(MODELS, "one side", biased)
    for layout in ("EP", "SP x EP"):
        case = Case(LAYOUTS[layout], model="one side")
        for checkpointed in ("none", "selective", "full"):
            given = {"gradient_checkpointing": checkpointed}
            found = run(case.layout.world_size, lambda rank: on_rank(case, rank, **given))
            assert not differences(together(case, found), one_process(case, **given))


def test_copies_of_the_model_meet_once_a_step():
    """However many passes: gradients of a copy are kept until the last."""
    case = Case(LAYOUTS["HSDP"])

    def meetings(rank: int) -> tuple[int, int]:
        e = engine(case.model, "actor", case.layout)
        _, batch, _ = share(case, rank)
        found = []
        for budget in (10_000, 30):
            e.passes.max_tokens, seen = budget, []
            reduce = sharded.FSDPModule.set_requires_all_reduce
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    sharded.FSDPModule, "set_requires_all_reduce", lambda m, on: (seen.append(on), reduce(m, on))
                )
                e.forward_backward(batch, case.batch()[2])
            found.append((len(seen), sum(seen)))
        return found

    for (passes, met), (more, still) in run(4, meetings):
        assert passes == met == still == 1 and more > 2


def test_a_mean_in_place_of_the_sum_is_seen(monkeypatch):
    monkeypatch.setattr(sharded.FSDPModule, "set_gradient_divide_factor", lambda module, factor: None)
    case = Case(LAYOUTS["FSDP"])
    assert differences(together(case, run(2, lambda rank: on_rank(case, rank))), one_process(case), rtol=1e-2)


def test_norms_of_heads_that_saw_their_own_rank_alone_are_seen(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "Partial", tensor_parallel.Replicate)
    case = Case(LAYOUTS["TP"])
    found = run(2, lambda rank: on_rank(case, rank)["whole"])
    expected = one_process(case)
    wrong = differences(found[0], {n: expected[n] for n in found[0]}, rtol=1e-2)
    assert wrong and all("_norm.weight" in line for line in wrong), wrong


def test_gradients_that_every_peer_counts_are_seen(monkeypatch):
    def summed(ctx, d_out):
        d_out = d_out.clone()
        dist.all_reduce(d_out, group=ctx.group)
        return d_out[ctx.saved_tensors[0]], None, None, None

    def forward(ctx, values, which, size, group):
        ctx.group = group
        return once(ctx, values, which, size, group)

    once = sequence_parallel._Together.forward
    monkeypatch.setattr(sequence_parallel._Together, "forward", staticmethod(forward))
    monkeypatch.setattr(sequence_parallel._Together, "backward", staticmethod(summed))
    case = Case(LAYOUTS["SP"])
    assert differences(together(case, run(2, lambda rank: on_rank(case, rank))), one_process(case), rtol=1e-2)


def test_no_rank_holds_a_row_of_logits(monkeypatch):
    case, made = Case(LAYOUTS["TP, four"]), linear_logprob.chunk_logits

    def widths(rank: int) -> set[int]:
        seen = set()

        def noted(*args):
            z = made(*args)
            seen.add(z.shape[1])
            return z

        monkeypatch.setattr(linear_logprob, "chunk_logits", noted)
        on_rank(case, rank)
        return seen

    assert run(4, widths) == [{VOCAB // 4}] * 4
