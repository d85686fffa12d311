"""Groups in flight on a fake engine: order, retries, outcomes, faults, the end.

Durations are virtual: they are functions of the request's seed, and nothing depends on the machine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from fakes import FakeEngine, put
from stage import SAMPLING, Stage, by_id, group_id, groups_of, jitter, play, seed_of, task_of

from verl.agent_loop.base import AgentLoopBase, AgentLoopFactory, AgentLoopOutput
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.algorithms.estimators import grpo, token_rewards
from verl.algorithms.resolve import resolve
from verl.driver.checked import CheckedOutput
from verl.transfer_queue.memory import MemoryQueue
from verl.transfer_queue.rows import queued_samples
from verl.types import Invalid, Refs, Sample, Score, Segment, Trajectory, derive_seed, samples_of
from verl.workers.compute import Compute
from verl.workers.waits import DeadlineExpired

# -- order -------------------------------------------------------------------------------------------------------------


def test_at_staleness_0_a_batch_is_in_admission_order_whatever_ends_first(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=8, n=3)
        async with stage.groups:
            batches = [groups_of(await stage.step()) for _ in range(3)]
        assert batches == [[group_id(8 * s + i) for i in range(8)] for s in range(3)]
        ended = [e["group_id"] for e in stage.log("scored")]
        assert sorted(ended) == [group_id(i) for i in range(24)] and ended != sorted(ended), (
            "they did end in another order"
        )
        assert len(stage.queue) == 0 and stage.groups.groups == {} and stage.groups.save() == ()

    play(test)


def test_rows_of_a_group_are_in_order_and_carry_what_was_played(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=2, n=4)
        async with stage.groups:
            refs = await stage.groups.take(0)
            assert [r.sample_id for r in refs] == [f"{group_id(g)}/train{i}.0#0" for g in range(2) for i in range(4)]
            for ref, sample in zip(refs, queued_samples(stage.queue, refs), strict=True):
                assert ref.reward == by_id(SimpleNamespace(request_id=ref.trajectory_id)).value
                assert ref.prompt_tokens == 3 and 1 <= ref.loss_tokens <= 5 and ref.outcome == "ok"
                assert (ref.version_min, ref.version_max) == (0, 0) and sample.temperature == 1.0
        seeds = {name: s.seed for name, _, s in stage.engine.requests}
        assert seeds == {f"{group_id(g)}/train{i}.0": seed_of(g, i) for g in range(2) for i in range(4)}

    play(test)


def test_what_a_loop_and_a_reward_are_given(tmp_path):
    seen: dict[str, Any] = {}
    stage: Any = None

    class Looks(SingleTurnLoop):
        async def run(self, sampling_params, **kwargs):
            seen["row"], seen["params"] = kwargs, sampling_params
            seen["wall_s"] = self.server_manager.wall_s / stage.trajectories.timeout_s
            return await super().run(sampling_params, **kwargs)

    def reward(request):
        seen["request"] = request
        return Score(1.0)

    async def test():
        nonlocal stage
        stage = Stage(
            tmp_path,
            prompts=1,
            n=1,
            algorithm=resolve("reinforce"),
            loop=lambda s, _: Looks(None, s, None),
            reward=reward,
        )
        async with stage.groups:
            await stage.step()

    play(test)
    row, request = seen["row"], seen["request"]
    assert row["ability"] == "math" and row["raw_prompt"] == [{"role": "user", "content": "q0"}] and row["index"] == 0
    assert row["request_id"] == request.request_id and row["prompt_ids"].tolist() == [1, 2, 3]
    assert seen["wall_s"] == 0.75, "a trajectory ends as cut before its attempt fails"
    assert seen["params"]["max_tokens"] == 8 and seen["params"]["temperature"] == 1.0
    said = {"num_turns": 2, "turn_texts": [request.solution_str]}
    assert request.ground_truth == "0" and request.extra_info == {"split": "train", **said}
    assert request.solution_str == " ".join(map(str, request.response_ids)) and request.response_tokens == len(
        request.response_ids
    )
    assert request.max_response_tokens == 8 and not request.truncated


def test_the_length_of_an_answer_for_its_reward_counts_what_tools_wrote(tmp_path):
    """Length penalties are of the whole response: three tokens of a tool stand behind the sampled ones."""
    seen: list[Any] = []

    class Adds(SingleTurnLoop):
        async def run(self, sampling_params, **kwargs):
            out = await super().run(sampling_params, **kwargs)
            return replace(
                out, response_ids=[*out.response_ids, 30, 31, 32], response_mask=[*out.response_mask, 0, 0, 0]
            )

    async def test():
        stage = Stage(
            tmp_path,
            prompts=1,
            n=2,
            loop=lambda s, _: Adds(None, s, None),
            reward=lambda request: seen.append(request) or by_id(request),
        )
        async with stage.groups:
            refs = await stage.step()
        lengths = sorted(r.loss_tokens + 3 for r in refs)
        assert sorted(request.response_tokens for request in seen) == lengths
        assert all(request.response_ids[-3:].tolist() == [30, 31, 32] for request in seen)

    play(test)


# -- retries and outcomes ----------------------------------------------------------------------------------------------


async def one(stage: Stage, index: int = 0) -> Trajectory:
    """Play the first group alone; one of its trajectories."""
    async with stage.groups:
        stage.groups._admit()
        await stage.groups.drain()
        group = next(iter(stage.groups.groups.values()), None)
        assert group is not None, stage.released()
        return group.trajectories[index]


def test_a_failed_attempt_is_played_again_with_another_seed(tmp_path):
    async def test():
        broken = {seed_of(0, 1, 0), seed_of(0, 1, 1)}
        stage = Stage(tmp_path, prompts=1, n=3, max_attempts=3, engine=FakeEngine(fail=broken.__contains__))
        trajectory = await one(stage, 1)
        assert (trajectory.attempt, trajectory.outcome, trajectory.trajectory_id) == (
            2,
            "ok",
            f"{group_id(0)}/train1.2",
        )
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
        assert stage.groups.stats.invalid == {"timeout": 1} and stage.groups.stats.played == 3
        assert 0 < stage.groups.stats.unread == stage.groups.stats.sampled, "this test calls all of them so"

    play(test)


def test_rewards_of_turns_that_are_not_one_for_each_are_no_reward(tmp_path):
    async def test():
        found = {}
        for name, rewards in (("two", (0.5, 0.5)), ("one", (0.5,)), ("empty", ()), ("none", None)):

            def reward(request, rewards=rewards):
                return Score(1.0, {}, None, rewards if "train0" in request.request_id else None)

            found[name] = await one(Stage(tmp_path / name, prompts=1, n=3, reward=reward))
        said = "bad_result: turn_rewards has 2 values, and the model played 1 turns: give one for each of extra_info"
        assert found["two"].outcome == "invalid" and found["two"].error == f"{said}['turn_texts']"
        assert [found[name].outcome for name in ("one", "empty", "none")] == ["ok", "invalid", "ok"]

    play(test)


class Returns(AgentLoopBase):
    """A loop with a fault: what `make` does with a sampled answer."""

    make: Callable[[Any, Any], Any]

    async def run(self, sampling_params, **kwargs):
        out = await self.server_manager.generate(
            kwargs["request_id"], prompt_ids=kwargs["prompt_ids"], sampling_params={}
        )
        return type(self).make(kwargs["prompt_ids"], out)


def loop_that(make: Callable[[Any, Any], Any]) -> AgentLoopFactory:
    cls = type("Loop", (Returns,), {"make": staticmethod(make)})
    return lambda server, task: cls(None, server, None)


def answer(prompt, out, **more):
    return AgentLoopOutput(
        **{"prompt_ids": prompt, "response_ids": out.token_ids, "response_mask": [1] * len(out.token_ids)} | more
    )


def dies(prompt, out):
    raise KeyError("tool")


class Sly:
    def item(self):
        return 1 / 0


def cancels(prompt, out):
    raise asyncio.CancelledError


@each(
    "make, outcome, error",
    [
        (dies, "failed", "KeyError: 'tool'"),
        (cancels, "failed", "Abandoned: "),
        (lambda p, o: None, "failed", "ValueError: the agent loop returned a NoneType"),
        (lambda p, o: answer(p, o, response_mask=[1] * 9), "failed", "ValueError: response_mask has 9 values for"),
        (
            lambda p, o: answer(p, o, response_ids=[9, *o.token_ids], response_mask=[1] * (len(o.token_ids) + 1)),
            "failed",
            "ValueError: ",
        ),
        (lambda p, o: answer(p, o, response_ids=[], response_mask=[]), "failed", "empty: "),
        (lambda p, o: answer(p, o, response_mask=[0] * len(o.token_ids)), "failed", "empty: "),
        (lambda p, o: answer(p, o, reward_score=float("nan")), "invalid", "bad_result: "),
        (lambda p, o: answer(p, o, reward_score="good"), "invalid", "bad_result: "),
        (lambda p, o: answer(p, o, reward_score=Sly()), "invalid", "exception: ZeroDivisionError"),
        (lambda p, o: answer(p, o, reward_score=0.75), "ok", ""),
        (lambda p, o: answer(p, o, reward_score=np.float32(0.75)), "ok", ""),
    ],
)
def test_what_a_loop_returns_is_an_outcome_never_a_crash(tmp_path, make, outcome, error):
    async def test():
        stage = Stage(tmp_path, n=2, reward=lambda r: Score(0.0), loop=loop_that(make))
        async with stage.groups:
            seat = SimpleNamespace(group_id="g", index=0, purpose="train", epoch=0, draw=0)
            made = await stage.trajectories.run(task_of(0), seat, SAMPLING)
        assert made.outcome == outcome and made.error.startswith(error), made.error
        assert (made.reward == Score(0.75)) == (outcome == "ok")

    play(test)


@each("said, kept", [("too slow", "too slow"), ("z" * 5000, "z" * 4000), (3, ""), (None, "")])
def test_what_the_environment_says_of_an_attempt_is_kept_where_the_reward_says_nothing(tmp_path, said, kept):
    async def test():
        loop = loop_that(lambda p, o: answer(p, o, extra_fields={"feedback": said}))
        for feedback in ("", "wrong"):
            stage = Stage(tmp_path, n=2, reward=lambda r, f=feedback: Score(0.0, feedback=f), loop=loop)
            async with stage.groups:
                seat = SimpleNamespace(group_id="g", index=0, purpose="train", epoch=0, draw=0)
                made = await stage.trajectories.run(task_of(0), seat, SAMPLING)
            assert made.reward == Score(0.0, feedback=feedback or kept)

    play(test)


def test_only_trained_trajectories_have_the_experts_of_their_tokens(tmp_path):
    wants = {}

    class Records(FakeEngine):
        async def generate(self, request):
            wants[request.id.split("/")[-1][:-3]] = request.routes
            return await super().generate(request)

    async def test():
        stage = Stage(tmp_path, n=1, engine=Records())
        for purpose in ("train", "baseline", "eval"):
            seat = SimpleNamespace(group_id="g", index=0, purpose=purpose, epoch=0, draw=0)
            await stage.trajectories.run(task_of(0), seat, SAMPLING)

    play(test)
    assert wants == {"train": True, "baseline": False, "eval": False}


def test_an_aborted_request_is_cancelled_and_played_again(tmp_path):
    class Gives_up(FakeEngine):
        async def generate(self, request):
            done = await super().generate(request)
            return replace(done, stop_reason="abort") if request.id.endswith(".0") else done

    async def test():
        stage = Stage(tmp_path, n=1, max_attempts=2, engine=Gives_up())
        seat = SimpleNamespace(group_id="g", index=0, purpose="train", epoch=0, draw=0)
        made = await stage.trajectories.run(task_of(0), seat, SAMPLING)
        assert (made.outcome, made.attempt) == ("ok", 1)
        stage = Stage(tmp_path / "b", n=1, max_attempts=1, engine=Gives_up())
        made = await stage.trajectories.run(task_of(0), seat, SAMPLING)
        assert (made.outcome, made.stop_reason, made.reward) == ("cancelled", "abort", None)

    play(test)


class SlowReward:
    """Never answers for some."""

    def __init__(self, slow: Callable[[str], bool]) -> None:
        self.slow = slow

    async def score(self, request):
        if self.slow(request.request_id):
            await asyncio.sleep(1e6)
        return by_id(request)

    async def close(self): ...


def test_a_reward_that_never_comes_is_invalid_and_the_step_goes_on(tmp_path):
    async def test():
        stage = Stage(tmp_path, reward=SlowReward(lambda name: "train2" in name), timeout_s=30)
        async with stage.groups:
            refs = await stage.step()
        assert len(refs) == 4 * 3 and not [r for r in refs if "train2" in r.trajectory_id]
        assert Counter(e for s in stage.log("scored") for e in s["errors"]) == {"timeout: no reward in 30 s": 4}

    play(test)


class OneGrader:
    """Scores one answer after the other, 4 s each."""

    def __init__(self) -> None:
        self.free = asyncio.Lock()

    async def score(self, request):
        async with self.free:
            await asyncio.sleep(4.0)
        return by_id(request)

    async def close(self): ...


def test_the_time_in_the_queue_of_slow_graders_costs_no_answer(tmp_path):
    """16 answers wait up to 64 s for a grader, which is far above the deadline of one; and two steps in a row do."""

    async def test():
        stage = Stage(tmp_path, reward=OneGrader(), timeout_s=10, play_timeout_s=10)
        async with stage.groups:
            for _ in range(2):
                assert len(await stage.step()) == 16
        assert not [e for s in stage.log("scored") for e in s["errors"]]

    play(test)


def test_a_trajectory_that_always_hangs_costs_itself_and_not_the_step(tmp_path):
    """Its three attempts take longer than the player's own patience, which must not end the run."""

    async def test():
        engine = FakeEngine(hang={seed_of(0, 0, a) for a in range(3)}.__contains__)
        stage = Stage(tmp_path, engine=engine, timeout_s=30, play_timeout_s=1, max_attempts=3)
        async with stage.groups:
            refs = await stage.step()
        assert len(refs) == 15 and stage.log("scored")[-1]["errors"] == ["timeout: the agent loop did not end in 30 s"]

    play(test)


