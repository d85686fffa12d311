"""Stopped by a signal, the terminal gone, the pipe closed: what was done is saved, and the run is the one never cut."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from small_runs import metrics_of, same_tensors, small_args, small_run, tensors_of
from test_resume import TESTS, assert_equal_runs, wait_for

from verl.track.events import read_events

HANGS = """
import pathlib, time
from reward_length import compute_score as plain
HERE = pathlib.Path(__file__).parent
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if (HERE / "hang").exists():
        (HERE / "hangs").touch()
        time.sleep(600)
    return plain(data_source, solution_str, ground_truth, extra_info)
"""


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{HANGS}")
    return path


def start(args: list[str], **ends) -> subprocess.Popen:
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, "-m", "verl", "train", *args], env=env, cwd=TESTS.parent, **ends)


def steps_done(run_dir) -> int:
    return len(metrics_of(run_dir)) if (run_dir / "metrics.jsonl").exists() else 0


def saved(run_dir) -> list[int]:
    return [e.step for e in read_events(run_dir, {"saved"})]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("staleness", [0, 1], ids=["sync", "async"])
def test_a_hung_reward_does_not_hold_sigterm_and_the_run_goes_on(
    tmp_path, tiny_model, arithmetic_data, reward, staleness
):
    """By default nothing is saved before the end: SIGTERM saves the state at the beginning of the step that hangs."""
    more = ("run.total_steps=300", f"reward.path={reward}", "reward.timeout_s=500", "run.grace_s=4")
    more += ("run.seed=3", f"pipeline.staleness={staleness}", "track.sinks=[jsonl]")
    args, run_dir = small_args(tmp_path / "cut", tiny_model, arithmetic_data[:1], *more), tmp_path / "cut" / "r"
    with (tmp_path / "log").open("w") as log:
        process = start(args, stdout=log, stderr=log)
        wait_for(lambda: steps_done(run_dir) >= 2, 120, "two steps")
        (tmp_path / "hang").touch()
        wait_for((tmp_path / "hangs").exists, 60, "a reward that hangs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 75, (tmp_path / "log").read_text()
    last = max(metrics_of(run_dir))
    assert saved(run_dir) == [last], "the state after the last whole step"
    said = (tmp_path / "log").read_text()
    assert "SIGTERM: finishing this step" in said and f"stopped before step {last + 1} of 300" in said
    assert not (run_dir / "crash").exists()
    (tmp_path / "hang").unlink()
    total = f"run.total_steps={last + 2}"
    assert small_run(tmp_path / "cut", tiny_model, arithmetic_data[:1], *more, total).steps == 2
    if staleness == 0:
        small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], *more, total)
        assert_equal_runs(tmp_path / "straight" / "r", run_dir, last + 2)
    else:
        groups = [{i.split("/")[0] for i in e.data["sample_ids"]} for e in read_events(run_dir, {"trained"})]
        drawn = {e.data["group_id"] for e in read_events(run_dir, {"dispatched"})}
        assert len(groups) == last + 2 and len(set.union(*groups)) == 4 * (last + 2) and set.union(*groups) <= drawn


@pytest.mark.timeout(200)
def test_ctrl_c_saves_and_a_second_one_is_out_now(tmp_path, tiny_model, arithmetic_data, reward):
    more = ("run.total_steps=400", f"reward.path={reward}", "reward.timeout_s=500", "track.sinks=[jsonl]")
    args, run_dir = small_args(tmp_path, tiny_model, arithmetic_data[:1], *more), tmp_path / "r"
    with (tmp_path / "log").open("w") as log:
        process = start(args, stdout=log, stderr=log)
        wait_for(lambda: steps_done(run_dir) >= 1, 120, "a step")
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
        assert saved(run_dir) == [max(metrics_of(run_dir))]
        done = steps_done(run_dir)
        process = start(args, stdout=log, stderr=log)
        wait_for(lambda: steps_done(run_dir) > done, 120, "another step")
        (tmp_path / "hang").touch()
        wait_for((tmp_path / "hangs").exists, 60, "a reward that hangs")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: (tmp_path / "log").read_text().count("SIGINT: finishing") == 2, 10, "the first to be heard")
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
    assert len(saved(run_dir)) == 1


@pytest.mark.timeout(200)
def test_a_lost_terminal_and_a_closed_pipe_end_nothing(tmp_path, tiny_model, arithmetic_data):
    """The one as an ssh connection that drops, the other as `| head`: the run ends as if somebody had watched."""
    ended = {}
    for name in ("terminal", "pipe"):
        args = small_args(tmp_path, tiny_model, arithmetic_data[:1], "run.total_steps=12", f"run.name={name}")
        ours, theirs = pty.openpty() if name == "terminal" else os.pipe()
        process = start(args, stdout=theirs, stderr=theirs if name == "terminal" else None, stdin=subprocess.DEVNULL)
        os.close(theirs)
        wait_for(lambda name=name: steps_done(tmp_path / name) >= 2, 120, "two steps")
        os.close(ours)
        if name == "terminal":
            process.send_signal(signal.SIGHUP)
        ended[name] = process.wait(120)
        assert steps_done(tmp_path / name) == 12, name
        assert [e.kind for e in read_events(tmp_path / name, {"console_lost"})] == ["console_lost"], name
    assert ended == {"terminal": 0, "pipe": 0}
    same_tensors(tensors_of(tmp_path / "terminal", 12), tensors_of(tmp_path / "pipe", 12))
