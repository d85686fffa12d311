"""Atomic files, and the log: torn lines, attempts, events, metrics and their units."""

import json
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from each import each

from verl.track.events import EventLog, next_attempt, read_events
from verl.track.files import remove_leftovers, write_atomic
from verl.track.log import MOST_WAITING, Log, whole_lines
from verl.track.metrics import MetricsLog, read_metrics, read_units, units_of
from verl.types import Metric


def log_of(run_dir, attempt, records, resume=None):
    log = EventLog(run_dir, attempt, clock=lambda: 1000.0 + attempt)
    if resume is not None:
        log.append("resumed", resume, {})
    for kind, step in records:
        log.append(kind, step, {"by": attempt})
    log.flush(fsync=True)
    log.close()


def seen(run_dir, kinds=None):
    return [(e.kind, e.step, e.attempt) for e in read_events(run_dir, kinds)]


def log_steps(run_dir, attempt, steps, **values):
    log = MetricsLog(run_dir, attempt, clock=lambda: 1000.0 + attempt)
    for step in steps:
        log.log(step, {"critic/score/mean": step + attempt / 10, **values})
    log.close()


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two" and path.stat().st_mode & 0o600 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_write_atomic_keeps_the_old_file_when_the_disk_fails(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_atomic(path, b"old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, broken, full)
            write_atomic(path, b"new")
        assert path.read_bytes() == b"old", broken
        assert [p.name for p in tmp_path.iterdir()] == ["file.json"], broken