# -- errors of ours, and the end ---------------------------------------------------------------------------------------


def test_an_internal_error_in_a_group_surfaces_in_take_and_stops_its_siblings(tmp_path):
    async def test():
        def reward(request):
            if request.request_id == f"{group_id(2)}/train1.0":
                raise ZeroDivisionError("ours")
            return by_id(request)

        engine = FakeEngine(hang=lambda seed: seed in {seed_of(2, 0), seed_of(2, 3)})
        stage = Stage(tmp_path, reward=reward, engine=engine)
        async with stage.groups:
            with pytest.raises(ZeroDivisionError, match="ours"):
                await stage.step()
            assert not {f"{group_id(2)}/train{i}.0" for i in range(4)} & engine.live, (
                "its siblings do not go on unwatched"
            )
            with pytest.raises(ZeroDivisionError):
                await stage.groups.take(0)

    play(test)


def test_leaving_cancels_everything_and_stays_until_it_has_ended(tmp_path):
    ended: list[str] = []

    class Careful(SingleTurnLoop):
        """Needs a while to put its tools away."""

        async def run(self, sampling_params, **kwargs):
            try:
                return await super().run(sampling_params, **kwargs)
            finally:
                await asyncio.sleep(2)
                ended.append(kwargs["request_id"])

    async def test():
        engine = FakeEngine(delay_s=lambda seed: 1e6)
        stage = Stage(tmp_path, engine=engine, staleness=1.0, loop=lambda s, _: Careful(None, s, None))
        with pytest.raises(TimeoutError):
            async with stage.groups:
                async with asyncio.timeout(100):
                    await stage.step()
        assert engine.calls == 32 and not engine.live and len(ended) == 32
        assert not stage.groups._running and stage.waits.pending() == []

    play(test)


