"""The trainer's side of one grader process: start it, call it, kill it. It is used by one caller at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import psutil

from verl.reward.worker import HEADER, PLAIN, PLAIN_TAG
from verl.types import Invalid, Score

KILL_WAIT_S = 8.0  # for the guardian to kill, reap and report; it gives up after guardian.KILL_S
GRACE_S = 1.0  # for an idle worker to end by itself
REPORT_WAIT_S = 0.5  # for a death to be reported after the channel broke
MAX_ANSWER_BYTES = 4 << 20
UNFIT = ("crash", "memory")  # a worker that says so is not called again: a heap that hit the limit is not reused
REASONS = ("exception", "memory", "timeout", "bad_result")  # that a worker gives for a call without a score
End = Literal["answered", "gone", "late"]
Deliver = Callable[[Score | Invalid, float], None]
"""What becomes of a call: its outcome, and its wall-clock seconds as far as the trainer saw them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The user's reward function: a `.py` file or an importable module, and a name in it.

    `kwargs` are passed to every call; or, with `factory`, once, to the named function, which returns the grader.
    `with_ids`: the grader also takes `prompt_ids` and `response_ids`.
    """

    path: str = "verl.reward.compute"
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    factory: bool = False
    with_ids: bool = False

    def __str__(self) -> str:
        return f"reward.path={self.path} reward.name={self.name}"


class TargetError(ValueError):
    """The user's reward function cannot be loaded; the text says why, and the fix."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended, as its guardian saw it. All None: the guardian itself was killed."""

    exit: int | None = None
    signal: int | None = None
    memory_mb: float | None = None
    tail: str = ""

    @property
    def output(self) -> str:
        return f"; last output: {self.tail[-1000:].strip()}" if self.tail.strip() else ""

    def invalid(self, memory_limit_mb: float) -> Invalid:
        """The outcome of the call during which it happened."""
        output = self.output
        if self.memory_mb is not None:
            return Invalid(
                "memory", f"used {self.memory_mb:.0f} MB, reward.memory_limit_mb={memory_limit_mb:g}{output}"
            )
        if self.signal == signal.SIGABRT and "bad_alloc" in self.tail:
            return Invalid("memory", f"C++ allocation failed, reward.memory_limit_mb={memory_limit_mb:g}{output}")
        if self.signal is not None:
            hint = " (by the kernel, if the machine is out of memory)" if self.signal == signal.SIGKILL else ""
            return Invalid("crash", f"the grader was killed by {signal.Signals(self.signal).name}{hint}{output}")
        how = f"exited with code {self.exit}" if self.exit is not None else "and its guardian were killed"
        return Invalid("crash", f"the grader {how}{output}")


