"""Process 1 of a sandbox. It runs programs, each in a fork of its own, and returns their output.

    caller == one socket, a JSON line each way ==> process 1 -- fork, pipes --> the tested code

The tested code never has that socket. Its output arrives here over pipes of one run, and is sent on with the nonce of
the request, so that code cannot answer for another program. Processes inside cannot signal process 1 nor set its
limits. When it ends, the kernel ends all others, and this counts as an act of the code. Standard library only: with
bubblewrap this file and kept.py are the only ones of verl in the sandbox.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types

TYPE_CHECKING = False  # `typing`, `ast`, `tarfile` and the like: without them bubblewrap's sandboxes are up sooner
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]

CHUNK_BYTES = 1 << 16
FAR_S = 10**9  # CPU limit in seconds of a session's process: each of its cells has its own limit
PR_SET_DUMPABLE, PR_SET_SECCOMP, NOBODY = 4, 22, 65534
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 0x20, 0x1000
READY = {"status": "ready"}  # the first line of process 1
SHOW = sys.__excepthook__  # prints a traceback as the interpreter does


def serve_cell(channel: socket.socket) -> None:
    """Answer requests until the socket ends. There are four kinds, all with limits and a nonce:

    {kind: "run", code, stdin, call, arguments}: one program, or one call of a function that it defines
    {kind: "cell", code}: code that shares its variables with other cells, in a process that stays
    {kind: "begin", kept, most}: before any cell; the files in /tmp are the workspace, and kept files are put back
    {kind: "keep"}: return the files that were added or changed since then, and the names of those that were removed
    """
    gc.disable()
    lines = channel.makefile("rb")
    kernel: _Kernel | None = None
    files = None
    channel.sendall(json.dumps(READY).encode() + b"\n")
    while line := lines.readline():
        request = json.loads(line)
        try:
            if request["kind"] == "run":
                answer = _run(request)
            elif request["kind"] in ("begin", "keep"):
                files = files or _kept().SessionFiles()
                answer = files.answer(request)
            else:
                kernel = kernel or _Kernel(request["limits"])
                answer = kernel.run(request)
                kernel = kernel if answer["alive"] else None
        except _NoProcess as e:
            answer = {"status": "gone", "why": str(e)}
        channel.sendall(json.dumps(answer | {"nonce": request["nonce"]}).encode() + b"\n")


class _NoProcess(Exception):
    """The machine could not create a process for the code, so that no code was run."""


class _Child:
    """A fork that runs `work`, with this process's ends of its pipes: stdin, stdout, stderr, `sent` (its results) and
    `orders`."""

    def __init__(self, limits: Json, work: Callable[[], int]) -> None:
        sys.stdout.flush()
        try:
            ends = [os.pipe() for _ in range(5)]  # stdin, stdout, stderr, results, orders
            self.pid = os.fork()
        except OSError as e:
            raise _NoProcess(f"no process for the code: {e}") from e
        theirs = [pair[0 if i in (0, 4) else 1] for i, pair in enumerate(ends)]
        if self.pid == 0:
            _become_child(theirs, limits, work)
        for fd in theirs:
            os.close(fd)
        self.stdin, self.stdout, self.stderr, self.sent, self.orders = (
            pair[1 if i in (0, 4) else 0] for i, pair in enumerate(ends)
        )
        self.pid_fd = os.pidfd_open(self.pid)
        self.limits = limits
        for fd in (self.stdout, self.stderr, self.sent, self.stdin):
            os.set_blocking(fd, False)

    def watch(self, stdin: bytes, until: Callable[[dict[int, bytearray]], bool]) -> tuple[str, dict[int, bytearray]]:
        """Write the child's input and read its output until it ends or `until` is true. Return the limit that was
        exceeded ("timeout", "output" or ""), and the output by descriptor."""
        deadline = time.monotonic() + self.limits["wall_s"]
        output = {fd: bytearray() for fd in (self.stdout, self.stderr, self.sent)}
        poller = select.poll()
        for fd in (*output, self.pid_fd):
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
            for fd in output.keys() & (output.keys() if ended else ready):
                while got := _read(fd):
                    output[fd] += got
                    if sum(map(len, output.values())) > self.limits["output_bytes"]:
                        return "output", output
                if got == b"" and not ended:
                    poller.unregister(fd)
            if ended:
                return "", output
            if until(output):
                for fd in output:  # output that was written before the result, while other pipes were read
                    while got := _read(fd):
                        output[fd] += got
                return "", output
        return "timeout", output

    def _feed(self, stdin: bytes) -> bytes:
        try:
            return stdin[os.write(self.stdin, stdin[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return stdin
        except BrokenPipeError:  # the child does not read its input
            return b""

    def end_input(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def end(self) -> int:
        found = end_others(self.pid)
        self.end_input()
        for fd in (self.stdout, self.stderr, self.sent, self.orders, self.pid_fd):
            os.close(fd)
        return found


def end_others(of: int = 0) -> int:
    """Kill and reap everything in the sandbox but this process. Return the exit code of the child `of`, or minus the
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
    from verl.processes import tree  # tier "none": orphans are below this process, which adopts them

    for pid in tree.descendants(os.getpid()):
        tree.kill(os.kill, pid)


def _read(fd: int) -> bytes | None:
    """Return some bytes of a pipe; b"" at its end, None if there are none at present."""
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None


def _run(request: Json) -> Json:
    """Run one program, or one call of a function that its code defines."""
    child = _Child(request["limits"], lambda: _program(request))
    stdin = request["stdin"].encode()
    if not stdin:
        child.end_input()
    why, output = child.watch(stdin, lambda _: False)
    code = child.end()
    return _answer(why, code, output, child) | {"value": output[child.sent].decode(errors="replace") or None}


