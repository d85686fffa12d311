"""Options and inputs of the golden format that no stored case uses, against formulas of the peers in numpy: each is
one that an adapter must take, and give the peer's number for."""

import numpy as np
import pytest
from golden_adapters import ADAPTERS, CORE, Read, golden_of

RNG = np.random.default_rng(3)
B, T = 6, 7
LENGTHS = np.array([7, 3, 5, 1, 6, 4])
MASK = (np.arange(T) < LENGTHS[:, None]).astype(np.float64)
HOLES = MASK.copy()
HOLES[0, 2] = HOLES[4, 1] = 0
OLD = -1.0 - RNG.random((B, T))
LP, RO = OLD + RNG.normal(0, 0.4, (B, T)), OLD + RNG.normal(0, 0.3, (B, T))
ADV = np.repeat(RNG.normal(0, 1, (B, 1)), T, 1)
ENTROPY = RNG.random((B, T)) * 2
R, Q = np.exp(LP - OLD), np.exp(OLD - RO)
POLICY = {"in_log_prob": LP, "in_old_log_prob": OLD, "in_advantages": ADV, "in_response_mask": MASK}
SAMPLED = {**POLICY, "in_rollout_log_prob": RO}
VERL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def clipped(ratio=R, low=0.2, high=0.3, dual=None):
    out = np.maximum(-ADV * ratio, -ADV * np.clip(ratio, 1 - low, 1 + high))
    return out if dual is None else np.where(ADV < 0, np.minimum(out, -dual * ADV), out)


def token_mean(x, total=None):
    return (x * MASK).sum() / (MASK.sum() if total is None else total)


def row_mean(x, rows=B):
    return ((x * MASK).sum(1) / MASK.sum(1)).sum() / rows


def geometric(log_ratio):
    return np.exp((log_ratio * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True))


def verl(kind, mode, info, **more):
    options = {**VERL, "loss_mode": kind, "loss_agg_mode": mode, "global_batch_info": info, **more}
    return f'verl.trainer.ppo.core_algos policy loss "{kind}"', options, POLICY


def trl(kind, **more):
    options = {"loss_type": kind, "importance_sampling_level": "token", "beta": 0.0, "delta": None}
    options |= {"epsilon_low": 0.2, "epsilon_high": 0.3, "off_policy_mask_threshold": None, "vllm_is_cap": None}
    options |= {"max_completion_length": 64, "sapo_tau": [1.0, 1.05], **more}
    arrays = {**SAMPLED, **({"in_entropies": ENTROPY} if "top_entropy_quantile" in more else {})}
    return "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss", options, arrays


