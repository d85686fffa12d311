"""The driver's step over stored columns, without a model: what replaces what."""

import asyncio
import random
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.algorithms.resolve import resolve
from verl.batch import Ragged
from verl.config.load import load_config
from verl.driver.roles import Learner
from verl.driver.step import Step, _advantages, _critic_is_warm, _log_failed, _selected, _with_copies, optimizer_steps
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Metric, Refs, Sample, Segment, derive_seed, ref_of
from verl.workers.compute import Compute
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ComputeWorker
from verl.workers.waits import Waits

OLD, REFERENCE = [-1.5, -2.5, -0.5, -4.0], [-1.6, -2.6, -0.62, -4.12]


def advantages_of(settings, name="dapo", cut=()):
    """Return the results of the step for one group of two answers, on which the sampler and the old policy disagree:
    the names that it returns, the columns, and the new KL coefficient. The answers in `cut` are truncated."""
    queue = MemoryQueue()
    rows = [
        Sample(
            sample_id=str(i),
            trajectory_id=str(i),
            group_id="g",
            purpose="train",
            segments=(
                Segment(ids=np.array([1]), source="prompt"),
                Segment(ids=np.array([2, 3]), source="sampled", logprobs=np.float32([-1, -2]) - i, version=0),
            ),
            reward=float(i),
            stop_reason="length" if i in cut else "eos",
        )
        for i in range(2)
    ]
    algorithm = resolve(name, settings)
    compute = ComputeWorker(InprocGroup("compute", [Compute(queue)]))
    config = load_config(["model.path=/models/m"]).config
    learner = Learner(config=config, models={}, compute=compute, queue=queue, waits=Waits(), algorithm=algorithm)

    step = Step(0)
    if algorithm.kl_reward:
        learner.controllers.kl_coef = algorithm.kl_reward.coef

    async def run():
        refs = await queue.put(rows)
        for column, values in (("old_logprobs", OLD), ("ref_logprobs", REFERENCE)):
            queue.write(refs, {column: Ragged(torch.tensor(values, dtype=torch.float64), np.array([0, 2, 4]))})
        written = await _advantages(learner, step, algorithm, refs)
        columns = {n: queue.read(refs, (n,))[n].values.tolist() for n in queue.columns(refs)}
        if algorithm.kl_reward:
            assert step.metrics["actor/reward_kl_penalty_coeff"].value == algorithm.kl_reward.coef
        return written, columns, learner.controllers.kl_coef

    try:
        return asyncio.run(run())
    finally:
        compute.close()


def test_in_bypass_mode_the_sampler_is_the_old_policy():
    written, columns, _ = advantages_of({"bypass": True})
    assert columns["old_logprobs"] == columns["rollout_logprobs"] == [-1, -2, -2, -3] and "old_logprobs" in written


def test_a_correction_leaves_the_old_policy_and_weighs_against_the_sampler():
    written, columns, _ = advantages_of({"correction": "truncate", "correction_high": 2.0})
    assert columns["old_logprobs"] == [-1.5, -2.5, -0.5, -4.0] and "old_logprobs" not in written
    ratios = np.exp(np.array([-0.5, -0.5, 1.5, -1.0])).clip(max=2.0)
    np.testing.assert_allclose(columns["is_weights"], ratios, rtol=1e-6)
    assert columns["keep"] == [True] * 4 and columns["advantages"][0] < 0 < columns["advantages"][2]


def test_a_cut_answer_adds_to_what_a_correction_rejected():
    """mask: token 2 of the first answer and token 1 of the second have a ratio above 1.5 or below 1 / 1.5."""
    correction = {"correction": "mask", "correction_high": 1.7, "correction_low": 0.5}
    _, columns, _ = advantages_of(correction)
    assert columns["keep"] == [True, True, False, False]
    _, columns, _ = advantages_of({**correction, "mask_truncated": True}, cut={0})
    assert columns["keep"] == [False] * 4, "the rejected tokens of the answer that was not cut came back"
    _, columns, _ = advantages_of({"mask_truncated": True}, cut={0})
    assert columns["keep"] == [False, False, True, True]


def test_the_adaptive_coefficient_follows_the_kl_and_not_the_penalty():
    """The mean KL is (0.1 + 0.12) / 2 = 0.11 per token, 10% above the target; the penalty is 0.3 of it."""
    given = {"kl_reward_coef": 0.3, "kl_reward_target": 0.1, "kl_reward_horizon": 10.0}
    assert advantages_of(given, "reinforce_plus_plus")[2] == pytest.approx(0.3 * (1 + 0.1 * 2 / 10), rel=1e-9)


def row(name, group, reward=0.0, trajectory=None):
    answer = Segment(ids=np.array([2]), source="sampled", logprobs=np.zeros(1, np.float32), version=0)
    made = Sample(
        sample_id=name,
        trajectory_id=trajectory or name,
        group_id=group,
        purpose="train",
        segments=(answer,),
        reward=reward,
    )
    return ref_of(made)


