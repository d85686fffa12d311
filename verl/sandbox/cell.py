"""Process 1 of a sandbox: it runs the code it is sent, each program in a fork of its own, and says what it gave.

    launcher == one socket, a JSON line each way ==> this process -- fork, pipes --> the tested code

The tested code never holds that socket: what it prints or returns comes here over pipes of one run, and is sent on with
the nonce of the request, so that it can speak for nothing but itself. Process 1 cannot be signalled from inside; when
it ends, the kernel ends whatever is left. Standard library only: with bubblewrap this file is all that is there.
"""

from __future__ import annotations

import atexit
import binascii
import builtins
import contextlib
import ctypes
import gc
import io
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import types

TYPE_CHECKING = False  # `typing`, `ast`, `tarfile` and the like: without them bubblewrap's sandboxes are up sooner
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Json = dict[str, Any]

CHUNK_BYTES = 1 << 16
MAX_KEPT_BYTES = 32 << 20  # of a snapshot, packed: as text it is a line of the socket
FAR_S = 10**9  # of CPU, for a process that stays: each of its cells has its own limit
PR_SET_DUMPABLE, NOBODY = 4, 65534
SHOW = sys.__excepthook__  # as the interpreter itself does


def serve(channel: socket.socket) -> None:
    """Answer requests until the socket ends. {kind: "run", code, stdin, call, arguments, limits, nonce}, or {kind:
    "cell", code, limits, nonce}: cells share their names, in a process that stays. {kind: "begin", kept}, before any
    cell: what is in /tmp is the workspace, and what was kept is put back; {kind: "keep"}: what came, and what went."""
    gc.disable()
    lines = channel.makefile("rb")
    kernel: _Kernel | None = None
    files = _Files()
    while line := lines.readline():
        request = json.loads(line)
        if request["kind"] == "run":
            answer = _run(request)
        elif request["kind"] in ("begin", "keep"):
            answer = files.answer(request)
        else:
            kernel = kernel or _Kernel(request["limits"])
            answer = kernel.run(request)
            kernel = kernel if answer["alive"] else None
        channel.sendall(json.dumps(answer | {"nonce": request["nonce"]}).encode() + b"\n")


