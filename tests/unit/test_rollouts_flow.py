"""The life of groups: release, selection, over-sampling, staleness, resume.

Durations are virtual: they are functions of the request's seed, and nothing depends on the machine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each import each
from fakes import FakeEngine
from stage import SAMPLING, Stage, by_id, group_id, groups_of, jitter, play, seed_of

from verl.agent_loop.single_turn import SingleTurnLoop
from verl.algorithms.resolve import Algorithm, resolve
from verl.algorithms.specs import GroupSpec
from verl.driver.rollouts import InvalidShare, RunEnded
from verl.track.events import read_events
from verl.transfer_queue.rows import queued_samples
from verl.types import Invalid, Refs, Score, Trajectory, derive_seed

# -- groups that do not train ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "reason"), [("reward", "invalid"), ("engine", "failed")])
def test_a_group_with_too_few_valid_trajectories_is_released_and_replaced(tmp_path, fault, reason):
    async def test():
        bad = {f"{group_id(1)}/train{i}.0" for i in range(3)}  # one of four is valid, grpo needs two
        engine = (
            FakeEngine(delay_s=jitter, fail={seed_of(1, i) for i in range(3)}.__contains__)
            if fault == "engine"
            else FakeEngine()
        )
        stage = Stage(
            tmp_path,
            engine=engine,
            reward=lambda r: Invalid("crash", "x") if fault == "reward" and r.request_id in bad else by_id(r),
        )
        async with stage.groups:
            refs = await stage.step()
            assert groups_of(refs) == [group_id(i) for i in (0, 2, 3, 4)]
            assert stage.groups.stats.released == {reason: 1}
            assert len(stage.queue) == 0
        assert stage.log("released") == [{"group_id": group_id(1), "reason": reason}]

    play(test)


def test_a_group_that_keeps_enough_valid_trajectories_trains_on_those(tmp_path):
    async def test():
        stage = Stage(
            tmp_path,
            reward=lambda r: Invalid("crash") if "train0" in r.request_id or "train3" in r.request_id else by_id(r),
        )
        async with stage.groups:
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
            tmp_path,
            n=2,
            prompts=2,
            algorithm=greedy_baseline(),
            engine=FakeEngine(fail={seed_of(1, 0, purpose="baseline")}.__contains__),
        )
        async with stage.groups:
            refs = await stage.step()
            assert groups_of(refs) == [group_id(0), group_id(2)] and stage.groups.stats.released == {"failed": 1}
        assert [(r.purpose, r.trajectory_id) for r in refs[:3]] == [
            ("train", f"{group_id(0)}/train0.0"),
            ("train", f"{group_id(0)}/train1.0"),
            ("baseline", f"{group_id(0)}/baseline0.0"),
        ]
        assert {s.temperature for n, _, s in stage.engine.requests if "baseline" in n} == {0.0}
        assert {s.temperature for n, _, s in stage.engine.requests if "train" in n} == {1.0}

    play(test)


def test_dynamic_sampling_rejects_flat_groups_and_refills(tmp_path):
    async def test():
        def reward(request):  # of every three groups the first two are flat: all right, all wrong
            draw = int(request.request_id[1:9])
            return Score(1.0 - draw % 3) if draw % 3 < 2 else by_id(request)

        stage = Stage(tmp_path, prompts=3, algorithm=resolve("dapo"), reward=reward)
        async with stage.groups:
            for s in range(2):
                refs = await stage.groups.take(s)
                assert groups_of(refs) == [group_id(9 * s + 2 + 3 * i) for i in range(3)]
                assert (
                    stage.groups.stats.flat,
                    stage.groups.stats.groups,
                    stage.groups.stats.released["rejected"],
                ) == (6, 9, 6)
                stage.groups.stats = type(stage.groups.stats)()
                stage.groups.on_trained(s, refs)
                stage.groups.on_published(s + 1)

    play(test)


@pytest.mark.parametrize("algorithm", ["grpo", "remax"])
def test_a_curriculum_is_given_the_mean_score_of_each_draw(tmp_path, monkeypatch, algorithm):
    """The mean is over the answers that are trained, without the baseline."""

    async def test():
        stage, found = Stage(tmp_path, prompts=2, algorithm=resolve(algorithm)), {}
        monkeypatch.setattr(stage.cursor, "scored", lambda draw, score: found.setdefault(draw.draw, score))
        async with stage.groups:
            await stage.step()
        names = {g: [f"{group_id(g)}/train{i}.0" for i in range(4)] for g in range(2)}
        mean = {g: sum((derive_seed(n) % 1000) / 1000 for n in own) / 4 for g, own in names.items()}
        assert {g: found[g] for g in mean} == pytest.approx(mean)

    play(test)


def test_one_bad_group_at_the_beginning_ends_no_run(tmp_path):
    """Four of four trajectories are invalid, but the share is judged from 16 trajectories on."""

    async def test():
        first = f"{group_id(0)}/"
        reward = lambda r: Invalid("crash", "x") if r.request_id.startswith(first) else by_id(r)  # noqa: E731
        stage = Stage(tmp_path, prompts=1, reward=reward, max_invalid_share=0.1)
        async with stage.groups:
            assert groups_of(await stage.step()) == [group_id(1)]

    play(test)


def test_a_share_of_invalid_answers_is_of_those_since_it_was_judged():
    share = InvalidShare(0.2, least=4, span=4)
    share.played, share.reasons["crash"], share.examples["crash"] = 100, 10, "x"
    share.step_ended()
    assert (share.played, share.reasons, share.examples) == (0, Counter(), {})
    share.played, share.reasons["crash"], share.examples["crash"] = 40, 40, "x"
    with pytest.raises(RunEnded, match="40 of 40"):
        share.check()


def test_a_step_ends_for_the_cursor_and_for_the_share_of_invalid_answers(tmp_path, monkeypatch):
    async def test():
        stage, ended = Stage(tmp_path, prompts=1), []
        stage.groups._invalid.span = stage.groups._invalid.least = 4
        monkeypatch.setattr(stage.cursor, "step_ended", lambda: ended.append(stage.scheduler.next_step))
        async with stage.groups:
            for _ in range(3):
                await stage.step(publish=False)
                assert stage.groups._invalid.played == 0
                stage.groups.on_published(stage.scheduler.version + 1)
        assert ended == [1, 2, 3]

    play(test)


def test_of_what_breaks_beside_each_other_the_first_is_the_cause(tmp_path):
    async def breaks(text):
        raise RuntimeError(text)

    async def test():
        stage = Stage(tmp_path)
        for text in ("first", "second"):
            task = asyncio.ensure_future(breaks(text))
            await asyncio.wait([task])
            stage.groups._ended("g", task)
        with pytest.raises(RuntimeError, match="first"):
            stage.groups.check()

    play(test)


def test_a_branch_of_which_no_token_is_trained_is_no_row(tmp_path):
    """The second branch repeats the first: its tokens are trained there."""

    class Twice(SingleTurnLoop):
        async def run(self, sampling_params, **kwargs):
            out = await super().run(sampling_params, **kwargs)
            return [out, replace(out)]

    async def test():
        stage = Stage(tmp_path, prompts=1, n=2, loop=lambda s, _: Twice(None, s, None))
        async with stage.groups:
            refs = await stage.step()
        assert len(refs) == 2 and all(r.loss_tokens > 0 for r in refs)

    play(test)


def test_surplus_goes_back_to_the_cursor_latest_first(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=2, n=2, oversample=1.0)
        async with stage.groups:
            taken = groups_of(await stage.step())
        left = [group_id(i) for i in range(4) if group_id(i) not in taken]
        assert [e["group_id"] for e in stage.log("released")] == left[::-1] and len(left) == 2

    play(test)


def test_selection_looks_at_the_named_component_and_says_when_it_is_missing(tmp_path):
    async def test():
        algorithm = resolve("dapo", {"filter_metric": "acc"})
        stage = Stage(
            tmp_path, prompts=1, algorithm=algorithm, reward=lambda r: Score(1.0, {"acc": by_id(r).value, "score": 1.0})
        )
        async with stage.groups:
            assert len(await stage.step()) == 4
        stage = Stage(tmp_path / "b", prompts=1, algorithm=algorithm, reward=lambda r: Score(1.0, {"format": 1.0}))
        async with stage.groups:
            with pytest.raises(ValueError, match=r"filter_metric='acc' is not a component of the reward \(format\)"):
                await stage.step()

    play(test)


def test_the_accuracy_of_a_reward_that_is_one_number_is_that_number(tmp_path):
    """DAPO's scripts select by `acc`, and most reward functions return a number alone."""

    def shaped(request):
        return Score(0.5, {"score": by_id(request).value, "overlong_penalty": 0.5})

    async def test():
        algorithm = resolve("dapo", {"filter_metric": "acc"})
        for reward in (by_id, shaped):
            stage = Stage(tmp_path / reward.__name__, prompts=1, algorithm=algorithm, reward=reward)
            async with stage.groups:
                assert len(await stage.step()) == 4

    play(test)


