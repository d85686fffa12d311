"""Hostile graders: each costs its own sample's score and nothing else, and leaves no process behind.

Two pools serve all of them, a strict one the cases that must run into the time limit, and a patient one the others:
every case also proves that its pool healed from the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from children import children
from each import matrix

from verl.reward.base import RewardRequest
from verl.reward.pool import RewardPool, grader_spec
from verl.types import Invalid, Score

STRICT_S, PATIENT_S = 1.0, 60.0
MARGIN_S = 10.0  # slow machines; the point is that no call takes for ever
WORKERS = 2

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and orphan control need Linux")

GRADERS = '''
import ctypes, os, re, signal, sys, threading, time

def forever():
    while True:
        pass

def spawn_child(pid_file, *, escape):
    """A child that spins for ever; with `escape`, in another session and with another parent."""
    pid = os.fork()
    if pid == 0:
        if escape:
            os.setsid()
            if os.fork():
                os._exit(0)
        with open(pid_file, "a") as f:
            f.write(f"{os.getpid()}\\n")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        forever()
    while not os.path.exists(pid_file):
        time.sleep(0.01)

def swallow_signals():
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    while True:
        try:
            forever()
        except BaseException:
            pass

def eat_memory():
    hoard = []
    while True:
        hoard.append(bytearray(10_000_000))

def children_eat_memory():
    for _ in range(4):
        if os.fork() == 0:
            hoard = bytearray(b"x") * 60_000_000
            forever()
    forever()

def recurse_beyond_limits():
    sys.setrecursionlimit(10**9)
    class Deep:
        def __repr__(self):
            return repr(self)
    repr(Deep())

def return_twice():
    os.fork()
    return 0.125

def alarm_left_over():
    signal.alarm(1)
    return 0.125

def dies_later():
    threading.Thread(target=lambda: (time.sleep(0.3), os._exit(9)), daemon=True).start()
    return 0.125

class Odd:
    def item(self):
        raise RuntimeError("no item")

class Hanging:
    def item(self):
        forever()

def print_a_gigabyte():
    block = "x" * 999_999 + "\\n"
    for _ in range(500):
        sys.stdout.write(block)
        sys.stderr.write(block)
    return 0.125

def close_all():
    os.closerange(0, 1000)
    return 0.125

def close_output():
    os.closerange(0, 3)
    return 0.125

def spoil_the_process():
    sys.stdout.close()
    os.chdir("/proc/self/fd")
    sys.setrecursionlimit(30)
    return 0.125

def garbage_on_every_fd():
    for fd in range(3, 4096):
        try:
            os.write(fd, b"\\x00\\x00\\x00\\x05hello" * 3)
        except OSError:
            pass
    return 0.125

CASES = {
    "while_true": lambda f: forever(),
    "regex": lambda f: re.match(r"(a+)+$", "a" * 60 + "b"),
    "big_power": lambda f: 10**10**10,
    "swallow_signals": lambda f: swallow_signals(),
    "fork_and_hang": lambda f: (spawn_child(f, escape=False), forever()),
    "fork_escape_and_hang": lambda f: (spawn_child(f, escape=True), 10**10**10),
    "fork_escape_and_segfault": lambda f: (spawn_child(f, escape=True), ctypes.string_at(0)),
    "eat_memory": lambda f: eat_memory(),
    "children_eat_memory": lambda f: children_eat_memory(),
    "segfault": lambda f: ctypes.string_at(0),
    "abort": lambda f: os.abort(),
    "recurse": lambda f: CASES["recurse"](f),
    "recurse_beyond_limits": lambda f: recurse_beyond_limits(),
    "os_exit": lambda f: os._exit(0),
    "sys_exit": lambda f: sys.exit(0),
    "kill_own_group": lambda f: os.killpg(0, signal.SIGKILL),
    "kill_guardian": lambda f: (spawn_child(f, escape=False), os.kill(os.getppid(), signal.SIGKILL), forever()),
    "close_all": lambda f: close_all(),
    "close_output": lambda f: close_output(),
    "garbage_on_every_fd": lambda f: garbage_on_every_fd(),
    "return_twice": lambda f: return_twice(),
    "alarm_left_over": lambda f: alarm_left_over(),
    "dies_later": lambda f: dies_later(),
    "spoil_the_process": lambda f: spoil_the_process(),
    "print_a_gigabyte": lambda f: print_a_gigabyte(),
    "none": lambda f: None,
    "nan": lambda f: {"score": float("nan")},
    "text": lambda f: "1.0",
    "unpicklable": lambda f: lambda: 1,
    "generator": lambda f: (i for i in range(3)),
    "odd_item": lambda f: Odd(),
    "hanging_item": lambda f: Hanging(),
    "huge_dict": lambda f: {"score": 1.0, **{str(i): float(i) for i in range(100_000)}},
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "hostile":
        time.sleep(0.02)
        print("an ordinary grader prints", os.getcwd())
        return float(solution_str == ground_truth)
    return CASES[solution_str](extra_info["pid_file"])
'''

EXPECTED = {
    "while_true": {"timeout"},
    "regex": {"timeout"},
    "big_power": {"timeout"},
    "swallow_signals": {"timeout"},
    "fork_escape_and_hang": {"timeout"},
    "fork_escape_and_segfault": {"crash"},
    "eat_memory": {"memory"},
    "children_eat_memory": {"memory"},
    "segfault": {"crash"},
    "abort": {"crash"},
    "recurse": {"exception"},
    # From 3.12 on, CPython limits the recursion of C code by itself.
    "recurse_beyond_limits": {"exception"} if sys.version_info >= (3, 12) else {"crash", "memory"},
    "os_exit": {"crash"},
    "sys_exit": {"exception"},
    "kill_own_group": {"crash"},
    "kill_guardian": {"crash"},
    "close_all": {"crash"},
    "close_output": {"ok"},
    "garbage_on_every_fd": {"crash"},
    "return_twice": {"ok"},
    "alarm_left_over": {"ok"},
    "dies_later": {"ok"},
    "spoil_the_process": {"ok"},
    "none": {"bad_result"},
    "nan": {"bad_result"},
    "text": {"bad_result"},
    "unpicklable": {"bad_result"},
    "generator": {"bad_result"},
    "odd_item": {"bad_result"},
    "hanging_item": {"timeout"},
    "huge_dict": {"bad_result"},
}


class Bench:
    """A pool on an event loop of its own, shared by the cases of this file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.others = _children()  # of other tests of this process: multiprocessing keeps helpers
        (folder / "hostile.py").write_text(GRADERS)
        self.runner = asyncio.Runner()
        self.strict = self.runner.run(self.open(STRICT_S))
        self.patient = self.runner.run(self.open(PATIENT_S))

    async def open(self, timeout_s: float) -> RewardPool:
        target = grader_spec(path=str(self.folder / "hostile.py"))
        pool = RewardPool(target, num_workers=WORKERS, timeout_s=timeout_s, memory_limit_mb=150)
        await pool.start()
        return pool

    def hostile(self, case: str) -> RewardRequest:
        return RewardRequest(
            request_id=case,
            data_source="hostile",
            solution_str=case,
            ground_truth="",
            extra_info={"pid_file": str(self.folder / f"{case}.pids")},
        )

    async def with_others(self, pool: RewardPool, case: str) -> Score | Invalid:
        """The case's outcome; ordinary samples before, beside and after it must be right."""
        others = [ordinary(i) for i in range(8)]
        requests = [*others[:4], self.hostile(case), *others[4:]]
        got = list(await asyncio.gather(*map(pool.score, requests)))
        outcome = got.pop(4)
        assert got == [Score(float(i % 2)) for i in range(8)], f"{case} cost other samples: {got}"
        return outcome

    async def healed(self, pool: RewardPool) -> None:
        deadline = time.monotonic() + MARGIN_S
        while pool.workers < WORKERS or len(self.family()) != 4 * WORKERS:  # a guardian and a worker each
            assert time.monotonic() < deadline, f"{pool.workers} workers, processes: {self.family()}"
            await asyncio.gather(*(pool.score(ordinary(0)) for _ in range(WORKERS)))

    def family(self) -> set[psutil.Process]:
        return _children() - self.others


