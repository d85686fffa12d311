"""A fresh model learns from a trained one through the real loop, and continues after a kill; with FULL_GRID=1 the
trained quickstart teaches the model that it began with."""

import json
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from adapters import write_adapter
from each import FULL_GRID, matrix
from small_runs import launch, metrics_of, same_tensors, saved, small_args, small_run, tensors_of, trained, wait_for

from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.driver.replay import replay
from verl.model_engine.adapter import load_model
from verl.model_engine.base import EngineContext
from verl.models import tiny
from verl.quickstart import last_export
from verl.track.samples import read_samples

NAMES = ("opd", "gkd", "gkd_topk")
FIGURE = {"opd": "teacher/kl", "gkd": "actor/teacher_divergence", "gkd_topk": "actor/teacher_divergence"}


@pytest.fixture(scope="module")
def learned(tmp_path_factory, tiny_teacher, arithmetic_data):
    """The folder of a teacher that a few steps of RL have made sure of itself."""
    root = tmp_path_factory.mktemp("learned")
    done = small_run(root, tiny_teacher, arithmetic_data[:1], "run.total_steps=10", "optim.lr=2e-2")
    assert done.steps == 10
    return root / "r" / "checkpoints" / "step_10" / "hf"


def arguments(name, learned, *more):
    return (
        f"algorithm.name={name}",
        "algorithm.kl_loss_coef=null",
        f"teacher.path={learned}",
        "teacher.top_k=8",
        *more,
    )


@matrix("name", NAMES, quick=("gkd",))
def test_a_fresh_model_comes_near_to_a_trained_one(name, learned, tmp_path, tiny_model, arithmetic_data):
    more = ("run.total_steps=24", "optim.lr=1e-2", "step.samples_per_prompt=1", "step.prompts_per_step=16")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *arguments(name, learned, *more))
    found = metrics_of(tmp_path / "r")
    distance = [found[s][FIGURE[name]] for s in range(1, 25)]
    assert np.mean(distance[-4:]) < 0.5 * np.mean(distance[:2]), distance
    assert all(found[s]["timing_s/teacher"] > 0 and found[s]["teacher/invalid"] == 0 for s in range(1, 25))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES if FULL_GRID else ["gkd"])  # the others are cut below
def test_a_run_that_was_cut_is_the_run_that_was_not(name, learned, tmp_path, tiny_model, arithmetic_data):
    given = arguments(name, learned, "run.deterministic=true", "step.updates_per_step=2")
    for folder, steps in (("cut", 2), ("cut", 4), ("whole", 4)):
        small_run(tmp_path / folder, tiny_model, arithmetic_data[:1], *given, f"run.total_steps={steps}")
    cut, whole = tmp_path / "cut" / "r", tmp_path / "whole" / "r"
    assert trained(cut) == trained(whole)
    same_tensors(tensors_of(cut, 4), tensors_of(whole, 4))


@pytest.mark.timeout(300)
@pytest.mark.full("a run that was cut, below")
def test_a_run_that_is_killed_is_the_run_that_was_not(learned, tmp_path, tiny_model, arithmetic_data):
    """Killed twice with its teacher, at moments of no choice."""
    more = ("run.total_steps=5", "run.save_every_steps=1", "run.deterministic=true", "track.sinks=[jsonl]")
    given = arguments("gkd_topk", learned, *more)
    args = small_args(tmp_path / "cut", tiny_model, arithmetic_data[:1], *given)
    cut, log, rng = tmp_path / "cut" / "r", tmp_path / "log", random.Random(5)
    for wanted in (1, 3):
        process = launch(args, log)
        wait_for(lambda p=process, w=wanted: p.poll() is not None or saved(cut) >= w, 120, f"step {wanted}: {log}")
        time.sleep(rng.random() * 0.4)
        process.kill()
        process.wait(30)
    assert launch(args, log).wait(120) == 0, log.read_text()[-3000:]
    small_run(tmp_path / "whole", tiny_model, arithmetic_data[:1], *given)
    assert trained(cut) == trained(tmp_path / "whole" / "r") and sorted(trained(cut)) == [1, 2, 3, 4, 5]
    same_tensors(tensors_of(cut, 5), tensors_of(tmp_path / "whole" / "r", 5))


def merged(folder, adapter, base):
    """The model that an adapter makes of its base, in a folder of its own."""
    load_model(EngineContext(folder=base, adapter=adapter)).save_pretrained(folder)
    for file in base.glob("*token*"):
        shutil.copy(file, folder)
    return folder


