"""Guarantees of the design for a run over processes: the driver has refs, and no tensor or column."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from small_runs import metrics_of, small_run
from test_house import held_by

from verl.batch import Ragged
from verl.driver import launch
from verl.driver.run import Run
from verl.track.samples import read_samples
from verl.transfer_queue.shared import SharedQueue


class House:
    """Looks at the driver of the next run after each step, and at what it reads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs: list[Run] = []
        self.looked: list[int] = []
        self.reads: list[Any] = []
        assemble, read, reads = launch.assemble, SharedQueue.read, self.reads

        async def remembered(*args: Any, **kwargs: Any) -> Run:
            self.runs.append(await assemble(*args, **{**kwargs, "on_step": self.look}))
            return self.runs[0]

        def counted(queue: SharedQueue, refs: Any, columns: Any) -> Any:
            reads.append(columns)
            return read(queue, refs, columns)

        patch.setattr(launch, "assemble", remembered)
        patch.setattr(SharedQueue, "read", counted)

    def look(self, step: int, values: Any) -> None:
        columns = (torch.Tensor, Ragged)
        found = [path for x, path in held_by(self.runs[0], elsewhere=()) if isinstance(x, columns)]
        assert not found, found[:3]
        self.looked.append(step)

    def held_no_column(self, run_dir: Path, steps: int) -> None:
        """And the recorder, which is elsewhere, has written all and dropped it."""
        assert self.looked == [*range(steps + 1)] and not self.reads
        queue = self.runs[0].learner.queue
        assert isinstance(queue, SharedQueue) and len(queue) == 0, "the recorder has dropped what it wrote"
        assert set(metrics_of(run_dir)) == {*range(steps + 1)}
        for step in range(1, steps + 1):
            written = read_samples(run_dir, step)
            assert len(written) == 16 and all({"old_logprobs", "advantages"} <= r.tokens.keys() for r in written)
            assert all(r.ground_truth and r.prompt_text for r in written)


@pytest.mark.skipif(not os.environ.get("FULL_GRID"), reason="make test-all; test_ray_run has it of one rank")
def test_the_driver_of_a_run_over_two_ranks_holds_and_reads_no_column(
    ray_session, tmp_path, tiny_model, arithmetic_data, monkeypatch
):
    house = House(monkeypatch)
    over = ("cluster.backend=ray", "cluster.ranks_per_node=2", "cluster.pools.main.cpus_per_rank=0.5")
    small_run(tmp_path, tiny_model, arithmetic_data, "run.total_steps=2", "algorithm.kl_loss_coef=0.1", *over)
    house.held_no_column(tmp_path / "r", steps=2)
