"""Servers as children: they start, say why they do not, end with everything they started, and come back."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import served
from aiohttp import web
from test_rollout_client import PROMPT, context_of, greedy, reader, until

from verl.processes import tree
from verl.processes.guard import SHM
from verl.rollout.api import Deadlines, Expected
from verl.rollout.base import Capabilities, GenerateRequest, ReplicaLost
from verl.rollout.client import ServedEngine
from verl.rollout.http import ServerGone, ServerLate
from verl.rollout.process import ServerProcess, free_port
from verl.rollout.router import Router
from verl.rollout.vllm_api import VllmApi
from verl.workers.group import first_cause

DOUBLE = [sys.executable, served.__file__]
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print(f"child {child.pid}", flush=True)  # one write, so that whoever finds the word finds the number too
time.sleep(600)
"""


def started(tmp_path: Path, code: str, **env: str) -> ServerProcess:
    command = [sys.executable, "-c", code]
    return ServerProcess(command, env={**os.environ, **env}, log=tmp_path / "logs" / "it.log")


def wait_for(ready: Any, what: str) -> None:
    until_s = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < until_s, f"waited 30 s for {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_that_does_not_listen_to_signals_ends_with_its_children(tmp_path: Path) -> None:
    it = started(tmp_path, STUBBORN)
    wait_for(lambda: "child" in it.tail(), "its child")
    child = int(it.tail().split()[1])
    assert it.exit_code is None and {it.pid, child} <= tree.session_of(it.pid)
    it.stop()
    assert gone(it.pid) and gone(child) and it.exit_code == 128 + signal.SIGKILL
    it.stop()


def test_a_server_that_ends_says_how(tmp_path: Path) -> None:
    it = started(tmp_path, "print('no such model'); raise SystemExit(3)")
    wait_for(lambda: it.exit_code is not None, "its end")
    assert it.exit_code == 3 and it.tail() == "no such model"
    again = started(tmp_path, "pass")
    wait_for(lambda: again.exit_code is not None, "its end")
    assert again.tail() == "(it said nothing)", "what another one wrote before is not its"
    missing = ServerProcess([str(tmp_path / "none")], env={}, log=tmp_path / "it.log")
    wait_for(lambda: missing.exit_code is not None, "its end")
    assert missing.pid == 0 and "No such file" in missing.tail()
    missing.stop()


def test_its_temporary_files_go_with_it(tmp_path: Path) -> None:
    code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"
    it = started(tmp_path, code, TMPDIR=str(tmp_path))
    wait_for(lambda: it.tail() != "(it said nothing)", "its folder")
    folder = Path(it.tail())
    assert folder.is_dir() and folder.parent.parent == tmp_path
    it.stop()
    assert not folder.parent.exists()


@pytest.mark.parametrize("how", ["kill -9 of the parent", "kill -9 of the guardian", "forgotten"])
def test_a_server_dies_with_its_parent(tmp_path: Path, how: str) -> None:
    """The parent is killed, so it cannot clean up."""
    code = f"""
    import os, sys, time
    from pathlib import Path
    from verl.rollout.process import ServerProcess
    log = Path({str(tmp_path / "log")!r})
    it = ServerProcess([sys.executable, "-c", {STUBBORN!r}], env=dict(os.environ), log=log)
    print(it.pid, it._child.guard_pid, flush=True)
    if {how == "forgotten"}:
        while "child" not in it.tail():
            time.sleep(0.02)
        sys.exit()
    time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server, guardian = map(int, parent.stdout.readline().split())
    try:
        wait_for(lambda: "child" in (tmp_path / "log").read_text(), "its child")
        child = int((tmp_path / "log").read_text().split()[1])
        if how == "kill -9 of the parent":
            parent.kill()
        elif how == "kill -9 of the guardian":
            os.kill(guardian, signal.SIGKILL)
            wait_for(lambda: gone(server), "the server")
            os.kill(child, signal.SIGKILL)  # it is alone: no other process could end it
            parent.kill()
        wait_for(lambda: gone(server) and gone(child), "the server and its child")
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()


def test_a_guardian_that_was_shot_is_made_up_for(tmp_path: Path) -> None:
    it = started(tmp_path, STUBBORN)
    wait_for(lambda: "child" in it.tail(), "its child")
    child = int(it.tail().split()[1])
    os.kill(it._child.guard_pid, signal.SIGKILL)
    it.stop()
    wait_for(lambda: gone(it.pid) and gone(child), "the server and its child")


def test_what_it_left_in_shared_memory_is_removed(tmp_path: Path) -> None:
    """A server that is killed leaves its segments; those of others stay, and the trainer's."""
    before, ours, mine = (f"{name}_{os.getpid()}" for name in ("before", "verl-weights", "mine"))
    (SHM / before).write_bytes(b"x")
    code = f"""
import mmap, os, time
for name in {(before, ours, mine)!r}:
    with open("/dev/shm/" + name, "a+b") as file:
        os.ftruncate(file.fileno(), 4096)
        kept = [mmap.mmap(file.fileno(), 4096), globals().get("kept")]
print("mapped", flush=True)
time.sleep(600)
"""
    try:
        it = started(tmp_path, code)
        wait_for(lambda: "mapped" in it.tail(), "its segments")
        it.stop()
        assert [(SHM / name).exists() for name in (before, ours, mine)] == [True, True, False]
    finally:
        for name in (before, ours, mine):
            (SHM / name).unlink(missing_ok=True)


