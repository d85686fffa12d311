"""The code sandbox: nothing gets out, programs do what they do elsewhere, and graders cannot be fooled from inside."""

import asyncio
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import sandbox_escapes
from each import FULL_GRID, each, matrix
from sandbox_escapes import ADD, CHEATS, fenced

from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Toolbox, close_tools
from verl.chat.parsing import ToolCall
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.assemble_rewards import sandbox_of
from verl.processes import memory, tree
from verl.reward.code import code_score, program_of, same_result, same_text
from verl.reward.compute import compute_score
from verl.sandbox import code as sandboxes
from verl.sandbox import launcher
from verl.sandbox.code import CodeSandbox, Limits, Ran, SandboxGone, _Link
from verl.tools.code_interpreter import output_text
from verl.tools.function_tool import ToolBroken
from verl.types import Task

NOBODY = 65534
BWRAP = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed (apt-get install bubblewrap)"
)
TIERS = ["launcher", pytest.param("bubblewrap", marks=[BWRAP, pytest.mark.slow])]


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request):
    with CodeSandbox(request.param, Limits(wall_s=20, cpu_s=10)) as made:
        yield made


def an_interpreter_for(uid: int) -> str:
    """One that this user may run; its own may be in root's home."""
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3.11", "/usr/bin/python3"):
        command = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(command, user=uid, group=uid, extra_groups=[], cwd="/", timeout=60).returncode == 0:
                return path
        except OSError:
            continue
    pytest.skip("no Python 3.11 that nobody may run")


SOME = ("launcher", "root", 8)
WHERE = [SOME, ("launcher", "root", 1), pytest.param("bubblewrap", "nobody", 1, marks=BWRAP)]
CROSSED = [("launcher", "nobody", 1), pytest.param("bubblewrap", "root", 1, marks=BWRAP)]