ADAPTED = ("q_proj", "down_proj", "lm_head")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES if FULL_GRID else ["gkd"])
def test_an_adapter_teaches_what_its_model_would(name, tmp_path, tiny_model, tiny_teacher, arithmetic_data):
    """Bitwise, in a run that was cut; with another adapter, or another base, in its place it does not go on."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(tiny_teacher, base)
    write_adapter(adapter, base, *ADAPTED)
    model, deterministic = merged(tmp_path / "merged", adapter, base), "run.deterministic=true"

    def played(folder, teacher, steps):
        given = arguments(name, teacher, deterministic, f"run.total_steps={steps}")
        return small_run(tmp_path / folder, tiny_model, arithmetic_data[:1], *given)

    for folder, teacher, steps in (("cut", adapter, 1), ("cut", adapter, 2), ("whole", model, 2), ("plain", base, 2)):
        played(folder, teacher, steps)
    found = [tensors_of(tmp_path / folder / "r", 2) for folder in ("cut", "whole", "plain")]
    same_tensors(*found[:2])
    assert any(not torch.equal(t, found[2][name]) for name, t in found[0].items()), "an adapter that says nothing"
    weights = adapter / "adapter_model.safetensors"
    for change in (
        lambda: write_adapter(adapter, base, *ADAPTED, seed=1),
        lambda: (write_adapter(adapter, base, *ADAPTED), (base / "generation_config.json").write_text("{} ")),
    ):
        change()
        assert weights.is_file()
        with pytest.raises(ValueError, match=r"teacher\.path: .*another content"):
            played("cut", adapter, 3)


@pytest.mark.slow
def test_two_adapters_of_one_base_teach_beside_each_other(tmp_path, tiny_model, tiny_teacher, arithmetic_data, capsys):
    """As the two models that they are; the base of one is not here, and the policy's is taken."""
    one = write_adapter(tmp_path / "one", tiny_teacher, seed=1)
    two = write_adapter(tmp_path / "two", tiny_model, seed=2, base_model_name_or_path="not/here")
    models = {"a": merged(tmp_path / "a", one, tiny_teacher), "b": merged(tmp_path / "b", two, tiny_model)}
    for folder, (a, b) in (("adapters", (one, two)), ("models", models.values())):
        given = arguments("opd", "null", "teacher.pick=mix", f"teacher.paths={{a: {a}, b: {b}}}")
        args = small_args(tmp_path / folder, tiny_model, arithmetic_data[:1], *given, "run.deterministic=true")
        run_rl(load_config(args), quiet=False)
    said = " ".join(capsys.readouterr().out.split())
    for name, adapter, base in (("a", one, tiny_teacher), ("b", two, tiny_model)):
        assert f"teacher.paths.{name}={adapter}: an adapter, of the model in {base}" in said
    same_tensors(*(tensors_of(tmp_path / folder / "r", 3) for folder in ("adapters", "models")))
    tiny.character_tokenizer("0123456789 ").save_pretrained(one)  # its own, where it has one
    args = small_args(tmp_path / "other", tiny_model, arithmetic_data[:1], *arguments("opd", one))
    with pytest.raises(ValueError, match=rf"teacher\.path={one} has another vocabulary than the policy"):
        run_rl(load_config(args), quiet=True)


SCHEDULE = "{teacher_coef: [[1, 1], [3, 0]], entropy_coef: [[2, 0], [4, 1]]}"
MIXED = ("algorithm.options.reward_coef=1", "algorithm.entropy_coef=0.1", "run.deterministic=true")


@pytest.mark.slow
def test_coefficients_follow_their_schedule_through_a_resume(learned, tmp_path, tiny_model, arithmetic_data, capsys):
    given = arguments("opd", learned, *MIXED, f"algorithm.options.coef_schedule={SCHEDULE}")
    for folder, steps in (("cut", 2), ("cut", 4), ("whole", 4)):
        small_run(tmp_path / folder, tiny_model, arithmetic_data[:1], *given, f"run.total_steps={steps}")
    cut, whole = tmp_path / "cut" / "r", tmp_path / "whole" / "r"
    assert trained(cut) == trained(whole)
    same_tensors(tensors_of(cut, 4), tensors_of(whole, 4))
    found = metrics_of(whole)
    said = [[found[s][f"algorithm/{name}_coef"] for name in ("teacher", "entropy")] for s in range(1, 5)]
    assert said == [[1, 0], [0.5, 0], [0, pytest.approx(0.05)], [0, pytest.approx(0.1)]]
    for step in (1, 3):  # an entropy of at least 1 nat per token, which the loss lowers by the coefficient's share
        assert (found[step]["actor/entropy_loss"] < -0.04) == (step == 3)
    assert replay([f"run.root_dir={tmp_path / 'whole'}", "run.name=r"], 3) == 0, capsys.readouterr().out
    other = (*given[:-1], "algorithm.options.coef_schedule={teacher_coef: [[1, 1], [9, 0]]}", "run.total_steps=5")
    with pytest.raises(ValueError, match="coef_schedule"):
        small_run(tmp_path / "cut", tiny_model, arithmetic_data[:1], *other)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, arithmetic_data):
    """The training rows with an answer each."""
    rows = [json.loads(line) for line in arithmetic_data[0].read_text().splitlines()]
    path = tmp_path_factory.mktemp("stored") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**r, "said": r["reward_model"]["ground_truth"] + "="}) for r in rows))
    return path


