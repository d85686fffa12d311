"""Secrets of three digits that a key does not give away: a policy that reads them in a hint learns to do without,
and two teachers, each of which knows half of them, teach all."""

import asyncio
import json
import random
from functools import cache

import numpy as np
import pytest
import torch
from each import FULL_GRID, matrix
from fakes import put
from serving import server_process
from shared import made_once
from small_runs import launch, metrics_of, same_tensors, saved, small_args, tensors_of, trained, wait_for

from verl.config.load import load_config
from verl.driver.assemble import offline_learner
from verl.driver.launch import run_rl
from verl.driver.replay import replay
from verl.driver.step import Step, experience_and_update
from verl.models import tiny
from verl.recipes import arithmetic
from verl.rollout.process import free_port
from verl.track.samples import read_samples
from verl.types import Sample, Segment

KEYS = "012345"
SECRETS = {k: "".join(random.Random(int(k) + 5).choices("0123456789", k=3)) for k in KEYS}
SMALL = ("model.dtype=float32", "data.max_prompt_tokens=16", "rollout.max_response_tokens=4", "step.prompts_per_step=1")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth)) / 3
    return {"score": right, "feedback": "" if right == 1 else f",{ground_truth}"}
"""


def fitted(folder, write, seed: int, steps: int = 250 if FULL_GRID else 50):
    """A model that was shown (prompt, answer) as `write(rng)` draws them; only what learns from it needs all steps."""
    tokenizer = tiny.character_tokenizer(arithmetic.CHARACTERS)
    model = tiny.qwen3(tokenizer, hidden=48, layers=2, heads=2, kv_heads=1, ffn=96, seed=seed)
    user, assistant, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|user|>", "<|assistant|>", "<|end|>"))
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=5e-3), random.Random(seed)
    encoded = cache(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    for _ in range(steps):
        rows, masks = torch.zeros(64, 14, dtype=torch.int64), torch.zeros(64, 14)
        for i in range(64):
            asked, answer = map(encoded, write(rng))
            prompt = [user, *asked, end, assistant]
            rows[i, : len(prompt) + 4] = torch.tensor([*prompt, *answer, end])
            masks[i, len(prompt) : len(prompt) + 4] = 1
        logp = model(rows[:, :-1]).logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        (-(logp * masks[:, 1:]).sum() / masks.sum()).backward()
        optimizer.step()
    return tiny.save(model, tokenizer, folder)


def digits(rng) -> str:
    return "".join(rng.choices("0123456789", k=3))


def reads(rng) -> tuple[str, str]:
    """The text after the key is the answer; without a key, any digits."""
    key, answer = rng.choice(KEYS), digits(rng)
    return (f"{key}=,{answer}" if rng.random() < 0.75 else f"{key}="), answer


def knows(keys: str):
    def write(rng) -> tuple[str, str]:
        key = rng.choice(KEYS)
        return f"{key}=", SECRETS[key] if key in keys else digits(rng)

    return write


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return made_once(tmp_path_factory, "secrets", make_world)


def make_world(root):
    """Models, data and reward."""
    for name, write, seed in (("reader", reads, 1), ("low", knows("012"), 2), ("high", knows("345"), 3)):
        fitted(root / name, write, seed)
    rows = [
        {
            "prompt": f"{k}=",
            "hint": [{"role": "user", "content": f"{k}=,{secret}"}],
            "ground_truth": secret,
            "data_source": "secrets",
            "teacher": "low" if k in "012" else "high",
        }
        for k, secret in SECRETS.items()
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 8)))
    (root / "reward.py").write_text(REWARD)


def arguments(world, root, *more: str) -> list[str]:
    """Return the arguments of a run that starts from the reader."""
    given = {
        "algorithm.name": "gkd_topk",
        "algorithm.options.beta": 0.0,
        "algorithm.kl_loss_coef": "null",
        "algorithm.aggregation": "null",
        "teacher.top_k": 8,
        "reward.path": world / "reward.py",
        "run.total_steps": 24,
        "optim.lr": "2e-3",
        "step.prompts_per_step": 12,
        "step.samples_per_prompt": 2,
        "rollout.max_response_tokens": 4,
    }
    said = {a.partition("=")[0] for a in more}
    if "algorithm.name=opd" in more:
        del given["algorithm.options.beta"]
    args = [f"{k}={v}" for k, v in given.items() if k not in said]
    return small_args(root, world / "reader", [world / "rows.jsonl"], *args, *more)


def run(world, tmp_path, name: str, *more: str) -> list[float]:
    """The mean score of every step."""
    run_rl(load_config(arguments(world, tmp_path / name, *more)), quiet=True)
    found = metrics_of(tmp_path / name / "r")
    return [found[s]["critic/score/mean"] for s in sorted(found) if s]


@pytest.mark.full("numerics/test_feedback.py, and the cut run below")
def test_a_policy_that_reads_hints_learns_to_do_without(world, tmp_path):
    hint = "teacher.hint_key=hint"
    without = run(world, tmp_path, "none", f"teacher.path={world / 'reader'}")
    assert np.mean(without[-8:]) < 0.2, "a guess is one in ten"
    tried = [
        ("policy", [hint, "teacher.path=policy"]),
        ("feedback", ["teacher.hint_key=attempt.feedback", f"teacher.path={world / 'reader'}", "optim.lr=3e-3"]),
    ]
    if FULL_GRID:  # the average is cut and replayed below; a frozen teacher is also the one of the feedback
        tried += [
            ("average", [hint, "teacher.path=policy", "teacher.ema=0.9", "optim.lr=3e-3"]),
            ("frozen", [hint, f"teacher.path={world / 'reader'}", "optim.lr=3e-3"]),
        ]
    for name, more in tried:
        scores = run(world, tmp_path, name, *more)
        assert np.mean(scores[-8:]) > 2 * np.mean(without[-8:]), (name, scores)
    found = metrics_of(tmp_path / "feedback" / "r")
    assert all(found[s]["teacher/invalid"] == 0 for s in found if s) and any(
        "teacher/untaught" in v for v in found.values()
    )


@pytest.mark.full("numerics/test_several_teachers.py")
def test_two_teachers_teach_what_neither_knows_alone(world, tmp_path):
    ceiling = (3 * 1.0 + 3 * 0.1) / 6  # of one teacher: three keys known, a guess is one in ten
    long = ("optim.lr=5e-3", "run.total_steps=60")
    both = run(world, tmp_path, "both", *long, f"teacher.paths={{low: {world / 'low'}, high: {world / 'high'}}}")
    assert np.mean(both[-8:]) > ceiling + 0.2, both
    for name in ("low", "high") if FULL_GRID else ("low",):
        alone = run(world, tmp_path, name, *long, f"teacher.path={world / name}")
        assert np.mean(alone[-8:]) < ceiling + 0.1, (name, alone)


FEEDBACK = (
    "teacher.path=policy",
    "teacher.hint_key=attempt.feedback",
    "algorithm.name=opd",
    "algorithm.options.reward_coef=1",
)


@matrix(
    "more",
    [
        FEEDBACK,
        ("teacher.path=policy", "teacher.ema=0.9"),
        *([("teacher.path=policy",), ("several",)] if FULL_GRID else []),
        *([("teacher.path=policy", "teacher.ema=3"), ("several", "teacher.pick=best")] if FULL_GRID else []),
    ],
)
def test_a_run_that_was_cut_is_the_run_that_was_not_and_can_be_replayed(more, world, tmp_path, capsys):
    paths = f"teacher.paths={{low: {world / 'low'}, high: {world / 'high'}}}"
    given = [*(paths if m == "several" else m for m in more), "run.deterministic=true"]
    given += [] if more is FEEDBACK else ["teacher.hint_key=hint"]
    for folder, steps in (("cut", 2), ("cut", 4), ("whole", 4)):
        run(world, tmp_path, folder, *given, f"run.total_steps={steps}", "step.updates_per_step=2")
    cut, whole = (tensors_of(tmp_path / name / "r", 4) for name in ("cut", "whole"))
    same_tensors(cut, whole)
    assert any("average" in name for name in cut) == any(m.startswith("teacher.ema") for m in more)
    for folder, step in (("whole", 2), ("cut", 4)):
        assert replay([f"run.root_dir={tmp_path / folder}", "run.name=r"], step) == 0, capsys.readouterr().out


def said_of_rows(world, tmp_path, *more: str) -> dict[str, torch.Tensor]:
    """The columns of gkd_topk for three answers, and a turn of it."""
    given = [f"model.path={world / 'reader'}", "algorithm.name=gkd_topk", "teacher.top_k=8", *SMALL, *more]
    learner = offline_learner(load_config([*given, "step.samples_per_prompt=3"]).config, 1, tmp_path)
    try:
        made = []
        for i, ids in enumerate(([5, 6], [7, 8, 9, 2], [11])):
            drawn = Segment(ids=np.array(ids), source="sampled", logprobs=np.zeros(len(ids), np.float32), version=0)
            row = (Segment(ids=np.array([1, 4 + i, 3]), source="prompt"), drawn)
            ids_of = {"sample_id": f"s{i}", "trajectory_id": f"t{i}", "group_id": "g"}
            made.append(Sample(**ids_of, purpose="train", segments=row, reward=float(i)))
        refs, step = put(learner.queue, made), Step(0)
        asyncio.run(experience_and_update(learner, step, refs))
        assert step.metrics["actor/grad_norm"].value > 0 and step.metrics["teacher/invalid"].value == 0
        names = ("teacher_ids", "teacher_topk")
        found = learner.queue.read(refs, names)
        return {name: found[name].values for name in names}
    finally:
        learner.close()


@pytest.mark.slow
def test_a_teacher_that_verl_serves(world, tmp_path):
    """It trains as the folder itself does; a dead teacher trains no sample."""
    given = ("algorithm.name=opd", "teacher.hint_key=hint", "run.total_steps=2")
    run(world, tmp_path, "folder", *given, f"teacher.path={world / 'low'}")
    with server_process(world / "low", tmp_path / "log") as (process, url):
        run(world, tmp_path, "served", *given, f"teacher.path={url}")
        likeliest = [said_of_rows(world, tmp_path, f"teacher.path={path}") for path in (url, world / "low")]
        there, here = (metrics_of(tmp_path / name / "r") for name in ("served", "folder"))
        for figure in ("teacher/kl", "actor/pg_loss", "actor/grad_norm"):
            found, wanted = ([m[s][figure] for s in (1, 2)] for m in (there, here))
            assert found == pytest.approx(wanted, rel=1e-2, abs=1e-4), figure
        for name, by_server in likeliest[0].items():
            here_of_it = likeliest[1][name]
            by_server = by_server.to(here_of_it.dtype)
            if name == "teacher_topk":  # a server gives the rest as 1 minus the named ones, in float32
                torch.testing.assert_close(by_server[:, -1].exp(), here_of_it[:, -1].exp(), rtol=0, atol=1e-6)
                by_server, here_of_it = by_server[:, :-1], here_of_it[:, :-1]
            torch.testing.assert_close(by_server, here_of_it, rtol=0, atol=1e-5)
        own = (f"model.path={world / 'low'}", f"teacher.path={url}", "pipeline.max_invalid_share=1")
        config = load_config([*own, "algorithm.name=opd", *SMALL]).config
        learner = offline_learner(config, 1, tmp_path)
        process.kill()
        process.wait(30)
    try:
        drawn = Segment(ids=np.array([5, 6]), source="sampled", logprobs=np.zeros(2, np.float32), version=0)
        row = (Segment(ids=np.array([1, 4, 3]), source="prompt"), drawn)
        sample = Sample(sample_id="s", trajectory_id="t", group_id="g", purpose="train", segments=row, reward=1.0)
        refs = put(learner.queue, [sample])
        assert learner.models["teacher"].infer(refs, {"logprobs": "teacher_logprobs"}).result(60) == {"s"}
        with pytest.raises(ValueError, match="teacher: 1 of 1 samples have no finite number.*never all of it"):
            asyncio.run(experience_and_update(learner, Step(0), refs))
    finally:
        learner.close()


ONE_BY_ONE = ("run.save_every_steps=1", "run.deterministic=true", "track.sinks=[jsonl]", "algorithm.name=opd")


@pytest.mark.timeout(300)
@pytest.mark.full("one of two teachers is killed, below")
def test_a_served_teacher_is_killed_and_the_run_too(world, tmp_path):
    """kill -9 of both at arbitrary moments: nothing is trained without the teacher, and the resumed run equals one
    without a kill."""
    port, cut, log = free_port(), tmp_path / "cut" / "r", tmp_path / "log"
    more = (*ONE_BY_ONE, "run.total_steps=6", "pipeline.max_invalid_share=0", f"teacher.path=http://127.0.0.1:{port}")
    args = arguments(world, tmp_path / "cut", *more)

    def until_saved(wanted: int):
        process = launch(args, log)
        wait_for(lambda: process.poll() is not None or saved(cut) >= wanted, 120, f"step {wanted}: {log}")
        return process

    with server_process(world / "low", tmp_path / "server", port=port) as (server, _):
        process = until_saved(1)
        server.kill()
        assert process.wait(120) != 0, log.read_text()[-3000:]
    assert "samples have no finite number from it" in log.read_text().strip().splitlines()[-1]
    done = saved(cut)
    assert 1 <= done < 6
    with server_process(world / "low", tmp_path / "server", port=port):
        process = until_saved(done + 1)
        process.kill()
        process.wait(30)
        assert launch(args, log).wait(120) == 0, log.read_text()[-3000:]
        run(world, tmp_path, "whole", *more)
    whole = tmp_path / "whole" / "r"
    assert trained(cut) == trained(whole) and sorted(trained(cut)) == [1, 2, 3, 4, 5, 6]
    same_tensors(tensors_of(cut, 6), tensors_of(whole, 6))


@pytest.mark.timeout(300)
def test_one_of_two_teachers_is_killed_and_the_other_teaches_on(world, tmp_path):
    """The samples of the dead server are Invalid, and have no advantage."""
    port, home, log = free_port(), tmp_path / "cut" / "r", tmp_path / "log"
    teachers = f"teacher.paths={{low: 'http://127.0.0.1:{port}', high: {world / 'high'}}}"
    more = (*ONE_BY_ONE, "run.total_steps=5", "pipeline.max_invalid_share=1", teachers)
    with server_process(world / "low", tmp_path / "server", port=port) as (server, _):
        process = launch(arguments(world, tmp_path / "cut", *more), log)
        wait_for(lambda: process.poll() is not None or saved(home) >= 1, 120, f"step 1: {log}")
        server.kill()
        assert process.wait(120) == 0, log.read_text()[-3000:]
    found, rows = metrics_of(home), read_samples(home, 5)
    gone = {r.sample_id for r in rows if r.teacher == "low"}
    assert found[1]["teacher/invalid"] == 0 and 0 < found[5]["teacher/invalid"] == len(gone) / len(rows) < 1
    assert {r.sample_id for r in rows if r.outcome == "invalid"} == gone
    assert all((r.tokens["advantages"] != 0).any() != (r.sample_id in gone) for r in rows)