def test_nothing_is_admitted_any_more_while_leaving(tmp_path):
    """A group that ends during the exit frees a slot; it stays free."""

    async def test():
        stage = Stage(tmp_path, staleness=1.0, engine=FakeEngine(delay_s=lambda seed: 3))
        async with stage.groups:
            await stage.step()
            calls = stage.engine.calls
        stage.groups._admit()
        assert stage.engine.calls == calls and not stage.groups._running

    play(test)


def test_a_wait_that_nobody_answers_says_what_it_waits_for(tmp_path):
    async def test():
        stage = Stage(tmp_path, timeout_s=100, play_timeout_s=50)
        async with stage.groups:
            await stage.step(publish=False)
            with pytest.raises(
                DeadlineExpired,
                match=r"step 2 waited 250 s for step 1 needs 4 groups: .* wait for the publish of version 1",
            ):
                await stage.step()

    play(test)


def test_drain_waits_for_everything_that_is_generated(tmp_path):
    async def test():
        stage = Stage(tmp_path, sync_every=3)
        async with stage.groups:
            await stage.groups.take(0)
            await stage.groups.drain()
            assert not stage.engine.live and not stage.groups._running
            assert len(stage.log("scored")) == 12, "three steps share a version: their groups were all in flight"

    play(test)


# -- Invalid never enters the advantages -------------------------------------------------------------------------------


