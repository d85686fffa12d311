"""Model engines in child processes of another interpreter: what they compute is what this process computes.

VERL_WORKER_PYTHON names the interpreter of an environment with another torch (docs/engines_training.md); without it the
processes are of this environment. `make test-worker` makes such an environment and runs this."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import child_engine
import numpy as np
import pytest
import torch
from cases import Case, differences, model, share
from child_engine import EngineRank, alone

from verl.config.backends import MODEL
from verl.model_engine.base import EngineContext
from verl.model_engine.layout import Layout
from verl.model_engine.optim import OptimSpec
from verl.types import merge_metrics
from verl.workers.children.cluster import ChildCluster
from verl.workers.group import Broadcast

PYTHON = os.environ.get("VERL_WORKER_PYTHON", sys.executable)
WAIT_S = 120.0
UPDATES = 3


def tensors(found: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in found.items()}


@pytest.mark.parametrize("tensor", [1, 2], ids=["data ranks", "tensor ranks"])
def test_two_ranks_of_another_interpreter_train_as_one_process(tensor, tmp_path):
    """Loss and gradients of each update, and the weights after the last one."""
    layout = Layout(world_size=2, tensor=tensor)
    case, folder = Case(layout), tmp_path / "model"
    model(case.model).save_pretrained(folder)
    context = EngineContext(
        folder=folder, optim=OptimSpec(lr=1e-2, eps=1e-5), dtype="float32", max_tokens_per_microbatch=60
    )
    _, batch, terms = case.batch()
    (one,) = child_engine.build(MODEL["torch"].build, context, ranks=[None])
    cluster = ChildCluster(layout, alone, tmp_path / "logs", python=PYTHON)
    try:
        given = (MODEL["sharded"].build, replace(context, layout=layout))
        group = cluster.start("actor", child_engine.build, given, world_size=2)
        versions = {*group.submit(EngineRank.torch_version, Broadcast()).result(WAIT_S)}
        print(f"torch {torch.__version__} in the driver, {', '.join(versions)} in the ranks")
        assert (versions == {torch.__version__}) == (sys.executable == PYTHON), "VERL_WORKER_PYTHON has the same torch"
        start = one.weights()
        for number in range(UPDATES):
            metrics, gradients = one.update(batch, terms, 0)
            parts = [share(case, rank)[1:] for rank in range(2)]
            found = group.submit(EngineRank.update, [(part, terms, count) for part, count in parts]).result(WAIT_S)
            assert not differences(tensors(found[1][1]), tensors(gradients), rtol=1e-4 if number else 1e-5)
            theirs = merge_metrics([found[rank][0] for rank in layout.primaries])
            for term in terms:
                assert theirs[term.name].total == pytest.approx(metrics[term.name].total, rel=1e-5)
        _, there = group.submit(EngineRank.weights, Broadcast()).result(WAIT_S)
        moved = {name: value - start[name] for name, value in one.weights().items()}
        assert not differences(tensors({n: there[n] - start[n] for n in moved}), tensors(moved), rtol=1e-3)
    finally:
        cluster.close()
