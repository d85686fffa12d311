"""Reduction of metrics and the time ledger."""

import math
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.corrections import mismatch_metrics
from verl.track import metrics
from verl.track.metrics import PHASES, TimeLedger, reduce
from verl.track.verl_names import SAME, verl_names
from verl.types import Metric, merge_metrics

KINDS = ("mean", "sum", "max", "min")


class Clock:
    """A clock that moves when the test sets it, and a little at every reading."""

    def __init__(self, reading_s=0.0):
        self.now, self.reading_s = 100.0, reading_s

    def __call__(self):
        self.now += self.reading_s
        return self.now

    def sleep(self, seconds):
        self.now += seconds


parts = st.lists(
    st.fixed_dictionaries(
        {
            f"m/{kind}": st.builds(
                Metric,
                st.integers(-1000, 1000).map(float),
                st.integers(0, 64).map(float),
                st.just("token"),
                st.just(kind),
            )
            for kind in KINDS
        }
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(parts, st.randoms(use_true_random=False), st.integers(1, 5))
def test_reduce_does_not_depend_on_how_the_step_was_split(pieces, random, ranks):
    whole = reduce(merge_metrics(pieces))
    shuffled = random.sample(pieces, len(pieces))
    shares = [merge_metrics(shuffled[r::ranks]) for r in range(ranks)]
    again = reduce(merge_metrics(share for share in shares if share))
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        assert again[name] == value or (math.isnan(value) and math.isnan(again[name]))


def test_a_mean_is_weighted_by_its_unit_and_not_by_rows():
    # one trajectory of 3 turns with reward 0, one of 1 turn with reward 1: a mean over trajectories is 0.5, not 0.25
    step = merge_metrics([{"reward": Metric(0.0, 1, "sequence")}, {"reward": Metric(1.0, 1, "sequence")}])
    assert reduce(step) == {"reward": 0.5}
    tokens = merge_metrics([{"e": Metric(6.0, 3, "token")}, {"e": Metric(1.0, 1, "token")}])
    assert reduce(tokens) == {"e": 7 / 4}
    assert reduce({"lr": Metric(1e-6, 1, "update", "last"), "n": Metric(5, 2, "token", "sum")}) == {
        "lr": 1e-6,
        "n": 5.0,
    }
    assert math.isnan(reduce({"e": Metric(0.0, 0, "token")})["e"])


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.tuples(st.sampled_from(PHASES[:-1]), st.floats(0, 50), st.just(())),
        lambda inner: st.tuples(st.sampled_from(PHASES[:-1]), st.floats(0, 50), st.lists(inner, max_size=3)),
        max_leaves=10,
    ),
    st.floats(0, 0.01),
)
def test_phases_sum_to_the_wall_time(tree, reading_s):
    clock = Clock(reading_s)
    ledger = TimeLedger(clock)

    def visit(node):
        name, seconds, inner = node
        with ledger.phase(name):
            clock.sleep(seconds)
            for child in inner:
                visit(child)
        clock.sleep(0.25)

    visit(tree)
    ledger.stop()
    values = ledger.metrics()
    total = sum(v for name, v in values.items() if name.startswith("timing_s/"))
    assert total == pytest.approx(values["perf/time_per_step"], rel=1e-9)
    assert values["perf/time_per_step"] == pytest.approx(ledger.wall_s)
    assert sum(v for name, v in values.items() if name.startswith("timing_share/")) == pytest.approx(1.0)
    assert values["timing_s/other"] >= 0.25


def test_nested_phases_are_booked_once_and_in_order():
    clock = Clock()
    ledger = TimeLedger(clock)
    clock.sleep(1)
    with ledger.phase("update"):
        clock.sleep(4)
    with ledger.phase("advantages"):
        clock.sleep(2)
        with ledger.phase("reference"):
            clock.sleep(3)
            assert ledger.seconds()["reference"] == 3
        with ledger.phase("custom"):
            clock.sleep(0.5)
        clock.sleep(1)
    ledger.stop()
    clock.sleep(99)
    assert ledger.seconds() == {"reference": 3, "advantages": 3, "update": 4, "custom": 0.5, "other": 1}
    assert list(ledger.seconds()) == ["reference", "advantages", "update", "custom", "other"]
    assert ledger.wall_s == 11.5