def advantages_of(queue: MemoryQueue, refs: Refs) -> dict[str, np.ndarray]:
    role = Compute(queue)
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
        async with stage.groups:
            refs = await stage.groups.take(0)
            groups = list(stage.groups.groups.values())
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
            sample_id=f"all/{t.trajectory_id}",
            trajectory_id=t.trajectory_id,
            group_id=t.group_id,
            purpose="train",
            segments=t.segments,
            reward=t.reward.value if isinstance(t.reward, Score) else float("nan"),
            outcome=t.outcome,
        )
        for t in played
    ]
    random.Random(seed).shuffle(everything)  # nor does the order matter
    found = advantages_of(queue, put(queue, everything))
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
            delay_s=jitter,
            fail={seed_of(*p) for p in raising}.__contains__,
            hang={seed_of(*p) for p in hanging}.__contains__,
        )
        stage = Stage(tmp_path, engine=engine, prompts=32, n=8, timeout_s=60)
        async with stage.groups:
            refs = await stage.groups.take(0)
            groups = list(stage.groups.groups.values())
            stats = stage.groups.stats
        played = [t for g in groups for t in g.trajectories]
        assert [(t.group_id, t.index) for t in played] == [(group_id(g), i) for g, i in places]
        assert len({t.trajectory_id for t in played}) == 256 == engine.calls
        assert Counter(t.outcome for t in played) == {"ok": 217, "failed": 39}
        assert stats.invalid == {"RuntimeError": 26, "timeout": 13} and stats.played == 256
        assert {t.trajectory_id for t in played if t.error.startswith("timeout")} == {
            f"{group_id(g)}/train{i}.0" for g, i in hanging
        }
        assert {r.trajectory_id for r in refs} == {t.trajectory_id for t in played if t.outcome == "ok"}
        assert len(stage.queue) == 217 and not engine.live and stage.waits.pending() == []

    play(test)


