"""A process beside this one that runs user code as long as a run lasts: messages both ways, and an end that is sure.

    this process == socket == attended.py -- fork --> companion (user code) --> whatever it starts

Messages to it are pickles. What it says are bytes, which whoever listens decodes against a type: user code shares that
process. An event loop of its own beats every BEAT_S; one that is silent for too long, or takes too much memory, is
ended, with all it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import uvloop

from verl.sandbox import attended, guardian
from verl.sandbox.messages import LENGTH

BEAT_S, LOOK_S = 0.5, 0.25
LEAST_SILENT_S = 5.0  # nobody is ended for less: a healthy one is silent between two beats
REPORT_S = 1.0  # for its exit code, once its end of the channel is closed
CLOSE_S = 10.0  # for one that was asked to end, and for one that was told to
MAX_FRAME_BYTES, MAX_UNSENT_BYTES = 256 << 20, 1 << 30
BEGIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.sandbox.companion import main; main()"


class Channel(asyncio.Protocol):
    """Either end: frames of bytes, each behind its length; an empty one is a beat. One that says too much, or does not
    read what it is told, is cut off: wrong says why."""

    def __init__(self) -> None:
        self.heard = 0  # frames, beats among them
        self.wrong = ""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._frames: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._over = False

    @staticmethod
    async def over(ends: socket.socket) -> Channel:
        _, channel = await asyncio.get_running_loop().create_unix_connection(Channel, sock=ends)
        return channel

    def send(self, body: bytes) -> None:
        """ValueError for what is too long."""
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(body) >> 20} MB at once; at most {MAX_FRAME_BYTES >> 20} leave or enter a process")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(LENGTH.pack(len(body)) + body)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._cut("it does not read what it is told")

    async def frames(self) -> AsyncIterator[bytes]:
        """Until the other end is closed."""
        while self._frames or not self._over:
            while self._frames:
                yield self._frames.popleft()
            if not self._over:
                self._more.clear()
                await self._more.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _cut(self, why: str) -> None:
        assert self._transport is not None
        self.wrong = self.wrong or why
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) >= start + LENGTH.size:
            (size,) = LENGTH.unpack_from(self._received, start)
            if size > MAX_FRAME_BYTES:
                return self._cut(f"it said {size >> 20} MB at once")
            end = start + LENGTH.size + size
            if len(self._received) < end:
                break
            self.heard += 1
            if size:
                self._frames.append(bytes(memoryview(self._received)[start + LENGTH.size : end]))
            start = end
        del self._received[:start]
        self._more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._more.set()


Target = Callable[[Any, Channel], Awaitable[None]]
"""What a companion does, until it returns: with what it was given, and a channel whose frames are pickles."""


class Companion:
    """Build with `start`. Its `frames` have to be read to their end, which is its own; `ended` says why then. It
    belongs to one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.ended = ""
        self._process, self._channel = process, channel
        self._watch: asyncio.Task[None] | None = None

    @staticmethod
    async def start(target: Target, given: object) -> Companion:
        """Both are pickled: target by its name."""
        order = pickle.dumps((target, given))
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _launched(theirs)
            except BaseException:
                ours.close()
                raise
        channel = await Channel.over(ours)
        channel.send(order)
        return Companion(process, channel)

    def send(self, message: object) -> None:
        """ValueError for what is too long."""
        self._channel.send(pickle.dumps(message))

    def watch(self, silent_s: float, pid: int, memory_mb: float) -> None:
        """From now on it is ended if its event loop does not turn for so long, or if it takes so much more memory of
        its own than now. pid: its own, which it says."""
        self._watch = asyncio.create_task(self._look(max(silent_s, LEAST_SILENT_S), pid, memory_mb))

    async def frames(self) -> AsyncIterator[bytes]:
        """Those before it was ended."""
        async for body in self._channel.frames():
            if not self.ended:
                yield body
        self.ended = self.ended or self._channel.wrong
        await asyncio.to_thread(self._reap)
        self.ended = self.ended or f"it ended with exit code or signal {self._process.returncode}"
        if self._watch is not None:
            self._watch.cancel()

    async def _look(self, silent_s: float, pid: int, memory_mb: float) -> None:
        """Looks are counted, not seconds: while this process is kept from looking, nobody else is late."""
        heard, silent, base_mb = -1, 0, guardian.anonymous_mb(pid)
        while True:
            await asyncio.sleep(LOOK_S)
            heard, silent = self._channel.heard, silent + 1 if heard == self._channel.heard else 0
            if silent * LOOK_S >= silent_s:
                why = f"its event loop did not turn for {silent_s:g} s: what runs there must await, or give the "
                return await self.kill(f"{why}interpreter up")
            if (more_mb := guardian.anonymous_mb(pid) - base_mb) > memory_mb:
                return await self.kill(f"memory: it took {more_mb:.0f} MB, and {memory_mb:.0f} are for it")

    def _reap(self) -> None:
        """Its end is closed: it is ending, or made to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REPORT_S)
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)

    async def kill(self, why: str) -> None:
        """End it and all it started; returns once they are gone."""
        self.ended = self.ended or why
        await asyncio.to_thread(self._end)

    async def stop(self, farewell: object, within_s: float) -> None:
        """The same, after it had so long to end by itself."""
        if self._watch is not None:
            self._watch.cancel()
        self.send(farewell)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, within_s)
        await self.kill("it was closed")
        self._channel.close()


def _launched(ends: socket.socket) -> subprocess.Popen[bytes]:
    begin = [sys.executable, "-c", BEGIN, json.dumps([os.path.abspath(path) for path in sys.path])]
    command = [sys.executable, "-I", "-S", attended.__file__, str(os.getpid()), *begin]
    return subprocess.Popen(command, stdin=ends.fileno(), stdout=ends.fileno(), start_new_session=True)


# -- in the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """What user code prints goes to our standard error: the channel is not its."""
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # if the machine runs out of memory, the kernel takes this, not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    (size,) = LENGTH.unpack(channel.recv(LENGTH.size, socket.MSG_WAITALL))
    target, given = pickle.loads(channel.recv(size, socket.MSG_WAITALL))
    uvloop.run(_serve(channel, target, given))


async def _serve(ends: socket.socket, target: Target, given: Any) -> None:
    channel = await Channel.over(ends)
    beating = asyncio.create_task(_beat(channel))
    try:
        await target(given, channel)
    finally:
        beating.cancel()


async def _beat(channel: Channel) -> None:
    while True:
        channel.send(b"")
        await asyncio.sleep(BEAT_S)
