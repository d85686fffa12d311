"""A trainer that publishes weights and processes that fetch them as those of other hosts do: their shared memory is
another folder. Each reads lines of commands and writes lines."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from started import server

from verl.weight_sync import shm

COMMON = """
import hashlib, importlib, sys, torch
from pathlib import Path
from verl.weight_sync import base, shm, tcp
from verl.weight_sync.record import entry_of

transport, settings = sys.argv[1].split(";")
module = importlib.import_module(f"verl.weight_sync.{transport}")
for setting in settings.split():
    name, _, value = setting.partition("=")
    setattr(module, name, type(getattr(module, name))(float(value)))

def tensors(version):
    torch.manual_seed(version)
    return {"a": torch.randn(700, 999), "b": torch.randn(20_001).bfloat16(), "one": torch.tensor(2.0 + version),
            "none": torch.zeros(0, 3)}

def told(found):
    raw = [(n, str(t.dtype), tuple(t.shape), t.view(-1).view(torch.uint8).numpy().tobytes()) for n, t in found]
    return hashlib.sha256(repr(raw).encode()).hexdigest()

def say(*words):
    print(*words, flush=True)
"""
TRAINER = (
    COMMON
    + """
made = []
if transport == "collective":
    group = module.BroadcastGroup
    module.BroadcastGroup = lambda *args: (made.append(args), group(*args))[1]
outlet = {"nixl": "NixlOutlet", "collective": "CollectiveOutlet"}[transport]
outlet = vars(module)[outlet](host="127.0.0.1")
for line in sys.stdin:
    if line == "groups\\n":
        say(*(size for _, _, _, size, _ in made))
        continue
    if line == "release\\n":  # as the driver does, once all hosts have it
        module.open_weights(address).release(version)
        say(*(path.name[-1] for path in shm.SHM.glob(f"{shm.PREFIX}-*-{outlet.tag}-?")))
        continue
    version = int(line)
    now = tensors(version)
    say(address := outlet.stage(version, {n: entry_of(t) for n, t in now.items()}, now.items()), told(now.items()))
shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
"""
)
HOST = (
    COMMON
    + """
shm.SHM = tcp.SHM = Path(sys.argv[2])
at, reads = sys.argv[3], []
# it waits for a line: nowhere, before, amid or after the reading; what fails: full (no memory), breaks (off, once)
if at == "full":
    def no_room(*args):
        raise OSError(28, "No space left on device")
    shm.os.posix_fallocate = no_room
owner, name = (module, "_read") if transport == "nixl" else (module.BroadcastGroup, "broadcast")
read = getattr(owner, name)

def stop_at(place):
    if at == place:
        say("here"), sys.stdin.readline()

def watched(*args):
    reads.append(args)
    stop_at("before")
    if at == "amid":
        read(args[0], args[1][: module.PIECE_BYTES])
        stop_at("amid")
        return read(args[0], args[1][module.PIECE_BYTES :])
    if at == "breaks" and len(reads) == 1:
        read(args[0], args[1][: module.PIECE_BYTES])
        raise ConnectionError("reset by peer")
    read(*args)
    stop_at("after")

setattr(owner, name, watched)
for line in sys.stdin:
    try:
        stream = module.open_weights(line.strip())
        found = [stream.version, told(stream.tensors()), len(reads)]
    except (base.SyncError, OSError) as e:
        found = ["error", e]
    say(*found, "|", *(shm.ShmStream(path).version for path in sorted(shm.SHM.glob(f"{shm.PREFIX}-*"))))
"""
)


def play(script: str, args: list[str], line: socket.socket) -> None:
    """In a process forked from one that has made the imports: a start costs no seconds."""
    os.environ |= {"UCX_TLS": "tcp,sm,self", "NIXL_LOG_LEVEL": "WARN", "GLOO_SOCKET_IFNAME": "lo"}
    sys.argv, sys.stdin, sys.stdout = ["-c", *args], line.makefile("r"), line.makefile("w")
    exec(compile(script, "far host", "exec"), {"__name__": "__main__"})


class Told:
    """A process that reads lines, and writes lines within a deadline."""

    def __init__(self, script: str, *args: object) -> None:
        self._line, its = socket.socketpair()
        self.process = server().Process(target=play, args=(script, [*map(str, args)], its), daemon=True)
        self.process.start()
        its.close()
        self._said = self._line.makefile("r")

    def tell(self, line: object) -> None:
        self._line.sendall(f"{line}\n".encode())

    def heard(self, within_s: float = 60.0) -> str:
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            if not selector.select(within_s):
                raise TimeoutError(f"nothing said in {within_s} s")
        return self._said.readline().strip()

    def ask(self, line: object) -> str:
        """Send this line and return the one line of its answer."""
        self.tell(line)
        return self.heard()

    def end(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(10)

    def close(self) -> None:
        """No more lines: it ends by itself, or is ended."""
        self._line.shutdown(socket.SHUT_WR)  # others, forked since, may hold this end open
        self.process.join(10)
        self.process.kill()
        self.process.join(10)
        self._said.close(), self._line.close()


def all_of(told: list[Told], line: object) -> list[str]:
    """Send a line to all at once and return each answer."""
    for one in told:
        one.tell(line)
    return [one.heard() for one in told]


@contextlib.contextmanager
def played(script: str, *args: object) -> Iterator[Told]:
    one = Told(script, *args)
    try:
        yield one
    finally:
        one.close()
        shm.remove(f"{shm.PREFIX}-{one.process.pid}")


def trainer(transport: str) -> contextlib.AbstractContextManager[Told]:
    return played(TRAINER, transport)


def host(transport: str, folder: Path, at: str = "nowhere") -> contextlib.AbstractContextManager[Told]:
    folder.mkdir(exist_ok=True)
    return played(HOST, transport, folder, at)
