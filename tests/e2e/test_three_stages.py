"""SFT, reward model, PPO against it, small: each stage passes its folder on, and at the end the true and the modelled
reward are compared."""

import importlib.util
import json
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("three_stages", Path(__file__).parents[2] / "examples/three_stages.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


@pytest.mark.full("test_preference.py: RL against a trained reward model")
def test_the_three_stages_run_end_to_end(tmp_path):
    code = example.three_stages(
        [
            f"run.root_dir={tmp_path}",
            "sft_steps=3",
            "rm_steps=3",
            "ppo_steps=2",
            "run.threads=1",
            "step.prompts_per_step=4",
            "step.samples_per_prompt=2",
            "rollout.max_response_tokens=8",
            "algorithm.critic_warmup_steps=1",
            "data.max_eval_rows=8",
            f"data.cache_dir={tmp_path}/cache",
        ]
    )
    assert code == 0
    found = json.loads((tmp_path / "three_stages" / "summary.json").read_text())
    assert 0 <= found["rm_accuracy"] <= 1 and [p["step"] for p in found["curve"]] == [1, 2]
    assert (tmp_path / "three_stages" / "ppo" / "report.html").is_file()


def test_the_true_score_is_read_from_the_texts():
    assert (
        example._true("12+30=", "junk #42") == 1.0
        and example._true("50-8=", "#42") == 1.0
        and example._true("50-8=", "#43") == 0.0
    )


def test_over_optimisation_is_a_rising_model_over_a_falling_truth():
    point = lambda n, m, t: {"step": n, "modelled": m, "true": t}  # noqa: E731
    assert example.over_optimised([point(1, 0.0, 0.2), point(2, 1.0, 0.8), point(3, 2.0, 0.5)]) == 2
    assert example.over_optimised([point(1, 0.0, 0.2), point(2, 1.0, 0.8)]) is None
    assert example.over_optimised([point(1, 0.0, 0.8), point(2, -1.0, 0.2)]) is None
