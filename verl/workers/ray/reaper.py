"""The processes of a Ray that this process started die with it, also by kill -9: Ray itself leaves some behind.

Run as a script it reads "PID STARTED" lines from its standard input, and ends these processes when that is closed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def started(pid: int) -> str:
    """Return the start time of a process in ticks since boot, which with its number identifies it; "" if there is
    none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Reaper:
    """A child process that outlives the process that started Ray, and kills the processes of Ray then."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the driver's group must not end it
            text=True,
        )

    def watch(self, pids: list[int]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{pid} {started(pid)}\n" for pid in pids if pid != self._process.pid))
        self._process.stdin.flush()

    def close(self) -> None:
        """End the remaining processes now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def main() -> None:
    seen = [line.split() for line in sys.stdin]
    for found in seen:
        if len(found) == 2 and started(int(found[0])) == found[1]:
            try:
                os.kill(int(found[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main()
