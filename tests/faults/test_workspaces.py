"""Sessions over a folder of files: each has its own files, the folder is unchanged, snapshots are unpacked inside."""

import asyncio
import base64
import gzip
import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

import verl
from verl.agent_loop.load_tools import load_tools
from verl.agent_loop.tools import Toolbox, close_tools, contents_of
from verl.chat.parsing import ToolCall
from verl.leftovers import OwnFolder, own_folder
from verl.sandbox import workspace as workspaces
from verl.sandbox.code import CodeSandbox, Limits, SavedFiles
from verl.sandbox.workspace import Workspaces, read_tree
from verl.tools.function_tool import ToolBroken

BWRAP = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed (apt-get install bubblewrap)"
)
LIMITS = Limits(wall_s=30, cpu_s=20, tmp_mb=8)
SHOW = """
import os, stat
def show():
    found = {}
    for folder, folders, names in os.walk(b'.'):
        for path in [os.path.join(folder, name) for name in folders + names]:
            about = os.lstat(path); mode = about.st_mode
            if stat.S_ISREG(mode): what = open(path, 'rb').read()
            elif stat.S_ISLNK(mode): what = os.readlink(path)
            elif stat.S_ISDIR(mode): what = b''
            else: continue
            found[ascii(path[2:])[2:-1]] = (oct(mode), ascii(what)[2:-1], about.st_nlink if what else 0)
    return found
"""


@pytest.fixture(params=["launcher", pytest.param("bubblewrap", marks=[BWRAP, pytest.mark.slow])])
def tier(request):
    return request.param


@pytest.fixture
def base(tmp_path):
    """Make a base of files that not every user may write, such as root's."""
    root = tmp_path / "base"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "gone").mkdir()
    for name, text in (("README", "read me"), ("src/a.py", "A = 1\n"), ("src/deep/b", "b"), ("gone/c", "c")):
        (root / name).write_text(text)
    (root / "run.sh").write_text("#!/bin/sh\necho ran")
    (root / "run.sh").chmod(0o700)
    (root / "README").chmod(0o600)
    (tmp_path / "secret").write_text("H17SECRET")
    (root / "link").symlink_to(tmp_path / "secret")
    return root


def shown(session):
    ran = session.run(SHOW + "show()")
    assert ran.status == "ok", ran
    return eval(ran.stdout)


def ok(session, code):
    ran = session.run(code)
    assert ran.status == "ok", ran
    return ran.stdout


def test_sessions_over_one_folder_do_not_see_each_other_and_never_write_to_it(tier, base):
    before = read_tree(base)
    with CodeSandbox(tier, LIMITS, workspace=base) as sandbox:
        a, b = sandbox.session(), sandbox.session()
        first = shown(a)
        assert first["src/a.py"][1] == "A = 1\\n" and first["README"][1] == "read me"
        assert ok(a, "import subprocess; print(subprocess.check_output(['./run.sh']))") == "b'ran\\n'\n"
        ok(a, "open('src/a.py', 'a').write('B = 2'); os.rename('README', 'new'); __import__('shutil').rmtree('gone')")
        ok(a, "os.mkdir('gone')")
        assert a.run("open('link').read()").status == "error", "the link is one, and leads nowhere"
        assert shown(b) == first and "new" not in first
        changed = shown(a)
        assert changed["src/a.py"][1] == "A = 1\\nB = 2" and "README" not in changed and "gone/c" not in changed
        ran = sandbox.session().run("open('/etc/passwd')")
        assert "No such file" in ran.stderr
        a.close()
        again = sandbox.session()
        assert shown(again) == first
        assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n", "a program by itself has none"
        assert read_tree(base) == before
        (base / "README").write_text("later")
        assert shown(b) == first, "what is changed outside is not seen by those who began before"


