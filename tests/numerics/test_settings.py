"""Every setting of every algorithm reaches what is computed: another value is another advantage, weight, loss or
gradient."""

import random
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
import torch
from each import each
from small_columns import F64

from verl.algorithms import losses
from verl.algorithms.corrections import correct
from verl.algorithms.filters import SampleFilter
from verl.algorithms.presets import PRESETS, SCHEDULED, settled
from verl.algorithms.resolve import resolve
from verl.algorithms.weights import term_weights
from verl.batch import Columns
from verl.driver.step import explained_variance, rewards_and_advantages

_MASK = {"correction": "mask", "correction_low": 0.8, "correction_high": 1.3}
BASE = {  # settings without which another one does nothing
    "horizon_tokens": {"aggregation": "seq-mean-token-sum-norm", "horizon_tokens": 12},
    "lam_critic": {"lam_critic": 0.9},
    "kl_loss_form": {"kl_loss_coef": 0.1},
    "kl_loss_ratio_corrected": {"kl_loss_coef": 0.1},
    **{key: {"divergence_coef": 0.1} for key in ("divergence_beta", "divergence_clamp", "divergence_floor")},
    "kl_reward_form": {"kl_reward_coef": 0.1},
    "reward_weights": {"reward_weights": [1.0, 1.0]},
    **{f"correction_{key}": _MASK for key in ("level", "low", "high", "batch_normalize", "denominator")},
    "correction": {"correction": "truncate", "correction_low": 0.8, "correction_high": 1.3},
    **dict.fromkeys(("cov_low", "cov_high"), MappingProxyType({"cov_ratio": 0.5, "cov_low": 0.1})),
    **dict.fromkeys(("scale_rewards", "epsilon"), MappingProxyType({"normalize_by_std": True})),
    "whiten_epsilon": {"normalize_advantages": True},
    "lam": {"length_adaptive_alpha": None},
    "agree_only": {"reward_coef": 0.5},
    "coef_schedule": {"entropy_coef": 0.3},
}
_KL = ("kl_reward_coef", "kl_reward_form")
_BESIDE = ("divergence_coef", "divergence_beta", "divergence_clamp", "divergence_floor")
_BOUNDS = ("teacher_clamp", "teacher_floor")
_MASK_OF_POLICY = ("top_entropy_quantile",)
REFUSED = {
    "gdpo": _KL,
    "vapo": ("lam",),
    "intellect_ipo": (
        "correction",
        *(f"correction_{key}" for key in ("level", "low", "high", "batch_normalize", "denominator")),
    ),
    "gkd": (*_KL, *_BESIDE, *_MASK_OF_POLICY, "beta", *_BOUNDS),
    "gkd_topk": (*_KL, *_BESIDE, *_MASK_OF_POLICY),
}
"""Settings that cannot reach what is computed; giving one is refused. (gkd's beta is the engine's: test_teacher.py.)"""
NO_LOSERS = {"pass_at_k": ("off_policy_delta", "clip_low", "clip_dual")}
"""Settings of negative advantages, where there are none."""
OTHER = {
    "normalize_by_std": lambda now: not now,
    "leave_one_out": lambda now: not now,
    "scale_rewards": lambda now: "none",
    "aggregation": lambda now: "token-sum" if now != "token-sum" else "token-mean",
    "horizon_tokens": lambda now: 24,
    "off_policy_delta": lambda now: 0.01,
    "entropy_coef": lambda now: now + 0.5,
    "positive_nll_coef": lambda now: now + 0.5,
    "clip_low": lambda now: now / 50,
    "clip_high": lambda now: now / 50,
    "clip_dual": lambda now: 1.01,
    "ratio_max": lambda now: 1.1,
    "ratio_min": lambda now: 0.9,
    "kl_loss_coef": lambda now: (now or 0) + 0.1,
    "divergence_coef": lambda now: (now or 0) + 0.1,
    "divergence_beta": lambda now: now / 2,
    **dict.fromkeys(("divergence_clamp", "teacher_clamp"), lambda now: 0.05),
    **dict.fromkeys(("divergence_floor", "teacher_floor"), lambda now: -0.5),
    "kl_loss_form": lambda now: "k1" if now != "k1" else "k3",
    "kl_loss_ratio_corrected": lambda now: not now,
    "kl_reward_coef": lambda now: (now or 0) + 0.1,
    "kl_reward_form": lambda now: "k2" if now != "k2" else "k3",
    "correction": lambda now: "clamp",
    "correction_level": lambda now: "sequence" if now != "sequence" else "token",
    "correction_low": lambda now: 0.9,
    "correction_high": lambda now: 1.1,
    "correction_batch_normalize": lambda now: not now,
    "correction_reject": lambda now: ["token_k1:1.05"],
    "correction_denominator": lambda now: "before_rejection" if now != "before_rejection" else "after_rejection",
    "tau_positive": lambda now: now * 2,
    "tau_negative": lambda now: now * 2,
    "cov_ratio": lambda now: 0.5,
    "cov_coef": lambda now: now * 3,
    "cov_low": lambda now: 0.5,
    "cov_high": lambda now: 0.4,
    "reward_components": lambda now: ["b", "c"],
    "reward_weights": lambda now: [0.2, 5.0],
    "gamma": lambda now: 0.7,
    "lam": lambda now: now * 0.6,
    "lam_critic": lambda now: 0.3,
    "length_adaptive_alpha": lambda now: 0.4,
    "value_clip": lambda now: now / 5,
    "dro_beta": lambda now: now * 5,
    "epsilon": lambda now: 0.5,
    "reward_clip": lambda now: [-0.5, 0.5],
    "normalize_advantages": lambda now: not now,
    "teacher_coef": lambda now: now / 2,
    "reward_coef": lambda now: now + 0.5,
    "beta": lambda now: now / 2,
    "observation_coef": lambda now: now + 0.5,
    "agree_only": lambda now: not now,
    "singleton": lambda now: "raw",
    "shift_mean": lambda now: not now,
    "whiten_epsilon": lambda now: 0.5,
    "alpha_counts": lambda now: "nonzero",
    "f_norm": lambda now: 2.0,
    "prefix_gain": lambda now: now + 0.5,
    "top_entropy_quantile": lambda now: 0.4,
    **dict.fromkeys(("k_positive", "k_negative", "lambda_positive", "lambda_negative"), lambda now: now * 2),
    "drift_coef": lambda now: now + 0.5,
    "turn_discount": lambda now: now / 2,
    "step_coef": lambda now: now + 0.5,
    "coef_schedule": lambda now: {"entropy_coef": [[1, 0.5]]},
}
NOT_HERE = {  # their reader, and the place of its test
    **dict.fromkeys(
        ("filter_groups", "filter_metric", "max_draws_per_group", "on_exhausted"), "unit/test_rollouts_flow"
    ),
    **dict.fromkeys(("kl_reward_target", "kl_reward_horizon"), "the driver: test_the_adaptive_coefficient below"),
    **dict.fromkeys(("selection", "weight_pow"), "test_closed_forms, e2e/test_presets"),
    **dict.fromkeys(("critic_warmup_steps", "critic_warmup_until"), "the driver: e2e/test_presets"),
    **dict.fromkeys(("mask_truncated", "stop_properly_coef"), "unit/test_step_settings, unit/test_reward_shaping"),
    **dict.fromkeys(("overlong_tokens", "overlong_cap"), "unit/test_reward_shaping, unit/test_config_validate"),
    "bypass": "below, and unit/test_step",
    "curriculum": "unit/test_data_cursor, e2e/test_resume",
    **dict.fromkeys(("on_policy_share", "stored_key"), "numerics/test_stored_answers, e2e/test_distillation"),
}


