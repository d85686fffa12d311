"""Run code that a model wrote where it can do no harm: `CodeSandbox(...).run("print(1)")`.

The tier is the way of isolation: `bubblewrap` (Debian's package) or `launcher` (namespaces of our own, from a warm
interpreter). "auto" takes the first that works on this machine, and raises ValueError where none does. The tier `none`,
which must be configured explicitly, isolates nothing: its code may do all that this process may, but its time and
memory are limited, and all processes that it starts end with it. Every call is synchronous, has a time limit, and may
be made from any thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal

from verl.errors import Refused
from verl.processes.child import interpreter_line
from verl.sandbox import launcher
from verl.sandbox.cell import READY
from verl.sandbox.workspace import MAX_FILES, Base, Workspaces

TIERS = ("bubblewrap", "launcher")
NONE = "none"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
MAX_LINE_BYTES = 64 << 20
Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]


class SandboxGone(RuntimeError):
    """The sandbox failed for a reason that is not the code in it. The text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one run, or of one cell of a session."""

    wall_s: float = 10.0
    """Wall clock time in seconds."""
    cpu_s: float = 10.0
    """Processor time of each process in seconds."""
    memory_mb: int = 512
    """Memory of each process, and of all processes together, in MB."""
    processes: int = 32
    """Number of processes and threads at the same time."""
    output_bytes: int = 1 << 16
    """Size of the printed output and the returned value together."""
    tmp_mb: int = 64
    """Size of its /tmp in MB."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise Refused(f"{name}={value}: a sandbox has limits; give a number above 0")


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended."""

    status: Status
    """"ok", "error" (an exception, or an exit code above 0), "killed" (by a signal), or the limit that was exceeded."""
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """The value that the function returned, as JSON; None without a function."""
    code: int = 0
    """Exit code, or minus the signal that ended it."""
    why: str = ""
    """Details of an end by a limit or a signal."""


@dataclass(slots=True)
class _Link:
    """The connection to one sandbox."""

    cell: socket.socket
    """Carries requests to process 1 of the sandbox, and its answers."""
    guard: socket.socket
    """A socket to the launcher, which ends the sandbox when this end is closed."""
    ready: bool = False
    """True once process 1 has started. If it ends after that, the code is assumed to have ended it."""

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and return the answer. The key "gone" of the answer is true if the sandbox ended. Raise
        SandboxGone if there is no valid answer."""
        nonce = os.urandom(16).hex()
        try:
            self._await_ready()
            self.cell.settimeout(launcher.START_S)
            with contextlib.suppress(ConnectionError):  # the reason of its end may be there to read
                self.cell.sendall(json.dumps(request | {"nonce": nonce}).encode() + b"\n")
            answer = self._receive(limit_s + launcher.GRACE_S, {"gone": True, "nonce": nonce})
        except (OSError, TypeError, ValueError, RecursionError) as e:
            raise SandboxGone(f"no answer of the sandbox: {e}") from e
        if answer.get("status", "gone") == "gone" or answer.get("nonce") != nonce:
            raise SandboxGone(answer.get("why") or "the sandbox spoke out of turn")
        return answer

    def _await_ready(self) -> None:
        if not self.ready:
            answer = self._receive(launcher.START_S, {}, watch=False)
            self.ready = answer["status"] == READY["status"]
            if not self.ready:
                raise SandboxGone(answer.get("why") or "the sandbox does not start")

    def _receive(self, limit_s: float, default: dict[str, Any], *, watch: bool = True) -> dict[str, Any]:
        """Return the next line of process 1; if it ends or takes too long, the default with the reason. With `watch`,
        the launcher checks the memory of the sandbox meanwhile."""
        got, deadline, watched = bytearray(), time.monotonic() + limit_s, not watch
        poller = select.poll()
        poller.register(self.cell, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if not poller.poll(1000 * (left_s if watched else min(left_s, launcher.LOOK_S))):
                if not watched:
                    self.guard.sendall(launcher.WATCH)
                    watched = True
                continue
            try:
                part = self.cell.recv(1 << 18)
            except ConnectionResetError:  # it ended with a request unread; its own lines can still be read
                part = self.cell.recv(1 << 18)
            got += part
            if not part:
                return default | self._end()
            if got.endswith(b"\n"):
                if watched and watch:
                    self.guard.sendall(launcher.REST)
                return dict(json.loads(got), gone=False)
            if len(got) > MAX_LINE_BYTES:
                return default | {"status": "output", "why": "its answer has no end"}
        return default | {"status": "timeout", "why": f"no answer in {limit_s:g} s"}

    def _end(self) -> dict[str, Any]:
        """Return the launcher's report of how process 1 ended. If the launcher itself has ended, process 1 has ended
        with it."""
        self.guard.settimeout(launcher.START_S)
        report = self.guard.recv(1 << 16)
        return dict(json.loads(report)) if report else {"status": "gone", "why": "the launcher of sandboxes ended"}

    def close(self) -> None:
        self.guard.close()
        self.cell.close()


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """The files of a session that were added, changed or removed since it began. Its variables are not kept."""

    workspace: str
    """Hash of the workspace below the files; "" without a workspace."""
    kept: str = field(repr=False)
    """The files as text, which is unpacked inside of sandboxes only."""


class CodeSandbox:
    """Starts sandboxes, one for each run or session.

    packages: folders of Python packages that the code may import
    workspace: a folder; the /tmp of a session begins with a copy of its files, or of those of a folder in it
    """

    def __init__(
        self,
        tier: str = "auto",
        limits: Limits = Limits(),
        packages: Sequence[str] = (),
        workspace: str | os.PathLike[str] = "",
    ) -> None:
        if tier not in ("auto", *TIERS, NONE):
            naked = f"{NONE} runs code that a model wrote with all rights of this run"
            raise Refused(f"tier={tier!r}: a sandbox is one of auto, {', '.join(TIERS)}; {naked}")
        self.limits, self._packages = limits, [os.path.abspath(path) for path in packages]
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._spare: _Link | None = None  # the next sandbox, which starts while the one before works
        self.workspaces = Workspaces(workspace) if workspace else None
        self.bounds = ""  # what bounds the memory of sandboxes here, in words
        self.refused: list[str] = []  # tiers that were tried first, and why they do not work here
        for name in TIERS if tier == "auto" else (tier,):
            self.tier = name
            if (why := self._why_not()) is None:
                return
            self.refused.append(f"{name}: {why}")
        self.close()
        fix = "apt-get install bubblewrap, or allow unprivileged user namespaces (sysctl user.max_user_namespaces)"
        raise Refused(f"no sandbox for code works here ({'; '.join(self.refused)}). Fix: {fix}")

    def _why_not(self) -> str | None:
        """Run a program in the tier. Return the reason why that does not work on this machine, or None if it works."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return f"the filter of system calls is written for Linux on x86_64, not {sys.platform} {platform.machine()}"
        if self.tier == "bubblewrap" and shutil.which("bwrap") is None:
            return "bwrap is not installed"
        try:
            base = self.workspaces.folder() if self.workspaces else ""
            ran = self.run_all("print(6 * 7)", [{"stdin": ""}], base=base)[0]
        except SandboxGone as e:
            return str(e)
        return None if ran.stdout == "42\n" else f"it ran, and gave {ran}"

    def described(self) -> str:
        """Return a description of the tier, with a warning if it isolates nothing."""
        return (
            f"{NONE}. Warning: code that a model wrote may do all that this run may" if self.tier == NONE else self.tier
        )

    def run(self, code: str, stdin: str = "") -> Ran:
        """Run a Python program in a sandbox of its own."""
        return self.run_all(code, [{"stdin": stdin}])[0]

    def call(self, code: str, function: str, arguments: Sequence[Any]) -> Ran:
        """Call a function (or a method of `Solution`) that the code defines, in a sandbox of its own.

        arguments: values of JSON types
        """
        return self.run_all(code, [{"call": function, "arguments": list(arguments)}])[0]

    def run_all(
        self, code: str, cases: Sequence[dict[str, Any]], within_s: float = math.inf, base: str = ""
    ) -> list[Ran]:
        """Run the code once per case ({stdin} or {call, arguments}) and return the results in order.

        Each case has a process of its own. All share one sandbox and its /tmp; if a case ends the sandbox, the next one
        uses a new one. No case starts after `within_s` seconds, so there may be fewer results than cases.
        base: a copy of a workspace; /tmp begins with its files
        """
        link: _Link | None = None
        found: list[Ran] = []
        end_s = time.monotonic() + within_s
        try:
            for case in cases:
                if time.monotonic() >= end_s:
                    break
                link = link or self._next(base)
                request = {"kind": "run", "code": code, "stdin": "", "call": "", "arguments": []} | case
                answer = link.ask(request | {"limits": asdict(self.limits)}, self.limits.wall_s)
                found.append(ran_of(answer))
                if answer["gone"]:
                    link.close()
                    link = None
        finally:
            if link is not None:
                link.close()
        return found

    def connect(self, base: str = "") -> _Link:
        """Start a sandbox that continues even if the launcher ends. Raise SandboxGone if it does not start."""
        with self._lock:
            return self._new(base, stays=True)

    def _next(self, base: str) -> _Link:
        """Return a sandbox for one program: without a base, one that was started in advance. Raise SandboxGone if none
        starts."""
        with self._lock:
            if base:
                return self._new(base)
            if self._popen is not None and self._popen.poll() is not None:
                self._stop()  # the spare sandbox has ended with it
            link, self._spare = self._spare or self._new(), None
            self._spare = self._new()
        return link

    def _new(self, base: str = "", stays: bool = False) -> _Link:
        read_only = [*SYSTEM, *(path for path in (sys.base_prefix, *self._packages) if not path.startswith("/usr/"))]
        job: dict[str, Any] = {"tier": self.tier, "read_only": list(dict.fromkeys(read_only)), "base": base}
        job |= {
            "packages": self._packages,
            "tmp_mb": self.limits.tmp_mb,
            "memory_mb": self.limits.memory_mb,
            "processes": self.limits.processes,
            "python": _python(),
            "stays": stays,
        }
        cell, guard = socket.socketpair(), socket.socketpair()
        with cell[1], guard[1]:
            for attempt in range(2):
                if self._channel is None:
                    self._start()
                assert self._channel is not None
                try:
                    socket.send_fds(self._channel, [json.dumps(job).encode()], [guard[1].fileno(), cell[1].fileno()])
                    break
                except OSError as e:
                    self._stop()
                    if attempt:
                        cell[0].close()
                        guard[0].close()
                        raise SandboxGone(f"the launcher of sandboxes ended: {e}") from e
        return _Link(cell[0], guard[0])

    def session(self, workspace: str = "", start: SavedFiles | None = None) -> Session:
        """Start a session: cells that share their variables and files until it is closed.

        workspace: a folder in the sandbox's workspace; "": all of it. Raises ValueError for a folder that is not in it.
        start: files of an earlier session, which this one begins with.
        """
        if self.workspaces is not None:
            self.workspaces.check(workspace)
        elif workspace:
            raise ValueError(f"workspace={workspace!r} is a folder in the sandbox's workspace, and that has none")
        return Session(self, workspace, start)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = interpreter_line("verl.sandbox.launcher", "-I", "-S", python=_python())
        command.append(self.workspaces.scratch if self.workspaces else "")
        nothing = subprocess.DEVNULL
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        with theirs:
            self._popen = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=nothing, stderr=nothing, env=env, start_new_session=True
            )
        ours.settimeout(launcher.START_S)
        try:
            answer = ours.recv(1 << 12)
        except OSError:
            answer = b""
        ready, self.bounds = answer[:1] == b"+", answer[1:].decode(errors="replace")
        self._channel = ours
        if not ready:
            self._stop()
            raise SandboxGone(f"{_python()} does not start the launcher of sandboxes")

    def _stop(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._popen is not None:
            try:
                self._popen.wait(launcher.GRACE_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
            self._popen = None

    def close(self) -> None:
        """End the launcher. Running programs have 2 s to end; sessions stay until they are closed. Idempotent."""
        with self._lock:
            self._stop()
        if self.workspaces is not None:
            self.workspaces.close()

    def __enter__(self) -> CodeSandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Session:
    """Cells of Python that share their variables and files. After a cell that hits a limit they are lost: `lost` is
    true, and the next cell begins with the files of the session's start."""

    def __init__(self, sandbox: CodeSandbox, workspace: str = "", start: SavedFiles | None = None) -> None:
        self._sandbox, self._workspace, self._start = sandbox, workspace, start
        self._link: _Link | None = None
        self._base: Base | None = None
        self._lock = threading.Lock()  # one cell at a time
        self.lost = False

    def run(self, code: str) -> Ran:
        """Run a cell. Its output ends with the value of its last expression. Raise SandboxGone if the sandbox fails,
        and ValueError if the session cannot begin with its workspace or snapshot."""
        with self._lock:
            self.lost = False
            return ran_of(self._ask(self._begin(), {"kind": "cell", "code": code}))

    def snapshot(self) -> SavedFiles:
        """Return the files as they are now. Other sessions over the same workspace, on any machine, can begin with
        them. Raise ValueError for more than `tmp_mb` MB (32 MB when packed), and for files that cannot be read."""
        with self._lock:
            answer = self._ask(self._begin(), {"kind": "keep"})
            if answer["status"] != "ok":
                raise ValueError(f"no snapshot of the session: {answer.get('why') or answer['status']}")
            return SavedFiles(self._base.digest if self._base else "", answer["value"])

    def restore(self, snapshot: SavedFiles) -> None:
        """Begin the session again with these files; its variables are lost."""
        with self._lock:
            self._forget()
            self._start = snapshot

    def _begin(self) -> _Link:
        if self._link is not None:
            return self._link
        sandbox, kept = self._sandbox, ""
        if self._base is None and sandbox.workspaces is not None:
            self._base = sandbox.workspaces.take(self._workspace)
        if self._start is not None:
            kept = self._start.kept
            if self._start.workspace != (self._base.digest if self._base else ""):
                raise ValueError("a snapshot belongs to the files below it: this one was taken over another workspace")
        self._link = link = sandbox.connect(self._base.folder if self._base else "")
        if kept or self._base:
            request = {"kind": "begin", "kept": kept, "most": MAX_FILES + 64 * sandbox.limits.tmp_mb}
            answer = self._ask(link, request)
            if answer["status"] != "ok":
                self._forget()
                raise ValueError(f"the session cannot begin: {answer.get('why') or answer['status']}")
        return link

    def _ask(self, link: _Link, request: dict[str, Any]) -> dict[str, Any]:
        limits = self._sandbox.limits
        try:
            answer = link.ask(request | {"limits": asdict(limits)}, limits.wall_s)
        except SandboxGone:
            self._forget()
            raise
        if answer["gone"] or not answer["alive"]:
            self.lost = True
            self._forget()
        return answer

    def _forget(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def close(self) -> None:
        """End the session and all of its processes. Idempotent."""
        with self._lock:
            self._forget()
            if self._base is not None and self._sandbox.workspaces is not None:
                self._sandbox.workspaces.give_back(self._base)
                self._base = None


def ran_of(answer: dict[str, Any]) -> Ran:
    named = {name: answer[name] for name in ("stdout", "stderr", "value", "code", "why") if name in answer}
    return Ran(answer["status"], **named)


def describe() -> str:
    """Return one line for `verl doctor`: the tier that "auto" takes on this machine, why not those before it, and what
    bounds the memory of its code."""
    try:
        with CodeSandbox() as sandbox:
            before = f" ({'; '.join(sandbox.refused)})" if sandbox.refused else ""
            return f"code sandbox: {sandbox.tier}{before}; its memory is bounded by {sandbox.bounds}"
    except ValueError as e:
        return f"code sandbox: none: {e}"


def _python() -> str:
    return os.path.realpath(sys.executable)