@pytest.mark.parametrize(
    ("groups", "updates", "sizes"), [(5, 2, [2, 3]), (7, 3, [2, 3, 2]), (2, 4, [1, 1]), (4, 2, [2, 2])]
)
def test_every_group_is_trained_once_per_epoch_also_where_they_do_not_divide(groups, updates, sizes):
    rows = Refs(row(f"{g}/{i}", str(g)) for g in range(groups) for i in range(2))
    steps = optimizer_steps(rows, updates, 2, seed=3, index=0)
    assert len(steps) == 2 * len(sizes)
    for epoch in (0, 1):
        own = [s for s in steps if s.recorded == (epoch == 0)]
        assert sorted(len(s.refs.groups()) for s in own) == sorted(sizes)
        assert sorted(r.sample_id for s in own for r in s.refs) == sorted(rows.ids)
        assert {s.weights for s in own} == {f"/{epoch}" if epoch else ""}


def test_the_critic_is_warm_once_it_explains_enough_and_stays_so():
    algorithm = resolve("ppo", {"critic_warmup_until": 0.6, "critic_warmup_steps": 50})
    config = load_config(["model.path=/models/m"]).config
    learner = Learner(config=config, models={"critic": None}, compute=None, queue=None, waits=Waits())
    found = []
    for index, explained in enumerate((0.1, 0.59, 0.6, -3.0)):
        step = Step(index)
        step.metrics = {"critic/vf_explained_var": Metric(explained, 1, "step")}
        found.append(_critic_is_warm(learner, step, algorithm))
    assert found == [False, False, True, True]
    learner.controllers.critic_warm = False
    assert not _critic_is_warm(learner, step, algorithm)
    late = Step(50)
    late.metrics = step.metrics
    assert _critic_is_warm(learner, late, algorithm), "after the warm-up's steps it trains whatever it explains"


def learner_of(name, **settings):
    config = load_config(["model.path=/models/m", "run.seed=7", "pipeline.max_invalid_share=1.0"]).config
    return SimpleNamespace(algorithm=resolve(name, settings), config=config, models={}, done=_done)


async def _done(future, what):
    return future.result()


def test_answers_are_chosen_anew_in_every_step_and_group():
    """The best and a random other one of four; a trajectory of two rows is chosen whole."""
    rows = Refs(
        row(f"{g}/{i}/{k}", g, float(i), f"{g}/{i}") for g in "ab" for i in range(4) for k in range(1 + (i == 3))
    )
    learner, found = learner_of("pf_ppo", selection="br"), set()
    for index in range(8):
        kept = _selected(learner, Step(index), rows)
        names = [r.sample_id for r in kept]
        assert [n[:3] for n in names].count("a/3") == [n[:3] for n in names].count("b/3") == 2 and len(names) == 6
        found.add(tuple(n for n in names if "/3" not in n))
        assert [r.sample_id for r in _selected(learner, Step(index), rows)] == names
    assert len({a[2] for a, _ in found}) == 3 and any(a[2] != b[2] for a, b in found)
    greedy = replace(row("a/greedy", "a"), purpose="baseline")
    assert greedy in _selected(learner, Step(0), Refs([*rows, greedy])), "a baseline is not chosen from"


def test_draws_with_replacement_are_copies_of_whole_answers():
    scores = {"a": 1.0, "b": 3.0, "c": 0.0, "d": 2.0}
    rows = Refs(row(f"{n}{k}", n, s, n) for n, s in scores.items() for k in range(1 + (n == "b")))
    learner = learner_of("pf_ppo", selection="pow", weight_pow=1.0)
    for index in range(4):
        drawn = learner.algorithm.sample_filter.draw(
            list(scores.values()), random.Random(derive_seed(7, "draw", index))
        )
        expected = {n: k for n, k in zip(scores, drawn) if k}
        found = _with_copies(learner, Step(index), rows)
        assert {r.trajectory_id: r.copies for r in found} == expected and sum(expected.values()) == 4
        assert len(found) == len(expected) + ("b" in expected)
    assert _with_copies(learner_of("ppo"), Step(0), rows) is rows


def test_a_step_of_which_a_teacher_has_nothing_is_refused_whatever_share_may_fail():
    counted: Future = Future()
    counted.set_result({})
    learner = learner_of("opd")
    learner.models["teacher"] = SimpleNamespace(take_metrics=lambda: counted)
    rows, step = Refs([row("a", "g"), row("b", "g")]), Step(0)
    asyncio.run(_log_failed(learner, step, "teacher", rows, frozenset({"a"})))
    assert step.metrics["teacher/invalid"].value == 0.5
    with pytest.raises(ValueError, match=r"teacher: 2 of 2 samples have no finite number"):
        asyncio.run(_log_failed(learner, step, "teacher", rows, frozenset({"a", "b"})))