@pytest.mark.parametrize("on_exhausted", ["stop", "smaller"])
def test_data_without_signal_ends_as_declared(tmp_path, on_exhausted):
    async def test():
        algorithm = resolve("dapo", {"max_draws_per_group": 3.0, "on_exhausted": on_exhausted})
        stage = Stage(
            tmp_path,
            algorithm=algorithm,
            reward=lambda r: by_id(r) if r.request_id.startswith(group_id(0)) else Score(0.0),
        )
        async with stage.groups:
            if on_exhausted == "smaller":
                assert groups_of(await stage.step()) == [group_id(0)]
            with pytest.raises(RunEnded, match=r"the draw budget is spent .*rejected"):
                await stage.step()
            await stage.groups.drain()
        assert not stage.groups._running

    play(test)


def test_used_up_tasks_end_the_run_by_name(tmp_path):
    async def test():
        stage = Stage(tmp_path, prompts=4, tasks=6, epochs=1)
        async with stage.groups:
            await stage.step()
            with pytest.raises(RunEnded, match="the tasks are used up with 2 of 4 groups complete"):
                await stage.step()

    play(test)


class HangsAtFirst(FakeEngine):
    """The first requests of these draws never end; all others take equally long."""

    def __init__(self, *draws: int) -> None:
        super().__init__(delay_s=lambda seed: 1.0)
        self.names = {f"{group_id(d)}/train{i}.0" for d in draws for i in range(2)}

    async def work(self, request_id, seed):
        if request_id in self.names:
            self.names.remove(request_id)
            await asyncio.sleep(1e6)
        await super().work(request_id, seed)