class _Child:
    """A fork that runs `work`, and our ends of its pipes: what it is given, and what it prints and sends."""

    def __init__(self, limits: Json, work: Callable[[], int]) -> None:
        ends = [os.pipe() for _ in range(5)]  # stdin, stdout, stderr, what it sends, what it is told
        theirs = [pair[0 if i in (0, 4) else 1] for i, pair in enumerate(ends)]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_child(theirs, limits, work)
        for fd in theirs:
            os.close(fd)
        self.stdin, self.stdout, self.stderr, self.sent, self.told = (
            pair[1 if i in (0, 4) else 0] for i, pair in enumerate(ends)
        )
        self.pid_fd = os.pidfd_open(self.pid)
        self.limits = limits
        for fd in (self.stdout, self.stderr, self.sent, self.stdin):
            os.set_blocking(fd, False)

    def watch(self, stdin: bytes, until: Callable[[dict[int, bytearray]], bool]) -> tuple[str, dict[int, bytearray]]:
        """Feed and read it until it ends or `until` says so: "", "timeout" or "output", and what came, by pipe."""
        deadline = time.monotonic() + self.limits["wall_s"]
        said = {fd: bytearray() for fd in (self.stdout, self.stderr, self.sent)}
        poller = select.poll()
        for fd in (*said, self.pid_fd):
            poller.register(fd, select.POLLIN)
        if stdin:
            poller.register(self.stdin, select.POLLOUT)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in poller.poll(left_s * 1000)}
            ended = self.pid_fd in ready
            if self.stdin in ready:
                stdin = self._feed(stdin)
                if not stdin:
                    poller.unregister(self.stdin)
                    self.end_input()
            for fd in said.keys() & (said.keys() if ended else ready):
                while got := _read(fd):
                    said[fd] += got
                    if sum(map(len, said.values())) > self.limits["output_bytes"]:
                        return "output", said
                if got == b"" and not ended:
                    poller.unregister(fd)
            if ended:
                return "", said
            if until(said):
                for fd in said:  # what came before its last word, while the others were looked at
                    while got := _read(fd):
                        said[fd] += got
                return "", said
        return "timeout", said

    def _feed(self, stdin: bytes) -> bytes:
        try:
            return stdin[os.write(self.stdin, stdin[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return stdin
        except BrokenPipeError:  # it does not read
            return b""

    def end_input(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def end(self) -> int:
        found = end_all(self.pid)
        self.end_input()
        for fd in (self.stdout, self.stderr, self.sent, self.told, self.pid_fd):
            os.close(fd)
        return found


def end_all(of: int = 0) -> int:
    """Everything in the sandbox but this process is killed and reaped -> the exit code of the child `of`, or minus the
    signal that ended it."""
    found = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill_all()
            pid, status = os.waitpid(-1, 0)
            found = os.waitstatus_to_exitcode(status) if pid == of else found
    return found


def _kill_all() -> None:
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    from verl.sandbox import guardian  # tier "none": all below this process, which orphans come to

    for pid in guardian.descendants(os.getpid()):
        guardian.shoot(os.kill, pid)


def _read(fd: int) -> bytes | None:
    """b"" at its end, None when there is nothing now."""
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None


def _run(request: Json) -> Json:
    """One program, or one call of a function that its code defines."""
    child = _Child(request["limits"], lambda: _program(request))
    stdin = request["stdin"].encode()
    if not stdin:
        child.end_input()
    why, said = child.watch(stdin, lambda _: False)
    code = child.end()
    return _answer(why, code, said, child) | {"value": said[child.sent].decode(errors="replace") or None}


class _Kernel:
    """A process that keeps the names of the cells it ran."""

    def __init__(self, limits: Json) -> None:
        self._child = _Child({**limits, "cpu_s": FAR_S}, _cells)
        self._child.end_input()

    def run(self, request: Json) -> Json:
        child = self._child
        child.limits = request["limits"]
        with contextlib.suppress(BrokenPipeError):
            os.write(child.told, json.dumps([request["code"], request["limits"]["cpu_s"]]).encode() + b"\n")
        why, said = child.watch(b"", lambda said: said[child.sent].endswith(b"\n"))
        alive = why == "" and said[child.sent].endswith(b"\n")
        code = (0 if said[child.sent] == b"0\n" else 1) if alive else child.end()
        return _answer(why, code, said, child) | {"alive": alive}


class _Files:
    """What is in /tmp and is not of the workspace, as text. Its code is anyone's, and so are the names and kinds of
    its files: all of this is done as nobody, inside, and outside no one reads what was kept."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, int, int]] = {}  # of the workspace, by path

    def answer(self, request: Json) -> Json:
        import tarfile
        import zlib

        try:
            value = self._begin(request) if request["kind"] == "begin" else self._keep(request["limits"])
        except (OSError, EOFError, ValueError, LookupError, TypeError, tarfile.TarError, zlib.error) as e:
            return {"status": "error", "why": f"{type(e).__name__}: {e}"[:500], "alive": True}
        return {"status": "ok", "value": value, "alive": True}

    def _begin(self, request: Json) -> str:
        import shutil
        import tarfile

        self._first = {path: _stamp(about) for path, about in _below(request["most"])}
        if request["kept"]:
            kept = json.loads(request["kept"])
            for path in (f"./{path}" for path in kept["gone"]):
                if os.path.lexists(path):
                    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
            with tarfile.open(fileobj=io.BytesIO(binascii.a2b_base64(kept["files"])), mode="r:gz") as archive:
                archive.extraction_filter = lambda member, path: member  # it may do what its code might
                archive.extractall(".")
        return ""

    def _keep(self, limits: Json) -> str:
        import tarfile

        most, room, packed = 64 * limits["tmp_mb"], limits["tmp_mb"] << 20, _Bounded()
        gone = dict.fromkeys(self._first)
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for path, about in _below(most + len(self._first)):
                first, now = self._first.get(path), _stamp(about)
                if first == now or (first and stat.S_ISDIR(first[0]) and stat.S_ISDIR(about.st_mode)):
                    del gone[path]
                if first == now or not any(kind(about.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
                    continue  # pipes and sockets are nobody's at the end
                info = archive.gettarinfo(f"./{path}", path)
                most, room = most - 1, room - (info.size if info.isreg() else 0)
                if most < 0 or room < 0:
                    raise ValueError(f"more than tmp_mb={limits['tmp_mb']} MB, or {64 * limits['tmp_mb']} files")
                if info.isreg():  # or a pipe by now: no wait
                    with open(os.open(f"./{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                        archive.addfile(info, file)
                else:
                    archive.addfile(info)
        return json.dumps({"gone": list(gone), "files": binascii.b2a_base64(packed.getvalue()).decode()})


class _Bounded(io.BytesIO):
    def write(self, part: Any) -> int:
        if self.tell() + len(part) > MAX_KEPT_BYTES:
            raise ValueError(f"more than {MAX_KEPT_BYTES >> 20} MB when packed")
        return super().write(part)


def _stamp(about: os.stat_result) -> tuple[int, int, int]:
    """Another one for a file that was written to: no code can set the last of it."""
    return about.st_mode, about.st_size, about.st_ctime_ns


def _below(most: int) -> Iterator[tuple[str, os.stat_result]]:
    """All that is in /tmp, by its path in it; no link is followed. ValueError for more than so many."""
    todo = [""]
    while todo:
        folder = todo.pop()
        with os.scandir(f"./{folder}") as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                most -= 1
                if most < 0:
                    raise ValueError("too many files")
                yield folder + entry.name, about
                if stat.S_ISDIR(about.st_mode):
                    todo.append(f"{folder}{entry.name}/")


def _answer(why: str, code: int, said: dict[int, bytearray], child: _Child) -> Json:
    ended = {0: "ok", -signal.SIGXCPU: "timeout"}.get(code, "error" if code > 0 else "killed")
    texts = {"stdout": said[child.stdout], "stderr": said[child.stderr]}
    limit = child.limits["output_bytes"]
    return {"status": why or ended, "code": code} | {n: t[:limit].decode(errors="replace") for n, t in texts.items()}


# -- in the child: from here on the code is not ours -------------------------------------------------------------------


def _become_child(theirs: list[int], limits: Json, work: Callable[[], int]) -> None:
    """Only the pipes of this run are left of what we held: 0 to 2, 3 for what is sent, 4 for what is told."""
    code = 1
    try:
        os.setsid()
        high = [os.dup2(fd, 100 + i) for i, fd in enumerate(theirs)]
        for i, fd in enumerate(high):
            os.dup2(fd, i, inheritable=i < 3)
        os.closerange(5, 1 << 20)
        _limit(limits)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        sys.argv = ["main.py"]
        sys.path = [path for path in sys.path if os.path.isdir(path)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # what `site` adds, which is not loaded
        gc.enable()
        code = work()
    except BaseException:  # a limit of ours that the kernel does not take: never run without it
        SHOW(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _limit(limits: Json) -> None:
    megabyte = 1 << 20
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, int(limits["memory_mb"]) * megabyte),
        (resource.RLIMIT_FSIZE, int(limits["tmp_mb"]) * megabyte),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        resource.setrlimit(which, (value, value))
    if os.getppid() == 1:  # elsewhere all that the user runs would count
        resource.setrlimit(resource.RLIMIT_NPROC, (int(limits["processes"]),) * 2)
    cpu_s = max(1, int(limits["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU says why, before SIGKILL


def _program(request: Json) -> int:
    os.close(4)
    name = "solution" if request["call"] else "__main__"
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__file__"] = "main.py"
    call = request["call"]
    if not call:
        os.close(3)

    def work() -> None:
        exec(compile(request["code"], "main.py", "exec"), module.__dict__)
        if call:
            found = module.__dict__.get(call)
            function = found if found is not None else getattr(module.__dict__["Solution"](), call)
            value = json.dumps(function(*request["arguments"]))
            view = memoryview(value.encode())
            while view:
                view = view[os.write(3, view) :]

    return _guarded(work, at_end=True)


def _cells() -> int:
    """Cells as lines of JSON on 4, code and seconds; after each, 0 or 1 on 3. A last expression's value is printed.
    Every cell has its own seconds of CPU; beyond what it may raise them to, its wall time holds."""
    import ast

    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    lines = open(4, encoding="utf-8", closefd=False)  # noqa: SIM115
    for line in lines:
        code, cpu_s = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(used.ru_utime + used.ru_stime) + max(1, int(cpu_s))
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))

        def work(code: str = code) -> None:
            tree = ast.parse(code, "cell.py")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell.py", "exec"), module.__dict__)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell.py", "eval"), module.__dict__)
                if value is not None:
                    print(repr(value))

        ended = _guarded(work, at_end=False)
        os.write(3, b"%d\n" % min(1, ended))
    return 0


def _guarded(work: Callable[[], None], *, at_end: bool) -> int:
    """The exit code that Python would have given; the traceback without our own frames. `at_end`: threads are waited
    for and exit handlers run."""
    try:
        work()
        code = 0
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        code = 0 if e.code is None else e.code & 0xFF if isinstance(e.code, int) else 1
    except BaseException as e:  # it is not our code
        trace = e.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == _guarded.__code__.co_filename:
            trace = trace.tb_next
        SHOW(type(e), e.with_traceback(trace), trace)
        code = 1
    if at_end:
        if threading := sys.modules.get("threading"):  # without it, there are none
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if ctypes.CDLL(None).capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)):  # what could be inherited, too
        sys.exit("no capability may be left")
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.path += sys.argv[2:]
    serve(socket.socket(fileno=int(sys.argv[1])))
