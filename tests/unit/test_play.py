"""Groups in flight on a fake engine: order, retries, outcomes, selection, staleness, resume (pitfalls 16 to 19, 30, 31).

Time is virtual in the sense that nothing depends on it: durations are milliseconds drawn from the request's seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEngine, FunctionReward

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.algorithms.advantages import grpo, token_rewards
from verl.algorithms.table import Algorithm, GroupSpec, resolve
from verl.data.cursor import Cursor
from verl.driver.play import InvalidShare, Player, RunEnded, Trajectories
from verl.driver.scheduler import Scheduler
from verl.track.events import EventLog, read_events
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Invalid, Refs, Sample, Sampling, Score, Segment, Task, Trajectory, derive_seed
from verl.workers.role import Role
from verl.workers.waits import DeadlineExpired, Waits

SEED = 11
SAMPLING = Sampling(max_tokens=8)


def jitter(seed: int) -> float:
    """0 to 4 ms."""
    return random.Random(seed).random() * 0.004


def by_id(request: Any) -> Score:
    """A reward that differs within a group and is a function of the place alone."""
    return Score((derive_seed(request.request_id) % 1000) / 1000)


def seed_of(draw: int, index: int, attempt: int = 0, purpose: str = "train", epoch: int = 0) -> int:
    """As DESIGN section 6 says: hash(run seed, purpose, epoch, draw, task, index, attempt, turn)."""
    return derive_seed(SEED, purpose, epoch, draw, f"task{draw}", index, attempt, 0)


def task_of(index: int) -> Task:
    return Task(
        task_id=f"task{index}", index=index, messages=({"role": "user", "content": f"q{index}"},),
        prompt_ids=np.array([1, 2, 3 + index % 5]), ground_truth=str(index), extra_info={"split": "train"}, row={"ability": "math"},
    )  # fmt: skip


@dataclass
class Stage:
    """A player with everything real but the model."""

    tmp_path: Path
    engine: FakeEngine = field(default_factory=lambda: FakeEngine(delay_s=jitter))
    reward: Callable[[Any], Any] = by_id
    loop: Callable[[Any], AgentLoopBase] = lambda server: SingleTurnLoop(None, server, None)
    algorithm: Algorithm = field(default_factory=lambda: resolve("grpo"))
    prompts: int = 4
    n: int = 4
    steps: int = 20
    tasks: int = 1000
    epochs: int | None = None
    staleness: float = 0.0
    oversample: float = 0.0
    sync_every: int = 1
    max_attempts: int = 1
    timeout_s: float = 30.0
    play_timeout_s: float = 30.0
    max_invalid_share: float = 1.0
    clock: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self.engine.version = max(self.engine.version, 0)
        self.queue, self.waits = MemoryQueue(), Waits()
        self.events = EventLog(self.tmp_path, 0)
        self.cursor = Cursor(self.tasks, 0, shuffle=False, num_epochs=self.epochs)
        self.scheduler = Scheduler(
            prompts_per_step=self.prompts, total_steps=self.steps, staleness=self.staleness, oversample=self.oversample,
            sync_every=self.sync_every, max_draws_per_group=self.algorithm.max_draws_per_group, on_exhausted=self.algorithm.on_exhausted,
        )  # fmt: skip
        reward = self.reward if hasattr(self.reward, "score") else FunctionReward(self.reward)
        self.trajectories = Trajectories(
            engine=self.engine, loop=self.loop, reward=reward, decode=lambda ids: " ".join(map(str, ids)),  # type: ignore[arg-type]
            waits=self.waits, seed=SEED, max_attempts=self.max_attempts, timeout_s=self.timeout_s,
        )  # fmt: skip
        self.player = Player(
            scheduler=self.scheduler, cursor=self.cursor, tasks=SimpleTasks(self.tasks), trajectories=self.trajectories,
            algorithm=self.algorithm, sampling=SAMPLING, samples_per_prompt=self.n, queue=self.queue, events=self.events,
            waits=self.waits, timeout_s=self.play_timeout_s, eager=self.staleness > 0, max_invalid_share=self.max_invalid_share,
        )  # fmt: skip

    async def step(self, *, publish: bool = True) -> Refs:
        """One turn of the driver, without the training."""
        step = self.scheduler.next_step
        refs = await self.player.take(step)
        self.player.trained(step, refs)
        self.queue.drop(refs)
        if publish and self.scheduler.publish_due(step):
            self.engine.version += 1
            self.player.published(self.engine.version)
        return refs

    def log(self, kind: str) -> list[dict[str, Any]]:
        self.events.flush()
        return [dict(e.data) for e in read_events(self.tmp_path, {kind})]

    def released(self) -> Counter[str]:
        return Counter(e["reason"] for e in self.log("released"))


class SimpleTasks:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Task:
        return task_of(index)


def play(test: Callable[[], Any]) -> Any:
    """Run to the end; nothing may be left in the loop, and nothing may be said to its exception handler."""
    said: list[str] = []

    async def main() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context)))
        result = await asyncio.wait_for(test(), 60)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"
        return result

    result = asyncio.run(main())
    assert not said, said
    return result


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def groups_of(refs: Refs) -> list[str]:
    return list(refs.groups())


def group_id(draw: int) -> str:
    return f"g{draw:08d}"


# -- order -------------------------------------------------------------------------------------------------------------


def test_at_staleness_0_a_batch_is_in_admission_order_whatever_ends_first(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=8, n=3)
        async with stage.player:
            batches = [groups_of(await stage.step()) for _ in range(3)]
        assert batches == [[group_id(8 * s + i) for i in range(8)] for s in range(3)]
        ended = [e["group_id"] for e in stage.log("scored")]
        assert sorted(ended) == [group_id(i) for i in range(24)] and ended != sorted(ended), "they did end in another order"
        assert len(stage.queue) == 0 and stage.player.groups == {} and stage.player.in_flight() == []

    play(test)


def test_rows_of_a_group_are_in_order_and_carry_what_was_played(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=2, n=4)
        async with stage.player:
            refs = await stage.player.take(0)
            assert [r.sample_id for r in refs] == [f"{group_id(g)}/train{i}.0#0" for g in range(2) for i in range(4)]
            for ref, sample in zip(refs, stage.queue.samples(refs), strict=True):
                assert ref.reward == by_id(SimpleNamespace(request_id=ref.trajectory_id)).value
                assert ref.prompt_tokens == 3 and 1 <= ref.loss_tokens <= 5 and ref.outcome == "ok"
                assert (ref.version_min, ref.version_max) == (0, 0) and sample.temperature == 1.0
        seeds = {name: s.seed for name, _, s in stage.engine.requests}
        assert seeds == {f"{group_id(g)}/train{i}.0": seed_of(g, i) for g in range(2) for i in range(4)}

    play(test)


def test_what_a_loop_and_a_reward_are_given(tmp_path):
    seen: dict[str, Any] = {}

    class Looks(SingleTurnLoop):
        async def run(self, sampling_params, **kwargs):
            seen["row"], seen["params"] = kwargs, sampling_params
            return await super().run(sampling_params, **kwargs)

    def reward(request):
        seen["request"] = request
        return Score(1.0)

    async def test():
        stage = Stage(tmp_path, prompts=1, n=1, algorithm=resolve("reinforce"), loop=lambda s: Looks(None, s, None), reward=reward)
        async with stage.player:
            await stage.step()

    play(test)
    row, request = seen["row"], seen["request"]
    assert row["ability"] == "math" and row["raw_prompt"] == [{"role": "user", "content": "q0"}] and row["index"] == 0
    assert row["request_id"] == request.request_id and row["prompt_ids"].tolist() == [1, 2, 3]
    assert seen["params"]["max_tokens"] == 8 and seen["params"]["temperature"] == 1.0
    assert request.ground_truth == "0" and request.extra_info == {"split": "train", "num_turns": 2}
    assert request.solution_str == " ".join(map(str, request.response_ids)) and request.response_tokens == len(request.response_ids)
    assert request.max_response_tokens == 8 and not request.truncated


# -- retries and outcomes ----------------------------------------------------------------------------------------------


async def one(stage: Stage, index: int = 0) -> Trajectory:
    """Play the first group alone; one of its trajectories."""
    async with stage.player:
        stage.player._admit()
        await stage.player.drain()
        group = next(iter(stage.player.groups.values()), None)
        assert group is not None, stage.released()
        return group.trajectories[index]


def test_a_failed_attempt_is_played_again_with_another_seed(tmp_path):
    async def test():
        broken = {seed_of(0, 1, 0), seed_of(0, 1, 1)}
        stage = Stage(tmp_path, prompts=1, n=3, max_attempts=3, engine=FakeEngine(fail=broken.__contains__))
        trajectory = await one(stage, 1)
        assert (trajectory.attempt, trajectory.outcome, trajectory.trajectory_id) == (2, "ok", f"{group_id(0)}/train1.2")
        assert [(n, s.seed) for n, _, s in stage.engine.requests if "train1" in n] == [
            (f"{group_id(0)}/train1.{a}", seed_of(0, 1, a)) for a in range(3)
        ]
        assert stage.log("scored")[0]["attempts"] == [1, 3, 1]
        assert stage.engine.calls == 5

    play(test)


def test_an_invalid_reward_is_tried_again_until_the_last_attempt(tmp_path):
    async def test():
        def reward(request):
            return Invalid("timeout", "no result") if "train0" in request.request_id else Score(0.5)

        stage = Stage(tmp_path, prompts=1, n=3, max_attempts=4, reward=reward)
        trajectory = await one(stage)
        assert (trajectory.attempt, trajectory.outcome, trajectory.error) == (3, "invalid", "timeout: no result")
        assert trajectory.reward == Invalid("timeout", "no result") and stage.engine.calls == 4 + 2
        assert len({s.seed for _, _, s in stage.engine.requests}) == 6
        assert stage.player.stats.invalid == {"timeout": 1} and stage.player.stats.played == 3

    play(test)


class Returns(AgentLoopBase):
    """A loop with a fault: what `make` does with a sampled answer."""

    make: Callable[[Any, Any], Any]

    async def run(self, sampling_params, **kwargs):
        out = await self.server_manager.generate(kwargs["request_id"], prompt_ids=kwargs["prompt_ids"], sampling_params={})
        return type(self).make(kwargs["prompt_ids"], out)


def loop_that(make: Callable[[Any, Any], Any]) -> Callable[[Any], AgentLoopBase]:
    cls = type("Loop", (Returns,), {"make": staticmethod(make)})
    return lambda server: cls(None, server, None)


def answer(prompt, out, **more):
    return AgentLoopOutput(**{"prompt_ids": prompt, "response_ids": out.token_ids, "response_mask": [1] * len(out.token_ids)} | more)


def dies(prompt, out):
    raise KeyError("tool")


def cancels(prompt, out):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("make", "outcome", "error"),
    [
        (dies, "failed", "KeyError: 'tool'"),
        (cancels, "failed", "Abandoned: "),
        (lambda p, o: None, "failed", "AttributeError: "),
        (lambda p, o: answer(p, o, response_mask=[1] * 9), "failed", "ValueError: response_mask has 9 values for"),
        (lambda p, o: answer(p, o, response_ids=[9, *o.token_ids], response_mask=[1] * (len(o.token_ids) + 1)), "failed", "ValueError: "),
        (lambda p, o: answer(p, o, response_ids=[], response_mask=[]), "failed", "empty: "),
        (lambda p, o: answer(p, o, response_mask=[0] * len(o.token_ids)), "failed", "empty: "),
        (lambda p, o: answer(p, o, reward_score=float("nan")), "invalid", "bad_result: "),
        (lambda p, o: answer(p, o, reward_score="good"), "invalid", "bad_result: "),
        (lambda p, o: answer(p, o, reward_score=0.75), "ok", ""),
        (lambda p, o: answer(p, o, reward_score=np.float32(0.75)), "ok", ""),
    ],
    ids=["dies", "cancels itself", "returns nothing", "mask of another length", "invents a token", "no token", "all masked",
         "score nan", "score text", "score", "score numpy"],
)  # fmt: skip
def test_what_a_loop_returns_is_an_outcome_never_a_crash(tmp_path, make, outcome, error):
    async def test():
        stage = Stage(tmp_path, n=2, reward=lambda r: Score(0.0), loop=loop_that(make))
        async with stage.player:
            seat = SimpleNamespace(group_id="g", index=0, purpose="train", epoch=0, draw=0)
            made = await stage.trajectories.play(task_of(0), seat, SAMPLING)
        assert made.outcome == outcome and made.error.startswith(error), made.error
        assert (made.reward == Score(0.75)) == (outcome == "ok")

    play(test)


def test_an_aborted_request_is_cancelled_and_played_again(tmp_path):
    class Gives_up(FakeEngine):
        async def generate(self, request_id, prompt_ids, sampling, *, prefix_key=None):
            done = await super().generate(request_id, prompt_ids, sampling, prefix_key=prefix_key)
            return replace(done, stop_reason="abort") if request_id.endswith(".0") else done

    async def test():
        stage = Stage(tmp_path, n=1, max_attempts=2, engine=Gives_up())
        seat = SimpleNamespace(group_id="g", index=0, purpose="train", epoch=0, draw=0)
        made = await stage.trajectories.play(task_of(0), seat, SAMPLING)
        assert (made.outcome, made.attempt) == ("ok", 1)
        stage = Stage(tmp_path / "b", n=1, max_attempts=1, engine=Gives_up())
        made = await stage.trajectories.play(task_of(0), seat, SAMPLING)
        assert (made.outcome, made.stop_reason, made.reward) == ("cancelled", "abort", None)

    play(test)


class SlowReward:
    """Never answers for some."""

    def __init__(self, slow: Callable[[str], bool]) -> None:
        self.slow = slow

    async def score(self, request):
        if self.slow(request.request_id):
            await asyncio.sleep(3600)
        return by_id(request)

    async def close(self): ...


def test_a_reward_that_never_comes_is_invalid_and_the_step_goes_on(tmp_path):
    async def test():
        stage = Stage(tmp_path, reward=SlowReward(lambda name: "train2" in name), timeout_s=0.05)
        async with stage.player:
            refs = await stage.step()
        assert len(refs) == 4 * 3 and not [r for r in refs if "train2" in r.trajectory_id]
        assert Counter(e for s in stage.log("scored") for e in s["errors"]) == {"timeout: no reward in 0.05 s": 4}

    play(test)


def test_a_trajectory_that_always_hangs_costs_itself_and_not_the_step(tmp_path):
    """Its three attempts take longer than the player's own patience, which must not end the run."""

    async def test():
        engine = FakeEngine(hang={seed_of(0, 0, a) for a in range(3)}.__contains__)
        stage = Stage(tmp_path, engine=engine, timeout_s=0.05, play_timeout_s=0.01, max_attempts=3)
        async with stage.player:
            refs = await stage.step()
        assert len(refs) == 15 and stage.log("scored")[-1]["errors"] == ["timeout: the agent loop did not end in 0.05 s"]

    play(test)