def test_a_phase_that_raises_is_booked_too():
    clock = Clock()
    ledger = TimeLedger(clock)
    with pytest.raises(RuntimeError), ledger.phase("rollout"), ledger.phase("reward_model"):
        clock.sleep(2)
        raise RuntimeError("boom")
    clock.sleep(1)
    ledger.stop()
    assert ledger.seconds() == {"rollout": 0, "reward_model": 2, "other": 1}


def test_misuse_is_ours():
    ledger = TimeLedger(Clock())
    first, second = ledger.phase("rollout"), ledger.phase("update")
    first.__enter__()
    second.__enter__()
    with pytest.raises(AssertionError, match="phase 'rollout' closed while"):
        first.__exit__(None, None, None)
    with pytest.raises(AssertionError, match="one lower-case word"), ledger.phase("Roll out"):
        pass
    ledger.stop()
    with pytest.raises(AssertionError, match="after the step's ledger was stopped"), ledger.phase("log"):
        pass


def test_real_clock_within_one_percent():
    ledger = TimeLedger()
    for _ in range(20):
        with ledger.phase("rollout"), ledger.phase("reward_model"):
            time.sleep(0.002)
    ledger.stop()
    assert ledger.wall_s > 0.04
    assert sum(ledger.seconds().values()) == pytest.approx(ledger.wall_s, rel=0.01)


def test_every_phase_of_the_driver_has_its_place_and_color():
    room = Path(metrics.__file__).parents[1]
    used = {n for p in (room / "driver").glob("*.py") for n in re.findall(r'(?:clock|phase)\("(\w+)"\)', p.read_text())}
    assert used and used <= set(PHASES), used - set(PHASES)
    colors = re.findall(r"--phase-(\w+):", (room / "report" / "report.css").read_text())
    assert {name: colors.count(name) for name in PHASES} == dict.fromkeys(PHASES, 3), (
        "light, dark, as the system has it"
    )


def test_verls_names_are_the_same_numbers():
    ours = {"timing_s/rollout": 3.0, "timing_s/update": 2.0, "perf/time_per_step": 6.0, "perf/total_num_tokens": 400.0}
    assert verl_names(ours, answer_tokens=100) == {
        "timing_s/gen": 3.0,
        "timing_s/reward": 0.0,
        "timing_s/update_actor": 2.0,
        "timing_s/step": 6.0,
        "timing_per_token_ms/gen": 30.0,
        "timing_per_token_ms/update_actor": 5.0,
        **dict.fromkeys((f"global_seqlen/{n}" for n in ("min", "max", "mean", "balanced_min", "balanced_max")), 400.0),
        "global_seqlen/minmax_diff": 0.0,
    }
    lengths = {f"response_length/{how}": float(i) for i, how in enumerate(("mean", "max", "min", "clip_ratio"))}
    more = verl_names({**lengths, "mismatch/k1": 0.25, "mismatch/k3": 0.5}, answer_tokens=0)
    assert more == {
        **{name.replace("length", "length_non_aborted"): value for name, value in lengths.items()},
        **{"response/aborted_ratio": 0.0, "rollout_corr/kl": 0.25, "rollout_corr/k3_kl": 0.5},
    }
    said = verl_names({"mismatch/k1": 0.25, "rollout_corr/kl": 0.3}, answer_tokens=0)
    assert "rollout_corr/kl" not in said, "a correction wrote its own"
    assert set(SAME.values()) <= {f"timing_s/{phase}" for phase in PHASES} | set(ours) | set(lengths) | set(
        mismatch_metrics(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    )
