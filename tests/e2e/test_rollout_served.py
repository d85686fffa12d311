"""A run with `verl serve` as rollout engine, over HTTP: it trains as one with an engine in its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import CONTROLLED, WITH_KEY, server_process
from small_runs import metrics_of, same_tensors, small_run, tensors_of, trained

from verl.weight_sync.base import SyncError
from verl.workers.group import WorkerDied


@pytest.fixture
def url(tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    with server_process(tiny_model, tmp_path / "serve.log", *CONTROLLED) as (_, found):
        yield found


def test_a_run_over_http_is_the_run_in_process(
    tmp_path: Path, tiny_model: Path, arithmetic_data: Any, url: str
) -> None:
    """The same seeds give the same tokens, so the same weights but for rounding."""
    small_run(tmp_path / "here", tiny_model, arithmetic_data)
    small_run(tmp_path / "there", tiny_model, arithmetic_data, "rollout.engine=server", f"rollout.url={url}", WITH_KEY)
    here, there = (tmp_path / place / "r" for place in ("here", "there"))
    assert trained(here) == trained(there)
    steps = metrics_of(there)
    assert max(steps[i]["sync/canary_mean_abs"] for i in (1, 2, 3)) <= 1e-5
    same_tensors(tensors_of(here, 3), tensors_of(there, 3))


def test_updates_reach_requests_in_flight(tmp_path: Path, tiny_model: Path, arithmetic_data: Any, url: str) -> None:
    ahead = ("pipeline.staleness=1", "pipeline.partial_rollout=true", "rollout.max_response_tokens=64")
    served = ("rollout.engine=server", f"rollout.url={url}", WITH_KEY, 'rollout.stop=["+++"]', "run.total_steps=4")
    small_run(tmp_path, tiny_model, arithmetic_data, *served, *ahead)
    steps = metrics_of(tmp_path / "r")
    assert {1, 2, 3, 4} <= steps.keys() and max(steps[i]["sync/canary_mean_abs"] for i in (1, 2, 3, 4)) <= 1e-5


def test_a_server_that_dies_ends_the_run_with_its_cause(tmp_path: Path, tiny_model: Path, arithmetic_data: Any) -> None:
    def kill_after_a_step(process: Any) -> None:
        metrics = tmp_path / "r" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.05)
        process.kill()

    with server_process(tiny_model, tmp_path / "serve.log", *CONTROLLED) as (process, found):
        killer = threading.Thread(target=kill_after_a_step, args=(process,), daemon=True)
        killer.start()
        served = ("rollout.engine=server", f"rollout.url={found}", WITH_KEY, "run.total_steps=500")
        cause = r"http://127\.0\.0\.1:\d+/.*the run cannot start again: .*no healthy server there"
        with pytest.raises((WorkerDied, SyncError), match=cause):
            small_run(tmp_path, tiny_model, arithmetic_data, *served)
        killer.join(10)
