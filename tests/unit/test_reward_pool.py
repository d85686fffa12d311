"""The pool as users meet it: plain functions, files and modules, load errors, limits, statistics, managers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import struct
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from verl.reward.base import RewardFn, RewardRequest
from verl.reward.manager import manager_spec
from verl.reward.pool import RewardPool, grader_spec
from verl.sandbox.messages import MAX_ANSWER_BYTES, CallableSpec
from verl.sandbox.process import CannotLoad, Channel, Worker, start_worker
from verl.reward.shaping import Shaped
from verl.sandbox.worker import Memory
from verl.types import Invalid, Score

GRADER = """
    import asyncio, os, sys, time
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
        time.sleep(extra_info.get("sleep_s", 0))
        return {"score": (solution_str == ground_truth) + bonus, "pid": os.getpid(), "source": data_source}

    async def later(data_source, solution_str, ground_truth, extra_info=None):
        asyncio.create_task(asyncio.sleep(3600))  # a stray task
        await asyncio.sleep(0.01)
        return float(solution_str == ground_truth)

    def plain_returning_awaitable(**row):
        return later(**row)

    def light(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1.0, "torch": "torch" in sys.modules, "numpy": "numpy" in sys.modules}

    def leak(data_source, solution_str, ground_truth, extra_info=None):
        calls.append(bytearray(30_000_000))
        return float(len(calls))

    def sibling(data_source, solution_str, ground_truth, extra_info=None):
        import beside_the_grader
        return beside_the_grader.VALUE

    def raising(data_source, solution_str, ground_truth, extra_info=None):
        raise KeyError(solution_str)

    def build(offset):
        return lambda data_source, solution_str, ground_truth, extra_info=None: offset

    def by_word(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "crash":
            os._exit(7)
        if solution_str == "memory":
            return float(len(bytearray(1 << 40)))
        time.sleep({"hang": 60, "nap": 0.3}.get(solution_str, 0))
        return {"score": 0.0 if solution_str == "nap" else float(solution_str), "pid": os.getpid()}

    NOT_A_FUNCTION = 3
"""

MANAGER = """
    class MyManager:
        def __init__(self, config, tokenizer, compute_score, reward_router_address=None):
            import asyncio
            self.loop = asyncio.get_running_loop()
            self.factor = config.reward.get("reward_kwargs", {}).get("factor", 1.0)
            self.compute_score = compute_score

        async def run_single(self, data):
            assert len(data) == 1 and data.batch["responses"].shape[0] == 1
            item = data[0]
            responses = item.batch["responses"]
            valid = item.batch["attention_mask"][-responses.shape[-1]:].sum()
            ids = responses[:valid].tolist()
            text = await self.loop.run_in_executor(None, lambda: "#### " + "".join(map(str, ids)))
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            score = self.compute_score(item.non_tensor_batch["data_source"], text, truth)
            extra = {"acc": score, "n": len(item.batch["prompts"])}
            return {"reward_score": score * self.factor, "reward_extra_info": extra}

    class NoManager:
        pass
"""


@pytest.fixture
def grader(tmp_path: Path) -> str:
    (tmp_path / "beside_the_grader.py").write_text("VALUE = 0.5\n")
    (tmp_path / "manager.py").write_text(textwrap.dedent(MANAGER))
    file = tmp_path / "grader.py"
    file.write_text(textwrap.dedent(GRADER))
    return str(file)


def request(
    solution: str = "7", *, request_id: str = "r", data_source: str = "openai/gsm8k", **extra: Any
) -> RewardRequest:
    return RewardRequest(
        request_id=request_id, data_source=data_source, solution_str=solution, ground_truth="7", extra_info=extra
    )


def with_pool(target: CallableSpec, use: Callable[[RewardPool], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with RewardPool(target, **{"num_workers": 1, "timeout_s": 20, **options}) as pool:
            return await use(pool)

    result = uvloop.run(run())  # as a run does; the tests of a single worker take asyncio's own loop
    assert not psutil.Process().children(recursive=True)
    return result


def score_all(*requests: RewardRequest) -> Callable[[RewardPool], Awaitable[list[Score | Invalid]]]:
    async def use(pool: RewardFn) -> list[Score | Invalid]:
        return list(await asyncio.gather(*map(pool.score, requests)))

    return use


def test_default_target_scores_by_data_source() -> None:
    got = with_pool(grader_spec(), score_all(request("#### 7"), request("#### 8"), request(data_source="unknown")))
    assert got[:2] == [Score(1.0), Score(0.0)]
    assert got[2].reason == "exception" and "reward.path=" in got[2].detail


def test_sync_function_kwargs_and_components(grader: str) -> None:
    got = with_pool(grader_spec(path=grader, kwargs={"bonus": 0.5}), score_all(request(), request("8")))
    assert [g.value for g in got] == [1.5, 0.5]
    assert got[0].components.keys() == {"pid"}


@pytest.mark.parametrize("name", ["later", "plain_returning_awaitable"])
def test_async_functions(grader: str, name: str) -> None:
    assert with_pool(grader_spec(path=grader, name=name), score_all(request(), request("8"))) == [Score(1.0), Score(0.0)]


def test_module_target_factory_and_sibling_import(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(grader).parent))
    built = grader_spec(path="pkg://grader", name="build", kwargs={"offset": 0.25}, factory=True)
    assert with_pool(built, score_all(request())) == [Score(0.25)]
    assert with_pool(grader_spec(path=grader, name="sibling"), score_all(request())) == [Score(0.5)]


def test_worker_is_light(grader: str) -> None:
    [got] = with_pool(grader_spec(path=grader, name="light"), score_all(request()))
    assert got.components == {"torch": 0.0, "numpy": 0.0}


@pytest.mark.parametrize(
    ("text", "name", "kwargs", "says"),
    [
        (None, "compute_score", {}, "no such file"),
        ("def compute_scores(**k): return 1", "compute_score", {}, "did you mean reward.name=compute_scores"),
        ("X = 1", "X", {}, "int, not a function"),
        ("def f(:", "f", {}, "SyntaxError.*:1"),
        ("import no_such_package", "f", {}, "No module named 'no_such_package' .at .*bad.py:1"),
        ("1 / 0", "f", {}, "ZeroDivisionError"),
        ("import os; os._exit(3)", "f", {}, "exited with code 3.*while loading"),
        ("raise SystemExit(2)", "f", {}, "SystemExit"),
        ("def f(data_source, solution_str): return 1", "f", {}, "cannot be called with .data_source"),
        ("def f(data_source, solution_str, ground_truth, extra_info=None): return 1", "f", {"a": 1}, "reward.kwargs"),
        ("def f(**k): return 1", "f", {"extra_info": 1}, "extra_info, which every call sets"),
        ("while True: pass", "f", {}, "did not load within 1 s"),
    ],
)
def test_load_errors_are_one_clear_value_error(
    tmp_path: Path, text: str | None, name: str, kwargs: Any, says: str
) -> None:
    file = tmp_path / "bad.py"
    if text is not None:
        file.write_text(text + "\n")

    async def start() -> None:
        pool = RewardPool(
            grader_spec(path=str(file), name=name, kwargs=kwargs),
            num_workers=2,
            start_timeout_s=1 if "while" in str(text) else 30,
        )
        with pytest.raises(ValueError, match=says) as raised:
            await pool.start()
        assert str(file) in str(raised.value)
        assert isinstance(await pool.score(request()), Invalid)

    asyncio.run(start())
    assert not psutil.Process().children(recursive=True)


def test_missing_module_and_unpicklable_kwargs() -> None:
    for target, says in (
        (grader_spec(path="no_such_module_x"), "no module named 'no_such_module_x'"),
        (grader_spec(path="verl.reward.no_such"), "no module named 'verl.reward.no_such'"),
        (grader_spec(kwargs={"f": lambda: 0}), "reward.kwargs cannot be sent"),
    ):
        with pytest.raises(CannotLoad, match=says):
            with_pool(target, score_all())


@pytest.mark.parametrize("option", ["num_workers", "timeout_s", "memory_limit_mb", "max_calls_per_worker"])
def test_no_call_without_a_limit(option: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.{option}=0"):
        RewardPool(grader_spec(), **{option: 0})


def test_exceptions_and_odd_rows_cost_one_sample(grader: str) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    got = with_pool(
        grader_spec(path=grader, name="raising"), score_all(request("boo"), request(x=Unpicklable()), request("x"))
    )
    assert [g.reason for g in got] == ["exception"] * 3
    assert "KeyError: 'boo'" in got[0].detail and "grader.py" in got[0].detail
    assert "not me" in got[1].detail


def test_workers_run_in_parallel_and_requests_queue(grader: str) -> None:
    async def use(pool: RewardPool) -> tuple[list[Any], Any]:
        got = await score_all(*(request(request_id=str(i), sleep_s=0.2) for i in range(8)))(pool)
        return got, pool.stats()

    got, stats = with_pool(grader_spec(path=grader), use, num_workers=2)
    assert sorted(Counter(g.components["pid"] for g in got).values()) in ([4, 4], [3, 5]), "both workers served"
    assert stats.outcomes == {"ok": 8} and stats.workers == 2 and stats.waiting == 0
    assert len(stats.slowest) == 8 and stats.slowest[0].wall_s >= 0.2 and stats.longest_wait_s > 0.3


def test_slowest_ten(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        await score_all(*(request(request_id=str(i), sleep_s=0.1 if i == 5 else 0) for i in range(30)))(pool)
        return pool.stats().slowest

    slowest = with_pool(grader_spec(path=grader), use)
    assert len(slowest) == 10 and slowest[0].request_id == "5"
    assert sorted(slowest, reverse=True) == list(slowest)


def test_recycling_by_calls_and_by_leak(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        got = [await pool.score(request()) for _ in range(7)]
        return got, pool.stats()

    got, stats = with_pool(grader_spec(path=grader), use, max_calls_per_worker=3)
    assert len({g.components["pid"] for g in got}) == 3 and stats.recycled == 2 and stats.restarted == 0

    got, stats = with_pool(grader_spec(path=grader, name="leak"), use, memory_limit_mb=100)
    assert [g.value for g in got] == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0], (
        "a leaking worker is replaced before the limit"
    )
    assert stats.outcomes == {"ok": 7} and stats.recycled == 3


async def warm(pool: RewardPool) -> None:
    """So many quick calls that the pool sends the next ones together."""
    while pool._call_s > 0.0005:
        await score_all(*(request(str(i)) for i in range(20)))(pool)


def test_quick_calls_are_sent_together_and_slow_ones_are_not(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    call = Worker.call

    async def counted(self: Worker, frames: Any, *args: Any) -> None:
        sizes.append(len(frames))
        await call(self, frames, *args)

    monkeypatch.setattr(Worker, "call", counted)

    async def use(pool: RewardPool) -> list[Any]:
        await warm(pool)
        sizes.clear()
        got = await score_all(*(request(str(i)) for i in range(16)))(pool)
        quick = list(sizes)
        await score_all(*(request("1", sleep_s=0.02) for _ in range(5)))(pool)
        sizes.clear()
        await score_all(*(request(str(i)) for i in range(16)))(pool)
        return [got, quick, list(sizes)]

    got, quick, after = with_pool(grader_spec(path=grader), use, num_workers=2)
    assert [g.value for g in got] == [float(i == 7) for i in range(16)], "answers reach their own callers"
    assert len({g.components["pid"] for g in got}) == 2 and max(quick) > 2, "shared by the workers"
    assert after[0] == 1, "one at a time, after a few that took their time"


@pytest.mark.parametrize(
    ("word", "reason"), [("crash", "crash"), ("memory", "memory"), ("hang", "timeout"), ("x", "exception")]
)
@pytest.mark.parametrize("at", [0, 5, 11])
def test_what_happens_to_one_of_many_calls_is_its_own(grader: str, word: str, reason: str, at: int) -> None:
    async def use(pool: RewardPool) -> Any:
        await warm(pool)
        words = [str(i) for i in range(12)]
        words[at] = word
        return await score_all(*map(request, words))(pool), pool.stats()

    got, stats = with_pool(grader_spec(path=grader, name="by_word"), use, timeout_s=2, memory_limit_mb=200)
    assert isinstance(got[at], Invalid) and got[at].reason == reason
    assert [g.value for i, g in enumerate(got) if i != at] == [float(i) for i in range(12) if i != at]
    assert stats.outcomes[reason] == 1 and stats.waiting == 0
    assert stats.repeated == (word in ("crash", "memory")), "in a worker that had served others"


def test_a_caller_that_leaves_takes_nobody_along(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        await warm(pool)
        tasks = [asyncio.create_task(pool.score(request(word))) for word in ("1", "hang", "2", "3", "4")]
        await asyncio.sleep(0.3)
        tasks[1].cancel()
        tasks[3].cancel()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks, return_exceptions=True), pool.stats()

    (one, left, two, gone, four), stats = with_pool(grader_spec(path=grader, name="by_word"), use)
    assert isinstance(left, asyncio.CancelledError) and isinstance(gone, asyncio.CancelledError)
    assert [g.value for g in (one, two, four)] == [1.0, 2.0, 4.0] and stats.restarted == 1
    assert "timeout" not in stats.outcomes


def test_a_call_that_nobody_waits_for_any_more_is_given_up_when_its_turn_comes(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        await warm(pool)
        tasks = [asyncio.create_task(pool.score(request(word))) for word in ("nap", "hang", "2", "3")]
        await asyncio.sleep(0.1)
        assert pool.stats().waiting == 3, "sent, but not begun"
        tasks[1].cancel()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks, return_exceptions=True)

    nap, left, two, three = with_pool(grader_spec(path=grader, name="by_word"), use)
    assert [g.value for g in (nap, two, three)] == [0.0, 2.0, 3.0] and isinstance(left, asyncio.CancelledError)


def test_a_leak_is_ended_between_calls_that_were_sent_together(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        pool._call_s = 1e-4
        return await score_all(*(request() for _ in range(8)))(pool), pool.stats()

    got, stats = with_pool(grader_spec(path=grader, name="leak"), use, memory_limit_mb=100)
    assert sorted(g.value for g in got) == [1.0] * 4 + [2.0] * 4
    assert stats.outcomes == {"ok": 8} and stats.restarted == stats.repeated == 0


def test_a_call_before_the_workers_are_up_is_served(grader: str) -> None:
    async def run() -> Any:
        pool = RewardPool(grader_spec(path=grader), num_workers=1)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            got = await pool.score(request())
        await starting
        await pool.close()
        return got

    assert asyncio.run(run()).value == 1.0


def test_a_call_that_waits_for_a_fresh_worker_ends_with_the_pool(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(pool: RewardPool) -> Any:
        async def never(slot: Any) -> None:
            await asyncio.sleep(3600)

        await pool.score(request("1"))
        monkeypatch.setattr(pool, "_fill", never)
        tasks = [asyncio.create_task(pool.score(request(word))) for word in ("crash", "2")]
        while not pool.stats().repeated:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pool.close()
        async with asyncio.timeout(10):
            return await asyncio.gather(*tasks)

    got = with_pool(grader_spec(path=grader, name="by_word"), use)
    assert [g.reason for g in got] == ["crash"] * 2 and all("closed" in g.detail for g in got)


def test_a_fault_of_ours_is_said_and_nobody_waits(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise KeyError("ours")

    async def use(pool: RewardPool) -> Any:
        monkeypatch.setattr(Worker, "call", broken)
        async with asyncio.timeout(10):
            return await score_all(request(), request(), request())(pool)

    got = with_pool(grader_spec(path=grader), use)
    assert {g.reason for g in got} == {"crash"} and all("KeyError('ours')" in g.detail for g in got)


def test_no_call_waits_for_a_worker_for_ever(grader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RewardPool, "_turn_s", 0.2)

    async def use(pool: RewardPool) -> Any:
        pool._idle.clear()  # as if a worker had been lost
        async with asyncio.timeout(10):
            got = await score_all(request(), request())(pool)
        pool._idle.extend(pool._slots)
        return got, await pool.score(request())

    got, after = with_pool(grader_spec(path=grader), use)
    assert [g.reason for g in got] == ["timeout"] * 2 and "no free worker" in got[0].detail
    assert after.value == 1.0


def test_cancelled_call_frees_its_worker(grader: str) -> None:
    async def use(pool: RewardPool) -> None:
        task = asyncio.create_task(pool.score(request(sleep_s=60)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            assert isinstance(await pool.score(request()), Score)

    with_pool(grader_spec(path=grader), use)


def test_close_with_calls_in_flight_and_waiting(grader: str) -> None:
    async def use(pool: RewardPool) -> None:
        tasks = [asyncio.create_task(pool.score(request(sleep_s=60))) for _ in range(4)]
        await asyncio.sleep(0.2)
        assert pool.stats().waiting == 3
        async with asyncio.timeout(10):
            await pool.close()
            await pool.close()
            got = await asyncio.gather(*tasks, pool.score(request()))
        assert all(isinstance(g, Invalid) and g.reason == "crash" for g in got)

    with_pool(grader_spec(path=grader), use)


def test_a_worker_that_cannot_be_replaced_is_an_outcome(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        os.unlink(grader)
        slow = await pool.score(request(sleep_s=60))
        gone = await pool.score(request())
        os.link(spare, grader)
        return slow, gone, await pool.score(request())

    spare = f"{grader}.spare"
    os.link(grader, spare)
    slow, gone, back = with_pool(grader_spec(path=grader), use, timeout_s=1)
    assert slow.reason == "timeout"
    assert gone.reason == "crash" and "no such file" in gone.detail
    assert back.value == 1.0


def test_shaped_over_a_pool(grader: str) -> None:
    async def use(pool: RewardPool) -> Score | Invalid:
        long = RewardRequest(
            request_id="r",
            data_source="s",
            solution_str="7",
            ground_truth="7",
            response_tokens=20,
            max_response_tokens=20,
        )
        return await Shaped(pool, buffer_tokens=10).score(long)

    got = with_pool(grader_spec(path=grader), use)
    assert got.value == 0.0 and got.components["score"] == 1.0 and got.components["overlong_penalty"] == -1.0


def test_reward_manager(grader: str) -> None:
    manager = str(Path(grader).with_name("manager.py"))
    sample = RewardRequest(
        request_id="r",
        data_source="openai/gsm8k",
        solution_str="ignored",
        ground_truth="72",
        prompt_ids=np.array([1, 2, 3]),
        response_ids=np.array([7, 2]),
    )
    target = manager_spec(manager, "MyManager", reward_kwargs={"factor": 0.5})
    got = with_pool(target, score_all(sample, sample, request()))
    assert got[:2] == [Score(0.5, {"acc": 1.0, "n": 3.0})] * 2
    assert got[2].reason == "exception" and "prompt_ids" in got[2].detail
    with pytest.raises(CannotLoad, match=r"no class 'NoManager' with a method run_single"):
        with_pool(manager_spec(manager, "NoManager"), score_all())


def test_stats_are_plain_data(grader: str) -> None:
    async def use(pool: RewardPool) -> Any:
        await score_all(request("a"), request("b"))(pool)
        return pool.stats()

    stats = with_pool(grader_spec(path=grader, name="raising"), use)
    assert json.loads(json.dumps(dict(stats.outcomes))) == {"exception": 2}
    assert "KeyError" in stats.examples["exception"]


def test_a_channel_keeps_nothing_that_nobody_asked_for() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            _, channel = await asyncio.get_running_loop().create_connection(Channel, sock=ours)
            theirs.sendall(b"x" * 50_000)  # user code that found the channel
            await asyncio.sleep(0.05)
            assert not channel._received
            heard: list[bytes] = []
            told = channel.ask([b"call", b"another"], lambda body: not heard.append(body))
            await asyncio.sleep(0)
            theirs.sendall(struct.pack(">I", 5) + b"hel")
            await asyncio.sleep(0.02)
            assert not heard
            theirs.sendall(b"lo" + struct.pack(">I", 2) + b"h")
            await asyncio.sleep(0.02)
            assert heard == [b"hello"] and not told.done()
            theirs.sendall(b"i" + b"more")
            assert (
                await asyncio.wait_for(told, 5) == "answered" and heard == [b"hello", b"hi"] and not channel._received
            )
            told = channel.ask([b"call", b"another"], lambda body: bool(heard.append(body)))
            theirs.sendall(2 * (struct.pack(">I", 1) + b"x"))
            assert await asyncio.wait_for(told, 5) == "answered" and heard[2:] == [b"x"], "it had heard enough"
            late = channel.ask([b"call"], lambda body: True)
            theirs.sendall(struct.pack(">I", MAX_ANSWER_BYTES + 1) + b"y" * 1000)
            assert await asyncio.wait_for(late, 5) == "gone" and not channel._received
            assert await asyncio.wait_for(channel.ask([b"call"], bool), 5) == "gone", "closed: the worker is replaced"

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN.pack(b"=", 1, math.nan, 0.0, 0.1),
        PLAIN.pack(b"=", 1, 1.0, math.inf, 0.1),
        PLAIN.pack(b"?", 1, 1.0, 0.0, 0.1),
        PLAIN.pack(b"=", 2, 1.0, 0.0, 0.1),
        b"=",
        {"pid": 1},
        {"pid": 1, "grown_mb": 1.0, "took_s": 0.1},
        {"reason": "exception", "detail": "", "grown_mb": "no"},
        {"error": "x"},
        {"reason": [], "detail": "", "grown_mb": 0.0, "took_s": 0.0},
    ],
)
def test_an_answer_that_no_worker_gives_is_a_crash_of_the_grader(answer: dict[str, object] | bytes) -> None:
    async def run() -> None:
        worker = await start_worker(grader_spec(), memory_limit_mb=512, start_timeout_s=60)
        found: list[Score | Invalid] = []

        def lie(frames: Any, hear: Callable[[bytes], bool]) -> asyncio.Future[str]:
            told = asyncio.get_running_loop().create_future()
            hear(answer if isinstance(answer, bytes) else json.dumps({**answer, "id": worker.calls}).encode())
            told.set_result("answered")
            return told

        worker._channel.ask = lie  # type: ignore[method-assign]
        await worker.call([b"", b""], 5.0, lambda outcome, wall_s: found.append(outcome))
        assert [f.reason for f in found] == ["crash"] and not worker.healthy
        await worker.kill()

    asyncio.run(run())


def test_memory_is_read_on_whatever_became_of_the_open_file(tmp_path: Path) -> None:
    memory = Memory()
    before = memory.address_space_mb()
    assert before > memory.resident_mb() > 1
    for content in (b"not a number", b""):
        (tmp_path / "log").write_bytes(content)
        theirs, number = os.open(tmp_path / "log", os.O_RDONLY), memory._file
        os.dup2(theirs, number)  # user code closed it, and its number is another file's now
        assert memory.address_space_mb() == pytest.approx(before, rel=0.5)
        os.close(number)
        os.close(theirs)
    os.close(memory._file)
    assert memory.resident_mb() > 1
    os.close(memory._file)
