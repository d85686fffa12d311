"""Names of algorithms and of their settings: an error has the nearest name, with the other settings that it needs."""

import pytest
from handmade_model import write_model, write_rows

from verl.algorithms.meanings import MEANINGS
from verl.algorithms.presets import PRESETS, find, knobs
from verl.config.load import load_config, validate
from verl.show import show

NEAR = {
    "GRPO": "grpo",
    "Dr.GRPO": "drgrpo",
    "dr_grpo": "drgrpo",
    "dr-grpo": "drgrpo",
    "Reinforce++": "reinforce_plus_plus",
    "REINFORCE++-baseline": "reinforce_plus_plus_baseline",
    "reinforce-plus-plus": "reinforce_plus_plus",
    "gae": "ppo",
    "PPO": "ppo",
    "GSPO-token": "gspo_token",
    "grpo_passk": "pass_at_k",
    "Pass@k": "pass_at_k",
    "optimal_token_baseline": "otb",
    "geo_mean": "gmpo",
    "OnPolicyDistillation": "opd",
    "KL-Cov": "kl_cov",
}


@pytest.mark.parametrize(("given", "near"), NEAR.items())
def test_another_spelling_of_an_algorithm_leads_to_it(given, near):
    with pytest.raises(ValueError, match=f"unknown; did you mean {near}\\?"):
        find(given)


def test_every_setting_has_a_meaning_and_is_shown_with_its_whole_key(capsys):
    assert not knobs().keys() - MEANINGS.keys(), "write them into algorithms/meanings.py"
    assert not MEANINGS.keys() - knobs().keys() - {"advantage"}
    for name in ("grpo", "drgrpo", "opd"):
        assert show([f"algorithm={name}"]) == 0
        rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith(" ")}
        for key in PRESETS[name].settings().keys() & knobs().keys():
            path = f"options.{key}" if knobs()[key] else key
            assert MEANINGS[key][:60].strip() in rows[path], path


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("algorithm.correction_high=2.0", "write algorithm.options.correction_high=2.0 beside algorithm.correction="),
        ("correction_high=2.0", "write algorithm.options.correction_high=2.0 beside algorithm.correction="),
        ("algorithm.mask_truncated=true", "write algorithm.options.mask_truncated=true"),
        ("algorithm.corection_high=2.0", "did you mean algorithm.options.correction_high"),
        (
            "algorithm.options.correction=truncate",
            "write algorithm.correction=truncate algorithm.options.correction_high=2.0",
        ),
        ("algorithm.options.clip_high=0.3", "write algorithm.clip_high=0.3"),
        ("algorithm.options.corection_high=2", "did you mean correction_high?"),
    ],
)
def test_a_setting_at_another_place_is_told_its_own(given, said):
    with pytest.raises(ValueError) as refused:
        validate(load_config(["model.path=m", given]).config)
    assert said in str(refused.value)


def test_what_is_told_is_right(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 100)
    args = [f"model.path={write_model(tmp_path / 'm')}", f"data.train_files={rows}", f"data.eval_files={rows}"]
    told = ["algorithm.correction=truncate", "algorithm.options.correction_high=2.0"]
    validate(load_config([*args, *told]).config)
    resolved = load_config([*args, "algorithm.name=drgrpo", "rollout.max_response_tokens=512"])
    validate(resolved.config)
    assert resolved.config.algorithm.given()["horizon_tokens"] == 512
    assert resolved.origins["algorithm.horizon_tokens"] == "default: rollout.max_response_tokens"
    own = load_config([*args, "algorithm.aggregation=seq-mean-token-sum-norm", "algorithm.horizon_tokens=9"]).config
    assert own.algorithm.given()["horizon_tokens"] == 9
    assert "horizon_tokens" not in load_config(args).config.algorithm.given()