# -- groups that do not train ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "reason"), [("reward", "invalid"), ("engine", "failed")])
def test_a_group_with_too_few_valid_trajectories_is_released_and_replaced(tmp_path, fault, reason):
    async def test():
        bad = {f"{group_id(1)}/train{i}.0" for i in range(3)}  # one of four is valid, grpo needs two
        engine = FakeEngine(delay_s=jitter, fail={seed_of(1, i) for i in range(3)}.__contains__) if fault == "engine" else FakeEngine()
        stage = Stage(
            tmp_path, engine=engine,
            reward=lambda r: Invalid("crash", "x") if fault == "reward" and r.request_id in bad else by_id(r),
        )  # fmt: skip
        async with stage.player:
            refs = await stage.step()
            assert groups_of(refs) == [group_id(i) for i in (0, 2, 3, 4)]
            assert stage.player.stats.released == {reason: 1}
            assert len(stage.queue) == 0
        assert stage.log("released") == [{"group_id": group_id(1), "reason": reason}]

    play(test)


def test_a_group_that_keeps_enough_valid_trajectories_trains_on_those(tmp_path):
    async def test():
        stage = Stage(tmp_path, reward=lambda r: Invalid("crash") if "train0" in r.request_id or "train3" in r.request_id else by_id(r))
        async with stage.player:
            refs = await stage.step()
        assert [r.trajectory_id.split("/")[1] for r in refs] == ["train1.0", "train2.0"] * 4
        assert not stage.released()

    play(test)