@pytest.mark.parametrize(("staleness", "hung"), [(0.0, (1, 3)), (1.0, (7, 9))])
def test_over_sampled_surplus_returns_its_draw_which_is_drawn_again_first(tmp_path, staleness, hung):
    """Drawn again under the same ids: the dropped one must have ended before (the fake engine, like the real ones,
    refuses an id that is running). And it must train soon: a draw that is dropped at every step would never."""

    async def test():
        engine = HangsAtFirst(*hung)
        stage = Stage(tmp_path, engine=engine, staleness=staleness, oversample=0.5, n=2, tasks=40, epochs=1, steps=8)
        trained: list[str] = []
        async with stage.groups:
            for _ in range(8):
                refs = await stage.step()
                assert len(groups_of(refs)) == 4 and len(refs) == 8
                trained += groups_of(refs)
                held = {int(g[1:]) for g in (*trained, *stage.groups.groups)}
                state = stage.cursor.state()
                assert held | set(state["returned"]) == set(range(state["next_draw"])), "no draw is lost"
                assert not held & set(state["returned"]), "and none is in two places"
            dropped = [e["group_id"] for e in stage.log("released") if e["reason"] == "dropped"]
            assert {group_id(d) for d in hung} <= set(dropped)
            dispatched = Counter(e["group_id"] for e in stage.log("dispatched"))
            assert all(dispatched[group_id(d)] == 2 for d in hung) and max(dispatched.values()) == 2
        assert len(set(trained)) == 32, "none is trained twice"
        assert {group_id(d) for d in hung} <= set(trained), "the dropped ones came back"
        assert not engine.live and len(stage.queue) == sum(len(r) for r in stage.groups._refs.values())

    play(test)


