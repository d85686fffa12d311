"""The messages between a driver and the process of a rank: pickles over a pair of sockets. The two may be of different
versions of Python, numpy and torch, but of one source of verl."""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
import threading
from typing import Any

HEAD = struct.Struct("!QQ")  # the number of a message, and the length of its body
MOVED = {"pathlib._local": "pathlib"}  # modules of Python 3.13's standard library -> their name in every Python


class Channel:
    """One end of the messages, each of which has a number and a body. Threads may send at the same time; one thread
    receives."""

    def __init__(self, ends: socket.socket) -> None:
        self._socket, self._file = ends, ends.makefile("rb")
        self._sending = threading.Lock()

    def send(self, number: int, body: bytes) -> None:
        """Send a message. Raise OSError if the other end is closed."""
        with self._sending:
            self._socket.sendall(HEAD.pack(number, len(body)))
            self._socket.sendall(body)

    def receive(self) -> tuple[int, bytes]:
        """Return the next message. Raise EOFError once the other end is closed."""
        number, size = HEAD.unpack(self._exactly(HEAD.size))
        return number, self._exactly(size)

    def close(self) -> None:
        """Close this end. A thread that receives gets an EOFError."""
        with contextlib.suppress(OSError):  # the other end is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()  # the socket stays open as long as its file
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        try:
            found = self._file.read(size)
        except OSError as e:
            raise EOFError(str(e)) from e
        if len(found) < size:
            raise EOFError("the other end is closed")
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(MOVED.get(module, module), name)


def loads(body: bytes) -> Any:
    """Return the object of a pickle that another version of Python may have made."""
    return _Unpickler(io.BytesIO(body)).load()