def test_a_log_cut_at_any_byte_loses_at_most_its_last_record(tmp_path):
    log_of(tmp_path, 0, [("drawn", 1), ("scored", 1), ("trained", 1)])
    path = tmp_path / "events" / "attempt_0000.log"
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in sorted({*range(0, len(whole) + 1, 5), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(whole[:size])
        expected = sum(end <= size for end in ends)
        assert len(seen(tmp_path)) == expected
        log_of(tmp_path, 0, [("published", 1)])
        assert seen(tmp_path)[-1][0] == "published"
        assert len(seen(tmp_path)) == expected + 1


def test_a_tail_of_garbage_is_cut_and_damage_inside_costs_that_record(tmp_path):
    log_of(tmp_path, 0, [("drawn", 1), ("trained", 1)])
    path = tmp_path / "events" / "attempt_0000.log"
    good = path.read_bytes()
    path.write_bytes(good + b"\0" * 64)
    assert len(seen(tmp_path)) == 2
    log_of(tmp_path, 1, [("trained", 2)])  # opening a later attempt cuts the earlier tail
    assert path.read_bytes() == good
    path.write_bytes(good.replace(b'"drawn"', b'"drown"'))
    noted: list[str] = []
    assert [event.kind for event in read_events(tmp_path, note=noted.append)] == ["trained", "trained"]
    assert noted == [f"{path}: 1 damaged records are left out, the first is line 1"]
    log_of(tmp_path, 2, [("trained", 3)])
    assert path.read_bytes().endswith(good.splitlines(keepends=True)[-1]), "what is behind the damage stays"


def test_a_log_without_checksums_is_cut_too(tmp_path):
    path = tmp_path / "log"
    assert list(whole_lines(path)) == []
    for attempt in (0, 1):
        log = Log(path, attempt, clock=lambda: 5.0)
        log.put({"step": 1}, {"a": "b\nc"})
        log.close()
        log.close()
        line = b'{"step":1,"attempt":%d,"time_s":5.0,"a":"b\\nc"}' % attempt
        assert list(whole_lines(path))[-1] == line
        path.write_bytes(path.read_bytes() + b'{"step":2,"attem')
        assert len(list(whole_lines(path))) == attempt + 1
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    noted: list[str] = []
    assert len(list(whole_lines(path, noted.append))) == 3
    assert noted == [f"{path}: 1 damaged records are left out, the first is line 3"]


def test_records_carry_attempt_time_and_exact_data(tmp_path):
    log = EventLog(tmp_path, 3, clock=lambda: 12.5)
    data = {"x": np.float32(0.1), "ids": np.arange(3), "text": "a\nb\u2028 \ud800", "bad": float("nan"), "none": None}
    log.append("turn", 7, data)
    log.close()
    [event] = read_events(tmp_path)
    assert (event.kind, event.step, event.attempt, event.time_s) == ("turn", 7, 3, 12.5)
    assert event.data["x"] == float(np.float32(0.1)) and event.data["ids"] == [0, 1, 2]
    assert event.data["text"] == data["text"] and np.isnan(event.data["bad"]) and event.data["none"] is None
    log = EventLog(tmp_path, 4)
    log.append("turn", 1, {"x": {1, 2}})
    log.append("turn", 2, {})
    with pytest.raises(TypeError, match="not set"):
        log.flush()
    with pytest.raises(AssertionError, match="one lower-case word"):
        log.append("Turn 2", 1, {})
    log.close()
    assert [event.step for event in read_events(tmp_path)][-1] == 2, "one bad record costs no other"


def test_what_waits_for_its_text_is_bounded(tmp_path):
    log = EventLog(tmp_path, 0)
    for step in range(MOST_WAITING + 5):
        log.append("turn", step, {})
    assert len(list(read_events(tmp_path))) == MOST_WAITING, "a killed process loses the last few"
    log.close()
    assert [event.step for event in read_events(tmp_path)] == list(range(MOST_WAITING + 5))


def test_a_later_attempt_replaces_what_it_did_again(tmp_path):
    log_of(tmp_path, 0, [(k, s) for s in (1, 2, 3, 4) for k in ("drawn", "trained", "published")])
    log_of(tmp_path, 1, [("drawn", 3), ("trained", 3)], resume=3)
    assert seen(tmp_path, {"trained"}) == [("trained", 1, 0), ("trained", 2, 0), ("trained", 3, 1)]
    assert seen(tmp_path, {"published"}) == [("published", 1, 0), ("published", 2, 0)]
    assert sum(len(file.read_bytes().splitlines()) for file in (tmp_path / "events").iterdir()) == 15, "nothing is lost"


def test_resume_at_voids_later_steps_even_if_the_attempt_died_at_once(tmp_path):
    log_of(tmp_path, 0, [("trained", s) for s in (1, 2, 3)])
    log_of(tmp_path, 1, [], resume=2)
    assert seen(tmp_path, {"trained"}) == [("trained", 1, 0)]
    log_of(tmp_path, 2, [("trained", 1)], resume=1)
    assert seen(tmp_path, {"trained"}) == [("trained", 1, 2)]
    assert seen(tmp_path, {"resumed"}) == [("resumed", 1, 2)]


def test_attempts_are_numbered_and_an_unused_folder_is_empty(tmp_path):
    assert next_attempt(tmp_path) == 0 and seen(tmp_path) == []
    log_of(tmp_path, 0, [])
    log_of(tmp_path, 1, [("drawn", 1)])
    assert next_attempt(tmp_path) == 2
    other = tmp_path / "without events"
    log_steps(other, 0, [1, 2])
    assert next_attempt(other) == 1
    log_steps(other, 1, [2, 3])
    assert next_attempt(other) == 2


def test_reading_while_another_writes_and_threads_append(tmp_path):
    log = EventLog(tmp_path, 0)

    def work(worker):
        for i in range(200):
            log.append("scored", i, {"worker": worker, "pad": "x" * 300})

    threads = [threading.Thread(target=work, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    counts = []
    while any(thread.is_alive() for thread in threads):
        log.flush()
        counts.append(len(seen(tmp_path)))
    for thread in threads:
        thread.join(timeout=10)
    log.close()
    assert counts == sorted(counts) and len(seen(tmp_path)) == 800


def test_metrics_are_exact_strict_and_on_disk_at_once(tmp_path):
    log = MetricsLog(tmp_path, 2, clock=lambda: 12.25)
    log.log(5, {"a/b": 0.1 + 0.2, "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "int": 3})

    def refuse(token):
        raise AssertionError(token)

    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=refuse)
    assert list(record)[:3] == ["step", "attempt", "time_s"] and record["nan"] is None and record["-inf"] is None
    [line] = read_metrics(tmp_path)
    assert (line.step, line.attempt, line.time_s) == (5, 2, 12.25)
    assert line.values["a/b"] == 0.1 + 0.2 and math.isnan(line.values["nan"]) and math.isnan(line.values["-inf"])
    with pytest.raises(AssertionError, match="may not be named"):
        log.log(6, {"attempt": 1.0})


def test_later_attempts_win_and_curves_never_overlap(tmp_path):
    log_steps(tmp_path, 0, range(1, 8), only_first=1.0)
    log_steps(tmp_path, 1, [4, 5])
    lines = read_metrics(tmp_path)
    assert [(line.step, line.attempt) for line in lines] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    assert [line.values["critic/score/mean"] for line in lines] == [1, 2, 3, 4.1, 5.1]
    assert "only_first" in lines[3].values and "only_first" not in lines[4].values


def test_what_is_logged_twice_for_a_step_is_joined(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.log(3, {"a": 1.0, "b": 1.0})
    log.log(3, {"b": 2.0, "eval/acc/greedy": 0.5})
    log.close()
    assert read_metrics(tmp_path)[0].values == {"a": 1.0, "b": 2.0, "eval/acc/greedy": 0.5}


def test_a_step_that_is_saved_has_one_line_whatever_happens_between(tmp_path):
    text = lambda: (tmp_path / "metrics.jsonl").read_text()  # noqa: E731
    log = MetricsLog(tmp_path, 0)
    log.keep(1, {"a": 1.0})
    log.log(1, {"a": 1.0, "b": math.nan})
    assert text().count("\n") == 1 and not (tmp_path / "metrics_kept.jsonl").exists()
    log.keep(2, {"a": 2.0, "nan": math.nan})  # killed here: the checkpoint was committed, the step not logged
    assert [line.step for line in read_metrics(tmp_path)] == [1, 2]
    later = MetricsLog(tmp_path, 1)
    later.keep(3, {"a": 3.0})
    later.log(3, {"a": 3.0})
    lines = read_metrics(tmp_path)
    assert [(line.step, line.attempt, line.values["a"]) for line in lines] == [(1, 0, 1.0), (2, 0, 2.0), (3, 1, 3.0)]
    assert math.isnan(lines[1].values["nan"]) and text().count("\n") == 3


def test_a_torn_line_is_tolerated_and_cut_on_resume(tmp_path):
    assert read_metrics(tmp_path) == []
    log_steps(tmp_path, 0, [1, 2])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [line.step for line in read_metrics(tmp_path)] == [1]
    log_steps(tmp_path, 1, [2])
    assert [(line.step, line.attempt) for line in read_metrics(tmp_path)] == [(1, 0), (2, 1)]


def test_units_are_kept_beside_the_metrics(tmp_path):
    assert read_units(tmp_path) == {}
    entropy = units_of({"actor/entropy": Metric(1, 1, "token")})
    for attempt in (0, 1):
        log = MetricsLog(tmp_path, attempt)
        for step in (1, 2, 3):
            log.log(
                step, {}, entropy | (units_of({"actor/grad_norm": Metric(1, 1, "update", "max")}) if step > 1 else {})
            )
        log.close()
    assert read_units(tmp_path) == {"actor/entropy": "mean per token", "actor/grad_norm": "max over updates"}
    assert len(list(whole_lines(tmp_path / "metrics_units.jsonl"))) == 4, "a unit is written once per attempt"


def test_temporary_files_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / "samples").mkdir()
    dead, mine = int(gone.stdout), os.getpid()
    names = (".metrics_kept.jsonl.{}-01234567.tmp", "samples/.step_000001.parquet.{}-89abcdef.tmp")
    for name in names:
        for pid in (dead, mine):
            (tmp_path / name.format(pid)).write_text("x")
    kept = [".other.tmp", "metrics.jsonl", ".x.1-0123456.tmp"]
    for name in kept:
        (tmp_path / name).write_text("x")
    remove_leftovers(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*kept, *(name.format(mine) for name in names)}


@each(
    "line", ["", "{", "\0" * 9, "{}", '{"step":2}', "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, '{"step":null}']
)
def test_a_damaged_line_of_metrics_costs_that_line(tmp_path, line):
    for attempt in (0, 1):
        log = MetricsLog(tmp_path, attempt)
        log.log(1 + attempt, {"loss": 0.5}, {"loss": "mean per token"})
        log.close()
    path, noted = tmp_path / "metrics.jsonl", list[str]()
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{second}\n")
    assert [found.step for found in read_metrics(tmp_path, noted.append)] == [1, 2]
    assert len(noted) == 1 and str(path) in noted[0]
    assert next_attempt(tmp_path) == 2
    MetricsLog(tmp_path, 2).close()
    assert [found.step for found in read_metrics(tmp_path, noted.append)] == [1, 2], "opening it cuts nothing"
    units = tmp_path / "metrics_units.jsonl"
    units.write_text(f"{line}\n" + units.read_text())
    assert read_units(tmp_path, noted.append) == {"loss": "mean per token"}
