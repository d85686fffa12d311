"""The contract of a worker group, placement, and what a role does with a user's functions."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from fakes import FakeEngine

from verl.batch import Columns
from verl.model_engine.optim import OptimSpec
from verl.model_engine.torch_engine import TorchEngine, load_causal_lm
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Metric, Sample, Segment
from verl.workers.group import WorkerGroup
from verl.workers.inproc import InprocGroup
from verl.workers.placement import Placement, ResourcePool
from verl.workers.role import Role
from verl.workers.waits import DeadlineExpired

BACKENDS: dict[str, Callable[[str, object], WorkerGroup]] = {"inproc": InprocGroup}


class Worker:
    """Says what it does into `log`; `hold` blocks until the gate opens."""

    def __init__(self):
        self.log: list[object] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def note(self, what):
        self.log.append(what)
        return what

    def hold(self):
        self.entered.set()
        assert self.gate.wait(20)
        self.log.append("held")

    def fail(self, error):
        raise error

    def make(self, cls):
        return cls()

    def thread(self):
        return threading.get_ident()


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.gate.set()


@pytest.fixture(params=BACKENDS)
def group(request, worker):
    made = BACKENDS[request.param]("actor", worker)
    yield made
    worker.gate.set()
    made.close()


# -- worker groups -----------------------------------------------------------------------------------------------------


def test_submit_enqueues_at_the_call_and_calls_run_in_that_order(group, worker):
    group.submit("hold")
    futures = [group.submit("note", i) for i in range(50)]
    assert worker.log == [], "nothing overtakes the call that runs"
    worker.gate.set()
    assert [f.result(20) for f in reversed(futures)] == list(reversed(range(50)))
    assert worker.log == ["held", *range(50)]
    assert (group.name, group.world_size) == ("actor", 1)


def test_calls_run_in_one_thread_that_is_not_the_callers(group):
    threads = {group.submit("thread").result(20) for _ in range(5)}
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_submissions_of_one_thread_keep_their_order_among_those_of_others(group, worker):
    def submit(me: int) -> None:
        for i in range(100):
            group.submit("note", (me, i))

    threads = [threading.Thread(target=submit, args=(m,)) for m in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    group.submit("thread").result(20)
    assert len(worker.log) == 400
    for me in range(4):
        assert [i for m, i in worker.log if m == me] == list(range(100))


def test_split_says_where_a_call_goes(group):
    assert group.submit("note", "x", split="first").result(20) == "x"
    assert group.submit("note", "x", split="dp").result(20) == "x", "one rank: its share is everything"
    assert group.submit("note", "x", split="all").result(20) == ["x"] * group.world_size


@pytest.mark.parametrize("split", ["first", "dp", "all"])
def test_an_exception_reaches_the_future_and_the_worker_serves_the_next_call(group, split):
    broken = group.submit("fail", ValueError("no"), split=split)
    fine = group.submit("note", 1)
    with pytest.raises(ValueError, match="no"):
        broken.result(20)
    assert fine.result(20) == 1
    with pytest.raises(AttributeError, match="missing"):
        group.submit("missing", split=split).result(20)
    with pytest.raises(SystemExit):
        group.submit("fail", SystemExit(3), split=split).result(20)
    assert group.submit("note", 2).result(20) == 2


@pytest.mark.parametrize(
    "error",
    [StopIteration("end"), asyncio.CancelledError("gone"), CancelledError("gone")],
    ids=lambda e: type(e).__module__ + type(e).__name__,
)
def test_an_exception_that_asyncio_cannot_carry_does_not_hang_or_cancel_the_waiter(group, error):
    """StopIteration cannot be set on an asyncio future, and a CancelledError would look like the driver's own end."""

    async def main():
        await asyncio.wait_for(asyncio.wrap_future(group.submit("fail", error)), 20)

    with pytest.raises(RuntimeError, match=r"actor\.fail ended with"):
        asyncio.run(main())


def test_a_cancelled_call_that_has_not_begun_never_runs(group, worker):
    group.submit("hold")
    assert worker.entered.wait(20)
    gone = [group.submit("note", "gone", split=s) for s in ("first", "all")]
    kept = group.submit("note", "kept")
    assert all(f.cancel() for f in gone)
    worker.gate.set()
    assert kept.result(20) == "kept"
    assert worker.log == ["held", "kept"] and all(f.cancelled() for f in gone)


def test_close_finishes_what_was_submitted_and_refuses_what_comes_after(group, worker):
    group.submit("hold")
    futures = [group.submit("note", i, split="all") for i in range(20)]
    worker.gate.set()
    group.close(20)
    assert [f.result(0) for f in futures] == [[i] for i in range(20)]
    with pytest.raises(RuntimeError, match="'actor' is closed; note was not submitted"):
        group.submit("note", 99)
    group.close(20)
    assert 99 not in worker.log


