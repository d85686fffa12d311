"""Attempts to get out of the code sandbox, and to fool the grader of programs. As a script, `sandbox_escapes.py TIER`:
all of them, on one tier, as the user of the script -> one JSON line {attempt: the leaked text, or the score}. Standard
library only: another user's interpreter may have nothing else.

Each attempt prints BREACH if it got what it wanted. Those in NAKED do so outside of a sandbox (the tests check it), so
that an attempt that fails for a reason of its own is noticed.
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

PRELUDE = """
import ctypes, os, sys, socket, mmap, struct, time, signal, resource
L = ctypes.CDLL(None, use_errno=True)
def call(*a):
    r = L.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a]); return r, ctypes.get_errno()
def breach(*what): print("BREACH", *what)
def denied(*a):
    r, e = call(*a)
    if r >= 0 or e not in (1, 38): breach(a[0], r, e)
def tried(f):
    try: return f()
    except (OSError, ValueError, AttributeError, ImportError, KeyError): return None
"""
ATTEMPTS = dict(
    part.split("\n", 1)
    for part in (Path(__file__).parent / "data" / "sandbox_escapes.txt").read_text().split("\n## ")[1:]
)
NAKED = (
    *("read /etc/passwd", "list /etc", "read a secret of the host", "a symlink to a host file", "read our source"),
    *(
        "/proc",
        "/sys",
        "TCP to the host",
        "UDP",
        "netlink",
        "an abstract socket of the host",
        "a socket file of the host",
    ),
    *(
        "the host's name",
        "System V memory of the host",
        "memory that is of no process",
        "join a namespace",
        "new privileges",
        "our environment",
    ),
    *(
        "descriptors of process 1, and how it is asked",
        "see siblings",
        "raise a limit",
        "namespaces by clone3",
        "handles of files",
    ),
)
OVER_FILES = (
    *(
        "read a secret of the host",
        "a symlink to a host file",
        "a symlink out of /tmp",
        "/proc",
        "make a device",
        "chroot",
    ),
    *("mount", "remount / writable", "pivot_root", "new mount calls", "handles of files", "descriptors of process 1"),
    *("become root", "capabilities", "nested user namespace", "nested mount namespace", "a forged answer"),
    *("disk bomb", "file of any size", "inode bomb", "attributes of files", "shared memory of no file"),
)
"""The attempts with another result if files are mounted over a folder."""

ADD = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
CHEATS = {
    "it leaves before the check": "import os\nos._exit(0)",
    "equal to everything": "class E(int):\n    def __eq__(self, o): return True\ndef add(a, b): return E(0)",
    "a text that is equal": "class E(str):\n    def __eq__(self, o): return True\ndef add(a, b): return E('x')",
    "json that lies": "import json\njson.dumps = lambda v: '{\"value\": true}'\ndef add(a, b): return 0",
    "from the frames": (
        "import sys, gc\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in f.f_locals.values():\n"
        "            if isinstance(v, dict) and 'outputs' in v: return v['outputs'][0]\n        f = f.f_back\n"
        "    for o in gc.get_objects():\n        if isinstance(o, dict) and 'outputs' in o: return o['outputs'][0]\n"
    ),
    "an answer for every descriptor": (
        "import os\ndef add(a, b):\n    for fd in range(1, 300):\n        try: os.write(fd, b'3')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "True for 1": "def add(a, b): return True",
}


class Host:
    """Targets outside of the sandbox: a secret, sockets, a segment of memory, a process."""

    def __init__(self, folder: Path) -> None:
        os.environ["TOKEN"] = "H17SECRET"
        self.secret = folder / "secret"
        self.secret.write_text("H17SECRET")
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        (self.workspace / "file").write_text("ours")
        self.tcp, self.named, self.abstract = (
            socket.socket(),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        )
        self.tcp.bind(("127.0.0.1", 0))
        self.named.bind(str(folder / "socket"))
        self.abstract.bind(f"\0h17-{os.getpid()}")
        for one in (self.tcp, self.named, self.abstract):
            one.listen(64)
        self.victim = subprocess.Popen(["sleep", "600"])
        self.key = 0x17000000 + os.getpid()
        self.memory = ctypes.CDLL(None).shmget(self.key, 16, 0o1666)
        self.named_as = {
            "secret": str(self.secret),
            "source": __file__,
            "port": self.tcp.getsockname()[1],
            "key": self.key,
            "abstract": f"\0h17-{os.getpid()}",
            "path": str(folder / "socket"),
            "victim": self.victim.pid,
            "host": socket.gethostname(),
        }

    def code(self, name: str) -> str:
        return PRELUDE + ATTEMPTS[name].format(**self.named_as)

    def close(self) -> None:
        ctypes.CDLL(None).shmctl(self.memory, 0, 0)
        self.victim.kill()
        self.victim.wait()
        for one in (self.tcp, self.named, self.abstract):
            one.close()


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


def fooled(tier: str) -> dict[str, str]:
    """By cheat, the score that it should not have; and an honest program that has not its own."""
    from verl.reward.code import code_score

    found = {}
    for name, code in {**CHEATS, "honest": "def add(a, b): return a + b"}.items():
        score = code_score(fenced(code), ADD, tier=tier)["score"]
        if score not in {"honest": (1,), "an answer for every descriptor": (0, 0.5)}.get(name, (0,)):
            found[f"cheat: {name}"] = str(score)
    return found


def named_processes(name: str) -> list[str]:
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found += [str(comm)] if comm.read_text().strip() == name else []
    return found


def breaches(tier: str, host: Host, every: int) -> dict[str, str]:
    """By attempt, what got out; and what an attempt did to the run after it. Makes each `every`th attempt."""
    from verl.sandbox.code import CodeSandbox, Limits

    limits = Limits(wall_s=3, cpu_s=1, memory_mb=512, processes=32, tmp_mb=64)
    found: dict[str, str] = {}
    with CodeSandbox(tier, limits, workspace=host.workspace) as sandbox:

        def attempt(name: str, base: str = "") -> None:
            began_s = time.monotonic()
            try:
                ran = sandbox.run_all(host.code(name), [{"stdin": ""}], base=base)[0]
                if "BREACH" in ran.stdout:
                    found[name] = ran.stdout[-500:]
                elif time.monotonic() - began_s > 30:
                    found[name] = f"{time.monotonic() - began_s:.1f} s"
                elif ran.status == "error" and "MemoryError" not in ran.stderr and "rror: [Errno" not in ran.stderr:
                    found[name] = f"it did not try: {ran.stderr[-500:]}"
                after = sandbox.run("print(1)")
                if after.stdout != "1\n":
                    found[name] = f"the run after it: {after}"
            except Exception as e:
                found[name] = repr(e)

        base = sandbox.workspaces.take("")
        names = list(ATTEMPTS)[::every]
        over = [name for name in names if name.startswith(OVER_FILES)]
        at_once = ("fork bomb", "output bomb", "read /etc/passwd")
        with ThreadPoolExecutor(4) as pool:  # most of their time they wait, for limits
            list(pool.map(attempt, [*names, *over, *at_once], [""] * len(names) + [base.folder] * len(over) + [""] * 3))
        if [path.read_text() for path in host.workspace.iterdir()] != ["ours"]:
            found["write to the workspace"] = str(list(host.workspace.iterdir()))
        if host.victim.poll() is not None:
            found["kill a process of the host"] = "it is dead"
        if left := named_processes("H17STAYS"):
            found["a daemon that stays"] = str(left)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        host = Host(Path(folder))
        try:
            print(json.dumps(breaches(sys.argv[1], host, int(sys.argv[2])) | fooled(sys.argv[1])))
        finally:
            host.close()
