"""Metrics of a batch and of an evaluation: closed-form values, in the units of trajectories, groups and steps."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each import each
from fakes import FakeEngine, FunctionReward, put
from stage import SAMPLING, by_id, play, task_of

from verl.agent_loop.single_turn import SingleTurnLoop
from verl.batch import Ragged
from verl.config.schema import Config
from verl.config.tree import changed
from verl.driver.evaluate import eval_metrics, eval_sampling, evaluate, verl_validation
from verl.driver.measure import batch_metrics, spread
from verl.driver.record import SampleRecorder, build_recorder
from verl.driver.replay import recorded_sample
from verl.driver.rollouts import RolloutStats
from verl.driver.task_media import TaskMedia
from verl.driver.trajectories import TrajectoryRunner
from verl.model_engine.base import OneRank
from verl.rollout.base import ReplicaLost
from verl.track.metrics import reduce
from verl.track.samples import read_samples
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Invalid, Medium, Purpose, Ref, Refs, Sample, Score, Segment, Trajectory
from verl.workers.waits import Waits


def ref(
    trajectory: str,
    group: str,
    reward: float,
    *,
    prompt: int = 10,
    response: int = 5,
    row: int = 0,
    version: int = 3,
    purpose: Purpose = "train",
    **more: Any,
) -> Ref:
    return Ref(
        sample_id=f"{trajectory}#{row}",
        trajectory_id=trajectory,
        group_id=group,
        purpose=purpose,
        prompt_tokens=prompt,
        total_tokens=prompt + response,
        loss_tokens=response,
        version_min=version,
        version_max=more.pop("version_max", version),
        reward=reward,
        **more,
    )


BATCH = Refs(
    [
        ref("a", "g", 1.0, response=4, components={"score": 2.0, "format": 0.5}, version=2),
        ref("b", "g", 0.0, response=8, components={"score": 0.0}, stop_reason="length"),
        ref("c", "h", 0.5, prompt=20, response=6, components={"score": 1.0, "format": 1.0}, version=1, version_max=3),
        ref("base", "h", 9.0, prompt=20, response=99, purpose="baseline", components={"format": 7.0}),
    ]
)


def stats(**more: Any) -> RolloutStats:
    return replace(
        RolloutStats(
            released=Counter(rejected=2, dropped=1),
            invalid=Counter(timeout=3, crash=1),
            turns=Counter({2: 3, 6: 1}),
            played=16,
            flat=1,
            groups=4,
            sampled=200,
            unread=1,
        ),
        **more,
    )


def measured(refs: Refs, s: RolloutStats | None = None, version: int = 3) -> dict[str, float]:
    return reduce(batch_metrics(refs, s or stats(), version, max_prompt_tokens=20))


def test_every_metric_of_a_handmade_batch_has_its_closed_form():
    assert measured(BATCH) == {
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": 0.0,
        "critic/score/mean": 1.0,
        "critic/score/max": 2.0,
        "critic/score/min": 0.0,
        "response_length/mean": 6.0,
        "response_length/max": 8.0,
        "response_length/min": 4.0,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/mean": 40 / 3,
        "prompt_length/max": 20.0,
        "prompt_length/min": 10.0,
        "prompt_length/clip_ratio": 1 / 3,
        "num_turns/mean": 3.0,
        "num_turns/max": 6.0,
        "num_turns/min": 2.0,
        "reward/component/format": 0.75,
        "reward/invalid_share": 0.25,
        "rollout/unread_share": 0.005,
        "pipeline/staleness_mean": 1.0,
        "pipeline/staleness_max": 2.0,
        "groups/zero_variance_share": 0.25,
        "groups/rejected": 2.0,
        "groups/invalid": 0.0,
        "groups/failed": 0.0,
        "groups/dropped": 1.0,
        "groups/size/mean": 1.5,
        "groups/size/max": 2.0,
        "groups/size/min": 1.0,
    }


def test_calls_of_tools_are_counted_with_all_trajectories_that_made_them() -> None:
    """The batch has 4 of the 16 that ended."""
    found = measured(BATCH, stats(agent=Counter(tool_calls=32)))
    assert (found["agent/tool_calls"], found["agent/trajectories"]) == (32, 16)


def test_units_say_what_was_counted():
    found = batch_metrics(BATCH, stats(), 3, max_prompt_tokens=20)
    assert {
        found[n].unit
        for n in ("critic/rewards/mean", "response_length/clip_ratio", "reward/invalid_share", "pipeline/staleness_max")
    } == {"sequence"}
    assert {m.unit for n, m in found.items() if n.startswith("groups/")} == {"group"}
    assert (found["critic/rewards/mean"].total, found["critic/rewards/mean"].count) == (1.5, 3)


@each("seed", range(5))
def test_the_order_of_the_rows_does_not_matter(seed):
    rng = random.Random(seed)
    rows = [
        ref(
            f"t{i}",
            f"g{i % 7}",
            rng.random(),
            response=rng.randint(1, 50),
            version=rng.randint(0, 3),
            components={"x": rng.random()},
        )
        for i in range(60)
    ]
    expected = measured(Refs(rows))
    rng.shuffle(rows)
    assert measured(Refs(rows)) == expected


def test_a_trajectory_of_several_rows_counts_once():
    """A rewritten history gives two rows: reward 1.0 is one reward (0.5 on average, not 2/3), of one member of its
    group."""
    one = measured(Refs([ref("a", "g", 1.0, response=9, version=1), ref("b", "g", 0.0)]))
    rows = [
        ref("a", "g", 1.0, response=4, row=0, version=2),
        ref("b", "g", 0.0),
        ref("a", "g", 1.0, response=5, row=1, version=1),
    ]
    assert measured(Refs(rows)) == one
    assert one["critic/rewards/mean"] == 0.5 and one["response_length/mean"] == 7.0 and one["groups/size/mean"] == 2.0
    cut = measured(Refs([rows[0], rows[1], replace(rows[2], stop_reason="length")]))
    assert cut["response_length/clip_ratio"] == 0.5


def test_rows_without_a_valid_reward_are_in_no_statistic():
    nan = ref("x", "g", float("nan"), response=900, outcome="invalid")
    assert measured(Refs([*BATCH, nan, replace(nan, trajectory_id="y", reward=5.0)])) == measured(BATCH)


def test_an_empty_batch_has_counts_and_no_zeros_in_place_of_means():
    found = measured(Refs(), RolloutStats())
    assert "critic/rewards/mean" not in found and "groups/size/mean" not in found
    assert found["reward/invalid_share"] == 0 and found["groups/rejected"] == 0
    assert spread("x", [], "group") == {}


def test_components_are_where_the_health_checks_look_for_them():
    from verl.track.health import COMPONENT_PREFIX

    assert f"{COMPONENT_PREFIX}format" in measured(BATCH)


# -- evaluation --------------------------------------------------------------------------------------------------------


def played(source_reward: Score | Invalid, tokens: int = 2, name: str = "t") -> Trajectory:
    ids = np.arange(tokens)
    return Trajectory(
        trajectory_id=f"{name}/eval0.0",
        group_id=name,
        task_id="task7",
        index=0,
        purpose="eval",
        attempt=0,
        sampling=SAMPLING,
        segments=(
            Segment(ids=np.array([1, 2]), source="prompt"),
            Segment(ids=ids, source="sampled", logprobs=np.zeros(tokens, np.float32), version=4),
        ),
        stop_reason="stop",
        outcome="ok" if isinstance(source_reward, Score) else "invalid",
        reward=source_reward,
        error="" if isinstance(source_reward, Score) else "timeout: slow",
    )


def test_eval_metrics_are_per_source_and_leave_the_invalid_out():
    found = [
        played(Score(1.0), 2),
        played(Score(0.2, {"acc": 0.0, "score": 0.2}), 4),
        played(Invalid("timeout")),
        played(Score(0.5, {"score": 1.0}), 6),
    ]
    assert reduce(eval_metrics("greedy", found, ["gsm8k", "gsm8k", "gsm8k", "math"], 1)) == {
        "eval/invalid_share/greedy": 0.25,
        "eval/acc/greedy": 2 / 3,
        "eval/response_length/greedy": 4.0,
        "eval/gsm8k/acc/greedy": 0.5,
        "val-core/gsm8k/acc/mean@1": 0.5,
        "eval/math/acc/greedy": 1.0,
        "val-core/math/acc/mean@1": 1.0,
    }
    sampled = reduce(eval_metrics("sampled", found[:2], ["gsm8k", "gsm8k"], 4))
    assert sampled["val-core/gsm8k/acc/mean@4/sampled"] == 0.5
    graded = [played(Score(v)) for v in (0.0, 1.0, 1.188, -1.0)] + [played(Score(0.5, {"acc": 1.0}))]
    assert reduce(eval_metrics("greedy", graded, ["a"] * 5, 1))["eval/graded_share/greedy"] == 2 / 5


def test_validation_under_verls_names_in_closed_form():
    """Two prompts of 4 answers, of which 1 and all are right; a source with a reward without acc; invalid answers left
    out."""
    acc = [Score(2 * a, {"acc": a}) for a in (1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)]
    other = [Score(3.0), Score(1.0), Invalid("timeout"), Invalid("crash")]
    found = reduce(verl_validation([played(r) for r in [*acc, *other]], ["a"] * 8 + ["b"] * 4, 4))
    wanted = {
        "val-core/a/acc/mean@4": (0.25 + 1) / 2,
        "val-core/a/acc/best@4/mean": (1 - 0.75**4 + 1) / 2,
        "val-aux/a/acc/best@2/mean": (1 - 0.75**2 + 1) / 2,
        "val-aux/a/acc/worst@4/mean": (0.25**4 + 1) / 2,
        "val-aux/a/acc/std@4": (0.25 * 0.75) ** 0.5 / 2,
        "val-aux/a/reward/mean@4": 1.25,
        "val-aux/b/reward/mean@2": 2.0,
        "val-aux/b/reward/best@2/mean": 2.5,
    }
    assert {name: found.get(name) for name in wanted} == {n: pytest.approx(v) for n, v in wanted.items()}
    (one,) = verl_validation([played(Score(0.5))], ["a"], 1)
    assert one == "val-core/a/reward/mean@1"


def majority(values: list[float], preds: list[str], n: int) -> tuple[float, float]:
    """Mean and deviation of votes among n draws, drawn and counted in the plain way."""
    rng, won = np.random.RandomState(42), []
    for drawn in rng.choice(len(values), size=(1000, n)):
        votes = Counter(preds[i] for i in drawn)  # in the order of their first appearance
        elected = max(votes, key=lambda pred: votes[pred])
        won.append(values[next(i for i in drawn if preds[i] == elected)])
    return float(np.mean(won)), float(np.std(won))


def test_majorities_vote_by_what_the_reward_read():
    """Five answers of which three agree on a wrong one; two that disagree, with different values for equal preds."""
    acc, preds = [1.0, 0.0, 0.0, 1.0, 0.0], ["4", "5", "5", "4", "5"]
    other = [Score(v, pred=p) for v, p in ((1.0, "a"), (3.0, "a"), (0.0, "b"), (0.5, "c"), (0.25, "b"))]
    rows = [Score(2 * a, {"acc": a}, pred) for a, pred in zip(acc, preds)]
    found = reduce(verl_validation([played(r) for r in [*rows, *other]], ["a"] * 5 + ["b"] * 5, 5))
    for n in (2, 4, 5):
        section = "val-core" if n == 5 else "val-aux"
        mean, std = majority(acc, preds, n)
        assert found[f"{section}/a/acc/maj@{n}/mean"] == pytest.approx(mean)
        assert found[f"{section}/a/acc/maj@{n}/std"] == pytest.approx(std)
        mean, std = majority([s.value for s in other], [s.pred for s in other], n)
        assert found[f"{section}/b/reward/maj@{n}/mean"] == pytest.approx(mean)
    assert found["val-core/a/acc/maj@5/mean"] < found["val-core/a/acc/mean@5"], "the wrong answer wins"
    without = [*rows[:-1], Score(0.0, {"acc": 0.0})]  # one has no pred to vote with
    assert not [n for n in verl_validation([played(r) for r in without], ["a"] * 5, 5) if "maj@" in n]


def test_an_evaluation_without_a_valid_reward_has_no_accuracy():
    """0.0 would read like a model that knows nothing, and be kept as the best of a negative scale."""
    assert reduce(eval_metrics("greedy", [played(Invalid("crash"))] * 3, ["a", "a", "b"], 1)) == {
        "eval/invalid_share/greedy": 1.0
    }


class Here:
    """The run that `evaluate` sees."""

    def __init__(self, tmp_path, config: Config, tasks: int, reward: Any) -> None:
        self.config = config
        self.eval_tasks = [replace(task_of(i), data_source="even" if i % 2 == 0 else "odd") for i in range(tasks)]
        self.engine = FakeEngine(delay_s=lambda seed: seed % 5)
        self.engine.version = 2
        self.trajectories = TrajectoryRunner(
            engine=self.engine,
            loop=lambda s, _: SingleTurnLoop(None, s, None),
            reward=reward,
            decode=str,
            waits=Waits(),
            seed=1,
            max_attempts=1,
            timeout_s=60,
            reward_timeout_s=60,
        )
        self.groups, self.failure, self.media = self, None, TaskMedia(None)
        self.reporter, self._recorder = self, SampleRecorder(MemoryQueue(), tmp_path, str)
        self.verl_names = False

    async def record_eval(self, step: int, found: Any, truths: Any) -> None:
        self._recorder.record_eval(step, found, truths)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


def test_an_evaluation_plays_every_task_in_every_mode_and_records_it(tmp_path):
    async def test():
        config = Config()
        config = changed(config, {"eval.also_sampled": True, "eval.samples_per_prompt": 3})
        run = Here(tmp_path, config, 4, FunctionReward(lambda r: Score(float("sampled" in r.request_id))))
        found = reduce(await evaluate(run, 5))
        assert run.engine.calls == 4 + 12
        assert found["eval/acc/greedy"] == 0 and found["eval/acc/sampled"] == 1
        assert found["val-core/even/acc/mean@1"] == 0 and found["val-core/odd/acc/mean@3/sampled"] == 1
        assert {s.temperature for n, _, s in run.engine.requests if "greedy" in n} == {0.0}
        rows = read_samples(tmp_path, 5, "eval")
        assert len(rows) == 16 and {r.purpose for r in rows} == {"eval"}
        assert Counter(r.task_id for r in rows) == {f"task{i}": 4 for i in range(4)}

    play(test)


@pytest.mark.parametrize("hidden", [False, True], ids=["", "answered by a loop of the user"])
def test_an_engine_that_died_is_no_answer_of_an_evaluation(tmp_path, hidden):
    async def test():
        run = Here(tmp_path, Config(), 4, FunctionReward(lambda r: Score(1.0)))
        if hidden:
            run.failure = ReplicaLost("rollout replica 0 died")
        else:
            run.engine.generate = dead
        with pytest.raises(ReplicaLost, match="rollout replica 0 died"):
            await evaluate(run, 1)
        assert not (tmp_path / "samples").exists()

    async def dead(*args: Any, **named: Any) -> Any:
        raise ReplicaLost("rollout replica 0 died")

    play(test)


def test_an_error_of_ours_in_an_evaluation_leaves_nothing_running(tmp_path):
    async def test():
        def reward(request):
            raise ZeroDivisionError("ours")

        run = Here(tmp_path, Config(), 8, FunctionReward(reward))
        with pytest.raises(ZeroDivisionError):
            await evaluate(run, 1)
        assert not run.engine.live

    play(test)


def test_what_one_evaluation_runs():
    config = Config()
    assert [*eval_sampling(config)] == ["greedy"] and eval_sampling(config)["greedy"].temperature == 0
    config = changed(config, {"eval.temperature": 0.6, "eval.top_p": 0.9, "eval.max_response_tokens": 77})
    sampled = eval_sampling(config)["sampled"]
    assert (sampled.temperature, sampled.top_p, sampled.max_tokens) == (0.6, 0.9, 77)


# -- the record --------------------------------------------------------------------------------------------------------


def test_the_recorder_writes_every_row_with_its_columns(tmp_path):
    queue = MemoryQueue()
    segments = (
        Segment(ids=np.array([1, 2]), source="prompt"),
        Segment(ids=np.array([5, 6]), source="sampled", logprobs=np.array([-1, -2], np.float32), version=3),
        Segment(ids=np.array([30]), source="env"),
        Segment(ids=np.array([7]), source="sampled", logprobs=np.array([-3], np.float32), version=4),
    )
    made = [
        Sample(
            sample_id=f"{g}/train0.0#0",
            trajectory_id=f"{g}/train0.0",
            group_id=g,
            purpose="train",
            segments=segments,
            reward=1.5,
            components={"acc": 1.0},
            stop_reason="length",
        )
        for g in ("g1", "g2")
    ]
    refs = put(queue, made)
    import torch

    queue.write(
        refs,
        {
            "advantages": Ragged(torch.arange(6.0), np.array([0, 3, 6])),
            "train_logprobs": Ragged(-torch.arange(6.0), np.array([0, 3, 6])),
        },
    )
    SampleRecorder(queue, tmp_path, lambda ids: " ".join(map(str, ids))).record(2, refs, {})
    rows = read_samples(tmp_path, 2)
    assert [r.sample_id for r in rows] == refs.ids
    row = rows[1]
    assert row.response_ids.tolist() == [5, 6, 30, 7] and row.response_mask.tolist() == [1, 1, 0, 1]
    assert row.tokens["token_versions"].tolist() == [3, 3, -1, 4] and (row.version_min, row.version_max) == (3, 4)
    np.testing.assert_array_equal(row.tokens["rollout_logprobs"], np.array([-1, -2, np.nan, -3], np.float32))
    np.testing.assert_array_equal(row.tokens["advantages"], np.array([3, 4, np.nan, 5], np.float32))
    np.testing.assert_array_equal(row.tokens["old_logprobs"], np.array([-3, -4, np.nan, -5], np.float32))
    assert "values" not in row.tokens
    assert (row.response_text, row.reward, row.components) == ("5 6 30 7", 1.5, {"acc": 1.0})
    assert row.stop_reason == "length"


@pytest.mark.parametrize(
    "more", [{}, {"media": (Medium("image", 0, 2),)}, {"side": {"experts": np.arange(4).reshape(2, 2)}}]
)
def test_a_recorded_row_is_the_sample_again(more, tmp_path):
    """The row that a replay trains on: each span has the version that sampled it, its media and its side channels."""
    first, at = ({"media": more["media"]}, {}) if "media" in more else ({}, more)
    segments = (
        Segment(ids=np.array([1, 2]), source="prompt", **first),
        Segment(ids=np.array([5, 6]), source="sampled", logprobs=np.array([-1, -2], np.float32), version=3, **at),
        Segment(ids=np.array([7]), source="sampled", logprobs=np.array([-3], np.float32), version=4),
        Segment(ids=np.array([30]), source="env"),
        Segment(ids=np.array([8]), source="sampled", logprobs=np.array([-4], np.float32), version=4),
    )
    adapter = "lora" if more else None
    names = {"sample_id": "g/0#0", "trajectory_id": "g/0", "group_id": "g"}
    made = Sample(**names, purpose="train", segments=segments, reward=1.5, adapter=adapter)
    queue = MemoryQueue()
    SampleRecorder(queue, tmp_path, str).record(1, put(queue, [made]), {})
    (row,) = read_samples(tmp_path, 1)
    again = recorded_sample(row, reads_feedback=False)
    assert (again.adapter, again.reward, len(again.segments)) == (adapter, 1.5, len(segments))
    for a, b in zip(again.segments, segments):
        assert (a.source, a.version, a.media, a.side.keys()) == (b.source, b.version, b.media, b.side.keys())
        np.testing.assert_array_equal(a.ids, b.ids)
        if b.source == "sampled":
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
        for name in b.side:
            np.testing.assert_array_equal(a.side[name], b.side[name])


def test_the_recorder_keeps_whole_groups(tmp_path):
    queue = MemoryQueue()
    segment = Segment(ids=np.array([5]), source="sampled", logprobs=np.zeros(1, np.float32), version=0)
    refs = put(
        queue,
        [
            Sample(
                sample_id=f"g{g}/{i}",
                trajectory_id=f"g{g}/{i}",
                group_id=f"g{g}",
                purpose="train",
                segments=(Segment(ids=np.array([1]), source="prompt"), segment),
            )
            for i in range(2)
            for g in range(3)
        ],
    )
    SampleRecorder(queue, tmp_path, str, groups_per_step=2).record(1, refs, {})
    assert Counter(r.group_id for r in read_samples(tmp_path, 1)) == {"g0": 2, "g1": 2}


def test_a_recorder_can_be_built_in_another_process(tmp_path):
    """From a description that was pickled it writes the same texts, special tokens of prompts included."""
    from verl.models import tiny

    tokenizer = tiny.character_tokenizer("0123456789+=")
    prompt, answer = np.array([tokenizer.eos_token_id, *tokenizer("1+2=").input_ids]), tokenizer("3").input_ids
    sampled = Segment(
        ids=np.array([*answer, tokenizer.eos_token_id]), source="sampled", logprobs=np.zeros(2, np.float32), version=0
    )
    told = replace(played(Score(1.0)), segments=(Segment(ids=prompt, source="prompt"), sampled))
    there = pickle.loads(pickle.dumps((None, tmp_path, tokenizer)))
    for told_of_it in ((MemoryQueue(), tmp_path, tokenizer), there):
        (recorder,) = build_recorder(*told_of_it, ranks=[OneRank()])
        assert recorder.record_eval(1, [told], {"task7": "3"}) == []
        (row,) = read_samples(tmp_path, 1, "eval")
        assert (row.prompt_text, row.response_text, row.ground_truth) == (f"{tokenizer.eos_token}1+2=", "3", "3")


def test_an_evaluation_row_says_why_it_has_no_reward(tmp_path):
    SampleRecorder(MemoryQueue(), tmp_path, str).record_eval(
        3, [played(Invalid("timeout")), played(Score(1.0), name="u")], {"task7": {"a": 1}}
    )
    rows = read_samples(tmp_path, 3, "eval")
    assert [(r.outcome, r.stop_reason, r.task_id, r.version_min) for r in rows] == [
        ("invalid", "stop", "task7", 4),
        ("ok", "stop", "task7", 4),
    ]
    assert np.isnan(rows[0].reward) and rows[1].reward == 1.0
    assert [r.ground_truth for r in rows] == ['{"a": 1}'] * 2


def test_scores_of_a_trajectory_are_a_function_of_its_place():
    """The helper of these tests gives the same id the same score in every call."""
    assert (
        by_id(SimpleNamespace(request_id="a"))
        == by_id(SimpleNamespace(request_id="a"))
        != by_id(SimpleNamespace(request_id="b"))
    )
    assert asyncio.iscoroutinefunction(evaluate)


def test_samples_that_found_no_room_until_the_end_are_said(tmp_path, monkeypatch):
    from verl.driver import record

    recorder = SampleRecorder(MemoryQueue(), tmp_path, str)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(record, "write_samples", full)
        said = [*recorder.record_eval(3, [played(Score(1.0))], {}), *recorder.finish()]
    assert len(said) == 2 and "wait for room" in said[0] and "samples of step 3 are lost" in said[1]
    recorder.finish()
    assert (tmp_path / "samples" / "eval_step_000003.parquet").exists(), "there is room again"
