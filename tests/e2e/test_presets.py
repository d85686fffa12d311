"""Every row of the table runs as a whole recipe through the real loop: its columns, roles, baselines and
corrections."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from each import FULL_GRID, matrix
from small_runs import metrics_of, small_run, tensors_of

from verl.algorithms.presets import PRESETS
from verl.track.samples import read_samples

PARTS = Path(__file__).parents[1] / "reward_parts.py"
MORE = {
    "drgrpo": ("algorithm.horizon_tokens=12",),
    "gdpo": ("algorithm.options.reward_components=[short,digits]",),
    "vapo": ("algorithm.critic_warmup_steps=0",),
}


def run_of(root, model, data, name, *more, steps=2):
    args = (f"algorithm.name={name}", "algorithm.kl_loss_coef=null", f"reward.path={PARTS}", *MORE.get(name, ()), *more)
    return small_run(root, model, data[:1], f"run.total_steps={steps}", *args)


def unlike() -> list[str]:
    """Return the presets that differ from all before them in what the loop does: roles, baselines, filters, passes. How
    the others compute advantages and losses is tested in tests/numerics."""
    found: dict[tuple[object, ...], str] = {}
    for name, p in PRESETS.items():
        loss, groups = p.loss, p.group_filter
        does = (frozenset(p.roles()), p.group.baselines, p.kl_reward is not None, loss.two_pass, loss.outputs)
        found.setdefault((*does, p.sample_filter is not None, groups.filter_groups, p.correction is not None), name)
    return list(found.values())


@matrix("name", PRESETS if FULL_GRID else unlike(), quick=("grpo", "ppo", "gkd_topk"))
def test_every_row_trains_through_the_loop(name, tmp_path, tiny_model, tiny_teacher, arithmetic_data):
    taught = "teacher" in PRESETS[name].roles()
    teacher = (f"teacher.path={tiny_teacher}", "teacher.top_k=8") if taught else ()
    run_of(tmp_path, tiny_model, arithmetic_data, name, *teacher)
    preset, found = PRESETS[name], metrics_of(tmp_path / "r")
    for step in (1, 2):
        m = found[step]
        assert m["actor/grad_norm"] > 0 and np.isfinite(m["actor/grad_norm"]), (
            "the default configuration has a gradient"
        )
        assert np.isfinite(m["actor/pg_loss"])
        assert m["mismatch/max_abs_dlogp"] < 1e-4
        if preset.critic:
            assert m["critic/grad_norm"] > 0 and m["critic/vf_loss"] > 0 and m["critic/vf_explained_var"] <= 1
        if preset.kl_reward:
            assert m["actor/reward_kl_penalty_coeff"] == preset.kl_reward.coef
    rows = read_samples(tmp_path / "r", 1)
    trained_rows = [r for r in rows if r.purpose == "train"]
    with_advantage = [r for r in trained_rows if "advantages" in r.tokens]
    assert len(with_advantage) == (8 if name == "pf_ppo" else 16), "pf_ppo trains the best and the worst of each prompt"
    for r in with_advantage:
        assert np.isfinite(r.tokens["advantages"][r.response_mask.astype(bool)]).all()
    assert sum(r.purpose == "baseline" for r in rows) == 4 * preset.group.baselines
    run_of(tmp_path / "two", tiny_model, arithmetic_data, name, "cluster.virtual_ranks=2", *teacher, steps=1)
    same_step_on_two_ranks(tmp_path / "r", tmp_path / "two" / "r")


def same_step_on_two_ranks(one: Path, two: Path) -> None:
    """The whole loop on two virtual ranks: the same rows, rewards and (to rounding) gradients and advantages."""
    a, b = metrics_of(one)[1], metrics_of(two)[1]
    assert set(a) == set(b), "no figure is lost or told twice under another name"
    for metric in a:
        if metric.endswith(("grad_norm", "_loss", "entropy", "lr", "clipfrac", "skipped_updates", "vf_explained_var")):
            assert b[metric] == pytest.approx(a[metric], rel=1e-5, abs=1e-6), metric
    assert b["actor/skipped_updates"] == 0 if "actor/skipped_updates" in b else True
    rows, others = read_samples(one, 1), read_samples(two, 1)
    assert [r.sample_id for r in rows] == [r.sample_id for r in others]
    for x, y in zip(rows, others):
        assert (x.reward, x.response_ids.tolist()) == (y.reward, y.response_ids.tolist())
        for column in ("advantages", "old_logprobs"):
            p, q = (np.asarray([] if v is None else v) for v in (vars_of(x, column), vars_of(y, column)))
            np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-5, equal_nan=True, err_msg=f"{column} of {x.sample_id}")


def vars_of(row, column: str):
    return row.tokens.get(column)


def test_remax_subtracts_the_greedy_answers_score(tmp_path, tiny_model, arithmetic_data):
    run_of(tmp_path, tiny_model, arithmetic_data, "remax", "algorithm.kl_reward_coef=0")
    rows = read_samples(tmp_path / "r", 1)
    greedy = {r.group_id: r.reward for r in rows if r.purpose == "baseline"}
    assert len(greedy) == 4 and all(r.temperature == 0 for r in rows if r.purpose == "baseline")
    for r in rows:
        if r.purpose == "train":
            np.testing.assert_allclose(
                r.tokens["advantages"][r.response_mask.astype(bool)], r.reward - greedy[r.group_id], rtol=1e-5
            )


def test_pf_ppo_trains_the_best_and_the_worst_of_each_prompt(tmp_path, tiny_model, arithmetic_data):
    run_of(tmp_path, tiny_model, arithmetic_data, "pf_ppo")
    groups = {}
    for r in read_samples(tmp_path / "r", 1):
        groups.setdefault(r.group_id, []).append(r)
    for rows in groups.values():
        kept = [r.reward for r in rows if "advantages" in r.tokens]
        assert (max(kept), min(kept)) == (max(r.reward for r in rows), min(r.reward for r in rows)) and len(kept) == 2


@pytest.mark.slow
def test_pf_ppo_draws_from_the_whole_step_as_verl_does(tmp_path, tiny_model, arithmetic_data):
    """Answers are drawn after the advantages, which all have; only drawn ones have the update's own log-probs. Two
    ranks draw the same."""
    more = ("algorithm.options.selection=max_min", "step.updates_per_step=1")
    run_of(tmp_path, tiny_model, arithmetic_data, "pf_ppo", *more)
    rows = read_samples(tmp_path / "r", 1)
    rewards = [r.reward for r in rows]
    assert all("advantages" in r.tokens for r in rows)
    drawn = [r.reward for r in rows if "entropy" in r.tokens]
    assert [r.copies > 0 for r in rows] == ["entropy" in r.tokens for r in rows]
    assert sum(r.copies for r in rows) == len(rows), "the record has how often each answer was trained on"
    assert 0 < len(drawn) <= len(rows) and set(drawn) == {max(rewards), min(rewards)} != set(rewards)
    run_of(tmp_path / "two", tiny_model, arithmetic_data, "pf_ppo", *more, "cluster.virtual_ranks=2", steps=1)
    same_step_on_two_ranks(tmp_path / "r", tmp_path / "two" / "r")


def test_the_adaptive_kl_coefficient_is_what_the_next_step_pays(tmp_path, tiny_model, arithmetic_data):
    """Step 1: the policy is the reference, the KL is 0 and the coefficient falls by 0.2 x 16 answers / 32. Step 2 pays
    it: the last token's advantage is the score minus coefficient x log-ratio."""
    kl = ("kl_reward_coef=0.5", "kl_reward_target=1e-9", "kl_reward_horizon=32")
    run_of(tmp_path, tiny_model, arithmetic_data, "reinforce", *(f"algorithm.{k}" for k in kl), "optim.lr=1e-2")
    paid = 0
    for step, coef in ((1, 0.5), (2, 0.5 * (1 - 0.2 * 16 / 32))):
        for r in read_samples(tmp_path / "r", step):
            log_ratio = float(r.tokens["old_logprobs"][-1] - r.tokens["ref_logprobs"][-1])
            paid += step == 2 and abs(log_ratio) > 1e-3
            assert r.tokens["advantages"][-1] == pytest.approx(r.reward - coef * log_ratio, abs=2e-6)
    assert paid > 8, "the policy moved, so that the coefficient can be read"


