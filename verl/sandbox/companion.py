"""A process beside this one that runs user code as long as a run lasts: messages both ways, and an end that is sure.

    this process == socket == attended.py -- fork --> companion (user code) --> whatever it starts

Messages to it are pickles. What it says are bytes, which whoever listens decodes against a type: user code shares that
process. An event loop of its own beats every BEAT_S; one that is silent for too long is ended, with all it started.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

from verl.sandbox import attended
from verl.sandbox.messages import LENGTH

BEAT_S, LOOKS = 0.5, 20
REPORT_S = 1.0  # for its exit code, once its end of the channel is closed
CLOSE_S = 10.0  # for one that was asked to end, and for one that was told to
BEGIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.sandbox.companion import main; main()"


class Channel:
    """Either end: frames of bytes, each behind its length; an empty one is a beat."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = 0  # frames, beats among them

    def send(self, body: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(body)) + body)

    async def frames(self) -> AsyncIterator[bytes]:
        """Until the other end is closed."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                body = await self._reader.readexactly(size)
                self.heard += 1
                if body:
                    yield body

    def close(self) -> None:
        self._writer.close()


Target = Callable[[Any, Channel], Awaitable[None]]
"""What a companion does, until it returns: with what it was given, and a channel whose frames are pickles."""


class Companion:
    """Build with `start`. Its `frames` have to be read to their end, which is its own; `ended` says why then."""

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
        channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        channel.send(order)
        return Companion(process, channel)

    def send(self, message: object) -> None:
        self._channel.send(pickle.dumps(message))

    def watch(self, silent_s: float) -> None:
        """From now on it is ended if its event loop does not turn for so long."""
        self._watch = asyncio.create_task(self._look(silent_s))

    async def frames(self) -> AsyncIterator[bytes]:
        async for body in self._channel.frames():
            yield body
        await asyncio.get_running_loop().run_in_executor(None, self._reap)
        code = self._process.returncode
        self.ended = self.ended or f"it ended with exit code or signal {code}"

    async def _look(self, silent_s: float) -> None:
        """Looks are counted, not seconds: while this process is kept from looking, nobody else is late."""
        heard, silent = -1, 0
        while silent < LOOKS:
            await asyncio.sleep(silent_s / LOOKS)
            heard, silent = self._channel.heard, silent + 1 if heard == self._channel.heard else 0
        why = f"its event loop did not turn for {silent_s:g} s: what runs there must await, or give the interpreter up"
        await asyncio.get_running_loop().run_in_executor(None, self.kill, why)

    def _reap(self) -> None:
        """Its end is closed: it is ending, or made to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REPORT_S)
        self.kill("")

    def kill(self, why: str) -> None:
        """End it and all it started; returns once they are gone."""
        self.ended = self.ended or why
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)

    def stop(self, farewell: object) -> None:
        """The same, after it had CLOSE_S to end by itself."""
        if self._watch is not None:
            self._watch.cancel()
        self.send(farewell)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self.kill("it was closed")
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    (size,) = LENGTH.unpack(channel.recv(LENGTH.size, socket.MSG_WAITALL))
    target, given = pickle.loads(channel.recv(size, socket.MSG_WAITALL))
    uvloop.run(_serve(channel, target, given))


async def _serve(ends: socket.socket, target: Target, given: Any) -> None:
    channel = Channel(*await asyncio.open_unix_connection(sock=ends))
    beating = asyncio.create_task(_beat(channel))
    try:
        await target(given, channel)
    finally:
        beating.cancel()


async def _beat(channel: Channel) -> None:
    while True:
        channel.send(b"")
        await asyncio.sleep(BEAT_S)
