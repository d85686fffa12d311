"""Agent loops in a process of their own: the same trajectory as in the driver's; whatever they do to their process
costs the attempts that it played, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from each import matrix

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, LoopFailed, ServerManager
from verl.agent_loop.hosted import CancelCall, GrowingIds, HostedTask, Ready
from verl.agent_loop.registry import Loops, of_the_user
from verl.agent_loop.runner import HostedLoop, LoopRunner, Playing, hosted_loops
from verl.agent_loop.sections import AgentConfig
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.data.formats import Players
from verl.driver.checked import check_output
from verl.recorded import RecordedCall
from verl.rollout.base import Completion, GenerateRequest, ReplicaLost
from verl.sandbox import companion
from verl.sandbox.companion import FrameChannel
from verl.sandbox.messages import LENGTH
from verl.types import Medium, Sampling, Task

PROMPT = np.arange(7, dtype=np.int64)
MOST = 64


class Engine:
    """Samples ids that are a function of the prompt and the seed, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        request_id, prompt_ids, sampling = request.id, request.prompt_ids, request.sampling
        assert (request.prefix_key, request.parameters, request.media) == ("g1", "policy", (Medium("picture", 0, 1),))
        self.asked.append((prompt_ids.tolist(), sampling))
        if request_id == "lost":
            raise ReplicaLost("the machine is gone")
        if request_id == "refused":
            raise ValueError("a prompt of 9 tokens leaves no room")
        try:
            await asyncio.sleep(60 if request_id == "long" else {"slow": 0.02, "a second": 1.0}.get(request_id, 0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        rng = np.random.default_rng([*prompt_ids.tolist(), sampling.seed])
        ids, side = rng.integers(0, 99, 5), {"kept": rng.random((5, 2)).astype(np.float32)}
        logprobs = -rng.random(5).astype(np.float32)
        routes = rng.integers(0, 9, (len(prompt_ids) + 5, 2, 2)).astype(np.int8) if request.routes else None
        return Completion(request_id, ids, logprobs, ((3, 0, 2), (4, 2, 5)), "eos", None, 2, side, routes)


class Odd(BaseException):
    """No Exception."""


class Branches(AgentLoopBase):
    """Three calls, two of them at once and one given up; two branches, rewards of turns, and what is counted."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        manager, prompt = self.server_manager, kwargs["prompt_ids"]

        async def ask(name: str, ids: Any) -> Any:
            return await manager.generate(name, prompt_ids=ids, sampling_params=sampling_params)

        two, one = await asyncio.gather(ask("slow", [*prompt, 8]), ask("quick", prompt))
        manager.credit(0.5)
        late = asyncio.create_task(ask("long", prompt))
        await asyncio.sleep(0)  # the request is sent
        history = [*prompt, *one.token_ids, 5, 6]
        three = await ask("three", history)  # requests from before its start
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        manager.credit(2.0, state=("room", 4))
        with pytest.raises(ValueError, match="leaves no room"):
            await ask("refused", prompt)
        manager.counts["looked"] += 2
        manager.counts["looked_s"] += 0.5
        manager.end(manager.begin("tool", name="look"), error="")
        first = AgentLoopOutput([*prompt, 8], two.token_ids, [1] * 5)
        ids, mask = [*one.token_ids, 5, 6, *three.token_ids], [1] * 5 + [0] * 2 + [1] * 5
        said = {"tool_rewards": [np.float32(0.5)], "seen": np.arange(3)}
        said["routes"] = sum(call.completion.routes is not None for call in manager.record)
        return [first, AgentLoopOutput(prompt, ids, mask, reward_score=1.5, num_turns=4, extra_fields=said)]


class Does(AgentLoopBase):
    """A loop that does what the row names."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        what, prompt, there = kwargs["what"], kwargs["prompt_ids"], Path(kwargs.get("there") or ".")
        if what == "exit":
            os._exit(3)
        if what == "leave":
            sys.exit("I go")
        if what == "block":
            while True:
                time.sleep(1)  # noqa: ASYNC251
        if what in ("raise", "odd"):
            self.server_manager.counts["tool_errors"] += 1
            self.server_manager.end(self.server_manager.begin("tool", name="look"), error="exception")
            raise RuntimeError("\udcff odd") if what == "raise" else Odd("one of theirs")
        if what == "reason":
            self.server_manager.ended_by = "tired"  # type: ignore[assignment]
            return AgentLoopOutput(prompt, [1], [0])
        if what in ("forge", "ready"):
            gc.unfreeze()
            (channel,) = (found for found in gc.get_objects() if isinstance(found, FrameChannel))
            again = msgspec.msgpack.encode(Ready(os.getpid(), 0.0, "single_turn", [], [], [], {}))
            channel.send(b"no message" if what == "forge" else again)
            await asyncio.sleep(60)
        if what == "shout":
            gc.unfreeze()
            (channel,) = (found for found in gc.get_objects() if isinstance(found, FrameChannel))
            channel._transport.write(LENGTH.pack(1 << 31))
            await asyncio.sleep(60)
        if what == "eat":
            kept = b"x" * (600 << 20)
            await asyncio.sleep(60)
            return kept
        if what == "once" and not (there / "begun").exists():
            (there / "begun").write_text(str(os.getpid()))
            await asyncio.sleep(60)
        if what == "wait":
            begun = [os.getpid(), *grandchild()] if kwargs.get("starts") else [os.getpid()]
            (there / "begun").write_text(" ".join(map(str, begun)))
            try:
                await asyncio.sleep(60)
            finally:
                self.server_manager.counts["looked"] += 1
                await asyncio.sleep(0.2)  # as a tool's release
                (there / "over").touch()
        if what == "print":
            print("{}" * 2000, flush=True)
            os.write(1, b"\0" * 100)
        if what == "write":  # to what it was given
            prompt[0] = 50
        name = what if what in ("lost", "long") else kwargs["request_id"]
        out = await self.server_manager.generate(name, prompt_ids=prompt, sampling_params=sampling_params)
        fields = {"object": object()} if what == "object" else {}
        return None if what == "nothing" else AgentLoopOutput(prompt, out.token_ids, [1] * 5, extra_fields=fields)


def grandchild() -> list[int]:
    """Pids of a process that a tool starts, in a session of its own, and of what that starts."""
    command = "sleep 600 & echo $!; exec sleep 600"
    started = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    assert started.stdout is not None
    return [started.pid, int(started.stdout.readline())]


def loops_of(there: str, start: int) -> Loops:
    """Importable: the process makes them by this name."""
    if Path(there).is_dir():
        Path(there, f"start{start}").touch()
    if Path(there, "mended").exists():
        raise ValueError("tools.py: no such name")
    if there == "refused":
        raise ValueError("agent.loop=x.py:Y: no such file")
    if there == "broken":
        raise KeyError("of the user's module")

    def make(manager: ServerManager, task: Task) -> AgentLoopBase:
        return (Branches if task.agent == "branches" else Does)(None, manager, None)

    async def close() -> None:
        found = " ".join(os.listdir(there))
        Path(there, "closed").write_text(found)  # noqa: ASYNC240

    players, longest_s = Players("does", ("does", "single_turn")), 60.0 if there.endswith("slow_tool") else 0.0
    return Loops(players=players, make=make, notes=("a note",), close=close, longest_call_s=longest_s)


def task_of(agent: str = "", name: str = "t") -> Task:
    return Task(task_id=name, index=0, messages=(), prompt_ids=PROMPT, agent=agent)


def manager_of(engine: Any) -> ServerManager:
    sampling = Sampling(max_tokens=MOST, temperature=0.7)
    return ServerManager(
        *(engine, sampling, (1, "t", 0)),
        **{"prefix_key": "g1", "media": (Medium("picture", 0, 1),), "credits_turns": True, "routes": True},
    )


async def played(loop: AgentLoopBase, **row: Any) -> Any:
    params = {"max_tokens": 5, "temperature": 0.7}
    return await loop.run(params, **{"prompt_ids": PROMPT, "request_id": "r", **row})


def run(there: Path, body: Any, *, silent_s: float = 60.0, memory_mb: float = 1e6) -> None:
    async def whole() -> None:
        runner = LoopRunner(loops_of, str(there), silent_s=silent_s, memory_mb=memory_mb)
        loops = await hosted_loops(runner, None, None)
        assert loops.players.default == "does" and loops.notes == ("a note",)

        def loop(engine: Any, agent: str = "", name: str = "t") -> AgentLoopBase:
            return loops.make(manager_of(engine), task_of(agent, name))

        try:
            await asyncio.wait_for(body(loop), 240)
        finally:
            await loops.close()
        assert (there / "closed").exists()

    asyncio.run(whole())


def test_a_trajectory_is_the_same_as_in_the_driver(tmp_path: Path) -> None:
    async def body(loop: Any) -> None:
        here, there = Engine(), Engine()
        hosted, own = loop(there, "branches"), Branches(None, manager_of(here), None)
        assert isinstance(hosted, HostedLoop) and isinstance(loop(there, "single_turn"), SingleTurnLoop)
        other, mine = await played(hosted), await played(own)
        assert there.asked == here.asked and len(here.asked) == 5 and there.cancelled == here.cancelled == 1
        a, b = (check_output(out, one.server_manager, MOST) for out, one in ((other, hosted), (mine, own)))
        assert (a.stop_reason, a.discarded, len(a.branches)) == (b.stop_reason, b.discarded, 1)
        for rows in zip((a.segments, *a.branches), (b.segments, *b.branches), strict=True):
            for x, y in zip(*rows, strict=True):
                assert (x.source, x.version, x.media) == (y.source, y.version, y.media)
                assert x.ids.tolist() == y.ids.tolist() and x.side.keys() == y.side.keys()
                for left, right in ((x.logprobs, y.logprobs), *((x.side[n], y.side[n]) for n in x.side)):
                    np.testing.assert_array_equal(left, right)
        assert hosted.server_manager.counts == own.server_manager.counts == {"looked": 2, "looked_s": 0.5}
        kinds = [
            [(e["kind"], e.get("name"), e.get("number")) for e in m.server_manager.timeline] for m in (hosted, own)
        ]
        assert kinds[0] == kinds[1] and ("tool", "look", None) in kinds[0]
        assert [p.tolist() for p in a.paid] == [p.tolist() for p in b.paid] == [[0.0], [0.5], [2.0]]
        assert (other[1].reward_score, other[1].num_turns) == (1.5, 4)
        assert other[1].extra_fields == {"tool_rewards": [0.5], "seen": [0, 1, 2], "routes": 0}
        assert mine[1].extra_fields["routes"] == 3
        kept = [[len(call.completion.routes) for call in m.server_manager.record] for m in (hosted, own)]
        assert kept[0] == kept[1] == [12, 6, 7], "the routes of each token once"

    run(tmp_path, body)


def test_a_call_that_its_loop_gave_up_as_it_ended_is_not_recorded() -> None:
    """Later calls would leave out the routes of its tokens, and the loop's own record does not contain it."""

    async def body() -> None:
        runner, engine = LoopRunner(loops_of, "", silent_s=1.0), Engine()
        part = HostedTask(task=task_of(), manager={}, params={}, row={})
        ended = asyncio.get_running_loop().create_future()
        runner._plays[0] = one = Playing(manager_of(engine), part, ended, GrowingIds.of(PROMPT), 0)
        request = one.manager.request("r", PROMPT, Sampling(max_tokens=5))
        one.record[3] = RecordedCall.of(request, await engine.generate(request), ())
        runner._receive(None, CancelCall(0, 3), None)  # type: ignore[arg-type]
        assert not one.record

    asyncio.run(body())


def test_what_a_loop_does_wrong_is_said_and_costs_its_attempt(tmp_path: Path) -> None:
    async def body(loop: Any) -> None:
        engine = Engine()
        for what, said in (
            ("raise", r"^RuntimeError: \\udcff odd$"),
            ("leave", "^SystemExit: I go$"),
            ("odd", "^Odd: one of theirs$"),
            ("object", r"^ValueError: what the agent loop .*cannot leave its process.*@driver.*a object in it"),
            ("reason", r"^ValueError: what the agent loop .*cannot leave its process.*Invalid enum value 'tired'"),
            ("nothing", "^ValueError: the agent loop returned a NoneType"),
        ):
            with pytest.raises(LoopFailed, match=said):
                await played(one := loop(engine), what=what)
            told = one.server_manager
            assert dict(told.counts) == ({"tool_errors": 1} if what in ("raise", "odd") else {})
            assert [entry["kind"] for entry in told.timeline] == (
                ["tool"] if told.counts else ["turn"] * len(told.record)
            )
            assert len(told.record) == (what in ("object", "nothing"))
        with pytest.raises(ReplicaLost, match="the machine is gone"):
            await played(loop(engine), what="lost")
        asked = len(engine.asked)
        waiting = [
            asyncio.create_task(played(loop(engine), what=what, there=str(tmp_path))) for what in ("wait", "long")
        ]
        while not (tmp_path / "begun").exists() or len(engine.asked) == asked:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        while not (tmp_path / "over").exists() or not engine.cancelled:  # noqa: ASYNC110 - the loop there hears of it
            await asyncio.sleep(0.02)
        (out,) = await played(loop(engine), what="print")
        assert len(out.response_ids) == 5
        (out,) = await played(loop(engine), what="write")
        assert engine.asked[-1][0] == out.prompt_ids.tolist() == [50, *PROMPT[1:]]

    run(tmp_path, body)


def test_a_history_is_kept_whatever_becomes_of_it_and_not_copied_as_it_grows() -> None:
    rng, known, views, copies = np.random.default_rng(0), GrowingIds.of(PROMPT), [], 0
    for _ in range(2_000):
        ids = known.held[: known.used]
        if rng.random() < 0.02:  # rewritten
            ids = ids[: rng.integers(0, len(ids) + 1)]
            ids = np.concatenate([ids, rng.integers(0, 3, 2)])
        ids = np.concatenate([ids, rng.integers(0, 3, rng.integers(0, 40))])
        keep, before, size = known.agreeing(ids), known.held, known.used
        assert keep == next((k for k in range(min(size, len(ids))) if before[k] != ids[k]), min(size, len(ids)))
        view = known.then(keep, ids[keep:])
        copies += keep == size and known.held is not before
        views.append((view, ids.copy()))
        np.testing.assert_array_equal(known.whole(3, ids[3:]), ids)
    assert all(np.array_equal(view, ids) for view, ids in views) and PROMPT.tolist() == list(range(7))
    assert copies < 300, "the room doubles"


@matrix(
    "what, said",
    [
        ("exit", "exit code or signal 3"),
        ("block", "did not turn for 2 s"),
        ("forge", "what no process of ours says"),
        ("ready", "what no process of ours says"),
        ("shout", "it said 2048 MB at once"),
        ("eat", r"memory: it took \d+ MB, and 300 are for it"),
    ],
)
def test_the_death_of_the_process_costs_the_attempt_that_was_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, said: str
) -> None:
    async def body(loop: Any) -> None:
        engine = Engine()
        with pytest.raises(LoopFailed, match=f"^ToolBroken: .* is gone: .*{said}"):
            await played(loop(engine), what=what)
        again = await asyncio.gather(*(played(loop(engine), what="") for _ in range(3)))
        assert [len(out.response_ids) for (out,) in again] == [5] * 3 and starts(tmp_path) == 2

    silent_s = 2.0 if what == "block" else 60.0
    monkeypatch.setattr(companion, "LEAST_SILENT_S", silent_s)
    run(tmp_path, body, silent_s=silent_s, memory_mb=300.0)


def starts(there: Path) -> int:
    return len(list(there.glob("start*")))


@pytest.mark.slow
def test_one_that_ends_the_process_is_found_among_many_and_costs_nobody_else(tmp_path: Path) -> None:
    async def body(loop: Any) -> None:
        engine, rows = Engine(), [""] * 8
        rows[5] = "exit"
        loops = [loop(engine, name=f"t{k}") for k in range(8)]
        plays = (played(one, what=what, request_id="slow") for one, what in zip(loops, rows, strict=True))
        found = await asyncio.gather(*plays, return_exceptions=True)
        assert [k for k, one in enumerate(found) if isinstance(one, Exception)] == [5]
        assert isinstance(found[5], LoopFailed) and starts(tmp_path) <= 5, "each death leaves half of them"
        before = starts(tmp_path)
        late = [played(loop(engine, name=f"t{k}"), what=rows[k], request_id="slow") for k in range(3, 8)]
        found = await asyncio.gather(*late, return_exceptions=True)
        assert [k for k, one in enumerate(found, 3) if isinstance(one, Exception)] == [5]
        assert starts(tmp_path) <= before + 1, "its task is known, and is played alone"

    run(tmp_path, body)


def test_suspects_that_do_not_do_it_again_are_all_played(tmp_path: Path) -> None:
    """A process that was killed from outside, with one that was given up and another that waits in line."""

    async def body(loop: Any) -> None:
        engine = Engine()
        first = asyncio.create_task(played(loop(engine, name="a"), what="once", there=str(tmp_path)))
        while not (tmp_path / "begun").exists() or not (pid := (tmp_path / "begun").read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        rest = [asyncio.create_task(played(loop(engine, name="b"), what="", request_id="slow")) for _ in range(6)]
        left = asyncio.create_task(played(loop(engine), what="long"))
        while len(engine.asked) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0)
        os.kill(int(pid), signal.SIGKILL)
        late = asyncio.create_task(played(loop(engine), what=""))
        while starts(tmp_path) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        left.cancel()
        found = await asyncio.gather(first, *rest, late)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
        assert [len(out.response_ids) for (out,) in found] == [5] * 8 and starts(tmp_path) == 2

    run(tmp_path, body)


@pytest.mark.slow
def test_a_start_that_fails_later_is_tried_once_for_all_who_wait(tmp_path: Path) -> None:
    async def body(loop: Any) -> None:
        (tmp_path / "mended").touch()
        with pytest.raises(LoopFailed):
            await played(loop(Engine()), what="exit")
        many = [played(loop(Engine()), what="") for _ in range(8)]
        for error in await asyncio.gather(*many, return_exceptions=True):
            assert isinstance(error, LoopFailed) and "cannot be started again: tools.py: no such name" in str(error)
        assert starts(tmp_path) == 2
        (tmp_path / "mended").unlink()
        await played(loop(Engine()), what="")

    run(tmp_path, body)


@pytest.mark.parametrize(("floor_s", "folder"), [(companion.LEAST_SILENT_S, "quick_tools"), (0.0, "slow_tool")])
def test_one_between_two_beats_and_one_whose_tools_take_long_are_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor_s: float, folder: str
) -> None:
    async def body(loop: Any) -> None:
        (out,) = await played(loop(Engine()), request_id="a second", what="")
        assert len(out.response_ids) == 5 and starts(tmp_path / folder) == 1

    monkeypatch.setattr(companion, "LEAST_SILENT_S", floor_s)
    (tmp_path / folder).mkdir()
    run(tmp_path / folder, body, silent_s=0.1)


