"""Replicas that die or miss a publish: their requests go on elsewhere, and they serve again only with weights."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl.rollout.base import BaseEngine, Capabilities, Completion, GenerateRequest, ReplicaLost
from verl.rollout.router import Router
from verl.types import Sampling
from verl.weight_sync.base import Sent, SyncError, WeightSource
from verl.weight_sync.canary import Probed
from verl.weight_sync.local import LocalCheckpointEngine, LocalOutlet

SAMPLING = Sampling(max_tokens=4, seed=7)


@dataclass
class Weights:
    """A version without tensors."""

    version: int
    passes: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> tuple[()]:
        return ()


class Engine(BaseEngine):
    """Answers when the test calls `answer`, or by itself after `turns` of the event loop."""

    def __init__(self, world: World, number: int, died: Callable[[BaseException], None]) -> None:
        self.world, self.number, self.died = world, number, died
        self.running: dict[str, asyncio.Future[Completion]] = {}
        self.calls: list[str] = []
        self.dead: BaseException | None = None
        self.version = -1

    async def generate(self, request: GenerateRequest) -> Completion:
        request_id, sampling = request.id, request.sampling
        if self.dead is not None:
            raise ReplicaLost("dead")
        assert self.version >= 0, "asked before it had weights"
        self.world.asked.append((request_id, sampling.seed))
        self.running[request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[request_id]
        finally:
            del self.running[request_id]

    def answer(self, request_id: str) -> None:
        ids = np.arange(self.number, self.number + 2)
        self.running[request_id].set_result(
            Completion(request_id, ids, np.zeros(2, np.float32), ((self.version, 0, 2),), "length")
        )

    def die(self, why: str = "killed") -> None:
        self.dead = ReplicaLost(why)
        self.fail(self.dead)
        self.died(self.dead)

    async def capabilities(self) -> Capabilities:
        if self.world.broken > 0:
            self.world.broken -= 1
            raise RuntimeError("does not start")
        return Capabilities(logprobs="processed", max_context_tokens=100)

    async def sleep(self, level: int = 1) -> int:
        self.calls.append("sleep")
        return 5

    async def wake(self, tags: Any = ()) -> None:
        self.calls.append("wake")

    async def close(self) -> None:
        self.calls.append("close")
        self.fail(RuntimeError("the rollout engine was closed"))

    def fail(self, why: BaseException) -> None:
        for one in self.running.values():
            if not one.done():
                one.set_exception(why)

    async def load_weights(self, source: Any, *, on_inflight: str = "wait") -> int:
        self.version = source.version
        return self.version


class World:
    def __init__(self, count: int, restarts: int = 3, *, at_urls: bool = False) -> None:
        self.made: list[list[Engine]] = [[] for _ in range(count)]
        self.asked: list[tuple[str, int | None]] = []
        self.said: list[str] = []
        self.broken = 0  # engines to come that do not start
        self.failures: list[BaseException] = []
        self.router = Router(
            [self.start(i) for i in range(count)], restarts=restarts, at_urls=at_urls, note=self.said.append
        )
        self.router.watch(self.failures.append)

    def start(self, number: int) -> Callable[[Callable[[BaseException], None]], Any]:
        def start(died: Callable[[BaseException], None]) -> Any:
            self.made[number].append(Engine(self, number, died))
            return self.made[number][-1]

        return start

    async def begin(self) -> None:
        await self.router.capabilities()
        await self.publish(0)

    async def publish(self, version: Any, failed: dict[int, str] | None = None) -> None:
        failed = dict(failed or {})
        for i, replica in enumerate(self.router.replicas):
            if i not in failed:
                try:
                    await replica.load_weights(Weights(version))
                except ReplicaLost as e:
                    failed[i] = str(e)
        self.router.published(failed)

    def ask(self, name: str) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.router.generate(GenerateRequest(name, np.arange(3), SAMPLING)))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_the_requests_of_a_dead_replica_are_asked_again_elsewhere() -> None:
    async def test() -> None:
        world = World(2)
        await world.begin()
        tasks = [world.ask(f"r{i}") for i in range(4)]
        await turns()
        (first,), (second,) = world.made
        assert sorted(first.running) == ["r0", "r2"] and sorted(second.running) == ["r1", "r3"]
        first.die("killed by signal 9")
        await turns()
        assert sorted(second.running) == ["r0", "r1", "r2", "r3"], "with the same seed: the same draws"
        assert {seed for _, seed in world.asked} == {7} and world.failures == []
        assert len(world.said) == 1 and "rollout replica 0 is lost: killed by signal 9; its requests" in world.said[0]
        for name in list(second.running):
            second.answer(name)
        assert [(await t).request_id for t in tasks] == ["r0", "r1", "r2", "r3"]
        assert len(world.made[0]) == 2 and "close" in first.calls, "it was started again"
        await turns()
        task = world.ask("r4")
        await turns()
        assert list(second.running) == ["r4"], "and has no weights yet"
        await world.publish(1)
        more = [world.ask("r5"), world.ask("r6")]
        await turns()
        assert world.made[0][1].running.keys() | second.running.keys() == {"r4", "r5", "r6"}
        assert world.made[0][1].running, "now it serves"
        for engine in (world.made[0][1], second):
            for name in list(engine.running):
                engine.answer(name)
        await asyncio.gather(task, *more)

    run(test)


@pytest.mark.parametrize("fails", ["error", "given up"])
def test_a_prompt_whose_request_failed_at_a_replica_is_not_tied_to_it(fails: str) -> None:
    """Given up: as by the deadline of its trajectory, where the replica hangs; nothing else runs anywhere then."""

    async def test() -> None:
        world = World(2)
        await world.begin()
        (first,), (second,) = world.made

        def ask(name: str) -> asyncio.Task[Completion]:
            return asyncio.create_task(
                world.router.generate(GenerateRequest(name, np.arange(3), SAMPLING, prefix_key="k"))
            )

        failed, sibling = ask("a"), ask("b")
        await turns()
        assert list(first.running) == ["a", "b"], "one prefix"
        if fails == "error":
            first.running["a"].set_exception(RuntimeError("HTTP 500"))
            with pytest.raises(RuntimeError, match="HTTP 500"):
                await failed
        else:
            sibling.cancel(), failed.cancel()
            await turns()
            assert not first.running
        retry = ask("a")
        await turns()
        assert list(second.running) == ["a"]
        second.answer("a")
        if first.running:
            first.answer("b")
        await asyncio.gather(retry, sibling, return_exceptions=fails == "given up")

    run(test)


def test_one_that_dies_between_two_calls_is_heard_of_from_any_thread() -> None:
    async def test() -> None:
        world = World(2)
        await world.begin()
        thread = threading.Thread(target=world.made[1][0].die)
        thread.start()
        thread.join()
        await turns()
        assert len(world.made[1]) == 2 and world.router._serving == {0}
        assert await world.router.sleep() == 10 and world.made[1][0].calls == ["close"]

    run(test)


def test_one_that_did_not_take_a_publish_must_not_speak() -> None:
    async def test() -> None:
        world = World(2)
        await world.begin()
        tasks = [world.ask("a"), world.ask("b")]
        await turns()
        await world.publish(1, failed={1: "SyncError: a tensor is missing"})
        old = world.made[1][0]
        await turns()
        assert "close" in old.calls and not old.running and sorted(world.made[0][0].running) == ["a", "b"]
        assert "a tensor is missing" in world.said[0]
        for name in ("a", "b"):
            world.made[0][0].answer(name)
        assert {(await t).spans for t in tasks} == {((1, 0, 2),)}, "nothing was drawn under the old weights"
        await world.publish(2)
        assert world.router._serving == {0, 1}

    run(test)


@pytest.mark.parametrize("fails", ["load", "canary"])
def test_one_that_fails_a_publish_is_given_up_before_the_others_have_ended_theirs(fails: str) -> None:
    async def test() -> None:
        world, slow = World(2, restarts=0), asyncio.Event()
        await world.begin()
        (bad,), (good,) = world.made

        async def loads(source: Any, *, on_inflight: str) -> int:
            if fails == "load":
                raise SyncError("half of it")
            bad.version = source.version
            return source.version

        async def loads_late(source: Any, *, on_inflight: str) -> int:
            await slow.wait()
            good.version = source.version
            return source.version

        async def scored(ids: np.ndarray, **_: Any) -> np.ndarray:
            return np.full(1, -1.0, np.float32)

        async def scored_elsewise(ids: np.ndarray, **_: Any) -> np.ndarray:
            return np.full(1, -5.0, np.float32)

        bad.load_weights, good.load_weights = loads, loads_late  # type: ignore[method-assign]
        bad.score, good.score = scored_elsewise, scored  # type: ignore[attr-defined]
        tasks = [world.ask("a"), world.ask("b")]
        await turns()
        assert list(bad.running) == ["a"]
        told: Future[Sent] = Future()
        released: Future[None] = Future()
        released.set_result(None)
        outlet = LocalOutlet()
        probed = Probed(*(np.array([x], np.float32) for x in (1, -1.0, 1.0, -1.0)), eps=2.0**-8)
        told.set_result(Sent(WeightSource(1, outlet.transport, outlet.stage(1, {}, []), {}), probed, 0, True))
        trainer: Any = SimpleNamespace(send_weights=lambda *_, copy: told, release_weights=lambda _: released)
        sync = LocalCheckpointEngine(probes=[np.arange(2)])
        publish = sync.publish(
            trainer, world.router.replicas, version=1, exclusive=False, on_inflight=["keep", "keep"], timeout_s=20
        )
        await turns()
        assert sorted(good.running) == ["a", "b"] and world.router._serving == {1} and not publish.done()
        slow.set()
        assert list((await publish).failed_replicas) == [0]
        for name in ("a", "b"):
            good.answer(name)
        assert [(await task).ids[0] for task in tasks] == [1, 1]

    run(test)


@pytest.mark.parametrize("end", ["verified", "published", "given up", "nobody"])
def test_what_is_drawn_with_new_weights_waits_for_their_canary(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a version that it had before; what was drawn by older weights waits for nothing."""
    monkeypatch.setattr("verl.rollout.replica.JUDGED_S", 0.2 if end == "nobody" else 60.0)

    async def test() -> None:
        world = World(2)
        await world.begin()
        old, task = world.ask("old"), None
        await turns()
        replica, (first,) = world.router.replicas[0], world.made[0]
        first.answer("old")
        assert (await old).spans[0][0] == 0
        await replica.load_weights(Weights(0))
        task = world.ask("new")
        await turns()
        first.answer("new")
        await turns()
        assert not task.done()
        if end == "verified":
            replica.mark_verified()
        elif end == "published":
            world.router.published({})
        elif end == "given up":
            replica.lose(SyncError("its canary failed"))
        while end in ("given up", "nobody") and "new" not in world.made[1][0].running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if end in ("given up", "nobody"):
            world.made[1][0].answer("new")
        assert (await task).ids[0] == (1 if end in ("given up", "nobody") else 0)

    run(test)


