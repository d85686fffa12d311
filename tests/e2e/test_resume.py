"""Resume: a run that was cut equals one that was not. Grade b is bitwise."""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from each import FULL_GRID, matrix
from on_device import DEVICE
from small_runs import (
    dispatched,
    launch,
    metrics_of,
    roles_of,
    same_tensors,
    saved,
    small_args,
    small_run,
    state_of,
    tensors_of,
    trained,
    wait_for,
)

from verl.accel.cuda.decode import missing
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.track.events import read_events
from verl.wire import FP8_CAPABILITY

EXACT = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean", "actor/lr")


def assert_equal_runs(one: Path, two: Path, steps: int) -> None:
    a, b = metrics_of(one), metrics_of(two)
    for step in range(1, steps + 1):
        for name in EXACT:
            assert a[step].get(name) == b[step].get(name), (step, name)
    assert trained(one) == trained(two)
    for role in roles_of(one, steps):
        same_tensors(tensors_of(one, steps, role), tensors_of(two, steps, role))
    x, y = state_of(one, steps), state_of(two, steps)
    assert (x.cursor, x.version, x.controllers, x.rng) == (y.cursor, y.version, y.controllers, y.rng)


# 64 rows / 4 prompts = 16 steps an epoch; with max_rows=12: 3 steps an epoch
REFILL = (
    "run.deterministic=true",
    "algorithm.name=dapo",
    "step.samples_per_prompt=2",
    "rollout.max_response_tokens=3",
    "run.total_epochs=40",
    "algorithm.max_draws_per_group=100",
)
CURRICULUM = ("run.deterministic=true", "algorithm.options.curriculum=reward_length:long_ones")
LORA = ("model.lora.rank=4", "model.quantization=nf4", "algorithm.kl_loss_coef=0.1")
NOISE = (*LORA, *(f"rollout.engine_options.noise_{x}" for x in ("sigma_start=0.1", "sigma_end=0.02")))
CRITIC = ("algorithm.name=ppo", "algorithm.kl_loss_coef=null", "algorithm.kl_reward_target=0.1")
SYNC_2 = ("pipeline.sync_every=2", "step.updates_per_step=2")
MORE_CUTS = [
    (SYNC_2, (2, 3)),
    (("algorithm.name=rloo",), (3,)),
    (("cluster.virtual_ranks=2", "algorithm.name=kl_cov"), (3,)),
    (("rollout.replicas=2",), (3,)),
    (CURRICULUM, (4,)),
]


# One run is cut at all of these: inside an epoch, at its end, and one step before the last; for sync_every=2 also in
# the middle of a period
@pytest.mark.on_device
@matrix(
    "more,cuts",
    [
        ((), (1, 3, 5)),
        (CRITIC, (3,)),
        (REFILL, (3,)),
        (("rollout.dtype=fp8",), (3,)),
        (NOISE, (3,)),
        *(MORE_CUTS if FULL_GRID else []),
    ],
    ids=lambda x: "+".join(str(m).split(".")[-1] for m in x) or "grpo",
)
def test_a_cut_run_equals_a_straight_one_bitwise(tmp_path, tiny_model, arithmetic_data, cuts, more):
    if DEVICE.type == "cuda" and "rollout.dtype=fp8" in more and (reason := missing(DEVICE, {}, FP8_CAPABILITY)):
        pytest.skip(reason)
    shape = (
        "run.total_steps=6",
        "data.max_rows=12",
        "run.total_epochs=2",
        "track.sinks=[jsonl]",
        "run.save_every_steps=1",
        *more,
    )
    small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], *shape)
    args, run_dir = small_args(tmp_path / "cut", tiny_model, arithmetic_data[:1], *shape), tmp_path / "cut" / "r"
    for cut in cuts:

        def crash(step: int, values: object, cut: int = cut) -> None:
            if step == cut:
                raise OSError("pulled the plug")

        with pytest.raises(OSError, match="pulled the plug"):
            run_rl(load_config(args), quiet=True, on_step=crash)
        assert saved(run_dir) in (cut - 1, cut), "it was cut there, and not before"
    run_rl(load_config(args), quiet=True)
    assert_equal_runs(tmp_path / "straight" / "r", run_dir, 6)
    if more is REFILL:
        refilled = sum(m.get("groups/rejected", 0) for m in metrics_of(run_dir).values())
        assert refilled > 0, "a test of the refill in which nothing was refilled"
    if more is CRITIC:
        assert "critic" in roles_of(run_dir, 6) and state_of(run_dir, 6).controllers
    if more is CURRICULUM:
        tasks = [e.data["task_id"] for e in read_events(run_dir) if e.kind == "dispatched"]
        first, last = Counter(tasks[:12]), Counter(tasks[-12:])
        assert len(first) == 12 and len(last) < 10, "an epoch by what was scored in the one before"


def test_a_finished_run_says_so_and_a_longer_one_goes_on(tmp_path, tiny_model, arithmetic_data):
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2").steps == 2
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2").steps == 0
    assert small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=3").steps == 1
    with pytest.raises(ValueError, match="earlier run"):
        small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.resume=never")


