"""Several teachers, and one that reads more than the policy does: each row is scored by its own, mixtures are those of
probabilities, a dead one is Invalid and never zero, and another prompt moves no token of the answer."""

import asyncio
import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from each import matrix
from fakes import put
from test_teacher import engine
from test_virtual_ranks import config_of, samples

from verl.algorithms import estimators as adv
from verl.algorithms.sections import POLICY
from verl.batch import Ragged, pack
from verl.config.tree import changed
from verl.driver.assemble import offline_learner
from verl.driver.roles import Learner
from verl.driver.step import Step, experience_and_update
from verl.model_engine.hf_model import load_causal_lm
from verl.model_engine.torch_engine import TorchEngine
from verl.models import tiny
from verl.recipes import arithmetic
from verl.track.health import HealthLimits, check_health
from verl.transfer_queue.memory import MemoryQueue
from verl.types import Metric, Refs, Segment, Task, ref_of, with_task
from verl.weight_sync.local import LocalOutlet
from verl.weight_sync.sender import WeightSender
from verl.workers.ahead import EarlyOutputs
from verl.workers.compute import step_columns
from verl.workers.group import WorkerDied
from verl.workers.rank_batch import informed
from verl.workers.role import Role
from verl.workers.teachers import Teachers
from verl.workers.waits import DeadlineExpired

RNG = np.random.default_rng(3)
CONTEXTS = {f"g{g}": RNG.integers(4, 19, 5 + 2 * g) for g in range(4)}


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, ffn=32, seed=9)
    return tiny.save(model, tokenizer, tmp_path_factory.mktemp("other"))


def rows(*, context: bool = False):
    """Groups 0 and 2 are of the teacher `a`, 1 and 3 of `b`."""
    out = []
    for s in samples(0):
        task = Task(
            task_id="t",
            index=0,
            messages=(),
            prompt_ids=s.segments[0].ids,
            teacher="ab"[int(s.group_id[1:]) % 2],
            context_ids=CONTEXTS[s.group_id] if context else None,
        )
        out.append(with_task(s, task))
    return out


def one_turn(config, made, patch=None):
    """(the step, its refs, the queue) after a turn of the loop over these rows."""
    config = changed(config, {"step.updates_per_step": 1, "step.epochs_per_step": 1})
    learner = offline_learner(config, 1, Path("/nonexistent"))
    try:
        if patch:
            patch(learner)
        refs, step = put(learner.queue, made), Step(0)
        asyncio.run(experience_and_update(learner, step, refs))
        return step, refs, learner.queue
    finally:
        learner.close()


def said_by(folder, model, made) -> list[torch.Tensor]:
    """Return the outputs of one teacher alone for the rows."""
    _, refs, queue = one_turn(config_of("opd", model, folder, 1, 16384), made)
    return list(queue.read(refs, ("teacher_logprobs",))["teacher_logprobs"].rows())


def several(name, model, folders, **given):
    config = config_of(name, model, folders["a"], 1, 64)
    own = {"path": None, "paths": {n: str(p) for n, p in folders.items()}, **given}
    return changed(config, {f"teacher.{key}": value for key, value in own.items()})


# -- several -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_is_scored_by_its_own_teacher_alone(ranks, tiny_model, tiny_teacher, other):
    made, folders = rows(), {"a": tiny_teacher, "b": other}
    alone = {n: said_by(path, tiny_model, made) for n, path in folders.items()}
    config = several("opd", tiny_model, folders)
    config = changed(config, {"cluster.virtual_ranks": ranks})
    step, refs, queue = one_turn(config, made)
    found = queue.read(refs, ("teacher_logprobs",))["teacher_logprobs"]
    for i, ref in enumerate(refs):
        torch.testing.assert_close(found.row(i), alone[ref.teacher][i], rtol=1e-12, atol=1e-13)
        assert not torch.allclose(found.row(i), alone["b" if ref.teacher == "a" else "a"][i], atol=1e-3)
    for name in "ab":
        mine = [i for i, r in enumerate(refs) if r.teacher == name and r.outcome == "ok"]
        likes = torch.cat([alone[name][i] - torch.from_numpy(made[i].segments[1].logprobs) for i in mine])
        assert step.metrics[f"teacher/kl/{name}"].value == pytest.approx(-float(likes.mean()), rel=1e-9)
    whole = sum(step.metrics[f"teacher/kl/{n}"].total for n in "ab")
    assert step.metrics["teacher/kl"].total == pytest.approx(whole)
    assert step.metrics["teacher/kl"].total == pytest.approx(
        sum(step.metrics[f"teacher/kl/quarter_{q}"].total for q in (1, 2, 3, 4))
    )


