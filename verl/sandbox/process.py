"""The pool's side of one worker process: start, call and kill it. It is used by one caller at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from subprocess import Popen
from typing import Any, Generic, Literal, cast

import msgspec

from verl.errors import Refused
from verl.processes import tree
from verl.processes.child import interpreter_line
from verl.sandbox import messages
from verl.sandbox.messages import LENGTH, CallableSpec, FailedCall, Failure, T, framed

KILL_WAIT_S = 8.0  # for the guardian to kill, reap and report; it gives up after guardian.KILL_S
GRACE_S = 1.0  # for an idle worker to end by itself
REPORT_WAIT_S = 0.5  # for the report of its end, after the channel broke
UNFIT = ("crash", "memory")  # failures after which a worker is not called again: its heap may be damaged or full
MAX_ANSWER_BYTES = messages.MAX_VALUE_BYTES + (64 << 10)
ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "NLTK_DATA"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
)
PREFIXES = ("LC_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_")
"""The environment variables that a worker gets. Keys and tokens are not among them: a callable gets those as kwargs."""
End = Literal["answered", "gone", "late"]


class CannotLoad(Refused):
    """The user's callable cannot be loaded; the text has the reason and the fix."""


class Death(msgspec.Struct, frozen=True):
    """The end of a worker, as its guardian reports it."""

    code: int | None = None
    """Exit code, or minus the signal. None: the guardian itself was killed."""
    memory_mb: float | None = None
    """Memory in use when it was too much."""
    tail: str = ""
    """The end of the worker's output."""

    @property
    def output(self) -> str:
        return f"; last output: {self.tail[-1000:].strip()}" if self.tail.strip() else ""

    def failure(self, spec: CallableSpec, memory_limit_mb: float) -> Failure:
        """Return the outcome of the call that ran when the worker ended."""
        limit = f"{spec.section}.memory_limit_mb={memory_limit_mb:g}{self.output}"
        if self.memory_mb is not None:
            return Failure("memory", f"used {self.memory_mb:.0f} MB, {limit}")
        if self.code == -signal.SIGABRT and "bad_alloc" in self.tail:
            return Failure("memory", f"C++ allocation failed, {limit}")
        how = "and its guardian were killed" if self.code is None else f"exited with code {self.code}"
        if self.code is not None and self.code < 0:
            hint = " (by the kernel, if the machine is out of memory)" if self.code == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-self.code).name}{hint}"
        return Failure("crash", f"the {spec.called} {how}{self.output}")


OnAnswer = Callable[[bytes], bool]
"""A function that takes an answer, and returns False if it was the last one."""


class WorkerChannel(asyncio.Protocol):
    """Sends messages to a worker and receives its answers, in order. It is an asyncio protocol, which is faster than a
    stream, since a step makes thousands of calls."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._expected = 0
        self._on_answer: OnAnswer | None = None
        self._question: asyncio.Future[End] | None = None  # how the latest question ended
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = self._timeout_s = 0.0

    def ask(self, frames: Sequence[bytes], take_answer: OnAnswer, timeout_s: float) -> asyncio.Future[End]:
        """Send frames and return a future of the outcome: "answered" when every frame has an answer, "gone" if the
        worker ended or sent a malformed answer, "late" if one answer took longer than `timeout_s`."""
        self._question = self._loop.create_future()
        self._on_answer, self._expected = take_answer, len(frames)
        self._received.clear()
        self._since_s, self._timeout_s = self._loop.time(), timeout_s
        if self.transport is None or self.transport.is_closing():
            self.end("gone")
        else:
            self.transport.write(b"".join(frames))
            self._timer = self._loop.call_later(timeout_s, self._check_time)
        return self._question

    @property
    def waited_s(self) -> float:
        """Seconds since the latest answer, or since the frames were sent."""
        return self._loop.time() - self._since_s

    def _check_time(self) -> None:
        left_s = self._timeout_s - self.waited_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_time)
        else:
            self.end("late")

    def end(self, how: End) -> None:
        """End the wait for answers, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
        if self._question is not None and not self._question.done():
            self._question.set_result(how)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        if self._question is None or self._question.done():
            return  # no call waits for an answer: user code found the channel and wrote to it
        assert self._on_answer is not None
        self._received += data
        start = 0
        while self._expected and len(self._received) >= start + LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, start)
            if size > MAX_ANSWER_BYTES:
                self.end("gone")
                self.close()
                break
            body = bytes(self._received[start + LENGTH.size : start + LENGTH.size + size])
            if len(body) < size:
                break
            start += LENGTH.size + size
            self._since_s = self._loop.time()
            self._expected = self._expected - 1 if self._on_answer(body) else 0
            if not self._expected:
                self.end("answered")
        if self._question.done():
            self._received.clear()
        else:
            del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("gone")