def test_changed_data_is_refused_at_resume(tmp_path, tiny_model, arithmetic_data):
    small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=1")
    with pytest.raises(ValueError, match=r"data\.max_rows: null -> 32"):
        small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", "data.max_rows=32")
    fork = ("run.name=fork", f"run.resume={tmp_path}/r/checkpoints/step_1")
    with pytest.raises(ValueError, match="other tasks"):
        small_run(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=2", "data.max_rows=32", *fork)


@pytest.mark.on_device
@pytest.mark.timeout(420)
@matrix("staleness,more", [(0, ()), (1, ()), (0, LORA)], ids=["sync", "async", "factors on NF4"])
def test_kill_nine_at_random_moments_loses_and_doubles_nothing(tmp_path, tiny_model, arithmetic_data, staleness, more):
    """Killed three times, inside saves too: it ends, and every group is trained exactly once (sync: bitwise as if
    never cut)."""
    shape = [
        "run.total_steps=8",
        "run.save_every_steps=1",
        "track.sinks=[jsonl]",
        f"pipeline.staleness={staleness}",
        *(["pipeline.partial_rollout=true"] if staleness else []),
        *more,
    ]
    args = small_args(tmp_path / "cut", tiny_model, arithmetic_data[:1], *shape)
    run_dir, log, rng = tmp_path / "cut" / "r", tmp_path / "log", random.Random(7 + staleness)
    for wanted in (2, 4, 6):
        process = launch(args, log)
        wait_for(
            lambda process=process, wanted=wanted: process.poll() is not None or saved(run_dir) >= wanted,
            120,
            f"step {wanted}\n{log.read_text()[-2000:]}",
        )
        time.sleep(rng.random() * 0.4)
        process.kill()
        process.wait(30)
    final = launch(args, log)
    assert final.wait(200) == 0, log.read_text()[-3000:]
    rows = trained(run_dir)
    assert sorted(rows) == list(range(1, 9))
    groups = [{s.split("/")[0] for s in ids} for _, ids in sorted(rows.items())]
    assert all(len(g) == 4 for g in groups)
    counted = Counter(g for step in groups for g in step)
    assert max(counted.values()) == 1, "a group was trained twice"
    drawn = set(dispatched(run_dir))
    assert set(counted) <= drawn
    if staleness == 0:
        assert set(counted) == {f"g{i:08d}" for i in range(32)}
        small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], *shape)
        assert_equal_runs(tmp_path / "straight" / "r", run_dir, 8)


@pytest.mark.timeout(200)
def test_sigterm_finishes_the_step_saves_and_says_75(tmp_path, tiny_model, arithmetic_data):
    args = small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=400", "track.sinks=[jsonl]")
    log = tmp_path / "log"
    process = launch(args, log)
    wait_for(
        lambda: (tmp_path / "r" / "metrics.jsonl").exists() and len(metrics_of(tmp_path / "r")) >= 2, 120, "two steps"
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, log.read_text()[-2000:]
    step = saved(tmp_path / "r")
    assert step >= 2 and step == max(metrics_of(tmp_path / "r"))
    assert log.read_text().strip().splitlines()[-1].startswith("error: SIGTERM: stopped before step")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_no_orphan_survives_the_controller(tmp_path, tiny_model, arithmetic_data, how):
    import psutil

    args = small_args(
        tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=400", "track.sinks=[jsonl]", "reward.num_workers=2"
    )
    log = tmp_path / "log"
    process = launch(args, log)
    wait_for(
        lambda: (tmp_path / "r" / "metrics.jsonl").exists() and len(metrics_of(tmp_path / "r")) >= 1, 120, "a step"
    )
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "reward workers are processes"
    process.send_signal(how)
    code = process.wait(60)
    assert code == (130 if how == signal.SIGINT else -9), log.read_text()[-2000:]
    wait_for(
        lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children),
        20,
        "the children to end",
    )


def test_a_second_process_on_the_same_run_is_refused(tmp_path, tiny_model, arithmetic_data):
    import fcntl

    (tmp_path / "r").mkdir()
    with (tmp_path / "r" / ".lock").open("w") as held:
        held.write("4711")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="in use by process 4711"):
            small_run(tmp_path, tiny_model, arithmetic_data[:1])
        assert [path.name for path in (tmp_path / "r").rglob("*")] == [".lock"], "nothing is left in the live run"
        assert (tmp_path / "r" / ".lock").read_text() == "4711"


def test_replay_of_a_recorded_step_is_equal_and_a_changed_sample_is_found(
    tmp_path, tiny_model, arithmetic_data, capsys
):
    from dataclasses import replace

    from verl.driver.replay import replay
    from verl.track.samples import read_samples, write_samples

    small_run(
        tmp_path,
        tiny_model,
        arithmetic_data[:1],
        "run.total_steps=3",
        "run.save_every_steps=1",
        "run.keep_last_checkpoints=2",
    )
    where = [f"run.root_dir={tmp_path}", "run.name=r"]
    assert replay(where, 3) == 0, capsys.readouterr().out
    assert replay(where, 1) == 0, capsys.readouterr().out
    rows = read_samples(tmp_path / "r", 3)
    write_samples(tmp_path / "r", 3, [replace(rows[0], reward=rows[0].reward + 1.0), *rows[1:]])
    assert replay(where, 3) == 1
    assert "advantages" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no samples of step 9"):
        replay(where, 9)