def test_at_the_end_tools_are_released_before_they_are_closed(tmp_path: Path) -> None:
    async def body(loop: Any) -> None:
        one = loop(Engine())
        waiting = asyncio.create_task(played(one, what="wait", there=str(tmp_path)))
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.wait({waiting})

    run(tmp_path, body)
    assert "over" in (tmp_path / "closed").read_text().split()


@pytest.mark.parametrize(
    ("given", "error", "said"), [("refused", ValueError, "no such file"), ("broken", LoopFailed, "of the user's")]
)
def test_what_cannot_be_made_there_is_refused_at_the_start(given: str, error: type[Exception], said: str) -> None:
    async def start() -> None:
        await LoopRunner(loops_of, given, silent_s=60).start()

    with pytest.raises(error, match=said):
        asyncio.run(start())


def test_what_is_the_user_s_runs_beside_the_driver_if_not_said_otherwise() -> None:
    for agent in (
        AgentConfig(loop="tool_agent", tools=["tools.py"]),
        AgentConfig(tools=["servers.json", "verl.yaml"]),
        AgentConfig(loop="mine.py:Mine"),
    ):
        assert of_the_user(agent) and not of_the_user(replace(agent, loop=f"{agent.loop}@driver"))
    for agent in (AgentConfig(), AgentConfig(loop="single_turn_agent"), AgentConfig("tool_agent", ["servers.json"])):
        assert not of_the_user(agent), "nothing of the user's plays in this process"


def test_it_ends_with_a_driver_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}\n"
        "from test_loop_process import Engine, loops_of, manager_of, played, task_of\n"
        "from verl.agent_loop.runner import HostedLoop, LoopRunner\n"
        "async def main():\n"
        f"    runner = LoopRunner(loops_of, {str(tmp_path)!r}, silent_s=60)\n"
        "    loop = HostedLoop(manager_of(Engine()), task_of(), runner)\n"
        f"    await played(loop, what='wait', starts=True, there={str(tmp_path)!r})\n"
        "asyncio.run(main())\n"
    )
    driver = subprocess.Popen([sys.executable, str(script)])
    until_s = time.monotonic() + 120
    while not (tmp_path / "begun").exists() or not (tmp_path / "begun").read_text():
        assert driver.poll() is None and time.monotonic() < until_s
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    pids = (tmp_path / "begun").read_text().split()
    assert len(pids) == 3
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until_s, f"{left} outlived their driver"
        time.sleep(0.05)