class CallWorker(Generic[T]):
    """One worker process with its guardian. Build with `start_worker`."""

    def __init__(
        self,
        spec: CallableSpec,
        memory_limit_mb: float,
        popen: Popen[bytes],
        channel: WorkerChannel,
        control: socket.socket,
    ) -> None:
        self.calls = 0
        self.grown_mb = 0.0  # address space gained since it was ready
        self.took_s = 0.0  # duration of its latest call, by its own clock
        self.ready_s = 0.0  # time from its start until it was ready
        self.pid = 0
        self.healthy = True  # False once it must not be called again
        self._spec, self._memory_limit_mb = spec, memory_limit_mb
        self._popen, self._channel, self._control = popen, channel, control
        answers: Any = messages.ReturnedCall[spec.returns] | FailedCall  # type: ignore[name-defined]
        self._decoder = msgspec.msgpack.Decoder(answers)
        self._death = asyncio.create_task(self._watch())
        self._death.add_done_callback(lambda _: channel.end("gone"))

    @property
    def alive(self) -> bool:
        return not self._death.done()

    @property
    def leaks(self) -> bool:
        """True if its address space has grown by half of the memory limit. It is then replaced, before that makes
        another call fail. The worker process ends by the same rule."""
        return self.grown_mb >= self._memory_limit_mb / 2

    async def load(self, frame: bytes, timeout_s: float) -> None:
        """Send the callable and wait until the worker has loaded it. Raises CannotLoad."""
        began_s = time.monotonic()
        answers: list[bytes] = []

        def take_answer(body: bytes) -> bool:
            answers.append(body)
            return False

        end = await self._channel.ask([frame], take_answer, timeout_s)
        if end == "late" and self.alive:
            found = f"did not load within {timeout_s:g} s. Fix: keep slow work out of its top level"
            raise CannotLoad(f"{self._spec}: {found}")
        if end != "answered":
            found = (await self._died()).failure(self._spec, 0).detail
            raise CannotLoad(f"{self._spec}: {found}, while loading. Fix: import it by itself to see why")
        try:
            answer = msgspec.msgpack.decode(answers[0], type=messages.Loaded)
        except msgspec.DecodeError:
            raise CannotLoad(f"{self._spec}: its process spoke out of turn") from None
        if answer.error:
            raise CannotLoad(f"{self._spec}: {answer.error}")
        self.pid, self.ready_s = answer.pid, time.monotonic() - began_s

    async def call(self, arguments: Sequence[bytes], timeout_s: float, deliver: Callable[[T | Failure], None]) -> None:
        """Call the user's callable with each of the pickled arguments, one after the other.

        `deliver` gets the outcome of each call when it ends, in order. A call that takes more than `timeout_s` of wall
        clock time is killed with all that it started. If a call ends the worker, or makes it unusable, its outcome is
        the last one delivered, and the remaining calls have not begun.
        """
        first = self.calls = self.calls + 1
        self.healthy = False  # until all are answered; stays so if the caller is cancelled

        def take_answer(body: bytes) -> bool:
            outcome = self._outcome(body)
            fit = not (isinstance(outcome, Failure) and outcome.reason in UNFIT)
            more = fit and not self.leaks and self.calls < first + len(arguments) - 1
            self.healthy = fit and not more
            deliver(outcome)
            self.calls += more  # the next call begins
            return more

        calls = [framed(messages.CallRequest(first + i, packed)) for i, packed in enumerate(arguments)]
        end = await self._channel.ask(calls, take_answer, timeout_s)
        if end == "answered":
            return
        death = await (self.kill() if end == "late" else self._died())
        outcome = death.failure(self._spec, self._memory_limit_mb)
        if end == "late" and death.memory_mb is None:
            limit = f"{self._spec.section}.timeout_s={timeout_s:g}"
            outcome = Failure("timeout", f"no result within {limit}{death.output}")
        self.took_s = self._channel.waited_s
        deliver(outcome)

    def give_up(self) -> None:
        """End the running call as if it were late."""
        self._channel.end("late")

    def _outcome(self, body: bytes) -> T | Failure:
        """Decode an answer. User code shares the process that wrote it: a malformed answer counts as a crash."""
        try:
            answer = self._decoder.decode(body)
        except msgspec.DecodeError:
            answer = None
        if answer is None or answer.number != self.calls:
            return Failure("crash", f"the {self._spec.called}'s process spoke out of turn")
        self.grown_mb, self.took_s = answer.grown_mb, answer.took_s
        return answer.failure if isinstance(answer, FailedCall) else answer.value

    async def stop(self) -> None:
        """Let an idle worker end by itself (its atexit handlers run), then kill all that is left of it; kill a busy
        worker."""
        if self.healthy:
            self.healthy = False
            self._channel.close()
            await asyncio.wait({self._death}, timeout=GRACE_S)
        await self.kill()

    async def kill(self) -> Death:
        """Kill the worker and all that it started, and wait for that. Return how it ended."""
        self.healthy = False
        self._channel.close()
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)  # the guardian reads end of file and can still answer
        await asyncio.wait({self._death}, timeout=KILL_WAIT_S)
        if self.alive:
            self._force()
            await asyncio.wait({self._death}, timeout=KILL_WAIT_S)
        # It is still alive only if it is in an uninterruptible system call, which nothing can end.
        return Death(tail=f"process {self.pid} does not die") if self.alive else self._death.result()

    async def _died(self) -> Death:
        """Wait for the report of its end after the channel broke; kill it if there is none."""
        await asyncio.wait({self._death}, timeout=REPORT_WAIT_S)
        return await self.kill()

    async def _watch(self) -> Death:
        """Wait until the guardian closes its control socket, which is its end, and return how the worker ended."""
        record = b""
        with contextlib.suppress(OSError):
            while part := await asyncio.get_running_loop().sock_recv(self._control, 1 << 16):
                record += part
        self._control.close()
        for _ in range(int(KILL_WAIT_S / 0.002)):
            if self._popen.poll() is not None:
                break
            await asyncio.sleep(0.002)
        if self._popen.returncode is None:
            self._force()
        elif self._popen.returncode < 0:
            self._kill_group()  # the guardian was killed by a signal: it could not clean up
        try:
            return msgspec.json.decode(record, type=Death)
        except msgspec.DecodeError:  # no record, or the error of an interpreter that could not start
            return Death(tail=record.decode(errors="replace"))

    def _force(self) -> None:
        """Kill a guardian that does not answer (user code may have stopped it), and all below it."""
        for pid in tree.descendants(self._popen.pid):
            tree.kill(os.kill, pid)
        self._popen.kill()
        self._kill_group()

    def _kill_group(self) -> None:
        if self.pid:
            tree.kill(os.killpg, self.pid)


