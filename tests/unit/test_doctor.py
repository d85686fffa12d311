"""`verl doctor RUN` distinguishes a running, a finished and a dead run."""

import fcntl
import json
import shutil

from verl.cli import main
from verl.sandbox import cgroups
from verl.sandbox.code import describe
from verl.track.events import FINISHED, EventLog
from verl.track.metrics import MetricsLog


def attempt(folder, number, kinds, steps):
    metrics, events = MetricsLog(folder, number), EventLog(folder, number)
    for kind, step in kinds:
        events.append(kind, step, {})
    for step in steps:
        metrics.log(step, {"a": 1.0})
    metrics.close()
    events.close()


def told(folder, capsys):
    assert main(["doctor", str(folder)]) == 0
    return capsys.readouterr().out


def test_alive_dead_finished_and_dead_again(tmp_path, capsys):
    lock = tmp_path / ".lock"
    lock.write_text("1")  # a process of this number lives, but it is not the one that ran
    wait = {"who": "driver", "what": "a reward", "waiting_s": 3, "timeout_s": 60.0}
    (tmp_path / "waits.json").write_text(json.dumps({"at_unix_s": 0, "pending": [wait]}))
    attempt(tmp_path, 0, [("resumed", 1)], [1, 2])
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        page = told(tmp_path, capsys)
        assert "process 1 is alive, after step 2" in page and "driver waits 3 s" in page
    page = told(tmp_path, capsys)
    assert "run: dead (process 1 is gone) after step 2" in page and "driver waits" not in page
    attempt(tmp_path, 1, [("resumed", 3), (FINISHED, 3)], [3])
    assert "run: finished, 3 steps" in told(tmp_path, capsys)
    attempt(tmp_path, 2, [("resumed", 4)], [4])  # more steps were requested, and it died
    assert "run: dead (process 1 is gone) after step 4" in told(tmp_path, capsys)


def test_what_is_no_run_is_refused_in_words(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'} is not a folder\n"


def test_the_tiers_of_the_code_sandbox_in_their_order(monkeypatch):
    """The first is taken if it works, else the next one, with the reason."""
    without = "launcher (bubblewrap: bwrap is not installed)"
    bounded = f"; its memory is bounded by {cgroups.here()[1]}"
    assert describe() == f"code sandbox: {'bubblewrap' if shutil.which('bwrap') else without}{bounded}"
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: None)
    assert describe() == f"code sandbox: {without}{bounded}"


def test_a_run_that_died_before_its_first_step(tmp_path, capsys):
    (tmp_path / ".lock").write_text("99999999")
    assert "dead (process 99999999 is gone) before its first step" in told(tmp_path, capsys)


def test_the_kernel_of_each_operation_and_the_reason_for_it(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert "kernels on cpu in float32:\n  rms_norm: kernels.c\n" in page and "  trained_rotation: torch\n" in page
    monkeypatch.setattr("verl.accel.cpu.rows.load_kernels", lambda dtype: "no C compiler on this machine")
    assert main(["doctor"]) == 0
    assert "  rms_norm: torch (not kernels.c: no C compiler on this machine)\n" in capsys.readouterr().out
