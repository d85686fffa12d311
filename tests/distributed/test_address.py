"""A Ray at an address: one that is not there, and one of another version, are refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from verl.workers.ray.cluster import _connect

OTHER = """
import sys, ray
ray.__version__ = "9.9.9"
from verl.workers.ray.cluster import _connect
try:
    _connect(sys.argv[1], {})
except ValueError as e:
    print(e)
"""


def test_nobody_at_the_address(ray_session, free_port):
    with pytest.raises(ValueError, match=rf"cluster.address=127.0.0.1:{free_port}: .*refused; is `ray start --head`"):
        _connect(f"127.0.0.1:{free_port}", {})


def test_a_ray_of_another_version(ray_session):
    address = ray_session.get_runtime_context().gcs_address
    command = [sys.executable, "-c", OTHER, address]
    env = os.environ | {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env).stdout
    assert len(out.splitlines()) == 1
    assert out.startswith(f"cluster.address={address}: Version mismatch") and "Ray: 2.60.0" in out and "9.9.9" in out


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]
