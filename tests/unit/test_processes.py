"""Commands under a guard: they end with all that they started, whatever ends the process that wanted them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.processes import child, guard, tree
from verl.processes.child import Child, command_line, output_of
from verl.processes.guard import Order

FAMILY = """
import os, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(left.pid, own.pid, flush=True)
"""


def until(ready: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline_s, f"waited 30 s for {what}"
        time.sleep(0.01)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def family(code: str = "time.sleep(600)") -> tuple[Child, list[int]]:
    """A command with a child in a session of its own and one in the same, and the pids of all three."""
    read, write = os.pipe()
    one = Child(python(FAMILY + code), stdout=write)
    os.close(write)
    with open(read) as output:
        pids = [int(pid) for pid in output.readline().split()]
    return one, [one.pid, *pids]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if tree.started(pid)]


def test_the_exit_code_is_that_of_the_command() -> None:
    for code, wanted in (
        ("raise SystemExit(3)", 3),
        ("", 0),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ):
        one = Child(python(code), stderr=child.NOTHING)
        assert one.wait(30) == wanted and one.exit_code == wanted and one.stop() == wanted


def test_a_command_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        one = Child([str(tmp_path / "none")], stderr=log)
    assert (one.pid, one.wait(30)) == (0, guard.NOT_STARTED)
    assert "No such file" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("end", ["end", "stop", "forgotten", "ends itself", "guard killed", "guard stopped"])
def test_all_that_it_started_ends_with_it(end: str) -> None:
    one, pids = family("" if end == "ends itself" else "time.sleep(600)")
    if end == "end":
        one.end()
        assert one.wait(30) == -signal.SIGKILL
    elif end == "stop":
        assert one.stop() == -signal.SIGKILL and not alive(pids)
    elif end == "forgotten":
        del one
    elif end == "guard killed":
        os.kill(one.guard_pid, signal.SIGKILL)
        until(lambda: not alive(pids[:1]), "the kernel to end the command")
        one.stop()
        os.kill(pids[1], signal.SIGKILL)  # in a session of its own: it cannot be found any more
    elif end == "guard stopped":
        os.kill(one.guard_pid, signal.SIGSTOP)
        one.stop(0.5)
    until(lambda: not alive(pids), f"{pids}, of which {alive(pids)} are left")


def test_it_ends_with_a_parent_that_is_killed_even_while_it_is_busy(tmp_path: Path) -> None:
    """Nothing that it does by itself is needed: a command that hangs ends too."""
    code = f"""
    import time
    from verl.processes.child import Child
    log = open({str(tmp_path / "log")!r}, "wb")
    one = Child([{sys.executable!r}, "-c", {FAMILY + "while True: pass"!r}], stdout=log)
    print(one.pid, one.guard_pid, flush=True)
    time.sleep(600)
    """
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    until(lambda: "\n" in (tmp_path / "log").read_text(), "its children")
    pids += [int(pid) for pid in (tmp_path / "log").read_text().split()]
    assert len(alive(pids)) == 4
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    until(lambda: not alive(pids), "all of them to end")


def test_without_a_control_socket_it_ends_with_a_parent_that_is_killed() -> None:
    code = f"""
    import os, subprocess, time
    from verl.processes.child import command_line
    from verl.processes.guard import Order
    subprocess.Popen(command_line(Order([{sys.executable!r}, "-c", {FAMILY + "time.sleep(600)"!r}], os.getpid())))
    time.sleep(600)
    """
    parent = subprocess.Popen(python(code), stdout=subprocess.DEVNULL)
    until(lambda: len(tree.descendants(parent.pid)) == 4, "its family")
    pids = tree.descendants(parent.pid)
    parent.kill()
    parent.wait(30)
    until(lambda: not alive(pids), "all of them to end")


def test_a_fork_of_the_parent_does_not_keep_it() -> None:
    one, pids = family()
    if (fork := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    one.end()
    until(lambda: not alive(pids), "all of them to end")
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


def test_it_lives_on_when_the_thread_that_started_it_ends() -> None:
    """The kernel's own signal for the end of a parent follows the thread."""
    found: list[Child] = []
    thread = threading.Thread(target=lambda: found.append(Child(python("import time; time.sleep(600)"))))
    thread.start()
    thread.join()
    assert tree.started(found[0].pid)
    time.sleep(3 * guard.LOOK_S)
    assert found[0].exit_code is None and found[0].stop() == -signal.SIGKILL


