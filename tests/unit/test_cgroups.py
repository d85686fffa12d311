"""Groups of processes that bound a sandbox's memory, over a double of the kernel's tree: none was made by a test."""

import errno
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from verl.processes.memory import Machine
from verl.sandbox import cgroups, launcher
from verl.sandbox.cgroups import GroupTree, MemoryGroups, Unavailable
from verl.sandbox.code import CodeSandbox, Limits

MOUNTS = "24 30 0:22 / /proc rw - proc proc rw\n33 30 0:28 {root} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
ROOT = Path(__file__).parents[2]
LIMITS = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")


class Kernel(GroupTree):
    """The tree of groups in a folder, with the kernel's refusals. Folders in `forbidden` belong to another user."""

    def __init__(self, top, controllers="cpu memory pids"):
        self.top, self.forbidden, self.killed = top, set(), []
        self._dress(top, controllers)

    def _dress(self, group, controllers):
        files = {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.controllers": controllers, "cgroup.kill": ""}
        if group != self.top and "memory" in controllers:
            files |= {"memory.max": "max", "memory.swap.max": "max", "memory.oom.group": "0", "memory.peak": "0"}
            files |= {"memory.events": "low 0\noom 0\noom_kill 0\n"}
        if group != self.top and "pids" in controllers:
            files |= {"pids.max": "max"}
        for name, text in files.items():
            (group / name).write_text(text)

    def _refuse(self, number):
        raise OSError(number, os.strerror(number))

    def writable(self, path):
        return (path if path.is_dir() else path.parent) not in self.forbidden

    def make(self, path):
        if not self.writable(path):
            self._refuse(errno.EACCES)
        path.mkdir()
        self._dress(path, (path.parent / "cgroup.subtree_control").read_text())

    def remove(self, path):
        if (path / "cgroup.procs").read_text() or any(below.is_dir() for below in path.iterdir()):
            self._refuse(errno.EBUSY)
        for file in path.iterdir():
            file.unlink()
        path.rmdir()

    def write(self, path, text):
        if not self.writable(path):
            self._refuse(errno.EACCES)
        if not path.exists():
            self._refuse(errno.ENOENT)
        group, before = path.parent, path.read_text()
        enabled = (group / "cgroup.subtree_control").read_text()
        if path.name == "cgroup.procs":
            if group != self.top and enabled:  # no processes where groups below share controllers
                self._refuse(errno.EBUSY)
            for other, _, _ in os.walk(self.top):  # another process may remove a group meanwhile
                with suppress(FileNotFoundError):
                    procs = Path(other, "cgroup.procs")
                    procs.write_text("".join(f"{pid}\n" for pid in procs.read_text().split() if pid != text))
            text = f"{path.read_text()}{text}\n"
        elif path.name == "cgroup.subtree_control":
            if group != self.top and (group / "cgroup.procs").read_text():
                self._refuse(errno.EBUSY)
            wanted = {name.removeprefix("+") for name in text.split()}
            if not wanted <= set((group / "cgroup.controllers").read_text().split()):
                self._refuse(errno.ENOENT)
            text = " ".join(sorted({*before.split(), *wanted}))
        elif path.name == "cgroup.kill":
            self.killed += (group / "cgroup.procs").read_text().split()
            (group / "cgroup.procs").write_text("")
        elif path.name in LIMITS and not (text == "max" or text.isdigit()):
            self._refuse(errno.EINVAL)
        path.write_text(text)

    def fill(self, group):
        """Act as at an end for want of memory."""
        self.write(group / "cgroup.kill", "1")
        (group / "memory.events").write_text("low 0\noom 1\noom_kill 3\noom_group_kill 1\n")
        (group / "memory.peak").write_text(str(700 << 20))


@pytest.fixture
def kernel(tmp_path):
    """A tree as systemd makes it for a user: `app` may have groups, and the run is in one of them."""
    kernel = Kernel(tmp_path)
    kernel.write(tmp_path / "cgroup.subtree_control", "+memory +pids")
    for name in ("user", "user/app", "user/app/run"):
        kernel.make(tmp_path / name)
        if name != "user/app/run":
            kernel.write(tmp_path / name / "cgroup.subtree_control", "+memory +pids")
    kernel.write(tmp_path / "user/app/run/cgroup.procs", str(os.getpid()))
    kernel.forbidden = {tmp_path, tmp_path / "user"}
    return kernel


def groups_of(kernel, path="user/app/run"):
    return MemoryGroups.found(MOUNTS.format(root="/", at=kernel.top), f"1:cpu:/\n0::/{path}\n", kernel)


def test_the_group_of_this_process_is_found_in_the_mounted_tree():
    of = cgroups.own_group
    assert of(MOUNTS.format(root="/", at="/sys/fs/cgroup"), "0::/a/b\n") == (
        Path("/sys/fs/cgroup"),
        Path("/sys/fs/cgroup/a/b"),
    )
    assert of(MOUNTS.format(root="/docker/7", at="/cg\\040roup"), "0::/docker/7/a\n")[1] == Path("/cg roup/a")
    for mounts, member in (
        ("30 1 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "4:memory:/x\n0::/\n"),  # version 1
        (MOUNTS.format(root="/", at="/cg"), "4:memory:/x\n"),
        (MOUNTS.format(root="/docker/7", at="/cg"), "0::/docker/8\n"),
        (MOUNTS.format(root="/", at="/cg"), "0::/../other\n"),
    ):
        with pytest.raises(Unavailable):
            of(mounts, member)


def test_groups_are_made_in_the_nearest_group_that_may_have_them(kernel):
    groups = groups_of(kernel)
    assert groups.home == kernel.top / "user/app", "its own holds processes, and has no groups below it"
    assert (kernel.top / "user/app/run/cgroup.subtree_control").read_text() == ""
    group = groups.group(memory_mb=512, tmp_mb=64, processes=32)
    read = {name: (group.path / name).read_text() for name in LIMITS}
    assert read["memory.max"] == str((512 + 64 + cgroups.OWN_MB) << 20)
    assert (read["memory.swap.max"], read["memory.oom.group"]) == ("0", "1")
    assert read["pids.max"] == str(32 + cgroups.OWN_PROCESSES)
    group.add(4711)
    assert "4711" in (group.path / "cgroup.procs").read_text().split()
    assert not group.removed(), "the kernel keeps a group with processes"
    group.kill()
    assert kernel.killed[-1] == "4711" and group.removed() and not group.path.exists()
    assert group.removed(), "once is enough"


def test_a_group_without_processes_gets_the_controllers_that_it_lacks(kernel):
    kernel.write(kernel.top / "user/app/run/cgroup.kill", "1")
    kernel.make(kernel.top / "user/app/run/inner")
    kernel.write(kernel.top / "user/app/run/inner/cgroup.procs", str(os.getpid()))
    assert groups_of(kernel, "user/app/run/inner").home == kernel.top / "user/app/run"
    assert (kernel.top / "user/app/run/cgroup.subtree_control").read_text() == "memory pids"


@pytest.mark.parametrize("why", ["others'", "limited", "no controller", "the root", "cannot be written", "no swap"])
def test_where_no_group_can_be_made_the_reason_is_given(kernel, why, tmp_path):
    path, app = "user/app/run", tmp_path / "user/app"
    if why == "others'":
        kernel.forbidden.add(app)
    elif why == "limited":  # what a run starts stays inside the limit of the run
        kernel.write(app / "run/memory.max", str(1 << 30))
    elif why == "no controller":
        (app / "cgroup.subtree_control").write_text("cpu")
        (app / "cgroup.controllers").write_text("cpu pids")
    elif why == "the root":  # its settings are the machine's
        kernel.forbidden, path = set(), ""
        (tmp_path / "cgroup.subtree_control").write_text("")
    elif why == "cannot be written":
        kernel.write = lambda *_: kernel._refuse(errno.EOPNOTSUPP)
    if why == "no swap":
        before = kernel._dress
        kernel._dress = lambda group, controllers: (before(group, controllers), (group / "memory.swap.max").unlink())
        assert groups_of(kernel).home == app, "a kernel without swap has no limit of it"
        return
    with pytest.raises(Unavailable):
        groups_of(kernel, path)
    assert not list(tmp_path.rglob(f"{cgroups.PREFIX}*"))


def test_groups_of_killed_runs_are_removed_and_those_in_use_are_not(kernel):
    groups = groups_of(kernel)
    used = groups.group(memory_mb=64, tmp_mb=8, processes=4)
    left = groups.group(memory_mb=64, tmp_mb=8, processes=4)
    left.add(4712)
    left.forget()  # as the end of its process does
    groups_of(kernel)
    assert used.path.exists() and not left.path.exists() and "4712" in kernel.killed
    other = used.path.with_name("other-group")
    kernel.make(other)
    groups_of(kernel)
    assert other.exists(), "only ours"


def test_a_group_that_a_start_beside_us_removed_is_made_again(kernel, monkeypatch):
    groups, made, removed = groups_of(kernel), kernel.make, []

    def make(path):
        made(path)
        if not removed:
            removed.append(path)
            kernel.remove(path)

    monkeypatch.setattr(kernel, "make", make)
    group = groups.group(memory_mb=64, tmp_mb=8, processes=4)
    assert group.path.exists() and removed and group.path != removed[0]


def test_code_that_the_kernel_ends_for_lack_of_memory_is_reported_so(kernel):
    """The message is that of the launcher's own check of memory, which is used where there is no group."""
    groups = groups_of(kernel)
    for full in (True, False):
        group = groups.group(memory_mb=512, tmp_mb=64, processes=4)
        group.add(4713)
        ours, theirs = socket.socketpair()
        box = launcher._Box(theirs, 512, "", group=group)
        if full:
            kernel.fill(group.path)
        box.ended()
        told = ours.recv(999).decode()
        assert ('"memory"' in told and "it used 700 MB of 512" in told) == full
        assert ('"killed"' in told) != full
        assert box.pid == 0 and group.removed()
        ours.close(), theirs.close()
    group = groups.group(memory_mb=512, tmp_mb=64, processes=4)
    group.add(4714)
    launcher._Box(theirs, 512, "", group=group).end()
    assert kernel.killed[-1] == "4714"


def test_what_the_kernel_holds_is_not_guessed_where_a_group_counts_it(kernel):
    group = groups_of(kernel).group(memory_mb=128, tmp_mb=8, processes=4)
    for found, wanted in ((None, True), (group, False)):
        ours, theirs = socket.socketpair()
        box = launcher._Box(theirs, 128, "", group=found)
        box.check_memory(Machine(9000, 9999, 100))
        box._began = (box._began[0], -1000.0)  # the kernel worked long enough
        box.check_memory(Machine(8000, 9999, 900))
        ours.setblocking(False)
        try:
            told = bool(ours.recv(99))
        except BlockingIOError:
            told = False
        assert told == wanted
        ours.close(), theirs.close()


class NotedKernel(Kernel):
    """A tree that exists. Its writes are appended to a log."""

    def __init__(self, top):
        self.top, self.forbidden, self.killed = Path(top), set(), []

    def write(self, path, text):
        super().write(path, text)
        with (self.top / "log").open("a") as file:
            file.write(f"{path.parent.name} {path.name} {text}\n")


def serve(channel_fd, top):
    """Run a launcher over the double."""
    groups = MemoryGroups(Path(top) / "user/app", NotedKernel(top))
    launcher._Sandboxes(socket.socket(fileno=channel_fd), groups=groups).run()


def test_a_sandbox_is_in_its_group_before_it_runs_and_leaves_none(kernel):
    """A launcher over the double: a program, a session, and both kinds of end.

    It is a process of its own: the memory of a sandbox counts the pages that it shares with its launcher, so a fork of
    a large test process exceeds the limit as soon as it is measured.
    """
    home, log = kernel.top / "user/app", kernel.top / "log"
    with CodeSandbox("launcher", Limits(memory_mb=128, tmp_mb=16, processes=5)) as sandbox:
        sandbox._stop()
        sandbox._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line = f"from tests.unit.test_cgroups import serve; serve({theirs.fileno()}, {str(kernel.top)!r})"
        served = subprocess.Popen([sys.executable, "-c", line], pass_fds=[theirs.fileno()], cwd=ROOT)
        theirs.close()
        assert sandbox.run("print(6 * 7)").stdout == "42\n"
        session = sandbox.session()
        assert session.run("x = 3").status == "ok" and session.run("x + 1").stdout == "4\n"
        used = [one for one in home.glob(f"{cgroups.PREFIX}*") if (one / "cgroup.procs").read_text()]
        assert len(used) == 2, "of the session, and of the sandbox that was started ahead"
        session.close()
    assert served.wait(60) == 0
    ended_s = time.monotonic() + 20
    while list(home.glob(f"{cgroups.PREFIX}*")) and time.monotonic() < ended_s:
        time.sleep(0.02)
    assert not list(home.glob(f"{cgroups.PREFIX}*"))
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {text for _, name, text in lines if name == "memory.max"} == {str((128 + 16 + cgroups.OWN_MB) << 20)}
    added = [group for group, name, _ in lines if name == "cgroup.procs"]
    assert len(added) == len(set(added)) == 3, "one process each: what it starts is in the group too"
    for group in added:
        names = [name for one, name, _ in lines if one == group]
        assert names.index("memory.max") < names.index("cgroup.procs") < names.index("cgroup.kill")


def test_the_memory_of_this_machines_sandboxes_is_bounded_by_one_of_two():
    groups, said = cgroups.here()
    assert said.startswith("a cgroup in" if groups else "a watch")
