"""A disk that is full for a while: records wait, one line has the file's name, and all records are written later.

The kernel's own refusals: files may not grow beyond a limit (EFBIG), which is lifted again.
"""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_runs import metrics_of, same_tensors, small_args, small_run, tensors_of, trained
from started import Started

import verl.track.log as log_module
from verl.config.load import load_config
from verl.driver.launch import run_rl
from verl.track.events import EventLog, read_events
from verl.track.metrics import MetricsLog, read_metrics
from verl.track.samples import sample_steps

TESTS = Path(__file__).parents[1]


@contextmanager
def files_of_at_most(num_bytes: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_wait_in_order_and_a_line_cut_in_its_middle_goes_on(tmp_path):
    said: list[str] = []
    events, metrics = EventLog(tmp_path, 0, report=said.append), MetricsLog(tmp_path, 0, report=said.append)
    for step in range(1, 40):
        with files_of_at_most(1500 if step < 30 else 1 << 30):
            events.append("trained", step, {"ids": list(range(step))})
            events.flush(fsync=True)
            metrics.log(step, {"loss": step / 7})
        if step == 29:
            shown = {e.step for e in read_events(tmp_path)}
            assert shown and shown == set(range(1, max(shown) + 1)) and max(shown) < 29, "readers see whole lines"
    events.close()
    metrics.close()
    assert [(e.step, e.data["ids"]) for e in read_events(tmp_path)] == [(n, list(range(n))) for n in range(1, 40)]
    assert [(line.step, line.values["loss"]) for line in read_metrics(tmp_path)] == [(n, n / 7) for n in range(1, 40)]
    for name in ("attempt_0000.log", "metrics.jsonl"):
        assert len([s for s in said if name in s and "cannot be written (File too large)" in s]) == 1, said
        assert len([s for s in said if name in s and "is written again; 0 records were lost" in s]) == 1, said
    assert len(said) == 4


def test_what_waits_is_bounded_and_what_is_lost_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MOST_BYTES", 2000)
    said: list[str] = []
    log = EventLog(tmp_path, 0, report=said.append)
    with files_of_at_most(100):
        for step in range(1, 200):
            log.append("scored", step, {})
            log.flush()
    log.flush()
    log.append("scored", 200, {})
    log.close()
    kept = [e.step for e in read_events(tmp_path)]
    assert kept[:-1] == list(range(1, len(kept))) and kept[-1] == 200 and len(kept) < 60
    assert f"{200 - len(kept)} records were lost" in said[-1]
    closed = EventLog(tmp_path, 1, report=said.append)
    with files_of_at_most(0):
        closed.append("scored", 201, {})
        closed.close()
    assert "bytes were lost" in said[-1]


def trained_under_it(args: list[str]) -> int:
    free = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step(step: int, values: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, free[1]) if step in (2, 3) else free)

    run_rl(load_config(args), quiet=True, on_step=on_step)
    return 0


@pytest.mark.timeout(200)
@pytest.mark.full("test_mistakes.py: a disk that fills up")
def test_a_run_goes_through_a_full_disk(tmp_path, tiny_model, arithmetic_data):
    """Full while steps 3 and 4 are recorded and saved, under a report after each step."""
    more = ("run.total_steps=6", "run.save_every_steps=1", "track.report_every_steps=1", "track.sinks=[jsonl]")
    more += ("run.keep_last_checkpoints=9",)
    args, log = small_args(tmp_path / "full", tiny_model, arithmetic_data[:1], *more), tmp_path / "log"
    assert Started(args, log, entry=trained_under_it).wait(180) == 0, log.read_text()[-3000:]
    run_dir, said = tmp_path / "full" / "r", log.read_text()
    small_run(tmp_path / "straight", tiny_model, arithmetic_data[:1], *more)
    same_tensors(tensors_of(run_dir, 6), tensors_of(tmp_path / "straight" / "r", 6))
    assert trained(run_dir) == trained(tmp_path / "straight" / "r") and len(trained(run_dir)) == 6
    assert sorted(metrics_of(run_dir)) == sample_steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in read_events(run_dir, {"saved"})] == [1, 2, 5, 6]
    assert [e.step for e in read_events(run_dir, {"save_failed"})] == [3, 4]
    for name in ("metrics.jsonl", "attempt_0000.log", "step_000003.parquet"):
        assert said.count(f"{name} cannot be written") == 1, (name, said)
    assert said.count("checkpoint of step 3 was not written") == 1 and "the report in" in said
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 6


@pytest.mark.timeout(200)
def test_a_full_standard_output_is_let_go_and_the_run_goes_on(tmp_path, tiny_model, arithmetic_data):
    """From the first line that is printed: /dev/full refuses every byte. What `verl eval` found is not lost with it."""
    own = tmp_path / "own" / "r"
    more = ("actor_rollout_ref.rollout.n=4", "run.total_steps=2")  # a key of verl's own: what became of it is printed

    def started(verb: str, data: list[Path], *given: str) -> tuple[int, str]:
        args = small_args(tmp_path, tiny_model, data, *given, f"run.name={verb}")
        args, errors = [verb, *(a for a in args if "samples_per_prompt" not in a)], tmp_path / f"{verb}.err"
        code = Started(args, Path("/dev/full"), errors=errors).wait(120)
        return code, errors.read_text()

    code, said = started("train", arithmetic_data[:1], *more)
    assert code == 0 and "Traceback" not in said, said[-3000:]
    [lost] = read_events(tmp_path / "train", {"console_lost"})
    assert "No space left" in lost.data["why"] and lost.step == 1
    assert [e.step for e in read_events(tmp_path / "train", {"finished"})] == [2]
    small_run(own.parent, tiny_model, arithmetic_data[:1], "run.total_steps=2")
    same_tensors(tensors_of(own, 2), tensors_of(tmp_path / "train", 2))
    code, said = started("eval", arithmetic_data, "run.total_steps=1")
    assert code == 1 and "No space left" in said and "acc" in said, said[-3000:]
