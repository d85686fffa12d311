"""The planner's seconds beside those of a run, and the figures of a machine that it learns or measures."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from handmade_model import write_model, write_rows

from bench import calibration
from verl import machine_figures
from verl.cli import main
from verl.config.load import dump_config, load_config
from verl.errors import Refused
from verl.planner.beside import beside, learned_figures, measured_run, predicted_seconds, seconds_at
from verl.planner.hardware import DEVICES, Nodes, read_cluster
from verl.planner.learned import fitted_nodes
from verl.planner.plan import make_plan
from verl.planner.recorded import EVENT, recorded_page, recorded_prediction
from verl.planner.text import render_plan
from verl.track.events import EventLog
from verl.workers import host

AT = Nodes(device=replace(DEVICES["H100"], step_ms=2.0), nodes=1, devices_per_node=8, network_gbs=50)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("beside")
    sizes = {"layers": 8, "hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 4, "vocab": 32000}
    write_model(folder / "model", **sizes, tied=True)
    rows = write_rows(folder / "rows.jsonl", 100)
    data = [f"data.train_files=[{rows}]", "data.max_prompt_tokens=100", "rollout.max_response_tokens=400"]
    return [f"model.path={folder / 'model'}", *data, "algorithm.name=ppo", "step.prompts_per_step=16"]


def write_run(folder: Path, arguments: list[str], phases: Mapping[str, float], steps: int = 4) -> Path:
    """Write the folder of a run whose steps have these seconds, but the first, which takes ten times as long."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(load_config(arguments)))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            seconds = {f"timing_s/{name}": s * (10 if step == 1 else 1) for name, s in phases.items()}
            values: dict[str, Any] = {"step": step, "attempt": 0, "time_s": float(step), **seconds}
            values |= {"prompt_length/mean": 60.0, "response_length/mean": 200.0}
            values["perf/time_per_step"] = sum(seconds.values()) + 0.25
            file.write(json.dumps(values) + "\n")
    return folder


PHASES = {"rollout": 8.0, "reference": 0.5, "values": 0.5, "update_critic": 1.0, "update": 2.0, "evaluate": 30.0}


def test_the_phases_of_a_run_are_those_of_its_stages(arguments: list[str], tmp_path: Path) -> None:
    run = measured_run(write_run(tmp_path / "run", arguments, PHASES))
    assert run.seconds == {"rollout": 8.0, "experience": 1.0, "update": 3.0}
    assert (run.prompt_tokens, run.response_tokens, run.step_s) == (60, 200, 12.25)  # without the evaluation
    assert {*predicted_seconds(run, AT)} == {*run.seconds}


@pytest.mark.parametrize("figures", [{"compute_share": 0.31, "step_ms": 7.5}, {"bandwidth_share": 0.93}])
def test_learned_figures_are_those_with_which_the_run_was_made(
    arguments: list[str], tmp_path: Path, figures: dict[str, float]
) -> None:
    shape = measured_run(write_run(tmp_path / "shape", arguments, PHASES))
    device = replace(AT.device, **({"step_ms": 0.0} | figures))  # type: ignore[arg-type]
    made = predicted_seconds(shape, replace(AT, device=device))
    run = measured_run(write_run(tmp_path / "run", arguments, {"reference": made.pop("experience"), **made}))
    learned = learned_figures(run, AT)
    assert {name: learned[name] for name in figures} == pytest.approx(figures)
    again = replace(AT, device=replace(AT.device, **learned))  # type: ignore[arg-type]
    assert predicted_seconds(run, again) == pytest.approx({**made, "experience": run.seconds["experience"]})