def greedy_baseline() -> Algorithm:
    spec = GroupSpec(least=1, baselines=1, baseline_sampling=lambda s: replace(s, temperature=0.0))
    return replace(resolve("reinforce"), group=spec)


def test_a_baseline_rides_in_its_group_and_its_failure_releases_the_group(tmp_path):
    async def test():
        stage = Stage(
            tmp_path, n=2, prompts=2, algorithm=greedy_baseline(),
            engine=FakeEngine(fail={seed_of(1, 0, purpose="baseline")}.__contains__),
        )  # fmt: skip
        async with stage.player:
            refs = await stage.step()
            assert groups_of(refs) == [group_id(0), group_id(2)] and stage.player.stats.released == {"failed": 1}
        assert [(r.purpose, r.trajectory_id) for r in refs[:3]] == [
            ("train", f"{group_id(0)}/train0.0"), ("train", f"{group_id(0)}/train1.0"), ("baseline", f"{group_id(0)}/baseline0.0"),
        ]  # fmt: skip
        assert {s.temperature for n, _, s in stage.engine.requests if "baseline" in n} == {0.0}
        assert {s.temperature for n, _, s in stage.engine.requests if "train" in n} == {1.0}

    play(test)


def test_dynamic_sampling_rejects_flat_groups_and_refills(tmp_path):
    async def test():
        def reward(request):  # of every three groups the first two are flat: all right, all wrong
            draw = int(request.request_id[1:9])
            return Score(1.0 - draw % 3) if draw % 3 < 2 else by_id(request)

        stage = Stage(tmp_path, prompts=3, algorithm=resolve("dapo"), reward=reward)
        async with stage.player:
            for s in range(2):
                refs = await stage.player.take(s)
                assert groups_of(refs) == [group_id(9 * s + 2 + 3 * i) for i in range(3)]
                assert (stage.player.stats.flat, stage.player.stats.groups, stage.player.stats.released["rejected"]) == (6, 9, 6)
                stage.player.stats = type(stage.player.stats)()
                stage.player.trained(s, refs)
                stage.player.published(s + 1)

    play(test)