# -- evaluation shares the machinery -----------------------------------------------------------------------------------


def test_evaluation_holds_no_slot_and_has_seeds_of_its_own(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=1, n=1, algorithm=resolve("reinforce"))
        seat = SimpleNamespace(group_id="eval5/greedy/0", index=0, purpose="eval", epoch=0, draw=0)
        async with stage.groups:
            free = stage.scheduler.free_slots()
            made = await stage.trajectories.run(task_of(0), seat, replace(SAMPLING, temperature=0.0))
            assert stage.scheduler.free_slots() == free and len(stage.queue) == 0
            await stage.step()
        assert made.trajectory_id == "eval5/greedy/0/eval0.0"
        assert [s.seed for _, _, s in stage.engine.requests] == [seed_of(0, 0, purpose="eval"), seed_of(0, 0)]

    play(test)


def test_the_prompt_of_a_trajectory_is_the_tasks_own(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=3, n=1, algorithm=resolve("reinforce"))
        async with stage.groups:
            refs = await stage.groups.take(0)
            for i, sample in enumerate(queued_samples(stage.queue, refs)):
                first = sample.segments[0]
                assert isinstance(first, Segment) and first.ids.tolist() == task_of(i).prompt_ids.tolist()
                assert torch.tensor(first.ids).dtype == torch.int64

    play(test)


def test_an_answer_that_ran_out_of_room_is_truncated_for_the_reward_and_in_its_row(tmp_path):
    """By its own budget or by the context's: both are cut answers (reward shaping, truncated masks)."""
    seen, rows = {}, {}

    async def test():
        stage = Stage(
            tmp_path, reward=lambda request: seen.update({request.request_id: request.truncated}) or Score(1.0)
        )
        prompt, answer = Segment(ids=np.array([1, 2]), source="prompt"), np.array([5, 6])
        sampled = Segment(ids=answer, source="sampled", logprobs=np.zeros(2, np.float32), version=0)
        for name in ("eos", "stop", "length", "context_full"):
            made = CheckedOutput((prompt, sampled), name)
            output = AgentLoopOutput([1, 2], answer.tolist(), [1, 1])
            reward = await stage.trajectories._score(name, task_of(0), SAMPLING, made, output, 1, [output.response_ids])
            trajectory = Trajectory(
                trajectory_id=name,
                group_id="g",
                task_id="t",
                index=0,
                purpose="train",
                attempt=0,
                sampling=SAMPLING,
                segments=made.segments,
                stop_reason=made.stop_reason,
                reward=reward,
            )
            rows[name] = samples_of(trajectory)[0].truncated

    play(test)
    assert seen == rows == {"eos": False, "stop": False, "length": True, "context_full": True}
