"""One Ray for all tests of this folder, which `make test` leaves out: it takes some ten seconds to start.
FULL_GRID=1 makes every combination of the gate."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

CLUSTERS = ("test_three_nodes", "test_shared_gpu", "test_queue_package", "test_torchrun")
RUNS = ("test_ray_run", "test_faults", "test_quickstart_ray")


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Tests that fork come before Ray is here: its threads do not survive a fork, and `ray.shutdown` waits for them.
    What starts clusters bears a mark, and so do whole runs, so that they can run beside the others."""
    items.sort(key=lambda item: "ray_session" in item.fixturenames)  # stable
    for item in items:
        if item.module.__name__.endswith(RUNS):
            item.add_marker("runs")
        elif "ray_session" in item.fixturenames or item.module.__name__.endswith(CLUSTERS):
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
    from verl.workers.ray.cluster import OWN_RAY

    ray.init(
        address="local",  # and not to a cluster that somebody else has here
        num_cpus=16,
        resources={"chip": 2},  # an accelerator that Ray does not know
        include_dashboard=False,
        object_store_memory=512 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="verl",
        _system_config=OWN_RAY,
    )
    yield ray
    ray.shutdown()
