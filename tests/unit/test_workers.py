"""The contract of a worker group, waits with deadlines, placement, and what a role does with a user's functions."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import FakeEngine, put

from verl.algorithms.terms import Term, nll
from verl.batch import Columns
from verl.model_engine.optim import OptimSpec
from verl.model_engine.torch_engine import TorchEngine, load_causal_lm
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Metric, Sample, Segment
from verl.workers import waits as waits_module
from verl.workers.compute import Compute, WeightedStep
from verl.workers.placement import Placement, ResourcePool
from verl.workers.role import RankStep, Role
from verl.workers.waits import Abandoned, DeadlineExpired, Waits

# -- waits -------------------------------------------------------------------------------------------------------------


def test_an_expired_wait_says_who_what_and_what_else_was_pending(tmp_path):
    async def main():
        waits, path = Waits(tmp_path / "waits.json"), tmp_path / "waits.json"
        other = asyncio.ensure_future(
            waits.wait(asyncio.sleep(30), who="trajectory g1/train0.0", what="its reward", timeout_s=60)
        )
        await asyncio.sleep(0)
        asked = []
        with pytest.raises(DeadlineExpired) as caught:
            await waits.wait(
                asyncio.sleep(30), who="step 7", what=lambda: asked.append(1) or "4 groups of 8", timeout_s=0.02
            )
        assert (
            str(caught.value)
            == "step 7 waited 0.02 s for 4 groups of 8; also pending: trajectory g1/train0.0: its reward"
        )
        assert isinstance(caught.value, TimeoutError) and asked
        dumped = json.loads(path.read_text())
        assert [(w["who"], w["what"], w["timeout_s"]) for w in dumped["pending"]] == [
            ("trajectory g1/train0.0", "its reward", 60),
            ("step 7", "4 groups of 8", 0.02),
        ]
        assert [w["who"] for w in waits.pending()] == ["trajectory g1/train0.0"]
        other.cancel()
        await asyncio.wait({other}, timeout=5)
        assert waits.pending() == []

    asyncio.run(main())


def test_the_message_stays_short_with_thousands_pending():
    async def main():
        waits = Waits()
        others = [
            asyncio.ensure_future(waits.wait(asyncio.sleep(30), who=f"t{i}", what="x", timeout_s=60))
            for i in range(500)
        ]
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExpired, match=r"t0: x.* and 494 more") as caught:
            await waits.wait(asyncio.sleep(30), who="me", what="it", timeout_s=0.01)
        assert len(str(caught.value)) < 300
        for other in others:
            other.cancel()
        await asyncio.wait(others, timeout=20)

    asyncio.run(main())


async def until_cancelled(ended):
    """Ends a little after it is told to, and says so."""
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.01)
        ended.append(True)


def test_a_coroutine_that_is_too_late_has_ended_when_the_error_comes():
    async def main():
        ended = []

        with pytest.raises(DeadlineExpired):
            await Waits().wait(until_cancelled(ended), who="a", what="b", timeout_s=0.01)
        assert ended and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("cancel", [False, True])
def test_a_future_that_others_may_hold_is_cancelled_only_on_request(cancel):
    async def main():
        shared = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExpired):
            await Waits().wait(shared, who="a", what="b", timeout_s=0.01, cancel=cancel)
        assert shared.cancelled() == cancel

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_nothing_running_and_nothing_pending():
    async def main():
        waits, ended = Waits(), []

        waiter = asyncio.ensure_future(waits.wait(until_cancelled(ended), who="a", what="b", timeout_s=60))
        await asyncio.sleep(0.005)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert ended and waits.pending() == [] and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_something_cancelled_by_others_is_an_error_and_not_the_waiters_end():
    async def main():
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        with pytest.raises(Abandoned, match="step 1 waited for the weights, which was cancelled"):
            await Waits().wait(future, who="step 1", what="the weights", timeout_s=1)

        async def suicidal():
            raise asyncio.CancelledError

        with pytest.raises(Abandoned):
            await Waits().wait(suicidal(), who="a", what="b", timeout_s=1)
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_results_and_errors_come_through():
    async def main():
        async def fine():
            return 5

        async def bad():
            raise KeyError("k")

        assert await Waits().wait(fine(), who="a", what="b", timeout_s=5) == 5
        with pytest.raises(KeyError):
            await Waits().wait(bad(), who="a", what="b", timeout_s=5)

    asyncio.run(main())


def test_a_late_error_of_an_abandoned_future_is_not_reported_as_never_retrieved():
    said = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExpired):
            await Waits().wait(future, who="a", what="b", timeout_s=0.01)
        future.set_exception(RuntimeError("late"))
        del future
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    assert not said


def test_an_unwritable_dump_does_not_hide_the_deadline(tmp_path):
    (tmp_path / "file").write_text("")

    async def main():
        with pytest.raises(DeadlineExpired):
            await Waits(tmp_path / "file" / "waits.json").wait(asyncio.sleep(9), who="a", what="b", timeout_s=0.01)

    asyncio.run(main())


def test_a_long_wait_is_written_down_before_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(waits_module, "NOTICE_S", 0.01)

    async def main():
        path = tmp_path / "waits.json"
        waiter = asyncio.ensure_future(
            Waits(path).wait(asyncio.sleep(30), who="step 3", what="a hung engine", timeout_s=60)
        )
        for _ in range(1000):
            if path.exists():
                break
            await asyncio.sleep(0.005)
        assert json.loads(path.read_text())["pending"][0]["what"] == "a hung engine"
        waiter.cancel()
        await asyncio.wait({waiter}, timeout=5)

    asyncio.run(main())


@pytest.mark.parametrize("nested", [False, True])
def test_a_limit_cancels_its_block_and_says_what_it_waited_for(nested):
    async def main():
        waits, ended = Waits(), []

        async def block():
            with waits.limit(who="trajectory g1/train0.0", what="its reward", timeout_s=0.01):
                await until_cancelled(ended)

        with pytest.raises(DeadlineExpired, match="trajectory g1/train0.0 waited 0.01 s for its reward"):
            if nested:
                with waits.limit(who="outer", what="all of it", timeout_s=60):
                    await block()
            else:
                await block()
        assert ended and waits.pending() == [] and not asyncio.current_task().cancelling()
        await asyncio.sleep(0)  # no cancellation is left over

    asyncio.run(main())


def test_a_limit_lets_results_errors_and_other_cancellations_through():
    async def main():
        waits = Waits()
        with waits.limit(who="a", what="b", timeout_s=60):
            await asyncio.sleep(0)
        with pytest.raises(KeyError), waits.limit(who="a", what="b", timeout_s=60):
            raise KeyError

        async def limited():
            with waits.limit(who="a", what="b", timeout_s=60):
                await asyncio.sleep(30)

        future = asyncio.get_running_loop().create_future()
        future.cancel()
        with (
            pytest.raises(Abandoned, match="a waited for b, which was cancelled"),
            waits.limit(who="a", what="b", timeout_s=60),
        ):
            await future
        task = asyncio.ensure_future(limited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waits.pending() == [] and waits._timer is None

    asyncio.run(main())


def test_a_limit_leaves_no_cancellation_behind_however_its_block_ends():
    async def main():
        waits = Waits()

        async def badly():
            try:
                await asyncio.sleep(30)
            finally:
                raise KeyError("in its cleanup")

        with pytest.raises(KeyError), waits.limit(who="a", what="b", timeout_s=0.01):
            await badly()
        assert not asyncio.current_task().cancelling()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.01))

    asyncio.run(main())


def test_deadlines_hold_on_a_second_event_loop():
    waits = Waits()
    first = asyncio.new_event_loop()
    left = first.create_task(waits.wait(first.create_future(), who="a", what="b", timeout_s=30))
    first.run_until_complete(asyncio.sleep(0))
    first.close()  # with a wait in it

    async def main():
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineExpired):
                await waits.wait(asyncio.sleep(30), who="a", what="b", timeout_s=0.05)

    asyncio.run(main())
    left._log_destroy_pending = False


def test_limits_of_any_order_expire_in_theirs():
    async def main():
        waits, order = Waits(), []

        async def limited(timeout_s):
            with pytest.raises(DeadlineExpired), waits.limit(who=str(timeout_s), what="b", timeout_s=timeout_s):
                await asyncio.sleep(30)
            order.append(timeout_s)

        await asyncio.gather(*(limited(t) for t in (0.15, 0.01, 0.08)))
        assert order == [0.01, 0.08, 0.15]

    asyncio.run(main())


# -- placement ---------------------------------------------------------------------------------------------------------


def test_a_colocated_rollout_sleeps_while_training_and_wakes_whatever_happens():
    async def main():
        replicas = [FakeEngine(), FakeEngine()]
        placement = Placement(ResourcePool("global"), replicas, colocated=True)
        async with placement.training():
            assert [r.asleep for r in replicas] == [True, True]
        assert [r.asleep for r in replicas] == [False, False]
        with pytest.raises(KeyError):
            async with placement.training():
                raise KeyError
        assert [r.asleep for r in replicas] == [False, False]
        async with Placement(ResourcePool("global"), replicas, colocated=False).training():
            assert [r.asleep for r in replicas] == [False, False]

    asyncio.run(main())


def test_a_replica_that_does_not_go_to_sleep_is_named_and_the_others_wake():
    class Insomniac(FakeEngine):
        async def sleep(self, level=1):
            await asyncio.sleep(30)

    async def main():
        replicas = [FakeEngine(), Insomniac()]
        with pytest.raises(DeadlineExpired, match="replica 1 to sleep"):
            async with Placement(ResourcePool("global"), replicas, colocated=True, timeout_s=0.02).training():
                raise AssertionError("not reached")
        assert not replicas[0].asleep

    asyncio.run(main())


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


@pytest.mark.parametrize(
    ("output", "says"),
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
    engine = TorchEngine(load_causal_lm(tiny_model), optim=OptimSpec(lr=1e-3), dtype="float32")
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
    compute.weigh([WeightedStep(refs), WeightedStep(a, "/1"), WeightedStep(type(refs)([*b, *c]), "/1")], terms, ())
    assert queue.read(refs, ("w/pg",))["w/pg"].values.tolist() == [1 / 5] * 5 + [0], "c has no valid reward"
    assert queue.read(refs, ("w/pg/1",))["w/pg/1"].values.tolist() == [1 / 2] * 2 + [1 / 3] * 3 + [0]
    assert queue.read(refs, ("w/seq",))["w/seq"].values.tolist() == [1 / 2, 1 / 2, 0]
    assert queue.read(refs, ("w/seq/1",))["w/seq/1"].values.tolist() == [1, 1, 0]
    assert queue.read(refs, ("loss_mask",))["loss_mask"].values.tolist() == [1, 1, 1, 1, 1, 0]
    rows_of_one = [replace(s, trajectory_id="t") for s in rows(("x", "g", 1, 1.0), ("y", "g", 2, 1.0))]
    both = put(queue, rows_of_one)
    compute.weigh([WeightedStep(both)], terms, ())
    assert queue.read(both, ("w/seq",))["w/seq"].values.tolist() == [1, 0], "a trajectory counts once"


def test_weighing_refuses_a_non_finite_input_before_any_gradient(filled):
    queue, refs = filled
    compute = Compute(queue)
    compute.compute(refs, lambda c: {"x": torch.tensor([0.0, 0.0, float("nan"), 0.0, 0.0, 0.0])}, (), ("x",))
    with pytest.raises(ValueError, match=r"x is nan at trainable token 2 of sequence 1"):
        compute.weigh([WeightedStep(refs)], (Term(name="pg", fn=nll, inputs=("x",)),), ("x",))
