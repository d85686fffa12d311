"""GKD's lambda: a share of the prompts is answered by the data. A stored answer is in the loss as a sampled one is,
with its own tokens, and in nothing else: it was neither sampled nor scored."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from each import each
from fakes import put
from passes import turn
from test_teacher import dense_pair, plain
from test_virtual_ranks import config_of, samples

from verl.batch import pack
from verl.config.tree import changed
from verl.driver.trajectories import takes_stored
from verl.model_engine.hf_model import load_causal_lm
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.rows import queued_samples
from verl.types import Ref, Segment, ref_of

BETA, OF_DRAWN = 0.3, ("critic/", "mismatch/")


def rows():
    """Groups 1 and 3 are stored answers, of one row each; 0 and 2 four drawn ones."""
    out, seen = [], set()
    for s in samples(0):
        if s.group_id in ("g0", "g2"):
            out.append(s)
        elif s.group_id not in seen:
            seen.add(s.group_id)
            answer = Segment(ids=s.segments[1].ids, source="stored")
            out.append(replace(s, segments=(s.segments[0], answer), reward=float("nan"), components={}))
    return [replace(s, segments=tuple(replace(x, side={}) for x in s.segments)) for s in out]


def turn_of(name, made, model, teacher, ranks=1, budget=16384, share=0.5):
    """(gradients of each optimizer step, metrics, queue, refs) of a turn over these rows."""
    config = config_of(name, model, teacher, ranks, budget)
    config = changed(config, {"step.updates_per_step": 1, "step.epochs_per_step": 1})
    config = changed(config, {"step.samples_per_prompt": 4})
    config.algorithm.options.update({"beta": BETA})
    if share < 1:
        config.algorithm.options.update({"on_policy_share": share, "stored_key": "answer"})
    return turn(config, made)


@pytest.mark.parametrize("name", ["gkd", "gkd_topk"])
def test_the_loss_and_its_gradient_are_those_of_the_definition(name, tiny_model, tiny_teacher):
    """The mean over tokens, where a stored answer counts as the four that the policy would have given."""
    made = rows()
    found, metrics, _, _ = turn_of(name, made, tiny_model, tiny_teacher)
    student, teacher = (load_causal_lm(folder).double() for folder in (tiny_model, tiny_teacher))
    total, tokens, entropy, same = torch.zeros((), dtype=torch.float64), 0, [], []
    of_source: dict[str, list[torch.Tensor]] = {"sampled": [], "stored": []}
    for s in made:
        if s.outcome != "ok":
            continue
        times = 4 if s.segments[1].source == "stored" else 1
        pair = dense_pair(student, teacher, s, top=5 if name == "gkd_topk" else None)
        of_source[s.segments[1].source].append(plain(*pair, BETA).detach())
        total, tokens = total + times * plain(*pair, BETA).sum(), tokens + times * len(s.segments[1].ids)
        entropy.append(-(pair[1].exp() * pair[1]).sum(-1))
        one, other = (x[:, :-1] if name == "gkd_topk" else x for x in pair)
        same.append((one.argmax(-1) == other.argmax(-1)).double())
    (total / tokens).backward()
    assert metrics["actor/pg_loss"] == pytest.approx(float(total.detach()) / tokens, rel=1e-6)
    for said, source in (("drawn", "sampled"), ("stored", "stored")):
        wanted = float(torch.cat(of_source[source]).mean())
        assert metrics[f"actor/teacher_divergence/{said}"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["actor/teacher_entropy"] == pytest.approx(float(torch.cat(entropy).mean()), rel=1e-6)
    assert metrics["actor/teacher_agreement"] == pytest.approx(float(torch.cat(same).mean()))
    grads = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    assert grads.keys() == found[0].keys()
    for n, g in found[0].items():
        torch.testing.assert_close(g, grads[n], rtol=1e-5, atol=1e-6 * float(grads[n].abs().max()))


@pytest.mark.parametrize("name", ["gkd", "gkd_topk"])
def test_ranks_and_packing_do_not_matter(name, tiny_model, tiny_teacher):
    (expected,), metrics, _, _ = turn_of(name, rows(), tiny_model, tiny_teacher)
    for ranks, budget in ((2, 40), (3, 16384)):
        (found,), theirs, _, _ = turn_of(name, rows(), tiny_model, tiny_teacher, ranks, budget)
        for n, g in expected.items():
            torch.testing.assert_close(found[n], g, rtol=1e-9, atol=1e-12)
        assert theirs == pytest.approx(metrics, rel=1e-8, abs=1e-9)


def test_what_nobody_drew_is_in_no_figure_of_what_was(tiny_model, tiny_teacher):
    """Rewards, advantages and the mismatch with the sampler are those of the drawn answers alone."""
    made = rows()
    drawn = [s for s in made if s.segments[1].source == "sampled"]
    _, metrics, queue, refs = turn_of("gkd_topk", made, tiny_model, tiny_teacher)
    _, alone, _, _ = turn_of("gkd_topk", drawn, tiny_model, tiny_teacher, share=1.0)
    same = [n for n in alone if n.startswith(OF_DRAWN)]
    assert {n.partition("/")[0] + "/" for n in same} == {*OF_DRAWN} and metrics["groups/stored_share"] == 0.5
    assert {n: metrics[n] for n in same} == pytest.approx({n: alone[n] for n in same})
    stored = [r for r in refs if r.stored]
    assert len(stored) == 2 and all(r.version_min == -1 and np.isnan(r.reward) for r in stored)
    assert queue.having(refs, "advantages") == refs.sampled()


def test_a_step_without_any_drawn_answer(tiny_model, tiny_teacher):
    stored = [s for s in rows() if s.segments[1].source == "stored"]
    (grads,), metrics, _, _ = turn_of("gkd_topk", stored, tiny_model, tiny_teacher, share=0.0)
    assert metrics["groups/stored_share"] == 1 and any(float(g.abs().max()) > 0 for g in grads.values())
    assert not any(n.startswith(OF_DRAWN) for n in metrics)


def test_a_stored_answer_in_the_queue_and_in_a_pack():
    made = rows()
    queue = MemoryQueue()
    refs = put(queue, made)
    again = queued_samples(queue, refs)
    assert [r.stored for r in refs] == [s.segments[1].source == "stored" for s in made]
    for a, b in zip(made, again, strict=True):
        assert (a.segments[1].source, a.loss_tokens) == (b.segments[1].source, b.loss_tokens)
        assert (b.segments[1].logprobs is None) == (a.segments[1].source == "stored")
    batch = pack(again)
    at = batch.columns["rollout_logprobs"].isnan()
    assert torch.equal(at, batch.columns["versions"] == -1)
    assert int(at.sum()) == sum(s.loss_tokens for s in made if s.segments[1].source == "stored")
    with pytest.raises(AssertionError, match="nobody drew"):
        Segment(ids=np.arange(2), source="stored", logprobs=np.zeros(2, np.float32))


@each("share", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_any_draws_in_a_row_hold_their_share(share):
    taken = [takes_stored(share, 7, 0, draw) for draw in range(1000)]
    for first, count in ((0, 1000), (3, 40), (500, 9), (17, 200)):
        assert abs(sum(taken[first : first + count]) - share * count) < 1
    for draw in (0, 12, 999):
        of_row = np.mean([takes_stored(share, 7, epoch, draw) for epoch in range(2000)])
        assert of_row == pytest.approx(share, abs=0.05), "every row is as likely"


def test_a_ref_says_it():
    ref = ref_of(rows()[4])
    assert isinstance(ref, Ref) and ref.stored and ref.loss_tokens > 0
