"""sglang-router in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl.rollout.process import free_port


@contextlib.contextmanager
def router(urls: Sequence[str], log: Path, *args: str) -> Iterator[str]:
    """Once it answers: its URL. Its own default host is 0.0.0.0."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *urls, "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    with log.open("w") as said:
        process = subprocess.Popen([*command, *args], stdout=said, stderr=said, cwd=log.parent)
    try:
        until_s = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < until_s and process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
