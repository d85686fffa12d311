"""Preference and reward-model terms in the engine, float64: no split, order or sharing changes loss or gradient."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from each import each
from fakes import put
from passes import forward_backward
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.algorithms.preference import Pairs, bradley_terry, dpo, preference_terms, reward_terms, rpo_gap
from verl.algorithms.presets import PREFERENCES
from verl.batch import Ragged
from verl.chat import Rendered
from verl.data.preference import Pair, PairTable
from verl.driver.stages import PreferenceStage, Reference, RewardStage
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.transfer_queue.memory import MemoryQueue
from verl.workers.compute import Compute, OptimizerStep
from verl.workers.rank_batch import RankStep, batch_of_step

VOCAB = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            tie_word_embeddings=True,
        )
    ).double()


def table(rows: int = 5) -> PairTable:
    rng = np.random.default_rng(0)

    def answer(prompt: np.ndarray) -> Rendered:
        ids = np.concatenate([prompt, rng.integers(1, VOCAB, rng.integers(1, 7))])
        return Rendered(ids, np.arange(len(ids)) >= len(prompt))

    pairs = []
    for i in range(rows):
        prompt = rng.integers(1, VOCAB, rng.integers(2, 6))
        pairs.append(Pair(answer(prompt), answer(prompt), desirable=i % 2 == 0, gap=float(rng.normal())))
    return PairTable(pairs, None, "k")  # type: ignore[arg-type]


def stage_of(name):
    if name == "rm":
        return RewardStage(table(), reward_terms(center_coef=0.1, margin=True))
    stage = PreferenceStage(table(), preference_terms(name), PREFERENCES[name].paired)
    if "ref_logprobs" in stage.terms[0].inputs:
        counts = [int(r.mask.sum()) for i in range(len(stage.table)) for _, r in stage.entries(i)]
        values = np.random.default_rng(1).normal(-2, 0.5, sum(counts)).astype(np.float32)
        stage.reference = Reference(values, np.concatenate([[0], np.cumsum(counts)]), len(stage.entries(0)))
    return stage


def gradient(model, stage, indices, *, budget=10_000, share=True):
    engine = TorchEngine(
        copy.deepcopy(model),
        EngineSettings(
            head="score" if isinstance(stage, RewardStage) else "lm",
            optim=OptimSpec(lr=1e-3),
            dtype="float64",
            max_tokens_per_microbatch=budget,
        ),
    )
    if engine.value_head is not None:
        torch.nn.init.normal_(engine.value_head.weight, generator=torch.Generator().manual_seed(0))
    queue = MemoryQueue()
    samples, columns = stage.rows(indices, [f"s{i}" for i in indices], str)
    refs = put(queue, samples)
    offsets = np.cumsum([0, *(r.loss_tokens for r in refs)])
    queue.write(refs, {n: Ragged(value, offsets) for n, value in columns.items()})
    Compute(queue).weigh([OptimizerStep(refs)], stage.terms, tuple(columns))
    batch = batch_of_step(queue, RankStep(refs), stage.terms, tuple(columns), share_prefix=share)
    out = forward_backward(engine, batch, stage.terms)
    return {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}, out


@each("name", ["rm", *PREFERENCES], quick=4)
def test_no_split_order_or_sharing_changes_the_gradient(name, model):
    stage = stage_of(name)
    expected, whole = gradient(model, stage, range(5), share=False)
    assert sum(float(g.abs().sum()) for g in expected.values()) > 0
    variants = {
        "shared": gradient(model, stage, range(5)),
        "micro-batches that part the pairs": gradient(model, stage, range(5), share=False, budget=12),
        "shared micro-batches": gradient(model, stage, range(5), budget=16),
        "another order": gradient(model, stage, [3, 0, 4, 2, 1], budget=20),
    }
    for what, (grads, out) in variants.items():
        assert out.metrics["loss"].value == pytest.approx(whole.metrics["loss"].value, rel=1e-9), what
        for n, g in expected.items():
            torch.testing.assert_close(grads[n], g, rtol=1e-7, atol=1e-11, msg=lambda m, w=what, n=n: f"{w} {n}: {m}")


def test_the_loss_of_a_step_is_the_mean_of_its_pairs(model):
    stage = stage_of("dpo")
    _, whole = gradient(model, stage, range(5))
    alone = [gradient(model, stage, [i])[1].metrics["loss"].value for i in range(5)]
    assert whole.metrics["loss"].value == pytest.approx(np.mean(alone), rel=1e-9)
    metrics = [gradient(model, stage, [i])[1].metrics["rewards/margins"].value for i in range(5)]
    assert whole.metrics["rewards/margins"].value == pytest.approx(np.mean(metrics), rel=1e-9)


def pairs(chosen, rejected, gap=None):
    t = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    one = torch.ones(len(chosen), dtype=torch.float64)
    return Pairs(
        chosen=t(*chosen),
        rejected=t(*rejected),
        ref_chosen=0 * one,
        ref_rejected=0 * one,
        chosen_tokens=one,
        rejected_tokens=one,
        gap=None if gap is None else t(*gap),
    )


def test_extremes_stay_finite():
    huge = pairs([1e4, -1e4], [-1e4, 1e4], gap=[100.0, -100.0])
    assert dpo(huge, beta=1.0).isfinite().all() and dpo(huge, beta=1.0).tolist() == [0.0, 2e4]
    for how in ("sq", "bwd_kl", "fwd_kl"):
        assert rpo_gap(huge, beta=0.1, distance=how).isfinite().all()
    assert bradley_terry(torch.tensor([-200.0]), torch.tensor([200.0])).tolist() == [400.0], (
        "log(1 + exp()) would overflow"
    )
    same = rpo_gap(pairs([1.0], [0.0], gap=[0.1]), beta=0.1)
    assert float(same) == pytest.approx(0.0, abs=1e-12), "the implicit reward is the true one"
    assert float(
        rpo_gap(replace(pairs([1.0], [0.0]), gap=torch.tensor([0.1])), beta=0.1, distance="fwd_kl")
    ) == pytest.approx(0.0, abs=1e-7)


def test_a_row_without_scores_is_refused_by_a_loss_that_reads_them():
    with pytest.raises(ValueError, match="chosen_score"):
        rpo_gap(pairs([1.0], [0.0]), beta=0.1)