@pytest.mark.parametrize("weights", [{}, {"a": 3.0, "b": 1.0}])
def test_a_mixture_is_one_of_probabilities(weights, tiny_model, tiny_teacher, other):
    made, folders = rows(), {"a": tiny_teacher, "b": other}
    a, b = (said_by(path, tiny_model, made) for path in folders.values())
    _, refs, queue = one_turn(several("opd", tiny_model, folders, pick="mix", weights=weights), made)
    found = queue.read(refs, ("teacher_logprobs",))["teacher_logprobs"]
    share = 0.75 if weights else 0.5
    for i in range(len(refs)):
        expected = (share * a[i].exp() + (1 - share) * b[i].exp()).log()
        torch.testing.assert_close(found.row(i), expected, rtol=1e-10, atol=1e-12)


def test_the_best_teacher_of_an_answer_is_the_one_that_finds_it_likeliest(tiny_model, tiny_teacher, other):
    made, folders = rows(), {"a": tiny_teacher, "b": other}
    both = [said_by(path, tiny_model, made) for path in folders.values()]
    _, refs, queue = one_turn(several("opd", tiny_model, folders, pick="best"), made)
    found, taken = queue.read(refs, ("teacher_logprobs",))["teacher_logprobs"], set()
    for i in range(len(refs)):
        best = int(both[1][i].sum() > both[0][i].sum())
        taken.add(best)
        torch.testing.assert_close(found.row(i), both[best][i], rtol=1e-12, atol=1e-13)
    assert taken == {0, 1}, "a test of one teacher proves nothing"


@pytest.mark.parametrize("ranks, budget", [(1, 16384), (2, 64)])
def test_of_the_best_teacher_all_is_taken_that_it_says(ranks, budget, tiny_model, tiny_teacher, other):
    """Its ids with their log-probs, and not those of the other; the same however the rows are shared out."""
    made, folders, names = rows(), {"a": tiny_teacher, "b": other}, ("teacher_logprobs", "teacher_ids", "teacher_topk")
    alone = [one_turn(config_of("gkd_topk", tiny_model, folder, 1, 16384), made) for folder in folders.values()]
    both = [queue.read(refs, names) for _, refs, queue in alone]
    config = several("gkd_topk", tiny_model, folders, pick="best")
    config = changed(config, {"cluster.virtual_ranks": ranks, "step.max_tokens_per_microbatch": budget})
    _, refs, queue = one_turn(config, made)
    found, taken = queue.read(refs, names), set()
    for i in range(len(refs)):
        best = int(both[1]["teacher_logprobs"].row(i).sum() > both[0]["teacher_logprobs"].row(i).sum())
        taken.add(best)
        for name in names:
            torch.testing.assert_close(found[name].row(i), both[best][name].row(i), rtol=1e-12, atol=1e-13)
        assert not torch.equal(found["teacher_ids"].row(i), both[1 - best]["teacher_ids"].row(i))
    assert taken == {0, 1}