def test_a_snapshot_has_the_files_of_its_time_and_outlives_its_session(tier, base):
    code = """
import os, shutil, stat
open('src/a.py', 'a').write('B = 2')
open('run.sh', 'r+').write('#!/bin/SH'); os.utime('run.sh', (1, 1))  # as long as it was
os.unlink('README'); os.symlink('/etc/passwd', 'README')
shutil.rmtree('gone'); os.mkdir('gone'); open('gone/new', 'w').write('n')
shutil.rmtree('src/deep'); open('src/deep', 'w').write('a file now')
open(b'\\xff\\n', 'w').write('odd'); os.link(b'\\xff\\n', 'same'); os.mkdir('empty'); os.chmod('empty', 0o500)
open('script', 'w').write('s'); os.chmod('script', 0o755); os.mkfifo('pipe')
__import__('socket').socket(1).bind('socket')
"""
    with CodeSandbox(tier, LIMITS, workspace=base) as sandbox:
        session = sandbox.session()
        began = session.snapshot()
        x = ok(session, "x = 3")
        ok(session, code)
        then = shown(session)
        kept = session.snapshot()
        assert ok(session, "x") == "3\n" and x == "", "it goes on"
        ok(session, "open('late', 'w'); os.unlink('script'); open('src/a.py', 'w').write('')")
        fork = sandbox.session(start=kept)
        assert shown(fork) == then and then["src/a.py"][1] == "A = 1\\nB = 2" and then["same"][2] == 2
        assert then["README"][1] == "/etc/passwd" and then["src/deep"][1] == "a file now" and "late" not in then
        assert fork.run("x").status == "error", "names are not kept"
        session.restore(kept)
        assert shown(session) == then and session.run("x").status == "error"
        ok(session, "open('more', 'w').write('m')")
        both = session.snapshot()
        session.restore(began)
        assert set(shown(session)) == {
            "README",
            "src",
            "src/a.py",
            "src/deep",
            "src/deep/b",
            "gone",
            "gone/c",
            "run.sh",
            "link",
        }
    kept, both = pickle.loads(pickle.dumps((kept, both)))
    assert "H17" not in base64.b64decode(json.loads(kept.kept)["files"]).decode("latin1")
    with CodeSandbox(tier, LIMITS, workspace=base) as other:
        assert shown(other.session(start=kept)) == then
        later = shown(other.session(start=both))
        assert later.pop("more")[1] == "m" and later == then, "a snapshot of a session that began with one has it all"
    with CodeSandbox(tier, LIMITS) as bare:
        with pytest.raises(ValueError, match="over another workspace"):
            bare.session(start=kept).run("1")
        session = bare.session()
        ok(session, "import os; os.mkdir('d'); open('d/f', 'w').write('1')")
        assert shown(bare.session(start=session.snapshot()))["d/f"][1] == "1", "without a workspace, too"
    (base / "src" / "a.py").write_text("A = 2\n")
    with CodeSandbox(tier, LIMITS, workspace=base) as changed, pytest.raises(ValueError, match="another workspace"):
        changed.session(start=kept).run("1")


def test_a_session_over_a_limit_begins_again_with_the_files_of_its_start(tier, base):
    with CodeSandbox(tier, Limits(wall_s=3, tmp_mb=8), workspace=base) as sandbox:
        session = sandbox.session()
        ok(session, "open('kept', 'w').write('k')")
        session.restore(session.snapshot())
        ok(session, "open('lost', 'w').write('l')")
        assert session.run("while True: pass").status == "timeout" and session.lost
        assert {"kept", "README"} <= shown(session).keys() and "lost" not in shown(session)