def test_the_schedule_is_as_long_as_the_updates_of_the_run(tmp_path, tiny_model, arithmetic_data):
    """Two steps of two updates in two epochs: eight, and the eighth has an eighth of the rate left."""
    shape = ("step.updates_per_step=2", "step.epochs_per_step=2", "optim.schedule=linear", "optim.lr=1e-3")
    run_of(tmp_path, tiny_model, arithmetic_data, "dapo", *shape)
    found = metrics_of(tmp_path / "r")
    assert [found[step]["actor/lr"] for step in (1, 2)] == pytest.approx([1e-3 * 5 / 8, 1e-3 / 8])


def test_the_policy_waits_for_the_critic(tmp_path, tiny_model, arithmetic_data):
    """Value pretraining: the critic learns, the policy does not move; then both do."""
    run_of(
        tmp_path,
        tiny_model,
        arithmetic_data,
        "ppo",
        "algorithm.critic_warmup_steps=1",
        "run.save_every_steps=1",
        "run.keep_last_checkpoints=3",
    )
    found = metrics_of(tmp_path / "r")
    assert "actor/grad_norm" not in found[1] and found[1]["critic/grad_norm"] > 0 and found[2]["actor/grad_norm"] > 0
    one, two = (tensors_of(tmp_path / "r", n) for n in (1, 2))
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    weights = {name.removeprefix("model."): v for name, v in one.items() if name.startswith("model.")}
    same = [torch.equal(v, start[name]) for name, v in weights.items() if name in start]
    assert same and all(same)
    assert any(not torch.equal(two[f"model.{name}"], v) for name, v in weights.items())


