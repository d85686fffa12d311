"""The driver's step over stored columns, without a model: what replaces what."""

import asyncio

import numpy as np
import torch

from verl.algorithms.resolve import resolve
from verl.batch import Ragged
from verl.config.load import load_config
from verl.driver.roles import Learner
from verl.driver.step import Step, _advantages, _critic_is_warm
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Metric, Sample, Segment
from verl.workers.compute import Compute
from verl.workers.inproc import InprocGroup
from verl.workers.model_workers import ComputeWorker
from verl.workers.waits import Waits


def advantages_of(settings):
    """One group of two answers; the sampler and the old policy disagree. What was stored afterwards."""
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
        )
        for i in range(2)
    ]
    algorithm = resolve("dapo", settings)
    compute = ComputeWorker(InprocGroup("compute", [Compute(queue)]))
    config = load_config(["model.path=/models/m"]).config
    learner = Learner(config=config, models={}, compute=compute, queue=queue, waits=Waits(), algorithm=algorithm)

    async def run():
        refs = await queue.put(rows)
        old = torch.tensor([-1.5, -2.5, -0.5, -4.0], dtype=torch.float64)
        queue.write(refs, {"old_logprobs": Ragged(old, np.array([0, 2, 4]))})
        written = await _advantages(learner, Step(0), algorithm, refs)
        return written, {n: queue.read(refs, (n,))[n].values.tolist() for n in queue.columns(refs)}

    try:
        return asyncio.run(run())
    finally:
        compute.close()


def test_in_bypass_mode_the_sampler_is_the_old_policy():
    written, columns = advantages_of({"bypass": True})
    assert columns["old_logprobs"] == columns["rollout_logprobs"] == [-1, -2, -2, -3] and "old_logprobs" in written


def test_a_correction_leaves_the_old_policy_and_weighs_against_the_sampler():
    written, columns = advantages_of({"correction": "truncate", "correction_high": 2.0})
    assert columns["old_logprobs"] == [-1.5, -2.5, -0.5, -4.0] and "old_logprobs" not in written
    ratios = np.exp(np.array([-0.5, -0.5, 1.5, -1.0])).clip(max=2.0)
    np.testing.assert_allclose(columns["is_weights"], ratios, rtol=1e-6)
    assert columns["keep"] == [True] * 4 and columns["advantages"][0] < 0 < columns["advantages"][2]


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