def test_selection_looks_at_the_named_component_and_says_when_it_is_missing(tmp_path):
    async def test():
        algorithm = resolve("dapo", {"filter_metric": "acc"})
        stage = Stage(tmp_path, prompts=1, algorithm=algorithm, reward=lambda r: Score(1.0, {"acc": by_id(r).value, "score": 1.0}))
        async with stage.player:
            assert len(await stage.step()) == 4
        stage = Stage(tmp_path / "b", prompts=1, algorithm=algorithm, reward=lambda r: Score(1.0, {"format": 1.0}))
        async with stage.player:
            with pytest.raises(ValueError, match=r"filter_metric='acc' is not a component of the reward \(format\)"):
                await stage.step()

    play(test)


@pytest.mark.parametrize("on_exhausted", ["stop", "smaller"])
def test_data_without_signal_ends_as_declared(tmp_path, on_exhausted):
    async def test():
        algorithm = resolve("dapo", {"max_draws_per_group": 3.0, "on_exhausted": on_exhausted})
        stage = Stage(tmp_path, algorithm=algorithm, reward=lambda r: by_id(r) if r.request_id.startswith(group_id(0)) else Score(0.0))
        async with stage.player:
            if on_exhausted == "smaller":
                assert groups_of(await stage.step()) == [group_id(0)]
            with pytest.raises(RunEnded, match=r"the draw budget is spent .*rejected"):
                await stage.step()
            await stage.player.drain()
        assert not stage.player._running

    play(test)