def test_an_answer_of_two_rows_has_one_best_teacher():
    """By hand: each row alone would take another one than both together."""
    two = samples(0)[:2]
    two = [
        replace(s, sample_id=f"t#{i}", trajectory_id="t", segments=(s.segments[0], drawn(2))) for i, s in enumerate(two)
    ]
    queue, each = MemoryQueue(), np.array([0, 2, 4])
    refs = put(queue, two)
    said = {"a": [-1.0, -1.0, -5.0, -1.0], "b": [-2.0, -1.0, -1.0, -1.0]}
    for n, (name, logs) in enumerate(said.items()):
        queue.write(refs, {f"lp/{name}": Ragged(torch.tensor(logs), each)})
        queue.write(refs, {f"ids/{name}": Ragged(torch.arange(8).view(4, 2) + 10 * n, each)})
    role = Role("teacher", queue, None)
    role.merge(refs, {"logprobs": "lp", "topk_ids": "ids"}, ("a", "b"), ())
    found = queue.read(refs, ("lp", "ids"))
    assert found["lp"].values.tolist() == said["b"] and found["ids"].values[:, 0].tolist() == [10, 12, 14, 16]


def drawn(n: int) -> Segment:
    return Segment(ids=np.arange(4, 4 + n), source="sampled", logprobs=np.zeros(n, np.float32), version=0)


def dead(members, name: str, error: BaseException):
    def infer(refs, outputs):
        found: Future = Future()
        found.set_exception(error)
        return found

    members[name].infer = infer


@pytest.mark.parametrize("pick, names", [("task", "ab"), ("task", "a"), ("mix", "ab")])
def test_the_samples_of_a_dead_teacher_are_invalid_and_the_others_learn(pick, names, tiny_model, tiny_teacher, other):
    config = several("opd", tiny_model, {"a": tiny_teacher, "b": other}, pick=pick)
    config = changed(config, {"pipeline.max_invalid_share": 0.6})

    def patch(learner):
        dead(learner.models["teacher"]._members, names[-1], WorkerDied("rank 0 of teacher was killed"))

    if pick == "mix":  # a mixture without one of its parts is another one
        with pytest.raises(ValueError, match="teacher: 16 of 16 samples have no finite number from it"):
            one_turn(config, rows(), patch)
        return
    step, refs, queue = one_turn(config, rows(), patch)
    gone = {r.sample_id for r in refs if r.teacher == names[-1]}
    assert {r.sample_id for r in step.trained if r.outcome == "invalid"} >= gone
    masks = queue.read(refs, ("loss_mask",))["loss_mask"]
    assert all(masks.row(i).any() != (r.sample_id in gone or r.outcome != "ok") for i, r in enumerate(refs))
    assert step.metrics["teacher/invalid"].value == len(gone) / len(refs)
    assert {n: step.metrics[f"teacher/invalid/{n}"].value for n in "ab"} == {n: float(n == names[-1]) for n in "ab"}
    assert step.metrics["actor/grad_norm"].value > 0


class Early(EarlyOutputs):
    """Computes half of a step's rows before the step."""

    def infer(self, refs, outputs):
        self.begin(Refs(r for r in refs if r.group_id in ("g0", "g1")))
        return super().infer(refs, outputs)


