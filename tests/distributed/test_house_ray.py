"""What the plan of the house promises of a run over processes: the driver holds refs, and no tensor or column."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from small_runs import metrics_of, small_run
from test_house import held_by

from verl.batch import Ragged
from verl.driver import launch
from verl.driver.run import Run
from verl.track.samples import read_samples
from verl.transfer_queue.shared import SharedQueue


def test_the_driver_of_a_run_over_processes_holds_and_reads_no_column(
    ray_session, tmp_path, tiny_model, arithmetic_data, monkeypatch
):
    runs: list[Run] = []
    looked: list[int] = []
    reads: list[Any] = []
    assemble, read = launch.assemble, SharedQueue.read

    async def remembered(*args: Any, **kwargs: Any) -> Run:
        runs.append(await assemble(*args, **{**kwargs, "on_step": look}))
        return runs[0]

    def look(step: int, values: Any) -> None:
        columns = (torch.Tensor, Ragged)
        found = [path for x, path in held_by(runs[0], elsewhere=()) if isinstance(x, columns)]
        assert not found, found[:3]
        looked.append(step)

    def counted(self: SharedQueue, refs: Any, columns: Any) -> Any:
        reads.append(columns)
        return read(self, refs, columns)

    monkeypatch.setattr(launch, "assemble", remembered)
    monkeypatch.setattr(SharedQueue, "read", counted)
    over = ("cluster.backend=ray", "cluster.ranks_per_node=2", "cluster.cpus_per_rank=0.5")
    small_run(tmp_path, tiny_model, arithmetic_data, "run.total_steps=2", "algorithm.kl_loss_coef=0.1", *over)
    assert looked == [0, 1, 2] and not reads
    queue = runs[0].learner.queue
    assert isinstance(queue, SharedQueue) and len(queue) == 0, "the recorder has dropped what it wrote"
    assert set(metrics_of(tmp_path / "r")) == {0, 1, 2}
    for step in (1, 2):
        written = read_samples(tmp_path / "r", step)
        assert len(written) == 16 and all(r.old_logprobs is not None and r.advantages is not None for r in written)
        assert all(r.ground_truth and r.prompt_text for r in written)