def test_used_up_tasks_end_the_run_by_name(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=4, tasks=6, epochs=1)
        async with stage.player:
            await stage.step()
            with pytest.raises(RunEnded, match="the tasks are used up with 2 of 4 groups complete"):
                await stage.step()

    play(test)


@pytest.mark.parametrize("staleness", [0.0, 1.0])
def test_over_sampled_surplus_returns_its_draw_which_is_drawn_again_first(tmp_path, staleness):
    """With staleness the slot is filled again at once, by the same draw under the same ids: the dropped one must have
    ended before (the fake engine, like the real ones, refuses an id that is running)."""

    async def test():
        engine = FakeEngine(delay_s=lambda seed: 0.001 + 10 * jitter(seed) * (seed % 4 == 0))  # some are slow
        stage = Stage(tmp_path, engine=engine, staleness=staleness, oversample=0.5, n=2, tasks=40, epochs=1, steps=8)
        trained: list[str] = []
        async with stage.player:
            for _ in range(8):
                refs = await stage.step()
                assert len(groups_of(refs)) == 4 and len(refs) == 8
                trained += groups_of(refs)
            dropped = [e["group_id"] for e in stage.log("released") if e["reason"] == "dropped"]
            assert dropped and stage.scheduler.stats().dropped == len(dropped)
            held = {int(g[1:]) for g in (*trained, *stage.player.groups)}
            drawn = stage.cursor.state()["next_draw"]
            assert held | set(stage.cursor.state()["returned"]) == set(range(drawn)), "no draw is lost"
        assert len(set(trained)) == 32, "none is trained twice"
        assert set(dropped) & set(trained), "a dropped one came back"
        assert not engine.live and len(stage.queue) == sum(len(r) for r in stage.player._refs.values())

    play(test)


# -- too many invalid --------------------------------------------------------------------------------------------------


def test_a_share_of_invalid_rewards_above_the_limit_ends_the_run_with_the_reasons(tmp_path):
    async def test():
        def reward(request):
            which = derive_seed(request.request_id) % 10
            return Invalid("timeout", "no result within 30 s") if which < 5 else Invalid("crash", "exit 1") if which < 7 else by_id(request)

        stage = Stage(tmp_path, prompts=8, n=8, reward=reward, max_invalid_share=0.2)
        async with stage.player:
            with pytest.raises(RunEnded) as caught:
                await stage.step()
        text = str(caught.value)
        assert "trajectories had no valid reward (pipeline.max_invalid_share=0.2)" in text
        assert "x timeout: no result within 30 s" in text and "x crash: exit 1" in text
        assert text.index("timeout") < text.index("crash"), "the most frequent first"

    play(test)


def test_a_dead_engine_ends_the_run_with_its_cause(tmp_path):
    async def test():
        stage = Stage(tmp_path, engine=FakeEngine(fail=lambda seed: True), max_invalid_share=0.2)
        async with stage.player:
            with pytest.raises(RunEnded, match=r"16 of 16 .*16 x RuntimeError: the engine broke this request"):
                await stage.step()

    play(test)


def test_small_steps_are_judged_together(tmp_path):
    """2 trajectories a step, half of them invalid: no step alone says anything."""

    async def test():
        stage = Stage(
            tmp_path, prompts=1, n=2, steps=1000, algorithm=resolve("reinforce"), max_invalid_share=0.2,
            reward=lambda r: Invalid("crash") if "train0" in r.request_id else by_id(r),
        )  # fmt: skip
        async with stage.player:
            with pytest.raises(RunEnded, match="max_invalid_share"):
                for _ in range(100):
                    await stage.step()

    play(test)


def outcomes(rng: random.Random, share: float, count: int) -> list[Trajectory]:
    bad = [rng.random() < share for _ in range(count)]
    return [
        Trajectory(
            trajectory_id=str(i), group_id="g", task_id="t", index=i, purpose="train", attempt=0, sampling=SAMPLING, segments=(),
            stop_reason="eos", outcome="invalid" if b else "ok", error="crash: x" if b else "",
        )
        for i, b in enumerate(bad)
    ]  # fmt: skip


def stops_at(share: float, limit: float, *, seed: int, per_step: int = 32, steps: int = 200) -> int | None:
    """The step at which a run ends whose trajectories are invalid with probability `share`."""
    judge, rng = InvalidShare(limit, least=32), random.Random(seed)
    for step in range(steps):
        for t in outcomes(rng, share, per_step):
            judge.add([t])
            try:
                judge.check()
            except RunEnded:
                return step
        judge.step_ended()
    return None