# -- too many invalid --------------------------------------------------------------------------------------------------


def test_a_share_of_invalid_rewards_above_the_limit_ends_the_run_with_the_reasons(tmp_path):
    async def test():
        def reward(request):
            which = derive_seed(request.request_id) % 10
            return (
                Invalid("timeout", "no result within 30 s")
                if which < 5
                else Invalid("crash", "exit 1")
                if which < 7
                else by_id(request)
            )

        stage = Stage(tmp_path, prompts=8, n=8, reward=reward, max_invalid_share=0.2)
        async with stage.groups:
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
        async with stage.groups:
            with pytest.raises(RunEnded, match=r"16 of 16 .*16 x RuntimeError: the engine broke this request"):
                await stage.step()

    play(test)


def test_small_steps_are_judged_together(tmp_path):
    """2 trajectories per step, half of them invalid: one step alone is not enough for a decision."""

    async def test():
        stage = Stage(
            tmp_path,
            prompts=1,
            n=2,
            steps=1000,
            algorithm=resolve("reinforce"),
            max_invalid_share=0.2,
            reward=lambda r: Invalid("crash") if "train0" in r.request_id else by_id(r),
        )
        async with stage.groups:
            with pytest.raises(RunEnded, match="max_invalid_share"):
                for _ in range(100):
                    await stage.step()

    play(test)


def outcomes(rng: random.Random, share: float, count: int) -> list[Trajectory]:
    bad = [rng.random() < share for _ in range(count)]
    return [
        Trajectory(
            trajectory_id=str(i),
            group_id="g",
            task_id="t",
            index=i,
            purpose="train",
            attempt=0,
            sampling=SAMPLING,
            segments=(),
            stop_reason="eos",
            outcome="invalid" if b else "ok",
            error="crash: x" if b else "",
        )
        for i, b in enumerate(bad)
    ]


def stops_at(share: float, limit: float, *, seed: int, per_step: int = 32, steps: int = 200) -> int | None:
    """Return the step at which a run ends if trajectories are invalid with probability `share`."""
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
    """Half the limit never stops 200 steps; twice the limit stops within 10; a limit of 1 and of 0 are what they
    say."""
    assert [stops_at(0.1, 0.2, seed=s) for s in range(10)] == [None] * 10
    assert all((found := stops_at(0.4, 0.2, seed=s)) is not None and found < 10 for s in range(10))
    assert stops_at(1.0, 1.0, seed=0) is None
    assert stops_at(0.05, 0.0, seed=0) is not None
    assert stops_at(1.0, 0.2, seed=0, per_step=2) == 15, "all of 32"


# -- staleness and partial rollouts ------------------------------------------------------------------------------------


class Straddles(FakeEngine):
    """Every sixth group generates until new weights are live, and continues with them."""

    def __init__(self) -> None:
        super().__init__(delay_s=jitter)
        self.published = asyncio.Event()

    async def work(self, request_id, seed):
        await super().work(request_id, seed)
        if int(request_id[1:9]) % 6 == 5:
            await self.published.wait()

    async def load_weights(self, source, *, on_inflight="wait"):
        version = await super().load_weights(source, on_inflight=on_inflight)
        self.published.set()
        self.published = asyncio.Event()
        return version