# ---- engines over them -----------------------------------------------------------------------------------------------


def engine_of(tmp_path: Path, *, start_s: float = 60.0, command: Any = DOUBLE, **env: str) -> ServedEngine:
    def launch(folder: str | None) -> tuple[ServerProcess, str]:
        port = free_port()
        log = tmp_path / "rollout.log"
        process = ServerProcess([*command, str(port)], env={**os.environ, **env}, log=log)
        return process, f"http://127.0.0.1:{port}"

    able = Capabilities(logprobs="processed", max_context_tokens=64)
    return ServedEngine(context_of(), Expected(name="vLLM"), VllmApi(), launch, able, Deadlines(start_s=start_s))


def test_a_server_that_cannot_start_says_why_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def run() -> None:
        engine = engine_of(tmp_path, SERVED_FAILS="1")
        with pytest.raises(RuntimeError, match=r"exit code 3.*rollout\.log:\n.*cannot be loaded: no such thing"):
            await engine.capabilities()
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_server_without_the_architecture_is_one_line_with_the_fix(tmp_path: Path) -> None:
    """The message of vLLM 0.32, with all the text after it."""
    said = "  Value error, Model architectures ['FooForCausalLM'] are not supported for now."

    async def run() -> None:
        engine = engine_of(tmp_path, SERVED_FAILS=f"{said} Supported architectures: dict_keys(['A', 'B'])\nlast line")
        with pytest.raises(
            ValueError, match=r"vLLM does not know this model \(Model arch.*set rollout.engine=nat"
        ) as caught:
            await engine.capabilities()
        assert "\n" not in str(caught.value) and "dict_keys" not in str(caught.value)
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_start_has_a_deadline_that_names_what_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('loading shard 3', flush=True); import time; time.sleep(600)"]

    async def run() -> int:
        engine = engine_of(tmp_path, start_s=1.0, command=command)
        with pytest.raises(ServerLate, match=r"vLLM at http.*waited 1 s for it to start.*\n.*loading shard 3"):
            await engine.capabilities()
        assert engine.connection.process is not None
        await engine.close()
        return engine.connection.process.pid

    assert gone(asyncio.run(asyncio.wait_for(run(), 60)))