AT = ("logprobs_at", "teacher_topk")


def step_columns(seed: int = 0) -> Columns:
    """Four groups of answers of one to six tokens, and one answer that is alone; ratios well away from 1."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (16,), generator=rng)
    of = torch.arange(16).repeat_interleave(lengths)
    n = len(of)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=rng, dtype=F64)

    lp = -1.5 + normal(0.7)
    token = {"logprobs": lp, "old_logprobs": lp + normal(0.5), "entropy": normal(1).abs(), "values": normal(1)}
    token |= {"rollout_logprobs": token["old_logprobs"] + normal(0.4), "ref_logprobs": lp + normal(0.5)}
    token |= {"old_values": token["values"] + normal(0.6), "sum_pi_squared": normal(1).abs().clamp(max=1)}
    score = torch.randint(-2, 3, (16,), generator=rng).double()
    group = torch.cat([torch.arange(15) // 4, torch.tensor([4])])
    sequence = {"score": score, "group": group, "valid": torch.ones(16, dtype=torch.bool)}
    sequence |= {"positive": score > 0, "baseline": torch.arange(4, dtype=F64).repeat_interleave(4)}
    for i, name in enumerate("abc"):
        sequence[f"component/{name}"] = (score * (i + 1)) % 3 + 0.1 * torch.arange(16)
    place = torch.cat([torch.arange(k) for k in lengths.tolist()])
    token |= {"side/turn": place // 2, "side/turn_reward": (place % 2) * normal(1), "side/turn_state": place // 2 % 2}
    token |= {"teacher_logprobs": lp + normal(0.5), "divergence": normal(1).abs()}
    token |= {"teacher_agreement": normal(1), "teacher_entropy": normal(1)}
    token |= {name: torch.randn(n, 5, generator=rng, dtype=F64).log_softmax(-1) for name in AT}
    return Columns(
        token=token, sequence=sequence, sequence_of=of, num_sequences=16, mask=torch.ones(n, dtype=torch.bool)
    )


def computed(name: str, settings: dict, columns: Columns, step: int = 1) -> dict[str, torch.Tensor]:
    """Return the results of a step with these columns: the weighted loss of every term, and its gradient."""
    algorithm, _ = resolve(name, settings).at(step)
    kl = algorithm.kl_reward
    if algorithm.correction is not None:
        found = correct(columns, algorithm.correction)
        columns = columns.with_token({k: found[k] for k in ("is_weights", "keep")})
    made = rewards_and_advantages(columns, advantage=algorithm.advantage, kl=kl, kl_coef=kl.coef if kl else 0.0)
    columns = columns.with_token({k: v for k, v in made.items() if isinstance(v, torch.Tensor)})
    out: dict[str, torch.Tensor] = {}
    for terms in (algorithm.terms, algorithm.value_terms):
        weights = term_weights(columns, terms)
        leaves = {
            k: columns[k].clone().requires_grad_()
            for k in ("logprobs", "entropy", "values", "divergence", "logprobs_at")
        }
        live = columns.with_token(leaves)
        for term in terms:
            loss = (weights[f"w/{term.name}"] * term.fn(live).values).sum()
            out[term.name] = loss.detach()
            for leaf, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)):
                if grad is not None:
                    out[f"{term.name}/{leaf}"] = grad
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=1e-9, atol=1e-12) for k in a)


@each("name", PRESETS, quick=10)
def test_every_setting_changes_what_is_computed(name):
    columns, ignored, unknown = step_columns(), [], []
    made: dict[str, dict[str, torch.Tensor]] = {}  # of the settings to which another value is compared
    if name == "max_rl":  # of scores that are not below 0
        columns = replace(columns, sequence={**columns.sequence, "score": columns.sequence["score"].abs()})
    required = {"gdpo": {"reward_components": ["a", "b"]}, "drgrpo": {"horizon_tokens": 12}}
    required = (required | {name: {"reward_coef": 0.5} for name in ("opd", "iw_opd")}).get(name, {})
    for spec in PRESETS[name].parts().values():
        for key in spec.knobs():
            if key in NOT_HERE or key in (*NO_LOSERS.get(name, ()), *REFUSED.get(name, ())):
                continue
            if key not in OTHER:
                unknown.append(key)
                continue
            base = {**required, **BASE.get(key, {})}
            now = base.get(key, spec.settings()[key])
            before = made[str(base)] = made.get(str(base)) or computed(name, base, columns)
            after = computed(name, {**base, key: OTHER[key](now)}, columns)
            if same(before, after):
                ignored.append(f"{key}: {now} -> {OTHER[key](now)}")
    assert not unknown, f"give another value of {unknown} in OTHER"
    assert not ignored, f"{name} computes the same whatever these are: {ignored}"


def test_a_setting_that_reaches_nothing_is_refused():
    for name, given in (
        ("gdpo", {"kl_reward_coef": 0.1, "reward_components": ["a", "b"]}),
        ("gkd", {"kl_reward_coef": 0.1}),
        ("opd", {"kl_reward_coef": 0.1, "reward_coef": 0.0}),
        ("vapo", {"lam": 0.9}),
        ("drgrpo", {"scale_rewards": "batch", "horizon_tokens": 12}),
        ("drgrpo", {"epsilon": 1e-4, "horizon_tokens": 12}),
        ("rloo", {"whiten_epsilon": 1e-4}),
    ):
        (said,) = settled(name, given).idle(given)
        assert next(iter(given)) in said and ("does nothing" in said or "does not reach" in said), said
        rest = dict(list(given.items())[1:])
        assert not list(settled(name, rest).idle(rest))


LINES = [[2, 1], [4, 0.5], [8, 2.5]]
FACTORS = {1: 1.0, 2: 1.0, 3: 0.75, 4: 0.5, 5: 1.0, 6: 1.5, 8: 2.5, 50: 2.5}


@each("key", SCHEDULED)
def test_a_scheduled_coefficient_is_at_each_step_what_it_could_have_been_set_to(key):
    """Straight lines between the points, by hand; all that a step computes is what it is with that coefficient."""
    columns, name = step_columns(), "opd" if key in ("teacher_coef", "reward_coef") else "grpo"
    given = {"reward_coef": 0.5} if name == "opd" else {}
    for step, factor in FACTORS.items():
        scheduled = {**given, key: 0.4, "coef_schedule": {key: LINES}}
        found = computed(name, scheduled, columns, step)
        assert resolve(name, scheduled).at(step)[1] == {key: pytest.approx(0.4 * factor)}
        assert same(found, computed(name, {**given, key: 0.4 * factor}, columns)), step
        assert same(found, computed(name, {**given, key: 0.4}, columns)) == (factor == 1), step


def test_coefficients_are_scheduled_apart():
    given = {"teacher_coef": 2.0, "reward_coef": 0.5, "entropy_coef": 0.1}
    schedule = {"teacher_coef": [[1, 1], [5, 0]], "entropy_coef": [[1, 0.0], [2, 1.0]]}
    algorithm = resolve("opd", {**given, "coef_schedule": schedule})
    assert [algorithm.at(step)[1] for step in (1, 2, 3, 5, 6)] == [
        {"teacher_coef": 2.0, "entropy_coef": 0.0},
        {"teacher_coef": 1.5, "entropy_coef": 0.1},
        {"teacher_coef": 1.0, "entropy_coef": 0.1},
        {"teacher_coef": 0.0, "entropy_coef": 0.1},
        {"teacher_coef": 0.0, "entropy_coef": 0.1},
    ]
    left = computed("opd", {**given, "coef_schedule": schedule}, step_columns(), 6)
    alone = computed("opd", {**given, "teacher_coef": 1e-12}, step_columns())
    assert same(left, alone), "nothing of the teacher is left, all of the reward"


@each(
    "schedule, said",
    [
        (
            {"kl_loss_coef": [[1, 1]]},
            "kl_loss_coef is no coefficient of opd that is above 0; of such there are: teacher",
        ),
        ({"clip_high": [[1, 1]]}, "clip_high is no coefficient of opd"),
        ({"teacher_coef": [[0, 1]]}, "write [[step, factor], ...], steps from 1 that grow"),
        ({"teacher_coef": [[2, 1], [2, 0]]}, "steps from 1 that grow"),
        ({"teacher_coef": [[1, -1]]}, "factors >= 0"),
        ({"teacher_coef": [[1, float("nan")]]}, "factors >= 0"),
        ({"teacher_coef": [[1.5, 1]]}, "steps from 1"),
        ({"teacher_coef": []}, "coef_schedule.teacher_coef=[]: write"),
        ({"teacher_coef": 0.5}, "coef_schedule.teacher_coef=0.5: write"),
        (0.5, "algorithm.options.coef_schedule=0.5: must be a mapping"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule, said):
    with pytest.raises(ValueError) as refused:
        settled("opd", {"coef_schedule": schedule})
    assert said in str(refused.value)


def test_bypass_weighs_a_token_once():
    """REINFORCE in bypass mode: -A min(pi / pi_rollout, high) log pi, divided as without a correction."""
    columns = step_columns()
    found = computed("reinforce", {"bypass": True, "correction": "truncate", "correction_high": 1.2}, columns)
    a = computed_advantages("reinforce", columns)
    w = (columns["logprobs"] - columns["rollout_logprobs"]).exp().clamp(max=1.2)
    torch.testing.assert_close(found["pg_loss/logprobs"], -a * w / columns.num_sequences)


def computed_advantages(name: str, columns: Columns) -> torch.Tensor:
    return rewards_and_advantages(columns, advantage=resolve(name).advantage, kl=None, kl_coef=0.0)["advantages"]


def test_explained_variance_by_hand():
    c = step_columns()
    noisy = c.with_token({"returns": c["values"], "old_values": c["values"] * 0.5})
    left = float((0.5 * c["values"]).var() / c["values"].var())
    for columns, expected in ((noisy, 1 - left), (noisy.with_token({"old_values": c["values"]}), 1.0)):
        assert explained_variance(columns)["critic/vf_explained_var"].value == pytest.approx(expected)
    flat = c.with_token({"returns": torch.ones_like(c["values"])})
    assert explained_variance(flat)["critic/vf_explained_var"].value == 0.0, "returns that do not vary"
    two = Columns(
        token={"returns": torch.tensor([1.0, 3.0]), "old_values": torch.tensor([1.0, 2.0])},
        sequence={},
        sequence_of=torch.tensor([0, 1]),
        num_sequences=2,
        mask=torch.ones(2, dtype=torch.bool),
    )
    assert explained_variance(two)["critic/vf_explained_var"].value == pytest.approx(1 - 0.5 / 2)


def test_the_filters_settings_change_who_is_drawn():
    scores = [random.Random(i).random() * 3 for i in range(8)]
    drawn = {p: SampleFilter(selection="pow", weight_pow=p).batch_weights(scores) for p in (1.0, 2.0)}
    assert drawn[1.0] != drawn[2.0]


def test_gmpos_sides_are_told_apart():
    """Each side by hand, with unlike bounds: log-ratios above and below, of both signs of the advantage."""
    bound = partial(losses.gmpo, clip_low=0.1, clip_high=0.3)
    for d, a, expected in ((0.5, 1.0, 0.3), (-0.5, 1.0, -0.5), (0.5, -1.0, 0.5), (-0.5, -1.0, -0.1)):
        one = torch.zeros(1, dtype=torch.int64)
        token = {"logprobs": torch.tensor([d], dtype=F64), "old_logprobs": torch.zeros(1, dtype=F64)}
        token["advantages"] = torch.tensor([a], dtype=F64)
        c = Columns(token=token, sequence={}, sequence_of=one, num_sequences=1, mask=one == 0)
        torch.testing.assert_close(bound(c).values, -a * torch.tensor([expected], dtype=F64).exp())