def test_what_a_session_writes_and_what_is_kept_of_it_is_bounded(tier, base):
    fill = "try:\n    while True: {}\nexcept OSError as e: print(e.errno)"
    (base / "large").write_bytes(bytes(20 << 20))  # the quota is of changes
    with CodeSandbox(tier, LIMITS, workspace=base) as sandbox:
        session = sandbox.session()
        assert ok(session, "f = open('big', 'wb')\n" + fill.format("f.write(bytes(1 << 18)); f.flush()")) in (
            "28\n",
            "27\n",
        )
        assert session.run("open('README', 'a').write('x' * 99999)").status == "error"
        ok(session, "f.close(); import os; os.unlink('big')")
        ran = session.run("open('large', 'ab').write(b'x')")
        assert ran.status == "error", "to be written to, it has to be copied, and has no room"
        assert ok(session, "n = 0\n" + fill.format("open(f'n{n}', 'w'); n += 1")) == "28\n", "files are counted"
        assert 100 < int(ok(session, "print(n)")) < 64 * 8
        ok(session, "for i in range(n): os.unlink(f'n{i}')")
        ok(session, "for i in range(2):\n  f = open(f's{i}', 'wb'); f.truncate(5 << 20); f.close()")
        with pytest.raises(ValueError, match="no snapshot of the session: ValueError: more than tmp_mb=8 MB"):
            session.snapshot()
        assert ok(session, "os.unlink('s1'); print(1)") == "1\n", "the session goes on"
        assert len(session.snapshot().kept) < 100_000
        ok(session, "os.chmod('README', 0)")
        with pytest.raises(ValueError, match="no snapshot of the session: PermissionError.*README"):
            session.snapshot()
    with CodeSandbox(tier, Limits(wall_s=30, tmp_mb=2)) as bare:
        session = bare.session()
        assert ok(session, "n = 0\n" + fill.format("open(f'n{n}', 'w'); n += 1")) == "28\n"
        assert 100 < int(ok(session, "print(n)")) < 64 * 2, "files are counted without a workspace, too"


def test_a_snapshot_that_packs_badly_is_refused_and_one_that_does_not_fit_too(tier):
    with CodeSandbox(tier, Limits(wall_s=60, cpu_s=30, tmp_mb=64)) as sandbox:
        session = sandbox.session()
        ok(session, "import os; open('f', 'wb').write(os.urandom(20 << 20)) and None")
        kept = session.snapshot()
        ok(session, "open('g', 'wb').write(os.urandom(20 << 20)) and None")
        with pytest.raises(ValueError, match="more than 32 MB when packed"):
            session.snapshot()
        assert ok(sandbox.session(start=kept), "import os; os.path.getsize('f')") == f"{20 << 20}\n"
    with CodeSandbox(tier, LIMITS) as small:
        session = small.session(start=kept)
        with pytest.raises(ValueError, match="the session cannot begin: OSError.*No space"):
            session.run("1")


def hostile(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, text
            info.size = len(text) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(text.encode()) if info.size else None)
    return base64.b64encode(packed.getvalue()).decode()


def test_no_snapshot_reaches_the_host(tier, tmp_path):
    """A snapshot of a session, and one that no session could have made."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    os.chmod(victim, 0o777)
    os.chmod(victim / "file", 0o666)
    file, link, hard, device = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE
    archives = [
        [("x", link, str(victim)), ("x/new", file, "escaped")],
        [("x", link, str(victim / "file")), ("x", file, "escaped")],
        [(f"{victim}/new", file, "escaped"), ("../../../../.." + str(victim) + "/new", file, "escaped")],
        [("x", hard, str(victim / "file")), ("x", file, "escaped")],
        [("x", device, ""), ("/dev/null", file, "escaped"), ("/usr/lib/new", file, "escaped")],
    ]
    wholes = [json.dumps({"gone": [], "files": hostile(members)}) for members in archives]
    empty = hostile([])
    wholes += [
        json.dumps({"gone": [gone], "files": empty}) for gone in (str(victim), "../.." + str(victim / "file"), "")
    ]
    bomb = base64.b64encode(gzip.compress(bytes(64 << 20))).decode()
    cut = hostile([("x", file, "x" * 9999)])[:200]
    wholes += ["", "no json", "[]", "{}", json.dumps({"gone": 3, "files": empty}), '{"gone": [], "files": "!"}']
    wholes += [json.dumps({"gone": [], "files": text}) for text in (bomb, cut, "", "AAAA")]
    with CodeSandbox(tier, LIMITS) as sandbox:
        for whole in wholes:
            session = sandbox.session(start=SavedFiles("", whole))
            try:
                ran = session.run(
                    "import os\nfor f in os.listdir('.'):\n  try: print(open(f).read())\n  except OSError: pass"
                )
                assert "untouched" not in ran.stdout, whole
            except ValueError as e:
                assert "cannot begin" in str(e)
            session.close()
            assert [p.name for p in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "untouched"
            assert not os.path.lexists("/usr/lib/new")
        session = sandbox.session()
        ok(session, f"import os; os.symlink({str(victim)!r}, 'x'); os.symlink('/', 'root')")
        copy = sandbox.session(start=session.snapshot())
        assert ok(copy, "import os; print(sorted(os.listdir()), os.path.exists('x'))") == "['root', 'x'] False\n"
        assert copy.run("open('x/new', 'w')").status == "error"


def test_no_code_takes_the_place_of_what_keeps_its_files(tier):
    """Modules that it leaves where an interpreter may look for them."""
    places = ["/tmp", str(Path(verl.__file__).parents[1]), os.getcwd()]
    names = ["kept", "tarfile", "gzip", "base64", "zlib", "shutil", "io", "stat", "bz2", "lzma", "grp", "pwd", "copy"]
    code = f"""
