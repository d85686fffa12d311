"""Sinks: written numbers are read back, later attempts win, a missing library is one line."""

import io
import math
import re
import subprocess
import sys
import types

import pytest
from rich.console import Console

from verl.config.load import load_config
from verl.track.console import LiveProgress, compact, duration, sparkline
from verl.track.metrics import read_metrics
from verl.track.sinks import open_sinks


def plain_progress(width=80):
    out = io.StringIO()
    clock = [0.0]
    progress = LiveProgress(Console(file=out, width=width, force_terminal=False), clock=lambda: clock[0])
    return progress, out, clock


def sinks_of(run_dir, *names, attempt=0, progress=None):
    config = load_config(["model.path=m", f"track.sinks=[{','.join(names)}]", "track.project=proj"]).config
    return open_sinks(run_dir, config, attempt=attempt, progress=progress or plain_progress()[0])


def test_tensorboard_files_read_back(tmp_path):
    for attempt, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        sinks = sinks_of(tmp_path, "tensorboard", attempt=attempt)
        for step in steps:
            sinks.log(step, {"actor/entropy": step + attempt / 10, "bad": math.nan})
        sinks.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    scalars = [(e.step, pytest.approx(e.value)) for e in reader.Scalars("actor/entropy")]
    assert scalars == [(1, 1.0), (2, 2.1), (3, 3.1), (4, 4.1)]  # the restart purged what attempt 0 wrote from step 2 on
    assert [line.step for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_a_missing_sink_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError) as caught:
        sinks_of(tmp_path, "wandb")
    assert "pip install '.[wandb]'" in str(caught.value) and "\n" not in str(caught.value)


class FakeRun:
    def __init__(self):
        self.logged, self.finished, self.defined = [], False, []

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


def test_wandb_goes_offline_without_an_account_and_keeps_its_id(tmp_path, monkeypatch):
    runs, calls = [], []

    def init(**options):
        calls.append(options)
        runs.append(FakeRun())
        return runs[-1]

    fake = types.SimpleNamespace(api=types.SimpleNamespace(api_key=None), init=init, Settings=lambda console: console)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for attempt in (0, 1):
        sinks = sinks_of(tmp_path, "wandb", attempt=attempt)
        sinks.log(7, {"a": 1.0}, {"a": "mean per token"})
        sinks.close()
    assert [c["mode"] for c in calls] == ["offline", "offline"] and calls[0]["id"] == calls[1]["id"]
    assert calls[0]["project"] == "proj" and calls[0]["config"]["track"]["sinks"] == ["wandb"]
    assert runs[0].logged == [{"a": 1.0, "training/global_step": 7}] and runs[0].finished
    monkeypatch.setenv("WANDB_MODE", "online")
    (tmp_path / "config.yaml").write_text('reward: {kwargs: {key: "${oc.env:KEY}"}}')
    sinks_of(tmp_path, "wandb").close()
    assert calls[2]["config"] == {"reward": {"kwargs": {"key": "${oc.env:KEY}"}}}, "as recorded, without secrets"
    assert calls[2]["mode"] is None and calls[2]["resume"] == "allow"


def test_a_broken_dashboard_does_not_end_the_run(tmp_path, monkeypatch):
    progress, out, _ = plain_progress()
    sinks = sinks_of(tmp_path, "console", "tensorboard", progress=progress)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks._shown["tensorboard"], "log", full)
    sinks.log(1, {"a": 1.0})
    sinks.log(2, {"a": 1.0})
    assert out.getvalue().count("sink tensorboard is left out from step 1 on") == 1
    assert [line.step for line in read_metrics(tmp_path)] == [1, 2]
    sinks.close()
    sinks = sinks_of(tmp_path, "tensorboard", attempt=1, progress=progress)
    monkeypatch.setattr(sinks._shown["tensorboard"], "close", full)
    sinks.close()
    assert "sink tensorboard did not close: [Errno 28]" in out.getvalue()
    sinks = sinks_of(tmp_path, attempt=2)
    monkeypatch.setattr(sinks._record, "log", full)
    with pytest.raises(OSError, match="No space left"):
        sinks.log(3, {"a": 1.0})


