"""The contract of a worker group, waits with deadlines, placement, and what a role does with a user's functions."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from each import each
from fakes import FakeEngine, put

from verl.algorithms.losses import nll
from verl.batch import Columns
from verl.driver.step import optimizer_steps
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.optim import OptimSpec
from verl.model_engine.settings import EngineSettings
from verl.model_engine.torch_engine import TorchEngine
from verl.objective import Term
from verl.rollout.base import Capabilities
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Metric, Sample, Segment
from verl.workers.compute import Compute, OptimizerStep
from verl.workers.placement import Placement
from verl.workers.rank_batch import RankStep
from verl.workers.role import Role
from verl.workers.waits import DeadlineExpired

# -- placement ---------------------------------------------------------------------------------------------------------


def test_a_colocated_rollout_sleeps_while_training_and_wakes_whatever_happens():
    async def main():
        replicas = [FakeEngine(), FakeEngine()]
        placement = Placement(replicas, colocated=True)
        async with placement.training():
            assert [r.asleep for r in replicas] == [True, True]
        assert [r.asleep for r in replicas] == [False, False]
        with pytest.raises(KeyError):
            async with placement.training():
                raise KeyError
        assert [r.asleep for r in replicas] == [False, False]
        async with Placement(replicas, colocated=False).training():
            assert [r.asleep for r in replicas] == [False, False]

    asyncio.run(main())


def test_a_replica_that_does_not_go_to_sleep_is_named_and_the_others_wake():
    class Insomniac(FakeEngine):
        async def sleep(self, level=1):
            await asyncio.sleep(30)

    async def main():
        replicas = [FakeEngine(), Insomniac()]
        with pytest.raises(DeadlineExpired, match="replica 1 to sleep"):
            async with Placement(replicas, colocated=True, timeout_s=0.02).training():
                raise AssertionError("not reached")
        assert not replicas[0].asleep

    asyncio.run(main())


class Unwilling(FakeEngine):
    """One of several."""

    replaceable, fails_at, why = True, "sleep", None

    async def sleep(self, level=1):
        if self.fails_at == "sleep":
            raise ConnectionError("the server is gone")
        return await super().sleep(level)

    async def wake(self, tags=("weights", "kv")):
        if self.fails_at == "wake":
            raise ConnectionError("the server is gone")
        await super().wake(tags)

    def lose(self, why):
        self.why = why


@pytest.mark.parametrize("at", ["sleep", "wake"])
def test_one_of_several_replicas_that_fails_to_sleep_or_wake_is_lost_and_the_others_go_on(at):
    replicas = [FakeEngine(), Unwilling(), FakeEngine()]
    replicas[1].fails_at, inside, notes = at, [], []

    async def main():
        placement = Placement(replicas, colocated=True, note=notes.append)
        for _ in range(2):
            async with placement.training():
                inside.append([r.asleep for r in replicas])

    asyncio.run(main())
    assert inside == 2 * [[True, at == "wake", True]] and not (replicas[0].asleep or replicas[2].asleep)
    assert isinstance(replicas[1].why, ConnectionError)
    (note,) = notes
    assert note.startswith(
        "rollout: asleep, replica 0, 2 told of no" if at == "sleep" else "rollout: asleep, replica 0, 1"
    )


@each(
    "level, told, freed, why",
    [
        (1, 900e6, 900e6, None),
        (1, 900e6, 100e6, "it told of 900 MB, and of its device 100 MB came free: at least 450 MB"),
        (1, 0, 3e9, None),  # it does not say
        (1, 0, 0, "it told of 0 MB, and of its device 0 MB came free: at least 67 MB"),
        (1, 900e6, -1e6, "and of its device -1 MB came free"),  # somebody else took more
        (2, 0, 0, None),  # it cannot, and no number was expected
    ],
)
def test_a_replica_whose_sleep_frees_too_little_of_the_device_is_given_up(level, told, freed, why):
    free = [10_000_000_000]

    class Server(Unwilling):
        fails_at = "nowhere"

        async def capabilities(self):
            return Capabilities(logprobs="processed", max_context_tokens=8, sleep_levels=(1,))

        async def sleep(self, level=1):
            await super().sleep(level)
            free[0] += int(freed)
            return int(told)

    replicas = [Server(), FakeEngine()]

    async def main():
        async with Placement(replicas, True, level == 2, free_bytes=lambda: free[0]).training():
            assert replicas[1].asleep, "the next one is asked all the same"

    asyncio.run(main())
    assert (replicas[0].why is None) == (why is None) and (why or "") in str(replicas[0].why)


# -- roles -------------------------------------------------------------------------------------------------------------


def rows(*shape: tuple[str, str, int, float]) -> list[Sample]:
    """(trajectory, group, sampled tokens, reward); NaN: no valid reward."""
    return [
        Sample(
            sample_id=f"{name}#0",
            trajectory_id=name,
            group_id=group,
            purpose="train",
            reward=reward,
            outcome="ok" if reward == reward else "invalid",
            segments=(
                Segment(ids=np.array([3, 4, 5]), source="prompt"),
                Segment(ids=np.arange(6, 6 + n), source="sampled", logprobs=np.full(n, -1.0, np.float32), version=0),
            ),
        )
        for name, group, n, reward in shape
    ]


@pytest.fixture
def filled():
    queue = MemoryQueue()
    return queue, put(queue, rows(("a", "g", 2, 1.0), ("b", "g", 3, 0.0), ("c", "h", 1, float("nan"))))


def test_compute_writes_its_outputs_and_measures_the_valid_tokens(filled):
    queue, refs = filled
    seen: list[Columns] = []

    def fn(columns):
        seen.append(columns)
        return {"advantages": torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0, 99.0]), "x/y": Metric(3.0)}

    metrics = Compute(queue).compute(refs, fn, (), ("advantages",))
    assert seen[0].mask.tolist() == [True] * 5 + [False]
    assert seen[0].sequence["score"].tolist() == [1, 0, 0] and seen[0].sequence["group"].tolist() == [0, 0, 1]
    assert queue.read(refs, ("advantages",))["advantages"].row(1).tolist() == [-2, -2, -2]
    assert metrics["critic/advantages/mean"].value == pytest.approx(-4 / 5)
    assert metrics["critic/advantages/max"].value == 1 and metrics["x/y"].value == 3


@each(
    "output, says",
    [
        ({"advantage": torch.zeros(6)}, r"must return \{'advantages': tensor \[6\]\}; it returned \['advantage'\]"),
        (torch.zeros(6), "it returned a Tensor"),
        ({"advantages": np.zeros(6)}, "it returned"),
        ({"advantages": torch.zeros(3)}, r"has shape \[3\]; it needs one value for each of 6"),
        ({"advantages": torch.zeros(9)}, r"has shape \[9\]"),
        ({"advantages": torch.tensor(1.0)}, r"has shape \[\]"),
    ],
)
def test_a_user_function_of_the_wrong_shape_is_told_so(filled, output, says):
    queue, refs = filled
    with pytest.raises(ValueError, match=says):
        Compute(queue).compute(refs, lambda columns: output, (), ("advantages",))
    assert not queue.having(refs, "advantages")


def test_compute_names_a_non_finite_input(filled):
    queue, refs = filled
    role = Compute(queue)
    role.compute(refs, lambda c: {"x": torch.tensor([0.0, 0.0, 0.0, float("inf"), 0.0, 0.0])}, (), ("x",))
    with pytest.raises(ValueError, match=r"x is inf at trainable token 3 of sequence 1"):
        role.compute(refs, lambda c: {"y": c["x"]}, ("x",), ("y",))
    role.compute(refs, lambda c: {"x": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, float("nan")])}, (), ("x",))
    role.compute(refs, lambda c: {"y": c["x"]}, ("x",), ("y",))  # outside the mask nothing matters


def test_infer_writes_the_rows_in_order_and_the_mismatch_is_of_the_valid_ones(tiny_model, filled):
    queue, refs = filled
    engine = TorchEngine(load_causal_lm(tiny_model), EngineSettings(optim=OptimSpec(lr=1e-3), dtype="float32"))
    Role("actor", queue, engine).infer(RankStep(refs), {"logprobs": "old_logprobs", "entropy": "old_entropy"})
    backwards = type(refs)(reversed(refs))
    Role("reference", queue, engine, share_prefix=False).infer(RankStep(backwards), {"logprobs": "ref_logprobs"})
    for ref in refs:
        one = type(refs)([ref])
        found = queue.read(one, ("old_logprobs", "ref_logprobs", "old_entropy"))
        assert len(found["old_logprobs"].values) == ref.loss_tokens
        torch.testing.assert_close(found["old_logprobs"].values, found["ref_logprobs"].values, atol=1e-5, rtol=0)
    q = queue.read(type(refs)(refs[:2]), ("old_logprobs",))["old_logprobs"].values.double() + 1.0
    metrics = Compute(queue).mismatch(refs, "old_logprobs")
    assert metrics["mismatch/max_abs_dlogp"].value == pytest.approx(float(q.abs().max())), (
        "invalid rows are not measured"
    )
    assert metrics["mismatch/k1"].value == pytest.approx(float(-q.mean()))


def test_weights_are_of_the_whole_step_and_an_epoch_has_its_own(filled):
    """The denominators of a row are those of its optimizer step, whatever share of it a rank will see."""
    queue, refs = filled
    terms = (Term(name="pg", fn=nll), Term(name="seq", fn=nll, unit="sequence", aggregate="seq-mean-token-mean"))
    a, b, c = (type(refs)([r]) for r in refs)
    compute = Compute(queue)
    compute.weigh([OptimizerStep(refs), OptimizerStep(a, "/1"), OptimizerStep(type(refs)([*b, *c]), "/1")], terms, ())
    assert queue.read(refs, ("w/pg",))["w/pg"].values.tolist() == [1 / 5] * 5 + [0], "c has no valid reward"
    assert queue.read(refs, ("w/pg/1",))["w/pg/1"].values.tolist() == [1 / 2] * 2 + [1 / 3] * 3 + [0]
    assert queue.read(refs, ("w/seq",))["w/seq"].values.tolist() == [1 / 2, 1 / 2, 0]
    assert queue.read(refs, ("w/seq/1",))["w/seq/1"].values.tolist() == [1, 1, 0]
    assert queue.read(refs, ("loss_mask",))["loss_mask"].values.tolist() == [1, 1, 1, 1, 1, 0]
    rows_of_one = [replace(s, trajectory_id="t") for s in rows(("x", "g", 1, 1.0), ("y", "g", 2, 1.0))]
    both = put(queue, rows_of_one)
    compute.weigh([OptimizerStep(both)], terms, ())
    assert queue.read(both, ("w/seq",))["w/seq"].values.tolist() == [1, 0], "a trajectory counts once"


def test_weighing_refuses_a_non_finite_input_before_any_gradient(filled):
    queue, refs = filled
    compute = Compute(queue)
    compute.compute(refs, lambda c: {"x": torch.tensor([0.0, 0.0, float("nan"), 0.0, 0.0, 0.0])}, (), ("x",))
    with pytest.raises(ValueError, match=r"x is nan at trainable token 2 of sequence 1"):
        compute.weigh([OptimizerStep(refs)], (Term(name="pg", fn=nll, inputs=("x",)),), ("x",))


def test_every_optimizer_step_of_every_epoch_has_the_weights_of_its_own_rows():
    """A row is in one step of each epoch, with other rows beside it: its weights there are columns of that epoch."""
    queue = MemoryQueue()
    refs = put(queue, rows(*((f"{g}/{i}", f"g{g}", 1 + (3 * g + i) % 5, 1.0) for g in range(6) for i in range(2))))
    steps = optimizer_steps(refs, updates=3, epochs=3, seed=1, index=0)
    assert len(steps) == 9 and [s.recorded for s in steps] == [True] * 3 + [False] * 6
    Compute(queue).weigh(steps, (Term(name="pg", fn=nll),), ())
    for step in steps:
        name = f"w/pg{step.weights}"
        assert float(queue.read(step.refs, (name,))[name].values.sum()) == pytest.approx(1.0)