@each("staleness, sync_every", [(0.5, 1), (1.0, 1), (2.0, 1), (1.0, 2)])
def test_versions_are_per_span_and_never_older_than_allowed(tmp_path, staleness, sync_every):
    async def test():
        engine = Straddles()
        stage = Stage(tmp_path, engine=engine, staleness=staleness, sync_every=sync_every, steps=14, n=3)
        mixed, lags, ids = 0, [], []
        async with stage.groups:
            for step in range(14):
                refs = await stage.groups.take(step)
                now = stage.scheduler.version
                admitted = {g.group_id: g.admitted_version for g in stage.groups.groups.values()}
                for ref, sample in zip(refs, queued_samples(stage.queue, refs), strict=True):
                    versions = [s.version for s in sample.segments if s.source == "sampled"]
                    assert versions == sorted(versions) and (ref.version_min, ref.version_max) == (
                        versions[0],
                        versions[-1],
                    )
                    assert admitted[ref.group_id] <= ref.version_min <= ref.version_max <= now
                    lags.append(now - ref.version_min)
                    if int(ref.group_id[1:]) % 6 == 5 and ref.loss_tokens > 1:
                        assert ref.version_min < ref.version_max, "it went on under new weights"
                        mixed += 1
                ids += groups_of(refs)
                stage.groups.on_trained(step, refs)
                stage.queue.drop(refs)
                if stage.scheduler.publish_due(step):
                    source = SimpleNamespace(version=now + 1, passes=False, seconds={}, tensors=lambda: ())
                    await engine.load_weights(source, on_inflight="keep")
                    stage.groups.on_published(now + 1)
        assert max(lags) <= np.ceil(staleness) and max(lags) >= 1
        assert mixed > 5
        assert len(set(ids)) == 14 * 4

    play(test)


# -- resume ------------------------------------------------------------------------------------------------------------


def test_a_resumed_player_goes_on_with_the_same_ids_and_seeds_and_plays_nothing_twice(tmp_path):
    slow = {seed_of(g, i) for g in range(4, 8) for i in (1, 3)} | {seed_of(5, 0), seed_of(5, 2)}

    def make(path: Path, **more: Any) -> Stage:
        return Stage(
            path,
            staleness=1.0,
            engine=FakeEngine(delay_s=lambda seed: 1e6 if more.get("stuck") and seed in slow else 0.0),
        )

    async def first():
        stage = make(tmp_path / "a", stuck=True)
        async with stage.groups:
            await stage.step()
            await asyncio.sleep(100)  # everything that can end has ended
            assert stage.engine.live == {n for n, _, s in stage.engine.requests if s.seed in slow}
            return stage, stage.groups.save(), stage.scheduler.state(), stage.cursor.state()

    before, groups, scheduler, cursor = play(first)
    complete = [g.group_id for g in groups if g.complete]
    running = {g.group_id: [t.index for t in g.trajectories] for g in groups if not g.complete}
    assert complete == [group_id(i) for i in (8, 9, 10, 11)]
    assert {g: sorted(v) for g, v in running.items()} == {
        group_id(4): [0, 2],
        group_id(5): [],
        group_id(6): [0, 2],
        group_id(7): [0, 2],
    }

    async def second():
        stage = make(tmp_path / "b")
        stage.engine.version = before.engine.version
        stage.cursor.load_state(cursor)
        async with stage.groups:
            await stage.groups.restore(scheduler, groups)
            again = {g.group_id: [t.trajectory_id for t in g.trajectories] for g in stage.groups.save()}
            assert again == {g.group_id: [t.trajectory_id for t in g.trajectories] for g in groups}, (
                "before it ran a step"
            )
            refs = [await stage.step(), await stage.step()]
        assert [groups_of(r) for r in refs] == [[group_id(i) for i in range(4, 8)], [group_id(i) for i in range(8, 12)]]
        played = {n: s.seed for n, _, s in stage.engine.requests}
        kept = {t.trajectory_id for g in groups for t in g.trajectories}
        assert not kept & set(played), "what had ended is not played again"
        seeds = {n: s.seed for n, _, s in before.engine.requests}
        unfinished = {f"{g}/train{i}.0" for g, ended in running.items() for i in range(4) if i not in ended}
        assert {n: s for n, s in played.items() if n in seeds} == {n: seeds[n] for n in unfinished}
        rows = {t.trajectory_id: t for g in groups for t in g.trajectories}
        for ref in (*refs[0], *refs[1]):
            if ref.trajectory_id in rows:
                kept_row = rows[ref.trajectory_id]
                assert (ref.reward, ref.version_min) == (kept_row.score.value, kept_row.segments[1].version)
            assert ref.reward == by_id(SimpleNamespace(request_id=ref.trajectory_id)).value

    play(second)


