"""A job over chunks of rows in worker processes, results in order, and no wait without a deadline.

Workers are fresh interpreters (`python -P -m verl.data.parallel FD DIR`), so nothing is forked and a script needs no main
guard. Jobs, chunks and results travel as files in a temporary folder; the pipe carries only messages of a few bytes, so
neither side can block on a write to the other.

    worker -> up · ready · progress ROWS (at most one per second) · done · refused TEXT (a ValueError of the job)
    parent -> job · chunk NUMBER · (end of file: stop)

Any other exception ends the worker; its traceback is then part of the parent's error.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, BinaryIO

# Called with a chunk and a function to report progress with (rows of the chunk that are done).
Job = Callable[[Sequence[Any], Callable[[int], None]], Any]
MESSAGE_BYTES = 2000
PROGRESS_EVERY_S = 1.0
REAP_S = 10.0
logger = logging.getLogger(__name__)


class WorkerDied(RuntimeError):
    """A data worker crashed, was killed or fell silent. The cause is the message."""


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    conn: Connection
    log: BinaryIO
    heard: float
    chunk: int | None = None
    rows_done: int = 0
    ready: bool = False
    state: str = "starting its interpreter"


@dataclass(slots=True)
class _Failure:
    error: Exception


@dataclass(slots=True)
class _Board:
    """Which chunks wait, run and are done. Chunks are numbered as they come."""

    chunks: Iterator[Sequence[Any]]
    ahead: int
    sent: int = 0
    yielded: int = 0
    exhausted: bool = False
    sizes: dict[int, int] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)

    def take(self) -> tuple[int, Sequence[Any]] | None:
        """The next chunk for a worker, unless there is none or the oldest unfinished one is too far behind."""
        if self.exhausted or self.sent - self.yielded >= self.ahead:
            return None
        chunk = next(self.chunks, None)
        if chunk is None:
            self.exhausted = True
            return None
        number, self.sent = self.sent, self.sent + 1
        self.sizes[number] = len(chunk)
        return number, chunk


def run_chunks(
    job: Job, chunks: Iterable[Sequence[Any]], *, num_workers: int, timeout_s: float, what: str = "rows"
) -> Iterator[Any]:
    """Yield job(chunk) for each chunk, in order. A ValueError of the job is raised here, when its turn comes.

    WorkerDied if a worker dies, or reports no progress for `timeout_s` seconds.
    """
    packed = _pickled(job)
    folder = Path(tempfile.mkdtemp(prefix="verl-data-"))
    workers: list[_Worker] = []
    board = _Board(iter(chunks), ahead=4 * num_workers)
    try:
        (folder / "job").write_bytes(packed)
        workers.extend(_start(folder) for _ in range(num_workers))
        while True:
            for worker in workers:
                _feed(worker, board, folder)
            while board.yielded in board.done:
                result = board.done.pop(board.yielded)
                if isinstance(result, _Failure):
                    raise result.error
                board.yielded += 1
                yield result
                for worker in workers:  # the consumer may have taken its time
                    _feed(worker, board, folder)
            if board.exhausted and board.yielded == board.sent:
                return
            _listen(workers, board, folder, timeout_s, what)
    finally:
        for worker in workers:
            _stop(worker)
        shutil.rmtree(folder, ignore_errors=True)


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, TypeError, AttributeError) as exc:
        raise ValueError(f"the tokenizer cannot be sent to worker processes ({exc}). Fix: data.num_workers=0") from exc


def _start(folder: Path) -> _Worker:
    ours, theirs = Pipe(duplex=True)
    log = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by _stop)
    paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "verl.data.parallel", str(theirs.fileno()), str(folder)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},  # one row at a time
    )
    theirs.close()
    return _Worker(process, ours, log, heard=time.monotonic())


def _feed(worker: _Worker, board: _Board, folder: Path) -> None:
    """Give an idle worker the next chunk."""
    if not worker.ready or worker.chunk is not None:
        return
    taken = board.take()
    if taken is None:
        return
    number, chunk = taken
    (folder / f"{number}.in").write_bytes(pickle.dumps(chunk))
    worker.chunk, worker.rows_done, worker.heard, worker.state = number, 0, time.monotonic(), "at work"
    _send(worker, ("chunk", number))


def _send(worker: _Worker, message: tuple[str, Any]) -> None:
    try:
        worker.conn.send(message)
    except OSError:
        worker.state = "gone"  # its end of the pipe is closed: _listen reads the end of file and reports the cause


def _listen(workers: list[_Worker], board: _Board, folder: Path, timeout_s: float, what: str) -> None:
    """Take the messages that are there, or wait until the first deadline."""
    busy = [w for w in workers if w.chunk is not None or not w.ready]
    assert busy, f"nothing runs, and {board.yielded} of {board.sent} chunks are done"
    left_s = min(w.heard for w in busy) + timeout_s - time.monotonic()
    for conn in wait([w.conn for w in workers], timeout=max(0.0, left_s)):
        worker = next(w for w in workers if w.conn is conn)
        try:
            kind, value = worker.conn.recv()
        except (EOFError, ConnectionError):
            raise WorkerDied(_obituary(worker, board, what)) from None
        _take(worker, kind, value, board, folder)
    late = [w for w in busy if time.monotonic() - w.heard >= timeout_s and not w.conn.poll()]
    if late:
        raise WorkerDied(
            f"data worker {late[0].process.pid} made no progress for {timeout_s:g} s ({_where(late[0], board, what)})."
            " Fix: look at that row; on a very slow machine, data.num_workers=0"
        )


def _take(worker: _Worker, kind: str, value: Any, board: _Board, folder: Path) -> None:
    worker.heard = time.monotonic()
    if kind == "up":
        worker.state = "loading the tokenizer"
        _send(worker, ("job", None))
    elif kind == "ready":
        worker.ready, worker.state = True, "idle"
    elif kind == "progress":
        worker.rows_done = value
    else:
        number, worker.chunk, worker.state = worker.chunk, None, "idle"
        assert number is not None, f"worker {worker.process.pid} answered {kind} without a chunk"
        if kind == "done":
            path = folder / f"{number}.out"
            board.done[number] = pickle.loads(path.read_bytes())
            path.unlink()
            return
        assert kind == "refused", f"unknown message {kind!r} of a data worker"
        board.done[number], board.exhausted = _Failure(ValueError(value)), True


def _obituary(worker: _Worker, board: _Board, what: str) -> str:
    try:
        code = worker.process.wait(timeout=REAP_S)
    except subprocess.TimeoutExpired:
        how = "closed its pipe but lives on"
    else:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    worker.log.seek(max(0, worker.log.seek(0, os.SEEK_END) - MESSAGE_BYTES))
    last = worker.log.read().decode(errors="replace").strip()
    hint = " (the kernel kills so when memory is short: try fewer data.num_workers)" if "SIGKILL" in how else ""
    output = f". Its last output:\n{last}" if last else ""
    return f"data worker {worker.process.pid} {how}{hint} ({_where(worker, board, what)}){output}"


def _where(worker: _Worker, board: _Board, what: str) -> str:
    if worker.chunk is None:
        return f"while {worker.state}"
    first = sum(board.sizes[k] for k in range(worker.chunk))
    return f"in {what} {first + worker.rows_done + 1} to {first + board.sizes[worker.chunk]}"


def _stop(worker: _Worker) -> None:
    worker.conn.close()
    worker.process.kill()  # it holds nothing that could be lost
    worker.log.close()
    try:
        worker.process.wait(timeout=REAP_S)
    except subprocess.TimeoutExpired:  # stuck in the kernel; must not hide the error that stops us
        logger.warning("data worker %d does not die", worker.process.pid)


# ---- in the worker ---------------------------------------------------------------------------------------------------


def serve(conn: Connection, folder: Path) -> None:
    """The worker's loop. The parent's end of file is the order to stop."""
    try:
        conn.send(("up", None))
        conn.recv()
        job: Job = pickle.loads((folder / "job").read_bytes())
        conn.send(("ready", None))
        while True:
            _, number = conn.recv()
            _work(conn, job, folder, number)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed could not


def _work(conn: Connection, job: Job, folder: Path, number: int) -> None:
    source, last = folder / f"{number}.in", time.monotonic()
    chunk = pickle.loads(source.read_bytes())
    source.unlink()

    def progress(rows_done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            conn.send(("progress", rows_done))

    try:
        result = job(chunk, progress)
    except ValueError as exc:
        conn.send(("refused", str(exc)[:MESSAGE_BYTES]))
    else:
        (folder / f"{number}.out").write_bytes(pickle.dumps(result))
        conn.send(("done", None))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