class Worker:
    """One grader process with its guardian. Build with `start_worker`."""

    def __init__(
        self, popen: subprocess.Popen[bytes], channel: Channel, control: Stream, memory_limit_mb: float
    ) -> None:
        self.calls = 0
        self.grown_mb = 0.0  # address space gained since it was ready
        self.took_s = 0.0  # for its latest call, by its own clock
        self.ready_s = 0.0  # from start to ready
        self.pid = 0
        self.healthy = True  # False once it must not be called again
        self._popen, self._channel, self._control = popen, channel, control
        self._memory_limit_mb = memory_limit_mb
        self._told: asyncio.Future[End] | None = None  # how the latest question ended
        self._death = asyncio.create_task(self._watch())
        self._death.add_done_callback(lambda _: channel.end())

    @property
    def alive(self) -> bool:
        return not self._death.done()

    @property
    def leaks(self) -> bool:
        """Half the limit gained between calls: it ends before that costs an innocent sample. The process knows it too."""
        return self.grown_mb >= self._memory_limit_mb / 2

    async def load(self, target: Target, timeout_s: float) -> None:
        """Have it load the target. Raises TargetError."""
        started = time.monotonic()
        heard: list[bytes] = []

        def hear(body: bytes) -> bool:
            heard.append(body)
            return True

        self._told = self._channel.ask([_load_frame(target, self._memory_limit_mb)], hear)
        timer = asyncio.get_running_loop().call_later(timeout_s, self.give_up)
        try:
            end = await self._told
        finally:
            timer.cancel()
        if end == "late" and not self._death.done():
            raise TargetError(
                f"{target}: did not load within {timeout_s:g} s. Fix: keep slow work out of its top level"
            )
        answer = _answer(heard[0]) if heard else None
        if answer is None:
            raise TargetError(
                f"{target}: {(await self._died()).invalid(0).detail}, while loading. Fix: import it by itself to see why"
            )
        if "pid" not in answer:
            raise TargetError(f"{target}: {answer.get('error', 'its process spoke out of turn')}")
        self.pid = answer["pid"]
        self.ready_s = time.monotonic() - started

    async def call(self, frames: Sequence[bytes], timeout_s: float, deliver: Deliver) -> None:
        """Calls of the user's function (`frame_of`), sent together and run one after the other.

        `deliver` as each of them ends, in order. One that takes more than `timeout_s` of wall clock is
        killed with everything it started. A call that ends the worker, or after which it is not fit to be called, is the
        last to be delivered: those behind it were not begun.
        """
        loop = asyncio.get_running_loop()
        first, since_s = self.calls + 1, loop.time()
        self.calls = first
        self.healthy = False  # until all have answered; stays so if the caller is cancelled
        nonsense = False

        def hear(body: bytes) -> bool:
            nonlocal since_s, nonsense
            answer = _answer(body)
            if answer is None:
                nonsense = True
                return False
            now_s = loop.time()
            wall_s, since_s = now_s - since_s, now_s
            outcome = self._outcome(answer)
            fit = not (isinstance(outcome, Invalid) and outcome.reason in UNFIT)
            more = fit and not self.leaks and self.calls < first + len(frames) - 1
            self.healthy = fit and not more
            deliver(outcome, wall_s)
            self.calls += more  # the next one is begun
            return more

        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            left_s = since_s + timeout_s - loop.time()
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                self.give_up()

        self._told = self._channel.ask([HEADER.pack(first + i) + frame for i, frame in enumerate(frames)], hear)
        look()
        try:
            end = await self._told
        finally:
            if timer is not None:
                timer.cancel()
        if end == "answered" and not nonsense:
            return
        death = await (self.kill() if end == "late" else self._died())
        if end == "late" and death.memory_mb is None:
            outcome: Invalid = Invalid("timeout", f"no result within reward.timeout_s={timeout_s:g}{death.output}")
        else:
            outcome = death.invalid(self._memory_limit_mb)
        self.took_s = loop.time() - since_s
        deliver(outcome, self.took_s)

    def give_up(self) -> None:
        """End the call that runs now as one that is too late."""
        if self._told is not None:
            _settle(self._told, "late")

    def _outcome(self, answer: Mapping[str, Any]) -> Score | Invalid:
        if answer.get("id") != self.calls or not _finite(answer.get("grown_mb")) or not _finite(answer.get("took_s")):
            return Invalid("crash", "the grader's process spoke out of turn")
        self.grown_mb, self.took_s = answer["grown_mb"], answer["took_s"]
        if "value" in answer:
            return Score(answer["value"], answer["components"])
        if "reason" in answer:
            return Invalid(answer["reason"], answer["detail"])
        return Invalid("crash", "the grader's process spoke out of turn")

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
        self._control.order()
        await asyncio.wait({self._death}, timeout=KILL_WAIT_S)
        if not self._death.done():
            self._force()
            await asyncio.wait({self._death}, timeout=KILL_WAIT_S)
        # Not done only for a process in an uninterruptible system call, which nothing can end.
        return self._death.result() if self._death.done() else Death(tail=f"process {self.pid} does not die")

    async def _died(self) -> Death:
        """The channel broke: its death is on the way, or made to come."""
        await asyncio.wait({self._death}, timeout=REPORT_WAIT_S)
        return await self.kill()

    async def _watch(self) -> Death:
        """Lives as long as the guardian does; its control socket closes only with it."""
        record = await self._control.read_all()
        for _ in range(int(KILL_WAIT_S / 0.002)):
            if self._popen.poll() is not None:
                break
            await asyncio.sleep(0.002)
        if self._popen.returncode is None:
            self._force()
        elif self._popen.returncode < 0 and self.pid:
            self._kill_group()  # the guardian was shot: it could not clean up
        self._control.close()
        try:
            return Death(**json.loads(record))
        except (ValueError, TypeError):  # no record, or what the interpreter said when it could not start
            return Death(tail=record.decode(errors="replace"))

    def _force(self) -> None:
        """For a guardian that does not answer (stopped by user code, say)."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._popen.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self._popen.kill()
        self._kill_group()

    def _kill_group(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Channel(asyncio.Protocol):
    """Frames to a worker and its answers, in order. A protocol and not a stream: there are thousands of calls in a step."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._expected = 0
        self._hear: Callable[[bytes], bool] | None = None
        self._told: asyncio.Future[End] | None = None

    def ask(self, frames: Sequence[bytes], hear: Callable[[bytes], bool]) -> asyncio.Future[End]:
        """`hear` gets the body of each answer as it comes, and may say False: that was the last one.

        The future ends as "answered", or as "gone" if the other side is, or gives an answer that no worker of ours does.
        """
        self._told = asyncio.get_running_loop().create_future()
        self._hear, self._expected = hear, len(frames)
        self._received.clear()
        if self._transport is None or self._transport.is_closing():
            self.end()
        else:
            self._transport.write(b"".join(part for frame in frames for part in (HEADER.pack(len(frame)), frame)))
        return self._told

    def end(self) -> None:
        if self._told is not None:
            _settle(self._told, "gone")

    @property
    def open(self) -> bool:
        return self._transport is not None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        if self._told is None or self._told.done():
            return  # nobody asked: user code that found the channel
        assert self._hear is not None
        self._received += data
        start = 0
        while self._expected and len(self._received) >= start + HEADER.size:
            (size,) = HEADER.unpack_from(self._received, start)
            if size > MAX_ANSWER_BYTES:
                self.end()
                self.close()
                break
            body = bytes(self._received[start + HEADER.size : start + HEADER.size + size])
            if len(body) < size:
                break
            start += HEADER.size + size
            self._expected -= 1
            if not self._hear(body):
                self._expected = 0
            if not self._expected:
                _settle(self._told, "answered")
        if self._told.done():
            self._received.clear()
        else:
            del self._received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()


