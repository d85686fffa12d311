"""The process of one rank, started by a driver on the same machine: it reads requests, and answers them. `main` is
called in an interpreter that may have other versions than the driver's."""

from __future__ import annotations

import json
import os
import pickle
import queue
import socket
import sys
import threading
from typing import Any

from verl.workers.answers import RankAnswer, failed_answer
from verl.workers.children.channel import Channel, loads
from verl.workers.rank_host import RankHost

AT_ONCE = ("alive", "call_at_once")
"""The requests that are answered during a call; others wait for it."""
Waiting = queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]]


class ChildHost(RankHost):
    """The rank of this process."""

    def alive(self) -> int:
        """Return the pid of this process."""
        return os.getpid()


def main() -> None:
    """Serve requests until the driver closes the channel. The last argument has its descriptor and the folders of
    modules that the driver imports."""
    fd, folders = json.loads(sys.argv[-1])
    sys.path += [folder for folder in folders if folder not in sys.path]
    channel, host = Channel(socket.socket(fileno=fd)), ChildHost(loads)
    calls, beside = Waiting(), Waiting()
    threading.Thread(target=_read, args=(channel, calls, beside), daemon=True).start()
    threading.Thread(target=_serve, args=(channel, host, beside), daemon=True).start()
    _serve(channel, host, calls)


def _read(channel: Channel, calls: Waiting, beside: Waiting) -> None:
    while True:
        try:
            number, body = channel.receive()
        except EOFError:
            os._exit(0)  # nothing is wanted any more, whatever the other threads do
        name, args = loads(body)
        (beside if name in AT_ONCE else calls).put((number, name, args))
        del body, args


def _serve(channel: Channel, host: ChildHost, waiting: Waiting) -> None:
    while True:
        number, name, args = waiting.get()
        try:
            answer = getattr(host, name)(*args)
        except BaseException as e:
            answer = failed_answer(e)
        answer = answer if isinstance(answer, RankAnswer) else RankAnswer(answer)
        channel.send(number, _pickled(answer))
        del args, answer  # they belong to the caller now


def _pickled(answer: RankAnswer) -> bytes:
    try:
        return pickle.dumps(answer, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        return pickle.dumps(failed_answer(e), protocol=5)
