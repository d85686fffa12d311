"""Several processes on one GPU: Ray gives each a share of it. The GPU is a number that Ray is told; nothing computes on
it, so the test has a Ray of its own, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="pip install '.[ray]'")

START_S = 200.0  # of processes that each import torch, beside other tests
WITH_ONE_GPU = """
import logging, sys, ray
ray.init(address="local", num_cpus=8, num_gpus=1, include_dashboard=False, object_store_memory=128 << 20,
         log_to_driver=False, logging_level=logging.ERROR, namespace="verl")
from tests.distributed.test_shared_gpu import visits
visits(sys.argv[1])
ray.shutdown()
"""


def seen(worker: object) -> tuple[str | None, float]:
    import ray

    return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)


def visits(folder: str) -> None:
    """The roles of a run share the GPU of their pool; two pools may have a half each."""
    from tests.worker_contract import build, nothing
    from verl.model_engine.layout import Layout
    from verl.workers.group import Broadcast
    from verl.workers.pools import Pool, Shortage
    from verl.workers.ray.cluster import RayCluster

    def shares(pools: dict[str, Pool], roles: dict[str, str]) -> list[tuple[str | None, float]]:
        cluster = RayCluster(pools, roles, layout=Layout(world_size=1), set_up=nothing, replicas=1, start_timeout_s=5.0)
        try:
            groups = [cluster.start(role, build, (folder,), world_size=1) for role in roles]
            return [found for group in groups for found in group.submit(seen, Broadcast()).result(START_S)]
        finally:
            cluster.close()

    one = {role: "main" for role in ("actor", "ref", "critic", "rollout")}
    found = shares({"main": Pool(gpus_per_rank=1.0, device="cpu")}, one)
    assert [visible for visible, _ in found] == ["0"] * 4 and abs(sum(share for _, share in found) - 1) < 1e-2, found
    half = Pool(gpus_per_rank=0.5, device="cpu")
    found = shares({"main": half, "gen": half}, {"actor": "main", "rollout": "gen"})
    assert found == [("0", 0.5), ("0", 0.5)], found
    try:
        shares({"main": half, "gen": Pool(gpus_per_rank=0.6, device="cpu")}, {"actor": "main", "rollout": "gen"})
    except Shortage as e:
        assert "1.1 GPU where there are 1" in str(e), e
    else:
        raise AssertionError("more than one GPU was given away")


def test_roles_and_pools_share_one_gpu(tmp_path):
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    made = [sys.executable, "-c", WITH_ONE_GPU, str(tmp_path)]
    done = subprocess.run(made, capture_output=True, text=True, timeout=300, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
