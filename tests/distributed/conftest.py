"""One Ray for all tests of a session."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(scope="session")
def ray_session():
    ray = pytest.importorskip("ray", reason="pip install 'verl[ray]'")
    from verl.workers.ray.cluster import FAST_HEALTH

    ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config=FAST_HEALTH,
    )
    yield ray
    ray.shutdown()