@pytest.mark.parametrize("failed", ["died", "loading", "canary"])
def test_a_server_at_a_url_that_failed_an_update_is_never_connected_to_again(failed: str) -> None:
    async def test() -> None:
        world = World(2, at_urls=True)
        await world.begin()
        old, task = world.made[1][0], world.ask("a")

        async def breaks(source: Any, *, on_inflight: str) -> int:
            old.die("fenced")  # its requests hear of it first
            await turns()
            raise SyncError("half of it")

        if failed == "died":
            old.die()
        elif failed == "loading":
            old.load_weights = breaks  # type: ignore[method-assign]
            with pytest.raises(SyncError):
                await world.router.replicas[1].load_weights(Weights(1))
        else:
            await world.publish(1)
            world.router.replicas[1].lose(SyncError("other weights"))
        await turns()
        again = "is started again" if failed == "died" else "stays out of service"
        assert len(world.made[1]) == (2 if failed == "died" else 1) and world.said[0].endswith(f"and it {again}")
        assert world.router._serving == {0}
        await turns()
        world.made[0][0].answer("a")
        await task

    run(test)


async def one_died_after_its_load() -> World:
    """Return two replicas of which the second has died after it loaded version 1, before the end of the publish."""
    world = World(2)
    await world.begin()
    for replica in world.router.replicas:
        await replica.load_weights(Weights(1))
    world.made[1][0].die()
    await turns()
    return world


