"""The sandbox with a callable that is no reward: loading, batches, deadlines, deaths, limits, statistics, the wire."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import struct
import textwrap
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from children import children

from verl.sandbox.messages import MAX_VALUE_BYTES, CallableSpec, FailedCall, Failure, Finite, Loaded, ReturnedCall
from verl.sandbox.pool import WorkerPool
from verl.sandbox.process import MAX_ANSWER_BYTES, CallWorker, CannotLoad, WorkerChannel, start_worker
from verl.sandbox.worker import MemoryUse

TOOLS = """
    import asyncio, os, time
    calls = []

    def work(word, sleep_s=0.0, suffix=""):
        if word == "crash":
            os._exit(7)
        if word == "memory":
            return len(bytearray(1 << 40))
        if word == "x":
            raise KeyError(word)
        time.sleep({"hang": 60, "nap": 0.3}.get(word, sleep_s))
        return {"word": word + suffix, "pid": os.getpid()}

    async def later(word):
        asyncio.create_task(asyncio.sleep(3600))  # a stray task
        await asyncio.sleep(0.01)
        return word

    def returning_awaitable(**arguments):
        return later(**arguments)

    def leak(word):
        calls.append(bytearray(30_000_000))
        return len(calls)

    def sibling(word):
        import beside_the_tools
        return beside_the_tools.VALUE

    def build(offset):
        return lambda word: [word, offset]

    class Shell:
        history = []

        @staticmethod
        def run(word):
            Shell.history.append(word)
            return list(Shell.history)

    def give(word):
        return {"lambda": lambda: 1, "generator": (i for i in range(3)), "big": "x" * (5 << 20), "set": {1},
                "surrogate": "\\ud800", "none": None, "nested": {"a": [1, 2.5, "x", None, b"b"]}}[word]