def test_what_a_checkpoint_holds_was_recorded_in_its_step_or_before(tmp_path):
    """A resumed attempt voids the records of the steps it does again: those of the groups it was given must stand."""

    async def test():
        stage = Stage(tmp_path, staleness=1.0)
        async with stage.groups:
            for number in (1, 2, 3):
                await stage.step()
                stage.events.flush()
                found = {e.data["group_id"]: e.step for e in read_events(tmp_path, {"dispatched"})}
                assert {g.group_id for g in stage.groups.save()} <= set(found)
                assert max(found.values()) == number
                assert max(e.step for e in read_events(tmp_path, {"scored", "released"})) <= number

    play(test)


def test_a_group_of_the_checkpoint_that_no_longer_fits_is_not_started(tmp_path):
    """The task of a group that the scheduler drops on resume returns to the cursor; the player never starts it."""

    async def test():
        stage = Stage(tmp_path, staleness=2.0)
        async with stage.groups:
            first = groups_of(await stage.step())
            groups, scheduler, cursor = stage.groups.save(), stage.scheduler.state(), stage.cursor.state()
        fresh = Stage(tmp_path / "b", staleness=0.0)
        fresh.engine.version = stage.engine.version
        fresh.cursor.load_state(cursor)
        async with fresh.groups:
            await fresh.groups.restore(scheduler, groups)
            kept = {g.group_id for g in fresh.groups.save()}
            assert kept < {g.group_id for g in groups}
            trained = [g for _ in range(3) for g in groups_of(await fresh.step())]
        assert set(trained[:4]) == kept, "what was in flight goes first"
        assert sorted(first + trained) == [group_id(i) for i in range(16)], "none is lost, none is doubled"

    play(test)


def test_dynamic_sampling_looks_at_the_score_before_its_shaping(tmp_path):
    """Four right answers of different lengths have equal scores, and different rewards by the overlong penalty."""

    async def test():
        shaped = {name: 1.0 - 0.1 * i for i, name in enumerate(("train0", "train1", "train2", "train3"))}

        def reward(request):
            value = next(v for name, v in shaped.items() if name in request.request_id)
            right = 1.0 if request.request_id.startswith(group_id(0)) else value
            return Score(value, {"score": right, "overlong_penalty": value - right})

        stage = Stage(tmp_path, reward=reward, algorithm=resolve("dapo"), prompts=2)
        async with stage.groups:
            refs = await stage.step()
        assert group_id(0) not in {r.group_id for r in refs} and len(refs) == 8

    play(test)


class Ahead:
    """A model that computes complete groups; their rows exist as long as it uses them. busy: with a call, until
    `end`."""

    def __init__(self, queue, busy=False) -> None:
        self.queue, self.begun, self.left, self.busy = queue, list[Refs](), list[Refs](), busy
        self.held: list[Future[None]] = []

    def begin(self, refs: Refs) -> None:
        self.begun.append(refs)

    def leave(self, refs: Refs) -> Future[None]:
        assert self.queue.having(refs, "segments") == refs, "let go of before they are dropped"
        self.left.append(refs)
        self.held.append(Future())
        last = self.held[-1]
        if not self.busy:
            self.end(None)
        return last

    def end(self, error: Exception | None) -> None:
        held, self.held, self.busy = self.held, [], False
        for call in held:
            call.set_exception(error) if error else call.set_result(None)