def test_one_that_dies_between_its_load_and_the_end_of_the_publish_does_not_serve() -> None:
    async def test() -> None:
        world = await one_died_after_its_load()
        assert len(world.made[1]) == 2, "and there is another engine already"
        world.router.published({})
        assert world.router._serving == {0}

    run(test)


def test_one_that_comes_back_during_the_publish_that_its_engine_missed_is_left_alone() -> None:
    async def test() -> None:
        world = await one_died_after_its_load()
        world.router.published({1: "ReplicaLost: killed"})
        await turns()
        assert [len(engines) for engines in world.made] == [1, 2] and world.made[1][1].calls == []
        assert world.router._serving == {0}, "it has no weights yet"
        await world.publish(2)
        assert world.router._serving == {0, 1}

    run(test)


def test_an_answer_of_one_that_was_given_up_meanwhile_does_not_count() -> None:
    async def test() -> None:
        world = World(2)
        await world.begin()
        task = world.ask("a")
        await turns()
        world.made[0][0].answer("a")  # the answer is on its way
        world.router.replicas[0].lose(ReplicaLost("half-loaded"))
        await turns()
        assert not task.done()
        world.made[1][0].answer("a")
        assert (await task).ids[0] == 1

    run(test)


def test_what_is_asked_of_a_lost_one_says_why_and_what_keeps_step_is_nothing_to_it() -> None:
    async def test() -> None:
        world = World(2, restarts=0)
        await world.begin()
        world.made[0][0].die("out of memory")
        await turns()
        lost = world.router.replicas[0]
        for asked in (lost.score(np.arange(3)), lost.load_weights(None), lost.capabilities()):  # type: ignore[arg-type]
            with pytest.raises(ReplicaLost, match="replica 0 has no engine: out of memory"):
                await asked
        assert (await lost.sleep(), await lost.abort()) == (0, 0)
        await lost.wake()
        assert world.made[0][0].calls == ["close"] and len(world.made[0]) == 1

    run(test)