async def start_worker(spec: CallableSpec, memory_limit_mb: float, start_timeout_s: float) -> CallWorker[Any]:
    """Start a new interpreter and load the callable in it. Raise CannotLoad if that fails; no process is left then."""
    try:
        packed = pickle.dumps(replace(spec, kwargs=dict(spec.kwargs), returns=Any))  # the type may not pickle
    except Exception as error:  # __reduce__ of the user's objects in kwargs
        message = f"{spec.section}.kwargs cannot be sent to a worker: {error}. Fix: plain values"
        raise CannotLoad(f"{spec}: {message}") from None
    ours, theirs = socket.socketpair()
    control, control_theirs = socket.socketpair()
    control.setblocking(False)
    channel = WorkerChannel()
    with theirs, control_theirs:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
            popen = _launch(theirs.fileno(), control_theirs.fileno(), memory_limit_mb)
        except BaseException:  # cancelled, or no more processes
            control.close()
            # A socket of the event loop is closed through it: otherwise it ignores the next socket of that number.
            (channel.transport or ours).close()
            raise
    worker: CallWorker[Any] = CallWorker(spec, memory_limit_mb, popen, channel, control)
    try:
        await worker.load(LENGTH.pack(len(packed)) + packed, start_timeout_s)
    except BaseException:  # cancelled, too
        await worker.kill()
        raise
    return worker


def _launch(channel_fd: int, control_fd: int, memory_limit_mb: float) -> Popen[bytes]:
    paths = [os.path.abspath(p) for p in sys.path]
    about = {"channel_fd": channel_fd, "parent_pid": os.getpid(), "memory_limit_mb": memory_limit_mb, "sys_path": paths}
    # One thread and one arena each: workers are many, and memory that threads reserve counts as address space.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    env = {name: value for name, value in os.environ.items() if name in ENVIRONMENT or name.startswith(PREFIXES)}
    env |= {name: os.environ.get(name, "1") for name in names}
    command = [*interpreter_line("verl.sandbox.guardian", "-P"), json.dumps(about)]
    ends: dict[str, Any] = {"stdin": control_fd, "stdout": control_fd, "stderr": control_fd}
    return Popen(command, pass_fds=(channel_fd,), start_new_session=True, env=env, **ends)
