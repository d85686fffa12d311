"""The effect on a policy term of a correction that weighs and rejects tokens: gradients against closed forms, through
the workers that train."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import put
from small_columns import columns

from verl.algorithms import losses
from verl.algorithms.resolve import resolve
from verl.algorithms.weights import term_weights
from verl.batch import Ragged
from verl.model_engine.objective import evaluate_terms
from verl.objective import Term
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Sample, Segment
from verl.workers.compute import Compute, OptimizerStep
from verl.workers.rank_batch import RankStep, batch_of_step

F64 = torch.float64
OLD = [-1.0, -2.0, -0.5, -1.5]  # one answer of three tokens, one of one


def gradient(terms: tuple[Term, ...], new, *, advantages=(1.0, 1.0, 1.0, -1.0), **stored) -> list[float]:
    """dL/dlog-probs of the terms on two answers, as Compute weighs them and a Role packs them for its engine."""
    queue = MemoryQueue()
    refs = put(queue, [_sample("a", 3), _sample("b", 1)])
    columns = {"old_logprobs": OLD, "advantages": advantages, "rollout_logprobs": OLD, **stored}
    offsets = np.array([0, 3, 4])
    for name, values in columns.items():
        value = torch.tensor(values, dtype=torch.bool if name == "keep" else F64)
        queue.write(refs, {name: Ragged(value, offsets)})
    inputs = tuple(dict.fromkeys([*(n for t in terms for n in t.inputs), "old_logprobs"]))
    Compute(queue).weigh([OptimizerStep(refs)], terms, inputs)
    batch = batch_of_step(queue, RankStep(refs), terms, inputs, share_prefix=True)
    leaf = torch.tensor(new, dtype=F64, requires_grad=True)
    loss, _ = evaluate_terms(terms, batch, {"logprobs": leaf})
    return torch.autograd.grad(loss, leaf)[0].tolist()


def _sample(name: str, tokens: int) -> Sample:
    answer = Segment(ids=np.arange(1, tokens + 1), source="sampled", logprobs=np.zeros(tokens, np.float32), version=0)
    return Sample(
        sample_id=name,
        trajectory_id=name,
        group_id="g",
        purpose="train",
        segments=(Segment(ids=np.array([7]), source="prompt"), answer),
        reward=1.0,
    )


WIDE = {"clip_low": 0.9, "clip_high": 9.0}
NEW = [-0.9, -2.2, -0.2, -1.5]
MEAN = (0.1 - 0.2 + 0.3) / 3  # of the log-ratios of the first answer, all of its tokens


def corrected(name, **more):
    given = {"correction": "icepop", "correction_high": 2.0, **WIDE, **more}
    return resolve(name, given).terms


def test_a_token_that_icepop_zeroed_stays_in_the_ratio_of_its_sequence():
    """s = exp(mean of all log-ratios), the loss of a token is -w_t s A / (S n), and ds / dlp = s / n."""
    s, w = math.exp(MEAN), (0.0, 1.5, 1.0)
    each = -s * sum(w) / 3 / (2 * 3)  # every token pulls on s, also the one without weight
    got = gradient(corrected("gspo"), NEW, is_weights=[*w, 1.0], keep=[True] * 4)
    assert got == pytest.approx([each] * 3 + [0.5], rel=1e-9)


def test_a_rejected_token_leaves_the_ratio_of_its_sequence():
    s = math.exp((-0.2 + 0.3) / 2)
    got = gradient(corrected("gspo"), NEW, is_weights=[0.0, 1.0, 1.0, 1.0], keep=[False, True, True, True])
    assert got == pytest.approx([0.0, -s / 4, -s / 4, 0.5], rel=1e-9)


def test_gmpo_takes_the_geometric_mean_of_the_importance_weights():
    """-A rho (w_1 w_2 w_3)^(1/3) per answer."""
    w = (0.5, 1.5, 1.2)
    geometric = (0.5 * 1.5 * 1.2) ** (1 / 3)
    got = gradient(corrected("gmpo"), NEW, is_weights=[*w, 2.0], keep=[True] * 4)
    assert got == pytest.approx([-math.exp(MEAN) * geometric / 6] * 3 + [1.0], rel=1e-9)
    gone = gradient(corrected("gmpo"), NEW, is_weights=[0.0, 1.5, 1.2, 2.0], keep=[True] * 4)
    assert gone == pytest.approx([0.0] * 3 + [1.0]), "the geometric mean of weights with a 0 is 0"


def test_sequence_weights_of_a_bypassed_step_count_the_rejected_tokens_too():
    """w = exp(sum of log pi / rollout) of the whole answer; only the kept tokens are trained."""
    level = {"correction_level": "sequence", "correction": "truncate", "bypass": True, "correction_high": 9.0}
    terms = resolve(
        "reinforce", {**level, "aggregation": "token-mean", "correction_reject": ["token_k1:0.1:1.2"]}
    ).terms
    w = math.exp(0.1 - 0.2 + 0.3)
    got = gradient(terms, NEW, keep=[True, True, False, True], is_weights=[1.0, 1.0, 0.0, 1.0])
    assert got == pytest.approx([-w / 3, -w / 3, 0.0, 1 / 3], rel=1e-9)


def test_answers_that_the_budget_cut_are_in_no_loss_and_in_no_denominator():
    from verl.driver.step import without_truncated
    from verl.workers.compute import step_columns

    refs = put(MemoryQueue(), [replace(_sample("a", 3), stop_reason="length"), _sample("b", 1)])
    columns = step_columns(refs, {"keep": torch.tensor([True, True, True, False])})
    found = without_truncated(columns)
    assert found["keep"].tolist() == [False] * 4, "what a correction rejected stays rejected"
    assert found["actor/truncated_masked"].value == 0.5
    keep = without_truncated(step_columns(refs, {}))["keep"]
    assert keep.tolist() == [False, False, False, True]
    got = gradient(resolve("dapo", {"mask_truncated": True}).terms, OLD, keep=keep.tolist())
    assert got == pytest.approx([0.0, 0.0, 0.0, 1.0])


AGGREGATED = {  # weights of two answers of 3 and 1 tokens, horizon 5
    "token-mean": [1 / 4] * 4,
    "token-sum": [1.0] * 4,
    "seq-mean-token-sum": [1 / 2] * 4,
    "seq-mean-token-mean": [1 / 6] * 3 + [1 / 2],
    "seq-mean-token-sum-norm": [1 / 10] * 4,
}


def test_the_terms_beside_the_policy_loss_have_its_aggregation():
    """k2: the gradient of a token is its weight times log(pi / ref)."""
    ref = [-1.1, -2.1, -0.3, -2.0]
    gaps = [new - old for new, old in zip(NEW, ref)]
    for aggregation, each in AGGREGATED.items():
        given = {"aggregation": aggregation, "horizon_tokens": 5, "kl_loss_coef": 0.5, "kl_loss_form": "k2"}
        terms = resolve("grpo", {**given, "entropy_coef": 0.25, "divergence_coef": 2.0}).terms
        kl = tuple(t for t in terms if t.name == "kl_loss")
        expected = [0.5 * w * gap for w, gap in zip(each, gaps)]
        assert gradient(kl, NEW, ref_logprobs=ref) == pytest.approx(expected, rel=1e-9), aggregation
        found = term_weights(columns([1.0, 0.0], tokens=[3, 1]), terms)
        for name, coef in (("pg_loss", 1.0), ("kl_loss", 0.5), ("entropy_loss", 0.25), ("divergence_loss", 2.0)):
            assert found[f"w/{name}"].tolist() == pytest.approx([coef * w for w in each]), (aggregation, name)


def test_vapo_learns_the_text_of_the_right_answers_alone():
    found = term_weights(columns([1.0, 0.0, 1.0], tokens=[3, 1, 1]), resolve("vapo").terms)
    assert found["w/positive_nll"].tolist() == pytest.approx([0.1 / 4] * 3 + [0.0, 0.1 / 4])


def test_a_bad_answer_is_dropped_where_the_policy_left_it_by_more_than_delta():
    """The mean of log(sampler / pi) is 0.4 for the first answer, which has a negative advantage."""
    sampler, bad = [x + 0.4 for x in NEW[:3]] + NEW[3:], (-1.0, -1.0, -1.0, 1.0)
    for delta, kept in ((0.39, False), (0.41, True)):
        terms = resolve("dapo", {**WIDE, "off_policy_delta": delta}).terms
        found = gradient(terms, NEW, advantages=bad, rollout_logprobs=sampler)
        assert [g != 0 for g in found] == [kept] * 3 + [True], delta
    assert "logprobs" in resolve("gkd", {"off_policy_delta": 0.5}).terms[0].outputs


def test_a_row_without_a_teacher_leaves_the_terms_that_read_one_and_no_other():
    c = columns([1.0, 0.0], tokens=[3, 1])
    c = replace(c, sequence={**c.sequence, "taught": torch.tensor([True, False])})
    policy, teacher = (
        Term(name=n, fn=losses.nll, inputs=i) for n, i in (("p", ("advantages",)), ("t", ("teacher_ids",)))
    )
    found = term_weights(c, (policy, teacher))
    assert found["w/p"].tolist() == [1 / 4] * 4 and found["m/p"].tolist() == [True] * 4
    assert found["w/t"].tolist() == pytest.approx([1 / 3] * 3 + [0.0]) and found["m/t"].tolist() == [True] * 3 + [False]
    before = term_weights(c, (replace(teacher, denominator="before_rejection"),))["w/t"]
    assert before.tolist() == pytest.approx([1 / 3] * 3 + [0.0]), "its tokens are in no count of that term"


def test_a_term_over_some_sequences_counts_only_their_tokens_before_a_rejection():
    """One of three tokens of the first answer was rejected; the second answer is not in the term."""
    c = columns([1.0, 0.0], tokens=[3, 1]).with_token({"keep": torch.tensor([True, True, False, True])})
    for denominator, each in (("after_rejection", 1 / 2), ("before_rejection", 1 / 3)):
        term = Term(name="t", fn=losses.nll, over="positive", denominator=denominator)
        assert term_weights(c, (term,))["w/t"].tolist() == pytest.approx([each, each, 0.0, 0.0]), denominator