def test_without_one_that_serves_the_run_hears_the_first_cause() -> None:
    async def test() -> None:
        world = World(2)
        await world.begin()
        world.broken = 100
        task = world.ask("a")
        await turns()
        world.made[0][0].die("the first")
        await turns()
        world.made[1][0].die("the second")
        with pytest.raises(ReplicaLost, match="no rollout replica serves"):
            await task
        assert [str(e) for e in world.failures] == ["the second"] and world.router.version == -1
        await turns(100)
        assert [len(engines) for engines in world.made] == [4, 4], "three more each, none of which started"
        ends = [engine.calls for engines in world.made for engine in engines]
        assert ends == [["close"]] * 8, "and none of which holds its place"

    run(test)


def test_a_new_engine_that_cannot_be_made_costs_one_of_its_starts_and_is_told_of() -> None:
    async def test() -> None:
        world = World(2, restarts=3)
        await world.begin()
        (replica, _), makes = world.router.replicas, world.start(0)

        def start(died: Callable[[BaseException], None]) -> Any:
            if len(world.said) < 3:
                raise ValueError("rollout.python=/env/bin/python: cannot be started")
            return makes(died)

        replica.supervisor.start = start
        world.made[0][0].die("killed")
        await turns(100)
        why = "replica 0 is lost: rollout.python=/env/bin/python: cannot be started; "
        assert [why in said and said.endswith("it is started again") for said in world.said] == [False, True, True]
        await world.publish(1)
        assert world.router._serving == {0, 1} and len(world.made[0]) == 2

    run(test)