def test_a_run_that_no_share_explains_teaches_nothing(arguments: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", arguments, {**PHASES, "update": 1e-7, "update_critic": 1e-7})
    assert "compute_share" not in learned_figures(measured_run(run), AT)
    page = beside(run, AT)
    assert "no share up to 1 explains the update: a rate of H100 is too low" in page and "they agree" not in page


def test_a_run_is_shown_beside_its_prediction(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", arguments, PHASES)
    (tmp_path / "cluster.yaml").write_text("- {device: H100, step_ms: 2}\n")
    assert main(["show", str(run), f"cluster_file={tmp_path / 'cluster.yaml'}"]) == 0
    page = capsys.readouterr().out
    assert page == beside(run, *read_cluster(tmp_path / "cluster.yaml")) + "\n"
    predicted = predicted_seconds(measured_run(run), AT)
    line = next(line.split() for line in page.splitlines() if line.startswith("update "))
    assert line[1:] == [f"{predicted['update']:.3g}", "3", f"{predicted['update'] / 3 - 1:+.0%}"]
    assert "with these figures they agree: compute_share: " in page and "the rest of a step" in page


@pytest.mark.parametrize(
    ("more", "steps", "why"),
    [
        ((), 1, "1 steps with times"),
        (("cluster.backend=ray", "cluster.ranks_per_node=16"), 3, "the run has 16 ranks, the cluster file 8 x H100"),
        (("pipeline.placement=split", "rollout.replicas=2"), 3, "have devices of their own"),
        (("pipeline.staleness=1",), 3, "have devices of their own"),
        (("parallel.context=2", "cluster.backend=ray", "cluster.ranks_per_node=2"), 3, "parallel.context: the planner"),
    ],
)
def test_a_run_that_cannot_be_compared_is_refused(
    arguments: list[str], tmp_path: Path, more: tuple[str, ...], steps: int, why: str
) -> None:
    with pytest.raises(Refused, match=why):
        beside(write_run(tmp_path / "run", [*arguments, *more], PHASES, steps), AT)
    with pytest.raises(Refused, match="not the folder of a run"):
        beside(tmp_path, AT)


def test_a_prediction_of_the_start_is_shown_beside_the_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("- {device: H100, step_ms: 2, price_per_hour: 3}\n")
    named = [*arguments, f"track.cluster_file={file}"]
    plan = make_plan(load_config(named).config)
    assert plan.predicted is not None and plan.predicted.seconds == seconds_at(load_config(named).config, 100, 400, AT)
    assert f"predicted {plan.predicted.text()}" in render_plan(plan)
    run = write_run(tmp_path / "run", named, PHASES)
    assert recorded_page(run) == ""
    log = EventLog(run, 0)
    log.append(EVENT, 0, asdict(plan.predicted))
    log.close()
    file.unlink()  # the figures are those of the start
    assert recorded_prediction(run) == plan.predicted
    rows = {line.split("  ")[0]: line.split()[-4:] for line in recorded_page(run).splitlines()[2:]}
    assert {*rows} == {"rollout", "experience", "update", "together"}
    by_length = predicted_seconds(measured_run(run), AT)
    for stage, s in measured_run(run).seconds.items():
        numbers = plan.predicted.seconds[stage], by_length[stage], s
        assert rows[stage] == [*(f"{number:.3g}" for number in numbers), f"{by_length[stage] / s - 1:+.0%}"]
        assert plan.predicted.seconds[stage] > by_length[stage], "answers are shorter than the limit"
    one = write_run(tmp_path / "one", named, PHASES, steps=1)
    (one / "events").mkdir()
    shutil.copy(run / "events" / "attempt_0000.log", one / "events")
    assert "nothing is measured yet" in recorded_page(one) and recorded_page(one).count("\n") == 0


@pytest.mark.parametrize(
    ("text", "more", "why"),
    [
        ("[{device: H100}, {device: H200}]", (), "2 node groups; a run is predicted on one"),
        ("[{device: H1OO}]", (), "device 'H1OO' is not known"),
        ("[{device: H100}]", ("pipeline.staleness=1",), "have devices of their own"),
        ("[{device: H100, memory_gb: 0.5}]", (), "do not fit 1 x H100 by the figures of the file"),
    ],
)
def test_a_run_that_cannot_be_predicted_is_refused_at_its_start(
    arguments: list[str], tmp_path: Path, text: str, more: tuple[str, ...], why: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(Refused, match=why):
        make_plan(load_config([*arguments, *more, f"track.cluster_file={tmp_path / 'cluster.yaml'}"]).config)


def test_a_cluster_file_learns_from_runs(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("- {device: H100, price_per_hour: 3}\n")
    shape = measured_run(write_run(tmp_path / "shape", arguments, PHASES))
    made = []
    for number, figures in enumerate(({"compute_share": 0.2, "step_ms": 5.0}, {"compute_share": 0.4, "step_ms": 7.0})):
        device = replace(DEVICES["H100"], **figures)
        seconds = predicted_seconds(shape, replace(AT, device=device))
        phases = {"reference": seconds.pop("experience"), **seconds}
        made.append(str(write_run(tmp_path / f"run{number}", arguments, phases)))
    assert main(["plan", f"learn={made[0]}", f"cluster_file={file}"]) == 0
    printed = capsys.readouterr().out
    file.write_text(printed)
    (at,) = read_cluster(file)
    assert (at.device.compute_share, at.device.step_ms) == pytest.approx((0.2, 5.0), rel=1e-3)
    assert at.price_per_hour == 3 and printed.startswith(f"# compute_share, step_ms: of {made[0]}\n")
    assert main(["plan", f"learn=[{made[0]},{made[1]}]", f"cluster_file={file}"]) == 0
    file.write_text(capsys.readouterr().out)
    assert read_cluster(file)[0].device.compute_share == pytest.approx(0.3, rel=1e-3)
    for args, why in (
        ([f"learn={made[0]}"], "verl plan learn=RUN cluster_file=FILE"),
        ([f"learn={made[0]}", f"cluster_file={file}", "model.path=m"], "takes no model.path="),
        ([f"learn={tmp_path}", f"cluster_file={file}"], "not the folder of a run"),
    ):
        assert main(["plan", *args]) == 2
        assert why in capsys.readouterr().err
    file.write_text("[{device: H100}, {device: H200}]")
    assert main(["plan", f"learn={made[0]}", f"cluster_file={file}"]) == 2
    assert "the figures of one are learned" in capsys.readouterr().err


def test_the_figures_of_several_runs_are_fitted_together(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "cluster.yaml", []
    rates = "memory_gb: 80, bandwidth_gbs: 10, matrix_tflops: 0.2, link_gbs: 5, item_bytes: 4, overlap: 0"
    file.write_text(f"- {{device: mine, {rates}}}\n")
    (at,) = read_cluster(file)
    known = {"compute_share": 0.6, "half_width": 150.0, "decode_share": 0.3, "bandwidth_share": 0.5, "step_ms": 40.0}
    figures = replace(at.device, **known)  # type: ignore[arg-type]
    for number in range(5):
        sizes = {"layers": 2 + number, "hidden": 256 << number % 3, "ffn": 1024, "heads": 4, "kv_heads": 4}
        model = write_model(tmp_path / f"model{number}", **sizes, vocab=2000 << number, tied=True)
        more = [f"model.path={model}", f"step.prompts_per_step={4 << number}"]
        shape = measured_run(write_run(tmp_path / f"shape{number}", [*arguments, *more], PHASES))
        seconds = predicted_seconds(shape, replace(at, device=figures))
        phases = {"reference": seconds.pop("experience"), **seconds}
        made.append(str(write_run(tmp_path / f"run{number}", [*arguments, *more], phases)))
    assert main(["plan", f"learn=[{','.join(made)}]", f"cluster_file={file}"]) == 0
    file.write_text(capsys.readouterr().out)
    (found,) = read_cluster(file)
    assert {name: getattr(found.device, name) for name in known} == pytest.approx(known, rel=0.01)


def test_runs_that_nothing_was_learned_from_are_predicted() -> None:
    """Measured CPU seconds: the figures of six runs predict sixteen others."""
    records = json.loads(calibration.RECORD.read_text())
    at = calibration.learned(records)
    errors = [abs(calibration.step_error(calibration.observed(one), at)) for one in records[calibration.LEARNED :]]
    with pytest.raises(Refused, match="4 runs do not determine compute_share, .* too much alike"):
        fitted_nodes([calibration.observed(records[0])] * 4, at)
    assert len(errors) >= 16 and max(errors) <= calibration.WITHIN, errors
    assert statistics.median(errors) <= calibration.MEDIAN


def test_this_machine_is_measured_into_a_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_figures, "MEASURE_S", 0.01)
    monkeypatch.setattr(machine_figures, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(machine_figures, "CPU_WIDTH", 64)
    file = tmp_path / "here.yaml"
    assert main(["doctor", f"cluster_file={file}"]) == 0
    (at,) = read_cluster(file)
    assert capsys.readouterr().out == file.read_text() and at.devices == 1
    assert 0.01 < at.device.bandwidth_gbs < 5000 and 1e-5 < at.device.matrix_tflops < 100
    assert (at.device.item_bytes, at.device.overlap, at.device.memory_gb > 0.5) == (4, 0, True)
    assert at.host_memory_gb == pytest.approx(host.total_bytes() / 1e9, rel=1e-3)
    assert at.disk_gb == pytest.approx(shutil.disk_usage(tmp_path).free / 1e9, rel=0.1) and at.disk_gb > 0
    assert main(["doctor", f"cluster_file={file}"]) == 2
    assert "exists: name another file" in capsys.readouterr().err
    assert main(["doctor", f"cluster_file={tmp_path / 'none' / 'here.yaml'}"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["doctor", f"cluster_file={tmp_path / 'other.yaml'}", "a_run"]) == 2
    assert "takes no a_run" in capsys.readouterr().err
