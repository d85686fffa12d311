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
import traceback
from collections.abc import Callable
from typing import Any

from verl.workers.answers import RankAnswer, failed_answer
from verl.workers.children.channel import Channel, loads
from verl.workers.rank_host import RankHost

Waiting = queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]]


def main() -> None:
    """Serve requests until the driver closes the channel. The last argument has its descriptor and the folders of
    modules that the driver imports."""
    fd, folders = json.loads(sys.argv[-1])
    sys.path += [folder for folder in folders if folder not in sys.path]
    channel, host = Channel(socket.socket(fileno=fd)), RankHost(loads)
    calls, beside = Waiting(), Waiting()
    threading.Thread(target=_or_exit, args=(_read, channel, calls, beside), daemon=True).start()
    threading.Thread(target=_or_exit, args=(_serve, channel, host, beside), daemon=True).start()
    _or_exit(_serve, channel, host, calls)


def _or_exit(work: Callable[..., None], *args: Any) -> None:
    """Run a thread of this process. An error in it ends the process: the driver would wait for the answer."""
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _read(channel: Channel, calls: Waiting, beside: Waiting) -> None:
    while True:
        try:
            number, body = channel.receive()
        except EOFError:
            os._exit(0)  # nothing is wanted any more, whatever the other threads do
        name, args = loads(body)
        if name == "alive":
            channel.send(number, _pickled(RankAnswer()))
        else:  # a call at once is made during a call; others wait for it
            (beside if name == "call_at_once" else calls).put((number, name, args))
        del body, args


def _serve(channel: Channel, host: RankHost, waiting: Waiting) -> None:
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
