"""The simulator against runs whose times follow by hand, and against a published table."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from operator import le

import numpy as np
import pytest
import yaml
from handmade_model import write_model, write_rows

from bench import areal
from bench.planner import FITTED, PUBLISHED, predicted
from verl.cli import main
from verl.driver.scheduler import Scheduler
from verl.errors import Refused
from verl.planner.simulate import Decoding, Simulated, SimulatedRun, Workload, lengths_like, lognormal, simulate
from verl.planner.what_if import measured_by
from verl.track.metrics import MetricsLog
from verl.track.samples import SampleRow, write_samples

BASE_S, SEQUENCE_S = 0.01, 0.001


def work(**given: object) -> Workload:
    known = {
        "replicas": 1,
        "sequences": 64,
        "samples_per_prompt": 4,
        "lengths": lognormal(100, 0.0, 1000),
        "decoding": Decoding(base_s=BASE_S, sequence_s=SEQUENCE_S),
        "update_s": 3.0,
    }
    return Workload(**{**known, **given})  # type: ignore[arg-type]


def played(of: Workload, *, prompts: int = 8, staleness: float = 0.0, sync_every: int = 1) -> Simulated:
    scheduler = Scheduler(
        prompts_per_step=prompts, total_steps=40 * sync_every, sync_every=sync_every, staleness=staleness
    )
    return simulate(scheduler, of, publishes=30)


@pytest.mark.parametrize(
    ("given", "rollout_s"),
    [
        ({}, 100 * (BASE_S + 32 * SEQUENCE_S)),
        ({"sequences": 16}, 2 * 100 * (BASE_S + 16 * SEQUENCE_S)),  # one half waits for the other
        ({"replicas": 2}, 100 * (BASE_S + 16 * SEQUENCE_S)),
        ({"lengths": lognormal(10_000, 0.0, 50)}, 50 * (BASE_S + 32 * SEQUENCE_S)),  # cut off
        ({"samples_per_prompt": 1}, 100 * (BASE_S + 8 * SEQUENCE_S)),
    ],
)
def test_a_step_on_shared_devices_is_rollout_update_and_publish_in_turn(given, rollout_s) -> None:
    got = played(work(shared=True, publish_s=0.5, **given))
    assert got.period_s == pytest.approx(rollout_s + 3.5)
    assert got.wait_s == pytest.approx(rollout_s)
    assert got.idle_share == pytest.approx(3.5 / got.period_s)
    assert got.staleness == {0: 1.0}


def test_a_decode_step_is_faster_when_some_answers_have_ended() -> None:
    lengths = iter([10, 30] * 1000)
    got = played(work(lengths=lambda drawn: next(lengths), samples_per_prompt=2, shared=True), prompts=1)
    both_s, one_s = BASE_S + 2 * SEQUENCE_S, BASE_S + SEQUENCE_S
    assert got.period_s == pytest.approx(10 * both_s + 20 * one_s + 3.0)
    assert got.tokens == 40


def test_rollout_and_update_overlap_with_staleness() -> None:
    rollout_s = 100 * (BASE_S + 32 * SEQUENCE_S)
    longer_update = played(work(update_s=2 * rollout_s), staleness=1)
    assert longer_update.period_s == pytest.approx(2 * rollout_s)
    assert longer_update.wait_s == pytest.approx(0.0, abs=1e-9)
    longer_rollout = played(work(update_s=0.1), staleness=1)  # twice as many groups at once, each half as fast
    alone_s = played(work(update_s=0.1)).period_s
    assert rollout_s < longer_rollout.period_s < alone_s
    assert max(longer_rollout.staleness) == 1


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("partial", [False, True])
def test_groups_are_never_older_than_the_configuration_allows(staleness, partial) -> None:
    of = work(lengths=lognormal(80, 1.0, 2000), publish_s=0.2, partial_rollout=partial)
    got = played(of, staleness=staleness, sync_every=2)
    assert max(got.staleness) <= math.ceil(staleness) and sum(got.staleness.values()) == pytest.approx(1.0)
    assert 0.0 <= got.idle_share < 1.0 and got.wait_s < got.period_s


def test_a_publish_waits_for_running_requests_unless_they_continue() -> None:
    scheduler = Scheduler(prompts_per_step=4, total_steps=40, staleness=1)
    run = SimulatedRun(scheduler, work(lengths=lognormal(80, 1.0, 2000), publish_s=1.0))
    seen = 0
    while len(run.ends) < 10:
        run.admit()
        run.take()
        run.admit()
        run.settle()
        if run.publishing and not run.draining:
            seen += 1
            assert not any(one.running for one in run.replicas)
        run.advance()
    assert seen


def test_more_replicas_and_staleness_are_not_slower() -> None:
    def period_s(replicas: int, staleness: float) -> float:
        lengths = lognormal(80, 0.8, 2000)
        return played(work(replicas=replicas, lengths=lengths, partial_rollout=True), staleness=staleness).period_s

    slow, fast = period_s(1, 0.0), period_s(2, 0.0)
    assert fast <= slow and period_s(1, 1.0) <= slow and period_s(2, 1.0) <= fast


def test_lengths_have_the_mean_that_is_given_and_those_of_a_run() -> None:
    drawn, many = random.Random(0), lognormal(500, 0.7, 100_000)
    assert sum(many(drawn) for _ in range(20_000)) / 20_000 == pytest.approx(500, rel=0.02)
    of_run = lengths_like([7, 9])
    assert {of_run(drawn) for _ in range(50)} == {7, 9}
    for wrong in (
        lambda: lognormal(0, 1, 10),
        lambda: lognormal(10, -1, 10),
        lambda: lengths_like([]),
        lambda: lengths_like([0]),
    ):
        with pytest.raises(Refused):
            wrong()


def test_the_verb_prints_a_table_over_staleness(tmp_path, capsys) -> None:
    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "train.jsonl", 64)
    line = [f"model.path={model}", f"data.train_files={rows}", "step.prompts_per_step=4", "pipeline.placement=split"]
    times = ["token_s=0.01", "sequence_s=0.001", "update_s=3", "mean_tokens=20", "sigma=0.5"]
    assert main(["simulate", *line, *times]) == 0
    shown = capsys.readouterr().out
    assert [row.split()[:2] for row in shown.splitlines() if "*" in row] == [["*", "0"]]
    assert len(shown.splitlines()) == 6
    assert main(["simulate", *line, *times, "json=true"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [f"{one['period_s']:.4g}" for one in runs] == [row[10:].split()[0] for row in shown.splitlines()[1:]]
    assert main(["simulate", *line[:3], *times]) == 0  # devices are shared: no other staleness is of this placement
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["simulate", *line, *times, "step.prompts_per_step=1", "algorithm.name=dapo"]) == 0
    shown = capsys.readouterr().out
    assert " 0.25 " not in shown, "less than one group"
    assert "not counted: groups that the filter or the curriculum drops (algorithm.name=dapo)" in shown
    for args, why in (
        (times[1:], "token_s"),
        ([*times[1:], "token_s=0"], "token_s=0"),
        ([*times, f"from={tmp_path}"], "mean_tokens=20 and from="),
        ([*times[:3], f"from={tmp_path}"], "0 steps with times"),
    ):
        assert main(["simulate", *line, *args]) == 2
        assert why in capsys.readouterr().err


def test_a_grid_prints_the_points_that_no_other_one_beats(tmp_path, capsys) -> None:
    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "train.jsonl", 64)
    line = [f"model.path={model}", f"data.train_files={rows}", "step.prompts_per_step=4", "pipeline.placement=split"]
    times = ["token_s=0.01", "sequence_s=0.001", "update_s=3", "mean_tokens=20", "sigma=0.5"]
    grid = "grid={rollout.replicas: [1, 2, 4], pipeline.staleness: [0, 1, 2]}"
    priced = ["price_per_hour=2", "trainer_price_per_hour=6"]
    assert main(["simulate", *line, *times, grid, *priced, "json=true"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 9
    assert all(p["price"] == pytest.approx((2 * p["replicas"] + 6) * p["step_s"] / 3600) for p in points)
    assert main(["simulate", *line, *times, grid, *priced]) == 0
    shown = capsys.readouterr().out.splitlines()
    kept = {(int(row.split()[0]), float(row.split()[1])) for row in shown[2:]}

    def numbers(p):
        return 1 / p["tokens_per_s"], p["price"] / (p["tokens_per_s"] * p["step_s"]), p["staleness"]

    front = {
        (p["replicas"], p["staleness"])
        for p in points
        if not any(numbers(o) != numbers(p) and all(map(le, numbers(o), numbers(p))) for o in points)
    }
    assert kept == front and 1 < len(front) < 9
    assert shown[0].startswith(f"{len(front)} of 9 points")
    for args, why in (
        (["grid={rollout.replica: [1]}"], "rollout.replica: there is no such key"),
        (["grid={optim.lr: [1]}"], "optim.lr: no simulated run reads it"),
        (["grid={rollout.replicas: 2}"], "a list of values is expected"),
        (["grid=[1, 2]"], "{KEY: [VALUES], ...} is expected"),
        (["grid={rollout.replicas: [0]}"], "rollout.replicas=0"),
        (["grid={step.prompts_per_step: [" + ", ".join(map(str, range(1, 1500))) + "]}"], "at most 1,000"),
        (["grid={rollout.replicas: [1]}", f"trace={tmp_path / 't.json'}"], "a trace is of one run"),
        (priced, "is of grid="),
    ):
        assert main(["simulate", *line, *times, *args]) == 2
        assert why in capsys.readouterr().err


def test_a_trace_has_all_the_time_of_every_part(tmp_path, capsys) -> None:
    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "train.jsonl", 64)
    line = [f"model.path={model}", f"data.train_files={rows}", "step.prompts_per_step=4", "rollout.replicas=2"]
    times = ["token_s=0.01", "sequence_s=0.001", "update_s=3", "publish_s=0.5", "mean_tokens=20", "sigma=0.5"]
    assert main(["simulate", *line, *times, "pipeline.placement=split", f"trace={tmp_path / 't.json'}"]) == 0
    shown = capsys.readouterr().out
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert [*names.values()] == ["trainer", "replica 0", "replica 1"]
    spans = {part: [e for e in events if e["ph"] == "X" and names[e["tid"]] == part] for part in names.values()}
    end = max(e["ts"] + e["dur"] for e in spans["trainer"])
    assert sum(e["dur"] for e in spans["trainer"]) == pytest.approx(end), "wait, update and publish fill the time"
    assert {e["name"] for e in spans["trainer"]} == {"wait", "update", "publish"}
    for part in spans.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(part))
    busy = sum(e["dur"] for part in ("replica 0", "replica 1") for e in spans[part]) / (2 * end)
    idle = next(row.split()[4] for row in shown.splitlines() if "*" in row)
    assert busy == pytest.approx(1 - float(idle.strip("%")) / 100, abs=0.02)
    assert main(["simulate", *line, *times, f"trace={tmp_path / 't.json'}"]) == 2
    assert "it exists: name another file" in capsys.readouterr().err


def test_the_answers_and_times_of_a_run(tmp_path) -> None:
    log = MetricsLog(tmp_path, 0)
    for step, update_s in enumerate((0.5, 2.0, 0.7)):
        times = {
            "rollout": 9.0,
            "update": update_s,
            "advantages": 0.1,
            "publish": 0.25,
            "evaluate": 50.0,
            "checkpoint": 9.0,
        }
        log.log(step, {f"timing_s/{name}": s for name, s in times.items()})
        write_samples(tmp_path, step, [row(step, index, tokens=10 + index) for index in range(20)])
    log.close()
    found = measured_by(tmp_path)
    assert sorted(set(found.lengths)) == [*range(10, 30)] and len(found.lengths) == 60
    assert (found.update_s, found.publish_s) == (pytest.approx(0.8), 0.25)


def row(step: int, index: int, tokens: int) -> SampleRow:
    return SampleRow(
        step=step,
        sample_id=f"{step}-{index}#0",
        trajectory_id=f"{step}-{index}",
        group_id=f"{step}",
        task_id="0",
        purpose="train",
        prompt_text="?",
        response_text="!",
        prompt_ids=np.arange(4),
        response_ids=np.arange(tokens),
        response_mask=np.ones(tokens, np.uint8),
    )


@pytest.mark.slow
def test_a_published_table_is_predicted_within_15_percent() -> None:
    page = yaml.safe_load(PUBLISHED.read_text())
    errors = {
        (row["rollout"], row["staleness"]): predicted(page, row, FITTED, publishes=6).period_s / row["step_s"] - 1
        for row in page["rows"]
    }
    assert len(errors) == 6 and max(map(abs, errors.values())) < 0.15, errors


@pytest.mark.slow
def test_one_mean_of_answers_gives_the_published_factors_of_two_models() -> None:
    """AReaL's text has no lengths: one number is free, and two factors follow."""
    page = yaml.safe_load(areal.PUBLISHED.read_text())
    page["mean_tokens"] = [6000]
    for row, cells in zip(page["rows"], areal.rows_of(page), strict=True):
        assert float(cells[5]) == pytest.approx(row["sync_h"] / row["async_h"], rel=0.15), cells
