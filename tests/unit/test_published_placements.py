"""The planner's placements beside those of HybridFlow (bench/mapping.py)."""

from __future__ import annotations

import pytest
import yaml

from bench.mapping import (
    PUBLISHED,
    compared,
    counted,
    engine_seconds,
    engines_less,
    network_gbs,
    nodes_of,
    resharding_savings,
    roles_of,
    scaling_of,
    together_faster,
)
from verl.planner.latency import StepWork, Stored
from verl.planner.mapping import Rules, stages_of, times_of


def test_published_placements() -> None:
    """Smaller clusters: all models together. Larger ones: the paper's sets are the same or a tie in three quarters of
    the rows, and within a tenth in all but one."""
    page = yaml.safe_load(PUBLISHED.read_text())
    got = {tuple(row): compared(page, row) for row in page["rows"]}
    assert all(one.same for (_, _, devices, _), one in got.items() if devices <= 32)
    same, ties, close = counted([*got.values()])
    assert same >= 5 and ties >= 10 and close >= 12 and len(got) == 13
    assert [row for row, one in got.items() if one.verdict == "different"] == [("13B", "13B", 128, "apart")]


def test_all_apart_is_faster_only_where_four_times_the_devices_are_not_twice_as_fast() -> None:
    """The row that differs: the paper's actor has 64 devices as in halves, and each other model a half or less of the
    devices that it has there. The reference, on 16 devices and alone, then sets the pace of its stage: halves compute
    two models there on 64."""
    page = yaml.safe_load(PUBLISHED.read_text())
    at = nodes_of(page, 128)
    roles = roles_of(page, "13B", "13B")
    times = times_of(roles, (at,), Rules(work=StepWork(**page["work"]), stored=Stored(**page["stored"])))
    preparation, training = (stages_of(roles).index(stage) for stage in ("preparation", "training"))

    def seconds(stage: int, **devices: int) -> float:
        found = [times(tuple(names.split("_")), 0, n) for names, n in devices.items()]
        return max(one.seconds[stage] for one in found if one is not None)

    apart, halves = {"actor": 64, "critic": 32, "ref": 16, "reward": 16}, {"actor_ref": 64, "critic_reward": 64}
    assert seconds(training, **apart) > seconds(training, **halves)
    assert seconds(preparation, **apart) > 1.5 * seconds(preparation, **halves)
    assert seconds(preparation, ref=16) > 3.5 * seconds(preparation, ref=64)


def test_other_figures_of_the_paper() -> None:
    """What the host adds for a sequence is fitted to 7B; 13B, strong scaling and the gain on few devices follow."""
    page = yaml.safe_load(PUBLISHED.read_text())
    # 7/64 of 138 GB for each device of a node, in 78.2 / 0.891 - 78.2 s
    assert network_gbs(page) == pytest.approx(8 * 138 * 7 / 64 / (78.2 / 0.891 - 78.2))
    assert nodes_of(page, 64).network == pytest.approx(1e9 * network_gbs(page))
    for model, within in (("7B", 0.01), ("13B", 0.05)):
        assert engines_less(page, model) == pytest.approx(page["engines"]["less"][model][1], abs=within)
        assert max((s, n) for n, s in engine_seconds(page, model).items() if s is not None and n > 1)[1] == 8
    scaling = scaling_of(page)
    assert sum(scaling.values()) / len(scaling) == pytest.approx(page["scaling"]["efficiency"], abs=0.05)
    assert together_faster(page) == pytest.approx(page["together"]["faster"], abs=0.15)


def test_parts_alone_save_what_the_paper_measured() -> None:
    """By hand: 6/16, 4/32 and nothing of the model in the place of 7/8; an engine of one device gathers it whole."""
    page = yaml.safe_load(PUBLISHED.read_text())
    savings, of = resharding_savings(page), page["resharding"]
    assert [*savings.values()] == pytest.approx([0, 1 - 6 / 14, 1 - 1 / 7, 1])
    assert sum(savings.values()) / len(savings) == pytest.approx(of["saving"], abs=of["within"])
