"""Weights that another process reads out of the trainer's memory by NIXL, as a process of another host does: its shared
memory is another folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.weight_sync import shm

pytest.importorskip("nixl", reason="the package nixl is not installed (make nixl-package)")

COMMON = """
import hashlib, sys, torch
from pathlib import Path
from verl.weight_sync import base, nixl, shm, tcp
from verl.weight_sync.sender import entry_of

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
outlet = nixl.NixlOutlet(host="127.0.0.1")
for line in sys.stdin:
    now = tensors(int(line))
    say(outlet.stage(int(line), {n: entry_of(t) for n, t in now.items()}, now.items()), told(now.items()))
shm.remove(f"{shm.PREFIX}-*-{outlet.tag}")
"""
)
HOST = (
    COMMON
    + """
shm.SHM = tcp.SHM = Path(sys.argv[1])
at, reads, read = sys.argv[2], [], nixl._read  # where it waits for a line: nowhere, before or after the reading

def watched(*args):
    reads.append(args[-1])
    if at == "before":
        say("here"), sys.stdin.readline()
    read(*args)
    if at == "after":
        say("here"), sys.stdin.readline()

nixl._read = watched
for line in sys.stdin:
    try:
        stream = nixl.open_weights(line.strip())
        found = [stream.version, told(stream.tensors()), len(reads)]
    except base.SyncError as e:
        found = ["error", e]
    say(*found, "|", *(shm.ShmStream(path).version for path in sorted(shm.SHM.glob(f"{shm.PREFIX}-*"))))
"""
)


class Told:
    """A process that is told lines, and says lines within a deadline."""

    def __init__(self, script: str, *args: object) -> None:
        env = os.environ | {"UCX_TLS": "tcp,sm,self", "NIXL_LOG_LEVEL": "WARN"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-c", script, *map(str, args)]
        self.process = subprocess.Popen(command, text=True, bufsize=1, env=env, **pipes)

    def ask(self, line: object, within_s: float = 60.0) -> str:
        """The one line that it says to this one."""
        self.process.stdin.write(f"{line}\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(within_s):
                raise TimeoutError(f"{line!r}: nothing said in {within_s} s")
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def played(script: str, *args: object) -> Iterator[Told]:
    one = Told(script, *args)
    try:
        yield one
    finally:
        one.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(10)
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()
        shm.remove(f"{shm.PREFIX}-{one.process.pid}")


def host(folder: Path, at: str = "nowhere") -> contextlib.AbstractContextManager[Told]:
    folder.mkdir()
    return played(HOST, folder, at)


def test_every_version_comes_as_it_was_staged_once_to_each_host(tmp_path):
    with played(TRAINER) as trainer, host(tmp_path / "b") as b, host(tmp_path / "c") as c:
        for version in range(5):
            address, digest = trainer.ask(version).split()
            for _, one in itertools.product(range(2), (b, c)):  # the second time it is there already
                assert one.ask(address).startswith(f"{version} {digest} {version + 1} |")
        with played(HOST, tmp_path / "c", "nowhere") as late:
            assert late.ask(address) == f"{version} {digest} 0 | 4 3", "another process of the host finds it"
    assert not list(Path("/dev/shm").glob(f"*{address.rpartition('/')[2]}*"))


def test_a_version_that_is_written_over_while_it_is_read_is_refused(tmp_path):
    with played(TRAINER) as trainer, host(tmp_path / "b", "after") as b:
        address, _ = trainer.ask(0).split()
        assert b.ask(address) == "here"
        for version in (1, 2):
            _, digest = trainer.ask(version).split()
        said = b.ask("go on")
        assert said == "error version 0 was written over by 2 while it was read | -1", "what was read is no version"
        assert b.ask(address) == "here" and b.ask("go on") == f"2 {digest} 2 | 2"


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_trainer_that_dies_ends_the_reading(tmp_path, at):
    with played(TRAINER) as trainer, host(tmp_path / "b", at) as b:
        address, _ = trainer.ask(0).split()
        assert b.ask(address) == "here"
        trainer.process.kill()
        trainer.process.wait()
        said = b.ask("go on")
        assert said.startswith("error version 0: ") and said.endswith("| -1"), said
        assert b.ask(address).startswith("error the trainer's weights cannot be fetched from ")