def test_nothing_here_imports_torch(tmp_path):
    code = (
        "import sys, pathlib, verl.report.live, verl.track.console\n"
        "from verl.track.sinks import open_sinks; from verl.report.page import write_report\n"
        f"run = pathlib.Path({str(tmp_path)!r})\n"
        "from verl.config.load import load_config\n"
        "config = load_config(['model.path=m', 'track.sinks=[tensorboard]']).config\n"
        "s = open_sinks(run, config, attempt=0, progress=verl.track.console.LiveProgress())\n"
        "s.log(1, {'a': 1.0}); s.close(); write_report(run)\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules and 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


STEP = {
    "critic/score/mean": 0.512,
    "actor/entropy": 0.34,
    "response_length/mean": 212.4,
    "mismatch/k3": 1.2e-4,
    "actor/grad_norm": 0.81,
    "actor/lr": 1e-6,
    "perf/throughput": 3421.0,
    "perf/time_per_step": 4.0,
    "timing_s/rollout": 3.0,
    "timing_s/update": 1.0,
}


def test_log_files_get_one_line_per_step():
    progress, out, clock = plain_progress()
    progress.start(100, "grpo [run]")
    progress.log(0, {"eval/acc/greedy": 0.381})
    for step in (1, 2):
        clock[0] += 4.0
        progress.log(step, {**STEP, **({"eval/acc/greedy": 0.412} if step == 2 else {})})
    progress.message("warning: [bold]entropy[/bold]")
    progress.close()
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "grpo [run] · 100 steps" and lines[1] == "step   0/100 · held-out 0.381"
    assert lines[3] == (
        "step   2/100 · held-out 0.412 (+0.031) · reward 0.512 · entropy 0.34 · length 212 · "
        "mismatch KL 1.2e-04 · grad norm 0.81 · lr 1.0e-06 · tok/s 3.42k · 4.0s (rollout 75% update 25%) · eta 6m 32s"
    )
    assert lines[4] == "warning: [bold]entropy[/bold]" and len(lines) == 5


def test_the_panel_shows_progress_and_where_the_time_goes():
    out, clock = io.StringIO(), [0.0]
    console = Console(file=out, width=100, force_terminal=True, color_system="truecolor", legacy_windows=False)
    progress = LiveProgress(console, clock=lambda: clock[0])
    progress.start(50, "toy")
    for step in range(1, 11):
        clock[0] += 10
        rest = {"eval/math/acc/greedy": 0.3 + step / 100, "timing_s/rollout": 9.0, "timing_s/update": 1.0}
        progress.log(step, {**STEP, "critic/score/mean": step / 10, **rest})
    progress.message("note")
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    last = text[text.rindex("╭") :]
    assert "step 10/50" in last and "held-out accuracy  0.400 (+0.010, +0.090 since step 1)" in last
    assert "rollout 90%" in last and "update 10%" in last and "▁" in last and "left" in last
    assert "note" in text


def test_the_panel_says_score_where_rewards_are_graded():
    for rest, word in (
        ({}, "accuracy"),
        ({"eval/graded_share/greedy": 0.2}, "score"),
        ({"eval/acc/sampled": -1}, "score"),
    ):
        out = io.StringIO()
        console = Console(file=out, width=100, force_terminal=True, legacy_windows=False)
        progress = LiveProgress(console)
        progress.start(2, "toy")
        progress.log(1, {**STEP, "eval/acc/greedy": 0.5, **rest})
        progress.log(2, {**STEP, "eval/acc/greedy": 0.75})
        progress.close()
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
        assert f"held-out {word}  0.750" in text[text.rindex("╭") :], (rest, text)


def test_what_was_lost_first_is_noted_once():
    """A closed terminal refuses a write and hangs up, in either order, and a step may end between the two."""
    progress, out, _ = plain_progress()
    assert progress.newly_lost() == ""
    progress.close_output("Input/output error", hung_up=True)
    assert progress.newly_lost() == "Input/output error"
    progress.close_output("the terminal is gone", hung_up=True)
    assert (progress.newly_lost(), progress.lost) == ("", "Input/output error")


def test_resumed_runs_estimate_only_what_is_left():
    progress, _, clock = plain_progress()
    progress.start(100, "r")
    assert progress.eta_s is None
    for step in (91, 92):
        clock[0] += 5
        progress.log(step, {})
    assert progress.eta_s == 40.0


def test_numbers_and_times_in_words():
    assert [compact(v) for v in (0.0, 0.4129, 1.2e-6, 3421, 12.8e6, math.nan)] == [
        "0",
        "0.413",
        "1.2e-06",
        "3.42k",
        "12.8M",
        "nan",
    ]
    assert [duration(s) for s in (8.14, 245, 11520, 187200)] == ["8.1s", "4m 05s", "3h 12m", "2d 4h"]
    assert sparkline([0, 1, 2, math.nan]) == "▁▅█" and sparkline([1]) == "" and sparkline([2, 2]) == "▁▁"