def test_a_stopped_command_has_its_grace_and_no_more() -> None:
    kind = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); time.sleep(600)"
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    for code, grace_s, wanted in ((kind, 30.0, 7), (kind, 0.0, -9), (stubborn, 0.3, -9)):
        read, write = os.pipe()
        one = Child(python(code), stdout=write, grace_s=grace_s)
        os.close(write)
        assert os.read(read, 1) == b"\n"
        assert one.stop() == wanted
        os.close(read)


def test_other_processes_end_with_it_if_they_are_still_the_same() -> None:
    others = [subprocess.Popen(python("import time; time.sleep(600)"), start_new_session=True) for _ in range(3)]
    one = Child(())
    one.also_end([others[0].pid, one.guard_pid])
    one.also_end([others[1].pid])
    one._control.sendall(f"{others[2].pid} {tree.started(1)}\n".encode())  # another process had this number
    assert one.stop() == 0 and one.pid == 0
    assert [other.wait(30) for other in others[:2]] == [-9, -9] and others[2].poll() is None
    others[2].kill()
    others[2].wait(30)


def test_only_its_control_socket_and_not_a_signal_ends_it_early() -> None:
    """A signal to all processes of a run is for the run, which still needs its servers while it saves."""
    one, pids = family()
    os.kill(one.guard_pid, signal.SIGTERM)
    time.sleep(3 * guard.LOOK_S)
    assert len(alive(pids)) == 3 and one.stop() == -9
    line = command_line(Order(python("import time; print(flush=True); time.sleep(600)"), os.getpid()))
    free = subprocess.Popen(line, stdout=subprocess.PIPE)
    assert free.stdout is not None and free.stdout.readline() == b"\n"
    free.terminate()
    assert free.wait(30) == 128 + 9
    free.stdout.close()


def test_a_command_whose_parent_has_ended_is_not_started(tmp_path: Path) -> None:
    touch = ["touch", str(tmp_path / "ran")]
    assert subprocess.run(command_line(Order(touch, 1)), timeout=30).returncode == 1
    assert not (tmp_path / "ran").exists()
    assert subprocess.run(command_line(Order(touch, os.getpid())), timeout=30).returncode == 0
    assert (tmp_path / "ran").exists()


def test_the_end_of_a_pipe_is_noticed_while_others_live() -> None:
    """Neither the guard nor this process holds the command's end of it."""
    read, write = os.pipe()
    one = Child(
        python(f"import os, time; os.write({write}, b'x'); os.close({write}); time.sleep(600)"), pass_fds=[write]
    )
    os.close(write)
    assert (os.read(read, 9), os.read(read, 9)) == (b"x", b"")
    os.close(read)
    assert one.exit_code is None
    one.stop()


def test_the_output_of_a_short_command() -> None:
    assert output_of([sys.executable, "-c", "print(5)"], timeout_s=30) == (0, "5")
    assert output_of([sys.executable, "-c", "raise SystemExit('no')"], timeout_s=30) == (1, "no")
    assert output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)[0] == -1
    with pytest.raises(OSError):
        output_of(["/nowhere/python"], timeout_s=1)


@pytest.mark.parametrize("lists", [True, False])
def test_processes_are_found_with_and_without_lists_of_children(monkeypatch: pytest.MonkeyPatch, lists: bool) -> None:
    monkeypatch.setattr(tree, "LISTS_CHILDREN", lists and tree.LISTS_CHILDREN)
    one, pids = family()
    assert set(tree.descendants(one.guard_pid)) == set(pids)
    assert tree.session_of(pids[0]) == {pids[0], pids[2]}
    one.stop()
    assert tree.descendants(one.guard_pid) == [] and tree.started(pids[0]) == ""