OFF_POLICY = ("algorithm.options.on_policy_share=0.375", "algorithm.options.stored_key=said", "teacher.top_k=8")


def stored_of(run_dir, steps):
    """Return for each step: group -> True for a stored answer."""
    rows = [row for step in range(1, steps + 1) for row in read_samples(run_dir, step)]
    return {(r.step, r.group_id): np.isnan(r.tokens["rollout_logprobs"]).all() for r in rows}


@pytest.mark.slow
def test_a_share_of_the_prompts_is_answered_by_the_data(learned, tmp_path, tiny_model, stored, capsys):
    """The same draws of a run that was cut; what is recorded is what the data say, and a step can be replayed."""
    given = arguments("gkd_topk", learned, "run.deterministic=true", *OFF_POLICY[:2])
    for folder, steps in (("cut", 2), ("cut", 4), ("whole", 4)):
        small_run(tmp_path / folder, tiny_model, [stored], *given, f"run.total_steps={steps}")
    cut, whole = tmp_path / "cut" / "r", tmp_path / "whole" / "r"
    assert trained(cut) == trained(whole)
    same_tensors(tensors_of(cut, 4), tensors_of(whole, 4))
    assert stored_of(cut, 4) == stored_of(whole, 4)
    assert abs(sum(stored_of(whole, 4).values()) - 16 * 0.625) < 1
    figures = metrics_of(whole)
    assert sum(4 * figures[s]["groups/stored_share"] for s in range(1, 5)) == sum(stored_of(whole, 4).values())
    for row in read_samples(whole, 4):
        nobody = np.isnan(row.tokens["rollout_logprobs"]).all()
        assert row.response_mask.all() and nobody == (row.version_min == -1) == np.isnan(row.reward)
        if nobody:
            assert row.response_text == f"{row.ground_truth}=" and row.trajectory_id.endswith("/stored")
    assert replay([f"run.root_dir={tmp_path / 'whole'}", "run.name=r"], 4) == 0, capsys.readouterr().out


@matrix("more", [(), ("pipeline.staleness=1",)])
def test_stored_answers_alone_teach(more, learned, tmp_path, tiny_model, stored):
    args = ("run.total_steps=12", "optim.lr=1e-2", *OFF_POLICY[1:], "algorithm.options.on_policy_share=0", *more)
    small_run(tmp_path, tiny_model, [stored], *arguments("gkd", learned, *args))
    distance = [figures["actor/teacher_divergence"] for step, figures in metrics_of(tmp_path / "r").items() if step]
    assert np.mean(distance[-3:]) < 0.6 * np.mean(distance[:2]), distance


@pytest.mark.skipif(not FULL_GRID, reason="minutes: make test-all")
@pytest.mark.timeout(1500)
def test_the_trained_quickstart_is_distilled_in_a_quarter_of_its_steps(tmp_path):
    """From the step on from which GRPO holds 95% of what it ends with, of as many answers a step and at the rate it
    begins with; from the same warm-up, in less than four minutes."""
    command = [sys.executable, "-m", "verl.quickstart", f"run.root_dir={tmp_path}", "run.eval_every_steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    home, figure = tmp_path / "quickstart", "eval/acc/greedy"
    accuracy = {step: found[figure] for step, found in metrics_of(home).items() if figure in found}
    wanted = 0.95 * accuracy[max(accuracy)]
    needed = 1 + max(step for step, found in accuracy.items() if found < wanted)
    assert len(accuracy) == 26 and accuracy[0] < 0.5 * wanted
    given = {
        "recipe": "quickstart",
        "model.path": last_export(home / "warmup"),
        "data.train_files": f"[{home}/data/train.jsonl]",
        "data.eval_files": f"[{home}/data/heldout.jsonl]",
        "reward.path": "verl.recipes.arithmetic",
        "algorithm.name": "gkd",
        "algorithm.options.beta": 0.0,
        "algorithm.kl_loss_coef": "null",
        "algorithm.aggregation": "null",
        "teacher.path": last_export(home),
        "optim.schedule": "linear",
        "step.updates_per_step": 4,
        "step.epochs_per_step": 8,
        "run.root_dir": tmp_path,
        "run.name": "distilled",
        "run.total_steps": max(1, needed // 4),
    }
    began = time.monotonic()
    run_rl(load_config([f"{key}={value}" for key, value in given.items()]), quiet=True)
    seconds, found = time.monotonic() - began, metrics_of(tmp_path / "distilled")
    print(accuracy, needed, seconds, found[max(found)][figure])
    assert found[max(found)][figure] >= wanted and seconds < 240
