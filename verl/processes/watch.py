"""The loop of a process that watches one child: it waits until the child ends, or until there is a reason to end it.

The guard of a command (guard.py) and the guardian of a worker (sandbox/guardian.py) run it. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from verl.processes import tree

Input = Literal["open", "closed", "end"]
"""The state of a descriptor after it was read: more may follow, nothing follows, or the child has to be ended."""


class Look(NamedTuple):
    """A check that is repeated, the first time at the start and the last time when the child has ended."""

    every_s: float
    """Time between two checks in seconds."""
    has_to_end: Callable[[], bool]
    """Returns True if the child has to be ended."""


def watch(
    pid: int, wake: int, inputs: Mapping[int, Callable[[], Input]], looks: Sequence[Look], *, ends_on_sigterm: bool
) -> int | None:
    """Wait until the child `pid` has ended, or until an input, a check or SIGTERM is a reason to end it. Return the
    exit code of the child, or minus the signal that ended it; None if it still runs.

    pid: 0 if there is no child
    wake: the descriptor of `tree.wake_by_signals`
    inputs: descriptor -> the function that reads it
    looks: the repeated checks
    """
    poller, due_s = select.poll(), [0.0] * len(looks)
    for fd in (wake, *inputs):
        poller.register(fd, select.POLLIN)
    pause_s = min(look.every_s for look in looks)
    while True:
        ready = {fd for fd, _ in poller.poll(pause_s * 1000)}
        if wake in ready and signal.SIGTERM in os.read(wake, 4096) and ends_on_sigterm:
            return None
        for fd in [fd for fd in inputs if fd in ready]:
            state = inputs[fd]()
            if state == "end":
                return None
            if state == "closed":
                poller.unregister(fd)
        code, now_s, ends = tree.reap()[0].get(pid), time.monotonic(), False
        for number, look in enumerate(looks):
            if now_s >= due_s[number]:
                ends |= look.has_to_end()
                due_s[number] = time.monotonic() + look.every_s
        if code is not None or ends:
            return code


def end_family(pid: int, within_s: float, others: Callable[[], set[int]] = set) -> int | None:
    """Kill and reap the group of the child `pid` (0: no child), all other processes below this one, and those that
    `others` returns. Return the exit code of the child; None if it had been reaped before."""
    if pid:
        tree.kill(os.killpg, pid)
    return tree.end_all(within_s, others).get(pid)