def asked_ahead(tmp_path, busy=False, **given):
    """Return a manager that draws more groups than a step takes, and the model that computes its groups."""
    stage = Stage(tmp_path, engine=FakeEngine(), prompts=4, oversample=0.5, **given)
    ahead = Ahead(stage.queue, busy)
    stage.groups.ahead = (ahead,)
    return stage, ahead


def test_complete_groups_are_asked_for_ahead_and_let_go_of_where_they_are_dropped(tmp_path):
    async def test():
        stage, ahead = asked_ahead(tmp_path, algorithm=greedy_baseline())
        async with stage.groups:
            taken = [r.group_id for _ in range(4) for r in (await stage.step()).of("train")]
        begun = [r.group_id for refs in ahead.begun for r in refs]
        left = {r.group_id for refs in ahead.left for r in refs}
        assert {r.purpose for refs in ahead.begun for r in refs} == {"train"}
        assert all(begun.count(g) >= 4 for g in taken), "all its rows at once"
        assert left and left <= {*begun} and all(begun.count(g) == 8 for g in left & {*taken}), (
            "drawn again, asked again"
        )
        assert {*begun} == {*taken} | left and stage.released()["dropped"] > 0

    play(test)


def test_no_step_waits_for_the_call_that_holds_rows_of_dropped_groups(tmp_path):
    """They go when it ends, and not before what was drawn again under their names is stored."""

    async def test():
        stage, ahead = asked_ahead(tmp_path, busy=True)
        async with stage.groups:
            taken = [r.group_id for _ in range(2) for r in await stage.step()]
            held = Refs(r for refs in ahead.left for r in refs)
            assert held and held.groups().keys().isdisjoint(taken), "drawn again, and waiting"
            assert stage.queue.having(held, "segments") == held and len(ahead.held) == len(ahead.left)
            ahead.end(None)
            later = [r.group_id for _ in range(3) for r in await stage.step()]
            assert all(later.count(g) == 4 for g in held.groups()), "taken, with the rows of one draw"
            await asyncio.gather(*stage.rows.pending)
            assert len(stage.queue) == sum(map(len, stage.groups._refs.values()))

    play(test)


def test_a_call_that_breaks_while_it_holds_dropped_rows_ends_the_run_with_its_cause(tmp_path):
    async def test():
        stage, ahead = asked_ahead(tmp_path, busy=True)
        async with stage.groups:
            await stage.step()
            ahead.end(RuntimeError("rank 0 of teacher was killed"))
            await asyncio.sleep(1)  # of virtual time
            with pytest.raises(RuntimeError, match="rank 0 of teacher was killed"):
                stage.groups.check()  # before anything is drawn again under their names
            with pytest.raises(RuntimeError, match="rank 0 of teacher was killed"):
                for _ in range(3):
                    await stage.step()

    play(test)


def test_groups_that_were_complete_at_a_checkpoint_are_asked_for_again(tmp_path):
    async def test():
        first = Stage(tmp_path / "a", prompts=2, staleness=1)
        async with first.groups:
            refs = await first.groups.take(0)
            await asyncio.sleep(100)  # of virtual time: what was admitted has ended
            first.groups.on_trained(0, refs)
            scheduler, saved, cursor = first.scheduler.state(), first.groups.save(), first.cursor.state()
        complete = {g.group_id for g in saved if g.complete}
        again = Stage(tmp_path / "b", prompts=2, staleness=1)
        ahead = Ahead(again.queue)
        again.groups.ahead = (ahead,)
        again.cursor.load_state(cursor)
        async with again.groups:
            await again.groups.restore(scheduler, saved)
            assert complete and {r.group_id for refs in ahead.begun for r in refs} == complete

    play(test)
