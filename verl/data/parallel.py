"""Apply a function to chunks of rows in worker processes, with results in order and a deadline for every wait.

Workers are fresh interpreters (`python -P -m verl.data.parallel FD DIR`), so nothing is forked and a script needs no
main guard. One thread of the parent drives each worker. The function, chunks and results are files in a temporary
folder; the pipe carries messages of a few bytes, and answers, for which the worker waits. So neither side can block on
a write to the other.

    worker -> up · progress ROWS (at once, then at most one per second) · ask QUESTION · done
            · refused TEXT (a ValueError)
    parent -> NUMBER of a chunk · the answer to a question · (end of file: stop)

A function that `Asks` gets answers from its original in the parent, which has libraries loaded that take a worker
seconds.

Any other exception ends the worker; its traceback is then part of the parent's error.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from verl.errors import Refused
from verl.leftovers import OwnFolder
from verl.processes.child import Child

# Called with a chunk and a function to report progress with (rows of the chunk that are done).
OnChunk = Callable[[Sequence[Any], Callable[[int], None]], Any]
Ask = Callable[[Any], Any]
MESSAGE_BYTES = 2000
PROGRESS_EVERY_S = 1.0
REAP_S = 10.0
logger = logging.getLogger(__name__)


class ReaderDied(RuntimeError):
    """A data worker crashed, was killed or did not report progress in time. The text has the cause."""


@runtime_checkable
class Asks(Protocol):
    """A function that is called in the parent process, from copies of it in workers."""

    def prepare(self) -> None:
        """Compute what the copies need, before they are made."""
        ...

    def answer(self, question: Any) -> Any:
        """Return the answer to a question of a copy."""
        ...

    def connect(self, ask: Ask) -> None:
        """Use `ask` for questions from now on, as a copy."""
        ...


def run_chunks(
    function: OnChunk, chunks: Iterable[Sequence[Any]], *, num_workers: int, timeout_s: float
) -> Iterator[Any]:
    """Yield function(chunk) for each chunk, in order. A ValueError of the function is raised when its chunk is due.

    Raise ReaderDied if a worker dies, or reports no progress for `timeout_s` seconds.
    """
    if isinstance(function, Asks):
        function.prepare()
    try:
        packed = pickle.dumps(function)
    except (pickle.PicklingError, TypeError, AttributeError) as exc:
        raise Refused(f"the tokenizer cannot be sent to worker processes ({exc}). Fix: data.num_workers=0") from exc
    own = OwnFolder("verl-rows-")
    folder = own.path
    workers: list[_Worker] = []
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verl-data")
    running: deque[Future[Path]] = deque()
    answering = threading.Lock()

    def answer(question: Any) -> Any:
        assert isinstance(function, Asks), "a function that asks"
        with answering:  # tokenizers are not used by several threads
            return function.answer(question)

    def work(number: int, rows: range) -> Path:
        worker = idle.get()
        try:
            return worker.run(number, rows)
        finally:
            idle.put(worker)

    def oldest() -> Any:
        path = running.popleft().result()
        result = pickle.loads(path.read_bytes())
        path.unlink()
        return result

    try:
        (folder / "function").write_bytes(packed)
        for _ in range(num_workers):
            workers.append(_Worker(folder, timeout_s, answer))
            idle.put(workers[-1])
        first_row = 0
        for number, chunk in enumerate(chunks):
            (folder / f"{number}.in").write_bytes(pickle.dumps(chunk))
            running.append(threads.submit(work, number, range(first_row, first_row + len(chunk))))
            first_row += len(chunk)
            if len(running) >= 4 * num_workers:
                yield oldest()
        while running:
            yield oldest()
    finally:
        for worker in workers:
            worker.end()  # no result is lost, and its thread reads an end of file
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()
        own.cleanup()


class _Worker:
    """The parent's side of one worker process; used by one thread at a time."""

    def __init__(self, folder: Path, timeout_s: float, answer: Ask) -> None:
        self._folder, self._timeout_s, self._answer = folder, timeout_s, answer
        self._conn, theirs = Pipe(duplex=True)
        self._log = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by `close`)
        self._state = "while starting its interpreter"
        paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._child = Child(
            [sys.executable, "-P", "-m", "verl.data.parallel", str(theirs.fileno()), str(folder)],
            pass_fds=[theirs.fileno()],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},  # one row at a time
            left_by_parent=str(folder),
        )
        theirs.close()
        self.end = self._child.end

    def run(self, number: int, rows: range) -> Path:
        """Let the worker compute a chunk, and return the file with its result."""
        self._send(number)
        while (message := self._receive())[0] in ("up", "progress", "ask"):
            if message[0] == "ask":
                self._send(self._answer(message[1]))
                continue
            left = rows[message[1] :]
            loading = message[0] == "up"
            self._state = "while loading the tokenizer" if loading else f"in rows {left.start + 1} to {left.stop}"
        kind, value = message
        if kind == "refused":
            raise Refused(value)
        assert kind == "done", f"unknown message {kind!r} of a data worker"
        return self._folder / f"{number}.out"

    def _send(self, message: Any) -> None:
        try:
            self._conn.send(message)
        except OSError:
            raise ReaderDied(self._end_described()) from None

    def _receive(self) -> tuple[str, Any]:
        try:
            if self._conn.poll(self._timeout_s):
                return self._conn.recv()
        except (EOFError, OSError):
            raise ReaderDied(self._end_described()) from None
        raise ReaderDied(
            f"data worker {self._child.pid} made no progress for {self._timeout_s:g} s ({self._state})."
            " Fix: look at that row; on a very slow machine, data.num_workers=0"
        )

    def _end_described(self) -> str:
        code = self._child.wait(REAP_S)
        if code is None:
            how = "closed its pipe but lives on"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - MESSAGE_BYTES))
        last = self._log.read().decode(errors="replace").strip()
        hint = " (the kernel kills so when memory is short: try fewer data.num_workers)" if "SIGKILL" in how else ""
        output = f". Its last output:\n{last}" if last else ""
        return f"data worker {self._child.pid} {how}{hint} ({self._state}){output}"

    def close(self) -> None:
        self._conn.close()
        self._log.close()
        if self._child.stop(REAP_S) is None:  # stuck in the kernel; must not hide the error that stops us
            logger.warning("data worker %d does not die", self._child.pid)


def serve_chunks(conn: Connection, folder: Path) -> None:
    """Work on chunks in a worker process until the parent closes the pipe."""
    try:
        conn.send(("up", 0))
        function: OnChunk = pickle.loads((folder / "function").read_bytes())
        if isinstance(function, Asks):
            function.connect(partial(_answered, conn))
        while True:
            _work(conn, function, folder, conn.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answered(conn: Connection, question: Any) -> Any:
    conn.send(("ask", question))
    return conn.recv()


def _work(conn: Connection, function: OnChunk, folder: Path, number: int) -> None:
    conn.send(("progress", 0))
    source, last = folder / f"{number}.in", time.monotonic()
    chunk = pickle.loads(source.read_bytes())
    source.unlink()

    def progress(rows_done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            conn.send(("progress", rows_done))

    try:
        result = function(chunk, progress)
    except ValueError as exc:
        return conn.send(("refused", str(exc)[:MESSAGE_BYTES]))
    (folder / f"{number}.out").write_bytes(pickle.dumps(result))
    conn.send(("done", None))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    serve_chunks(Connection(int(sys.argv[1])), Path(sys.argv[2]))