class _Kernel:
    """A process that runs cells and keeps their variables."""

    def __init__(self, limits: Json) -> None:
        self._child = _Child({**limits, "cpu_s": FAR_S}, _cells)
        self._child.end_input()

    def run(self, request: Json) -> Json:
        child = self._child
        child.limits = request["limits"]
        with contextlib.suppress(BrokenPipeError):
            os.write(child.orders, json.dumps([request["code"], request["limits"]["cpu_s"]]).encode() + b"\n")
        why, output = child.watch(b"", lambda output: output[child.sent].endswith(b"\n"))
        alive = why == "" and output[child.sent].endswith(b"\n")
        code = (0 if output[child.sent] == b"0\n" else 1) if alive else child.end()
        return _answer(why, code, output, child) | {"alive": alive}


def _kept() -> Any:
    """Return the module kept.py. In bubblewrap it is a file beside this one, and it is loaded on use, since few
    sandboxes need it."""
    if __name__ != "__main__":
        from verl.sandbox import kept

        return kept
    module = types.ModuleType("kept")
    with open("/kept.py", "rb") as source:  # no import: it could load a compiled file that the code wrote
        exec(compile(source.read(), "/kept.py", "exec"), module.__dict__)
    return module


def _answer(why: str, code: int, output: dict[int, bytearray], child: _Child) -> Json:
    ended = {0: "ok", -signal.SIGXCPU: "timeout"}.get(code, "error" if code > 0 else "killed")
    texts = {"stdout": output[child.stdout], "stderr": output[child.stderr]}
    limit = child.limits["output_bytes"]
    return {"status": why or ended, "code": code} | {n: t[:limit].decode(errors="replace") for n, t in texts.items()}


# -- in the child: from here on the code is not ours -------------------------------------------------------------------


def _become_child(theirs: list[int], limits: Json, work: Callable[[], int]) -> None:
    """Close all descriptors but the pipes of this run (0 to 2; 3: results; 4: orders), set the limits, call `work` and
    exit."""
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
        if os.getppid() == 1:
            mmap.mmap = _Shared  # type: ignore[misc]
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site` adds them, and is not loaded
        gc.enable()
        code = work()
    except BaseException:  # a limit that the kernel refuses: code is never run without it
        SHOW(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


class _Shared(mmap.mmap):
    """An `mmap` that places anonymous shared memory in an unlinked file in /tmp, so that it counts against the quota of
    /tmp."""

    def __new__(
        cls,
        fileno: int,
        length: int,
        flags: int = mmap.MAP_SHARED,
        prot: int = 3,
        access: int = 0,
        *rest: Any,
        **named: Any,
    ) -> _Shared:
        if fileno != -1 or not flags & mmap.MAP_SHARED or access == mmap.ACCESS_COPY:
            return super().__new__(cls, fileno, length, flags, prot, access, *rest, **named)
        file = os.open(path := f"/tmp/.shared-{os.urandom(8).hex()}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.unlink(path)
            os.posix_fallocate(file, 0, length)
            return super().__new__(cls, file, length, flags & ~mmap.MAP_ANONYMOUS, prot, access, *rest, **named)
        finally:
            os.close(file)


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
    if os.getppid() == 1:  # elsewhere all processes of the user would count
        resource.setrlimit(resource.RLIMIT_NPROC, (int(limits["processes"]),) * 2)
    cpu_s = max(1, int(limits["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # first SIGXCPU, by which the reason is known


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
    """Run the cells of a session: read lines of JSON (code, seconds of CPU) from 4, and write 0 or 1 to 3 after each.
    The value of a last expression is printed. If a cell's CPU limit would be above the hard limit, only its wall time
    is limited."""
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
    """Call `work` and return the exit code that Python would return. Tracebacks are printed without frames of this
    module.

    at_end: also wait for its threads and run its exit handlers, as at the end of a program
    """
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


# -- before any code runs: shared by bubblewrap and our own namespaces -------------------------------------------------


libc = ctypes.CDLL(None, use_errno=True)


def called(what: str, result: int) -> int:
    """Return the result of a C library call. Raise OSError if the call failed."""
    if result < 0:
        raise OSError(number := ctypes.get_errno(), f"{what}: {os.strerror(number)}")
    return result


def mount(kind: str, at: str, options: str, flags: int = MS_NOSUID | MS_NODEV) -> None:
    texts = [text.encode() or None for text in (kind, at, kind)]
    called(f"mount {at}", libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None))


def make_zeros(path: str) -> None:
    """Make a file of zeros in place of /dev/zero, since memory that is mapped from that device counts for no
    process."""
    with open(path, "xb") as file:
        file.truncate(1 << 42)
    os.chmod(path, 0o444)


def filter_calls(program: bytes) -> None:
    """Limit this process, and all that it starts, to the system calls of the filter, for good."""
    words = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(words))
    called("seccomp", libc.prctl(PR_SET_SECCOMP, 2, filter_, 0, 0))


def drop_privileges() -> None:
    """Become the user 65534, without any capability, and with memory that no other process may read."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    called("capset", libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)))
    called("dumpable", libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))


def main(channel: str, filter_fd: str, quota: str, *packages: str) -> None:
    """Serve in bubblewrap, with the right to mount.

    quota: the mount options of /tmp; "" if it is mounted already
    """
    if quota:
        mount("tmpfs", "/tmp", quota)
    os.chdir("/tmp")
    make_zeros("/dev/zero")
    mount("", "/dev", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    drop_privileges()
    with open(int(filter_fd), "rb") as program:
        filter_calls(program.read())
    sys.path += packages
    serve_cell(socket.socket(fileno=int(channel)))


if __name__ == "__main__":
    main(*sys.argv[1:])
