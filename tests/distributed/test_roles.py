"""A whole turn of the driver over real ranks: shares, columns, weights of the step, two passes, engines, updates. Every
rank runs the driver's code; a call reaches the role of this rank, and its answers and rows are exchanged."""

from __future__ import annotations

import asyncio
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import forked
import numpy as np
import pytest
import test_virtual_ranks as virtual
import torch
import torch.distributed as dist
from cases import SIZES, engine, gradients
from fakes import put, unscored
from forked import ranks_of
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl.config.tree import changed
from verl.driver import assemble, models
from verl.driver.step import Step, experience_and_update
from verl.model_engine import torch_engine
from verl.model_engine.base import OneRank
from verl.model_engine.layout import Layout
from verl.models import tiny
from verl.recipes import arithmetic
from verl.transfer_queue.memory import MemoryQueue
from verl.workers.answers import CONSEQUENCES, RankAnswer, RankLate, failed_answer, first_failure
from verl.workers.dist import ProcessRanks
from verl.workers.group import Broadcast
from verl.workers.inproc import InprocCluster
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import Role, RoleSpec, build_roles, roles_of

TWO = Layout(world_size=2)
LAYOUTS = {
    "FSDP x SP": Layout(world_size=4, sequence=2),
    "FSDP x TP": Layout(world_size=4, tensor=2),
    "FSDP x PP": Layout(world_size=4, pipeline=2),
}
FULL = bool(os.environ.get("FULL_GRID"))
if FULL:
    LAYOUTS |= {
        "DP": Layout(world_size=2, replicate=2),
        "FSDP": Layout(world_size=2),
        "HSDP": Layout(world_size=4, replicate=2),
        "TP": Layout(world_size=2, tensor=2),
        "DP x TP": Layout(world_size=4, replicate=2, tensor=2),
        "SP": Layout(world_size=2, sequence=2),
        "HSDP x SP": Layout(world_size=4, sequence=2, replicate=2),
        "SP x TP": Layout(world_size=4, sequence=2, tensor=2),
        "PP": Layout(world_size=2, pipeline=2),
        "DP x PP": Layout(world_size=4, replicate=2, pipeline=2),
        "TP x PP": Layout(world_size=4, tensor=2, pipeline=2),
        "SP x PP": Layout(world_size=4, sequence=2, pipeline=2),
    }
WITH_EXPERTS = {
    "FSDP x EP": Layout(world_size=4, expert=2),
    "SP x EP": Layout(world_size=4, sequence=2, expert=4),
    "TP x EP": Layout(world_size=4, tensor=2, expert=2),
    "EP x PP": Layout(world_size=4, expert=2, pipeline=2),
}
REJECTED = {"correction": "mask", "correction_high": 1.5, "correction_denominator": "before_rejection"}
CASES = {
    "grpo": ("grpo", {}),
    "a critic": ("ppo", {}),
    "two passes": ("kl_cov", {}),
    "ratios of whole sequences": ("gspo", {}),
    "rejected tokens count": ("grpo", REJECTED),
}


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("tiny"))


def saved_model(folder: Path) -> Path:
    """Save the tests' small model with heads and a vocabulary that four ranks can share."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=32, layers=2, heads=4, kv_heads=4, ffn=64, seed=1)
    return tiny.save(model, tokenizer, folder)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    config = Qwen3MoeConfig(**SIZES | {"vocab_size": 32, "initializer_range": 0.02} | sizes)
    torch.manual_seed(0)
    return tiny.save(Qwen3MoeForCausalLM(config), tokenizer, tmp_path_factory.mktemp("experts"))


class LoggedQueue(MemoryQueue):
    """Every rank has the rows; what one has written, the others get when a call ends."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def write(self, refs, columns) -> None:
        super().write(refs, columns)
        self.log.append((refs, columns))

    def exchange(self, rank: int) -> None:
        logs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(logs, self.log)
        for other, log in enumerate(logs):
            for refs, columns in log if other != rank else ():
                super().write(refs, columns)