def test_close_does_not_wait_for_ever_and_leaves_no_future_behind(group, worker):
    running = group.submit("hold")
    assert worker.entered.wait(20)
    waiting = [group.submit("note", 1), group.submit("note", 2, split="all")]
    group.close(timeout_s=0.05)
    assert all(f.cancelled() for f in waiting), "nobody waits for a call that will never begin"
    assert not running.done()
    worker.gate.set()
    assert running.result(20) is None and worker.log == ["held"]


def test_no_call_is_lost_between_submit_and_close(worker):
    """Threads submit while another closes: every submit is either refused or answered."""
    for backend in BACKENDS.values():
        for _ in range(20):
            made, futures, refused = backend("g", worker), [], []

            def submit(made=made, futures=futures, refused=refused):
                for i in range(30):
                    try:
                        futures.append(made.submit("note", i))
                    except RuntimeError:
                        refused.append(i)

            threads = [threading.Thread(target=submit) for _ in range(3)]
            for t in threads:
                t.start()
            made.close(20)
            for t in threads:
                t.join(20)
            assert all(f.result(20) is not None for f in futures)
            assert len(futures) + len(refused) == 90


def test_the_event_loop_goes_on_while_a_long_call_runs(group, worker):
    async def main() -> int:
        call = asyncio.wrap_future(group.submit("hold"))
        turns = 0
        while not worker.entered.is_set() or turns < 100:
            assert not call.done()
            await asyncio.sleep(0)
            turns += 1
        worker.gate.set()
        await asyncio.wait_for(call, 20)
        return turns

    assert asyncio.run(main()) >= 100


class Big:
    """Something that can be watched."""


def test_a_group_holds_neither_arguments_nor_results_of_a_call_that_has_ended(group):
    """A copy of the weights must not live until the next call comes."""
    argument = Big()
    seen = [weakref.ref(argument), weakref.ref(group.submit("make", Big).result(20))]
    future = group.submit("thread", split="first")
    future.result(20)
    weak = group.submit("make", Big)
    seen.append(weakref.ref(weak.result(20)))
    with pytest.raises(RuntimeError):
        group.submit("fail", RuntimeError(argument)).result(20)
    del argument, weak, future
    for _ in range(200):
        gc.collect()
        if all(r() is None for r in seen):
            return
        time.sleep(0.01)
    raise AssertionError([r() for r in seen])


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
    return queue, queue.put(rows(("a", "g", 2, 1.0), ("b", "g", 3, 0.0), ("c", "h", 1, float("nan"))))


def test_compute_writes_its_outputs_and_measures_the_valid_tokens(filled):
    queue, refs = filled
    seen: list[Columns] = []

    def fn(columns):
        seen.append(columns)
        return {"advantages": torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0, 99.0]), "x/y": Metric(3.0)}

    metrics = Role("compute", queue).compute(refs, fn, (), ("advantages",))
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
        Role("compute", queue).compute(refs, lambda columns: output, (), ("advantages",))
    assert not queue.having(refs, "advantages")


def test_compute_names_a_non_finite_input(filled):
    queue, refs = filled
    role = Role("compute", queue)
    role.compute(refs, lambda c: {"x": torch.tensor([0.0, 0.0, 0.0, float("inf"), 0.0, 0.0])}, (), ("x",))
    with pytest.raises(ValueError, match=r"x is inf at trainable token 3 of sequence 1"):
        role.compute(refs, lambda c: {"y": c["x"]}, ("x",), ("y",))
    role.compute(refs, lambda c: {"x": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, float("nan")])}, (), ("x",))
    role.compute(refs, lambda c: {"y": c["x"]}, ("x",), ("y",))  # outside the mask nothing matters


def test_infer_writes_the_rows_in_order_and_reports_the_mismatch(tiny_model, filled):
    queue, refs = filled
    engine = TorchEngine(load_causal_lm(tiny_model), optim=OptimSpec(lr=1e-3), dtype="float32")
    metrics = Role("actor", queue, engine).infer(refs, {"logprobs": "old_logprobs", "entropy": "old_entropy"})
    backwards = type(refs)(reversed(refs))
    Role("reference", queue, engine, share_prefix=False).infer(backwards, {"logprobs": "ref_logprobs"})
    for ref in refs:
        one = type(refs)([ref])
        found = queue.read(one, ("old_logprobs", "ref_logprobs", "old_entropy"))
        assert len(found["old_logprobs"].values) == ref.loss_tokens
        torch.testing.assert_close(found["old_logprobs"].values, found["ref_logprobs"].values, atol=1e-5, rtol=0)
    q = queue.read(type(refs)(refs[:2]), ("old_logprobs",))["old_logprobs"].values.double() + 1.0
    assert metrics["mismatch/max_abs_dlogp"].value == pytest.approx(float(q.abs().max())), (
        "invalid rows are not measured"
    )
    assert metrics["mismatch/k1"].value == pytest.approx(float(-q.mean()))