@pytest.mark.parametrize("seed", range(10))
def test_no_request_is_lost_or_doubled_whatever_dies(seed: int) -> None:
    async def test() -> None:
        draw, world = random.Random(seed), World(4, restarts=1000)
        await world.begin()
        tasks = [world.ask(f"r{i}") for i in range(200)]
        version = 0
        while not all(task.done() for task in tasks):
            await turns(draw.randrange(4))
            live = [engines[-1] for i, engines in enumerate(world.made) if i in world.router._serving]
            for engine in live:
                for name in list(engine.running):
                    if draw.random() < 0.2 and not engine.running[name].done():
                        engine.answer(name)
            if len(live) > 1 and draw.random() < 0.3:
                if draw.random() < 0.5:
                    draw.choice(live).die()
                else:
                    version += 1
                    await world.publish(version, failed={draw.choice(live).number: "broken off"})
            elif draw.random() < 0.3:
                version += 1
                await world.publish(version)
        done = [await task for task in tasks]
        assert [c.request_id for c in done] == [f"r{i}" for i in range(200)] and not world.failures
        assert world.router._running == {} and world.router._load == [0] * 4

    run(test)


def test_one_that_joins_is_asked_after_a_publish_and_one_that_leaves_is_asked_no_more() -> None:
    async def test() -> None:
        world = World(1)
        await world.begin()
        first, task = world.made[0][0], world.ask("a")
        world.made.append([])
        await world.router.join(world.start(1))
        await turns()
        early = world.ask("b")
        await turns()
        assert sorted(first.running) == ["a", "b"] and world.router.states() == ["serves", "waits for a publish"]
        with pytest.raises(ValueError, match="replica 0 is the only one that serves"):
            world.router.leave(0)
        await world.publish(1)
        assert world.router.states() == ["serves", "serves"]
        world.router.leave(0)
        await turns()
        (second,) = world.made[1]
        assert sorted(second.running) == ["a", "b"] and first.calls == ["close"] and len(world.made[0]) == 1
        assert world.said == [
            "rollout replica 0 left the run; its requests go on elsewhere, and it stays out of service"
        ]
        for name in ("a", "b"):
            second.answer(name)
        assert {(await one).spans for one in (task, early)} == {((1, 0, 2),)}
        await world.publish(2)
        assert world.router.states() == ["left", "serves"] and world.router.version == 2 and not world.failures
        for number in (0, 2, -1):
            with pytest.raises(ValueError, match=f"replica {number}: none has this number"):
                world.router.leave(number)

    run(test)


def test_one_that_leaves_while_it_is_started_again_never_serves() -> None:
    async def test() -> None:
        world = World(2)
        await world.begin()
        world.made[0][0].die()
        world.router.leave(0)
        await turns(50)
        await world.publish(1)
        assert world.router.states() == ["left", "serves"]
        assert [engine.calls for engine in world.made[0]] == [["close"]] * len(world.made[0])

    run(test)


def test_one_that_cannot_start_does_not_join() -> None:
    async def test() -> None:
        world = World(1)
        await world.begin()
        world.made.append([])
        world.broken = 1
        with pytest.raises(RuntimeError, match="does not start"):
            await world.router.join(world.start(1))
        assert world.router.states() == ["serves"] and world.made[1][0].calls == ["close"] and world.said == []
        await world.router.join(world.start(1))
        await world.publish(1)
        assert world.router.states() == ["serves", "serves"]

    run(test)


def test_no_engine_is_started_while_the_replicas_sleep() -> None:
    """Others have the device then. One that starts already is waited for, and put to sleep."""

    async def test() -> None:
        world = World(2)
        await world.begin()
        lost, router = world.made[0][0], world.router
        await router.sleep(1)
        lost.die()
        await turns()
        assert len(world.made[0]) == 1 and lost.calls[-1] == "close"
        joins = asyncio.create_task(router.join(world.start(1)))
        await turns()
        assert len(world.made[1]) == 1
        await router.wake(("weights",))
        await turns()
        assert len(world.made[0]) == 1, "the weights alone are awake"
        await router.wake(("kv",))
        await joins
        await turns()
        assert len(world.made[0]) == len(world.made[1]) == 2 and "sleep" not in world.made[0][1].calls

        gate, able = asyncio.Event(), Engine.capabilities
        world.made[0][1].die()

        async def slow(self: Engine) -> Capabilities:
            await gate.wait()
            return await able(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "capabilities", slow)
            await turns()
            asleep = asyncio.create_task(router.sleep(1))
            await turns()
            assert len(world.made[0]) == 3 and not asleep.done()
            gate.set()
            await asleep
        assert world.made[0][2].calls == ["sleep"]
        await router.close()

    run(test)
