"""A fresh model learns from a trained one through the real loop, and goes on where it was killed."""

import numpy as np
import pytest
from small_runs import metrics_of, same_tensors, small_run, tensors_of, trained

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


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_model_comes_near_to_a_trained_one(name, learned, tmp_path, tiny_model, arithmetic_data):
    more = ("run.total_steps=24", "optim.lr=1e-2", "step.samples_per_prompt=1", "step.prompts_per_step=16")
    small_run(tmp_path, tiny_model, arithmetic_data[:1], *arguments(name, learned, *more))
    found = metrics_of(tmp_path / "r")
    distance = [found[s][FIGURE[name]] for s in range(1, 25)]
    assert np.mean(distance[-4:]) < 0.5 * np.mean(distance[:2]), distance
    assert all(found[s]["timing_s/teacher"] > 0 and found[s]["teacher/invalid"] == 0 for s in range(1, 25))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_cut_is_the_run_that_was_not(name, learned, tmp_path, tiny_model, arithmetic_data):
    given = arguments(name, learned, "run.deterministic=true", "step.updates_per_step=2")
    for folder, steps in (("cut", 2), ("cut", 4), ("whole", 4)):
        small_run(tmp_path / folder, tiny_model, arithmetic_data[:1], *given, f"run.total_steps={steps}")
    cut, whole = tmp_path / "cut" / "r", tmp_path / "whole" / "r"
    assert trained(cut) == trained(whole)
    same_tensors(tensors_of(cut, 4), tensors_of(whole, 4))