def openrlhf(kind, low, high):
    options = {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": [low, high]}
    return "openrlhf.models.loss.PolicyLoss.forward", {**options, "vllm_is_correction_type": kind}, SAMPLED


def areal(level, action, lower, upper):
    rule = {"level": level, "action": action, "metric": "ratio", "agg": "mean", "lower": lower, "upper": upper}
    arrays = {"in_proximal_log_prob": OLD, "in_behave_log_prob": RO, **POLICY}
    del arrays["in_old_log_prob"]
    options = {"eps_clip": 0.2, "eps_clip_higher": 0.3, "c_clip": None, "rejection_sampling": rule}
    return "areal.utils.functional.functional.ppo_actor_loss_fn", options, arrays


def vespo(weights=1.0):
    w = np.exp(((LP - OLD + np.log(weights)) * MASK).sum(1, keepdims=True)).clip(1e-8)
    k, rate = np.where(ADV < 0, 3.0, 2.0), np.where(ADV < 0, 2.0, 3.0)
    return -(w**k) * np.exp(rate * (1 - w)) * ADV * LP


TOP = np.quantile(ENTROPY[MASK > 0], 0.7)
GEO = geometric(OLD - RO)
CASES = {
    "tokens of the batch": (
        verl("vanilla", "token-mean", {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 9}),
        2 * token_mean(clipped(dual=3.0), 90),
    ),
    "rows of the batch": (
        verl("vanilla", "seq-mean-token-mean", {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 9}),
        2 * row_mean(clipped(dual=3.0), 9),
    ),
    "sums of rows": (
        verl("vanilla", "seq-mean-token-sum", {"dp_size": 1, "global_batch_size": 9}),
        (clipped(dual=3.0) * MASK).sum() / 9,
    ),
    "sums by a constant": (
        verl("vanilla", "seq-mean-token-sum-norm", {"dp_size": 1, "loss_scale_factor": 50}),
        (clipped(dual=3.0) * MASK).sum() / 50 / B,
    ),
    "sapo has one aggregation": (
        verl("sapo", "token-mean", {}, tau_pos=1.0, tau_neg=1.5, clip_ratio_high=0.2),
        row_mean(-ADV * 4 / np.where(ADV > 0, 1.0, 1.5) / (1 + np.exp(-np.where(ADV > 0, 1.0, 1.5) * (R - 1)))),
    ),
    "trl truncates sequences": (
        trl("dapo", vllm_is_cap=1.1, vllm_importance_sampling_mode="sequence_truncate"),
        token_mean(clipped() * np.exp(((OLD - RO) * MASK).sum(1, keepdims=True)).clip(max=1.1)),
    ),
    "trl masks tokens": (
        trl("dapo", vllm_is_cap=1.1, vllm_importance_sampling_mode="token_mask"),
        token_mean(clipped() * np.where(Q <= 1.1, Q, 0.0)),
    ),
    "luspo": (
        trl("luspo", importance_sampling_level="sequence"),
        ((clipped(geometric(LP - OLD)) * MASK).sum(1)).mean(),
    ),
    "vespo": (trl("vespo"), token_mean(vespo())),
    "vespo with weights": (trl("vespo", vllm_is_cap=1.1), token_mean(vespo(Q.clip(max=1.1)))),
    "top entropy": (trl("dapo", top_entropy_quantile=0.3), token_mean(np.where(ENTROPY >= TOP, clipped(), 0.0))),
    "icepop": (openrlhf("icepop", 0.8, 1.2), token_mean(clipped(high=0.2) * np.where((Q >= 0.8) & (Q <= 1.2), Q, 0.0))),
    "seq-mask-tis": (
        openrlhf("seq-mask-tis", 0.9, 1.1),
        token_mean(clipped(high=0.2) * Q * ((GEO >= 0.9) & (GEO <= 1.1))),
    ),
    "areal masks sequences": (
        areal("sequence", "mask", None, 1.05),
        token_mean(clipped() * np.where(GEO <= 1.05, GEO, 0.0)),
    ),
    "areal clamps on both sides": (areal("token", "clamp", 0.9, 1.1), token_mean(clipped() * Q.clip(0.9, 1.1))),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_with_options_that_no_stored_case_has(name):
    (function, options, arrays), expected = CASES[name]
    given, read = Read(options), Read(arrays)
    found = ADAPTERS[function](read, given)
    assert float(found["out_loss"]) == pytest.approx(expected, rel=1e-9)
    assert not read.unread() and not given.ignored()


def test_returns_from_a_token_on_leave_out_what_is_not_in_the_mask():
    """Rewards everywhere, also in holes and behind the end; the baseline is of the whole answer."""
    rewards, baseline = RNG.normal(0, 1, (B, T)), RNG.normal(0, 1, B)
    returns = np.cumsum((rewards * HOLES)[:, ::-1], 1)[:, ::-1]
    advantages = returns - baseline[:, None] * HOLES
    arrays = {"in_token_level_rewards": rewards, "in_response_mask": HOLES, "in_reward_baselines": baseline}
    golden_of(CORE + "compute_remax_outcome_advantage", arrays, {"out_advantages": advantages, "out_returns": returns})


def test_the_optimal_baseline_is_weighed_by_squared_importance_weights():
    rewards, group = RNG.normal(0, 1, (B, T)), np.array([0, 0, 0, 1, 1, 1])
    pi2, weights = RNG.random((B, T)), RNG.random((B, T)) + 0.5
    returns = np.cumsum((rewards * MASK)[:, ::-1], 1)[:, ::-1]
    cost = np.cumsum((1 - 2 * np.exp(OLD) + pi2) * weights**2 * MASK, 1) * MASK
    expected = np.zeros((B, T))
    for t in range(T):
        for g in (0, 1):
            there = np.flatnonzero((group == g) & (MASK[:, t] > 0))
            b = (returns[there, t] * cost[there, t]).sum() / (cost[there, t].sum() + 1e-8) if len(there) > 1 else 0.0
            expected[there, t] = returns[there, t] - b
    arrays = {"in_token_level_rewards": rewards, "in_response_mask": MASK, "in_index": group, "in_old_log_probs": OLD}
    arrays |= {"in_sum_pi_squared": pi2, "in_rollout_is_weights": weights}
    options = {"handle_zero_tail": True, "epsilon": 1e-8}
    out = {"out_advantages": expected, "out_returns": returns * MASK}
    golden_of(CORE + "compute_optimal_token_baseline_advantage", arrays, out, options)


def test_whitening_without_a_shift_of_the_mean():
    values = RNG.normal(2, 1, (B, T))
    x = values[MASK > 0]
    expected = np.where(MASK > 0, (values - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8) + x.mean(), 0.0)
    arrays, options = {"in_values": values, "in_mask": MASK}, {"shift_mean": False}
    golden_of("verl.utils.torch_functional.masked_whiten", arrays, {"out_whitened": expected}, options)


def test_an_input_that_no_adapter_reads_is_refused():
    (function, options, arrays), _ = CASES["tokens of the batch"]
    read = Read({**arrays, "in_teacher_log_prob": LP})
    ADAPTERS[function](read, Read(options))
    assert read.unread() == ["in_teacher_log_prob"]
    with pytest.raises(KeyError):
        ADAPTERS["openrlhf.models.loss.PolicyLoss.forward"](Read(SAMPLED), Read(openrlhf("other", 0.8, 1.2)[1]))