def test_chance_alone_ends_no_run_and_a_bad_share_ends_every_one():
    """Half the limit never stops 200 steps; twice the limit stops within 10; a limit of 1 and of 0 are what they say."""
    assert [stops_at(0.1, 0.2, seed=s) for s in range(10)] == [None] * 10
    assert all((found := stops_at(0.4, 0.2, seed=s)) is not None and found < 10 for s in range(10))
    assert stops_at(1.0, 1.0, seed=0) is None
    assert stops_at(0.05, 0.0, seed=0) is not None
    assert stops_at(1.0, 0.2, seed=0, per_step=2) == 15, "all of 32"


# -- errors of ours, and the end ---------------------------------------------------------------------------------------


def test_an_internal_error_in_a_group_surfaces_in_take_and_stops_its_siblings(tmp_path):
    async def test():
        def reward(request):
            if request.request_id == f"{group_id(2)}/train1.0":
                raise ZeroDivisionError("ours")
            return by_id(request)

        engine = FakeEngine(hang=lambda seed: seed in {seed_of(2, 0), seed_of(2, 3)})
        stage = Stage(tmp_path, reward=reward, engine=engine)
        async with stage.player:
            with pytest.raises(ZeroDivisionError, match="ours"):
                await stage.step()
            assert not {f"{group_id(2)}/train{i}.0" for i in range(4)} & engine.live, "its siblings do not go on unwatched"
            with pytest.raises(ZeroDivisionError):
                await stage.player.take(0)

    play(test)


def test_leaving_cancels_everything_and_stays_until_it_has_ended(tmp_path):
    ended: list[str] = []

    class Careful(SingleTurnLoop):
        """Needs a while to put its tools away."""

        async def run(self, sampling_params, **kwargs):
            try:
                return await super().run(sampling_params, **kwargs)
            finally:
                await asyncio.sleep(0.002)
                ended.append(kwargs["request_id"])

    async def test():
        engine = FakeEngine(delay_s=lambda seed: 3600)
        stage = Stage(tmp_path, engine=engine, staleness=1.0, loop=lambda s: Careful(None, s, None))
        with pytest.raises(TimeoutError):
            async with stage.player:
                async with asyncio.timeout(0.05):
                    await stage.step()
        assert engine.calls == 32 and not engine.live and len(ended) == 32
        assert not stage.player._running and stage.waits.pending() == []

    play(test)


def test_nothing_is_admitted_any_more_while_leaving(tmp_path):
    """A group that ends during the exit frees a slot; it stays free."""

    async def test():
        stage = Stage(tmp_path, staleness=1.0, engine=FakeEngine(delay_s=lambda seed: 0.003))
        async with stage.player:
            await stage.step()
            calls = stage.engine.calls
        stage.player._admit()
        assert stage.engine.calls == calls and not stage.player._running

    play(test)


def test_a_wait_that_nobody_answers_says_what_it_waits_for(tmp_path):
    async def test():
        stage = Stage(tmp_path, timeout_s=0.01, play_timeout_s=0.02)
        async with stage.player:
            await stage.step(publish=False)
            with pytest.raises(DeadlineExpired, match=r"step 2 waited 0.04 s for step 1 needs 4 groups: .* wait for the publish of version 1"):
                await stage.step()

    play(test)


def test_drain_waits_for_everything_that_is_generated(tmp_path):
    async def test():
        stage = Stage(tmp_path, sync_every=3)
        async with stage.player:
            await stage.player.take(0)
            await stage.player.drain()
            assert not stage.engine.live and not stage.player._running
            assert len(stage.log("scored")) == 12, "three steps share a version: their groups were all in flight"

    play(test)


# -- Invalid never enters the advantages -------------------------------------------------------------------------------


def advantages_of(queue: MemoryQueue, refs: Refs) -> dict[str, np.ndarray]:
    role = Role("compute", queue)
    role.compute(refs, lambda columns: {"rewards": token_rewards(columns)}, (), ("rewards",))
    role.compute(refs, grpo, ("rewards",), ("advantages",))
    column = queue.read(refs, ("advantages",))["advantages"]
    return {r.trajectory_id: column.row(i).numpy() for i, r in enumerate(refs)}


