"""The pool's side of one worker process: start it, call it, kill it. It is used by one caller at a time."""

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
from verl.sandbox import guardian, messages
from verl.sandbox.messages import LENGTH, CallableSpec, Failed, Failure, T, framed

KILL_WAIT_S = 8.0  # for the guardian to kill, reap and report; it gives up after guardian.KILL_S
GRACE_S = 1.0  # for an idle worker to end by itself
REPORT_WAIT_S = 0.5  # for a death to be reported after the channel broke
UNFIT = ("crash", "memory")  # a worker that says so is not called again: a heap that hit the limit is not reused
MAX_ANSWER_BYTES = messages.MAX_VALUE_BYTES + (64 << 10)
ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "NLTK_DATA"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
)
PREFIXES = ("LC_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_")
"""What a worker sees of our environment. Keys and tokens are not among it: what a callable needs is in its kwargs."""
End = Literal["answered", "gone", "late"]


class CannotLoad(Refused):
    """The user's callable cannot be loaded; the text says why, and the fix."""


class Death(msgspec.Struct, frozen=True):
    """How a worker ended, as its guardian saw it. No code: the guardian itself was killed."""

    code: int | None = None  # exit code, or minus the signal
    memory_mb: float | None = None  # in use when that was too much
    tail: str = ""

    @property
    def output(self) -> str:
        return f"; last output: {self.tail[-1000:].strip()}" if self.tail.strip() else ""

    def failure(self, spec: CallableSpec, memory_limit_mb: float) -> Failure:
        """The outcome of the call during which it happened."""
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


Hear = Callable[[bytes], bool]
"""Gets an answer; False: that was the last one."""


