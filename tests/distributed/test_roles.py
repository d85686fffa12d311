"""A whole turn of the driver over real ranks: shares, columns, weights of the step, two passes, engines, updates. Every
rank runs the driver's code; a call reaches the role of this rank, and its answers and rows are exchanged."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import test_virtual_ranks as virtual
import torch
import torch.distributed as dist
from cases import gradients
from fakes import put
from forked import ranks_of

from verl.driver import assemble, models
from verl.driver.step import Step, experience_and_update
from verl.model_engine import sharded, torch_engine
from verl.model_engine.layout import Layout
from verl.models import tiny
from verl.recipes import arithmetic
from verl.transfer_queue.memory import MemoryQueue
from verl.workers.dist import ProcessRanks
from verl.workers.group import Broadcast
from verl.workers.inproc import InprocCluster
from verl.workers.model_workers import ModelWorkers
from verl.workers.role import Role, build_roles

LAYOUTS = {
    "FSDP x SP": Layout(world_size=4, sequence=2),
    "FSDP x TP": Layout(world_size=4, tensor=2),
    "FSDP x PP": Layout(world_size=4, pipeline=2),
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
    """The tests' small model with heads and a vocabulary that four ranks can share."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=32, layers=2, heads=4, kv_heads=4, ffn=64, seed=1)
    return tiny.save(model, tokenizer, tmp_path_factory.mktemp("tiny"))


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
    """See `Cluster`: this process is one rank of every model."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank

    def start(self, name, build, args, *, world_size=1):
        if name == "compute":
            return super().start(name, build, args)
        spec = replace(args[0], context=replace(args[0].context, layout=self._layout))
        ranks = ranks_of(self._layout, self._rank)
        return RealRanks(name, build(spec, ranks=[ranks])[0], self._rank, ranks, self._layout.world_size)


class RealRanks:
    """See `WorkerGroup`."""

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


def turn(rank: int, layout: Layout, name: str, options: dict[str, Any], model: Path) -> tuple[list[torch.Tensor], Any]:
    """The gradient of every optimizer step of a turn, in order, and the metrics of the turn."""
    config = virtual.config_of(name, model, model, 1, 40)  # none of the cases has a teacher
    config.model.engine = "sharded"
    config.algorithm.options.update(options)
    found: list[torch.Tensor] = []

    def watched(e: Any) -> Any:
        found.append(torch.cat([g.flatten() for g in gradients(e).values()]))
        return torch_engine.TorchEngine.optim_step(e)

    def workers_of(context, spec):
        group = RealCluster(layout, rank).start(spec.name, build_roles, (spec,))
        return ModelWorkers(group, layout=layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded.ShardedEngine, "optim_step", watched)
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
    name, options = CASES[case]
    config_of = virtual.config_of

    def with_options(*given):
        config = config_of(*given)
        config.algorithm.options.update(options)
        return config

    monkeypatch.setattr(virtual, "config_of", with_options)
    torch.manual_seed(0)
    expected, metrics = virtual.gradients(name, four_heads, four_heads, 1)
    assert sum(float(g.abs().max()) > 0 for g in expected) >= 2
    for layout in LAYOUTS.values():
        for found, theirs in forked.run(layout.world_size, lambda rank: turn(rank, layout, name, options, four_heads)):
            assert len(found) == len(expected)
            for i, (a, b) in enumerate(zip(expected, found)):
                assert float((a - b).abs().max()) <= 1e-10 * max(1.0, float(a.abs().max())), (layout, i)
            assert set(metrics) == set(theirs)
            for metric, value in metrics.items():
                assert theirs[metric] == pytest.approx(value, rel=1e-8, abs=1e-9), (layout, metric)
