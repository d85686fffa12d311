"""A run is the same whatever holds its rows."""

from __future__ import annotations

import gc
import os

from small_runs import same_tensors, small_run, tensors_of, trained

from verl.transfer_queue import segments


def test_a_run_over_shared_memory_is_bitwise_the_run_in_memory(tmp_path, tiny_model, arithmetic_data):
    args = ("run.total_steps=2", "algorithm.kl_loss_coef=0.1", "step.updates_per_step=2")
    for engine, more in (("memory", ()), ("shared", (f"queue.engine_options.max_bytes={1 << 24}",))):
        chosen = (*args, f"run.name={engine}", f"queue.engine={engine}", *more)
        assert small_run(tmp_path, tiny_model, arithmetic_data[:1], *chosen).steps == 2
    assert trained(tmp_path / "memory") == trained(tmp_path / "shared")
    same_tensors(*(tensors_of(tmp_path / engine, 2) for engine in ("memory", "shared")))
    gc.collect()
    ours = f"{segments.PREFIX}{os.getpid()}-"
    assert not list(segments.ROOT.glob(f"{ours}*")), "and nothing of it is left"
