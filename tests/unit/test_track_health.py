"""Every detector fires in a run that was made to fail, and none does in a healthy one."""

import math
import random

from verl.track.health import MESSAGES, TABLE, HealthLimits, check_health, scan

CONFIG = HealthLimits()


def healthy(seed, steps=120):
    """A run as it should be: reward rises, entropy falls slowly, everything is noisy."""
    rng = random.Random(seed)
    for i in range(steps):
        t = i / steps
        yield {
            "critic/score/mean": 0.3 + 0.4 * t + rng.gauss(0, 0.04),
            "reward/component/acc": 0.3 + 0.4 * t + rng.gauss(0, 0.04),
            "reward/component/format": min(1.0, 0.8 + 0.2 * t + rng.gauss(0, 0.02)),
            "actor/entropy": 0.6 * math.exp(-2 * t) * math.exp(rng.gauss(0, 0.05)),
            "actor/grad_norm": 0.5 * math.exp(rng.gauss(0, 0.35)),
            "actor/kl_loss": 0.1 * t + abs(rng.gauss(0, 0.005)),
            "actor/pg_clipfrac": 0.02 * math.exp(rng.gauss(0, 0.4)),
            "actor/skipped_updates": 0.0,
            "response_length/mean": (150 + 200 * t) * math.exp(rng.gauss(0, 0.08)),
            "response_length/clip_ratio": 0.05,
            "mismatch/k3": 1e-3 * math.exp(rng.gauss(0, 0.5)),
            "mismatch/max_abs_dlogp": 0.5 * math.exp(rng.gauss(0, 0.5)),
            "mismatch/ess": 0.97 + rng.gauss(0, 0.01),
            "mismatch/ratio_p99": 1.08 + rng.gauss(0, 0.02),
            "groups/zero_variance_share": 0.3 + 0.4 * t,
            "reward/invalid_share": 0.01,
        }


def fired(history, config=CONFIG):
    return {alarm.name: alarm for alarm in check_health(history, config)}


def test_a_healthy_run_raises_no_alarm():
    raised = {seed: list(scan(list(healthy(seed)), CONFIG)) for seed in range(8)}
    assert not any(raised.values()), raised


def test_a_toy_run_that_learns_fast_raises_no_alarm():
    # the quick start: a tiny task is solved in 40 steps, entropy falls from 2 to 0.1 as it should
    history = [
        {
            "actor/entropy": 0.1 + 1.9 * math.exp(-i / 12),
            "critic/score/mean": 1 - math.exp(-i / 12),
            "mismatch/k3": 0.0,
            "mismatch/max_abs_dlogp": 1e-6 * (1 + i % 3),
        }
        for i in range(60)
    ]
    assert list(scan(history, CONFIG)) == []


def test_partial_metrics_are_fine():
    assert check_health([], CONFIG) == []
    assert check_health([{}], CONFIG) == []
    assert list(scan([{"train/loss": 1.0, "actor/entropy": math.nan}] * 30, CONFIG)) == []


SINGLE = [
    ("mismatch_warn", {"mismatch/k3": 0.07}, "0.07 nats per token, above 0.05"),
    ("mismatch_stop", {"mismatch/k3": 0.7}, "0.7 nats per token, above the stop limit 0.5"),
    ("mismatch_stop", {"mismatch/k3": math.nan}, "nan"),
    ("mismatch_stop", {"mismatch/k3": math.inf}, "inf"),
    ("max_abs_dlogp", {"mismatch/max_abs_dlogp": 12.0}, "12 nats"),
    ("max_abs_dlogp", {"mismatch/max_abs_dlogp": 9.0}, "9 nats between rollout and trainer; it was 0.5"),
    ("ess_drop", {"mismatch/ess": 0.3}, "30.0% of the tokens (limit 50%)"),
    ("ess_drop", {"mismatch/ess": 0.6}, "fell to 60.0% of the tokens from 97"),
    ("ratio_p99", {"mismatch/ratio_p99": 3.5}, "above 3.5"),
    ("entropy_floor", {"actor/entropy": 5e-4}, "0.0005 nats per token, below the floor 0.001"),
    ("entropy_explosion", {"actor/entropy": 3.0}, "3 nats per token"),
    ("length_explosion", {"response_length/mean": 900.0}, "900 tokens long"),
    ("length_collapse", {"response_length/mean": 20.0}, "shrank to 20 tokens"),
    ("truncated_share", {"response_length/clip_ratio": 0.6}, "60% of the responses"),
    ("zero_variance_share", {"groups/zero_variance_share": 0.95}, "95% of the groups"),
    ("invalid_share", {"reward/invalid_share": 0.12}, "12.0% of the trajectories"),
    ("gradient_not_finite", {"actor/grad_norm": math.inf}, "(norm inf): 1 update(s) skipped"),
    ("gradient_not_finite", {"actor/skipped_updates": 2.0}, "2 update(s) skipped"),
    ("gradient_spike", {"actor/grad_norm": 40.0}, "gradient norm is 40"),
    ("clip_fraction", {"actor/pg_clipfrac": 0.7}, "70% of the tokens are clipped"),
    ("kl_explosion", {"actor/kl_loss": 2.5}, "KL to the reference is 2.5"),
    ("teacher_coverage", {"actor/teacher_coverage": 0.8}, "hold 80% of its probability"),
    ("teacher_silent", {"teacher/untaught": 1.0}, "no attempt of this step came with feedback"),
    ("teacher_invalid", {"teacher/invalid": 0.1}, "the teacher gave no finite number for 10.0% of its samples"),
    (
        "teacher_invalid",
        {"teacher/invalid": 0.04, "teacher/invalid/a": 0.01, "teacher/invalid/b": 0.4},
        "the teacher b gave no finite number for 40.0% of its samples",
    ),
    ("unread_tokens", {"rollout/unread_share": 0.002}, "0.2% of the sampled tokens are no text"),
    ("tool_errors", {"agent/tool_error_share": 0.6}, "60% of the calls of tools fail"),
    ("malformed_calls", {"agent/malformed_share": 0.4}, "40% of the calls cannot be read"),
    ("no_progress", {"agent/no_progress_share": 0.5}, "50% of the trajectories end in the same calls"),
    ("turn_limit", {"agent/turn_limit_share": 1.0}, "100% of the trajectories end at agent.max_turns"),
    ("slow_rewards", {"reward/workers_needed": 6.0}, "reward.num_workers=6 would do"),
    ("noise_stop", {"noise/k3": 0.7}, "k3 KL is 0.7 nats per token, above the stop limit 0.5"),
    ("noise_ess", {"noise/ess": 0.3}, "30.0% of the tokens (limit 50%); lower"),
]