"""


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "beside_the_tools.py").write_text("VALUE = 0.5\n")
    file = tmp_path / "tools.py"
    file.write_text(textwrap.dedent(TOOLS))
    return str(file)


def spec_of(
    path: str, name: str = "work", *, kwargs: Any = None, factory: bool = False, more: tuple[str, ...] = ()
) -> CallableSpec:
    return CallableSpec(
        path=path,
        name=name,
        kwargs=kwargs or {},
        factory=factory,
        parameters=("word", *more),
        section="tools",
        called="tool",
        given="call",
    )


def with_pool(spec: CallableSpec, use: Callable[[WorkerPool[Any]], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        pool: WorkerPool[Any] = WorkerPool(spec, **{"num_workers": 1, "timeout_s": 20, **options})
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()

    result = uvloop.run(run())  # as a run does; the tests of a single worker take asyncio's own loop
    assert not children()
    return result


async def call_all(pool: WorkerPool[Any], *words: str, **extra: Any) -> list[Any]:
    return await asyncio.gather(*(pool.call({"word": word, **extra}) for word in words))


def calling(*words: str) -> Callable[[WorkerPool[Any]], Awaitable[list[Any]]]:
    return lambda pool: call_all(pool, *words)


async def warm(pool: WorkerPool[Any]) -> None:
    """So many quick calls that the pool sends the next ones together."""
    while pool._call_s > 0.0005:
        await call_all(pool, *map(str, range(20)))


def words_of(got: list[Any]) -> list[str]:
    return [g["word"] for g in got]


def test_what_a_callable_may_be(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = with_pool(spec_of(tools, kwargs={"suffix": "!"}), calling("a", "b"))
    assert words_of(got) == ["a!", "b!"]
    for name in ("later", "returning_awaitable"):
        assert with_pool(spec_of(tools, name), calling("a", "b")) == ["a", "b"]
    assert with_pool(spec_of(tools, "sibling"), calling("a")) == [0.5]
    assert with_pool(spec_of(tools, "Shell.run"), calling("a", "b")) == [["a"], ["a", "b"]]
    monkeypatch.syspath_prepend(str(Path(tools).parent))
    built = spec_of("pkg://tools", "build", kwargs={"offset": 0.25}, factory=True)
    assert with_pool(built, calling("a")) == [["a", 0.25]]


def test_a_value_that_cannot_be_sent_is_a_bad_result(tools: str) -> None:
    words = ("lambda", "generator", "big", "surrogate", "none", "set", "nested")
    got = dict(zip(words, with_pool(spec_of(tools, "give"), calling(*words))))
    assert got["none"] is None and got["set"] == [1] and got["nested"] == {"a": [1, 2.5, "x", None, b"b"]}
    for word, says in (
        ("lambda", "the tool returned a function"),
        ("generator", "a generator"),
        ("surrogate", "a str"),
    ):
        assert got[word].reason == "bad_result" and says in got[word].detail
    assert f"at most {MAX_VALUE_BYTES}" in got["big"].detail


def test_load_errors_are_one_clear_value_error(tmp_path: Path) -> None:
    cases: list[tuple[str | None, str, Any, str]] = [
        (None, "work", {}, "no such file.*Fix: tools.path=/absolute/path/to/your_tools.py"),
        ("def works(**k): return 1", "work", {}, "did you mean tools.path=.*:works"),
        ("X = 1", "X", {}, "int, not a function"),
        ("def f(:", "f", {}, "SyntaxError.*:1"),
        ("import no_such_package", "f", {}, "No module named 'no_such_package' .at .*bad.py:1"),
        ("1 / 0", "f", {}, "ZeroDivisionError"),
        ("raise ValueError('\\ud800')", "f", {}, "ValueError"),
        ("import os; os._exit(3)", "f", {}, "the tool exited with code 3.*while loading"),
        ("raise SystemExit(2)", "f", {}, "SystemExit"),
        ("def f(): return 1", "f", {}, "cannot be called with .word"),
        ("def f(word): return 1", "f", {"a": 1}, "Fix its signature, or tools.kwargs"),
        ("def f(**k): return 1", "f", {"word": 1}, "tools.kwargs has word, which every call sets"),
        ("while True: pass", "f", {}, "did not load within 1 s"),
    ]

    async def start(file: Path, name: str, kwargs: Any, start_timeout_s: float) -> str:
        pool: WorkerPool[Any] = WorkerPool(
            spec_of(str(file), name, kwargs=kwargs), num_workers=2, start_timeout_s=start_timeout_s
        )
        with pytest.raises(ValueError) as raised:
            await pool.start()
        assert isinstance(await pool.call({"word": "a"}), Failure), "closed"
        return str(raised.value)

    wrong = []
    for i, (text, name, kwargs, says) in enumerate(cases):
        file = tmp_path / str(i) / "bad.py"
        file.parent.mkdir()
        if text is not None:
            file.write_text(text + "\n")
        said = asyncio.run(start(file, name, kwargs, 1 if "while" in str(text) else 30))
        if not (said.startswith(f"tools.path={file}:{name}: ") and re.search(says, said)):
            wrong.append((text, said))
    assert not wrong
    assert not children()
    for spec, says in (
        (spec_of("no_such_module_x"), "no module named 'no_such_module_x'"),
        (spec_of("verl.no_such"), "no module named 'verl.no_such'"),
        (spec_of("verl", kwargs={"f": lambda: 0}), "tools.kwargs cannot be sent to a worker"),
    ):
        with pytest.raises(CannotLoad, match=says):
            with_pool(spec, calling())


def test_no_call_without_a_limit() -> None:
    for option in ("num_workers", "timeout_s", "memory_limit_mb", "max_calls_per_worker", "start_timeout_s"):
        with pytest.raises(ValueError, match=rf"tools\.{option}=0: must be positive"):
            WorkerPool(spec_of("verl"), **{option: 0})  # type: ignore[arg-type]


def test_workers_run_in_parallel_calls_queue_and_statistics_say_so(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        got = await call_all(pool, *map(str, range(8)), sleep_s=0.2)
        return got, pool.workers, pool.waiting, pool.stats

    got, workers, waiting, stats = with_pool(spec_of(tools, more=("sleep_s",)), use, num_workers=2)
    assert sorted(Counter(g["pid"] for g in got).values()) in ([4, 4], [3, 5]), "both workers served"
    assert stats.outcomes == {"ok": 8} and workers == 2 and waiting == 0


def test_recycling_by_calls_and_by_leak(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        return [await pool.call({"word": "a"}) for _ in range(7)], pool.stats

    got, stats = with_pool(spec_of(tools), use, max_calls_per_worker=3)
    assert len({g["pid"] for g in got}) == 3 and stats.recycled == 2 and stats.restarted == 0
    got, stats = with_pool(spec_of(tools, "leak"), use, memory_limit_mb=100)
    assert got == [1, 2, 1, 2, 1, 2, 1], "a leaking worker is replaced before the limit"
    assert stats.outcomes == {"ok": 7} and stats.recycled == 3


def test_quick_calls_are_sent_together_and_slow_ones_are_not(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    call = CallWorker.call

    async def counted(self: CallWorker[Any], arguments: Any, *more: Any) -> None:
        sizes.append(len(arguments))
        await call(self, arguments, *more)

    monkeypatch.setattr(CallWorker, "call", counted)

    async def use(pool: WorkerPool[Any]) -> list[Any]:
        await warm(pool)
        sizes.clear()
        got = await call_all(pool, *map(str, range(16)))
        quick = list(sizes)
        await call_all(pool, *"11111", sleep_s=0.02)
        sizes.clear()
        await call_all(pool, *map(str, range(16)))
        return [got, quick, list(sizes)]

    got, quick, after = with_pool(spec_of(tools), use, num_workers=2)
    assert words_of(got) == [str(i) for i in range(16)], "answers reach their own callers"
    assert len({g["pid"] for g in got}) == 2 and max(quick) > 2, "shared by the workers"
    assert after[0] == 1, "one at a time, after a few that took their time"


@pytest.mark.parametrize(
    ("word", "reason", "says"),
    [
        ("crash", "crash", "the tool exited with code 7"),
        ("memory", "memory", "MemoryError"),
        ("hang", "timeout", "no result within tools.timeout_s=1"),
        ("x", "exception", "KeyError: 'x'"),
    ],
)
def test_what_happens_to_one_of_many_calls_is_its_own(tools: str, word: str, reason: str, says: str) -> None:
    async def use(pool: WorkerPool[Any]) -> None:
        for times, at in enumerate((0, 5, 11), 1):
            pool._call_s = 1e-4  # twelve calls go in two messages
            words = [str(i) for i in range(12)]
            words[at] = word
            got = await call_all(pool, *words)
            failure = got.pop(at)
            assert isinstance(failure, Failure) and failure.reason == reason and says in failure.detail, (at, failure)
            assert words_of(got) == [str(i) for i in range(12) if i != at]
            assert pool.stats.outcomes[reason] == times and pool.waiting == 0

    async def warmed(pool: WorkerPool[Any]) -> Any:
        await warm(pool)
        await use(pool)
        return pool.stats

    stats = with_pool(spec_of(tools), warmed, timeout_s=1, memory_limit_mb=200)
    repeated = word in ("crash", "memory")
    assert stats.repeated == (3 if repeated else 0), "only in a worker that had served others"


def test_a_caller_that_leaves_takes_nobody_along(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        await warm(pool)
        tasks = [asyncio.create_task(pool.call({"word": word})) for word in ("1", "hang", "2", "3", "4")]
        await asyncio.sleep(0.3)
        tasks[1].cancel()
        tasks[3].cancel()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks, return_exceptions=True), pool.stats

    (one, left, two, gone, four), stats = with_pool(spec_of(tools), use)
    assert isinstance(left, asyncio.CancelledError) and isinstance(gone, asyncio.CancelledError)
    assert words_of([one, two, four]) == ["1", "2", "4"] and stats.restarted == 1
    assert "timeout" not in stats.outcomes


def test_a_call_that_nobody_waits_for_any_more_is_given_up_when_its_turn_comes(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        await warm(pool)
        tasks = [asyncio.create_task(pool.call({"word": word})) for word in ("nap", "hang", "2", "3")]
        await asyncio.sleep(0.1)
        assert pool.waiting == 3, "sent, but not begun"
        tasks[1].cancel()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks, return_exceptions=True)

    nap, left, two, three = with_pool(spec_of(tools), use)
    assert words_of([nap, two, three]) == ["nap", "2", "3"] and isinstance(left, asyncio.CancelledError)


def test_a_leak_is_ended_between_calls_that_were_sent_together(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        pool._call_s = 1e-4
        return await call_all(pool, *"aaaaaaaa"), pool.stats

    got, stats = with_pool(spec_of(tools, "leak"), use, memory_limit_mb=100)
    assert sorted(got) == [1] * 4 + [2] * 4
    assert stats.outcomes == {"ok": 8} and stats.restarted == stats.repeated == 0


def test_a_call_before_the_workers_are_up_is_served(tools: str) -> None:
    async def run() -> Any:
        pool: WorkerPool[Any] = WorkerPool(spec_of(tools), num_workers=1)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            got = await pool.call({"word": "a"})
        await starting
        await pool.close()
        return got

    assert asyncio.run(run())["word"] == "a"


def test_a_call_that_waits_for_a_fresh_worker_ends_with_the_pool(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        async def never(slot: Any) -> None:
            await asyncio.sleep(3600)

        await pool.call({"word": "1"})
        monkeypatch.setattr(pool, "_fill", never)
        tasks = [asyncio.create_task(pool.call({"word": word})) for word in ("crash", "2")]
        while not pool.stats.repeated:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pool.close()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks)

    got = with_pool(spec_of(tools), use)
    assert got == [Failure("crash", "the tools pool was closed")] * 2


def test_a_fault_of_ours_is_said_and_nobody_waits(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        async def broken(*_: Any) -> None:
            raise KeyError("ours")

        with monkeypatch.context() as patched:
            patched.setattr(CallWorker, "call", broken)
            async with asyncio.timeout(10):
                failed = await call_all(pool, "a", "b", "c")
        async with asyncio.timeout(10):
            return failed, await pool.call({"word": "a"})

    failed, after = with_pool(spec_of(tools), use)
    assert {g.reason for g in failed} == {"broken"} and all("KeyError('ours')" in g.detail for g in failed)
    assert after["word"] == "a", "the pool goes on"


def test_no_call_waits_for_a_worker_for_ever(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "_turn_s", 0.2)

    async def use(pool: WorkerPool[Any]) -> Any:
        while not pool._idle:  # noqa: ASYNC110
            await asyncio.sleep(0)
        lost = list(pool._idle)
        pool._idle.clear()  # as if a worker had been lost
        async with asyncio.timeout(10):
            got = await call_all(pool, "a", "b")
        pool._idle.extend(lost)
        return got, await pool.call({"word": "c"})

    got, after = with_pool(spec_of(tools), use)
    assert [g.reason for g in got] == ["broken"] * 2 and "no free worker" in got[0].detail
    assert after["word"] == "c"


def test_a_cancelled_call_frees_its_worker(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        task = asyncio.create_task(pool.call({"word": "hang"}))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            return await pool.call({"word": "a"})

    assert with_pool(spec_of(tools), use)["word"] == "a"


def test_close_with_calls_in_flight_and_waiting(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> None:
        tasks = [asyncio.create_task(pool.call({"word": "hang"})) for _ in range(4)]
        await asyncio.sleep(0.2)
        assert pool.waiting == 3
        async with asyncio.timeout(10):
            await pool.close()
            await pool.close()
            got = await asyncio.gather(*tasks, pool.call({"word": "a"}))
        assert got == [Failure("crash", "the tools pool was closed")] * 5

    with_pool(spec_of(tools), use)


def test_a_worker_that_cannot_be_replaced_is_an_outcome(tools: str) -> None:
    async def use(pool: WorkerPool[Any]) -> Any:
        os.unlink(tools)
        slow = await pool.call({"word": "hang"})
        gone = await pool.call({"word": "a"})
        os.link(spare, tools)
        return slow, gone, await pool.call({"word": "b"})

    spare = f"{tools}.spare"
    os.link(tools, spare)
    slow, gone, back = with_pool(spec_of(tools), use, timeout_s=1)
    assert slow.reason == "timeout"
    assert gone.reason == "broken" and "no such file" in gone.detail
    assert back["word"] == "b"


def test_a_start_that_is_cancelled_leaves_nothing(tools: str) -> None:
    async def run(after_s: float) -> None:
        starting = asyncio.create_task(start_worker(spec_of(tools), 512, 60))
        await asyncio.sleep(after_s)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    for after_s in (0, 0.0001, 0.01):
        asyncio.run(run(after_s))
        deadline = time.monotonic() + 10
        while children():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_channel_keeps_nothing_that_nobody_asked_for_and_no_answer_comes_late() -> None:
    heard: list[bytes] = []

    def more(body: bytes) -> bool:
        heard.append(body)
        return True

    def enough(body: bytes) -> bool:
        heard.append(body)
        return False

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            _, channel = await asyncio.get_running_loop().create_connection(WorkerChannel, sock=ours)
            theirs.sendall(b"x" * 50_000)  # user code that found the channel
            await asyncio.sleep(0.05)
            assert not channel._received
            told = channel.ask([b"call", b"another"], more, 60.0)
            await asyncio.sleep(0)
            theirs.sendall(struct.pack(">I", 5) + b"hel")
            await asyncio.sleep(0.02)
            assert not heard
            theirs.sendall(b"lo" + struct.pack(">I", 2) + b"h")
            await asyncio.sleep(0.02)
            assert heard == [b"hello"] and not told.done()
            theirs.sendall(b"i" + b"more")
            assert await asyncio.wait_for(told, 5) == "answered"
            assert heard == [b"hello", b"hi"] and not channel._received
            told = channel.ask([b"call", b"another"], enough, 60.0)
            theirs.sendall(2 * (struct.pack(">I", 1) + b"x"))
            assert await asyncio.wait_for(told, 5) == "answered" and heard[2:] == [b"x"], "it had heard enough"
            began_s = time.monotonic()
            told = channel.ask([b"call", b"another"], more, 0.3)
            await asyncio.sleep(0.2)
            theirs.sendall(struct.pack(">I", 1) + b"y")
            assert await asyncio.wait_for(told, 5) == "late" and heard[3:] == [b"y"], "each has its own deadline"
            assert time.monotonic() - began_s > 0.45
            told = channel.ask([b"call"], more, 60.0)
            theirs.sendall(struct.pack(">I", MAX_ANSWER_BYTES + 1) + b"y" * 1000)
            assert await asyncio.wait_for(told, 5) == "gone" and not channel._received
            told = channel.ask([b"call"], more, 60.0)
            assert await asyncio.wait_for(told, 5) == "gone", "closed: the worker is replaced"

    asyncio.run(run())


def test_an_answer_that_no_worker_gives_is_a_crash(tools: str) -> None:
    answers: list[Any] = [
        ReturnedCall(1, 0.0, 0.1, math.nan),
        ReturnedCall(1, 0.0, math.inf, 1.0),
        ReturnedCall(1, math.inf, 0.1, 1.0),
        ReturnedCall(2, 0.0, 0.1, 1.0),
        ReturnedCall(1, 0.0, 0.1, "1.0"),
        ReturnedCall(1, 0.0, 0.1, None),
        FailedCall(1, 0.0, math.nan, Failure("exception", "")),
        FailedCall(1, 0.0, 0.1, Failure("other", "")),  # type: ignore[arg-type]
        FailedCall(2, 0.0, 0.1, Failure("exception", "")),
        Loaded(1),
        ["other", 1, 0.0, 0.1, 1.0],
        {"number": 1},
        b"",
    ]
    frames = [answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer) for answer in answers]

    async def run() -> list[Any]:
        worker = await start_worker(replace(spec_of(tools), returns=Finite), 512, 60)
        wrong = []
        for answer, body in zip(answers, frames):
            found: list[Any] = []

            def lie(_: Any, hear: Callable[[bytes], bool], __: float, body: bytes = body) -> Any:
                told = asyncio.get_running_loop().create_future()
                hear(body)
                told.set_result("answered")
                return told

            worker._channel.ask, worker.calls = lie, 0  # type: ignore[method-assign,assignment]
            await worker.call([b"", b""], 5.0, lambda outcome, found=found: found.append(outcome))
            expected = Failure("crash", "the tool's process spoke out of turn")
            if found != [expected] or worker.healthy:
                wrong.append((answer, found))
        await worker.kill()
        return wrong

    assert not asyncio.run(run())


def test_memory_is_read_on_whatever_became_of_the_open_file(tmp_path: Path) -> None:
    memory = MemoryUse()
    before, resident = memory.used_mb()
    assert before > resident > 1
    for content in (b"not a number", b""):
        (tmp_path / "log").write_bytes(content)
        theirs, number = os.open(tmp_path / "log", os.O_RDONLY), memory._file
        os.dup2(theirs, number)  # user code closed it, and its number is another file's now
        assert memory.used_mb()[0] == pytest.approx(before, rel=0.5)
        os.close(number)
        os.close(theirs)
    os.close(memory._file)
    assert memory.used_mb()[1] > 1
    os.close(memory._file)