@matrix("tier, who, every", [*WHERE, *(CROSSED if FULL_GRID else ())])
def test_nothing_gets_out_and_no_grader_is_fooled(tier, who, every):
    if who == "root":
        if os.geteuid() != 0:
            pytest.skip("the tests do not run as root")
        python, user = os.path.realpath(sys.executable), {}
    elif os.geteuid() == 0:
        python, user = an_interpreter_for(NOBODY), {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    else:
        python, user = os.path.realpath(sys.executable), {}
    command = [python, sandbox_escapes.__file__, tier, str(every)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd="/", **user)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(sandbox_escapes.ATTEMPTS) > 60 and len(CHEATS) >= 7
    assert json.loads(ran.stdout) == {}


def test_the_attempts_succeed_without_a_sandbox(tmp_path):
    """Else an attempt that fails for a reason of its own would count as held."""
    host = sandbox_escapes.Host(tmp_path)
    try:
        for name in sandbox_escapes.NAKED:
            ran = subprocess.run([sys.executable, "-c", host.code(name)], capture_output=True, text=True, cwd=tmp_path)
            for left in tmp_path.glob("l"):
                left.unlink()
            assert "BREACH" in ran.stdout, (name, ran)
    finally:
        host.close()
        del os.environ["TOKEN"]


EXPRESSIONS = (
    [f"sum(range({n}))" for n in range(10, 30)]
    + [f"sorted('{word}')" for word in ("sandbox", "kernel", "naïve", "日本語", "🙂a", "")]
    + [f"{a} {op} {b}" for op in ("+", "-", "*", "//", "%", "**") for a, b in ((7, 3), (-7, 3), (10**20, 9), (2, 64))]
    + [f"__import__('{m}').__name__" for m in ("json", "re", "heapq", "decimal", "sqlite3", "zlib", "ctypes", "uuid")]
    + [f"[x ** {k} for x in range(5)]" for k in range(10)]
    + [f"__import__('math').comb({n}, {n // 2})" for n in range(10, 22)]
    + [f"__import__('itertools').{f}" for f in ("chain([1], [2]).__next__()", "accumulate([3, 4]).__next__()")]
    + [f"'{text}'.encode().hex()" for text in ("abc", "é", "\\n", "日")]
    + [f"__import__('fractions').Fraction({a}, {b})" for a, b in ((1, 3), (-6, 4), (10, 5))]
    + [
        "{**{'a': 1}, 'b': [None, True]}",
        "(lambda *a, **k: (a, k))(1, b=2)",
        "__import__('datetime').date(2024, 2, 29)",
    ]
    + ["__import__('re').findall(r'[0-9]+', 'a1b22c333')", "'%.3f' % 2.5", "hash(1)", "float('nan') != float('nan')"]
)
PROGRAMS = json.loads((Path(sandbox_escapes.__file__).parent / "data" / "sandbox_programs.json").read_text())
"""name, code, stdin (or `repeat`: a text, how often) -> status, stdout."""


def test_programs_do_what_they_do_elsewhere(sandbox):
    for p in PROGRAMS:
        text, times = p["repeat"] or (p["stdin"], 1)
        ran = sandbox.run(p["code"], text * times)
        assert (ran.status, ran.stdout) == (p["status"], p["stdout"]), (p["name"], ran)
    assert len(PROGRAMS) + len(EXPRESSIONS) == 123
    # One process each, and one sandbox.
    ran = sandbox.run_all("import sys\nprint(eval(sys.stdin.read()))", [{"stdin": text} for text in EXPRESSIONS])
    assert [(one.status, one.stdout) for one in ran] == [("ok", f"{eval(text)}\n") for text in EXPRESSIONS]
    assert "ZeroDivisionError" in (said := sandbox.run("def f():\n    1/0\nf()").stderr)
    assert "main.py" in said and "cell.py" not in said and "launcher" not in said
    assert sandbox.run("import random; print(random.random())") != sandbox.run("import random; print(random.random())")


def test_a_case_that_ends_its_sandbox_costs_no_other(sandbox):
    with CodeSandbox(sandbox.tier, Limits(wall_s=1, cpu_s=1, memory_mb=256)) as small:
        code = "n = int(input())\nif n == 1:\n    while True: pass\nif n == 2:\n    import time\n    for _ in range(4):\n        if __import__('os').fork() == 0: break\n    x = [__import__('os').urandom(1 << 20) for _ in range(100)]; time.sleep(5)\nprint(n)"  # noqa: E501
        ran = small.run_all(code, [{"stdin": str(n)} for n in (0, 1, 2, 3)])
        assert [one.status for one in ran] in (["ok", "timeout", "memory", "ok"], ["ok", "timeout", "timeout", "ok"])
        assert [one.stdout for one in ran] == ["0\n", "", "", "3\n"]
        late = small.run_all("while True: pass", [{"stdin": ""}] * 9, within_s=1.5)
        assert 1 <= len(late) < 9


def test_many_at_once(sandbox):
    found = {}

    def one(n):
        found[n] = sandbox.run(f"print({n})").stdout

    threads = [threading.Thread(target=one, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"{n}\n" for n in range(24)}


def test_sandboxes_do_not_share_their_number_of_processes(sandbox):
    code = "import os, time\nfor _ in range(24):\n    if os.fork() == 0:\n        time.sleep(2)\n        os._exit(0)\n"
    code += "time.sleep(1.5)"
    found = []
    threads = [threading.Thread(target=lambda: found.append(sandbox.run(code).status)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["ok"] * 3


def test_a_session_keeps_names_until_a_limit(sandbox):
    with CodeSandbox(sandbox.tier, Limits(wall_s=2)) as small:
        session, other = small.session(), small.session()
        assert session.run("a = 2\nopen('f', 'w').write('x')").stdout == "1\n"
        assert session.run("a += 1\na").stdout == "3\n"
        assert session.run("print(open('f').read())").stdout == "x\n"
        assert session.run("1/0").status == "error" and session.run("a").stdout == "3\n"
        assert other.run("a").status == "error"  # its own names
        assert session.run("import time; time.sleep(9)").status == "timeout" and session.lost
        assert session.run("a").status == "error" and not session.lost
        session.close()
        other.close()


def test_every_cell_has_its_own_seconds_and_all_that_it_said(sandbox):
    burn = "import time\nuntil = time.process_time() + 0.7\nwhile time.process_time() < until: pass\n"
    with CodeSandbox(sandbox.tier, Limits(wall_s=20, cpu_s=1)) as small:
        session = small.session()
        assert [session.run(burn + "1").stdout for _ in range(2)] == ["1\n"] * 2
        ran = [session.run(f"import sys\nprint({i})\nprint({i}, file=sys.stderr)") for i in range(80)]
        assert [(one.stdout, one.stderr) for one in ran] == [(f"{i}\n", f"{i}\n") for i in range(80)]
        assert session.run("while True: pass").status == "timeout"
        session.close()


def test_a_dead_launcher_is_replaced_and_a_dead_sandbox_is_no_result():
    with CodeSandbox("launcher") as sandbox:
        session = sandbox.session()
        assert session.run("1").stdout == "1\n"
        sandbox._popen.kill()
        sandbox._popen.wait()
        assert session.run("2").stdout == "2\n"  # running sessions continue
        session.close()
        sandbox.run("1")
        assert sandbox.run("print(3)").stdout == "3\n"
    with pytest.raises(ValueError, match="tier='docker': .* none runs code that a model wrote with all rights"):
        CodeSandbox("docker")


def test_a_program_whose_launcher_dies_is_no_result_and_ends_with_it():
    with CodeSandbox("launcher") as sandbox:
        sandbox.run("1")
        found = []

        def one():
            try:
                found.append(sandbox.run("import time; time.sleep(15)"))
            except SandboxGone as e:
                found.append(e)

        thread = threading.Thread(target=one)
        began_s = time.monotonic()
        thread.start()
        time.sleep(0.3)
        below = tree.descendants(sandbox._popen.pid)
        assert len(below) >= 2, "process 1 and the program"
        sandbox._popen.kill()
        sandbox._popen.wait()
        assert sandbox.run("print(3)").stdout == "3\n", "no spare sandbox of a launcher that is gone is used"
        thread.join()
        assert isinstance(found[0], SandboxGone) and time.monotonic() - began_s < 10
        assert not until_gone(below)


def until_gone(pids, there=lambda pid: not ended(pid)):
    """Those that are still there, processes that run, after some seconds."""
    until_s = time.monotonic() + 10
    left = pids
    while left and time.monotonic() < until_s:
        left = [pid for pid in pids if there(pid)]
        time.sleep(0.02)
    return left


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_sandboxes_that_nobody_wants_any_more_end_whatever_they_were_at(sandbox):
    """Also one that is half begun: a bubblewrap is several processes, which end one by one."""
    with CodeSandbox(sandbox.tier) as small:
        small.run("1")
        for number in range(40):
            link = small._next("")
            time.sleep(0.001 * (number % 20))
            link.close()
        small.connect().close()
        links = [small._next(""), small.connect()]
        request = {"kind": "run", "code": "import time; time.sleep(60)", "stdin": "", "call": "", "nonce": ""}
        for link in links:
            link.cell.sendall(json.dumps(request | {"limits": asdict(Limits(wall_s=60))}).encode() + b"\n")
        time.sleep(0.5)
        for link in links:
            link.guard.close()  # its request continues
        small._spare.close()
        small._spare = None
        until_s = time.monotonic() + 20
        while (left := tree.descendants(small._popen.pid)) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert left == []
        for link in links:
            link.close()


ALL_OF_MEMORY = "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = b'x' * (100 << 20)"


def test_the_memory_of_all_its_processes_is_limited(sandbox):
    code = f"{ALL_OF_MEMORY}\ntime.sleep(15)"
    with CodeSandbox(sandbox.tier, Limits(wall_s=20, memory_mb=256)) as small:
        ran = small.run(code)
        assert ran.status == "memory" and "of 256" in ran.why
        session = small.session()
        assert session.run(code).status == "memory" and session.lost
        session.close()
        assert small.run("print(1)").stdout == "1\n"


def test_a_session_is_held_to_its_memory_between_its_cells_too(sandbox):
    code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        time.sleep(3)\n"
    code += "        x = os.urandom(90 << 20)\n        time.sleep(60)\n        os._exit(0)"
    with CodeSandbox(sandbox.tier, Limits(memory_mb=128)) as small:
        session = small.session()
        assert session.run(code).status == "ok"  # it ends before what it left behind has grown
        poller = select.poll()  # select() takes no descriptor above 1023, which a long run of tests may have
        poller.register(session._link.cell, select.POLLIN)
        assert poller.poll(60_000), "nobody looked at it"
        ran = session.run("1")
        assert (ran.status, session.lost) == ("memory", True) and "of 128" in ran.why
        assert session.run("2").stdout == "2\n"
        session.close()


SOCKETS = """
import os, socket, time
for _ in range(2): os.fork()
held = []
while True:
    try: held += socket.socketpair()
    except OSError: time.sleep(60)  # as many files as it may have: it is held against what they hold
    for one in held[-2:]:
        one.setblocking(False)
        try:
            while one.send(bytes(1 << 15)): pass
        except BlockingIOError: pass
"""
BACKLOG = """
import socket, time
server = socket.socket(socket.AF_UNIX)
server.bind("s")
server.listen(4096)
while True:
    with socket.socket(socket.AF_UNIX) as one:  # closed, and what it sent is kept
        one.setblocking(False)
        one.connect("s")
        try:
            while one.send(bytes(1 << 15)): pass
        except BlockingIOError: pass
"""


@pytest.mark.parametrize("code", [SOCKETS, BACKLOG], ids=["pairs", "a backlog"])
def test_what_sockets_hold_is_memory_of_the_sandbox(sandbox, code):
    with CodeSandbox(sandbox.tier, Limits(wall_s=20, memory_mb=64)) as small:
        ran = small.run(code)
        assert ran.status == "memory" and "of 64" in ran.why, ran


@contextlib.contextmanager
def boxes_over(*programs):
    """A sandbox of the launcher for each program, which has not been looked at, and the program's output."""
    with contextlib.ExitStack() as stack:
        found = []
        for program in programs:
            guard, ours = (stack.enter_context(one) for one in socket.socketpair())
            popen = stack.enter_context(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
            stack.callback(popen.kill)
            box = launcher._Box(guard, 128.0, "", outer=True)
            box.pid = popen.pid
            found.append((box, popen.stdout, ours))
        yield found


WORKS = "import os\nwhile os.times().system < 0.4: os.stat('/')" + "\nos.write(1, b'.')\nwhile True: pass"
SLEEPS = "import time; print('.', flush=True); time.sleep(60)"


def test_what_the_kernel_grows_by_is_of_the_sandbox_that_it_works_for():
    with boxes_over(WORKS, SLEEPS) as found:
        for box, _, _ in found:
            box.check_memory(memory.Machine(9000, 9999, 100))
        for _, output, _ in found:
            output.read(1)
        for grown_mb in (127, 200):
            assert not any(box.reported for box, _, _ in found)
            for box, _, _ in found:
                box.check_memory(memory.Machine(8000, 9999, 100 + grown_mb))
        assert [box.reported for box, _, _ in found] == [True, False]
        assert json.loads(found[0][2].recv(999)) == {"status": "memory", "why": "it used 200 MB of 128"}


def test_a_machine_without_memory_ends_the_sandbox_that_ran_while_it_went():
    with boxes_over(SLEEPS, SLEEPS) as ((first, _, _), (last, _, _)):
        first.check_memory(memory.Machine(5000, 64_000))
        last.check_memory(memory.Machine(1500, 64_000))
        for free_mb, total_mb in ((1100, 64_000), (900, 16_000)):
            launcher.free_memory([last, first], memory.Machine(free_mb, total_mb))
            assert not first.reported and not last.reported
        launcher.free_memory([last, first], memory.Machine(900, 64_000))
        assert (first.reported, last.reported) == (True, False)


def test_the_end_of_process_1_is_that_of_the_code_that_it_runs(sandbox):
    """In every way in which code can do it, a reward is 0 and a model gets the reason. An error of the sandbox would be
    tried again."""
    name = f"H17{os.getpid()}"
    code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0); time.sleep(60)"
    with CodeSandbox(sandbox.tier, Limits(wall_s=60)) as small:
        session, found = small.session(), []
        for run in (small.run, session.run):
            thread = threading.Thread(target=lambda run=run: found.append(run(code)))
            thread.start()
            until_s = time.monotonic() + 20
            while not (comm := sandbox_escapes.named_processes(name)) and time.monotonic() < until_s:
                time.sleep(0.02)
            os.kill(int(Path(comm[0]).with_name("stat").read_text().rpartition(")")[2].split()[1]), 9)  # its parent
            thread.join()
            assert (found[-1].status, found[-1].why) == ("killed", "it ended the process that ran it")
            assert not until_gone([comm[0]], os.path.exists)
        assert session.lost and "it ended the process that ran it" in output_text(found[-1], session.lost, small.limits)
        assert session.run("2").stdout == "2\n"
        session.close()


def test_no_sandbox_holds_what_another_was_asked(sandbox):
    """Each is a fork of the launcher, and may read all that it holds."""
    with CodeSandbox(sandbox.tier) as small:
        session = small.session()
        for _ in range(3):
            assert small.run("print(len('H17' + 'ASKED-' + input()))", "H17ASKED-" * 2).stdout == "27\n"
            session.run("'H17' 'ASKED-'; x = 'H17ASKED-'")
        assert b"verl.sandbox.launcher" in (held := memory_of(small._popen.pid))
        assert b"H17ASKED-" not in held
        session.close()


def memory_of(pid):
    found = b""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(first)
                found += memory.read(last - first)
    return found


def answered(said=b"", told=b"", close=True):
    """Return the caller's result for these bytes of a sandbox, and the orders that the launcher got from the caller."""
    (cell, inside), (guard, launcher) = socket.socketpair(), socket.socketpair()

    def play():
        nonce = json.loads(inside.makefile("rb").readline())["nonce"].encode()
        time.sleep(0.2)
        launcher.sendall(told) if told else None
        with contextlib.suppress(OSError):  # it hears no more
            inside.sendall(said.replace(b"NONCE", nonce))
        inside.close() if close else None

    thread = threading.Thread(target=play)
    thread.start()
    try:
        return _Link(cell, guard, ready=True).ask({}, -1.0), launcher.recv(9)
    except SandboxGone as e:
        return str(e), launcher.recv(9)
    finally:
        thread.join()
        for one in (cell, inside, guard, launcher):
            one.close()


def test_a_sandbox_speaks_for_itself_alone_and_only_when_it_is_asked(monkeypatch):
    ok = {"status": "ok", "nonce": "NONCE"}
    assert answered(json.dumps(ok | {"gone": True}).encode() + b"\n")[0]["gone"] is False
    assert answered(json.dumps(ok).encode() + b"\n")[1] == b"+-", "its memory was watched, from 0.05 s on to its end"
    for forged in ({"status": "ok"}, {"status": "ok", "nonce": "0" * 32}, {"status": "ok", "gone": True}, [], 1):
        assert "turn" in (said := answered(json.dumps(forged).encode() + b"\n")[0]) or "no answer" in said
    assert "no answer" in answered(b"[" * 100_000 + b"\n")[0] and "no answer" in answered(b"\xff\n")[0]
    assert answered(b'{"status": "gone", "why": "no sandbox here"}\n')[0] == "no sandbox here"
    ended = answered(told=b'{"status": "killed", "why": "process 1 ended"}')[0]
    assert (ended["status"], ended["gone"]) == ("killed", True), "its end is the doing of the code"
    full = answered(told=b'{"status": "memory", "why": "all of it"}')[0]
    assert (full["status"], full["why"], full["gone"]) == ("memory", "all of it", True)
    late = answered(b"{", close=False)[0]
    assert (late["status"], late["gone"]) == ("timeout", True)
    monkeypatch.setattr(sandboxes, "MAX_LINE_BYTES", 99)
    long = answered(b"x" * 100, close=False)[0]
    assert (long["status"], long["gone"]) == ("output", True)


def test_no_tier_no_run(monkeypatch):
    monkeypatch.setattr(sandboxes.shutil, "which", lambda _: None)

    def run_all(sandbox, *_, base):
        if sandbox.tier == "none":
            return [Ran("ok", "42\n")]
        raise SandboxGone("no namespaces")

    monkeypatch.setattr(CodeSandbox, "run_all", run_all)
    with pytest.raises(ValueError, match=r"bubblewrap: bwrap is not installed; launcher: no namespaces.*Fix"):
        CodeSandbox()
    assert "none" in sandboxes.describe()
    with pytest.raises(ValueError, match="no sandbox"):
        compute_score("taco", "```python\nprint(1)\n```", '{"inputs": [""], "outputs": ["1"]}')
    assert CodeSandbox("none").tier == "none", "it works here, and only who writes it has it"


DAEMONS = """
import os, time
for k in range(3):
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(600)
        print(pid, flush=True)
        os._exit(0)
for k in range(3):
    os.wait()
"""


def test_none_keeps_nothing_in_but_has_its_limits_and_leaves_nothing(tmp_path):
    (tmp_path / "secret").write_text("ours")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_text("1")
    with CodeSandbox("none", Limits(wall_s=20, memory_mb=256), workspace=tmp_path / "files") as naked:
        assert naked.run(f"print(open('{tmp_path}/secret').read())").stdout == "ours\n"
        where, again = naked.run("import os, tempfile; print(os.getcwd(), tempfile.gettempdir())").stdout.split()
        assert "/none-" in where and where == again
        ran = naked.run(DAEMONS)
        pids = [int(line) for line in ran.stdout.split()]
        assert ran.status == "ok" and len(pids) == 3 and not until_gone(pids)
        noted = f"open('{tmp_path}/where', 'w').write(__import__('os').getcwd())\n"
        assert naked.run(f"{noted}{ALL_OF_MEMORY}\ntime.sleep(15)").status == "memory"
        session = naked.session()
        assert session.run("x = open('a').read()\nopen('a', 'w').write('2')").stdout == "1\n"
        kept = session.snapshot()
        session.restore(kept)
        assert session.run("open('a').read()").stdout == "'2'\n" and session.run("x").status == "error"
        pids = [int(line) for line in session.run(DAEMONS).stdout.split()]
        below = tree.descendants(naked._popen.pid)
        naked._popen.kill()  # and with it all that it began, but for sessions
        assert session.run("1").stdout == "1\n" and not any(map(ended, pids))
        session.close()
        assert set(pids) <= set(below) and not until_gone(below)
    assert (tmp_path / "files" / "a").read_text() == "1"
    assert not until_gone([where, (tmp_path / "where").read_text()], os.path.exists)
    with CodeSandbox("none", Limits(wall_s=20, memory_mb=256)) as large:  # its launcher ends with it
        noted = f"\nopen('{tmp_path}/of', 'a').write(f'{{os.getpid()}} ')\nx ="
        assert large.run(f"{ALL_OF_MEMORY.replace(chr(10) + 'x =', noted)}\ntime.sleep(15)").status == "memory"
        large._popen.kill()
        pids = [int(pid) for pid in (tmp_path / "of").read_text().split()]
        assert pids and not until_gone(pids)
    with CodeSandbox("none", Limits(wall_s=1)) as short:
        assert short.run("while True: pass").status == "timeout"
        for how in ("SIGSTOP", "SIGKILL"):  # a program that turns on the process that it runs in
            below = set(tree.descendants(short._popen.pid))
            said = (
                f"import os, signal, time\nopen('{tmp_path}/{how}', 'w').write(f'{{os.getppid()}} {{os.getcwd()}}')\n"
            )
            turns = f"{said}os.kill(os.getppid(), signal.{how})\ntime.sleep(600)"
            assert short.run(turns).status == ("timeout" if how == "SIGSTOP" else "killed")
            pid, where = (tmp_path / how).read_text().split()
            assert not until_gone([int(pid)]) and not until_gone([where], os.path.exists)
        code, link = f"{DAEMONS}open('{tmp_path}/up', 'w').close()\ntime.sleep(600)", short._next("")
        request = {
            "kind": "run",
            "code": code,
            "stdin": "",
            "call": "",
            "nonce": "",
            "limits": asdict(Limits(wall_s=600)),
        }
        link.cell.sendall(json.dumps(request).encode() + b"\n")
        assert not until_gone([tmp_path / "up"], lambda path: not path.exists()), "it runs"
        below = tree.descendants(short._popen.pid)
        short._popen.kill()
        assert len(below) >= 5 and not until_gone(below), "process 1 ends what it began, whoever ended the launcher"
        link.close()


def test_none_is_written_by_hand_and_said(tmp_path):
    said = "none. Warning: code that a model wrote may do all that this run may"
    task = Task(task_id="t", index=0, messages=(), prompt_ids=np.arange(3), data_source="taco")
    config = Config()
    config = changed(config, {"reward.kwargs": {"tier": "none"}})
    assert sandbox_of(config, [task]) == (f"code sandbox of rewards: {said}",)
    yaml = tmp_path / "tools.yaml"
    yaml.write_text("tools:\n- class_name: verl.tools.code_interpreter.CodeInterpreter\n  config: {tier: none}\n")
    tools = load_tools([str(yaml)])
    assert tools["code_interpreter"].held.instance.note() == f"code sandbox of code_interpreter: {said}"
    close_tools(tools)
    score = lambda code: code_score(fenced(code), ADD, tier="none")["score"]  # noqa: E731
    assert score("def add(a, b): return a + b") == 1
    assert [score(CHEATS[name]) for name in ("from the frames", "equal to everything", "json that lies")] == [0] * 3


SUM = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}


@pytest.mark.parametrize("tier", TIERS)
def test_programs_are_scored(tier):
    score = lambda code, truth: code_score(fenced(code), truth, tier=tier)  # noqa: E731
    assert score("a, b = map(int, input().split())\nprint(a + b)", json.dumps(SUM))["score"] == 1
    assert score("a, b = map(int, input().split())\nprint(a * b - a + 2)", SUM)["score"] == pytest.approx(1 / 3)
    assert score("def add(a, b): return a + b", ADD)["score"] == 1
    assert score("class Solution:\n    def add(self, a, b): return a + b", ADD)["score"] == 1
    assert score("print(0.1 + 0.2)", {"inputs": [""], "outputs": ["0.3"]})["score"] == 1
    assert score("print('a  b ')", {"inputs": [""], "outputs": ["a b"]})["score"] == 1
    assert score("print(10)", {"inputs": [""], "outputs": ["10.5"]})["score"] == 0
    assert score("def f(x): return (x, [x])", {"inputs": ["1"], "outputs": [[1, [1]]], "fn_name": "f"})["score"] == 1
    assert code_score("no code", SUM, tier=tier) == {"score": 0.0, "tests": 3.0, "passed": 0.0, "has_code": 0.0}
    with pytest.raises(ValueError, match="inputs"):
        score("print(1)", "{}")
    assert compute_score("taco", fenced("print(1)"), {"inputs": [""], "outputs": ["1"]}, tier=tier)["score"] == 1


@each(
    "value, expected, same",
    [
        (True, [True], True),
        (1, [True], False),
        (True, True, True),
        (1, True, False),
        ([1], [True], False),
        (None, "yes", False),
        ("yes", "yes", True),
        ("yes", '"yes"', True),
        ("3", "3", True),
        (3, "3", True),
        ([1, 2], "[1, 2]", True),
        (2, "[2]", True),
        (2.0, 2, True),
        ({"a": [True]}, {"a": [1]}, False),
        ([], [[]], True),
    ],
)
def test_values_are_compared_as_json(value, expected, same):
    assert same_result(Ran("ok", "", "", json.dumps(value)), expected) is same


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [
        ("1000000007000001", "1000000007000000", False),
        ("-1000000007000001", "-1000000007000000", False),
        ("-7.0000000001", "-7", False),
        ("+7", "7", False),
        ("-7.0000000001", "-7.0", True),
        ("1e3", "1000.0", True),
    ],
)
def test_whole_numbers_are_compared_as_they_are_written(said, wanted, same):
    assert same_text(Ran("ok", said), wanted) is same


def test_the_program_of_an_answer():
    assert program_of("```text\n1 2\n```\nSo:\n```python\nprint(3)\n```") == "print(3)\n"
    assert program_of("```Python3\nprint(1)\n```\nIt prints\n```\n1\n```") == "print(1)\n"
    assert program_of("```\nprint(1)\n```\n```json\n{}\n```") == "print(1)\n"
    assert program_of("```cpp\nint main(){}\n```") is None and program_of("no code") is None


def test_a_long_output_that_is_expected_has_room():
    truth = {"inputs": ["", ""], "outputs": ["1\n" * 60_000, "2"]}
    assert code_score(fenced("print('1\\n' * 60_000)"), truth, tier="launcher")["score"] == 0.5


def test_the_code_tool_keeps_a_session_per_trajectory(tmp_path):
    yaml = tmp_path / "tools.yaml"
    yaml.write_text(
        "tools:\n- class_name: verl.tools.code_interpreter.CodeInterpreter\n"
        "  config: {type: native, tier: launcher, wall_s: 2}\n"
    )
    tools = load_tools([str(yaml)])
    assert tools["code_interpreter"].held.instance.note() == "code sandbox of code_interpreter: launcher"

    def call(code):
        return ToolCall("code_interpreter", {"code": code})

    async def play():
        a, b = (Toolbox(tools, {}, 30.0) for _ in range(2))
        assert (await a.call(call("x = 20\nx + 1"))).text == "21"
        assert "NameError" in (await b.call(call("x"))).text
        assert (await a.call(call("x * 2"))).text == "40"
        assert "more than 2 s" in (said := (await a.call(call("while True: pass"))).text) and "gone" in said
        assert (await a.call(call("y = 1"))).text == "(no output)"
        tools["code_interpreter"].held.instance._sandbox.connect = lambda base: (_ for _ in ()).throw(
            SandboxGone("gone")
        )
        with pytest.raises(ToolBroken):
            await Toolbox(tools, {}, 30.0).call(call("1"))
        assert await a.close() == [] and await b.close() == []

    asyncio.run(play())
    pid = tools["code_interpreter"].held.instance._sandbox._popen.pid
    close_tools(tools)
    assert not Path(f"/proc/{pid}").exists(), "the sandbox ends with the run"


def test_the_start_of_a_run_says_what_keeps_programs_in():
    task = Task(task_id="t", index=0, messages=(), prompt_ids=np.arange(3), data_source="taco")
    config = Config()
    config = changed(config, {"reward.kwargs": {"tier": "launcher"}})
    assert sandbox_of(config, [task]) == ("code sandbox of rewards: launcher",)
    assert sandbox_of(config, [replace(task, data_source="gsm8k")]) == ()
    config = changed(config, {"reward.path": "own.py"})
    assert sandbox_of(config, [task]) == ()


def test_nothing_of_ours_stays_behind():
    with CodeSandbox("launcher") as sandbox:
        sandbox.run("print(1)")
        pid = sandbox._popen.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_why_a_sandbox_ends_is_said_once():
    """A sandbox that is ended for its memory may exceed the limit again before it has ended."""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        box = launcher._Box(theirs, 1.0, "")
        box.report("memory", "first")
        box.report("memory", "again")
        assert json.loads(ours.recv(1 << 16)) == {"status": "memory", "why": "first"}
