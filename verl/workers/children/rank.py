"""The driver's side of the process of one rank on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from verl.processes.child import Child, interpreter_line
from verl.processes.environment import import_folders
from verl.workers.answers import RankAnswer, failed_answer
from verl.workers.children.channel import Channel, loads
from verl.workers.group import WorkerDied

END_S = 10.0  # for the exit code of a process whose end of the channel is closed
TAIL_BYTES = 4096  # of the log, in which the reason of an end is searched


class ChildRank:
    """A process with one rank, which `python` runs. It ends with this process.

    name: the rank, for messages · log: the file that gets its output · env: its variables · died: called once, in any
    thread, with a text about its end, unless `kill` was called · start_timeout_s: the deadline of its first answer"""

    def __init__(
        self,
        name: str,
        python: str,
        *,
        log: Path,
        env: Mapping[str, str],
        died: Callable[[str], None],
        start_timeout_s: float,
    ) -> None:
        self._name, self._log, self._died, self._over = name, log, died, False
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[RankAnswer]] = {}
        self._request_sent_s: float | None = None
        self._opened_s, self._start_timeout_s = time.monotonic(), start_timeout_s
        self.ready = False
        """True once the rank is built: from then on it answers at any time."""
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        line = interpreter_line("verl.workers.children.host", "-P", python=python)
        line.append(json.dumps([theirs.fileno(), import_folders()]))
        with theirs, log.open("ab") as output:
            self._began = output.tell()
            self._child = Child(line, stdout=output, stderr=output, env=env, pass_fds=(theirs.fileno(),))
        self._channel = Channel(ours)
        threading.Thread(target=self._read, name=f"verl-{name}", daemon=True).start()
        self._first = self.request("alive")

    def request(self, method: str, *args: Any) -> Future[RankAnswer]:
        """Send a request for a method of its `RankHost`, or `alive`, and return the future of its answer."""
        future, number = Future[RankAnswer](), next(self._numbers)
        with self._lock:
            ended = self._over
            if not ended:
                self._waiting[number] = future
        if ended:
            future.set_exception(WorkerDied(f"{self._name} has ended"))
            return future
        with contextlib.suppress(OSError):  # it has ended: its reader fails the future
            self._channel.send(number, pickle.dumps((method, args), protocol=5))
        return future

    def call(self, number: int, payload: bytes) -> Future[RankAnswer]:
        return self.request("call", number, payload)

    def call_at_once(self, payload: bytes) -> Future[RankAnswer]:
        return self.request("call_at_once", payload)

    def look(self, silent_s: float) -> None:
        """Check that the process has started, and that it answers. A stopped process does not, and counts as dead after
        `silent_s`."""
        limit_s = self._start_timeout_s
        if not self._first.done() and time.monotonic() - self._opened_s > limit_s:
            self._end(f"has not started within cluster.start_timeout_s={limit_s:g} (log: {self._log})")
        if self._over or not self.ready:
            return
        if self._request_sent_s is None:
            self._request_sent_s = time.monotonic()
            self.request("alive").add_done_callback(self._answered)
        elif time.monotonic() - self._request_sent_s > silent_s:
            self._end(f"has not answered for {silent_s:g} s")

    def kill(self) -> None:
        """End the process, and wait until it has ended."""
        self._over = True
        self._child.stop()

    @property
    def pid(self) -> int:
        """The pid of the process; 0 if it could not be started."""
        return self._child.pid

    # -- private -------------------------------------------------------------------------------------------------------

    def _answered(self, found: Future[RankAnswer]) -> None:
        self._request_sent_s = None

    def _read(self) -> None:
        while True:
            try:
                number, body = self._channel.receive()
            except EOFError:
                break
            try:
                answer = loads(body)
            except Exception as e:  # of a class that only the worker has
                answer = failed_answer(e)
            with self._lock:
                future = self._waiting.pop(number, None)
            if future is not None:  # None: the rank has counted as dead meanwhile
                future.set_result(answer)
            del answer, body, future  # they belong to the caller now
        self._end(f"died: {self._reason(self._child.wait(END_S))}")
        self._channel.close()
        self._child.end()

    def _end(self, how: str) -> None:
        with self._lock:
            over, self._over = self._over, True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        what = f"{self._name} (process {self.pid}) {how}"
        if not over:
            self._died(what)
        for future in waiting:
            future.set_exception(WorkerDied(what))

    def _reason(self, code: int | None) -> str:
        if code is None:
            return "it closed its channel"
        if code < 0:
            hint = " (by the kernel, if the machine is out of memory)" if code == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        with self._log.open("rb") as file:
            file.seek(max(self._began, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return f"it ended with exit code {code}: {lines[-1] if lines else 'no output'} (log: {self._log})"