@pytest.mark.parametrize("name, pick, gone", [("opd", "task", ""), ("opd", "task", "b"), ("gkd_topk", "best", "")])
def test_what_is_asked_ahead_is_what_is_asked_in_the_step(name, pick, gone, tiny_model, tiny_teacher, other):
    """Columns, figures and Invalid samples are equal, also if a teacher dies in the call before the step."""
    columns = ("teacher_logprobs", *(("teacher_ids", "teacher_topk") if name == "gkd_topk" else ()), "loss_mask")
    found = []
    for ahead in (False, True):
        config = several(name, tiny_model, {"a": tiny_teacher, "b": other}, pick=pick)
        config = changed(config, {"pipeline.max_invalid_share": 0.6})

        def patch(learner, ahead=ahead, algorithm=name):
            if gone:
                dead(learner.models["teacher"]._members, gone, WorkerDied("rank 0 of teacher was killed"))
            if ahead:
                learner.models["teacher"] = Early(
                    learner.models["teacher"], learner.algorithm.outputs_by_role(1)["teacher"], 10, 60.0
                )

        step, refs, queue = one_turn(config, rows(), patch)
        figures = {n: m.value for n, m in step.metrics.items() if not n.startswith(("timing", "perf"))}
        found.append((queue.read(refs, columns), figures, [r.outcome for r in step.trained]))
    (plain, figures, outcomes), (early, theirs, also) = found
    assert (
        theirs.pop("teacher/ahead") == (0.0 if gone else 0.5)
        and outcomes == also
        and ("invalid" in outcomes[4:8]) == (gone == "b")
    )
    assert theirs == pytest.approx(figures, rel=1e-6, nan_ok=True)
    for column in columns:
        torch.testing.assert_close(early[column].values, plain[column].values, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_teacher_that_died_before_is_not_asked_to_speak_for_one_that_dies_now():
    asked, gone = [], set()

    class Member:
        def __init__(self, name: str) -> None:
            self.name = name

        def infer(self, refs, outputs):
            return self.answer(frozenset())

        def blank(self, refs, outputs):
            asked.append(self.name)
            return self.answer(None)

        def answer(self, value):
            found: Future = Future()
            if self.name in gone:
                found.set_exception(WorkerDied(f"{self.name} was killed"))
            else:
                found.set_result(value)
            return found

    teachers = Teachers({name: Member(name) for name in "abc"}, "task", {}, 10.0)
    for name in "ab":
        gone.add(name)
        refs = Refs([SimpleNamespace(teacher=name, sample_id=f"of {name}")])
        assert teachers.infer(refs, {"logprobs": "teacher_logprobs"}).result(10) == {f"of {name}"}
    assert asked == ["b", "c"]


def test_a_teacher_that_hangs_is_silent_and_is_not_asked_again(caplog):
    asked = []

    class Member:
        def __init__(self, name: str) -> None:
            self.name = name

        def infer(self, refs, outputs):
            return self.answer("infer", frozenset())

        def blank(self, refs, outputs):
            assert {r.teacher for r in refs} == {"a"}
            return self.answer("blank", None)

        def answer(self, call, value):
            asked.append((call, self.name))
            found: Future = Future()
            if self.name != "a":
                found.set_result(value)
            return found

    teachers = Teachers({name: Member(name) for name in "ab"}, "task", {}, 0.2)
    refs = Refs([SimpleNamespace(teacher=name, sample_id=f"of {name}") for name in "ab"])
    for _ in range(2):
        assert teachers.infer(refs, {"logprobs": "teacher_logprobs"}).result(60) == {"of a"}
    assert asked == [("infer", "a"), *[("infer", "b"), ("blank", "b")] * 2]
    assert caplog.text.count("teacher a did not answer within 0.2 s; its samples are Invalid from now on") == 1
    alone = Refs(refs[:1])
    with pytest.raises(DeadlineExpired, match="teacher a did not answer"):
        Teachers({"a": Member("a")}, "task", {}, 0.2).infer(alone, {"logprobs": "teacher_logprobs"}).result(60)


def test_whoever_asks_what_was_counted_is_not_held_up():
    """The driver's loop waits for it as for any call; of a member that dies meanwhile nothing is counted."""
    answers = {name: Future() for name in "ab"}
    members = {name: SimpleNamespace(take_metrics=lambda name=name: answers[name]) for name in "ab"}
    found = Teachers(members, "task", {}, 10.0).take_metrics()
    assert not found.done()
    answers["a"].set_result({"cache_hits": Metric(1.0, 2.0, "sequence")})
    answers["b"].set_exception(WorkerDied("b was killed"))
    assert found.result(10) == {"cache_hits/a": Metric(1.0, 2.0, "sequence")}


def test_the_ids_of_rows_without_a_teacher_differ(tiny_teacher):
    queue, made = MemoryQueue(), rows()[:2]
    role = Role("teacher", queue, engine(tiny_teacher, top_k=5))
    refs = put(queue, made)
    role.blank(refs, {"topk_ids": "teacher_ids", "topk_logprobs": "teacher_topk"})
    found = queue.read(refs, ("teacher_ids", "teacher_topk"))
    assert found["teacher_topk"].values.isnan().all() and found["teacher_topk"].values.shape[1] == 6
    assert all(len({*row}) == 5 for row in found["teacher_ids"].values.tolist())


def test_the_death_of_the_last_teacher_is_the_end(tiny_model, tiny_teacher, other):
    def patch(learner):
        for name in "ab":
            dead(learner.models["teacher"]._members, name, WorkerDied(f"{name} was killed"))

    with pytest.raises(WorkerDied, match="a was killed"):
        one_turn(several("opd", tiny_model, {"a": tiny_teacher, "b": other}), rows(), patch)


def test_what_a_teacher_raises_is_no_death(tiny_model, tiny_teacher, other):
    def patch(learner):
        dead(learner.models["teacher"]._members, "b", ZeroDivisionError("ours"))

    with pytest.raises(ZeroDivisionError):
        one_turn(several("opd", tiny_model, {"a": tiny_teacher, "b": other}), rows(), patch)


# -- another prompt ----------------------------------------------------------------------------------------------------


def dense(model, ids, first: int) -> torch.Tensor:
    """Log-probs of ids[first:] by the model's own forward pass."""
    ids = torch.from_numpy(np.asarray(ids))
    with torch.no_grad():
        z = model(ids[None]).logits[0].log_softmax(-1)
    return z[first - 1 : -1].gather(-1, ids[first:, None])[:, 0]


@pytest.mark.parametrize("path", [POLICY, "folder"])
def test_a_teacher_reads_its_context_and_scores_the_very_tokens(path, tiny_model, tiny_teacher):
    made = rows(context=True)
    config = config_of("opd", tiny_model, tiny_teacher, 1, 64)
    config = changed(config, {"teacher.hint_key": "hint"})
    if path == POLICY:
        config = changed(config, {"teacher.path": POLICY})
    _, refs, queue = one_turn(config, made)
    found = queue.read(refs, ("teacher_logprobs", "train_logprobs"))
    model = load_causal_lm(tiny_model if path == POLICY else tiny_teacher).double()
    policy = load_causal_lm(tiny_model).double()
    for i, s in enumerate(made):
        prompt, answer = (x.ids for x in s.segments)
        context = CONTEXTS[s.group_id]
        expected = dense(model, np.concatenate([context, answer]), len(context))
        torch.testing.assert_close(found["teacher_logprobs"].row(i), expected, rtol=1e-6, atol=1e-6)
        own = dense(policy, np.concatenate([prompt, answer]), len(prompt))
        torch.testing.assert_close(found["train_logprobs"].row(i), own, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(expected, own, atol=1e-3)


def test_a_context_moves_no_token_of_turns_and_of_rewritten_histories():
    def drawn(n):
        return Segment(ids=RNG.integers(4, 19, n), source="sampled", logprobs=np.zeros(n, np.float32), version=0)

    first = samples(0)[0]
    prompt, env = first.segments[0], Segment(ids=RNG.integers(4, 19, 4), source="env")
    turns = (prompt, drawn(3), env, drawn(2))
    branch = (Segment(ids=np.concatenate([prompt.ids, turns[1].ids, env.ids]), source="prompt"), drawn(4))
    elsewhere = (Segment(ids=prompt.ids + 1, source="prompt"), drawn(4))
    context = np.arange(4, 13)
    task = Task(task_id="t", index=0, messages=(), prompt_ids=prompt.ids, context_ids=context)
    for segments, rest in ((turns, turns[1:]), (branch, (replace(turns[1], source="env"), env, branch[1]))):
        plain = with_task(replace(first, segments=segments), task)
        found = informed(plain)
        whole = np.concatenate([s.ids for s in found.segments])
        assert np.array_equal(whole, np.concatenate([context, *(s.ids for s in rest)]))
        a, b = pack([plain]), pack([found])
        assert torch.equal(a.targets, b.targets) and np.array_equal(a.row_start, b.row_start)
        moved = len(context) - len(prompt.ids)
        assert torch.equal(a.target_from + moved, b.target_from), "the same place of the answer, behind another prompt"
        assert torch.equal(a.columns["rollout_logprobs"], b.columns["rollout_logprobs"])
    assert with_task(replace(first, segments=elsewhere), task).context is None


def test_a_row_without_its_context_is_invalid(tiny_model):
    made = rows(context=True)
    made[0] = replace(made[0], context=None)
    config = config_of("opd", tiny_model, tiny_model, 1, 64)
    config = changed(config, {"teacher.path": POLICY, "teacher.hint_key": "hint"})
    step, _, queue = one_turn(config, made)
    assert step.trained[0].outcome == "invalid" and step.metrics["teacher/invalid"].value == 1 / 16
    assert not queue.read(Refs(step.trained[:1]), ("loss_mask",))["loss_mask"].values.any()


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_teacher_that_likes_wrong_answers_shows():
    """Two answers of two tokens: the teacher's log-ratios by hand."""
    made = [replace(s, reward=r, outcome="ok") for s, r in zip(samples(0)[:2], (1.0, 0.0))]
    made = [
        replace(
            s,
            segments=(s.segments[0], Segment(ids=np.array([4, 5]), source="sampled", logprobs=np.zeros(2), version=0)),
        )
        for s in made
    ]
    found = {"rollout_logprobs": torch.zeros(4), "teacher_logprobs": torch.tensor([-3.0, -1.0, -0.5, -0.1])}
    columns = step_columns(Refs(ref_of(s) for s in made), found)
    metrics = adv.opd(columns)
    assert metrics["teacher/likes_right"].value == pytest.approx(-2.0 - -0.3)
    assert metrics["teacher/kl"].value == pytest.approx(4.6 / 4)
    assert metrics["teacher/kl/quarter_1"].value == pytest.approx(3.5 / 2)
    assert metrics["teacher/kl/quarter_3"].value == pytest.approx(1.1 / 2)
    assert metrics["teacher/kl/quarter_2"].count == 0
    assert metrics["teacher/overlap"].value == pytest.approx(sum(math.exp(x) for x in (-3, -1, -0.5, -0.1)) / 4)
    over = columns.with_token({"teacher_logprobs": torch.tensor([1.0, 2.0, -1.0, 0.0])})
    assert adv.of_teacher(over)["teacher/overlap"].value == pytest.approx((3 + math.exp(-1)) / 4), "1 is the most"


BESIDE = {"divergence_coef": 0.1, "kl_loss_coef": 0.0}


@matrix("name", ["gkd", "gkd_topk", "grpo"])
def test_every_objective_sees_a_teacher_that_is_worse(name, tiny_model, tiny_teacher):
    """The same figures as on-policy distillation has, of the same rows. Answers that the teacher likes less have the
    higher score, which is an alarm after five steps; there is none with the scores the other way round."""

    def turn(name: str, made, ranks: int = 1, budget: int = 16384):
        config = config_of(name, tiny_model, tiny_teacher, ranks, budget)
        if name == "grpo":
            config = changed(
                config, {"teacher.path": str(tiny_teacher), "teacher.top_k": 5, "algorithm.options": {**BESIDE}}
            )
        step, refs, queue = one_turn(config, made)
        return {n: m.value for n, m in step.metrics.items()}, refs, queue

    made = [s for s in rows() if s.outcome == "ok"]
    _, refs, queue = turn("opd", made)
    found = queue.read(refs, ("teacher_logprobs", "rollout_logprobs"))
    likes = [
        float((found["teacher_logprobs"].row(i) - found["rollout_logprobs"].row(i)).mean()) for i in range(len(made))
    ]
    for sign in (-1.0, 1.0):
        scored = [replace(s, reward=sign * x) for s, x in zip(made, likes, strict=True)]
        wanted = {
            n: v for n, v in turn("opd", scored)[0].items() if n.startswith("teacher/") and n != "teacher/invalid"
        }
        assert {*wanted} >= {
            "teacher/likes_right",
            "teacher/kl",
            "teacher/kl/quarter_4",
            "teacher/kl/a",
            "teacher/overlap",
        }
        for ranks, budget in ((1, 16384), (2, 64)):
            said, _, _ = turn(name, scored, ranks, budget)
            assert {n: said[n] for n in wanted} == pytest.approx(wanted, rel=1e-9)
        alarms = [a.name for a in check_health([said] * 5, HealthLimits())]
        assert ("teacher_disagrees" in alarms) == (sign < 0) and said["teacher/likes_right"] * sign > 0


def test_the_reward_counts_where_the_teacher_agrees():
    """Two answers of two tokens, scores 1 and 0: GRPO gives +-1 / sqrt(2); the teacher likes the first of each."""
    made = [replace(s, reward=r, outcome="ok") for s, r in zip(samples(0)[:2], (1.0, 0.0))]
    two = Segment(ids=np.array([4, 5]), source="sampled", logprobs=np.zeros(2), version=0)
    refs = Refs(ref_of(replace(s, segments=(s.segments[0], two))) for s in made)
    likes = torch.tensor([0.5, -0.25, 0.125, -0.5], dtype=torch.float64)
    columns = step_columns(refs, {"rollout_logprobs": torch.zeros(4), "teacher_logprobs": likes})
    columns = columns.with_token({"rewards": torch.tensor([0.0, 1.0, 0.0, 0.0])})
    a, plain = 2**-0.5, adv.opd(columns, reward_coef=2.0)
    only = adv.opd(columns, reward_coef=2.0, agree_only=True)
    assert (plain["advantages"] - likes).tolist() == pytest.approx([2 * a, 2 * a, -2 * a, -2 * a], rel=1e-5)
    assert (only["advantages"] - likes).tolist() == pytest.approx([2 * a, 0, 0, -2 * a], rel=1e-5)
    assert plain["teacher/agrees"].value == only["teacher/agrees"].value == 0.5
    assert "teacher/agrees" not in adv.opd(columns)
    second = replace(columns, sequence={**columns.sequence, "taught": torch.tensor([True, False])})
    untaught = adv.opd(second, reward_coef=2.0, agree_only=True)
    assert untaught["advantages"].tolist() == pytest.approx([0.5 + 2 * a, -0.25, -2 * a, -2 * a], rel=1e-5)
    assert untaught["teacher/agrees"] == Metric(1.0, 2.0, "token"), "where nobody taught, nobody disagrees"


# -- the average of the policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_teaches_and_the_policy_moves_on(ranks, tiny_model, tmp_path):
    """Two turns of two optimizer steps: the outputs of the second turn's teacher are those of the average of the
    weights, which is computed by hand; the policy is the same as without it. A checkpoint holds both."""
    made, decay = rows(context=True), 0.75
    config = config_of("opd", tiny_model, tiny_model, ranks, 64)
    config = changed(config, {"teacher.path": POLICY, "teacher.hint_key": "hint", "teacher.ema": decay})
    config = changed(config, {"step.updates_per_step": 2, "step.epochs_per_step": 1})
    seen: list[dict[str, torch.Tensor]] = []

    class Watched(TorchEngine):
        def optim_step(self):
            if not seen:
                seen.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
            out = super().optim_step()
            seen.append({n: p.detach().clone() for n, p in self.model.named_parameters()})
            return out

    def turn(learner, number: int):
        again = [
            replace(s, sample_id=f"{number}/{s.sample_id}", trajectory_id=f"{number}/{s.trajectory_id}") for s in made
        ]
        refs = put(learner.queue, again)
        asyncio.run(experience_and_update(learner, Step(number), refs))
        return learner.queue.read(refs, ("teacher_logprobs",))["teacher_logprobs"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.model_engine.torch_engine.TorchEngine", Watched)
        learner, other = (offline_learner(config, 2, Path("/nonexistent")) for _ in range(2))
    try:
        first, second = turn(learner, 0), None
        learner.models["actor"].save(tmp_path / "state").result(60)
        after = len(seen)
        second = turn(learner, 1)
        other.models["actor"].load(tmp_path / "state").result(60)
        loaded = turn(other, 1)
    finally:
        learner.close()
        other.close()
    assert torch.equal(second.values, loaded.values), "a run goes on with the average that it had"
    average = {n: p.clone() for n, p in seen[0].items()}
    for weights in seen[1:after]:
        average = {n: decay * a + (1 - decay) * weights[n] for n, a in average.items()}
    assert after == 3 and not torch.equal(average["model.norm.weight"], seen[2]["model.norm.weight"])
    model = load_causal_lm(tiny_model).double()
    for i, s in enumerate(made):
        context = CONTEXTS[s.group_id]
        ids = np.concatenate([context, s.segments[1].ids])
        for found, weights in ((first, seen[0]), (second, average)):
            model.load_state_dict(weights, strict=False)
            torch.testing.assert_close(found.row(i), dense(model, ids, len(context)), rtol=1e-6, atol=1e-6)


@matrix("ranks, broken", [(1, False), (1, True), (2, True)])
def test_a_lagged_policy_teaches_what_it_said_so_many_publishes_ago(ranks, broken, tiny_model, tmp_path):
    """Five turns of two optimizer steps, with a copy every second turn: the teacher's outputs are bitwise those of the
    policy for the same rows at the time of the copy; also in a run that was cut between two copies, or at one. broken:
    the first gradient is not finite, and its optimizer step is none."""
    made, config = samples(0), config_of("opd", tiny_model, tiny_model, ranks, 64)
    config = changed(config, {"teacher.path": POLICY, "teacher.ema": 2.0})
    config = changed(config, {"step.updates_per_step": 2, "step.epochs_per_step": 1})

    def turn(learner, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the policy's outputs before the turn, and the teacher's in it."""
        again = [
            replace(s, sample_id=f"{number}/{s.sample_id}", trajectory_id=f"{number}/{s.trajectory_id}") for s in made
        ]
        refs = put(learner.queue, again)
        learner.models["actor"].infer(refs, {"logprobs": "now"}).result(60)
        step = Step(number)
        asyncio.run(experience_and_update(learner, step, refs))
        assert step.metrics["actor/skipped_updates"].value == (broken and number == 0)
        publish(learner, number + 1)
        found = learner.queue.read(refs, ("now", "teacher_logprobs"))
        return found["now"].values, found["teacher_logprobs"].values

    def publish(learner, version: int) -> None:
        learner.models["actor"].send_weights(version, (), copy=False).result(60)
        learner.models["actor"].release_weights(version).result(60)

    class First(TorchEngine):
        def optim_step(self):
            if broken and self.updates.steps + self.updates.skipped == 0:
                next(iter(self.model.parameters())).grad.fill_(float("nan"))
            return super().optim_step()

    def started() -> Learner:
        learner, sender = offline_learner(config, 5, tmp_path / "crash"), WeightSender(LocalOutlet(), dtype="float32")
        for role in learner.models["actor"]._group._workers:
            role.publishing.sender = sender
        return learner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.model_engine.torch_engine.TorchEngine", First)
        learner, *others = (started() for _ in range(3))
    try:
        publish(learner, 0)
        policy, teacher = [], []
        for number in range(5):
            found = turn(learner, number)
            policy.append(found[0])
            teacher.append(found[1])
            learner.models["actor"].save(tmp_path / str(number + 1)).result(60)
        straight, cut = list(zip(policy, teacher)), []
        for at, other in zip((2, 3), others):
            other.models["actor"].load(tmp_path / str(at)).result(60)
            publish(other, 2)  # again, as a resumed run does, also between two publishes
            cut.append([turn(other, n) for n in range(at, 5)])
    finally:
        for each in (learner, *others):
            each.close()
    for number, of in enumerate((0, 0, 2, 2, 4)):
        assert torch.equal(teacher[number], policy[of]), (number, of)
    assert all(not torch.equal(a, b) for a, b in zip(policy, policy[1:]))
    for again in cut:
        assert all(torch.equal(a, b) for x, y in zip(straight[::-1], again[::-1]) for a, b in zip(x, y, strict=True))