@pytest.mark.parametrize("seed", range(3))
def test_with_a_third_invalid_the_advantages_are_those_of_the_valid_subset(tmp_path, seed):
    async def test():
        def reward(request):
            return Invalid("timeout") if derive_seed(seed, request.request_id) % 10 < 3 else by_id(request)

        stage = Stage(tmp_path, prompts=8, n=8, reward=reward)
        async with stage.player:
            refs = await stage.player.take(0)
            groups = list(stage.player.groups.values())
        played = [t for g in groups for t in g.trajectories]
        assert len(played) == 64 and 8 < sum(t.outcome == "invalid" for t in played) < 32
        valid = {t.trajectory_id: t for t in played if t.outcome == "ok"}
        assert {r.trajectory_id for r in refs} == set(valid)
        found = advantages_of(stage.queue, refs)
        for group in groups:
            scores = np.array([t.reward.value for t in group.trajectories if t.outcome == "ok"])
            for t in group.trajectories:
                if t.outcome == "ok":
                    expected = (t.reward.value - scores.mean()) / (scores.std(ddof=1) + 1e-6)
                    np.testing.assert_allclose(found[t.trajectory_id], expected, rtol=1e-12)
                    assert len(found[t.trajectory_id]) == t.loss_tokens
        return stage.queue, played, found

    queue, played, expected = play(test)
    everything = [  # the same with the invalid ones in the queue: they are in no statistic and get 0
        Sample(
            sample_id=f"all/{t.trajectory_id}", trajectory_id=t.trajectory_id, group_id=t.group_id, purpose="train",
            segments=t.segments, reward=t.reward.value if isinstance(t.reward, Score) else float("nan"), outcome=t.outcome,
        )
        for t in played
    ]  # fmt: skip
    random.Random(seed).shuffle(everything)  # nor does the order matter
    found = advantages_of(queue, queue.put(everything))
    for t in played:
        want = expected.get(t.trajectory_id, np.zeros(t.loss_tokens))
        np.testing.assert_allclose(found[t.trajectory_id], want, rtol=1e-12, atol=0)


# -- a hostile step ----------------------------------------------------------------------------------------------------


def test_256_trajectories_of_which_some_raise_and_some_hang(tmp_path):
    """The step completes, every outcome is counted once, no id is lost and no task is left."""
    places = [(g, i) for g in range(32) for i in range(8)]
    chosen = random.Random(5).sample(places, 39)
    raising, hanging = chosen[:26], chosen[26:]

    async def test():
        engine = FakeEngine(
            delay_s=jitter, fail={seed_of(*p) for p in raising}.__contains__, hang={seed_of(*p) for p in hanging}.__contains__
        )
        stage = Stage(tmp_path, engine=engine, prompts=32, n=8, timeout_s=0.4)
        async with stage.player:
            refs = await stage.player.take(0)
            groups = list(stage.player.groups.values())
            stats = stage.player.stats
        played = [t for g in groups for t in g.trajectories]
        assert [(t.group_id, t.index) for t in played] == [(group_id(g), i) for g, i in places]
        assert len({t.trajectory_id for t in played}) == 256 == engine.calls
        assert Counter(t.outcome for t in played) == {"ok": 217, "failed": 39}
        assert stats.invalid == {"RuntimeError": 26, "timeout": 13} and stats.played == 256
        assert {t.trajectory_id for t in played if t.error.startswith("timeout")} == {f"{group_id(g)}/train{i}.0" for g, i in hanging}
        assert {r.trajectory_id for r in refs} == {t.trajectory_id for t in played if t.outcome == "ok"}
        assert len(stage.queue) == 217 and not engine.live and stage.waits.pending() == []

    play(test)


# -- staleness and partial rollouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "sync_every"), [(0.5, 1), (1.0, 1), (2.0, 1), (1.0, 2)])
def test_versions_are_per_span_and_never_older_than_allowed(tmp_path, staleness, sync_every):
    async def test():
        engine = FakeEngine(delay_s=lambda seed: 3 * jitter(seed))
        stage = Stage(tmp_path, engine=engine, staleness=staleness, sync_every=sync_every, steps=14, n=3)
        mixed, lags, ids = 0, [], []
        async with stage.player:
            for step in range(14):
                refs = await stage.player.take(step)
                now = stage.scheduler.version
                admitted = {g.group_id: g.admitted_version for g in stage.player.groups.values()}
                for ref, sample in zip(refs, stage.queue.samples(refs), strict=True):
                    versions = [s.version for s in sample.segments if s.source == "sampled"]
                    assert versions == sorted(versions) and (ref.version_min, ref.version_max) == (versions[0], versions[-1])
                    assert admitted[ref.group_id] <= ref.version_min <= ref.version_max <= now
                    lags.append(now - ref.version_min)
                    mixed += ref.version_min < ref.version_max
                ids += groups_of(refs)
                stage.player.trained(step, refs)
                stage.queue.drop(refs)
                if stage.scheduler.publish_due(step):
                    await engine.load_weights(SimpleNamespace(version=now + 1, tensors=lambda: ()), on_inflight="keep")
                    stage.player.published(now + 1)
        assert max(lags) <= np.ceil(staleness) and max(lags) >= 1
        assert mixed, "some sample went on under new weights"
        assert len(set(ids)) == 14 * 4

    play(test)


# -- resume ------------------------------------------------------------------------------------------------------------