def ordinary(i: int) -> RewardRequest:
    return RewardRequest(request_id=str(i), data_source="fine", solution_str=str(i % 2), ground_truth="1")


def _children() -> set[psutil.Process]:
    return set(children())


def _gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(map(_running, pids)):
            return True
        time.sleep(0.02)
    return False


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # adopted by an init that may not reap
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("hostile"))
    yield bench
    bench.runner.run(bench.strict.close())
    bench.runner.run(bench.patient.close())
    bench.runner.close()
    assert not bench.family()


@matrix("case", EXPECTED, quick=6)
def test_hostile_grader_costs_one_sample(bench: Bench, case: str) -> None:
    pool = bench.strict if "timeout" in EXPECTED[case] else bench.patient
    began = time.monotonic()
    outcome = bench.runner.run(bench.with_others(pool, case))
    assert time.monotonic() - began < STRICT_S + MARGIN_S
    name = outcome.reason if isinstance(outcome, Invalid) else "ok"
    assert name in EXPECTED[case], outcome
    assert outcome == Score(0.125) if name == "ok" else outcome.detail  # type: ignore[union-attr]
    # Processes that the grader forked end with its worker at the latest.
    pid_file = bench.folder / f"{case}.pids"
    if pid_file.exists():
        assert _gone([int(pid) for pid in pid_file.read_text().split()], MARGIN_S)
    bench.runner.run(bench.healed(pool))


