"""A process that runs user code for the whole run, with messages in both directions.

    this process == socket == companion (user code, under a guard) -- fork --> any other process

Messages to the companion are pickles. Its own messages are bytes that the reader decodes by a type, since user code
shares that process. Its event loop sends an empty frame (a beat) every BEAT_S. A companion that sends nothing for too
long, or uses too much memory, is ended with all that it started.
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
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import uvloop

from verl.processes.child import Child
from verl.processes.memory import anonymous_mb
from verl.sandbox.messages import LENGTH

BEAT_S, LOOK_S = 0.5, 0.25
LEAST_SILENT_S = 5.0  # the shortest limit of silence: a healthy companion is silent between two beats
REPORT_S = 1.0  # for its exit code, once its end of the channel is closed
CLOSE_S = 10.0  # for it to end by itself, and for it to end once it is killed
MAX_FRAME_BYTES, MAX_UNSENT_BYTES = 256 << 20, 1 << 30
BEGIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.sandbox.companion import main; main()"


class FrameChannel(asyncio.Protocol):
    """One end of the channel. It sends and receives frames of bytes, each preceded by its length; an empty frame is a
    beat.

    received: number of frames that arrived, including beats
    fault: why the channel was closed: the other side sent too much, or did not read its messages
    """

    def __init__(self) -> None:
        self.received = 0
        self.fault = ""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._over = False

    @staticmethod
    async def over(ends: socket.socket) -> FrameChannel:
        """Return a channel over a connected socket."""
        _, channel = await asyncio.get_running_loop().create_unix_connection(FrameChannel, sock=ends)
        return channel

    def send(self, body: bytes) -> None:
        """Send a frame. Raises ValueError if it is too long."""
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(body) >> 20} MB at once; at most {MAX_FRAME_BYTES >> 20} leave or enter a process")
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(LENGTH.pack(len(body)) + body)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._cut("it does not read what it is told")

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the frames, without beats, until the other end is closed."""
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
        self.fault = self.fault or why
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                return self._cut(f"it said {size >> 20} MB at once")
            end = start + LENGTH.size + size
            if len(self._buffer) < end:
                break
            self.received += 1
            if size:
                self._frames.append(bytes(memoryview(self._buffer)[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        self._more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._more.set()


Target = Callable[[Any, FrameChannel], Awaitable[None]]
"""The function that a companion runs: it takes the given object and a channel of pickled frames."""


class Companion:
    """The owner of a companion process, built by `start`. Its `frames` must be read until it has ended; `ended` is then
    the reason. It belongs to one event loop."""

    def __init__(self, child: Child, channel: FrameChannel) -> None:
        self.ended = ""
        self._child, self._channel = child, channel
        self._watch: asyncio.Task[None] | None = None

    @staticmethod
    async def start(target: Target, given: object) -> Companion:
        """Start a companion that runs target(given, channel). Both are pickled, the target by its name."""
        order = pickle.dumps((target, given))
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = _start(theirs)
            except BaseException:
                ours.close()
                raise
        channel = await FrameChannel.over(ours)
        channel.send(order)
        return Companion(child, channel)

    def send(self, message: object) -> None:
        """Pickle a message and send it. Raises ValueError if it is too long."""
        self._channel.send(pickle.dumps(message))

    def watch(self, silent_s: float, pid: int, memory_mb: float) -> None:
        """From now on, end the companion if its event loop is blocked for `silent_s` seconds, or if its own memory
        grows by `memory_mb` MB. pid: its process, as its first message reports it."""
        self._watch = asyncio.create_task(self._look(max(silent_s, LEAST_SILENT_S), pid, memory_mb))

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the messages of the companion until it has ended. Messages after `kill` are dropped."""
        async for body in self._channel.frames():
            if not self.ended:
                yield body
        self.ended = self.ended or self._channel.fault
        await asyncio.to_thread(self._reap)
        self.ended = self.ended or f"it ended with exit code or signal {abs(self._child.exit_code or 0)}"
        if self._watch is not None:
            self._watch.cancel()

    async def _look(self, silent_s: float, pid: int, memory_mb: float) -> None:
        """Check beats and memory repeatedly. Silence is counted in checks, not seconds: if this process itself is
        stopped, that does not count."""
        received, silent, base_mb = -1, 0, anonymous_mb(pid)
        while True:
            await asyncio.sleep(LOOK_S)
            received, silent = self._channel.received, silent + 1 if received == self._channel.received else 0
            if silent * LOOK_S >= silent_s:
                why = f"its event loop did not turn for {silent_s:g} s: what runs there must await, or give the "
                return await self.kill(f"{why}interpreter up")
            if (more_mb := anonymous_mb(pid) - base_mb) > memory_mb:
                return await self.kill(f"memory: it took {more_mb:.0f} MB, and {memory_mb:.0f} are for it")

    def _reap(self) -> None:
        """Wait for its end after it closed the channel, and kill it if it does not end."""
        self._child.wait(REPORT_S)
        self._child.stop(CLOSE_S)

    async def kill(self, why: str) -> None:
        """End the companion and all that it started, and wait for that."""
        self.ended = self.ended or why
        await asyncio.to_thread(self._child.stop, CLOSE_S)

    async def stop(self, farewell: object, within_s: float) -> None:
        """Send it a last message, and kill it if it does not end within this time."""
        if self._watch is not None:
            self._watch.cancel()
        self.send(farewell)
        await asyncio.to_thread(self._child.wait, within_s)
        await self.kill("it was closed")
        self._channel.close()


def _start(ends: socket.socket) -> Child:
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    return Child([sys.executable, "-c", BEGIN, paths], stdin=ends.fileno(), stdout=ends.fileno())


# -- in the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the target of the first message. Text that user code prints is written to standard error."""
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends this process and not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    (size,) = LENGTH.unpack(channel.recv(LENGTH.size, socket.MSG_WAITALL))
    target, given = pickle.loads(channel.recv(size, socket.MSG_WAITALL))
    uvloop.run(_serve(channel, target, given))


async def _serve(ends: socket.socket, target: Target, given: Any) -> None:
    channel = await FrameChannel.over(ends)
    beating = asyncio.create_task(_beat(channel))
    try:
        await target(given, channel)
    finally:
        beating.cancel()


async def _beat(channel: FrameChannel) -> None:
    while True:
        channel.send(b"")
        await asyncio.sleep(BEAT_S)