def _settle(told: asyncio.Future[End], end: End) -> None:
    if not told.done():
        told.set_result(end)


class Stream:
    """A socket pair end on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read_all(self) -> bytes:
        try:
            return await self._reader.read(-1)
        except OSError:
            return b""

    def order(self) -> None:
        """Half-close: the other side reads end of file and can still answer."""
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


def _finite(number: object) -> bool:
    return isinstance(number, float) and math.isfinite(number)


def _answer(body: bytes) -> dict[str, Any] | None:
    """User code shares the process that wrote this: believe only what has the right shape."""
    if len(body) == PLAIN.size and body.startswith(PLAIN_TAG):
        _, number, value, grown_mb, took_s = PLAIN.unpack(body)
        if not math.isfinite(value + grown_mb + took_s):
            return None
        return {"id": number, "value": value, "components": {}, "grown_mb": grown_mb, "took_s": took_s}
    try:
        answer = json.loads(body.decode())  # of bytes, json would look for their encoding first
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    if "value" in answer:
        components = answer.get("components")
        if not isinstance(components, dict):
            return None
        numbers = [answer["value"], answer.get("grown_mb"), *components.values()]
        return answer if all(map(_finite, numbers)) else None
    if "reason" in answer:
        shaped = answer["reason"] in REASONS and isinstance(answer.get("detail"), str)
    else:
        shaped = isinstance(answer.get("error"), str) or isinstance(answer.get("pid"), int)
    return answer if shaped else None


async def start_worker(target: Target, *, memory_limit_mb: float, start_timeout_s: float) -> Worker:
    """Start a fresh interpreter and load the target in it. Raises TargetError; leaves nothing behind then."""
    channel, channel_far = socket.socketpair()
    control, control_far = socket.socketpair()
    with channel_far, control_far:
        popen = _launch(channel_far.fileno(), control_far.fileno(), memory_limit_mb)
    requests = Channel()
    stream: Stream | None = None
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: requests, sock=channel)
        stream = await _stream(control)
        worker = Worker(popen, requests, stream, memory_limit_mb)
    except BaseException:  # cancelled: nobody watches it yet; its guardian ends with it
        popen.kill()
        popen.wait()
        for sock, end in ((channel, requests if requests.open else None), (control, stream)):
            (
                end or sock
            ).close()  # what the event loop knows is closed through it: else the next socket of that number is deaf
        raise
    try:
        await worker.load(target, start_timeout_s)
    except BaseException:  # cancelled, too
        await worker.kill()
        raise
    return worker


def _launch(channel_fd: int, control_fd: int, memory_limit_mb: float) -> subprocess.Popen[bytes]:
    spec = {"channel_fd": channel_fd, "parent_pid": os.getpid(), "memory_limit_mb": memory_limit_mb}
    # One thread and one arena each: graders are many, and what threads reserve counts as address space.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    threads = {name: os.environ.get(name, "1") for name in names}
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("guardian.py")), json.dumps(spec)],
        stdin=control_fd,
        stdout=control_fd,
        stderr=control_fd,
        pass_fds=(channel_fd,),
        start_new_session=True,
        env={**os.environ, **threads},
    )


def frame_of(arguments: Mapping[str, Any]) -> bytes | Invalid:
    """One call as it is sent, or why it cannot be."""
    try:
        return pickle.dumps(arguments)
    except Exception as error:  # __reduce__ of objects in the user's rows
        return Invalid("exception", f"the row cannot be sent to the grader: {type(error).__name__}: {error}")


def _load_frame(target: Target, memory_limit_mb: float) -> bytes:
    init = {
        "path": target.path,
        "name": target.name,
        "kwargs": dict(target.kwargs),
        "factory": target.factory,
        "with_ids": target.with_ids,
        "memory_limit_mb": memory_limit_mb,
        "sys_path": [os.path.abspath(p) for p in sys.path],
    }
    try:
        return pickle.dumps(init)
    except Exception as error:  # __reduce__ of what the user put into kwargs
        raise TargetError(f"{target}: reward.kwargs cannot be sent to a worker: {error}. Fix: plain values") from None


async def _stream(end: socket.socket) -> Stream:
    return Stream(*await asyncio.open_unix_connection(sock=end))