def test_crash_detail_holds_the_last_output(bench: Bench) -> None:
    outcome = bench.runner.run(bench.patient.score(bench.hostile("segfault")))
    assert isinstance(outcome, Invalid) and "SIGSEGV" in outcome.detail and "hostile.py" in outcome.detail


def test_a_gigabyte_of_prints_is_swallowed(bench: Bench) -> None:
    assert bench.runner.run(bench.with_others(bench.patient, "print_a_gigabyte")) == Score(0.125)
    assert max(process.memory_info().rss for process in children(recursive=False)) < 100 * 2**20, (
        "guardians keep a tail"
    )


def test_a_guardian_that_is_stopped_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.sandbox.process.KILL_WAIT_S", 0.5)

    async def run() -> Score | Invalid:
        guardians = children(recursive=False)
        task = asyncio.create_task(bench.strict.score(bench.hostile("while_true")))
        await asyncio.sleep(0.3)
        for process in guardians:
            process.suspend()
        outcome = await task
        for process in guardians:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        return outcome

    assert bench.runner.run(run()).reason == "timeout"  # type: ignore[union-attr]
    bench.runner.run(bench.healed(bench.strict))


@pytest.mark.slow
def test_many_hostile_graders_at_once(bench: Bench) -> None:
    cases = ["segfault", "recurse", "os_exit", "kill_own_group", "fork_escape_and_segfault", "nan"]

    async def run() -> list[Score | Invalid]:
        return list(await asyncio.gather(*(bench.with_others(bench.patient, case) for case in cases)))

    for case, outcome in zip(cases, bench.runner.run(run()), strict=True):
        assert isinstance(outcome, Invalid) and outcome.reason in EXPECTED[case], (case, outcome)
    bench.runner.run(bench.healed(bench.patient))


PARENT = """
    import asyncio, os, sys
    from verl.reward.base import RewardRequest
    from verl.reward.pool import RewardPool, grader_spec

    async def main():
        pool = RewardPool(grader_spec(sys.argv[1]), num_workers=2, timeout_s=600, memory_limit_mb=2000)
        await pool.start()
        try:
            await asyncio.gather(*(
                pool.score(RewardRequest(
                    request_id=case, data_source="hostile", solution_str=case, ground_truth="",
                    extra_info={"pid_file": f"{sys.argv[2]}/{case}"},
                ))
                for case in ("fork_escape_and_hang", "fork_and_hang")
            ))
        finally:
            await pool.close()

    asyncio.run(main())
"""


@matrix("how", [signal.SIGKILL, signal.SIGINT])
def test_no_orphan_when_the_parent_dies(bench: Bench, tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen(
        [sys.executable, str(script), str(bench.folder / "hostile.py"), str(tmp_path)],
        stderr=subprocess.DEVNULL,
        cwd=os.getcwd(),
    )
    try:
        files = [tmp_path / "fork_escape_and_hang", tmp_path / "fork_and_hang"]
        deadline = time.monotonic() + 30
        while not all(f.exists() and f.read_text().endswith("\n") for f in files):
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        family = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
        assert len(family) >= 6, "two guardians, two workers, one child of each"
        assert {int(f.read_text()) for f in files} <= set(family)
        parent.send_signal(how)
        parent.wait(timeout=20)
    finally:
        parent.kill()
        parent.wait(timeout=20)
    assert _gone(family, 5.0), [psutil.Process(p) for p in family if _running(p)]