def test_one_bad_step_after_a_healthy_past():
    wrong = []
    for name, change, words in SINGLE:
        history = list(healthy(0, 60))
        history[-1] |= change
        level = "stop" if name in ("mismatch_stop", "noise_stop") else "warn"
        alarms = check_health(history, CONFIG)
        if [(a.name, a.level) for a in alarms] != [(name, level)] or words not in alarms[0].message:
            wrong.append((name, change, words, alarms))
    assert not wrong, wrong


def test_a_teacher_that_likes_wrong_answers_is_told_of():
    history = [{"teacher/likes_right": -0.2} for _ in range(5)]
    assert "by 0.2 nats per token over 5 steps" in fired(history, CONFIG)["teacher_disagrees"].message
    assert fired([*history, {"teacher/likes_right": 0.1}], CONFIG) == fired(history[:4], CONFIG) == {}


def test_limits_come_from_the_config():
    history = [
        {
            "mismatch/k3": 0.2,
            "actor/entropy": 0.05,
            "response_length/clip_ratio": 0.3,
            "groups/zero_variance_share": 0.5,
        }
    ]
    strict = HealthLimits(mismatch_stop=0.1, entropy_floor=0.1, truncated_warn=0.2, zero_variance_warn=0.4)
    assert set(fired(history, strict)) == {"mismatch_stop", "entropy_floor", "truncated_share", "zero_variance_share"}
    assert set(fired(history, HealthLimits(mismatch_warn=0.3))) == set()


def test_the_mismatch_guard_trips_within_one_step():
    history = [{"mismatch/k3": 1e-5} for _ in range(10)]
    assert fired(history) == {}
    assert fired([*history, {"mismatch/k3": 2.0}])["mismatch_stop"].level == "stop"


def test_entropy_collapse_fires_before_the_reward_halves():
    history, names = list(healthy(1, 40)), []
    for i in range(20):
        reward = 0.5 * (1 - i / 20)
        history.append(
            {"actor/entropy": history[39]["actor/entropy"] * math.exp(-0.4 * i), "critic/score/mean": reward}
        )
        if "entropy_collapse" in fired(history):
            names.append((i, reward, fired(history)["entropy_collapse"].message))
    assert names and names[0][1] > 0.25, names[:1]
    assert "nats per token in 9 steps; at this rate it is below 0.001 in" in names[0][2]


def test_length_drift_without_gain_and_with_gain():
    lengths = [200 * 1.04**i for i in range(20)]
    flat = [{"response_length/mean": v, "critic/score/mean": 0.4} for v in lengths]
    gain = [{"response_length/mean": v, "critic/score/mean": 0.4 + 0.01 * i} for i, v in enumerate(lengths)]
    assert "while the score went from 0.4 to 0.4" in fired(flat)["length_drift"].message
    assert fired(gain) == {}


def test_a_hacked_component():
    def history(accuracy_change):
        return [
            {
                "critic/score/mean": 0.4 + 0.02 * i,
                "reward/component/acc": 0.5 + accuracy_change * i,
                "reward/component/format": 0.2 + 0.04 * i,
            }
            for i in range(20)
        ]

    alarm = fired(history(-0.015))["component_dominance"]
    assert "on format (0.24 -> 0.92) while acc fell (0.485 -> 0.23)" in alarm.message
    assert fired(history(0.01)) == {}


def test_what_is_a_change_needs_a_past():
    usual, changes = list(healthy(0, 60)), SINGLE[5:6] + SINGLE[7:8] + SINGLE[10:13] + SINGLE[18:19] + SINGLE[20:21]
    for past, alarms in ((usual[-5:-1], 0), (usual[-6:-1], 1)):
        raised = {name: check_health([*past, usual[-1] | change], CONFIG) for name, change, _ in changes}
        assert len(raised) == 7 and all(len(found) == alarms for found in raised.values()), raised


def test_each_row_of_the_table_has_fired_in_this_file_and_each_message_is_used():
    covered = {name for name, _, _ in SINGLE} | {"entropy_collapse", "length_drift", "component_dominance"}
    covered |= {"teacher_disagrees"}
    assert {row.name for row in TABLE} == covered
    assert {row.message or row.name for row in TABLE} == set(MESSAGES)


def test_scan_tells_the_step():
    history = list(healthy(2, 30))
    history[17] |= {"actor/grad_norm": math.nan}
    assert [(i, alarm.name) for i, alarm in scan(history, CONFIG)] == [(17, "gradient_not_finite")]
