"""A loss on the environment's tokens in addition to the policy's: by hand, over ranks and micro-batches, with separate
figures. (Splits, packing: test_split.py.)"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import put
from passes import turn
from test_virtual_ranks import config_of, samples

from verl.algorithms.resolve import resolve
from verl.batch import pack
from verl.config.tree import changed
from verl.model_engine.hf_model import load_causal_lm
from verl.observed import OBSERVED, observed
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.rows import columns_of, observed_tokens, queued_samples
from verl.types import TEMPLATE, Segment

RNG = np.random.default_rng(8)


def of(source: str, n: int) -> Segment:
    logprobs = (-2 - RNG.random(n)).astype(np.float32) if source == "sampled" else None
    return Segment(ids=RNG.integers(4, 19, n), source=source, logprobs=logprobs, version=0)


def turns():
    """Some rows with one or two answers of a tool between the policy's, one that a tool ends, some without."""
    out = []
    for i, s in enumerate(samples(0)):
        more = [of("env", 1 + i % 4), of("sampled", 2), of("env", 3)] if i % 3 else []
        own = (replace(segment, side={}) for segment in s.segments)
        out.append(replace(s, segments=(*own, *more)))
    return out


def turn_of(model: Path, made, coef: float, *, ranks: int = 1, budget: int = 16384, updates: int = 1, name="grpo"):
    """(gradients of the optimizer steps, metrics, queue, refs)."""
    config = config_of(name, model, model, ranks, budget)
    config = changed(config, {"step.updates_per_step": updates, "step.epochs_per_step": 1})
    config.algorithm.options["observation_coef"] = coef
    config.algorithm.options["kl_loss_coef"] = 0.0
    return turn(config, made)


def by_hand(model: Path, made) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Mean -log p of the tools' tokens of valid rows, their number, and its gradient."""
    own, nll = load_causal_lm(model).double(), []
    for s in made:
        ids = torch.from_numpy(np.concatenate([x.ids for x in s.segments]))
        logp = own(ids[None]).logits[0].log_softmax(-1)
        at = 0
        for x in s.segments:
            if x.source == "env" and s.outcome == "ok":
                nll += [-logp[t - 1, ids[t]] for t in range(at, at + len(x.ids))]
            at += len(x.ids)
    mean = torch.stack(nll).mean()
    mean.backward()
    return float(mean.detach()), len(nll), {n: p.grad for n, p in own.named_parameters()}


@pytest.mark.parametrize("ranks, budget", [(1, 16384), (1, 40), (2, 60)])
def test_the_gradient_is_that_of_the_mean_over_what_tools_wrote(ranks, budget, tiny_model):
    made, coef = turns(), 0.25
    (without,), plain, before, refs = turn_of(tiny_model, made, 0.0, ranks=ranks, budget=budget)
    (beside,), metrics, after, _ = turn_of(tiny_model, made, coef, ranks=ranks, budget=budget)
    mean, count, grads = by_hand(tiny_model, made)
    assert metrics["actor/observation_nll"] == pytest.approx(mean, rel=1e-9)
    assert metrics["actor/observation_loss"] == pytest.approx(coef * mean, rel=1e-9)
    assert metrics["actor/observed_tokens"] == count > 40
    for n, expected in grads.items():
        scale = float(expected.abs().max())
        assert scale > 0
        torch.testing.assert_close(beside[n] - without[n], coef * expected, rtol=0, atol=1e-6 * scale)
    apart = {n: v for n, v in metrics.items() if "observ" not in n and not n.startswith("actor/grad_norm")}
    assert apart == pytest.approx({n: v for n, v in plain.items() if n in apart}, rel=1e-12, abs=1e-15)
    assert apart.keys() >= {"actor/pg_loss", "actor/entropy", "mismatch/k3"}
    a, b = (q.read(refs, ("train_logprobs",))["train_logprobs"] for q in (before, after))
    torch.testing.assert_close(a.values, b.values, rtol=1e-12, atol=1e-13)
    assert np.array_equal(a.offsets, b.offsets)


def test_each_optimizer_step_divides_by_its_own_tokens(tiny_model):
    made = turns()
    _, _, queue, refs = turn_of(tiny_model, made, 0.25, updates=2)
    weights = queue.read(refs, ("w/observation_loss",))["w/observation_loss"]
    groups: dict[float, set[str]] = {}
    for s, row in zip(made, weights.rows(), strict=True):
        assert len(row) == sum(len(x.ids) for x in s.segments if x.source == "env")
        for w in row.tolist() if s.outcome == "ok" else ():
            groups.setdefault(w, set()).add(s.group_id)
        assert s.outcome == "ok" or not row.any()
    assert len(groups) == 2 and sorted(g for half in groups.values() for g in half) == ["g0", "g1", "g2", "g3"]
    for w, half in groups.items():
        assert w == pytest.approx(0.25 / by_hand(tiny_model, [s for s in made if s.group_id in half])[1])


def test_what_stands_before_the_policy_and_in_other_rows_is_context():
    first = samples(0)[0]
    prompt = first.segments[0]
    for rest, count in (
        ((of("env", 3), of("sampled", 2)), 0),
        ((of("env", 3), of("sampled", 2), of("env", 4), of("env", 1), of("sampled", 1)), 5),
        ((of("sampled", 2), of("env", 2)), 2),
    ):
        sample = replace(first, segments=(prompt, *rest))
        batch = pack([observed(sample)])
        seen = batch.columns["versions"] == OBSERVED
        assert int(seen.sum()) == observed_tokens(columns_of(sample)["segments"]) == count
        plain = pack([sample])
        assert torch.equal(batch.targets[~seen], plain.targets)
        assert torch.equal(batch.columns["rollout_logprobs"][~seen], plain.columns["rollout_logprobs"])
        assert batch.num_tokens == plain.num_tokens


def test_what_the_template_wrote_around_an_answer_is_context():
    first = samples(0)[0]
    body, scaffold = of("env", 3), replace(of("env", 2), version=TEMPLATE)
    for rest, learned in (
        ((body, of("sampled", 2), scaffold, body, scaffold, of("sampled", 1)), [body]),
        ((of("sampled", 2), scaffold, body, body), [body, body]),
        ((body, of("sampled", 2), scaffold), []),
    ):
        sample = replace(first, segments=(first.segments[0], *rest))
        queue = MemoryQueue()
        (sample,) = queued_samples(queue, put(queue, [sample]))
        batch = pack([observed(sample)])
        seen = batch.columns["versions"] == OBSERVED
        assert batch.targets[seen].tolist() == [i for s in learned for i in s.ids.tolist()]
        assert int(seen.sum()) == observed_tokens(columns_of(sample)["segments"])


def test_side_channels_are_0_where_nobody_drew():
    sample = samples(0)[0]
    drawn = replace(of("sampled", 2), side={"routes": np.array([[1, 2], [3, 4]])})
    batch = pack([observed(replace(sample, segments=(sample.segments[0], drawn, of("env", 2), drawn)))])
    assert batch.columns["side/routes"].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0], [1, 2], [3, 4]]


def test_it_is_off_by_default():
    assert "observation_loss" not in [t.name for t in resolve("grpo").terms]
    with pytest.raises(ValueError, match=r"observation_coef=-1.*>= 0"):
        resolve("grpo", {"observation_coef": -1.0})