def test_a_server_that_was_killed_is_told_of_and_comes_back_with_all_weights(tmp_path: Path) -> None:
    async def run() -> None:
        engine = engine_of(tmp_path)
        await engine.load_weights(reader())
        first = engine.connection.process
        assert first is not None
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, greedy(60))))
        await asyncio.sleep(0.01)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(ServerGone):
            await task
        while first.exit_code is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(ServerGone, match=r"vLLM ended with exit code 137; in .*rollout\.log"):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))
        assert await engine.load_weights(reader(7)) == 7
        assert (await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))).spans == ((7, 0, 2),)
        second = engine.connection.process
        assert second is not None and second.pid != first.pid
        await engine.close()
        assert gone(second.pid)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_the_first_to_hear_of_a_death_hears_how_it_ended_and_a_run_begins_again_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        failed: list[BaseException] = []
        router = Router([lambda died: engine_of(tmp_path, SERVED_STEP_S="0.2")], note=lambda said: None)
        router.watch(failed.append)
        (replica,) = router.replicas
        await replica.load_weights(reader())
        task = asyncio.create_task(router.generate(GenerateRequest("r", PROMPT, greedy(60))))  # of 12 s
        await until(lambda: bool(router._running))
        os.kill(replica.engine.connection.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(ReplicaLost) as caught:
            await task
        for error in (caught.value, failed[0]):
            assert isinstance(cause := first_cause(error), ReplicaLost), "what the run is repaired after"
            assert "vLLM ended with exit code 137; in " in str(cause)
        await router.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_fenced_server_is_killed_and_started_anew(tmp_path: Path) -> None:
    async def run() -> None:
        engine = engine_of(tmp_path)
        await engine.load_weights(reader())
        first = engine.connection.process
        with pytest.raises(Exception, match="loaded 1 tensors that nobody sent|did not load"):
            await engine.load_weights(reader(1, ["a.weight", "other.weight"]))
        assert first is not None and gone(first.pid)
        with pytest.raises(ServerGone, match="out of service: the update to version 1 failed"):
            await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))
        assert await engine.load_weights(reader(2)) == 2 and engine.connection.process is not first
        assert (await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))).spans == ((2, 0, 2),)
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("then", ["loads", "ends", "shares"])
def test_a_server_whose_port_was_taken_meanwhile_is_started_on_another(tmp_path: Path, then: str) -> None:
    """The server that took the port gets no weights: while ours loads, after ours could not listen, or beside ours."""

    async def run() -> None:
        foreign, ports = served.Served(), list[int]()
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, then == "shares")
            line.bind(("127.0.0.1", 0))
            runner = web.AppRunner(foreign.app())
            await runner.setup()
            await web.SockSite(runner, line).start()

            def launch(folder: str | None) -> tuple[ServerProcess, str]:
                ports.append(free_port() if ports else line.getsockname()[1])
                loading = then == "loads" and len(ports) == 1
                command = [sys.executable, "-c", "import time; time.sleep(600)"] if loading else DOUBLE
                env = {**os.environ, "SERVED_SHARES": "1" * (then == "shares")}
                process = ServerProcess([*command, str(ports[-1])], env=env, log=tmp_path / "rollout.log")
                if then != "loads" and len(ports) == 1:
                    wait_for(lambda: process.exit_code is not None or process.listens(ports[0])[0], "its port")
                return process, f"http://127.0.0.1:{ports[-1]}"

            able = Capabilities(logprobs="processed", max_context_tokens=64)
            limits = Deadlines(start_s=60)
            engine = ServedEngine(context_of(), Expected(name="vLLM"), VllmApi(), launch, able, limits)
            assert await engine.load_weights(reader(3)) == 3
            assert (await engine.generate(GenerateRequest("r", PROMPT, greedy(2)))).spans == ((3, 0, 2),)
            assert len(ports) == 2 and {path for path, _ in foreign.asked} <= {"/health"}
            assert engine.connection.process is not None and engine.connection.process.listens(ports[1]) == (
                True,
                False,
            )
            await engine.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_engine_that_is_closed_while_it_restarts_starts_no_other_server(tmp_path: Path) -> None:
    async def run() -> None:
        engine, stopping, gate = engine_of(tmp_path), threading.Event(), threading.Event()
        await engine.load_weights(reader())
        first, launch = engine.connection.process, engine.connection.launch
        assert first is not None and launch is not None
        servers, stop = [], first.stop

        def slow() -> None:
            stopping.set()
            gate.wait(30)
            stop()

        def counted(folder: str | None) -> tuple[ServerProcess, str]:
            servers.append(launch(folder))
            return servers[-1]

        first.stop, engine.connection.launch = slow, counted  # type: ignore[method-assign]
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: first.exit_code is not None, "its end")
        update = asyncio.create_task(engine.load_weights(reader(1)))
        await asyncio.to_thread(stopping.wait, 30)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(RuntimeError, match="closed"):
            await update
        await closing
        assert not servers and gone(first.pid)

    asyncio.run(asyncio.wait_for(run(), 60))
