"""Connections between a sender and its readers: a listener that serves only peers with the sender's key, and messages
of a known length."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

from verl.weight_sync.base import SyncError

QUIET_S = 60.0  # to connect, and for a peer to send a piece
ASK_S = 10.0  # for a peer to send its key
MOST_SILENT = 256  # peers that have not sent their key yet
PIECE_BYTES = 16 << 20
LOOK_S = 0.01  # the pause between two polls


def connected(place: str) -> socket.socket:
    """Connect to a sender at host:port. Raise SyncError if it cannot be reached."""
    host, _, port = place.rpartition(":")
    try:
        peer = socket.create_connection((host, int(port)), timeout=QUIET_S)
        _send_at_once(peer)
        return peer
    except OSError as e:
        raise unreachable(place, e) from e


def _send_at_once(peer: socket.socket) -> None:
    """Turn off Nagle's algorithm: a head that is followed by an answer of the other side would wait 40 ms."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unreachable(place: str, e: OSError) -> SyncError:
    """Return the error for a sender that cannot be reached."""
    return SyncError(
        f"the trainer's weights cannot be fetched from {place}: {e}; is that address reachable from "
        f"{socket.gethostname()}? (sync.engine_options.host)"
    )


def listening(host: str | None, key: str, ask: struct.Struct, answer: Callable[..., None]) -> str:
    """Start to listen and return the address (host:port). For every peer that sends the struct `ask` with the key, a
    new thread calls answer(peer, *the other fields). host: the address to listen on; None: that of this machine's
    default route."""
    host = host or _way_out()
    listener = _listener(host)
    _send_at_once(listener)  # which accepted connections inherit
    threading.Thread(target=_accept, args=(listener, key.encode(), ask, answer), name="weights", daemon=True).start()
    return f"{host}:{listener.getsockname()[1]}"


def has_address(host: str) -> bool:
    """Return True if this machine has that address."""
    with contextlib.suppress(OSError), _listener(host):
        return True
    return False


def _listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _accept(listener: socket.socket, key: bytes, ask: struct.Struct, answer: Callable[..., None]) -> None:
    """Accept peers and read their requests, all in this thread. A peer that sends no request within ASK_S, is the
    oldest of more than MOST_SILENT, or has another key, is closed, so that a stranger costs no thread."""
    waiting: dict[socket.socket, tuple[float, bytearray]] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as looked_at:
        looked_at.register(listener, selectors.EVENT_READ)

        def leave(peer: socket.socket) -> None:
            looked_at.unregister(peer)
            del waiting[peer]

        while True:
            found = [ready.fileobj for ready, _ in looked_at.select(ASK_S / 10)]
            for peer in [one for one in found if isinstance(one, socket.socket) and one is not listener]:
                answered = waiting[peer][1]
                try:
                    answered += (piece := peer.recv(ask.size - len(answered)))
                except BlockingIOError:
                    continue
                except OSError:
                    piece = b""
                if piece and len(answered) < ask.size:
                    continue
                leave(peer)
                if not piece or not hmac.compare_digest(bytes(answered[: len(key)]), key):
                    peer.close()
                    continue
                peer.setblocking(True)
                given = (peer, *ask.unpack(answered)[1:])
                threading.Thread(target=answer, args=given, name="weights", daemon=True).start()
            if listener in found:
                try:
                    peer, _ = listener.accept()
                except OSError:  # no file descriptor is free, or the peer closed: it is tried again
                    time.sleep(LOOK_S)
                    continue
                peer.setblocking(False)
                waiting[peer] = time.monotonic() + ASK_S, bytearray()
                looked_at.register(peer, selectors.EVENT_READ)
            late = [peer for peer, (until_s, _) in waiting.items() if until_s < time.monotonic()]
            for peer in late or [*waiting][: max(0, len(waiting) - MOST_SILENT)]:
                leave(peer)
                peer.close()


def tag_of(key: str) -> str:
    """Return the part of file names that identifies the sender with this key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]  # file names are visible to every user


def received(peer: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes of the peer. Raise ConnectionError if it closes earlier."""
    into = bytearray(size)
    filled(peer, memoryview(into))
    return bytes(into)


def has_input(peer: socket.socket) -> bool:
    """Return True if the peer has sent something or closed. `select` would fail for file numbers of 1024 or more."""
    if peer.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(peer, select.POLLIN)
    return bool(poller.poll(0))


def filled(peer: socket.socket, into: memoryview) -> None:
    """Fill the memory with the next bytes of the peer. Raise ConnectionError if it closes earlier."""
    while into:
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("the other end closed the connection")
        into = into[count:]


def _way_out() -> str:
    """Return the address of this machine on its default route; 127.0.0.1 without one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no machine has it (RFC 5737)
        except OSError:  # no route to other machines
            return "127.0.0.1"
        return str(probe.getsockname()[0])