@pytest.mark.slow
def test_a_threshold_alone_holds_the_policy_until_the_critic_explains_so_much(tmp_path, tiny_model, arithmetic_data):
    run_of(tmp_path, tiny_model, arithmetic_data, "ppo", "algorithm.critic_warmup_until=1.0")
    found = metrics_of(tmp_path / "r")
    assert len(found) > 1 and all(m["critic/vf_explained_var"] < 1 for m in found.values())
    assert all("actor/grad_norm" not in m and m["critic/grad_norm"] > 0 for m in found.values())


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory, tiny_model, arithmetic_data):
    """The metrics of a run with these settings, each made once."""

    @cache
    def metrics(*more):
        root = tmp_path_factory.mktemp("plain")
        base = ("algorithm.name=dapo", "algorithm.filter_groups=false", "run.total_steps=1")
        small_run(root, tiny_model, arithmetic_data[:1], *base, *more)
        return metrics_of(root / "r")

    return metrics


@matrix(
    "more",
    [
        ("algorithm.correction=truncate", "algorithm.options.correction_high=2.0"),
        (
            "algorithm.correction=icepop",
            "algorithm.options.correction_low=0.5",
            "algorithm.options.correction_high=5.0",
        ),
        (
            "algorithm.correction=truncate",
            "algorithm.options.correction_level=sequence",
            "algorithm.options.correction_high=2.0",
            "algorithm.options.correction_batch_normalize=true",
        ),
        ("algorithm.options.correction_reject=[token_k1:0.5:2,seq_mean_k3:0.01]",),
        ("algorithm.bypass=true",),
        (
            "algorithm.bypass=true",
            "algorithm.loss=reinforce",
            "algorithm.correction=truncate",
            "algorithm.options.correction_high=2.0",
        ),
        ("algorithm.options.off_policy_delta=0.1",),
        ("algorithm.kl_loss_coef=0.1", "algorithm.options.kl_loss_ratio_corrected=true", "step.updates_per_step=2"),
    ],
    ids=lambda m: ",".join(x.removeprefix("algorithm.").removeprefix("options.") for x in m),
)
def test_corrections_are_one_where_sampler_and_trainer_agree(more, plain_run):
    """In float32 the policies agree to 1e-5: a correction changes nothing, so the run is the plain one."""
    kl = [m for m in more if m.startswith("algorithm.kl_loss_coef") or m.startswith("step.")]
    loss = [m for m in more if m.startswith("algorithm.loss")]
    plain, corrected = plain_run(*kl, *loss), plain_run(*more)
    assert corrected[1]["actor/grad_norm"] == pytest.approx(plain[1]["actor/grad_norm"], rel=1e-3)
    if any("correction" in m for m in more):
        assert any(k.startswith("rollout_corr/") for k in corrected[1])


def test_answers_that_the_budget_cut_train_nothing(tmp_path, tiny_model, arithmetic_data):
    """Their rewards stay in the group's statistics: with every answer cut there is no gradient at all."""
    more = ("algorithm.options.mask_truncated=true", "algorithm.options.stop_properly_coef=0.5")
    run_of(tmp_path / "all", tiny_model, arithmetic_data, "grpo", *more, "rollout.ignore_eos=true")
    found = metrics_of(tmp_path / "all" / "r")[1]
    assert found["actor/truncated_masked"] == 1.0 and found["actor/grad_norm"] == 0.0
    rows = read_samples(tmp_path / "all" / "r", 1)
    assert all(r.reward == pytest.approx(0.5 * r.components["score"]) for r in rows if r.components["score"] > 0)
    run_of(tmp_path / "some", tiny_model, arithmetic_data, "grpo", *more)
    assert metrics_of(tmp_path / "some" / "r")[1]["actor/grad_norm"] > 0
