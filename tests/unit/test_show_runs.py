"""`verl show RUN [RUN ...]`: what it prints fits the screen and names what it leaves out."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from verl.cli import main
from verl.config.schema import Config
from verl.driver.reporter import QUIET_STEPS, Reporter
from verl.report.table import COLUMNS, print_runs
from verl.track.metrics import MetricsLog


def write_run(folder: Path, steps: int, score: float, names: tuple[str, ...] = tuple(COLUMNS)) -> Path:
    folder.mkdir()
    sink = MetricsLog(folder, 1, report=print)
    for step in range(1, steps + 1):
        sink.log(step, dict.fromkeys(names, score) | {"training/global_step": float(step)}, {})
    sink.close()
    return folder


def printed(*runs: Path, width: int = 80) -> list[str]:
    out = io.StringIO()
    print_runs(runs, Console(file=out, width=width))
    return out.getvalue().splitlines()


def test_headings_are_whole_at_80_columns_and_metrics_without_values_are_left_out(tmp_path: Path) -> None:
    lines = printed(
        write_run(tmp_path / "run", 3, 0.25, ("critic/score/mean", "actor/grad_norm", "perf/time_per_step"))
    )
    assert lines[1].split() == ["step", "score", "grad", "s/step"]
    assert [line.split() for line in lines[2:5]] == [[str(i), "0.25", "0.25", "0.25"] for i in (1, 2, 3)]
    assert "critic/score/mean" in " ".join(lines[5:]) and not any("…" in line for line in lines)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    lines = printed(write_run(tmp_path / "run", 1, 0.5))
    assert max(map(len, lines)) <= 80 and lines[1].split()[:3] == ["step", "greedy", "sampled"]
    below = " ".join(" ".join(lines).split())
    assert "too narrow for" in below and "perf/time_per_step" in below


def test_two_runs_are_side_by_side_and_each_value_is_of_its_run_and_step(tmp_path: Path) -> None:
    names = ("critic/score/mean", "perf/time_per_step")
    a, b = write_run(tmp_path / "a", 3, 0.25, names), write_run(tmp_path / "b", 2, 0.75, names)
    lines = printed(a, b)
    assert lines[0] == f"A: {a}" and lines[1] == f"B: {b}"
    assert lines[3].split() == ["step", "A", "B", "A", "B"]
    rows = [line.split() for line in lines[4:7]]
    assert rows == [["1", "0.25", "0.75", "0.25", "0.75"], ["2", "0.25", "0.75", "0.25", "0.75"], ["3", "0.25", "0.25"]]


def test_a_long_run_has_some_of_its_steps_and_the_last(tmp_path: Path) -> None:
    lines = printed(write_run(tmp_path / "run", 103, 0.5, ("critic/score/mean",)))
    steps = [int(line.split()[0]) for line in lines if line and line.split()[0].isdigit()]
    assert steps[0] == 1 and steps[-1] == 103 and len(steps) <= 41


def test_what_show_cannot_use_is_refused(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "run", 1, 0.5)
    assert main(["show", str(run), str(tmp_path)]) == 2 and "is not a run directory" in capsys.readouterr().err
    assert main(["show", str(run), "step=3"]) == 2 and "has no option step=" in capsys.readouterr().err
    assert main(["show", str(run), str(run), "trajectory=x"]) == 2


def test_the_version_is_printed(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("verl 0.")


def test_a_reader_that_stops_reading_is_no_error() -> None:
    code = "import sys; from verl.cli import main; sys.exit(main(['train', '--help']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141


def test_an_alarm_is_printed_when_it_begins_and_when_it_has_ended() -> None:
    lines, events = list[str](), list[int]()
    progress: Any = SimpleNamespace(message=lines.append)
    log: Any = SimpleNamespace(append=lambda kind, step, data: events.append(step))
    given: Any = dict.fromkeys(("run_dir", "sinks", "waits", "recorder", "on_step"))
    reporter = Reporter(config=Config(), progress=progress, events=log, verl_names=False, **given)

    def step(truncated: float) -> None:
        number = float(len(reporter.history) + 1)
        reporter.history.append({"training/global_step": number, "response_length/clip_ratio": truncated})
        reporter.check_health()

    for share in [0.9] * 30 + [0.0] * 5 + [0.9] + [0.0] * (QUIET_STEPS + 1) + [0.9]:
        step(share)
    assert [line.split(":")[0] for line in lines] == ["warn", "over", "warn"]
    name = lines[0].split(":")[1]
    assert lines[1] == f"over:{name}: the last {QUIET_STEPS} steps did not have it"
    assert len(events) == 32, "each is recorded"


def test_the_example_explains_itself() -> None:
    path = Path(__file__).parents[2] / "examples" / "three_stages.py"
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Own keys" in done.stdout
    assert "1 of 3" not in done.stdout, "nothing was started"