class Channel(asyncio.Protocol):
    """Messages to a worker and its answers, in order. A protocol and not a stream: a step makes thousands of calls."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._expected = 0
        self._hear: Hear | None = None
        self._told: asyncio.Future[End] | None = None  # how the latest question ended
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = self._timeout_s = 0.0

    def ask(self, frames: Sequence[bytes], hear: Hear, timeout_s: float) -> asyncio.Future[End]:
        """The future ends as "answered"; as "gone" if the other side is, or sends what no worker does; as "late" if one
        answer takes more than `timeout_s`, or if `end` says so."""
        self._told = self._loop.create_future()
        self._hear, self._expected = hear, len(frames)
        self._received.clear()
        self._since_s, self._timeout_s = self._loop.time(), timeout_s
        if self.transport is None or self.transport.is_closing():
            self.end("gone")
        else:
            self.transport.write(b"".join(frames))
            self._timer = self._loop.call_later(timeout_s, self._look)
        return self._told

    @property
    def waited_s(self) -> float:
        """Since the latest answer, or the question."""
        return self._loop.time() - self._since_s

    def _look(self) -> None:
        left_s = self._timeout_s - self.waited_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self.end("late")

    def end(self, how: End) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._told is not None and not self._told.done():
            self._told.set_result(how)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        if self._told is None or self._told.done():
            return  # nobody asked: user code that found the channel
        assert self._hear is not None
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
            self._expected = self._expected - 1 if self._hear(body) else 0
            if not self._expected:
                self.end("answered")
        if self._told.done():
            self._received.clear()
        else:
            del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("gone")


class Worker(Generic[T]):
    """One worker process with its guardian. Build with `start_worker`."""

    def __init__(
        self, spec: CallableSpec, memory_limit_mb: float, popen: Popen[bytes], channel: Channel, control: socket.socket
    ) -> None:
        self.calls = 0
        self.grown_mb = 0.0  # address space gained since it was ready
        self.took_s = 0.0  # for its latest call, by its own clock
        self.ready_s = 0.0  # from start to ready
        self.pid = 0
        self.healthy = True  # False once it must not be called again
        self._spec, self._memory_limit_mb = spec, memory_limit_mb
        self._popen, self._channel, self._control = popen, channel, control
        answers: Any = messages.Returned[spec.returns] | Failed  # type: ignore[name-defined]
        self._decoder = msgspec.msgpack.Decoder(answers)
        self._death = asyncio.create_task(self._watch())
        self._death.add_done_callback(lambda _: channel.end("gone"))

    @property
    def alive(self) -> bool:
        return not self._death.done()

    @property
    def leaks(self) -> bool:
        """Half the limit gained between calls: it ends before that costs an innocent call. The process knows it too."""
        return self.grown_mb >= self._memory_limit_mb / 2

    async def load(self, frame: bytes, timeout_s: float) -> None:
        """Have it load the callable. Raises CannotLoad."""
        began_s = time.monotonic()
        heard: list[bytes] = []

        def hear(body: bytes) -> bool:
            heard.append(body)
            return False

        end = await self._channel.ask([frame], hear, timeout_s)
        if end == "late" and self.alive:
            said = f"did not load within {timeout_s:g} s. Fix: keep slow work out of its top level"
            raise CannotLoad(f"{self._spec}: {said}")
        if end != "answered":
            said = (await self._died()).failure(self._spec, 0).detail
            raise CannotLoad(f"{self._spec}: {said}, while loading. Fix: import it by itself to see why")
        try:
            answer = msgspec.msgpack.decode(heard[0], type=messages.Loaded)
        except msgspec.DecodeError:
            raise CannotLoad(f"{self._spec}: its process spoke out of turn") from None
        if answer.error:
            raise CannotLoad(f"{self._spec}: {answer.error}")
        self.pid, self.ready_s = answer.pid, time.monotonic() - began_s

    async def call(self, arguments: Sequence[bytes], timeout_s: float, deliver: Callable[[T | Failure], None]) -> None:
        """Calls of the user's callable with pickled arguments, sent together and run one after the other. `deliver`
        gets the outcome of each as it ends, in order. One that takes more than `timeout_s` of wall clock is killed with
        everything it started. A call that ends the worker, or after which it is not fit, is the last to be delivered:
        those behind it were not begun."""
        first = self.calls = self.calls + 1
        self.healthy = False  # until all have answered; stays so if the caller is cancelled

        def hear(body: bytes) -> bool:
            outcome = self._outcome(body)
            fit = not (isinstance(outcome, Failure) and outcome.reason in UNFIT)
            more = fit and not self.leaks and self.calls < first + len(arguments) - 1
            self.healthy = fit and not more
            deliver(outcome)
            self.calls += more  # the next one is begun
            return more

        calls = [framed(messages.Call(first + i, packed)) for i, packed in enumerate(arguments)]
        end = await self._channel.ask(calls, hear, timeout_s)
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
        """End the call that runs now as one that is too late."""
        self._channel.end("late")

    def _outcome(self, body: bytes) -> T | Failure:
        """User code shares the process that wrote this: believe only what has the right shape."""
        try:
            answer = self._decoder.decode(body)
        except msgspec.DecodeError:
            answer = None
        if answer is None or answer.number != self.calls:
            return Failure("crash", f"the {self._spec.called}'s process spoke out of turn")
        self.grown_mb, self.took_s = answer.grown_mb, answer.took_s
        return answer.failure if isinstance(answer, Failed) else answer.value

    async def stop(self) -> None:
        """Ask an idle worker to end (atexit handlers run), then kill whatever is left; kill a busy one."""
        if self.healthy:
            self.healthy = False
            self._channel.close()
            await asyncio.wait({self._death}, timeout=GRACE_S)
        await self.kill()

    async def kill(self) -> Death:
        """End the worker and everything it started; returns once they are gone."""
        self.healthy = False
        self._channel.close()
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)  # the guardian reads end of file and can still answer
        await asyncio.wait({self._death}, timeout=KILL_WAIT_S)
        if self.alive:
            self._force()
            await asyncio.wait({self._death}, timeout=KILL_WAIT_S)
        # Not done only for a process in an uninterruptible system call, which nothing can end.
        return Death(tail=f"process {self.pid} does not die") if self.alive else self._death.result()

    async def _died(self) -> Death:
        """The channel broke: its death is on the way, or made to come."""
        await asyncio.wait({self._death}, timeout=REPORT_WAIT_S)
        return await self.kill()

    async def _watch(self) -> Death:
        """Lives as long as the guardian does; its control socket closes only with it."""
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
            self._kill_group()  # the guardian was shot: it could not clean up
        try:
            return msgspec.json.decode(record, type=Death)
        except msgspec.DecodeError:  # no record, or what the interpreter said when it could not start
            return Death(tail=record.decode(errors="replace"))

    def _force(self) -> None:
        """For a guardian that does not answer (stopped by user code, say)."""
        for pid in guardian.descendants(self._popen.pid):
            guardian.shoot(os.kill, pid)
        self._popen.kill()
        self._kill_group()

    def _kill_group(self) -> None:
        if self.pid:
            guardian.shoot(os.killpg, self.pid)


async def start_worker(spec: CallableSpec, memory_limit_mb: float, start_timeout_s: float) -> Worker[Any]:
    """Start a fresh interpreter and load the callable in it. Raises CannotLoad; leaves nothing behind then."""
    try:
        packed = pickle.dumps(replace(spec, kwargs=dict(spec.kwargs), returns=Any))  # the type may not pickle
    except Exception as error:  # __reduce__ of what the user put into kwargs
        said = f"{spec.section}.kwargs cannot be sent to a worker: {error}. Fix: plain values"
        raise CannotLoad(f"{spec}: {said}") from None
    ours, theirs = socket.socketpair()
    control, control_theirs = socket.socketpair()
    control.setblocking(False)
    channel = Channel()
    with theirs, control_theirs:
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
            popen = _launch(theirs.fileno(), control_theirs.fileno(), memory_limit_mb)
        except BaseException:  # cancelled, or no more processes
            control.close()
            # What the event loop knows is closed through it: else the next socket of that number is deaf.
            (channel.transport or ours).close()
            raise
    worker: Worker[Any] = Worker(spec, memory_limit_mb, popen, channel, control)
    try:
        await worker.load(LENGTH.pack(len(packed)) + packed, start_timeout_s)
    except BaseException:  # cancelled, too
        await worker.kill()
        raise
    return worker


def _launch(channel_fd: int, control_fd: int, memory_limit_mb: float) -> Popen[bytes]:
    paths = [os.path.abspath(p) for p in sys.path]
    about = {"channel_fd": channel_fd, "parent_pid": os.getpid(), "memory_limit_mb": memory_limit_mb, "sys_path": paths}
    # One thread and one arena each: workers are many, and what threads reserve counts as address space.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    env = {name: value for name, value in os.environ.items() if name in ENVIRONMENT or name.startswith(PREFIXES)}
    env |= {name: os.environ.get(name, "1") for name in names}
    command = [sys.executable, "-P", guardian.__file__, json.dumps(about)]
    ends: dict[str, Any] = {"stdin": control_fd, "stdout": control_fd, "stderr": control_fd}
    return Popen(command, pass_fds=(channel_fd,), start_new_session=True, env=env, **ends)
