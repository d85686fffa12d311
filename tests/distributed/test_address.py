"""A Ray at an address: one that is not there, and one of another version, are refused in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

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


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["http", "ends", "is silent"])
def test_a_port_that_somebody_else_has(monkeypatch, says):
    monkeypatch.setattr("verl.workers.ray.cluster.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, ended = server.getsockname()[1], threading.Event()

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(100)
                if says is None:
                    ended.wait(60)
                else:
                    connection.sendall(says)

        other = threading.Thread(target=serve)
        other.start()
        with pytest.raises(
            ValueError, match=rf"cluster.address=127.0.0.1:{port}: (what listens there is no Ray|timed)"
        ):
            _connect(f"127.0.0.1:{port}", {})
        ended.set()
        other.join()


def test_what_ray_says_of_another_version(monkeypatch):
    said = "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\nThis process with:\n    Ray: 9.9.9"

    def init(**given: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(
        ValueError, match=rf"^cluster.address=auto: {' '.join(said.split())}; is `ray start --head` running"
    ):
        _connect("auto", {})


@pytest.mark.skipif(
    not os.environ.get("FULL_GRID"), reason="make test-all; another process, and a version that is not here"
)
def test_a_ray_of_another_version(ray_session):
    address = ray_session.get_runtime_context().gcs_address
    command = [sys.executable, "-c", OTHER, address]
    env = os.environ | {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env).stdout
    assert len(out.splitlines()) == 1
    assert out.startswith(f"cluster.address={address}: Version mismatch") and "Ray: 2.60.0" in out and "9.9.9" in out


@pytest.fixture
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]