import os
for place in {places!r}:
    for name in {names!r}:
        try:
            os.makedirs(place, exist_ok=True)
            open(f'{{place}}/{{name}}.py', 'w').write('open("/tmp/taken", "w")\\nraise SystemExit')
        except OSError:
            pass
"""
    with CodeSandbox(tier, LIMITS) as sandbox:
        session = sandbox.session()
        ok(session, code)
        copy = sandbox.session(start=session.snapshot())
        assert ok(copy, "import os; print(os.path.exists('taken'), os.path.exists('gzip.py'))") == "False True\n"
        assert ok(session, "print(os.path.exists('taken'))") == "False\n"


def test_a_workspace_is_files_folders_and_links_and_not_too_many(tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "task").mkdir(parents=True)
    (root / "task" / "f").write_text("1")
    (root / "out").symlink_to("/usr")
    held = Workspaces(root)
    (root / "circle").symlink_to("circle")
    bad = (("n" * 300, "name too long"), ("a\0b", "null"), (7, "cannot be read"), ("circle", "circle"))
    plain = (("..", "outside of"), ("/etc", "outside of"), ("out", "outside of"), ("none", "is no folder"))
    for name, says in (*bad, *plain):
        with pytest.raises(ValueError, match=f"(?i)workspace.*{says}"):
            held.take(name)
    one, two = held.take("task"), held.take("task")
    assert one is two and os.listdir(f"{one.folder}/files") == ["f"]
    held.give_back(one)
    assert os.path.isdir(one.folder)
    held.give_back(two)
    assert os.listdir(held.scratch) == [], "nothing is left of what nobody uses"
    (root / "task" / "f").write_text("2")
    again = held.take("task")
    assert again.digest != one.digest and Path(f"{again.folder}/files/f").read_text() == "2"
    os.utime(root / "task" / "f", (1, 1))
    assert read_tree(root / "task") == again.digest == read_tree(f"{again.folder}/files"), "times are none of it"
    (root / "task" / "f").chmod(0o755)
    assert read_tree(root / "task") != again.digest
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(str(root / "task" / "s"))
        with pytest.raises(ValueError, match="task/s is no file, folder or link"):
            held.take("")
    (root / "task" / "s").unlink()
    assert len(os.listdir(held.scratch)) == 1
    for name, most in (("MAX_FILES", 2), ("MAX_BYTES", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(workspaces, name, most)
            with pytest.raises(ValueError, match="more than"):
                held.take("")
    held.close()
    assert not os.path.exists(held.scratch)
    with pytest.raises(ValueError, match="is no folder"):
        CodeSandbox("launcher", workspace=tmp_path / "none")
    with CodeSandbox("launcher") as bare, pytest.raises(ValueError, match="has none"):
        bare.session("task")


def test_a_tier_that_cannot_lay_files_over_a_folder_is_none(tier, base, monkeypatch):
    monkeypatch.setattr(Workspaces, "folder", lambda held: f"{held.scratch}/none")
    with pytest.raises(ValueError, match=f"{tier}: no sandbox here: .*No such file"):
        CodeSandbox(tier, workspace=base)


def test_a_temporary_folder_goes_with_its_owner_or_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        f"import tempfile, time; tempfile.tempdir = {str(tmp_path)!r}; from verl.leftovers import OwnFolder\n"
        "left = OwnFolder('mine-'); print(left.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as popen:
        left = Path(popen.stdout.readline().strip())
        own = OwnFolder("mine-")
        assert left.is_dir(), "it lives"
        popen.kill()
    other = OwnFolder("mine-")
    assert not left.exists() and own.path.is_dir()
    own.cleanup()
    own.cleanup()
    assert not own.path.exists()
    path = other.path
    del other
    assert not path.exists()


@pytest.mark.parametrize("first", ["the run", "the launcher"])
def test_a_run_that_is_killed_leaves_no_copy(base, first):
    """Its launcher removes it; if that was killed too, the next one that starts."""
    code = (
        "import sys, time\nfrom verl.sandbox.code import CodeSandbox\n"
        f"s = CodeSandbox('launcher', workspace={str(base)!r}); x = s.session(); x.run('1')\n"
        "print(s.workspaces.scratch, s._popen.pid, flush=True); time.sleep(60)"
    )
    live = Workspaces(base)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as popen:
        scratch, launcher = popen.stdout.readline().split()
        if first == "the launcher":
            os.kill(int(launcher), signal.SIGKILL)
        Workspaces(base).close()
        assert os.listdir(scratch), "it lives"
        popen.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while os.path.exists(scratch) and first == "the run":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    Workspaces(base).close()
    assert not os.path.exists(scratch) and os.path.exists(live.scratch)
    live.close()


def test_what_is_held_is_not_removed_whatever_it_is_named(tmp_path):
    """A process of another container may have our number, and a fork outlives the process that made the folder."""
    folder, held = own_folder(tmp_path, "mine-")
    (folder / "file").write_text("1")
    (tmp_path / "mine-link").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other-1").mkdir()
    fork = subprocess.Popen(["sleep", "60"], pass_fds=[held])
    os.close(held)
    others = [own_folder(tmp_path, "mine-") for _ in range(2)]
    assert (folder / "file").exists() and all(one.is_dir() for one, _ in others)
    fork.kill()
    fork.wait()
    os.close(others[0][1])
    last, fd = own_folder(tmp_path, "mine-")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {last.name, others[1][0].name, "mine-link", "other", "other-1"}
    for one in (fd, others[1][1]):
        os.close(one)


def test_the_code_tool_has_the_folder_that_a_row_names(tmp_path, base):
    (tmp_path / "tools.yaml").write_text(
        "tools:\n- class_name: verl.tools.code_interpreter.CodeInterpreter\n"
        f"  config: {{type: native, tier: launcher, workspace: {base}}}\n"
    )
    tools = load_tools([str(tmp_path / "tools.yaml")])

    def call(code):
        return ToolCall("code_interpreter", {"code": code})

    async def play(given, code="import os; print(sorted(os.listdir()))"):
        box = Toolbox(tools, {"code_interpreter": {"create_kwargs": given}}, 30.0)
        try:
            return (await box.call(call(code))).text
        finally:
            assert await box.close() == []

    assert asyncio.run(play({})) == "['README', 'gone', 'link', 'run.sh', 'src']"
    assert asyncio.run(play({"workspace": "src"})) == "['a.py', 'deep']"
    for name in ("none", "../base2"):
        with pytest.raises(ToolBroken, match="is no folder|outside"):
            asyncio.run(play({"workspace": name}))
    before = contents_of(tools)
    assert len(before["agent.tools (code_interpreter)"]) == 64
    (base / "README").write_text("another")
    assert contents_of(tools) != before, "a run is not resumed with other files"
    close_tools(tools)