def test_a_resumed_player_goes_on_with_the_same_ids_and_seeds_and_plays_nothing_twice(tmp_path):
    slow = {seed_of(g, i) for g in range(4, 8) for i in (1, 3)} | {seed_of(5, 0), seed_of(5, 2)}

    def make(path: Path, **more: Any) -> Stage:
        return Stage(path, staleness=1.0, engine=FakeEngine(delay_s=lambda seed: 3600 if more.get("stuck") and seed in slow else 0.0))

    async def first():
        stage = make(tmp_path / "a", stuck=True)
        async with stage.player:
            await stage.step()
            await until(lambda: len(stage.engine.live) == 10 and len(stage.log("scored")) == 8)
            return stage, stage.player.in_flight(), stage.scheduler.state(), stage.cursor.state()

    before, groups, scheduler, cursor = play(first)
    complete = [g.group_id for g, _, done in groups if done]
    running = {g.group_id: [t.index for t in g.trajectories] for g, _, done in groups if not done}
    assert complete == [group_id(i) for i in (8, 9, 10, 11)]
    assert {g: sorted(v) for g, v in running.items()} == {group_id(4): [0, 2], group_id(5): [], group_id(6): [0, 2], group_id(7): [0, 2]}

    async def second():
        stage = make(tmp_path / "b")
        stage.engine.version = before.engine.version
        stage.cursor.load_state(cursor)
        found = stage.scheduler.load_state(scheduler, 0.0)
        assert set(found.complete) == set(complete) and set(found.running) == set(running)
        async with stage.player:
            for group, draw, done in groups:
                stage.player.resume(group, draw, complete=done)
            again = {g.group_id: [t.trajectory_id for t in g.trajectories] for g, _, _ in stage.player.in_flight()}
            assert again == {g.group_id: [t.trajectory_id for t in g.trajectories] for g, _, _ in groups}, "before it ran a step"
            refs = [await stage.step(), await stage.step()]
        assert [groups_of(r) for r in refs] == [[group_id(i) for i in range(4, 8)], [group_id(i) for i in range(8, 12)]]
        played = {n: s.seed for n, _, s in stage.engine.requests}
        kept = {t.trajectory_id for g, _, _ in groups for t in g.trajectories}
        assert not kept & set(played), "what had ended is not played again"
        seeds = {n: s.seed for n, _, s in before.engine.requests}
        unfinished = {f"{g}/train{i}.0" for g, ended in running.items() for i in range(4) if i not in ended}
        assert {n: s for n, s in played.items() if n in seeds} == {n: seeds[n] for n in unfinished}
        rows = {t.trajectory_id: t for g, _, _ in groups for t in g.trajectories}
        for ref in (*refs[0], *refs[1]):
            if ref.trajectory_id in rows:
                assert ref.reward == rows[ref.trajectory_id].reward.value and ref.version_min == 0
            assert ref.reward == by_id(SimpleNamespace(request_id=ref.trajectory_id)).value

    play(second)


def test_a_group_of_the_checkpoint_that_no_longer_fits_is_not_started(tmp_path):
    """What the scheduler drops on resume, its task goes back to the cursor; the player never sees it."""

    async def test():
        stage = Stage(tmp_path, staleness=2.0)
        async with stage.player:
            await stage.step()
            groups, scheduler, cursor = stage.player.in_flight(), stage.scheduler.state(), stage.cursor.state()
        fresh = Stage(tmp_path / "b", staleness=0.0)
        fresh.engine.version = stage.engine.version
        fresh.cursor.load_state(cursor)
        found = fresh.scheduler.load_state(scheduler, 0.0)
        assert found.dropped
        async with fresh.player:
            for group, draw, done in groups:
                if group.group_id in found.dropped:
                    fresh.cursor.give_back(draw)
                else:
                    fresh.player.resume(group, draw, complete=done)
            trained = [g for _ in range(3) for g in groups_of(await fresh.step())]
        assert set(trained[:4]) == set(found.complete) | set(found.running), "what was in flight goes first"
        assert sorted(trained) == [group_id(i) for i in range(4, 16)], "none is lost, none is doubled"

    play(test)


# -- evaluation shares the machinery -----------------------------------------------------------------------------------


def test_evaluation_holds_no_slot_and_has_seeds_of_its_own(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=1, n=1, algorithm=resolve("reinforce"))
        seat = SimpleNamespace(group_id="eval5/greedy/0", index=0, purpose="eval", epoch=0, draw=0)
        async with stage.player:
            free = stage.scheduler.free_slots()
            made = await stage.trajectories.play(task_of(0), seat, replace(SAMPLING, temperature=0.0))
            assert stage.scheduler.free_slots() == free and len(stage.queue) == 0
            await stage.step()
        assert made.trajectory_id == "eval5/greedy/0/eval0.0"
        assert [s.seed for _, _, s in stage.engine.requests] == [seed_of(0, 0, purpose="eval"), seed_of(0, 0)]

    play(test)


def test_the_prompt_of_a_trajectory_is_the_tasks_own(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=3, n=1, algorithm=resolve("reinforce"))
        async with stage.player:
            refs = await stage.player.take(0)
            for i, sample in enumerate(stage.queue.samples(refs)):
                first = sample.segments[0]
                assert isinstance(first, Segment) and first.ids.tolist() == task_of(i).prompt_ids.tolist()
                assert torch.tensor(first.ids).dtype == torch.int64

    play(test)