class RealCluster(InprocCluster):
    """A `Cluster` in which this process is one rank of every model."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank

    def start(self, name, build, args, *, world_size=1):
        if name == "compute":
            return super().start(name, build, args)
        spec = replace(args[0], context=replace(args[0].context, layout=self._layout))
        ranks = ranks_of(self._layout, self._rank)
        return RealRanks(name, build(spec, ranks=[ranks])[0], self._rank, ranks, self._layout.world_size)


class RealRanks:
    """The `WorkerGroup` of a rank."""

    def __init__(self, name: str, role: Role, rank: int, ranks: ProcessRanks, world_size: int) -> None:
        self.name, self.world_size = name, world_size
        self._role, self._rank, self._ranks = role, rank, ranks

    def submit(self, method, args) -> Future:
        self._role.queue.log = []  # what the driver's other worker writes, it writes on every rank
        future: Future = Future()
        found: list[Any] = [None] * self.world_size
        mine = args.args if isinstance(args, Broadcast) else args[self._rank]
        dist.all_gather_object(found, method(self._role, *mine))
        self._role.queue.exchange(self._rank)
        future.set_result(found)
        return future

    def close(self, timeout_s: float = 10.0) -> None: ...


Gradients = Callable[[Any], Mapping[str, torch.Tensor]]


def turn(
    rank: int,
    layout: Layout,
    name: str,
    options: dict[str, Any],
    model: Path,
    engine_keys: Mapping[str, Any],
    gradients: Gradients,
) -> tuple[list[torch.Tensor], Any]:
    """The gradient of every optimizer step of a turn, in order, and the metrics of the turn."""
    config = virtual.config_of(name, model, model, 1, 40)  # none of the cases has a teacher
    config = changed(config, engine_keys)
    config.algorithm.options.update(options)
    found: list[torch.Tensor] = []
    optim_step = torch_engine.TorchEngine.optim_step

    def watched(e: Any) -> Any:
        found.append(torch.cat([g.flatten() for g in gradients(e).values()]))
        return optim_step(e)

    def workers_of(context, spec):
        group = RealCluster(layout, rank).start(spec.name, build_roles, (spec,))
        return ModelWorkers(group, layout=layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine.TorchEngine, "optim_step", watched)
        patch.setattr(models, "workers_of", workers_of)
        patch.setattr(assemble, "workers_of", workers_of)
        patch.setattr("verl.transfer_queue.memory.MemoryQueue", LoggedQueue)
        torch.manual_seed(0)
        learner = assemble.offline_learner(config, 1, Path("/nonexistent"))
        learner.controllers.critic_warm = True
        step, rows = Step(0), virtual.samples(learner.algorithm.group.baselines)
        asyncio.run(experience_and_update(learner, step, put(learner.queue, rows)))
        learner.close()
    return found, {n: m.value for n, m in step.metrics.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_turn_over_real_ranks_is_that_of_one_rank(case, four_heads, monkeypatch):
    """Two passes over every layout; the others, unless FULL_GRID=1, over one each."""
    layouts, turn = [*LAYOUTS], [*CASES].index(case)
    chosen = layouts if FULL or case == "two passes" else [layouts[turn % len(layouts)]]
    same_turn(case, {name: LAYOUTS[name] for name in chosen}, four_heads, monkeypatch)


@pytest.mark.parametrize("case", CASES if FULL else ["two passes"])
def test_a_turn_over_ranks_that_share_experts_is_that_of_one_rank(case, experts, monkeypatch):
    """In float32, the most that torch multiplies experts in."""
    layouts = WITH_EXPERTS if FULL else {"FSDP x EP": WITH_EXPERTS["FSDP x EP"]}
    same_turn(case, layouts, experts, monkeypatch, dtype="float32", rtol=1e-5)


def test_streamed_rows_are_scored_once_by_real_ranks():
    """Five rows, and one: a rank without a row of its own keeps step."""
    rows = [unscored(np.arange(3, 5 + i), np.arange(4, 6 + 3 * i)) for i in range(5)]
    spec, layout = RoleSpec(name="reward_model", queue=LoggedQueue(), engine="", options=None, context=None), TWO

    def on(rank: int) -> tuple[list[float], list[float], int]:
        e, seen, ranks = engine("qwen3, tied", "reward_model", layout), list[int](), ranks_of(layout, rank)
        infer = e.infer
        e.infer = lambda batch, *more: (seen.append(batch.num_rows), infer(batch, *more))[1]
        group = RealRanks("reward_model", roles_of(e, spec, ranks=[ranks])[0], rank, ranks, layout.world_size)
        workers = ModelWorkers(group, layout=layout)
        return workers.score_rows(rows).result(0), workers.score_rows(rows[:1]).result(0), seen[0]

    (alone,) = roles_of(engine("qwen3, tied", "reward_model", None), spec, ranks=[OneRank()])
    expected, found = alone.score_rows(rows), forked.run(2, on)
    for scores, first, _ in found:
        assert scores == pytest.approx(expected, rel=1e-5) and first == pytest.approx(expected[:1], rel=1e-5)
    assert sum(count for *_, count in found) == 5 and len({*expected}) == 5


@pytest.mark.parametrize("stops", ["before", "in", "elsewhere"])
def test_a_rank_that_stops_is_waited_for_with_a_deadline_and_named(stops, monkeypatch):
    """It stops before an exchange, in it (after it has joined), or in a collective of a model, which gloo reports."""
    exchange = dist.all_gather_object

    def stop(*given, **how):
        time.sleep(60)

    def work(rank: int) -> BaseException | None:
        group = ranks_of(Layout(world_size=2), rank, timeout_s=5.0)
        group.begin(1)
        try:
            if rank == 1:
                if stops == "in":
                    monkeypatch.setattr(dist, "all_gather_object", stop)
                    group.all_gather("there")
                stop()
            if stops != "elsewhere":
                group.all_gather("there")
            exchange([None, None], "there", group=group._peers)
        except (RuntimeError, TimeoutError) as e:
            (Path(folder) / "said").write_bytes(pickle.dumps(failed_answer(e).error))
            raise
        return None

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(RuntimeError):
            forked.run(2, work)
        error = pickle.loads((Path(folder) / "said").read_bytes())
    told = (
        "rank 0 waited 5 s for 1 of 2 ranks" if stops == "before" else "waited 5 s for another rank, which is slow or"
    )
    assert type(error) is RankLate and told in str(error) and isinstance(error, CONSEQUENCES)
    assert first_failure([RankAnswer(error=error), own := RankAnswer(error=ValueError("mine"))]) is own


def same_turn(
    case: str,
    layouts: dict[str, Layout],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: str = "float64",
    rtol: float = 1e-10,
    engine_name: str = "sharded",
    gradients: Gradients = gradients,
    engine_options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    name, options = CASES[case]
    scale = 1.0 if dtype == "float64" else 1e-2
    config_of = virtual.config_of

    def with_options(*given):
        config = config_of(*given)
        config.algorithm.options.update(options)
        eps = {} if dtype == "float64" else {"optim.eps": 1e-5}  # noise in a gradient of 0 is no step
        config = changed(config, {"model.dtype": dtype, **eps})
        return config

    monkeypatch.setattr(virtual, "config_of", with_options)
    torch.manual_seed(0)
    expected, metrics = virtual.gradients(name, model, model, 1)
    assert sum(float(g.abs().max()) > 0 for g in expected) >= 2
    for layout in layouts.values():
        given = layout, name, options, model, {"model.engine": engine_name, **engine_options}, gradients
        for found, theirs in forked.run(layout.world_size, lambda rank: turn(rank, *given)):
            assert len(found) == len(expected)
            for i, (a, b) in enumerate(zip(expected, found)):
                assert float((a - b).abs().max()) <= rtol * max(scale, float(a.abs().max())), (layout, i)
            assert set(metrics) == set(theirs)
            for metric, value in metrics.items():
                assert theirs[metric] == pytest.approx(value, rel=100 * rtol, abs=10 * rtol), (layout, metric)
